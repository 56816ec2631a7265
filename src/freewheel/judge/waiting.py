"""Requests that wait for something other than a slot: to be sent again, or for a judge that does not answer.

failed ─▶ back-off ─▶ budget (retries only) ─▶ ready
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from freewheel.judge.flight import Flight
from freewheel.judge.lane import Lane
from freewheel.judge.outcome import REASONS
from freewheel.judge.retry import RetryBudget
from freewheel.judge.verdict import Reason

log = logging.getLogger("freewheel.judge")


class RetryLine:
    """Holds flights through their back-off, and those that failed until the budget pays for the next try, in turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ready: Callable[[Flight], None]) -> None:
        self._loop = loop
        self._ready = ready
        self._budget = RetryBudget()
        self._backing_off = 0
        self._unpaid: deque[Flight] = deque()

    def __len__(self) -> int:
        return self._backing_off + len(self._unpaid)

    def add(self, flight: Flight, wait_s: float) -> None:
        self._backing_off += 1
        self._loop.call_later(wait_s, self._back_off_over, flight)

    def replied(self, now: float) -> None:
        """A reply came: it pays for part of a retry."""
        self._budget.earn()
        if self._unpaid:
            self._pay(now)

    def passed(self, now: float, limit: int) -> None:
        """Time passed: the trickle pays, too."""
        self._budget.allow(limit)
        self._pay(now)

    def _back_off_over(self, flight: Flight) -> None:
        self._backing_off -= 1
        if flight.done:
            return
        if flight.is_retry:
            self._unpaid.append(flight)
            self._pay(time.monotonic())
        else:
            self._ready(flight)

    def _pay(self, now: float) -> None:
        while self._unpaid:
            if self._unpaid[0].done:
                self._unpaid.popleft()
            elif self._budget.take(now):
                flight = self._unpaid.popleft()
                flight.is_retry = False
                self._ready(flight)
            else:
                return


class OutageWatch:
    """Since when no endpoint answers, and which requests have waited long enough for one that does."""

    def __init__(self, lanes: Sequence[Lane], patience_s: float) -> None:
        self._lanes = lanes
        self._patience_s = patience_s
        self.down_since: float | None = None

    def look(self, now: float, detail: str) -> None:
        """After a call ended; `detail` is what went wrong with it."""
        down = all(not lane.works for lane in self._lanes) and any(lane.halted is None for lane in self._lanes)
        if down and self.down_since is None:
            self.down_since = now
            log.warning("the judge does not answer (%s); requests wait while one at a time probes it", detail)
        elif not down and self.down_since is not None:
            log.info("the judge answers again after %.1f s", now - self.down_since)
            self.down_since = None

    def given_up(self, now: float, queued: Iterable[Flight]) -> Iterator[tuple[Flight, Reason, str]]:
        """What no endpoint will take: all are halted, or none answered for as long as this request may wait."""
        halts = [lane.halted for lane in self._lanes if lane.halted is not None]
        if len(halts) == len(self._lanes):
            for flight in queued:
                yield flight, REASONS[halts[0].kind], halts[0].detail
        elif self.down_since is not None:
            flights = list(queued)
            last = next((flight.last for flight in flights if flight.last), "")
            detail = f"no endpoint answered for {now - self.down_since:.0f} s: {last}"
            for flight in flights:
                if now - max(self.down_since, flight.queued_at) > self._patience_s:
                    yield flight, Reason.UNAVAILABLE, detail
