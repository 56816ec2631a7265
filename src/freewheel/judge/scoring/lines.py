"""Numbered lines of a file or a pipe, in constant memory: whole blocks are read and split, long lines are cut short.

os.read ─▶ block ─▶ split at newlines ─▶ [Line, Line, …]      one list per block, so a slow pipe's lines come at once
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

READ_BYTES = 1 << 18
"""Large enough that a read costs nothing per line, small enough that its lines fit the window of a job."""
MAX_LINE_BYTES = 32 << 20
"""No judge takes a prompt of this size; a line beyond it is a file that is not JSON Lines."""


class Line(NamedTuple):
    number: int
    """Counted from 1, blank lines included."""
    text: bytes
    """Without its newline; empty where it is too long."""
    start: int
    end: int
    """The line's bytes in the file, newline included."""
    complete: bool = True
    """False for a last line without a newline."""
    too_long: bool = False


class Lines:
    """Reads `fd` to its end. At most `max_line_bytes` and one block are held."""

    def __init__(self, fd: int, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._fd = fd
        self._max = max_line_bytes
        self._number = 0
        self._start = 0
        self._pieces: list[bytes] = []
        self._held = 0
        self._offset = 0

    def blocks(self, first: int = 1) -> Iterator[list[Line]]:
        """The lines from number `first` on, as many at a time as one read brought."""
        while data := os.read(self._fd, READ_BYTES):
            ends = data.count(b"\n")
            if not ends:
                self._carry(data)
                self._offset += len(data)
            elif self._number + ends < first:
                self._skip(data, ends)
            else:
                yield [line for line in self._split(data) if line.number >= first]
        if self._offset > self._start:
            last = self._take(b"", self._offset, complete=False)
            if last.number >= first:
                yield [last]

    def _split(self, data: bytes) -> Iterator[Line]:
        texts = data.split(b"\n")
        rest = texts.pop()
        end = self._offset
        for text in texts:
            end += len(text) + 1
            yield self._take(text, end)
        self._offset += len(data)
        self._carry(rest)

    def _skip(self, data: bytes, ends: int) -> None:
        self._number += ends
        cut = data.rfind(b"\n") + 1
        self._pieces, self._held = [], 0
        self._start = self._offset + cut
        self._offset += len(data)
        self._carry(data[cut:])

    def _carry(self, piece: bytes) -> None:
        """The beginning of a line whose end is not read yet; past the limit only its length counts."""
        self._held += len(piece)
        if self._held > self._max:
            self._pieces = []
        elif piece:
            self._pieces.append(piece)

    def _take(self, text: bytes, end: int, *, complete: bool = True) -> Line:
        too_long = self._held + len(text) > self._max
        if too_long:
            text = b""
        elif self._pieces:
            text = b"".join(self._pieces) + text
        self._number += 1
        line = Line(self._number, text, self._start, end, complete, too_long)
        if self._held:
            self._pieces, self._held = [], 0
        self._start = end
        return line
