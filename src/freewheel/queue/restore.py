"""`restore`: the state of a `MessageQueue` after its process, or the whole run, died. Reads a `Journal`.

    queue restart   journal + tickets that live rollouters hold ─────────────┐
    whole resume    journal + checkpoint ─ agree? ─ no ─▶ rewind or reset ───┴─▶ load ─▶ Restored ─▶ MessageQueue
                                                          (steps after the checkpoint are trained again)

An ordinal is live if its group is stored, taken or in flight. It has ended if a committed step has it or it was
abandoned. Every other ordinal is issued again. `restore` runs in the thread that owns the journal, before anybody calls
the queue.

`RecordedSteps` serves committed steps while the queue runs: to a trainer that resumes from an earlier checkpoint, and
to checkpoints.

    take(s) of a committed s ─▶ read_groups ──▶ the same groups again
    read_frontier(s) ─────────▶ frontier_at ──▶ the ledger as it was when s was committed
    confirm_checkpoint(s) ────▶ compact ──────▶ groups of steps up to s are dropped
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from freewheel.data.group import Ticket
from freewheel.queue.journal import (
    DROPPED_AT_ONCE,
    Abandoned,
    CheckpointMark,
    Event,
    Failed,
    Journal,
    JournalClosed,
    JournalDamaged,
    JournalWriter,
    Step,
    Stored,
    is_temporary,
)
from freewheel.queue.ledger import BUDGETS, Frontier, Kind, Ledger
from freewheel.queue.staleness import PolicyState

log = logging.getLogger("freewheel.queue")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Everything that a `MessageQueue` needs to continue."""

    ledger: Ledger
    policy: PolicyState
    step: int
    """The last committed step. Steps after the trainer's checkpoint come from the journal."""
    base: int = 0
    """The recorded steps start after this one."""
    versions: Mapping[int, int] = field(default_factory=dict)
    """Recorded step → the version after it."""
    stored: Mapping[int, Stored] = field(default_factory=dict)
    """By sequence: groups that are ready, and those of taken steps."""
    taken: Mapping[int, Step] = field(default_factory=dict)
    """Steps that a live trainer has and did not commit."""
    in_flight: Mapping[int, tuple[Ticket, str]] = field(default_factory=dict)
    """By sequence: tickets that a live rollouter works on, and its name."""
    last_commit_s: float = 0.0
    """Wall-clock time; 0: no commit is recorded."""
    notes: list[str] = field(default_factory=list)
    """For the log: what was found, and what is done again."""


def restore(
    journal: Journal,
    *,
    total: int | None,
    checkpoint: CheckpointMark | None,
    in_flight: Mapping[str, Sequence[Ticket]] | None = None,
) -> Restored:
    """`total`: prompts in the stream. `checkpoint` None: only the queue's process died, and a trainer may hold steps.

    With a checkpoint, the journal is first made to agree with it. A recorded step that is not whole is forgotten with
    all steps after it. A journal that ends before the checkpoint starts again from the checkpoint.
    """
    notes: list[str] = []
    if checkpoint is not None:
        assert not in_flight, "no rollouter outlives a run"
        _agree(journal, checkpoint, notes)
    steps = _StepSummary.read(journal)
    if checkpoint is None and steps.gap:
        raise JournalDamaged(f"{journal.path}: step {steps.gap} cannot be read, and a live trainer builds on it")
    return _Loader(journal, steps, notes).load(total, checkpoint, in_flight or {})


# -- the journal and a checkpoint -------------------------------------------------------------------------------------


@dataclass
class _StepSummary:
    """The recorded steps after the base, up to the first gap. Committed steps are kept as a few numbers only, because
    there may be very many."""

    base: CheckpointMark
    versions: list[int] = field(default_factory=list)
    """After each committed step."""
    counts: list[int] = field(default_factory=list)
    """Groups in each."""
    taken: list[Step] = field(default_factory=list)
    last_commit_s: float = 0.0
    gap: int = 0
    """The first missing step that has a later one; 0: none."""

    @classmethod
    def read(cls, journal: Journal) -> _StepSummary:
        found = cls(journal.base())
        for step in journal.steps(after=found.base.step):
            expected = found.last + len(found.taken) + 1
            if step.step != expected or (found.taken and step.version is not None):
                found.gap = expected
                break
            if step.version is None:
                found.taken.append(step)
            else:
                found.versions.append(step.version)
                found.counts.append(len(step.tickets))
                found.last_commit_s = step.wall_s
        return found

    @property
    def last(self) -> int:
        """The last committed step."""
        return self.base.step + len(self.versions)

    def version(self, step: int) -> int:
        """Return the version after `step`."""
        return self.versions[step - self.base.step - 1] if step > self.base.step else self.base.version


