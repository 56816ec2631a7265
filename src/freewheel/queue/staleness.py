"""`StalenessPolicy`: which group may be generated, and which may be trained on, so that none lags too far. Pure.

    room ─▶ admit ─▶ open ─▶ finish ─▶ ready ─▶ select ─▶ taken ─▶ commit ─▶ held ─▶ publish ─▶ slot free
                      └────── drop ──────┴─────────────────┘ ─────────────────────────────────▶ slot free at once

With Q = groups per weight version (groups per step × steps per version), T the threshold and W the window:

- admission: at most (T + 1)·Q groups are alive. A trained group stays alive until every engine holds the version that
  it went into; a dropped one is released at once.
- selection: with h the oldest sequence not taken, only sequences below h + W may be taken.

**Bound.** A group's lag when it is trained is at most T + ⌈(W − 1) / Q⌉. Let it be admitted with sequence s while all
engines hold version u, and trained at version v. The (v − u)·Q groups of versions u+1 … v were taken before it. Each
was alive at that moment (at most (T + 1)·Q − 1 others are) or was admitted later; of the latter at most W − 1 can be
taken first, as h ≤ s until it is taken itself. So (v − u)·Q ≤ (T + 1)·Q − 1 + W − 1, and therefore
v − u ≤ T + ⌊(Q − 1 + W − 1) / Q⌋, which is the bound. It needs steps of exactly P groups: short ones would raise v with
fewer groups.

**After a restart** (`Standing`) it holds as before, for it speaks of what was alive at an admission and of the order of
sequences: groups keep theirs, later ones get higher ones, and what was trained holds its slot until it is known to be
published. Before anything is known of that (`published` None), nothing is admitted. Numbers that are skipped count in
the window: who was taken before is not known by number any more. A sequence that was given up and lives again is the
exception: it is for `Bounds.find_stale` to catch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The numbers that staleness is made of."""

    groups_per_step: int
    """P."""
    steps_per_version: int = 1
    threshold: int
    """T: versions that generation may run ahead."""
    window: int
    """W."""
    max_alive: int
    """A bound on groups alive beside that of the threshold (`max_queue_size`)."""
    max_lag_allowed: int
    """Checked again when a group is trained: after a crash one may be older than the arithmetic says."""
    min_batches: int = 1
    drain: bool = False
    """Weights change only when nothing is in progress."""
    total_groups: int | None = None
    """Groups that the run trains on. None: until the prompts end."""

    @property
    def groups_per_version(self) -> int:
        """Q."""
        return self.groups_per_step * self.steps_per_version

    @property
    def in_turns(self) -> bool:
        """Nothing is generated while a version is trained, whatever the mode is called."""
        return self.threshold == 0

    @property
    def capacity(self) -> int:
        return min((self.threshold + 1) * self.groups_per_version, self.max_alive)

    @property
    def most_ready(self) -> int:
        """Groups that can be ready at once, at worst: the earlier steps of an unfinished version hold their slots."""
        return self.capacity - self.groups_per_step * (self.steps_per_version - 1)

    def find_stale(self, min_versions: Sequence[int], version: int) -> list[int]:
        """The check at consumption: return the indices of groups that are too old to be trained on at `version`."""
        return [i for i, min_version in enumerate(min_versions) if version - min_version > self.max_lag_allowed]

    @property
    def max_lag(self) -> int:
        return self.threshold + -(-(self.window - 1) // self.groups_per_version)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a policy begins: at the start of a run, or where one that is gone had come to."""

    version: int = 0
    published: int | None = 0
    """A version that engines hold for certain. None: nobody has said it yet, and nothing is admitted before."""
    trained: int = 0
    steps_in_version: int = 0
    next_sequence: int = 0
    """Above every one that was ever given out."""
    untaken: Mapping[int, bool] = field(default_factory=dict)
    """Sequence → ready."""
    taken: Collection[int] = ()
    held: Mapping[int, int] = field(default_factory=dict)
    """Version that frees them → groups that were trained."""

    def __post_init__(self) -> None:
        known = {*self.untaken, *self.taken}
        assert len(known) == len(self.untaken) + len(self.taken), "a group is taken and not taken"
        assert max(known, default=-1) < self.next_sequence, "a sequence would be given out twice"
        published = self.published or 0
        assert published <= self.version, f"version {published} is not trained yet"
        assert all(published < frees <= self.version + 1 for frees in self.held), "a slot would never be freed"


class StalenessPolicy:
    """Keeps the bound of this module's head, and never stops a run that could go on."""

    def __init__(self, bounds: Bounds, standing: Standing | None = None) -> None:
        standing = standing or Standing()
        self.bounds = bounds
        self.version = standing.version
        """The trainer's."""
        self.published = standing.published or 0
        """What every engine in use holds, at least."""
        self._is_told = standing.published is not None
        self.trained = standing.trained
        self.exhausted = False
        """No prompt is left to be admitted. A re-issue may still set it back."""
        self._steps_in_version = standing.steps_in_version
        self._next_sequence = standing.next_sequence
        self._untaken = dict(sorted(standing.untaken.items()))  # sequence → ready; in the order of admission
        self._ready = {sequence for sequence, ready in self._untaken.items() if ready}
        self._taken = set(standing.taken)
        self._held = dict(standing.held)  # version that frees them → groups

    # -- admission ----------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> int:
        return len(self._untaken) + len(self._taken) + sum(self._held.values())

    @property
    def open(self) -> int:
        """Admitted and not finished."""
        return len(self._untaken) - len(self._ready)

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def room(self) -> int:
        """How many groups may be admitted now."""
        if not self._is_told:
            return 0
        room = self.bounds.capacity - self.alive + self._excess
        if self.bounds.total_groups is not None:
            room = min(room, self.bounds.total_groups - self.trained - len(self._untaken) - len(self._taken))
        return max(0, room)

    @property
    def _excess(self) -> int:
        """Groups that the version in progress has beyond what leaves room for its last step: it had more steps before a
        resume, and would never be complete. The bound holds: they are alive, and trained in a version that counts."""
        partial = self._held.get(self.version + 1, 0)
        return max(0, partial - (self.bounds.groups_per_version - self.bounds.groups_per_step))

    @property
    def next_sequence(self) -> int:
        """What `admit` would give."""
        return self._next_sequence

    def admit(self) -> int:
        """A new sequence number; a slot is held for it from now on."""
        assert self.room > 0, "admit without room"
        sequence = self._next_sequence
        self._next_sequence += 1
        self._untaken[sequence] = False
        return sequence

    def finish(self, sequence: int) -> None:
        """The group is generated and scored."""
        assert self._untaken.get(sequence) is False, f"{sequence} is not open"
        self._untaken[sequence] = True
        self._ready.add(sequence)

    def drop(self, sequence: int) -> None:
        """The group will not be trained on; its slot is free at once."""
        if self._untaken.pop(sequence, None) is None:
            self._taken.remove(sequence)
        self._ready.discard(sequence)

    # -- selection ----------------------------------------------------------------------------------------------------

    def select(self, count: int, *, starting: bool = True) -> list[int]:
        """The next `count` groups to train on, taken; none at all while fewer can be.

        `starting`: a step begins, so `min_batches` must be ready. Only the last step of a run may get fewer than asked.
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
        """The first groups, `wanted` at most, that may be taken if those before them are."""
        found: list[int] = []
        if len(self._ready) < wanted:
            return found
        head: int | None = None  # the oldest that would be left
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
        """No group will be admitted beyond those that are here."""
        # Below 0: what had been given up lives again after a restart.
        if self.bounds.total_groups is not None and self._unasked <= 0:
            return True
        return self.exhausted and self.open == 0

    @property
    def dry(self) -> bool:
        """`select` has nothing to give, and never will: all that is left is taken."""
        return self._ending and not self._untaken

    @property
    def _unasked(self) -> int:
        assert self.bounds.total_groups is not None
        return self.bounds.total_groups - self.trained - len(self._untaken) - len(self._taken)

    def untake(self, sequences: Iterable[int]) -> None:
        """Groups that were taken and not trained are ready again, in their old places."""
        for sequence in sequences:
            self._taken.remove(sequence)
            self._untaken[sequence] = True
            self._ready.add(sequence)
        self._untaken = dict(sorted(self._untaken.items()))

    # -- versions -----------------------------------------------------------------------------------------------------

    def lag(self, min_version: int) -> int:
        return self.version - min_version

    @property
    def version_after_step(self) -> int:
        """The version that the next commit leaves."""
        return self.version + (self._steps_in_version + 1 >= self.bounds.steps_per_version)

    @property
    def version_is_partial(self) -> bool:
        """Steps were trained that went into no version yet."""
        return self._steps_in_version > 0

    def commit(self, sequences: Iterable[int]) -> bool:
        """A step on these groups is done. True: it completed a weight version, which is now to be published."""
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
        """What was trained since the last version becomes one. By itself only at the end of a run."""
        if self._steps_in_version:
            self._steps_in_version = 0
            self.version += 1
        return self.version

    def publish(self, version: int) -> None:
        """Every engine in use holds `version`: the groups that went into it free their slots."""
        assert version <= self.version, f"version {version} is not trained yet"
        self.published = max(self.published, version)
        self._is_told = True
        for frees in [one for one in self._held if one <= version]:
            del self._held[frees]

    @property
    def settled(self) -> bool:
        """Nothing is in progress and nothing more would be admitted: a moment to change weights under `drain`."""
        return self.open == 0 and (self.room == 0 or self.exhausted)

    @property
    def finished(self) -> bool:
        """Nothing is left to train on, and nothing will come."""
        none_here = not self._untaken and not self._taken
        spent = self.bounds.total_groups is not None and self.trained >= self.bounds.total_groups
        return none_here and (spent or self.exhausted)
