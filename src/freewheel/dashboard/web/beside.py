"""`beside`: the page of a run that is going on, served by a process of its own. It never fails a run, nor slows it.

this process: a listening socket and a token ─▶ the address, at once
              └─ the child (nice 10, asleep until somebody looks) takes both; it ends when we do, however we end
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from freewheel.dashboard.terminal import LiveView, PlainView
    from freewheel.runtime.config import TrainConfig

log = logging.getLogger("freewheel.dashboard")

END_S = 2.0
"""Longest time that the child has to end; it has nothing to save."""


@contextmanager
def page_of(config: TrainConfig, shown: LiveView | PlainView) -> Iterator[None]:
    """The page of the run that `freewheel train` is about to start, where its settings have one. Its address is shown
    and goes into no file: who has it may look."""
    if not config.observe.dashboard or config.run_dir is None:
        yield
        return
    with beside(config.run_dir, port=config.observe.dashboard_port) as found:
        if found:
            shown.page = found
            shown.say(f"Dashboard: {found}")
        try:
            yield
        finally:
            shown.page = ""


@contextmanager
def beside(run_dir: str | os.PathLike[str], *, port: int = 0) -> Iterator[str]:
    """The page's address while the block lasts; empty where there is none, which is logged."""
    folder = Path(run_dir).expanduser().absolute()
    child, found = None, ""
    try:
        child, found = _start(folder, port)
    except OSError as error:
        log.warning(
            "The run has no page (%s): it goes on without one. `freewheel dashboard %s` shows it; "
            "observe.dashboard_port=0 takes any free port",
            *(error, folder),
        )
    try:
        yield found
    finally:
        if child is not None:
            _end(child, folder)


def _start(folder: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    from freewheel.dashboard.web.door import make_token
    from freewheel.dashboard.web.listening import HOST, address, listen

    token = make_token()
    with listen(HOST, port) as listening:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "freewheel.dashboard.web.child", str(listening.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            process_group=0,  # a Ctrl-C in the terminal is for the run
        )
        told = {"run": str(folder), "token": token, "parent": os.getpid()}
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once, which is said at the end
            child.stdin.write(msgspec.json.encode(told) + b"\n")
            child.stdin.flush()
        return child, address(listening, token)


def _end(child: subprocess.Popen[bytes], folder: Path) -> None:
    if child.poll() is not None:
        log.warning(
            "The run's page ended by itself (exit code %d); `freewheel dashboard %s` shows the run",
            *(child.returncode, folder),
        )
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
