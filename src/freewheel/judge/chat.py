"""Chat completions as clients sent them: what the gateway hands to the engine beside `JudgeRequest`s.

They go through the same limiter, retries, breaker, cache and accounts; only what is sent, and what a reply means,
differs. `exchange.py` holds that difference.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from freewheel.judge.completion import error_inside
from freewheel.judge.outcome import Failure, Kind, Reply
from freewheel.judge.verdict import Usage

WHOLE = ("stop", "tool_calls", "function_call")
"""How a completion ends that came to its own end. One that was cut off or filtered is passed on and not kept."""
SSE_TAIL_BYTES = 1 << 16
"""The end of an event stream, where its usage stands."""


class ChatRequest(msgspec.Struct, frozen=True):
    """One chat completion as a client sent it.

    Equal ones are sent once, as judge requests are, where one answer can stand for another: with `temperature` 0 or a
    `seed`. All others ask for a sample, and who asks for two votes wants two.
    """

    body: bytes
    """A JSON object. It goes upstream as it is, save `model` where an endpoint has its own name for it."""
    fresh: bool = False
    """Ask the upstream whatever is cached, share with nobody, and keep the answer for the next."""
    shares_samples: bool = False
    """Take one sample for all who ask for the same."""


class ChatStream:
    """The same for `"stream": true`: it takes a slot and is retried until its first byte, and is never shared."""

    __slots__ = ("body", "sink")

    def __init__(self, body: bytes, sink: Callable[[bytes], Awaitable[None]]) -> None:
        self.body = body
        self.sink = sink
        """Gets each chunk of the event stream."""


class HungUp(Exception):
    """Who asked for a stream is gone."""


class Relayed(msgspec.Struct, frozen=True, tag="relayed"):
    """A chat completion that was answered."""

    content: bytes
    """The upstream's body; empty for a stream, which went to its sink."""
    usage: Usage = Usage()
    cached: bool = False
    attempts: int = 1

    status = "relayed"


class _Counts(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Envelope(msgspec.Struct):
    """As much of a completion as tells it from something else."""

    choices: list[_Choice]
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
