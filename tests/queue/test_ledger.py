"""Every prompt ends exactly once: over any order of failures and ends, and over any number of resumes."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.queue.ledger import BUDGETS, Frontier, Kind, Ledger, data_failure, infra_failure

EVENTS = ("issue", "issue", "train", "infra", "data", "retry", "abandon", "resume")


class Book:
    """A ledger, and what must be true of it."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.ledger = Ledger(total=total)
        self.live: list[int] = []
        self.attempts: dict[int, int] = {}
        self.ends: list[int] = []

    def issue(self) -> bool:
        exhausted = self.ledger.exhausted
        issued = self.ledger.issue()
        assert (issued is None) == exhausted
        if issued is not None:
            ordinal, before = issued
            assert ordinal not in self.ends and ordinal not in self.live
            assert before == self.attempts.get(ordinal, 0)
            self.attempts[ordinal] = before + 1
            self.live.append(ordinal)
        return issued is not None

    def end(self, what: str, choice: int) -> None:
        if not self.live:
            return
        ordinal = self.live.pop(choice % len(self.live))
        if what == "train":
            self.ledger.train([ordinal])
            self.ends.append(ordinal)
        elif what == "abandon":
            self.ledger.abandon(ordinal, "zero_variance")
            self.ends.append(ordinal)
        elif what == "retry":
            self.ledger.retry(ordinal, "stale")
        else:
            failure = infra_failure("engine", "died") if what == "infra" else data_failure("reward", "raised")
            if not self.ledger.fail(ordinal, failure):
                self.ends.append(ordinal)

    def resume(self) -> None:
        """From what a checkpoint kept: all that had not ended is attempted anew."""
        kept = msgspec.msgpack.decode(msgspec.msgpack.encode(self.ledger.frontier()), type=Frontier)
        self.ledger = Ledger(total=self.total, frontier=kept)
        assert self.ledger.frontier() == kept
        self.live, self.attempts = [], {}

    def play(self, what: str, choice: int) -> None:
        if what == "issue":
            self.issue()
        elif what == "resume":
            self.resume()
        else:
            self.end(what, choice)
        frontier = self.ledger.frontier()
        assert sorted([*range(frontier.low), *frontier.ended]) == sorted(self.ends)
        assert frontier.trained + sum(frontier.abandoned.values()) == len(self.ends)


@given(
    total=st.none() | st.integers(0, 12),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 99)), max_size=120),
)
@settings(max_examples=300, deadline=None)
def test_every_prompt_ends_once_whatever_happens_and_however_often_a_run_is_resumed(
    total: int | None, events: list[tuple[str, int]]
) -> None:
    book = Book(total)
    for what, choice in events:
        book.play(what, choice)
    while total is not None and (book.issue() or book.live):
        book.end("train", 0)
    highest = max(book.ends, default=-1)
    missing = set(range(highest + 1)) - set(book.ends)
    if total is None:
        while missing:  # an endless stream comes back to each of them before it goes on
            book.issue()
            missing -= set(book.live)
    assert not missing
    assert len(set(book.ends)) == len(book.ends)
    assert total is None or sorted(book.ends) == list(range(total))


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_resumed_after_every_end_trains_each_prompt_once(seed: int) -> None:
    rng = random.Random(seed)
    book = Book(40)
    while not (book.ledger.exhausted and not book.live):
        for _ in range(rng.randrange(1, 8)):
            book.issue()
        book.end("train", rng.randrange(99))
        book.resume()
    assert sorted(book.ends) == list(range(40))


def test_what_had_ended_before_a_resume_is_not_issued_once_the_frontier_has_passed_it() -> None:
    ledger = Ledger(total=8, frontier=Frontier(low=3, ended=(5,), trained=4))
    assert [ledger.issue(), ledger.issue()] == [(3, 0), (4, 0)]
    ledger.train([3, 4])
    assert ledger.frontier().low == 6
    assert ledger.issue() == (6, 0)


