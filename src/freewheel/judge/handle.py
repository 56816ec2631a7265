"""A batch under way, as its caller sees it: ask, wait, iterate or cancel, from any thread or event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

from freewheel.judge.errors import JudgeClosed
from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import Failed, Reason, Scored, Skipped, Verdict


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
