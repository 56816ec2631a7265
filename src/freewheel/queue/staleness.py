"""`StalenessPolicy`: which groups may be generated and which may be trained on, so that none lags too far. Pure.

    room ─▶ admit ─▶ open ─▶ finish ─▶ ready ─▶ select ─▶ taken ─▶ commit ─▶ held ─▶ publish ─▶ slot free
                      └────── drop ──────┴─────────────────┘ ─────────────────────────────────▶ slot free at once

With Q = groups per weight version (groups per step × steps per version), T the threshold and W the window:

- admission: at most (T + 1)·Q groups are alive. A trained group stays alive until every engine holds the version that
  it went into. A dropped group is released at once.
- selection: with h the oldest sequence that is not taken, only sequences below h + W may be taken.

**Bound.** A group's lag when it is trained is at most T + ⌈(W − 1) / Q⌉. Proof: let the group be admitted with sequence
s while all engines hold version u, and trained at version v. The (v − u)·Q groups of versions u+1 … v were taken before
it. Each of them was alive at the admission or was admitted later. At most (T + 1)·Q − 1 others were alive then. Of the
later ones at most W − 1 can be taken first, because h ≤ s until the group itself is taken. So (v − u)·Q ≤ (T + 1)·Q − 1
+ W − 1, and therefore v − u ≤ T + ⌊(Q − 1 + W − 1) / Q⌋, which is the bound. The proof needs steps of exactly P groups:
shorter ones would raise v with fewer groups.

**After a restart** (`PolicyState`) the bound still holds, because it only depends on the groups alive at an admission
and on the order of sequences. Groups keep their sequences, later ones get higher ones, and a trained group holds its
slot until its version is known to be published. While that is unknown (`published` None), nothing is admitted. Skipped
numbers count in the window, because the restored policy does not know which sequences were taken before. One case can
exceed the bound: a sequence that was given up and is alive again after a restart. `Bounds.find_stale` catches it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The limits that decide about staleness."""

    groups_per_step: int
    """P: groups that a step trains on."""
    steps_per_version: int = 1
    threshold: int
    """T: versions that generation may run ahead of training."""
    window: int
    """W: the selection window, in groups."""
    max_alive: int
    """A second bound on groups alive (`max_queue_size`)."""
    max_lag_allowed: int
    """The largest lag a group may have when it is trained. After a crash a group may exceed the bound."""
    min_batches: int = 1
    drain: bool = False
    """Weights change only when nothing is in progress."""
    total_groups: int | None = None
    """Groups that the run trains on. None: as many as there are prompts."""

    @property
    def groups_per_version(self) -> int:
        """Q: groups per weight version."""
        return self.groups_per_step * self.steps_per_version

    @property
    def in_turns(self) -> bool:
        """Whether generation and training take turns (T = 0), in any mode."""
        return self.threshold == 0

    @property
    def capacity(self) -> int:
        return min((self.threshold + 1) * self.groups_per_version, self.max_alive)

    @property
    def most_ready(self) -> int:
        """Most groups that can be ready at once. Earlier steps of an unfinished version still hold slots, so these are
        subtracted."""
        return self.capacity - self.groups_per_step * (self.steps_per_version - 1)

    def find_stale(self, min_versions: Sequence[int], version: int) -> list[int]:
        """The check at consumption: return the indices of groups too old to be trained on at `version`."""
        return [i for i, min_version in enumerate(min_versions) if version - min_version > self.max_lag_allowed]

    @property
    def max_lag(self) -> int:
        return self.threshold + -(-(self.window - 1) // self.groups_per_version)


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """The state from which a policy starts: at the start of a run, or after a restart."""

    version: int = 0
    published: int | None = 0
    """A version that all engines hold. None: not known yet, and nothing is admitted before it is."""
    trained: int = 0
    steps_in_version: int = 0
    next_sequence: int = 0
    """A number above every sequence that was ever given out."""
    untaken: Mapping[int, bool] = field(default_factory=dict)
    """Groups that are not taken: sequence → whether it is ready."""
    taken: Collection[int] = ()
    held: Mapping[int, int] = field(default_factory=dict)
    """Version that frees the slots → trained groups."""

    def __post_init__(self) -> None:
        known = {*self.untaken, *self.taken}
        assert len(known) == len(self.untaken) + len(self.taken), "a group is taken and not taken"
        assert max(known, default=-1) < self.next_sequence, "a sequence would be given out twice"
        published = self.published or 0
        assert published <= self.version, f"version {published} is not trained yet"
        assert all(published < frees <= self.version + 1 for frees in self.held), "a slot would never be freed"


class StalenessPolicy:
    """Keeps the bound that the module docstring proves, and never stops a run that could continue."""

    def __init__(self, bounds: Bounds, start: PolicyState | None = None) -> None:
        start = start or PolicyState()
        self.bounds = bounds
        self.version = start.version
        """The trainer's version."""
        self.published = start.published or 0
        """Every engine in use holds at least this version."""
        self._knows_published = start.published is not None
        self.trained = start.trained
        self.exhausted = False
        """No prompt is left to be admitted. A prompt that is issued again resets this."""
        self._steps_in_version = start.steps_in_version
        self.next_sequence = start.next_sequence
        """The sequence that `admit` would return."""
        self._untaken = dict(sorted(start.untaken.items()))  # sequence → ready, in the order of admission
        self._ready = {sequence for sequence, ready in self._untaken.items() if ready}
        self._taken = set(start.taken)
        self._held = dict(start.held)  # version that frees their slots → groups

    # -- admission ----------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> int:
        return len(self._untaken) + len(self._taken) + sum(self._held.values())

    @property
    def open(self) -> int:
        """Groups that are admitted and not finished."""
        return len(self._untaken) - len(self._ready)

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def room(self) -> int:
        """Number of groups that may be admitted now."""
        if not self._knows_published:
            return 0
        room = self.bounds.capacity - self.alive + self._excess
        if self.bounds.total_groups is not None:
            room = min(room, self._left_to_admit)
        return max(0, room)

    @property
    def _excess(self) -> int:
        """Extra groups to admit after a resume. The version in progress may then have more steps than usual. Its
        trained groups leave too little room for the next step, so without these it would never complete. The bound
        still holds: the groups are alive, and trained in a version that counts."""
        partial = self._held.get(self.version + 1, 0)
        return max(0, partial - (self.bounds.groups_per_version - self.bounds.groups_per_step))

    def admit(self) -> int:
        """Return a new sequence number, which holds a slot from now on."""
        assert self.room > 0, "admit without room"
        sequence = self.next_sequence
        self.next_sequence += 1
        self._untaken[sequence] = False
        return sequence

    def finish(self, sequence: int) -> None:
        """The group is generated and scored."""
        assert self._untaken.get(sequence) is False, f"{sequence} is not open"
        self._untaken[sequence] = True
        self._ready.add(sequence)

    def drop(self, sequence: int) -> None:
        """The group will not be trained: free its slot at once."""
        if self._untaken.pop(sequence, None) is None:
            self._taken.remove(sequence)
        self._ready.discard(sequence)

    # -- selection ----------------------------------------------------------------------------------------------------

    def select(self, count: int, *, starting: bool = True) -> list[int]:
        """Take the next `count` groups to train on, or none while fewer can be taken.

        `starting`: this starts a step, so `min_batches` batches must be ready. Only the last step of a run may get
        fewer groups.
        """
        left = len(self._untaken) if self._ending else None
        wanted = count * self.bounds.min_batches if starting else count
        if left is not None:
            wanted, count = min(wanted, left), min(count, left)
        eligible = self._eligible(wanted)
        if count == 0 or len(eligible) < wanted:
            return []
        chosen = eligible[:count]
        for sequence in chosen:
            del self._untaken[sequence]
            self._ready.remove(sequence)
            self._taken.add(sequence)
        return chosen

    def _eligible(self, wanted: int) -> list[int]:
        """Return up to `wanted` groups, oldest first. Each may be taken once those before it are taken."""
        found: list[int] = []
        if len(self._ready) < wanted:
            return found
        head: int | None = None  # the oldest group that would be left
        for sequence, ready in self._untaken.items():
            if len(found) == wanted or (head is not None and sequence >= head + self.bounds.window):
                break
            if ready:
                found.append(sequence)
            elif head is None:
                head = sequence
        return found

    @property
    def _ending(self) -> bool:
        """No more groups will be admitted."""
        # `_left_to_admit` is negative if a group that was given up is alive again after a restart.
        return self.exhausted or (self.bounds.total_groups is not None and self._left_to_admit <= 0)

    @property
    def dry(self) -> bool:
        """`select` will never return a group again: all that are left are taken."""
        return self._ending and not self._untaken

    @property
    def _left_to_admit(self) -> int:
        assert self.bounds.total_groups is not None
        return self.bounds.total_groups - self.trained - len(self._untaken) - len(self._taken)

    def untake(self, sequences: Iterable[int]) -> None:
        """Make taken groups that were not trained ready again, in their old places."""
        for sequence in sequences:
            self._taken.remove(sequence)
            self._untaken[sequence] = True
            self._ready.add(sequence)
        self._untaken = dict(sorted(self._untaken.items()))

    # -- versions -----------------------------------------------------------------------------------------------------

    @property
    def version_after_step(self) -> int:
        """The version after the next commit."""
        return self.version + (self._steps_in_version + 1 >= self.bounds.steps_per_version)

    @property
    def version_is_partial(self) -> bool:
        """Steps were trained since the last version."""
        return self._steps_in_version > 0

    def commit(self, sequences: Iterable[int]) -> bool:
        """The step on these groups is done. Returns whether it completed a weight version, to be published now."""
        done = list(sequences)
        self._taken.difference_update(done)
        self.trained += len(done)
        frees = self.version + 1
        self._held[frees] = self._held.get(frees, 0) + len(done)
        self._steps_in_version += 1
        if self._steps_in_version < self.bounds.steps_per_version:
            return False
        self.complete_version()
        return True

    def complete_version(self) -> int:
        """Make a version of the steps since the last one. Only the end of a run calls this directly."""
        if self._steps_in_version:
            self._steps_in_version = 0
            self.version += 1
        return self.version

    def publish(self, version: int) -> None:
        """`ParameterSynchronizer` has published `version`: free the slots of the groups that went into it."""
        assert version <= self.version, f"version {version} is not trained yet"
        self.published = max(self.published, version)
        self._knows_published = True
        for frees in [one for one in self._held if one <= version]:
            del self._held[frees]

    @property
    def settled(self) -> bool:
        """Nothing is in progress and nothing more would be admitted: with `drain`, weights may change now."""
        return self.open == 0 and (self.room == 0 or self.exhausted)

    @property
    def finished(self) -> bool:
        """Nothing is left to train on, and no group will come."""
        none_here = not self._untaken and not self._taken
        spent = self.bounds.total_groups is not None and self.trained >= self.bounds.total_groups
        return none_here and (spent or self.exhausted)
