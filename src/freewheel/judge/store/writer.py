"""The writing side of the cache: what waits in memory, and the thread that brings it to the file.

    put, remember, touch --> waiting (bounded) --> thread: transaction --> evict, expire

The thread waits for the first thing to write; unblocked 50 ms after it, by a full batch, by `flush` and by `close`.
After a failure that time may mend, what waits stays in memory and the file is left alone for a while.
It is started by `start`, or by the first thing to write where nobody called that (after a fork). Where no thread can be
started (at exit, or at the limit of the machine), what waits is written by `close`.
"""

from __future__ import annotations

import logging
import random
import sqlite3
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from freewheel.judge.store import tables
from freewheel.judge.store.file import CacheFile, Link
from freewheel.judge.store.tables import CachedReply
from freewheel.utils.sqlite import Trouble, diagnose

BATCH_ENTRIES = 1024
"""Entries per transaction: beyond it the cost per entry no longer falls, and other processes wait longer."""
BATCH_BYTES = 8 * 2**20
"""Text per transaction, where replies are long: some 20 ms of writing."""
LINGER_S = 0.05
"""How long the first entry waits for company: what a killed process may lose."""
TOUCH_LINGER_S = 1.0
"""The same for a mere note that an entry was used; losing that costs nothing."""
TOUCHED_MAX = 65_536
"""Uses waiting to be written; further ones are forgotten."""
WAITING_MAX_BYTES = 64 * 2**20
"""Replies waiting for a disk that is slow, full or gone. Past it the oldest are let go."""
WAITING_OVERHEAD_BYTES = 500
"""What a waiting entry costs beside its text."""
EVICT_TO = 0.9
"""Eviction goes down to this part of the bound, so that it is rare."""
SHRINK_ABOVE = 1.25
"""A file longer than this part of its bound gives pages back to the disk: only after the bound was made smaller."""
EXPIRE_EVERY_S = 3600.0
"""How often entries that are past their time are removed from the file; they are misses from the first moment."""
LOCKED_SAY_S = 10.0
"""Waiting for a lock is said after this long; until then it is ordinary."""
LOCKED_BACKOFF_S = (0.005, 0.25)
"""The first and the longest pause, drawn at random below the bound, before asking for the lock again."""
CLOSE_TIMEOUT_S = 5.0
"""How long `close` may go on writing. What is left then is lost, which is said."""
JOIN_GRACE_S = 2.0
"""The thread looks at its watch between statements; this is for the statement."""
_FOREVER = float("inf")


class Outage:
    """When to leave the file alone, and whether a kind of trouble was said already."""

    def __init__(self, *, said: set[Trouble], clock: Callable[[], float] = time.monotonic) -> None:
        self._said = said
        self._clock = clock
        self._until = -_FOREVER
        self.trouble: Trouble | None = None

    def begin(self, trouble: Trouble, rest_s: float) -> bool:
        """Rests for `rest_s`. True where this kind of trouble is new and ought to be said."""
        self.trouble = trouble
        self._until = self._clock() + rest_s
        new = trouble not in self._said
        self._said.add(trouble)
        return new

    def end(self) -> bool:
        """The file works. True where it did not before."""
        ended = self.trouble is not None
        self.trouble = None
        self._until = -_FOREVER
        return ended

    @property
    def rest_s(self) -> float:
        """Seconds until the next try; 0 or less: now."""
        return self._until - self._clock()


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


