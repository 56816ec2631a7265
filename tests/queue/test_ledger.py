"""Every prompt ends exactly once, over any order of failures and ends and over any number of resumes."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.queue.ledger import BUDGETS, Failure, Frontier, Kind, Ledger, data_failure, infra_failure

EVENTS = ("issue", "issue", "train", "infra", "data", "retry", "abandon", "resume")
FAILURES = {Kind.INFRA: infra_failure("engine", "died"), Kind.DATA: data_failure("reward", "raised")}


class Model:
    """A ledger, and what must be true of it."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.ledger = Ledger(total=total)
        self.live: list[int] = []
        self.again: list[int] = []
        self.attempts: dict[int, int] = {}
        self.ends: list[int] = []

    def issue(self) -> bool:
        """Prompts come in order, repeated ones first."""
        begun = {*self.ends, *self.live}
        first = min(self.again, default=next(one for one in itertools.count() if one not in begun))
        is_over = self.total is not None and first >= self.total
        assert self.ledger.exhausted == is_over
        assert self.ledger.issue() == (None if is_over else (first, self.attempts.get(first, 0)))
        if not is_over:
            self.again = [one for one in self.again if one != first]
            self.attempts[first] = self.attempts.get(first, 0) + 1
            self.live.append(first)
        return not is_over

    def end(self, what: str, choice: int) -> None:
        ordinal = self.live.pop(choice % len(self.live))
        ended = what in ("train", "abandon")
        if what == "train":
            self.ledger.train([ordinal])
        elif what == "abandon":
            self.ledger.abandon(ordinal, "zero_variance")
        elif what == "retry":
            self.ledger.retry(ordinal, "stale")
        else:
            ended = not self.ledger.fail(ordinal, FAILURES[Kind(what)])
        (self.ends if ended else self.again).append(ordinal)

    def resume(self) -> None:
        """Continue from a checkpoint: every prompt that had not ended is attempted again."""
        kept = msgspec.msgpack.decode(msgspec.msgpack.encode(self.ledger.frontier()), type=Frontier)
        self.ledger = Ledger(total=self.total, frontier=kept)
        assert self.ledger.frontier() == kept
        self.live, self.again, self.attempts = [], [], {}

    def play(self, what: str, choice: int) -> None:
        if what == "issue":
            self.issue()
        elif what == "resume":
            self.resume()
        elif self.live:
            self.end(what, choice)
        frontier = self.ledger.frontier()
        assert sorted([*range(frontier.low), *frontier.ended]) == sorted(self.ends)
        assert frontier.trained + sum(frontier.abandoned.values()) == len(self.ends)


@given(
    total=st.none() | st.integers(0, 12),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 99)), max_size=120),
)
@settings(max_examples=300, deadline=None)
def test_every_prompt_ends_once_whatever_happens(total: int | None, events: list[tuple[str, int]]) -> None:
    model = Model(total)
    for what, choice in events:
        model.play(what, choice)
    while total is not None and (model.issue() or model.live):
        model.end("train", 0)
    missing = set(range(max(model.ends, default=-1) + 1)) - set(model.ends)
    while total is None and missing:  # an endless stream returns to each of them before it continues
        model.issue()
        missing -= set(model.live)
    assert not missing
    assert len(set(model.ends)) == len(model.ends)
    assert total is None or sorted(model.ends) == list(range(total))


@pytest.mark.parametrize("kind", list(Kind))
def test_a_prompt_is_abandoned_when_the_budget_of_one_kind_is_spent(kind: Kind) -> None:
    ledger = Ledger(total=1)
    failures: list[Failure] = []
    for other, failure in FAILURES.items():
        failures += [failure] * (BUDGETS[other] - 1)
    again = []
    for failure in [*failures, FAILURES[kind]]:
        ledger.issue()
        again.append(ledger.fail(0, failure))
    assert again == [True] * len(failures) + [False]
    assert ledger.exhausted and ledger.abandoned == {FAILURES[kind].reason: 1}
    assert ledger.failures[FAILURES[kind].reason] == BUDGETS[kind]


def test_a_prompt_cannot_end_twice_or_without_an_attempt() -> None:
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


def test_live_attempts_and_earlier_failures_survive_a_restart() -> None:
    ledger = Ledger(total=5, frontier=Frontier(low=1, trained=1))
    ledger.reopen(2, attempts=1, failed={}, live=True)
    ledger.reopen(3, attempts=2, failed={Kind.DATA: 1}, live=False)
    assert [ledger.issue() for _ in range(3)] == [(3, 2), (1, 0), (4, 0)]
    assert ledger.issue() is None
    ledger.train([1, 2, 4])
    assert not ledger.fail(3, FAILURES[Kind.DATA]), "the failure before the restart counts"
    assert ledger.frontier() == Frontier(low=5, trained=4, abandoned={"reward": 1})


@pytest.mark.parametrize(
    ("ordinal", "failed", "message"),
    [(0, {}, "has ended"), (3, {}, "has ended"), (1, {}, "is open"), (2, BUDGETS, "no budget left")],
)
def test_a_prompt_that_cannot_be_attempted_is_not_reopened(ordinal: int, failed: dict[Kind, int], message: str) -> None:
    ledger = Ledger(frontier=Frontier(low=1, ended=(3,), trained=2))
    ledger.reopen(1, attempts=1, failed={}, live=True)
    with pytest.raises(AssertionError, match=message):
        ledger.reopen(ordinal, attempts=1, failed=failed, live=True)
