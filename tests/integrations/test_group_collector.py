"""The meeting of a group's rows: nobody is lost, nobody is answered twice, nobody waits longer than was said."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from freewheel.integrations.grouping import LATE_S, Closed, GroupCollector

DEADLINE_S = 60.0
SETTLE_S = 5.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def meeting() -> tuple[GroupCollector[int], Clock]:
    clock = Clock()
    return GroupCollector(deadline_s=DEADLINE_S, settle_s=SETTLE_S, clock=clock), clock


def answered(closed: Closed[int]) -> tuple[int, ...]:
    return closed.rows[len(closed.rows) - closed.unanswered :]


def test_a_group_is_answered_when_its_last_row_comes() -> None:
    met, _ = meeting()
    assert met.join("u", 1, [3]) is None
    assert met.join("u", 2, [3]) is None
    assert met.join("u", 3, [3]) == Closed("u", (1, 2, 3), 3, 3, whole=True)
    assert len(met) == 0


def test_a_group_of_one_never_waits() -> None:
    met, _ = meeting()
    assert met.join("u", 1, [1]) == Closed("u", (1,), 1, 1, whole=True)


def test_groups_do_not_mix() -> None:
    met, _ = meeting()
    met.join("u", 1, [2])
    met.join("v", 2, [2])
    closed = met.join("v", 3, [2])
    assert closed is not None and closed.rows == (2, 3)


def test_a_group_that_never_completes_is_given_up_after_the_deadline() -> None:
    met, clock = meeting()
    met.join("u", 1, [3])
    clock.now += DEADLINE_S - 1
    assert met.due() == []
    clock.now += 1
    assert met.due() == [Closed("u", (1,), 1, 3, whole=False)]


def test_the_deadline_counts_from_the_last_row_that_came() -> None:
    met, clock = meeting()
    met.join("u", 1, [3])
    clock.now += DEADLINE_S - 1
    met.join("u", 2, [3])
    clock.now += DEADLINE_S - 1
    assert met.due() == []


def test_a_group_that_may_be_whole_waits_only_for_quiet() -> None:
    met, clock = meeting()
    met.join("validation", 1, [8, 1])
    met.join("training", 2, [8, 1])
    met.join("training", 3, [8, 1])
    clock.now += SETTLE_S
    assert met.due() == [Closed("validation", (1,), 1, 1, whole=True)]


def test_a_row_too_many_is_measured_by_the_group_that_was_answered() -> None:
    met, _ = meeting()
    met.join("u", 1, [2])
    met.join("u", 2, [2])
    assert met.join("u", 3, [2]) == Closed("u", (1, 2, 3), 1, 2, whole=True, late=True)


def test_a_row_that_comes_after_its_group_was_given_up_has_no_median() -> None:
    met, clock = meeting()
    met.join("u", 1, [2])
    clock.now += DEADLINE_S
    met.due()
    closed = met.join("u", 2, [2])
    assert closed is not None and closed.late and not closed.whole and answered(closed) == (2,)


def test_a_row_that_shows_that_a_group_only_seemed_whole_has_no_median() -> None:
    met, clock = meeting()
    met.join("u", 1, [8, 1])
    clock.now += SETTLE_S
    met.due()
    closed = met.join("u", 2, [8, 1])
    assert closed is not None and closed.late and not closed.whole


def test_an_old_group_is_forgotten_and_its_uid_may_be_used_again() -> None:
    met, clock = meeting()
    met.join("u", 1, [2])
    met.join("u", 2, [2])
    clock.now += DEADLINE_S
    assert met.join("u", 3, [2]) is None
    assert met.join("u", 4, [2]) == Closed("u", (3, 4), 2, 2, whole=True)


def test_a_uid_that_is_used_again_is_a_group_of_its_own_and_not_measured_by_the_old_one() -> None:
    met, clock = meeting()
    met.join("u", 1, [2])
    met.join("u", 2, [2])
    clock.now += LATE_S
    assert met.join("u", 3, [2]) is None
    assert met.join("u", 4, [2]) == Closed("u", (3, 4), 2, 2, whole=True)
    assert met.join("u", 5, [2]) == Closed("u", (3, 4, 5), 1, 2, whole=True, late=True)


def test_what_only_seems_to_be_a_uid_used_again_does_not_hold_up_a_run_for_long() -> None:
    met, clock = meeting()
    for row in range(3):
        met.join("u", row, [3])
    clock.now += LATE_S
    met.join("u", 3, [3])
    clock.now += SETTLE_S
    assert met.due() == [Closed("u", (3,), 1, 3, whole=False, late=True)]


def test_the_past_of_a_uid_that_is_used_again_counts_from_its_last_group() -> None:
    met, clock = meeting()
    for name in ("u", "v", "u"):
        met.join(name, 1, [2])
        met.join(name, 2, [2])
        clock.now += DEADLINE_S / 2
    assert met.join("v", 3, [2]) is None  # forgotten, though a group that is older in name is not
    met.join("u", 3, [2])
    clock.now += SETTLE_S
    assert [closed.key for closed in met.due()] == ["u"]


def test_a_group_of_one_is_no_measure_for_the_next_of_its_uid() -> None:
    met, _ = meeting()
    met.join("u", 1, [1])
    assert met.join("u", 2, [1]) == Closed("u", (2,), 1, 1, whole=True)


Steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 4), st.sampled_from([(1,), (2,), (4,), (4, 1), (4, 2)])),
        st.tuples(st.just("wait"), st.floats(0, 2 * DEADLINE_S), st.none()),
    ),
    max_size=60,
)


@given(Steps)
def test_whatever_comes_when_each_row_is_answered_exactly_once_and_in_time(steps: list[tuple[object, ...]]) -> None:
    met, clock = meeting()
    sizes_of: dict[int, set[int]] = {}
    came: dict[int, float] = {}
    done: list[int] = []
    done_at: dict[int, float] = {}

    def take(closed: Closed[int]) -> None:
        beside = closed.rows[: -closed.unanswered]
        assert all(clock.now - done_at[row] < LATE_S for row in beside), "measured by a group of long ago"
        assert closed.late or not beside
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
            closed = met.join(value, row, sizes)
            if closed is not None:
                take(closed)
        else:
            # As its caller does: `due` is asked whenever something is.
            until = clock.now + value
            while met.next_due_at() <= until:
                clock.now = max(clock.now, met.next_due_at())
                for closed in met.due():
                    take(closed)
            clock.now = until
        assert len(met) == len(came) - len(done)
    while met.next_due_at() < math.inf:
        clock.now = met.next_due_at()
        for closed in met.due():
            take(closed)
    assert sorted(done) == sorted(came)


@given(
    gap_s=st.floats(LATE_S, 3 * DEADLINE_S),
    size=st.integers(2, 8),
    extra=st.integers(0, 8),
    pauses=st.lists(st.floats(0, 0.9 * SETTLE_S), min_size=8, max_size=8),
)
def test_a_second_validation_is_answered_as_the_first_was_whatever_copies_filled_it_up(
    gap_s: float, size: int, extra: int, pauses: list[float]
) -> None:
    met, clock = meeting()
    for row in range(size + extra):
        met.join("u", row, [size])
    clock.now += gap_s
    again = range(100, 100 + size)
    closed: Closed[int] | None = None
    for row, pause_s in zip(again, pauses, strict=False):
        assert closed is None
        closed = met.join("u", row, [size])
        clock.now += pause_s
        assert met.due() == []
    assert closed == Closed("u", tuple(again), size, size, whole=True)
