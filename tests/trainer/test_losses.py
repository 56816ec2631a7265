"""Each loss against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.trainer.losses import (
    PolicyTokens,
    clipped_surrogate,
    importance_weights,
    kl_estimate,
    policy_loss,
    sequence_ratio,
    token_weights,
    value_loss,
)
from freewheel.trainer.metrics import Tally
from freewheel.trainer.options import AlgorithmConfig

SEQUENCE = torch.tensor([0, 0, 0, 1])
"""Two responses, of three tokens and one."""


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log(*values: float) -> Tensor:
    return tensor(*values).log()


def tokens(**changes: object) -> PolicyTokens:
    given = {
        "behaviour": log(0.5, 0.5, 0.5, 0.5),
        "advantages": tensor(1, 1, 1, -2),
        "weights": tensor(0.25, 0.25, 0.25, 0.25),
        "sequence": SEQUENCE,
        "n_sequences": 2,
    }
    return PolicyTokens(**{**given, **changes})  # type: ignore[arg-type]


def loss_of(probabilities: Tensor, given: PolicyTokens | None = None, **settings: object) -> float:
    entropy = torch.zeros_like(probabilities)
    loss, _ = policy_loss(probabilities.log(), entropy, given or tokens(), AlgorithmConfig(**settings))  # type: ignore[arg-type]
    return float(loss)


@pytest.mark.parametrize(
    ("aggregation", "constant", "wanted"),
    [
        ("token_mean", None, [1 / 4, 1 / 4]),
        ("sequence_mean", None, [1 / 6, 1 / 2]),
        ("constant", 10, [1 / 20, 1 / 20]),
    ],
)
def test_token_weights_say_what_a_token_counts(aggregation, constant, wanted) -> None:
    assert token_weights(np.array([3, 1]), aggregation, constant) == pytest.approx(wanted)


def test_the_surrogate_is_clipped_where_going_on_would_pay() -> None:
    ratio = tensor(1.5, 0.5, 1.5, 0.5, 1.1)
    advantages = tensor(1, 1, -1, -1, 2)
    found = clipped_surrogate(ratio, advantages, low=0.2, high=0.28)
    assert found.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -2.2])


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    ratio, advantages = tensor(10, 2, 10), tensor(-1, -1, 1)
    found = clipped_surrogate(ratio, advantages, low=0.2, high=0.28, dual=3.0)
    assert found.tolist() == pytest.approx([3.0, 2.0, -1.28])


def test_clipped_tokens_get_no_gradient() -> None:
    ratio = tensor(1.5, 0.5, 0.5, 10).requires_grad_()
    clipped_surrogate(ratio, tensor(1, -1, 1, -1), low=0.2, high=0.28, dual=3.0).sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0, 0, -1, 0]


def test_the_sequence_ratio_is_the_geometric_mean_over_a_response() -> None:
    found = sequence_ratio(log(1, 2, 4, 0.5), SEQUENCE, 2)
    assert found.tolist() == pytest.approx([2, 2, 2, 0.5])


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("none", [3, 0.5, 1, 4]),
        ("token_truncate", [2, 0.5, 1, 2]),
        ("token_mask", [0, 0.5, 1, 0]),
        ("sequence_truncate", [1.5, 1.5, 1.5, 2]),
        ("sequence_mask", [1.5, 1.5, 1.5, 0]),
    ],
)
def test_importance_weights_are_truncated_or_masked_by_token_or_by_response(kind, wanted) -> None:
    found = importance_weights(log(3, 0.5, 1, 4), SEQUENCE, 2, kind, cap=2.0)
    assert found.tolist() == pytest.approx(wanted)


def test_a_mask_may_have_a_floor() -> None:
    found = importance_weights(log(3, 0.4, 1, 0.6), SEQUENCE, 2, "token_mask", cap=2.0, floor=0.5)
    assert found.tolist() == pytest.approx([0, 0, 1, 0.6])


def test_kl_estimators() -> None:
    logp, reference = log(0.5), log(0.25)
    x = math.log(0.5)
    assert float(kl_estimate(logp, reference, "k1")) == pytest.approx(-x)
    assert float(kl_estimate(logp, reference, "k2")) == pytest.approx(x * x / 2)
    assert float(kl_estimate(logp, reference, "k3")) == pytest.approx(0.5 - x - 1)


def test_the_default_loss_is_ppo_clip_against_the_engines_probabilities() -> None:
    # ratios 1, 1.6 (clipped to 1.28), 0.4, and 0.2 at a negative advantage (clipped to 0.8)
    found = loss_of(tensor(0.5, 0.8, 0.2, 0.1))
    assert found == pytest.approx(-(1 + 1.28 + 0.4 + 0.8 * -2) / 4)


def test_the_gradient_on_policy_is_that_of_reinforce() -> None:
    logp = log(0.5, 0.5, 0.5, 0.5).requires_grad_()
    loss, _ = policy_loss(logp, torch.zeros(4), tokens(), AlgorithmConfig())
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-0.25, -0.25, -0.25, 0.5])


def test_the_sequence_level_loss_clips_whole_responses() -> None:
    # ratios 1, 2, 4: geometric mean 2, clipped to 1.28; the other response 0.5, clipped to 0.8
    given = tokens(behaviour=log(0.2, 0.2, 0.2, 0.2), weights=tensor(1 / 6, 1 / 6, 1 / 6, 1 / 2))
    found = loss_of(tensor(0.2, 0.4, 0.8, 0.1), given, ratio="sequence", aggregation="sequence_mean")
    assert found == pytest.approx(-(1.28 + 0.8 * -2) / 2)


def test_decoupled_ppo_clips_against_the_proximal_policy_and_weighs_by_it() -> None:
    given = tokens(proximal=log(0.4, 0.4, 0.4, 0.4))
    # weights 0.8; ratios 1, 2 (1.28), 0.5, 0.25 (0.8)
    found = loss_of(tensor(0.4, 0.8, 0.2, 0.1), given, proximal="recomputed")
    assert found == pytest.approx(-0.8 * (1 + 1.28 + 0.5 + 0.8 * -2) / 4)


def test_decoupled_ppo_truncates_its_weights() -> None:
    given = tokens(behaviour=log(0.1, 0.4, 0.4, 0.4), proximal=log(0.4, 0.4, 0.4, 0.4))
    settings = {"proximal": "recomputed", "importance": "token_truncate", "importance_cap": 2.0}
    assert loss_of(tensor(0.4, 0.4, 0.4, 0.4), given, **settings) == pytest.approx(-(2 * 1 + 1 + 1 - 2) / 4)


def test_without_a_recomputed_policy_the_current_one_stands_for_it() -> None:
    logp = log(0.4, 0.8, 0.2, 0.1).requires_grad_()
    config = AlgorithmConfig(proximal="recomputed")
    loss, _ = policy_loss(logp, torch.zeros(4), tokens(), config)
    loss.backward()
    # ratio 1 for all, weights 0.8, 1.6, 0.4, 0.2
    assert loss.item() == pytest.approx(-(0.8 + 1.6 + 0.4 + 0.2 * -2) / 4)
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-0.2, -0.4, -0.1, 0.1])


def test_a_mask_leaves_out_tokens_far_from_the_engines_policy() -> None:
    settings = {"importance": "token_mask", "importance_cap": 1.5, "importance_floor": 0.3}
    # ratios 1, 1.6 (masked), 0.4, 0.2 (masked)
    assert loss_of(tensor(0.5, 0.8, 0.2, 0.1), **settings) == pytest.approx(-(1 + 0.4) / 4)


def test_k3_is_added_to_the_loss() -> None:
    given = tokens(reference=log(0.25, 0.5, 0.5, 0.5), advantages=tensor(0, 0, 0, 0))
    found = loss_of(tensor(0.5, 0.5, 0.5, 0.5), given, kl_coef=0.1)
    assert found == pytest.approx(0.1 * (0.5 - math.log(0.5) - 1) / 4)


def test_k1_is_taken_from_the_advantage_so_that_it_has_a_gradient() -> None:
    given = tokens(reference=log(0.25, 0.5, 0.5, 0.5), advantages=tensor(0, 0, 0, 0))
    logp = log(0.5, 0.5, 0.5, 0.5).requires_grad_()
    loss, _ = policy_loss(logp, torch.zeros(4), given, AlgorithmConfig(kl_coef=0.1, kl_kind="k1"))
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.1 * math.log(2) / 4, 0, 0, 0])


def test_entropy_is_taken_from_the_loss() -> None:
    entropy = tensor(1, 2, 3, 4)
    probabilities = tensor(0.5, 0.5, 0.5, 0.5)
    plain, _ = policy_loss(probabilities.log(), entropy, tokens(), AlgorithmConfig())
    found, _ = policy_loss(probabilities.log(), entropy, tokens(), AlgorithmConfig(entropy_coef=0.1))
    assert float(plain - found) == pytest.approx(0.1 * 2.5)


def test_the_value_loss_takes_the_worse_of_the_clipped_and_the_free_value() -> None:
    values, old, returns = tensor(1.0, 0.1), tensor(0.0, 0.0), tensor(1.0, 1.0)
    found, _ = value_loss(values, old, returns, tensor(0.5, 0.5), 0.2)
    assert float(found) == pytest.approx(0.5 * (0.8**2 + 0.9**2) / 2)
    free, _ = value_loss(values, old, returns, tensor(0.5, 0.5), None)
    assert float(free) == pytest.approx(0.5 * (0 + 0.9**2) / 2)


def test_metrics_of_a_policy_loss() -> None:
    logp = log(0.5, 0.8, 0.2, 0.1)
    _, tally = policy_loss(logp, tensor(1, 2, 3, 6), tokens(), AlgorithmConfig())
    found = tally.values()
    ratios = np.array([1, 1.6, 0.4, 0.2])
    wholes = np.array([1 * 1.6 * 0.4, 0.2])
    assert found["actor/clip_ratio_high"] == pytest.approx(1 / 4)
    assert found["actor/clip_ratio_low"] == pytest.approx(1 / 4)
    assert found["actor/kl"] == pytest.approx(-np.log(ratios).mean())
    assert found["actor/kl_k3"] == pytest.approx((ratios - 1 - np.log(ratios)).mean())
    assert found["actor/entropy"] == pytest.approx(3)
    assert found["actor/ratio_max"] == pytest.approx(1.6)
    assert found["actor/ess"] == pytest.approx(ratios.sum() ** 2 / (4 * (ratios**2).sum()))
    assert found["actor/ess_sequence"] == pytest.approx(wholes.sum() ** 2 / (2 * (wholes**2).sum()))


def test_masked_tokens_are_counted() -> None:
    config = AlgorithmConfig(importance="token_mask", importance_cap=1.5)
    _, tally = policy_loss(log(0.5, 0.8, 0.2, 0.1), torch.zeros(4), tokens(), config)
    assert tally.values()["actor/importance_masked"] == pytest.approx(1 / 4)


def test_losses_and_metrics_of_two_parts_add_up_to_those_of_the_whole() -> None:
    settings = AlgorithmConfig(ratio="sequence", importance="sequence_mask", kl_coef=0.1, entropy_coef=0.1)
    logp, entropy = log(0.5, 0.8, 0.2, 0.1), tensor(1, 2, 3, 6)
    whole = tokens(reference=log(0.4, 0.4, 0.4, 0.4))
    loss, tally = policy_loss(logp, entropy, whole, settings)
    total, together = 0.0, Tally()
    for part in (slice(0, 3), slice(3, 4)):
        some = PolicyTokens(
            behaviour=whole.behaviour[part],
            advantages=whole.advantages[part],
            weights=whole.weights[part],
            sequence=whole.sequence[part] - whole.sequence[part][0],
            n_sequences=1,
            reference=whole.reference[part] if whole.reference is not None else None,
        )
        found, more = policy_loss(logp[part], entropy[part], some, settings)
        total += float(found)
        together.merge(more)
    assert total == pytest.approx(float(loss))
    assert together.values() == pytest.approx(tally.values())


def test_a_ratio_beyond_all_bounds_stays_finite() -> None:
    logp = tensor(0, 0, 0, 0).requires_grad_()
    given = tokens(behaviour=tensor(-500, -500, -500, -500))
    loss, tally = policy_loss(logp, torch.zeros(4), given, AlgorithmConfig())
    loss.backward()
    assert math.isfinite(loss.item()) and logp.grad is not None and bool(logp.grad.isfinite().all())
    assert all(map(math.isfinite, tally.values().values()))


def test_a_tally_of_nothing_has_no_values() -> None:
    assert Tally().values() == {}
    assert Tally(means={"a": (tensor(0)[0], tensor(0)[0])}).values() == {}