def test_prompts_are_issued_in_order_and_those_to_be_repeated_first() -> None:
    ledger = Ledger()
    assert [ledger.issue() for _ in range(3)] == [(0, 0), (1, 0), (2, 0)]
    ledger.retry(2, "stale")
    ledger.retry(1, "stale")
    assert [ledger.issue() for _ in range(3)] == [(1, 1), (2, 1), (3, 0)]


@pytest.mark.parametrize("kind", list(Kind))
def test_a_prompt_is_abandoned_when_its_budget_is_spent(kind: Kind) -> None:
    ledger = Ledger(total=1)
    failure = infra_failure("engine", "died") if kind is Kind.INFRA else data_failure("reward", "raised")
    again = []
    while not ledger.exhausted:
        ledger.issue()
        again.append(ledger.fail(0, failure))
    assert again == [True] * (BUDGETS[kind] - 1) + [False]
    assert ledger.abandoned == {failure.reason: 1}
    assert ledger.failures == {failure.reason: BUDGETS[kind]}


def test_the_two_kinds_of_failure_have_budgets_of_their_own() -> None:
    ledger = Ledger()
    failures = [infra_failure("engine", "")] * (BUDGETS[Kind.INFRA] - 1) + [data_failure("prompt", "")] * (
        BUDGETS[Kind.DATA] - 1
    )
    for failure in failures:
        ledger.issue()
        assert ledger.fail(0, failure)


def test_a_stale_or_lost_attempt_costs_nothing() -> None:
    ledger = Ledger()
    for _ in range(100):
        assert ledger.issue() is not None
        ledger.retry(0, "stale")
    assert ledger.failures == {"stale": 100}
    assert not ledger.abandoned


def test_a_prompt_cannot_end_twice_nor_without_having_been_issued() -> None:
    ledger = Ledger()
    ledger.issue()
    ledger.train([0])
    with pytest.raises(AssertionError, match="ordinal 0 has ended"):
        ledger.train([0])
    with pytest.raises(AssertionError, match="ordinal 1 has ended, or was not issued"):
        ledger.abandon(1, "zero_variance")
    ledger.issue()
    ledger.retry(1, "stale")
    with pytest.raises(AssertionError, match="ordinal 1"):
        ledger.train([1])


def test_a_stream_with_a_prompt_that_is_to_be_repeated_is_not_exhausted() -> None:
    ledger = Ledger(total=1)
    ledger.issue()
    assert ledger.exhausted
    ledger.retry(0, "stale")
    assert not ledger.exhausted


# -- after a restart --------------------------------------------------------------------------------------------------


def test_what_lives_on_after_a_restart_is_not_issued_again() -> None:
    ledger = Ledger(total=5, frontier=Frontier(low=1, trained=1))
    ledger.reopen(2, attempts=1, failed={}, live=True)
    ledger.reopen(3, attempts=2, failed={Kind.DATA: 1}, live=False)
    assert [ledger.issue() for _ in range(3)] == [(3, 2), (1, 0), (4, 0)]
    assert ledger.issue() is None and ledger.exhausted
    ledger.train([1, 2, 4])
    assert not ledger.fail(3, data_failure("reward", "raised"))  # the failure before the restart counts
    assert ledger.frontier() == Frontier(low=5, trained=4, abandoned={"reward": 1})


def test_what_has_ended_or_is_open_or_has_no_budget_left_cannot_be_opened_again() -> None:
    ledger = Ledger(frontier=Frontier(low=1, ended=(3,), trained=2))
    ledger.reopen(1, attempts=1, failed={}, live=True)
    for ordinal in (0, 3):
        with pytest.raises(AssertionError, match="has ended"):
            ledger.reopen(ordinal, attempts=1, failed={}, live=True)
    with pytest.raises(AssertionError, match="is open"):
        ledger.reopen(1, attempts=1, failed={}, live=True)
    with pytest.raises(AssertionError, match="no budget left"):
        ledger.reopen(2, attempts=2, failed={Kind.DATA: BUDGETS[Kind.DATA]}, live=False)
