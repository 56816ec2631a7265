"""`JournalFile`: the journal's SQLite file: made private, locked for one writer, opened, checked; its errors named.

Journal ─▶ JournalFile ─▶ journal.sqlite          the file: pages that deletion frees are used again
                       ├▶ journal.sqlite-wal      the log: commits go there, a checkpoint copies them into the file
                       ├▶ journal.sqlite-shm      the log's index
                       └▶ journal.sqlite.lock     empty; locked by the one who writes
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from freewheel.judge.store.file import Trouble, diagnose
from freewheel.utils.files import open_private

PAGE_BYTES = 65536
"""SQLite's largest: a group of 80 KB costs 144 us of CPU, compaction included; 181 with 16 KiB and 299 with 4 KiB. One
of 10 KB costs 48 us, with 4 KiB 53."""
SYNCHRONOUS = "NORMAL"
"""A commit reaches the operating system and is synced at the next checkpoint: docs/durability.md has the argument."""
CHECKPOINT_BYTES = 16 << 20
"""Of log before it is copied into the file. The commit that does it took 69 ms at worst on a busy disk, and 165 ms with
64 MiB; 4 MiB made it 57 ms, four times as often."""
LOG_LIMIT_BYTES = 64 << 20
"""The log is cut back to this once it begins anew, where a large transaction or a reader made it longer."""
CACHE_KIB = 4 * 1024
"""Of pages in memory. A transaction that is larger spills into the log early; 16 MiB cost a tenth more CPU."""
BUSY_TIMEOUT_S = 5.0
"""Readers never block the writer; a backup tool that locks the file may, for a moment."""
LOCK_WAIT_S, LOCK_POLL_S = 5.0, 0.05
"""For the writer before, whose process was killed: it is gone in milliseconds, or somebody else's."""
LITTLE_ROOM_BYTES = 32 << 20
"""Below it an input/output error is put down to the disk being full: a log and its index need more than this."""
WRITE_ERRORS = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_TRUNCATE)
"""What SQLite makes of a quota, a limit on file sizes or a full tmpfs; it says FULL for ENOSPC alone."""
COMPANIONS = ("-wal", "-shm")


class JournalError(Exception):
    """Anything that keeps the journal from being used."""


class JournalFull(JournalError):
    """There is no room to write; what was to be written can be written later. Says the path and the MB free."""


class JournalDamaged(JournalError):
    """The file cannot be read: not a journal, cut off, or overwritten."""


class JournalFormat(JournalDamaged):
    """Written by a later freewheel, in a way that this one does not know."""


class JournalBusy(JournalError):
    """Another process writes it."""


