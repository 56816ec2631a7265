"""Audits a run: did every prompt end once, and was every trained group fresh enough? Read-only.

    journal: stored, failures, abandoned, steps ┐
    checkpoints: frontiers ─────────────────────┴─▶ a state for every ordinal, and contradictions

Called by `freewheel inspect`, also during a run: the journal is read as of one moment. Checkpoints must be read first,
because a step reaches the journal before a checkpoint. Needs about 100 bytes of memory per ordinal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from freewheel.queue.journal import CheckpointMark, Journal, Step, Stored

STATES = ("trained", "abandoned", "ended", "taken", "queued", "failed", "open")
"""`ended`: a frontier says so, and its own record is gone. `failed`: it waits for another attempt or is in one. `open`:
nothing is recorded; in flight during a run, issued again by a resume."""
MOST_LISTED = 10
"""Violations of one kind that are listed; more would say nothing new."""

ABANDONED = 0
"""Instead of the step in which an ordinal was trained: steps count from 1."""


class Audit(msgspec.Struct, kw_only=True):
    """The result. `violations` is empty if all promises were kept."""

    step: int = 0
    """Committed steps."""
    version: int = 0
    states: dict[str, int] = {}
    """Ordinals by state, from 0 to the highest known one."""
    abandoned: Counter[str] = msgspec.field(default_factory=Counter)
    failures: Counter[str] = msgspec.field(default_factory=Counter)
    """Failed attempts by reason."""
    lost: int = 0
    """Prompts that count as ended but were neither trained on nor abandoned."""
    repeated: int = 0
    """Ends beyond the first: trained on twice, or trained on and abandoned."""
    stale_trained: int = 0
    """Groups that were trained on with a lag beyond the bound."""
    lags_checked: int = 0
    """Trained groups whose lag is still known."""
    stored_groups: int = 0
    recorded: tuple[int, int] | None = None
    """First and last step with a row."""
    base: int | None = None
    """The step that the journal can go back to."""
    violations: list[str] = []
    notes: list[str] = []


def audit(
    journal: Journal | None,
    *,
    checkpoints: Sequence[CheckpointMark] = (),
    max_lag: int | None = None,
    capacity: int | None = None,
) -> Audit:
    """Audit a run. `journal` None: use only the checkpoints. `max_lag`: largest allowed lag at training; `capacity`:
    most groups alive at once. None: not checked."""
    auditor = _Auditor(max_lag)
    if journal is not None:
        auditor.read(journal)
    for mark in sorted(checkpoints, key=lambda mark: mark.step):
        auditor.compare(f"the checkpoint of step {mark.step}", mark)
    return auditor.report(capacity)


class _Auditor:
    """Reads a run once and collects what contradicts itself."""

    def __init__(self, max_lag: int | None) -> None:
        self._max_lag = max_lag
        self._ends: dict[int, int] = {}  # ordinal → the step it was trained in, or `ABANDONED`
        self._low = 0  # below this, a frontier counts all ordinals as ended
        self._covered: set[int] = set()  # and these
        self._queued: dict[int, int] = {}  # ordinal → sequence
        self._taken: set[int] = set()
        self._failed: set[int] = set()
        self._sequences: set[int] = set()
        self._versions: dict[int, int] = {}  # step → the version after it
        self._base: CheckpointMark | None = None
        self._violations: dict[str, list[str]] = {}
        self._found = Audit()

    # -- the journal --------------------------------------------------------------------------------------------------

    def read(self, journal: Journal) -> None:
        with journal.snapshot():
            self._base = base = journal.base()
            self._found.base, self._found.step, self._found.version = base.step, base.step, base.version
            for group in journal.stored():
                self._read_stored(group)
            for failed in journal.failures():
                self._found.failures[failed.reason] += 1
                self._failed.add(failed.ticket.ordinal)
            for gone in journal.abandoned():
                self._found.abandoned[gone.reason] += 1
                self._end(gone.ordinal, ABANDONED)
            for step in journal.steps(after=0):
                self._read_step(step, journal)
        missing = [number for number in range(1, self._found.step + 1) if number not in self._versions]
        for number in missing:
            if number > base.step:
                self._violate("missing step", f"step {number} is missing between {base.step} and {self._found.step}")
        if earlier := sum(number <= base.step for number in missing):
            self._found.notes.append(
                f"{earlier} steps up to {base.step} have no row of their own: a checkpoint vouches for them"
            )
        if base.step:
            self.compare(f"the journal's base at step {base.step}", base)

    def _read_stored(self, group: Stored) -> None:
        ticket = group.ticket
        self._found.stored_groups += 1
        if ticket.ordinal in self._queued:
            sequences = f"sequences {self._queued[ticket.ordinal]} and {ticket.sequence}"
            self._violate("queued twice", f"prompt {ticket.ordinal} is in the queue twice ({sequences})")
        self._queued[ticket.ordinal] = ticket.sequence

    def _end(self, ordinal: int, how: int) -> None:
        before = self._ends.get(ordinal)
        self._ends[ordinal] = how
        if before is not None:
            self._found.repeated += 1
            first = "abandoned" if before == ABANDONED else f"trained on in step {before}"
            self._violate("ended twice", f"prompt {ordinal} was {first} and trained on in step {how}")

    def _read_step(self, step: Step, journal: Journal) -> None:
        for ticket in step.tickets:
            if ticket.sequence in self._sequences:
                self._violate("sequence", f"sequence {ticket.sequence} is twice in the groups of steps")
            if ticket.sequence >= 0:  # a compacted step has no sequences any more
                self._sequences.add(ticket.sequence)
            if ticket.ordinal in self._queued:
                self._violate("queued again", f"prompt {ticket.ordinal} is in step {step.step} and in the queue")
        if step.version is None:
            self._taken.update(ticket.ordinal for ticket in step.tickets)
            return
        for ticket in step.tickets:
            self._end(ticket.ordinal, step.step)
        assert self._base is not None
        before = 0 if step.step == 1 else self._versions.get(step.step - 1)
        if step.step == self._base.step + 1:
            before = self._base.version
        if before is not None:
            if step.version < before:
                self._violate("version", f"step {step.step} made version {step.version}, which is before {before}")
            if self._max_lag is not None:
                self._check_lags(step, journal, before, self._max_lag)
        self._versions[step.step] = step.version
        found = self._found
        found.step, found.version = max(found.step, step.step), max(found.version, step.version)

    def _check_lags(self, step: Step, journal: Journal, version: int, allowed: int) -> None:
        """`version`: the trainer's, when it trained `step`."""
        if step.min_version is not None:
            self._found.lags_checked += len(step.tickets)
            lags = {"a group": version - step.min_version}  # its oldest: at least one is stale
        else:
            found = journal.min_versions(step) or []
            self._found.lags_checked += len(found)
            tickets = zip(step.tickets, found, strict=False)
            lags = {f"prompt {ticket.ordinal}": version - oldest for ticket, oldest in tickets}
        for what, lag in lags.items():
            if lag > allowed:
                self._found.stale_trained += 1
                self._violate("stale", f"{what} lagged {lag} versions in step {step.step}, and {allowed} are allowed")

    # -- frontiers ----------------------------------------------------------------------------------------------------

    def compare(self, name: str, mark: CheckpointMark) -> None:
        """Compare a frontier with what is known about the steps up to it."""
        step, frontier = mark.step, mark.frontier
        covered = set(frontier.ended)

        def is_covered(ordinal: int) -> bool:
            return ordinal < frontier.low or ordinal in covered

        ended = frontier.low + len(covered)
        counted = frontier.trained + sum(frontier.abandoned.values())
        if ended != counted:
            self._violate("count", f"{name} has {ended} ended prompts, and counts {counted} trained or abandoned")
        # If the rows explain the frontier's counts, they are complete: any other ended prompt was lost.
        explained = sum(how <= step and is_covered(ordinal) for ordinal, how in self._ends.items())
        if self._base is not None and counted == explained:
            unknown = [one for one in chain(range(frontier.low), frontier.ended) if one not in self._ends]
            self._name_all("lost", unknown, f"has ended according to {name}, but was neither trained on nor abandoned")
            self._found.lost = max(self._found.lost, len(unknown))
        self._found.lost = max(self._found.lost, ended - counted)
        self._found.repeated = max(self._found.repeated, counted - ended)
        trained = [(ordinal, how) for ordinal, how in sorted(self._ends.items()) if how != ABANDONED]
        later = (ordinal for ordinal, how in trained if how > step and is_covered(ordinal))
        self._name_all("later", later, f"has ended according to {name}, but was trained on later")
        uncovered = (ordinal for ordinal, how in trained if how <= step and not is_covered(ordinal))
        self._name_all("uncovered", uncovered, f"was trained on before, but is open according to {name}")
        known = self._versions.get(step, mark.version)
        if known != mark.version:
            self._violate("version", f"{name} is of version {mark.version}, and the journal says {known}")
        if step > self._found.step:
            if self._base is not None:
                self._found.notes.append(
                    f"the journal ends at step {self._found.step}, before {name}: its tail was lost"
                )
            self._found.step, self._found.version = step, mark.version
        self._low = max(self._low, frontier.low)
        self._covered |= covered
        if self._base is None:
            self._found.abandoned = Counter(frontier.abandoned)

    # -- the result ---------------------------------------------------------------------------------------------------

    def _name_all(self, kind: str, ordinals: Iterable[int], what: str) -> None:
        for ordinal in ordinals:
            self._violate(kind, f"prompt {ordinal} {what}")

    def _violate(self, kind: str, text: str) -> None:
        self._violations.setdefault(kind, []).append(text)

    def _count_states(self) -> dict[str, int]:
        covered = [one for one in chain(range(self._low), self._covered) if one not in self._ends]
        states = dict.fromkeys(STATES, 0)
        states["abandoned"] = sum(how == ABANDONED for how in self._ends.values())
        states["trained"] = len(self._ends) - states["abandoned"]
        seen = {*self._ends}
        for state, ordinals in zip(STATES[2:-1], (covered, self._taken, self._queued, self._failed), strict=True):
            states[state] = len({*ordinals} - seen)
            seen.update(ordinals)
        states["open"] = max(seen, default=-1) + 1 - len(seen)
        return states

    def report(self, capacity: int | None) -> Audit:
        found = self._found
        found.states = states = self._count_states()
        alive = states["open"] + states["queued"] + states["taken"]
        if capacity is not None and alive > capacity:
            found.notes.append(
                f"{alive} prompts were started and have not ended, but only {capacity} can be alive at once. A run "
                "that went back some steps issues them again; any other run has lost them"
            )
        if self._max_lag is not None and found.lags_checked < states["trained"]:
            found.notes.append(
                f"the lag of {found.lags_checked} of {states['trained']} trained groups could be checked; others are "
                "gone"
            )
        for texts in self._violations.values():
            more = len(texts) - MOST_LISTED
            found.violations += [*texts[:MOST_LISTED], f"… and {more} more like this"] if more > 0 else texts
        if self._versions:
            found.recorded = min(self._versions), max(self._versions)
        return found
