"""How one call ends: a `Reply`, or a `CallFailure` whose kind alone decides what the engine does next. Pure.

kind         asked again            slows the limiter   trips the breaker   stops the endpoint
THROTTLED    until the deadline     yes (429)           -                   -
RATE         until the deadline     the pacer           -                   -
OVERLOADED   max_attempts           if sustained        yes                 -
TIMEOUT      max_attempts           -                   yes                 -
BROKEN       max_attempts           -                   yes                 -
STALE        at once, twice         -                   -                   -
GARBAGE      max_attempts           -                   -                   -
REJECTED     no                     -                   -                   -
FORBIDDEN    no                     -                   -                   as AUTH, if it never answered us
AUTH, NOT_FOUND, QUOTA   elsewhere  -                   -                   yes

`classify` reads statuses other than 200, `read_completion` and `read_chat` read bodies with status 200.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from enum import Enum
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from freewheel.judge.pacing import RateHeaders, parse_duration_s
from freewheel.judge.verdict import TOKENS_MAX, Reason, Usage, without_surrogates

DETAIL_CHARS = 300
"""The useful part of a server's error; the rest is usually HTML."""
_CUT_OFF = ("length", "content_filter")
"""Finish reasons that leave a reply incomplete: a `1` may be half of a `10`."""
_WHOLE = ("stop", "tool_calls", "function_call")
"""Finish reasons of a client's completion that is complete. Any other one is passed on and not kept."""
SSE_TAIL_BYTES = 1 << 16
"""The end of an event stream, which holds its usage."""

_UNREADABLE = (ValueError, RecursionError)
"""Everything that decoding a server's JSON raises. A thousand nested brackets raise RecursionError."""


class FailureKind(Enum):
    THROTTLED = "throttled"
    RATE = "rate"
    OVERLOADED = "overloaded"
    TIMEOUT = "timeout"
    BROKEN = "broken"
    STALE = "stale"
    GARBAGE = "garbage"
    REJECTED = "rejected"
    FORBIDDEN = "forbidden"
    AUTH = "auth"
    NOT_FOUND = "not_found"
    QUOTA = "quota"


WAITS = frozenset({FailureKind.THROTTLED, FailureKind.RATE})
"""The judge works and asks us to wait. This does not count as an attempt."""
INFRA = frozenset({FailureKind.OVERLOADED, FailureKind.TIMEOUT, FailureKind.BROKEN})
"""The endpoint itself has a fault."""
FINAL = frozenset({FailureKind.REJECTED, FailureKind.FORBIDDEN})
"""The judge refuses this very request and would refuse it again."""
HALTS = frozenset({FailureKind.AUTH, FailureKind.NOT_FOUND, FailureKind.QUOTA})
"""The endpoint will refuse every request, so nothing more is sent there."""

REASONS: dict[FailureKind, Reason] = {
    **dict.fromkeys(WAITS, Reason.THROTTLED),
    **dict.fromkeys(INFRA | {FailureKind.STALE, FailureKind.GARBAGE}, Reason.UNAVAILABLE),
    **dict.fromkeys(FINAL, Reason.REJECTED),
    **{kind: Reason(kind.value) for kind in HALTS},
}
"""The verdict's reason if the last call failed with this kind."""

_KIND_OF_STATUS: dict[int, FailureKind] = {
    HTTPStatus.REQUEST_TIMEOUT: FailureKind.TIMEOUT,
    HTTPStatus.UNAUTHORIZED: FailureKind.AUTH,
    HTTPStatus.FORBIDDEN: FailureKind.FORBIDDEN,
    HTTPStatus.NOT_FOUND: FailureKind.NOT_FOUND,
}
"""Every other 4xx that `classify` does not handle itself is `REJECTED`."""


class Reply(NamedTuple):
    """The judge's answer to one call."""

    text: str
    usage: Usage
    cut_off: bool = False
    """True if the reply is incomplete: a `1` may be half of a `10`."""
    rate: RateHeaders | None = None


