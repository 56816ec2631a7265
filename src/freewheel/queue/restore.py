"""`restore`: what a `MessageQueue` begins with after its process, or the whole run, is gone. Over a `Journal` alone.

    queue restart   journal + tickets that live rollouters hold ─────────────┐
    whole resume    journal + checkpoint ─ agree? ─ no ─▶ rewind or reset ───┴─▶ load ─▶ Restored ─▶ MessageQueue
                                                          (what the checkpoint has not seen is made again)

An ordinal is live where its group is stored, taken or in flight; it has ended where a committed step has it, or it was
abandoned; every other is issued again. Called in the thread that owns the journal, before anybody talks to the queue.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from freewheel.data.group import Ticket
from freewheel.queue.journal import (
    DROPPED_AT_ONCE,
    Abandoned,
    CheckpointMark,
    Event,
    Failed,
    Journal,
    JournalDamaged,
    Step,
    Stored,
)
from freewheel.queue.ledger import BUDGETS, Kind, Ledger
from freewheel.queue.staleness import Standing
from freewheel.queue.steps import frontier_at

__all__ = [
    "Restored",
    "restore",
]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Everything that a `MessageQueue` needs to go on."""

    ledger: Ledger
    standing: Standing
    step: int
    """Steps that are committed: those after the trainer's checkpoint come from the journal."""
    base: int = 0
    """The recorded steps begin after this one."""
    versions: Mapping[int, int] = field(default_factory=dict)
    """Recorded step → the version after it."""
    stored: Mapping[int, Stored] = field(default_factory=dict)
    """By sequence: groups that are ready, and those of steps that are taken."""
    taken: Mapping[int, Step] = field(default_factory=dict)
    """Steps that a live trainer has and did not commit."""
    in_flight: Mapping[int, tuple[Ticket, str]] = field(default_factory=dict)
    """By sequence: what a live rollouter works on, and its name."""
    last_commit_s: float = 0.0
    """On the wall clock; 0: none is recorded."""
    notes: list[str] = field(default_factory=list)
    """For the log, in words: what was found, and what is made again."""


def restore(
    journal: Journal,
    *,
    total: int | None,
    checkpoint: CheckpointMark | None,
    in_flight: Mapping[str, Sequence[Ticket]] | None = None,
) -> Restored:
    """`total`: prompts in the stream. `checkpoint` None: only the queue's process died, and a trainer may hold steps.

    Given a checkpoint, the journal is first brought to a state that it can be gone on from: a recorded step that is not
    whole is forgotten with all after it, and a journal that ends before the checkpoint begins anew from it.
    """
    notes: list[str] = []
    if checkpoint is not None:
        assert not in_flight, "nobody who works on anything outlives a run"
        _agree(journal, checkpoint, notes)
    steps = _Steps.read(journal)
    if checkpoint is None and steps.gap:
        raise JournalDamaged(f"{journal.path}: step {steps.gap} cannot be read, and a live trainer builds on it")
    return _Loading(journal, steps, notes).load(total, checkpoint, in_flight or {})


# -- the journal and a checkpoint -------------------------------------------------------------------------------------


@dataclass
class _Steps:
    """The recorded steps after the base, as far as they follow on each other. Of those that were committed only a few
    numbers: there may be very many."""

    base: CheckpointMark
    versions: list[int] = field(default_factory=list)
    """After each committed step."""
    counts: list[int] = field(default_factory=list)
    """Groups in each."""
    taken: list[Step] = field(default_factory=list)
    last_commit_s: float = 0.0
    gap: int = 0
    """The first step that is not there though a later one is; 0: none."""

    @classmethod
    def read(cls, journal: Journal) -> _Steps:
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
        """The last step that was committed."""
        return self.base.step + len(self.versions)

    def version(self, step: int) -> int:
        """After it."""
        return self.versions[step - self.base.step - 1] if step > self.base.step else self.base.version


