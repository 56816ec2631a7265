"""Measure a policy on held-out prompts: generate with an engine, score, average.

    prompts ─▶ engine (as many at a time as it has slots for) ─▶ responses ─▶ score ─▶ EvalResult

Called by `freewheel eval` with its own engine, and by rollouters during training. There the weights may change in
between, so a result lists the versions it saw. Responses that could not be generated or scored are left out and
counted; they are never a zero.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from freewheel.data.group import Array, Prompt, Response
from freewheel.judge.verdict import Failed, Verdict
from freewheel.rewards.scoring import rule_value
from freewheel.rollout.engine import Engine, EngineDied, EngineError
from freewheel.rollout.generation import Sampling, generate_and_score
from freewheel.rollout.reward_workers import FunctionRunner

log = logging.getLogger("freewheel.rollout")

AHEAD = 2
"""Prompts requested, in units of what the engine runs at a time: a free slot always finds the next prompt waiting."""

_numbers = itertools.count()
"""Numbers evaluations, so that the requests of two concurrent ones have different names."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over held-out prompts, and how far another draw of prompts may differ from it."""

    mean: float
    """Over all responses; NaN where there is none."""
    error: float
    """Standard error over prompts, because the samples of one prompt are alike. NaN for fewer than two prompts."""


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """The result of an evaluation. Arrays have one row per prompt and one column per sample."""

    scores: Array
    """float64, NaN where generation or scoring failed."""
    truncated: Array
    """bool: cut off at `max_new_tokens`."""
    lengths: Array
    """int64, in tokens; 0 where generation failed."""
    versions: tuple[int, ...]
    """Versions of the weights that made the tokens, ascending."""
    responses: tuple[tuple[Response | None, ...], ...] = ()
    """Empty unless the caller asked for them."""
    named_parts: tuple[tuple[Mapping[str, float], ...], ...] = ()
    """The parts of each response's score, by name."""

    @property
    def reward(self) -> Estimate:
        return _estimate(self.scores)

    @property
    def parts(self) -> dict[str, Estimate]:
        """The parts of the reward by name, each over the responses that have it."""
        found = {}
        for name in sorted({name for row in self.named_parts for one in row for name in one}):
            values = np.array([[one.get(name, math.nan) for one in row] for row in self.named_parts])
            found[name] = _estimate(np.where(np.isfinite(values), values, math.nan))
        return found

    @property
    def mean(self) -> float:
        """Mean over all scored responses; for rewards of 0 and 1, the accuracy. NaN if there is none."""
        return _mean(self.scores)

    @property
    def best(self) -> float:
        """Mean over prompts of their best sample; for rewards of 0 and 1, pass@k."""
        return _mean(np.fmax.reduce(self.scores, axis=1))

    @property
    def per_prompt(self) -> Array:
        """Mean score of each prompt, NaN where none of its responses was scored."""
        return np.array([_mean(row) for row in self.scores])

    @property
    def failed(self) -> int:
        return int(np.isnan(self.scores).sum())

    @property
    def truncated_share(self) -> float:
        """Share of the generated responses."""
        return _mean(self.truncated[self.lengths > 0].astype(np.float64))

    @property
    def mean_tokens(self) -> float:
        return _mean(self.lengths[self.lengths > 0].astype(np.float64))

    @classmethod
    def joined(cls, parts: Sequence[EvalResult]) -> EvalResult:
        """Join the shares of several engines, one after the other."""
        return cls(
            scores=np.concatenate([part.scores for part in parts]),
            truncated=np.concatenate([part.truncated for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            versions=tuple(sorted({version for part in parts for version in part.versions})),
            responses=tuple(itertools.chain.from_iterable(part.responses for part in parts)),
            named_parts=tuple(itertools.chain.from_iterable(part.named_parts for part in parts)),
        )


ScoreResponse = Callable[[Prompt, Response], Awaitable[Verdict]]


def held_out_score(runner: FunctionRunner, decode: Callable[[Array], str]) -> ScoreResponse:
    """Score with the reward function alone. The judge and the length penalty would change the measurement.

    A call that hangs costs only its own score.
    """

    async def score(prompt: Prompt, response: Response) -> Verdict:
        (verdict,) = await runner.score([runner.function.call_for(prompt, decode(response.tokens), response)])
        if isinstance(verdict, Failed):
            log.warning("Evaluation: a response could not be scored: %s", verdict.summary)
        return verdict

    return score


async def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    score: ScoreResponse,
    sampling: Sampling,
    *,
    timeout_s: float,
    ordinals: Sequence[int] | None = None,
    keep_responses: bool = False,
) -> EvalResult:
    """`ordinals`: the numbers of the prompts if these are a share of all; seeds depend on them. Raises `EngineError` if
    the engine failed on every prompt, or died."""
    if not prompts:
        raise ValueError("prompts = []: an evaluation needs at least one")
    numbers = range(len(prompts)) if ordinals is None else ordinals
    gate = asyncio.Semaphore(AHEAD * max(1, engine.stats().slots // sampling.n))
    name = f"eval-{next(_numbers)}"
    found: list[list[Response | None]] = [[None] * sampling.n for _ in prompts]
    verdicts: list[list[Verdict]] = [[Failed("generation")] * sampling.n for _ in prompts]
    errors: list[EngineError] = []

    async def run(row: int) -> None:
        prompt = prompts[row]

        async def score_response(index: int, response: Response) -> None:
            found[row][index] = response
            verdicts[row][index] = await score(prompt, response)

        request = sampling.request(f"{name}/{numbers[row]}", numbers[row], prompt, timeout_s=timeout_s)
        # Scoring holds no slot of the engine: a slow reward function must not make it wait.
        async with asyncio.TaskGroup() as scoring, gate:
            try:
                await generate_and_score(
                    engine.generate(request), sampling.n, lambda *ended: scoring.create_task(score_response(*ended))
                )
            except EngineError as error:
                errors.append(error)

    async with asyncio.TaskGroup() as tasks:
        for row in range(len(prompts)):
            tasks.create_task(run(row))
    if errors:
        log.warning("Evaluation: generation failed for %d of %d prompts: %s", len(errors), len(prompts), errors[0])
        dead = [error for error in errors if isinstance(error, EngineDied)]  # a dead engine fails most prompts
        if dead or len(errors) == len(prompts):
            raise dead[0] if dead else errors[0]
    versions = {
        version for row in found for one in row if one is not None for version in np.unique(one.versions).tolist()
    }
    return EvalResult(
        scores=np.array([[rule_value(one) for one in row] for row in verdicts], np.float64),
        truncated=np.array([[one is not None and one.finish == "length" for one in row] for row in found]),
        lengths=np.array([[0 if one is None else len(one.tokens) for one in row] for row in found], np.int64),
        versions=tuple(sorted(versions)),
        responses=tuple(map(tuple, found)) if keep_responses else (),
        named_parts=tuple(tuple(one.parts for one in row) for row in verdicts),
    )


def _estimate(values: Array) -> Estimate:
    means = np.array([_mean(row) for row in values])
    known = means[~np.isnan(means)]
    error = float(known.std(ddof=1) / math.sqrt(known.size)) if known.size > 1 else math.nan
    return Estimate(mean=_mean(values), error=error)


def _mean(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan
