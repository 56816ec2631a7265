"""The log lines that dashboards and habits rely on, letter by letter (SPEC 1.1, 1.3), and that a key is in none."""

from __future__ import annotations

import io
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from freewheel.judge import JudgeError
from freewheel.rewards import LengthPenaltyRewardManager
from freewheel.rewards import openai_manager as handle_module

from .conftest import KEY, WAIT_S, Characters, MakeManager, Mock, batch_of

Said = Callable[..., list[str]]

INITIALIZED = "Initialized async OpenAI manager for TRUE ASYNC I/O (zero GPU wait)"
SYNC_FALLBACK = "OpenAI API key provided but use_async_io=False. Using synchronous fallback."
SHUTTING_DOWN = "Shutting down async OpenAI manager..."
SHUT_DOWN = "Async OpenAI manager shut down successfully."
NOTHING_TO_SHUT_DOWN = "No OpenAI manager to shut down (not initialized)"
COMPLETED = re.compile(r"Completed in \d+\.\d\ds, avg \d+\.\d\ds per response")


def test_async_on_says_so_at_construction_and_for_each_batch(mock: Mock, make_manager: MakeManager, said: Said) -> None:
    manager = make_manager(mock().url, use_async_io=True)
    assert said(logging.INFO) == [INITIALIZED]
    for _ in range(2):
        manager(batch_of("yes a", "yes b", "yes c"))
    per_batch = said()[1:]
    assert len(per_batch) == 6
    for batch in (per_batch[:3], per_batch[3:]):
        assert batch[:2] == [
            "Using TRUE ASYNC I/O for batch with 3 responses (zero GPU wait)",
            "Starting async evaluation of 3 responses",
        ]
        assert COMPLETED.fullmatch(batch[2])


def test_async_off_with_a_key_says_so_at_construction_and_for_each_batch(
    mock: Mock, make_manager: MakeManager, said: Said
) -> None:
    manager = make_manager(mock().url, use_async_io=False)
    assert said(logging.INFO) == [SYNC_FALLBACK]
    manager(batch_of("yes a", "yes b"))
    first, second = said()[1:]
    assert first == "Using synchronous method for batch with 2 responses (set use_async_io=True for async)"
    assert COMPLETED.fullmatch(second)


@pytest.mark.parametrize("use_async_io", [True, False])
def test_without_a_key_that_is_said_once(make_manager: MakeManager, said: Said, use_async_io: bool) -> None:
    manager = make_manager(use_async_io=use_async_io)
    for _ in range(3):
        manager(batch_of("yes"))
    [line] = said()
    assert line.startswith("No API key: rewards are rule score and length penalty only") and "api_key" in line


def test_a_judge_that_is_turned_off_is_not_said_to_lack_a_key(
    mock: Mock, make_manager: MakeManager, said: Said
) -> None:
    make_manager(mock().url, use_async_io=True, enable_openai_reward=False)(batch_of("yes"))
    [line] = said()
    assert "enable_openai_reward=False" in line and "No API key" not in line


def test_the_lines_of_a_batch_count_what_is_judged(mock: Mock, make_manager: MakeManager, said: Said) -> None:
    make_manager(mock().url, use_async_io=True)(batch_of("yes a", "no", "no way"))
    assert "Using TRUE ASYNC I/O for batch with 3 responses (zero GPU wait)" in said()
    assert "Starting async evaluation of 1 responses" in said(), "two are kept back by the gate"


def test_completed_has_the_time_and_the_time_per_response(mock: Mock, make_manager: MakeManager, said: Said) -> None:
    make_manager(mock(latency_s=0.4).url, use_async_io=True)(batch_of("yes a", "yes b"))
    completed = next(line for line in said() if line.startswith("Completed"))
    took_s, average_s = map(float, re.findall(r"\d+\.\d\d", completed))
    assert 0.4 <= took_s < 20 and average_s == pytest.approx(took_s / 2, abs=0.011)


