"""`restore`: the state of a `MessageQueue` after its process, or the whole run, died. Reads a `Journal`.

    queue restart   journal + tickets that live rollouters hold ─────────────┐
    whole resume    journal + checkpoint ─ agree? ─ no ─▶ rewind or reset ───┴─▶ Restored ─▶ MessageQueue
                                                          (steps after the checkpoint are trained again)

An ordinal is live if its group is stored, taken or in flight. It has ended if a committed step has it or it was
abandoned. Every other ordinal is issued again. `restore` runs in the thread that owns the journal, before anybody calls
the queue. `frontier_at` replays committed steps, also for checkpoints while the queue runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from freewheel.data.group import Ticket
from freewheel.queue.journal import (
    Abandoned,
    AttemptFailed,
    CheckpointMark,
    Journal,
    JournalDamaged,
    JournalEvent,
    Step,
    Stored,
)
from freewheel.queue.ledger import BUDGETS, Frontier, Kind, Ledger
from freewheel.queue.staleness import PolicyState

ORDINALS_IN_A_NOTE = 5
"""Enough to search a log for."""


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
    """Groups by sequence: those that are ready, and those of taken steps."""
    taken: Mapping[int, Step] = field(default_factory=dict)
    """Steps that a live trainer has and did not commit."""
    in_flight: Mapping[int, tuple[Ticket, str]] = field(default_factory=dict)
    """Tickets by sequence that a live rollouter works on, with its name."""
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
    steps = _Steps(journal)
    if checkpoint is None and steps.gap:
        raise JournalDamaged(f"{journal.path}: step {steps.gap} cannot be read, and a live trainer builds on it")
    prompts = _Prompts(journal, steps, replay(journal, step=steps.last, total=total), notes)
    prompts.read_failures()
    prompts.read_taken()
    ready = prompts.read_stored()
    open_now = prompts.find_open(in_flight or {})
    ledger = prompts.reopen()
    policy = PolicyState(
        version=steps.version,
        published=None if checkpoint is None else checkpoint.version,
        trained=ledger.trained,
        steps_in_version=sum(version == steps.version for version in steps.versions.values()) - 1,
        next_sequence=max([journal.reserved(), *(ticket.sequence + 1 for ticket in prompts.live.values())]),
        untaken=dict.fromkeys(ready, True) | dict.fromkeys(open_now, False),
        taken=[ticket.sequence for step in steps.taken for ticket in step.tickets],
        held=_count_held(journal, steps, after=0 if checkpoint is None else checkpoint.step),
    )
    if steps.last or policy.untaken or policy.taken:
        notes.append(
            f"Restored at step {steps.last}, version {steps.version}: {ledger.trained} prompts trained, "
            f"{len(ready)} groups ready, {len(policy.taken)} being trained, {len(open_now)} in flight"
        )
    return Restored(
        ledger=ledger,
        policy=policy,
        step=steps.last,
        base=steps.base.step,
        versions=steps.versions,
        stored=prompts.stored,
        taken={step.step: step for step in steps.taken},
        in_flight=open_now,
        last_commit_s=steps.last_commit_s,
        notes=notes,
    )


def replay(journal: Journal, *, step: int, total: int | None = None) -> Ledger:
    """Return the ledger as it was when `step` was committed, with the prompts abandoned since: the frontier of the
    journal's base, plus everything written after it."""
    base = journal.base()
    assert step >= base.step, f"step {step} is before the base: steps after it are not recorded any more"
    ledger = Ledger(total=total, frontier=base.frontier)
    for one in journal.steps(after=base.step):
        if one.step > step:
            break
        for ticket in one.tickets:
            ledger.reopen(ticket.ordinal, attempts=1, failed={}, live=True)
        ledger.train(ticket.ordinal for ticket in one.tickets)
    for gone in journal.abandoned(after=base.frontier.low - 1):
        if not ledger.has_ended(gone.ordinal):
            ledger.reopen(gone.ordinal, attempts=1, failed={}, live=True)
            ledger.abandon(gone.ordinal, gone.reason)
    return ledger


