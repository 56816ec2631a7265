"""How one call ends: a `Reply`, or a `Failure` whose kind alone decides what the engine does next.

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
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from freewheel.judge.pacing import RateHeaders, parse_duration_s
from freewheel.judge.request import without_surrogates
from freewheel.judge.verdict import TOKENS_MAX, Reason, Usage

DETAIL_CHARS = 300
"""As much of a server's error as helps; the rest is usually HTML."""


class Kind(Enum):
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


WAITS = frozenset({Kind.THROTTLED, Kind.RATE})
"""The judge is well and asks for patience: no attempt is counted."""
INFRA = frozenset({Kind.OVERLOADED, Kind.TIMEOUT, Kind.BROKEN})
"""The endpoint itself is unwell."""
FINAL = frozenset({Kind.REJECTED, Kind.FORBIDDEN})
"""The judge refuses this very request, and would again."""
HALTS = frozenset({Kind.AUTH, Kind.NOT_FOUND, Kind.QUOTA})
"""No request will fare better here: nothing more is sent to this endpoint."""

REASONS: dict[Kind, Reason] = {
    Kind.THROTTLED: Reason.THROTTLED,
    Kind.RATE: Reason.THROTTLED,
    Kind.OVERLOADED: Reason.UNAVAILABLE,
    Kind.TIMEOUT: Reason.UNAVAILABLE,
    Kind.BROKEN: Reason.UNAVAILABLE,
    Kind.STALE: Reason.UNAVAILABLE,
    Kind.GARBAGE: Reason.UNAVAILABLE,
    Kind.REJECTED: Reason.REJECTED,
    Kind.FORBIDDEN: Reason.REJECTED,
    Kind.AUTH: Reason.AUTH,
    Kind.NOT_FOUND: Reason.NOT_FOUND,
    Kind.QUOTA: Reason.QUOTA,
}


class Reply(NamedTuple):
    """What the judge said."""

    text: str
    usage: Usage
    cut_off: bool = False
    """True if it did not come to its own end: a `1` may be half of a `10`."""
    rate: RateHeaders | None = None


class Failure(NamedTuple):
    """One call that brought no reply."""

    kind: Kind
    detail: str
    retry_after_s: float | None = None
    billed: bool = False
    """The judge answered, so it will charge for it, although nothing can be made of the answer."""


_RATE_WORDS = re.compile(
    r"(requests|tokens) per (min|hour|day|second)|\b[RT]P[MDS]\b|rate limit reached for (requests|tokens)",
    re.IGNORECASE,
)
_QUOTA_WORDS = re.compile(
    r"insufficient_quota|exceeded your current quota|insufficient (balance|credit)", re.IGNORECASE
)


def classify(status: int, headers: Mapping[str, str], body: bytes, *, wall_now: float) -> Failure:
    """The failure that a reply other than 200 stands for."""
    text = _error_text(body)
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "?"
    detail = f"HTTP {status} {phrase}" + (f": {text}" if text else "")
    if status == HTTPStatus.TOO_MANY_REQUESTS or status == HTTPStatus.PAYMENT_REQUIRED:
        if status == HTTPStatus.PAYMENT_REQUIRED or _QUOTA_WORDS.search(text):
            return Failure(Kind.QUOTA, detail)
        exhausted = (
            headers.get("x-ratelimit-remaining-requests") == "0" or headers.get("x-ratelimit-remaining-tokens") == "0"
        )
        kind = Kind.RATE if exhausted or _RATE_WORDS.search(text) else Kind.THROTTLED
        return Failure(kind, detail, _retry_after_s(headers, wall_now))
    if status >= 500:
        return Failure(Kind.OVERLOADED, detail, _retry_after_s(headers, wall_now))
    if status == HTTPStatus.REQUEST_TIMEOUT:
        return Failure(Kind.TIMEOUT, detail)
    if status == HTTPStatus.UNAUTHORIZED:
        return Failure(Kind.AUTH, detail)
    if status == HTTPStatus.FORBIDDEN:
        return Failure(Kind.FORBIDDEN, detail)
    if status == HTTPStatus.NOT_FOUND:
        return Failure(Kind.NOT_FOUND, detail)
    if 300 <= status < 400:
        target = headers.get("Location", "elsewhere")
        remedy = "a key goes only where its owner sent it; name that URL as the endpoint"
        return Failure(
            Kind.NOT_FOUND,
            f"HTTP {status} {phrase}: it redirects to {shorten(target)}, which is not followed: {remedy}",
        )
    return Failure(Kind.REJECTED, detail)


def _retry_after_s(headers: Mapping[str, str], wall_now: float) -> float | None:
    """The wait that the server asks for: Retry-After (seconds or a date), else the exhausted limit's reset."""
    milliseconds = headers.get("retry-after-ms")
    if milliseconds is not None and (wait := parse_duration_s(milliseconds, wall_now)) is not None:
        return wait / 1000
    if (text := headers.get("Retry-After")) is not None:
        return parse_duration_s(text, wall_now)
    waits = [
        parse_duration_s(headers.get(f"x-ratelimit-reset-{what}", ""), wall_now)
        for what in ("requests", "tokens")
        if headers.get(f"x-ratelimit-remaining-{what}") == "0"
    ]
    return max((wait for wait in waits if wait is not None), default=None)


