"""What happens to a request: refused, or let in with a service time and perhaps a fault. No I/O; the clock is given.

    request ──▶ outage? ──▶ burst? ──▶ key, body, model, quota, length ──▶ in flight? ──▶ rates? ──▶ Plan
                  ▼           ▼                       ▼                        └──────┬──────┘
        Outage, Refusal 503   Refusal 429             Refusal 4xx                     ▼ Refusal 429

Times are the judge's own seconds; only what is written into a header is wall time.
"""

from __future__ import annotations

from email.utils import formatdate
from enum import StrEnum
from hashlib import blake2b
from math import ceil, exp, log
from statistics import NormalDist

import msgspec

from freewheel.judge.testing.profile import SHARES, JudgeProfile, Windows
from freewheel.judge.testing.rates import Headers, RateLimits
from freewheel.judge.testing.replies import Ask, Content, error_body

STANDARD_NORMAL = NormalDist()

TWO_TO_53 = 2**53
"""Number of equally spaced doubles in [0, 1): 53 bits of a hash make one of them."""

RATE_MESSAGE = "Rate limit reached for {what}. Please try again in {wait_s:.3f}s."
CROWDED_MESSAGE = "Too many requests are in flight."
BARE_MESSAGE = "Too many requests."


class Fault(StrEnum):
    """What goes wrong with a request that was let in."""

    ERROR = "error"
    DISCONNECT = "disconnect"
    TRUNCATE = "truncate"
    GARBAGE = "garbage"
    WRONG_TYPE = "wrong_type"
    HANG = "hang"
    DRIP = "drip"
    UNPARSEABLE = "unparseable"
    EMPTY = "empty"


class Plan(msgspec.Struct, frozen=True):
    """A request that was let in."""

    service_s: float
    """Time it needs when the judge is not crowded. A fault shows after it; a hang needs no service."""
    fault: Fault | None = None


class Refusal(msgspec.Struct, frozen=True):
    """A request that was not."""

    status: int
    body: bytes
    headers: Headers = ()


class Outage(msgspec.Struct, frozen=True):
    """A request that meets no judge: its connection is to be aborted."""


Decision = Plan | Refusal | Outage


def draws(seed: int, content: Content, attempt: int) -> tuple[float, float]:
    """Two independent numbers in [0, 1), the same for the same seed, content and attempt on every machine."""
    bits = blake2b(content.digest + f"{seed}:{attempt}".encode(), digest_size=16).digest()
    first, second = (int.from_bytes(half, "big") >> 11 for half in (bits[:8], bits[8:]))
    return first / TWO_TO_53, second / TWO_TO_53


def plan_for(profile: JudgeProfile, content: Content, attempt: int, faults_so_far: int = 0) -> Plan:
    """What happens to the attempt-th admitted request (from 0) for this content."""
    luck, pace = draws(profile.seed, content, attempt)
    fault = None
    if profile.faults_per_content is None or faults_so_far < profile.faults_per_content:
        fault = _fault(profile, luck)
    return Plan(_service_s(profile, pace), fault)


def _fault(profile: JudgeProfile, luck: float) -> Fault | None:
    edge = 0.0
    for fault, share in zip(Fault, SHARES, strict=True):
        edge += getattr(profile, share)
        if luck < edge:
            return fault
    return None


def _service_s(profile: JudgeProfile, pace: float) -> float:
    if profile.latency == "fixed" or profile.latency_s == 0.0:
        return profile.latency_s
    location = log(profile.latency_s) - profile.sigma**2 / 2  # so that the mean, not the median, is latency_s
    # The quantile of 0 is minus infinity; half a step above it is not.
    return exp(location + profile.sigma * STANDARD_NORMAL.inv_cdf(pace or 0.5 / TWO_TO_53))


def inside(windows: Windows, elapsed_s: float) -> bool:
    """Whether one of the (start_s, duration_s) windows holds this moment; its end is outside."""
    return any(start <= elapsed_s < start + duration for start, duration in windows)


