"""The caller's side of the wire: who waits for what, and what the engine should be told next. Thread-safe, no I/O.

    Judge.submit ─▶ Desk ─ next() ─▶ link ─▶ engine          a link pulls: it takes as much as the engine can hold
    Handle.put   ◀─ Desk ◀─ take() ◀─ link ◀─ engine

A request leaves the desk only when its verdict is in, so an engine that dies costs nothing but time: what it had not
answered is sent to the next one.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from freewheel.judge.errors import EngineDied, JudgeClosed
from freewheel.judge.handle import Handle
from freewheel.judge.request import JudgeRequest
from freewheel.judge.stats import JudgeStats
from freewheel.judge.verdict import Reason
from freewheel.judge.wire import AskStats, Cancel, Close, LogLine, Results, StatsReply, Submit, ToCaller, ToEngine

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
