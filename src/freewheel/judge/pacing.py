"""When a request may be sent: budgets of requests and tokens per minute, and the back-off after a failure.

The concurrency limit says how many requests may be in flight. A judge may also count requests or tokens per minute.
Lowering the concurrency for that would be wrong: the number in flight is fine, only the pace is too high. So the pacer
limits the pace separately. The engine calls it before a request is sent and after it ends. It is pure: the caller
passes the time.

    ready_at ──▶ sent ──▶ settled     corrects the token bucket by the real usage
                    ├──▶ rejected     a 429 for the rate: a short pause, then the accepted pace, slowly rising
                    └──▶ observed     x-ratelimit-* headers: a bucket that binds only when little is left

With nothing configured and nothing learned, each call is a few attribute checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NamedTuple

MINUTE_S = 60.0
_BURST_S = 1.0
"""A bucket holds one second of its rate, so no minute exceeds the budget by more than 1/60."""
_SCARCE_SHARE = 0.2
"""A budget learned from headers binds once less than this share is left. Before that there is nothing to ration."""
_LEAST_RESET_S = 0.05
"""A nearer reset is ignored: it is over before the next request arrives."""
_MOST_RESET_S = 60.0
"""A learned budget never delays a single request longer than this, because headers can be wrong."""
_PAUSE_S = 0.5
"""Pause after a 429 for the rate without Retry-After: half of the shortest window that judges use."""
MOST_PAUSE_S = 2.0
"""Longest pause, even if Retry-After is longer. Retry-After names the end of a window, but the pace alone keeps later
requests within the limit."""
_PACE_SHARE = 0.98
"""Share of the accepted rate to continue with: slightly below it, so that the judge's own bucket recovers."""
_PACE_GROWTH_PER_RTT = 0.05
"""Rise of the pace per round trip, to find out whether a rate limit was lifted."""
_PACE_FORGOTTEN = 3.0
"""When the pace has grown to this multiple of the refused pace, the rate limit no longer exists, and the pace is
dropped."""
_RATE_WINDOW_S = 8.0
"""The accepted rate is measured over a time between half of this and all of it."""
_LEAST_RATE_WINDOW_S = 1.0
"""The accepted rate is never measured over a shorter time: the first burst that a judge accepts is not a rate."""
_LEAST_PACE_PER_S = 0.2
"""The pace never falls below one request in five seconds, so a judge that refuses everything is still asked."""
BASE_BACKOFF_S = 0.25
"""Upper end of the first back-off: short next to a judge's call, long enough for a brief fault to pass."""
MAX_BACKOFF_S = 8.0
"""Longest back-off if the server names none. A batch's deadline leaves room for many."""
RETRY_AFTER_SPREAD = 0.25
"""Retry-After × U(1, 1.25), so that requests that got the same Retry-After do not return at the same instant."""
_EPOCH_SECONDS_FROM = 1e9
"""A plain number of at least this is a date (seconds since 1970), not a duration of thirty years."""
_EPOCH_MILLISECONDS_FROM = 1e11
"""A plain number of at least this is a date in milliseconds since 1970."""

_UNIT_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|us|µs|ns|d|h|m|s)\s*")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?")


def backoff_s(failures: int, retry_after_s: float | None, random: Callable[[], float]) -> float:
    """How long a request waits after its `failures`-th failure. `random` gives U(0, 1)."""
    if retry_after_s is not None and retry_after_s > 0:
        return retry_after_s * (1 + RETRY_AFTER_SPREAD * random())
    return min(MAX_BACKOFF_S, BASE_BACKOFF_S * 2.0 ** min(failures - 1, 16)) * random()


def parse_duration_s(text: str, wall_now: float) -> float | None:
    """Return the seconds from `wall_now` (seconds since 1970) that `text` means, or None if it cannot be read.

    It may be "20ms", "6m0s", "12", an HTTP date, or seconds or milliseconds since 1970. A time in the past gives 0.0.
    """
    text = text.strip().lower()
    seconds = 0.0
    end = 0
    if _NUMBER.fullmatch(text):
        seconds, end = float(text), len(text)
        if seconds >= _EPOCH_MILLISECONDS_FROM:
            seconds = seconds / 1000.0 - wall_now
        elif seconds >= _EPOCH_SECONDS_FROM:
            seconds -= wall_now
    while part := _PART.match(text, end):
        seconds += float(part[1]) * _UNIT_S[part[2]]
        end = part.end()
    if not end or end < len(text):
        try:
            seconds = parsedate_to_datetime(text).replace(tzinfo=UTC).timestamp() - wall_now  # HTTP dates are in GMT
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _amount(text: str | None) -> float | None:
    if text is None or not _NUMBER.fullmatch(text := text.strip().lower()):
        return None
    value = float(text)
    return value if math.isfinite(value) and value >= 0.0 else None