def _agree(journal: Journal, mark: CheckpointMark, notes: list[str]) -> None:
    """Brings the journal to where a run can go on from `mark`."""
    steps = _Steps.read(journal)
    why = _contradiction(steps, mark)
    if why:
        notes.append(f"{why}: prompts are taken up from the checkpoint of step {mark.step}")
        journal.reset(step=mark.step, version=mark.version, frontier=mark.frontier)
        return
    whole = mark.step
    while whole < steps.last and journal.groups(whole + 1) is not None:
        whole += 1
    rewound = [one.ordinal for step in journal.steps(after=whole) if step.version is not None for one in step.tickets]
    if rewound:
        notes.append(
            f"Step {whole + 1} is not whole in the journal: it and the steps after it are forgotten, and their prompts "
            f"({_some(rewound)}) are trained on anew"
        )
    if rewound or steps.gap or steps.taken:  # what was taken and not committed is ready again
        journal.rewind(after=whole)
    if whole > mark.step:
        notes.append(f"Steps {mark.step + 1} to {whole} are in the journal and are trained again as they were")


def _contradiction(steps: _Steps, mark: CheckpointMark) -> str:
    """Why the journal cannot be gone on from at `mark`; empty: it can."""
    if steps.last < mark.step:
        if steps.last == 0:
            return "The journal has no step of this run"
        return f"The journal ends with step {steps.last}, before the checkpoint (its end was lost)"
    if steps.base.step > mark.step:
        return f"The journal has dropped the groups of steps {mark.step + 1} to {steps.base.step}"
    trained = steps.base.frontier.trained + sum(steps.counts[: mark.step - steps.base.step])
    if (steps.version(mark.step), trained) != (mark.version, mark.frontier.trained):
        return f"The journal tells another history of step {mark.step} than the checkpoint"
    return ""


# -- from the journal to a queue --------------------------------------------------------------------------------------


@dataclass
class _History:
    """What a prompt that has not ended went through."""

    attempts: int = 0
    failed: Counter[Kind] = field(default_factory=Counter)
    spent: str = ""
    """Why its budget is spent; the process died before it could say so."""

    def add(self, failed: Failed) -> None:
        self.attempts = max(self.attempts, failed.ticket.attempt + 1)
        if failed.kind is not None:
            kind = Kind(failed.kind)
            self.failed[kind] += 1
            if self.failed[kind] >= BUDGETS[kind]:
                self.spent = failed.reason


