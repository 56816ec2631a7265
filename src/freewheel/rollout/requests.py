"""What the engines share: the check of each request, and the requests in flight.

caller ── RequestTracker.serve ◀── InFlightRequest.put ◀── the engine: a response, or the error that ends the request
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from freewheel.data.group import Response
from freewheel.rollout.engine import EngineError, GenerationAborted, GenerationRequest, PromptRefused, SamplingParams

Event = tuple[int, Response] | EngineError
"""An ended sample (its index and response), or the end of the whole request."""


class InFlightRequest:
    """Its methods run in the event loop. `holds_slot` is written by the native engine's thread."""

    __slots__ = ("_inbox", "holds_slot", "loop", "missing", "over", "request")

    def __init__(self, request: GenerationRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.loop = loop
        self.missing = len(request.samples)
        """Responses that the caller has not got."""
        self.over = False
        """Nobody waits for it any more."""
        self.holds_slot = False
        """It should get a token soon."""
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        self._inbox.put_nowait(event)

    async def get(self) -> tuple[int, Response]:
        """The next response. Raises an error that was `put` in place of one."""
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
        check_request(
            request,
            max_prompt_tokens=self._max_prompt_tokens,
            max_new_tokens=self._max_new_tokens,
            vocabulary=self._vocabulary,
        )
        if request.id in self._requests:
            raise ValueError(f"request {request.id!r} is in flight already: give each request its own id")
        entry = self._requests[request.id] = InFlightRequest(request, asyncio.get_running_loop())
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


def send(events: Sequence[tuple[InFlightRequest, Event]]) -> None:
    """Deliver events from an engine's thread, with one call of the event loop."""

    def deliver() -> None:
        for request, event in events:
            request.put(event)

    if events:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
            events[0][0].loop.call_soon_threadsafe(deliver)


def check_request(request: GenerationRequest, *, max_prompt_tokens: int, max_new_tokens: int, vocabulary: int) -> None:
    """Raises `PromptRefused` for an unusable prompt and ValueError for impossible parameters."""
    prompt = request.prompt
    if len(prompt) == 0:
        raise PromptRefused(f"request {request.id!r}: the prompt has no tokens; give at least 1")
    if len(prompt) > max_prompt_tokens:
        raise PromptRefused(
            f"request {request.id!r}: the prompt has {len(prompt)} tokens, max_prompt_tokens = {max_prompt_tokens}"
        )
    lowest, highest = int(prompt.min()), int(prompt.max())
    if lowest < 0 or highest >= vocabulary:
        raise PromptRefused(
            f"request {request.id!r}: the prompt has token {lowest if lowest < 0 else highest}, "
            f"the model knows 0 to {vocabulary - 1}"
        )
    if not request.timeout_s > 0:
        raise ValueError(f"request {request.id!r}: timeout_s = {request.timeout_s}: give a time over 0")
    for params in set(request.samples):
        _check_params(request.id, params, max_new_tokens)


def _check_params(request_id: str, params: SamplingParams, max_new_tokens: int) -> None:
    problem = None
    if not 1 <= params.max_new_tokens <= max_new_tokens:
        problem = f"max_new_tokens = {params.max_new_tokens}: the engine makes 1 to {max_new_tokens}"
    elif not (params.temperature >= 0 and math.isfinite(params.temperature)):
        problem = f"temperature = {params.temperature}: give 0 (greedy) or more"
    elif not 0 < params.top_p <= 1:
        problem = f"top_p = {params.top_p}: give a number over 0, 1 at most"
    elif params.top_k < 0:
        problem = f"top_k = {params.top_k}: give 0 (all tokens) or more"
    if problem:
        raise ValueError(f"request {request_id!r}: {problem}")
