"""`JournalWriter`: a `Journal` for an event loop. One thread owns the file; the loop never waits for a disk.

    MessageQueue ── write(events) ─▶ buffer ─▶ thread ── one transaction of all that is there ─▶ Journal
                 ◀─ future: durable ──────────────┘  no room: rolled back, kept, tried again every second
                 ── read(work) ────▶ after all that was written before it; ahead of what there is no room for, where
                                     it makes room

Order of calls is order on disk. A transaction takes what came in while the one before was written, so many small puts
cost as much as one large one, and a lonely one does not wait for company.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from freewheel.judge.store.file import Trouble, diagnose
from freewheel.queue.journal import Event, Journal, JournalError, JournalFull, Stored

log = logging.getLogger("freewheel.queue")

TRANSACTION_BYTES = 32 << 20
"""Of groups in one transaction. After a pause a lot has gathered: where room comes back bit by bit, so does the run."""
RETRY_S = 1.0
"""Between two tries to write while there is no room: a person makes it, or a clean-up job."""
CLOSE_S = 30.0
"""For what is buffered at the close. A disk that needs longer does not answer any more."""

T = TypeVar("T")


class JournalClosed(JournalError):
    """What was to be written was not: the journal is closed, or closing while there is no room."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Something for the thread: events to write, or work on the journal."""

    future: asyncio.Future[Any]
    events: tuple[Event, ...] = ()
    work: Callable[[Journal], Any] | None = None
    makes_room: bool = False
    """Needs nothing that was written before it."""

    @property
    def data_bytes(self) -> int:
        return sum(len(event.data) for event in self.events if isinstance(event, Stored))


def together(jobs: Iterable[Job], limit_bytes: int = TRANSACTION_BYTES) -> list[Job]:
    """The first jobs that make one transaction: writes up to `limit_bytes`, one at least; or one read, alone."""
    chosen: list[Job] = []
    size = 0
    for job in jobs:
        size += job.data_bytes
        if chosen and (job.work is not None or size > limit_bytes):
            break
        chosen.append(job)
        if job.work is not None:
            break
    return chosen


def passing(error: Exception) -> bool:
    """Whether the same may well work later: no room, or another process that locks the file."""
    if isinstance(error, sqlite3.Error):
        return diagnose(error) is Trouble.LOCKED
    return isinstance(error, JournalFull)


class JournalWriter:
    """A future that is resolved stands for rows that a kill of this process does not lose.

    After an error that does not pass, nothing is written any more: a later event must not be there without an earlier.
    """

    def __init__(self, *, journal: Journal) -> None:
        """Takes `journal` over: it is used and closed by the thread."""
        self.paused = ""
        """Why nothing can be written now, in words; "" while it can."""
        self._journal = journal
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="freewheel-journal", daemon=True)
        self._thread.start()

    # -- the loop's side ----------------------------------------------------------------------------------------------

    def write(self, *events: Event) -> asyncio.Future[None]:
        """Resolved when they are durable, all or none of them. Need not be awaited."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_seen)
        self._add(Job(future, events=events))
        return future

    async def read(self, work: Callable[[Journal], T], *, makes_room: bool = False) -> T:
        """What `work` gives, done in the thread after all that was written before. Gives data, no iterator: the journal
        goes on meanwhile. `makes_room`: while nothing can be written, it does not wait for that."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._add(Job(future, work=work, makes_room=makes_room))
        return await future

    async def flush(self) -> None:
        """Returns when all that was written before is durable."""
        await self.write()

    async def close(self) -> None:
        """Writes what is buffered, if that can be done now, and closes the journal. What is not written is told so."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            self._fail(JournalClosed(f"{self._journal.path} did not answer within {CLOSE_S:g} s of the close"))
        await asyncio.sleep(0)  # futures that the thread resolved last are so when this returns

    def _add(self, job: Job) -> None:
        with self._changed:
            if not self._closing and self._broken is None:
                self._jobs.append(job)
                self._changed.notify()
                return
        job.future.set_exception(self._broken or JournalClosed(f"{self._journal.path} is closed"))

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while jobs := self._next():
                self._do(jobs)
        finally:
            self._journal.close()

    def _next(self) -> list[Job]:
        """What to do now; they stay in the buffer until they are done. Nothing: closed, and all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            first = next((job for job in self._jobs if job.makes_room), None) if self.paused else None
            return together(self._jobs) if first is None else [first]

    def _do(self, jobs: list[Job]) -> None:
        work = jobs[0].work
        result = None
        try:
            if work is not None:
                result = work(self._journal)
            else:
                self._journal.append([event for job in jobs for event in job.events])
        except Exception as error:  # noqa: BLE001  whatever it is, whoever waits must hear of it
            if work is not None:
                self._done(jobs, error=error)
            elif passing(error):
                self._pause(error)
            else:
                log.error("The journal cannot be written any more: %s", error)
                self._fail(error)
            return
        if work is None and self.paused:
            self.paused = ""
            log.warning("%s can be written again", self._journal.path)
        self._done(jobs, result=result)

    def _pause(self, error: Exception) -> None:
        if not self.paused:
            log.error("%s; nothing is lost, and the run goes on when there is room", error)
        self.paused = str(error)
        with self._changed:
            self._changed.wait_for(lambda: self._closing, RETRY_S)
            closing = self._closing
        if closing:
            self._fail(JournalClosed(f"closed before it could be written: {error}"))

    def _done(self, jobs: list[Job], *, result: Any = None, error: Exception | None = None) -> None:
        with self._changed:
            if self._jobs:  # else given up at the close meanwhile
                for job in jobs:
                    self._jobs.remove(job)
        _resolve(jobs, result, error)

    def _fail(self, error: Exception) -> None:
        """Nothing more is written."""
        with self._changed:
            self._broken = self._broken or error
            jobs = list(self._jobs)
            self._jobs.clear()
        _resolve(jobs, None, error)


def _resolve(jobs: list[Job], result: Any, error: Exception | None) -> None:
    """On the loop of whoever waits; one wake-up for all."""

    def tell() -> None:
        for job in jobs:
            if job.future.done():
                continue
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)

    if jobs:
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits
            jobs[0].future.get_loop().call_soon_threadsafe(tell)


def _seen(future: asyncio.Future[None]) -> None:
    """An error is told to those who wait and is in the log: that nobody waited is no news."""
    if not future.cancelled():
        future.exception()
