"""Losses against numbers worked out by hand, and the contract of a custom loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.trainer.losses import (
    LossInputs,
    LossOutputs,
    Tally,
    apply_loss,
    check_loss,
    ppo_clip,
    token_weights,
    value_loss,
)
from freewheel.trainer.options import AlgorithmConfig

RESPONSE = torch.tensor([0, 0, 0, 1])
"""Two responses, of three tokens and one."""
CPU = torch.device("cpu")


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log(*values: float) -> Tensor:
    return tensor(*values).log()


def inputs(logp: Tensor, settings: AlgorithmConfig | None = None, **changes: Any) -> LossInputs:
    given: dict[str, Any] = {
        "entropy": torch.zeros_like(logp),
        "behaviour": log(0.5, 0.5, 0.5, 0.5),
        "advantages": tensor(1, 1, 1, -2),
        "weights": tensor(0.25, 0.25, 0.25, 0.25),
        "response": RESPONSE,
        "n_responses": 2,
        "tokens": torch.arange(4),
    }
    return LossInputs(logprobs=logp, settings=settings or AlgorithmConfig(), **{**given, **changes})


EVEN = tensor(0, 0, 0, 0)
SIXTHS = tensor(1 / 6, 1 / 6, 1 / 6, 1 / 2)
CASES: dict[str, tuple[list[float], dict[str, Any], dict[str, Any], float, list[float] | None]] = {
    # probabilities (behaviour: 0.5), settings, other inputs, loss, gradient by log-probability
    "PPO-clip with ratios 1, 1.6 → 1.28, 0.4, and 0.2 → 0.8 at a negative advantage": (
        [0.5, 0.8, 0.2, 0.1], {}, {}, -(1 + 1.28 + 0.4 + 0.8 * -2) / 4, [-0.25, 0, -0.1, 0],
    ),
    "on policy, REINFORCE": ([0.5] * 4, {}, {}, -(1 + 1 + 1 - 2) / 4, [-0.25, -0.25, -0.25, 0.5]),
    "at a negative advantage nothing bounds a ratio of 1.9": (
        [0.95, 0.5, 0.5, 0.5], {}, {"advantages": tensor(-1, 1, 1, 1)}, -(-1.9 + 3) / 4, [1.9 / 4, -0.25, -0.25, -0.25],
    ),
    "dual clip bounds it": (
        [0.95, 0.5, 0.5, 0.5], {"dual_clip": 1.5}, {"advantages": tensor(-1, 1, 1, 1)}, -(-1.5 + 3) / 4,
        [0, -0.25, -0.25, -0.25],
    ),
    "whole responses: ratios 1, 2, 4 have mean 2 → 1.28, and 0.5 → 0.8": (
        [0.2, 0.4, 0.8, 0.1], {"ratio": "sequence", "aggregation": "sequence_mean"},
        {"behaviour": log(0.2, 0.2, 0.2, 0.2), "weights": SIXTHS}, -(1.28 + 0.8 * -2) / 2, None,
    ),
    "decoupled PPO: weights 0.8, ratios 1, 2 → 1.28, 0.5, 0.25 → 0.8": (
        [0.4, 0.8, 0.2, 0.1], {"proximal": "recomputed"}, {"proximal": log(0.4, 0.4, 0.4, 0.4)},
        -0.8 * (1 + 1.28 + 0.5 + 0.8 * -2) / 4, None,
    ),
    "decoupled PPO truncates the weight 4 to 2": (
        [0.4] * 4, {"proximal": "recomputed", "importance": "token_truncate", "importance_cap": 2.0},
        {"behaviour": log(0.1, 0.4, 0.4, 0.4), "proximal": log(0.4, 0.4, 0.4, 0.4)}, -(2 + 1 + 1 - 2) / 4, None,
    ),
    "decoupled PPO before the first update: ratio 1, weights 0.8, 1.6, 0.4, 0.2": (
        [0.4, 0.8, 0.2, 0.1], {"proximal": "recomputed"}, {},
        -(0.8 + 1.6 + 0.4 + 0.2 * -2) / 4, [-0.2, -0.4, -0.1, 0.1],
    ),
    "a mask leaves out the ratios 1.6 and 0.2": (
        [0.5, 0.8, 0.2, 0.1], {"importance": "token_mask", "importance_cap": 1.5, "importance_floor": 0.3}, {},
        -(1 + 0.4) / 4, None,
    ),
    "weights of whole responses, 2 · 0.5 · 1.5 and 2 → 1.75": (
        [0.8, 0.2, 0.6, 0.8],
        {"proximal": "recomputed", "importance": "sequence_truncate", "importance_cap": 1.75},
        {"behaviour": log(0.4, 0.4, 0.4, 0.4)}, -(3 * 1.5 + 1.75 * -2) / 4, None,
    ),
    "a mask leaves out the second of these responses": (
        [0.8, 0.2, 0.6, 0.8],
        {"proximal": "recomputed", "importance": "sequence_mask", "importance_cap": 1.75},
        {"behaviour": log(0.4, 0.4, 0.4, 0.4)}, -3 * 1.5 / 4, None,
    ),
    "k3 is added to the loss": (
        [0.5] * 4, {"kl_coef": 0.1}, {"reference": log(0.25, 0.5, 0.5, 0.5), "advantages": EVEN},
        0.1 * (0.5 - math.log(0.5) - 1) / 4, None,
    ),
    "k2 is half the square of the log-ratio": (
        [0.5] * 4, {"kl_coef": 0.1, "kl_kind": "k2"},
        {"reference": log(0.25, 0.5, 0.5, 0.5), "advantages": EVEN}, 0.1 * math.log(2) ** 2 / 2 / 4, None,
    ),
    "k1 is subtracted from the advantage, so it has a gradient": (
        [0.5] * 4, {"kl_coef": 0.1, "kl_kind": "k1"},
        {"reference": log(0.25, 0.5, 0.5, 0.5), "advantages": EVEN},
        0.1 * math.log(2) / 4, [0.1 * math.log(2) / 4, 0, 0, 0],
    ),
    "entropy is subtracted": (
        [0.5] * 4, {"entropy_coef": 0.1}, {"entropy": tensor(1, 2, 3, 4), "advantages": EVEN}, -0.1 * 2.5, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("probabilities", "settings", "given", "wanted", "slope"), CASES.values(), ids=CASES)
def test_the_policy_loss_is_worked_out_by_hand(probabilities, settings, given, wanted, slope) -> None:
    logp = log(*probabilities).requires_grad_()
    loss, _ = apply_loss(ppo_clip, inputs(logp, AlgorithmConfig(**settings), **given))
    assert loss.item() == pytest.approx(wanted)
    if slope is not None:
        (found,) = torch.autograd.grad(loss, logp)
        assert found.tolist() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("aggregation", "constant", "wanted"),
    [
        ("token_mean", None, [1 / 4, 1 / 4]),
        ("sequence_mean", None, [1 / 6, 1 / 2]),
        ("constant", 10, [1 / 20, 1 / 20]),
    ],
)
def test_the_aggregation_decides_how_much_a_token_counts(aggregation, constant, wanted) -> None:
    assert token_weights(np.array([3, 1]), aggregation, constant) == pytest.approx(wanted)


def test_the_value_loss_takes_the_worse_of_the_clipped_and_the_free_value() -> None:
    values, old, returns = tensor(1.0, 0.1), tensor(0.0, 0.0), tensor(1.0, 1.0)
    clipped, tally = value_loss(values, old, returns, tensor(0.5, 0.5), 0.2)
    assert float(clipped) == pytest.approx(0.5 * (0.8**2 + 0.9**2) / 2)
    assert tally.values()["critic/clip_ratio"] == 0.5
    free, _ = value_loss(values, old, returns, tensor(0.5, 0.5), None)
    assert float(free) == pytest.approx(0.5 * (0 + 0.9**2) / 2)


def test_metrics_of_a_policy_loss() -> None:
    given = inputs(log(0.5, 0.8, 0.2, 0.1), entropy=tensor(1, 2, 3, 6))
    found = apply_loss(ppo_clip, given)[1].values()
    ratios, wholes = np.array([1, 1.6, 0.4, 0.2]), np.array([1 * 1.6 * 0.4, 0.2])
    assert found == pytest.approx(
        {
            "actor/clip_ratio_high": 1 / 4,
            "actor/clip_ratio_low": 1 / 4,
            "actor/kl": -np.log(ratios).mean(),
            "actor/kl_k3": (ratios - 1 - np.log(ratios)).mean(),
            "actor/entropy": 3,
            "actor/ratio_max": 1.6,
            "actor/ess": ratios.sum() ** 2 / (4 * (ratios**2).sum()),
            "actor/ess_sequence": wholes.sum() ** 2 / (2 * (wholes**2).sum()),
        }
    )
    flipped = apply_loss(ppo_clip, inputs(given.logprobs, advantages=tensor(-1, -1, -1, 1)))[1].values()
    assert (flipped["actor/clip_ratio_high"], flipped["actor/clip_ratio_low"]) == (0, 1 / 4), "only 0.4 is clipped"
    masked = inputs(given.logprobs, AlgorithmConfig(importance="token_mask", importance_cap=1.5))
    assert apply_loss(ppo_clip, masked)[1].values()["actor/importance_masked"] == pytest.approx(1 / 4)


def test_losses_and_metrics_of_two_micro_batches_add_up_to_those_of_one() -> None:
    settings = AlgorithmConfig(ratio="sequence", importance="sequence_mask", kl_coef=0.1, entropy_coef=0.1)
    whole = inputs(log(0.5, 0.8, 0.2, 0.1), settings, entropy=tensor(1, 2, 3, 6), reference=log(0.4, 0.4, 0.4, 0.4))
    loss, tally = apply_loss(ppo_clip, whole)
    total, together = 0.0, Tally()
    for part in (slice(0, 3), slice(3, 4)):
        cut = {name: one[part] for name, one in vars(whole).items() if isinstance(one, Tensor)}
        cut |= {"response": cut["response"] - cut["response"][0], "n_responses": 1, "settings": settings}
        found, more = apply_loss(ppo_clip, LossInputs(**cut))  # type: ignore[arg-type]
        total += float(found)
        together.merge(more)
    assert total == pytest.approx(float(loss))
    assert together.values() == pytest.approx(tally.values())


def test_a_huge_ratio_stays_finite() -> None:
    logp = tensor(0, 0, 0, 0).requires_grad_()
    loss, tally = apply_loss(ppo_clip, inputs(logp, behaviour=tensor(-500, -500, -500, -500)))
    (slope,) = torch.autograd.grad(loss, logp)
    assert math.isfinite(loss.item()) and bool(slope.isfinite().all())
    assert all(map(math.isfinite, tally.values().values()))


# -- the contract of a custom loss ------------------------------------------------------------------------------------


def reinforce(given: LossInputs) -> LossOutputs:
    ratio = (given.logprobs.detach() - given.behaviour).exp().clamp(max=2.0)
    zero = ratio.new_zeros(())
    metrics = {"mine/truncated": ((ratio == 2.0).sum(), zero + len(ratio)), "mine/empty": (zero, zero)}
    return LossOutputs(
        loss=-ratio * given.advantages * given.logprobs, metrics=metrics, maxima={"mine/max": ratio.max()}
    )


def test_a_custom_loss_is_weighted_and_its_metrics_join_the_usual_ones() -> None:
    logp = log(0.5, 0.5, 1.0, 1.0).requires_grad_()
    loss, tally = apply_loss(reinforce, inputs(logp))
    (slope,) = torch.autograd.grad(loss, logp)
    assert slope.tolist() == pytest.approx([-1 / 4, -1 / 4, -2 / 4, 2 * 2 / 4])
    found = tally.values()
    assert (found["mine/truncated"], found["mine/max"]) == (0.5, 2.0)
    assert "actor/kl" in found and "actor/clip_ratio_low" not in found
    assert "mine/empty" not in found, "a mean over nothing"


WRONG: dict[str, tuple[Any, str]] = {
    "a bare tensor": (lambda given: -given.logprobs, "it returned Tensor: return LossOutputs"),
    "a mean": (lambda given: LossOutputs(loss=-given.logprobs.mean()), r"a loss of \[\] for 3 tokens.*do not average"),
    "a number": (lambda given: LossOutputs(loss=1.0), "a loss of float for 3 tokens"),
    "no gradient": (lambda given: LossOutputs(loss=-given.logprobs.detach()), "its loss has no gradient"),
    "a metric that is no pair": (
        lambda given: LossOutputs(loss=-given.logprobs, metrics={"mine/x": given.logprobs.mean()}),
        "its metric 'mine/x' is no",
    ),
    "a metric per token": (
        lambda given: LossOutputs(loss=-given.logprobs, metrics={"mine/x": (given.logprobs, torch.tensor(3))}),
        "its metric 'mine/x' is no",
    ),
    "NaN": (lambda given: LossOutputs(loss=given.logprobs.log()), "is nan: return finite numbers"),
    "an exception": (lambda given: given.logprops, "it raised AttributeError on a test batch"),
}


@pytest.mark.parametrize(("loss", "problem"), WRONG.values(), ids=WRONG)
def test_a_loss_with_a_wrong_result_is_refused_before_training(loss, problem) -> None:
    settings = AlgorithmConfig(loss="mine:loss")
    with pytest.raises(ConfigError, match=f"algorithm.loss = 'mine:loss': .*{problem}"):
        check_loss(loss, settings, CPU)
    check_loss(reinforce, settings, CPU)
