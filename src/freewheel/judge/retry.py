"""When to send a request again: back-off with full jitter, and a budget that keeps an outage from multiplying load.

    failed ─▶ back-off ─▶ budget (retries only) ─▶ ready

`backoff_s` and `RetryBudget` are pure; the caller passes the clock and the random number. `RetryQueue` holds the
engine's requests meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freewheel.judge.engine import InFlightRequest

BASE_BACKOFF_S = 0.25
"""Upper end of the first back-off: short next to a judge's call, long enough for a brief fault to pass."""
MAX_BACKOFF_S = 8.0
"""Longest back-off where the server names none. A batch's deadline leaves room for many."""
RETRY_AFTER_SPREAD = 0.25
"""Retry-After × U(1, 1.25), so that all who got the same second do not come back at the same instant."""


def backoff_s(failures: int, retry_after_s: float | None, random: Callable[[], float]) -> float:
    """How long a request waits after its `failures`-th failure. `random` gives U(0, 1)."""
    if retry_after_s is not None and retry_after_s > 0:
        return retry_after_s * (1 + RETRY_AFTER_SPREAD * random())
    return min(MAX_BACKOFF_S, BASE_BACKOFF_S * 2.0 ** min(failures - 1, 16)) * random()


class RetryBudget:
    """Retries are at most a share of the replies, plus a trickle, so an outage does not multiply load.

    A retry without budget is not refused. It waits for the next reply to pay for it.
    """

    SHARE = 0.5
    """Tokens earned per reply. A judge that fails a fifth of its calls needs 0.25, one that fails a third 0.5."""
    TRICKLE_PER_S = 2.0
    """Retries that are always allowed: enough to notice that a dead judge is back."""
    LEAST_CAPACITY = 100.0
    """Least number of tokens that can be saved. A whole window may fail at once, so it grows with the limit."""

    def __init__(self) -> None:
        self._capacity = self._tokens = self.LEAST_CAPACITY
        self._at: float | None = None

    def allow(self, limit: int) -> None:
        """The concurrency limit grew: one burst of that many failures can be paid for."""
        if limit > self._capacity:
            self._tokens += limit - self._capacity
            self._capacity = float(limit)

    def earn(self) -> None:
        """A reply arrived."""
        self._tokens = min(self._capacity, self._tokens + self.SHARE)

    def take(self, now: float) -> bool:
        """Take the token for one retry; False if there is none."""
        if self._at is not None:
            self._tokens = min(self._capacity, self._tokens + max(0.0, now - self._at) * self.TRICKLE_PER_S)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class RetryQueue:
    """Holds requests during their back-off, and retries until the budget pays for them, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ready: Callable[[InFlightRequest], None]) -> None:
        self._loop = loop
        self._ready = ready
        self._budget = RetryBudget()
        self._backing_off = 0
        self._unpaid: deque[InFlightRequest] = deque()

    def __len__(self) -> int:
        return self._backing_off + len(self._unpaid)

    def add(self, inflight: InFlightRequest, wait_s: float) -> None:
        self._backing_off += 1
        self._loop.call_later(wait_s, self._end_backoff, inflight)

    def earn(self, now: float) -> None:
        """A reply arrived, which pays for part of a retry."""
        self._budget.earn()
        if self._unpaid:
            self._pay(now)

    def tick(self, now: float, limit: int) -> None:
        """Time passed, which also pays for retries. `limit` is the current concurrency limit."""
        self._budget.allow(limit)
        self._pay(now)

    def _end_backoff(self, inflight: InFlightRequest) -> None:
        self._backing_off -= 1
        if inflight.done:
            return
        if inflight.is_retry:
            self._unpaid.append(inflight)
            self._pay(time.monotonic())
        else:
            self._ready(inflight)

    def _pay(self, now: float) -> None:
        while self._unpaid:
            if self._unpaid[0].done:
                self._unpaid.popleft()
            elif self._budget.take(now):
                inflight = self._unpaid.popleft()
                inflight.is_retry = False
                self._ready(inflight)
            else:
                return
