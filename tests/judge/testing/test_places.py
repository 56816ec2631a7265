"""The places of the mock judge: a thread, a child process, a program; and how each of them ends."""

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import trustme

from freewheel.errors import ConfigError
from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge, expected_score
from freewheel.judge.verdict import JudgeError
from freewheel.utils.processes import wait_for_end, within

PATIENCE_S = 10.0
"""Far more than any test needs."""


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


QUESTION = {"model": "judge", "messages": [{"role": "user", "content": "Rate this answer."}]}


def ask(judge: RunningJudge, context: ssl.SSLContext | None = None) -> str:
    request = urllib.request.Request(judge.url, data=json.dumps(QUESTION).encode())
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    with urllib.request.build_opener(*handlers).open(request, timeout=PATIENCE_S) as reply:
        content: str = json.load(reply)["choices"][0]["message"]["content"]
        return content


@pytest.mark.parametrize("place", ["in_thread", "in_process"])
def test_a_synchronous_caller_can_use_a_judge_in_a_thread_or_a_process(place: str) -> None:
    profile = JudgeProfile(keep_requests=1, latency_s=0.01)
    with getattr(MockJudge(profile), place)() as judge:
        assert ask(judge) == str(expected_score("Rate this answer."))
        assert judge.counts().of("Rate this answer.").answered == 1
        assert judge.requests()[0].json() == QUESTION
        judge.reset(JudgeProfile(scores={"Rate": "4"}))
        assert judge.counts().received == 0
        assert ask(judge) == "4"
        assert judge.profile.scores == {"Rate": "4"}


def test_an_occupied_port_is_an_error_in_the_callers_thread() -> None:
    with (
        MockJudge().in_thread() as judge,
        pytest.raises(OSError, match="address already in use"),
        MockJudge(port=judge.port).in_thread(),
    ):
        pass


def test_a_child_that_cannot_start_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with MockJudge().in_thread() as judge, pytest.raises(JudgeError), MockJudge(port=judge.port).in_process():
        pass
    assert "address already in use" in capfd.readouterr().err


def test_tls_works_with_a_given_context() -> None:
    authority = trustme.CA()
    served, trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(served)
    authority.configure_trust(trusted)
    with MockJudge(ssl_context=served).in_thread() as judge:
        assert judge.url.startswith("https://")
        assert ask(judge, trusted) == str(expected_score("Rate this answer."))
    with pytest.raises(ConfigError, match="in_thread"):
        MockJudge(ssl_context=served).in_process()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_program_ends_cleanly_on_a_signal(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "freewheel", "mock-judge", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        ready = json.loads(program.stdout.readline())
        assert ready["endpoint"] == f"http://127.0.0.1:{ready['port']}/v1"
        os.kill(program.pid, number)
        assert program.wait(PATIENCE_S) == 0


PARENT = """
import time
from freewheel.judge.testing import MockJudge
with MockJudge().in_process() as judge:
    print(judge.pid, flush=True)
    time.sleep(3600)
"""


def test_a_child_process_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        with contextlib.suppress(TimeoutError):
            within(PATIENCE_S, lambda: wait_for_end(child))
        assert not is_running(child)


def test_counts_need_a_judge_that_was_started() -> None:
    with pytest.raises(JudgeError, match="not been started"):
        MockJudge().counts()
