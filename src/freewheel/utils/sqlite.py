"""Private SQLite files that one thread per process writes: the judge's cache and a run's journal.

    caller ── schedule ──▶ WriterThread ── write() ──▶ transaction ──▶ file and log (WAL)
                                └◀── pause: the disk is full, the file is locked

A commit goes to the log and reaches the operating system at once; a checkpoint copies the log into the file. So a
killed process loses nothing that it committed. What to do about an error is the caller's decision: the cache sets a
damaged file aside and continues, the journal stops the run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote

from freewheel.utils.files import open_private

COMPANIONS = ("-wal", "-shm")
"""Suffixes of the files that SQLite keeps next to a database: its log and the log's index."""
_LOCK_POLL_S = 0.02
"""A file lock has no wait with a time limit, so it is polled."""


# -- errors -----------------------------------------------------------------------------------------------------------


class Trouble(StrEnum):
    """The kinds of failure that need different reactions."""

    LOCKED = "locked by another process"
    FULL = "the disk is full"
    READ_ONLY = "it cannot be written"
    CORRUPT = "it is damaged"
    IO = "an input/output error"
    CANNOT_OPEN = "it cannot be opened"
    OTHER = "an unexpected error"


_BY_SQLITE_CODE = {
    sqlite3.SQLITE_BUSY: Trouble.LOCKED,
    sqlite3.SQLITE_LOCKED: Trouble.LOCKED,
    sqlite3.SQLITE_PROTOCOL: Trouble.LOCKED,
    sqlite3.SQLITE_FULL: Trouble.FULL,
    sqlite3.SQLITE_READONLY: Trouble.READ_ONLY,
    sqlite3.SQLITE_PERM: Trouble.READ_ONLY,
    sqlite3.SQLITE_CORRUPT: Trouble.CORRUPT,
    sqlite3.SQLITE_NOTADB: Trouble.CORRUPT,
    sqlite3.SQLITE_IOERR: Trouble.IO,
    sqlite3.SQLITE_CANTOPEN: Trouble.CANNOT_OPEN,
}
_BY_ERRNO = {
    errno.ENOSPC: Trouble.FULL,
    errno.EDQUOT: Trouble.FULL,
    errno.EROFS: Trouble.READ_ONLY,
    errno.EACCES: Trouble.READ_ONLY,
    errno.EPERM: Trouble.READ_ONLY,
    errno.EIO: Trouble.IO,
    errno.ETIMEDOUT: Trouble.LOCKED,
}
_PRIMARY_CODE_MASK = 0xFF
"""SQLite's extended error codes keep the primary code in their low byte."""


def diagnose(error: sqlite3.Error | OSError) -> Trouble:
    """Classify an error of SQLite or of the file system."""
    if isinstance(error, OSError):
        return _BY_ERRNO.get(error.errno or 0, Trouble.CANNOT_OPEN)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    if code == sqlite3.SQLITE_IOERR_SHORT_READ:
        return Trouble.CORRUPT  # the file ends within a page that its header counts
    if code == sqlite3.SQLITE_ERROR and str(error).startswith(("no such table", "no such column", "malformed")):
        return Trouble.CORRUPT  # the version is right, the tables are not
    return _BY_SQLITE_CODE.get(code & _PRIMARY_CODE_MASK, Trouble.OTHER)


# -- files ------------------------------------------------------------------------------------------------------------


def connect(path: Path, *, timeout_s: float, mode: str = "rw", settings: Sequence[str] = ()) -> sqlite3.Connection:
    """Open an existing database in autocommit mode. `settings` are PRAGMA statements without the keyword.

    SQLite must not create the file: `open_private` does, and SQLite gives its log and index the same permissions. The
    connection may move between threads, but only one may use it at a time.
    """
    db = sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        for setting in settings:
            db.execute(f"PRAGMA {setting}").fetchall()
    except BaseException:
        db.close()
        raise
    return db


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Write all or nothing. IMMEDIATE, because a transaction that starts with a read can fail at its first write."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            if db.in_transaction:
                db.execute("ROLLBACK")
        raise


def read_pragma(db: sqlite3.Connection, name: str) -> int:
    """Return the value of a numeric PRAGMA."""
    value: int = db.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def rename_database(path: Path, target: Path) -> None:
    """Rename a database with its log. A log that stayed behind would be replayed into the next file of this name."""
    for suffix in ("", *COMPANIONS):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(target.with_name(target.name + suffix))


def lock_database(path: Path, wait_s: float) -> int:
    """Lock `<path>.lock` and return its descriptor; closing it unlocks. Raises `TimeoutError` after `wait_s`.

    The operating system releases the lock when the process dies. A child that is forked meanwhile shares the lock.
    """
    descriptor = open_private(path.with_name(path.name + ".lock"), os.O_RDWR)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock", str(path)) from None
            time.sleep(_LOCK_POLL_S)
    except BaseException:
        os.close(descriptor)
        raise


# -- the thread -------------------------------------------------------------------------------------------------------


class WriterThread:
    """A daemon thread that calls `write` when something is due, and never twice at once.

    The owner keeps the waiting items and changes them only while it holds `changed`:

        with writer.changed:
            items.append(item)
            writer.schedule(0.05)       # the first of several calls decides: a batch gathers meanwhile
    """

    def __init__(
        self,
        name: str,
        *,
        pending: Callable[[], object],
        write: Callable[[], float],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """`pending`: whether anything waits; called with `changed` held.

        `write` writes one batch and returns how many seconds to pause: 0 after a success, infinity to end the thread.
        If items remain after a success, it schedules the next batch. `finish` runs last, in the thread.
        """
        self.changed = threading.Condition(threading.Lock())
        self.closing = False
        self._name = name
        self._pending, self._write, self._finish = pending, write, finish
        self._due_at = math.inf
        self._paused_until = -math.inf
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Start the thread unless it runs. `RuntimeError` if none can be started: at interpreter exit, at a limit."""
        if self._thread is None:
            thread = threading.Thread(target=self.run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def schedule(self, delay_s: float) -> None:
        """Call `write` within `delay_s`, or when a pause ends. With `changed` held."""
        due_at = time.monotonic() + delay_s
        if due_at < self._due_at:
            self._due_at = due_at
            self.changed.notify_all()

    def close(self) -> None:
        """Write without delays and pauses from now on, and end the thread when nothing is pending."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end. Returns whether it has."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def run(self) -> None:
        """The thread's work. An owner that cannot start a thread calls this itself after `close`."""
        try:
            while self._wait():
                pause_s = self._write()
                if pause_s == math.inf:
                    return
                if pause_s:
                    with self.changed:
                        self._due_at = -math.inf
                        self._paused_until = time.monotonic() + pause_s
        finally:
            self._finish()

    def _wait(self) -> bool:
        """Wait until a batch is due. False: closing, and nothing is pending."""
        with self.changed:
            while True:
                if not self._pending():
                    if self.closing:
                        return False
                    self._due_at = math.inf
                    self.changed.wait()
                    continue
                wait_s = max(self._due_at, self._paused_until) - time.monotonic()
                if self.closing or wait_s <= 0:
                    self._due_at = math.inf
                    return True
                self.changed.wait(min(wait_s, threading.TIMEOUT_MAX))
