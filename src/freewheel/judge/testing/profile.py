"""What the mock judge does: its profile, its decision about each request, and its replies. No I/O; the clock is given.

    request ──▶ outage? ──▶ burst? ──▶ key, body, model, quota, length ──▶ in flight? ──▶ rates? ──▶ Plan
                  ▼           ▼                       ▼                        └──────┬──────┘
        Outage, Refusal 503   Refusal 429             Refusal 4xx                     ▼ Refusal 429

`JudgeServer` carries the decisions out. `JudgeProfile` is the only source of the defaults. Times are in the judge's own
seconds: `time_scale` converts them to wall time, and only headers hold wall time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from email.utils import formatdate
from enum import StrEnum
from hashlib import blake2b, sha256
from math import ceil, exp, floor, isfinite, log
from statistics import NormalDist
from typing import Any, Final, Literal

import msgspec

from freewheel.errors import ConfigError
from freewheel.utils.checks import check_choice, check_number, check_share

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
"""In binary, 0.1 + 0.2 + 0.7 is not exactly 1."""

LOWEST_ERROR, HIGHEST_ERROR = 400, 599
"""The error statuses of HTTP."""


class JudgeProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the mock judge treats requests. By default it answers everything correctly and at once."""

    seed: int = 0
    """Latencies and faults are drawn from (seed, content, attempt): the order of arrival changes nothing. Only
    requests that were let in are attempts."""

    time_scale: float = 1.0
    """Wall seconds per second of this profile, in headers too: 0.1 rehearses ten times faster."""

    latency: Literal["fixed", "lognormal"] = "fixed"
    """Each request takes `latency_s`, or a lognormal time with that mean."""
    latency_s: float = 0.0
    """Mean time of a request when the judge is not crowded."""
    sigma: float = 0.5
    """Spread of the lognormal: the standard deviation of the time's logarithm."""

    knee: float | None = None
    """Throughput saturates here: with n in service, each progresses at the rate min(1, knee / n). None: never.
    Hanging and dripping requests are in flight but use no service."""
    reject_above: int | None = None
    """A request that finds this many in flight gets a 429 at once. None: all are let in."""
    retry_after_s: float | None = 1.0
    """`Retry-After` of a 429. A labelled rate limit sends the exact wait instead. None: never send the header."""
    retry_after_style: Literal["seconds", "date"] = "seconds"
    """`Retry-After` as a number (with decimals where needed) or as an HTTP date, rounded up to a second."""

    requests_per_minute: float | None = None
    """Requests beyond this rate get a 429."""
    tokens_per_minute: float | None = None
    """The same for tokens of prompt and reply, as `usage` reports them."""
    rate_window_s: float = 60.0
    """A rate's bucket holds the allowance of this time, starts full, and refills continuously."""
    label_rate: bool = True
    """Whether a rate limit is named in `x-ratelimit-*` headers and the message. False: it is a bare 429."""

    error_share: float = 0.0
    """Share of requests that end with `error_status`."""
    error_status: int = 500
    """Status of those errors."""
    disconnect_share: float = 0.0
    """Share whose connection is closed before any reply."""
    truncate_share: float = 0.0
    """Share whose body is cut in the middle, in spite of its Content-Length."""
    garbage_share: float = 0.0
    """Share that gets 200, application/json and a body that is not JSON."""
    wrong_type_share: float = 0.0
    """Share that gets 200 and an HTML page."""
    hang_share: float = 0.0
    """Share that is never answered; it counts as in flight until the client goes away."""
    drip_share: float = 0.0
    """Share whose correct answer is sent a few bytes at a time, over `drip_s`."""
    drip_s: float = 5.0
    """Duration of a dripping answer."""
    unparseable_share: float = 0.0
    """Share that gets a valid completion without a score in it."""
    empty_share: float = 0.0
    """Share that gets no choices, or a choice whose content is null (by content)."""
    faults_per_content: int | None = None
    """After this many faults a content is answered correctly: 1 makes the first retry succeed. None: never."""

    outages: Windows = ()
    """(start_s, duration_s) pairs, counted from the first chat request after the start or a reset."""
    outage_kind: Literal["refuse", "503"] = "refuse"
    """`refuse` aborts every open and new connection during an outage; `503` answers with that status."""
    throttle_bursts: Windows = ()
    """(start_s, duration_s) pairs, counted in the same way, in which every request gets a bare 429."""

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
    """The form of the score; `mixed` chooses by content."""
    scores: dict[str, str] = {}
    """Replies set by a test: the first key that occurs in the user message selects its value as the reply."""

    keep_requests: int = 0
    """Number of latest chat requests to keep, with headers and body."""
    keep_texts: bool = True
    """Whether counts by content include the text. False: only its key, for very long runs."""

    def __post_init__(self) -> None:
        for name in ("outages", "throttle_bursts"):
            msgspec.structs.force_setattr(self, name, _windows(name, getattr(self, name)))
        for name in SHARES:
            check_share(name, getattr(self, name))
        total = sum(getattr(self, name) for name in SHARES)
        if total > 1.0 + ROUNDING:
            raise ConfigError("shares", total, "the fault shares must not add up to more than 1")
        for name in ("latency_s", "sigma", "drip_s", "keep_requests"):
            check_number(name, getattr(self, name), low=0)
        for name in ("time_scale", "rate_window_s"):
            check_number(name, getattr(self, name), above=0)
        for name in ("knee", "requests_per_minute", "tokens_per_minute"):
            check_number(name, getattr(self, name), above=0, optional=True)
        for name in ("reject_above", "max_prompt_chars", "retry_after_s", "faults_per_content"):
            check_number(name, getattr(self, name), low=0, optional=True)
        if not LOWEST_ERROR <= self.error_status <= HIGHEST_ERROR:
            raise ConfigError("error_status", self.error_status, "an error's status lies between 400 and 599")
        if self.score_low > self.score_high:
            raise ConfigError("score_low", self.score_low, f"must not exceed score_high = {self.score_high}")
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)


