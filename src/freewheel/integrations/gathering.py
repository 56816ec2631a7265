"""`Gathering`: single requests in, batches to the judge. For trainers that hand their rows over one by one.

    score(request) ─┐
    score(request) ─┼─▶ GATHER_S ─▶ Judge.submit([…]) ─▶ each verdict to its caller as it is reached
    score(request) ─┘

`freewheel.integrations.verl` is the caller.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from typing import Protocol

from freewheel.judge.request import JudgeRequest
from freewheel.judge.tracker import Handle
from freewheel.judge.verdict import JudgeClosed, Verdict

GATHER_S = 0.005
"""How long the first of a batch waits for others: nothing beside a judge's seconds, and enough for a loop's backlog."""


class Submits(Protocol):
    """What is needed of a `Judge`."""

    @property
    def running(self) -> bool: ...

    def submit(self, requests: list[JudgeRequest]) -> Handle: ...


Waiter = tuple[JudgeRequest, "asyncio.Future[Verdict]"]


class Gathering:
    """Scores single requests, and sends those that come together as one batch. Safe on any number of event loops.

    Each loop gathers its own: a loop that ends takes only its own callers with it.
    """

    def __init__(self, judge: Submits, gather_s: float = GATHER_S) -> None:
        self._judge = judge
        self._gather_s = gather_s
        self._lock = threading.Lock()
        self._of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Batches] = weakref.WeakKeyDictionary()

    async def score(self, request: JudgeRequest) -> Verdict:
        """The verdict on one request. Cancelling a caller leaves the others of its batch alone.

        Raises what `submit` or the batch's handle raised, and `JudgeClosed` where the sending was cancelled.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            batches = self._of_loop.get(loop)
            if batches is None:
                batches = self._of_loop[loop] = _Batches(self._judge, self._gather_s)
        return await batches.join(request)


class _Batches:
    """The gathering of one loop. It holds no reference to that loop: the dictionary above must let it go."""

    def __init__(self, judge: Submits, gather_s: float) -> None:
        self._judge = judge
        self._gather_s = gather_s
        self._waiting: list[Waiter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, request: JudgeRequest) -> asyncio.Future[Verdict]:
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if len(self._waiting) == 1:
            task = asyncio.ensure_future(self._send(self._waiting))
            self._tasks.add(task)  # a loop holds its tasks weakly
            task.add_done_callback(functools.partial(self._ended, self._waiting))
        return answer

    async def _send(self, gathered: list[Waiter]) -> None:
        await asyncio.sleep(self._gather_s)
        self._waiting = []  # who comes from now on is of the next batch
        waiting = [(request, answer) for request, answer in gathered if not answer.done()]
        if not waiting:
            return
        requests = [request for request, _ in waiting]
        if self._judge.running:
            handle = self._judge.submit(requests)  # not in the loop's threads, which slow rules may hold all of
        else:
            # The first submit starts the engine's process, which would stop the loop for a moment.
            handle = await asyncio.to_thread(self._judge.submit, requests)
        try:
            async for index, verdict in handle.as_completed():
                answer = waiting[index][1]
                if not answer.done():
                    answer.set_result(verdict)
        finally:
            handle.cancel()

    def _ended(self, gathered: list[Waiter], task: asyncio.Task[None]) -> None:
        """However a batch's sending ended, even before it began: nobody goes on waiting, and the next is a new one."""
        self._tasks.discard(task)
        if self._waiting is gathered:
            self._waiting = []
        error = None if task.cancelled() else task.exception()
        for _, answer in gathered:
            if not answer.done():
                answer.set_exception(error or JudgeClosed("the judging was cancelled"))
