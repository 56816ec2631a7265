"""Groups for trainers that pass rows one by one.

    join(uid, row) ──▶ GroupCollector: open group ──▶ as many rows as expected ───────────▶ Closed(whole)
                            │──▶ as many as a group may have, and quiet for settle_s ─────▶ Closed(whole)     due()
                            └──▶ no row for deadline_s ───────────────────────────────────▶ Closed(given up)  due()
    join(uid, row) within LATE_S of that ──▶ Closed(late): answered at once, with the rows that were there
    join(uid, row) after LATE_S ──▶ the uid is used again: a new group, which is given up after settle_s already

A length penalty needs its group's median, and a failed row needs its group's mean, so a row is answered with its group.
`freewheel.integrations.verl` uses it. This module does not import verl.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

LATE_S = 10.0
"""How long a group that was answered accepts more rows. verl fills a batch with copies of its first rows, so a group
may have a few too many. They come with their batch, and verl drops them. Rows that come later use the uid again, as the
next validation does with a dataset's own uids; no whole validation ends within these seconds."""


@dataclass(frozen=True)
class Closed(Generic[T]):
    """A group that waits no longer. Its last `unanswered` rows must be answered now."""

    key: Hashable
    rows: tuple[T, ...]
    unanswered: int
    expected: int
    """The size of the complete group."""
    whole: bool
    """All rows are there, so their median is the group's."""
    late: bool = False
    """The rows came after rows of this key had been answered, and do not form a new group."""


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


class GroupCollector(Generic[T]):
    """Every row that joins is answered once: with its whole group, or with the rows that came in time.

    `deadline_s` counts from the last row of a group, not from the first: a slow group is not a lost group. A row is
    never compared with a group that was answered more than `LATE_S` before it came. Pure: the clock is injected.
    """

    def __init__(self, *, deadline_s: float, settle_s: float, clock: Callable[[], float]) -> None:
        self.deadline_s = deadline_s
        self.settle_s = settle_s
        self._clock = clock
        self._open: dict[Hashable, _Open[T]] = {}
        self._past: OrderedDict[Hashable, _Past[T]] = OrderedDict()

    def join(self, key: Hashable, row: T, sizes: Sequence[int]) -> Closed[T] | None:
        """Add a row. `sizes`: how many rows its group may have; several if the caller cannot know which."""
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
        """Close and return the groups whose time is over."""
        now = self._clock()
        over = [key for key, group in self._open.items() if self._due_at(group) <= now]
        return [self._close(key, whole=_may_be_whole(self._open[key]), sure=False) for key in over]

    def next_due_at(self) -> float:
        """Return when `due` must be called next, on the given clock; infinity if no row waits."""
        return min(map(self._due_at, self._open.values()), default=math.inf)

    def _due_at(self, group: _Open[T]) -> float:
        # A uid that seems to be used again may be a copy that verl adds and drops: no run may wait long for that.
        return group.last_at + (self.settle_s if group.again or _may_be_whole(group) else self.deadline_s)

    def _close(self, key: Hashable, *, whole: bool, sure: bool) -> Closed[T]:
        group = self._open.pop(key)
        rows, expected = tuple(group.rows), max(group.sizes)
        if expected > 1:  # one row alone says nothing about another
            # If one more row arrives, the group was not whole after all: that row has no valid median.
            self._past[key] = _Past(rows, expected, whole and sure, self._clock())
            self._past.move_to_end(key)
        return Closed(key, rows, len(rows), len(rows) if whole else expected, whole, late=group.again and not whole)

    def _forget(self, now: float) -> None:
        """Forget past groups, oldest first: a dataset may have its own uids, and the next epoch uses them again."""
        while self._past:
            key, past = next(iter(self._past.items()))
            if past.closed_at + self.deadline_s > now:
                return
            del self._past[key]


def _may_be_whole(group: _Open[T]) -> bool:
    return len(group.rows) in group.sizes