class CallFailure(NamedTuple):
    """One call without a usable reply."""

    kind: FailureKind
    detail: str
    retry_after_s: float | None = None
    billed: bool = False
    """True if the judge charges for the call although its answer is unusable."""


class HungUp(Exception):
    """The client that asked for a stream is gone."""


_RATE_WORDS = re.compile(
    r"(requests|tokens) per (min|hour|day|second)|\b[RT]P[MDS]\b|rate limit reached for (requests|tokens)",
    re.IGNORECASE,
)
_QUOTA_WORDS = re.compile(
    r"insufficient_quota|exceeded your current quota|insufficient (balance|credit)", re.IGNORECASE
)


def classify(status: int, headers: Mapping[str, str], body: bytes, *, wall_now: float) -> CallFailure:
    """Classify a reply with a status other than 200 as a failure. 429 is QUOTA, RATE or THROTTLED."""
    text = _error_text(body)
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "?"
    detail = f"HTTP {status} {phrase}" + (f": {text}" if text else "")
    if status == HTTPStatus.PAYMENT_REQUIRED or (status == HTTPStatus.TOO_MANY_REQUESTS and _QUOTA_WORDS.search(text)):
        return CallFailure(FailureKind.QUOTA, detail)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = FailureKind.RATE if _exhausted(headers) or _RATE_WORDS.search(text) else FailureKind.THROTTLED
        return CallFailure(kind, detail, _retry_after_s(headers, wall_now))
    if status >= 500:
        return CallFailure(FailureKind.OVERLOADED, detail, _retry_after_s(headers, wall_now))
    if 300 <= status < 400:
        target = shorten(headers.get("Location", "elsewhere"))
        remedy = "freewheel sends a key only to the endpoint that you name; name that URL as the endpoint"
        detail = f"HTTP {status} {phrase}: it redirects to {target}, which is not followed: {remedy}"
        return CallFailure(FailureKind.NOT_FOUND, detail)
    return CallFailure(_KIND_OF_STATUS.get(status, FailureKind.REJECTED), detail)


def _exhausted(headers: Mapping[str, str]) -> list[str]:
    """Return the budgets that have nothing left."""
    return [what for what in ("requests", "tokens") if headers.get(f"x-ratelimit-remaining-{what}") == "0"]


def _retry_after_s(headers: Mapping[str, str], wall_now: float) -> float | None:
    """The wait that the server requests: Retry-After (seconds or a date), else the reset of the exhausted limit."""
    milliseconds = parse_duration_s(headers.get("retry-after-ms", ""), wall_now)
    if milliseconds is not None:
        return milliseconds / 1000
    if (text := headers.get("Retry-After")) is not None:
        return parse_duration_s(text, wall_now)
    waits = [parse_duration_s(headers.get(f"x-ratelimit-reset-{what}", ""), wall_now) for what in _exhausted(headers)]
    return max((wait for wait in waits if wait is not None), default=None)


def _error_text(body: bytes) -> str:
    """The server's message on one line, from the JSON shapes in use."""
    try:
        found = msgspec.json.decode(body)
    except _UNREADABLE:
        return shorten(body.decode("utf-8", "replace"))
    error = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(error, dict):
        words = [str(error[key]) for key in ("code", "type", "message", "detail") if error.get(key)]
        return shorten("; ".join(dict.fromkeys(words)) or str(error))
    return shorten(str(error))


def shorten(text: str) -> str:
    """Put `text` on one line, shorten it, and replace lone surrogates, which aiohttp makes of bytes outside UTF-8."""
    line = " ".join(text[: 4 * DETAIL_CHARS].encode("utf-8", "replace").decode().split())
    return line if len(line) <= DETAIL_CHARS else line[: DETAIL_CHARS - 1] + "…"


# -- bodies with status 200 -------------------------------------------------------------------------------------------


class _Usage(msgspec.Struct):
    prompt_tokens: float | None = None
    completion_tokens: float | None = None


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _End(msgspec.Struct):
    finish_reason: str | None = None


