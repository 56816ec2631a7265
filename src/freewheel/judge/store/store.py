"""`Store`: the one cache file of a user as the engine and the command line see it.

    put, remember --------------> WriteBehind --> the file
    get_many --+-- still waiting there --^          |
               +-- else: a query <-----------------+

Reading is done by the calling thread, which waits for nobody but another reader of the same process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from freewheel.judge.store import tables
from freewheel.judge.store.file import CacheFile, Link, forget_setup_lock
from freewheel.judge.store.tables import CachedReply
from freewheel.judge.store.writer import Outage, WriteBehind
from freewheel.judge.verdict import JudgeError
from freewheel.utils.sqlite import Trouble, diagnose

logger = logging.getLogger("freewheel.judge.cache")

TOUCH_EVERY_S = 600.0
"""An entry's time of last use is written at most this often, so that reading seldom writes: the LRU is approximate."""
RETRY_AFTER_S = 30.0
"""After a failure that time may mend (a full disk, an I/O error) the file is left alone this long."""
LOCKED_REST_S = 1.0
"""A reader that met a locked file asks no more for this long: a miss costs less than a wait for every batch."""
FLUSH_TIMEOUT_S = 10.0
CLEAR_TIMEOUT_S = 30.0
"""How long `clear` keeps asking for the lock."""
FORK_WAIT_S = 2.0
"""How long a fork waits for the connections to be idle. Past it the child does without the file."""


