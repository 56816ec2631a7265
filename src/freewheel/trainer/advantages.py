"""How much better than expected each response (or token) was: one pure function an estimator, its formula above it.

    [PromptGroup] ─▶ values, a group at a time, NaN where scoring failed ─▶ grpo | rloo | reinforce_pp ─▶ advantages
                     a critic's values, a token at a time ────────────────▶ gae ─▶ advantages, returns

A response whose scoring failed is in no mean and in no standard deviation, and its advantage is 0; the batch leaves it
out altogether (`freewheel.trainer.batching`). Where a group leaves nothing to compare, with one scored response or
with equal rewards, advantages are 0. Called by backends, once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from freewheel.data.group import Array, PromptGroup
from freewheel.trainer.options import AlgorithmConfig, Baseline, Normalise

STD_FLOOR = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does: rewards that differ by less are noise, and must
not become advantages of 1."""
EQUAL = 1e-9
"""Rewards closer than this, relative to their size, are equal: a mean of equal floats may be off by a rounding."""


def grpo(values: Sequence[Array], normalise: Normalise = "std") -> list[Array]:
    """Group-relative: A_i = (r_i − mean(r)) / (std(r) + ε), over the scored responses of a group (std with n − 1).

    `normalise` "none" does not divide (Dr. GRPO); "batch_std" divides by the std of all scored rewards of the batch.
    """
    advantages = [_centred(group) for group in values]
    if normalise == "std":
        return [one / (_std(group) + STD_FLOOR) for one, group in zip(advantages, values, strict=True)]
    if normalise == "batch_std":
        scale = _std(np.concatenate(values)) + STD_FLOOR
        return [one / scale for one in advantages]
    return advantages


def rloo(values: Sequence[Array], normalise: Normalise = "none") -> list[Array]:
    """Leave one out: A_i = r_i − mean of the group's other scored rewards = n/(n − 1) · (r_i − mean(r)).

    `normalise` "batch_std" then normalises over the batch, (A − mean(A)) / (std(A) + ε).
    """
    advantages = []
    for group in values:
        n = np.count_nonzero(~np.isnan(group))
        advantages.append(_centred(group) * (n / (n - 1) if n > 1 else 0.0))
    return _whitened(advantages, values) if normalise == "batch_std" else advantages


def reinforce_pp(values: Sequence[Array], baseline: Baseline = "group") -> list[Array]:
    """REINFORCE++: A_i = (a_i − mean(a)) / (std(a) + ε) over the batch's scored responses, where a_i = r_i − baseline.

    `baseline` "group": the mean of the response's group. "batch": none of its own, for the batch's mean is subtracted.
    """
    if baseline == "batch":
        return _whitened([np.nan_to_num(group, nan=0.0) for group in values], values)
    return _whitened([_centred(group) for group in values], values)


def gae(rewards: Array, values: Array, mask: Array, *, gamma: float, lam: float) -> tuple[Array, Array]:
    """Generalised advantage estimation, [n, T]; gives advantages and returns (A + V), 0 where `mask` is 0.

        δ_t = r_t + γ·V_{t+1} − V_t        A_t = δ_t + γλ·A_{t+1}        V and A are 0 after the end

    t + 1 is the next token that the policy made: a hole in the mask (a tool's reply) takes no time.
    """
    advantages = np.zeros(values.shape, np.float64)
    next_value = np.zeros(len(values))
    next_advantage = np.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        made = mask[:, t] != 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = np.where(made, advantage, next_advantage)
        next_value = np.where(made, values[:, t], next_value)
        advantages[:, t] = np.where(made, advantage, 0.0)
    return advantages, np.where(mask != 0, advantages + values, 0.0)


def whiten(values: Array) -> Array:
    """(x − mean(x)) / (std(x) + ε); zeros where there is nothing to compare."""
    return _centred(values) / (_std(values) + STD_FLOOR)


def estimate(groups: Sequence[PromptGroup], config: AlgorithmConfig) -> list[Array]:
    """An advantage for each response of each group, by the algorithm's name. (PPO's are `gae`'s, a token each.)"""
    values = [group.rewards for group in groups]
    estimators: dict[str, Callable[[], list[Array]]] = {
        "grpo": lambda: grpo(values, config.normalisation),
        "rloo": lambda: rloo(values, config.normalisation),
        "reinforce_pp": lambda: reinforce_pp(values, config.baseline),
    }
    return estimators[config.name]()


def has_no_variance(group: PromptGroup) -> bool:
    """Whether a group baseline leaves nothing to learn from it: `algorithm.zero_variance` says what then happens."""
    return not _differs(group.rewards[group.scored])


def _centred(values: Array) -> Array:
    """values − their mean, over the scored ones; 0 for the others, and for all where nothing differs."""
    scored = ~np.isnan(values)
    if not _differs(values[scored]):
        return np.zeros(len(values))
    return np.where(scored, values - values[scored].mean(), 0.0)


def _differs(scored: Array) -> bool:
    return len(scored) > 1 and bool(np.ptp(scored) > EQUAL * np.abs(scored).max())


def _std(values: Array) -> float:
    scored = values[~np.isnan(values)]
    return float(scored.std(ddof=1)) if len(scored) > 1 else 0.0


def _whitened(advantages: Sequence[Array], values: Sequence[Array]) -> list[Array]:
    """Normalised over the batch's scored responses; 0 for the others."""
    flat = np.concatenate([np.where(np.isnan(v), np.nan, a) for a, v in zip(advantages, values, strict=True)])
    return np.split(whiten(flat), np.cumsum([len(group) for group in values])[:-1])