def test_a_shutdown_says_that_it_begins_and_that_it_is_done(mock: Mock, make_manager: MakeManager, said: Said) -> None:
    manager = make_manager(mock().url, use_async_io=True)
    manager.start_workers()
    before = len(said())
    manager.shutdown_workers()
    assert said()[before:] == said(logging.INFO)[before:] == [SHUTTING_DOWN, SHUT_DOWN]


@pytest.mark.parametrize("use_async_io", [True, False])
def test_a_shutdown_of_nothing_says_so(mock: Mock, make_manager: MakeManager, said: Said, use_async_io: bool) -> None:
    for manager in (make_manager(use_async_io=use_async_io), make_manager(mock().url, use_async_io=use_async_io)):
        before = len(said())
        manager.shutdown_workers()
        assert said()[before:] == [NOTHING_TO_SHUT_DOWN]


@pytest.mark.parametrize("error", [JudgeError("it is stuck"), OSError("it is stuck")], ids=["judge", "system"])
def test_a_shutdown_that_fails_is_an_error_line_and_not_an_exception(
    mock: Mock, make_manager: MakeManager, said: Said, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    manager = make_manager(mock(scores={"": "5"}).url, use_async_io=True)
    manager.start_workers()
    broken = manager.async_openai_manager
    assert broken is not None
    shutdown = broken.shutdown

    def fail(*_: Any) -> None:
        shutdown()
        raise error

    monkeypatch.setattr(broken, "shutdown", fail)
    manager.shutdown_workers()
    assert said(logging.ERROR) == ["Error shutting down async manager: it is stuck"]
    assert SHUT_DOWN not in said()
    assert manager(batch_of("yes")).sum() == 6.0, "the next batch has a new one"


@pytest.mark.parametrize("use_async_io", [True, False], ids=["async", "sync"])
def test_a_batch_that_times_out_is_a_warning(
    mock: Mock, make_manager: MakeManager, said: Said, use_async_io: bool
) -> None:
    manager = make_manager(mock(hang_share=1.0).url, use_async_io=use_async_io, batch_timeout_s=0.3)
    manager(batch_of("yes a", "yes b"))
    [warning] = said(logging.WARNING)
    assert warning.startswith("OpenAI API evaluation timeout, using fallback")


def test_other_failures_are_not_called_a_timeout(mock: Mock, make_manager: MakeManager, said: Said) -> None:
    make_manager(mock(unparseable_share=1.0).url, use_async_io=True)(batch_of("yes a", "yes b", "no"))
    [warning] = said(logging.WARNING)
    assert warning.startswith("2 of 3 judgements failed (unparseable 2), the first with: ")


def test_a_key_for_the_endpoint_that_nobody_named_is_said_to_go_there(make_manager: MakeManager, said: Said) -> None:
    LengthPenaltyRewardManager(Characters(), 0, length_penalty_config={"api_key": KEY})
    assert "qianfan.baidubce.com" in said(logging.WARNING)[0]


def test_a_judge_that_was_meant_and_has_no_key_is_a_warning(said: Said) -> None:
    LengthPenaltyRewardManager(Characters(), 0, length_penalty_config={"api_endpoint": "http://127.0.0.1:1/v1"})
    assert said(logging.WARNING)[0].startswith("No API key: ")


def test_a_shutdown_says_that_batches_are_given_up(mock: Mock, make_manager: MakeManager, said: Said) -> None:
    judge = mock(latency_s=30.0)
    manager = make_manager(judge.url, use_async_io=True)
    handle = manager.submit(batch_of("yes"))
    until = time.monotonic() + WAIT_S
    while judge.counts().in_flight == 0 and time.monotonic() < until:
        time.sleep(0.01)
    manager.shutdown_workers()
    assert "1 batches are not complete: their rows without a verdict have failed" in said(logging.WARNING)
    handle.result()


def test_a_log_hears_how_far_a_batch_is_every_ten_seconds(
    mock: Mock, make_manager: MakeManager, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert handle_module.LOG_EVERY_S == 10.0
    monkeypatch.setattr(handle_module, "LOG_EVERY_S", 0.2)
    judge = mock(scores={"yes": "5"}, hang_share=0.4, seed=3)
    manager = make_manager(judge.url, use_async_io=True, batch_timeout_s=2.0)
    manager(batch_of(*[f"yes {number}" for number in range(10)]))
    told = [line for line in said(logging.INFO) if line.startswith("Waiting")]
    assert told and all(re.fullmatch(r"Waiting for OpenAI results\.\.\. \d+\.\d% complete", line) for line in told)
    shares = [float(line.split()[4].rstrip("%")) for line in told]
    assert shares == sorted(shares) and 0 < shares[-1] < 100


def test_forty_two_percent_reads_as_it_always_did(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting:
        """21 of 50 are done at the first look, all at the second."""

        def __init__(self) -> None:
            self.looks = 0

        def wait(self, timeout_s: float) -> bool:
            self.looks += 1
            return self.looks > 2

        def progress(self) -> Any:
            from freewheel.judge import Progress

            return Progress(50, 20, 1, 0)

        def result(self) -> list[Any]:
            return ["done"]

    assert handle_module.wait_for(Waiting()) == ["done"]  # type: ignore[arg-type]
    assert said(logging.INFO) == ["Waiting for OpenAI results... 42.0% complete"]


def test_a_terminal_has_a_bar_instead_of_lines(
    mock: Mock, make_manager: MakeManager, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(handle_module, "LOG_EVERY_S", 0.05)
    manager = make_manager(mock(latency_s=0.6).url, use_async_io=True)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        manager(batch_of("yes a", "yes b"))
    assert "OpenAI results" in terminal.getvalue() and "/2" in terminal.getvalue()
    assert not [line for line in said() if line.startswith("Waiting")]


def test_no_line_of_ours_has_an_emoji_or_goes_to_stdout(
    mock: Mock, make_manager: MakeManager, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    for use_async_io in (True, False):
        manager = make_manager(mock().url, use_async_io=use_async_io, num_examine=1)
        manager(batch_of("yes"))
        manager.shutdown_workers()
    assert len(said()) > 8 and all(line.isascii() for line in said())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("use_async_io", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(
    "profile",
    [{}, {"api_key": "another"}, {"error_share": 1.0}, {"insufficient_quota": True}],
    ids=["answers", "refuses the key", "errors", "quota"],
)
def test_the_key_is_in_no_log_line_of_any_logger_at_any_level(
    mock: Mock,
    make_manager: MakeManager,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    use_async_io: bool,
    profile: dict[str, Any],
) -> None:
    caplog.set_level(logging.DEBUG)
    judge = {"max_attempts": 1, "reasks": 0}
    manager = make_manager(mock(**profile).url, use_async_io=use_async_io, judge=judge, num_examine=1)
    result = manager(batch_of("yes"), return_dict=True)
    manager.shutdown_workers()
    assert caplog.records
    formatted = "\n".join(logging.Formatter("%(name)s %(message)s %(args)s").format(one) for one in caplog.records)
    out, err = capfd.readouterr()
    for text in (formatted, out, err, repr(result), repr(manager.config), repr(manager.__dict__), str(manager)):
        assert KEY not in text


def test_the_logger_is_the_one_that_people_configure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "freewheel.rewards")
    LengthPenaltyRewardManager(Characters(), 0)
    assert {record.name for record in caplog.records} == {"freewheel.rewards"}


def test_the_synchronous_path_says_how_far_it_is_too(
    mock: Mock, make_manager: MakeManager, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_module, "LOG_EVERY_S", 0.05)
    make_manager(mock(latency_s=0.5).url, use_async_io=False)(batch_of("yes"))
    assert "Waiting for OpenAI results... 0.0% complete" in said(logging.INFO)