class HeaderBudget(NamedTuple):
    """The values of one family of `x-ratelimit-*` headers. A missing or unreadable value is None."""

    limit: float | None = None
    remaining: float | None = None
    reset_s: float | None = None


class RateHeaders(NamedTuple):
    """A reply's `x-ratelimit-*` headers."""

    requests: HeaderBudget = HeaderBudget()
    tokens: HeaderBudget = HeaderBudget()


def read_rate_headers(headers: Mapping[str, str], wall_now: float) -> RateHeaders | None:
    """Read a reply's headers (a case-insensitive mapping). Returns None, quickly, if there are no such headers."""
    requests = _read_budget(headers, "-requests", wall_now) or _read_budget(headers, "", wall_now)
    tokens = _read_budget(headers, "-tokens", wall_now)
    if requests is None and tokens is None:
        return None
    return RateHeaders(requests or HeaderBudget(), tokens or HeaderBudget())


def _read_budget(headers: Mapping[str, str], suffix: str, wall_now: float) -> HeaderBudget | None:
    limit, remaining = headers.get("x-ratelimit-limit" + suffix), headers.get("x-ratelimit-remaining" + suffix)
    if limit is None or remaining is None:
        return None
    reset_s = parse_duration_s(headers.get("x-ratelimit-reset" + suffix, ""), wall_now)
    return HeaderBudget(_amount(limit), _amount(remaining), reset_s)


class Bucket:
    """Fills at `rate_per_s` up to `capacity`. An amount above the capacity may be taken from a full bucket; the level
    is then negative."""

    def __init__(self, rate_per_s: float, capacity: float, level: float, at: float) -> None:
        self.rate_per_s = rate_per_s
        self.capacity = capacity
        self.level = level
        self.at = at

    def refill(self, now: float) -> None:
        if now > self.at:
            self.level = min(self.capacity, self.level + (now - self.at) * self.rate_per_s)
            self.at = now

    def ready_at(self, now: float, amount: float) -> float:
        self.refill(now)
        missing = min(amount, self.capacity) - self.level
        return now if missing <= 0.0 else now + missing / self.rate_per_s


def _make_bucket(per_minute: float | None) -> Bucket | None:
    if per_minute is None:
        return None
    rate_per_s = per_minute / MINUTE_S
    capacity = max(1.0, rate_per_s * _BURST_S)
    return Bucket(rate_per_s, capacity, capacity, -math.inf)


def _scarce_bucket(now: float, known: Bucket | None, reported: HeaderBudget) -> Bucket | None:
    """Return the bucket that `reported` describes, or None while plenty is left. `known` is the previous bucket.

    The budget is full again after `reset_s`, so the refill rate is the used amount divided by that time. That is right
    for budgets of a second, a minute or a day. For a fixed window it may be too fast; then a refusal causes a pause.
    """
    limit, remaining, reset_s = reported
    if limit is None or remaining is None or limit < 1.0 or remaining >= limit * _SCARCE_SHARE:
        return None
    if reset_s is None:
        reset_s = MINUTE_S
    if reset_s < _LEAST_RESET_S:
        return None
    if known is not None:  # a reply that arrives late must not restore budget
        known.refill(now)
        remaining = min(remaining, known.level)
    rate_per_s = max((limit - remaining) / reset_s, 1.0 / _MOST_RESET_S)
    return Bucket(rate_per_s, max(1.0, limit * _SCARCE_SHARE), remaining, now)


