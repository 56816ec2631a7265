"""Tracks who waits for which verdict: `Handle` for the caller, `RequestTracker` for the link to the engine.

    Judge.submit ─▶ RequestTracker ── next() ──▶ link ──▶ engine
    Handle       ◀─ RequestTracker ◀─ take() ─── link ◀── engine

A link pulls, so it takes no more than the engine can hold. The tracker keeps each request until its verdict arrives. So
no verdict is lost if an engine dies: the next engine gets every request that was not answered. Both classes are
thread-safe and do no I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from freewheel.judge.request import JudgeRequest
from freewheel.judge.stats import JudgeStats
from freewheel.judge.transport import AskStats, Cancel, LogLine, Results, StatsReply, Submit, ToCaller, ToEngine
from freewheel.judge.verdict import Failed, JudgeClosed, JudgeDied, Reason, Scored, Skipped, Verdict
from freewheel.utils.waiting import wait_in_slices

log = logging.getLogger("freewheel.judge")

WINDOW = 8192
"""Unanswered requests that the engine may hold. This keeps any limit busy and bounds the engine's memory."""
CHUNK = 256
"""Requests per message."""
CHUNK_CHARS = 1 << 20
"""Characters per message, unless a single request is longer."""
GRACE_S = 0.05
"""After a deadline the tracker waits this long for the engine's verdicts, which have more detail than the tracker's."""


class Progress(NamedTuple):
    """How many verdicts of a batch are in."""

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
    """The verdicts of one `submit`, in the order of its requests. Each request gets exactly one.

    Wait for it, await it, iterate over it or cancel it, from any thread and any event loop.
    """

    def __init__(
        self, batch: int, requests: Sequence[Any], deadline_at: float | None, cancel: Callable[[Handle], None]
    ) -> None:
        self.batch = batch
        self.requests = requests
        self.deadline_at = deadline_at
        self.judge: object = None
        """The judge of this batch. The reference keeps the judge open until the batch is done."""
        self.finished_at: float | None = None
        """When the last verdict arrived, in `time.monotonic()` seconds."""
        self.unsent = deque(range(len(requests)))
        self.sent: set[int] = set()
        """Indexes that the engine holds. Only the tracker changes `unsent` and `sent`."""
        self._cancel = cancel
        self._verdicts: list[Verdict | None] = [None] * len(requests)
        self._order: list[int] = []
        self._counts: Counter[type] = Counter()
        self._finished = threading.Event()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._pid = os.getpid()
        if not requests:
            self._finished.set()

    def __len__(self) -> int:
        return len(self._verdicts)

    def done(self) -> bool:
        return self._finished.is_set()

    def progress(self) -> Progress:
        return Progress(len(self._verdicts), self._counts[Scored], self._counts[Failed], self._counts[Skipped])

    def result(self, timeout_s: float | None = None) -> list[Verdict]:
        """Wait for all verdicts and return them in the order of the requests.

        Raises `TimeoutError` after `timeout_s`. The batch continues; call `result` again or `cancel`.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(
                f"{len(self._order)} of {len(self)} verdicts are in after {timeout_s:g} s; "
                "call result() again to wait longer, or cancel()"
            )
        return self._complete()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the batch is done. Returns False if `timeout_s` passes first."""
        self._check_owner()
        return wait_in_slices(self._finished.wait, timeout_s)

    def cancel(self) -> None:
        """Give every request without a verdict `Failed("cancelled")` at once. A batch that is done stays as it is."""
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
        """Yield verdicts in the order of the requests, each as soon as it and all before it are in."""
        self._check_owner()
        with self._listen() as changed:
            for index in range(len(self)):
                while (verdict := self._verdicts[index]) is None:
                    await changed.wait()
                    changed.clear()
                yield verdict

    async def as_completed(self) -> AsyncIterator[tuple[int, Verdict]]:
        """Yield (index, verdict) pairs in the order in which the verdicts arrive."""
        self._check_owner()
        with self._listen() as changed:
            for seen in range(len(self)):
                while seen == len(self._order):
                    await changed.wait()
                    changed.clear()
                index = self._order[seen]
                verdict = self._verdicts[index]
                assert verdict is not None
                yield index, verdict

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

    # -- for the tracker ----------------------------------------------------------------------------------------------

    def put(self, index: int, verdict: Verdict) -> None:
        """Store a verdict, under the tracker's lock. The first verdict of a request is final."""
        if self._verdicts[index] is None:
            self._verdicts[index] = verdict
            self._counts[type(verdict)] += 1
            self._order.append(index)

    def put_missing(self, reason: Reason, detail: str) -> None:
        """End every open request: as skipped if it has a reason to skip, else as failed."""
        for index, verdict in enumerate(self._verdicts):
            if verdict is None:
                skip = self.requests[index].skip
                self.put(index, Skipped(skip) if skip else Failed(reason.value, 0, detail))

    def is_complete(self) -> bool:
        return len(self._order) == len(self._verdicts)

    def wake(self) -> None:
        """Wake everyone who waits. Call this after `put`, without the tracker's lock."""
        if self.is_complete() and not self._finished.is_set():
            self.finished_at = time.monotonic()
            self._finished.set()
        for loop, event in list(self._listeners):
            with contextlib.suppress(RuntimeError):  # that loop has closed: nobody waits there
                loop.call_soon_threadsafe(event.set)


