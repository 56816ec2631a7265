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
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from freewheel.errors import ConfigError
from freewheel.judge.config import JudgeConfig
from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import Verdict, plain_verdict

READ_BYTES = 1 << 18
"""Large enough that a read costs nothing per line, small enough that its lines fit the window of a job."""
_MAX_LINE_BYTES = 32 << 20
"""No judge accepts a prompt of this size. A longer line means that the file is not JSON Lines."""
_MAX_ROW_BYTES = 2 * _MAX_LINE_BYTES
"""A row is its line and a verdict, and a judge's reply is much shorter than a line may be."""
MALFORMED = "malformed"
"""The reason of a row that could not be read; no judge has seen it."""
REMEDY = "give another output file, or --overwrite to start over"
_KEY_HEX_DIGITS = 16
"""64 bits: enough to recognise the line that was scored, short enough to be in each row."""


# -- lines ------------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line of a file."""

    number: int
    """Counted from 1, blank lines included."""
    text: bytes
    """The line without its newline; empty if it is too long."""
    start: int
    end: int
    """The line's bytes in the file, newline included."""
    is_complete: bool = True
    """False for a last line without a newline."""
    is_too_long: bool = False


def read_lines(fd: int, first: int = 1, *, max_bytes: int = _MAX_LINE_BYTES) -> Iterator[list[Line]]:
    """Yield the lines from number `first` on, one list per read, so that a slow pipe holds no line back. A list may be
    empty.

    Memory is constant: a block and at most `max_bytes`.
    """
    number = start = dropped = 0
    rest = b""
    is_open = True
    while is_open:
        data = os.read(fd, READ_BYTES)
        is_open = bool(data)
        *texts, rest = (rest + data).split(b"\n")
        if not is_open and (rest or dropped):
            texts.append(rest)
        lines: list[Line] = []
        for text in texts:
            number += 1
            length = dropped + len(text)
            end = start + length + is_open
            is_too_long = length > max_bytes
            lines.append(Line(number, b"" if is_too_long else text, start, end, is_open, is_too_long))
            start, dropped = end, 0
        if dropped or len(rest) > max_bytes:  # of a line that is too long, only the length is kept
            dropped, rest = dropped + len(rest), b""
        yield [line for line in lines if line.number >= first]


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
        names = msgspec.structs.asdict(self)
        for key, name in names.items():
            if not name:
                raise ConfigError(f"{key}_field", name, "give the field's name")
            if list(names.values()).count(name) > 1:
                raise ConfigError(f"{key}_field", name, "another field has this name; give each its own")


class MalformedRowError(ValueError):
    """The line holds no row. The message names the fault."""


class AddedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are added to a row. Fields without a value are left out."""

    line: int
    status: str
    score: float | None
    key: str
    raw: str | UnsetType = UNSET
    parts: dict[str, float] | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    detail: str | UnsetType = UNSET
    attempts: int | UnsetType = UNSET
    cached: bool | UnsetType = UNSET
    usage: dict[str, int] | UnsetType = UNSET

    @classmethod
    def of(cls, line: int, key: str, verdict: Verdict) -> AddedFields:
        fields = plain_verdict(verdict)
        is_empty = {"detail": not fields.get("detail"), "usage": not any(fields.get("usage", {}).values())}
        fields = {name: value for name, value in fields.items() if not is_empty.get(name)}
        return cls(line=line, key=key, score=fields.pop("value", None), **fields)


class RowFormat:
    """Reads and writes the rows of one job."""

    def __init__(self, config: JudgeConfig, fields: Fields) -> None:
        self._fields = fields
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
        if line.is_too_long:
            raise MalformedRowError(f"the line is longer than {_MAX_LINE_BYTES >> 20} MiB")
        names = self._fields
        try:
            row = _load(line.text)
        except UnicodeDecodeError as error:
            raise MalformedRowError(f"not UTF-8: byte {error.start + 1} is 0x{line.text[error.start]:02x}") from None
        except ValueError as error:
            raise MalformedRowError(f"not JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
        if names.verdict in row:
            name = names.verdict
            raise MalformedRowError(f"the row has a field {name!r} already; choose another name with --verdict-field")
        response, prompt, reference, skip = map(row.get, (names.response, names.prompt, names.reference, names.skip))
        for name in (names.response, names.prompt, names.reference, names.skip):
            if not isinstance(row.get(name), str | None) and not (name == names.skip and isinstance(skip, bool)):
                raise MalformedRowError(f"{name!r} holds no text")
        if skip:
            return JudgeRequest(response or "", skip=skip if isinstance(skip, str) else "skip")
        if response is None:
            raise MalformedRowError(f"it has no text in {names.response!r}")
        return JudgeRequest(response, prompt or "", reference or "")

    def key(self, request: JudgeRequest) -> str:
        """Identifies the judge (model, rubric, sampling) and the content. Equal for equal content."""
        texts = [t.encode("utf-8", "surrogatepass") for t in (request.prompt, request.reference, request.response)]
        digest = self._judge_hash.copy()
        digest.update(b"%d:%d:%d:" % tuple(map(len, texts)) + b"".join(texts))
        return digest.hexdigest()[:_KEY_HEX_DIGITS]

    def malformed_entry(self, line: Line, detail: str) -> AddedFields:
        key = hashlib.sha256(line.text).hexdigest()[:_KEY_HEX_DIGITS]
        return AddedFields(line=line.number, status="failed", score=None, key=key, reason=MALFORMED, detail=detail)

    def write(self, line: Line, entry: AddedFields) -> bytes:
        """The row with its verdict, newline included. A malformed row has nothing else: it cannot be passed through."""
        before = b"{" if entry.reason == MALFORMED else line.text.rstrip()[:-1] + b","
        return b"%b%b:%b}\n" % (before, msgspec.json.encode(self._fields.verdict), msgspec.json.encode(entry))

    def read_written(self, text: bytes) -> AddedFields:
        """Return the verdict in a row of an output file. Raises `ValueError` if the row is not from an output file."""
        return msgspec.convert(_load(text).get(self._fields.verdict), AddedFields)


def _load(text: bytes) -> dict[str, Any]:
    """The fields of a row. Raises `ValueError` if there are none."""
    if not text.isascii():
        text.decode()
    try:
        try:
            row = msgspec.json.decode(text)
        except msgspec.DecodeError:
            # msgspec refuses lone surrogates, which models emit and Python's json writes.
            if b"\\ud" not in text.lower():
                raise
            row = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    return row


# -- totals -----------------------------------------------------------------------------------------------------------


class RowCounts(msgspec.Struct, kw_only=True):
    """Rows by outcome. `scored`, `failed`, `skipped` and `malformed` add up to the rows of the output."""

    scored: int = 0
    failed: int = 0
    skipped: int = 0
    malformed: int = 0
    cached: int = 0
    """Rows among `scored` that were answered from the cache, at no cost."""
    reasons: dict[str, int] = {}
    """Number of `failed` rows by reason."""
    first_failure: str = ""
    """The line and the fault of the first of `failed`."""

    @property
    def rows(self) -> int:
        return self.scored + self.failed + self.skipped + self.malformed

    def count(self, entry: AddedFields) -> None:
        if entry.status == "scored":
            self.scored += 1
            self.cached += bool(entry.cached)
        elif entry.status == "skipped":
            self.skipped += 1
        elif entry.reason == MALFORMED:
            self.malformed += 1
        else:
            reason = entry.reason or ""
            self.failed += 1
            self.first_failure = self.first_failure or f"line {entry.line}: {entry.detail or reason}"
            self.reasons[reason] = self.reasons.get(reason, 0) + 1


# -- outputs ----------------------------------------------------------------------------------------------------------


class RowOutput:
    """Writes whole rows. This base class is for a pipe or a device, which a later run cannot continue."""

    def __init__(self, fd: int, name: str = "-") -> None:
        self.fd = fd
        self.name = name
        self.tally = RowCounts()
        """The rows in it, those of an earlier run included."""
        self.last_line = 0
        """The input line of its last row."""
        self.last_key = ""
        self.earlier: Iterator[Line] | None = None
        """Rows of an earlier output, to keep or to score again."""

    def append(self, rows: bytes) -> None:
        """Write whole rows. After an `OSError`, nothing of this call is left in a file."""
        view = memoryview(rows)
        while view:
            view = view[os.write(self.fd, view) :]

    def finish(self, *, is_complete: bool) -> None:
        """Called when the job ends. `is_complete`: it reached the end of its input."""


class FileOutput(RowOutput):
    """The file at `path`, locked by this process until it is closed. A later run can continue it."""

    def __init__(self, path: Path) -> None:
        super().__init__(_open_locked(path), str(path))
        self.path = path
        self._size = os.lseek(self.fd, 0, os.SEEK_END)

    def scan(self, rows: RowFormat) -> None:
        """Read the file, check that it is an output, and cut off a last row that is not whole."""
        for row in self.read_rows():
            if not row.is_complete:
                self.cut(row.start)
                break
            try:
                entry = rows.read_written(row.text)
            except ValueError:
                entry = None
            if entry is None or entry.line <= self.last_line:
                raise ConfigError(
                    "output", self.name, f"its line {row.number} is not a row of `freewheel score`; {REMEDY}"
                )
            self.tally.count(entry)
            self.last_line, self.last_key = entry.line, entry.key

    def read_rows(self) -> Iterator[Line]:
        os.lseek(self.fd, 0, os.SEEK_SET)
        for block in read_lines(self.fd, max_bytes=_MAX_ROW_BYTES):
            yield from block

    def cut(self, size: int) -> None:
        os.ftruncate(self.fd, size)
        self._size = os.lseek(self.fd, size, os.SEEK_SET)

    def append(self, rows: bytes) -> None:
        try:
            super().append(rows)
        except OSError:
            with contextlib.suppress(OSError):  # the next run cuts it off
                self.cut(self._size)
            raise
        self._size += len(rows)

    def finish(self, *, is_complete: bool) -> None:
        with contextlib.nullcontext() if is_complete else contextlib.suppress(OSError):
            os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class Replacement(RowOutput):
    """A new version of a `FileOutput`. It replaces the file when it is complete; until then the file is unchanged."""

    def __init__(self, original: FileOutput) -> None:
        self._replaced = original.path.resolve()  # if it is a link, the file that it leads to
        self._path = self._replaced.with_name(self._replaced.name + ".retry")
        # The lock of the original keeps a second run away from this file too.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        super().__init__(os.open(self._path, flags, 0o666), original.name)
        os.fchmod(self.fd, stat.S_IMODE(os.fstat(original.fd).st_mode))
        self.earlier = original.read_rows()

    def finish(self, *, is_complete: bool) -> None:
        if is_complete:
            os.fsync(self.fd)
            self._path.replace(self._replaced)
        else:
            self._path.unlink(missing_ok=True)
        os.close(self.fd)


def is_stream(path: str) -> bool:
    """Whether `path` is `-`, a pipe or a device, which a later run cannot continue."""
    if path == "-":
        return True
    try:
        return not stat.S_ISREG(Path(path).stat().st_mode) and not Path(path).is_dir()
    except OSError:
        return False


def _open_locked(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError("output", str(path), f"it cannot be opened: {error.strerror}") from None
    with contextlib.suppress(OSError):  # a file system without locks
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(fd), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False  # locked, or replaced or deleted since it was opened
        if not is_ours:
            os.close(fd)
            remedy = "another run is writing to it; wait for it, or give another output file"
            raise ConfigError("output", str(path), remedy)
    return fd
