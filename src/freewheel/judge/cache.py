"""The cache of judge replies: an LRU in memory, in front of one SQLite file that all processes of a user share.

    engine ── in_memory ──▶ MemoryCache ── miss ──▶ on_disk: Store.get_many ── miss ──▶ the judge
    engine ◀── a reply that could be parsed: keep ──▶ MemoryCache.put and Store.put, neither of which waits

    Store.put, remember ──▶ items wait in memory ── thread: transaction, evict ──▶ CacheFile ──▶ the file
    Store.get_many ──┬── items that still wait ◀─┘                                                 │
                     └── the rest: a query on the calling thread ◀── CacheFile ◀───────────────────┘

Replies are kept unparsed and parsed on every use, so a better parser needs no new call. Failures are never kept. Keys
are SHA-256 digests of everything that decides a reply. The file may lose an entry, but it never blocks or fails its
caller. `ReplyCache` is the engine's view of both; `freewheel cache` uses the `Store` alone.

Files are created and renamed only while `<name>.lock` is held. If several processes find the same damaged file, one of
them renames it, and the others notice that the path leads to another file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import random
import secrets
import sqlite3
import threading
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from freewheel.judge.config import JudgeConfig
from freewheel.judge.limiter import LimiterMemory
from freewheel.judge.outcome import Reply
from freewheel.judge.verdict import JudgeError
from freewheel.utils.files import open_private
from freewheel.utils.sqlite import (
    COMPANIONS,
    Trouble,
    WriterThread,
    connect,
    diagnose,
    lock_database,
    read_pragma,
    rename_database,
    transaction,
)

logger = logging.getLogger("freewheel.judge.cache")
T = TypeVar("T")

CACHE_FILE = "judge.sqlite3"
"""The file name in `cache_dir`."""
_SECRET_NAME = "delimiter secret"
SECRET_BYTES = 32
"""The width of SHA-256."""
_APPLICATION_ID = 0x46574A43
"""Marks the file in its header as freewheel's judge cache ("FWJC")."""
_SCHEMA_VERSION = 1
"""Raised whenever a table changes. A file of another version is set aside: replies can be requested again."""
ASIDES_MAX = 8
"""Most files that are set aside, so that a disk that damages every file is not filled with copies. After that the cache
is in memory only."""
_BUSY_TIMEOUT_S = 0.25
"""How long one statement waits for another process's transaction. Short, because `close` and a fork wait for a thread
that is inside SQLite. Later statements try again."""
_COMMAND_TIMEOUT_S = 30.0
"""How long one statement of the command line waits for another process's transaction."""
_SETUP_WAIT_S = 2.0
"""How long to wait at least for a process that is opening the file. That takes milliseconds, unless that process is
stopped."""
RETRY_AFTER_S = 30.0
"""The pause after a failure that may pass, such as a full disk."""
_LOCKED_PAUSE_S = (0.1, 1.0)
"""The pause after a lock outlasted SQLite's own wait, drawn at random: a miss costs less than a wait per batch."""
_BATCH_ENTRIES = 1024
"""Entries per transaction. Above it the cost per entry no longer falls, and other processes wait longer."""
_LINGER_S = 0.05
"""How long the first entry of a batch waits for more. A killed process loses at most this."""
WAITING_MAX_BYTES = 64 * 2**20
"""Replies waiting for a slow, full or missing disk. Above it the oldest are dropped."""
_TOUCH_EVERY_S = 600.0
"""An entry's time of last use is written at most this often, so reads rarely write. Eviction by use is approximate."""
_TOUCH_LINGER_S = 1.0
"""How long uses wait to be written. Losing one costs nothing."""
_TOUCHED_MAX = 65_536
"""Uses waiting to be written; more are dropped."""
_EVICT_TO = 0.9
"""Eviction shrinks the file to this share of its bound, so that it is rare."""
_STEP_ENTRIES = 256
"""Rows per transaction of eviction and clearing: a few milliseconds, so that other processes can write."""
_STEP_PAGES = 512
"""Pages returned to the disk per transaction, for the same reason."""
_EXPORT_ENTRIES = 64
"""Entries that an export reads at a time. If a slow export held one snapshot, the log would grow."""
_CLOSE_TIMEOUT_S = 5.0
"""How long `close` may continue to write. Replies that remain are lost, and a warning gives their number."""
_JOIN_GRACE_S = 2.0
"""How much longer `close` waits: the thread checks the time only between two statements."""
_ENTRY_OVERHEAD_BYTES = 500
"""Memory of an entry besides its text, by tracemalloc: the digest, the reply and the dict's slot."""
_QUERY_KEYS = 256
"""Keys per query."""
_INSERT_ROWS = 64
"""Rows per insert. Python's sqlite3 releases the interpreter lock once per statement, so next to a busy event loop each
single-row insert would cost a thread switch."""

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
# `replies_used` (1 us more per put) serves eviction and stats without reading the replies.
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
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {_SCHEMA_VERSION}",
)
_WRITTEN = ("key", "created_at", "used_at", "size", "checksum", "prompt_tokens", "completion_tokens", "text")
_SELECT = "SELECT id, key, created_at, used_at, checksum, prompt_tokens, completion_tokens, text FROM replies"


