"""`Lines`: JSON lines that a process writes down beside its work: events of a trace, samples.

    add(item) ─▶ waits in memory ─ a second, or many ─▶ [thread] text ─▶ appended, whole lines ─▶ set aside when full
      │ never waits, never raises                                          └─ a full disk: counted, tried again

    NAME-PID.jsonl     what is written now
    NAME-PID.1.jsonl   what it was before it was full
    NAME-PID.0.jsonl   the beginning of the run, where that is kept: never removed

A process has files of its own, so that none waits for another, and one that is killed leaves what it wrote: all but its
last second. The files of one name, those of processes before it included, take `most_bytes` at most.
"""

from __future__ import annotations

import json
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from freewheel.observe.values import plain, without_nonfinite
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