class Pacer:
    """Never sends faster than the configured or learned budgets allow, and never makes a request wait forever."""

    def __init__(self, *, requests_per_minute: float | None = None, tokens_per_minute: float | None = None) -> None:
        self._requests = _make_bucket(requests_per_minute)
        self._tokens = _make_bucket(tokens_per_minute)
        self._header_requests: Bucket | None = None
        self._header_tokens: Bucket | None = None
        self._pace_per_s = 0.0  # 0: no pace
        self._refused_pace_per_s = 0.0
        self._paced_at = -math.inf
        self._next_at = -math.inf
        self._paused_until = -math.inf
        self._window_accepted = 0
        self._window_start = -math.inf
        self._window_before = 0
        self._window_before_s = 0.0

    @property
    def _is_free(self) -> bool:
        return not (self._requests or self._tokens or self._header_requests or self._header_tokens or self._pace_per_s)

    def ready_at(self, now: float, tokens: int) -> float:
        """Return when a request of about `tokens` tokens may be sent: `now` means at once; at a later time, ask
        again."""
        if self._is_free:
            return now
        at = max(now, self._paused_until, self._next_at)
        for bucket, amount in self._buckets(tokens):
            at = max(at, bucket.ready_at(now, amount))
        return at

    def _buckets(self, tokens: int) -> list[tuple[Bucket, float]]:
        """Return the budgets that apply now, each with the amount that one request takes from it."""
        amounts = (
            (self._requests, 1.0),
            (self._header_requests, 1.0),
            (self._tokens, tokens),
            (self._header_tokens, tokens),
        )
        return [(bucket, amount) for bucket, amount in amounts if bucket is not None]

    def sent(self, now: float, tokens: int) -> None:
        """A request of about `tokens` tokens is sent now."""
        self._window_accepted += 1
        if self._window_start == -math.inf:
            self._window_start = now
        if self._is_free:
            return
        if self._pace_per_s:
            self._next_at = max(self._next_at, now) + 1.0 / self._pace_per_s
        for bucket, amount in self._buckets(tokens):
            bucket.refill(now)
            bucket.level -= amount

    def settled(self, now: float, estimated_tokens: int, used_tokens: int, rtt_s: float) -> None:
        """A reply arrived that used `used_tokens` and took `rtt_s`."""
        if now - self._window_start > _RATE_WINDOW_S / 2.0:
            self._roll_window(now)
        if self._is_free:
            return
        if self._tokens is not None:
            self._tokens.level += estimated_tokens - used_tokens
        if self._pace_per_s:
            self._raise_pace(now, rtt_s)

    def rejected(self, now: float, retry_after_s: float | None) -> None:
        """Handle a 429 for the rate: pause, then continue at the accepted pace."""
        self._window_accepted = max(0, self._window_accepted - 1)
        if retry_after_s is None or not math.isfinite(retry_after_s):
            retry_after_s = _PAUSE_S
        if now < self._paused_until:  # part of the same burst
            return
        self._paused_until = now + min(MOST_PAUSE_S, max(0.0, retry_after_s))
        pace = max(_LEAST_PACE_PER_S, self._accepted_per_s(now) * _PACE_SHARE)
        self._pace_per_s = self._refused_pace_per_s = min(pace, self._pace_per_s) if self._pace_per_s else pace
        self._paced_at = self._next_at = self._paused_until

    def observed(self, now: float, headers: RateHeaders) -> None:
        """A reply had these headers."""
        self._header_requests = _scarce_bucket(now, self._header_requests, headers.requests)
        self._header_tokens = _scarce_bucket(now, self._header_tokens, headers.tokens)

    def _accepted_per_s(self, now: float) -> float:
        elapsed_s = now - self._window_start + self._window_before_s
        accepted = self._window_accepted + self._window_before
        return accepted / max(elapsed_s, _LEAST_RATE_WINDOW_S)

    def _roll_window(self, now: float) -> None:
        elapsed_s = now - self._window_start
        is_fresh = elapsed_s <= _RATE_WINDOW_S
        self._window_before = self._window_accepted if is_fresh else 0
        self._window_before_s = elapsed_s if is_fresh else 0.0
        self._window_accepted = 0
        self._window_start = now

    def _raise_pace(self, now: float, rtt_s: float) -> None:
        if now <= self._paced_at or rtt_s <= 0.0 or self._next_at < now - rtt_s:
            return  # if the pace was not fully used, the reply says nothing about the limit
        growth = _PACE_GROWTH_PER_RTT * min(1.0, (now - self._paced_at) / rtt_s)
        self._pace_per_s *= 1.0 + growth
        self._paced_at = now
        if self._pace_per_s > _PACE_FORGOTTEN * self._refused_pace_per_s:
            self._pace_per_s = 0.0
