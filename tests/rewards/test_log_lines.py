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
from freewheel.rewards import openai_manager

from .conftest import KEY, WAIT_S, MakeManager, Mock, batch_of

Logged = Callable[..., list[str]]

INITIALIZED = "Initialized async OpenAI manager for TRUE ASYNC I/O (zero GPU wait)"
SYNC_FALLBACK = "OpenAI API key provided but use_async_io=False. Using synchronous fallback."
SHUTTING_DOWN = "Shutting down async OpenAI manager..."
SHUT_DOWN = "Async OpenAI manager shut down successfully."
NOTHING_TO_SHUT_DOWN = "No OpenAI manager to shut down (not initialized)"
COMPLETED = re.compile(r"Completed in \d+\.\d\ds, avg \d+\.\d\ds per response")


@pytest.mark.parametrize("use_async_io", [True, False], ids=["async", "sync"])
def test_a_manager_logs_its_start_its_batches_and_its_end(
    mock: Mock, make_manager: MakeManager, logged: Logged, capsys: pytest.CaptureFixture[str], use_async_io: bool
) -> None:
    manager = make_manager(mock(latency_s=0.2).url, use_async_io=use_async_io)
    assert logged(logging.INFO) == [INITIALIZED if use_async_io else SYNC_FALLBACK]
    batch = ["Using synchronous method for batch with 3 responses (set use_async_io=True for async)"]
    if use_async_io:
        batch = [
            "Using TRUE ASYNC I/O for batch with 3 responses (zero GPU wait)",
            "Starting async evaluation of 2 responses",  # the gate holds one back
        ]
    for number in range(2):
        before = len(logged())
        manager(batch_of(f"yes a{number}", f"yes b{number}", "no"))
        *lines, completed = logged(logging.INFO)[before:]
        assert lines == batch and COMPLETED.fullmatch(completed)
        took_s, average_s = map(float, re.findall(r"\d+\.\d\d", completed))
        assert 0.2 <= took_s < WAIT_S and average_s == pytest.approx(took_s / 3, abs=0.011)
    before = len(logged())
    for _ in range(2):
        manager.shutdown_workers()
    shut_down = [SHUTTING_DOWN, SHUT_DOWN] if use_async_io else [NOTHING_TO_SHUT_DOWN]
    assert logged(logging.INFO)[before:] == [*shut_down, NOTHING_TO_SHUT_DOWN]
    assert all(line.isascii() for line in logged()) and capsys.readouterr().out == ""


def test_the_logged_time_of_a_batch_ends_with_its_last_verdict(
    mock: Mock, make_manager: MakeManager, logged: Logged
) -> None:
    began = time.monotonic()
    handle = make_manager(mock().url, use_async_io=True).submit(batch_of("yes"))
    while not handle.done():
        time.sleep(0.01)
    done_s = time.monotonic() - began
    time.sleep(1.0)
    handle.result()
    took_s, _ = map(float, re.findall(r"\d+\.\d\d", logged(logging.INFO)[-1]))
    assert took_s < done_s + 0.1


NO_KEY = "No API key: rewards are rule score and length penalty only, and no request is made. Give api_key"
OFF = "The judge is off (enable_openai_reward=False)"


@pytest.mark.parametrize(
    ("settings", "level", "start"),
    [
        ({}, logging.INFO, NO_KEY),
        ({"use_async_io": True}, logging.INFO, NO_KEY),
        ({"api_endpoint": "http://127.0.0.1:1/v1"}, logging.WARNING, NO_KEY),
        ({"api_key": KEY, "enable_openai_reward": False}, logging.INFO, OFF),
        ({"api_key": KEY}, logging.WARNING, "The key goes to https://qianfan.baidubce.com/"),
    ],
)
def test_construction_logs_once_whether_there_is_a_judge_and_where_the_key_goes(
    make_manager: MakeManager, logged: Logged, settings: dict[str, Any], level: int, start: str
) -> None:
    manager = make_manager(**settings)
    [line, *more] = logged()
    assert logged(level)[0] == line and line.startswith(start)
    if manager._judge_config is None:
        for _ in range(2):
            manager(batch_of("yes"))
        assert logged() == [line]
    else:
        assert more == [SYNC_FALLBACK]


@pytest.mark.parametrize("use_async_io", [True, False], ids=["async", "sync"])
def test_a_log_shows_the_progress_of_a_batch_every_ten_seconds(
    mock: Mock, make_manager: MakeManager, logged: Logged, monkeypatch: pytest.MonkeyPatch, use_async_io: bool
) -> None:
    assert openai_manager.LOG_EVERY_S == 10.0
    monkeypatch.setattr(openai_manager, "LOG_EVERY_S", 0.1)
    judge = mock(scores={"yes": "5"}, hang_share=0.4, seed=3)
    manager = make_manager(judge.url, use_async_io=use_async_io, batch_timeout_s=1.0)
    manager(batch_of(*[f"yes {number}" for number in range(10)]))
    lines = [line for line in logged(logging.INFO) if line.startswith("Waiting")]
    assert lines and all(re.fullmatch(r"Waiting for OpenAI results\.\.\. \d+\.\d% complete", line) for line in lines)
    shares = [float(line.split()[4].rstrip("%")) for line in lines]
    assert shares == sorted(shares) and any(0 < share < 100 for share in shares)


@pytest.mark.parametrize("error", [JudgeError("it is stuck"), OSError("it is stuck")], ids=["judge", "system"])
def test_a_shutdown_that_fails_is_an_error_line_and_not_an_exception(
    mock: Mock, make_manager: MakeManager, logged: Logged, monkeypatch: pytest.MonkeyPatch, error: Exception
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
    assert logged(logging.ERROR) == ["Error shutting down async manager: it is stuck"]
    assert SHUT_DOWN not in logged()
    assert manager(batch_of("yes")).sum() == 6.0, "the next batch has a new one"


def test_other_failures_are_not_reported_as_a_timeout(mock: Mock, make_manager: MakeManager, logged: Logged) -> None:
    make_manager(mock(unparseable_share=1.0).url, use_async_io=True)(batch_of("yes a", "yes b", "no"))
    [warning] = logged(logging.WARNING)
    assert warning.startswith("2 of 3 judgements failed (unparseable 2), the first with: ")


def test_a_terminal_shows_a_bar_instead_of_lines(
    mock: Mock, make_manager: MakeManager, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(openai_manager, "LOG_EVERY_S", 0.05)
    manager = make_manager(mock(latency_s=0.6).url, use_async_io=True)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        manager(batch_of("yes a", "yes b"))
    assert "OpenAI results" in terminal.getvalue() and "/2" in terminal.getvalue()
    assert not [line for line in logged() if line.startswith("Waiting")]
