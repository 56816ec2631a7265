"""The cache file on disk: its tables, the statements on them, and how it is opened, created and set aside.

    CacheFile.connect() ── the file exists, is ours and is whole ─────────────────────────────▶ CacheDatabase
            └── missing, empty, foreign, damaged ─ lock ─ look again ─ set aside ─ create ─────────┘

Files are created and renamed only while `<name>.lock` is held, and only by a process that looked again after it got the
lock. So if several processes find the same damaged file, one sets it aside and the others use the new one. A process
that still has the old file open learns that from `CacheDatabase.is_current`.

`Store` is the only caller.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from freewheel.utils.files import open_private
from freewheel.utils.sqlite import (
    COMPANIONS,
    Trouble,
    connect,
    diagnose,
    lock_database,
    read_pragma,
    rename_database,
    transaction,
)

log = logging.getLogger("freewheel.judge.cache")

APPLICATION_ID = 0x46574A43
"""Marks the file in its header as freewheel's judge cache ("FWJC")."""
SCHEMA_VERSION = 1
"""Raised whenever a table changes. A file of another version is set aside: replies can be requested again."""
ASIDES_MAX = 8
"""A disk that damages every file must not be filled with copies. After this many, the process does without a file."""
BUSY_TIMEOUT_S = 0.25
"""How long one statement waits for another process's transaction. Short, because `close` and a fork wait for a thread
that is inside SQLite; callers that must not give up try again."""
SETUP_WAIT_S = 10.0
"""How long to wait for a process that is creating the file. That takes milliseconds, unless the process is stopped."""
STEP_ENTRIES = 512
"""Rows per transaction of eviction, expiry and clearing: a few milliseconds, so that other processes can write."""
STEP_PAGES = 512
"""Pages returned to the disk per transaction, for the same reason."""
_EXPORT_ENTRIES = 256
_EXPORT_BYTES = 4 * 2**20
"""An export reads this much at a time. A slow reader that held a snapshot would make the log grow."""
_ROW_OVERHEAD_BYTES = 100
"""Bytes of an entry in the file besides key and text: the key again in its index, numbers, the index of last use."""
_QUERY_SIZES = (1, 8, 64, 256)
"""Numbers of keys in a prepared query; a shorter chunk repeats its last key."""
_INSERT_SIZES = (64, 8, 1)
"""Numbers of rows in a prepared insert. Python's sqlite3 releases the interpreter lock once per statement, so next to a
busy event loop each single-row insert would cost a thread switch."""

# synchronous = NORMAL: a power cut may lose the last commits, and the file stays whole.
# wal_autocheckpoint: 8 MiB of log, twice SQLite's default, because each checkpoint rewrites index pages at random.
# journal_size_limit: a checkpoint cuts a log that a burst made longer back to 16 MiB.
# cache_size: 8 MiB hold the upper levels of both indexes of a file with several hundred thousand entries.
_SETTINGS = (
    "synchronous = NORMAL",
    "wal_autocheckpoint = 2048",
    f"journal_size_limit = {16 * 2**20}",
    f"cache_size = -{8 * 1024}",
    "temp_store = MEMORY",
)