class CacheUnusableError(JudgeError, RuntimeError):
    """The cache file cannot be read or written. Only `stats`, `clear` and `export` raise it."""


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the file, now."""

    path: str
    schema_version: int
    entries: int
    expired: int
    """Of `entries`: those past `ttl_s`, which are misses and will be removed."""
    payload_bytes: int
    """Keys and texts."""
    file_bytes: int
    """The file and its log, on disk."""
    max_bytes: int
    ttl_s: float | None
    oldest_at: float | None
    newest_at: float | None
    """Unix times at which the oldest and the newest reply were stored."""
    set_aside: tuple[str, ...]
    """Files beside it that could not be used, kept for whoever wants to look; they may be deleted."""


class Store:
    """Replies and notes in the file at `path`. Nothing but `stats`, `clear` and `export` raises for its troubles.

    For any thread and any number of processes. After a fork both processes go on, each with connections of its own;
    what waited to be written is the parent's to write.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        ttl_s: float | None,
        wall_clock: Callable[[], float] = time.time,
        log: logging.Logger = logger,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self._wall_clock = wall_clock
        self._log = log
        self._retry_after_s = retry_after_s
        self._file = CacheFile(path, wall_clock=wall_clock, log=log)
        self._held_for_fork: list[threading.Lock] = []
        self._begin()
        _stores.add(self)

    def _begin(self) -> None:
        """The state of one process and one opening."""
        said: set[Trouble] = set()
        self._closed = False
        self._damage_said = False
        self._outage = Outage(said=said)
        self._read_lock = threading.Lock()
        self._reader: Link | None = None
        self._writer = WriteBehind(
            self._file,
            max_bytes=self.max_bytes,
            ttl_s=self.ttl_s,
            wall_clock=self._wall_clock,
            log=self._log,
            outage=Outage(said=said),
            retry_after_s=self._retry_after_s,
        )

    # -- for the engine --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Makes or checks the file. Where it cannot be used that is said, and the store goes on in memory.

        The writer's thread begins here: a judge that is closed at exit is past the time when threads can be started.
        """
        if self._closed:
            self._begin()
        self._writer.start()
        with self._read_lock:
            try:
                self._connected()
            except (sqlite3.Error, OSError) as error:
                self._reader_failed(error)

    @property
    def trouble(self) -> str | None:
        """Why the file is not in use at present, or None."""
        return self._writer.outage.trouble or self._outage.trouble

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, CachedReply]:
        """The replies that there are, of those asked for.

        Reads the disk on the calling thread. The engine calls it on its event loop: a miss costs under a microsecond
        a key, and a file that is locked or failing is left alone after one short wait.
        """
        found = self._writer.waiting(keys)
        ask = [key for key in keys if key not in found] if found else keys
        used: list[bytes] = []
        with self._read_lock:
            if ask and self._may_read():
                try:
                    self._read(ask, found, used)
                except (sqlite3.Error, OSError) as error:
                    self._reader_failed(error)
                else:
                    self._outage.end()
        if used:
            self._writer.touch(used)
        return found

    def put(self, key: bytes, reply: CachedReply) -> None:
        """Keeps `reply`, soon. Does not wait for anything; `get_many` finds it at once."""
        self._writer.put(key, reply)

    def remember(self, name: str, value: bytes) -> None:
        """Keeps a small value by name, soon: what a limiter learnt about an endpoint."""
        self._writer.remember(name, value)

    def recall(self, name: str) -> bytes | None:
        """What was remembered by that name, by this process or another, at any time."""
        waiting = self._writer.waiting_note(name)
        if waiting is not None:
            return waiting
        with self._read_lock:
            if not self._may_read():
                return None
            try:
                return tables.read_note(self._connected(), name)
            except (sqlite3.Error, OSError) as error:
                self._reader_failed(error)
                return None

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Waits until what was put before is on disk. False where it is not: time is over, or the disk refuses it."""
        return self._writer.flush(timeout_s)

    def close(self) -> None:
        """Writes what waits, ends the thread and closes the file. Can be called again, and by any thread."""
        self._closed = True
        self._writer.close()
        with self._read_lock:
            self._disconnect()

    # -- for the command line --------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self._usable() as conn:
            summary = tables.summary(conn, self._cutoff())
        path = self._file.path
        file_bytes = 0
        for name in (path.name, path.name + "-wal"):
            with contextlib.suppress(OSError):
                file_bytes += path.with_name(name).stat().st_size
        return StoreStats(
            path=str(path),
            schema_version=tables.SCHEMA_VERSION,
            entries=summary.entries,
            expired=summary.expired,
            payload_bytes=summary.payload_bytes,
            file_bytes=file_bytes,
            max_bytes=self.max_bytes,
            ttl_s=self.ttl_s,
            oldest_at=summary.oldest_at,
            newest_at=summary.newest_at,
            set_aside=self._file.asides(),
        )

    def clear(self, *, older_than_s: float | None = None) -> int:
        """Removes the replies, or those stored longer ago than that, and gives the space back. Says how many.

        Notes are kept. Replies that other processes hold in memory stay there until those processes end.
        """
        if older_than_s is None:
            self._writer.forget_replies()
        before = float("inf") if older_than_s is None else self._wall_clock() - older_than_s
        removed = 0
        with self._usable() as conn:
            for ids in list(tables.id_ranges(conn)):
                removed += _patiently(
                    conn, "DELETE FROM replies WHERE id > ? AND id <= ? AND created_at < ?", (*ids, before)
                )
            while tables.pragma(conn, "freelist_count") > 0:
                _patiently(conn, f"PRAGMA incremental_vacuum({tables.STEP_PAGES})")
            conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return removed

    def export(self) -> Iterator[dict[str, Any]]:
        """Each reply that is not expired, in the order of storing and in constant memory. `key` is in hex."""
        last: int | None = tables.BEFORE_FIRST_ID
        cutoff = self._cutoff()
        while last is not None:
            with self._usable() as conn:
                last, entries = tables.export_step(conn, last, cutoff)
            for entry in entries:
                yield {
                    "key": entry.key.hex(),
                    "text": entry.reply.text,
                    "prompt_tokens": entry.reply.prompt_tokens,
                    "completion_tokens": entry.reply.completion_tokens,
                    "created_at": entry.created_at,
                    "used_at": entry.used_at,
                }

    # -- reading: with `_read_lock` held ---------------------------------------------------------------------

    def _may_read(self) -> bool:
        return not self._closed and self._outage.rest_s <= 0

    def _connected(self) -> sqlite3.Connection:
        if self._reader is not None and not self._reader.is_current():
            self._disconnect()
        if self._reader is None:
            self._reader = self._file.connect()
        return self._reader.conn

    def _disconnect(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self, keys: Sequence[bytes], found: dict[bytes, CachedReply], used: list[bytes]) -> None:
        conn = self._connected()
        now, cutoff = self._wall_clock(), self._cutoff()
        stale = now - TOUCH_EVERY_S
        for entry in tables.select(conn, keys):
            if entry is None:
                if not self._damage_said:
                    self._damage_said = True
                    self._log.warning("judge cache %s holds damaged replies; they are asked for again", self.path)
                continue
            key, reply, created_at, used_at = entry
            if created_at < cutoff:
                continue
            found[key] = reply
            # Times in the future, left by a clock that was wrong, count as now: the touch corrects them.
            if used_at < stale or used_at > now or created_at > now:
                used.append(key)

    def _cutoff(self) -> float:
        """Replies stored before this are expired."""
        return float("-inf") if self.ttl_s is None else self._wall_clock() - self.ttl_s

    def _reader_failed(self, error: sqlite3.Error | OSError) -> None:
        trouble = diagnose(error)
        reader = self._reader
        mended = trouble is Trouble.CORRUPT and reader is not None and self._file.set_aside(reader.identity, error)
        self._disconnect()
        if mended:
            return
        if self._outage.begin(trouble, LOCKED_REST_S if trouble is Trouble.LOCKED else self._retry_after_s):
            self._file.say(trouble, error)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[sqlite3.Connection]:
        """A connection for the command line's calls, which are told of a failure."""
        with self._read_lock:
            if self._closed:
                raise CacheUnusableError(f"the judge cache {self.path} is closed")
            try:
                yield self._connected()
            except (sqlite3.Error, OSError) as error:
                self._reader_failed(error)
                raise CacheUnusableError(f"judge cache {self.path}: {diagnose(error)} ({error})") from error

    # -- forks -----------------------------------------------------------------------------------------------

    def _before_fork(self) -> None:
        """Closes the connections: SQLite's notion of which locks its process holds would be wrong in the child."""
        self._held_for_fork = []
        for lock, disconnect in (
            (self._read_lock, self._disconnect),
            (self._writer.lock, self._writer.disconnect),
        ):
            if lock.acquire(timeout=FORK_WAIT_S):
                self._held_for_fork.append(lock)
                disconnect()

    def _after_fork_in_parent(self) -> None:
        for lock in self._held_for_fork:
            lock.release()

    def _after_fork_in_child(self) -> None:
        abandoned = self._reader, self._writer
        usable = not self._closed and len(self._held_for_fork) == 2
        self._begin()
        if not usable:
            _abandoned.append(abandoned)
            self._closed = True
            self._writer.close()


def _patiently(conn: sqlite3.Connection, statement: str, parameters: Sequence[object] = ()) -> int:
    """One statement as its own transaction, asked for again while others write. Returns the rows it changed."""
    deadline = time.monotonic() + CLEAR_TIMEOUT_S
    while True:
        try:
            cursor = conn.execute(statement, parameters)
            cursor.fetchall()
            return cursor.rowcount
        except sqlite3.OperationalError as error:
            if diagnose(error) is not Trouble.LOCKED or time.monotonic() > deadline:
                raise


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_abandoned: list[object] = []
"""Connections of a parent that were busy at the fork: closing them in the child would harm the parent."""


def _before_fork() -> None:
    for store in list(_stores):
        store._before_fork()


def _after_fork_in_parent() -> None:
    for store in list(_stores):
        store._after_fork_in_parent()


def _after_fork_in_child() -> None:
    forget_setup_lock()
    for store in list(_stores):
        store._after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
