"""A process that watches another ends with it, whether or not that is its parent."""

from __future__ import annotations

import subprocess
import sys

import pytest

from freewheel.utils.processes import ORPHANED

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
