"""When to ask again: back-off with full jitter, a budget that an outage cannot multiply, and patience for one call.

Pure arithmetic; the engine brings the clock and the dice.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from freewheel.judge.latency import LatencyHistogram

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


class AttemptPatience:
    """How long one call may take: three times the 99th percentile of what was seen, within the configured bound.

    A request that timed out gets twice as long the next time. When nothing but time-outs comes back, all calls do: the
    judge has become slower, and giving up early would only add to its load.
    """

    FACTOR = 3.0
    """Times p99: with a lognormal latency about one call in a million is cut off in vain."""
    FLOOR_S = 1.0
    """Never less: below it, a garbage collection or a TLS handshake looks like a hang."""
    SAMPLES_NEEDED = 64
    """Before that many latencies a 99th percentile is a guess."""
    IN_A_ROW = 8
    """Time-outs of calls that were sent after the last one that was answered: hangs of 5% of the calls do that once in
    10^10, a judge that became slower does it at once."""
    MOST_DOUBLINGS = 2
    """For one request: four times as long as usual, or else the last of many hangs holds up its whole batch."""
    REFRESH_EVERY = 32
    """Latencies between two looks at the percentile, which costs more than the rest."""

    def __init__(self, bound_s: float, latencies: LatencyHistogram) -> None:
        self.bound_s = bound_s
        self._latencies = latencies
        self._usual_s = bound_s
        self._stretch = 1.0
        self._in_a_row = 0
        self._answered_sent_at = -math.inf
        self._until_refresh = self.SAMPLES_NEEDED

    def allow_s(self, timeouts_before: int) -> float:
        return float(min(self.bound_s, self._usual_s * self._stretch * 2 ** min(timeouts_before, self.MOST_DOUBLINGS)))

    def answered(self, sent_at: float) -> None:
        if sent_at > self._answered_sent_at:
            self._answered_sent_at = sent_at
            self._in_a_row = 0
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            self._until_refresh = self.REFRESH_EVERY
            self._usual_s = max(self.FLOOR_S, self.FACTOR * self._latencies.quantile(0.99))
            self._stretch = 1.0

    def timed_out(self, sent_at: float) -> None:
        if sent_at <= self._answered_sent_at:
            return  # later calls were answered: this one hung
        self._in_a_row += 1
        if self._in_a_row >= self.IN_A_ROW:
            self._in_a_row = 0
            self._stretch = min(self._stretch * 2, self.bound_s / self._usual_s)
