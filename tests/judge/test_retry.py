"""When to ask again: the arithmetic of back-off and of the retry budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freewheel.judge.retry import (
    BASE_BACKOFF_S,
    MAX_BACKOFF_S,
    RETRY_AFTER_SPREAD,
    RetryBudget,
    backoff_s,
)


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_back_off_without_a_word_from_the_server_is_full_jitter_under_a_cap(failures: int, luck: float) -> None:
    wait_s = backoff_s(failures, None, lambda: luck)
    assert 0 <= wait_s <= min(MAX_BACKOFF_S, BASE_BACKOFF_S * 2.0 ** min(failures - 1, 30))


@given(st.integers(1, 100), st.floats(0.001, 1e6), st.floats(0, 1, exclude_max=True))
def test_a_wait_that_the_server_asks_for_is_never_cut_short(failures: int, asked_s: float, luck: float) -> None:
    wait_s = backoff_s(failures, asked_s, lambda: luck)
    assert asked_s <= wait_s <= asked_s * (1 + RETRY_AFTER_SPREAD)


def test_back_off_doubles_with_each_failure_also_after_a_retry_after_of_zero() -> None:
    assert backoff_s(3, 0.0, lambda: 1.0) == BASE_BACKOFF_S * 4


def spent_budget(now: float = 0.0) -> RetryBudget:
    budget = RetryBudget()
    for _ in range(int(RetryBudget.LEAST_CAPACITY)):
        assert budget.take(now)
    return budget


def test_the_budget_lets_a_burst_through_and_then_a_trickle() -> None:
    budget = spent_budget()
    assert not budget.take(0.0)
    assert not budget.take(0.5 / RetryBudget.TRICKLE_PER_S)
    assert budget.take(1.01 / RetryBudget.TRICKLE_PER_S)
    assert not budget.take(1.02 / RetryBudget.TRICKLE_PER_S)
    assert not budget.take(0.0), "a clock that runs back gives nothing"


def test_replies_pay_for_retries() -> None:
    budget = spent_budget()
    for _ in range(2):
        budget.earn()
    assert budget.take(0.0)
    assert not budget.take(0.0)


def test_a_burst_of_a_whole_window_can_be_paid_for() -> None:
    budget = RetryBudget()
    budget.allow(400)
    assert all(budget.take(0.0) for _ in range(400))
    assert not budget.take(0.0)
    budget.allow(400)
    assert not budget.take(0.0), "a limit that stays gives nothing"


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=300))
def test_an_outage_never_gets_more_retries_than_share_trickle_and_capacity(events: list[tuple[bool, float]]) -> None:
    budget, now, replies, taken = RetryBudget(), 0.0, 0, 0
    for reply, pause_s in events:
        now += pause_s
        if reply:
            budget.earn()
            replies += 1
        else:
            taken += budget.take(now)
    allowed = RetryBudget.LEAST_CAPACITY + replies * RetryBudget.SHARE + now * RetryBudget.TRICKLE_PER_S
    assert taken <= allowed + 1e-6
