"""Requests that come one by one leave as batches, and every caller gets its own verdict."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from freewheel.integrations.grouping import RequestBatcher
from freewheel.judge import Judge, JudgeConfig, JudgeRequest, Scored, Verdict
from freewheel.judge.testing import JudgeProfile, MockJudge
from freewheel.judge.tracker import Handle
from freewheel.judge.verdict import JudgeClosed


class Counting:
    """A judge whose batches are counted."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.sizes: list[int] = []

    @property
    def running(self) -> bool:
        return self.judge.running

    def submit(self, requests: list[JudgeRequest]) -> Handle:
        self.sizes.append(len(requests))
        return self.judge.submit(requests)


def config(url: str) -> JudgeConfig:
    return JudgeConfig(endpoint=url, model="judge", placement="thread", cache=False)


async def test_what_comes_together_is_one_batch_and_each_gets_its_own_verdict() -> None:
    profile = JudgeProfile(scores={f"<{number}>": str(number) for number in range(1, 10)})
    with MockJudge(profile).in_thread() as mock, Judge(config(mock.url)) as judge:
        counting = Counting(judge)
        batcher = RequestBatcher(counting)
        verdicts = await asyncio.gather(*(batcher.score(JudgeRequest(f"<{n}>")) for n in range(1, 10)))
    assert [verdict.value for verdict in verdicts if isinstance(verdict, Scored)] == list(range(1, 10))
    assert counting.sizes == [9]


async def test_a_verdict_does_not_wait_for_the_rest_of_its_batch() -> None:
    profile = JudgeProfile(hang_share=0.5, scores={"": "5"}, seed=3)
    with MockJudge(profile).in_thread() as mock, Judge(config(mock.url)) as judge:
        batcher = RequestBatcher(judge)
        tasks = [asyncio.ensure_future(batcher.score(JudgeRequest(f"answer {n}"))) for n in range(16)]
        done, pending = await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert done and pending
        for task in pending:
            task.cancel()


async def test_a_caller_that_goes_away_leaves_the_others_alone() -> None:
    with MockJudge(JudgeProfile(latency_s=0.2)).in_thread() as mock, Judge(config(mock.url)) as judge:
        batcher = RequestBatcher(judge)
        first = asyncio.ensure_future(batcher.score(JudgeRequest("one")))
        second = asyncio.ensure_future(batcher.score(JudgeRequest("two")))
        await asyncio.sleep(0.05)
        first.cancel()
        assert isinstance(await second, Scored)


async def test_a_closed_judge_is_said_to_every_caller() -> None:
    judge = Judge(config("http://127.0.0.1:9"))
    judge.close()
    batcher = RequestBatcher(judge)
    answers = await asyncio.gather(*(batcher.score(JudgeRequest("x")) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [JudgeClosed] * 3


async def test_a_request_that_is_to_be_skipped_is_skipped() -> None:
    with Judge(config("http://127.0.0.1:9")) as judge:
        verdict = await RequestBatcher(judge).score(JudgeRequest("x", skip="the gate"))
    assert verdict.status == "skipped"


async def test_a_handle_that_breaks_is_said_to_every_caller_that_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    as_completed = Handle.as_completed

    async def one_then_broken(self: Handle) -> AsyncIterator[tuple[int, Verdict]]:
        async for found in as_completed(self):
            yield found
            raise JudgeClosed("this handle belongs to another process")

    monkeypatch.setattr(Handle, "as_completed", one_then_broken)
    with MockJudge(JudgeProfile(latency_s=0.05)).in_thread() as mock, Judge(config(mock.url)) as judge:
        batcher = RequestBatcher(judge)
        scoring = asyncio.gather(*(batcher.score(JudgeRequest(f"{n}")) for n in range(3)), return_exceptions=True)
        answers = await asyncio.wait_for(scoring, 20)
    assert sorted(type(answer).__name__ for answer in answers) == ["JudgeClosed", "JudgeClosed", "Scored"]


@pytest.mark.parametrize(
    "wait_s", [0.0, 0.05, 0.4], ids=["before it began", "while it gathered", "while it was judged"]
)
async def test_a_sending_that_is_cancelled_leaves_nobody_waiting_and_later_rows_go_on(wait_s: float) -> None:
    with MockJudge(JudgeProfile(latency_s=0.5)).in_thread() as mock, Judge(config(mock.url)) as judge:
        batcher = RequestBatcher(judge, gather_s=0.2)
        before = asyncio.all_tasks()
        scoring = [asyncio.ensure_future(batcher.score(JudgeRequest(f"{n}"))) for n in range(2)]
        while not (sending := asyncio.all_tasks() - before - set(scoring)):
            await asyncio.sleep(0)
        if wait_s:
            await asyncio.sleep(wait_s)
        for task in sending:
            task.cancel()
        answers = await asyncio.wait_for(asyncio.gather(*scoring, return_exceptions=True), 20)
        assert [type(answer) for answer in answers] == [JudgeClosed] * 2
        assert isinstance(await asyncio.wait_for(batcher.score(JudgeRequest("later")), 20), Scored)


async def test_rules_that_hold_all_of_the_loops_threads_do_not_hold_up_the_judge() -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    over = threading.Event()
    with MockJudge(JudgeProfile()).in_thread() as mock, Judge(config(mock.url)) as judge:
        batcher = RequestBatcher(judge)
        await batcher.score(JudgeRequest("the first starts the engine"))
        rule = asyncio.ensure_future(asyncio.to_thread(over.wait, 30))
        try:
            assert isinstance(await asyncio.wait_for(batcher.score(JudgeRequest("x")), 10), Scored)
        finally:
            over.set()
            await rule


pytestmark = pytest.mark.timeout(60)
