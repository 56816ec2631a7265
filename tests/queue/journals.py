"""What the queue's tests share: groups, a journal in memory, and a writer whose disk works when a test says so."""

from __future__ import annotations

import asyncio
import copy
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from freewheel.data.group import EncodedGroup, EncodedGroups, Prompt, PromptGroup, Response, Ticket
from freewheel.judge.verdict import Scored
from freewheel.queue.journal import (
    Abandoned,
    CheckpointMark,
    Committed,
    Event,
    Failed,
    GivenBack,
    JournalError,
    Reserved,
    Step,
    Stored,
    Took,
    VersionCompleted,
    _Job,
    _resolve_job,
)
from freewheel.queue.ledger import Frontier


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
    """Tickets with their versions, and groups that nobody looks into."""
    return EncodedGroups(EncodedGroup(ticket, version, b"%d" % ticket.sequence) for ticket, version in tickets)


class MemoryJournal:
    """A `Journal` by its own description, in a few dictionaries; it remembers itself before each transaction."""

    path = Path("journal.memory")

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {
            "base": CheckpointMark(),
            "reserved": 0,
            "steps": {},
            "groups": {},
            "failures": {},
            "abandoned": {},
        }
        self.before: list[dict[str, Any]] = []

    def _begin(self) -> dict[str, Any]:
        self.before.append({name: copy.copy(value) for name, value in self.rows.items()})
        return self.rows

    def lose(self, transactions: int) -> None:
        """A power cut: the newest of them were not on the disk."""
        for _ in range(min(transactions, len(self.before))):
            self.rows = self.before.pop()

    def append(self, events: Sequence[Event]) -> None:
        rows = self._begin()
        steps: dict[int, Step] = rows["steps"]
        for event in events:
            match event:
                case Stored(ticket):
                    rows["groups"].setdefault(ticket.sequence, event)
                case Took(step, tickets, missing):
                    if step not in steps or steps[step].version is None:
                        steps[step] = Step(step, None, tickets, missing, 0.0)
                case Committed(step, version, wall_s):
                    if steps[step].version is None:
                        steps[step] = msgspec.structs.replace(steps[step], version=version, wall_s=wall_s)
                case VersionCompleted(step, version):
                    steps[step] = msgspec.structs.replace(steps[step], version=version)
                case Failed(ticket):
                    rows["failures"].setdefault(ticket.sequence, event)
                    rows["groups"].pop(ticket.sequence, None)
                case Abandoned(ordinal):
                    rows["abandoned"].setdefault(ordinal, event)
                case GivenBack(step):
                    if step in steps and steps[step].version is None:
                        del steps[step]
                case Reserved(below):
                    rows["reserved"] = max(rows["reserved"], below)

    def compact(self, *, step: int, frontier: Frontier, keep_groups: int) -> None:
        rows = self._begin()
        if step <= rows["base"].step:
            return
        old = [ticket for at, one in rows["steps"].items() if at <= step for ticket in one.tickets]
        for ticket in old[: len(old) - keep_groups]:
            rows["groups"].pop(ticket.sequence, None)
        rows["base"] = CheckpointMark(step, rows["steps"][step].version, frontier)

    def rewind(self, *, after: int) -> None:
        rows = self._begin()
        assert after >= rows["base"].step
        rows["steps"] = {at: one for at, one in rows["steps"].items() if at <= after}

    def reset(self, *, step: int, version: int, frontier: Frontier) -> None:
        rows = self._begin()
        rows["base"] = CheckpointMark(step, version, frontier)
        rows["steps"] = {at: one for at, one in rows["steps"].items() if at <= step and one.version is not None}
        ended = set(frontier.ended)
        rows["groups"] = {
            at: one
            for at, one in rows["groups"].items()
            if one.ticket.ordinal >= frontier.low and one.ticket.ordinal not in ended
        }

    def base(self) -> CheckpointMark:
        return self.rows["base"]

    def reserved(self) -> int:
        return self.rows["reserved"]

    def steps(self, *, after: int) -> Iterator[Step]:
        return iter([one for at, one in sorted(self.rows["steps"].items()) if at > after])

    def stored(self) -> Iterator[Stored]:
        mine = {ticket.sequence for step in self.rows["steps"].values() for ticket in step.tickets}
        return iter([one for at, one in sorted(self.rows["groups"].items()) if at not in mine])

    def groups(self, step: int) -> list[Stored] | None:
        known = self.rows["steps"].get(step)
        found = [self.rows["groups"].get(ticket.sequence) for ticket in known.tickets] if known else [None]
        return None if None in found else found

    def failures(self, ordinal: int | None = None) -> Iterator[Failed]:
        found = [one for _, one in sorted(self.rows["failures"].items())]
        return iter([one for one in found if ordinal in (None, one.ticket.ordinal)])

    def abandoned(self, *, after: int = -1) -> Iterator[Abandoned]:
        return iter([one for ordinal, one in sorted(self.rows["abandoned"].items()) if ordinal > after])

    def close(self) -> None:
        pass


class ManualWriter:
    """A `JournalWriter` without a thread: each write is a transaction, and happens at `work`."""

    def __init__(self, journal: Any) -> None:
        self.journal = journal
        self.paused = ""
        self.jobs: deque[_Job] = deque()

    def write(self, *events: Event, on_durable: Callable[[], None] | None = None) -> asyncio.Future[None]:
        return self._add(_Job(asyncio.get_running_loop().create_future(), events, on_durable))

    async def read(self, work: Callable[[Any], Any], *, makes_room: bool = False) -> Any:
        return await self._add(_Job(asyncio.get_running_loop().create_future(), work=work))

    def _add(self, job: _Job) -> asyncio.Future[Any]:
        self.jobs.append(job)
        return job.future

    def work(self, count: int = 1_000_000) -> bool:
        """Do the first of the waiting jobs, which resolves their futures on the loop. False: there was none."""
        done = 0
        while self.jobs and done < count:
            job = self.jobs.popleft()
            done += 1
            result, failed = None, None
            try:
                result = self.journal.append(job.events) if job.work is None else job.work(self.journal)
            except (JournalError, sqlite3.Error) as error:
                failed = error
            job.future.get_loop().call_soon(_resolve_job, job, result, failed)
        return done > 0