class CachedReply(msgspec.Struct, frozen=True, gc=False):
    """A judge's reply, unparsed, and the tokens that it cost."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def memory_bytes(self) -> int:
        """Upper bound of the entry's memory. (`sys.getsizeof` grows when something requests a string's UTF-8.)"""
        return _ENTRY_OVERHEAD_BYTES + len(self.text) * (1 if self.text.isascii() else 4)


class CacheUnusableError(JudgeError, RuntimeError):
    """The cache file cannot be read or written. Only `stats`, `clear` and `export` raise it."""


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The content and the size of the file."""

    path: str
    schema_version: int
    entries: int
    payload_bytes: int
    """Keys and texts."""
    file_bytes: int
    """The file and its log, on disk."""
    oldest_at: float | None
    newest_at: float | None
    """Unix times at which the oldest and the newest reply were stored."""
    set_aside: tuple[str, ...]
    """Unusable files that were renamed and kept next to it. They may be deleted."""


def cache_dir(configured: str | None = None) -> Path:
    """The cache's folder: as configured, $FREEWHEEL_CACHE_DIR, $XDG_CACHE_HOME/freewheel or ~/.cache/freewheel."""
    explicit = configured or os.environ.get("FREEWHEEL_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a path that is not absolute.
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "freewheel"


class MemoryCache:
    """The most recently used replies, within `max_bytes`. For one thread only: the event loop's."""

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, CachedReply] = OrderedDict()

    def get(self, key: bytes) -> CachedReply | None:
        reply = self._entries.get(key)
        if reply is not None:
            self._entries.move_to_end(key)
        return reply

    def put(self, key: bytes, reply: CachedReply) -> None:
        """Keep `reply` and drop the least recently used ones. A reply larger than the bound is not kept."""
        old = self._entries.pop(key, None)
        if old is not None:
            self.bytes -= old.memory_bytes
        if reply.memory_bytes > self._max_bytes:
            return
        self._entries[key] = reply
        self.bytes += reply.memory_bytes
        while self.bytes > self._max_bytes:
            self.bytes -= self._entries.popitem(last=False)[1].memory_bytes


# -- the file ---------------------------------------------------------------------------------------------------------


class _ForeignError(sqlite3.DatabaseError):
    """The file is a database, but not one of our schema."""

    sqlite_errorcode = sqlite3.SQLITE_NOTADB