class JournalFile:
    """A connection. SQLite's errors go through `errors`: no room and damage have names, all else stays what it is."""

    def __init__(self, path: Path, *, readonly: bool) -> None:
        """Makes the file where there is none, unless `readonly`: then nothing is made beside one that nobody writes."""
        self.path = path
        self._lock: int | None = None
        self._still: tuple[int, ...] | None = None
        """How the file was that is read as one that nobody writes."""
        if readonly and not path.exists():
            raise FileNotFoundError(f"{path}: there is no journal")
        try:
            with self.errors():
                mode = "rw"
                if readonly:
                    self._still = self._unwritten()
                    mode = "ro" if self._still is None else "ro&immutable=1"
                else:
                    self._lock = _locked(path)
                    self._make()
                # Not tied to a thread: whoever restores from it hands it to its writer's thread afterwards.
                self.db = sqlite3.connect(
                    f"file:{quote(str(path))}?mode={mode}",
                    uri=True,
                    timeout=BUSY_TIMEOUT_S,
                    isolation_level=None,
                    check_same_thread=False,
                )
        except BaseException:
            self._unlock()
            raise
        try:
            self.db.text_factory = bytes  # text where none should be is for a checksum to find, not for a decoder
            with self.errors():
                self._set_up()
        except BaseException:
            self.close()
            raise

    @property
    def _log(self) -> Path:
        return self.path.with_name(self.path.name + "-wal")

    def _unwritten(self) -> tuple[int, ...] | None:
        """How the file is, where there is no log: nobody writes it and all is in it, so that SQLite need not make a log
        and an index to read it, which it cannot in a folder of somebody else's."""
        about = _mark(self.path)  # before the log is looked for: who begins to write in between changes it
        return None if self._log.exists() else about

    def _check_still(self) -> None:
        if self._still is not None and _mark(self.path) != self._still:
            raise JournalBusy(f"{self.path} began to be written while it was read: look again")

    def _make(self) -> None:
        log = self._log
        if not self.path.exists() and log.exists() and log.stat().st_size:  # it would be replayed into the new file
            raise JournalDamaged(f"{self.path} is gone, and {log.name} is left of it")
        os.close(open_private(self.path, os.O_RDWR))  # SQLite gives its log the same mode

    def _set_up(self) -> None:
        for setting in (
            f"page_size = {PAGE_BYTES}",
            f"cache_size = -{CACHE_KIB}",
            f"synchronous = {SYNCHRONOUS}",
            f"wal_autocheckpoint = {CHECKPOINT_BYTES // PAGE_BYTES}",
            f"journal_size_limit = {LOG_LIMIT_BYTES}",
            "cell_size_check = ON",
            "secure_delete = OFF",  # some builds of SQLite overwrite what is deleted: as much to write as it was
            "temp_store = MEMORY",
        ):
            self.db.execute(f"PRAGMA {setting}").fetchall()

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # a last checkpoint that does not fit: the log stays, and holds it
            self.db.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def pages(self, query: str, after: int) -> Iterator[Any]:
        """Rows of a query by its first column, a page at a time: nothing is held open in between."""
        while True:
            with self.errors():
                page = self.db.execute(query, (after,)).fetchall()
            for row in page:
                if row[0] <= after:
                    raise JournalDamaged(f"{self.path} is damaged: {row[0]} comes after {after}")
                after = row[0]
                yield row
            if not page:
                return

    def row(self, query: str, key: int | str) -> Any:
        with self.errors():
            return self.db.execute(query, (key,)).fetchone()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self.errors():
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield self.db
                self.db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    if self.db.in_transaction:
                        self.db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._check_still()  # what was read at two moments looks like damage
            if isinstance(error, sqlite3.Error | OSError):
                self._raise(error)
            raise
        self._check_still()

    def _raise(self, error: sqlite3.Error | OSError) -> NoReturn:
        trouble = diagnose(error)
        free = _free_bytes(self.path)
        code = getattr(error, "sqlite_errorcode", None)
        io_for_room = code is not None and trouble in (Trouble.IO, Trouble.CANNOT_OPEN) and free < LITTLE_ROOM_BYTES
        if trouble is Trouble.FULL or code in WRITE_ERRORS or io_for_room:
            raise JournalFull(f"{self.path} cannot be written: no room ({free / 1e6:.0f} MB free; {error})") from error
        if trouble is Trouble.CORRUPT:
            raise JournalDamaged(f"{self.path} is damaged: {error}") from error
        raise error


def set_aside(path: Path) -> Path:
    """Moves a journal that cannot be read, and its log, out of the way of a new one. Gives where it is now."""
    target = next(
        one for number in itertools.count(1) if not (one := path.with_name(f"{path.name}.damaged-{number}")).exists()
    )
    for suffix in ("", *COMPANIONS):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(target.with_name(target.name + suffix))
    return target


def _locked(path: Path) -> int:
    """An open file that is locked for this writer, and by the death of its process no longer."""
    lock = open_private(path.with_name(path.name + ".lock"), os.O_RDWR)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise JournalBusy(f"{path} is written by another process: end that run first") from None
        time.sleep(LOCK_POLL_S)


def _mark(path: Path) -> tuple[int, ...] | None:
    """Another one after each checkpoint, which alone writes into the file."""
    try:
        about = path.stat()
    except OSError:
        return None
    return (about.st_ino, about.st_size, about.st_mtime_ns)


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:
        return 0
