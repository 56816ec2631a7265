"""`Steps`: which groups each step is made of, from its selection until it is committed. Used by `MessageQueue`.

    filled ─▶ select ─▶ composed ─▶ the journal is told ─▶ given to the trainer ─▶ committing ─▶ pop
                 ▲          └─ drop (stale): groups are missing ─┐
                 └───────────────────────────────────────────────┘        give_back ─▶ ready again

Steps are composed in order, each when all before it have their groups: a later one must not get the older ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from freewheel.data.group import Ticket
from freewheel.queue.journal import Event, GivenBack, Step, Took
from freewheel.queue.recording import Recording, Written
from freewheel.queue.staleness import StalenessPolicy


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