class Behaviour:
    """Decides about each request in turn. It knows the profile, the rates so far and when the schedule began."""

    def __init__(self, profile: JudgeProfile) -> None:
        self.profile = profile
        self._rates = RateLimits(profile)
        self._began: float | None = None

    def begin(self, now: float) -> bool:
        """Start the schedule's clock; True the first time. The first chat request does it."""
        if self._began is not None:
            return False
        self._began = now
        return True

    def in_outage(self, now: float) -> bool:
        """Whether the judge is away; never before the first request."""
        return self._began is not None and inside(self.profile.outages, now - self._began)

    def decide(
        self,
        now: float,
        ask: Ask | None,
        content: Content,
        *,
        authorization: str | None,
        tokens: int,
        in_flight: int,
        attempt: int,
        faults_so_far: int = 0,
        wall_time: float = 0.0,
    ) -> Decision:
        """The fate of one request. `ask` is None if its body could not be read as a chat request."""
        profile = self.profile
        if self._began is not None:
            if self.in_outage(now):
                if profile.outage_kind == "refuse":
                    return Outage()
                return Refusal(503, error_body("The judge is away.", "server_error"))
            if inside(profile.throttle_bursts, now - self._began):
                return self._too_many(BARE_MESSAGE, wall_time)
        refusal = self._unacceptable(ask, authorization)
        if refusal is not None:
            return refusal
        if profile.reject_above is not None and in_flight >= profile.reject_above:
            return self._too_many(CROWDED_MESSAGE, wall_time, code="concurrency_limit_exceeded")
        over = self._rates.admit(now, tokens) if self._rates else None
        if over is not None:
            what, wait_s = over
            if not profile.label_rate:
                return self._too_many(BARE_MESSAGE, wall_time)
            wait_s *= profile.time_scale
            message = RATE_MESSAGE.format(what=what, wait_s=wait_s)
            headers = self._retry_after(wait_s, wall_time) + self.rate_headers(now)
            return Refusal(429, error_body(message, what, "rate_limit_exceeded"), headers)
        return plan_for(profile, content, attempt, faults_so_far)

    def rate_headers(self, now: float) -> Headers:
        """What a reply says about the rates; nothing if they are unlabelled or there are none."""
        return self._rates.headers(now) if self._rates and self.profile.label_rate else ()

    def _unacceptable(self, ask: Ask | None, authorization: str | None) -> Refusal | None:
        """What no retry of this very request could change."""
        profile = self.profile
        if profile.api_key is not None and authorization != f"Bearer {profile.api_key}":
            return Refusal(401, error_body("Incorrect API key provided.", "invalid_request_error", "invalid_api_key"))
        if ask is None:
            return Refusal(400, error_body("The body is not a chat completion request.", "invalid_request_error"))
        if profile.model is not None and ask.model != profile.model:
            message = f"The model `{ask.model}` does not exist or you do not have access to it."
            return Refusal(404, error_body(message, "invalid_request_error", "model_not_found"))
        if profile.insufficient_quota:
            message = "You exceeded your current quota, please check your plan and billing details."
            return Refusal(429, error_body(message, "insufficient_quota", "insufficient_quota"))
        if profile.max_prompt_chars is not None and ask.prompt_chars > profile.max_prompt_chars:
            message = f"This model's maximum context length is {profile.max_prompt_chars} characters."
            return Refusal(400, error_body(message, "invalid_request_error", "context_length_exceeded"))
        return None

    def _too_many(self, message: str, wall_time: float, code: str | None = None) -> Refusal:
        wait_s = self.profile.retry_after_s
        headers = () if wait_s is None else self._retry_after(wait_s * self.profile.time_scale, wall_time)
        return Refusal(429, error_body(message, "too_many_requests", code), headers)

    def _retry_after(self, wait_s: float, wall_time: float) -> Headers:
        """The header for a wait in wall seconds, rounded up to a millisecond or, as a date, to a second."""
        if self.profile.retry_after_s is None:
            return ()
        if self.profile.retry_after_style == "date":
            return (("Retry-After", formatdate(ceil(wall_time + wait_s), usegmt=True)),)
        return (("Retry-After", f"{ceil(wait_s * 1000) / 1000:g}"),)
