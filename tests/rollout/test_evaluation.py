"""An evaluation averages what was scored, counts what was not, and asks the same of an engine every time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from freewheel.data.group import Prompt, Response
from freewheel.judge.verdict import Scored
from freewheel.rollout.engine import EngineError, GenerationRequest, PromptRefused, generated_response
from freewheel.rollout.evaluation import EvalResult, HeldOutScore, evaluate
from freewheel.rollout.reward_functions import load_reward


class Echo:
    """An engine that answers a prompt with its own tokens, and refuses those that begin with 0."""

    def __init__(self, *, slots: int = 4, limit: int = 100) -> None:
        self.slots, self.limit = slots, limit
        self.version = 7
        self.requests: list[GenerationRequest] = []
        self.at_once = self.most_at_once = 0

    def stats(self) -> Any:
        return SimpleNamespace(slots=self.slots)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[tuple[int, Response]]:
        self.requests.append(request)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0)
            if request.prompt[0] == 0:
                raise PromptRefused("it begins with 0")
            for index, _ in reversed(list(enumerate(request.samples))):
                tokens = request.prompt[: self.limit]
                cut = "length" if len(request.prompt) > self.limit else "stop"
                versions = np.full(len(tokens), self.version, np.int32)
                yield index, generated_response(tokens, np.zeros(len(tokens), np.float32), versions, cut)
                self.version += 1
        finally:
            self.at_once -= 1


def prompts(*rows: list[int]) -> list[Prompt]:
    return [Prompt(tokens=np.array(row, np.int32), row={"place": place}) for place, row in enumerate(rows)]


def total(prompt: Prompt, response: Response) -> float:
    return float(response.tokens.sum())


async def test_scores_are_averaged_over_prompts_and_samples():
    found = await evaluate(
        Echo(), prompts([1, 1], [1, 3]), total, samples=2, temperature=1.0, max_new_tokens=9, timeout_s=30.0
    )
    assert found.scores.tolist() == [[2, 2], [4, 4]]
    assert (found.mean, found.best, found.per_prompt.tolist()) == (3.0, 3.0, [2.0, 4.0])
    assert (found.failed, found.scored, found.truncated_share, found.mean_tokens) == (0, 4, 0.0, 2.0)


async def test_versions_of_all_tokens_are_known():
    assert (await evaluate(Echo(), prompts([1], [1]), total, samples=2, max_new_tokens=9, timeout_s=30.0)).versions == (
        7,
        8,
        9,
        10,
    )


async def test_what_could_not_be_generated_or_scored_is_counted_and_not_a_zero(caplog: pytest.LogCaptureFixture):
    def score(prompt: Prompt, response: Response) -> float:
        if prompt.row["place"] == 1:
            raise KeyError("ground_truth")
        return math.nan if prompt.row["place"] == 2 else 1.0

    found = await evaluate(Echo(), prompts([1], [1], [1], [0]), score, max_new_tokens=9, timeout_s=30.0)
    assert (found.mean, found.failed, found.scored) == (1.0, 3, 1)
    assert np.isnan(found.per_prompt[1:]).all()
    assert "1 of 4 prompts could not be generated for: it begins with 0" in caplog.text
    assert "KeyError" in caplog.text


async def test_an_engine_that_can_do_nothing_is_an_error_and_not_a_result():
    with pytest.raises(EngineError, match="begins with 0"):
        await evaluate(Echo(), prompts([0], [0]), total, max_new_tokens=9, timeout_s=30.0)
    with pytest.raises(ValueError, match="at least one"):
        await evaluate(Echo(), [], total, max_new_tokens=9, timeout_s=30.0)


async def test_nothing_scored_has_no_mean():
    found = await evaluate(Echo(), prompts([1]), lambda prompt, response: math.nan, max_new_tokens=9, timeout_s=30.0)
    assert math.isnan(found.mean) and math.isnan(found.best)


async def test_responses_that_were_cut_off_are_counted():
    found = await evaluate(Echo(limit=2), prompts([1, 1, 1], [1, 1]), total, max_new_tokens=2, timeout_s=30.0)
    assert found.truncated_share == 0.5


async def test_a_share_of_the_prompts_is_sampled_as_in_the_whole():
    whole, part = Echo(), Echo()
    rows = prompts([1], [2], [3], [4])
    await evaluate(whole, rows, total, samples=2, temperature=1.0, max_new_tokens=9, timeout_s=30.0, seed=5)
    await evaluate(
        part, rows[1::2], total, samples=2, temperature=1.0, max_new_tokens=9, timeout_s=30.0, seed=5, ordinals=[1, 3]
    )
    seeds = {int(request.prompt[0]): request.samples for request in whole.requests}
    assert len({one.seed for samples in seeds.values() for one in samples}) == 8
    assert all(seeds[int(request.prompt[0])] == request.samples for request in part.requests)
    assert not {one.id for one in whole.requests} & {one.id for one in part.requests}, "both may use one engine at once"


async def test_shares_are_joined():
    parts = [await evaluate(Echo(), prompts(row), total, max_new_tokens=9, timeout_s=30.0) for row in ([1], [3])]
    found = EvalResult.joined(parts)
    assert found.mean == 2.0 and found.scores.shape == (2, 1) and found.versions == (7,)


# -- parts and standard errors ----------------------------------------------------------------------------------------


def result(scores: list[list[float]], **parts: list[list[float]]) -> EvalResult:
    shape = np.array(scores).shape
    return EvalResult(
        scores=np.array(scores, np.float64),
        truncated=np.zeros(shape, bool),
        lengths=np.ones(shape, np.int64),
        versions=(7,),
        part_scores={name: np.array(values, np.float64) for name, values in parts.items()},
    )


def test_a_standard_error_is_that_of_a_mean_over_prompts():
    found = result([[1.0], [0.0], [0.0], [0.0]]).reward
    assert found.mean == 0.25 and found.error == pytest.approx(math.sqrt(0.25 * 0.75 / 3))


def test_samples_of_one_prompt_do_not_make_a_mean_surer():
    """They are alike: four times the same answer says as much as one."""
    once = result([[1.0], [0.0], [0.0]])
    often = result([[1.0] * 4, [0.0] * 4, [0.0] * 4])
    assert often.reward == once.reward


def test_what_was_not_scored_is_in_no_standard_error():
    known = result([[1.0], [0.0], [0.0]])
    assert result([[1.0, math.nan], [math.nan, 0.0], [0.0, 0.0], [math.nan] * 2]).reward.error == known.reward.error
    alone = result([[1.0, 0.0], [math.nan, math.nan]]).reward
    assert alone.mean == 0.5 and math.isnan(alone.error), "one prompt says nothing about others"


async def test_parts_of_a_score_are_measured_apart():
    def score(prompt: Prompt, response: Response) -> Scored:
        place = prompt.row["place"]
        parts = {"format": 1.0, "correct": float(place == 1)}
        return Scored(1.0, parts=parts | ({"steps": math.inf if place else 3.0} if place < 2 else {}))

    found = await evaluate(Echo(), prompts([1], [1], [1], [1]), score, max_new_tokens=9, timeout_s=30.0)
    assert [*found.parts] == ["correct", "format", "steps"]
    assert found.parts["correct"].mean == 0.25 and found.parts["correct"].error == pytest.approx(0.25)
    assert (found.parts["format"].mean, found.parts["format"].error) == (1.0, 0.0)
    assert found.parts["steps"].mean == 3.0, "over those that have it, and infinity is none"


async def test_a_response_that_failed_has_no_parts():
    def score(response: str, row: dict[str, Any]) -> dict[str, float]:
        return {"score": 1 / row["place"], "format": 0.5, "steps": 2.0}

    async with held_out(score) as scored:
        found = await evaluate(Echo(), prompts([1], [1]), scored, max_new_tokens=9, timeout_s=30.0)
    assert found.failed == 1
    assert {name: part.mean for name, part in found.parts.items()} == {"format": 0.5, "steps": 2.0}


def test_a_part_that_only_one_share_has_is_joined_with_holes():
    found = EvalResult.joined([result([[1.0], [1.0]], steps=[[2.0], [4.0]]), result([[0.0]], format=[[1.0]])])
    assert found.parts["steps"].mean == 3.0 and found.parts["format"].mean == 1.0
    assert found.part_scores["steps"].shape == found.scores.shape == (3, 1)


async def test_an_engine_is_not_asked_for_everything_at_once():
    engine = Echo(slots=4)
    done: list[int] = []
    await evaluate(
        engine, prompts(*[[1]] * 30), total, samples=2, max_new_tokens=9, timeout_s=30.0, progress=done.append
    )
    assert engine.most_at_once == 4, "twice what it runs at a time"
    assert done == list(range(1, 31))


async def test_slow_scoring_does_not_keep_the_engine_waiting():
    engine, scoring, all_generated = Echo(slots=1), 0, asyncio.Event()

    async def score(prompt: Prompt, response: Response) -> float:
        nonlocal scoring
        scoring += 1
        if scoring == 8:
            all_generated.set()
        await all_generated.wait()
        return 1.0

    async with asyncio.timeout(20):
        found = await evaluate(
            engine, prompts(*[[1]] * 8), score, max_new_tokens=9, timeout_s=30.0, keep_responses=True
        )
    assert found.mean == 1.0 and len(found.responses) == 8


# -- scoring ----------------------------------------------------------------------------------------------------------


def held_out(function: Any, *, timeout_s: float = 20.0, workers: int = 2, executor: Any = "thread") -> HeldOutScore:
    return HeldOutScore(
        load_reward(function),
        decode=lambda tokens: " ".join(map(str, tokens)),
        workers=workers,
        executor=executor,
        timeout_s=timeout_s,
    )


def first_number(response: str, row: dict[str, Any]) -> float:
    return float(response.split()[0])


async def first_number_async(response: str, row: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return first_number(response, row)


@pytest.mark.parametrize("function", [first_number, first_number_async])
async def test_a_reward_function_scores_held_out_responses(function: Any):
    async with held_out(function) as score:
        found = await evaluate(Echo(), prompts([1, 1], [3, 1]), score, max_new_tokens=9, timeout_s=30.0)
    assert found.scores.tolist() == [[1.0], [3.0]]


async def test_a_reward_function_that_hangs_costs_its_own_score(caplog: pytest.LogCaptureFixture):
    release = threading.Event()

    def hangs(response: str, row: dict[str, Any]) -> float:
        if row["place"] == 0:
            release.wait(20)
        return 1.0

    async def never(response: str, row: dict[str, Any]) -> float:
        while row["place"] == 0:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(over.wait(), 20)
                break
        return 1.0

    over = asyncio.Event()
    for function in (hangs, never):
        async with held_out(function, timeout_s=0.1, workers=1) as score:
            found = await evaluate(Echo(), prompts([1], [1], [1]), score, max_new_tokens=9, timeout_s=30.0)
        assert np.isnan(found.scores[0]).all() and found.scores[1:].tolist() == [[1.0], [1.0]]
    assert caplog.text.count("no score within reward.timeout_s = 0.1 s") == 2
    release.set()
    over.set()


async def test_scoring_takes_no_thread_of_the_loops_own_pool():
    used: set[str] = set()

    def names(response: str, row: dict[str, Any]) -> float:
        used.add(threading.current_thread().name)
        return 1.0

    async with held_out(names) as score:
        await evaluate(Echo(), prompts([1], [2]), score, max_new_tokens=9, timeout_s=30.0)
    assert used == {"freewheel-reward"}


async def test_a_process_scores_held_out_responses_where_training_has_one():
    async with held_out("freewheel.data.tasks.word_problems:TASK.score", workers=1, executor="process") as score:
        row = {"place": 0, "reward_model": {"ground_truth": "3"}}
        found = await evaluate(
            Echo(), [Prompt(tokens=np.array([1], np.int32), row=row)], score, max_new_tokens=9, timeout_s=30.0
        )
    assert found.failed == 0
