"""`MessageQueue`: all groups pass through it. It decides which groups may be generated and which are trained on.

    rollouter ── admit ──▶ tickets        (waits for: room, i.e. a published version or a dropped group)
    rollouter ── put ────▶ stored         (waits for: the journal)
    trainer ──── take ───▶ P groups       (waits for: P groups within the window, and the journal)
    trainer ──── commit ─▶ trained        (waits for: the journal)
    synchronizer ─ confirm_published ─▶ room      (never waits)

Plain asyncio on one event loop: calls interleave only where a method awaits. Every wait is bounded by the caller's
`wait_s`. An empty answer means "not yet"; the caller asks again. Every call may arrive twice: if the queue dies, the
caller repeats the call to its successor. `Restored` has what the dead queue wrote.

The decisions are made by `StalenessPolicy` and `Ledger`. Groups stay the bytes in which they arrived. Without a journal
everything counts as written at once, and the queue lives in memory.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from freewheel.data.group import EncodedGroup, EncodedGroups, Ticket
from freewheel.queue.client import Admission, Starved, Taken
from freewheel.queue.journal import (
    Abandoned,
    AttemptFailed,
    Committed,
    Journal,
    JournalClosed,
    JournalDamaged,
    JournalEvent,
    JournalWriter,
    Reserved,
    Stored,
    Took,
    is_temporary,
)
from freewheel.queue.ledger import Failure, Frontier, Kind, Ledger, infra_failure
from freewheel.queue.restore import Restored, frontier_at
from freewheel.queue.staleness import Bounds, PolicyState, StalenessPolicy
from freewheel.utils.waiting import Signal

log = logging.getLogger("freewheel.queue")
T = TypeVar("T")

RETRY_DELAY_S, LONGEST_RETRY_DELAY_S = 1.0, 30.0
"""Delay before a prompt is attempted again after an engine or a reward service failed. It doubles with each attempt, so
that an outage of half a minute does not use up a prompt's attempts within seconds."""
COMPACTION_WAIT_S = 10.0
"""Longest wait for a compaction of the journal. Nobody needs its result, and it continues in the background."""
MEMORY_WARNING_BYTES = 4 << 30
"""Groups of a few KB never reach this. It takes very long responses and a slow trainer."""
SEQUENCES_RESERVED = 1024
"""Sequence numbers reserved by one journal row: one row per second at a thousand groups per second. A restart skips at
most this many numbers."""

Written = asyncio.Future[None]


@dataclass
class _OpenStep:
    """A step that is taken and not committed."""

    sequences: list[int]
    missing: int = 0
    """Groups that became stale and have to be replaced."""
    written: Written | None = None
    """The write of its current state; None: it is on disk."""


