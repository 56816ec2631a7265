"""A judge with limits, asked by the engine's own limiter and pacer under a virtual clock."""

from __future__ import annotations

import itertools

import pytest

from freewheel.plan.scene import Constant, Generation, Scores
from freewheel.plan.simulation import Group, LimitedJudge, simulate
from freewheel.runtime.bottleneck import Setting

from .scenes import scene


def scored(count, latencies=(1.0,), **limits):
    """(when, how many) until all are scored, and the judge."""
    judge = LimitedJudge(Scores(latency_s=Constant(1.0), **limits), itertools.cycle(latencies), seed=1)
    for number in range(count):
        judge.submit(Group(number, 1, 0))
    found, now, left = [], 0.0, count
    while left:
        groups = judge.pump(now)
        left -= len(groups)
        if groups:
            found.append((now, len(groups)))
        if left:
            assert judge.next_at() < float("inf"), "it would never be done"
            now = judge.next_at()
    return found, judge


def test_every_response_is_scored_once_whatever_is_refused():
    found, judge = scored(400, latencies=(0.5, 1.0, 2.0), knee=20, rate_per_s=5.0)
    assert sum(many for _, many in found) == 400
    assert judge.refused > 0 and not judge._asked and not judge._tickets
    assert judge.limiter.in_flight == 0


def test_a_knee_bounds_what_is_done_in_a_time():
    found, _ = scored(1000, latencies=(0.8, 1.0, 1.2), knee=40)
    assert found[-1][0] >= 1000 / 40
    assert found[-1][0] <= 1.35 * 1000 / 40


def test_a_rate_is_kept_and_used():
    found, judge = scored(500, rate_per_s=50.0)
    assert found[-1][0] == pytest.approx(500 / 50, rel=0.2)
    assert judge.refused <= 5, "the pacer knows the rate"
    for at, _ in found:
        within = sum(many for then, many in found if at - 1 < then <= at)
        assert within <= 2 * 50 + 1, "a second's budget may be saved up, and no more"


def test_a_judge_that_has_room_holds_nothing_back_while_nothing_comes():
    judge = LimitedJudge(Scores(latency_s=Constant(0.1), knee=10**6), itertools.repeat(0.1), seed=1)
    for now in (0.0, 10.0, 20.0):
        judge.submit(Group(int(now), 1, 0))
        judge.pump(now)
        judge.pump(judge.next_at())
    assert judge.held_back_s == 0.0


def test_what_waits_to_be_sent_or_rests_after_a_refusal_is_held_back():
    found, judge = scored(100, rate_per_s=50.0)
    assert judge.held_back_s >= 0.8 * (found[-1][0] - 1.0), "all but the last second, in which the last are judged"


def test_an_ample_judge_is_not_named_where_generation_is_slow():
    slow = scene(
        steps=30,
        generation=Generation(slots=16, step_s=0.1),
        scores=Scores(is_judge=True, latency_s=Constant(0.1), knee=10**6),
    )
    found = simulate(slow)
    assert found.held_back is not None and found.held_back < 0.05
    assert found.verdict(Setting(threshold=3), is_judge=True).bound == "generation"
