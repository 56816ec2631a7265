"""Promises to one request that state shared by all could break: outages, budgets, waits, connections, interrupts."""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from freewheel.judge import Endpoint, Failed, Judge, JudgeConfig
from freewheel.judge.testing import JudgeProfile, RunningJudge

Mock = Callable[..., RunningJudge]
SEVEN = b'{"choices": [{"message": {"content": "7"}}], "usage": {"prompt_tokens": 10, "completion_tokens": 4000}}'


def statuses(verdicts: list[Any]) -> set[str]:
    return {verdict.reason if isinstance(verdict, Failed) else verdict.status for verdict in verdicts}


async def test_a_judge_that_is_back_scores_the_next_batch_however_long_it_was_away(mock: Mock, bench: Any) -> None:
    judge = mock(latency_s=0.01, outages=((0.0, 1000.0),))
    async with bench(judge.url, request_deadline_s=3.0) as engine:  # which a good batch needs on a busy machine
        assert "scored" not in statuses(await engine.score([f"lost {n}" for n in range(40)]))
        judge.reset(JudgeProfile(latency_s=0.01))
        assert statuses(await engine.score([f"next {n}" for n in range(100)])) == {"scored"}


async def test_a_throttled_endpoint_does_not_hold_up_what_another_can_take(
    scripted: Any, mock: Mock, bench: Any
) -> None:
    busy = scripted(lambda number, headers, body: (429, {"Retry-After": "3600"}, b"later"))
    free = mock(latency_s=0.01)
    began = time.monotonic()
    async with bench([Endpoint(url=busy.url), Endpoint(url=free.url)]) as engine:
        assert statuses(await engine.score([f"text {n}" for n in range(100)])) == {"scored"}
    assert time.monotonic() - began < 10, "Retry-After is one endpoint's affair"


async def test_a_connection_that_the_server_had_closed_costs_no_attempt(bench: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request a connection, and drops the connection when the second one comes."""
        for turn in itertools.count():
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            if turn:
                break
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(SEVEN), SEVEN))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with bench(url, max_attempts=1, concurrency="fixed:8") as engine:
        for step in range(3):
            assert statuses(await engine.score([f"step {step} {n}" for n in range(8)])) == {"scored"}
        faults = engine.engine.stats().endpoints[0].faults
    server.close()
    assert set(faults) == {"stale"} and faults["stale"] >= 8


async def test_the_spend_ceiling_holds_where_nothing_bounds_the_replies(scripted: Any, bench: Any) -> None:
    judge = scripted(lambda number, headers, body: (200, {}, SEVEN))
    prices = {"m": {"input": 0.0, "output": 10.0}}  # a reply of 4,000 tokens costs 0.04
    async with bench(judge.url, prices=prices, max_cost=0.1) as engine:
        verdicts = await engine.score([f"text {n}" for n in range(100)])
        assert statuses(verdicts) == {"scored", "budget"}
        assert engine.engine.spent <= 0.1 and len(judge.seen) == 2


async def test_answers_that_cannot_be_used_count_towards_the_ceiling(scripted: Any, bench: Any) -> None:
    judge = scripted(lambda number, headers, body: (200, {}, b"<html>"))
    prices = {"m": {"input": 0.0, "output": 10.0}}
    async with bench(judge.url, prices=prices, max_tokens=4000, max_cost=0.1) as engine:
        assert statuses(await engine.score([f"text {n}" for n in range(20)])) == {"budget"}
    assert len(judge.seen) == 2


async def test_running_out_of_open_files_is_said_and_not_taken_for_an_outage(
    mock: Mock, bench: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judge = mock(latency_s=0.05)
    allowed = 10

    def open_socket(*address: Any) -> socket.socket:
        if judge.counts().open_connections >= allowed:
            raise OSError(errno.EMFILE, "Too many open files")
        return socket.socket(*address)

    monkeypatch.setattr("freewheel.judge.client.socket", SimpleNamespace(**{**vars(socket), "socket": open_socket}))
    async with bench(judge.url) as engine:
        assert statuses(await engine.score([f"text {n}" for n in range(100)])) == {"scored"}
        assert engine.engine.stats().endpoints[0].faults == {}
    assert caplog.text.count("ulimit -n") == 1 and "does not answer" not in caplog.text


async def test_a_request_that_joins_a_running_call_late_gets_a_whole_deadline(mock: Mock, bench: Any) -> None:
    judge = mock(latency_s=2.4)
    async with bench(judge.url, request_deadline_s=2.0) as engine:
        first = asyncio.create_task(engine.score(["same"]))
        await asyncio.sleep(1.0)
        second = asyncio.create_task(engine.score(["same"]))
        assert statuses(await first) == {"deadline"}
        assert statuses(await second) == {"scored"}
    assert judge.counts().received == 1


def test_a_verdict_that_cannot_be_sent_fails_alone(mock: Mock, tmp_path: Any, script: Any) -> None:
    (tmp_path / "odd_parser.py").write_text(
        "def read(text):\n    return 7.0, {'\\ud800': 1.0} if text.strip() == '1' else {}\n"
    )
    judge = mock(scores={"bad": "1", "good": "7"})
    process = script(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from freewheel.judge import Judge, JudgeConfig, Rubric
        rubric = Rubric(name="odd", system="Score it.", parser="odd_parser:read")
        with Judge(JudgeConfig(endpoint={judge.url!r}, model="m", rubric=rubric)) as judge:
            verdicts = judge.submit(["good a", "bad b", "good c"]).result(20)
            print([getattr(verdict, "reason", verdict.status) for verdict in verdicts], judge.stats().restarts)
        """
    )
    out, err = process.communicate(timeout=60)
    assert out.strip() == "['scored', 'engine', 'scored'] 0", err


def test_submits_torn_by_exceptions_from_signals_leave_a_judge_that_works(mock: Mock, script: Any) -> None:
    judge = mock()
    process = script(
        f"""
        import signal, time
        from freewheel.judge import Judge, JudgeConfig
        class Torn(Exception): pass
        def tear(*_): raise Torn
        signal.signal(signal.SIGALRM, tear)
        with Judge(JudgeConfig(endpoint={judge.url!r}, model="m")) as judge:
            judge.submit(["warm"]).result(20)
            for number in range(1000):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-6 * (number % 200 + 1))
                    judge.submit([f"torn {{number}} {{i}}" for i in range(3)])
                    time.sleep(0.0005)
                except Torn:
                    pass
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            print([verdict.status for verdict in judge.submit(["after"]).result(20)], judge.stats().restarts)
        """
    )
    out, err = process.communicate(timeout=60)
    assert out.strip() == "['scored'] 0", err


def test_a_link_that_cannot_start_is_not_kept(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    judge = Judge(JudgeConfig(endpoint=mock().url, model="m"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            judge.submit(["a"])
    with judge:
        assert judge.submit(["b"]).result(20)[0].status == "scored"
