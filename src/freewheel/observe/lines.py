"""Append-only JSON-lines files, and readers that follow them.

`Lines` writes items (trace events, samples) in a background thread:

    add(item) ─▶ queue in memory ─ one second, or many items ─▶ [thread] text ─▶ append whole lines ─▶ rotate when full
      │ never waits, never raises                                          └─ full disk: count, try again

    NAME-PID.jsonl     the current file
    NAME-PID.1.jsonl   the previous file, when it was full
    NAME-PID.0.jsonl   the start of the run, if it is kept; never removed

Each process has its own files, so no process waits for another. A killed process loses at most its last second. All
files of one name, including those of earlier processes, take at most `most_bytes`.

`Tail` returns the whole lines that were appended to a file since the last look. `Folder` does the same for a folder.
`decode_line` decodes one line.

    look ─▶ blocks of whole lines, each with its position in the file; an incomplete line waits for its rest
         ├─ shorter than before, or a new file of that name ─▶ `generation` increases, and it is read from its start
         └─ missing ─▶ nothing, until it exists again

The files may belong to a live run, or come from somebody else, so links, pipes and devices are not opened.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from freewheel.observe.metrics import plain, without_nonfinite
from freewheel.utils.files import WholeLines, private_folder

T = TypeVar("T")

FLUSH_EVERY_S = 1.0
"""A viewer looks about once a second, and a kill loses what was not written."""
FLUSH_ITEMS = 512
"""About 64 KB of trace. Larger batches do not make writing cheaper."""
MOST_WAITING = 20_000
"""Items in memory while a disk hangs: a few MB, and many seconds of any trace."""
HEAD_SHARE = 0.25
"""Share of the bytes that the start of a run may keep."""
SUFFIX = ".jsonl"


class Lines:
    """An added item is in a file one second later, or is counted in `lost`. Adding never waits for a disk."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        name: str,
        *,
        most_bytes: int,
        keeps_head: bool = False,
        render: Callable[[Any], bytes] | None = None,
    ) -> None:
        """`render` turns an item into whole lines, in the writing thread. Without it an item is one JSON value. No file
        is created before the first line is written."""
        head_bytes = int(most_bytes * HEAD_SHARE) if keeps_head else 0
        self._folder = Path(folder)
        self._name = name
        self._stem = f"{name}-{os.getpid()}"
        self._file = WholeLines(self._folder / f"{self._stem}{SUFFIX}")
        self._head_bytes = head_bytes
        self._part_bytes = (most_bytes - head_bytes) // 2
        """Limit of the current file, and of all its rotated files together. So between one and two times this much is
        kept."""
        self._render = render or as_line
        self._waiting: deque[Any] = deque()
        self._dropped = 0
        self._begun = False
        self._in_head = False
        self._closed = False
        self._awake = False
        """True while the thread knows about waiting items. It is checked for every line and is cheaper than an event.
        """
        self._some = threading.Event()
        self._many = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        """The holder writes."""

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def lost(self) -> int:
        return self._file.lost + self._dropped

    def add(self, item: Any) -> None:
        if self._closed or len(self._waiting) >= MOST_WAITING:
            self._dropped += 1
            return
        self._waiting.append(item)
        if not self._awake:
            self._wake()
        elif len(self._waiting) == FLUSH_ITEMS:
            self._many.set()

    def flush(self) -> None:
        """Write the items that were added so far, if possible."""
        with self._lock:
            while self._waiting:
                self._write_some()

    def close(self) -> None:
        """Write the rest. May be called twice; later items are lost."""
        self._closed = True
        self._some.set()
        self._many.set()
        self.flush()
        with self._lock:
            self._file.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._awake = True
        self._some.set()
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name} lines", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            self._some.wait()
            self._many.wait(FLUSH_EVERY_S)
            self._many.clear()
            self._some.clear()
            # Clear this before looking at the queue: an item that arrives now wakes the thread again.
            self._awake = False
            self.flush()

    # -- the files ----------------------------------------------------------------------------------------------------

    def _write_some(self) -> None:
        """Write as many waiting items as fit into one file."""
        try:
            self._begin()
        except OSError as error:
            self._file.handle_failure(len(self._waiting), error)
            self._waiting.clear()
            return
        parts: list[bytes] = []
        size = 0
        while self._waiting and len(parts) < FLUSH_ITEMS:
            data = self._rendered(self._waiting[0])
            if parts and self._file.size + size + len(data) > self._limit:
                break  # the next file takes it
            self._waiting.popleft()
            if len(data) > self._limit:  # no file has room for it
                self._dropped += 1
                continue
            parts.append(data)
            size += len(data)
        data = b"".join(parts)
        if size and self._file.size and self._file.size + size > self._limit:
            try:
                self._set_aside()
            except OSError as error:
                self._file.handle_failure(data.count(b"\n"), error)
                return
        self._file.append(data)

    def _rendered(self, item: Any) -> bytes:
        try:
            return self._render(item)
        except Exception:  # noqa: BLE001  # of a user's row, say; it costs this line and nothing else
            self._dropped += 1
            return b""

    @property
    def _limit(self) -> int:
        return self._head_bytes if self._in_head else self._part_bytes

    def _begin(self) -> None:
        if not self._begun:
            private_folder(self._folder)
            self._in_head = self._begins_run()
            self._file.open()
            self._prune()
            self._begun = True

    def _set_aside(self) -> None:
        part = 0 if self._in_head else 1
        self._file.move(self._folder / f"{self._stem}.{part}{SUFFIX}")
        self._in_head = False
        self._prune()

    def _prune(self) -> None:
        """Remove the oldest files until the rest fit."""
        kept = self._kept()
        excess = sum(one.size for one in kept) - self._part_bytes
        for one in kept:
            if excess > 0:
                one.path.unlink(missing_ok=True)
                excess -= one.size

    def _begins_run(self) -> bool:
        """Return whether the next lines are the start of a run, which is kept. If an earlier process died while writing
        the start, its file is the start."""
        if not self._head_bytes or any(one.is_head for one in files_of(self._folder, self._name)):
            return False
        before = self._kept()
        if not before:
            return True
        first = min(before, key=lambda one: one.written_s)
        first.path.rename(self._folder / f"{self._name}-{first.process}.0{SUFFIX}")
        return False

    def _kept(self) -> list[LineFile]:
        """Return all files except the current one and the start of the run."""
        found = files_of(self._folder, self._name)
        return [one for one in found if not one.is_head and one.path != self._file.path]


