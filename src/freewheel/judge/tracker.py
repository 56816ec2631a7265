"""`RequestTracker`: who waits for which verdict, and what the engine should be told next. Thread-safe, no I/O."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from freewheel.judge.request import JudgeRequest
from freewheel.judge.stats import JudgeStats
from freewheel.judge.transport import AskStats, Cancel, Close, LogLine, Results, StatsReply, Submit, ToCaller, ToEngine
from freewheel.judge.verdict import EngineDied, Failed, JudgeClosed, Reason, Scored, Skipped, Verdict


class Progress(NamedTuple):
    """How far a batch is."""

    total: int
    scored: int
    failed: int
    skipped: int

    @property
    def done(self) -> int:
        return self.scored + self.failed + self.skipped

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 1.0


class Handle:
    """The verdicts of one `submit`, in the order of its requests. Each request gets exactly one."""

    def __init__(
        self, batch: int, requests: Sequence[JudgeRequest], deadline_at: float | None, cancel: Callable[[Handle], None]
    ) -> None:
        self.batch = batch
        self.requests = requests
        self.deadline_at = deadline_at
        self.judge: object = None
        """Whose batch it is."""
        self.finished_at: float | None = None
        """When its last verdict came, in `time.monotonic()` seconds."""
        self._cancel = cancel
        self._verdicts: list[Verdict | None] = [None] * len(requests)
        self._order: list[int] = []
        self._counts = {Scored: 0, Failed: 0, Skipped: 0}
        self._finished = threading.Event()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._pid = os.getpid()
        if not requests:
            self._finished.set()

    # -- the caller's side --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._verdicts)

    def done(self) -> bool:
        return self._finished.is_set()

    def progress(self) -> Progress:
        return Progress(len(self._verdicts), self._counts[Scored], self._counts[Failed], self._counts[Skipped])

    def result(self, timeout_s: float | None = None) -> list[Verdict]:
        """All verdicts, in the order of the requests; waits for them. `TimeoutError` leaves the batch running."""
        if not self.wait(timeout_s):
            raise TimeoutError(
                f"{len(self._order)} of {len(self)} verdicts are in after {timeout_s:g} s; "
                "call result() again to go on waiting, or cancel()"
            )
        return self._complete()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the batch is done; False if the time was over first."""
        self._check_owner()
        return self._finished.wait(timeout_s)

    def cancel(self) -> None:
        """What has no verdict yet gets `Failed("cancelled")`, at once. Nothing happens to a batch that is done."""
        self._check_owner()
        if not self.done():
            self._cancel(self)

    def __await__(self) -> Generator[Any, None, list[Verdict]]:
        return self._wait().__await__()

    async def _wait(self) -> list[Verdict]:
        async for _ in self.as_completed():
            pass
        return self._complete()

    async def __aiter__(self) -> AsyncIterator[Verdict]:
        """Verdicts in the order of the requests, each as soon as it and all before it are in."""
        self._check_owner()
        with self._listen() as changed:
            for index in range(len(self)):
                while (verdict := self._verdicts[index]) is None:
                    await changed.wait()
                    changed.clear()
                yield verdict

    async def as_completed(self) -> AsyncIterator[tuple[int, Verdict]]:
        """(index, verdict) pairs in the order in which they are reached."""
        self._check_owner()
        with self._listen() as changed:
            seen = 0
            while seen < len(self):
                while seen == len(self._order):
                    await changed.wait()
                    changed.clear()
                index = self._order[seen]
                verdict = self._verdicts[index]
                assert verdict is not None
                yield index, verdict
                seen += 1

    def __repr__(self) -> str:
        return f"<Handle {self.batch}: {len(self._order)} of {len(self)} done>"

    def __reduce__(self) -> Any:
        raise TypeError("a Handle stays in its process; send its verdicts instead")

    def _complete(self) -> list[Verdict]:
        return [verdict for verdict in self._verdicts if verdict is not None]

    def _check_owner(self) -> None:
        if self._pid != os.getpid() and not self.done():
            raise JudgeClosed(f"this handle belongs to process {self._pid}; a fork must submit its own batches")

    @contextlib.contextmanager
    def _listen(self) -> Iterator[asyncio.Event]:
        listener = (asyncio.get_running_loop(), asyncio.Event())
        self._listeners.append(listener)
        try:
            yield listener[1]
        finally:
            self._listeners.remove(listener)

    # -- the desk's side ----------------------------------------------------------------------------------------------

    def put(self, index: int, verdict: Verdict) -> bool:
        """Under the desk's lock. False if there was a verdict already: the first one stands."""
        if self._verdicts[index] is not None:
            return False
        self._verdicts[index] = verdict
        self._counts[type(verdict)] += 1
        self._order.append(index)
        return True

    def put_missing(self, reason: Reason, detail: str) -> None:
        for index, verdict in enumerate(self._verdicts):
            if verdict is None:
                self.put(index, Failed(reason.value, 0, detail))

    def wake(self) -> None:
        """After puts, outside the lock: tells all who wait."""
        if len(self._order) == len(self._verdicts) and not self._finished.is_set():
            self.finished_at = time.monotonic()
            self._finished.set()
        for loop, event in list(self._listeners):
            with contextlib.suppress(RuntimeError):  # that loop has closed: nobody waits there any more
                loop.call_soon_threadsafe(event.set)


