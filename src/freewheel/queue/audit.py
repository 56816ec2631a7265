"""Audits a run: does every prompt end once, and was nothing trained that was too old? Pure and read-only.

    journal: stored, failures, abandoned, steps ┐
    checkpoints: frontiers ─────────────────────┴─▶ a state for every ordinal, and contradictions

Called by `freewheel inspect`, also during a run: the journal is read as of one moment, except the lags of its groups,
which do not change. Checkpoints must be read first, because a step reaches the journal before a checkpoint. Needs a few
bytes of memory per ordinal.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

if TYPE_CHECKING:
    from freewheel.queue.journal import Abandoned, CheckpointMark, Failed, Step, Stored
    from freewheel.queue.ledger import Frontier

Ends = np.ndarray[Any, np.dtype[np.int32]]
Which = np.ndarray[Any, np.dtype[np.bool_]]

STATES = ("trained", "abandoned", "ended", "taken", "queued", "failed", "open")
"""`ended`: a frontier says so, and its own record is gone. `failed`: it waits for another attempt or is in one. `open`:
nothing is recorded; in flight during a run, issued again by a resume."""
MOST_TOLD = 10
"""Violations of one kind that are listed; more would say nothing new."""

NOT_ENDED, ABANDONED = 0, -1
"""Instead of the step in which an ordinal was trained: steps count from 1."""


class Recorded(Protocol):
    """What is read of a `Journal`."""

    def snapshot(self) -> AbstractContextManager[None]: ...
    def base(self) -> CheckpointMark: ...
    def steps(self, *, after: int) -> Iterator[Step]: ...
    def stored(self) -> Iterator[Stored]: ...
    def groups(self, step: int) -> list[Stored] | None: ...
    def failures(self, ordinal: int | None = None) -> Iterator[Failed]: ...
    def abandoned(self) -> Iterator[Abandoned]: ...


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The result. `violations` is empty if all promises were kept."""

    step: int
    """Committed steps."""
    version: int
    states: dict[str, int]
    """Ordinals by state, from 0 to the highest known one."""
    abandoned: dict[str, int]
    failures: dict[str, int]
    """Failed attempts by reason."""
    lost: int
    """Prompts that count as ended but were neither trained on nor abandoned."""
    repeated: int
    """Ends beyond the first: trained on twice, or trained on and abandoned."""
    stale_trained: int
    """Groups that were trained on with a lag beyond the bound."""
    lags_checked: int
    """Trained groups whose lag is still known."""
    stored_groups: int
    recorded: tuple[int, int] | None
    """First and last step with a row."""
    base: int | None
    """The step that the journal can go back to."""
    violations: list[str]
    notes: list[str]


def audit(
    journal: Recorded | None,
    *,
    checkpoints: Sequence[CheckpointMark] = (),
    max_lag: int | None = None,
    capacity: int | None = None,
) -> Audit:
    """Audit a run. `journal` None: use only the checkpoints. `max_lag`: largest allowed lag at training; `capacity`:
    most groups alive at once. None: not checked."""
    book = _Book(max_lag=max_lag)
    if journal is not None:
        book.read(journal)
    for mark in sorted(checkpoints, key=lambda mark: mark.step):
        book.compare(f"the checkpoint of step {mark.step}", mark.step, mark.version, mark.frontier)
    return book.close(capacity)


