"""`Store`: the persistent cache of judge replies, one SQLite file that all processes of a user share.

    put, remember ──▶ _WriteBehind: items wait in memory ── thread: transaction, evict, expire ──▶ the file
    get_many ──┬── items that still wait ◀───┘                                                      │
               └── the rest: a query on the calling thread ◀────────────────────────────────────────┘

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
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from freewheel.judge.cache_file import (
    BEFORE_FIRST_ID,
    SCHEMA_VERSION,
    CacheDatabase,
    CachedReply,
    CacheFile,
    forget_setup_lock,
)
from freewheel.judge.verdict import JudgeError
from freewheel.utils.sqlite import Trouble, WriterThread, diagnose

logger = logging.getLogger("freewheel.judge.cache")
T = TypeVar("T")

TOUCH_EVERY_S = 600.0
"""An entry's time of last use is written at most this often, so reads rarely write. Eviction by use is approximate."""
RETRY_AFTER_S = 30.0
"""The pause after a failure that may pass, such as a full disk."""
LOCKED_REST_S = 1.0
"""A reader that met a locked file does not read for this long: a miss costs less than a wait for each batch."""
FLUSH_TIMEOUT_S = 10.0
CLEAR_TIMEOUT_S = 30.0
"""How long `clear` retries while other processes write."""
FORK_WAIT_S = 2.0
"""How long a fork waits for idle connections. After that the child works without the file."""
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
WAITING_OVERHEAD_BYTES = 500
"""Memory of a waiting entry besides its text."""
EVICT_TO = 0.9
"""Eviction shrinks the file to this share of its bound, so that it is rare."""
SHRINK_ABOVE = 1.25
"""A file larger than this share of its bound returns pages to the disk: only after the bound was lowered."""
EXPIRE_EVERY_S = 3600.0
"""How often expired entries are removed from the file. They are misses from the first moment."""
LOCKED_WARN_S = 10.0
"""A wait for a lock is ordinary until it has lasted this long."""
LOCKED_BACKOFF_S = (0.005, 0.25)
"""The first and the longest pause before the lock is requested again; each is drawn at random."""
CLOSE_TIMEOUT_S = 5.0
"""How long `close` may continue to write. What is left then is lost, and a warning counts it."""
JOIN_GRACE_S = 2.0
"""The thread checks the time between statements; this is for the statement."""


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


class Outage:
    """When to leave the file alone, and whether a kind of trouble was logged already."""

    def __init__(self, *, logged: set[Trouble], clock: Callable[[], float] = time.monotonic) -> None:
        self._logged = logged
        self._clock = clock
        self._until = -math.inf
        self.trouble: Trouble | None = None

    def begin(self, trouble: Trouble, rest_s: float) -> bool:
        """Rest for `rest_s`. True if this kind of trouble is new and should be logged."""
        self.trouble = trouble
        self._until = self._clock() + rest_s
        is_new = trouble not in self._logged
        self._logged.add(trouble)
        return is_new

    def end(self) -> bool:
        """The file works. True if it did not before."""
        had_trouble = self.trouble is not None
        self.trouble = None
        self._until = -math.inf
        return had_trouble

    @property
    def is_over(self) -> bool:
        """Whether the file may be tried now."""
        return self._until <= self._clock()


