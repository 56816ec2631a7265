"""Child processes that end with their parent, and calls with a time limit.

    parent ──starts──▶ child: end_with(parent_pid)          a parent that is killed cannot close its children itself
    within(5.0, work): work() in a daemon thread, or TimeoutError

Used by the judge's engine process, reward workers, vLLM's workers, the dashboard's server and the mock judge.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

PARENT_CHECK_S = 1.0
ORPHANED = 4
"""Exit code of a process whose parent is gone."""


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
