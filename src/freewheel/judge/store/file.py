"""The cache's file on disk: made private, checked, set aside when it is not ours or broken.

    connect() -- the file is there, ours and whole ------------------------------> Link
        `------- missing, empty, foreign, broken -- lock -- look again -- set aside -- make new -- Link

Files are made and renamed only while `<name>.lock` is held, and only by a process that has looked again after
it got the lock; so of several processes that find the same broken file, one sets it aside and the others use
the new one. A process that still has the old file open learns it from `Link.is_current`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from freewheel.judge.store.tables import APPLICATION_ID, SCHEMA, SCHEMA_VERSION, pragma
from freewheel.utils.sqlite import Trouble, diagnose

if sys.platform != "win32":
    import fcntl

BUSY_TIMEOUT_S = 0.25
"""How long one statement waits for another process's transaction. Short, so that `close` and a fork need not wait
long for a thread inside SQLite; whoever must not give up tries again."""
SETUP_WAIT_S = 10.0
"""How long to wait for a process that is making the file. It takes milliseconds, unless that process is stopped."""
SETUP_POLL_S = 0.02
"""A file lock cannot be waited for with a time limit, only asked for again."""
ASIDES_MAX = 8
"""A disk that damages each file it is given must not be filled with copies: past this a process does without."""
WAL_AUTOCHECKPOINT_PAGES = 2048
"""8 MiB of log between checkpoints: twice SQLite's own, as each checkpoint rewrites index pages at random."""
WAL_LIMIT_BYTES = 16 * 2**20
"""The write-ahead log is cut back to this after a checkpoint, where a burst made it longer."""
PAGE_CACHE_KIB = 8 * 1024
"""Per connection: holds the upper levels of both indexes of a file of several hundred thousand entries."""


class Identity(NamedTuple):
    """Which file a path led to. It stays unique for as long as somebody has that file open."""

    device: int
    inode: int