class Store:
    """Replies and notes in the file at `path`. Only `stats`, `clear` and `export` raise when the file is in trouble.

    For any thread and any number of processes. After a fork both processes continue, each with its own connections;
    the parent writes what was waiting.
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
        """Set up the state of one process and one opening."""
        logged: set[Trouble] = set()
        self._closed = False
        self._damage_logged = False
        self._outage = Outage(logged=logged)
        self._read_lock = threading.Lock()
        self._reader: CacheDatabase | None = None
        self._writer = _WriteBehind(
            self._file,
            max_bytes=self.max_bytes,
            ttl_s=self.ttl_s,
            wall_clock=self._wall_clock,
            log=self._log,
            outage=Outage(logged=logged),
            retry_after_s=self._retry_after_s,
        )

    # -- for the engine ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create or check the file. If it cannot be used, log a warning and continue in memory.

        The writer's thread starts here: a judge that is closed at interpreter exit can no longer start one.
        """
        if self._closed:
            self._begin()
        self._writer.start()
        self._reading(lambda db: None, None)

    @property
    def trouble(self) -> str | None:
        """Why the file is not in use at present, or None."""
        return self._writer.outage.trouble or self._outage.trouble

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, CachedReply]:
        """Return the replies that exist for these keys.

        Reads the disk on the calling thread, which is the engine's event loop: a miss costs less than a microsecond per
        key, and a file that is locked or failing is left alone after one short wait.
        """
        found = self._writer.find_waiting(keys)
        rest = [key for key in keys if key not in found] if found else keys
        if rest and (used := self._reading(lambda db: self._read(db, rest, found), None, only_after_outage=True)):
            self._writer.touch(used)
        return found

    def put(self, key: bytes, reply: CachedReply) -> None:
        """Keep `reply`. It is written soon; `get_many` finds it at once."""
        self._writer.put(key, reply)

    def remember(self, name: str, value: bytes) -> None:
        """Keep a small value by name, such as what a limiter learned about an endpoint."""
        self._writer.remember(name, value)

    def recall(self, name: str) -> bytes | None:
        """Return what this or another process remembered by that name."""
        waiting = self._writer.find_note(name)
        if waiting is not None:
            return waiting
        return self._reading(lambda db: db.read_note(name), None, only_after_outage=True)

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until everything put before is on disk. False if time runs out or the disk refuses it."""
        return self._writer.flush(timeout_s)

    def close(self) -> None:
        """Write what waits, end the thread and close the file. May be called again, and by any thread."""
        self._closed = True
        self._writer.close()
        with self._read_lock:
            self._disconnect()

    # -- for the command line ---------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self._usable() as db:
            summary = db.summarize(self._cutoff())
        path = self._file.path
        file_bytes = 0
        for name in (path.name, path.name + "-wal"):
            with contextlib.suppress(OSError):
                file_bytes += path.with_name(name).stat().st_size
        return StoreStats(
            path=str(path),
            schema_version=SCHEMA_VERSION,
            file_bytes=file_bytes,
            max_bytes=self.max_bytes,
            ttl_s=self.ttl_s,
            set_aside=self._file.asides(),
            **summary._asdict(),
        )

    def clear(self, *, older_than_s: float | None = None) -> int:
        """Remove all replies, or those stored longer ago, and return their space to the disk. Returns how many.

        Notes are kept. Replies that other processes hold in memory stay there until those processes end.
        """
        if older_than_s is None:
            self._writer.forget_replies()
        before = math.inf if older_than_s is None else self._wall_clock() - older_than_s
        removed = 0
        with self._usable() as db:
            for ids in db.id_ranges():
                removed += _retry_while_locked(lambda ids=ids: db.delete_range(ids, before))  # type: ignore[misc]
            while db.free_pages() > 0:
                _retry_while_locked(db.vacuum_step)
            db.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return removed

    def export(self) -> Iterator[dict[str, Any]]:
        """Each reply that has not expired, in the order of storing and in constant memory. `key` is in hex."""
        last: int | None = BEFORE_FIRST_ID
        cutoff = self._cutoff()
        while last is not None:
            with self._usable() as db:
                last, entries = db.export_step(last, cutoff)
            for entry in entries:
                yield {
                    "key": entry.key.hex(),
                    **msgspec.structs.asdict(entry.reply),
                    "created_at": entry.created_at,
                    "used_at": entry.used_at,
                }

    # -- reading ----------------------------------------------------------------------------------------------------

    def _reading(self, work: Callable[[CacheDatabase], T], otherwise: T, *, only_after_outage: bool = False) -> T:
        """Return `work(connection)`, or `otherwise` if the file cannot be used; the trouble is logged once."""
        with self._read_lock:
            if self._closed or (only_after_outage and not self._outage.is_over):
                return otherwise
            try:
                found = work(self._connected())
            except (sqlite3.Error, OSError) as error:
                self._fail(error)
                return otherwise
            self._outage.end()
            return found

    @contextlib.contextmanager
    def _usable(self) -> Iterator[CacheDatabase]:
        """A connection for the command line, which wants to see failures."""
        with self._read_lock:
            if self._closed:
                raise CacheUnusableError(f"the judge cache {self.path} is closed")
            try:
                yield self._connected()
            except (sqlite3.Error, OSError) as error:
                self._fail(error)
                raise CacheUnusableError(f"judge cache {self.path}: {diagnose(error)} ({error})") from error

    def _connected(self) -> CacheDatabase:
        if self._reader is not None and not self._reader.is_current():
            self._disconnect()
        if self._reader is None:
            self._reader = self._file.connect()
        return self._reader

    def _disconnect(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self, db: CacheDatabase, keys: Sequence[bytes], found: dict[bytes, CachedReply]) -> list[bytes]:
        """Add the replies to `found`. Returns the keys whose time of last use should be written."""
        now, cutoff = self._wall_clock(), self._cutoff()
        stale = now - TOUCH_EVERY_S
        used: list[bytes] = []
        for entry in db.read(keys):
            if entry is None:
                if not self._damage_logged:
                    self._damage_logged = True
                    self._log.warning("judge cache %s holds damaged replies; they are requested again", self.path)
                continue
            key, reply, created_at, used_at = entry
            if created_at < cutoff:
                continue
            found[key] = reply
            # A wrong clock left times in the future. They count as now, and the touch corrects them.
            if used_at < stale or used_at > now or created_at > now:
                used.append(key)
        return used

    def _cutoff(self) -> float:
        """Replies stored before this have expired."""
        return -math.inf if self.ttl_s is None else self._wall_clock() - self.ttl_s

    def _fail(self, error: sqlite3.Error | OSError) -> None:
        trouble = diagnose(error)
        reader = self._reader
        is_mended = trouble is Trouble.CORRUPT and reader is not None and self._file.set_aside(reader.identity, error)
        self._disconnect()
        if is_mended:
            return
        if self._outage.begin(trouble, LOCKED_REST_S if trouble is Trouble.LOCKED else self._retry_after_s):
            self._file.warn(trouble, error)

    # -- forks ------------------------------------------------------------------------------------------------------

    def _before_fork(self) -> None:
        """Close the connections: in the child, SQLite's record of the locks its process holds would be wrong."""
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
        is_usable = not self._closed and len(self._held_for_fork) == 2
        self._begin()
        if not is_usable:
            _abandoned.append(abandoned)
            self._closed = True
            self._writer.close()


