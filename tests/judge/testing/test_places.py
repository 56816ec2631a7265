"""Where the mock judge runs: a thread, a process of its own, a program; and how each of them ends."""

import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.request

import pytest
import trustme

from freewheel.errors import ConfigError
from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge, expected_score
from freewheel.judge.verdict import JudgeError

PATIENCE_S = 10.0
"""Far more than anything here takes; only a broken test waits for it."""

QUESTION = {"model": "judge", "messages": [{"role": "user", "content": "Rate this answer."}]}


def ask(judge: RunningJudge, context: ssl.SSLContext | None = None) -> str:
    request = urllib.request.Request(judge.url, data=json.dumps(QUESTION).encode())
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    with urllib.request.build_opener(*handlers).open(request, timeout=PATIENCE_S) as reply:
        content: str = json.load(reply)["choices"][0]["message"]["content"]
        return content


@pytest.mark.parametrize("place", ["in_thread", "in_process"])
def test_a_synchronous_caller_can_use_it(place: str) -> None:
    profile = JudgeProfile(keep_requests=1, latency_s=0.01)
    with getattr(MockJudge(profile), place)() as judge:
        assert ask(judge) == str(expected_score("Rate this answer."))
        assert judge.counts().of("Rate this answer.").answered == 1
        assert judge.requests()[0].json() == QUESTION
        judge.reset(JudgeProfile(scores={"Rate": "4"}))
        assert judge.counts().received == 0
        assert ask(judge) == "4"
        assert judge.profile.scores == {"Rate": "4"}


def test_a_port_that_is_taken_is_an_error_in_the_callers_thread() -> None:
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


def test_tls_is_served_with_a_given_context() -> None:
    authority = trustme.CA()
    served, trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(served)
    authority.configure_trust(trusted)
    with MockJudge(ssl_context=served).in_thread() as judge:
        assert judge.url.startswith("https://")
        assert ask(judge, trusted) == str(expected_score("Rate this answer."))
    with pytest.raises(ConfigError, match="in_thread"):
        MockJudge(ssl_context=served).in_process()


def start_program(*flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "freewheel.judge.testing", "--port", "0", *flags]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_program_ends_cleanly_on_a_signal(number: signal.Signals) -> None:
    with start_program("--profile", '{"scores": {"Rate": "3"}}') as program:
        assert program.stdout is not None
        ready = json.loads(program.stdout.readline())
        assert ready["url"] == f"http://127.0.0.1:{ready['port']}/v1/chat/completions"
        os.kill(program.pid, number)
        assert program.wait(PATIENCE_S) == 0


def test_the_program_ends_with_its_parent() -> None:
    with start_program("--until-eof") as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline()
        program.stdin.close()
        assert program.wait(PATIENCE_S) == 0


def test_the_program_says_what_is_wrong_with_a_profile(capfd: pytest.CaptureFixture[str]) -> None:
    with start_program("--profile", '{"error_share": 2}') as program:
        assert program.wait(PATIENCE_S) == 2
    assert "error_share" in capfd.readouterr().err


def test_counts_need_a_judge_that_was_started() -> None:
    with pytest.raises(JudgeError, match="not been started"):
        MockJudge().counts()