def frontier_at(journal: Journal, *, step: int) -> Frontier:
    return replay(journal, step=step).frontier()


# -- the steps, and a checkpoint --------------------------------------------------------------------------------------


class _Steps:
    """The recorded steps from the base to the first gap. Committed steps are kept as a few numbers only, because there
    may be very many."""

    def __init__(self, journal: Journal) -> None:
        self.base = journal.base()
        self.last = self.base.step
        """The last committed step."""
        self.versions = {self.base.step: self.base.version}
        """Step → the version after it, from the base."""
        self.trained = {self.base.step: self.base.frontier.trained}
        """Step → groups trained up to it, from the base."""
        self.taken: list[Step] = []
        self.last_commit_s = 0.0
        self.gap = 0
        """The first missing step that has a later one; 0: none."""
        for step in journal.steps(after=self.base.step):
            expected = self.last + len(self.taken) + 1
            if step.step != expected or (self.taken and step.version is not None):
                self.gap = expected
                break
            if step.version is None:
                self.taken.append(step)
            else:
                self.trained[step.step] = self.trained[self.last] + len(step.tickets)
                self.versions[step.step] = step.version
                self.last, self.last_commit_s = step.step, step.wall_s

    @property
    def version(self) -> int:
        return self.versions[self.last]


def _agree(journal: Journal, mark: CheckpointMark, notes: list[str]) -> None:
    """Bring the journal to a state from which a run can continue at `mark`."""
    steps = _Steps(journal)
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
        first = ", ".join(map(str, sorted(rewound)[:ORDINALS_IN_A_NOTE]))
        more = f" and {len(rewound) - ORDINALS_IN_A_NOTE} more" if len(rewound) > ORDINALS_IN_A_NOTE else ""
        notes.append(
            f"Step {whole + 1} is not whole in the journal: it and the steps after it are forgotten, and their prompts "
            f"({first}{more}) are trained again"
        )
    if rewound or steps.gap or steps.taken:  # groups that were taken and not committed are ready again
        journal.rewind(after=whole)
    if whole > mark.step:
        notes.append(f"Steps {mark.step + 1} to {whole} are in the journal and are trained again with the same groups")


def _contradiction(steps: _Steps, mark: CheckpointMark) -> str:
    """Return why the journal cannot continue at `mark`; empty if it can."""
    if steps.last == 0 < mark.step:
        return "The journal has no step of this run"
    if steps.last < mark.step:
        return f"The journal ends with step {steps.last}, before the checkpoint (its end was lost)"
    if steps.base.step > mark.step:
        return f"The journal has dropped the groups of steps {mark.step + 1} to {steps.base.step}"
    if (steps.versions[mark.step], steps.trained[mark.step]) != (mark.version, mark.frontier.trained):
        return f"The journal and the checkpoint disagree about step {mark.step}"
    return ""


def _count_held(journal: Journal, steps: _Steps, *, after: int) -> dict[int, int]:
    """Count the groups of the committed steps after `after` by the version that they went into."""
    held: Counter[int] = Counter()
    before = 0
    for step in journal.steps(after=after):
        if step.step > steps.last or step.version is None:
            break
        held[steps.versions.get(step.step - 1, before) + 1] += len(step.tickets)
        before = step.version
    return dict(held)


# -- the prompts that have not ended ----------------------------------------------------------------------------------


@dataclass
class _Failures:
    """Failed attempts at a prompt that has not ended."""

    attempts: int = 0
    by_kind: Counter[Kind] = field(default_factory=Counter)
    spent: str = ""
    """Reason for which its budget is spent. The process died before it could record that."""


