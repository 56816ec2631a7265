"""`Lines`: JSON lines that a process writes down beside its work: events of a trace, samples.

    add(item) ─▶ waits in memory ─ a second, or many ─▶ [thread] text ─▶ appended, whole lines ─▶ set aside when full
      │ never waits, never raises                                          └─ a full disk: counted, tried again

    NAME-PID.jsonl     what is written now
    NAME-PID.1.jsonl   what it was before it was full
    NAME-PID.0.jsonl   the beginning of the run, where that is kept: never removed

A process has files of its own, so that none waits for another, and one that is killed leaves what it wrote: all but its
last second. The files of one name, those of processes before it included, take `most_bytes` at most.

`Tail`: the whole lines that were appended to a file since the last look; `Folder`: the same for all of a folder;
`decoded`: what a line says.

    look ─▶ blocks of whole lines, each with its place in the file; half a line waits for its other half
         ├─ shorter than before, or another file of that name ─▶ `generation` moves, and it is read from its start
         └─ gone ─▶ nothing, until it is there again

Files belong to a run that goes on, or to somebody else who handed them over: links, pipes and devices are not opened.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from freewheel.observe.metrics import plain, without_nonfinite
from freewheel.utils.files import WholeLines, private_folder

T = TypeVar("T")

FLUSH_EVERY_S = 1.0
"""Who looks at a run looks about once a second, and a kill costs what was not written."""
FLUSH_ITEMS = 512
"""Some 64 KB of trace: more at a time makes the writing no cheaper."""
MOST_WAITING = 20_000
"""Items in memory while a disk hangs: some MB, and many seconds of any trace."""
HEAD_SHARE = 0.25
"""Of the bytes, what the beginning of a run may keep."""
SUFFIX = ".jsonl"


class Lines:
    """What was added is in a file a second later, or is counted in `lost`. Nobody who adds waits for a disk."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        name: str,
        *,
        most_bytes: int,
        keeps_head: bool = False,
        render: Callable[[Any], bytes] | None = None,
    ) -> None:
        """`render` makes whole lines of an item, in the writing thread. Without it an item is one JSON value. Nothing
        is created before the first line is written."""
        head_bytes = int(most_bytes * HEAD_SHARE) if keeps_head else 0
        self._folder = Path(folder)
        self._name = name
        self._stem = f"{name}-{os.getpid()}"
        self._file = WholeLines(self._folder / f"{self._stem}{SUFFIX}")
        self._head_bytes = head_bytes
        self._part_bytes = (most_bytes - head_bytes) // 2
        """Of the current file, and of all that it has set aside: the newest part is between one and two of them."""
        self._render = render or as_line
        self._waiting: deque[Any] = deque()
        self._dropped = 0
        self._begun = False
        self._in_head = False
        self._closed = False
        self._awake = False
        """The thread knows that something waits: asked at every line, and cheaper than an event."""
        self._some = threading.Event()
        self._many = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        """Who holds it writes."""
        _OPEN.add(self)

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
        """What was added so far is written when it returns, as far as it can be."""
        with self._lock:
            while self._waiting:
                self._write_some()

    def close(self) -> None:
        """Writes the rest. May be called twice; what is added later is lost."""
        self._closed = True
        self._some.set()
        self._many.set()
        self.flush()
        with self._lock:
            self._file.close()
        _OPEN.discard(self)

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
            self._awake = False  # before what waits is looked at: what comes now wakes it again
            self.flush()

    def _forget(self) -> None:
        """In a process that was forked off: neither the thread nor what waits is this one's."""
        self._closed = True
        self._waiting.clear()
        self._lock = threading.Lock()
        self._file.forget()

    # -- the files ----------------------------------------------------------------------------------------------------

    def _write_some(self) -> None:
        """As much of what waits as goes into one file in one piece."""
        try:
            self._begin()
        except OSError as error:
            self._file.refused(len(self._waiting), error)
            self._waiting.clear()
            return
        parts: list[bytes] = []
        size = 0
        while self._waiting and len(parts) < FLUSH_ITEMS:
            data = self._rendered(self._waiting[0])
            if parts and self._file.size + size + len(data) > self._limit:
                break  # the next file's
            self._waiting.popleft()
            if len(data) > self._limit:  # no file has room for it
                self._dropped += 1
                continue
            parts.append(data)
            size += len(data)
        if size:
            self._append(b"".join(parts))

    def _rendered(self, item: Any) -> bytes:
        try:
            return self._render(item)
        except Exception:  # noqa: BLE001  # of a user's row, say; it costs this line and nothing else
            self._dropped += 1
            return b""

    def _append(self, data: bytes) -> None:
        if self._file.size and self._file.size + len(data) > self._limit:
            try:
                self._set_aside()
            except OSError as error:
                self._file.refused(data.count(b"\n"), error)
                return
        self._file.append(data)

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
        for path in superfluous(self._kept(), most_bytes=self._part_bytes):
            path.unlink(missing_ok=True)

    def _begins_run(self) -> bool:
        """Whether what comes is a run's beginning, and kept. Where one before this died in it, that is its file."""
        if not self._head_bytes or any(one.is_head for one in files_of(self._folder, self._name)):
            return False
        before = self._kept()
        if not before:
            return True
        first = min(before, key=lambda one: one.written_s)
        first.path.rename(self._folder / f"{self._name}-{first.process}.0{SUFFIX}")
        return False

    def _kept(self) -> list[LineFile]:
        """All but the current file and the run's beginning."""
        found = files_of(self._folder, self._name)
        return [one for one in found if not one.is_head and one.path != self._file.path]


