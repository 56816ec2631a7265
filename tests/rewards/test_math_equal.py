"""The process that compares math answers: its limits, its deaths, and what they mean for a reward."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freewheel.judge.verdict import Scored
from freewheel.rewards import math_equal
from freewheel.rewards.rules import boxed_math

RIGHT, WRONG = Scored(1.0), Scored(0.0)

BOUND_S = 20.0
"""Several times what any test here takes on a busy machine. Without a limit it would take a minute or never end."""
TOO_LARGE = "1.5E9999999999"
"""A call into C that blocks the interpreter and takes 4 GB; math-verify's own alarm does not end it."""
TOO_SLOW = "(x+1)^{5000}"
"""Expanding it takes far longer than any limit."""

needs_math = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="the extra [math] is not here")


@pytest.fixture(autouse=True)
def _fresh_comparer() -> Iterator[None]:
    """A comparer with an empty cache, which ends with its test."""
    math_equal.close()
    math_equal._compare.cache_clear()
    yield
    math_equal.close()
    math_equal._compare.cache_clear()


@needs_math
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bound the address space")
def test_a_comparison_that_needs_too_much_memory_is_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_equal, "TIMEOUT_S", 20.0)
    assert boxed_math(r"\boxed{84/2}", "42", {}) == RIGHT
    child = math_equal._comparer._child
    assert boxed_math(f"\\boxed{{{TOO_LARGE}}}", "42", {}) == WRONG
    assert boxed_math(r"\boxed{126/3}", "42", {}) == RIGHT
    assert math_equal._comparer._child is child, "not even its time was over"


@needs_math
def test_a_comparison_that_never_ends_is_a_zero_that_is_cached_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(math_equal, "TIMEOUT_S", 1.0)
    caplog.set_level(logging.DEBUG, "freewheel.rewards")
    for _ in range(8):
        assert boxed_math(f"\\boxed{{{TOO_SLOW}}}", "42", {}) == WRONG
    assert boxed_math(r"\boxed{84/2}", "42", {}) == RIGHT, "the next comparison has a process again"
    [record] = caplog.records
    assert TOO_SLOW in record.getMessage() and f"exit code -{signal.SIGPROF.value}" in record.getMessage()


@needs_math
def test_an_interrupt_does_not_leave_a_reply_for_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pipe: object) -> bytes:
        raise KeyboardInterrupt

    assert boxed_math(r"\boxed{24/2}", "12", {}) == RIGHT
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(math_equal.Connection, "recv_bytes", interrupted)
        boxed_math(r"\boxed{26/2}", "13", {})
    assert boxed_math(r"\boxed{28/2}", "15", {}) == WRONG


