"""`WholeLines`: a file that holds whole lines and nothing else, whatever the disk does.

    append(lines) ─▶ written ─▶ in the system's hands
                        └─ refused: what was half written is cut off, lines are counted, and it is said; tried again

Used by the recorder for `metrics.jsonl`, and by `Lines` for traces and samples. One writer a file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from freewheel.observe.private import open_private

log = logging.getLogger("freewheel.observe")

WARN_EVERY_S = 60.0
"""A disk stays full for hours, and a log that says so at each step helps nobody."""
TAIL_BYTES = 1 << 16
"""How much is read at a time to find the last whole line of a file that is continued."""


class WholeLines:
    """What `append` was given is in the file when it returns, or is counted in `lost`. Only `open` raises."""

    def __init__(
        self, path: str | os.PathLike[str], *, unit: str = "lines", clock: Callable[[], float] = time.time
    ) -> None:
        """`unit`: what a line is called when some are lost."""
        self.path = Path(path)
        self.lost = 0
        self.size = 0
        """Bytes in the file, as far as this writer knows."""
        self._unit = unit
        self._clock = clock
        self._fd = -1
        self._closed = False
        self._warned_at: float | None = None
        self._lost_before_warning = 0

    def open(self) -> None:
        """Without it the first `append` opens the file, and a file that cannot be had costs lines."""
        fd = open_private(self.path, os.O_RDWR | os.O_APPEND)
        with contextlib.suppress(OSError):  # then one line may be glued to half of another, and readers pass it over
            _cut_torn_line(fd)
        self._fd, self.size = fd, os.fstat(fd).st_size

    def append(self, data: bytes) -> None:
        """`data`: whole lines."""
        if self._closed:
            self.lost += data.count(b"\n")
            return
        written = 0
        try:
            if self._fd < 0:
                self.open()
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
        except OSError as error:
            self.refused(data.count(b"\n", written), error)
            return
        self.size += len(data)
        if self._warned_at is not None:
            lost = self.lost - self._lost_before_warning
            log.warning("%s is written again; %d %s were lost", self.path, lost, self._unit)
            self._warned_at, self._lost_before_warning = None, self.lost

    def refused(self, count: int, error: OSError) -> None:
        """Counts lines. Opening the file anew takes back what was written of one, so that it has whole lines only, and
        helps where it was moved away or its mount has gone stale."""
        self.lost += count
        now = self._clock()
        if self._warned_at is None or not 0 <= now - self._warned_at < WARN_EVERY_S:
            self._warned_at = now
            log.warning(
                "%s cannot be written (%s): %s are lost until it can, %d so far. Training goes on",
                self.path,
                error.strerror,
                self._unit,
                self.lost,
            )
        before = self._fd
        try:
            self.open()
        except OSError:
            return
        if before >= 0:
            os.close(before)

    def move(self, to: Path) -> None:
        """The file gets another name, over what is there; the next line begins an empty one. Raises `OSError`."""
        self.path.replace(to)
        self._release()
        self.size = 0

    def close(self) -> None:
        """Says what was lost. May be called twice."""
        if not self._closed and self.lost:
            log.warning("%d %s of %s were lost in all", self.lost, self._unit, self.path)
        self.forget()

    def forget(self) -> None:
        """Closes it without a word: in a process that was forked off, whose parent writes on."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _cut_torn_line(fd: int) -> None:
    """A process that was killed while it wrote left half a line, to which the next would be glued."""
    end = size = os.fstat(fd).st_size
    while end:
        start = max(0, end - TAIL_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