class MessageQueue:
    """Nothing that was put is lost before it is committed, and nothing is given out twice."""

    def __init__(
        self,
        *,
        bounds: Bounds,
        total_prompts: int | None = None,
        frontier: Frontier | None = None,
        version: int = 0,
        step: int = 0,
        journal: JournalWriter | None = None,
        restored: Restored | None = None,
        keep_groups: int = 0,
        retry_delay_s: float = RETRY_DELAY_S,
    ) -> None:
        """`journal` None: in memory, starting from `frontier`, `version` and `step`. `restored` takes precedence over
        these. `keep_groups`: trained groups that the journal keeps for later inspection."""
        assert journal is None or restored is not None or step == 0, "the start of a journal comes from `restore`"
        ledger = Ledger(total=total_prompts, frontier=frontier)
        start = restored or Restored(
            ledger=ledger, policy=PolicyState(version=version, published=version, trained=ledger.trained), step=step
        )
        self.ledger = start.ledger
        self.policy = StalenessPolicy(bounds, start.policy)
        self.step = start.step
        """The last committed step."""
        self.total_produced = self.ledger.trained + len(start.stored)
        self.total_consumed = self.ledger.trained
        self.dropped: Counter[str] = Counter()
        self.memory_bytes = sum(len(group.data) for group in start.stored.values())
        self._retry_delay_s = retry_delay_s
        self._keep_groups = keep_groups
        self._journal = journal
        self._reserved = self._reserving = start.policy.next_sequence  # sequences below are reserved, or soon will be
        self._changed = Signal()
        self._requests: list[TicketRequest] = []
        # By sequence, until the group is trained or dropped:
        self._tickets = {sequence: group.ticket for sequence, group in start.stored.items()}
        self._tickets |= {sequence: ticket for sequence, (ticket, _) in start.in_flight.items()}
        self._owners = {sequence: replica for sequence, (_, replica) in start.in_flight.items()}  # until it is put
        self._putting: dict[int, Written] = {}  # put, and not durable yet
        self._stored = dict(start.stored)
        self._steps = {
            number: _OpenStep([ticket.sequence for ticket in step.tickets], step.missing)
            for number, step in start.taken.items()
        }
        self._committing: dict[int, Written] = {}  # steps whose commit, or end of a version, is being written
        # Committed steps, which a trainer that resumes from an earlier checkpoint trains again:
        self._base = start.base  # they start after this one
        self._versions = dict(start.versions)  # step → the version after it
        self._last_commit_s = start.last_commit_s
        self._calls: dict[tuple[str, int], asyncio.Task[Any]] = {}  # of `_once`
        self._compaction_failed = False
        self._fenced: set[str] = set()
        self._delayed: dict[int, asyncio.TimerHandle] = {}  # ordinal → its next attempt
        self._closed = False
        self._warned = False

    # -- rollouters ---------------------------------------------------------------------------------------------------

    async def admit(self, replica: str, *, want: int, load: int, wait_s: float, holding: Collection[int]) -> Admission:
        """Issue up to `want` tickets to `replica`, which has `load` groups in generation and the sequences `holding`.

        A replica has at most one call open. Tickets issued to it that are not in `holding` count as lost.
        """
        request = TicketRequest(replica, want, load)
        self._reclaim_lost(request, holding)
        self._requests.append(request)
        try:
            self._issue_tickets()
            await self._changed.until(lambda: bool(request.tickets) or self.finished, wait_s)
        except asyncio.CancelledError:
            request.want = 0
            # nobody will read them, and the replica is alive, so nothing else would free their slots
            for ticket in request.tickets:
                self._write(self._retry(ticket, "lost"))
            self._wake()
            raise
        finally:
            self._requests.remove(request)
        return Admission(request.tickets, closed=self.finished)

    def _reclaim_lost(self, request: TicketRequest, holding: Collection[int]) -> None:
        """A replica that asks again ignores the answer to its earlier call. If that call still waits, move its tickets
        to this one. Issue tickets again that were sent but are not held: they were lost on the way."""
        for earlier in self._requests:
            if earlier.replica == request.replica:
                earlier.want = 0
                request.tickets += earlier.tickets
                earlier.tickets.clear()
        known = {*holding, *(ticket.sequence for ticket in request.tickets)}
        owned = [sequence for sequence, owner in self._owners.items() if owner == request.replica]
        for sequence in owned:
            if sequence not in known:
                self._write(self._retry(self._tickets[sequence], "lost"))

    def _issue_tickets(self) -> None:
        """Give the available room to those who ask, one ticket at a time to the least loaded."""
        candidates = [one for one in self._requests if one.replica not in self._fenced]
        room = 0 if self._closed or not candidates else self.policy.room
        if room:
            room = min(room, self._count_spare_sequences())
        for _ in range(room):
            request = pick_least_loaded(candidates)
            issued = self.ledger.issue() if request else None
            if request is None or issued is None:
                break
            ticket = Ticket(issued[0], self.policy.admit(), issued[1])
            self._tickets[ticket.sequence] = ticket
            self._owners[ticket.sequence] = request.replica
            request.tickets.append(ticket)
        self._update_exhausted()

    def _count_spare_sequences(self) -> int:
        """Return how many sequences may be given out, and reserve more if these are few.

        A sequence is given out only after the journal has reserved it, so a successor never gives it out again.
        """
        if self._journal is None:
            return sys.maxsize
        if self._reserving - self.policy.next_sequence < SEQUENCES_RESERVED // 2:
            self._reserving += SEQUENCES_RESERVED
            self._write(Reserved(self._reserving), on_durable=partial(self._finish_reserve, self._reserving))
        return self._reserved - self.policy.next_sequence

    def _finish_reserve(self, below: int) -> None:
        self._reserved = below
        self._wake()

    def _update_exhausted(self) -> None:
        self.policy.exhausted = self.ledger.exhausted and not self._delayed

    def _wake(self) -> None:
        self._issue_tickets()
        self._changed.notify()

    async def put(self, groups: EncodedGroups, *, wait_s: float) -> bool:
        """Store finished groups. Returns True once the journal has them all, and the sender may forget them.

        A group that is put twice, or after it was given up, is dropped and counted as `late`. A second put of a group
        that is still being written waits for the same write.
        """
        fresh: list[Stored] = []
        writing: set[Written] = set()
        for ticket, min_version, data in groups:
            if ticket.sequence in self._putting:
                writing.add(self._putting[ticket.sequence])
            elif self._owners.pop(ticket.sequence, None) is None:
                self.dropped["late"] += 1
            else:
                fresh.append(Stored(ticket, min_version, data, time.time()))
        if fresh:
            for group in fresh:
                self._stored[group.ticket.sequence] = group
                self.memory_bytes += len(group.data)
            sequences = [group.ticket.sequence for group in fresh]
            written = self._write(*fresh, on_durable=partial(self._finish_put, sequences))
            if written is not None:
                self._putting |= dict.fromkeys(sequences, written)
                writing.add(written)
        if self.memory_bytes > MEMORY_WARNING_BYTES and not self._warned:
            self._warned = True
            log.warning("The queue holds %.1f GB: lower async_training.max_queue_size", self.memory_bytes / 1e9)
        return await wait_durable(writing, wait_s)

    def _finish_put(self, sequences: list[int]) -> None:
        for sequence in sequences:
            self._putting.pop(sequence, None)
            self.policy.finish(sequence)
        self.total_produced += len(sequences)
        self._wake()

    async def fail(self, ticket: Ticket, failure: Failure) -> None:
        """An attempt failed. Issue the prompt again, or abandon it if its budget is spent.

        A report about a group that was put or given up already is late and changes nothing.
        """
        if ticket.sequence not in self._owners:
            return
        self._release(ticket.sequence, failure.reason)
        self._write(AttemptFailed(ticket, failure.kind, failure.reason, failure.detail, time.time()))
        if self._retry_delay_s and failure.kind is Kind.INFRA and failure.reason != "lost":
            delay_s = min(self._retry_delay_s * 2**ticket.attempt, LONGEST_RETRY_DELAY_S)
            loop = asyncio.get_running_loop()
            self._delayed[ticket.ordinal] = loop.call_later(delay_s, self._retry_or_abandon, ticket, failure)
        else:
            self._retry_or_abandon(ticket, failure)
        self._wake()

    def _retry_or_abandon(self, ticket: Ticket, failure: Failure) -> None:
        self._delayed.pop(ticket.ordinal, None)
        if not self.ledger.fail(ticket.ordinal, failure):
            log.error("Prompt %d is abandoned (%s): %s", ticket.ordinal, failure.reason, failure.detail)
            self._write_abandoned(ticket, failure.reason)
        self._wake()

    async def abandon(self, ticket: Ticket, reason: str) -> None:
        """A filter rejected the group before it was put: its prompt has ended, and another takes its place."""
        if ticket.sequence not in self._owners:
            return
        self._release(ticket.sequence, reason)
        self.ledger.abandon(ticket.ordinal, reason)
        self._write_abandoned(ticket, reason)
        self._wake()

    async def release_replica(self, replica: str) -> int:
        """A rollouter died. Issue its groups again, and return how many these were."""
        for request in self._requests:
            if request.replica == replica:
                request.want = 0  # a call of the dead replica must not swallow the tickets issued again
                request.tickets.clear()
        lost = [sequence for sequence, owner in self._owners.items() if owner == replica]
        for sequence in lost:
            await self.fail(self._tickets[sequence], infra_failure("lost", f"{replica} died"))
        return len(lost)

    async def fence(self, replica: str, *, fenced: bool) -> None:
        """Stop issuing tickets to a replica whose weights lag, or resume."""
        (self._fenced.add if fenced else self._fenced.discard)(replica)
        self._wake()

    # -- trainer ------------------------------------------------------------------------------------------------------

    async def begin(self, step: int) -> None:
        """A trainer starts after `step` trained steps. Groups that an earlier trainer took but did not commit become
        ready again."""
        assert step <= self.step, f"a trainer begins after step {step}, and only {self.step} are committed"
        for taken in sorted(self._steps):
            await self.give_back(taken)

    async def take(self, step: int, *, wait_s: float) -> Taken | Starved | None:
        """Return the groups of `step`: always exactly P, except in the last step of a run. A repeated call returns the
        same groups. Those of a committed step come from the journal, as they were trained. None: there are no more."""
        until = asyncio.get_running_loop().time() + wait_s

        def left() -> float:
            return max(0.0, until - asyncio.get_running_loop().time())

        def is_ready() -> bool:
            return step <= self.step or self._fill(step) or self.finished

        while True:
            committing = self._committing.get(step)
            if not await wait_durable([committing], left()) or not await self._changed.until(is_ready, left()):
                break
            if step <= self.step:
                recorded = await self._read("groups", step, _read_groups, left())
                if recorded is None:
                    break
                return self._batch(recorded)
            if not self._fill(step):
                return None
            written = self._steps[step].written
            if not await wait_durable([written], left()):
                break
            if self._is_whole(step) and self._steps[step].written is written:  # unchanged in the meantime
                return self._batch([self._stored[one] for one in self._steps[step].sequences])
        return Starved(self.describe_wait())

    def _batch(self, stored: list[Stored]) -> Taken:
        groups = EncodedGroups(EncodedGroup(group.ticket, group.min_version, group.data) for group in stored)
        return Taken(groups, recorded_until=self.step)

    def _fill(self, step: int) -> bool:
        """Select the groups that `step` lacks if that is possible. Returns whether the step is whole.

        Steps are filled in order: a step gets groups only when all earlier steps are whole. So a later step never gets
        older groups than an earlier one.
        """
        self._update_exhausted()
        one = self._steps.get(step)
        if one is None:
            if step == self.step + 1 or self._is_whole(step - 1):
                chosen = self.policy.select(self.policy.bounds.groups_per_step)
                if chosen:
                    self._steps[step] = _OpenStep(chosen)
                    self._write_step(step)
        elif one.missing:
            found = self.policy.select(one.missing, starting=False)
            missing = 0 if self.policy.dry else one.missing - len(found)
            one.sequences += found
            if missing != one.missing:
                one.missing = missing
                self._write_step(step)
        if one is not None and not one.sequences and not one.missing:
            del self._steps[step]  # all were stale, and their prompts were abandoned since
        return self._is_whole(step)

    def _is_whole(self, step: int) -> bool:
        return step in self._steps and not self._steps[step].missing

    def _write_step(self, step: int, events: Iterable[JournalEvent] = ()) -> None:
        """`events` are written in the same transaction; they say what happened to groups that left the step."""
        one = self._steps[step]
        took = Took(step, tuple(self._tickets[sequence] for sequence in one.sequences), one.missing)
        one.written = self._write(*events, took)

    async def replace_stale(self, step: int, sequences: Collection[int], *, wait_s: float) -> Taken | Starved | None:
        """Return groups of `step` that became too old to the stream, and take as many others."""
        one = self._steps.get(step)
        if one is not None and step not in self._committing:
            stale = [sequence for sequence in one.sequences if sequence in sequences]  # none in a repeated call
            if stale:
                one.sequences = [sequence for sequence in one.sequences if sequence not in sequences]
                one.missing += len(stale)
                self._write_step(step, [self._retry(self._tickets[sequence], "stale") for sequence in stale])
            self._wake()
        return await self.take(step, wait_s=wait_s)

    async def commit(self, step: int, *, wait_s: float) -> int | None:
        """`step` was trained: its prompts have ended. Returns the weight version after it, None if the journal does not
        have the commit yet."""
        if step > self.step and step not in self._committing:
            assert step == self.step + 1, f"step {step} comes too early: {self.step} are committed"
            assert self._is_whole(step), f"step {step} lacks groups that are being replaced, or was not taken"
            event = Committed(step, self.policy.version_after_step, time.time())
            written = self._write(event, on_durable=partial(self._finish_commit, event))
            if written is not None:
                self._committing[step] = written
        if not await wait_durable([self._committing.get(step)], wait_s):
            return None
        assert step in self._versions, f"step {step} is older than every checkpoint that is kept"
        return self._versions[step]

    def _finish_commit(self, event: Committed) -> None:
        self._committing.pop(event.step, None)
        sequences = self._steps.pop(event.step).sequences
        self.ledger.train(self._tickets[sequence].ordinal for sequence in sequences)
        self.policy.commit(sequences)
        for sequence in sequences:
            self._forget(sequence)
        self.step = event.step
        self._versions[event.step] = event.version
        self._last_commit_s = event.wall_s
        self.total_consumed += len(sequences)
        self._wake()

    async def give_back(self, step: int) -> None:
        """The trainer that took `step` will not train on it: its groups are ready again."""
        if step in self._steps and step not in self._committing:
            self.policy.untake(self._steps.pop(step).sequences)
            self._write(Took(step, ()))
            self._wake()

    async def read_frontier(self, step: int, *, wait_s: float) -> Frontier | None:
        """Return the prompts that had ended when `step` was committed; None if the journal has not answered yet."""
        assert step <= self.step, f"step {step} is not committed"
        if self._journal is None and step == self.step:
            return self.ledger.frontier()
        return await self._read("frontier", step, frontier_at, wait_s)

    async def confirm_checkpoint(self, step: int, *, wait_s: float = COMPACTION_WAIT_S) -> None:
        """No trainer will resume from a step before `step`. The journal drops groups that were trained up to it, now or
        after a later checkpoint."""
        assert step <= self.step, f"step {step} is not committed"
        if self._journal is not None and step > self._base:
            await self._once("compaction", step, partial(self._compact, self._journal, step), wait_s)

    async def _compact(self, journal: JournalWriter, step: int) -> None:
        try:  # runs before writes that wait for disk space, because it can free the space
            await journal.read(partial(_compact_until, step=step, keep_groups=self._keep_groups), makes_room=True)
        except Exception as error:
            if not is_temporary(error) and not isinstance(error, JournalClosed):
                raise
            if not self._compaction_failed:
                log.warning("Journal compaction after step %d failed; retrying at the next checkpoint: %s", step, error)
            self._compaction_failed = True
            return
        self._compaction_failed = False
        self._base = max(self._base, step)
        self._versions = {one: version for one, version in self._versions.items() if one >= self._base}

    async def _read(self, name: str, step: int, work: Callable[..., T], wait_s: float) -> T | None:
        """Return what `work` reads about a committed step, after all earlier writes. None: not within `wait_s`."""
        assert self._journal is not None, f"step {step} was committed, and there is no journal"
        return await self._once(name, step, partial(self._journal.read, partial(work, step=step)), wait_s)

    async def _once(self, name: str, step: int, call: Callable[[], Coroutine[Any, Any, T]], wait_s: float) -> T | None:
        """Return the result of a call, or None after `wait_s`. It then continues, and a repeated call waits for it."""
        task = self._calls.get((name, step))
        if task is None:
            self._calls = {
                key: one for key, one in self._calls.items() if not one.done()
            }  # nobody asked again for these
            task = self._calls[name, step] = asyncio.ensure_future(call())
        await asyncio.wait([task], timeout=wait_s)
        if not task.done():
            return None
        self._calls.pop((name, step), None)
        result: T = task.result()
        return result

    # -- versions and the end -----------------------------------------------------------------------------------------

    async def confirm_published(self, version: int) -> None:
        """Every engine in use holds `version`."""
        self.policy.publish(version)
        self._wake()

    async def complete_version(self, *, wait_s: float) -> int | None:
        """The run ends in the middle of a version: make a version of the steps since the last one. Returns it, None if
        that is not durable yet."""
        step = self.step
        if self.policy.version_is_partial and step not in self._committing:
            event = Committed(step, self.policy.version + 1, self._last_commit_s)
            written = self._write(event, on_durable=partial(self._finish_version, event))
            if written is not None:
                self._committing[step] = written
        return self.policy.version if await wait_durable([self._committing.get(step)], wait_s) else None

    def _finish_version(self, event: Committed) -> None:
        self._committing.pop(event.step, None)
        self._versions[event.step] = self.policy.complete_version()

    async def wait_settled(self, *, wait_s: float) -> bool:
        """Wait until no group is in progress and none can be admitted before the engines get new weights."""

        def is_settled() -> bool:
            self._update_exhausted()
            return self.policy.settled or self._closed

        return await self._changed.until(is_settled, wait_s)

    async def close(self) -> None:
        """The run is over: wake everybody who waits. The journal is closed by its owner."""
        self._closed = True
        for timer in self._delayed.values():
            timer.cancel()
        self._delayed.clear()
        for task in self._calls.values():
            task.cancel()
        self._calls.clear()
        self._changed.notify()

    @property
    def finished(self) -> bool:
        return self._closed or self.policy.finished

    # -- state --------------------------------------------------------------------------------------------------------

    def describe_wait(self) -> str:
        """Describe where the groups are that would make the next batch."""
        policy = self.policy
        where = (
            f"{policy.ready} groups ready, {policy.open} in generation or scoring, room for {policy.room} more; "
            f"trainer at version {policy.version}, engines at {policy.published}"
        )
        return f"{self._paused}; {where}" if self._paused else where

    @property
    def _paused(self) -> str:
        """Why the journal cannot be written now; empty if it can."""
        return self._journal.paused if self._journal is not None else ""

    async def stats(self) -> dict[str, Any]:
        policy = self.policy
        return {
            "queue_size": policy.ready,
            "total_produced": self.total_produced,
            "total_consumed": self.total_consumed,
            "dropped_samples": sum(self.dropped.values()),
            "memory_bytes": self.memory_bytes,
            "alive": policy.alive,
            "in_progress": policy.open,
            "room": policy.room,
            "version": policy.version,
            "published_version": policy.published,
            "step": self.step,
            "dropped_by_reason": dict(self.dropped),
            "failed_attempts": dict(self.ledger.failures),
            "abandoned": dict(self.ledger.abandoned),
            "waiting_for": self.describe_wait(),
            "paused": self._paused,
            "recorded_steps": self.step - self._base if self._journal else 0,
            "last_commit_s": self._last_commit_s,
        }

    def _write(self, *events: JournalEvent, on_durable: Callable[[], None] | None = None) -> Written | None:
        """Write `events`, then call `on_durable`. None: there is no journal, and everything is done already."""
        if self._journal is not None:
            return self._journal.write(*events, on_durable=on_durable)
        if on_durable is not None:
            on_durable()
        return None

    def _write_abandoned(self, ticket: Ticket, reason: str) -> None:
        self._write(Abandoned(ticket.ordinal, ticket.attempt, reason, time.time()))

    def _retry(self, ticket: Ticket, reason: str) -> JournalEvent:
        """Issue the prompt again without charging its budget: the attempt was stale or lost, which is not the prompt's
        fault. Returns the event for the journal."""
        self._release(ticket.sequence, reason)
        self.ledger.retry(ticket.ordinal, reason)
        return AttemptFailed(ticket, None, reason, "", time.time())

    def _release(self, sequence: int, reason: str) -> None:
        """Free the slot of a group that will not be trained."""
        self.policy.drop(sequence)
        self.dropped[reason] += 1
        self._forget(sequence)

    def _forget(self, sequence: int) -> None:
        del self._tickets[sequence]
        self._owners.pop(sequence, None)
        stored = self._stored.pop(sequence, None)
        self.memory_bytes -= len(stored.data) if stored else 0


