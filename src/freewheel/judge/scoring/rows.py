"""One line in, one line out: reads a row to a `JudgeRequest`, and writes the row again with its verdict.

    {"response": …, "prompt": …, "anything": …}   ─▶   {"response": …, "prompt": …, "anything": …, "verdict": {…}}

The input's bytes are kept as they are, so a number's digits and a field's order survive. All that is added stands
under one key; a row that has this key already is refused, so nothing is ever overwritten.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Protocol

import msgspec

from freewheel.errors import ConfigError
from freewheel.judge.config import JudgeConfig
from freewheel.judge.request import JudgeRequest
from freewheel.judge.scoring.lines import MAX_LINE_BYTES, Line
from freewheel.judge.verdict import Failed, Scored, Usage, Verdict

MALFORMED = "malformed"
"""The reason of a row that could not be read; no judge has seen it."""
KEY_HEX_DIGITS = 16
"""64 bits: enough to tell that a line is the one that was scored, short enough to stand in each row."""
UTF8_BOM = b"\xef\xbb\xbf"


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """Where in a row the things are. Every other field is passed through unread."""

    response: str = "response"
    prompt: str = "prompt"
    reference: str = "reference"
    skip: str = "skip"
    verdict: str = "verdict"
    """The key under which the verdict is added."""

    def __post_init__(self) -> None:
        names = msgspec.structs.astuple(self)
        for key, name in zip(self.__struct_fields__, names, strict=True):
            if not name:
                raise ConfigError(f"{key}_field", name, "give the field's name")
            if names.count(name) > 1:
                raise ConfigError(f"{key}_field", name, "another field has this name; give each its own")


class MalformedRowError(ValueError):
    """The line holds no row. The message says what is wrong with it."""


class Entry(msgspec.Struct, kw_only=True):
    """What is added to a row. Fields that say nothing are left out."""

    line: int
    status: str
    score: float | None
    key: str
    raw: str | msgspec.UnsetType = msgspec.UNSET
    parts: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET
    detail: str | msgspec.UnsetType = msgspec.UNSET
    attempts: int | msgspec.UnsetType = msgspec.UNSET
    cached: bool | msgspec.UnsetType = msgspec.UNSET
    usage: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class _Decoder(Protocol):
    def decode(self, buf: bytes, /) -> Any: ...


class RowFormat:
    """Reads and writes the rows of one job."""

    def __init__(self, config: JudgeConfig, fields: Fields) -> None:
        self.fields = fields
        text = str | None
        row = msgspec.defstruct(
            "Row",
            [
                ("response", text, None),
                ("prompt", text, None),
                ("reference", text, None),
                ("skip", str | bool | None, None),
                ("verdict", msgspec.Raw, msgspec.Raw()),
            ],
            rename=msgspec.structs.asdict(fields),
        )
        self._decoder: _Decoder = msgspec.json.Decoder(row)
        self._row = row
        written = msgspec.defstruct("Written", [("verdict", WrittenEntry)], rename={"verdict": fields.verdict})
        self._written_decoder: _Decoder = msgspec.json.Decoder(written)
        self._written = written
        self._encode = msgspec.json.Encoder().encode
        self._opening = self._encode(fields.verdict) + b":"
        # The endpoint is not part of it: a run may go on at another place that serves the same model.
        judge = (
            config.endpoints[0].model or config.model,
            config.loaded_rubric,
            config.sampling,
            config.temperature,
            config.max_tokens,
        )
        self._judge_hash = hashlib.sha256(msgspec.json.encode(judge, order="deterministic"))

    # -- in -----------------------------------------------------------------------------------------------------------

    def read(self, line: Line) -> JudgeRequest:
        """The request in a line. `MalformedRowError` where there is none."""
        if line.too_long:
            raise MalformedRowError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
        text = line.text
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise MalformedRowError(f"not UTF-8: byte {error.start + 1} is 0x{text[error.start]:02x}") from None
        try:
            row = _decode(self._decoder, self._row, text)
        except msgspec.ValidationError as error:
            raise MalformedRowError(_plainly(str(error))) from None
        except (ValueError, RecursionError) as error:
            raise MalformedRowError(f"not JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
        if len(bytes(row.verdict)):
            raise MalformedRowError(
                f"the row has a field {self.fields.verdict!r} already; choose another name with --verdict-field"
            )
        if row.skip:
            return JudgeRequest(row.response or "", skip=row.skip if isinstance(row.skip, str) else "skip")
        if row.response is None:
            raise MalformedRowError(f"it has no text in {self.fields.response!r}")
        return JudgeRequest(row.response, row.prompt or "", row.reference or "")

    def key(self, request: JudgeRequest) -> str:
        """Stands for the judge (model, rubric, sampling) and what it is asked; equal for equal content."""
        texts = [t.encode("utf-8", "surrogatepass") for t in (request.prompt, request.reference, request.response)]
        digest = self._judge_hash.copy()
        digest.update(b"%d:%d:%d:" % tuple(map(len, texts)) + b"".join(texts))
        return digest.hexdigest()[:KEY_HEX_DIGITS]

    def malformed_key(self, line: Line) -> str:
        """The same for a line that could not be read."""
        return hashlib.sha256(line.text).hexdigest()[:KEY_HEX_DIGITS]

    # -- out ----------------------------------------------------------------------------------------------------------

    def write(self, line: Line, key: str, verdict: Verdict) -> bytes:
        """The row with its verdict, newline included."""
        entry = Entry(line=line.number, status=verdict.status, score=None, key=key)
        if isinstance(verdict, Scored):
            entry.score = verdict.value
            entry.raw = verdict.raw
            if verdict.parts:
                entry.parts = verdict.parts
            entry.cached = verdict.cached
        else:
            entry.reason = verdict.reason
        if isinstance(verdict, Failed) and verdict.detail:
            entry.detail = verdict.detail
        if isinstance(verdict, Scored | Failed):
            entry.attempts = verdict.attempts
            if verdict.usage != _NO_USAGE:
                entry.usage = {name: getattr(verdict.usage, name) for name in Usage.__struct_fields__}
        row = line.text.rstrip()
        return b"%b,%b%b}\n" % (row[:-1], self._opening, self._encode(entry))

    def write_malformed(self, line: Line, detail: str) -> bytes:
        """A row that holds a verdict alone, as there is nothing that could be passed through."""
        key = self.malformed_key(line)
        entry = Entry(line=line.number, status="failed", score=None, key=key, reason=MALFORMED, detail=detail)
        return b"{%b%b}\n" % (self._opening, self._encode(entry))

    def read_written(self, text: bytes) -> WrittenEntry:
        """The verdict of a row of an output file. `ValueError` where it is not one."""
        try:
            entry: WrittenEntry = _decode(self._written_decoder, self._written, text).verdict
        except RecursionError as error:
            raise ValueError(str(error)) from None
        return entry


class WrittenEntry(msgspec.Struct, frozen=True):
    """As much of an `Entry` as a later run needs."""

    line: int
    status: str
    key: str
    reason: str = ""
    detail: str = ""
    cached: bool = False


_NO_USAGE = Usage()


def is_blank(text: bytes) -> bool:
    return not text or text.isspace()


def _decode(decoder: _Decoder, kind: type[msgspec.Struct], text: bytes) -> Any:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # msgspec refuses lone surrogates, which models do emit and Python's json does write.
        if b"\\ud" not in text and b"\\uD" not in text:
            raise
    plain = json.loads(text, parse_constant=_refuse_constant)
    known = msgspec.structs.fields(kind)
    if isinstance(plain, dict):
        plain = {field.encode_name: plain[field.encode_name] for field in known if field.encode_name in plain}
        for field in known:
            if field.type is msgspec.Raw and field.encode_name in plain:
                plain[field.encode_name] = msgspec.Raw(b"null")  # that it is there is all that is asked
    return msgspec.convert(plain, kind)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _plainly(message: str) -> str:
    """msgspec's words without its path syntax: `Expected `str | null`, got `int` - at `$.response``."""
    return message.replace("`$.", "`").replace("`", "'").replace("str", "text")
