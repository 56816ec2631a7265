"""Files that survive crashes and stay private.

    open_private, private_folder   readable by their owner only, whatever the umask is
    write_atomically, sync_folder  a file is complete or absent, also after a power cut
    WholeLines                     an append-only file of whole lines; a full disk costs lines and is reported

A run directory holds prompts, responses and settings. Whatever is created in one goes through here: the lock, the
configuration, the log, the metrics, the journal, the checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600
"""Files are private even in a private folder, because a folder that the user made keeps its permissions."""


def private_folder(path: str | os.PathLike[str]) -> Path:
    """Create a folder for its owner only, with its parents. An existing folder keeps its permissions."""
    folder = Path(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return folder
    folder.chmod(FOLDER_MODE)  # the umask may have removed even the owner's bits
    return folder


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, or create a private one, and return its descriptor.

    A symbolic link is refused with an `OSError`: in a run directory from somebody else it may point to any of the
    user's files. Links to devices such as `/dev/null` are allowed.
    """
    try:
        created = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    except FileExistsError:
        if Path(path).is_symlink() and not Path(path).is_char_device():
            why = "it is a link, which may lead out of the run directory: remove it"
            raise OSError(errno.ELOOP, why, os.fspath(path)) from None
        return os.open(path, flags | os.O_CLOEXEC)
    os.fchmod(created, FILE_MODE)
    return created


log = logging.getLogger("freewheel.observe")

WARN_EVERY_S = 60.0
"""Time between two warnings about the same file: a disk may stay full for hours."""
TAIL_BYTES = 1 << 16
"""Read this much at a time to find the last whole line of an existing file."""


class WholeLines:
    """Appends whole lines to a file. A line is in the file when `append` returns, or counted in `lost`.

    Only `open` and `move` raise.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, unit: str = "lines", clock: Callable[[], float] = time.time
    ) -> None:
        """`unit`: the word for lines in warnings about lost ones."""
        self.path = Path(path)
        self.lost = 0
        self.size = 0
        """Bytes in the file, if nobody else writes to it."""
        self._unit = unit
        self._clock = clock
        self._fd = -1
        self._closed = False
        self._warned_at: float | None = None
        self._lost_before_warning = 0

    def open(self) -> None:
        """Open the file now and raise if that fails. Else the first `append` opens it, and a failure loses lines."""
        fd = open_private(self.path, os.O_RDWR | os.O_APPEND)
        with contextlib.suppress(OSError):  # readers then skip the line that follows the torn one
            _cut_torn_line(fd)
        self._fd, self.size = fd, os.fstat(fd).st_size

    def append(self, data: bytes) -> None:
        """Append `data`, which must be whole lines."""
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
            self.handle_failure(data.count(b"\n", written), error)
            return
        self.size += len(data)
        if self._warned_at is not None:
            lost = self.lost - self._lost_before_warning
            log.warning("%s can be written again; %d %s were lost", self.path, lost, self._unit)
            self._warned_at, self._lost_before_warning = None, self.lost

    def handle_failure(self, count: int, error: OSError) -> None:
        """Count lost lines, warn, and reopen the file.

        Reopening removes a partly written line, and finds the file again after it was moved or its mount went stale.
        """
        self.lost += count
        now = self._clock()
        if self._warned_at is None or not 0 <= now - self._warned_at < WARN_EVERY_S:
            self._warned_at = now
            log.warning(
                "%s cannot be written (%s): %s are lost until it can be, %d so far. Training continues",
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
        """Rename the file, replacing any file at `to`. The next line starts an empty file. Raises `OSError`."""
        self.path.replace(to)
        self._release()
        self.size = 0

    def close(self) -> None:
        """Close the file and log how much was lost. May be called twice."""
        if not self._closed and self.lost:
            log.warning("%d %s of %s were lost in all", self.lost, self._unit, self.path)
        self.forget()

    def forget(self) -> None:
        """Close the file and log nothing: in a forked child, whose parent continues to write."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _cut_torn_line(fd: int) -> None:
    """Remove the half line that a killed process may have left at the end."""
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


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Replace `path` with a private file that contains `data`, whole or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(open_private(scratch, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Bring a file that is already closed to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Bring a folder's names to the disk: a renamed file is durable only after this."""
    sync_file(path)
