"""The protocol between a `Rollouter` (or an evaluation) and an inference engine, and the requests that are in flight.

    generate(request) ──▶ (2, Response), (0, Response), …      each sample once, when it has ended
    update_weights(v, …)   takes effect between two tokens; requests in flight are kept

    caller ◀── GenerationTracker.serve ◀── InFlightGeneration.put ◀── the engine: a response, or an error

docs/engines.md compares the engines that ship with freewheel and shows how to add one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
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
    """Longest time in which the engine makes no token while this request has a slot. Weight updates don't count."""


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


class EngineError(Exception):
    """The engine cannot continue, or could not finish a request. Nothing of that request may be used."""


class EngineDied(EngineError):
    """The engine and everything in flight are gone. Start another one in its place."""


class GenerationTimeout(EngineError):
    """The engine made no token for `timeout_s`."""


class GenerationAborted(EngineError):
    """The engine was closed."""


class PromptRefused(EngineError, ValueError):
    """The engine can never generate from this prompt: too long, empty, or with a token that the model does not know."""


class Engine(Protocol):
    """Called from one event loop."""

    @property
    def version(self) -> int:
        """Version of the weights that make the next token."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[tuple[int, Response]]:
        """Yield (index of the sample, its response) when a sample has ended, in any order.

        `logprobs` are at the sample's temperature: a training forward pass gives the same. Where top_p or top_k cut
        the distribution, `native` gives them before the cut and `vllm` after it. Raises a kind of `EngineError`.
        Closing the iterator early aborts the request.
        """

    async def update_weights(self, version: int, weights: AnyWeights, *, verify: bool) -> int | None:
        """Replace the parameters between two tokens and keep what is in flight. Called for one version at a time.
        Returns the content sum of the parameters that the engine then holds if `verify`, else None.

        `weights` are complete: a missing, unknown or misshapen parameter is an error. After a failure either nothing
        has changed, or the engine generates nothing until an update succeeds.
        """

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Free everything. Requests in flight raise GenerationAborted."""


def generated_response(tokens: Array, logprobs: Array, versions: Array, finish: Finish) -> Response:
    """A response in which the policy made every token."""
    mask = np.ones(len(tokens), np.uint8)
    return Response(tokens=tokens, logprobs=logprobs, versions=versions, mask=mask, finish=finish)


async def generate_all(engine: Engine, request: GenerationRequest) -> list[Response]:
    """Return all samples of a request, in order."""
    found: dict[int, Response] = {}
    async for index, response in engine.generate(request):
        found[index] = response
    return [found[index] for index in range(len(request.samples))]


# -- requests in flight -----------------------------------------------------------------------------------------------

WATCH_S = 0.5
"""How often requests are checked for an engine that hangs. Well below any useful timeout."""

GenerationEvent = tuple[int, Response] | EngineError
"""An ended sample (its index and response), or the end of the whole request."""


@dataclass(eq=False, slots=True)
class InFlightGeneration:
    """A request whose caller waits for responses. Belongs to the event loop."""

    request: GenerationRequest
    missing: int
    """Responses that the caller has not received."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _inbox: asyncio.Queue[GenerationEvent] = field(default_factory=asyncio.Queue)

    def put(self, event: GenerationEvent) -> None:
        self._inbox.put_nowait(event)

    async def get(self) -> tuple[int, Response]:
        """Return the next response. Raises an error that was `put` in its place."""
        event = await self._inbox.get()
        if isinstance(event, EngineError):
            raise event
        self.missing -= 1
        return event


@dataclass(eq=False, kw_only=True)
class GenerationTracker:
    """The requests in flight of one engine, by id: it checks, serves and watches them. For one event loop."""

    slots: int
    max_prompt_tokens: int
    max_new_tokens: int
    vocabulary: int
    idle_s: Callable[[], float]
    """Returns how long the engine has made no token although it should."""
    _requests: dict[str, InFlightGeneration] = field(default_factory=dict, init=False)
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[InFlightGeneration]:
        return iter(list(self._requests.values()))

    async def serve(
        self,
        request: GenerationRequest,
        start: Callable[[InFlightGeneration], None],
        stop: Callable[[InFlightGeneration], None],
    ) -> AsyncIterator[tuple[int, Response]]:
        """Check a request, and yield its responses as the engine puts them.

        `start` hands it to the engine. `stop` is called at its end, after the last response or before (`missing`).
        """
        self._check(request)
        entry = self._requests[request.id] = InFlightGeneration(request, missing=len(request.samples))
        try:
            start(entry)
            if self._timer is None:
                self._timer = entry.loop.call_later(WATCH_S, self._watch, entry.loop)
            while entry.missing:
                yield await entry.get()
        finally:
            del self._requests[request.id]
            if self._timer is not None and not self._requests:
                self._timer.cancel()
                self._timer = None
            stop(entry)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """End requests that have waited too long for a token. Runs in the event loop: an engine that hangs cannot
        report it."""
        idle_s = self.idle_s()
        slots_ahead = 0
        for entry in self:  # in the order of arrival, because engines assign slots in that order
            if slots_ahead < self.slots and idle_s > (limit_s := entry.request.timeout_s):
                message = f"request {entry.request.id!r}: no token for {idle_s:.3g} s, timeout_s = {limit_s:g}"
                entry.put(GenerationTimeout(message))
            slots_ahead += entry.missing
        self._timer = loop.call_later(WATCH_S, self._watch, loop)

    def _check(self, request: GenerationRequest) -> None:
        """Raise `PromptRefused` for an unusable prompt and ValueError for impossible parameters."""
        prompt, name = request.prompt, f"request {request.id!r}"
        if request.id in self._requests:
            raise ValueError(f"{name} is in flight already: give each request its own id")
        if not 1 <= len(prompt) <= self.max_prompt_tokens:
            raise PromptRefused(f"{name}: the prompt has {len(prompt)} tokens: give 1 to {self.max_prompt_tokens}")
        for token in (int(prompt.min()), int(prompt.max())):
            if not 0 <= token < self.vocabulary:
                most = self.vocabulary - 1
                raise PromptRefused(f"{name}: the prompt has token {token}, the model knows 0 to {most}")
        for params in request.samples:
            for key, is_possible, remedy in (
                ("max_new_tokens", 1 <= params.max_new_tokens <= self.max_new_tokens, f"1 to {self.max_new_tokens}"),
                ("temperature", 0 <= params.temperature < math.inf, "0 (greedy) or more"),
                ("top_p", 0 < params.top_p <= 1, "a number over 0, 1 at most"),
                ("top_k", params.top_k >= 0, "0 (all tokens) or more"),
            ):
                if not is_possible:
                    raise ValueError(f"{name}: {key} = {getattr(params, key)}: give {remedy}")
