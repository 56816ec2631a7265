"""What the queue's tests share: groups, events of a trained step, and a writer whose disk works when a test says so."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from freewheel.data.group import EncodedGroup, EncodedGroups, Prompt, PromptGroup, Response, Ticket
from freewheel.judge.verdict import Scored
from freewheel.queue.journal import Event, Journal, JournalError, _Job, _resolve_job

EVERY_TICKET = range(5000)
"""What a replica holds that has lost no ticket."""


def group(ticket: Ticket, version: int = 0) -> PromptGroup:
    tokens = np.array([ticket.ordinal, 7], np.int32)
    response = Response(
        tokens=tokens,
        logprobs=np.zeros(2, np.float32),
        versions=np.full(2, version, np.int32),
        mask=np.ones(2, np.uint8),
        finish="stop",
        verdict=Scored(1.0),
        reward=1.0,
        raw_reward=1.0,
    )
    return PromptGroup.of(ticket, Prompt(tokens=tokens, row={}), [response], created_s=0.0)


def block(tickets: Sequence[Ticket], version: int = 0) -> EncodedGroups:
    return EncodedGroups.encode([group(ticket, version) for ticket in tickets])


def light_block(tickets: Sequence[tuple[Ticket, int]]) -> EncodedGroups:
    """Tickets with their versions, and groups that nobody decodes."""
    return EncodedGroups(EncodedGroup(ticket, version, b"%d" % ticket.sequence) for ticket, version in tickets)


def cut_power(journal: Journal, lost_bytes: int) -> Journal:
    """Return the journal as it is after a power cut that took the end of its log."""
    path = journal.path.with_name("_" + journal.path.name)
    for suffix in ("", "-wal"):
        shutil.copy(f"{journal.path}{suffix}", f"{path}{suffix}")
    log = Path(f"{path}-wal")
    os.truncate(log, max(0, log.stat().st_size - lost_bytes))
    journal.close()
    return Journal(path)


class ManualWriter:
    """A `JournalWriter` without a thread: each write is a transaction, and happens at `work`."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.paused = ""
        self.jobs: deque[_Job] = deque()

    def write(self, *events: Event, on_durable: Callable[[], None] | None = None) -> asyncio.Future[None]:
        return self._add(_Job(asyncio.get_running_loop().create_future(), events, on_durable))

    async def read(self, work: Callable[[Journal], Any], *, makes_room: bool = False) -> Any:
        return await self._add(_Job(asyncio.get_running_loop().create_future(), work=work))

    def _add(self, job: _Job) -> asyncio.Future[Any]:
        self.jobs.append(job)
        return job.future

    def work(self, count: int = 1_000_000) -> None:
        """Do the first of the waiting jobs, which resolves their futures on the loop."""
        for _ in range(min(count, len(self.jobs))):
            job = self.jobs.popleft()
            result: Any = None
            failed: Exception | None = None
            try:
                result = self.journal.append(job.events) if job.work is None else job.work(self.journal)
            except (JournalError, sqlite3.Error) as error:
                failed = error
            job.future.get_loop().call_soon(_resolve_job, job, result, failed)
