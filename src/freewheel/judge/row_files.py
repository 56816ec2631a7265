"""Files of rows for `freewheel score`: read lines, read a row as a request, write the row with its verdict.

    {"response": …, "prompt": …, "anything": …}   ─▶   {"response": …, "prompt": …, "anything": …, "verdict": {…}}

The input's bytes are kept, so the digits of a number and the order of fields survive. Everything that is added is
under one key. A row that already has this key is refused, so nothing is overwritten. `ScoringJob` is the caller.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from freewheel.errors import ConfigError
from freewheel.judge.config import JudgeConfig
from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import Failed, Scored, Usage, Verdict

READ_BYTES = 1 << 18
"""Large enough that a read costs nothing per line, small enough that its lines fit the window of a job."""
MAX_LINE_BYTES = 32 << 20
"""No judge accepts a prompt of this size. A longer line means that the file is not JSON Lines."""
MAX_ROW_BYTES = 2 * MAX_LINE_BYTES
"""A row is its line and a verdict, and a judge's reply is much shorter than a line may be."""
MALFORMED = "malformed"
"""The reason of a row that could not be read; no judge has seen it."""
REMEDY = "give another output file, or --overwrite to begin anew"
UTF8_BOM = b"\xef\xbb\xbf"
_KEY_HEX_DIGITS = 16
"""64 bits: enough to recognise the line that was scored, short enough to be in each row."""
_LOCK_TRIES = 8
"""A file can be replaced between opening and locking it, but not again and again."""
_NO_USAGE = Usage()


# -- lines ------------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line of a file."""

    number: int
    """Counted from 1, blank lines included."""
    text: bytes
    """Without its newline; empty if it is too long."""
    start: int
    end: int
    """The line's bytes in the file, newline included."""
    complete: bool = True
    """False for a last line without a newline."""
    too_long: bool = False