def _error_text(body: bytes) -> str:
    """The server's own words, out of the JSON shapes in use, on one line."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return shorten(body.decode("utf-8", "replace"))
    error = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(error, dict):
        words = [str(error[key]) for key in ("code", "type", "message", "detail") if error.get(key)]
        return shorten("; ".join(dict.fromkeys(words)) or str(error))
    return shorten(str(error))


def shorten(text: str) -> str:
    """On one line, short, and fit to travel: aiohttp hands on header bytes that are not UTF-8 as lone surrogates."""
    line = " ".join(text[: 4 * DETAIL_CHARS].encode("utf-8", "replace").decode().split())
    return line if len(line) <= DETAIL_CHARS else line[: DETAIL_CHARS - 1] + "…"


CUT_OFF = ("length", "content_filter")
"""Reasons to finish that leave a reply incomplete: a `1` may be half of a `10`."""


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: float | None = None
    completion_tokens: float | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Completion, strict=False)


def read_completion(content: bytes) -> Reply | Failure:
    """What a body that came with status 200 says."""
    try:
        completion = _decode(content)
    except (ValueError, RecursionError) as error:
        seen = content[: 16 * DETAIL_CHARS].decode("utf-8", "replace")
        garbage = Failure(Kind.GARBAGE, f"200, but not a chat completion ({error}): {seen}", billed=True)
        return error_inside(content) or garbage
    if not completion.choices:
        return Failure(Kind.GARBAGE, "200, but `choices` is empty", billed=True)
    choice = completion.choices[0]
    text = _text(choice.message.content)
    if not text and (choice.message.refusal or choice.finish_reason == "content_filter"):
        detail = f"the judge refuses: {choice.message.refusal or choice.finish_reason}"
        return Failure(Kind.REJECTED, detail, billed=True)
    used = completion.usage or _Usage()
    usage = Usage(_count(used.prompt_tokens), _count(used.completion_tokens))
    return Reply(text, usage, choice.finish_reason in CUT_OFF)


def _decode(content: bytes) -> _Completion:
    """Strictly first, which is quick; then as forgivingly as a reader can: what was answered was paid for."""
    try:
        return _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = json.loads(content.decode("utf-8-sig", "replace"))
        if isinstance(found, dict):
            found.pop("usage", None)
        return msgspec.convert(found, _Completion, strict=False)


def _text(content: str | list[_Part] | None) -> str:
    if isinstance(content, list):
        content = "".join(part.text or "" for part in content if part.type in ("text", "output_text"))
    return without_surrogates(content) if content else ""


def _count(tokens: float | None) -> int:
    return int(min(max(tokens, 0), TOKENS_MAX)) if tokens else 0


def error_inside(content: bytes) -> Failure | None:
    """Some gateways answer 200 with `{"error": {"code": 429, …}}`: the code is the status that was meant."""
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    error = found.get("error") if isinstance(found, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and 400 <= code < 600:
        return classify(code, {}, content, wall_now=0.0)
    return None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def read_models(content: bytes) -> list[str]:
    """The names in a list of models; none where it is no such list."""
    try:
        return [model.id for model in msgspec.json.decode(content, type=_Models).data]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


WHOLE = ("stop", "tool_calls", "function_call")
"""How a completion ends that came to its own end. One that was cut off or filtered is passed on and not kept."""
SSE_TAIL_BYTES = 1 << 16
"""The end of an event stream, where its usage stands."""


class HungUp(Exception):
    """Who asked for a stream is gone."""


class _Counts(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _ChatChoice(msgspec.Struct):
    finish_reason: str | None = None


class _Envelope(msgspec.Struct):
    """As much of a completion as tells it from something else."""

    choices: list[_ChatChoice]
    usage: _Counts | None = None


_envelope = msgspec.json.Decoder(_Envelope, strict=False)


def read_chat(content: bytes) -> Reply | Failure:
    """A body that came with status 200, whole."""
    try:
        envelope = _envelope.decode(content)
        text = content.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        seen = content[:200].decode("utf-8", "replace")
        garbage = Failure(Kind.GARBAGE, f"200, but not a chat completion ({error}): {seen}", billed=True)
        return error_inside(content) or garbage
    if not envelope.choices:
        return Failure(Kind.GARBAGE, "200, but `choices` is empty", billed=True)
    whole = all(choice.finish_reason in WHOLE for choice in envelope.choices)
    return Reply(text, _usage(envelope.usage), cut_off=not whole)


def read_stream_usage(tail: bytes) -> Usage:
    """The tokens that an event stream's end tells of, where it does (`stream_options.include_usage`)."""
    for line in reversed(tail.splitlines()):
        data = line.removeprefix(b"data:").strip()
        if b'"usage"' in data:
            try:
                return _usage(_envelope.decode(data).usage)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
    return Usage()


def _usage(counts: _Counts | None) -> Usage:
    counts = counts or _Counts()
    return Usage(max(0, counts.prompt_tokens or 0), max(0, counts.completion_tokens or 0))
