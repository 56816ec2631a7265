"""Programs that end in every way a program ends: the engine goes with them, quietly, and nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from freewheel.judge.testing import RunningJudge

from .helpers import WAIT_S, wait_until

Mock = Callable[..., RunningJudge]

START = """
    import os, signal, sys, threading, time
    from freewheel.judge import Judge, JudgeConfig, JudgeClosed, JudgeRequest

    url, placement = sys.argv[1], sys.argv[2]
    config = JudgeConfig(endpoint=url, model="m", placement=placement)

    def child_of(judge):
        while judge._link.child_pid is None:
            time.sleep(0.01)
        return judge._link.child_pid

    def say(*words):
        print(*words, flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs `START` and the given source as a program in a separate session, and ends it with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(source: str, *args: str) -> subprocess.Popen[str]:
        path = tmp_path / f"script{len(started)}.py"
        path.write_text(textwrap.dedent(START + source))
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, str(path), *args], stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ends(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_interpreter_that_exits_without_closing_leaves_nothing_but_its_answers_in_the_cache(
    mock: Mock, script: Any, placement: str
) -> None:
    server = mock(latency_s=0.05)
    source = """
    judge = Judge(config)
    status = judge.submit(["first answer", "second answer"]).result(20)[0].status
    say(status, child_of(judge) if placement == "process" else 0)
    handle = judge.submit(["hang %d" % i for i in range(5)])
    """
    for _ in range(2):
        code, out, err = ends(script(source, server.url, placement))
        status, pid = out.split()
        assert (code, status, err) == (0, "scored", "")
        if pid != "0":
            wait_until(lambda pid=int(pid): is_gone(pid), 3.0)  # type: ignore[misc]
    assert [count.received for count in server.counts().containing("first answer")] == [1]


@pytest.mark.parametrize("moment", ["waiting", "starting"])
def test_ctrl_c_raises_keyboard_interrupt_and_leaves_nothing(
    mock: Mock, script: Any, placement: str, moment: str
) -> None:
    server = mock(hang_share=1.0)
    process = script(
        """
    with Judge(config) as judge:
        handle = judge.submit(["a", "b"])
        try:
            say(child_of(judge) if placement == "process" else 0)
            handle.result()
        except KeyboardInterrupt:
            say("interrupted")
            judge.close()
            say(handle.result(0)[0].reason)
            sys.exit(130)
    """,
        server.url,
        placement,
    )
    pid = int(process.stdout.readline())
    if moment == "waiting":
        wait_until(lambda: server.counts().in_flight == 2)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = ends(process)
    assert (code, out, err) == (130, "interrupted\ncancelled\n", "")
    if pid:
        wait_until(lambda: is_gone(pid), 3.0)


@pytest.mark.parametrize("number", [signal.SIGINT, 0], ids=["Ctrl-C", "exception"])
def test_a_program_without_a_handler_shows_one_traceback(
    mock: Mock, script: Any, placement: str, number: signal.Signals
) -> None:
    server = mock(hang_share=1.0)
    source = """
    with Judge(config) as judge:
        handle = judge.submit(["a"])
        if sys.argv[3] == "0":
            raise ValueError("mine")
        handle.result()
    """
    process = script(source, server.url, placement, str(int(number)))
    if number:
        wait_until(lambda: server.counts().in_flight == 1)
        os.killpg(process.pid, number)
    code, _, err = ends(process)
    last = "KeyboardInterrupt" if number else "ValueError: mine"
    assert code == (-number or 1) and err.count("Traceback") == 1 and err.rstrip().endswith(last)


@pytest.mark.parametrize("grandchild", [False, True], ids=["alone", "with a fork that holds the socket"])
def test_the_child_does_not_outlive_a_killed_parent(mock: Mock, script: Any, grandchild: bool) -> None:
    source = """
    judge = Judge(config)
    judge.submit(["a"]).result(20)
    say(child_of(judge))
    """
    if grandchild:
        source += """
    import ctypes
    fork = ctypes.CDLL(None).fork  # past Python's hooks, as a C library would: the socket stays open there
    grandchild = fork()
    if grandchild == 0:
        ctypes.CDLL(None).sleep(8)
        os._exit(0)
    say(grandchild)
    """
    source += """
    time.sleep(60)
    """
    process = script(source, mock().url, "process")
    pid = int(process.stdout.readline())
    other = int(process.stdout.readline()) if grandchild else 0
    assert Path(f"/proc/{pid}").exists()
    process.kill()
    process.wait()
    wait_until(lambda: is_gone(pid), 3.0)
    if grandchild:
        os.kill(other, signal.SIGKILL)


def test_a_fork_uses_the_same_judge_with_a_separate_engine(mock: Mock, script: Any, placement: str) -> None:
    server = mock(latency_s=0.1, scores={"parent": "3", "child": "8"})
    process = script(
        """
    import warnings
    warnings.simplefilter("ignore")
    judge = Judge(config)
    judge.submit(["warm up"]).result(20)
    handle = judge.submit(["parent %d" % i for i in range(30)])
    done = judge.submit(["warm up"])
    done.result(20)
    ours = os.fstat(judge._link._socket.fileno()).st_ino if placement == "process" else None
    pid = os.fork()
    if pid == 0:
        try:
            assert ours not in [os.stat(f.path).st_ino for f in os.scandir("/proc/self/fd") if os.path.exists(f.path)]
            assert done.result()[0].status == "scored"
            done.cancel()
            for use in (handle.result, handle.wait, handle.cancel):
                try:
                    use()
                    os._exit(3)
                except JudgeClosed as error:
                    assert "belongs to process" in str(error)
            values = {v.value for v in judge.submit(["child %d" % i for i in range(10)]).result(20)}
            judge.close()
            os._exit(0 if values == {8.0} else 4)
        except BaseException as error:
            say("child", repr(error))
            os._exit(5)
    values = {v.value for v in handle.result(20)}
    _, status = os.waitpid(pid, 0)
    say(values, os.waitstatus_to_exitcode(status))
    more = {v.value for v in judge.submit(["parent again"]).result(20)}
    say(more, judge.stats().restarts)
    judge.close()
    """,
        server.url,
        placement,
    )
    code, out, err = ends(process)
    assert (code, out, err) == (0, "{3.0} 0\n{3.0} 0\n", "")


def test_a_fork_right_after_the_first_submit_harms_neither_process(mock: Mock, script: Any) -> None:
    """The link is starting its process just then; the fork must hold neither end of its socket."""
    process = script(
        """
    import warnings
    warnings.simplefilter("ignore")
    import subprocess
    start = subprocess.Popen

    def slowly(*args, **settings):
        starting.set()
        time.sleep(0.3)
        return start(*args, **settings)

    starting, subprocess.Popen = threading.Event(), slowly
    judge = Judge(config)
    handle = judge.submit(["hang %d" % i for i in range(3)], deadline_s=6)
    starting.wait()
    pid = os.fork()
    if pid == 0:
        time.sleep(15)
        os._exit(0)
    subprocess.Popen = start
    os.kill(child_of(judge), signal.SIGKILL)
    while judge._tracker.restarts == 0 and not handle.done():
        time.sleep(0.01)
    say(judge._tracker.restarts)
    judge.close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    """,
        mock(hang_share=1.0).url,
        "process",
    )
    code, out, _ = ends(process)
    assert (code, out) == (0, "1\n")


def test_a_shells_small_limit_of_open_files_does_not_bound_the_concurrency(mock: Mock, script: Any) -> None:
    server = mock(latency_s=0.3)
    process = script(
        """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with Judge(JudgeConfig(endpoint=url, model="m", concurrency="fixed:150")) as judge:
        say({v.status for v in judge.submit(["a %d" % i for i in range(150)]).result(20)})
    """,
        server.url,
        "process",
    )
    assert ends(process) == (0, "{'scored'}\n", "")
    assert server.counts().max_in_flight > 100


def test_a_parser_in_the_callers_own_module_is_found_and_surrogates_in_its_names_are_replaced(
    mock: Mock, script: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def read(reply):\n    return 2.0 * float(reply), {'\\ud800': 1.0} if reply.strip() == '1' else {}\n"
    )
    process = script(
        """
    from freewheel.judge import Rubric
    rubric = Rubric(name="mine", system="s", parser="mine:read", low=0, high=100)
    with Judge(JudgeConfig(endpoint=url, model="m", rubric=rubric)) as judge:
        verdicts = judge.submit(["good", "bad"]).result(20)
        say(verdicts[0].value, ascii(verdicts[1].parts), judge.stats().restarts)
    """,
        mock(scores={"good": "21", "bad": "1"}).url,
        "process",
    )
    assert ends(process) == (0, "42.0 {'\\ufffd': 1.0} 0\n", "")


def test_submits_interrupted_by_exceptions_from_signals_leave_a_judge_that_works(mock: Mock, script: Any) -> None:
    process = script(
        """
    class Torn(Exception): pass
    def tear(*_): raise Torn
    signal.signal(signal.SIGALRM, tear)
    with Judge(config) as judge:
        judge.submit(["warm"]).result(20)
        for number in range(1000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (number % 200 + 1))
                judge.submit([f"torn {number} {i}" for i in range(3)])
                time.sleep(0.0005)
            except Torn:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        say([verdict.status for verdict in judge.submit(["after"]).result(20)], judge.stats().restarts)
    """,
        mock().url,
        "process",
    )
    code, out, err = ends(process)
    assert (code, out) == (0, "['scored'] 0\n"), err