CHOICES = {
    "latency": ("fixed", "lognormal"),
    "retry_after_style": ("seconds", "date"),
    "outage_kind": ("refuse", "503"),
    "reply_style": ("bare", "bold", "labelled", "json", "think", "chinese", "mixed"),
}
"""Allowed values. The annotations say the same to a type checker and to the JSON decoder."""


def _windows(name: str, value: Iterable[Iterable[float]]) -> Windows:
    pairs: list[tuple[float, float]] = []
    for item in value:
        pair = tuple(float(number) for number in item)
        if len(pair) != 2 or not all(isfinite(number) and number >= 0 for number in pair):
            raise ConfigError(name, item, "give pairs (start_s, duration_s), none of them negative")
        pairs.append((pair[0], pair[1]))
    return tuple(sorted(pairs))


MINUTE_S = 60.0

Headers = tuple[tuple[str, str], ...]


class Bucket:
    """Holds at most `per_minute * window_s / 60`, starts full, refills continuously."""

    def __init__(self, per_minute: float, window_s: float) -> None:
        self._per_s = per_minute / MINUTE_S
        # A bucket that cannot hold one request would never admit one.
        self.capacity = max(1.0, self._per_s * window_s)
        self._level = self.capacity
        self._at: float | None = None

    def level(self, now: float) -> float:
        """The amount left at `now`."""
        if self._at is not None:
            self._level = min(self.capacity, self._level + max(0.0, now - self._at) * self._per_s)
        self._at = now
        return self._level

    def wait_s(self, now: float, amount: float) -> float:
        """Time until `amount` is available. An amount above the capacity waits until the bucket is full."""
        return max(0.0, min(amount, self.capacity) - self.level(now)) / self._per_s

    def take(self, now: float, amount: float) -> None:
        self._level = self.level(now) - min(amount, self.capacity)

    def full_in_s(self, now: float) -> float:
        """Time until the bucket is full."""
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
        """None if the request may pass, which charges it; else the limit that is exceeded, and for how long."""
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
    """`6m0s`, `1.5s`, `20ms`: a duration as the public APIs write it, rounded up to a millisecond."""
    millis = ceil(seconds * 1000)
    if millis < 1000:
        return f"{millis}ms"
    minutes, millis = divmod(millis, 60_000)
    rest = f"{millis / 1000:g}s"
    return f"{minutes}m{rest}" if minutes else rest


