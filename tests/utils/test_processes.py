"""A process that watches another ends with it, whether or not that is its parent; a call has a time limit."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from freewheel.utils.processes import ORPHANED, within

WATCH = """
import os, sys, threading
from freewheel.utils import processes
if sys.argv[2] == "poll":
    del os.pidfd_open
    processes.PARENT_CHECK_S = 0.01
processes.end_with(int(sys.argv[1]))
print("watching", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("by", ["pidfd", "poll"])
def test_a_process_ends_with_the_one_it_watches_and_not_before(by: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as watched:
        command = [sys.executable, "-c", WATCH, str(watched.pid), by]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as watcher:
            try:
                assert watcher.stdout is not None and watcher.stdout.readline() == b"watching\n"
                assert watcher.poll() is None
                watched.kill()
                watched.wait()
                assert watcher.wait(timeout=30) == ORPHANED
            finally:
                watcher.kill()


def test_a_call_that_hangs_is_given_up_and_an_error_is_raised() -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, threading.Event().wait)
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)
    assert within(5, lambda: 3) == 3
