"""What the groups of a step say about generation and scoring, by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from freewheel.data.group import PromptGroup
from freewheel.trainer.advantages import has_no_variance


def rollout_metrics(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Rewards over scored responses, their parts over those that have them; lengths in the policy's own tokens, over
    all responses."""
    if not groups:
        return {}
    values = np.concatenate([group.values for group in groups])
    scored = values[~np.isnan(values)]
    lengths = np.concatenate([np.add.reduceat(group.mask != 0, group.offsets[:-1], dtype=np.int64) for group in groups])
    status = np.array([reward.status for group in groups for reward in group.rewards])
    raw = np.array([reward.raw for group in groups for reward in group.rewards])
    raw = raw[~np.isnan(raw)]
    found = {
        "rollout/response_length_mean": lengths.mean(),
        "rollout/response_length_max": lengths.max(),
        "rollout/truncation_ratio": np.mean([reason == "length" for group in groups for reason in group.finish]),
        "rollout/masked_ratio": (np.isnan(values) & (status != "skipped")).mean(),
        "rollout/skipped_ratio": (status == "skipped").mean(),
        "rollout/zero_variance_ratio": np.mean([has_no_variance(group) for group in groups]),
    }
    if len(scored):
        found |= {"rollout/reward_mean": scored.mean(), "rollout/reward_std": scored.std()}
    if len(raw):
        found["rollout/raw_reward_mean"] = raw.mean()
    return {name: float(value) for name, value in found.items()} | _parts(groups)


def _parts(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """What rewards are made of, as the function or the judge named it."""
    found: dict[str, list[float]] = {}
    for group in groups:
        for reward in group.rewards:
            for name, value in reward.parts.items():
                if math.isfinite(value):
                    found.setdefault(name, []).append(value)
    return {f"reward/{name}": math.fsum(values) / len(values) for name, values in sorted(found.items())}
