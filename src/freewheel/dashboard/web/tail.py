"""`Tail`: the whole lines that were appended to a file since the last look; `Folder`: the same for all of a folder;
`decoded`: what a line says.

    look ─▶ blocks of whole lines, each with its place in the file; half a line waits for its other half
         ├─ shorter than before, or another file of that name ─▶ `generation` moves, and it is read from its start
         └─ gone ─▶ nothing, until it is there again

Files belong to a run that goes on, or to somebody else who handed them over: links, pipes and devices are not opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