class _Loading:
    def __init__(self, journal: Journal, steps: _Steps, notes: list[str]) -> None:
        self.journal = journal
        self.steps = steps
        self.notes = notes
        self.version = steps.version(steps.last)
        self.live: dict[int, Ticket] = {}
        """By ordinal: the attempt that goes on."""
        self.stored: dict[int, Stored] = {}
        self.histories: dict[int, _History] = {}
        self.given_up: set[int] = set()
        """Sequences of attempts at prompts that have not ended."""

    def load(
        self, total: int | None, checkpoint: CheckpointMark | None, in_flight: Mapping[str, Sequence[Ticket]]
    ) -> Restored:
        steps = self.steps
        ledger = Ledger(total=total, frontier=frontier_at(self.journal, step=steps.last))
        failures = self._read_failures(ledger)
        self._abandon_the_spent(ledger)
        self._read_taken()
        ready = self._read_stored(ledger)
        open_now = self._still_open(ledger, in_flight)
        for ordinal in sorted({*self.live, *self.histories}):
            self._reopen(ledger, ordinal)
        ledger.failures.update(failures)
        known = [ticket.sequence for ticket in self.live.values()]
        standing = Standing(
            version=self.version,
            published=None if checkpoint is None else checkpoint.version,
            trained=ledger.trained,
            steps_in_version=self._steps_in_version(),
            next_sequence=max(self.journal.reserved(), max(known, default=-1) + 1),
            untaken=dict.fromkeys(ready, True) | dict.fromkeys(open_now, False),
            taken=[ticket.sequence for step in steps.taken for ticket in step.tickets],
            held=self._held(after=0 if checkpoint is None else checkpoint.step),
        )
        self._sum_up(standing, ledger)
        return Restored(
            ledger=ledger,
            standing=standing,
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
        """Gives all there were, by reason."""
        by_reason: Counter[str] = Counter()
        for failed in self.journal.failures():
            by_reason[failed.reason] += 1
            if not ledger.has_ended(failed.ticket.ordinal):
                self.histories.setdefault(failed.ticket.ordinal, _History()).add(failed)
                self.given_up.add(failed.ticket.sequence)
        return by_reason

    def _abandon_the_spent(self, ledger: Ledger) -> None:
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
        """Gives the sequences that are ready."""
        ready: list[int] = []
        foreign: list[Event] = []
        for group in self.journal.stored():
            ticket = group.ticket
            if group.min_version > self.version:  # made by weights that steps led to which are forgotten
                foreign.append(Failed(ticket, None, "rewound", "", group.wall_s))
                self.histories.setdefault(ticket.ordinal, _History()).attempts = ticket.attempt + 1
                self.given_up.add(ticket.sequence)
            elif not ledger.has_ended(ticket.ordinal) and ticket.ordinal not in self.live:
                self.stored[ticket.sequence] = group
                self.live[ticket.ordinal] = ticket
                ready.append(ticket.sequence)
        if foreign:
            self.notes.append(
                f"{len(foreign)} groups are dropped, and their prompts issued again: they were made by versions after "
                f"{self.version}, which were lost"
            )
        self._write(foreign)
        return ready

    def _still_open(self, ledger: Ledger, in_flight: Mapping[str, Sequence[Ticket]]) -> dict[int, tuple[Ticket, str]]:
        """What live rollouters work on and nothing else has; of two attempts at one prompt the later."""
        found: dict[int, tuple[Ticket, str]] = {}
        said = [(ticket, replica) for replica, tickets in in_flight.items() for ticket in tickets]
        for ticket, replica in sorted(said, key=lambda one: one[0].sequence, reverse=True):
            ended = ledger.has_ended(ticket.ordinal) or ticket.sequence in self.given_up
            if ended or ticket.ordinal in self.live:
                continue
            self.live[ticket.ordinal] = ticket
            found[ticket.sequence] = ticket, replica
        if len(found) < len(said):
            ignored = len(said) - len(found)
            self.notes.append(f"{ignored} attempts in flight had been stored, ended or given up: they will be late")
        return found

    def _reopen(self, ledger: Ledger, ordinal: int) -> None:
        history = self.histories.get(ordinal, _History())
        live = self.live.get(ordinal)
        attempts = max(history.attempts, live.attempt + 1 if live else 0)
        ledger.reopen(ordinal, attempts=attempts, failed=history.failed, live=live is not None)

    def _steps_in_version(self) -> int:
        """Trained since the last version was complete; the base is where one was."""
        last = self.steps.last
        while last > self.steps.base.step and self.steps.version(last - 1) == self.version:
            last -= 1
        return self.steps.last - last

    def _held(self, *, after: int) -> dict[int, int]:
        """Groups of the steps after `after`, by the version that they went into."""
        held: Counter[int] = Counter()
        before = 0
        for step in self.journal.steps(after=after):
            if step.step > self.steps.last or step.version is None:
                break
            known = step.step > self.steps.base.step
            held[(self.steps.version(step.step - 1) if known else before) + 1] += len(step.tickets)
            before = step.version
        return dict(held)

    def _sum_up(self, standing: Standing, ledger: Ledger) -> None:
        if self.steps.last or standing.untaken or standing.taken:
            ready = sum(standing.untaken.values())
            self.notes.append(
                f"Restored at step {self.steps.last}, version {self.version}: {ledger.trained} prompts trained, "
                f"{ready} groups ready, {len(standing.taken)} being trained, {len(standing.untaken) - ready} in flight"
            )

    def _write(self, events: Sequence[Event]) -> None:
        for start in range(0, len(events), DROPPED_AT_ONCE):
            self.journal.append(events[start : start + DROPPED_AT_ONCE])


def _some(ordinals: Iterable[int]) -> str:
    """Enough of them to look for in a log."""
    shown = sorted(ordinals)
    return ", ".join(str(one) for one in shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
