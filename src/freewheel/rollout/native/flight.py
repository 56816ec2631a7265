"""A request under way, seen from the event loop: what the engine's thread sends it, and who waits for that."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from freewheel.data.group import Response
from freewheel.rollout.engine import EngineError, GenerationRequest

Event = tuple[int, Response] | EngineError


class Flight:
    """The inbox belongs to the event loop; `holds_slot` is written by the engine's thread."""

    __slots__ = ("_inbox", "_waiter", "holds_slot", "loop", "over", "request")

    def __init__(self, request: GenerationRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.loop = loop
        self.over = False
        """Nobody listens any more."""
        self.holds_slot = False
        """A token is due."""
        self._inbox: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        self._inbox.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> tuple[int, Response]:
        """The next response; raises what was sent instead of one."""
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


def deliver(events: Sequence[tuple[Flight, Event]]) -> None:
    """Runs in the event loop: one call a step, whatever the step has made."""
    for flight, event in events:
        flight.put(event)


def send(events: Sequence[tuple[Flight, Event]]) -> None:
    """From the engine's thread to the event loops of those who wait."""
    loops = {flight.loop for flight, _ in events}
    for loop in loops:
        part = events if len(loops) == 1 else [(flight, event) for flight, event in events if flight.loop is loop]
        try:
            loop.call_soon_threadsafe(deliver, part)
        except RuntimeError:  # the loop is closed: nobody waits there
            continue