_OPEN: weakref.WeakSet[Lines] = weakref.WeakSet()


def _forget_all() -> None:
    for lines in list(_OPEN):
        lines._forget()


os.register_at_fork(after_in_child=_forget_all)


@dataclass(frozen=True)
class LineFile:
    """One file of a name."""

    path: Path
    name: str
    process: int
    part: int | None
    """None: the one that is written, or was last."""
    size: int
    written_s: float

    @property
    def is_head(self) -> bool:
        return self.part == 0


_FILE = re.compile(rf"(?P<name>.+)-(?P<process>\d+)(?:\.(?P<part>[01]))?{re.escape(SUFFIX)}")


def files_of(folder: Path, name: str | None = None) -> list[LineFile]:
    """The files of one name or of all, the oldest first. What is no such file is passed over."""
    found = []
    for entry in _entries(folder):
        match = _FILE.fullmatch(entry.name)
        if match is None or (name is not None and match["name"] != name):
            continue
        try:
            facts = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # set aside or removed meanwhile
            continue
        part = None if match["part"] is None else int(match["part"])
        found.append(
            LineFile(folder / entry.name, match["name"], int(match["process"]), part, facts.st_size, facts.st_mtime)
        )
    return sorted(found, key=lambda one: (one.written_s, one.part is None, one.path.name))


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if entry.is_file(follow_symlinks=False))
    except FileNotFoundError:
        return


def superfluous(files: Iterable[LineFile], *, most_bytes: int) -> list[Path]:
    """Of files with the oldest first, those to remove so that the others take `most_bytes` at most. Pure."""
    found = list(files)
    over = sum(one.size for one in found) - most_bytes
    gone = []
    for one in found:
        if over <= 0:
            break
        gone.append(one.path)
        over -= one.size
    return gone


def as_line(value: Any) -> bytes:
    """One JSON value a line; NaN and infinities are null. What JSON does not have is written as its text."""
    try:
        return msgspec.json.encode(value) + b"\n"
    except (TypeError, ValueError, msgspec.MsgspecError):  # no plain value, or half of a character
        finite, _ = without_nonfinite(plain(value))
        return json.dumps(finite, ensure_ascii=False).encode(errors="replace") + b"\n"


def decoded(decoder: msgspec.json.Decoder[T], line: bytes) -> T | None:
    """None where it is no such thing: half a line, no text, or nested too deeply to be read."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def read_lines(path: Path, *, refused: Callable[[], object] = lambda: None) -> Iterator[Any]:
    """The values in a file, while it is written or after. A line that is not whole is passed over, and so is the rest
    of a file that goes away. `refused`: told of each line that is no value, but not of one that may become whole."""
    try:
        with path.open("rb") as file:
            for line in file:
                if (value := decoded(_ANY, line)) is not None:
                    yield value
                elif line.endswith(b"\n"):
                    refused()
    except FileNotFoundError:
        return


BLOCK_BYTES = 8 << 20
"""Read at a time: large enough that a block's own cost is nothing, small beside what is kept of it."""
LONGEST_LINE_BYTES = 64 << 20
"""A longer line is none of ours, and is passed over."""

HEAD_BYTES = 64
"""By which a file is known again: the first line of each of ours has its time in it."""

Identity = tuple[int, int]


class Block(NamedTuple):
    """Whole lines, and where they begin in the file."""

    offset: int
    lines: list[bytes]


def open_regular(path: Path) -> int | None:
    """A descriptor for reading; None where there is no ordinary file. Never waits, as a pipe without a writer would."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


class Tail:
    """One file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        """Moves when what was read before no longer holds."""
        self.exists = False
        self._identity: Identity | None = None
        self._head = b""
        self._offset = 0

    def look(self) -> Iterator[Block]:
        """What is new. `generation` is right before the first block comes."""
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
        """Whether it is the file that was read before, and longer if at all. A number of a file alone does not say so:
        one that is removed may be given to the next."""
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
                    return  # half a line, so far
                elif wanted < LONGEST_LINE_BYTES:
                    wanted *= 2
                else:
                    self._offset += len(data)
        finally:
            os.close(fd)


class Folder:
    """All files of a folder whose names end as given, each known by what it is rather than by its name: one that is
    rotated to another name is not read twice."""

    def __init__(self, path: Path, suffix: str = ".jsonl") -> None:
        self.path = path
        self.exists = False
        self._suffix = suffix
        self._tails: dict[Identity, Tail] = {}

    def look(self) -> tuple[list[tuple[Identity, Tail]], list[Identity]]:
        """The files that are there, in the order of their names, and those that are no longer."""
        found: dict[Identity, Tail] = {}
        try:
            with os.scandir(self.path) as entries:
                names = sorted(entry.path for entry in entries if entry.name.endswith(self._suffix))
            self.exists = True
        except OSError:
            names, self.exists = [], False
        for name in names:
            try:
                about = Path(name).lstat()
            except OSError:  # rotated away in this moment
                continue
            identity = (about.st_dev, about.st_ino)
            found[identity] = self._tails.get(identity) or Tail(Path(name))
            found[identity].path = Path(name)
        gone = [identity for identity in self._tails if identity not in found]
        self._tails = found
        return list(found.items()), gone
