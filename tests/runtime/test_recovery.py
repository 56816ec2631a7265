"""Rules for restarting a component and for giving up a run."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.runtime.recovery import (
    HOPELESS_BATCHES,
    LONGEST_BACKOFF_S,
    SAME_BATCHES,
    STEP_S,
    STEP_TIMES,
    AbandonedPrompts,
    Restarts,
    StallDetector,
)

COMPONENTS = ("queue", "trainer", "rollouter-0")
TRAINS = {"training": True, "global_steps": 6}


@given(
    max_restarts=st.integers(0, 6),
    backoff_s=st.floats(0, 100),
    deaths=st.lists(st.tuples(st.sampled_from(COMPONENTS), st.integers(0, 2)), max_size=60),
)
def test_restarts_in_a_row_are_limited_per_component_and_a_trained_step_clears_them(
    max_restarts: int, backoff_s: float, deaths: list[tuple[str, int]]
) -> None:
    """`deaths`: the component, and how many steps were trained since the last death."""
    restarts = Restarts(max_restarts=max_restarts, backoff_s=backoff_s)
    step, in_a_row, waits = 0, dict.fromkeys(COMPONENTS, 0), {name: [0.0] for name in COMPONENTS}
    for name, trained in deaths:
        if trained:
            step += trained
            in_a_row, waits = dict.fromkeys(COMPONENTS, 0), {name: [0.0] for name in COMPONENTS}
        in_a_row[name] += 1
        wait_s = restarts.died(name, step=step)
        assert (wait_s is None) == (in_a_row[name] > max_restarts)
        if wait_s is not None:
            waits[name].append(wait_s)
    for found in waits.values():
        assert all(0 <= before <= after <= LONGEST_BACKOFF_S for before, after in pairwise(found))


def test_the_first_restart_is_immediate_and_waits_double_up_to_a_limit() -> None:
    restarts = Restarts(max_restarts=9, backoff_s=1.0)
    waits = [restarts.died("queue", step=4) for _ in range(10)]
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, None]
    many = Restarts(max_restarts=5_000, backoff_s=1.0)
    assert [many.died("sync", step=0) for _ in range(5_001)][-2:] == [LONGEST_BACKOFF_S, None], "no overflow"


def test_movement_activity_and_a_pause_restart_the_clock_and_only_movement_forgives_a_stall() -> None:
    progress = StallDetector(0.0)
    progress.note("a", trainer={}, now=0.0)
    assert progress.stalled(6.0, patience_s=6.0) is None and progress.stalled(6.5, patience_s=6.0) is not None
    for now, noted, since, stalls in (
        (10.0, {"trainer": {}}, 6.5, 1),
        (11.0, {"trainer": TRAINS}, 11.0, 1),
        (12.0, {"trainer": {}, "paused": True}, 12.0, 1),
        (1000.0, {"trainer": {}, "paused": True}, 1000.0, 1),
    ):
        progress.note("a", **noted, now=now)
        assert (progress.stalled_s(now), progress.stalls) == (now - since, stalls)
    assert progress.stalled(1007.0, patience_s=6.0) is not None
    progress.note("b", trainer={}, now=1008.0)
    assert (progress.stalled_s(1008.0), progress.stalls) == (0.0, 0)


def test_stalls_are_reported_once_per_patience_and_counted_until_something_moves() -> None:
    progress = StallDetector(0.0)
    progress.note("a", trainer={}, now=0.0)
    counts = []
    for marks, now in (("a", 10.0), ("a", 15.9), ("a", 20.0), ("b", 30.0), ("b", 40.0), ("b", 50.0)):
        progress.note(marks, trainer={}, now=now)
        stall = progress.stalled(now, patience_s=6.0)
        assert stall is None or (stall.why, stall.is_training) == ("no step, no token and no score for 6 s", False)
        counts.append(progress.stalls)
    assert counts == [1, 1, 2, 0, 1, 2]


def test_a_step_that_never_ends_is_a_stall_and_the_next_attempt_gets_the_full_time() -> None:
    progress = StallDetector(0.0)
    for now in (0.0, STEP_S):
        progress.note("a", trainer=TRAINS, now=now)
        assert progress.stalled(now, patience_s=10.0) is None
    progress.note("tokens arrive", trainer=TRAINS, now=STEP_S + 1)
    stall = progress.stalled(STEP_S + 1, patience_s=10.0)
    assert stall is not None and stall.is_training and "step 7 has been trained for 3601 s" in stall.why
    progress.note("a", trainer=TRAINS, now=STEP_S + 2)
    assert progress.stalled(2 * STEP_S, patience_s=1e9) is None


def test_steps_may_become_slower_and_each_has_its_own_clock() -> None:
    progress = StallDetector(0.0)
    long_s = STEP_S / 2
    for step in range(4):  # no look falls between two steps
        progress.note(step, trainer={"training": True, "global_steps": step}, now=step * long_s)
        assert progress.stalled(step * long_s, patience_s=10.0) is None
    assert progress.longest_step_s == long_s
    late = 3 * long_s + STEP_TIMES * long_s
    progress.note("a", trainer={"training": True, "global_steps": 3}, now=late)
    assert progress.stalled(late, patience_s=10.0) is None
    assert progress.stalled(late + 1, patience_s=10.0) is not None


@pytest.mark.parametrize("work", ["saving", "evaluating"])
def test_saving_and_evaluating_count_as_activity_for_a_limited_time(work: str) -> None:
    progress = StallDetector(0.0)
    for now, stalls in ((0.0, False), (1000.0, False), (STEP_S, False), (STEP_S + 60, True)):
        progress.note("a", trainer={work: True}, now=now)
        assert (progress.stalled(now, patience_s=10.0) is not None) == stalls


FEW = HOPELESS_BATCHES * 4
MANY = SAME_BATCHES * 4


@pytest.mark.parametrize(
    ("abandoned", "says"),
    [
        ({"reward": FEW - 1}, ""),
        ({"reward": FEW - 1, "prompt": 1}, f"{FEW} prompts were abandoned since step 2 (reward {FEW - 1}, prompt 1)"),
        ({"zero_variance": MANY - 1, "reward": 3}, ""),
        (
            {"zero_variance": MANY},
            f"every group scores the same, or nearly every one: {MANY} were dropped since step 2",
        ),
    ],
)
def test_a_run_is_hopeless_after_enough_abandoned_batches_without_a_step(abandoned: dict[str, int], says: str) -> None:
    prompts = AbandonedPrompts(groups_per_step=4)
    before = {"reward": 5_000, "zero_variance": 5_000}
    for step in (1, 2):  # what came before a step, or before a resume, does not count
        prompts.note({"abandoned": before, "step": step})
        assert not prompts.hopeless
    now = {reason: before.get(reason, 0) + abandoned.get(reason, 0) for reason in {**before, **abandoned}}
    prompts.note({"abandoned": now, "step": 2})
    prompts.note({})  # the queue did not answer
    assert bool(prompts.hopeless) == bool(says) and says in prompts.hopeless
    assert "algorithm.zero_variance=keep" in prompts.hopeless or "zero_variance" not in says
    prompts.note({"abandoned": now, "step": 3})
    assert not prompts.hopeless, "a step was taken"
