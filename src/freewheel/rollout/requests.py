"""The requests in flight of an engine: each is checked first, and its responses reach the caller one by one.

caller ── RequestTracker.serve ◀── InFlightRequest.put ◀── the engine: a response, or the error that ends the request
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from freewheel.data.group import Response
from freewheel.rollout.engine import EngineError, GenerationAborted, GenerationRequest, PromptRefused

Event = tuple[int, Response] | EngineError
"""An ended sample (its index and response), or the end of the whole request."""


class InFlightRequest:
    """Its methods run in the event loop. `holds_slot` is written by the native engine's thread."""

    __slots__ = ("_inbox", "holds_slot", "loop", "missing", "over", "request")

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.missing = len(request.samples)
        """Responses that the caller has not got."""
        self.over = False
        """The caller no longer waits."""
        self.holds_slot = False
        """It should get a token soon."""
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        self._inbox.put_nowait(event)

    async def get(self) -> tuple[int, Response]:
        """Return the next response. Raises an error that was `put` in its place."""
        event = await self._inbox.get()
        if isinstance(event, EngineError):
            raise event
        self.missing -= 1
        return event


class RequestTracker:
    """The requests in flight of one engine, by id. Its methods run in the event loop."""

    def __init__(self, *, max_prompt_tokens: int, max_new_tokens: int, vocabulary: int) -> None:
        self._max_prompt_tokens = max_prompt_tokens
        self._max_new_tokens = max_new_tokens
        self._vocabulary = vocabulary
        self._requests: dict[str, InFlightRequest] = {}

    def __iter__(self) -> Iterator[InFlightRequest]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    async def serve(
        self,
        request: GenerationRequest,
        start: Callable[[InFlightRequest], None],
        stop: Callable[[InFlightRequest], None],
    ) -> AsyncIterator[tuple[int, Response]]:
        """Check a request, and yield its responses as the engine puts them.

        `start` hands it to the engine. `stop` is called at its end, after the last response or before (`missing`).
        """
        self._check(request)
        entry = self._requests[request.id] = InFlightRequest(request)
        try:
            start(entry)
            while entry.missing:
                yield await entry.get()
        finally:
            entry.over = True
            del self._requests[request.id]
            stop(entry)

    def abort(self, request_id: str) -> None:
        """Make the caller of a request raise GenerationAborted. Ignores unknown ids."""
        entry = self._requests.get(request_id)
        if entry is not None:
            entry.put(GenerationAborted(f"request {request_id!r} was aborted"))

    def _check(self, request: GenerationRequest) -> None:
        """Raise `PromptRefused` for an unusable prompt and ValueError for impossible parameters."""
        prompt, name = request.prompt, f"request {request.id!r}"
        if request.id in self._requests:
            raise ValueError(f"{name} is in flight already: give each request its own id")
        if not 1 <= len(prompt) <= self._max_prompt_tokens:
            raise PromptRefused(f"{name}: the prompt has {len(prompt)} tokens: give 1 to {self._max_prompt_tokens}")
        for token in (int(prompt.min()), int(prompt.max())):
            if not 0 <= token < self._vocabulary:
                most = self._vocabulary - 1
                raise PromptRefused(f"{name}: the prompt has token {token}, the model knows 0 to {most}")
        if not request.timeout_s > 0:
            raise ValueError(f"{name}: timeout_s = {request.timeout_s}: give a time over 0")
        for params in request.samples:
            for key, is_possible, remedy in (
                ("max_new_tokens", 1 <= params.max_new_tokens <= self._max_new_tokens, f"1 to {self._max_new_tokens}"),
                ("temperature", 0 <= params.temperature < math.inf, "0 (greedy) or more"),
                ("top_p", 0 < params.top_p <= 1, "a number over 0, 1 at most"),
                ("top_k", params.top_k >= 0, "0 (all tokens) or more"),
            ):
                if not is_possible:
                    raise ValueError(f"{name}: {key} = {getattr(params, key)}: give {remedy}")


def send(events: Sequence[tuple[InFlightRequest, Event]]) -> None:
    """Deliver events from an engine's thread, with one call of the event loop."""

    def deliver() -> None:
        for request, event in events:
            request.put(event)

    if events:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the callers are gone
            events[0][0].loop.call_soon_threadsafe(deliver)
