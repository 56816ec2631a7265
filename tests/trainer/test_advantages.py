"""Each estimator against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.trainer.advantages import STD_FLOOR, estimate, gae, grpo, has_no_variance, reinforce_pp, rloo, whiten
from freewheel.trainer.options import AlgorithmConfig

from .groups import valued

NAN = math.nan


def arrays(*groups: list[float]) -> list[np.ndarray]:
    return [np.array(group) for group in groups]


def test_grpo_divides_the_distance_from_the_groups_mean_by_the_groups_deviation() -> None:
    (found,) = grpo(arrays([0, 0, 1, 3]))
    # mean 1, squares 1 + 1 + 0 + 4 = 6, variance 6 / 3
    assert found == pytest.approx(np.array([-1, -1, 0, 2]) / (math.sqrt(2) + STD_FLOOR))


def test_grpo_without_normalisation_leaves_the_distance() -> None:
    (found,) = grpo(arrays([0, 0, 1, 3]), "none")
    assert found.tolist() == [-1, -1, 0, 2]


def test_grpo_can_divide_by_the_batchs_deviation() -> None:
    first, second = grpo(arrays([0, 2], [4, 6]), "batch_std")
    # mean 3, squares 9 + 1 + 1 + 9 = 20, variance 20 / 3
    scale = math.sqrt(20 / 3) + STD_FLOOR
    assert first == pytest.approx([-1 / scale, 1 / scale])
    assert second == pytest.approx([-1 / scale, 1 / scale])


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    (found,) = rloo(arrays([0, 3, 6]))
    assert found == pytest.approx([0 - 4.5, 3 - 3, 6 - 1.5])


def test_rloo_can_be_normalised_over_the_batch() -> None:
    first, second = rloo(arrays([0, 1], [0, 3]), "batch_std")
    # advantages -1, 1, -3, 3: mean 0, variance 20 / 3
    scale = math.sqrt(20 / 3) + STD_FLOOR
    assert first == pytest.approx([-1 / scale, 1 / scale])
    assert second == pytest.approx([-3 / scale, 3 / scale])


def test_reinforce_pp_normalises_over_the_batch_what_is_left_of_the_groups_mean() -> None:
    first, second = reinforce_pp(arrays([0, 2], [10, 16]))
    # -1, 1, -3, 3
    scale = math.sqrt(20 / 3) + STD_FLOOR
    assert first == pytest.approx([-1 / scale, 1 / scale])
    assert second == pytest.approx([-3 / scale, 3 / scale])


def test_reinforce_pp_with_a_batch_baseline_keeps_the_difference_between_groups() -> None:
    first, second = reinforce_pp(arrays([0, 0], [1, 1]), "batch")
    scale = math.sqrt(1 / 3) + STD_FLOOR
    assert first == pytest.approx([-0.5 / scale] * 2)
    assert second == pytest.approx([0.5 / scale] * 2)


@pytest.mark.parametrize("estimator", [grpo, rloo, reinforce_pp])
def test_a_failed_response_is_in_no_baseline_and_gets_nothing(estimator) -> None:
    with_failure = estimator(arrays([0, NAN, 1, 3], [1, 2, 0]))
    without = estimator(arrays([0, 1, 3], [1, 2, 0]))
    assert with_failure[0][1] == 0
    assert np.delete(with_failure[0], 1) == pytest.approx(without[0])
    assert with_failure[1] == pytest.approx(without[1])


@pytest.mark.parametrize("estimator", [grpo, rloo, reinforce_pp])
@pytest.mark.parametrize("lost", [[5.0, NAN, NAN], [0.1, 0.1, 0.1], [NAN, NAN, NAN], [7.0]])
def test_a_group_with_nothing_to_compare_has_no_advantage(estimator, lost) -> None:
    found = estimator(arrays(lost, [0, 1]))
    assert np.abs(found[0]).max() == 0
    assert found[1][1] > 0 > found[1][0]


@pytest.mark.parametrize("estimator", [grpo, rloo, reinforce_pp])
def test_groups_of_different_sizes_keep_their_own_mean(estimator) -> None:
    found = estimator(arrays([0, 1], [5, 6, 7, 8]))
    assert [len(one) for one in found] == [2, 4]
    assert [one.sum() for one in found] == pytest.approx([0, 0])


group_rewards = st.lists(st.one_of(st.floats(-10, 10), st.just(NAN)), min_size=1, max_size=6)


@given(st.lists(group_rewards, min_size=1, max_size=5))
def test_advantages_are_always_finite_and_zero_where_scoring_failed(groups) -> None:
    values = arrays(*groups)
    found = [
        *grpo(values),
        *grpo(values, "batch_std"),
        *rloo(values),
        *rloo(values, "batch_std"),
        *reinforce_pp(values),
    ]
    found += reinforce_pp(values, "batch")
    for one, group in zip(found, values * 6, strict=True):
        assert np.isfinite(one).all()
        assert (one[np.isnan(group)] == 0).all()


def test_gae_adds_up_discounted_surprises() -> None:
    rewards, values = np.array([[0.0, 0.0, 1.0]]), np.array([[0.5, 0.4, 0.2]])
    advantages, returns = gae(rewards, values, np.ones((1, 3)), gamma=0.9, lam=0.5)
    last = 1 - 0.2
    middle = 0.9 * 0.2 - 0.4 + 0.45 * last
    first = 0.9 * 0.4 - 0.5 + 0.45 * middle
    assert advantages[0] == pytest.approx([first, middle, last])
    assert returns[0] == pytest.approx([first + 0.5, middle + 0.4, last + 0.2])


def test_gae_steps_over_holes_as_if_they_were_not_there() -> None:
    mask = np.array([[1, 0, 1, 0, 1, 0]])
    rewards, values = np.array([[0, 9, 0, 9, 1.0, 9]]), np.array([[0.5, 7, 0.4, 7, 0.2, 7]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    plain, plain_returns = gae(rewards[:, ::2], values[:, ::2], np.ones((1, 3)), gamma=0.9, lam=0.5)
    assert advantages[0, ::2] == pytest.approx(plain[0])
    assert returns[0, ::2] == pytest.approx(plain_returns[0])
    assert not advantages[0, 1::2].any() and not returns[0, 1::2].any()


def test_with_lambda_and_gamma_of_one_gae_is_the_reward_to_come_less_the_value() -> None:
    rewards, values = np.array([[0.0, 0.0, 2.0]]), np.array([[0.3, -1.0, 0.7]])
    advantages, returns = gae(rewards, values, np.ones((1, 3)), gamma=1.0, lam=1.0)
    assert advantages[0] == pytest.approx(2 - values[0])
    assert returns[0] == pytest.approx([2, 2, 2])


def test_whitening_gives_mean_zero_and_deviation_one() -> None:
    found = whiten(np.array([1.0, 2.0, 3.0]))
    assert found == pytest.approx([-1 / (1 + STD_FLOOR), 0, 1 / (1 + STD_FLOOR)])
    assert whiten(np.array([4.0])).tolist() == [0]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, grpo(arrays([0, 1], [2, 5]))),
        ({"normalise": "none"}, grpo(arrays([0, 1], [2, 5]), "none")),
        ({"name": "rloo"}, rloo(arrays([0, 1], [2, 5]))),
        ({"name": "reinforce_pp"}, reinforce_pp(arrays([0, 1], [2, 5]))),
        ({"name": "reinforce_pp", "baseline": "batch"}, reinforce_pp(arrays([0, 1], [2, 5]), "batch")),
    ],
)
def test_the_algorithms_name_says_which_estimator(settings, wanted) -> None:
    found = estimate([valued(0, 0, 1), valued(1, 2, 5)], AlgorithmConfig(**settings))
    assert np.concatenate(found) == pytest.approx(np.concatenate(wanted))


@pytest.mark.parametrize(
    ("values", "wanted"), [((1, 1, 1), True), ((0.1, 0.2), False), ((1, NAN), True), ((1, NAN, 2), False)]
)
def test_a_group_teaches_nothing_where_its_rewards_do_not_differ(values, wanted) -> None:
    assert has_no_variance(valued(0, *values)) is wanted