NONCE = re.compile(r"[0-9a-fA-F]{16,}")
"""Hex digits of this length are a request's nonce or hash, not its content."""

CHARS_PER_TOKEN = 4
"""The usual estimate for English; `usage` must only be plausible and repeatable."""

STREAM_PIECES = 4
"""About how many deltas a streamed reply has: more than one, so that a reader must join them."""

UNPARSEABLE_REPLY = "This answer cannot be rated."
GARBAGE_BODY = b"upstream connect error or disconnect/reset before headers"
HTML_BODY = b"<!doctype html><html><body><h1>Sign in to continue</h1></body></html>"

STYLES: Final = ("bare", "bold", "labelled", "json", "think", "chinese")
"""What `mixed` chooses from."""


class Part(msgspec.Struct):
    """A piece of a message whose content is a list."""

    type: str = "text"
    text: str = ""


class Message(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | list[Part] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(msgspec.Struct):
    """`stream_options` of a request."""

    include_usage: bool = False


class Ask(msgspec.Struct):
    """The fields of a chat completion request that matter here. Others are ignored."""

    messages: list[Message]
    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1

    @property
    def user_content(self) -> str:
        """The text of the last user message, which is judged."""
        return next((message.text for message in reversed(self.messages) if message.role == "user"), "")

    @property
    def prompt_chars(self) -> int:
        return sum(len(message.text) for message in self.messages)


class Content(msgspec.Struct, frozen=True):
    """The judged text without its nonce. Requests with equal contents repeat the same question."""

    text: str
    digest: bytes

    @classmethod
    def of(cls, user_content: str) -> Content:
        text = NONCE.sub("", user_content)
        return cls(text, sha256(text.encode("utf-8", "surrogatepass")).digest())

    @property
    def key(self) -> str:
        """The key of the content in the counts."""
        return self.digest.hex()[:32]


def expected_score(user_content: str, low: int = 1, high: int = 10) -> int:
    """The score that the mock judge gives this user message. Nonces are ignored."""
    return _score(Content.of(user_content), low, high)


def _score(content: Content, low: int, high: int) -> int:
    return low + int.from_bytes(content.digest[:8], "big") % (high - low + 1)


def reply_text(profile: JudgeProfile, content: Content) -> str:
    """The text of the judge's reply for this content."""
    for part, reply in profile.scores.items():
        if part in content.text:
            return reply
    mixed = profile.reply_style == "mixed"
    style = STYLES[content.digest[8] % len(STYLES)] if mixed else profile.reply_style
    return worded(_score(content, profile.score_low, profile.score_high), style, profile.score_low, profile.score_high)


def worded(score: int, style: str, low: int, high: int) -> str:
    """Write a score as judges do. `think` names both ends of the scale first, to mislead a careless parser."""
    match style:
        case "bare":
            return f"{score}"
        case "bold":
            return f"The answer is to the point, with small gaps.\n\n**{score}**"
        case "labelled":
            return f"Score: {score}/{high}"
        case "json":
            return f'{{"score": {score}, "reason": "To the point, with small gaps."}}'
        case "think":
            return f"<think>\nAt first sight a {high}; on reflection, maybe a {low}?\n</think>\n{score}"
        case _:
            return f"回答切题，略有不足。评分：{score}分"


def token_count(chars: int) -> int:
    """Tokens in a text of that many characters, at least one."""
    return max(1, chars // CHARS_PER_TOKEN)


def usage(ask: Ask, text: str) -> dict[str, int]:
    """The `usage` object for this question and this reply."""
    prompt, completion = token_count(ask.prompt_chars), token_count(len(text)) * (ask.n or 1)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def completion(
    ask: Ask, content: Content, text: str | None, *, model: str, used: dict[str, int], choices: bool = True
) -> bytes:
    """The body of a whole chat completion."""
    return msgspec.json.encode(
        {
            "id": f"chatcmpl-{content.key}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": text},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
                for index in range((ask.n or 1) if choices else 0)
            ],
            "usage": used,
        }
    )


