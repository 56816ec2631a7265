"""Where the rows of a group meet that a trainer hands over one by one. Pure: no I/O, and the clock is given.

    join(uid, row) ──▶ open group ──▶ as many as expected ──────────────▶ Closed(whole)
                            │──▶ as many as a group may have, then quiet ─▶ Closed(whole)    due()
                            └──▶ nobody came for deadline_s ─────────────▶ Closed(given up)  due()
    join(uid, row) within LATE_S of that ──▶ Closed(late): answered at once, beside the rows that were there
    join(uid, row) after LATE_S ──▶ the uid is used again: a new group, which is given up after settle_s already

A length penalty needs its group's median, and a failed row its group's mean; so a row is answered with its group.
`freewheel.integrations.verl` is the caller.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

LATE_S = 10.0
"""How long a group that was answered takes in more rows. verl fills a batch up with copies of its first rows: a group
can have a few too many, they come with their batch, and verl throws them away again. What comes later is a uid that is
used again, as a dataset's own uids are in the next validation; no whole validation is over within these seconds."""


@dataclass(frozen=True)
class Closed(Generic[T]):
    """A group that waits no longer. Its last `unanswered` rows are to be answered now."""

    key: Hashable
    rows: tuple[T, ...]
    unanswered: int
    expected: int
    """The number of rows that would have been all."""
    whole: bool
    """All rows are there: a median over them is the group's."""
    late: bool = False
    """Came when rows of this key had been answered, and are no group of their own."""


@dataclass
class _Open(Generic[T]):
    last_at: float
    again: bool
    """Another group of this key was answered not long ago."""
    sizes: frozenset[int] = frozenset()
    rows: list[T] = field(default_factory=list)


@dataclass(frozen=True)
class _Past(Generic[T]):
    rows: tuple[T, ...]
    expected: int
    whole: bool
    closed_at: float


class Meeting(Generic[T]):
    """Every row that joins is answered once: with its whole group, or with those that came in time.

    `deadline_s` counts from the last row of a group to come, not from the first: a slow group is not a lost one. A row
    is never measured by a group that was answered more than `LATE_S` before it came.
    """

    def __init__(self, *, deadline_s: float, settle_s: float, clock: Callable[[], float]) -> None:
        self.deadline_s = deadline_s
        self.settle_s = settle_s
        self._clock = clock
        self._open: dict[Hashable, _Open[T]] = {}
        self._past: OrderedDict[Hashable, _Past[T]] = OrderedDict()

    def __len__(self) -> int:
        """Rows that wait."""
        return sum(len(group.rows) for group in self._open.values())

    def join(self, key: Hashable, row: T, sizes: Sequence[int]) -> Closed[T] | None:
        """A row comes. `sizes`: how many rows its group may have; several where the caller cannot know which."""
        now = self._clock()
        self._forget(now)
        past = self._past.get(key)
        if past is not None and now < past.closed_at + LATE_S:
            return Closed(key, (*past.rows, row), 1, past.expected, past.whole, late=True)
        group = self._open.setdefault(key, _Open(now, again=past is not None))
        group.rows.append(row)
        group.last_at = now
        group.sizes |= frozenset(sizes)
        return self._close(key, whole=True, sure=True) if len(group.rows) >= max(group.sizes) else None

    def due(self) -> list[Closed[T]]:
        """The groups whose time is over."""
        now = self._clock()
        over = [key for key, group in self._open.items() if self._due_at(group) <= now]
        return [self._close(key, whole=self._may_be_whole(self._open[key]), sure=False) for key in over]

    def next_due_at(self) -> float:
        """When `due` is to be asked next, on the given clock; infinite where nobody waits."""
        return min(map(self._due_at, self._open.values()), default=math.inf)

    @staticmethod
    def _may_be_whole(group: _Open[T]) -> bool:
        return len(group.rows) in group.sizes

    def _due_at(self, group: _Open[T]) -> float:
        # What seems to be a uid used again may be a copy that verl added and throws away: no run waits long for that.
        return group.last_at + (self.settle_s if group.again or self._may_be_whole(group) else self.deadline_s)

    def _close(self, key: Hashable, *, whole: bool, sure: bool) -> Closed[T]:
        group = self._open.pop(key)
        rows, expected = tuple(group.rows), max(group.sizes)
        if expected > 1:  # a row alone is no measure for another
            # A group that only seemed whole was not, if one more row comes: that row has no median to be measured by.
            self._past[key] = _Past(rows, expected, whole and sure, self._clock())
            self._past.move_to_end(key)
        return Closed(key, rows, len(rows), len(rows) if whole else expected, whole, late=group.again and not whole)

    def _forget(self, now: float) -> None:
        """A dataset may bring its own uids, and use them again in the next epoch. Oldest first."""
        while self._past:
            key, past = next(iter(self._past.items()))
            if past.closed_at + self.deadline_s > now:
                return
            del self._past[key]
