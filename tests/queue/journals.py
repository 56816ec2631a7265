"""What the queue's tests share: groups, a writer whose disk works when a test says so, and short calls of a queue."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from freewheel.data.group import EncodedGroup, EncodedGroups, Prompt, PromptGroup, Response, Ticket
from freewheel.judge.verdict import Scored
from freewheel.queue.client import Starved, Taken
from freewheel.queue.journal import CheckpointMark, Journal, JournalError, JournalEvent, _Job, _resolve_job
from freewheel.queue.message_queue import MessageQueue
from freewheel.queue.restore import restore
from freewheel.queue.staleness import Bounds

EVERY_TICKET = range(5000)
"""What a replica holds that has lost no ticket."""
LONG_S = 3600.0
"""A wait that a test ends itself. If the queue does not wake a caller, the test's own limit comes first."""
NOW_S = 0.0


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

    def write(self, *events: JournalEvent, on_durable: Callable[[], None] | None = None) -> asyncio.Future[None]:
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


class Scene:
    """A queue with short calls. With a path it has a journal, whose disk works at `disk()`, and successors."""

    def __init__(
        self, path: Path | None = None, *, prompts: int | None = None, retry_delay_s: float = 0.0, **bounds: Any
    ) -> None:
        bounds = {"groups_per_step": 2, "threshold": 1, "max_alive": 1000, "max_lag_allowed": 10, **bounds}
        self.bounds = Bounds(**{"window": bounds["groups_per_step"] + 1, **bounds})
        self.prompts = prompts
        self.wait_s = NOW_S if path is None else LONG_S
        if path is None:
            self.queue = MessageQueue(bounds=self.bounds, total_prompts=prompts, retry_delay_s=retry_delay_s)
        else:
            self.journal = Journal(path)
            self.restart(CheckpointMark())

    def restart(
        self, checkpoint: CheckpointMark | None = None, *, published: int | None = 0, **in_flight: list[Ticket]
    ) -> MessageQueue:
        """`published`: the version that the synchronizer reports then; None: nothing yet."""
        restored = restore(self.journal, total=self.prompts, checkpoint=checkpoint, in_flight=in_flight)
        self.writer: Any = ManualWriter(self.journal)
        self.queue = MessageQueue(
            bounds=self.bounds, total_prompts=self.prompts, journal=self.writer, restored=restored, retry_delay_s=0.0
        )
        if published is not None:
            self.queue.policy.publish(published)
        return self.queue

    async def disk(self) -> None:
        await asyncio.sleep(0)
        self.writer.work()
        for _ in range(3):
            await asyncio.sleep(0)

    async def done(self, call: Any) -> Any:
        """Return the answer of a call while the disk works."""
        if self.wait_s == NOW_S:
            return await call
        task = asyncio.ensure_future(call)
        for _ in range(10):
            await self.disk()
        assert task.done()
        return task.result()

    async def admit(self, want: int, replica: str = "a", holding: Collection[int] = EVERY_TICKET) -> list[Ticket]:
        call = self.queue.admit(replica, want=want, load=0, wait_s=self.wait_s, holding=holding)
        return (await self.done(call)).tickets

    async def put(self, *tickets: Ticket, version: int = 0) -> None:
        assert await self.done(self.queue.put(block(tickets, version), wait_s=self.wait_s))

    async def fill(self, count: int, version: int = 0) -> list[Ticket]:
        tickets = await self.admit(count)
        await self.put(*tickets, version=version)
        return tickets

    async def take(self, step: int) -> list[int]:
        return ordinals(await self.done(self.queue.take(step, wait_s=self.wait_s)))

    async def replace(self, step: int, *sequences: int) -> list[int]:
        return ordinals(await self.done(self.queue.replace_stale(step, sequences, wait_s=self.wait_s)))

    async def commit(self, step: int) -> int:
        version = await self.done(self.queue.commit(step, wait_s=self.wait_s))
        assert version is not None
        return version

    async def train(self, *steps: int) -> None:
        for step in steps:
            await self.fill(self.bounds.groups_per_step, self.queue.policy.version)
            await self.take(step)
            await self.queue.confirm_published(await self.commit(step))

    async def waiting_admit(
        self, replica: str = "a", want: int = 1, load: int = 0, holding: Collection[int] = EVERY_TICKET
    ) -> asyncio.Task[Any]:
        return await started(self.queue.admit(replica, want=want, load=load, wait_s=LONG_S, holding=holding))


def ordinals(taken: Taken | Starved | None) -> list[int]:
    return [one.ticket.ordinal for one in taken.groups] if isinstance(taken, Taken) else []


def attempts(tickets: list[Ticket]) -> list[tuple[int, int]]:
    return [(ticket.ordinal, ticket.attempt) for ticket in tickets]


async def started(awaitable: Any) -> asyncio.Task[Any]:
    """Return a call that is under way and waits."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(2):
        await asyncio.sleep(0)
    assert not task.done()
    return task
