"""What the caller's side and the engine's side say to each other: msgspec structs, length-prefixed on a socket.

    caller ── Configure, Submit, Cancel, AskStats, Close ──▶ engine
    caller ◀── Started, Results, StatsReply, LogLine, Stopped ── engine

In `placement="thread"` the same messages are handed over as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from freewheel.judge.config import JudgeConfig
from freewheel.judge.request import JudgeRequest
from freewheel.judge.secret import Secret
from freewheel.judge.stats import JudgeStats
from freewheel.judge.verdict import Failed, Reason, Verdict


class Configure(msgspec.Struct, tag=True, array_like=True):
    config: JudgeConfig
    parent_pid: int
    spent: float
    """What an earlier engine of this judge has spent already: `max_cost` holds over restarts."""


class Submit(msgspec.Struct, tag=True, array_like=True):
    batch: int
    indexes: list[int]
    requests: list[JudgeRequest]
    deadline_at: float | None
    """In `time.monotonic()` seconds, one clock for all processes of a machine."""


class Cancel(msgspec.Struct, tag=True, array_like=True):
    batch: int


class AskStats(msgspec.Struct, tag=True, array_like=True):
    ticket: int


class Close(msgspec.Struct, tag=True, array_like=True):
    pass


class Started(msgspec.Struct, tag=True, array_like=True):
    pass


class Results(msgspec.Struct, tag=True, array_like=True):
    items: list[tuple[int, int, Verdict]]
    """(batch, index, verdict)."""
    spent: float


class StatsReply(msgspec.Struct, tag=True, array_like=True):
    ticket: int
    stats: JudgeStats


class LogLine(msgspec.Struct, tag=True, array_like=True):
    level: int
    text: str


class Stopped(msgspec.Struct, tag=True, array_like=True):
    error: str = ""
    """Why the engine cannot go on (a config that only shows its fault at start); empty after a `Close`."""


ToEngine = Configure | Submit | Cancel | AskStats | Close
ToCaller = Started | Results | StatsReply | LogLine | Stopped

_LENGTH = struct.Struct("!I")


def _encode_secret(value: Any) -> Any:
    if isinstance(value, Secret):
        return [value.reveal() if value else None, value.source]
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _decode_secret(kind: type, value: Any) -> Any:
    return Secret(value[0], source=value[1]) if kind is Secret else value


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_secret)
_engine_decoder = msgspec.msgpack.Decoder(ToEngine, dec_hook=_decode_secret)
_caller_decoder = msgspec.msgpack.Decoder(ToCaller)


def pack(message: ToEngine | ToCaller) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def pack_results(results: Results) -> bytes:
    """As `pack`; an item that cannot be encoded (a parser's own text may hold anything) fails alone."""
    try:
        return pack(results)
    except (OverflowError, TypeError, ValueError, msgspec.MsgspecError):
        return pack(Results([_encodable(item) for item in results.items], results.spent))


def _encodable(item: tuple[int, int, Verdict]) -> tuple[int, int, Verdict]:
    try:
        _encoder.encode(item)
    except (OverflowError, TypeError, ValueError, msgspec.MsgspecError) as error:
        return item[0], item[1], Failed(Reason.ENGINE.value, 0, f"the verdict cannot be sent: {error!r}"[:200])
    return item


class FrameReader:
    """Cuts a byte stream into messages. The same class serves both directions; the decoder differs."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    @classmethod
    def for_engine(cls) -> FrameReader:
        return cls(_engine_decoder)

    @classmethod
    def for_caller(cls) -> FrameReader:
        return cls(_caller_decoder)

    def feed(self, data: bytes) -> Iterator[Any]:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                message = self._decoder.decode(view[start + _LENGTH.size : end])
            start = end
            yield message
        del buffer[:start]
