"""Estimators against numbers worked out by hand, and the contract of a custom estimator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.data.group import PromptGroup
from freewheel.errors import ConfigError
from freewheel.trainer.advantages import (
    STD_FLOOR,
    AdvantageInputs,
    estimate,
    gae,
    grpo,
    has_no_variance,
    reinforce_pp,
    rloo,
)
from freewheel.trainer.options import AlgorithmConfig
from freewheel.utils.registry import kept_in_memory

from .groups import valued

NAN = math.nan
BUILT_IN = [grpo, rloo, reinforce_pp]


def inputs(*groups: list[float], **settings: Any) -> AdvantageInputs:
    return AdvantageInputs(rewards=[np.array(group) for group in groups], settings=AlgorithmConfig(**settings))


def scale(variance: float) -> float:
    return 1 / (math.sqrt(variance) + STD_FLOOR)


RLOO, PP = {"name": "rloo"}, {"name": "reinforce_pp"}


@pytest.mark.parametrize(
    ("estimator", "settings", "groups", "wanted"),
    [
        # mean 1, squares 1 + 1 + 0 + 4 = 6, variance 6 / 3
        (grpo, {}, [[0, 0, 1, 3]], scale(2) * np.array([-1, -1, 0, 2])),
        (grpo, {"normalise": "none"}, [[0, 0, 1, 3], [5, 7]], [-1, -1, 0, 2, -1, 1]),
        # mean 3, squares 9 + 1 + 1 + 9 = 20, variance 20 / 3
        (grpo, {"normalise": "batch_std"}, [[0, 2], [4, 6]], scale(20 / 3) * np.array([-1, 1, -1, 1])),
        (rloo, RLOO, [[0, 3, 6]], [0 - 4.5, 3 - 3, 6 - 1.5]),
        # advantages -1, 1, -3, 3: mean 0, variance 20 / 3
        (rloo, {**RLOO, "normalise": "batch_std"}, [[0, 1], [0, 3]], scale(20 / 3) * np.array([-1, 1, -3, 3])),
        (reinforce_pp, PP, [[0, 2], [10, 16]], scale(20 / 3) * np.array([-1, 1, -3, 3])),
        (reinforce_pp, {**PP, "baseline": "batch"}, [[0, 0], [1, 1]], scale(1 / 3) * np.array([-0.5, -0.5, 0.5, 0.5])),
    ],
)
def test_estimators_are_worked_out_by_hand_and_selected_by_name(estimator, settings, groups, wanted) -> None:
    found = estimator(inputs(*groups, **settings))
    assert [len(one) for one in found] == [len(group) for group in groups]
    assert np.concatenate(found) == pytest.approx(wanted)
    selected = estimate([valued(i, *group) for i, group in enumerate(groups)], AlgorithmConfig(**settings))
    assert np.array_equal(np.concatenate(selected), np.concatenate(found))


@pytest.mark.parametrize("estimator", BUILT_IN)
def test_a_failed_response_is_left_out_of_baselines_and_gets_no_advantage(estimator) -> None:
    with_failure = estimator(inputs([0, NAN, 1, 3], [1, 2, 0]))
    without = estimator(inputs([0, 1, 3], [1, 2, 0]))
    assert with_failure[0][1] == 0
    assert np.delete(with_failure[0], 1) == pytest.approx(without[0])
    assert with_failure[1] == pytest.approx(without[1])


@pytest.mark.parametrize("estimator", BUILT_IN)
@pytest.mark.parametrize("lost", [[5.0, NAN, NAN], [0.1, 0.1, 0.1], [0.3, 0.1 + 0.2], [NAN, NAN, NAN], [7.0]])
def test_a_group_with_nothing_to_compare_has_no_advantage(estimator, lost) -> None:
    found = estimator(inputs(lost, [0, 1]))
    assert np.abs(found[0]).max() == 0
    assert found[1][1] > 0 > found[1][0]


group_rewards = st.lists(st.one_of(st.floats(-10, 10), st.just(NAN)), min_size=1, max_size=6)
BATCH_STD = {"normalise": "batch_std"}
ALL_SETTINGS: list[dict[str, str]] = [{}, BATCH_STD, RLOO, RLOO | BATCH_STD, PP, PP | {"baseline": "batch"}]


@given(st.lists(group_rewards, min_size=1, max_size=5))
def test_advantages_are_always_finite_and_zero_where_scoring_failed(groups) -> None:
    for settings in ALL_SETTINGS:
        config = AlgorithmConfig(**settings)
        found = config.find_estimator()(AdvantageInputs(rewards=list(map(np.array, groups)), settings=config))
        for one, group in zip(found, groups, strict=True):
            assert np.isfinite(one).all()
            assert (one[np.isnan(group)] == 0).all()


def test_gae_adds_up_discounted_surprises_and_steps_over_holes_as_if_they_were_not_there() -> None:
    mask = np.array([[1, 0, 1, 0, 1, 0]])
    rewards, values = np.array([[0, 9, 0, 9, 1.0, 9]]), np.array([[0.5, 7, 0.4, 7, 0.2, 7]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    last = 1 - 0.2
    middle = 0.9 * 0.2 - 0.4 + 0.45 * last
    first = 0.9 * 0.4 - 0.5 + 0.45 * middle
    assert advantages[0] == pytest.approx([first, 0, middle, 0, last, 0])
    assert returns[0] == pytest.approx([first + 0.5, 0, middle + 0.4, 0, last + 0.2, 0])


@pytest.mark.parametrize(
    ("values", "wanted"), [((1, 1, 1), True), ((0.1, 0.2), False), ((1, NAN), True), ((1, NAN, 2), False)]
)
def test_a_group_teaches_nothing_if_its_rewards_do_not_differ(values, wanted) -> None:
    assert has_no_variance(valued(0, *values)) is wanted


# -- the contract of a custom estimator -------------------------------------------------------------------------------


def best_of_group(given: AdvantageInputs) -> list[np.ndarray]:
    return [np.where(group == np.nanmax(group), 1.0, -1.0) for group in given.rewards]


def estimate_with(estimator: Any, *groups: PromptGroup) -> list[np.ndarray]:
    with kept_in_memory({"mine": estimator}):
        return estimate(groups, AlgorithmConfig(advantage="in_memory:mine"))


def test_a_custom_estimator_gets_the_rewards_of_each_group_and_failed_ones_get_nothing() -> None:
    found = estimate_with(best_of_group, valued(0, 1, NAN, 3), valued(1, 2, 0))
    assert [one.tolist() for one in found] == [[-1, 0, 1], [1, -1]]
    assert [one.tolist() for one in inputs([1, NAN], [NAN]).scored] == [[True, False], [False]]


@pytest.mark.parametrize(
    ("estimator", "problem"),
    [
        (lambda given: np.zeros(5), "it returned ndarray: return a list with one array for each of 2 groups"),
        (lambda given: best_of_group(given)[:1], "it returned list: return a list with one array for each of 2"),
        (lambda given: [np.zeros(2), np.zeros(2)], r"it returned \[2\] advantages for the 3 responses of group 0"),
        (lambda given: [group / 0.0 for group in given.rewards], "an advantage of group 0 is not finite"),
    ],
)
def test_an_estimator_with_a_wrong_result_is_refused(estimator, problem) -> None:
    message = f"algorithm.advantage = 'in_memory:mine': {problem}"
    with pytest.raises(ConfigError, match=message), np.errstate(divide="ignore"):
        estimate_with(estimator, valued(0, 1, NAN, 3), valued(1, 2, 1))
