"""What the engines share: a check of each request, and its inbox while it is in flight.

event loop: generate ── InFlightRequest.get ◀── put ── the engine: a response, or the error that ended the request
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence

from freewheel.data.group import Response
from freewheel.rollout.engine import EngineError, GenerationRequest, PromptRefused, SamplingParams

Event = tuple[int, Response] | EngineError
"""An ended sample (its index and response), or the end of the whole request."""


class InFlightRequest:
    """Its methods run in the event loop. `holds_slot` is written by the native engine's thread."""

    __slots__ = ("_inbox", "_waiter", "holds_slot", "loop", "over", "request")

    def __init__(self, request: GenerationRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.loop = loop
        self.over = False
        """Nobody waits for it any more."""
        self.holds_slot = False
        """It should get a token soon."""
        self._inbox: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        self._inbox.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> tuple[int, Response]:
        """The next response. Raises an error that was `put` in place of one."""
        while not self._inbox:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event = self._inbox.popleft()
        if isinstance(event, EngineError):
            raise event
        return event


def send(events: Sequence[tuple[InFlightRequest, Event]]) -> None:
    """Deliver events from an engine's thread, with one call per event loop."""
    loops = {request.loop for request, _ in events}
    for loop in loops:
        part = events if len(loops) == 1 else [(request, event) for request, event in events if request.loop is loop]
        try:
            loop.call_soon_threadsafe(_deliver, part)
        except RuntimeError:  # the loop is closed: nobody waits there
            continue


def _deliver(events: Sequence[tuple[InFlightRequest, Event]]) -> None:
    for request, event in events:
        request.put(event)


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