# -- who gets a ticket ------------------------------------------------------------------------------------------------


@dataclass(eq=False)  # removed from a list by identity
class TicketRequest:
    """A rollouter's call of `admit` that waits for tickets. The planner simulates rollouters with it."""

    replica: str
    want: int
    """Groups that it could start now; 0 once nobody would read the answer."""
    load: int
    """Groups that it has in generation."""
    tickets: list[Ticket] = field(default_factory=list)
    """Tickets issued so far."""

    @property
    def pressure(self) -> float:
        """Its load, issued tickets included, as a share of its capacity."""
        return (self.load + len(self.tickets)) / (self.load + self.want)


def pick_least_loaded(requests: list[TicketRequest]) -> TicketRequest | None:
    """Return the request that should get the next ticket; None if nobody can take one. The earliest wins a tie."""
    return min((one for one in requests if len(one.tickets) < one.want), key=lambda one: one.pressure, default=None)


# -- the journal ------------------------------------------------------------------------------------------------------


def _read_groups(journal: Journal, *, step: int) -> list[Stored]:
    found = journal.groups(step)
    if found is None:
        raise JournalDamaged(
            f"groups of step {step}, which was trained, are gone from the journal: end the run and resume it "
            "(resume=RUN), which continues without them"
        )
    return found


def _compact_until(journal: Journal, *, step: int, keep_groups: int) -> None:
    if step > journal.base().step:
        journal.compact(step=step, frontier=frontier_at(journal, step=step), keep_groups=keep_groups)


async def wait_durable(writes: Iterable[Written | None], wait_s: float) -> bool:
    """Return whether all writes are on disk within `wait_s`. Raise the error of one that failed for good."""
    waiting = {one for one in writes if one is not None}
    if not all(one.done() for one in waiting):
        _, late = await asyncio.wait(waiting, timeout=wait_s)
        if late:
            return False
    for one in waiting:
        one.result()
    return True