class CacheFile:
    """A connection to the file, for one thread at a time. Creates the file, and renames one that cannot be used."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self.lock = threading.Lock()
        """Held while the connection is in use; a fork waits for it."""
        self._timeout_s = timeout_s
        self._db: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None

    def use(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return `work(connection)`. Raises `sqlite3.Error` or `OSError`, and connects again at the next call.

        If the file turns out to be damaged, it is set aside and `work` is called a second time, with a new file.
        """
        with self.lock:
            try:
                try:
                    return work(self._connect())
                except sqlite3.DatabaseError as error:
                    if diagnose(error) is not Trouble.CORRUPT:
                        raise
                    self._set_aside(error)
                    return work(self._connect())
            except (sqlite3.Error, OSError):
                self.disconnect()
                raise

    def disconnect(self) -> None:
        """Close the connection. Call it with `lock` held."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def list_asides(self) -> tuple[str, ...]:
        """The names of the files set aside so far. The user may inspect or delete them."""
        marks = (f"{self.path.name}.corrupt-", f"{self.path.name}.schema-")
        names = (entry.name for entry in self.path.parent.iterdir())
        return tuple(sorted(name for name in names if name.startswith(marks) and not name.endswith(COMPANIONS)))

    def _connect(self) -> sqlite3.Connection:
        if self._db is not None and _identify(self.path) != self._identity:
            self.disconnect()  # the file was set aside, deleted or replaced
        if self._db is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._setup_lock():
                self._db = self._open()
        return self._db

    def _open(self) -> sqlite3.Connection:
        """Connect, and create the file and its tables if they are missing. With the setup lock held."""
        if not self.path.exists():
            for suffix in COMPANIONS:  # SQLite would replay a log without its database into the new file
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            # Only a new file: closing a descriptor of a file drops all locks that this process has on it.
            os.close(open_private(self.path, os.O_RDWR))
        self.path.chmod(0o600)  # before SQLite gives its log and index the same permissions
        self._identity = _identify(self.path)
        db = connect(self.path, timeout_s=self._timeout_s, settings=_SETTINGS)
        try:
            found = read_pragma(db, "application_id"), read_pragma(db, "user_version")
            if found == (0, 0) and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # for `clear`; puts use the pages that eviction frees
                db.execute("PRAGMA journal_mode = WAL").fetchall()
                with transaction(db):
                    for statement in _SCHEMA:
                        db.execute(statement)
            elif found != (_APPLICATION_ID, _SCHEMA_VERSION):
                ours = found[0] == _APPLICATION_ID
                raise _ForeignError(
                    f"it has another schema, {found[1]}" if ours else "it is another program's", found[1]
                )
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        """Rename the file, unless another process already did."""
        suffix = f"schema-{error.args[1]}" if isinstance(error, _ForeignError) else "corrupt"
        with self._setup_lock():
            if _identify(self.path) != self._identity:
                return
            if len(self.list_asides()) >= ASIDES_MAX:
                why = f"{error.args[0]}, and {ASIDES_MAX} files were set aside already: delete those"
                raise OSError(errno.EIO, why)
            for number in itertools.count(1):
                target = self.path.with_name(f"{self.path.name}.{suffix}-{number}")
                if not target.exists():
                    break
            rename_database(self.path, target)
        message = "judge cache %s cannot be used (%s): moved to %s; a new one is created"
        logger.warning(message, self.path, error.args[0], target)

    def _setup_lock(self) -> contextlib.AbstractContextManager[Any]:
        return os.fdopen(lock_database(self.path, max(self._timeout_s, _SETUP_WAIT_S)))


def _identify(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file that `path` leads to. Unique while somebody has that file open."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


# -- statements -------------------------------------------------------------------------------------------------------


_Entry = tuple[bytes, CachedReply, float, float]
"""Key, reply, when it was stored and when it was last used."""


def _write(
    db: sqlite3.Connection,
    replies: Iterable[tuple[bytes, CachedReply]],
    touched: Iterable[bytes],
    notes: Iterable[tuple[str, bytes]],
    now: float,
) -> None:
    """Write replies and notes, and mark the touched entries as used now, in one transaction."""
    rows = []
    for key, reply in replies:
        text = _encode(reply.text)
        tokens = reply.prompt_tokens, reply.completion_tokens
        rows.append((key, now, now, len(key) + len(text), _checksum(key, text), *tokens, text))
    rows.sort(key=itemgetter(0))  # neighbours in the index are then written together
    one_row = f"({', '.join('?' * len(_WRITTEN))})"
    with transaction(db):
        for start in range(0, len(rows), _INSERT_ROWS):
            chunk = rows[start : start + _INSERT_ROWS]
            db.execute(
                f"REPLACE INTO replies ({', '.join(_WRITTEN)}) VALUES {', '.join([one_row] * len(chunk))}",
                list(itertools.chain.from_iterable(chunk)),
            )
        db.executemany("UPDATE replies SET used_at = ? WHERE key = ?", [(now, key) for key in touched])
        db.executemany("REPLACE INTO notes VALUES (?, ?)", [(_encode(name), value) for name, value in notes])


def _decode(row: tuple[Any, ...]) -> _Entry | None:
    _, key, created_at, used_at, checksum, prompt_tokens, completion_tokens, text = row
    try:
        if _checksum(key, text) != checksum:
            return None
        reply = CachedReply(text.decode("utf-8", "surrogatepass"), int(prompt_tokens), int(completion_tokens))
        return key, reply, float(created_at), float(used_at)
    except (TypeError, ValueError, AttributeError):  # a damaged row may hold any type
        return None


def _encode(text: str) -> bytes:
    """Encode text as bytes: SQLite's text type ends at a NUL and refuses lone surrogates, and a judge may send both."""
    return text.encode("utf-8", "surrogatepass")