class _Prompts:
    """The prompts that a committed step does not have: live attempts, and failed ones."""

    def __init__(self, journal: Journal, steps: _Steps, ledger: Ledger, notes: list[str]) -> None:
        self.journal, self.steps, self.ledger, self.notes = journal, steps, ledger, notes
        self.live: dict[int, Ticket] = {}
        """Ordinal → its live attempt."""
        self.stored: dict[int, Stored] = {}
        self.failures: dict[int, _Failures] = {}
        self.given_up: set[int] = set()
        """Sequences of failed attempts."""

    def read_failures(self) -> None:
        """Count all failures, and abandon the prompts whose budget is spent."""
        for failed in self.journal.failures():
            self.ledger.failures[failed.reason] += 1
            if not self.ledger.has_ended(failed.ticket.ordinal):
                known = self._add_failure(failed.ticket)
                if failed.kind is not None:
                    kind = Kind(failed.kind)
                    known.by_kind[kind] += 1
                    if known.by_kind[kind] >= BUDGETS[kind]:
                        known.spent = failed.reason
        spent = {ordinal: known for ordinal, known in self.failures.items() if known.spent}
        for ordinal, known in spent.items():
            del self.failures[ordinal]
            self.ledger.reopen(ordinal, attempts=known.attempts, failed={}, live=True)
            self.ledger.abandon(ordinal, known.spent)
        now = time.time()
        self.journal.append([Abandoned(one, known.attempts - 1, known.spent, now) for one, known in spent.items()])

    def _add_failure(self, ticket: Ticket) -> _Failures:
        known = self.failures.setdefault(ticket.ordinal, _Failures())
        known.attempts = max(known.attempts, ticket.attempt + 1)
        self.given_up.add(ticket.sequence)
        return known

    def read_taken(self) -> None:
        for step in self.steps.taken:
            groups = self.journal.groups(step.step)
            if groups is None:
                raise JournalDamaged(
                    f"{self.journal.path}: groups of step {step.step} are gone, which is being trained"
                )
            for group in groups:
                self._add_stored(group)

    def _add_stored(self, group: Stored) -> None:
        self.stored[group.ticket.sequence] = group
        self.live[group.ticket.ordinal] = group.ticket

    def read_stored(self) -> list[int]:
        """Return the sequences that are ready."""
        ready: list[int] = []
        foreign: list[JournalEvent] = []
        for group in self.journal.stored():
            ticket = group.ticket
            if group.min_version > self.steps.version:  # generated by weights of steps that are forgotten
                foreign.append(AttemptFailed(ticket, None, "rewound", "", group.wall_s))
                self._add_failure(ticket)
            elif not self.ledger.has_ended(ticket.ordinal) and ticket.ordinal not in self.live:
                self._add_stored(group)
                ready.append(ticket.sequence)
        if foreign:
            self.notes.append(
                f"{len(foreign)} groups are dropped, and their prompts issued again: they were generated by versions "
                f"after {self.steps.version}, which were lost"
            )
            self.journal.append(foreign)
        return ready

    def find_open(self, in_flight: Mapping[str, Sequence[Ticket]]) -> dict[int, tuple[Ticket, str]]:
        """Return the tickets of live rollouters that nothing else has; of two attempts at one prompt, the later."""
        found: dict[int, tuple[Ticket, str]] = {}
        claimed = [(ticket, replica) for replica, tickets in in_flight.items() for ticket in tickets]
        for ticket, replica in sorted(claimed, key=lambda one: one[0].sequence, reverse=True):
            ended = self.ledger.has_ended(ticket.ordinal) or ticket.sequence in self.given_up
            if not ended and ticket.ordinal not in self.live:
                self.live[ticket.ordinal] = ticket
                found[ticket.sequence] = ticket, replica
        if ignored := len(claimed) - len(found):
            self.notes.append(f"{ignored} attempts in flight had been stored, ended or given up: they will be late")
        return found

    def reopen(self) -> Ledger:
        """Open the prompts in the ledger: live ones continue, the others are issued again."""
        for ordinal in sorted({*self.live, *self.failures}):
            known, ticket = self.failures.get(ordinal, _Failures()), self.live.get(ordinal)
            attempts = max(known.attempts, ticket.attempt + 1 if ticket else 0)
            self.ledger.reopen(ordinal, attempts=attempts, failed=known.by_kind, live=ticket is not None)
        return self.ledger
