"""Generate the responses to a prompt and start scoring each one as it ends. Rollouter and evaluation share this path.

    Sampling.request ─▶ engine.generate ─┐
    prompt ─▶ the user's hook ───────────┴─▶ (index, Response) … ─▶ generate_and_score ─┬─▶ score(index, Response)
                                                                                        └─▶ [Response] when all ended

To generate in another way, such as an environment with several turns, write an async iterator of (index, Response) for
`generate_and_score`.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace

from freewheel.data.group import Prompt, Response
from freewheel.rollout.engine import GenerationRequest, SamplingParams


def sample_seed(run_seed: int, ordinal: int, sample: int) -> int:
    """Return the 64-bit seed of one response; the engine adds the token's index. It depends only on the run's seed, the
    prompt and the sample, so the order of work does not change the responses."""
    text = f"{run_seed}/{ordinal}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingParams):
    """How the `n` responses to a prompt are sampled. `seed` is the run's."""

    n: int

    def params(self, ordinal: int) -> tuple[SamplingParams, ...]:
        return tuple(replace(self, n=1, seed=sample_seed(self.seed, ordinal, index)) for index in range(self.n))

    def request(self, name: str, ordinal: int, prompt: Prompt, *, timeout_s: float) -> GenerationRequest:
        return GenerationRequest(id=name, prompt=prompt.tokens, samples=self.params(ordinal), timeout_s=timeout_s)


async def generate_and_score(
    source: AsyncIterator[tuple[int, Response]], n: int, score: Callable[[int, Response], object]
) -> list[Response]:
    """Return the `n` responses of `source` in the order of their indexes.

    `score` starts the scoring of a response as soon as it has ended. It must not wait. If generation fails, responses
    that ended before have been passed to `score` already.
    """
    found: dict[int, Response] = {}
    try:
        async for index, response in source:
            found[index] = response
            score(index, response)
    finally:
        if isinstance(source, AsyncGenerator):
            await source.aclose()  # aborts a request whose scoring raised
    return [found[index] for index in range(n)]