@dataclass(frozen=True)
class LineFile:
    """One file of a name."""

    path: Path
    name: str
    process: int
    part: int | None
    """None: the current file, or the last current one."""
    size: int
    written_s: float

    @property
    def is_head(self) -> bool:
        return self.part == 0


_FILE = re.compile(rf"(?P<name>.+)-(?P<process>\d+)(?:\.(?P<part>[01]))?{re.escape(SUFFIX)}")


def files_of(folder: Path, name: str | None = None) -> list[LineFile]:
    """Return the files of one name, or of all names, oldest first. Other files are ignored."""
    found = []
    for path in folder.iterdir() if folder.exists() else ():
        match = _FILE.fullmatch(path.name)
        if match is None or (name is not None and match["name"] != name):
            continue
        try:
            about = path.lstat()
        except FileNotFoundError:  # rotated or removed meanwhile
            continue
        if stat.S_ISREG(about.st_mode):
            part = None if match["part"] is None else int(match["part"])
            found.append(LineFile(path, match["name"], int(match["process"]), part, about.st_size, about.st_mtime))
    return sorted(found, key=lambda one: (one.written_s, one.part is None, one.path.name))


def as_line(value: Any) -> bytes:
    """Return one JSON value as a line. NaN and infinities become null. Values that JSON does not have become their
    text."""
    try:
        return msgspec.json.encode(value) + b"\n"
    except (TypeError, ValueError, msgspec.MsgspecError):  # not a plain value, or a lone surrogate
        finite, _ = without_nonfinite(plain(value))
        return json.dumps(finite, ensure_ascii=False).encode(errors="replace") + b"\n"