# A rowid table with a unique index on the key. Measured (SQLite 3.40, 2 vCPU, 100,000 entries of 600 bytes, batches of
# 1,024, keys by IN of 256): put 15 us and get 4.5-5.2 us per entry, 75 MB. WITHOUT ROWID: put 50 us, get 5.8-6.3 us,
# 86 MB, because keys are random and each one then dirties a page that also holds six replies.
# `replies_used` (1 us more per put) serves eviction, expiry and stats without reading the replies.
_SCHEMA = (
    """CREATE TABLE replies (
        id INTEGER PRIMARY KEY,
        key BLOB NOT NULL UNIQUE,
        created_at REAL NOT NULL,
        used_at REAL NOT NULL,
        size INTEGER NOT NULL,
        checksum INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        text BLOB NOT NULL
    )""",
    "CREATE INDEX replies_used ON replies (used_at, size, created_at)",
    "CREATE TABLE notes (name BLOB PRIMARY KEY NOT NULL, value BLOB NOT NULL) WITHOUT ROWID",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_UPSERTS = {
    rows: "INSERT INTO replies (key, created_at, used_at, size, checksum, prompt_tokens, completion_tokens, text)"
    f" VALUES {','.join(['(?, ?, ?, ?, ?, ?, ?, ?)'] * rows)} ON CONFLICT (key) DO UPDATE SET"
    " created_at = excluded.created_at, used_at = excluded.used_at, size = excluded.size,"
    " checksum = excluded.checksum, prompt_tokens = excluded.prompt_tokens,"
    " completion_tokens = excluded.completion_tokens, text = excluded.text"
    for rows in _INSERT_SIZES
}
_COLUMNS = "id, key, created_at, used_at, checksum, prompt_tokens, completion_tokens, text"
_QUERIES = {size: f"SELECT {_COLUMNS} FROM replies WHERE key IN ({','.join('?' * size)})" for size in _QUERY_SIZES}


class CachedReply(msgspec.Struct, frozen=True, gc=False):
    """A judge's reply, unparsed, and the tokens that it cost."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Entry(NamedTuple):
    """A row of `replies`."""

    key: bytes
    reply: CachedReply
    created_at: float
    used_at: float


class CacheDatabase:
    """One connection to a cache file of our schema, for one thread at a time. Methods raise `sqlite3.Error`."""

    def __init__(self, db: sqlite3.Connection, path: Path, identity: _Identity) -> None:
        self.db = db
        self.path = path
        self.identity = identity

    def is_current(self) -> bool:
        """Whether the path still leads to this file. False once the file was set aside, deleted or replaced."""
        return _identify(self.path) == self.identity

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self.db.close()

    # -- replies and notes ------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[bytes]) -> Iterator[Entry | None]:
        """The rows of those keys; None for a row whose content is damaged."""
        largest = _QUERY_SIZES[-1]
        for start in range(0, len(keys), largest):
            chunk = keys[start : start + largest]
            size = next(size for size in _QUERY_SIZES if size >= len(chunk))
            # fetchall, because a cursor that is read halfway keeps its snapshot.
            for row in self.db.execute(_QUERIES[size], [*chunk, *[chunk[-1]] * (size - len(chunk))]).fetchall():
                yield _decode(row)

    def write(
        self,
        replies: Iterable[tuple[bytes, CachedReply]],
        used: Iterable[bytes],
        notes: Iterable[tuple[str, bytes]],
        now: float,
    ) -> None:
        """Write replies, mark entries as used now and write notes, in one transaction."""
        rows = []
        for key, reply in replies:
            text = _encode(reply.text)
            tokens = reply.prompt_tokens, reply.completion_tokens
            rows.append((key, now, now, len(key) + len(text), _checksum(key, text), *tokens, text))
        rows.sort(key=itemgetter(0))  # neighbours in the index are then written together
        with transaction(self.db):
            start = 0
            for size in _INSERT_SIZES:
                while len(rows) - start >= size:
                    self.db.execute(_UPSERTS[size], [value for row in rows[start : start + size] for value in row])
                    start += size
            self.db.executemany("UPDATE replies SET used_at = ? WHERE key = ?", [(now, key) for key in used])
            self.db.executemany(
                "INSERT INTO notes (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                [(_encode(name), value) for name, value in notes],
            )

    def read_note(self, name: str) -> bytes | None:
        row = self.db.execute("SELECT value FROM notes WHERE name = ?", (_encode(name),)).fetchone()
        return row[0] if row is not None and isinstance(row[0], bytes) else None

    # -- bounds -----------------------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """The size of the pages in use. SQLite keeps this count for all processes, so no total of ours can drift."""
        return self.file_bytes() - self.free_pages() * read_pragma(self.db, "page_size")

    def file_bytes(self) -> int:
        return read_pragma(self.db, "page_count") * read_pragma(self.db, "page_size")

    def free_pages(self) -> int:
        return read_pragma(self.db, "freelist_count")

    def evict_step(self, target_bytes: int) -> bool:
        """Remove some of the least recently used entries, no more than needed. False: nothing is left to remove."""
        with transaction(self.db):
            excess = self.used_bytes() - target_bytes
            victims = []
            query = "SELECT id, size FROM replies ORDER BY used_at LIMIT ?"
            for row_id, size in self.db.execute(query, (STEP_ENTRIES,)):
                if excess <= 0:
                    break
                victims.append((row_id,))
                excess -= size + _ROW_OVERHEAD_BYTES
            self.db.executemany("DELETE FROM replies WHERE id = ?", victims)
        return bool(victims)

    def delete_step(self, column: str, before: float) -> int:
        """Remove some entries whose time in `column` is before that time. Returns how many; 0 when none is left."""
        query = f"DELETE FROM replies WHERE id IN (SELECT id FROM replies WHERE {column} < ? LIMIT ?)"
        return self.db.execute(query, (before, STEP_ENTRIES)).rowcount

    def vacuum_step(self) -> None:
        """Return some free pages to the disk."""
        self.db.execute(f"PRAGMA incremental_vacuum({STEP_PAGES})").fetchall()

    # -- for the command line ---------------------------------------------------------------------------------------

    def summarize(self, cutoff: float) -> tuple[int, int, float | None, float | None, int]:
        """Entries, their bytes, the oldest and newest time of storing, and how many were stored before `cutoff`."""
        found: tuple[int, int, float | None, float | None, int] = self.db.execute(
            "SELECT count(*), coalesce(sum(size), 0), min(created_at), max(created_at),"
            " coalesce(sum(created_at < ?), 0) FROM replies INDEXED BY replies_used",
            (cutoff,),
        ).fetchone()
        return found

    def export(self, cutoff: float) -> Iterator[Entry]:
        """The entries stored since `cutoff`, in the order of insertion. Reads a few at a time and keeps no snapshot."""
        last = -1
        query = f"SELECT {_COLUMNS} FROM replies WHERE id > ? AND created_at >= ? ORDER BY id LIMIT ?"
        while True:
            rows, size = [], 0
            with contextlib.closing(self.db.execute(query, (last, cutoff, _EXPORT_ENTRIES))) as cursor:
                for row in cursor:
                    rows.append(row)
                    size += len(row[-1])
                    if size > _EXPORT_BYTES:
                        break
            if not rows:
                return
            last = rows[-1][0]
            yield from filter(None, map(_decode, rows))


class CacheFile:
    """Connects to the file at `path`. Creates it, or sets it aside and creates a new one, where needed."""

    def __init__(self, path: Path, wall_clock: Callable[[], float] = time.time) -> None:
        self.given = path
        self._wall_clock = wall_clock
        self._asides_made = 0

    @property
    def path(self) -> Path:
        """The path with links resolved: SQLite puts its log next to the real file."""
        return Path(os.path.realpath(self.given))

    def connect(self, timeout_s: float = BUSY_TIMEOUT_S) -> CacheDatabase:
        """Connect to a file of our schema. Raises `sqlite3.Error` or `OSError` if there can be none."""
        path = self.path
        with contextlib.suppress(_NotReadyError):
            return _connect_ready(path, timeout_s)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _setup_lock(path):  # nobody else creates, fills or renames the file
            try:
                return _connect_ready(path, timeout_s)
            except _NotReadyError as why:
                if why.suffix is not None:
                    self._rename(path, why.suffix, str(why))
            _create(path)
            return _connect_ready(path, timeout_s)

    def set_aside(self, identity: _Identity, error: Exception) -> bool:
        """Rename a damaged file, unless another process already did. False if that fails.

        The caller still has the file open, so its identity cannot pass to another file.
        """
        path = self.path
        try:
            with _setup_lock(path):
                if _identify(path) == identity:
                    self._rename(path, "", str(error))
        except OSError as refused:
            log.warning("judge cache %s is damaged (%s) and cannot be set aside: %s", path, error, refused)
            return False
        return True

    def asides(self) -> tuple[str, ...]:
        """The names of the files set aside so far. The user may inspect or delete them."""
        path = self.path
        marks = (f"{path.name}.corrupt-", f"{path.name}.schema-")
        with contextlib.suppress(OSError):
            names = [entry.name for entry in path.parent.iterdir()]
            return tuple(sorted(name for name in names if name.startswith(marks) and not name.endswith(COMPANIONS)))
        return ()

    def _rename(self, path: Path, suffix: str, why: str) -> None:
        if self._asides_made >= ASIDES_MAX:
            raise OSError(errno.EIO, f"{ASIDES_MAX} damaged files were set aside already, and it is damaged again")
        self._asides_made += 1
        suffix = suffix or time.strftime("corrupt-%Y%m%dT%H%M%SZ", time.gmtime(self._wall_clock()))
        target = path.with_name(f"{path.name}.{suffix}")
        count = 1
        while target.exists() or target.is_symlink():
            count += 1
            target = path.with_name(f"{path.name}.{suffix}-{count}")
        rename_database(path, target)
        log.warning("judge cache %s cannot be used (%s): moved to %s; a new one is created", path, why, target)


_Identity = tuple[int, int]
"""Device and inode of the file that a path led to. Unique while somebody has that file open."""


class _NotReadyError(OSError):
    """The file needs work under the setup lock.

    `suffix`: None to create or fill the file; else set it aside under that suffix first, "" for a damaged file.
    """

    def __init__(self, detail: str, suffix: str | None = None) -> None:
        super().__init__(detail)
        self.suffix = suffix


def _connect_ready(path: Path, timeout_s: float) -> CacheDatabase:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise _NotReadyError("there is no file") from None
    if not stat.S_ISREG(status.st_mode):
        raise _NotReadyError("it is not a file", "")
    if status.st_mode & 0o077:
        path.chmod(0o600)  # first, because SQLite gives its log and index the same permissions
    db = connect(path, timeout_s=timeout_s)
    try:
        version, application = read_pragma(db, "user_version"), read_pragma(db, "application_id")
        if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
            if (application, version) == (0, 0) and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise _NotReadyError("it is empty")
            ours = f"its schema is {version} and this version of freewheel uses {SCHEMA_VERSION}"
            why = ours if application == APPLICATION_ID else "it is another program's database"
            raise _NotReadyError(why, f"schema-{version}")
        for setting in _SETTINGS:
            db.execute(f"PRAGMA {setting}").fetchall()
        identity = _identify(path)
        if identity != (status.st_dev, status.st_ino):
            raise _NotReadyError("it was replaced while it was opened")
    except BaseException as error:
        db.close()
        if isinstance(error, sqlite3.DatabaseError) and diagnose(error) is Trouble.CORRUPT:
            raise _NotReadyError(str(error), "") from error
        raise
    return CacheDatabase(db, path, identity)


def _create(path: Path) -> None:
    """Create the tables, and the file if it is missing."""
    if _identify(path) is None:
        # A log without its database would be replayed into the new file and corrupt it.
        for suffix in COMPANIONS:
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        os.close(open_private(path, os.O_RDWR))
    # Pages that eviction frees are used again by later puts, so the file does not grow past its bound. Only `clear`
    # and a smaller bound return pages to the disk, for which auto_vacuum must be on from the start.
    settings = ("auto_vacuum = INCREMENTAL", "journal_mode = WAL")
    with contextlib.closing(connect(path, timeout_s=BUSY_TIMEOUT_S, settings=settings)) as db, transaction(db):
        for statement in _SCHEMA:
            db.execute(statement)


def _identify(path: Path) -> _Identity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _encode(text: str) -> bytes:
    """As bytes: SQLite's text ends at a NUL and refuses lone surrogates, and a judge may send both."""
    return text.encode("utf-8", "surrogatepass")


def _checksum(key: bytes, text: bytes) -> int:
    """SQLite checks the structure of its pages, not their content."""
    return zlib.crc32(text, zlib.crc32(key))


def _decode(row: tuple[Any, ...]) -> Entry | None:
    _, key, created_at, used_at, checksum, prompt_tokens, completion_tokens, text = row
    try:
        if _checksum(key, text) != checksum:
            return None
        reply = CachedReply(text.decode("utf-8", "surrogatepass"), int(prompt_tokens), int(completion_tokens))
        return Entry(key, reply, created_at + 0.0, used_at + 0.0)
    except (TypeError, ValueError, AttributeError):  # a damaged row may hold any type
        return None


@contextlib.contextmanager
def _setup_lock(path: Path) -> Iterator[None]:
    """Hold `<name>.lock`."""
    handle = lock_database(path, SETUP_WAIT_S)
    try:
        yield
    finally:
        os.close(handle)