def _agree(journal: Journal, mark: CheckpointMark, notes: list[str]) -> None:
    """Bring the journal to a state from which a run can continue at `mark`."""
    steps = _StepSummary.read(journal)
    why = _contradiction(steps, mark)
    if why:
        notes.append(f"{why}: prompts continue from the checkpoint of step {mark.step}")
        journal.reset(step=mark.step, version=mark.version, frontier=mark.frontier)
        return
    whole = mark.step
    while whole < steps.last and journal.groups(whole + 1) is not None:
        whole += 1
    rewound = [one.ordinal for step in journal.steps(after=whole) if step.version is not None for one in step.tickets]
    if rewound:
        notes.append(
            f"Step {whole + 1} is not whole in the journal: it and the steps after it are forgotten, and their prompts "
            f"({_some(rewound)}) are trained again"
        )
    if rewound or steps.gap or steps.taken:  # groups that were taken and not committed are ready again
        journal.rewind(after=whole)
    if whole > mark.step:
        notes.append(f"Steps {mark.step + 1} to {whole} are in the journal and are trained again with the same groups")


def _contradiction(steps: _StepSummary, mark: CheckpointMark) -> str:
    """Return why the journal cannot continue at `mark`; empty if it can."""
    if steps.last < mark.step:
        if steps.last == 0:
            return "The journal has no step of this run"
        return f"The journal ends with step {steps.last}, before the checkpoint (its end was lost)"
    if steps.base.step > mark.step:
        return f"The journal has dropped the groups of steps {mark.step + 1} to {steps.base.step}"
    trained = steps.base.frontier.trained + sum(steps.counts[: mark.step - steps.base.step])
    if (steps.version(mark.step), trained) != (mark.version, mark.frontier.trained):
        return f"The journal and the checkpoint disagree about step {mark.step}"
    return ""


# -- from the journal to a queue --------------------------------------------------------------------------------------


@dataclass
class _History:
    """Failed attempts at a prompt that has not ended."""

    attempts: int = 0
    failed: Counter[Kind] = field(default_factory=Counter)
    spent: str = ""
    """Reason for which its budget is spent. The process died before it could record that."""

    def add(self, failed: Failed) -> None:
        self.attempts = max(self.attempts, failed.ticket.attempt + 1)
        if failed.kind is not None:
            kind = Kind(failed.kind)
            self.failed[kind] += 1
            if self.failed[kind] >= BUDGETS[kind]:
                self.spent = failed.reason


