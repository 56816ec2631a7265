"""A chat completion's body as a `Reply`, or as the `Failure` that it stands for. Pure.

Servers differ: content may be text or a list of parts, an error may come with status 200, a refusal without content.
"""

from __future__ import annotations

import json

import msgspec

from freewheel.judge.outcome import DETAIL_CHARS, Failure, Kind, Reply, classify
from freewheel.judge.request import without_surrogates
from freewheel.judge.verdict import TOKENS_MAX, Usage

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