def stream_events(
    ask: Ask, content: Content, text: str | None, *, model: str, used: dict[str, int], choices: bool = True
) -> list[bytes]:
    """A chat completion as server-sent events: role, deltas, finish, usage if requested, `[DONE]`."""
    head: dict[str, Any] = {
        "id": f"chatcmpl-{content.key}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }

    def event(deltas: Iterable[dict[str, Any]], finish: str | None = None) -> bytes:
        listed = [
            {"index": index, "delta": delta, "finish_reason": finish}
            for delta in deltas
            for index in range((ask.n or 1) if choices else 0)
        ]
        return b"data: " + msgspec.json.encode({**head, "choices": listed}) + b"\n\n"

    words = text or ""
    step = max(1, -(-len(words) // STREAM_PIECES))
    events = [event([{"role": "assistant", "content": ""}])]
    events += [event([{"content": words[at : at + step]}]) for at in range(0, len(words), step)]
    events.append(event([{}], "stop"))
    if ask.stream_options is not None and ask.stream_options.include_usage:
        events.append(b"data: " + msgspec.json.encode({**head, "choices": [], "usage": used}) + b"\n\n")
    events.append(b"data: [DONE]\n\n")
    return events


def error_body(message: str, kind: str, code: str | None = None) -> bytes:
    """An error as the OpenAI API writes it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


STANDARD_NORMAL = NormalDist()

TWO_TO_53 = 2**53
"""Number of equally spaced doubles in [0, 1): 53 bits of a hash make one of them."""

RATE_MESSAGE = "Rate limit reached for {what}. Please try again in {wait_s:.3f}s."
CROWDED_MESSAGE = "Too many requests are in flight."
BARE_MESSAGE = "Too many requests."


class Fault(StrEnum):
    """What goes wrong with an admitted request."""

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
    """A request is admitted."""

    service_s: float
    """Time it needs when the judge is not crowded. A fault occurs after it; a hang needs no service."""
    fault: Fault | None = None


class Refusal(msgspec.Struct, frozen=True):
    """A request is refused."""

    status: int
    body: bytes
    headers: Headers = ()


class Outage(msgspec.Struct, frozen=True):
    """The judge is away: abort the connection."""


Decision = Plan | Refusal | Outage


def draws(seed: int, content: Content, attempt: int) -> tuple[float, float]:
    """Two independent numbers in [0, 1), determined by seed, content and attempt on every machine."""
    bits = blake2b(content.digest + f"{seed}:{attempt}".encode(), digest_size=16).digest()
    first, second = (int.from_bytes(half, "big") >> 11 for half in (bits[:8], bits[8:]))
    return first / TWO_TO_53, second / TWO_TO_53


def plan_for(profile: JudgeProfile, content: Content, attempt: int, faults_so_far: int = 0) -> Plan:
    """Plan the attempt-th admitted request (from 0) for this content."""
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
    # The quantile of 0 is minus infinity, so move half a step up.
    return exp(location + profile.sigma * STANDARD_NORMAL.inv_cdf(pace or 0.5 / TWO_TO_53))


def inside(windows: Windows, elapsed_s: float) -> bool:
    """Whether one of the (start_s, duration_s) windows holds this moment; its end is outside."""
    return any(start <= elapsed_s < start + duration for start, duration in windows)


class Behaviour:
    """Decides about each request in turn, from the profile, the rates so far and the start of the schedule."""

    def __init__(self, profile: JudgeProfile) -> None:
        self.profile = profile
        self._rates = RateLimits(profile)
        self._began: float | None = None

    def begin(self, now: float) -> bool:
        """Start the clock of the schedule at the first chat request. True the first time."""
        if self._began is not None:
            return False
        self._began = now
        return True

    def in_outage(self, now: float) -> bool:
        """Whether the judge is away. Never before the first request."""
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
        """Decide about one request. `ask` is None if its body is no chat request."""
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
        """The rate headers of a reply; none if the rates are unlabelled or absent."""
        return self._rates.headers(now) if self._rates and self.profile.label_rate else ()

    def _unacceptable(self, ask: Ask | None, authorization: str | None) -> Refusal | None:
        """A refusal that no retry of this request could change."""
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