class WriteBehind:
    """Takes what is to be written without a wait, and writes it in order. It may lose entries; it never grows past
    its bound, and no error of the file leaves it."""

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

        self._changed = threading.Condition(threading.Lock())
        # With `_changed` held. Both dicts are in the order of their tickets.
        self._waiting: OrderedDict[bytes, _Waiting] = OrderedDict()
        self._waiting_bytes = 0
        self._notes: OrderedDict[str, _Note] = OrderedDict()
        self._touched: dict[bytes, None] = {}
        self._tickets = 0
        self._due_at = _FOREVER
        self._urgent_ticket = 0
        self._failures = 0
        self._overflowed = False
        self._thread: threading.Thread | None = None
        self._no_thread_said = False
        self._closed = False
        self._close_by = _FOREVER

        self.lock = threading.Lock()
        """Held while the connection is in use; a fork waits for it."""
        self._link: Link | None = None

        # Of the thread alone.
        self._locked_since: float | None = None
        self._not_before = -_FOREVER
        self._backoff_s = LOCKED_BACKOFF_S[0]
        self._expire_at = -_FOREVER
        self._healed = False

    # -- for any thread --------------------------------------------------------------------------------------

    def start(self) -> None:
        with self._changed:
            if not self._closed:
                self._ensure_thread()

    def put(self, key: bytes, reply: CachedReply) -> None:
        size = sys.getsizeof(reply.text) + WAITING_OVERHEAD_BYTES
        if size > min(WAITING_MAX_BYTES, self.max_bytes):
            return
        overflowed = False
        with self._changed:
            if self._closed:
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
                overflowed = not self._overflowed
                self._overflowed = True
            if len(waiting) == 1:
                self._due_within(LINGER_S)
            elif len(waiting) == BATCH_ENTRIES:
                self._due_within(0.0)
        if overflowed:
            self._log.warning(
                "judge cache %s: %d MiB of replies wait to be written; the oldest are let go, to be asked for again",
                self._file.given,
                WAITING_MAX_BYTES >> 20,
            )

    def remember(self, name: str, value: bytes) -> None:
        with self._changed:
            if self._closed:
                return
            self._tickets += 1
            self._notes[name] = _Note(self._tickets, bytes(value))
            self._notes.move_to_end(name)
            self._due_within(LINGER_S)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Notes that these entries were used."""
        with self._changed:
            if self._closed or len(self._touched) > TOUCHED_MAX:
                return
            self._touched.update(dict.fromkeys(keys))
            self._due_within(TOUCH_LINGER_S)

    def waiting(self, keys: Sequence[bytes]) -> dict[bytes, CachedReply]:
        """Those of the replies that are not in the file yet."""
        with self._changed:
            if not self._waiting:
                return {}
            found = ((key, self._waiting.get(key)) for key in keys)
            return {key: waiting.reply for key, waiting in found if waiting is not None}

    def waiting_note(self, name: str) -> bytes | None:
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
            if not self._written(ticket) and not self._closed:
                self._urgent_ticket = ticket
                self._due_within(0.0)
                self._changed.notify_all()  # it may be resting from a failure, with the work long due
                self._changed.wait_for(
                    lambda: self._written(ticket) or self._failures != failures or self._closed or self._thread is None,
                    timeout=timeout_s,
                )
            return self._written(ticket)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._close_by = min(self._close_by, time.monotonic() + CLOSE_TIMEOUT_S)
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_TIMEOUT_S + JOIN_GRACE_S)
        else:
            self._run()  # nothing else would write what waits
        with self._changed:
            lost = len(self._waiting)
            self._waiting.clear()
            self._notes.clear()
            self._touched.clear()
            self._waiting_bytes = 0
        if lost:
            self._log.warning("judge cache %s: closed with %d replies not written", self._file.given, lost)

    def disconnect(self) -> None:
        """With `lock` held. The next transaction connects anew."""
        if self._link is not None:
            self._link.close()
            self._link = None

    # -- with `_changed` held --------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return bool(self._waiting or self._notes or self._touched)

    def _written(self, ticket: int) -> bool:
        reply = next(iter(self._waiting.values()), None)
        note = next(iter(self._notes.values()), None)
        return (reply is None or reply.ticket > ticket) and (note is None or note.ticket > ticket)

    def _due_within(self, seconds: float) -> None:
        due_at = time.monotonic() + seconds
        if due_at < self._due_at:
            self._due_at = due_at
            self._changed.notify_all()
        self._ensure_thread()

    def _ensure_thread(self) -> None:
        """Where none can be started that is said once, and the next thing to write tries again."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="freewheel-judge-cache", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._no_thread_said:
                self._no_thread_said = True
                self._log.warning(
                    "judge cache %s: no thread can be started to write it (%s); it is written at the close",
                    self._file.given,
                    error,
                )
        else:
            self._thread = thread

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._await_work():
                self._work()
        finally:
            with self.lock:
                self.disconnect()

    def _await_work(self) -> bool:
        """Waits until something is due. False: closed, and nothing left that could be written."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._closed and (not self._has_work() or self.outage.trouble is not None or now >= self._close_by):
                    return False
                if not self._has_work():
                    self._due_at = _FOREVER
                    self._changed.wait()
                    continue
                wait_s = self._not_before - now
                if not self._closed and self._written(self._urgent_ticket):
                    wait_s = max(wait_s, self._due_at - now, self.outage.rest_s)
                if wait_s <= 0:
                    return True
                self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))

    def _work(self) -> None:
        batch = self._take()
        try:
            with self.lock:
                self._write(batch)
        except (sqlite3.Error, OSError) as error:
            self._failed(error)
            return
        self._settle(batch)
        try:
            with self.lock:
                self._keep_bounds()
        except (sqlite3.Error, OSError) as error:
            # The batch is in the file. A lock is no matter: the next batch looks at the bounds again.
            if diagnose(error) is not Trouble.LOCKED:
                self._failed(error)

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

    def _write(self, batch: _Batch) -> None:
        if self._link is not None and not self._link.is_current():
            self.disconnect()
        if self._link is None:
            self._link = self._file.connect()
        now = self._wall_clock()
        with self._link.transaction() as conn:
            tables.write_replies(conn, ((key, waiting.reply) for key, waiting in batch.replies), now)
            tables.touch(conn, batch.touched, now)
            tables.write_notes(conn, ((name, note.value) for name, note in batch.notes))

    def _settle(self, batch: _Batch) -> None:
        """The batch is in the file: what was not put anew meanwhile no longer waits."""
        recovered = self.outage.end()
        self._healed = False
        self._locked_since = None
        self._not_before = -_FOREVER
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
            more = len(self._waiting) >= BATCH_ENTRIES
            self._due_at = time.monotonic() + (0.0 if more else LINGER_S)
            self._changed.notify_all()
        if recovered:
            self._log.info("judge cache %s is in use again", self._file.given)

    def _failed(self, error: sqlite3.Error | OSError) -> None:
        """What waits stays. A lock is waited out, a damaged file replaced; all else gets time to mend."""
        trouble = diagnose(error)
        if trouble is Trouble.LOCKED:
            now = time.monotonic()
            self._locked_since = self._locked_since or now
            self._not_before = now + random.uniform(0.0, self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, LOCKED_BACKOFF_S[1])
            if now - self._locked_since > LOCKED_SAY_S and self.outage.begin(trouble, 0.0):
                self._file.say(trouble, error)
            return
        with self.lock:
            # Once: a file that is damaged again as soon as it is made is a failing disk.
            mended = trouble is Trouble.CORRUPT and not self._healed and self._set_aside(error)
            self.disconnect()
        if mended:
            self._healed = True
            return
        if self.outage.begin(trouble, self._retry_after_s):
            self._file.say(trouble, error)
        with self._changed:
            self._failures += 1
            self._urgent_ticket = 0
            self._changed.notify_all()

    def _set_aside(self, error: sqlite3.Error | OSError) -> bool:
        return self._link is not None and self._file.set_aside(self._link.identity, error)

    def _keep_bounds(self) -> None:
        """Removes what is past its time, now and then, and what was used longest ago where the file is too large."""
        link = self._link
        if link is None:
            return
        conn = link.conn
        if self.ttl_s is not None and time.monotonic() >= self._expire_at:
            now = self._wall_clock()
            cutoff = now - self.ttl_s
            self._in_steps(link, lambda: tables.correct_future_step(conn, now))
            self._in_steps(link, lambda: tables.expire_step(conn, cutoff))
            self._expire_at = time.monotonic() + EXPIRE_EVERY_S
        if tables.used_bytes(conn) > self.max_bytes:
            self._in_steps(link, lambda: tables.correct_future_step(conn, self._wall_clock()))
            target_bytes = int(self.max_bytes * EVICT_TO)
            self._in_steps(link, lambda: tables.evict_step(conn, target_bytes))
        pages_max = int(self.max_bytes * SHRINK_ABOVE) // tables.pragma(conn, "page_size")
        while tables.pragma(conn, "page_count") > pages_max and time.monotonic() < self._close_by:
            if tables.pragma(conn, "freelist_count") == 0:
                break
            conn.execute(f"PRAGMA incremental_vacuum({tables.STEP_PAGES})").fetchall()

    def _in_steps(self, link: Link, step: Callable[[], bool]) -> None:
        """Small transactions until `step` is done, between which other processes may write.

        `close` waits for it a while: short runs, each closed right after its last write, would let the file grow.
        """
        more = True
        while more and time.monotonic() < self._close_by:
            with link.transaction():
                more = step()
