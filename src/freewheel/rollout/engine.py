"""What a `Rollouter` asks of an engine: token ids in; tokens, log-probabilities and versions out, as they come.

    generate(request) ──▶ Chunk(index 2), Chunk(index 0), …      each sample ends with a chunk that has `finish`
    update_weights(v, …): takes effect between two tokens of what is in flight; nothing is thrown away

`native` (freewheel.rollout.native) is one, `vllm` (freewheel.rollout.vllm) another. docs/engines.md compares them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from freewheel.data.group import Array, Finish

if TYPE_CHECKING:
    from freewheel.sync.weights import AnyWeights


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one response is sampled."""

    max_new_tokens: int
    seed: int
    """64 bits. With the token's index it determines each draw, whatever else is in the batch."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """The token that ends a response is part of it."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """n responses to one prompt. The engine reads the prompt once."""

    id: str
    prompt: Array
    """int32, at least one token."""
    samples: tuple[SamplingParams, ...]
    timeout_s: float
    """Longest time without a new token while a sample has a slot, pauses excluded."""
    stream: bool = False
    """Chunks as tokens are made. Off: one chunk a sample, when it ends."""


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sample."""

    index: int
    """Which of the request's samples."""
    tokens: Array
    logprobs: Array
    """At the sample's temperature: what a training forward pass gives. Where top_p or top_k cut the distribution,
    `native` gives them before the cut and `vllm` after it."""
    versions: Array
    finish: Finish | None = None
    """Set in the sample's last chunk."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the start, and the state now."""

    version: int
    running: int
    """Sequences that hold a slot."""
    waiting: int
    """Sequences that wait for one."""
    slots: int
    prompt_tokens: int
    generated_tokens: int
    busy_s: float
    """Time spent computing."""
    paused: bool


class EngineError(Exception):
    """The engine cannot go on, or could not finish a request. Nothing of that request may be used."""


class EngineDied(EngineError):
    """The engine is gone for good, with all that was in flight. Another must be started in its place."""


class GenerationTimeout(EngineError):
    """No new token for `timeout_s`."""


class GenerationAborted(EngineError):
    """`abort` was called for it."""


class PromptRefused(EngineError, ValueError):
    """This prompt can never be generated from: too long, empty, or with a token that the model does not know."""


class Engine(Protocol):
    """Called from one event loop."""

    @property
    def version(self) -> int:
        """Of the weights that make the next token."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Raises `EngineError` (see its kinds). Closing the iterator early aborts the request."""

    async def pause(self) -> None:
        """Returns when no token is being made; what is in flight stays, and its timeout stands still."""

    async def resume(self) -> None: ...

    async def update_weights(self, version: int, weights: AnyWeights, *, verify: bool) -> int | None:
        """Replaces the parameters between two tokens, keeping what is in flight; gives the content sum of what it then
        holds where `verify`, else None.

        `weights` are complete. A missing, unknown or misshapen one is an error. Where it fails nothing changes, or
        nothing is generated until an update succeeds.
        """

    async def abort(self, request_id: str) -> None:
        """Its `generate` raises GenerationAborted. Unknown ids are fine: it may just have ended."""

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Frees everything; requests in flight raise GenerationAborted."""


@dataclass(frozen=True)
class Completion:
    """A sample, whole."""

    tokens: Array
    logprobs: Array
    versions: Array
    finish: Finish


@dataclass
class Collector:
    """Puts a request's chunks together; `add` gives a `Completion` when a sample has ended."""

    parts: dict[int, list[Chunk]] = field(default_factory=dict)

    def add(self, chunk: Chunk) -> Completion | None:
        parts = self.parts.setdefault(chunk.index, [])
        parts.append(chunk)
        if chunk.finish is None:
            return None
        if len(parts) == 1:
            return Completion(chunk.tokens, chunk.logprobs, chunk.versions, chunk.finish)
        return Completion(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.versions for part in parts]),
            chunk.finish,
        )
