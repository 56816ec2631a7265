"""Processor sharing on a running loop: each request waits for its share, one timer stands for all of them."""

from __future__ import annotations

import asyncio
import time
from math import ceil

from freewheel.judge.testing.sharing import ProcessorSharing

NEVER = float("inf")

MILLISECOND_S = 0.001
"""uvloop rounds its timers to this; one that fires early would only have to be set again."""


class SharedService:
    """Turns `ProcessorSharing`'s arithmetic into waiting. Belongs to the loop it is made on."""

    def __init__(self, knee: float | None, time_scale: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._scale = time_scale
        self._sharing = ProcessorSharing(knee)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._stuck: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER
        self._closed = False

    def now(self) -> float:
        """The judge's own time in seconds."""
        return time.monotonic() / self._scale

    async def serve(self, service_s: float) -> None:
        """Wait for `service_s` of the judge's attention. Cancelling gives the share back."""
        ticket = self._sharing.join(self.now(), service_s)
        future = self._waiting[ticket] = self._loop.create_future()
        self._arm()
        try:
            await future
        finally:
            if self._waiting.pop(ticket, None) is not None:
                self._sharing.leave(self.now(), ticket)
                self._arm()

    async def hang(self) -> None:
        """Wait until cancelled."""
        future = self._loop.create_future()
        self._stuck.add(future)
        try:
            await future
        finally:
            self._stuck.discard(future)

    def close(self) -> None:
        """Cancel all who wait."""
        self._closed = True
        self._disarm()
        for future in [*self._waiting.values(), *self._stuck]:
            future.cancel()

    def _arm(self) -> None:
        at = NEVER if self._closed else self._sharing.next_finish()
        if at == self._timer_at:
            return
        self._disarm()
        if at is None or at == NEVER:
            return
        delay_s = ceil(max(0.0, at - self.now()) * self._scale / MILLISECOND_S) * MILLISECOND_S
        self._timer_at = at
        self._timer = self._loop.call_later(delay_s, self._release)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, NEVER

    def _release(self) -> None:
        self._timer, self._timer_at = None, NEVER
        for ticket in self._sharing.finished(self.now()):
            future = self._waiting.pop(ticket, None)
            if future is not None and not future.done():
                future.set_result(None)
        self._arm()
