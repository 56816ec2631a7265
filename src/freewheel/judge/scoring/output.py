"""Where rows go: a file that a later run can continue, its replacement, or a stream.

FileOutput      appends whole rows to a locked file; what a failed write left half done is cut off again
Replacement     writes beside the file and takes its place at the end; until then the file stays as it was
StreamOutput    a pipe or a device: nothing to lock, nothing to continue
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import NamedTuple, Protocol

from freewheel.errors import ConfigError
from freewheel.judge.scoring.accounts import Tally
from freewheel.judge.scoring.lines import MAX_LINE_BYTES, Line, Lines
from freewheel.judge.scoring.rows import RowFormat

MAX_ROW_BYTES = 2 * MAX_LINE_BYTES
"""A row is its line and a verdict, and a judge's reply is much shorter than a line may be."""
LOCK_TRIES = 8
"""A file can be replaced between opening and locking it, but not again and again."""
REMEDY = "give another output file, or --overwrite to begin anew"


class Output(Protocol):
    """Takes whole rows. After an `OSError` from `append` nothing of that call is left in a file."""

    def append(self, rows: bytes) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...


class Found(NamedTuple):
    """What an output file holds already."""

    tally: Tally
    last_line: int
    """The input line of its last row; 0 for an empty file."""
    last_key: str


class StreamOutput:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def append(self, rows: bytes) -> None:
        _write_all(self._fd, rows)

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class FileOutput:
    """The file at `path`, held by this process alone until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = _open_locked(path)
        self._size = os.fstat(self.fd).st_size
        os.lseek(self.fd, 0, os.SEEK_END)

    def clear(self) -> None:
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)
        self._size = 0

    def scan(self, rows: RowFormat) -> Found:
        """Reads what is there, checks that it is an output, and cuts off a last row that is not whole."""
        tally, last_line, last_key = Tally(), 0, ""
        os.lseek(self.fd, 0, os.SEEK_SET)
        for block in Lines(self.fd, max_line_bytes=MAX_ROW_BYTES).blocks():
            for row in block:
                if not row.complete:
                    os.ftruncate(self.fd, row.start)
                    self._size = row.start
                    break
                try:
                    entry = rows.read_written(row.text)
                except ValueError:
                    raise not_an_output(self.path, row) from None
                if entry.line <= last_line:
                    raise not_an_output(self.path, row)
                tally.count_written(entry)
                last_line, last_key = entry.line, entry.key
        os.lseek(self.fd, 0, os.SEEK_END)
        return Found(tally, last_line, last_key)

    def append(self, rows: bytes) -> None:
        try:
            _write_all(self.fd, rows)
        except OSError:
            with contextlib.suppress(OSError):  # the next run cuts it off
                os.ftruncate(self.fd, self._size)
                os.lseek(self.fd, 0, os.SEEK_END)
            raise
        self._size += len(rows)

    def finish(self) -> None:
        os.fsync(self.fd)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class Replacement:
    """A new version of a `FileOutput`, which it replaces when it is finished."""

    def __init__(self, original: FileOutput) -> None:
        self._replaced = original.path.resolve()  # where it is a link, the file that it leads to
        self._path = self._replaced.with_name(self._replaced.name + ".retry")
        # The original's lock keeps a second run away from this file too.
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        os.fchmod(self._fd, stat.S_IMODE(os.fstat(original.fd).st_mode))

    def append(self, rows: bytes) -> None:
        _write_all(self._fd, rows)

    def finish(self) -> None:
        os.fsync(self._fd)
        os.close(self._fd)
        self._path.replace(self._replaced)

    def abandon(self) -> None:
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


def not_an_output(path: Path, row: Line) -> ConfigError:
    return ConfigError("output", str(path), f"its line {row.number} is no row of `freewheel score`; {REMEDY}")


def is_stream(path: str) -> bool:
    """Whether `path` cannot be continued: `-`, or something that is no file, such as a pipe or a device."""
    if path == "-":
        return True
    try:
        return not stat.S_ISREG(Path(path).stat().st_mode) and not Path(path).is_dir()
    except OSError:
        return False


def _open_locked(path: Path) -> int:
    for _ in range(LOCK_TRIES):
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


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