class Lines:
    """Reads `fd` to its end in constant memory: one block and at most `max_line_bytes`."""

    def __init__(self, fd: int, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._fd = fd
        self._max = max_line_bytes
        self._number = 0
        self._start = 0
        self._pieces: list[bytes] = []
        self._held = 0

    def blocks(self, first: int = 1) -> Iterator[list[Line]]:
        """The lines from number `first` on, one list per read: lines of a slow pipe are returned at once."""
        while data := os.read(self._fd, READ_BYTES):
            *texts, rest = data.split(b"\n")
            lines = [self._end_line(text) for text in texts]
            self._carry(rest)
            if lines and lines[-1].number >= first:
                yield [line for line in lines if line.number >= first]
        if self._held:
            last = self._end_line(b"", complete=False)
            if last.number >= first:
                yield [last]

    def _carry(self, piece: bytes) -> None:
        """Keep the start of a line whose end is not read yet. Above the limit only its length counts."""
        self._held += len(piece)
        if self._held > self._max:
            self._pieces = []
        elif piece:
            self._pieces.append(piece)

    def _end_line(self, text: bytes, *, complete: bool = True) -> Line:
        length = self._held + len(text)
        too_long = length > self._max
        if too_long:
            text = b""
        elif self._pieces:
            text = b"".join([*self._pieces, text])
        self._number += 1
        end = self._start + length + complete
        line = Line(self._number, text, self._start, end, complete, too_long)
        self._pieces, self._held, self._start = [], 0, end
        return line


def is_blank(text: bytes) -> bool:
    return not text or text.isspace()


# -- rows -------------------------------------------------------------------------------------------------------------


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a row's fields. Every other field is passed through unread."""

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
    """The line holds no row. The message names the fault."""


class _Entry(msgspec.Struct, kw_only=True):
    """What is added to a row, without the fields that have no value."""

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


class WrittenEntry(msgspec.Struct, frozen=True):
    """The part of an entry that a later run needs."""

    line: int
    status: str
    key: str
    reason: str = ""
    detail: str = ""
    cached: bool = False


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
        # Without the endpoint: a run may continue at another address that serves the same model.
        judge = (
            config.endpoints[0].model or config.model,
            config.loaded_rubric,
            config.sampling,
            config.temperature,
            config.max_tokens,
        )
        self._judge_hash = hashlib.sha256(msgspec.json.encode(judge, order="deterministic"))

    def read(self, line: Line) -> JudgeRequest:
        """The request in a line. Raises `MalformedRowError` if there is none."""
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
            raise MalformedRowError(_in_plain_words(str(error))) from None
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
        """Identifies the judge (model, rubric, sampling) and the content. Equal for equal content."""
        texts = [t.encode("utf-8", "surrogatepass") for t in (request.prompt, request.reference, request.response)]
        digest = self._judge_hash.copy()
        digest.update(b"%d:%d:%d:" % tuple(map(len, texts)) + b"".join(texts))
        return digest.hexdigest()[:_KEY_HEX_DIGITS]

    def malformed_key(self, line: Line) -> str:
        """The key of a line that could not be read."""
        return hashlib.sha256(line.text).hexdigest()[:_KEY_HEX_DIGITS]

    def write(self, line: Line, key: str, verdict: Verdict) -> bytes:
        """The row with its verdict, newline included."""
        entry = _Entry(line=line.number, status=verdict.status, score=None, key=key)
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
        """A row that holds only a verdict, because nothing can be passed through."""
        key = self.malformed_key(line)
        entry = _Entry(line=line.number, status="failed", score=None, key=key, reason=MALFORMED, detail=detail)
        return b"{%b%b}\n" % (self._opening, self._encode(entry))

    def read_written(self, text: bytes) -> WrittenEntry:
        """The verdict in a row of an output file. Raises `ValueError` if it is not one."""
        try:
            entry: WrittenEntry = _decode(self._written_decoder, self._written, text).verdict
        except RecursionError as error:
            raise ValueError(str(error)) from None
        return entry


def _decode(decoder: _Decoder, kind: type[msgspec.Struct], text: bytes) -> Any:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # msgspec refuses lone surrogates, which models emit and Python's json writes.
        if b"\\ud" not in text and b"\\uD" not in text:
            raise
    plain = json.loads(text, parse_constant=_refuse_constant)
    known = msgspec.structs.fields(kind)
    if isinstance(plain, dict):
        plain = {field.encode_name: plain[field.encode_name] for field in known if field.encode_name in plain}
        for field in known:
            if field.type is msgspec.Raw and field.encode_name in plain:
                plain[field.encode_name] = msgspec.Raw(b"null")  # only its presence matters
    return msgspec.convert(plain, kind)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _in_plain_words(message: str) -> str:
    """msgspec's message without its path syntax: `Expected `str | null`, got `int` - at `$.response``."""
    return message.replace("`$.", "`").replace("`", "'").replace("str", "text")


# -- totals -----------------------------------------------------------------------------------------------------------


class Tally(msgspec.Struct, kw_only=True):
    """Rows by outcome. `scored`, `failed`, `skipped` and `malformed` add up to the rows of the output."""

    scored: int = 0
    failed: int = 0
    skipped: int = 0
    malformed: int = 0
    cached: int = 0
    """Of `scored`: answered from the cache, at no cost."""
    reasons: dict[str, int] = {}
    """`failed` by reason."""
    first_failure: str = ""
    """The line and the fault of the first of `failed`."""

    @property
    def rows(self) -> int:
        return self.scored + self.failed + self.skipped + self.malformed

    def count(self, verdict: Verdict, line: int) -> None:
        if isinstance(verdict, Scored):
            self.scored += 1
            self.cached += verdict.cached
        elif isinstance(verdict, Failed):
            self._count_failed(verdict.reason, line, verdict.detail)
        else:
            self.skipped += 1

    def count_written(self, entry: WrittenEntry) -> None:
        """Count a row of an earlier run."""
        if entry.status == "scored":
            self.scored += 1
            self.cached += entry.cached
        elif entry.reason == MALFORMED:
            self.malformed += 1
        elif entry.status == "skipped":
            self.skipped += 1
        else:
            self._count_failed(entry.reason, entry.line, entry.detail)

    def _count_failed(self, reason: str, line: int, detail: str) -> None:
        self.failed += 1
        self.first_failure = self.first_failure or f"line {line}: {detail or reason}"
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


# -- outputs ----------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What an output file already holds."""

    tally: Tally
    last_line: int
    """The input line of its last row; 0 for an empty file."""
    last_key: str


class Output:
    """Takes whole rows. This class itself is a pipe or a device, which cannot be continued."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def append(self, rows: bytes) -> None:
        """Write whole rows. After an `OSError`, nothing of this call is left in a file."""
        view = memoryview(rows)
        while view:
            view = view[os.write(self.fd, view) :]

    def finish(self) -> None:
        """The job reached the end of its input."""

    def abandon(self) -> None:
        """The job stopped before the end of its input."""


class FileOutput(Output):
    """The file at `path`, locked by this process until it is closed. A later run can continue it."""

    def __init__(self, path: Path) -> None:
        super().__init__(_open_locked(path))
        self.path = path
        self._size = os.lseek(self.fd, 0, os.SEEK_END)

    def scan(self, rows: RowFormat) -> Found:
        """Read the file, check that it is an output, and cut off a last row that is not whole."""
        tally, last_line, last_key = Tally(), 0, ""
        for row in self.read_rows():
            if not row.complete:
                self._cut(row.start)
                break
            try:
                entry = rows.read_written(row.text)
            except ValueError:
                entry = None
            if entry is None or entry.line <= last_line:
                remedy = f"its line {row.number} is no row of `freewheel score`; {REMEDY}"
                raise ConfigError("output", str(self.path), remedy)
            tally.count_written(entry)
            last_line, last_key = entry.line, entry.key
        return Found(tally, last_line, last_key)

    def read_rows(self) -> Iterator[Line]:
        os.lseek(self.fd, 0, os.SEEK_SET)
        for block in Lines(self.fd, max_line_bytes=MAX_ROW_BYTES).blocks():
            yield from block

    def clear(self) -> None:
        self._cut(0)

    def append(self, rows: bytes) -> None:
        try:
            super().append(rows)
        except OSError:
            with contextlib.suppress(OSError):  # the next run cuts it off
                self._cut(self._size)
            raise
        self._size += len(rows)

    def finish(self) -> None:
        os.fsync(self.fd)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)

    def _cut(self, size: int) -> None:
        os.ftruncate(self.fd, size)
        self._size = os.lseek(self.fd, size, os.SEEK_SET)


class Replacement(Output):
    """A new version of a `FileOutput`. It replaces the file when it is finished; until then the file is unchanged."""

    def __init__(self, original: FileOutput) -> None:
        self._replaced = original.path.resolve()  # if it is a link, the file that it leads to
        self._path = self._replaced.with_name(self._replaced.name + ".retry")
        # The lock of the original keeps a second run away from this file too.
        super().__init__(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
        os.fchmod(self.fd, stat.S_IMODE(os.fstat(original.fd).st_mode))

    def finish(self) -> None:
        os.fsync(self.fd)
        os.close(self.fd)
        self._path.replace(self._replaced)

    def abandon(self) -> None:
        os.close(self.fd)
        self._path.unlink(missing_ok=True)


def is_stream(path: str) -> bool:
    """Whether `path` cannot be continued: `-`, or a pipe or a device."""
    if path == "-":
        return True
    try:
        return not stat.S_ISREG(Path(path).stat().st_mode) and not Path(path).is_dir()
    except OSError:
        return False


def _open_locked(path: Path) -> int:
    for _ in range(_LOCK_TRIES):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError("output", str(path), f"it cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(
                "output", str(path), "another run is writing to it; wait for it, or give another output file"
            ) from None
        except OSError:
            return fd  # a file system without locks
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)  # replaced meanwhile: the lock is on a file that nobody finds any more
    raise ConfigError("output", str(path), "it is being replaced again and again; give another output file")
