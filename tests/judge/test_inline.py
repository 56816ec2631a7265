"""The engine on the caller's own loop: the same verdicts as in a separate one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from freewheel.judge import ConfigError, Failed, Judge, JudgeClosed, JudgeConfig, JudgeRequest, Scored, Skipped
from freewheel.judge.judge import InlineJudge


def config(url: str, **settings: Any) -> JudgeConfig:
    return JudgeConfig(endpoint=url, model="m", **settings)


async def test_the_verdicts_are_those_of_a_separate_judge_in_the_order_of_the_requests(mock: Any) -> None:
    texts = [f"answer {i}" for i in range(40)]
    running = mock(latency_s=0.01)
    async with InlineJudge(config(running.url)) as judge:
        verdicts = await judge.score(texts)
    with Judge(config(running.url, cache=False)) as separate:
        expected = separate.submit(texts).result()
    assert [verdict.value for verdict in verdicts] == [verdict.value for verdict in expected]


async def test_requests_are_checked_and_skips_kept_in_place(mock: Any) -> None:
    async with InlineJudge(config(mock().url)) as judge:
        verdicts = await judge.score([{"response": "a"}, JudgeRequest("b", skip="not now")])
        assert isinstance(verdicts[0], Scored)
        assert verdicts[1] == Skipped("not now")
        assert await judge.score([]) == []
        with pytest.raises(ConfigError, match="give several"):
            await judge.score("one")


async def test_a_batch_deadline_marks_what_is_missing(mock: Any) -> None:
    async with InlineJudge(config(mock(latency_s=30.0).url)) as judge:
        [verdict] = await judge.score(["slow"], deadline_s=0.05)
    assert isinstance(verdict, Failed)
    assert verdict.reason == "deadline"


async def test_cancelling_the_caller_ends_the_call(mock: Any) -> None:
    running = mock(latency_s=30.0)
    async with InlineJudge(config(running.url)) as judge:
        task = asyncio.create_task(judge.score(["slow"]))
        while judge.stats().in_flight == 0:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        until = time.monotonic() + 5
        while judge.stats().in_flight and time.monotonic() < until:
            await asyncio.sleep(0.005)
        assert judge.stats().in_flight == 0


async def test_closing_answers_what_is_open(mock: Any) -> None:
    judge = await InlineJudge(config(mock(latency_s=30.0).url)).start()
    task = asyncio.create_task(judge.score(["slow"]))
    while judge.stats().in_flight == 0:
        await asyncio.sleep(0.005)
    await judge.close()
    [verdict] = await task
    assert verdict.reason == "cancelled"
    with pytest.raises(JudgeClosed):
        await judge.score(["more"])


async def test_a_judge_that_cannot_start_says_why_and_leaves_nothing_open(mock: Any) -> None:
    with pytest.raises(ConfigError, match="ca_file"):
        await InlineJudge(config(mock().url, ca_file="/nowhere/ca.pem")).start()
