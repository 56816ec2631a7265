"""`Store`: the persistent cache of judge replies, one SQLite file that all processes of a user share.

    put, remember ──▶ items wait in memory ── thread: transaction, evict, expire ──▶ the file
    get_many ──┬── items that still wait ◀─┘                                           │
               └── the rest: a query on the calling thread ◀───────────────────────────┘

The cache may lose an entry, but it never blocks or fails its caller. `ReplyCache` uses it for the engine, and
`freewheel cache` for the command line.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import sqlite3
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from freewheel.judge.cache_file import SCHEMA_VERSION, CacheDatabase, CachedReply, CacheFile
from freewheel.judge.verdict import JudgeError
from freewheel.utils.sqlite import Trouble, WriterThread, diagnose

logger = logging.getLogger("freewheel.judge.cache")
T = TypeVar("T")

TOUCH_EVERY_S = 600.0
"""An entry's time of last use is written at most this often, so reads rarely write. Eviction by use is approximate."""
RETRY_AFTER_S = 30.0
"""The pause after a failure that may pass, such as a full disk."""
LOCKED_PAUSE_S = (0.1, 1.0)
"""The pause after a lock outlasted SQLite's own wait, drawn at random: a miss costs less than a wait per batch."""
LOCKED_WARN_S = 10.0
"""A wait for a lock is ordinary until it has lasted this long."""
FLUSH_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 30.0
"""How long a statement of the command line waits while other processes write."""
BATCH_ENTRIES = 1024
"""Entries per transaction. Above it the cost per entry no longer falls, and other processes wait longer."""
BATCH_BYTES = 8 * 2**20
"""Text per transaction when replies are long: about 20 ms of writing."""
LINGER_S = 0.05
"""How long the first entry of a batch waits for more. A killed process loses at most this."""
TOUCH_LINGER_S = 1.0
"""The same for a note that an entry was used; losing one costs nothing."""
TOUCHED_MAX = 65_536
"""Uses waiting to be written; more are dropped."""
WAITING_MAX_BYTES = 64 * 2**20
"""Replies waiting for a slow, full or missing disk. Above it the oldest are dropped."""
ENTRY_OVERHEAD_BYTES = 500
"""Memory of an entry besides its text, by tracemalloc: the digest, the reply and the dict's slot."""
EVICT_TO = 0.9
"""Eviction shrinks the file to this share of its bound, so that it is rare."""
SHRINK_ABOVE = 1.25
"""A file larger than this share of its bound returns pages to the disk: only after the bound was lowered."""
EXPIRE_EVERY_S = 3600.0
"""How often expired entries are removed from the file. They are misses from the first moment."""
CLOSE_TIMEOUT_S = 5.0
"""How long `close` may continue to write. What is left then is lost, and a warning counts it."""
JOIN_GRACE_S = 2.0
"""The thread checks the time between statements; this is for the statement."""


def memory_bytes(reply: CachedReply) -> int:
    """Upper bound of an entry's memory. (`sys.getsizeof` grows when something requests a string's UTF-8.)"""
    return ENTRY_OVERHEAD_BYTES + len(reply.text) * (1 if reply.text.isascii() else 4)


class CacheUnusableError(JudgeError, RuntimeError):
    """The cache file cannot be read or written. Only `stats`, `clear` and `export` raise it."""


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds now."""

    path: str
    schema_version: int
    entries: int
    expired: int
    """Of `entries`: those older than `ttl_s`, which are misses and will be removed."""
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
    """Unusable files that were renamed and kept next to it. They may be deleted."""


class _Unusable(Exception):
    """The file could not be used. `is_brief`: it is locked, or was replaced by a new one."""

    def __init__(self, pause_s: float, *, is_brief: bool) -> None:
        self.pause_s = pause_s
        self.is_brief = is_brief


class _Access:
    """A connection to the file for one thread at a time. It reconnects, and replaces a damaged file."""

    def __init__(self, file: CacheFile, logged: set[Trouble]) -> None:
        self.lock = threading.Lock()
        """Held while the connection is in use; a fork waits for it."""
        self.trouble: Trouble | None = None
        self._file = file
        self._logged = logged
        self._failing_since = math.inf
        self._database: CacheDatabase | None = None

    def use(self, work: Callable[[CacheDatabase], T]) -> T:
        """Return `work(connection)`. Raises `_Unusable`; each kind of trouble is logged once."""
        with self.lock:
            try:
                if self._database is not None and not self._database.is_current():
                    self.disconnect()
                if self._database is None:
                    self._database = self._file.connect()
                result = work(self._database)
            except (sqlite3.Error, OSError) as error:
                raise self._fail(error) from error
        self._failing_since = math.inf
        if self.trouble is not None:
            self.trouble = None
            logger.info("judge cache %s is in use again", self._file.given)
        return result

    def disconnect(self) -> None:
        """With `lock` held."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _fail(self, error: sqlite3.Error | OSError) -> _Unusable:
        trouble, database = diagnose(error), self._database
        is_replaced = (
            trouble is Trouble.CORRUPT and database is not None and self._file.set_aside(database.identity, error)
        )
        self.disconnect()
        if is_replaced:
            return _Unusable(0.0, is_brief=True)
        is_locked = trouble is Trouble.LOCKED
        now = time.monotonic()
        self._failing_since = min(self._failing_since, now)
        if not is_locked or now - self._failing_since > LOCKED_WARN_S:
            self.trouble = trouble
            if trouble not in self._logged:
                self._logged.add(trouble)
                logger.warning(
                    "judge cache %s: %s (%s); continuing without it, and trying again later",
                    self._file.given, trouble, error,
                )  # fmt: skip
        return _Unusable(random.uniform(*LOCKED_PAUSE_S) if is_locked else RETRY_AFTER_S, is_brief=is_locked)


