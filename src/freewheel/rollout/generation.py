"""Generate the responses to a prompt and start scoring each one as it ends. Rollouter and evaluation share this path.

    Sampling.request ─▶ engine.generate ─┐
    prompt ─▶ the user's hook ───────────┴─▶ (index, Response) … ─▶ generate_and_score ─┬─▶ score(index, Response)
                                                                                        └─▶ [Response] when all ended

A new way to generate, such as an environment with several turns, is one more source of (index, Response).
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from freewheel.data.group import Prompt, Response, Ticket
from freewheel.errors import DataError
from freewheel.rollout.engine import GenerationRequest, GenerationTimeout, SamplingParams

HOOK_TIMEOUTS = 20
"""A hook may take this many times `async_training.generation_timeout` (30 s: ten minutes) for one group. That key
limits the time without a new token, and a hook has several turns with tools between them."""


def sample_seed(run_seed: int, ordinal: int, sample: int) -> int:
    """Return the 64-bit seed of one response; the engine adds the token's index. It depends on what is sampled and not
    on when, so a run samples the same responses in any order of its work."""
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


async def generate_by_hook(
    hook: Callable[[Any], Any],
    ticket: Ticket,
    prompt: Prompt,
    *,
    sampling: Sampling,
    version: int,
    generation_timeout_s: float,
) -> AsyncGenerator[tuple[int, Response], None]:
    """Yield the responses of a user's `_custom_generation_logic`, which gets the prompt n times as a `DataProto`.

    `version`: assigned to tokens that the hook does not label.
    """
    from freewheel.data.padded import from_data_proto, prompt_to_data_proto  # imports torch

    batch = prompt_to_data_proto(prompt, sampling.n, ticket.ordinal)
    limit = asyncio.timeout(HOOK_TIMEOUTS * generation_timeout_s)
    try:
        async with limit:
            result = await _call_hook(hook, batch)
    except TimeoutError as error:
        if not limit.expired():  # raised by the hook, perhaps by one of its tools
            raise
        raise GenerationTimeout(
            f"_custom_generation_logic took longer than {HOOK_TIMEOUTS} times async_training.generation_timeout = "
            f"{generation_timeout_s:g} s"
        ) from error
    responses = from_data_proto(result, ticket, prompt, version, stop_token_ids=sampling.stop_token_ids)
    if len(responses) != sampling.n:
        raise DataError(f"_custom_generation_logic gave {len(responses)} rows: give rollout.n = {sampling.n}")
    for index, response in enumerate(responses):
        yield index, response


async def _call_hook(hook: Callable[[Any], Any], batch: Any) -> Any:
    """Call a plain function in a thread: while it computes, weights arrive and other groups continue."""
    result = hook(batch) if inspect.iscoroutinefunction(hook) else await asyncio.to_thread(hook, batch)
    return await result if inspect.isawaitable(result) else result