class _Loader:
    def __init__(self, journal: Journal, steps: _StepSummary, notes: list[str]) -> None:
        self.journal = journal
        self.steps = steps
        self.notes = notes
        self.version = steps.version(steps.last)
        self.live: dict[int, Ticket] = {}
        """Ordinal → its live attempt."""
        self.stored: dict[int, Stored] = {}
        self.histories: dict[int, _History] = {}
        self.given_up: set[int] = set()
        """Sequences of failed attempts at prompts that have not ended."""

    def load(
        self, total: int | None, checkpoint: CheckpointMark | None, in_flight: Mapping[str, Sequence[Ticket]]
    ) -> Restored:
        steps = self.steps
        ledger = Ledger(total=total, frontier=frontier_at(self.journal, step=steps.last))
        failures = self._read_failures(ledger)
        self._abandon_spent(ledger)
        self._read_taken()
        ready = self._read_stored(ledger)
        open_now = self._find_open(ledger, in_flight)
        for ordinal in sorted({*self.live, *self.histories}):
            history, ticket = self.histories.get(ordinal, _History()), self.live.get(ordinal)
            attempts = max(history.attempts, ticket.attempt + 1 if ticket else 0)
            ledger.reopen(ordinal, attempts=attempts, failed=history.failed, live=ticket is not None)
        ledger.failures.update(failures)
        known = [ticket.sequence for ticket in self.live.values()]
        policy = PolicyState(
            version=self.version,
            published=None if checkpoint is None else checkpoint.version,
            trained=ledger.trained,
            steps_in_version=self._steps_in_version(),
            next_sequence=max(self.journal.reserved(), max(known, default=-1) + 1),
            untaken=dict.fromkeys(ready, True) | dict.fromkeys(open_now, False),
            taken=[ticket.sequence for step in steps.taken for ticket in step.tickets],
            held=self._held(after=0 if checkpoint is None else checkpoint.step),
        )
        if steps.last or policy.untaken or policy.taken:
            self.notes.append(
                f"Restored at step {steps.last}, version {self.version}: {ledger.trained} prompts trained, "
                f"{len(ready)} groups ready, {len(policy.taken)} being trained, {len(open_now)} in flight"
            )
        return Restored(
            ledger=ledger,
            policy=policy,
            step=steps.last,
            base=steps.base.step,
            versions=dict(enumerate(steps.versions, steps.base.step + 1)),
            stored=self.stored,
            taken={step.step: step for step in steps.taken},
            in_flight=open_now,
            last_commit_s=steps.last_commit_s,
            notes=self.notes,
        )

    def _read_failures(self, ledger: Ledger) -> Counter[str]:
        """Return all failures by reason."""
        by_reason: Counter[str] = Counter()
        for failed in self.journal.failures():
            by_reason[failed.reason] += 1
            if not ledger.has_ended(failed.ticket.ordinal):
                self.histories.setdefault(failed.ticket.ordinal, _History()).add(failed)
                self.given_up.add(failed.ticket.sequence)
        return by_reason

    def _abandon_spent(self, ledger: Ledger) -> None:
        now = time.time()
        events = []
        for ordinal in [one for one, history in self.histories.items() if history.spent]:
            history = self.histories.pop(ordinal)
            ledger.reopen(ordinal, attempts=history.attempts, failed={}, live=True)
            ledger.abandon(ordinal, history.spent)
            events.append(Abandoned(ordinal, history.attempts - 1, history.spent, now))
        self._write(events)

    def _read_taken(self) -> None:
        for step in self.steps.taken:
            groups = self.journal.groups(step.step)
            if groups is None:
                raise JournalDamaged(
                    f"{self.journal.path}: groups of step {step.step} are gone, which is being trained"
                )
            for group in groups:
                self.stored[group.ticket.sequence] = group
                self.live[group.ticket.ordinal] = group.ticket

    def _read_stored(self, ledger: Ledger) -> list[int]:
        """Return the sequences that are ready."""
        ready: list[int] = []
        foreign: list[Event] = []
        for group in self.journal.stored():
            ticket = group.ticket
            if group.min_version > self.version:  # generated by weights of steps that are forgotten
                foreign.append(Failed(ticket, None, "rewound", "", group.wall_s))
                self.histories.setdefault(ticket.ordinal, _History()).attempts = ticket.attempt + 1
                self.given_up.add(ticket.sequence)
            elif not ledger.has_ended(ticket.ordinal) and ticket.ordinal not in self.live:
                self.stored[ticket.sequence] = group
                self.live[ticket.ordinal] = ticket
                ready.append(ticket.sequence)
        if foreign:
            self.notes.append(
                f"{len(foreign)} groups are dropped, and their prompts issued again: they were generated by versions "
                f"after {self.version}, which were lost"
            )
        self._write(foreign)
        return ready

    def _find_open(self, ledger: Ledger, in_flight: Mapping[str, Sequence[Ticket]]) -> dict[int, tuple[Ticket, str]]:
        """Return the tickets of live rollouters that nothing else has; of two attempts at one prompt, the later."""
        found: dict[int, tuple[Ticket, str]] = {}
        claimed = [(ticket, replica) for replica, tickets in in_flight.items() for ticket in tickets]
        for ticket, replica in sorted(claimed, key=lambda one: one[0].sequence, reverse=True):
            ended = ledger.has_ended(ticket.ordinal) or ticket.sequence in self.given_up
            if ended or ticket.ordinal in self.live:
                continue
            self.live[ticket.ordinal] = ticket
            found[ticket.sequence] = ticket, replica
        if len(found) < len(claimed):
            ignored = len(claimed) - len(found)
            self.notes.append(f"{ignored} attempts in flight had been stored, ended or given up: they will be late")
        return found

    def _steps_in_version(self) -> int:
        """Return how many steps were trained since the last complete version. A version is complete at the base."""
        last = self.steps.last
        while last > self.steps.base.step and self.steps.version(last - 1) == self.version:
            last -= 1
        return self.steps.last - last

    def _held(self, *, after: int) -> dict[int, int]:
        """Count the groups of the steps after `after` by the version that they went into."""
        held: Counter[int] = Counter()
        before = 0
        for step in self.journal.steps(after=after):
            if step.step > self.steps.last or step.version is None:
                break
            known = step.step > self.steps.base.step
            held[(self.steps.version(step.step - 1) if known else before) + 1] += len(step.tickets)
            before = step.version
        return dict(held)

    def _write(self, events: Sequence[Event]) -> None:
        for start in range(0, len(events), DROPPED_AT_ONCE):
            self.journal.append(events[start : start + DROPPED_AT_ONCE])


