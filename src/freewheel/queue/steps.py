"""`Recording`: what a `MessageQueue` says to its journal, and what may happen only when that is written.

    put, take, commit ── then(events, go_on) ─▶ journal ─▶ durable ─▶ go_on()       (waits for: the disk)
    fail, give_back ──── write(events) ───────▶ journal                            (nobody waits)
    admit ────────────── spare() ◀── sequences whose use the journal knows of

Without a journal everything counts as written at once, and the queue lives in memory.

`Steps`: which groups each step is made of, from its selection until it is committed. Used by `MessageQueue`.

    filled ─▶ select ─▶ composed ─▶ the journal is told ─▶ given to the trainer ─▶ committing ─▶ pop
                 ▲          └─ drop (stale): groups are missing ─┐
                 └───────────────────────────────────────────────┘        give_back ─▶ ready again

Steps are composed in order, each when all before it have their groups: a later one must not get the older ones.

`RecordedSteps`: the steps that are committed and may be trained again, as the journal has them.

    take(s) of a committed s ─▶ groups ──▶ a trainer that goes on from an earlier checkpoint
    frontier(s) ──────────────▶ frontier_at ─▶ the ledger as it was when s was committed
    checkpointed(s) ──────────▶ compact ─▶ data of groups up to s is dropped

Every look at the journal comes after all that was written before it; but a compaction does not wait behind what there
is no room for. What a frontier counts is what the journal has, and nothing else. Used by `MessageQueue`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from freewheel.data.group import Ticket
from freewheel.queue.journal import (
    Event,
    GivenBack,
    Journal,
    JournalClosed,
    JournalDamaged,
    JournalWriter,
    Reserved,
    Step,
    Stored,
    Took,
    is_temporary,
)
from freewheel.queue.ledger import Frontier
from freewheel.queue.staleness import StalenessPolicy

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


@dataclass
class _Composition:
    sequences: list[int] = field(default_factory=list)
    missing: int = 0
    """Groups that turned out stale and are to be replaced."""
    written: Written | None = None
    """When the journal has it as it is now; None: it has."""


class Steps:
    """A step that is asked for again is the same, and one that the trainer has is on disk."""

    def __init__(
        self,
        policy: StalenessPolicy,
        recording: Recording,
        tickets: Mapping[int, Ticket],
        *,
        committed: int,
        taken: Mapping[int, Step],
    ) -> None:
        """`tickets`: by sequence, as the queue knows them. `taken`: those that a restarted queue finds taken."""
        self.committed = committed
        """The last step that was."""
        self.committing: dict[int, Written] = {}
        """Steps whose commit is on its way to the disk: nothing about them changes any more."""
        self._policy = policy
        self._recording = recording
        self._tickets = tickets
        self._taken = {
            number: _Composition([ticket.sequence for ticket in step.tickets], step.missing)
            for number, step in taken.items()
        }

    def filled(self, step: int) -> bool:
        """Gives `step` the groups that it lacks, if it can. True: it has all that it will have."""
        composed = self._taken.get(step)
        if composed is None:
            before = self._taken.get(step - 1)
            if step != self.committed + 1 and (before is None or before.missing):
                return False
            chosen = self._policy.select(self._policy.bounds.groups_per_step)
            if chosen:
                self._taken[step] = _Composition(chosen)
                self._tell(step)
            return bool(chosen)
        if composed.missing:
            found = self._policy.select(composed.missing, starting=False)
            missing = 0 if self._policy.dry else composed.missing - len(found)
            composed.sequences += found
            if found or missing != composed.missing:
                composed.missing = missing
                self._tell(step)
        if not composed.sequences and not composed.missing:  # all stale, and their prompts abandoned since
            self.give_back(step)
        return self.is_whole(step)

    def drop(self, step: int, sequences: Collection[int], events: Iterable[Event]) -> None:
        """Groups of `step` were stale: others come in their place. `events`: what became of them."""
        if sequences:
            composed = self._taken[step]
            composed.sequences = [one for one in composed.sequences if one not in sequences]
            composed.missing += len(sequences)
            self._tell(step, events)

    def _tell(self, step: int, events: Iterable[Event] = ()) -> None:
        composed = self._taken[step]
        took = Took(step, tuple(self._tickets[one] for one in composed.sequences), composed.missing)
        composed.written = self._recording.then([*events, took])

    def is_whole(self, step: int) -> bool:
        return step in self._taken and not self._taken[step].missing

    def sequences(self, step: int) -> list[int]:
        return self._taken[step].sequences if step in self._taken else []

    def written(self, step: int) -> Written | None:
        return self._taken[step].written

    def taken(self) -> list[int]:
        """Steps that are, and are not being committed."""
        return sorted(set(self._taken).difference(self.committing))

    def give_back(self, step: int) -> None:
        composed = None if step in self.committing else self._taken.pop(step, None)
        if composed is not None:
            self._policy.untake(composed.sequences)
            self._recording.write(GivenBack(step))

    def pop(self, step: int) -> list[int]:
        """`step` is committed: what it was made of."""
        self.committing.pop(step, None)
        self.committed = step
        return self._taken.pop(step).sequences


class RecordedSteps:
    """What was trained can be trained again until no resume would need it."""

    def __init__(
        self, journal: JournalWriter | None, *, base: int, versions: Mapping[int, int], last_commit_s: float
    ) -> None:
        self.base = base
        """They begin after this one."""
        self.versions = dict(versions)
        """Step → the version after it."""
        self.last_commit_s = last_commit_s
        """On the wall clock; 0: there was none."""
        self._journal = journal
        self._frontiers: dict[int, asyncio.Task[Frontier]] = {}  # by step: asked for, and not yet told
        self._compacting: asyncio.Task[None] | None = None
        self._said = False

    async def groups(self, step: int, *, wait_s: float) -> list[Stored] | None:
        """None: the journal does not answer within `wait_s`."""
        assert self._journal is not None, f"step {step} was committed before"
        reading = asyncio.ensure_future(self._journal.read(lambda journal: journal.groups(step)))
        try:
            await asyncio.wait([reading], timeout=wait_s)
            if not reading.done():
                return None
        finally:
            reading.cancel()
        found = reading.result()
        if found is None:
            raise JournalDamaged(
                f"groups of step {step}, which was trained, are gone from the journal: end the run and resume it "
                "(resume=RUN), which goes on without them"
            )
        return found

    async def frontier(self, step: int, *, wait_s: float) -> Frontier | None:
        """None: the journal does not answer within `wait_s`. Asked again, it is the same look that is waited for."""
        assert self._journal is not None, f"step {step} is not the last, and nothing is recorded"
        looking = self._frontiers.get(step)
        if looking is None:
            self._frontiers = {at: one for at, one in self._frontiers.items() if not one.done()}  # nobody asked again
            look = self._journal.read(partial(frontier_at, step=step))
            looking = self._frontiers[step] = asyncio.ensure_future(look)
        await asyncio.wait([looking], timeout=wait_s)
        if not looking.done():
            return None
        self._frontiers.pop(step, None)
        return looking.result()

    async def compact(self, step: int, *, keep_groups: int, wait_s: float) -> None:
        """Returns after `wait_s` at the latest. One at a time: what does not come to it is done with the next."""
        if self._journal is None or step <= self.base:
            return
        if self._compacting is None or self._compacting.done():
            self._compacting = asyncio.ensure_future(self._compact(self._journal, step, keep_groups))
        await asyncio.wait([self._compacting], timeout=wait_s)
        if self._compacting.done():
            self._compacting.result()

    async def _compact(self, journal: JournalWriter, step: int, keep_groups: int) -> None:
        try:
            await journal.read(partial(_compacted, step=step, keep_groups=keep_groups), makes_room=True)
        except Exception as error:
            if not is_temporary(error) and not isinstance(error, JournalClosed):
                raise
            if not self._said:
                log.warning("The journal was not made smaller; the next checkpoint sees to it: %s", error)
            self._said = True
            return
        self._said = False
        self.base = max(self.base, step)
        for old in [one for one in self.versions if one <= step]:
            del self.versions[old]

    def close(self) -> None:
        """Nobody waits for anything any more."""
        for task in [*self._frontiers.values(), *([self._compacting] if self._compacting else [])]:
            task.cancel()
        self._frontiers.clear()


def frontier_at(journal: Journal, *, step: int) -> Frontier:
    """What had ended when `step` was committed, and what was abandoned since: the base's, and what was written after
    it."""
    base = journal.base()
    assert step >= base.step, f"step {step} is before the base: what was trained after it is not known any more"
    low, ended, trained, abandoned = (
        base.frontier.low,
        set(base.frontier.ended),
        base.frontier.trained,
        Counter(base.frontier.abandoned),
    )
    for one in journal.steps(after=base.step):
        if one.step > step:
            break
        for ticket in one.tickets:
            assert ticket.ordinal >= low and ticket.ordinal not in ended, f"{ticket} is recorded as trained twice"
            ended.add(ticket.ordinal)
        trained += len(one.tickets)
        low = _advanced(low, ended)
    for gone in journal.abandoned(after=base.frontier.low - 1):
        if gone.ordinal >= low and gone.ordinal not in ended:
            ended.add(gone.ordinal)
            abandoned[gone.reason] += 1
    low = _advanced(low, ended)
    return Frontier(low=low, ended=tuple(sorted(ended)), trained=trained, abandoned=dict(abandoned))


def _compacted(journal: Journal, *, step: int, keep_groups: int) -> None:
    if step > journal.base().step:
        journal.compact(step=step, frontier=frontier_at(journal, step=step), keep_groups=keep_groups)


def _advanced(low: int, ended: set[int]) -> int:
    """The first that has not ended; those below it are taken out of `ended`."""
    while low in ended:
        ended.remove(low)
        low += 1
    return low
