"""A part that died is started anew, later and later, until it has died too often without a step in between."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from freewheel.runtime.recovery import LONGEST_BACKOFF_S, Restarts

PARTS = ("queue", "trainer", "rollouter-0")


@given(
    max_restarts=st.integers(0, 6),
    backoff_s=st.floats(0, 100),
    deaths=st.lists(st.tuples(st.sampled_from(PARTS), st.integers(0, 2)), max_size=60),
)
def test_no_part_is_started_more_often_in_a_row_than_allowed_and_a_step_forgives(
    max_restarts: int, backoff_s: float, deaths: list[tuple[str, int]]
) -> None:
    """`deaths`: who, and how many steps were trained since the one before."""
    restarts = Restarts(max_restarts=max_restarts, backoff_s=backoff_s)
    step, in_a_row, waits = 0, dict.fromkeys(PARTS, 0), {part: [0.0] for part in PARTS}
    for part, trained in deaths:
        if trained:
            step += trained
            in_a_row, waits = dict.fromkeys(PARTS, 0), {part: [0.0] for part in PARTS}
        in_a_row[part] += 1
        wait_s = restarts.died(part, step=step)
        assert (wait_s is None) == (in_a_row[part] > max_restarts)
        if wait_s is not None:
            waits[part].append(wait_s)
    for found in waits.values():
        assert all(0 <= before <= after <= LONGEST_BACKOFF_S for before, after in pairwise(found))


def test_the_first_restart_comes_at_once_and_the_wait_doubles_up_to_its_limit() -> None:
    restarts = Restarts(max_restarts=9, backoff_s=1.0)
    waits = [restarts.died("queue", step=4) for _ in range(10)]
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, None]


def test_one_parts_deaths_are_not_counted_against_another() -> None:
    restarts = Restarts(max_restarts=1, backoff_s=1.0)
    assert [restarts.died(part, step=0) for part in ("queue", "sync", "queue")] == [0.0, 0.0, None]


def test_a_budget_of_thousands_is_counted_to_its_end() -> None:
    restarts = Restarts(max_restarts=5_000, backoff_s=1.0)
    waits = [restarts.died("sync", step=0) for _ in range(5_001)]
    assert waits[-2:] == [LONGEST_BACKOFF_S, None]