class _Waiting(NamedTuple):
    ticket: int
    reply: CachedReply
    size: int


class _Note(NamedTuple):
    ticket: int
    value: bytes


class _Batch(NamedTuple):
    replies: list[tuple[bytes, _Waiting]]
    notes: list[tuple[str, _Note]]
    touched: list[bytes]


class _WriteBehind:
    """Takes items without waiting, and writes them in order.

    It may drop entries, but it never grows past its bound and never raises an error of the file. The thread wakes up
    50 ms after the first item, or for a full batch, `flush` and `close`. After a failure that may pass, the items stay
    in memory and the file is left alone for a while. If no thread can be started, `close` writes what waits.
    """

    def __init__(
        self,
        file: CacheFile,
        *,
        max_bytes: int,
        ttl_s: float | None,
        wall_clock: Callable[[], float],
        log: logging.Logger,
        outage: Outage,
        retry_after_s: float,
    ) -> None:
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self.outage = outage
        self._file = file
        self._wall_clock = wall_clock
        self._log = log
        self._retry_after_s = retry_after_s
        self._thread = WriterThread(
            "freewheel-judge-cache", pending=self.has_work, write=self._write, finish=self._finish
        )
        self._changed = self._thread.changed
        self._no_thread_logged = False

        # Guarded by `_changed`. Replies and notes are in the order of their tickets.
        self._waiting: OrderedDict[bytes, _Waiting] = OrderedDict()
        self._waiting_bytes = 0
        self._notes: OrderedDict[str, _Note] = OrderedDict()
        self._touched: dict[bytes, None] = {}
        self._tickets = 0
        self._failures = 0
        self._overflowed = False
        self._close_by = math.inf

        self.lock = threading.Lock()
        """Held while the connection is in use; a fork waits for it."""
        self._link: CacheDatabase | None = None

        # Used by the thread only.
        self._locked_since: float | None = None
        self._backoff_s = LOCKED_BACKOFF_S[0]
        self._expire_at = -math.inf
        self._is_mended = False

    # -- for any thread ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        with self._changed:
            if not self._thread.closing:
                self._ensure_thread()

    def put(self, key: bytes, reply: CachedReply) -> None:
        size = sys.getsizeof(reply.text) + WAITING_OVERHEAD_BYTES
        if size > min(WAITING_MAX_BYTES, self.max_bytes):
            return
        overflows = False
        with self._changed:
            if self._thread.closing:
                return
            waiting = self._waiting
            old = waiting.pop(key, None)
            if old is not None:
                self._waiting_bytes -= old.size
            self._tickets += 1
            waiting[key] = _Waiting(self._tickets, reply, size)
            self._waiting_bytes += size
            while self._waiting_bytes > WAITING_MAX_BYTES:
                self._waiting_bytes -= waiting.popitem(last=False)[1].size
                overflows = not self._overflowed
                self._overflowed = True
            if len(waiting) == 1:
                self._schedule(LINGER_S)
            elif len(waiting) == BATCH_ENTRIES:
                self._schedule(0.0)
        if overflows:
            self._log.warning(
                "judge cache %s: %d MiB of replies wait to be written; the oldest are let go and requested again later",
                self._file.given,
                WAITING_MAX_BYTES >> 20,
            )

    def remember(self, name: str, value: bytes) -> None:
        with self._changed:
            if self._thread.closing:
                return
            self._tickets += 1
            self._notes[name] = _Note(self._tickets, bytes(value))
            self._notes.move_to_end(name)
            self._schedule(LINGER_S)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that these entries were used."""
        with self._changed:
            if self._thread.closing or len(self._touched) > TOUCHED_MAX:
                return
            self._touched.update(dict.fromkeys(keys))
            self._schedule(TOUCH_LINGER_S)

    def find_waiting(self, keys: Sequence[bytes]) -> dict[bytes, CachedReply]:
        """The replies that are not in the file yet."""
        with self._changed:
            if not self._waiting:
                return {}
            found = ((key, self._waiting.get(key)) for key in keys)
            return {key: waiting.reply for key, waiting in found if waiting is not None}

    def find_note(self, name: str) -> bytes | None:
        with self._changed:
            note = self._notes.get(name)
            return None if note is None else note.value

    def forget_replies(self) -> None:
        with self._changed:
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        with self._changed:
            ticket, failures = self._tickets, self._failures
            if not self._is_written(ticket) and not self._thread.closing and self._thread.is_started:
                self._thread.hurry()
                self._changed.wait_for(
                    lambda: self._is_written(ticket) or self._failures != failures or self._thread.closing, timeout_s
                )
            return self._is_written(ticket)

    def close(self) -> None:
        with self._changed:
            self._close_by = min(self._close_by, time.monotonic() + CLOSE_TIMEOUT_S)
        self._thread.close()
        if self._thread.is_started:
            self._thread.join(CLOSE_TIMEOUT_S + JOIN_GRACE_S)
        else:
            self._thread.run()  # nothing else would write what waits
        with self._changed:
            lost = len(self._waiting)
            self._waiting.clear()
            self._notes.clear()
            self._touched.clear()
            self._waiting_bytes = 0
        if lost:
            self._log.warning("judge cache %s: closed with %d replies not written", self._file.given, lost)

    def disconnect(self) -> None:
        """With `lock` held. The next transaction connects again."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def has_work(self) -> bool:
        return bool(self._waiting or self._notes or self._touched)

    # -- with `_changed` held ---------------------------------------------------------------------------------------

    def _is_written(self, ticket: int) -> bool:
        reply = next(iter(self._waiting.values()), None)
        note = next(iter(self._notes.values()), None)
        return (reply is None or reply.ticket > ticket) and (note is None or note.ticket > ticket)

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
                self._log.warning(
                    "judge cache %s: no thread can be started to write it (%s); it is written when it is closed",
                    self._file.given,
                    error,
                )

    # -- the thread -------------------------------------------------------------------------------------------------

    def _write(self) -> float:
        """Write a batch. Returns the pause before the next attempt."""
        if time.monotonic() >= self._close_by:
            return math.inf
        batch = self._take()
        try:
            with self.lock:
                if self._link is not None and not self._link.is_current():
                    self.disconnect()
                if self._link is None:
                    self._link = self._file.connect()
                replies = ((key, waiting.reply) for key, waiting in batch.replies)
                notes = ((name, note.value) for name, note in batch.notes)
                self._link.write(replies, batch.touched, notes, self._wall_clock())
        except (sqlite3.Error, OSError) as error:
            return self._fail(error)
        self._settle(batch)
        try:
            with self.lock:
                self._keep_bounds()
        except (sqlite3.Error, OSError) as error:
            # The batch is in the file. A lock does not matter: the next batch checks the bounds again.
            if diagnose(error) is not Trouble.LOCKED:
                return self._fail(error)
        return 0.0

    def _take(self) -> _Batch:
        replies: list[tuple[bytes, _Waiting]] = []
        size = 0
        with self._changed:
            for key, waiting in self._waiting.items():
                if len(replies) == BATCH_ENTRIES or (replies and size + waiting.size > BATCH_BYTES):
                    break
                replies.append((key, waiting))
                size += waiting.size
            return _Batch(replies, list(self._notes.items()), list(self._touched)[:BATCH_ENTRIES])

    def _settle(self, batch: _Batch) -> None:
        """The batch is in the file: drop its items, except those that were replaced meanwhile."""
        has_recovered = self.outage.end()
        self._is_mended = False
        self._locked_since = None
        self._backoff_s = LOCKED_BACKOFF_S[0]
        with self._changed:
            for key, waiting in batch.replies:
                if self._waiting.get(key) is waiting:
                    del self._waiting[key]
                    self._waiting_bytes -= waiting.size
            for name, note in batch.notes:
                if self._notes.get(name) is note:
                    del self._notes[name]
            for key in batch.touched:
                self._touched.pop(key, None)
            self._thread.schedule(0.0 if len(self._waiting) >= BATCH_ENTRIES else LINGER_S)
            self._changed.notify_all()  # for `flush`
        if has_recovered:
            self._log.info("judge cache %s is in use again", self._file.given)

    def _fail(self, error: sqlite3.Error | OSError) -> float:
        """Keep what waits. Wait out a lock, replace a damaged file, and pause for anything else."""
        trouble = diagnose(error)
        if trouble is Trouble.LOCKED:
            now = time.monotonic()
            self._locked_since = self._locked_since or now
            pause_s = random.uniform(self._backoff_s / 8, self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, LOCKED_BACKOFF_S[1])
            if now - self._locked_since > LOCKED_WARN_S and self.outage.begin(trouble, 0.0):
                self._file.warn(trouble, error)
            return pause_s
        with self.lock:
            # Replace it once: a file that is damaged again right after its creation means a failing disk.
            link = self._link
            is_mended = trouble is Trouble.CORRUPT and not self._is_mended and link is not None
            is_mended = is_mended and link is not None and self._file.set_aside(link.identity, error)
            self.disconnect()
        if is_mended:
            self._is_mended = True
            with self._changed:
                self._thread.schedule(0.0)
            return 0.0
        if self.outage.begin(trouble, self._retry_after_s):
            self._file.warn(trouble, error)
        with self._changed:
            self._failures += 1
            self._changed.notify_all()
            return math.inf if self._thread.closing else self._retry_after_s

    def _keep_bounds(self) -> None:
        """Remove expired entries now and then, and the least recently used ones when the file is too large."""
        link = self._link
        if link is None:
            return
        if self.ttl_s is not None and time.monotonic() >= self._expire_at:
            now = self._wall_clock()
            cutoff = now - self.ttl_s
            self._repeat(lambda: link.correct_future_step(now))
            self._repeat(lambda: link.expire_step(cutoff))
            self._expire_at = time.monotonic() + EXPIRE_EVERY_S
        if link.used_bytes() > self.max_bytes:
            self._repeat(lambda: link.correct_future_step(self._wall_clock()))
            self._repeat(lambda: link.evict_step(int(self.max_bytes * EVICT_TO)))
        while link.file_bytes() > self.max_bytes * SHRINK_ABOVE and time.monotonic() < self._close_by:
            if link.free_pages() == 0:
                break
            link.vacuum_step()

    def _repeat(self, step: Callable[[], bool]) -> None:
        """Run small transactions until `step` is done; other processes may write between them.

        `close` waits for this a while: many short runs, each closed right after its last write, would otherwise let the
        file grow.
        """
        while time.monotonic() < self._close_by and step():
            pass

    def _finish(self) -> None:
        with self.lock:
            self.disconnect()


def _retry_while_locked(statement: Callable[[], T]) -> T:
    """Run one statement as its own transaction, again and again while other processes write."""
    deadline = time.monotonic() + CLEAR_TIMEOUT_S
    while True:
        try:
            return statement()
        except sqlite3.OperationalError as error:
            if diagnose(error) is not Trouble.LOCKED or time.monotonic() > deadline:
                raise


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_abandoned: list[object] = []
"""Connections of a parent that were busy at the fork. Closing them in the child would harm the parent."""


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
