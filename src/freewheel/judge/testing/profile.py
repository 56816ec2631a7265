"""The behaviour of the mock judge: its profile, its decisions and its replies. No I/O; the caller passes the time.

    request ──▶ outage? ──▶ burst? ──▶ key, body, model, quota, length ──▶ in flight? ──▶ rates? ──▶ AdmittedRequest
                  ▼           ▼                       ▼                        └──────┬──────┘
           None, Refusal 503  Refusal 429             Refusal 4xx                     ▼ Refusal 429

`__init__.py` carries the decisions out. `JudgeProfile` is the only source of the defaults. Times are in the judge's own
seconds: `time_scale` converts them to wall time, and only headers hold wall time.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b, sha256
from heapq import heappop, heappush
from itertools import accumulate
from math import ceil, exp, floor, inf, log
from statistics import NormalDist
from typing import Annotated, Any, Final, Literal

import msgspec

from freewheel.errors import ConfigError
from freewheel.judge.pacing import MINUTE_S, Bucket
from freewheel.utils.checks import CountOrZero, NotNegative, Positive, Share, check_fields
from freewheel.utils.http import openai_error

Windows = tuple[tuple[NotNegative, NotNegative], ...]
Headers = dict[str, str]


# -- the profile ------------------------------------------------------------------------------------------------------


class Fault(StrEnum):
    """The faults of admitted requests. Changing their order would change every seeded plan."""

    ERROR = "error"
    DISCONNECT = "disconnect"
    TRUNCATE = "truncate"
    GARBAGE = "garbage"
    WRONG_TYPE = "wrong_type"
    HANG = "hang"
    DRIP = "drip"
    UNPARSEABLE = "unparseable"
    EMPTY = "empty"


SHARES = tuple(f"{fault}_share" for fault in Fault)
"""The fields of the faults, in the order in which they divide the unit interval."""

_ROUNDING = 1e-9
"""Tolerance for the sum of the shares: in binary, 0.1 + 0.2 is slightly more than 0.3."""


class JudgeProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the mock judge treats requests. By default it answers everything correctly and at once."""

    seed: int = 0
    """Latencies and faults are drawn from (seed, content, attempt): the order of arrival changes nothing. Only admitted
    requests count as attempts."""

    time_scale: Positive = 1.0
    """Wall seconds per second of this profile, in headers too. With 0.1 everything runs ten times faster."""

    latency: Literal["fixed", "lognormal"] = "fixed"
    """Each request takes `latency_s`, or a lognormal time with that mean."""
    latency_s: NotNegative = 0.0
    """Mean time of a request when the judge is not crowded."""
    sigma: NotNegative = 0.5
    """Spread of the lognormal: the standard deviation of the time's logarithm."""

    knee: Positive | None = None
    """Throughput saturates here: with n in service, each progresses at the rate min(1, knee / n). None: never.
    Hanging and dripping requests are in flight but use no service."""
    reject_above: CountOrZero | None = None
    """A request that finds this many in flight gets a 429 at once. None: all are admitted."""
    retry_after_s: NotNegative | None = 1.0
    """`Retry-After` of a 429. A rate limit sends the exact wait instead. None: never send the header."""

    requests_per_minute: Positive | None = None
    """Requests beyond this rate get a 429."""
    tokens_per_minute: Positive | None = None
    """The same for tokens of prompt and reply, as `usage` reports them."""
    rate_window_s: Positive = 60.0
    """A rate's bucket holds the allowance of this time, starts full, and refills continuously."""

    error_share: Share = 0.0
    """Share of requests that end with `error_status`."""
    error_status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    """Status of those errors."""
    disconnect_share: Share = 0.0
    """Share whose connection is closed before any reply."""
    truncate_share: Share = 0.0
    """Share whose body is cut in the middle, in spite of its Content-Length."""
    garbage_share: Share = 0.0
    """Share that gets 200, application/json and a body that is not JSON."""
    wrong_type_share: Share = 0.0
    """Share that gets 200 and an HTML page."""
    hang_share: Share = 0.0
    """Share that is never answered; it counts as in flight until the client goes away."""
    drip_share: Share = 0.0
    """Share whose correct answer is sent a few bytes at a time, over `drip_s`."""
    drip_s: NotNegative = 5.0
    """Duration of a dripping answer."""
    unparseable_share: Share = 0.0
    """Share that gets a valid completion without a score in it."""
    empty_share: Share = 0.0
    """Share that gets no choices, or a choice whose content is null (by content)."""
    faults_per_content: CountOrZero | None = None
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
    max_prompt_chars: CountOrZero | None = None
    """A prompt with more characters gets a 400 (`context_length_exceeded`)."""

    score_low: int = 1
    """Lowest score."""
    score_high: int = 10
    """Highest score."""
    reply_style: Literal["bare", "bold", "labelled", "json", "think", "chinese", "mixed"] = "bare"
    """The form of the score; `mixed` chooses by content."""
    scores: dict[str, str] = {}
    """Replies set by a test: the first key that occurs in the user message selects its value as the reply."""

    keep_requests: CountOrZero = 0
    """Number of latest chat requests to keep, with headers and body."""

    def __post_init__(self) -> None:
        check_fields(self)
        total = sum(getattr(self, name) for name in SHARES)
        if total > 1.0 + _ROUNDING:
            raise ConfigError("shares", total, "the fault shares must not add up to more than 1")
        if self.score_low > self.score_high:
            raise ConfigError("score_low", self.score_low, f"must not exceed score_high = {self.score_high}")


