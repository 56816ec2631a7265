"""An evaluation averages what was scored, counts what was not, and sends an engine the same requests every time."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from freewheel.data.group import Prompt, Response
from freewheel.judge.verdict import Failed, Scored, Verdict
from freewheel.rollout.engine import EngineDied, EngineError, GenerationRequest, PromptRefused, generated_response
from freewheel.rollout.evaluation import EvalResult, evaluate, held_out_score
from freewheel.rollout.generation import Sampling
from freewheel.rollout.reward_functions import load_reward
from freewheel.rollout.reward_workers import FunctionRunner

from .fake_engine import FakeEngine

GREEDY = Sampling(n=1, max_new_tokens=9, temperature=0.0, seed=5)
PAIRS = replace(GREEDY, n=2, temperature=1.0)


def refuse_zero(request: GenerationRequest, before: int) -> None:
    if request.prompt[0] == 0:
        raise PromptRefused("it begins with 0")


def prompts(*rows: list[int]) -> list[Prompt]:
    return [Prompt(tokens=np.array(row, np.int32), row={"place": place}) for place, row in enumerate(rows)]


async def total(prompt: Prompt, response: Response) -> Verdict:
    return Scored(float(response.tokens.sum()))


async def run(*rows: list[int], score: Any = total, engine: Any = None, **more: Any) -> EvalResult:
    sampling = more.pop("sampling", GREEDY)
    return await evaluate(engine or FakeEngine(refuse_zero), prompts(*rows), score, sampling, timeout_s=30.0, **more)


class Changing(FakeEngine):
    """The second response of each prompt is cut off and made by the next version."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[tuple[int, Response]]:
        async for index, response in super().generate(request):
            finish: Any = "length" if index else "stop"
            yield index, replace(response, versions=response.versions + index, finish=finish)


async def test_scores_are_averaged_over_prompts_and_samples_of_all_versions():
    found = await run([1], [3], sampling=PAIRS, engine=Changing(version=7))
    assert found.scores.tolist() == [[1, 2], [3, 4]]
    assert (found.mean, found.best, found.per_prompt.tolist()) == (2.5, 3.0, [1.5, 3.5])
    assert (found.failed, found.truncated_share, found.mean_tokens) == (0, 0.5, 2.0)
    assert found.versions == (7, 8)


async def test_failures_of_the_engine_are_counted_and_raised_only_if_nothing_is_left(caplog: pytest.LogCaptureFixture):
    found = await run([1], [0], [1])
    assert (found.mean, found.failed, found.lengths.tolist()) == (1.0, 1, [[2], [0], [2]])
    assert "generation failed for 1 of 3 prompts: it begins with 0" in caplog.text
    with pytest.raises(EngineError, match="begins with 0"):
        await run([0], [0])

    def dies(request: GenerationRequest, before: int) -> None:
        if request.prompt[0] == 0:
            raise EngineDied("gone")

    with pytest.raises(EngineDied):
        await run([1], [0], engine=FakeEngine(dies))
    with pytest.raises(ValueError, match="at least one"):
        await run()


async def test_a_share_of_the_prompts_is_sampled_as_in_the_whole():
    whole, part = FakeEngine(), FakeEngine()
    rows = prompts([1], [2], [3], [4])
    await evaluate(whole, rows, total, PAIRS, timeout_s=30.0)
    await evaluate(part, rows[1::2], total, PAIRS, timeout_s=30.0, ordinals=[1, 3])
    seeds = {int(request.prompt[0]): request.samples for request in whole.requests}
    assert len({one.seed for samples in seeds.values() for one in samples}) == 8
    assert all(seeds[int(request.prompt[0])] == request.samples for request in part.requests)
    assert not {one.id for one in whole.requests} & {one.id for one in part.requests}, "both may use one engine at once"


async def test_the_engine_has_twice_its_slots_in_requests():
    engine = FakeEngine()
    await run(*[[1]] * 30, engine=engine, sampling=PAIRS)
    assert engine.most_running == engine.stats().slots


