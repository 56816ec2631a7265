"""How the mock judge behaves: one typed description, the only source of its defaults.

Every duration here is in the judge's own seconds; `time_scale` says how long such a second lasts on the wall.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Literal

import msgspec

from freewheel.errors import ConfigError

ReplyStyle = Literal["bare", "bold", "labelled", "json", "think", "chinese", "mixed"]
Windows = tuple[tuple[float, float], ...]

SHARES = (
    "error_share",
    "disconnect_share",
    "truncate_share",
    "garbage_share",
    "wrong_type_share",
    "hang_share",
    "drip_share",
    "unparseable_share",
    "empty_share",
)
"""The faults, in the order in which they divide the unit interval: moving one would change every seeded plan."""

ROUNDING = 1e-9
"""Shares such as 0.1 + 0.2 + 0.7 do not add up to exactly 1 in binary."""

LOWEST_ERROR, HIGHEST_ERROR = 400, 599
"""The statuses that say "error" in HTTP."""


class JudgeProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the mock judge does with the requests it gets. The default answers everything, at once and rightly."""

    seed: int = 0
    """Latencies and faults are drawn from (seed, content, attempt): the order of arrival changes nothing. Only
    requests that were let in are attempts."""

    time_scale: float = 1.0
    """Wall seconds per second of this profile, in headers too: 0.1 rehearses ten times faster."""

    latency: Literal["fixed", "lognormal"] = "fixed"
    """Whether each request takes `latency_s`, or a lognormal time with that mean."""
    latency_s: float = 0.0
    """Mean time that a request takes when the judge is not crowded."""
    sigma: float = 0.5
    """Spread of the lognormal: the standard deviation of the time's logarithm."""

    knee: float | None = None
    """Throughput saturates here: with n in service, each goes on at the rate min(1, knee / n). None: never.
    Hanging and dripping requests are in flight, but take no service."""
    reject_above: int | None = None
    """A request that finds this many in flight gets a 429 at once. None: all are let in."""
    retry_after_s: float | None = 1.0
    """`Retry-After` of a 429. A labelled rate limit says the exact wait instead. None: the header is never sent."""
    retry_after_style: Literal["seconds", "date"] = "seconds"
    """`Retry-After` as a number (with decimals where needed) or as an HTTP date, rounded up to a second."""

    requests_per_minute: float | None = None
    """Requests beyond this rate get a 429."""
    tokens_per_minute: float | None = None
    """The same for tokens: those of the prompt and of the reply, as `usage` reports them."""
    rate_window_s: float = 60.0
    """A rate's bucket holds what it allows in this time, is full at first, and refills continuously."""
    label_rate: bool = True
    """Whether a rate limit says so, by `x-ratelimit-*` headers and by its message, or is a bare 429."""

    error_share: float = 0.0
    """Share of requests that end with `error_status`."""
    error_status: int = 500
    """Status of those errors."""
    disconnect_share: float = 0.0
    """Share whose connection is closed before any reply."""
    truncate_share: float = 0.0
    """Share whose body is cut in the middle, although Content-Length promised all of it."""
    garbage_share: float = 0.0
    """Share that gets 200, application/json and a body that is not JSON."""
    wrong_type_share: float = 0.0
    """Share that gets 200 and an HTML page."""
    hang_share: float = 0.0
    """Share that is never answered; it counts as in flight until the client goes away."""
    drip_share: float = 0.0
    """Share whose right answer comes a few bytes at a time, over `drip_s`."""
    drip_s: float = 5.0
    """Duration of a dripping answer."""
    unparseable_share: float = 0.0
    """Share that gets a valid completion without a score in it."""
    empty_share: float = 0.0
    """Share that gets no choices, or a choice whose content is null (by content)."""
    faults_per_content: int | None = None
    """After this many faults a content is answered rightly: 1 makes the first retry succeed. None: no such end."""

    outages: Windows = ()
    """(start_s, duration_s) pairs, counted from the first chat request after the start or a reset."""
    outage_kind: Literal["refuse", "503"] = "refuse"
    """`refuse` aborts every open and new connection during an outage; `503` answers with that status."""
    throttle_bursts: Windows = ()
    """(start_s, duration_s) pairs, counted likewise, in which every request gets a bare 429."""

    api_key: str | None = None
    """If set, a request without `Authorization: Bearer <api_key>` gets a 401."""
    model: str | None = None
    """If set, a request for another model gets a 404 (`model_not_found`)."""
    insufficient_quota: bool = False
    """Every request gets a 429 with the code `insufficient_quota`."""
    max_prompt_chars: int | None = None
    """A prompt with more characters gets a 400 (`context_length_exceeded`)."""

    score_low: int = 1
    """Lowest score."""
    score_high: int = 10
    """Highest score."""
    reply_style: ReplyStyle = "bare"
    """How the score is worded; `mixed` chooses by content."""
    scores: dict[str, str] = {}
    """Replies dictated by a test: the first key that occurs in the user message decides, its value is the reply."""

    keep_requests: int = 0
    """How many of the latest chat requests to keep, with headers and body."""
    keep_texts: bool = True
    """Whether counts by content hold the content's text too, or only its key (for very long runs)."""

    def __post_init__(self) -> None:
        for name in ("outages", "throttle_bursts"):
            msgspec.structs.force_setattr(self, name, _windows(name, getattr(self, name)))
        for name in SHARES:
            share = getattr(self, name)
            if not 0.0 <= share <= 1.0:
                raise ConfigError(name, share, "a share lies between 0 and 1")
        total = sum(getattr(self, name) for name in SHARES)
        if total > 1.0 + ROUNDING:
            raise ConfigError("shares", total, "the fault shares must not add up to more than 1")
        for name in ("latency_s", "sigma", "drip_s"):
            _at_least(name, getattr(self, name), 0.0)
        for name in ("time_scale", "rate_window_s"):
            _positive(name, getattr(self, name))
        for name in ("knee", "requests_per_minute", "tokens_per_minute"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in ("reject_above", "max_prompt_chars", "retry_after_s", "faults_per_content"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 0)
        _at_least("keep_requests", self.keep_requests, 0)
        if not LOWEST_ERROR <= self.error_status <= HIGHEST_ERROR:
            raise ConfigError("error_status", self.error_status, "an error's status lies between 400 and 599")
        if self.score_low > self.score_high:
            raise ConfigError("score_low", self.score_low, f"must not exceed score_high = {self.score_high}")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(name, getattr(self, name), f"choose one of {', '.join(allowed)}")


CHOICES = {
    "latency": ("fixed", "lognormal"),
    "retry_after_style": ("seconds", "date"),
    "outage_kind": ("refuse", "503"),
    "reply_style": ("bare", "bold", "labelled", "json", "think", "chinese", "mixed"),
}
"""The words each choice allows; the annotations say the same to a type checker and to the JSON decoder."""


def _windows(name: str, value: Iterable[Iterable[float]]) -> Windows:
    pairs: list[tuple[float, float]] = []
    for item in value:
        pair = tuple(float(number) for number in item)
        if len(pair) != 2 or not all(isfinite(number) and number >= 0 for number in pair):
            raise ConfigError(name, item, "give pairs (start_s, duration_s), none of them negative")
        pairs.append((pair[0], pair[1]))
    return tuple(sorted(pairs))


def _at_least(name: str, value: float, low: float) -> None:
    if not (isfinite(value) and value >= low):
        raise ConfigError(name, value, f"give a number of at least {low:g}")


def _positive(name: str, value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise ConfigError(name, value, "give a number above 0")