def _some(ordinals: Iterable[int]) -> str:
    """Name enough ordinals to search a log for."""
    shown = sorted(ordinals)
    return ", ".join(str(one) for one in shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


# -- committed steps --------------------------------------------------------------------------------------------------


class RecordedSteps:
    """Every trained step can be trained again until no resume needs it.

    A read of the journal sees all earlier writes. A compaction may run first, because it can free the space that the
    writes wait for.
    """

    def __init__(
        self, journal: JournalWriter | None, *, base: int, versions: Mapping[int, int], last_commit_s: float
    ) -> None:
        self.base = base
        """The recorded steps start after this one."""
        self.versions = dict(versions)
        """Step → the version after it."""
        self.last_commit_s = last_commit_s
        """Wall-clock time; 0: no commit is recorded."""
        self._journal = journal
        self._reads: dict[tuple[str, int], asyncio.Task[Any]] = {}  # requested, and not fetched yet
        self._compaction: asyncio.Task[None] | None = None
        self._warned = False

    async def read_groups(self, step: int, *, wait_s: float) -> list[Stored] | None:
        """Return the groups of `step`; None if the journal does not answer within `wait_s`."""
        found: list[Stored] | None = await self._read("groups", step, partial(_groups_of, step=step), wait_s)
        return found

    async def read_frontier(self, step: int, *, wait_s: float) -> Frontier | None:
        """Return the frontier after `step`; None if the journal does not answer within `wait_s`."""
        found: Frontier | None = await self._read("frontier", step, partial(frontier_at, step=step), wait_s)
        return found

    async def _read(self, kind: str, step: int, work: Callable[[Journal], Any], wait_s: float) -> Any:
        """A repeated call waits for the same read."""
        assert self._journal is not None, f"step {step} was committed, and there is no journal"
        key = kind, step
        reading = self._reads.get(key)
        if reading is None:
            self._reads = {key: one for key, one in self._reads.items() if not one.done()}  # nobody came back for those
            reading = self._reads[key] = asyncio.ensure_future(self._journal.read(work))
        await asyncio.wait([reading], timeout=wait_s)
        if not reading.done():
            return None
        self._reads.pop(key, None)
        return reading.result()

    async def compact(self, step: int, *, keep_groups: int, wait_s: float) -> None:
        """Drop groups of steps up to `step`, and return after `wait_s` at the latest. Only one compaction runs at a
        time; a later checkpoint makes up for one that was skipped."""
        if self._journal is None or step <= self.base:
            return
        if self._compaction is None or self._compaction.done():
            self._compaction = asyncio.ensure_future(self._compact(self._journal, step, keep_groups))
        await asyncio.wait([self._compaction], timeout=wait_s)
        if self._compaction.done():
            self._compaction.result()

    async def _compact(self, journal: JournalWriter, step: int, keep_groups: int) -> None:
        try:
            await journal.read(partial(_compact_until, step=step, keep_groups=keep_groups), makes_room=True)
        except Exception as error:
            if not is_temporary(error) and not isinstance(error, JournalClosed):
                raise
            if not self._warned:
                log.warning("Journal compaction after step %d failed; retrying at the next checkpoint: %s", step, error)
            self._warned = True
            return
        self._warned = False
        self.base = max(self.base, step)
        for old in [one for one in self.versions if one <= step]:
            del self.versions[old]

    def close(self) -> None:
        for task in [*self._reads.values(), *([self._compaction] if self._compaction else [])]:
            task.cancel()
        self._reads.clear()


def _groups_of(journal: Journal, *, step: int) -> list[Stored]:
    found = journal.groups(step)
    if found is None:
        raise JournalDamaged(
            f"groups of step {step}, which was trained, are gone from the journal: end the run and resume it "
            "(resume=RUN), which continues without them"
        )
    return found


def frontier_at(journal: Journal, *, step: int) -> Frontier:
    """Return the prompts that had ended when `step` was committed, and those abandoned since: the frontier of the
    journal's base, plus everything written after it."""
    base = journal.base()
    assert step >= base.step, f"step {step} is before the base: steps after it are not recorded any more"
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
        low = _advance(low, ended)
    for gone in journal.abandoned(after=base.frontier.low - 1):
        if gone.ordinal >= low and gone.ordinal not in ended:
            ended.add(gone.ordinal)
            abandoned[gone.reason] += 1
    low = _advance(low, ended)
    return Frontier(low=low, ended=tuple(sorted(ended)), trained=trained, abandoned=dict(abandoned))


def _advance(low: int, ended: set[int]) -> int:
    """Return the first ordinal that has not ended, and remove those below it from `ended`."""
    while low in ended:
        ended.remove(low)
        low += 1
    return low


def _compact_until(journal: Journal, *, step: int, keep_groups: int) -> None:
    if step > journal.base().step:
        journal.compact(step=step, frontier=frontier_at(journal, step=step), keep_groups=keep_groups)
