"""Advantages: how much better than expected each response (or token) was. One pure function per estimator.

    [PromptGroup] ─▶ rewards of each group, NaN if scoring failed ─▶ grpo | rloo | reinforce_pp ─▶ an array per group
                     a critic's value of each token ───────────────▶ gae ─▶ advantages, returns

`algorithm.advantage` selects the estimator. A response whose scoring failed is in no mean and no standard deviation.
Its advantage is 0, and the batch leaves it out (`freewheel.trainer.batching`). In a group with nothing to compare (one
scored response, or equal rewards) all advantages are 0. Backends call `estimate` once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from freewheel.data.group import Array, PromptGroup
from freewheel.errors import ConfigError
from freewheel.trainer.options import AlgorithmConfig

STD_FLOOR = 1e-4
"""Added to a standard deviation before dividing by it, as in TRL: smaller differences between rewards are noise and
must not become advantages of 1."""
EQUAL = 1e-9
"""Rewards closer than this, relative to their size, are equal: the mean of equal floats may be off by a rounding."""


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """The rewards of a step's groups."""

    rewards: Sequence[Array]
    """One array per group, with the reward of each response. NaN if its scoring failed or was skipped."""
    settings: AlgorithmConfig = field(default_factory=AlgorithmConfig)

    @property
    def scored(self) -> list[Array]:
        """One boolean array per group: which responses have a reward."""
        return [~np.isnan(group) for group in self.rewards]


def estimate(groups: Sequence[PromptGroup], config: AlgorithmConfig) -> list[Array]:
    """Return an array per group with the advantage of each response. Raises `ConfigError` for a wrong result.

    Not for `gae`, whose advantages are per token.
    """
    inputs = AdvantageInputs(rewards=[group.rewards for group in groups], settings=config)
    found = config.find_estimator()(inputs)
    if problem := _find_problem(found, inputs):
        raise ConfigError("algorithm.advantage", config.estimator, problem)
    return [np.where(scored, np.asarray(one), 0.0) for one, scored in zip(found, inputs.scored, strict=True)]


def _find_problem(found: object, inputs: AdvantageInputs) -> str:
    """Describe why a result cannot be used; empty if it can."""
    if not isinstance(found, list | tuple) or len(found) != len(inputs.rewards):
        return (
            f"it returned {type(found).__name__}: return a list with one array for each of {len(inputs.rewards)} groups"
        )
    for number, (one, scored) in enumerate(zip(found, inputs.scored, strict=True)):
        if np.shape(one) != scored.shape:
            shape = list(np.shape(one))
            return f"it returned {shape} advantages for the {len(scored)} responses of group {number}: return one each"
        if not np.isfinite(np.asarray(one, float)[scored]).all():
            return f"an advantage of group {number} is not finite, with rewards {inputs.rewards[number].tolist()}"
    return ""


def grpo(inputs: AdvantageInputs) -> list[Array]:
    """Group-relative: A_i = (r_i − mean(r)) / (std(r) + ε), over the scored responses of a group (std with n − 1).

    `normalise` "none" does not divide (Dr. GRPO); "batch_std" divides by the std of all scored rewards of the batch.
    """
    rewards, normalise = inputs.rewards, inputs.settings.normalisation
    advantages = [_subtract_mean(group) for group in rewards]
    if normalise == "std":
        return [one / (_std(group) + STD_FLOOR) for one, group in zip(advantages, rewards, strict=True)]
    if normalise == "batch_std":
        scale = _std(np.concatenate(rewards)) + STD_FLOOR
        return [one / scale for one in advantages]
    return advantages


def rloo(inputs: AdvantageInputs) -> list[Array]:
    """Leave one out: A_i = r_i − mean of the group's other scored rewards = n/(n − 1) · (r_i − mean(r)).

    `normalise` "batch_std" then normalises over the batch, (A − mean(A)) / (std(A) + ε).
    """
    advantages = []
    for group in inputs.rewards:
        n = np.count_nonzero(~np.isnan(group))
        advantages.append(_subtract_mean(group) * (n / (n - 1) if n > 1 else 0.0))
    normalises = inputs.settings.normalisation == "batch_std"
    return _whiten_groups(advantages, inputs.rewards) if normalises else advantages


def reinforce_pp(inputs: AdvantageInputs) -> list[Array]:
    """REINFORCE++: A_i = (a_i − mean(a)) / (std(a) + ε) over the batch's scored responses, where a_i = r_i − baseline.

    `baseline` "group": the mean of the response's group. "batch": 0, because the batch's mean is subtracted anyway.
    """
    if inputs.settings.baseline == "batch":
        return _whiten_groups([np.nan_to_num(group, nan=0.0) for group in inputs.rewards], inputs.rewards)
    return _whiten_groups([_subtract_mean(group) for group in inputs.rewards], inputs.rewards)


def gae(rewards: Array, values: Array, mask: Array, *, gamma: float, lam: float) -> tuple[Array, Array]:
    """Generalised advantage estimation, [n, T]. Returns advantages and returns (A + V), 0 where `mask` is 0.

        δ_t = r_t + γ·V_{t+1} − V_t        A_t = δ_t + γλ·A_{t+1}        V and A are 0 after the end

    t + 1 is the next token of the policy: a gap in the mask (a tool's reply) takes no time.
    """
    advantages = np.zeros(values.shape, np.float64)
    next_value = np.zeros(len(values))
    next_advantage = np.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        own = mask[:, t] != 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = np.where(own, advantage, next_advantage)
        next_value = np.where(own, values[:, t], next_value)
        advantages[:, t] = np.where(own, advantage, 0.0)
    return advantages, np.where(mask != 0, advantages + values, 0.0)


def whiten(values: Array) -> Array:
    """(x − mean(x)) / (std(x) + ε); zeros if there is nothing to compare."""
    return _subtract_mean(values) / (_std(values) + STD_FLOOR)


def has_no_variance(group: PromptGroup) -> bool:
    """Whether a group baseline leaves nothing to learn from it. `algorithm.zero_variance` decides what happens then."""
    return not _differs(group.rewards[group.scored])


def _subtract_mean(values: Array) -> Array:
    """values − their mean, over the scored ones; 0 for the others, and for all if they do not differ."""
    scored = ~np.isnan(values)
    if not _differs(values[scored]):
        return np.zeros(len(values))
    return np.where(scored, values - values[scored].mean(), 0.0)


def _differs(scored: Array) -> bool:
    return len(scored) > 1 and bool(np.ptp(scored) > EQUAL * np.abs(scored).max())


def _std(values: Array) -> float:
    scored = values[~np.isnan(values)]
    return float(scored.std(ddof=1)) if len(scored) > 1 else 0.0


def _whiten_groups(advantages: Sequence[Array], rewards: Sequence[Array]) -> list[Array]:
    """Normalise over the batch's scored responses; 0 for the others."""
    flat = np.concatenate([np.where(np.isnan(r), np.nan, a) for a, r in zip(advantages, rewards, strict=True)])
    return np.split(whiten(flat), np.cumsum([len(group) for group in rewards])[:-1])