# -- requests and replies ---------------------------------------------------------------------------------------------


_NONCE = re.compile(r"[0-9a-fA-F]{16,}")
"""Hex digits of this length are a request's nonce or hash, not its content."""
_CHARS_PER_TOKEN = 4
"""The usual estimate for English; `usage` must only be plausible and repeatable."""
_STREAM_PIECES = 4
"""About how many deltas a streamed reply has: more than one, so that a reader must join them."""

UNPARSEABLE_REPLY = "This answer cannot be rated."
GARBAGE_BODY = b"upstream connect error or disconnect/reset before headers"
HTML_BODY = b"<!doctype html><html><body><h1>Sign in to continue</h1></body></html>"

STYLES: Final = {
    "bare": "{score}",
    "bold": "The answer is to the point, with small gaps.\n\n**{score}**",
    "labelled": "Score: {score}/{high}",
    "json": '{{"score": {score}, "reason": "To the point, with small gaps."}}',
    "think": "<think>\nAt first sight a {high}; on reflection, maybe a {low}?\n</think>\n{score}",
    "chinese": "回答切题，略有不足。评分：{score}分",
}
"""What `mixed` chooses from. `think` names both ends of the scale first, to mislead a careless parser."""


class Content(msgspec.Struct, frozen=True):
    """The judged text without its nonce. Requests with equal contents repeat the same question."""

    text: str
    digest: bytes

    @classmethod
    def of(cls, user_content: str) -> Content:
        text = _NONCE.sub("", user_content)
        return cls(text, sha256(text.encode("utf-8", "surrogatepass")).digest())

    @property
    def key(self) -> str:
        """The key of the content in the counts."""
        return self.digest.hex()[:32]

    def score(self, low: int, high: int) -> int:
        return low + int.from_bytes(self.digest[:8], "big") % (high - low + 1)


class Message(msgspec.Struct):
    """One message of a chat. Its content may be a list of parts; only parts with a text count."""

    role: str
    content: str | list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(str(part.get("text") or "") for part in self.content)
        return self.content or ""


class Ask(msgspec.Struct, dict=True):
    """The fields of a chat completion request that matter here. Others are ignored."""

    messages: list[Message]
    model: str = ""
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    n: int | None = 1

    @cached_property
    def content(self) -> Content:
        """The last user message, which is judged."""
        return Content.of(next((message.text for message in reversed(self.messages) if message.role == "user"), ""))

    @property
    def prompt_chars(self) -> int:
        return sum(len(message.text) for message in self.messages)


def expected_score(user_content: str, low: int = 1, high: int = 10) -> int:
    """The score that the mock judge gives this user message. Nonces are ignored."""
    return Content.of(user_content).score(low, high)


def reply_text(profile: JudgeProfile, content: Content) -> str:
    """The text of the judge's reply for this content."""
    for part, reply in profile.scores.items():
        if part in content.text:
            return reply
    mixed = profile.reply_style == "mixed"
    style = list(STYLES)[content.digest[8] % len(STYLES)] if mixed else profile.reply_style
    low, high = profile.score_low, profile.score_high
    return STYLES[style].format(score=content.score(low, high), low=low, high=high)


