"""The simulation keeps the promises of a run: every group ends once, none is too old, nothing outruns its parts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freewheel.data.group import Ticket
from freewheel.plan import simulation
from freewheel.plan.scene import (
    Generation,
    Lognormal,
    Measured,
    Scores,
    Slowdown,
    Training,
    WeightTransfer,
    stream,
    whole_stream,
)
from freewheel.plan.simulation import (
    SAVED_S,
    Group,
    JudgeQueue,
    SimulatedEngine,
    Simulation,
    deal,
    simulate,
    simulate_slice,
    slice_of,
)
from freewheel.queue.message_queue import TicketRequest, pick_least_loaded
from freewheel.runtime.bottleneck import Setting

from .scenes import bounds, scene, scenes

SLACK = 1.02
"""A stretch between two steps may begin with groups that are ready already."""

# -- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        (Measured((3.0,)), 3.0),
        (Measured((1.0, 2.0, 9.0)), 4.0),
        (Lognormal(100, 0.6), 100.0),
        (Lognormal(20, 0.0), 20.0),
        *((Lognormal.of_mean(mean, 0.6, 150.0), mean) for mean in (1.0, 60.0, 100.0, 149.0, 150.0)),
    ],
    ids=str,
)
def test_draws_have_their_mean_and_repeat_with_the_seed(draw, mean):
    first, again = (list(itertools.islice(stream(draw, np.random.default_rng(1)), 40_000)) for _ in range(2))
    assert first == again
    assert np.mean(first) == pytest.approx(mean, rel=0.02) and draw.mean == pytest.approx(mean)
    assert max(first) <= getattr(draw, "most", 9.0)
    assert not isinstance(draw, Measured) or set(first) == set(draw.values)
    tokens = list(itertools.islice(whole_stream(draw, np.random.default_rng(1)), 9))
    assert tokens == [max(1, round(one)) for one in first[:9]]


# -- one engine -------------------------------------------------------------------------------------------------------


def engine(lengths, **model):
    return SimulatedEngine(Generation(**{"slots": 2, "step_s": 1.0, **model}), itertools.cycle(lengths))


def ends(one, until=1000):
    """Return (time, groups whose response ended then), until nothing runs."""
    found = []
    while (at := one.due_at()) <= until:
        found.append((at, sorted(group.sequence for group in one.finish(at))))
    return found


def put(one, *sequences, samples=1, at=0.0):
    one.advance(at)
    groups = [Group(sequence, samples, 0) for sequence in sequences]
    for group in groups:
        one.add(group)
    one.enter()
    return groups


@pytest.mark.parametrize(
    ("lengths", "model", "groups", "expected"),
    [
        ([3, 5, 4], {}, [0, 1, 2], [(3.0, [0]), (5.0, [1]), (7.0, [2])]),
        ([4, 8], {"per_sequence_s": 0.5}, [0, 1], [(8.0, [0]), (14.0, [1])]),
        # two wait, and the first free slot stays empty until there are two
        ([2, 4, 4, 4, 1], {"slots": 4, "refill": 2}, range(6), [(2.0, [0]), (4.0, [1, 2, 3]), (5.0, [4]), (6.0, [5])]),
        ([3, 5, 9, 14], {"slots": 4, "resolution": 4}, range(4), [(4.0, [0, 1]), (8.0, [2]), (16.0, [3])]),
        ([1], {"slots": 1, "resolution": 4}, [0, 1], [(4.0, [0]), (8.0, [1])]),
    ],
    ids=["a free slot is refilled", "slower with more", "refill", "rounded ends", "each takes a step"],
)
def test_an_engine_ends_responses_when_their_tokens_are_made(lengths, model, groups, expected):
    one = engine(lengths, **model)
    put(one, *groups)
    assert ends(one) == expected and one.running == 0
    assert one.busy_s == expected[-1][0]


def test_groups_enter_between_steps_and_pauses_prompts_and_slowdowns_delay_them():
    one = engine([4])
    put(one, 0)
    put(one, 1, at=1.5)
    assert ends(one) == [(4.0, [0]), (6.0, [1])]
    one = engine([4])
    put(one, 0)
    one.advance(1.0)
    one.paused = True
    assert one.due_at() == float("inf")
    one.advance(6.0)
    one.paused = False
    assert ends(one) == [(9.0, [0])] and one.busy_s == 4.0
    one = engine([2], slots=4, prefill_s=0.5)
    put(one, 0, 1, samples=2)
    assert ends(one) == [(3.0, [0, 0, 1, 1])], "each prompt is read once per group"
    one = engine([4])
    put(one, 0)
    one.advance(2.0)
    one.slow(2.0)
    assert ends(one) == [(6.0, [0])]


def test_a_group_has_the_version_of_its_first_token():
    one = engine([4, 6])
    first, second, third = put(one, 0, 1, 2)
    one.finish(one.due_at())
    one.version = 7
    assert (first.version, second.version, third.version) == (0, 0, 0), "the third entered when the first ended"
    (fourth,) = put(one, 3, at=5.0)
    one.finish(one.due_at())
    assert fourth.version == 7


def test_slots_are_filled_as_the_native_scheduler_fills_them():
    pytest.importorskip("torch")
    from freewheel.rollout.native.engine import Scheduler

    tokens = [3, 5, 2, 7, 4, 6, 1]
    real, lengths = Scheduler(slots=8, refill=2), itertools.cycle(tokens)
    simulated = engine(tokens, slots=8, refill=2)
    put(simulated, *range(12), samples=3)
    for sequence in range(12):
        real.add(sequence, 3)
    left: dict[int, int] = {}
    expected = []
    for step in range(1, 100):
        for placed in real.admit():
            left[placed.slot] = next(lengths)
        ended = [slot for slot in left if left[slot] == 1]
        left = {slot: rest - 1 for slot, rest in left.items() if slot not in ended}
        if groups := sorted(real.release(slot)[0] for slot in ended):
            expected.append((float(step), groups))
    assert ends(simulated) == expected


requests = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(any), min_size=1, max_size=8)


@given(requests, st.integers(0, 40))
def test_tickets_are_dealt_in_the_order_of_the_queue(asked, room):
    def made():
        numbers = itertools.count()
        tickets = (Ticket(number, number) for number in numbers)
        return [TicketRequest(str(place), want, load) for place, (want, load) in enumerate(asked)], tickets.__next__

    (ours, issue), (theirs, issue_theirs) = made(), made()
    deal(ours, room, issue)
    for _ in range(room):
        if (one := pick_least_loaded(theirs)) is not None:
            one.tickets.append(issue_theirs())
    assert [one.tickets for one in ours] == [one.tickets for one in theirs]


# -- a judge with limits ----------------------------------------------------------------------------------------------


def test_a_knee_bounds_the_requests_at_a_time_and_a_rate_those_of_a_second():
    judge = JudgeQueue(Scores(knee=2))
    assert [judge.answer_at(now, took) for now, took in ((0, 4), (0, 1), (0, 1), (0, 5), (9, 1))] == [4, 1, 2, 7, 10]
    assert judge.held_back_s == 2, "the third waited until 1, the fourth until 2"
    judge = JudgeQueue(Scores(rate_per_s=50.0))
    ends = [judge.answer_at(0.0, 1.0) for _ in range(500)]
    assert ends[-1] == pytest.approx(500 / 50, rel=0.02) and judge.held_back_s == pytest.approx(ends[-1] - 1.0)
    assert all(later - end >= 1 - 1e-9 for end, later in zip(ends[50:], ends[100:], strict=False))
    assert ends[49] == ends[0] == 1.0 < ends[51], "the requests of one second may be saved up"
    for free in (JudgeQueue(Scores()), JudgeQueue(Scores(knee=9))):
        assert [free.answer_at(1.0, 0.5) for _ in range(9)] == [1.5] * 9 and free.held_back_s == 0


# -- whole runs -------------------------------------------------------------------------------------------------------

thorough = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(scenes, st.integers(0, 5))
def test_every_group_ends_once_within_the_bound_and_a_seed_repeats_the_run(one, seed):
    run = Simulation(one, seed=seed)
    outcome = run.run()  # it asserts the bound for each group, and that it did not stall
    assert outcome == simulate(one, seed=seed)
    assert outcome.lives == one.bounds.total_groups == run.policy.next_sequence
    assert run.policy.finished and run.policy.alive >= 0
    first, last = one.measured
    assert outcome.groups == (last - first) * one.bounds.groups_per_step == sum(outcome.lag_counts)
    assert outcome.lag_max <= one.bounds.max_lag
    shares = [share for spans in outcome.waits.values() for share in spans.values()]
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in [*shares, outcome.engine_busy])


@thorough
@given(scenes)
def test_no_run_is_faster_than_any_of_its_parts(one):
    outcome = simulate(replace(one, window=(0, one.steps)))
    saved = (one.scores.rate_per_s or 0.0) * SAVED_S
    made = one.generation
    assert outcome.tokens * made.token_s(made.slots) / made.slots <= outcome.whole_s * made.replicas * SLACK
    if one.scores.per_s is not None and outcome.whole_s > 5:
        assert outcome.samples - saved <= outcome.whole_s * one.scores.per_s * SLACK


def test_in_turns_a_step_is_the_sum_of_its_phases():
    one = scene(
        "sync",
        groups=8,
        scores=Scores(latency_s=Measured((0.25,))),
        training=Training(base_s=0.4, pack_s=0.03),
        weights=WeightTransfer(transfer_s=0.05, pause_s=0.02),
        hand_over=replace(scene().hand_over, message_s=0.025),
    )
    # 8 groups x 4 in 16 slots: two waves of 10 tokens, 0.02 s each; then admit, put, take and commit
    phases = 2 * 10 * 0.02 + 0.25 + 0.4 + 0.03 + 0.05 + 0.02 + 4 * 0.025
    outcome = simulate(one)
    assert outcome.step_s == pytest.approx(phases)
    assert outcome.lag_mean == outcome.lag_max == 0
    assert outcome.trainer_waits == pytest.approx((phases - 0.43) / phases)
    patient = replace(one, hand_over=replace(one.hand_over, linger_s=5.0))
    assert simulate(patient).step_s == pytest.approx(phases), "the last group of a batch waits for no other"


@pytest.mark.parametrize(("base_s", "step_s"), [(0.6, 0.6), (0.2, 0.4)], ids=["training", "generation"])
def test_one_step_off_takes_the_longer_of_the_two_and_lags_one_version(base_s, step_s):
    found = simulate(scene("one_step_off", training=Training(base_s=base_s)))
    assert found.step_s == pytest.approx(step_s) and found.lag_max == 1


def test_streaming_hides_a_slow_judge_and_a_long_tail():
    slow = Scores(latency_s=Measured((0.2, 0.4, 0.6)))
    sync, streamed = simulate(scene("sync", scores=slow)), simulate(scene(scores=slow))
    assert sync.step_s > 1.3 and streamed.step_s == pytest.approx(0.4, rel=0.05)
    assert 0 < streamed.lag_mean <= 3
    lengths, made = Lognormal(10, 0.8, 80), Generation(slots=64, step_s=0.01)
    wide = {"lengths": lengths, "groups": 64, "generation": made, "steps": 40}
    sync, streamed = simulate(scene("sync", **wide)), simulate(scene(**wide))
    assert sync.step_s > 0.4 + 1.4 * (4 * lengths.mean * 0.01)
    assert streamed.step_s < 0.6 * sync.step_s


def test_on_shared_hardware_each_side_is_slower_while_the_other_works():
    shared = simulate(scene(training=Training(base_s=1.0), slowdown=Slowdown(training=1.5)))
    # Generation takes 0.4 s of a step, during which training takes half as long again.
    assert shared.step_s == pytest.approx(1.0 + 0.4 * (1 - 1 / 1.5), rel=0.02)
    slowed = simulate(scene(training=Training(base_s=0.1), slowdown=Slowdown(generation=2.0)))
    assert 0.4 < slowed.step_s <= 0.8


def test_engines_pause_for_a_version_and_a_slow_transfer_makes_samples_older():
    quick = simulate(scene(weights=WeightTransfer(pause_s=0.1), steps=30))
    assert quick.waits["rollouter"]["load_weights"] == pytest.approx(0.1 / quick.step_s, rel=0.05)
    assert simulate(scene(weights=WeightTransfer(transfer_s=1.5), steps=30)).lag_mean > 2
    short = {"groups": 1, "steps": 3, "extra": 0, "n": 1, "lengths": Measured((1,))}
    made = Generation(slots=1, step_s=0.0625)
    one = scene(
        "one_step_off", generation=made, training=Training(base_s=0.125), weights=WeightTransfer(pause_s=0.25), **short
    )
    assert simulate(one).waits["rollouter"]["load_weights"] <= 1, "a pause counts as far as it is within the window"


@settings(max_examples=40, deadline=None)
@given(st.floats(0.1, 1.0), st.integers(1, 3), st.floats(10, 60), st.floats(1.2, 3))
def test_no_faster_part_costs_throughput(base_s, replicas, rate, factor):
    def step_s(*, base_s=0.4, replicas=1, rate=None):
        made = Generation(replicas=replicas, slots=16, step_s=0.02)
        scores = Scores(latency_s=Measured((0.2,)), rate_per_s=rate)
        return simulate(scene(training=Training(base_s=base_s), generation=made, scores=scores, steps=20)).step_s

    assert step_s(base_s=base_s / factor) <= step_s(base_s=base_s) * SLACK
    assert step_s(replicas=replicas + 1) <= step_s(replicas=replicas) * SLACK
    assert step_s(rate=rate * factor) <= step_s(rate=rate) * 1.05


def test_a_limited_judge_sets_the_pace_and_the_verdict_predicts_its_remedy():
    one = scene(scores=Scores(is_judge=True, latency_s=Measured((0.2,)), rate_per_s=30.0), steps=30)
    outcome = simulate(one)
    assert outcome.samples_per_s == pytest.approx(30, rel=0.1) == outcome.scores_per_s
    found = outcome.verdict(Setting(), one.scores)
    assert found.bound == "judge" and "raising its rate limit to" in str(found)
    freed = simulate(replace(one, scores=Scores(latency_s=Measured((0.2,)), rate_per_s=30.0 * found.lift)))
    assert freed.samples_per_s / outcome.samples_per_s == pytest.approx(found.lift, rel=0.2)


# -- slices -----------------------------------------------------------------------------------------------------------

LARGE = scene(
    groups=240,
    steps=20,
    lengths=Lognormal(20, 0.6, 80),
    generation=Generation(replicas=12, slots=32, step_s=0.01, prefill_s=0.002),
    training=Training(per_token_s=0.45 / (240 * 4 * 20)),
    weights=WeightTransfer(pause_s=0.05),
)


@pytest.mark.parametrize(
    ("changes", "replicas"),
    [
        ({}, 4),
        ({"training": replace(LARGE.training, per_token_s=LARGE.training.per_token_s * 2)}, 4),
        ({"scores": Scores(latency_s=Measured((0.3,)))}, 4),
        ({"scores": Scores(latency_s=Measured((0.3,)), rate_per_s=900.0)}, 4),
        # one engine is enough if it has as many groups to itself
        ({"generation": replace(LARGE.generation, replicas=3), "bounds": bounds(groups=240, steps=20)}, 1),
    ],
    ids=["generation", "training", "latency", "rate", "one engine"],
)
def test_a_slice_behaves_like_the_whole(monkeypatch, changes, replicas):
    monkeypatch.setattr(simulation, "MOST_GROUPS", 80)
    monkeypatch.setattr(simulation, "LEAST_REPLICAS", 4)
    whole = replace(LARGE, **changes)
    one, parts = slice_of(whole)
    assert (one.generation.replicas, one.bounds.groups_per_step, parts) == (replicas, 80, pytest.approx(3.0))
    expected, found = simulate(whole), simulate_slice(whole)
    assert found.samples_per_s == pytest.approx(expected.samples_per_s, rel=0.05)
    assert found.lag_mean == pytest.approx(expected.lag_mean, abs=0.3)
    assert found.engine_busy == pytest.approx(expected.engine_busy, abs=0.05)
    assert (found.groups, found.lives) == (expected.groups, expected.lives)


def test_a_small_run_is_simulated_whole():
    assert slice_of(scene()) == (scene(), 1.0) and simulate_slice(scene()) == simulate(scene())
