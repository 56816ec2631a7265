"""A run that gets nowhere is noticed, whatever lives in it: what stands still is said once, then time counts anew."""

from __future__ import annotations

from typing import Any

import pytest

from freewheel.runtime.recovery import STEP_S, STEP_TIMES, Progress

TRAINS = {"training": True, "global_steps": 6}


def test_progress_is_work_that_gets_done() -> None:
    progress = Progress(0.0)
    progress.note("a", trainer={}, now=1.0)
    progress.note("a", trainer={}, now=5.0)
    assert progress.stalled_s(7.0) == 6.0
    assert progress.stalled(7.0, patience_s=6.0) is None
    progress.note("a", trainer={"training": True}, now=8.0)
    assert progress.stalled_s(9.0) == 1.0
    progress.note("b", trainer={}, now=10.0)
    assert progress.stalled_s(10.0) == 0.0


def test_a_stall_is_said_once_and_then_time_counts_anew() -> None:
    progress = Progress(0.0)
    progress.note("a", trainer={}, now=1.0)
    stall = progress.stalled(7.1, patience_s=6.0)
    assert stall is not None
    assert (stall.why, stall.is_training) == ("no step, no token and no score for 6 s", False)
    progress.note("a", trainer={}, now=8.0)
    assert progress.stalled(13.0, patience_s=6.0) is None
    assert progress.stalled(13.2, patience_s=6.0) is not None


def test_stalls_count_up_until_something_moves() -> None:
    progress = Progress(0.0)
    progress.note("a", trainer={}, now=0.0)
    counts = []
    for marks, now in (("a", 10.0), ("a", 20.0), ("b", 30.0), ("b", 40.0), ("b", 50.0)):
        progress.note(marks, trainer={}, now=now)
        progress.stalled(now, patience_s=6.0)
        counts.append(progress.stalls)
    assert counts == [1, 2, 0, 1, 2]


def test_activity_alone_does_not_forgive_a_stall() -> None:
    """A trainer that hangs in its step, started anew, hangs in it again."""
    progress = Progress(0.0)
    progress.note("a", trainer={}, now=0.0)
    assert progress.stalled(10.0, patience_s=6.0) is not None
    progress.note("a", trainer=TRAINS, now=11.0)
    progress.note("a", trainer={}, paused=True, now=12.0)
    assert progress.stalls == 1


def test_paused_time_does_not_count() -> None:
    progress = Progress(0.0)
    for now in range(0, 1000, 5):
        progress.note("a", trainer={}, paused=True, now=float(now))
        assert progress.stalled(float(now), patience_s=6.0) is None
    progress.note("a", trainer={}, now=1000.0)
    assert progress.stalled(1002.0, patience_s=6.0) is not None


def test_a_step_that_never_ends_is_a_stall_and_is_named() -> None:
    progress = Progress(0.0)
    for now in (0.0, STEP_S):
        progress.note("a", trainer=TRAINS, now=now)
        assert progress.stalled(now, patience_s=10.0) is None
    progress.note("tokens go on", trainer=TRAINS, now=STEP_S + 1)
    stall = progress.stalled(STEP_S + 1, patience_s=10.0)
    assert stall is not None and stall.is_training
    assert "step 7 has been trained for 3601 s" in stall.why


def test_the_step_of_a_successor_has_all_its_time() -> None:
    progress = Progress(0.0)
    progress.note("a", trainer=TRAINS, now=0.0)
    assert progress.stalled(STEP_S + 1, patience_s=1e9) is not None
    progress.note("a", trainer=TRAINS, now=STEP_S + 2)
    assert progress.stalled(2 * STEP_S, patience_s=1e9) is None


def test_steps_may_become_slower_and_each_has_a_clock_of_its_own() -> None:
    progress = Progress(0.0)
    long_s = STEP_S / 2
    for step in range(4):  # the look never falls between two of them
        progress.note(step, trainer={"training": True, "global_steps": step}, now=step * long_s)
        assert progress.stalled(step * long_s, patience_s=10.0) is None
    assert progress.longest_step_s == long_s
    late = 3 * long_s + STEP_TIMES * long_s
    progress.note("a", trainer={"training": True, "global_steps": 3}, now=late)
    assert progress.stalled(late, patience_s=10.0) is None
    assert progress.stalled(late + 1, patience_s=10.0) is not None


@pytest.mark.parametrize("work", ["saving", "evaluating"])
def test_saving_and_evaluating_are_activity_but_not_for_ever(work: str) -> None:
    progress = Progress(0.0)
    at_it: dict[str, Any] = {work: True}
    for now in (0.0, 1000.0, STEP_S):
        progress.note("a", trainer=at_it, now=now)
        assert progress.stalled(now, patience_s=10.0) is None
    progress.note("a", trainer=at_it, now=STEP_S + 60)
    assert progress.stalled(STEP_S + 60, patience_s=10.0) is not None
