"""What makes a scene of async_vs_sync.py hard: a long tail of lengths, a slow judge, and one core for each side.
Configurations name the classes here.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freewheel.data.group import Prompt, Response, Ticket
from freewheel.data.tasks.word_problems import TASK
from freewheel.rollout.engine import SamplingParams, generated_response
from freewheel.rollout.generation import Sampling
from freewheel.rollout.rollouter import Rollouter
from freewheel.trainer.trainer import FullyAsyncTrainer

CORES = sorted(os.sched_getaffinity(0))
GENERATES, TRAINS = {CORES[0]}, {CORES[-1]}
TAIL_SHARE = 0.05
TAIL_TOKENS = 100
"""One response in twenty is six times as long as the others."""
JUDGE_S = (0.5, 1.5)


@dataclass(frozen=True, kw_only=True)
class TailSampling(Sampling):
    """Generates some responses far beyond their end. The rest of the pipeline does not see that part."""

    def params(self, ordinal: int) -> tuple[SamplingParams, ...]:
        return tuple(
            replace(params, stop_token_ids=(), max_new_tokens=TAIL_TOKENS)
            if _uniform("tail", ordinal, index) < TAIL_SHARE
            else params
            for index, params in enumerate(super().params(ordinal))
        )


def bind(cores: Set[int]) -> None:
    """Bind all threads of this process, and those they start, to a core."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


class BoundTrainer(FullyAsyncTrainer):
    def __init__(self, **kwargs: Any) -> None:
        bind(TRAINS)
        super().__init__(**kwargs)


class BoundRollouter(Rollouter):
    def __init__(self, **kwargs: Any) -> None:
        bind(GENERATES)
        super().__init__(**kwargs)


class TailRollouter(BoundRollouter):
    """Generates with `TailSampling` and cuts each response at its first end-of-sequence token."""

    def __init__(self, *, sampling: Sampling, **kwargs: Any) -> None:
        super().__init__(sampling=TailSampling(**vars(replace(sampling, max_new_tokens=TASK.max_new_tokens))), **kwargs)

    async def _generate(self, ticket: Ticket, prompt: Prompt) -> AsyncGenerator[tuple[int, Response], None]:
        async for index, response in super()._generate(ticket, prompt):
            yield index, self._cut(response)

    def _cut(self, response: Response) -> Response:
        tokens = response.tokens[: TASK.max_new_tokens].tolist()
        ends = [place for place, token in enumerate(tokens) if token in self.sampling.stop_token_ids]
        part = slice(ends[0] + 1 if ends else len(tokens))
        return generated_response(
            response.tokens[part], response.logprobs[part], response.versions[part], "stop" if ends else "length"
        )


async def judged(response: str, row: Mapping[str, Any], finish: str = "stop") -> float:
    """Return the task's own score after 0.5 to 1.5 s."""
    low, high = JUDGE_S
    await asyncio.sleep(low + (high - low) * _uniform("judge", response, row["extra_info"]["question"]))
    return TASK.score(response, row, finish=finish).value  # type: ignore[arg-type]


def _uniform(*what: object) -> float:
    """A number that is the same for the same input in every mode."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
