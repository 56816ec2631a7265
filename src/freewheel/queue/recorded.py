"""`RecordedSteps`: the steps that are committed and may be trained again, as the journal has them.

    take(s) of a committed s ─▶ groups ──▶ a trainer that goes on from an earlier checkpoint
    frontier(s) ──────────────▶ trained_after ─▶ the ledger as it was when s was committed
    checkpointed(s) ──────────▶ compact ─▶ data of groups up to s is dropped

Every look at the journal comes after all that was written before it. Used by `MessageQueue`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from freewheel.queue.journal import Journal, JournalDamaged, JournalFull, Stored
from freewheel.queue.journal_writer import JournalWriter
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

    async def trained_after(self, step: int) -> tuple[int, dict[int, list[int]]]:
        """The last step that is committed, and the prompts of each after `step`."""
        assert self._journal is not None, f"step {step} is not the last, and nothing is recorded"
        return await self._journal.read(partial(_trained_after, step=step))

    async def compact(self, step: int, frontier: Frontier, *, keep_groups: int) -> None:
        assert self._journal is not None
        try:
            await self._journal.read(lambda one: one.compact(step=step, frontier=frontier, keep_groups=keep_groups))
        except JournalFull as error:
            log.warning("The journal was not made smaller, which takes a little room: %s", error)
            return
        self.base = max(self.base, step)
        for old in [one for one in self.versions if one <= step]:
            del self.versions[old]


def _trained_after(journal: Journal, *, step: int) -> tuple[int, dict[int, list[int]]]:
    later = {
        one.step: [ticket.ordinal for ticket in one.tickets]
        for one in journal.steps(after=step)
        if one.version is not None
    }
    return max([step, *later]), later
