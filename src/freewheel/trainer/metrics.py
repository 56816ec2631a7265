"""Metrics of a training step: sums over micro-batches (`Tally`), and numbers about the step's groups.

Used by backends. Metrics are kept as sums with their counts, never as means of means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from freewheel.data.group import PromptGroup
from freewheel.trainer.advantages import has_no_variance


@dataclass(frozen=True)
class Tally:
    """Named sums over tokens. Merging the tallies of two micro-batches gives the tally of one with both's tokens.

    Tensors stay on their device until `values` moves them all at once, so that no micro-batch waits for the device.
    """

    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Name → (sum, count)."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    sample_sizes: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """Name → (n, Σw, Σw²) of importance weights w."""

    def merge(self, other: Tally) -> None:
        for name, (total, count) in other.means.items():
            mine = self.means.get(name)
            self.means[name] = (total, count) if mine is None else (mine[0] + total, mine[1] + count)
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value
        for name, (n, w, w2) in other.sample_sizes.items():
            have = self.sample_sizes.get(name)
            self.sample_sizes[name] = (n, w, w2) if have is None else (have[0] + n, have[1] + w, have[2] + w2)

    def to(self, device: torch.device) -> Tally:
        """Return a copy in double precision on another device. All numbers move at once."""
        flat = self._flat()
        if not flat:
            return Tally()
        moved = iter(torch.stack(flat).to(device).unbind())
        return Tally(
            means={name: (next(moved), next(moved)) for name in self.means},
            maxima={name: next(moved) for name in self.maxima},
            sample_sizes={name: (next(moved), next(moved), next(moved)) for name in self.sample_sizes},
        )

    def values(self) -> dict[str, float]:
        """Return the quotients. A name with a count of 0 is left out.

        The effective sample size (Σw)² / (n·Σw²) is a share: 1 if all weights are equal, 1/n if one weight is all.
        """
        flat = self._flat()
        numbers = iter(torch.stack(flat).tolist() if flat else [])
        found: dict[str, float] = {}
        for name in self.means:
            total, count = next(numbers), next(numbers)
            if count:
                found[name] = total / count
        for name in self.maxima:
            found[name] = next(numbers)
        for name in self.sample_sizes:
            n, w, w2 = next(numbers), next(numbers), next(numbers)
            if n and w2:
                found[name] = w * w / (n * w2)
        return found

    def _flat(self) -> list[Tensor]:
        flat = [one for pair in self.means.values() for one in pair]
        flat += self.maxima.values()
        flat += [one for three in self.sample_sizes.values() for one in three]
        return [one.detach().double() for one in flat]


def rollout_metrics(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Return metrics about generation and scoring of a step's groups.

    Rewards are means over scored responses, reward parts over the responses that have them. Lengths count the policy's
    own tokens of all responses.
    """
    if not groups:
        return {}
    values = np.concatenate([group.rewards for group in groups])
    scored = values[~np.isnan(values)]
    lengths = np.concatenate([np.add.reduceat(group.mask != 0, group.offsets[:-1], dtype=np.int64) for group in groups])
    status = np.array([verdict.status for group in groups for verdict in group.verdicts])
    raw = np.concatenate([group.raw_rewards for group in groups])
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
    return {name: float(value) for name, value in found.items()} | _reward_parts(groups)


def _reward_parts(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Return the mean of each part of the reward, as the reward function or the judge named it."""
    found: dict[str, list[float]] = {}
    for group in groups:
        for verdict in group.verdicts:
            for name, value in verdict.parts.items():
                if math.isfinite(value):
                    found.setdefault(name, []).append(value)
    return {f"reward/{name}": math.fsum(values) / len(values) for name, values in sorted(found.items())}