@needs_math
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from Python 3.12 on, where pytest has threads
def test_a_forked_process_does_not_share_its_parents_comparer() -> None:
    assert boxed_math(r"\boxed{30/2}", "15", {}) == RIGHT
    pid = os.fork()
    if pid == 0:
        os._exit(0 if math_equal._comparer._child is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert boxed_math(r"\boxed{32/2}", "16", {}) == RIGHT


@needs_math
def test_closing_ends_the_process_and_its_pipe_and_a_killed_process_is_replaced() -> None:
    assert boxed_math(r"\boxed{22/2}", "11", {}) == RIGHT
    child = math_equal._comparer._child
    assert child is not None
    child.process.kill()
    child.process.wait()
    assert boxed_math(r"\boxed{24/2}", "12", {}) == RIGHT
    child = math_equal._comparer._child
    math_equal.close()
    math_equal.close()
    assert gone(child) and child is not None and child.pipe.closed


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'freewheel\[math\]'"):
        boxed_math(r"\boxed{42}", "42", {})


STAND_IN = """
import os, signal, sys, threading, time

def once():
    "True in the first process that asks."
    try:
        os.close(os.open("FOLDER/asked", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def parse(text, parsing_timeout):
    return text.removeprefix(chr(92) + "boxed{").removesuffix("}")

def verify(truth, answer, timeout_seconds):
    with open("FOLDER/compared", "a") as file:
        file.write(answer + chr(10))
    does, _, answer = answer.rpartition("!")
    exec(does)
    return answer == truth
"""
"""A math-verify that runs the code before the `!` of an answer and then compares the rest as text."""

KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder from which the process imports its math-verify, and its sitecustomize if there is one."""
    (tmp_path / "math_verify.py").write_text(STAND_IN.replace("FOLDER", str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def in_time() -> Iterator[None]:
    started_at = time.perf_counter()
    yield
    assert time.perf_counter() - started_at < BOUND_S


def compared(stand_in: Path) -> int:
    """How many comparisons were started."""
    return len((stand_in / "compared").read_text().splitlines())


def gone(child: math_equal._Child | None) -> bool:
    return child is not None and child.process.returncode is not None


def test_output_of_the_process_is_not_taken_for_a_reply(stand_in: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (stand_in / "sitecustomize.py").write_text("print('ANTLR versions disagree', flush=True)")
    assert math_equal.equal("print('different', flush=True)!4", "4")
    assert not math_equal.equal("print('same', flush=True)!4", "7")
    printed = capfd.readouterr()
    assert not printed.out and "ANTLR versions disagree" in printed.err


@pytest.mark.parametrize("death", [KILLED, "1/0"])
def test_two_deaths_of_unknown_cause_are_an_error_and_not_a_zero_and_not_cached(stand_in: Path, death: str) -> None:
    answer = f"os.path.exists('{stand_in}/calm') or {death}!42"
    for _ in range(2):
        with pytest.raises(math_equal.ComparisonFailed, match="exit codes"):
            boxed_math(f"\\boxed{{{answer}}}", "42", {})
    assert compared(stand_in) == 4
    (stand_in / "calm").touch()
    assert boxed_math(f"\\boxed{{{answer}}}", "42", {}) == RIGHT
    assert math_equal.equal(f"once() and {death}!43", "43"), "one death may be an accident"


@pytest.mark.parametrize("crash", ["os.abort()", "os.kill(os.getpid(), signal.SIGSEGV)", "bytearray(1 << 40)"])
def test_an_answer_that_crashes_two_processes_is_not_comparable_and_cached(stand_in: Path, crash: str) -> None:
    for _ in range(4):
        assert boxed_math(f"\\boxed{{{crash}!42}}", "42", {}) == WRONG
    with pytest.raises(math_equal.NotComparable, match="too much time or memory"):
        math_equal.equal(f"{crash}!42", "42")
    assert compared(stand_in) == 2
    assert math_equal.equal(f"once() and {crash}!43", "43"), "one crash may be an accident"


def test_only_cpu_time_counts_against_a_comparison(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_equal, "TIMEOUT_S", 0.5)
    assert math_equal.equal("time.sleep(1.5)!42", "42")
    for _ in range(2):
        with pytest.raises(math_equal.NotComparable):
            math_equal.equal("[0 for _ in iter(int, 1)]!42", "42")
    assert compared(stand_in) == 2, "the limit is the same in every process, so there is no second try"


def test_a_comparison_that_starves_is_an_error_and_not_a_zero(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, in_time: None
) -> None:
    monkeypatch.setattr(math_equal, "WALL_S", 1.0)
    assert not math_equal.equal("42", "43")
    child = math_equal._comparer._child
    with pytest.raises(math_equal.ComparisonFailed, match="took 1 s"):
        boxed_math(r"\boxed{os.kill(os.getpid(), signal.SIGSTOP)!42}", "42", {})
    assert gone(child)
    assert math_equal.equal("!42", "42")


def test_an_answer_too_long_for_the_pipe_is_not_compared(stand_in: Path) -> None:
    longest = math_equal.LONGEST_CHARS
    assert math_equal.equal("!" + "4" * (longest - 1), "4" * (longest - 1))
    for answer, truth in [("4" * (longest + 1), "4"), ("4", "4" * (longest + 1))]:
        with pytest.raises(math_equal.NotComparable):
            math_equal.equal(answer, truth)
    assert math_equal.equal("4" * 1_000_000, "4" * 1_000_000), "equal texts need no comparison"
    assert compared(stand_in) == 1


def test_a_process_that_does_not_start_is_an_error(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, in_time: None
) -> None:
    (stand_in / "math_verify.py").write_text("raise ImportError('sympy is broken')")
    with pytest.raises(math_equal.ComparisonFailed, match=r"did not start \(exit code 1\); stderr says why"):
        math_equal.equal("42", "43")
    monkeypatch.setattr(math_equal, "START_S", 0.5)
    (stand_in / "sitecustomize.py").write_text("import time; time.sleep(60)")
    with pytest.raises(math_equal.ComparisonFailed, match="did not start within"):
        math_equal.equal("42", "43")
    assert math_equal._comparer._child is None


@pytest.mark.parametrize("during", ["comparison", "start"])
def test_closing_does_not_wait_for_a_comparison(stand_in: Path, in_time: None, during: str) -> None:
    if during == "start":
        (stand_in / "sitecustomize.py").write_text("import time; time.sleep(60)")
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            math_equal.equal("time.sleep(60)!42", "43")
        except BaseException as error:  # noqa: BLE001  # checked below
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    _until(lambda: math_equal._comparer._child is not None)
    if during == "comparison":
        _until((stand_in / "compared").exists)
    child = math_equal._comparer._child
    began = time.perf_counter()
    math_equal.close(0.1)
    assert time.perf_counter() - began < 4
    thread.join(BOUND_S)
    [error] = raised
    assert isinstance(error, math_equal.ComparisonFailed) and gone(child)
    assert math_equal._comparer._child is None, "nothing was started again"


def test_closing_does_not_wait_for_a_process_that_stays(stand_in: Path, in_time: None) -> None:
    assert math_equal.equal("threading.Thread(target=time.sleep, args=(60,)).start()!42", "42")
    child = math_equal._comparer._child
    began = time.perf_counter()
    math_equal.close()
    assert time.perf_counter() - began < 4
    assert gone(child)


def _until(true: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + BOUND_S
    while not true():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
