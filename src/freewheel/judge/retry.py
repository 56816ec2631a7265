"""When to ask again: back-off with full jitter, a budget that an outage cannot multiply, and patience for one call.

Pure arithmetic; the engine brings the clock and the dice.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freewheel.judge.engine import Flight


BASE_BACKOFF_S = 0.25
"""First back-off's upper end: short beside a judge's call, long enough for a blip to pass."""
MAX_BACKOFF_S = 8.0
"""Longest back-off without a word from the server: within a batch's deadline there is room for many."""
RETRY_AFTER_SPREAD = 0.25
"""Retry-After × U(1, 1.25): all who were told the same second do not come back at the same instant."""


def backoff_s(failures: int, retry_after_s: float | None, random: Callable[[], float]) -> float:
    """How long request number `failures`' next attempt waits; `random` gives U(0, 1)."""
    if retry_after_s is not None and retry_after_s > 0:
        return retry_after_s * (1 + RETRY_AFTER_SPREAD * random())
    return min(MAX_BACKOFF_S, BASE_BACKOFF_S * 2.0 ** min(failures - 1, 16)) * random()


class RetryBudget:
    """Retries may be at most a share of the replies, plus a trickle: an outage does not multiply load.

    A retry without budget waits for the next reply to pay for it; it is not refused.
    """

    SHARE = 0.5
    """Tokens earned by each reply. A judge that fails a fifth of its calls needs 0.25, one that fails a third 0.5."""
    TRICKLE_PER_S = 2.0
    """Retries that are always allowed: enough to notice that a dead judge is back."""
    LEAST_CAPACITY = 100.0
    """Tokens that may be saved up, at least. A whole window in flight may fail at once, so it grows with the limit."""

    def __init__(self) -> None:
        self._capacity = self._tokens = self.LEAST_CAPACITY
        self._at: float | None = None

    def allow(self, limit: int) -> None:
        """The limit moved: one burst of as many failures can be paid for."""
        if limit > self._capacity:
            self._tokens += limit - self._capacity
            self._capacity = float(limit)

    def earn(self) -> None:
        """A reply came."""
        self._tokens = min(self._capacity, self._tokens + self.SHARE)

    def take(self, now: float) -> bool:
        """Takes one retry's token; False if there is none."""
        if self._at is not None:
            self._tokens = min(self._capacity, self._tokens + max(0.0, now - self._at) * self.TRICKLE_PER_S)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


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