class _Book:
    """One reading of a run."""

    def __init__(self, *, max_lag: int | None) -> None:
        self._max_lag = max_lag
        self._ends = array("i")  # by ordinal
        self._covered = np.zeros(0, bool)  # ordinals that a frontier counts as ended
        self._queued: dict[int, int] = {}  # ordinal → sequence
        self._taken: set[int] = set()
        self._failed: set[int] = set()
        self._sequences = array("q")
        self._versions: dict[int, int] = {}  # after each committed step
        self._oldest: dict[int, tuple[int, int]] = {}  # step → version of its oldest group, and its number of groups
        self._base: CheckpointMark | None = None
        self._stored = self._checked = self._stale = self._lost = self._again = 0
        self._abandoned: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._violations: dict[str, list[str]] = {}
        self._more: Counter[str] = Counter()
        self._notes: list[str] = []
        self._step = self._version = 0

    # -- the journal --------------------------------------------------------------------------------------------------

    def read(self, journal: Recorded) -> None:
        with journal.snapshot():
            self._base = base = journal.base()
            self._step, self._version = base.step, base.version
            for group in journal.stored():
                self._store(group)
            for failed in journal.failures():
                self._failures[failed.reason] += 1
                self._failed.add(failed.ticket.ordinal)
            for gone in journal.abandoned():
                self._abandoned[gone.reason] += 1
                self._end(gone.ordinal, ABANDONED)
            for step in journal.steps(after=0):
                self._one_step(step)
        self._count_steps(base)
        self._compare_sequences()
        if base.step:
            self.compare(f"the journal's base at step {base.step}", base.step, base.version, base.frontier)
        if self._max_lag is not None:
            for number in self._versions:
                self._check_lags(journal, number, self._max_lag)

    def _store(self, group: Stored) -> None:
        ticket = group.ticket
        self._stored += 1
        if ticket.ordinal in self._queued:
            told = f"sequences {self._queued[ticket.ordinal]} and {ticket.sequence}"
            self._violate("queued twice", f"prompt {ticket.ordinal} is in the queue twice ({told})")
        self._queued[ticket.ordinal] = ticket.sequence

    def _end(self, ordinal: int, how: int) -> None:
        if ordinal >= len(self._ends):
            self._ends.extend([NOT_ENDED] * (ordinal + 1 - len(self._ends)))
        before = self._ends[ordinal]
        self._ends[ordinal] = how
        if before == NOT_ENDED:
            return
        self._again += 1
        if before == ABANDONED:
            what = "abandoned twice" if how == ABANDONED else f"abandoned and trained on in step {how}"
        else:
            what = f"trained on in step {before} and again in step {how}"
        self._violate("ended twice", f"prompt {ordinal} was {what}")

    def _one_step(self, step: Step) -> None:
        for ticket in step.tickets:
            if ticket.sequence >= 0:  # a compacted step has no sequences any more
                self._sequences.append(ticket.sequence)
            if ticket.ordinal in self._queued:
                self._violate("queued again", f"prompt {ticket.ordinal} is in step {step.step} and in the queue")
        if step.version is None:
            self._taken.update(ticket.ordinal for ticket in step.tickets)
            return
        for ticket in step.tickets:
            self._end(ticket.ordinal, step.step)
        before = self._version_before(step.step)
        if before is not None and step.version < before:
            self._violate("version", f"step {step.step} made version {step.version}, and {before} was there before it")
        self._versions[step.step] = step.version
        if step.min_version is not None:
            self._oldest[step.step] = step.min_version, len(step.tickets)
        self._step, self._version = max(self._step, step.step), max(self._version, step.version)

    def _version_before(self, step: int) -> int | None:
        if self._base is not None and step == self._base.step + 1:
            return self._base.version
        return 0 if step == 1 else self._versions.get(step - 1)

    def _check_lags(self, journal: Recorded, step: int, allowed: int) -> None:
        before = self._version_before(step)
        if before is None:
            return
        if step in self._oldest:
            oldest, groups = self._oldest[step]
            self._checked += groups
            if before - oldest > allowed:
                self._stale += 1  # at least
                told = f"a group of step {step} lagged {before - oldest} versions"
                self._violate("stale", f"{told}, and {allowed} are allowed")
            return
        for group in journal.groups(step) or ():
            self._checked += 1
            lag = before - group.min_version
            if lag > allowed:
                self._stale += 1
                told = f"prompt {group.ticket.ordinal} lagged {lag} versions in step {step}"
                self._violate("stale", f"{told}, and {allowed} are allowed")

    def _count_steps(self, base: CheckpointMark) -> None:
        missing = [step for step in range(1, self._step + 1) if step not in self._versions]
        for step in missing:
            if step > base.step:
                self._violate("missing step", f"step {step} is missing between {base.step} and {self._step}")
        earlier = sum(step <= base.step for step in missing)
        if earlier:
            self._notes.append(
                f"{earlier} steps up to {base.step} have no row of their own: a checkpoint vouches for them"
            )

    def _compare_sequences(self) -> None:
        found = np.sort(np.array(self._sequences, np.int64))
        for sequence in np.unique(found[1:][found[1:] == found[:-1]]).tolist():
            self._violate("sequence", f"sequence {sequence} stands twice in the steps' groups")

    # -- frontiers ----------------------------------------------------------------------------------------------------

    def compare(self, name: str, step: int, version: int, frontier: Frontier) -> None:
        """Compare a frontier with what is known about the steps up to it."""
        size = max(len(self._ends), len(self._covered), frontier.low, max(frontier.ended, default=-1) + 1)
        ends, covered = self._padded(size), np.zeros(size, bool)
        covered[: frontier.low] = True
        covered[list(frontier.ended)] = True
        trained, abandoned = (ends > 0) & (ends <= step), ends == ABANDONED
        told = frontier.trained + sum(frontier.abandoned.values())
        surplus = int(covered.sum()) - told
        if surplus:
            self._violate("count", f"{name} has {covered.sum()} ended prompts, and counts {told} trained or abandoned")
        # If the rows explain the frontier's counts, they are complete: any other ended prompt was lost.
        complete = self._base is not None and told == (covered & (trained | abandoned)).sum()
        unknown = covered & (ends == NOT_ENDED)
        if complete:
            self._name_all("lost", unknown, f"has ended by {name}, and nobody trained on it or abandoned it")
        self._lost = max(self._lost, surplus, int(unknown.sum()) if complete else 0)
        self._again = max(self._again, -surplus)
        self._name_all("later", covered & (ends > step), f"has ended by {name}, and was trained on later")
        self._name_all("uncovered", ~covered & trained, f"was trained on up to then, and is open by {name}")
        known = self._versions.get(step)
        if known is not None and known != version:
            self._violate("version", f"{name} is of version {version}, and the journal says {known}")
        if step > self._step:
            if self._base is not None:
                self._notes.append(f"the journal ends at step {self._step}, before {name}: its tail was lost")
            self._step, self._version = step, version
        self._covered = np.concatenate([self._covered, np.zeros(size - len(self._covered), bool)]) | covered
        if self._base is None:
            self._abandoned = Counter(frontier.abandoned)

    def _padded(self, size: int) -> Ends:
        ends = np.zeros(size, np.int32)
        ends[: len(self._ends)] = np.array(self._ends, np.int32)
        return ends

    def _name_all(self, kind: str, which: Which, what: str) -> None:
        for ordinal in np.flatnonzero(which).tolist():
            self._violate(kind, f"prompt {ordinal} {what}")

    # -- the result ---------------------------------------------------------------------------------------------------

    def _violate(self, kind: str, text: str) -> None:
        found = self._violations.setdefault(kind, [])
        if len(found) < MOST_TOLD:
            found.append(text)
        self._more[kind] += 1

    def _told(self) -> list[str]:
        told = []
        for kind, found in self._violations.items():
            told += found
            if self._more[kind] > len(found):
                told.append(f"… and {self._more[kind] - len(found)} more like this")
        return told

    def _states(self) -> dict[str, int]:
        known = [len(self._ends), len(self._covered), *(max(some) + 1 for some in self._unended() if some)]
        ends, covered = self._padded(max(known)), np.zeros(max(known), bool)
        covered[: len(self._covered)] = self._covered
        states = dict.fromkeys(STATES, 0)
        states["trained"], states["abandoned"] = int((ends > 0).sum()), int((ends == ABANDONED).sum())
        states["ended"] = int((covered & (ends == NOT_ENDED)).sum())
        rest: set[int] = set(np.flatnonzero(~covered & (ends == NOT_ENDED)).tolist())
        for state, ordinals in zip(("taken", "queued", "failed"), self._unended(), strict=True):
            states[state] = len(rest & ordinals)
            rest -= ordinals
        states["open"] = len(rest)
        return states

    def _unended(self) -> tuple[set[int], set[int], set[int]]:
        return self._taken, set(self._queued), self._failed

    def close(self, capacity: int | None) -> Audit:
        states = self._states()
        alive = states["open"] + states["queued"] + states["taken"]
        if capacity is not None and alive > capacity:
            self._notes.append(
                f"{alive} prompts have begun and not ended, and {capacity} can be alive at once: a run that had to go "
                "back some steps issues them again; in any other they were forgotten"
            )
        trained = states["trained"]
        if self._max_lag is not None and self._checked < trained:
            checked = f"the lag of {self._checked} of {trained} trained groups could be checked"
            self._notes.append(f"{checked}; of the others nothing is left")
        return Audit(
            step=self._step,
            version=self._version,
            states=states,
            abandoned=dict(self._abandoned),
            failures=dict(self._failures),
            lost=self._lost,
            repeated=self._again,
            stale_trained=self._stale,
            lags_checked=self._checked,
            stored_groups=self._stored,
            recorded=(min(self._versions), max(self._versions)) if self._versions else None,
            base=None if self._base is None else self._base.step,
            violations=self._told(),
            notes=self._notes,
        )
