"""Requests that come one by one leave as batches, and every caller gets its own verdict."""

from __future__ import annotations

import asyncio
import threading

import pytest

from freewheel.integrations.gathering import Gathering
from freewheel.judge import Judge, JudgeConfig, JudgeRequest, Scored
from freewheel.judge.errors import JudgeClosed
from freewheel.judge.handle import Handle
from freewheel.judge.testing import JudgeProfile, MockJudge


class Counting:
    """A judge whose batches are counted."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.sizes: list[int] = []

    def submit(self, requests: list[JudgeRequest]) -> Handle:
        self.sizes.append(len(requests))
        return self.judge.submit(requests)


def config(url: str) -> JudgeConfig:
    return JudgeConfig(endpoint=url, model="judge", placement="thread", cache=False)


async def test_what_comes_together_is_one_batch_and_each_gets_its_own_verdict() -> None:
    profile = JudgeProfile(scores={f"<{number}>": str(number) for number in range(1, 10)})
    with MockJudge(profile).in_thread() as mock, Judge(config(mock.url)) as judge:
        counting = Counting(judge)
        gathering = Gathering(counting)
        verdicts = await asyncio.gather(*(gathering.score(JudgeRequest(f"<{n}>")) for n in range(1, 10)))
    assert [verdict.value for verdict in verdicts if isinstance(verdict, Scored)] == list(range(1, 10))
    assert counting.sizes == [9]


async def test_a_verdict_does_not_wait_for_the_rest_of_its_batch() -> None:
    profile = JudgeProfile(hang_share=0.5, scores={"": "5"}, seed=3)
    with MockJudge(profile).in_thread() as mock, Judge(config(mock.url)) as judge:
        gathering = Gathering(judge)
        tasks = [asyncio.ensure_future(gathering.score(JudgeRequest(f"answer {n}"))) for n in range(16)]
        done, pending = await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert done and pending
        for task in pending:
            task.cancel()


async def test_a_caller_that_goes_away_leaves_the_others_alone() -> None:
    with MockJudge(JudgeProfile(latency_s=0.2)).in_thread() as mock, Judge(config(mock.url)) as judge:
        gathering = Gathering(judge)
        first = asyncio.ensure_future(gathering.score(JudgeRequest("one")))
        second = asyncio.ensure_future(gathering.score(JudgeRequest("two")))
        await asyncio.sleep(0.05)
        first.cancel()
        assert isinstance(await second, Scored)


async def test_a_closed_judge_is_said_to_every_caller() -> None:
    judge = Judge(config("http://127.0.0.1:9"))
    judge.close()
    gathering = Gathering(judge)
    answers = await asyncio.gather(*(gathering.score(JudgeRequest("x")) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [JudgeClosed] * 3


def test_several_loops_share_one_judge() -> None:
    with MockJudge(JudgeProfile(latency_s=0.05)).in_thread() as mock, Judge(config(mock.url)) as judge:
        gathering = Gathering(judge)
        found: list[object] = []

        def run(number: int) -> None:
            found.append(asyncio.run(gathering.score(JudgeRequest(f"loop {number}"))))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(found) == 4 and all(isinstance(verdict, Scored) for verdict in found)


async def test_a_request_that_is_to_be_skipped_is_skipped() -> None:
    with Judge(config("http://127.0.0.1:9")) as judge:
        verdict = await Gathering(judge).score(JudgeRequest("x", skip="the gate"))
    assert verdict.status == "skipped"


pytestmark = pytest.mark.timeout(60)
