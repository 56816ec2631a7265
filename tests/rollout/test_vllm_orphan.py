"""A process of vLLM's does not outlive the rollouter that started it, however that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from freewheel.rollout.vllm.orphan import ORPHANED, ROLLOUTER, claim, end_with_rollouter

CHILD = """
import sys
from freewheel.rollout.vllm.orphan import end_with_rollouter
assert end_with_rollouter() is not None
print("waits", flush=True)
sys.stdin.read()
"""
WAIT_S = 30.0


@pytest.mark.parametrize("ended", ["killed", "gone before"])
def test_a_child_ends_with_the_process_that_it_belongs_to(ended: str) -> None:
    rollouter = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    if ended == "gone before":
        rollouter.kill()
        rollouter.wait(WAIT_S)
    environment = {**os.environ, ROLLOUTER: str(rollouter.pid)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    with rollouter, child:
        if ended == "killed":
            assert child.stdout is not None and child.stdout.readline() == b"waits\n"
            rollouter.send_signal(signal.SIGKILL)
        assert child.wait(WAIT_S) == ORPHANED
        rollouter.kill()


def test_a_rollouter_does_not_wait_for_itself_and_a_server_for_nobody() -> None:
    environ: dict[str, str] = {}
    assert end_with_rollouter(environ) is None
    claim(environ)
    assert end_with_rollouter(environ) is None
