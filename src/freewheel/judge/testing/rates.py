"""Rate limits per minute, as the public APIs have them: a bucket for requests, one for tokens, and their headers."""

from __future__ import annotations

from math import ceil, floor

from freewheel.judge.testing.profile import JudgeProfile

MINUTE_S = 60.0

Headers = tuple[tuple[str, str], ...]


class Bucket:
    """Holds at most `per_minute * window_s / 60`, starts full, refills continuously."""

    def __init__(self, per_minute: float, window_s: float) -> None:
        self._per_s = per_minute / MINUTE_S
        # A bucket that cannot hold one request would never let one through.
        self.capacity = max(1.0, self._per_s * window_s)
        self._level = self.capacity
        self._at: float | None = None

    def level(self, now: float) -> float:
        """What is left at `now`."""
        if self._at is not None:
            self._level = min(self.capacity, self._level + max(0.0, now - self._at) * self._per_s)
        self._at = now
        return self._level

    def wait_s(self, now: float, amount: float) -> float:
        """Time until `amount` is there; what exceeds the capacity only has to wait until the bucket is full."""
        return max(0.0, min(amount, self.capacity) - self.level(now)) / self._per_s

    def take(self, now: float, amount: float) -> None:
        self._level = self.level(now) - min(amount, self.capacity)

    def full_in_s(self, now: float) -> float:
        """Time until nothing is missing any more."""
        return (self.capacity - self.level(now)) / self._per_s


class RateLimits:
    """The profile's two limits together: a request passes both or takes from neither."""

    def __init__(self, profile: JudgeProfile) -> None:
        self._scale = profile.time_scale
        self._limits: list[tuple[str, float, Bucket]] = []
        for what, per_minute in (("requests", profile.requests_per_minute), ("tokens", profile.tokens_per_minute)):
            if per_minute is not None:
                self._limits.append((what, per_minute, Bucket(per_minute, profile.rate_window_s)))

    def __bool__(self) -> bool:
        return bool(self._limits)

    def admit(self, now: float, tokens: int) -> tuple[str, float] | None:
        """None if the request may pass, and is then charged; else what is over its limit, and for how long."""
        amounts = {"requests": 1.0, "tokens": float(tokens)}
        for what, _, bucket in self._limits:
            wait_s = bucket.wait_s(now, amounts[what])
            if wait_s > 0.0:
                return what, wait_s
        for what, _, bucket in self._limits:
            bucket.take(now, amounts[what])
        return None

    def headers(self, now: float) -> Headers:
        """`x-ratelimit-limit-*`, `-remaining-*` and `-reset-*`, in the public APIs' notation and in wall time."""
        lines: list[tuple[str, str]] = []
        for what, per_minute, bucket in self._limits:
            lines += (
                (f"x-ratelimit-limit-{what}", f"{per_minute:g}"),
                (f"x-ratelimit-remaining-{what}", str(floor(bucket.level(now)))),
                (f"x-ratelimit-reset-{what}", duration(bucket.full_in_s(now) * self._scale)),
            )
        return tuple(lines)


def duration(seconds: float) -> str:
    """`6m0s`, `1.5s`, `20ms`: how the public APIs write a duration. Rounded up to a millisecond."""
    millis = ceil(seconds * 1000)
    if millis < 1000:
        return f"{millis}ms"
    minutes, millis = divmod(millis, 60_000)
    rest = f"{millis / 1000:g}s"
    return f"{minutes}m{rest}" if minutes else rest