class Link:
    """One connection, and the identity of the file it reads and writes."""

    __slots__ = ("conn", "identity", "path")

    def __init__(self, conn: sqlite3.Connection, path: Path, identity: Identity) -> None:
        self.conn = conn
        self.path = path
        self.identity = identity

    def is_current(self) -> bool:
        """Whether the path still leads to this file: false once it was set aside, deleted or replaced."""
        return _identity(self.path) == self.identity

    def transaction(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        return _transaction(self.conn)

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self.conn.close()


@contextlib.contextmanager
def _transaction(conn: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """A write transaction. IMMEDIATE: one that begins by reading can fail at its first write without any wait."""
    conn.execute("BEGIN IMMEDIATE")
    try:
        yield conn
        conn.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            if conn.in_transaction:
                conn.execute("ROLLBACK")
        raise


class CacheFile:
    """Connections to the file at `path`, which is made, or set aside and made anew, where that is needed."""

    def __init__(self, path: Path, *, wall_clock: Callable[[], float], log: logging.Logger) -> None:
        self.given = path
        self._wall_clock = wall_clock
        self._log = log
        self._asides_made = 0

    @property
    def path(self) -> Path:
        """Links resolved, since SQLite puts its log beside the real file."""
        return Path(os.path.realpath(self.given))

    def connect(self) -> Link:
        """A connection to a file of our schema. Raises `sqlite3.Error` or `OSError` where there can be none."""
        path = self.path
        with contextlib.suppress(_NotReadyError):
            return self._connect_ready(path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _setup_lock(path):
            return self._connect_or_make(path)

    def set_aside(self, identity: Identity, error: Exception) -> bool:
        """Puts a damaged file out of the way, unless another process already did. False where that is refused.

        The caller still has it open, so that its identity cannot pass to another file.
        """
        path = self.path
        try:
            with _setup_lock(path):
                if _identity(path) == identity:
                    self._set_aside(path, self._corrupt_suffix(), str(error))
        except OSError as refused:
            self._log.warning("judge cache %s is damaged (%s) and cannot be set aside: %s", path, error, refused)
            return False
        return True

    def say(self, trouble: Trouble, error: Exception) -> None:
        self._log.warning(
            "judge cache %s: %s (%s); going on without it, and trying again later", self.given, trouble, error
        )

    def asides(self) -> tuple[str, ...]:
        """The names of the files set aside so far, for whoever wants to look at them or delete them."""
        path = self.path
        marks = (f"{path.name}.corrupt-", f"{path.name}.schema-")
        with contextlib.suppress(OSError):
            names = (entry.name for entry in path.parent.iterdir())
            return tuple(sorted(name for name in names if name.startswith(marks) and not name.endswith(_COMPANIONS)))
        return ()

    def _connect_or_make(self, path: Path) -> Link:
        """With the setup lock held: nobody else makes, fills or renames the file."""
        try:
            return self._connect_ready(path)
        except _NotReadyError as why:
            if why.suffix is not None:
                self._set_aside(path, why.suffix or self._corrupt_suffix(), why.detail)
        if _identity(path) is None:
            # A log without its database would be replayed into the new one, and corrupt it.
            for companion in _COMPANIONS:
                path.with_name(path.name + companion).unlink(missing_ok=True)
            # SQLite gives its log and index the permissions of the database.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        self._fill(path)
        return self._connect_ready(path)

    def _connect_ready(self, path: Path) -> Link:
        try:
            status = path.stat()
        except FileNotFoundError:
            raise _NotReadyError("there is no file") from None
        if not stat.S_ISREG(status.st_mode):
            raise _NotReadyError("it is not a file", suffix="")
        if status.st_size == 0:
            raise _NotReadyError("it is empty")
        conn = _open(path)
        try:
            version, application = pragma(conn, "user_version"), pragma(conn, "application_id")
            if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
                blank = (application, version) == (0, 0) and not conn.execute("SELECT 1 FROM sqlite_master").fetchone()
                raise _NotReadyError(
                    f"its schema is {version} and this version of freewheel uses {SCHEMA_VERSION}"
                    if application == APPLICATION_ID
                    else "it is another program's database",
                    suffix=None if blank else f"schema-{version}",
                )
            for setting in _SETTINGS:
                conn.execute(setting).fetchall()
            identity = _identity(path)
            if identity != (status.st_dev, status.st_ino):
                raise _NotReadyError("it was replaced while being opened")
            if status.st_mode & 0o077:
                path.chmod(0o600)
        except sqlite3.DatabaseError as error:
            conn.close()
            if diagnose(error) is Trouble.CORRUPT:
                raise _NotReadyError(str(error), suffix="") from error
            raise
        except BaseException:
            conn.close()
            raise
        return Link(conn, path, identity)

    def _fill(self, path: Path) -> None:
        conn = _open(path)
        try:
            # Pages that eviction frees are used again by the next puts, so the file does not grow past its bound; only
            # `clear`, and a bound made smaller, give pages back to the disk. It costs no measurable time.
            conn.execute("PRAGMA auto_vacuum = INCREMENTAL")
            conn.execute("PRAGMA journal_mode = WAL")
            with _transaction(conn):
                for statement in SCHEMA:
                    conn.execute(statement)
        finally:
            conn.close()

    def _corrupt_suffix(self) -> str:
        return time.strftime("corrupt-%Y%m%dT%H%M%SZ", time.gmtime(self._wall_clock()))

    def _set_aside(self, path: Path, suffix: str, why: str) -> None:
        if self._asides_made >= ASIDES_MAX:
            raise OSError(errno.EIO, f"{ASIDES_MAX} damaged files were set aside already, and it is damaged again")
        self._asides_made += 1
        target = path.with_name(f"{path.name}.{suffix}")
        count = 1
        while target.exists() or target.is_symlink():
            count += 1
            target = path.with_name(f"{path.name}.{suffix}-{count}")
        path.rename(target)
        # The log goes along: it may hold what the file lacks, and must not be replayed into the next one.
        for companion in _COMPANIONS:
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + companion).rename(target.with_name(target.name + companion))
        self._log.warning("judge cache %s cannot be used (%s): set aside as %s; a new one is begun", path, why, target)


_COMPANIONS = ("-wal", "-shm")

# synchronous = NORMAL: in WAL mode a commit is written to the log and synced only at a checkpoint. A killed process
# loses nothing that was committed, since the operating system has it; a power cut may lose the last commits, and the
# file stays whole either way.
_SETTINGS = (
    "PRAGMA synchronous = NORMAL",
    f"PRAGMA wal_autocheckpoint = {WAL_AUTOCHECKPOINT_PAGES}",
    f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}",
    f"PRAGMA cache_size = -{PAGE_CACHE_KIB}",
    "PRAGMA temp_store = MEMORY",
)


class _NotReadyError(OSError):
    """The file needs work under the setup lock. `suffix`: None to make or fill it, else set it aside first."""

    def __init__(self, detail: str, *, suffix: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.suffix = suffix


def _identity(path: Path) -> Identity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return Identity(status.st_dev, status.st_ino)


def _open(path: Path) -> sqlite3.Connection:
    # mode=rw: SQLite must not make the file, which happens under the setup lock and with our permissions.
    return sqlite3.connect(
        f"file:{quote(str(path))}?mode=rw",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )


_setup_mutex = threading.Lock()
"""POSIX record locks do not keep two threads of one process apart."""


def forget_setup_lock() -> None:
    """In a forked child: the thread that held it does not exist here."""
    global _setup_mutex
    _setup_mutex = threading.Lock()


@contextlib.contextmanager
def _setup_lock(path: Path) -> Iterator[None]:
    """Holds `<name>.lock`. A record lock and not flock: a child forked meanwhile must not inherit it.

    On Windows there is only the mutex: a file that is in use cannot be renamed there.
    """
    deadline = time.monotonic() + SETUP_WAIT_S
    with _setup_mutex:
        handle = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            if sys.platform != "win32":
                while True:
                    try:
                        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except (BlockingIOError, PermissionError):
                        if time.monotonic() > deadline:
                            raise TimeoutError(
                                errno.ETIMEDOUT,
                                "another process has been making the cache file for too long",
                                str(path),
                            ) from None
                        time.sleep(SETUP_POLL_S * (0.5 + random.random()))
            yield
        finally:
            os.close(handle)
