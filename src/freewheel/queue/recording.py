"""`Recording`: what a `MessageQueue` says to its journal, and what may happen only when that is written.

    put, take, commit ── then(events, go_on) ─▶ journal ─▶ durable ─▶ go_on()       (waits for: the disk)
    fail, give_back ──── write(events) ───────▶ journal                            (nobody waits)
    admit ────────────── spare() ◀── sequences whose use the journal knows of

Without a journal everything counts as written at once, and the queue lives in memory.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterable
from functools import partial

from freewheel.queue.journal import Event, Reserved
from freewheel.queue.journal_writer import JournalWriter

log = logging.getLogger("freewheel.queue")

RESERVED_AT_ONCE = 1024
"""Sequences a row: one a second at a thousand groups a second. As many are skipped, at most, by a restart."""

Written = asyncio.Future[None]


class Recording:
    """Order of calls is order on disk. No sequence is given out that a successor might give out again."""

    def __init__(self, journal: JournalWriter | None, *, reserved: int = 0) -> None:
        self.journal = journal
        self._reserved = reserved
        self._reserving = False

    @property
    def paused(self) -> str:
        """Why nothing can be written now; empty while it can."""
        return self.journal.paused if self.journal is not None else ""

    def write(self, *events: Event) -> None:
        """Events that nobody waits for."""
        self.then(events)

    def then(self, events: Iterable[Event], go_on: Callable[[], None] | None = None) -> Written | None:
        """`go_on` is called when `events` are written. Resolved after that, so that whoever sees it done sees what came
        of it; or with what `go_on` or the writer raised. None: all is done already."""
        if self.journal is None:
            if go_on is not None:
                go_on()
            return None
        done: Written = asyncio.get_running_loop().create_future()
        done.add_done_callback(_seen)
        self.journal.write(*events).add_done_callback(partial(_go_on, done, go_on))
        return done

    def spare(self, next_sequence: int, go_on: Callable[[], None]) -> int:
        """Sequences from `next_sequence` on that may be given out; `go_on`: when there are more."""
        if self.journal is None:
            return sys.maxsize
        if self._reserved - next_sequence < RESERVED_AT_ONCE // 2 and not self._reserving:
            self._reserving = True
            below = max(self._reserved, next_sequence) + RESERVED_AT_ONCE
            self.then([Reserved(below)], partial(self._more, below, go_on))
        return max(0, self._reserved - next_sequence)

    def _more(self, below: int, go_on: Callable[[], None]) -> None:
        self._reserved = below
        self._reserving = False
        go_on()


async def durable(written: Iterable[Written | None], wait_s: float) -> bool:
    """True when all of it is on disk; False if it is not within `wait_s`. Raises what keeps it from ever being."""
    waiting = {one for one in written if one is not None}
    if not all(one.done() for one in waiting):
        _, late = await asyncio.wait(waiting, timeout=wait_s)
        if late:
            return False
    for one in waiting:
        one.result()
    return True


def _go_on(done: Written, go_on: Callable[[], None] | None, written: asyncio.Future[None]) -> None:
    if written.cancelled():
        done.cancel()
    elif (error := written.exception()) is not None:  # the writer has said why
        done.set_exception(error)
    else:
        try:
            if go_on is not None:
                go_on()
        except Exception as failure:
            log.exception("The journal has what the queue could not go on from")
            done.set_exception(failure)
        else:
            done.set_result(None)


def _seen(done: Written) -> None:
    """That nobody waits for it is no news: what goes wrong is in the log."""
    if not done.cancelled():
        done.exception()