class Store:
    """Replies and notes in the file at `path`. Only `stats`, `clear` and `export` raise when the file is in trouble.

    For any thread and any number of processes. After a fork both processes continue, each with its own connections;
    the parent writes what was waiting. A thread writes 50 ms after the first item, or for a full batch, `flush` and
    `close`. If no thread can be started, `close` writes what waits.
    """

    def __init__(
        self, path: Path, *, max_bytes: int, ttl_s: float | None, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self._wall_clock = wall_clock
        self._file = CacheFile(path, wall_clock)
        self._begin()
        _stores.add(self)

    def _begin(self) -> None:
        """Set up the state of one process and one opening."""
        logged: set[Trouble] = set()
        self._closed = False
        self._reader, self._writer = _Access(self._file, logged), _Access(self._file, logged)
        self._read_again_at = -math.inf
        self._damage_logged = False
        self._thread = WriterThread(
            "freewheel-judge-cache", pending=self._has_work, write=self._write, finish=self._finish
        )
        self._changed = self._thread.changed
        self._no_thread_logged = False

        # Guarded by `_changed`.
        self._waiting: OrderedDict[bytes, CachedReply] = OrderedDict()
        self._waiting_bytes = 0
        self._notes: dict[str, bytes] = {}
        self._touched: dict[bytes, None] = {}
        self._failures = 0
        self._overflowed = False
        self._close_by = math.inf
        self._expire_at = -math.inf

    # -- for the engine ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create or check the file. If it cannot be used, log a warning and continue in memory.

        The writer's thread starts here: a judge that is closed at interpreter exit can no longer start one.
        """
        if self._closed:
            self._begin()
        with self._changed:
            self._ensure_thread()
        self._reading(lambda database: None)

    @property
    def trouble(self) -> str | None:
        """Why the file is not in use at present, or None."""
        return self._writer.trouble or self._reader.trouble

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, CachedReply]:
        """Return the replies that exist for these keys.

        Reads the disk on the calling thread, which is the engine's event loop: a miss costs less than a microsecond per
        key, and a file that is locked or failing is left alone after one short wait.
        """
        found: dict[bytes, CachedReply] = {}
        with self._changed:
            if self._waiting:
                found = {key: self._waiting[key] for key in keys if key in self._waiting}
        rest = [key for key in keys if key not in found] if found else keys
        if rest and (used := self._reading(lambda database: self._read(database, rest, found))):
            with self._changed:
                if len(self._touched) <= TOUCHED_MAX:
                    self._touched.update(dict.fromkeys(used))
                    self._schedule(TOUCH_LINGER_S)
        return found

    def put(self, key: bytes, reply: CachedReply) -> None:
        """Keep `reply`. It is written soon; `get_many` finds it at once."""
        size = memory_bytes(reply)
        if size > min(WAITING_MAX_BYTES, self.max_bytes):
            return
        overflows = False
        with self._changed:
            if self._closed:
                return
            self._drop_waiting(key)
            self._waiting[key] = reply
            self._waiting_bytes += size
            while self._waiting_bytes > WAITING_MAX_BYTES:
                self._drop_waiting(next(iter(self._waiting)))
                overflows = not self._overflowed
                self._overflowed = True
            if len(self._waiting) == 1:
                self._schedule(LINGER_S)
            elif len(self._waiting) == BATCH_ENTRIES:
                self._schedule(0.0)
        if overflows:
            logger.warning(
                "judge cache %s: %d MiB of replies wait to be written; the oldest are dropped and requested again",
                self.path,
                WAITING_MAX_BYTES >> 20,
            )

    def remember(self, name: str, value: bytes) -> None:
        """Keep a small value by name, such as what a limiter learned about an endpoint."""
        with self._changed:
            if not self._closed:
                self._notes[name] = value
                self._schedule(LINGER_S)

    def recall(self, name: str) -> bytes | None:
        """Return what this or another process remembered by that name."""
        waiting = self._notes.get(name)
        return waiting if waiting is not None else self._reading(lambda database: database.read_note(name))

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until everything put before is on disk. False if time runs out or the disk refuses it."""
        with self._changed:
            failures = self._failures
            if self._thread.is_started and not self._closed:
                self._thread.hurry()
                self._changed.wait_for(
                    lambda: not (self._waiting or self._notes) or self._failures != failures or self._closed, timeout_s
                )
            return not (self._waiting or self._notes)

    def close(self) -> None:
        """Write what waits, end the thread and close the file. May be called again, and by any thread."""
        with self._changed:
            self._closed = True
            self._close_by = min(self._close_by, time.monotonic() + CLOSE_TIMEOUT_S)
        self._thread.close()
        if self._thread.is_started:
            self._thread.join(CLOSE_TIMEOUT_S + JOIN_GRACE_S)
        else:
            self._thread.run()  # nothing else would write what waits
        with self._changed:
            lost = len(self._waiting)
            for waiting in (self._waiting, self._notes, self._touched):
                waiting.clear()
        if lost:
            logger.warning("judge cache %s: closed with %d replies not written", self.path, lost)
        with self._reader.lock:
            self._reader.disconnect()

    # -- for the command line ---------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self._connected() as database:
            entries, payload_bytes, oldest_at, newest_at, expired = database.summarize(self._cutoff())
        path = self._file.path
        file_bytes = 0
        for name in (path.name, path.name + "-wal"):
            with contextlib.suppress(OSError):
                file_bytes += path.with_name(name).stat().st_size
        return StoreStats(
            path=str(path), schema_version=SCHEMA_VERSION, entries=entries, expired=expired,
            payload_bytes=payload_bytes, file_bytes=file_bytes, max_bytes=self.max_bytes, ttl_s=self.ttl_s,
            oldest_at=oldest_at, newest_at=newest_at, set_aside=self._file.asides(),
        )  # fmt: skip

    def clear(self, *, older_than_s: float | None = None) -> int:
        """Remove all replies, or those stored longer ago, and return their space to the disk. Returns how many.

        Notes are kept. Replies that other processes hold in memory stay there until those processes end.
        """
        before = math.inf
        if older_than_s is not None:
            before = self._wall_clock() - older_than_s
        else:
            with self._changed:
                self._waiting.clear()
                self._waiting_bytes = 0
        removed = 0
        with self._connected() as database:
            while step := database.delete_step("created_at", before):
                removed += step
            while database.free_pages() > 0:
                database.vacuum_step()
            database.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return removed

    def export(self) -> Iterator[dict[str, Any]]:
        """Each reply that has not expired, in the order of storing and in constant memory. `key` is in hex."""
        with self._connected() as database:
            for entry in database.export(self._cutoff()):
                yield {
                    "key": entry.key.hex(),
                    **msgspec.structs.asdict(entry.reply),
                    "created_at": entry.created_at,
                    "used_at": entry.used_at,
                }

    @contextlib.contextmanager
    def _connected(self) -> Iterator[CacheDatabase]:
        """A separate connection that waits for locks and whose errors the user sees."""
        if self._closed:
            raise CacheUnusableError(f"the judge cache {self.path} is closed")
        try:
            with contextlib.closing(self._file.connect(COMMAND_TIMEOUT_S)) as database:
                yield database
        except (sqlite3.Error, OSError) as error:
            raise CacheUnusableError(f"judge cache {self.path}: {diagnose(error)} ({error})") from error

    # -- reading ----------------------------------------------------------------------------------------------------

    def _reading(self, work: Callable[[CacheDatabase], T]) -> T | None:
        """Return `work(connection)`, or None if the file cannot be used."""
        if self._closed or time.monotonic() < self._read_again_at:
            return None
        try:
            return self._reader.use(work)
        except _Unusable as why:
            self._read_again_at = time.monotonic() + why.pause_s
            return None

    def _read(self, database: CacheDatabase, keys: Sequence[bytes], found: dict[bytes, CachedReply]) -> list[bytes]:
        """Add the replies to `found`. Returns the keys whose time of last use should be written."""
        cutoff, stale = self._cutoff(), self._wall_clock() - TOUCH_EVERY_S
        used: list[bytes] = []
        for entry in database.read(keys):
            if entry is None:
                if not self._damage_logged:
                    self._damage_logged = True
                    logger.warning("judge cache %s holds damaged replies; they are requested again", self.path)
            elif entry.created_at >= cutoff:
                found[entry.key] = entry.reply
                if entry.used_at < stale:
                    used.append(entry.key)
        return used

    def _cutoff(self) -> float:
        """Replies stored before this have expired."""
        return -math.inf if self.ttl_s is None else self._wall_clock() - self.ttl_s

    # -- writing, with `_changed` held ------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return bool(self._waiting or self._notes or self._touched)

    def _drop_waiting(self, key: bytes) -> None:
        reply = self._waiting.pop(key, None)
        if reply is not None:
            self._waiting_bytes -= memory_bytes(reply)

    def _schedule(self, delay_s: float) -> None:
        self._thread.schedule(delay_s)
        self._ensure_thread()

    def _ensure_thread(self) -> None:
        """Start the thread. If that fails, log it once; the next item tries again."""
        try:
            self._thread.start()
        except RuntimeError as error:
            if not self._no_thread_logged:
                self._no_thread_logged = True
                logger.warning(
                    "judge cache %s: no thread can be started to write it (%s); it is written when it is closed",
                    self.path,
                    error,
                )

    # -- writing, in the thread -------------------------------------------------------------------------------------

    def _write(self) -> float:
        """Write a batch. Returns the pause before the next attempt."""
        if time.monotonic() >= self._close_by:
            return math.inf
        with self._changed:
            replies: list[tuple[bytes, CachedReply]] = []
            size = 0
            for key, reply in islice(self._waiting.items(), BATCH_ENTRIES):
                size += memory_bytes(reply)
                if replies and size > BATCH_BYTES:
                    break
                replies.append((key, reply))
            notes, touched = list(self._notes.items()), list(islice(self._touched, BATCH_ENTRIES))
        try:
            self._writer.use(lambda database: database.write(replies, touched, notes, self._wall_clock()))
        except _Unusable as why:
            with self._changed:
                self._failures += not why.is_brief
                self._changed.notify_all()  # for `flush`
            return math.inf if self._closed and not why.is_brief else max(why.pause_s, 1e-3)
        with self._changed:
            for key, reply in replies:
                if self._waiting.get(key) is reply:  # not replaced meanwhile
                    self._drop_waiting(key)
            for name, value in notes:
                if self._notes.get(name) is value:
                    del self._notes[name]
            for key in touched:
                self._touched.pop(key, None)
            self._thread.schedule(0.0 if len(self._waiting) >= BATCH_ENTRIES else LINGER_S)
            self._changed.notify_all()
        with contextlib.suppress(_Unusable):  # the batch is in the file, and the next one checks the bounds again
            self._writer.use(self._keep_bounds)
        return 0.0

    def _keep_bounds(self, database: CacheDatabase) -> None:
        """Remove expired entries now and then, and the least recently used ones when the file is too large.

        Runs small transactions, so that other processes may write between them. `close` waits for this a while: many
        short runs, each closed right after its last write, would otherwise let the file grow.
        """

        def may_continue() -> bool:
            return time.monotonic() < self._close_by

        if self.ttl_s is not None and time.monotonic() >= self._expire_at:
            # By last use, which is indexed. An expired entry was last used before it expired, so it leaves the file
            # after twice its lifetime at the latest.
            while may_continue() and database.delete_step("used_at", self._cutoff()):
                pass
            self._expire_at = time.monotonic() + EXPIRE_EVERY_S
        if database.used_bytes() > self.max_bytes:
            while may_continue() and database.evict_step(int(self.max_bytes * EVICT_TO)):
                pass
        while may_continue() and database.file_bytes() > self.max_bytes * SHRINK_ABOVE and database.free_pages():
            database.vacuum_step()

    def _finish(self) -> None:
        with self._writer.lock:
            self._writer.disconnect()

    # -- forks ------------------------------------------------------------------------------------------------------

    def _before_fork(self) -> None:
        """Close the connections: in the child, SQLite's record of the locks its process holds would be wrong."""
        for access in (self._reader, self._writer):
            access.lock.acquire()
            access.disconnect()

    def _after_fork_in_parent(self) -> None:
        for access in (self._reader, self._writer):
            access.lock.release()

    def _after_fork_in_child(self) -> None:
        closed = self._closed
        self._begin()
        self._closed = closed


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_held_for_fork: list[Store] = []


def _before_fork() -> None:
    _held_for_fork[:] = _stores
    for store in _held_for_fork:
        store._before_fork()


def _after_fork_in_parent() -> None:
    for store in _held_for_fork:
        store._after_fork_in_parent()


def _after_fork_in_child() -> None:
    for store in _held_for_fork:
        store._after_fork_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