def _checksum(key: bytes, text: bytes) -> int:
    """Return a checksum of an entry, because SQLite checks only the structure of its pages, not their content."""
    return zlib.crc32(text, zlib.crc32(key))


def _used_bytes(db: sqlite3.Connection) -> int:
    """The size of the pages in use. SQLite keeps this count for all processes, so it cannot drift as a separate total
    would."""
    return (read_pragma(db, "page_count") - read_pragma(db, "freelist_count")) * read_pragma(db, "page_size")


def _delete(db: sqlite3.Connection, which: str, *parameters: float) -> int:
    """Delete a few of the replies that `which` selects. Returns how many; 0 when none is left."""
    query = f"DELETE FROM replies WHERE id IN (SELECT id FROM replies {which} LIMIT {_STEP_ENTRIES})"
    return db.execute(query, parameters).rowcount


# -- the store --------------------------------------------------------------------------------------------------------


class Store:
    """Replies and notes in the file at `path`. Only `stats`, `clear` and `export` raise if the file cannot be used.

    For any thread and any number of processes. After a fork both processes continue, each with separate connections;
    the parent writes the items that were waiting. A thread writes 50 ms after the first item, or for a full batch, and
    `close` writes the rest.
    """

    def __init__(
        self, path: Path, *, max_bytes: int, ttl_s: float | None, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.path = Path(os.path.realpath(path))  # SQLite puts its log next to the real file
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self._wall_clock = wall_clock
        self._close_by = math.inf
        """Finite once the store is closed."""
        self._begin()
        _stores.add(self)

    def _begin(self) -> None:
        """Set up the state of one process."""
        self._reader, self._writer = CacheFile(self.path, _BUSY_TIMEOUT_S), CacheFile(self.path, _BUSY_TIMEOUT_S)
        self._commands = CacheFile(self.path, _COMMAND_TIMEOUT_S)
        self.files = self._reader, self._writer, self._commands
        self._read_again_at = -math.inf
        self._logged: set[str] = set()
        self._thread = WriterThread("freewheel-judge-cache", pending=self._has_work, write=self._write)
        self._changed = self._thread.changed

        # Guarded by `_changed`.
        self._waiting: OrderedDict[bytes, CachedReply] = OrderedDict()
        self._waiting_bytes = 0
        self._notes: dict[str, bytes] = {}
        self._touched: dict[bytes, None] = {}

    # -- for the engine ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create or check the file. If it cannot be used, log a warning and continue in memory.

        The writer's thread starts here: a judge that is closed at interpreter exit can no longer start one.
        """
        with self._changed:
            self._start_thread()
        self._try_to_read(lambda db: None)

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, CachedReply]:
        """Return the replies that exist for these keys.

        Reads the disk on the calling thread, which is the engine's event loop: a miss costs less than a microsecond per
        key, and a file that is locked or failing is left alone after one short wait.
        """
        with self._changed:
            found = {key: self._waiting[key] for key in keys if key in self._waiting} if self._waiting else {}
        rest = [key for key in keys if key not in found] if found else keys
        if rest and (used := self._try_to_read(lambda db: self._find(db, rest, found))):
            with self._changed:
                if len(self._touched) <= _TOUCHED_MAX:
                    self._touched.update(dict.fromkeys(used))
                    self._schedule(_TOUCH_LINGER_S)
        return found

    def put(self, key: bytes, reply: CachedReply) -> None:
        """Keep `reply`. It is written soon; `get_many` finds it at once."""
        if reply.memory_bytes > self.max_bytes:
            return
        with self._changed:
            if self._is_closed():
                return
            self._drop_waiting(key)
            self._waiting[key] = reply
            self._waiting_bytes += reply.memory_bytes
            while self._waiting_bytes > WAITING_MAX_BYTES:
                self._drop_waiting(next(iter(self._waiting)))
                self._warn_once("too many replies wait to be written; the oldest are dropped and requested again")
            if len(self._waiting) == 1:
                self._schedule(_LINGER_S)
            elif len(self._waiting) == _BATCH_ENTRIES:
                self._schedule(0.0)

    def remember(self, name: str, value: bytes) -> None:
        """Keep a small value by name, such as the values that a limiter learned about an endpoint."""
        with self._changed:
            if not self._is_closed():
                self._notes[name] = value
                self._schedule(_LINGER_S)

    def recall(self, name: str) -> bytes | None:
        """Return what this or another process remembered by that name."""
        waiting = self._notes.get(name)
        if waiting is not None:
            return waiting
        query = "SELECT value FROM notes WHERE name = ?"
        row = self._try_to_read(lambda db: db.execute(query, (_encode(name),)).fetchone())
        return row[0] if row and isinstance(row[0], bytes) else None  # a damaged row may hold any type

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all replies and notes are in the file. False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._notes), timeout_s)

    def close(self) -> None:
        """Write what waits, end the thread and close the file. May be called again, and by any thread."""
        with self._changed:
            self._close_by = min(self._close_by, time.monotonic() + _CLOSE_TIMEOUT_S)
        self._thread.close()
        if self._thread.is_started:
            self._thread.join(_CLOSE_TIMEOUT_S + _JOIN_GRACE_S)
        else:
            self._thread.run()  # nothing else would write what waits
        with self._changed:
            lost = len(self._waiting)
            for waiting in (self._waiting, self._notes, self._touched):
                waiting.clear()
        if lost:
            logger.warning("judge cache %s: closed with %d replies not written", self.path, lost)
        for file in self.files:
            with file.lock:
                file.disconnect()

    # -- for the command line ---------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        summary = "SELECT count(*), coalesce(sum(size), 0), min(created_at), max(created_at) FROM replies"
        entries, payload_bytes, oldest_at, newest_at = self._run(
            lambda db: db.execute(f"{summary} INDEXED BY replies_used").fetchone()
        )
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        file_bytes = sum(file.stat().st_size for file in files if file.exists())
        return StoreStats(
            path=str(self.path), schema_version=_SCHEMA_VERSION, entries=entries, payload_bytes=payload_bytes,
            file_bytes=file_bytes, oldest_at=oldest_at, newest_at=newest_at, set_aside=self._commands.list_asides(),
        )  # fmt: skip

    def clear(self, *, older_than_s: float | None = None) -> int:
        """Remove all replies, or those stored longer ago, and return their space to the disk. Returns how many.

        Notes are kept. Replies that other processes hold in memory stay there until those processes end.
        """
        before = math.inf if older_than_s is None else self._wall_clock() - older_than_s

        def clear(db: sqlite3.Connection) -> int:
            removed = 0
            while step := _delete(db, "WHERE created_at < ?", before):
                removed += step
            while read_pragma(db, "freelist_count"):
                db.execute(f"PRAGMA incremental_vacuum({_STEP_PAGES})").fetchall()
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return removed

        return self._run(clear)

    def export(self) -> Iterator[dict[str, Any]]:
        """Each reply that has not expired, in the order of storing and in constant memory. `key` is in hex."""
        query = f"{_SELECT} WHERE id > ? AND created_at >= ? ORDER BY id LIMIT {_EXPORT_ENTRIES}"
        cutoff, last = self._cutoff(), -1
        while rows := self._run(lambda db: db.execute(query, (last, cutoff)).fetchall()):  # noqa: B023  called at once
            last = rows[-1][0]
            for key, reply, created_at, used_at in filter(None, map(_decode, rows)):
                times = {"created_at": created_at, "used_at": used_at}
                yield {"key": key.hex(), **msgspec.structs.asdict(reply), **times}

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return `work(connection)` from a connection that waits for locks and whose errors the user sees."""
        if self._is_closed():
            raise CacheUnusableError(f"the judge cache {self.path} is closed")
        try:
            return self._commands.use(work)
        except (sqlite3.Error, OSError) as error:
            raise CacheUnusableError(f"judge cache {self.path}: {diagnose(error)} ({error})") from error

    # -- reading ----------------------------------------------------------------------------------------------------

    def _try_to_read(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Return `work(connection)`, or None if the file cannot be used."""
        if self._is_closed() or time.monotonic() < self._read_again_at:
            return None
        try:
            return self._reader.use(work)
        except (sqlite3.Error, OSError) as error:
            self._read_again_at = time.monotonic() + self._choose_pause(error)
            return None

    def _find(self, db: sqlite3.Connection, keys: Sequence[bytes], found: dict[bytes, CachedReply]) -> list[bytes]:
        """Add the replies to `found`. Returns the keys whose time of last use should be written."""
        cutoff, stale = self._cutoff(), self._wall_clock() - _TOUCH_EVERY_S
        used: list[bytes] = []
        for chunk in (keys[start : start + _QUERY_KEYS] for start in range(0, len(keys), _QUERY_KEYS)):
            query = f"{_SELECT} WHERE key IN ({','.join('?' * len(chunk))})"
            # fetchall, because a cursor that is read halfway keeps its snapshot.
            for entry in map(_decode, db.execute(query, chunk).fetchall()):
                if entry is None:
                    self._warn_once("it holds damaged replies; they are requested again")
                    continue
                key, reply, created_at, used_at = entry
                if created_at >= cutoff:
                    found[key] = reply
                    if used_at < stale:
                        used.append(key)
        return used

    def _cutoff(self) -> float:
        """Replies stored before this have expired."""
        return self._wall_clock() - self.ttl_s if self.ttl_s is not None else -math.inf

    # -- what waits; with `_changed` held -----------------------------------------------------------------------------

    def _is_closed(self) -> bool:
        return self._close_by < math.inf

    def _has_work(self) -> bool:
        return bool(self._waiting or self._notes or self._touched)

    def _drop_waiting(self, key: bytes) -> None:
        reply = self._waiting.pop(key, None)
        if reply is not None:
            self._waiting_bytes -= reply.memory_bytes

    def _schedule(self, delay_s: float) -> None:
        self._thread.schedule(delay_s)
        self._start_thread()  # in a forked child there is none yet

    def _start_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # no more threads: the next item tries again, and `close` writes
            self._thread.start()

    # -- writing, in the thread -------------------------------------------------------------------------------------

    def _write(self) -> float:
        """Write a batch. Returns the pause before the next attempt."""
        if time.monotonic() >= self._close_by:
            return math.inf
        with self._changed:
            replies = list(itertools.islice(self._waiting.items(), _BATCH_ENTRIES))
            notes, touched = list(self._notes.items()), list(itertools.islice(self._touched, _BATCH_ENTRIES))
        try:
            self._writer.use(lambda db: _write(db, replies, touched, notes, self._wall_clock()))
        except (sqlite3.Error, OSError) as error:
            pause_s = self._choose_pause(error)
            return math.inf if self._is_closed() and pause_s == RETRY_AFTER_S else pause_s
        with self._changed:
            for key, reply in replies:
                if self._waiting.get(key) is reply:  # not replaced meanwhile
                    self._drop_waiting(key)
            for name, value in notes:
                if self._notes.get(name) is value:
                    del self._notes[name]
            for key in touched:
                self._touched.pop(key, None)
            self._thread.schedule(0.0 if len(self._waiting) >= _BATCH_ENTRIES else _LINGER_S)
            self._changed.notify_all()  # for `flush`
        with contextlib.suppress(sqlite3.Error, OSError):  # the next batch checks the bound again
            self._writer.use(self._evict)
        return 0.0

    def _evict(self, db: sqlite3.Connection) -> None:
        """Remove the least recently used replies when the file is too large.

        Uses small transactions, so that other processes may write between them. `close` waits for it, up to a limit.
        Otherwise many short runs, each closed right after its last write, would let the file grow.
        """
        if _used_bytes(db) > self.max_bytes:
            while time.monotonic() < self._close_by and _used_bytes(db) > self.max_bytes * _EVICT_TO:
                if not _delete(db, "ORDER BY used_at"):
                    return

    # -- troubles -----------------------------------------------------------------------------------------------------

    def _choose_pause(self, error: sqlite3.Error | OSError) -> float:
        """Return how long to leave the file alone. Each kind of trouble is logged once; a lock is normal and not
        logged."""
        trouble = diagnose(error)
        if trouble is Trouble.LOCKED:
            return random.uniform(*_LOCKED_PAUSE_S)
        self._warn_once(f"{trouble} (%s); continuing without it, and trying again later", error, kind=trouble)
        return RETRY_AFTER_S

    def _warn_once(self, message: str, *details: object, kind: str = "") -> None:
        if (kind or message) not in self._logged:
            self._logged.add(kind or message)
            logger.warning(f"judge cache %s: {message}", self.path, *details)


# -- the engine's view -------------------------------------------------------------------------------------------------


class ReplyCache:
    """The engine's cache of replies and of the limiters' learned values. With `cache` off it is in memory only, and the
    engine's keys contain the batch."""

    def __init__(self, config: JudgeConfig) -> None:
        self._model = config.model
        # Only the file knows the age of a reply.
        in_memory = config.cache_ttl_s is None or not config.cache
        self._memory = MemoryCache(config.memory_cache_bytes if in_memory else 0)
        self._store: Store | None = None
        self._noted: dict[str, bytes] = {}
        if config.cache:
            path = cache_dir(config.cache_dir) / CACHE_FILE
            self._store = Store(path, max_bytes=config.cache_max_bytes, ttl_s=config.cache_ttl_s)

    def open(self) -> None:
        if self._store is not None:
            self._store.open()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def in_memory(self, key: bytes) -> CachedReply | None:
        return self._memory.get(key)

    def on_disk(self, keys: Sequence[bytes]) -> dict[bytes, CachedReply]:
        """Read the file on the calling thread: in a batch, a miss costs only about a microsecond per key."""
        if self._store is None or not keys:
            return {}
        found = self._store.get_many(keys)
        for key, cached in found.items():
            self._memory.put(key, cached)
        return found

    def keep(self, key: bytes, reply: Reply) -> None:
        cached = CachedReply(reply.text, reply.usage.prompt_tokens, reply.usage.completion_tokens)
        self._memory.put(key, cached)
        if self._store is not None:
            self._store.put(key, cached)

    def secret(self) -> bytes:
        """This user's secret for the codes in prompts. The file keeps it, so later processes send the same bytes.

        Without a usable file it lasts as long as the engine, which changes no hash and no cached verdict.
        """
        stored = self._store.recall(_SECRET_NAME) if self._store is not None else None
        if stored is not None and len(stored) == SECRET_BYTES:
            return stored
        secret = secrets.token_bytes(SECRET_BYTES)
        if self._store is not None:
            self._store.remember(_SECRET_NAME, secret)
        return secret

    def remember(self, url: str, memory: LimiterMemory) -> None:
        noted = msgspec.json.encode(memory)
        if self._store is not None and self._noted.get(url) != noted:
            self._noted[url] = noted
            self._store.remember(self._limiter_name(url), noted)

    def recall(self, url: str) -> LimiterMemory | None:
        stored = self._store.recall(self._limiter_name(url)) if self._store is not None else None
        if stored is None:
            return None
        try:
            return msgspec.json.decode(stored, type=LimiterMemory)
        except msgspec.DecodeError:
            return None  # written by another version: start without it

    def _limiter_name(self, url: str) -> str:
        return f"limiter {url} {self._model}"


# -- forks ------------------------------------------------------------------------------------------------------------

_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_forking: list[Store] = []


def _before_fork() -> None:
    """Close the connections: in the child, SQLite's record of the locks its process holds would be wrong."""
    _forking[:] = _stores
    for store in _forking:
        for file in store.files:
            file.lock.acquire()
            file.disconnect()


def _after_fork_in_parent() -> None:
    for store in _forking:
        for file in store.files:
            file.lock.release()


def _after_fork_in_child() -> None:
    for store in _forking:
        store._begin()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