async def test_slow_scoring_does_not_keep_the_engine_waiting():
    scoring, all_generated = 0, asyncio.Event()

    async def score(prompt: Prompt, response: Response) -> Verdict:
        nonlocal scoring
        scoring += 1
        if scoring == 32:
            all_generated.set()
        await all_generated.wait()
        return Scored(1.0)

    async with asyncio.timeout(20):
        found = await run(*[[1]] * 32, score=score, keep_responses=True)
    assert found.mean == 1.0 and len(found.responses) == 32


def result(scores: list[list[float]], *parts: dict[str, float]) -> EvalResult:
    """`parts`: of the first sample of each prompt."""
    shape = np.array(scores).shape
    return EvalResult(
        scores=np.array(scores, np.float64),
        truncated=np.zeros(shape, bool),
        lengths=np.ones(shape, np.int64),
        versions=(7,),
        named_parts=tuple((one,) for one in parts),
    )


def test_a_standard_error_is_that_of_a_mean_over_prompts():
    found = result([[1.0], [0.0], [0.0], [0.0]]).reward
    assert found.mean == 0.25 and found.error == pytest.approx(math.sqrt(0.25 * 0.75 / 3))
    often = result([[1.0] * 4, *[[0.0] * 4] * 3]).reward
    assert often == found, "samples of one prompt are alike: four times the same answer says as much as one"


def test_missing_scores_are_in_no_mean_and_no_standard_error():
    known = result([[1.0], [0.0], [0.0]])
    holes = result([[1.0, math.nan], [math.nan, 0.0], [0.0, 0.0], [math.nan] * 2])
    assert holes.reward.error == known.reward.error and holes.best == known.best
    assert math.isnan(holes.per_prompt[3])
    alone = result([[1.0, 0.0], [math.nan, math.nan]]).reward
    assert alone.mean == 0.5 and math.isnan(alone.error), "one prompt says nothing about others"
    nothing = result([[math.nan]])
    assert math.isnan(nothing.mean) and math.isnan(nothing.best)


def test_shares_are_joined_with_their_parts():
    shares = [result([[1.0], [1.0]], {"steps": 2.0}, {"steps": 4.0, "cut": math.inf}), result([[0.0]], {"format": 1.0})]
    found = EvalResult.joined(shares)
    assert found.scores.tolist() == [[1.0], [1.0], [0.0]] and found.versions == (7,)
    assert {name: one.mean for name, one in found.parts.items()} == pytest.approx(
        {"cut": math.nan, "format": 1.0, "steps": 3.0}, nan_ok=True
    )


def runner_of(function: Any, executor: Any = "thread") -> FunctionRunner:
    return FunctionRunner(load_reward(function), workers=1, executor=executor, timeout_s=20.0)


async def test_a_failed_score_is_counted_and_is_not_a_zero(caplog: pytest.LogCaptureFixture):
    used: set[str] = set()

    def score(response: str, row: dict[str, Any]) -> dict[str, float]:
        used.add(threading.current_thread().name)
        return {"score": 1 / row["place"], "format": 0.5, "steps": 2.0}

    async with runner_of(score) as runner:
        found = await run([1], [1], score=held_out_score(runner, str))
    assert (found.mean, found.failed) == (1.0, 1)
    assert {name: part.mean for name, part in found.parts.items()} == {"format": 0.5, "steps": 2.0}
    assert "could not be scored: ZeroDivisionError" in caplog.text
    assert used == {"freewheel-reward"}, "no thread of the loop's own pool"


async def test_a_process_scores_held_out_responses():
    async with runner_of("freewheel.data.tasks.word_problems:TASK.score", executor="process") as runner:
        score = held_out_score(runner, str)
        row = {"place": 0, "reward_model": {"ground_truth": "3"}}
        prompt = Prompt(tokens=np.array([1], np.int32), row=row)
        assert isinstance(await score(prompt, generated_response(*[np.ones(1, np.int32)] * 3, "stop")), Scored)
        assert isinstance(await score(replace(prompt, row={}), generated_response(*[np.ones(1)] * 3, "stop")), Failed)