log = logging.getLogger("freewheel.judge")

WINDOW = 8192
"""Requests that the engine may hold unanswered: enough to keep any limit busy, and its memory stays bounded."""
CHUNK = 256
"""Requests per message."""
CHUNK_CHARS = 1 << 20
"""Text per message, unless a single request is longer."""
GRACE_S = 0.05
"""How long after a deadline the desk waits for the engine's own word before it gives that word itself."""


class _Open:
    """A batch with requests that are not answered."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.cursor = 0
        self.again: deque[int] = deque()
        self.out: set[int] = set()


class Desk:
    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may cancel or close while its thread is in here
        self._open: dict[int, _Open] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._to_send: deque[_Open] = deque()
        self._control: deque[ToEngine] = deque()
        self._queries: dict[int, Future[JudgeStats]] = {}
        self._out = 0
        self._next_batch = 0
        self._next_ticket = 1
        self._closed = ""
        self._broken = ""
        self._wake: Callable[[], None] = lambda: None
        self.spent = 0.0
        self.restarts = 0
        self.last_stats = JudgeStats()

    # -- from the caller ----------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[JudgeRequest], deadline_at: float | None) -> Handle:
        with self._lock:
            if self._closed:
                raise JudgeClosed(self._closed)
            if self._broken:
                raise EngineDied(self._broken)
            handle = Handle(self._next_batch, requests, deadline_at, self.cancel)
            self._next_batch += 1
            if requests:
                batch = self._open[handle.batch] = _Open(handle)
                self._to_send.append(batch)
                if deadline_at is not None:
                    heapq.heappush(self._deadlines, (deadline_at, handle.batch))
        self._wake()
        return handle

    def cancel(self, handle: Handle) -> None:
        self._end(handle, Reason.CANCELLED, "cancelled by the caller")
        self._wake()

    @property
    def asked_for_stats(self) -> bool:
        return bool(self._queries)

    def ask_stats(self) -> Future[JudgeStats]:
        future: Future[JudgeStats] = Future()
        with self._lock:
            if self._closed or self._broken:
                future.set_result(self.last_stats)  # nobody is left to answer
                return future
            self._queries[self._next_ticket] = future
            self._control.append(AskStats(self._next_ticket))
            self._next_ticket += 1
        self._wake()
        return future

    def close(self, why: str) -> None:
        """No more submits; what is open ends as cancelled; the engine is told to close."""
        with self._lock:
            self._closed = self._closed or why
            self._control.append(Close())
            handles = [batch.handle for batch in self._open.values()]
        for handle in handles:
            self._end(handle, Reason.CANCELLED, why)
        self._wake()

    def open_handles(self) -> list[Handle]:
        with self._lock:
            return [batch.handle for batch in self._open.values()]

    def attach(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when there is something new for the engine; it must not block."""
        self._wake = wake

    # -- from the link ------------------------------------------------------------------------------------------------

    def next(self) -> ToEngine | None:
        """What to tell the engine now; None while there is nothing, or while it holds enough."""
        with self._lock:
            if self._control:
                return self._control.popleft()
            while self._to_send and self._out < WINDOW:
                batch = self._to_send.popleft()
                if batch.handle.batch not in self._open:
                    continue  # it was ended meanwhile
                indexes = self._cut(batch)
                if batch.again or batch.cursor < len(batch.handle):
                    # The first goes on, so that an older batch is done first; one that the engine cannot hold as a
                    # whole gives way to the others, chunk by chunk.
                    put_back = self._to_send.append if len(batch.handle) > WINDOW else self._to_send.appendleft
                    put_back(batch)
                if indexes:
                    batch.out.update(indexes)
                    self._out += len(indexes)
                    requests = [batch.handle.requests[index] for index in indexes]
                    return Submit(batch.handle.batch, indexes, requests, batch.handle.deadline_at)
        return None

    def _cut(self, batch: _Open) -> list[int]:
        """The next chunk's indexes: what a dead engine left unanswered first."""
        indexes: list[int] = []
        room, chars = min(CHUNK, WINDOW - self._out), 0
        requests = batch.handle.requests
        while len(indexes) < room and chars < CHUNK_CHARS:
            if batch.again:
                index = batch.again.popleft()
            elif batch.cursor < len(requests):
                index, batch.cursor = batch.cursor, batch.cursor + 1
            else:
                break
            indexes.append(index)
            request = requests[index]
            chars += len(request.response) + len(request.prompt) + len(request.reference)
        return indexes

    def take(self, message: ToCaller) -> None:
        """What the engine says."""
        if isinstance(message, Results):
            self._take_results(message)
        elif isinstance(message, StatsReply):
            with self._lock:
                self.last_stats = message.stats
                query = self._queries.pop(message.ticket, None)
            if query is not None:
                query.set_result(message.stats)
        elif isinstance(message, LogLine):
            log.log(message.level, "%s", message.text)

    def _take_results(self, message: Results) -> None:
        touched: dict[int, Handle] = {}
        with self._lock:
            self.spent = message.spent
            for number, index, verdict in message.items:
                batch = self._open.get(number)
                if batch is None or index not in batch.out:
                    continue  # cancelled or expired meanwhile: its verdict is given
                batch.out.discard(index)
                self._out -= 1
                batch.handle.put(index, verdict)
                touched[number] = batch.handle
                if not batch.out and not batch.again and batch.cursor >= len(batch.handle):
                    del self._open[number]
        for handle in touched.values():
            handle.wake()

    def engine_lost(self) -> None:
        """The engine died: what it had not answered will be sent again, first."""
        with self._lock:
            self.restarts += 1
            self._control = deque(m for m in self._control if isinstance(m, Close))
            for query in self._queries.values():
                query.set_result(self.last_stats)
            self._queries.clear()
            self._out = 0
            self._to_send.clear()
            for batch in self._open.values():
                batch.again = deque(sorted({*batch.again, *batch.out}))
                batch.out.clear()
                self._to_send.append(batch)

    def next_deadline(self) -> float:
        """When `expire` has something to do, in monotonic seconds; infinity if never."""
        with self._lock:
            deadlines = self._deadlines
            while deadlines and deadlines[0][1] not in self._open:
                heapq.heappop(deadlines)
            return deadlines[0][0] + GRACE_S if deadlines else math.inf

    def expire(self, now: float) -> None:
        """Marks what is missing of batches that are over, whatever the engine is doing."""
        while self.next_deadline() <= now:
            with self._lock:
                _, number = heapq.heappop(self._deadlines)
                batch = self._open.get(number)
            if batch is not None:
                self._end(batch.handle, Reason.DEADLINE, "the batch's deadline is over")

    def break_down(self, why: str) -> None:
        """The engine will not come back: everything open fails, and later submits raise."""
        with self._lock:
            self._broken = why
            queries = list(self._queries.values())
            self._queries.clear()
        for query in queries:
            query.set_result(self.last_stats)
        for handle in self.open_handles():
            self._end(handle, Reason.ENGINE, why)

    def _end(self, handle: Handle, reason: Reason, detail: str) -> None:
        with self._lock:
            batch = self._open.pop(handle.batch, None)
            if batch is None:
                return
            self._out -= len(batch.out)
            if batch.out:
                self._control.append(Cancel(handle.batch))
            handle.put_missing(reason, detail)
        handle.wake()
