"""`MessageQueue`: the one place through which groups pass, and where it is decided which may be made and which trained.

    rollouter ── admit ──▶ tickets        (waits for: room, i.e. a published version or a dropped group)
    rollouter ── put ────▶ stored         (never waits: admission is the bound)
    trainer ──── take ───▶ P groups       (waits for: P groups within the window)
    trainer ──── commit ─▶ trained        (never waits)
    synchronizer ─ published ─▶ room      (never waits)

Plain asyncio on one loop: calls interleave only where a method awaits. Every wait is bounded by its caller's `wait_s`;
an empty answer says "nothing yet", and the caller looks after its peers before it asks again.
Decisions are `StalenessPolicy`'s, `Ledger`'s and `least_loaded`'s. Groups are kept as the bytes they came in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from freewheel.data.group import Block, Ticket, tickets_from_bytes, tickets_to_bytes
from freewheel.queue.failures import Failure, Kind, infra
from freewheel.queue.ledger import Frontier, Ledger
from freewheel.queue.routing import Asking, least_loaded
from freewheel.queue.signal import Signal
from freewheel.queue.staleness import Bounds, StalenessPolicy

log = logging.getLogger("freewheel.queue")

FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0
"""Before a prompt is attempted again that an engine or a reward service failed on, doubling from attempt to attempt:
what is down for half a minute must not use up its budget in seconds."""
MEMORY_WARNING_BYTES = 4 << 30
"""Groups of a few KB never get there: a queue that holds this much has very long responses and a slow trainer."""


@dataclass(frozen=True)
class Admission:
    """An answer to `admit`."""

    tickets: list[Ticket]
    closed: bool = False
    """No ticket will come any more."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _admission, (tickets_to_bytes(self.tickets), self.closed)


def _admission(tickets: bytes, closed: bool) -> Admission:
    return Admission(tickets_from_bytes(tickets), closed)


@dataclass(frozen=True)
class Taken:
    """An answer to `take`: a batch, `starved` (nothing yet: ask again), or `finished` (nothing will come)."""

    state: Literal["batch", "starved", "finished"]
    block: Block | None = None
    waiting_for: str = ""
    """Where the groups are that a starved trainer waits for."""


