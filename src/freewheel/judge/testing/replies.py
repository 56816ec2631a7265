"""What the mock judge says: the identity of a content, the score it gets, and the bodies around it. Pure functions."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, Final

import msgspec

from freewheel.judge.testing.profile import JudgeProfile

NONCE = re.compile(r"[0-9a-fA-F]{16,}")
"""Runs of hex digits this long are a request's nonce or hash, not its content."""

CHARS_PER_TOKEN = 4
"""The usual estimate for English; `usage` only has to be plausible and the same every time."""

STREAM_PIECES = 4
"""A streamed reply comes in about this many deltas: more than one, so that a reader has to join them."""

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
    """The fields of a chat completion request that matter here; the rest is ignored."""

    messages: list[Message]
    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1

    @property
    def user_content(self) -> str:
        """The text of the last user message: what is judged."""
        return next((message.text for message in reversed(self.messages) if message.role == "user"), "")

    @property
    def prompt_chars(self) -> int:
        return sum(len(message.text) for message in self.messages)


class Content(msgspec.Struct, frozen=True):
    """What is judged, without its nonce: requests with equal contents are the same question asked again."""

    text: str
    digest: bytes

    @classmethod
    def of(cls, user_content: str) -> Content:
        text = NONCE.sub("", user_content)
        return cls(text, sha256(text.encode("utf-8", "surrogatepass")).digest())

    @property
    def key(self) -> str:
        """The content's name in the counts."""
        return self.digest.hex()[:32]


def expected_score(user_content: str, low: int = 1, high: int = 10) -> int:
    """The score that the mock judge gives to this user message, nonces in it ignored."""
    return _score(Content.of(user_content), low, high)


def _score(content: Content, low: int, high: int) -> int:
    return low + int.from_bytes(content.digest[:8], "big") % (high - low + 1)


def reply_text(profile: JudgeProfile, content: Content) -> str:
    """The judge's words about this content."""
    for part, reply in profile.scores.items():
        if part in content.text:
            return reply
    mixed = profile.reply_style == "mixed"
    style = STYLES[content.digest[8] % len(STYLES)] if mixed else profile.reply_style
    return worded(_score(content, profile.score_low, profile.score_high), style, profile.score_low, profile.score_high)


def worded(score: int, style: str, low: int, high: int) -> str:
    """A score as judges write it. `think` names both ends of the scale first, to mislead a careless parser."""
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
    """Tokens in a text of so many characters, at least one."""
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
    """The same as server-sent events: role, deltas, finish, usage if asked for, `[DONE]`."""
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
    """An error in the shape that the OpenAI API gives it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})
