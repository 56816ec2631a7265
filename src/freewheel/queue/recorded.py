"""`RecordedSteps`: the steps that are committed and may be trained again, as the journal has them.

    take(s) of a committed s ─▶ groups ──▶ a trainer that goes on from an earlier checkpoint
    frontier(s) ──────────────▶ frontier_at ─▶ the ledger as it was when s was committed
    checkpointed(s) ──────────▶ compact ─▶ data of groups up to s is dropped

Every look at the journal comes after all that was written before it; but a compaction does not wait behind what there
is no room for. What a frontier counts is what the journal has, and nothing else. Used by `MessageQueue`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from functools import partial

from freewheel.queue.journal import Journal, JournalDamaged, Stored
from freewheel.queue.journal_writer import JournalClosed, JournalWriter, passing
from freewheel.queue.ledger import Frontier

log = logging.getLogger("freewheel.queue")


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
            if not passing(error) and not isinstance(error, JournalClosed):
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
