"""`GroupCollector`: every row is answered once, with its group, and within the time limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.integrations.grouping import LATE_S, Closed, GroupCollector

DEADLINE_S = 60.0
SETTLE_S = 5.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_collector() -> tuple[GroupCollector[int], Clock]:
    clock = Clock()
    return GroupCollector(deadline_s=DEADLINE_S, settle_s=SETTLE_S, clock=clock), clock


def answered(closed: Closed[int]) -> tuple[int, ...]:
    return closed.rows[len(closed.rows) - closed.unanswered :]


Join = tuple[str, int, list[int]]


def events(*steps: Join | float) -> list[Closed[int]]:
    """Join rows and let seconds pass; return every group in the order in which it was closed."""
    collector, clock = make_collector()
    closed = []
    for step in steps:
        if isinstance(step, tuple):
            closed += [group for group in [collector.join(*step)] if group is not None]
        else:
            clock.now += step
            closed += collector.due()
    return closed


PAIR = [("u", 1, [2]), ("u", 2, [2])]
WHOLE_PAIR = Closed("u", (1, 2), 2, 2, whole=True)


CASES: dict[str, tuple[list[Join | float], list[Closed[int]]]] = {
    "the last row closes it": ([("u", row, [3]) for row in (1, 2, 3)], [Closed("u", (1, 2, 3), 3, 3, whole=True)]),
    "a group of one does not wait": ([("u", 1, [1])], [Closed("u", (1,), 1, 1, whole=True)]),
    "groups do not mix": ([("u", 1, [2]), ("v", 2, [2]), ("v", 3, [2])], [Closed("v", (2, 3), 2, 2, whole=True)]),
    "it waits until the deadline": ([("u", 1, [3]), DEADLINE_S - 1], []),
    "it is given up at the deadline": ([("u", 1, [3]), DEADLINE_S - 1, 1.0], [Closed("u", (1,), 1, 3, whole=False)]),
    "the deadline counts from the last row": ([("u", 1, [3]), DEADLINE_S - 1, ("u", 2, [3]), DEADLINE_S - 1], []),
    "a group that may be whole waits only for quiet": (
        [("validation", 1, [8, 1]), ("training", 2, [8, 1]), ("training", 3, [8, 1]), SETTLE_S],
        [Closed("validation", (1,), 1, 1, whole=True)],
    ),
    "an extra row is measured by the answered group": (
        [*PAIR, ("u", 3, [2])],
        [WHOLE_PAIR, Closed("u", (1, 2, 3), 1, 2, whole=True, late=True)],
    ),
    "a row after its group was given up has no median": (
        [("u", 1, [2]), DEADLINE_S, ("u", 2, [2])],
        [Closed("u", (1,), 1, 2, whole=False), Closed("u", (1, 2), 1, 2, whole=False, late=True)],
    ),
    "one more row shows that a group only seemed whole": (
        [("u", 1, [8, 1]), SETTLE_S, ("u", 2, [8, 1])],
        [Closed("u", (1,), 1, 1, whole=True), Closed("u", (1, 2), 1, 8, whole=False, late=True)],
    ),
    "the uid of a forgotten group is used again": (
        [*PAIR, DEADLINE_S, ("u", 3, [2]), ("u", 4, [2])],
        [WHOLE_PAIR, Closed("u", (3, 4), 2, 2, whole=True)],
    ),
    "a uid used again is not measured by the old group": (
        [*PAIR, LATE_S, ("u", 3, [2]), ("u", 4, [2]), ("u", 5, [2])],
        [WHOLE_PAIR, Closed("u", (3, 4), 2, 2, whole=True), Closed("u", (3, 4, 5), 1, 2, whole=True, late=True)],
    ),
    "a copy that only seems a new group waits briefly": (
        [*PAIR, LATE_S, ("u", 3, [2]), SETTLE_S],
        [WHOLE_PAIR, Closed("u", (3,), 1, 2, whole=False, late=True)],
    ),
    "a group of one does not measure the next": (
        [("u", 1, [1]), ("u", 2, [1])],
        [Closed("u", (1,), 1, 1, whole=True), Closed("u", (2,), 1, 1, whole=True)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_group_closes_when_it_is_complete_or_its_time_is_over(case: str) -> None:
    steps, closed = CASES[case]
    assert events(*steps) == closed


def test_a_past_group_is_forgotten_by_the_time_of_the_uids_last_group() -> None:
    again = [step for name in ("u", "v", "u") for step in ((name, 1, [2]), (name, 2, [2]), DEADLINE_S / 2)]
    closed = events(*again, ("v", 3, [2]), ("u", 3, [2]), SETTLE_S)  # v is forgotten, and u is not
    assert [group.key for group in closed[3:]] == ["u"]


Steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 4), st.sampled_from([(1,), (2,), (4,), (4, 1), (4, 2)])),
        st.tuples(st.just("wait"), st.floats(0, 2 * DEADLINE_S), st.none()),
    ),
    max_size=60,
)


@given(Steps)
def test_each_row_is_answered_exactly_once_and_in_time(steps: list[tuple[object, ...]]) -> None:
    collector, clock = make_collector()
    sizes_of: dict[int, set[int]] = {}
    came: dict[int, float] = {}
    done: list[int] = []
    done_at: dict[int, float] = {}

    def take(closed: Closed[int]) -> None:
        earlier = closed.rows[: -closed.unanswered]
        assert all(clock.now - done_at[row] < LATE_S for row in earlier), "measured by a group of long ago"
        assert closed.late or not earlier
        done.extend(answered(closed))
        done_at.update(dict.fromkeys(answered(closed), clock.now))
        assert len(closed.rows) >= closed.unanswered >= 1
        if closed.whole and not closed.late:
            assert len(closed.rows) in sizes_of[closed.key] and closed.expected == len(closed.rows)
        if not closed.whole and not closed.late:
            assert len(closed.rows) < closed.expected

    for what, value, sizes in steps:
        if what == "join":
            row = len(came)
            came[row] = clock.now
            sizes_of.setdefault(value, set()).update(sizes)
            closed = collector.join(value, row, sizes)
            if closed is not None:
                take(closed)
        else:
            # Call `due` whenever something is due, as GroupScorer does.
            until = clock.now + value
            while collector.next_due_at() <= until:
                clock.now = max(clock.now, collector.next_due_at())
                for closed in collector.due():
                    take(closed)
            clock.now = until
    while collector.next_due_at() < math.inf:
        clock.now = collector.next_due_at()
        for closed in collector.due():
            take(closed)
    assert sorted(done) == sorted(came)


@given(
    gap_s=st.floats(LATE_S, 3 * DEADLINE_S),
    size=st.integers(2, 8),
    extra=st.integers(0, 8),
    pauses=st.lists(st.floats(0, 0.9 * SETTLE_S), min_size=8, max_size=8),
)
def test_a_second_validation_is_a_separate_group_even_if_copies_filled_up_the_first(
    gap_s: float, size: int, extra: int, pauses: list[float]
) -> None:
    collector, clock = make_collector()
    for row in range(size + extra):
        collector.join("u", row, [size])
    clock.now += gap_s
    again = range(100, 100 + size)
    closed: Closed[int] | None = None
    for row, pause_s in zip(again, pauses, strict=False):
        assert closed is None
        closed = collector.join("u", row, [size])
        clock.now += pause_s
        assert collector.due() == []
    assert closed == Closed("u", tuple(again), size, size, whole=True)
