"""Child Python processes, which end with their parent, and calls with a time limit.

    parent ─ start_child ─▶ child: end_with(parent_pid)     a parent that is killed cannot close its children itself
    run_in_child(code) ─▶ python -P -c code ─▶ the JSON object on its last line, or the reason why there is none
    within(5.0, work): work() in a daemon thread, or TimeoutError

Used by the judge's engine process, reward workers, vLLM's workers, the dashboard's server, the mock judge and checks.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

PARENT_CHECK_S = 1.0
ORPHANED = 4
"""Exit code of a process whose parent is gone."""


def start_child(*arguments: str, stdin: int = subprocess.DEVNULL, **options: Any) -> subprocess.Popen[bytes]:
    """Start Python with `arguments`. The child looks for modules where this process does: it finds a user's code.

    `-P` keeps the child's working directory out of that. `options` are those of `Popen`.
    """
    return subprocess.Popen(
        [sys.executable, "-P", *arguments], stdin=stdin, env={**os.environ, "PYTHONPATH": import_path()}, **options
    )


def import_path() -> str:
    """Return a `PYTHONPATH` with which a child finds the modules that this process finds."""
    return os.pathsep.join(entry or "." for entry in sys.path)


def end_with(parent_pid: int, on_end: Callable[[], None] | None = None) -> threading.Thread:
    """Watch `parent_pid` in a daemon thread and end this process when it has ended.

    `on_end` replaces the default, which is `os._exit(ORPHANED)`. It runs in the watching thread.
    """

    def watch() -> None:
        wait_for_end(parent_pid)
        if on_end is None:
            os._exit(ORPHANED)
        on_end()

    thread = threading.Thread(target=watch, name="freewheel-parent", daemon=True)
    thread.start()
    return thread


def wait_for_end(pid: int) -> None:
    """Return when the process `pid` has ended. Polls where there is no pidfd (old kernels, macOS)."""
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:  # forbidden by a sandbox
            pass
        else:
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)  # readable once the process has ended
                poll.poll()
            finally:
                os.close(descriptor)
            return
    is_parent = os.getppid() == pid
    while (os.getppid() == pid) if is_parent else _exists(pid):
        time.sleep(PARENT_CHECK_S)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises; `TimeoutError` after `limit_s`.

    For calls that have no timeout, such as name resolution or a dead network disk. A late call cannot be ended: its
    daemon thread remains.
    """
    ended: Future[T] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
            ended.set_exception(error)

    threading.Thread(target=run, name="freewheel-within", daemon=True).start()
    wait([ended], limit_s)
    if not ended.done():
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return ended.result()


LAST_CHARS = 300
"""How much of an error's last line is shown."""


@dataclass(frozen=True)
class ChildAnswer:
    """The answer of a child process: either `values`, or `why` there are none."""

    values: dict[str, Any] = field(default_factory=dict)
    why: str = ""


def run_in_child(code: str, *, limit_s: float) -> ChildAnswer:
    """Run `code`, whose last line of output is a JSON object. The working directory is not importable there."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return ChildAnswer(why=f"no answer within {limit_s:g} s")
    except OSError as error:
        return ChildAnswer(why=f"Python could not be started: {error.strerror}")
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        try:
            found = json.loads(lines[-1])
        except ValueError:
            found = None
        if isinstance(found, dict):
            return ChildAnswer(values=found)
    return ChildAnswer(why=last_words(done))


def last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return why a child ended: the last line of its stderr, its signal or its exit code."""
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name if -done.returncode in list(signal.Signals) else "a signal"
        return f"it was killed by {name}"
    lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip()[:LAST_CHARS] if lines else f"it ended with exit code {done.returncode} and no message"
