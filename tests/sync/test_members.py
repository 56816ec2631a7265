"""When an engine is compared follows from what happened to it, and from nothing else."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from freewheel.sync.synchronizer import MOST_UNANSWERED, Member

NOBODY: Any = None

events = st.lists(st.sampled_from(["take", "fail", "silence"]), max_size=40)


@given(events, st.integers(1, 5))
def test_between_two_comparisons_there_are_fewer_syncs_than_said_and_none_after_a_failure(
    happens: list[str], every: int
) -> None:
    member = Member(NOBODY, 0)
    on_trust: int | None = None
    for version, what in enumerate(happens, start=1):
        due = member.must_verify(every)
        assert due == (on_trust is None or on_trust == every - 1)
        member.handed(version)
        if what == "take":
            member.took(version, compared=due)
            on_trust = 0 if due or on_trust is None else on_trust + 1
            assert member.version == version
        else:
            member.failed("")
            on_trust = None


@given(events)
def test_zero_is_never(happens: list[str]) -> None:
    member = Member(NOBODY, 0)
    for version, what in enumerate(happens, start=1):
        assert not member.must_verify(0)
        if what == "take":
            member.took(version, compared=False)
        else:
            member.failed("")


@given(st.lists(st.booleans(), max_size=40))
def test_what_may_still_be_read_is_all_that_was_handed_over_since_the_last_answer(answers: list[bool]) -> None:
    member = Member(NOBODY, 0)
    open_: set[int] = set()
    for version, answered in enumerate(answers, start=1):
        member.handed(version)
        open_.add(version)
        if answered:
            member.answered(version)
            open_.clear()
        assert member.reading == open_
        assert member.is_busy == (len(open_) >= MOST_UNANSWERED)


def test_a_late_answer_leaves_what_was_handed_over_after_it() -> None:
    member = Member(NOBODY, 0)
    for version in (4, 5, 6):
        member.handed(version)
    member.answered(5)
    assert member.reading == {6}
    member.died("")
    assert not member.reading
