"""The simulation keeps what a run keeps: every group ends once, none is too old, nothing is faster than its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freewheel.plan.scene import Beside, Constant, Generation, Lognormal, Measured, Scores, Training, Weights
from freewheel.plan.simulation import Simulation, simulate

from .scenes import scene, scenes

SLACK = 1.02
"""A stretch between two steps may begin with groups that are ready already."""
thorough = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(scenes(), st.integers(0, 5))
def test_every_group_ends_once_and_none_is_older_than_the_bound(one, seed):
    simulation = Simulation(one, seed=seed)
    outcome = simulation.run()  # it asserts the bound for each group, and that it did not stand still
    assert outcome.lives == one.bounds.total_groups == simulation.policy.next_sequence
    assert simulation.policy.finished and simulation.policy.alive >= 0
    first, last = one.measured
    assert outcome.groups == (last - first) * one.bounds.groups_per_step == sum(outcome.lag_counts)
    assert outcome.lag_max <= one.bounds.max_lag
    shares = [share for spans in outcome.waits.values() for share in spans.values()]
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in [*shares, outcome.engine_busy])


@thorough
@given(scenes(), st.integers(0, 5))
def test_the_same_seed_gives_the_same_run(one, seed):
    assert simulate(one, seed=seed) == simulate(one, seed=seed)


@thorough
@given(scenes())
def test_no_run_is_faster_than_any_of_its_parts(one):
    whole = replace(one, window=(0, one.steps))
    outcome = simulate(whole)
    slack = SLACK if one.scores.rate_per_s is None else 1.3  # a bucket's first second comes on top of the rate
    made = one.generation
    busy_s = outcome.whole_s * made.replicas
    assert outcome.tokens * made.token_s(made.slots) / made.slots <= busy_s * slack
    assert outcome.waits["trainer"]["train"] <= 1 + 1e-9
    if one.scores.per_s is not None and outcome.whole_s > 5:
        assert outcome.samples / outcome.whole_s <= one.scores.per_s * slack


def test_a_pause_counts_as_far_as_it_lies_between_the_steps_that_are_looked_at():
    one = scene(
        "one_step_off",
        groups=1,
        steps=3,
        extra=0,
        n=1,
        lengths=Constant(1),
        generation=Generation(slots=1, step_s=0.0625),
        training=Training(base_s=0.125),
        weights=Weights(pause_s=0.25),
    )
    assert simulate(one).waits["rollouter"]["load_weights"] <= 1


def test_in_turns_a_step_is_the_sum_of_its_phases():
    one = scene(
        "sync",
        groups=8,
        scores=Scores(latency_s=Constant(0.25)),
        training=Training(base_s=0.4, pack_s=0.03),
        weights=Weights(transfer_s=0.05, pause_s=0.02),
        hand_over=replace(scene().hand_over, message_s=0.025),
    )
    # 8 groups x 4 in 16 slots: two waves of 10 tokens, 0.02 s each
    phases = 2 * 10 * 0.02 + 0.25 + 0.4 + 0.03 + 0.05 + 0.02 + 4 * 0.025
    outcome = simulate(one)
    assert outcome.step_s == pytest.approx(phases)
    assert outcome.lag_mean == outcome.lag_max == 0
    assert outcome.trainer_waits == pytest.approx((phases - 0.43) / phases)


def test_one_step_off_is_the_longer_of_the_two_and_lags_one_version():
    slow_training = simulate(scene("one_step_off", training=Training(base_s=0.6)))
    slow_generation = simulate(scene("one_step_off", training=Training(base_s=0.2)))
    assert slow_training.step_s == pytest.approx(0.6) and slow_training.lag_max == 1
    assert slow_generation.step_s == pytest.approx(0.4) and slow_generation.lag_max == 1


def test_streaming_hides_a_judge_that_turns_pay_for():
    slow = Scores(latency_s=Measured((0.2, 0.4, 0.6)))
    sync, streaming = simulate(scene("sync", scores=slow)), simulate(scene(scores=slow))
    assert sync.step_s > 1.3 and streaming.step_s == pytest.approx(0.4, rel=0.05)
    assert 0 < streaming.lag_mean <= 3


def test_a_long_tail_costs_turns_and_not_a_stream():
    wide = {
        "lengths": Lognormal(10, 0.8, 80),
        "groups": 64,
        "generation": Generation(slots=64, step_s=0.01),
        "steps": 40,
    }
    alone = 64 * 4 * wide["lengths"].mean * 0.01 / 64
    sync, streaming = simulate(scene("sync", **wide)), simulate(scene(**wide))
    assert sync.step_s > 0.4 + 1.4 * alone
    assert streaming.step_s < 0.6 * sync.step_s


def test_side_by_side_each_is_slower_while_the_other_is_at_work():
    apart = simulate(scene(training=Training(base_s=1.0)))
    shared = simulate(scene(training=Training(base_s=1.0), beside=Beside(training=1.5)))
    assert apart.step_s == pytest.approx(1.0)
    # Generation takes 0.4 s of a step, which then takes its time and half as much again.
    assert shared.step_s == pytest.approx(1.0 + 0.4 * (1 - 1 / 1.5), rel=0.02)
    slowed = simulate(scene(training=Training(base_s=0.1), beside=Beside(generation=2.0)))
    assert 0.4 < slowed.step_s <= 0.8


def test_a_version_that_waits_is_superseded_and_engines_stand_still_to_take_one():
    quick = simulate(scene(weights=Weights(transfer_s=0.0, pause_s=0.1), steps=30))
    assert quick.waits["rollouter"]["load_weights"] == pytest.approx(0.1 / quick.step_s, rel=0.05)
    slow = simulate(scene(weights=Weights(transfer_s=1.5), steps=30))
    assert slow.lag_mean > 2, "a transfer of three steps shows in what is trained on"


monotone = settings(max_examples=40, deadline=None)


@monotone
@given(st.floats(0.1, 1.0), st.floats(1.1, 3.0))
def test_faster_training_never_costs_throughput(base_s, factor):
    slower = simulate(scene(training=Training(base_s=base_s), steps=20))
    faster = simulate(scene(training=Training(base_s=base_s / factor), steps=20))
    assert faster.step_s <= slower.step_s * SLACK


@monotone
@given(st.integers(1, 3), st.floats(0.01, 0.05))
def test_more_engines_never_cost_throughput(replicas, step_s):
    def of(count):
        return simulate(scene(generation=Generation(replicas=count, slots=16, step_s=step_s), steps=20))

    assert of(replicas + 1).step_s <= of(replicas).step_s * SLACK


@monotone
@given(st.floats(10, 60), st.floats(1.2, 3))
def test_a_higher_rate_of_the_judge_never_costs_throughput(rate, factor):
    def of(per_s):
        return simulate(scene(scores=Scores(latency_s=Constant(0.2), rate_per_s=per_s), steps=20))

    assert of(rate * factor).step_s <= of(rate).step_s * 1.05


def test_a_limited_judge_sets_the_pace_and_the_verdict_says_so():
    from freewheel.runtime.bottleneck import Setting

    one = scene(scores=Scores(latency_s=Constant(0.2), rate_per_s=30.0), steps=30)
    outcome = simulate(one)
    assert outcome.samples_per_s == pytest.approx(30, rel=0.1)
    assert outcome.scores_per_s == pytest.approx(30, rel=0.1)
    found = outcome.verdict(Setting(), is_judge=True)
    assert found.bound == "judge" and "raising its rate limit to" in str(found)
    freed = simulate(replace(one, scores=Scores(latency_s=Constant(0.2), rate_per_s=30.0 * found.lift)))
    assert freed.samples_per_s / outcome.samples_per_s == pytest.approx(found.lift, rel=0.2)


def test_a_scene_that_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="total_groups"):
        replace(scene(), bounds=replace(scene().bounds, total_groups=13))
    with pytest.raises(ValueError, match="window"):
        scene(window=(5, 3))
