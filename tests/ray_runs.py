"""Shared by tests of whole runs under Ray: running in a thread, waiting for an event, and the processes of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from freewheel.observe.recorder import read_metrics
from freewheel.runtime.account import RunResult
from freewheel.runtime.main import FullyAsyncMain

WAIT_S = 120.0
"""Longest wait for an event: a busy machine is ten times slower."""


def wait_until(holds: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + wait_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def count_steps(run_dir: Path) -> int:
    return len(read_metrics(run_dir, "step"))


def processes(run_dir: Path, role: str = "") -> list[int]:
    """Return the processes that had this role, the newest last; without a role those of all components."""
    return [
        row["process"] for row in read_metrics(run_dir, "event") if row.get("role", "") and role in ("", row["role"])
    ]


@contextmanager
def running(main: FullyAsyncMain, *, wait_s: float = WAIT_S) -> Iterator[list[RunResult]]:
    """Run in a thread while the block lasts. The list holds the result once there is one."""
    found: list[RunResult] = []
    thread = threading.Thread(target=lambda: found.append(main.run()))
    thread.start()
    try:
        yield found
    finally:
        thread.join(wait_s)
