"""A slice of a large run behaves as the whole does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freewheel.plan import simulation
from freewheel.plan.scene import Constant, Generation, Lognormal, Scores, Training, Weights
from freewheel.plan.simulation import simulate, simulate_slice, slice_of

from .scenes import bounds, scene

LARGE = scene(
    groups=240,
    steps=20,
    lengths=Lognormal(20, 0.6, 80),
    generation=Generation(replicas=12, slots=32, step_s=0.01, prefill_s=0.002),
    training=Training(per_token_s=0.45 / (240 * 4 * 20)),
    weights=Weights(pause_s=0.05),
)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(simulation, "MOST_GROUPS", 80)
    monkeypatch.setattr(simulation, "LEAST_REPLICAS", 4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training": replace(LARGE.training, per_token_s=LARGE.training.per_token_s * 2)},
        {"scores": Scores(latency_s=Constant(0.3))},
        {"scores": Scores(latency_s=Constant(0.3), rate_per_s=900.0)},
    ],
    ids=["generation", "training", "latency", "rate"],
)
def test_a_slice_gives_what_the_whole_gives(changes):
    whole = replace(LARGE, **changes)
    one, parts = slice_of(whole)
    assert parts == pytest.approx(3.0) and one.generation.replicas == 4 and one.bounds.groups_per_step == 80
    expected, found = simulate(whole), simulate_slice(whole)
    assert found.samples_per_s == pytest.approx(expected.samples_per_s, rel=0.05)
    assert found.lag_mean == pytest.approx(expected.lag_mean, abs=0.3)
    assert found.engine_busy == pytest.approx(expected.engine_busy, abs=0.05)
    assert (found.groups, found.lives) == (expected.groups, expected.lives)


def test_one_engine_is_enough_where_it_has_as_many_groups_to_itself():
    whole = replace(LARGE, generation=replace(LARGE.generation, replicas=3), bounds=bounds(groups=240, steps=20))
    one, parts = slice_of(whole)
    assert parts == pytest.approx(3.0) and one.generation.replicas == 1 and one.bounds.groups_per_step == 80
    expected, found = simulate(whole), simulate_slice(whole)
    assert found.samples_per_s == pytest.approx(expected.samples_per_s, rel=0.05)
    assert found.engine_busy == pytest.approx(expected.engine_busy, abs=0.05)


def test_what_a_slice_of_a_judge_refused_and_allowed_is_told_of_the_whole():
    whole = replace(LARGE, scores=Scores(latency_s=Constant(0.3), rate_per_s=900.0))
    one, parts = slice_of(whole)
    part, found = simulate(one), simulate_slice(whole)
    assert part.judge_refused > 0 and found.judge_refused == round(part.judge_refused * parts)
    assert part.judge_limit is not None and found.judge_limit == round(part.judge_limit * parts)


def test_what_is_small_is_simulated_whole():
    small = scene()
    assert slice_of(small) == (small, 1.0)
    assert simulate_slice(small) == simulate(small)