class _Envelope(msgspec.Struct):
    """The parts of a completion that the gateway reads. Its clients may use any message."""

    choices: list[_End]
    usage: _Usage | None = None


_completion = msgspec.json.Decoder(_Completion, strict=False)
_envelope = msgspec.json.Decoder(_Envelope, strict=False)


def read_completion(content: bytes) -> Reply | CallFailure:
    """Read a chat completion that came with status 200. Content may be text or a list of parts."""
    try:
        completion = _decode_forgivingly(content)
    except _UNREADABLE as error:
        return _garbage(content, error)
    if not completion.choices:
        return CallFailure(FailureKind.GARBAGE, "200, but `choices` is empty", billed=True)
    choice = completion.choices[0]
    text = choice.message.content
    if isinstance(text, list):
        text = "".join(part.text or "" for part in text if part.type in ("text", "output_text"))
    if not text and (choice.message.refusal or choice.finish_reason == "content_filter"):
        detail = f"the judge refuses: {choice.message.refusal or choice.finish_reason}"
        return CallFailure(FailureKind.REJECTED, detail, billed=True)
    return Reply(without_surrogates(text or ""), _usage(completion.usage), choice.finish_reason in _CUT_OFF)


def _decode_forgivingly(content: bytes) -> _Completion:
    """Decode strictly first, which is fast. If that fails, decode as leniently as possible, because the answer has been
    paid for."""
    try:
        return _completion.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = json.loads(content.decode("utf-8-sig", "replace"))
        if isinstance(found, dict):
            found.pop("usage", None)
        return msgspec.convert(found, _Completion, strict=False)


def read_chat(content: bytes) -> Reply | CallFailure:
    """Read a client's chat completion that came with status 200. The reply's text is the whole body."""
    try:
        envelope = _envelope.decode(content)
        text = content.decode()
    except _UNREADABLE as error:
        return _garbage(content, error)
    if not envelope.choices:
        return CallFailure(FailureKind.GARBAGE, "200, but `choices` is empty", billed=True)
    whole = all(choice.finish_reason in _WHOLE for choice in envelope.choices)
    return Reply(text, _usage(envelope.usage), cut_off=not whole)


def read_stream_usage(tail: bytes) -> Usage:
    """Return the token counts at the end of an event stream; zeros if it has none (see
    `stream_options.include_usage`)."""
    for line in reversed(tail.splitlines()):
        data = line.removeprefix(b"data:").strip()
        if b'"usage"' in data:
            with contextlib.suppress(*_UNREADABLE):
                return _usage(_envelope.decode(data).usage)
    return Usage()


def read_models(content: bytes) -> list[str]:
    """The names in a list of models; empty if `content` is not one."""
    try:
        return [str(model["id"]) for model in json.loads(content)["data"]]
    except (*_UNREADABLE, KeyError, TypeError):
        return []


def _usage(reported: _Usage | None) -> Usage:
    if reported is None:
        return Usage()
    return Usage(_count(reported.prompt_tokens), _count(reported.completion_tokens))


def _count(tokens: float | None) -> int:
    return int(min(max(tokens, 0), TOKENS_MAX)) if tokens else 0


def _garbage(content: bytes, error: Exception) -> CallFailure:
    """Return the failure for a body that is not a completion. Some gateways answer 200 with `{"error": {"code": 429,
    …}}`; then the code is the real status."""
    with contextlib.suppress(*_UNREADABLE):
        found = msgspec.json.decode(content)
        inside = found.get("error") if isinstance(found, dict) else None
        code = inside.get("code") if isinstance(inside, dict) else None
        if isinstance(code, int) and 400 <= code < 600:
            return classify(code, {}, content, wall_now=0.0)
    seen = content[: 16 * DETAIL_CHARS].decode("utf-8", "replace")
    return CallFailure(FailureKind.GARBAGE, f"200, but not a chat completion ({error}): {seen}", billed=True)
