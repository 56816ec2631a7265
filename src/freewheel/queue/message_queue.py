"""`MessageQueue`: the one place through which groups pass, and where it is decided which may be made and which trained.

    rollouter ── admit ──▶ tickets        (waits for: room, i.e. a published version or a dropped group)
    rollouter ── put ────▶ stored         (waits for: the journal)
    trainer ──── take ───▶ P groups       (waits for: P groups within the window, and the journal)
    trainer ──── commit ─▶ trained        (waits for: the journal)
    synchronizer ─ confirm_published ─▶ room      (never waits)

Plain asyncio on one loop: calls interleave only where a method awaits. Every wait is bounded by its caller's `wait_s`;
an empty answer says "not yet", and the caller looks after its peers before it asks again. Every call may come twice: a
caller that met a dead queue asks its successor, which `Restored` tells what was written.
Decisions are `StalenessPolicy`'s, `Ledger`'s and `least_loaded`'s. Groups are kept as the bytes they came in.

Which of the rollouters that ask for work gets the next ticket: the least loaded. Pure.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from freewheel.data.group import Block, Ticket
from freewheel.queue.client import Admission, Taken
from freewheel.queue.journal import Abandoned, Committed, Event, Failed, JournalWriter, Stored, VersionCompleted
from freewheel.queue.ledger import Failure, Frontier, Kind, Ledger, infra_failure
from freewheel.queue.restore import Restored
from freewheel.queue.staleness import Bounds, StalenessPolicy, Standing
from freewheel.queue.steps import RecordedSteps, Recording, Steps, Written, durable
from freewheel.utils.waiting import Signal

log = logging.getLogger("freewheel.queue")

FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0
"""Before a prompt is attempted again that an engine or a reward service failed on, doubling from attempt to attempt:
what is down for half a minute must not use up its budget in seconds."""
COMPACTION_WAIT_S = 10.0
"""For a compaction, at most: nobody needs it done, and it goes on where it takes longer."""
MEMORY_WARNING_BYTES = 4 << 30
"""Groups of a few KB never get there: a queue that holds this much has very long responses and a slow trainer."""


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
        rest_s: float = FIRST_REST_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`journal` None: all in memory, from `frontier`, `version` and `step` on; `restored` says more than these.
        `keep_groups`: of steps that a checkpoint covers, for who looks back."""
        assert journal is None or restored is not None or step == 0, "what a journal begins with is `restore`'s to say"
        ledger = Ledger(total=total_prompts, frontier=frontier)
        begin = restored or Restored(
            ledger=ledger, standing=Standing(version=version, published=version, trained=ledger.trained), step=step
        )
        self.ledger = begin.ledger
        self.policy = StalenessPolicy(bounds, begin.standing)
        self.step = begin.step
        """Steps that are committed."""
        self.total_produced = self.ledger.trained + len(begin.stored)
        self.total_consumed = self.ledger.trained
        self.dropped: Counter[str] = Counter()
        self.memory_bytes = sum(len(group.data) for group in begin.stored.values())
        self._wall_clock = wall_clock
        self._rest_s = rest_s
        self._keep_groups = keep_groups
        self._recording = Recording(journal, reserved=begin.standing.next_sequence)
        self._changed = Signal()
        self._asking: list[Asking] = []
        # By sequence, until it is trained or dropped:
        self._tickets = {sequence: group.ticket for sequence, group in begin.stored.items()}
        self._tickets |= {sequence: ticket for sequence, (ticket, _) in begin.in_flight.items()}
        self._owners = {sequence: replica for sequence, (_, replica) in begin.in_flight.items()}  # until it is put
        self._putting: dict[int, Written] = {}  # put, and not durable yet
        self._stored = dict(begin.stored)
        self._steps = Steps(self.policy, self._recording, self._tickets, committed=begin.step, taken=begin.taken)
        self._recorded = RecordedSteps(
            journal, base=begin.base, versions=begin.versions, last_commit_s=begin.last_commit_s
        )
        self._completing: Written | None = None
        self._fenced: set[str] = set()
        self._resting: dict[int, asyncio.TimerHandle] = {}  # ordinal → when it is attempted again
        self._closed = False
        self._warned = False

    # -- rollouters ---------------------------------------------------------------------------------------------------

    async def admit(
        self, replica: str, *, want: int, load: int, wait_s: float, holding: Collection[int] | None = None
    ) -> Admission:
        """Up to `want` tickets for `replica`, which has `load` groups in generation and the sequences `holding`; None:
        it does not say, and nothing is concluded. Who says it asks once at a time."""
        asking = Asking(replica, want, load)
        if holding is not None:
            self._take_over(asking, holding)
        self._asking.append(asking)
        try:
            self._serve()
            await self._changed.until(lambda: bool(asking.tickets) or self.finished, wait_s)
        except asyncio.CancelledError:
            asking.want = 0
            for ticket in asking.tickets:  # nobody will read them: a live replica would hold their slots for ever
                self._recording.write(self._retried(ticket, "lost"))
            self._wake()
            raise
        finally:
            self._asking.remove(asking)
        return Admission(asking.tickets, closed=self.finished)

    def _take_over(self, asking: Asking, holding: Collection[int]) -> None:
        """Its replica asks again, so it will hear no answer to an earlier call. What one that still waits was given is
        this one's; what was answered and is not held was lost on the way, and is issued again."""
        for earlier in self._asking:
            if earlier.replica == asking.replica:
                earlier.want = 0
                asking.tickets += earlier.tickets
                earlier.tickets.clear()
        known = {*holding, *(ticket.sequence for ticket in asking.tickets)}
        owned = [sequence for sequence, owner in self._owners.items() if owner == asking.replica]
        for sequence in owned:
            if sequence not in known:
                self._recording.write(self._retried(self._tickets[sequence], "lost"))

    def _serve(self) -> None:
        """Gives what room there is to those who ask, one ticket at a time to the least loaded."""
        candidates = [one for one in self._asking if one.replica not in self._fenced]
        room = 0 if self._closed or not candidates else self.policy.room
        if room:
            room = min(room, self._recording.spare(self.policy.next_sequence, self._wake))
        for _ in range(room):
            asking = least_loaded(candidates)
            issued = self.ledger.issue() if asking else None
            if asking is None or issued is None:
                break
            ticket = Ticket(issued[0], self.policy.admit(), issued[1])
            self._tickets[ticket.sequence] = ticket
            self._owners[ticket.sequence] = asking.replica
            asking.tickets.append(ticket)
        self._look_ahead()

    def _look_ahead(self) -> None:
        self.policy.exhausted = self.ledger.exhausted and not self._resting

    def _wake(self) -> None:
        self._serve()
        self._changed.notify()

    async def put(self, block: Block, *, wait_s: float) -> bool:
        """Stores finished groups; True when the journal has them all, and who made them may forget them.

        What is put twice, or after it was given up, is dropped and counted as `late`; while it is being written, its
        second put waits for the same write."""
        fresh: list[Stored] = []
        writing: set[Written] = set()
        for ticket, min_version, data in zip(block.tickets, block.min_versions, block.parts(), strict=True):
            if ticket.sequence in self._putting:
                writing.add(self._putting[ticket.sequence])
            elif self._owners.pop(ticket.sequence, None) is None:
                self.dropped["late"] += 1
            else:
                fresh.append(Stored(ticket, min_version, bytes(data), self._wall_clock()))
        if fresh:
            for group in fresh:
                self._stored[group.ticket.sequence] = group
                self.memory_bytes += len(group.data)
            sequences = [group.ticket.sequence for group in fresh]
            written = self._recording.then(fresh, partial(self._are_stored, sequences))
            if written is not None:
                self._putting |= dict.fromkeys(sequences, written)
                writing.add(written)
        if self.memory_bytes > MEMORY_WARNING_BYTES and not self._warned:
            self._warned = True
            log.warning("The queue holds %.1f GB: lower async_training.max_queue_size", self.memory_bytes / 1e9)
        return await durable(writing, wait_s)

    def _are_stored(self, sequences: list[int]) -> None:
        for sequence in sequences:
            self._putting.pop(sequence, None)
            self.policy.finish(sequence)
        self.total_produced += len(sequences)
        self._wake()

    async def fail(self, ticket: Ticket, failure: Failure) -> None:
        """An attempt died. Its prompt is issued again, or abandoned where its budget is spent.

        Said of a group that was put, or given up before, it is late and changes nothing.
        """
        if ticket.sequence not in self._owners:
            return
        self._release(ticket.sequence, failure.reason)
        self._recording.write(Failed(ticket, failure.kind, failure.reason, failure.detail, self._wall_clock()))
        if self._rest_s and failure.kind is Kind.INFRA and failure.reason != "lost":
            rest_s = min(self._rest_s * 2**ticket.attempt, LONGEST_REST_S)
            loop = asyncio.get_running_loop()
            self._resting[ticket.ordinal] = loop.call_later(rest_s, self._failed, ticket, failure)
        else:
            self._failed(ticket, failure)
        self._wake()

    def _failed(self, ticket: Ticket, failure: Failure) -> None:
        if self._resting.pop(ticket.ordinal, None) is not None and self._closed:
            return
        if not self.ledger.fail(ticket.ordinal, failure):
            log.error("Prompt %d is abandoned (%s): %s", ticket.ordinal, failure.reason, failure.detail)
            self._recording.write(self._abandoned(ticket, failure.reason))
        self._wake()

    async def abandon(self, ticket: Ticket, reason: str) -> None:
        """A filter turned the group down before it was put: its prompt has ended, and another takes its place."""
        if ticket.sequence not in self._owners:
            return
        self._release(ticket.sequence, reason)
        self.ledger.abandon(ticket.ordinal, reason)
        self._recording.write(self._abandoned(ticket, reason))
        self._wake()

    async def release_replica(self, replica: str) -> int:
        """A rollouter died: what it worked on is issued again. Gives how many groups that were."""
        for asking in self._asking:
            if asking.replica == replica:
                asking.want = 0  # a call that it left behind must not swallow what is issued again
                asking.tickets.clear()
        lost = [sequence for sequence, owner in self._owners.items() if owner == replica]
        for sequence in lost:
            await self.fail(self._tickets[sequence], infra_failure("lost", f"{replica} died"))
        return len(lost)

    async def fence(self, replica: str, *, fenced: bool) -> None:
        """A replica whose weights lag gets no tickets until it is back."""
        (self._fenced.add if fenced else self._fenced.discard)(replica)
        self._wake()

    # -- trainer ------------------------------------------------------------------------------------------------------

    async def begin(self, step: int) -> None:
        """A trainer starts that has trained `step` steps: what another took and did not commit is ready again."""
        assert step <= self.step, f"a trainer begins after step {step}, and only {self.step} are committed"
        for taken in self._steps.taken():
            await self.give_back(taken)

    async def take(self, step: int, *, wait_s: float) -> Taken:
        """The groups of `step`: always exactly P, but for the last step of a run. Asked again, the same ones; one that
        was committed comes from the journal, as it was."""
        until = asyncio.get_running_loop().time() + wait_s

        def left() -> float:
            return max(0.0, until - asyncio.get_running_loop().time())

        def holds() -> bool:
            return step <= self.step or self._filled(step) or self.finished

        while True:
            committing = self._steps.committing.get(step)
            if not await durable([committing], left()) or not await self._changed.until(holds, left()):
                break
            if step <= self.step:
                recorded = await self._recorded.groups(step, wait_s=left())
                if recorded is None:
                    break
                return self._batch(recorded)
            if not self._filled(step):
                return Taken("finished", recorded_until=self.step)
            written = self._steps.written(step)
            if not await durable([written], left()):
                break
            if self._steps.is_whole(step) and self._steps.written(step) is written:  # nobody changed it meanwhile
                return self._batch([self._stored[one] for one in self._steps.sequences(step)])
        return Taken("starved", waiting_for=self.waiting_for(), recorded_until=self.step)

    def _batch(self, groups: list[Stored]) -> Taken:
        block = Block.join([(group.ticket, group.min_version, group.data) for group in groups])
        return Taken("batch", block, recorded_until=self.step)

    async def replace_stale(self, step: int, sequences: Collection[int], *, wait_s: float) -> Taken:
        """Sends groups of `step` that turned out too old back to the stream, and gives as many others."""
        if step > self.step and step not in self._steps.committing:
            stale = set(sequences).intersection(self._steps.sequences(step))  # asked again, they are gone
            tickets = [self._tickets[one] for one in stale]
            self._steps.drop(step, stale, [self._retried(ticket, "stale") for ticket in tickets])
            self._wake()
        return await self.take(step, wait_s=wait_s)

    def _filled(self, step: int) -> bool:
        self._look_ahead()
        return self._steps.filled(step)

    async def commit(self, step: int, *, wait_s: float) -> int | None:
        """`step` was trained on: its prompts have ended. Gives the version that it completed or went towards; None:
        the journal does not have it yet, ask again."""
        if step > self.step and step not in self._steps.committing:
            assert step == self.step + 1, f"step {step} comes too early: {self.step} are committed"
            assert self._steps.is_whole(step), f"step {step} lacks groups that are being replaced, or was not taken"
            said = Committed(step, self.policy.version_after_step, self._wall_clock())
            written = self._recording.then([said], partial(self._committed, said))
            if written is not None:
                self._steps.committing[step] = written
        if not await durable([self._steps.committing.get(step)], wait_s):
            return None
        assert step in self._recorded.versions, f"step {step} is behind every checkpoint that is kept"
        return self._recorded.versions[step]

    def _committed(self, said: Committed) -> None:
        sequences = self._steps.pop(said.step)
        self.ledger.train(self._tickets[sequence].ordinal for sequence in sequences)
        self.policy.commit(sequences)
        for sequence in sequences:
            self._forget(sequence)
        self.step = said.step
        self._recorded.versions[said.step] = said.version
        self._recorded.last_commit_s = said.wall_s
        self.total_consumed += len(sequences)
        self._wake()

    async def give_back(self, step: int) -> None:
        """`step` will not be trained on by the one who took it: its groups are ready again."""
        self._steps.give_back(step)
        self._wake()

    async def read_frontier(self, step: int, *, wait_s: float) -> Frontier | None:
        """What a checkpoint needs to know of prompts: the ledger when `step` was committed, as the journal has it.
        None: the journal does not answer yet, ask again."""
        assert step <= self.step, f"step {step} is not committed"
        if self._recording.journal is None and step == self.step:
            return self.ledger.frontier()
        return await self._recorded.frontier(step, wait_s=wait_s)

    async def confirm_checkpoint(self, step: int, *, wait_s: float = COMPACTION_WAIT_S) -> None:
        """No resume will go back beyond `step`: the journal drops the data of groups that were trained up to it, now or
        with a later checkpoint."""
        assert step <= self.step, f"step {step} is not committed"
        await self._recorded.compact(step, keep_groups=self._keep_groups, wait_s=wait_s)

    # -- versions and the end -----------------------------------------------------------------------------------------

    async def confirm_published(self, version: int) -> None:
        """All engines in use hold `version`."""
        self.policy.publish(version)
        self._wake()

    async def complete_version(self, *, wait_s: float) -> int | None:
        """The run ends between two versions: what was trained since the last one becomes one. None: ask again."""
        if self.policy.version_is_partial and self._completing is None:
            said = VersionCompleted(self.step, self.policy.version + 1)
            self._completing = self._recording.then([said], partial(self._completed, said))
        if not await durable([self._completing], wait_s):
            return None
        return self.policy.version

    def _completed(self, said: VersionCompleted) -> None:
        self._completing = None
        self._recorded.versions[said.step] = self.policy.complete_version()

    async def wait_settled(self, *, wait_s: float) -> bool:
        """Waits until nothing is in progress and nothing more is admitted under the weights that engines hold."""

        def holds() -> bool:
            self._look_ahead()
            return self.policy.settled or self._closed

        return await self._changed.until(holds, wait_s)

    async def close(self) -> None:
        """The run is over: everybody who waits is told so. The journal is closed by whoever opened it."""
        self._closed = True
        for timer in self._resting.values():
            timer.cancel()
        self._resting.clear()
        self._recorded.close()
        self._changed.notify()

    @property
    def finished(self) -> bool:
        return self._closed or self.policy.finished

    # -- what it knows ------------------------------------------------------------------------------------------------

    def waiting_for(self) -> str:
        """In words, where the groups are that would make the next batch."""
        policy = self.policy
        where = (
            f"{policy.ready} groups ready, {policy.open} in generation or scoring, room for {policy.room} more; "
            f"trainer at version {policy.version}, engines at {policy.published}"
        )
        return f"{self._recording.paused}; {where}" if self._recording.paused else where

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
            "waiting_for": self.waiting_for(),
            "paused": self._recording.paused,
            "recorded_steps": self.step - self._recorded.base if self._recording.journal else 0,
            "last_commit_s": self._recorded.last_commit_s,
        }

    def _abandoned(self, ticket: Ticket, reason: str) -> Event:
        return Abandoned(ticket.ordinal, ticket.attempt, reason, self._wall_clock())

    def _retried(self, ticket: Ticket, reason: str) -> Event:
        """An attempt came to nothing through no fault of its own. Gives what the journal is to be told."""
        self._release(ticket.sequence, reason)
        self.ledger.retry(ticket.ordinal, reason)
        return Failed(ticket, None, reason, "", self._wall_clock())

    def _release(self, sequence: int, reason: str) -> None:
        """Frees the slot of a group that is not trained on."""
        self.policy.drop(sequence)
        self.dropped[reason] += 1
        self._forget(sequence)

    def _forget(self, sequence: int) -> None:
        del self._tickets[sequence]
        self._owners.pop(sequence, None)
        stored = self._stored.pop(sequence, None)
        self.memory_bytes -= len(stored.data) if stored else 0


@dataclass(eq=False)  # two calls of one rollouter are two, however alike
class Asking:
    """A rollouter that waits for tickets."""

    replica: str
    want: int
    """Groups that it could begin now; 0 once nobody would read the answer."""
    load: int
    """Groups that it has in generation."""
    tickets: list[Ticket] = field(default_factory=list)
    """What it was given."""

    @property
    def pressure(self) -> float:
        """Its load after what it was given, as a share of what it can carry."""
        return (self.load + len(self.tickets)) / (self.load + self.want)


def least_loaded(asking: list[Asking]) -> Asking | None:
    """The one that should get the next ticket; None where nobody can take one. Ties go to the first that asked."""
    return min((one for one in asking if len(one.tickets) < one.want), key=lambda one: one.pressure, default=None)