def decode_line(decoder: msgspec.json.Decoder[T], line: bytes) -> T | None:
    """Decode a line. None for an incomplete line, invalid text, or nesting that is too deep."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def read_lines(path: Path, *, refused: Callable[[], object] = lambda: None) -> Iterator[Any]:
    """Yield the values of a file, during or after writing. Incomplete lines are skipped. `refused` is called for each
    invalid line, except for a last line that may become complete."""
    fd = open_regular(path)
    if fd is None:
        return
    with os.fdopen(fd, "rb") as file:
        for line in file:
            if (value := decode_line(_ANY, line)) is not None:
                yield value
            elif line.endswith(b"\n"):
                refused()


BLOCK_BYTES = 8 << 20
"""Bytes per read: large enough to hide the cost of a read, small compared with what is kept."""
LONGEST_LINE_BYTES = 64 << 20
"""Longer lines are not ours and are skipped."""

HEAD_BYTES = 64
"""Identifies a file: the first line of each of our files contains its time."""

Identity = tuple[int, int]


class Block(NamedTuple):
    """Whole lines, and their position in the file."""

    offset: int
    lines: list[bytes]


def open_regular(path: Path) -> int | None:
    """Return a descriptor for reading, or None if there is no regular file. Never blocks, unlike opening a pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


class Tail:
    """Follows one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        """Increases when earlier results no longer hold."""
        self.exists = False
        self._identity: Identity | None = None
        self._head = b""
        self._offset = 0

    def look(self) -> Iterator[Block]:
        """Yield new blocks. `generation` is up to date before the first block."""
        fd = open_regular(self.path)
        if fd is None:
            self.exists = False
            return iter(())
        about = os.fstat(fd)
        if not self._is_same(fd, about):
            self.generation += self._identity is not None
            self._identity, self._offset = (about.st_dev, about.st_ino), 0
        self.exists = True
        if about.st_size == self._offset:
            os.close(fd)
            return iter(())
        self._head = os.pread(fd, min(HEAD_BYTES, about.st_size), 0)
        return self._blocks(fd)

    def _is_same(self, fd: int, about: os.stat_result) -> bool:
        """Return whether this is the file that was read before, unchanged or longer. The inode alone does not tell,
        because the number of a removed file may be reused."""
        if not self.exists or (about.st_dev, about.st_ino) != self._identity or about.st_size < self._offset:
            return False
        return about.st_size == self._offset or os.pread(fd, len(self._head), 0) == self._head

    def _blocks(self, fd: int) -> Iterator[Block]:
        wanted = BLOCK_BYTES
        try:
            while data := os.pread(fd, wanted, self._offset):
                whole = data.rfind(b"\n") + 1
                if whole:
                    start, self._offset, wanted = self._offset, self._offset + whole, BLOCK_BYTES
                    yield Block(start, data[: whole - 1].split(b"\n"))
                elif len(data) < wanted:
                    return  # an incomplete line, so far
                elif wanted < LONGEST_LINE_BYTES:
                    wanted *= 2
                else:
                    self._offset += len(data)
        finally:
            os.close(fd)


class Folder:
    """Follows all JSON-lines files of a folder. A file is identified by its inode, not its name, so a rotated file is
    not read twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.exists = False
        self.tails: dict[Identity, Tail] = {}

    def look(self, forget: Callable[[Identity], object]) -> Iterator[tuple[Identity, Iterator[Block]]]:
        """Yield the new blocks of each file, in the order of their names. `forget` is called for each file that is
        gone or has other content, before its blocks."""
        before, self.tails = self.tails, {}
        try:
            paths = sorted(path for path in self.path.iterdir() if path.name.endswith(SUFFIX))
            self.exists = True
        except OSError:
            paths, self.exists = [], False
        for path in paths:
            try:
                about = path.lstat()
            except OSError:  # rotated at this moment
                continue
            identity = (about.st_dev, about.st_ino)
            self.tails[identity] = before.get(identity) or Tail(path)
            self.tails[identity].path = path
        for identity in before.keys() - self.tails.keys():
            forget(identity)
        for identity, tail in self.tails.items():
            generation = tail.generation
            blocks = tail.look()
            if tail.generation != generation:
                forget(identity)
            yield identity, blocks
