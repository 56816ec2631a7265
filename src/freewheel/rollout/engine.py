"""The protocol between a `Rollouter` (or an evaluation) and an inference engine.

    generate(request) ──▶ (2, Response), (0, Response), …      each sample once, when it has ended
    update_weights(v, …)   takes effect between two tokens; requests in flight are kept

docs/engines.md compares the engines that ship with freewheel and shows how to add one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from freewheel.data.group import Array, Finish, Response

if TYPE_CHECKING:
    from freewheel.sync.weights import AnyWeights


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one response is sampled."""

    max_new_tokens: int
    seed: int
    """64 bits. The seed and the token's index determine each draw, whatever else is in the batch."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these tokens, which is part of the response."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """n responses to one prompt. The engine reads the prompt once."""

    id: str
    prompt: Array
    """int32, at least one token."""
    samples: tuple[SamplingParams, ...]
    timeout_s: float
    """Longest time without a new token while a sample has a slot. Pauses don't count."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the start, and the current state."""

    version: int
    running: int
    """Samples that hold a slot."""
    waiting: int
    """Samples that wait for a slot."""
    slots: int
    prompt_tokens: int
    generated_tokens: int
    """Includes the tokens of samples in flight."""
    busy_s: float
    """Time spent computing."""
    paused: bool


class EngineError(Exception):
    """The engine cannot continue, or could not finish a request. Nothing of that request may be used."""


class EngineDied(EngineError):
    """The engine and everything in flight are gone. Start another one in its place."""


class GenerationTimeout(EngineError):
    """A sample got no new token for `timeout_s`."""


class GenerationAborted(EngineError):
    """`abort` was called for the request, or the engine was closed."""


class PromptRefused(EngineError, ValueError):
    """The engine can never generate from this prompt: too long, empty, or with a token that the model does not know."""


class Engine(Protocol):
    """Called from one event loop."""

    @property
    def version(self) -> int:
        """Version of the weights that make the next token."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[tuple[int, Response]]:
        """Yields (index of the sample, its response) when a sample has ended, in any order.

        `logprobs` are at the sample's temperature: a training forward pass gives the same. Where top_p or top_k cut
        the distribution, `native` gives them before the cut and `vllm` after it. Raises a kind of `EngineError`.
        Closing the iterator early aborts the request.
        """

    async def pause(self) -> None:
        """Returns when no token is being made. Requests in flight stay, and their timeouts stand still."""

    async def resume(self) -> None: ...

    async def update_weights(self, version: int, weights: AnyWeights, *, verify: bool) -> int | None:
        """Replaces the parameters between two tokens and keeps what is in flight. Returns the content sum of the
        parameters that the engine then holds if `verify`, else None.

        `weights` are complete: a missing, unknown or misshapen parameter is an error. After a failure either nothing
        has changed, or the engine generates nothing until an update succeeds.
        """

    async def abort(self, request_id: str) -> None:
        """Makes the request's `generate` raise GenerationAborted. Ignores unknown ids: the request may just have
        ended."""

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Frees everything. Requests in flight raise GenerationAborted."""


def generated_response(tokens: Array, logprobs: Array, versions: Array, finish: Finish) -> Response:
    """A response in which the policy made every token."""
    mask = np.ones(len(tokens), np.uint8)
    return Response(tokens=tokens, logprobs=logprobs, versions=versions, mask=mask, finish=finish)


async def generate_all(engine: Engine, request: GenerationRequest) -> list[Response]:
    """All samples of a request, in order."""
    found: dict[int, Response] = {}
    async for index, response in engine.generate(request):
        found[index] = response
    return [found[index] for index in range(len(request.samples))]