class RequestTracker:
    """Gives every submitted request exactly one verdict, whatever happens to the engine."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may cancel or close while its thread holds the lock
        self._open: dict[int, Handle] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._to_send: deque[Handle] = deque()
        self._control: deque[ToEngine] = deque()
        self._query: Future[JudgeStats] | None = None
        self._sent_count = 0
        self._next_batch = 0
        self._refusal: JudgeClosed | JudgeDied | None = None
        """Why no further batch is accepted."""
        self.wake: Callable[[], None] = lambda: None
        """Called from any thread whenever there is something new for the engine. It must not block."""
        self.spent = 0.0
        self.restarts = 0
        self.last_stats = JudgeStats()

    # -- for the caller -----------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[JudgeRequest], deadline_at: float | None) -> Handle:
        with self._lock:
            if self._refusal is not None:
                raise type(self._refusal)(*self._refusal.args)
            handle = Handle(self._next_batch, requests, deadline_at, self.cancel)
            self._next_batch += 1
            if requests:
                self._open[handle.batch] = handle
                self._to_send.append(handle)
                if deadline_at is not None:
                    heapq.heappush(self._deadlines, (deadline_at, handle.batch))
        self.wake()
        return handle

    def cancel(self, handle: Handle) -> None:
        self._end(handle, Reason.CANCELLED, "cancelled by the caller")
        self.wake()

    def ask_stats(self) -> Future[JudgeStats]:
        """Request the engine's statistics. All callers who ask before they arrive share one reply."""
        with self._lock:
            if self._query is None:
                self._query = Future()
                self._control.append(AskStats())
            query = self._query
            if self._refusal is not None:
                self._answer_query()  # no engine is left to answer
        self.wake()
        return query

    def end(self, why: JudgeClosed | JudgeDied) -> None:
        """Refuse further batches with that error. Open ones end as cancelled, or as failed if the engine died."""
        is_dead = isinstance(why, JudgeDied)
        with self._lock:
            self._refusal = self._refusal or why
            if is_dead:
                self._answer_query()
        for handle in self.open_handles():
            self._end(handle, Reason.ENGINE if is_dead else Reason.CANCELLED, str(why))

    def open_handles(self) -> list[Handle]:
        with self._lock:
            return list(self._open.values())

    # -- for the link -------------------------------------------------------------------------------------------------

    def next(self) -> ToEngine | None:
        """The next message for the engine. None: there is nothing to send, or the engine holds enough."""
        with self._lock:
            if self._control:
                return self._control.popleft()
            while self._to_send and self._sent_count < WINDOW:
                handle = self._to_send.popleft()
                if handle.batch not in self._open:
                    continue  # it has ended
                indexes = self._cut(handle)
                if handle.unsent:
                    # Older batches are sent first. Only a batch that is too large for the window takes turns.
                    put_back = self._to_send.append if len(handle) > WINDOW else self._to_send.appendleft
                    put_back(handle)
                if indexes:
                    requests = [handle.requests[index] for index in indexes]
                    return Submit(handle.batch, indexes, requests, handle.deadline_at)
        return None

    def _cut(self, handle: Handle) -> list[int]:
        """Take the indexes of the next message from `handle.unsent`."""
        indexes: list[int] = []
        room, chars = min(CHUNK, WINDOW - self._sent_count), 0
        while handle.unsent and len(indexes) < room and chars < CHUNK_CHARS:
            indexes.append(handle.unsent.popleft())
            request = handle.requests[indexes[-1]]
            chars += len(request.response) + len(request.prompt) + len(request.reference)
        handle.sent.update(indexes)
        self._sent_count += len(indexes)
        return indexes

    def take(self, message: ToCaller) -> None:
        """Handle a message from the engine."""
        if isinstance(message, Results):
            self._take_results(message)
        elif isinstance(message, StatsReply):
            with self._lock:
                self.last_stats = message.stats
                self._answer_query()
        elif isinstance(message, LogLine):
            log.log(message.level, "%s", message.text)

    def _take_results(self, message: Results) -> None:
        touched: dict[int, Handle] = {}
        with self._lock:
            self.spent = message.spent
            for number, index, verdict in message.items:
                handle = self._open.get(number)
                if handle is None or index not in handle.sent:
                    continue  # it was cancelled or has expired, and has its verdict
                handle.sent.discard(index)
                self._sent_count -= 1
                handle.put(index, verdict)
                touched[number] = handle
                if handle.is_complete():
                    del self._open[number]
        for handle in touched.values():
            handle.wake()

    def engine_lost(self) -> None:
        """The engine died: send its unanswered requests to the next one, before all others."""
        with self._lock:
            self.restarts += 1
            self._control.clear()
            self._answer_query()
            self._sent_count = 0
            self._to_send.clear()
            for handle in self._open.values():
                handle.unsent.extendleft(sorted(handle.sent, reverse=True))
                handle.sent.clear()
                self._to_send.append(handle)

    def next_deadline(self) -> float:
        """When `expire` must be called, in monotonic seconds; infinity if there is no deadline."""
        with self._lock:
            deadlines = self._deadlines
            while deadlines and deadlines[0][1] not in self._open:
                heapq.heappop(deadlines)
            return deadlines[0][0] + GRACE_S if deadlines else math.inf

    def expire(self, now: float) -> None:
        """End the batches whose deadline and grace are over, whatever the engine is doing."""
        while self.next_deadline() <= now:
            with self._lock:
                _, number = heapq.heappop(self._deadlines)
                handle = self._open.get(number)
            if handle is not None:
                self._end(handle, Reason.DEADLINE, "the batch's deadline is over")

    def _answer_query(self) -> None:
        if self._query is not None:
            self._query.set_result(self.last_stats)
            self._query = None

    def _end(self, handle: Handle, reason: Reason, detail: str) -> None:
        with self._lock:
            if self._open.pop(handle.batch, None) is None:
                return
            self._sent_count -= len(handle.sent)
            if handle.sent:
                self._control.append(Cancel(handle.batch))
            handle.put_missing(reason, detail)
        handle.wake()