def usage(ask: Ask, text: str) -> dict[str, int]:
    """The `usage` object for this question and this reply: at least one token each."""
    prompt = max(1, ask.prompt_chars // _CHARS_PER_TOKEN)
    completion = max(1, len(text) // _CHARS_PER_TOKEN) * (ask.n or 1)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def completion(ask: Ask, text: str | None, *, model: str, has_choices: bool = True) -> list[bytes]:
    """The body of a chat completion in one piece, or its server-sent events if the request asks for a stream."""
    kind = "chat.completion.chunk" if ask.stream else "chat.completion"
    head = {"id": f"chatcmpl-{ask.content.key}", "object": kind, "created": int(time.time()), "model": model}
    used = usage(ask, text or "")

    def choices(finish_reason: str | None, **fields: object) -> dict[str, Any]:
        count = (ask.n or 1) if has_choices else 0
        return {"choices": [{"index": index, **fields, "finish_reason": finish_reason} for index in range(count)]}

    if not ask.stream:
        message = {"role": "assistant", "content": text}
        return [msgspec.json.encode({**head, **choices("stop", message=message, logprobs=None), "usage": used})]
    words = text or ""
    step = max(1, ceil(len(words) / _STREAM_PIECES))
    events = [choices(None, delta={"role": "assistant", "content": ""})]
    events += [choices(None, delta={"content": words[at : at + step]}) for at in range(0, len(words), step)]
    events.append(choices("stop", delta={}))
    if ask.stream_options and ask.stream_options.get("include_usage"):
        events.append({"choices": [], "usage": used})
    lines = [msgspec.json.encode({**head, **event}) for event in events]
    return [b"data: " + line + b"\n\n" for line in [*lines, b"[DONE]"]]


# -- counts -----------------------------------------------------------------------------------------------------------


class ContentCount(msgspec.Struct):
    """Counts of one content."""

    received: int = 0
    """Requests that carried it."""
    admitted: int = 0
    """Requests that were neither refused nor lost to an outage."""
    answered: int = 0
    """Whole chat completions sent for it, including replies without a score."""
    rejected: int = 0
    """Requests for it that got a 429."""
    faults: int = 0
    """Faults it met."""
    text: str = ""
    """The user message without its nonce."""


class Counts(msgspec.Struct):
    """Counts of chat requests since the start or the last reset. Other paths are not counted."""

    received: int = 0
    answered: int = 0
    rejected: int = 0
    gone: int = 0
    """Admitted requests whose client left before the reply."""
    by_status: dict[int, int] = msgspec.field(default_factory=Counter)
    """Replies by status, including cut and dripping bodies, but not closed connections."""
    faults: dict[str, int] = msgspec.field(default_factory=Counter)
    """Faults by kind, as the profile's shares name them (`error`, `hang`, …), and `outage`."""
    in_flight: int = 0
    max_in_flight: int = 0
    connections_refused: int = 0
    """Connections aborted on arrival, during an outage that refuses."""
    open_connections: int = 0
    """Connections open now, for any path."""
    contents: dict[str, ContentCount] = {}

    def of(self, user_content: str) -> ContentCount:
        """The counts of this user message; all zeros if it never arrived."""
        return self.contents.get(Content.of(user_content).key) or ContentCount()

    def containing(self, part: str) -> list[ContentCount]:
        """The contents whose text contains `part`, in the order of their first arrival."""
        return [count for count in self.contents.values() if part in count.text]

    @property
    def most_received(self) -> int:
        """How often the most frequent content was received. 1 proves that each content was sent once."""
        return max((count.received for count in self.contents.values()), default=0)


# -- decisions --------------------------------------------------------------------------------------------------------


_STANDARD_NORMAL = NormalDist()
_TWO_TO_53 = 2**53
"""Number of equally spaced doubles in [0, 1): 53 bits of a hash make one of them."""


class AdmittedRequest(msgspec.Struct, frozen=True):
    """An admitted request."""

    service_s: float
    """Time it needs when the judge is not crowded. A fault occurs after it; a hang needs no service."""
    fault: Fault | None = None


class Refusal(msgspec.Struct, frozen=True):
    """The reply to a request that is refused."""

    status: int
    body: bytes
    headers: Headers = {}


def plan_for(profile: JudgeProfile, content: Content, attempt: int, faults_so_far: int = 0) -> AdmittedRequest:
    """Plan the attempt-th admitted request (from 0) for this content."""
    # Two independent numbers in [0, 1), the same on every machine.
    bits = blake2b(content.digest + f"{profile.seed}:{attempt}".encode(), digest_size=16).digest()
    luck, pace = ((int.from_bytes(half, "big") >> 11) / _TWO_TO_53 for half in (bits[:8], bits[8:]))
    fault = None
    if profile.faults_per_content is None or faults_so_far < profile.faults_per_content:
        edges = accumulate(getattr(profile, share) for share in SHARES)
        fault = next((fault for fault, edge in zip(Fault, edges, strict=True) if luck < edge), None)
    service_s = profile.latency_s
    if profile.latency == "lognormal" and service_s > 0.0:
        location = log(service_s) - profile.sigma**2 / 2  # so that the mean, not the median, is latency_s
        # The quantile of 0 is minus infinity, so move half a step up.
        service_s = exp(location + profile.sigma * _STANDARD_NORMAL.inv_cdf(pace or 0.5 / _TWO_TO_53))
    return AdmittedRequest(service_s, fault)


class RateLimits:
    """The profile's two limits together: a request passes both or takes from neither."""

    def __init__(self, profile: JudgeProfile) -> None:
        self._scale = profile.time_scale
        self._limits: dict[str, Bucket] = {}
        for what, per_minute in (("requests", profile.requests_per_minute), ("tokens", profile.tokens_per_minute)):
            if per_minute is not None:
                per_s = per_minute / MINUTE_S
                # A bucket that cannot hold one request would never admit one.
                capacity = max(1.0, per_s * profile.rate_window_s)
                self._limits[what] = Bucket(per_s, capacity, capacity, -inf)

    def admit(self, now: float, tokens: int) -> tuple[str, float] | None:
        """Charge the request to both limits and return None, or return the exceeded limit and the wait in seconds.

        A request above a bucket's capacity passes when the bucket is full.
        """
        amounts = {"requests": 1.0, "tokens": float(tokens)}
        for what, bucket in self._limits.items():
            wait_s = bucket.ready_at(now, amounts[what]) - now
            if wait_s > 0.0:
                return what, wait_s
        for what, bucket in self._limits.items():
            bucket.level -= min(amounts[what], bucket.capacity)
        return None

    def headers(self, now: float) -> Headers:
        """`x-ratelimit-limit-*`, `-remaining-*` and `-reset-*`, in the public APIs' notation and in wall time."""
        lines: Headers = {}
        for what, bucket in self._limits.items():
            full_in_s = bucket.ready_at(now, bucket.capacity) - now
            lines[f"x-ratelimit-limit-{what}"] = f"{bucket.rate_per_s * MINUTE_S:g}"
            lines[f"x-ratelimit-remaining-{what}"] = str(floor(bucket.level))
            lines[f"x-ratelimit-reset-{what}"] = f"{_up_to_ms(full_in_s * self._scale)}s"
        return lines


class Behaviour:
    """Decides about each request in turn, and counts it."""

    def __init__(self, profile: JudgeProfile) -> None:
        self.profile = profile
        self.counts = Counts()
        self.rates = RateLimits(profile)
        self._began = inf
        """When the first chat request came, which starts the schedule."""

    def in_outage(self, now: float) -> bool:
        """Whether the judge is away. Never before the first request."""
        return _is_inside(self.profile.outages, now - self._began)

    def decide(self, now: float, ask: Ask | None, authorization: str | None = None) -> AdmittedRequest | Refusal | None:
        """Decide about one request. `ask` is None if the body is not a chat request. Returns None if the connection
        must be aborted."""
        counts = self.counts
        counts.received += 1
        self._began = min(self._began, now)
        count = ContentCount()
        if ask is not None:
            count = counts.contents.setdefault(ask.content.key, ContentCount(text=ask.content.text))
        count.received += 1
        if self.profile.outage_kind == "refuse" and self.in_outage(now):
            counts.faults["outage"] += 1
            return None
        decision = self._refuse(now, ask, authorization)
        if decision is not None or ask is None:
            decision = decision or Refusal(400, openai_error("The body is not a chat completion request."))
            counts.by_status[decision.status] += 1
            if decision.status == 429:
                counts.rejected += 1
                count.rejected += 1
            return decision
        plan = plan_for(self.profile, ask.content, count.admitted, count.faults)
        count.admitted += 1
        counts.in_flight += 1
        counts.max_in_flight = max(counts.max_in_flight, counts.in_flight)
        if plan.fault is not None:
            count.faults += 1
            counts.faults[plan.fault.value] += 1
        return plan

    def _refuse(self, now: float, ask: Ask | None, authorization: str | None) -> Refusal | None:
        profile = self.profile
        if self.in_outage(now):
            return Refusal(503, openai_error("The judge is away.", "server_error"))
        if _is_inside(profile.throttle_bursts, now - self._began):
            return self._reject("Too many requests.")
        if profile.api_key is not None and authorization != f"Bearer {profile.api_key}":
            return Refusal(401, openai_error("Incorrect API key provided.", code="invalid_api_key"))
        if ask is None:
            return None
        if profile.model is not None and ask.model != profile.model:
            message = f"The model `{ask.model}` does not exist or you do not have access to it."
            return Refusal(404, openai_error(message, code="model_not_found"))
        if profile.insufficient_quota:
            message = "You exceeded your current quota, please check your plan and billing details."
            return Refusal(429, openai_error(message, "insufficient_quota", "insufficient_quota"))
        if profile.max_prompt_chars is not None and ask.prompt_chars > profile.max_prompt_chars:
            message = f"This model's maximum context length is {profile.max_prompt_chars} characters."
            return Refusal(400, openai_error(message, code="context_length_exceeded"))
        if profile.reject_above is not None and self.counts.in_flight >= profile.reject_above:
            return self._reject("Too many requests are in flight.", code="concurrency_limit_exceeded")
        over = self.rates.admit(now, usage(ask, reply_text(profile, ask.content))["total_tokens"])
        if over is None:
            return None
        what, wait_s = over
        message = f"Rate limit reached for {what}. Please try again in {wait_s * profile.time_scale:.3f}s."
        return self._reject(message, what, "rate_limit_exceeded", wait_s=wait_s, headers=self.rates.headers(now))

    def _reject(
        self,
        message: str,
        kind: str = "too_many_requests",
        code: str | None = None,
        *,
        wait_s: float | None = None,
        headers: Headers | None = None,
    ) -> Refusal:
        """A 429. `wait_s`: the exact wait, where it is known."""
        headers = headers or {}
        retry_after_s = self.profile.retry_after_s
        if retry_after_s is not None:
            wait_s = retry_after_s if wait_s is None else wait_s
            headers = {"Retry-After": _up_to_ms(wait_s * self.profile.time_scale), **headers}
        return Refusal(429, openai_error(message, kind, code), headers)


def _is_inside(windows: Windows, elapsed_s: float) -> bool:
    """Whether one of the (start_s, duration_s) windows holds this moment; its end is outside."""
    return any(start <= elapsed_s < start + duration for start, duration in windows)


def _up_to_ms(seconds: float) -> str:
    """Round up to a millisecond: an earlier retry would be refused again."""
    return f"{ceil(seconds * 1000) / 1000:g}"


# -- capacity ---------------------------------------------------------------------------------------------------------


class ProcessorSharing:
    """Exact processor sharing. It models the latencies of a batching inference server beyond its knee.

    With n requests in service, each progresses at the rate r = min(1, knee / n). Let virtual time V grow at the rate r.
    A request that joins at V0 and needs s seconds of service then ends at V = V0 + s, no matter which others join or
    leave before. A heap of those ends is all the state, and join, leave and finish cost O(log n). The caller supplies
    the time, which must not run backwards.
    """

    def __init__(self, knee: float | None) -> None:
        self._knee = inf if knee is None else knee
        self._virtual = 0.0
        self._now = 0.0
        self._ends: list[tuple[float, int]] = []
        self._active: set[int] = set()
        self._finished: list[int] = []
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._active)

    def join(self, now: float, service_s: float) -> int:
        """Start a request that needs `service_s` when alone. `finished` returns the ticket when it is done."""
        self._advance(now)
        ticket = self._tickets
        self._tickets += 1
        self._active.add(ticket)
        heappush(self._ends, (self._virtual + service_s, ticket))
        return ticket

    def leave(self, now: float, ticket: int) -> None:
        """Remove a request that nobody waits for any more. The others get its share from now on."""
        self._advance(now)
        self._active.discard(ticket)  # its entry in the heap is skipped later

    def finished(self, now: float) -> list[int]:
        """The tickets that ended since the last call, in the order in which they ended."""
        self._advance(now)
        done, self._finished = self._finished, []
        return done

    def next_finish(self) -> float:
        """When the next request ends if nobody joins or leaves before; infinity if none is in service."""
        return self._now if self._finished else self._next_end()

    def _rate(self) -> float:
        return min(1.0, self._knee / len(self._active))

    def _next_end(self) -> float:
        """When the first entry of the heap ends at the current rate; infinity if there is none."""
        while self._ends and self._ends[0][1] not in self._active:
            heappop(self._ends)
        return self._now + (self._ends[0][0] - self._virtual) / self._rate() if self._ends else inf

    def _advance(self, now: float) -> None:
        """Advance to `now`, one end at a time, because each end changes the rate. A late call loses no precision."""
        while (ends_at := self._next_end()) <= now:
            self._virtual, ticket = heappop(self._ends)
            self._active.discard(ticket)
            self._finished.append(ticket)
            self._now = max(self._now, ends_at)
        # A new origin when idle keeps the floats small.
        self._virtual = self._virtual + (now - self._now) * self._rate() if self._ends else 0.0
        self._now = max(self._now, now)
