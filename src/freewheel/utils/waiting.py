"""Waiting: on an event loop with a time limit or until a stop is requested, and on a thread without missing Ctrl-C.

`Signal`: many waiters on one event loop, each with its own condition and deadline.
`wait_in_slices`: a blocking wait of a user's thread.
`Stopwatch`: adds up the time during which something happened.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

SLICE_S = 0.05
"""Longest single wait of `wait_in_slices`: Ctrl-C is noticed at most this late."""


def wait_in_slices(wait: Callable[[float], bool], timeout_s: float | None = None) -> bool:
    """Call `wait(seconds)` until it returns True. Returns False when `timeout_s` has passed.

    Use it for every blocking wait on a user's thread, as in `wait_in_slices(event.wait)`. CPython runs signal handlers
    between bytecodes. A SIGINT that arrives after the last check but before the thread sleeps in the lock, or that the
    kernel delivers to another thread, does not interrupt the sleep: a wait without a limit then never ends.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = SLICE_S if end is None else min(SLICE_S, max(0.0, end - time.monotonic()))
        if wait(left_s):
            return True
        if end is not None and time.monotonic() >= end:
            return False


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for `event` for at most `timeout_s`. Returns whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return the result of `work`, or cancel it and return None when `stop` is set first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()


async def unless_failed(work: Coroutine[Any, Any, T], other: asyncio.Task[Any]) -> T:
    """Return the result of `work`. An exception of `other` cancels `work` and is raised at once."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait([working, other], return_when=asyncio.FIRST_COMPLETED)
        if other.done():
            other.result()
        return await working
    finally:
        working.cancel()


class Signal:
    """Wakes waiters whose condition holds. `notify` checks the condition of each waiter."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def notify(self) -> None:
        for waiter, holds in list(self._waiting.items()):
            if not waiter.done() and holds():
                waiter.set_result(None)

    async def until(self, holds: Callable[[], bool], wait_s: float) -> bool:
        """Wait until `holds()` returns True, for at most `wait_s`. Returns whether it did.

        `holds` may have side effects, such as taking an item: it is not called again after it returned True.
        """
        if holds():
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = holds
        try:
            await asyncio.wait([waiter], timeout=wait_s)
        finally:
            del self._waiting[waiter]
        return waiter.done() or holds()


class Stopwatch:
    """Adds up the time while it runs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total_s = 0.0
        self._since: float | None = None

    def run(self, running: bool) -> None:
        """Start or stop it, if needed."""
        now = self._clock()
        if self._since is not None:
            self._total_s += now - self._since
        self._since = now if running else None

    @property
    def elapsed_s(self) -> float:
        return self._total_s + (0.0 if self._since is None else self._clock() - self._since)