@dataclass(frozen=True, slots=True)
class _Stored:
    min_version: int
    data: bytes


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
        rest_s: float = FIRST_REST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = Ledger(total=total_prompts, frontier=frontier)
        self.policy = StalenessPolicy(bounds, version=version, trained=self.ledger.trained)
        self.step = step
        """Steps that are committed."""
        self.total_produced = 0
        self.total_consumed = 0
        self.dropped: Counter[str] = Counter()
        self.memory_bytes = 0
        self._clock = clock
        self._rest_s = rest_s
        self._changed = Signal()
        self._asking: list[Asking] = []
        self._tickets: dict[int, Ticket] = {}  # by sequence, until it is trained or dropped
        self._owners: dict[int, str] = {}  # the replica that works on it, until it is put
        self._stored: dict[int, _Stored] = {}
        self._taken: dict[int, list[int]] = {}  # step → sequences, until it is committed
        self._missing: dict[int, int] = {}  # step → groups that turned out stale and are to be replaced
        self._fenced: set[str] = set()
        self._resting: dict[int, asyncio.TimerHandle] = {}  # ordinal → when it is attempted again
        self._closed = False
        self._warned = False
        self._progress_s = clock()

    # -- rollouters ---------------------------------------------------------------------------------------------------

    async def admit(self, replica: str, *, want: int, load: int, wait_s: float) -> Admission:
        """Up to `want` tickets for `replica`, which has `load` groups in generation."""
        asking = Asking(replica, want, load)
        self._asking.append(asking)
        try:
            self._serve()
            await self._changed.until(lambda: bool(asking.tickets) or self.finished, wait_s)
        except asyncio.CancelledError:
            asking.want = 0
            for ticket in asking.tickets:  # nobody will read them: a live replica would hold their slots for ever
                self._retry(ticket, "lost")
            self._wake()
            raise
        finally:
            self._asking.remove(asking)
        return Admission(asking.tickets, closed=self.finished)

    def _serve(self) -> None:
        """Gives what room there is to those who ask, one ticket at a time to the least loaded."""
        candidates = [one for one in self._asking if one.replica not in self._fenced]
        for _ in range(0 if self._closed else self.policy.room):
            asking = least_loaded(candidates)
            issued = self.ledger.issue() if asking else None
            if asking is None or issued is None:
                break
            ticket = Ticket(issued[0], self.policy.admit(), issued[1])
            self._tickets[ticket.sequence] = ticket
            self._owners[ticket.sequence] = asking.replica
            asking.tickets.append(ticket)
        self.policy.exhausted = self.ledger.exhausted and not self._resting

    def _wake(self) -> None:
        self._serve()
        self._changed.notify()

    async def put(self, block: Block) -> None:
        """Stores finished groups. What is put twice, or after it was given up, is dropped and counted as `late`."""
        for ticket, min_version, data in zip(block.tickets, block.min_versions, block.parts(), strict=True):
            if self._owners.pop(ticket.sequence, None) is None:
                self.dropped["late"] += 1
                continue
            self._stored[ticket.sequence] = _Stored(min_version, bytes(data))
            self.memory_bytes += len(data)
            self.total_produced += 1
            self.policy.finish(ticket.sequence)
        if self.memory_bytes > MEMORY_WARNING_BYTES and not self._warned:
            self._warned = True
            log.warning("The queue holds %.1f GB: lower async_training.max_queue_size", self.memory_bytes / 1e9)
        self._wake()

    async def fail(self, ticket: Ticket, failure: Failure) -> None:
        """An attempt died. Its prompt is issued again, or abandoned where its budget is spent.

        Said of a group that was put, or given up before, it is late and changes nothing.
        """
        if ticket.sequence not in self._owners:
            return
        self._release(ticket.sequence, failure.reason)
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
        self._wake()

    async def abandon(self, ticket: Ticket, reason: str) -> None:
        """A filter turned the group down before it was put: its prompt has ended, and another takes its place."""
        if ticket.sequence not in self._owners:
            return
        self._release(ticket.sequence, reason)
        self.ledger.abandon(ticket.ordinal, reason)
        self._wake()

    async def replica_lost(self, replica: str) -> int:
        """A rollouter died: what it worked on is issued again. Gives how many groups that were."""
        for asking in self._asking:
            if asking.replica == replica:
                asking.want = 0  # a call that it left behind must not swallow what is issued again
        lost = [sequence for sequence, owner in self._owners.items() if owner == replica]
        for sequence in lost:
            await self.fail(self._tickets[sequence], infra("lost", f"{replica} died"))
        return len(lost)

    async def fence(self, replica: str, *, fenced: bool) -> None:
        """A replica whose weights lag gets no tickets until it is back."""
        (self._fenced.add if fenced else self._fenced.discard)(replica)
        self._wake()

    # -- trainer ------------------------------------------------------------------------------------------------------

    async def take(self, step: int, *, wait_s: float) -> Taken:
        """The groups of `step`: always exactly P, but for the last step of a run. Asked again, the same ones."""
        assert step > self.step, f"step {step} was committed before"
        if not await self._changed.until(lambda: self._filled(step) or self.finished, wait_s):
            return Taken("starved", waiting_for=self.waiting_for())
        return Taken("batch", self._block(self._taken[step])) if self._filled(step) else Taken("finished")

    async def replace_stale(self, step: int, sequences: Iterable[int], *, wait_s: float) -> Taken:
        """Sends groups of `step` that turned out too old back to the stream, and gives as many others."""
        for sequence in set(sequences).intersection(self._taken[step]):  # asked again, they are gone
            self._taken[step].remove(sequence)
            self._missing[step] += 1
            self._retry(self._tickets[sequence], "stale")
        self._wake()
        return await self.take(step, wait_s=wait_s)

    def _filled(self, step: int) -> bool:
        """Gives `step` the groups that it lacks, if it can. True: it has all that it will have."""
        self.policy.exhausted = self.ledger.exhausted and not self._resting
        if step not in self._taken:
            if any(self._missing.values()):  # an earlier step was sent stale groups and comes first
                return False
            chosen = self.policy.select(self.policy.bounds.groups_per_step)
            if chosen:
                self._taken[step], self._missing[step] = chosen, 0
            return bool(chosen)
        if self._missing[step]:
            found = self.policy.select(self._missing[step], starting=False)
            self._taken[step] += found
            self._missing[step] = 0 if self.policy.dry else self._missing[step] - len(found)
        if not self._taken[step] and not self._missing[step]:  # all stale, and their prompts abandoned since
            del self._taken[step], self._missing[step]
        return step in self._taken and not self._missing[step]

    def _block(self, sequences: list[int]) -> Block:
        stored = [(self._tickets[one], self._stored[one]) for one in sequences]
        return Block.join([(ticket, one.min_version, one.data) for ticket, one in stored])

    async def commit(self, step: int) -> int:
        """`step` was trained on: its prompts have ended. Gives the version that it completed or went towards."""
        if step > self.step:
            assert not self._missing[step], f"step {step} lacks groups that are being replaced"
            sequences = self._taken.pop(step)
            del self._missing[step]
            self.ledger.train(self._tickets[sequence].ordinal for sequence in sequences)
            self.policy.commit(sequences)
            for sequence in sequences:
                self._forget(sequence)
            self.step = step
            self.total_consumed += len(sequences)
            self._progress_s = self._clock()
            self._wake()
        return self.policy.version

    async def give_back(self, step: int) -> None:
        """`step` will not be trained on by the one who took it: its groups are ready again."""
        self.policy.untake(self._taken.pop(step, []))
        self._missing.pop(step, None)
        self._wake()

    async def frontier(self) -> Frontier:
        """What a checkpoint of the committed steps needs to know about prompts."""
        return self.ledger.frontier()

    # -- versions and the end -----------------------------------------------------------------------------------------

    async def published(self, version: int) -> None:
        """All engines in use hold `version`."""
        self.policy.publish(version)
        self._wake()

    async def complete_version(self) -> int:
        """The run ends between two versions: what was trained since the last one becomes one."""
        return self.policy.complete_version()

    async def settled(self, *, wait_s: float) -> bool:
        """Waits until nothing is in progress and nothing more is admitted under the weights that engines hold."""

        def holds() -> bool:
            self.policy.exhausted = self.ledger.exhausted and not self._resting
            return self.policy.settled or self._closed

        return await self._changed.until(holds, wait_s)

    async def close(self) -> None:
        """The run is over: everybody who waits is told so."""
        self._closed = True
        for timer in self._resting.values():
            timer.cancel()
        self._resting.clear()
        self._changed.notify()

    @property
    def finished(self) -> bool:
        return self._closed or self.policy.finished

    # -- what it knows ------------------------------------------------------------------------------------------------

    def waiting_for(self) -> str:
        """In words, where the groups are that would make the next batch."""
        policy = self.policy
        return (
            f"{policy.ready} groups ready, {policy.open} in generation or scoring, room for {policy.room} more; "
            f"trainer at version {policy.version}, engines at {policy.published}"
        )

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
            "trained_prompts": self.ledger.trained,
            "since_progress_s": max(0.0, self._clock() - self._progress_s),
            "waiting_for": self.waiting_for(),
        }

    def _retry(self, ticket: Ticket, reason: str) -> None:
        """An attempt came to nothing through no fault of its own."""
        self._release(ticket.sequence, reason)
        self.ledger.retry(ticket.ordinal, reason)

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
