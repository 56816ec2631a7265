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

    sums: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """Name → (total), (sum, count) of a mean, or (n, Σw, Σw²) of importance weights w."""
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def merge(self, other: Tally) -> None:
        for name, sums in other.sums.items():
            mine = self.sums.get(name)
            self.sums[name] = sums if mine is None else tuple(a + b for a, b in zip(mine, sums, strict=True))
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def to(self, device: torch.device) -> Tally:
        """Return a copy in double precision on another device. All numbers move at once."""
        flat = self._flat()
        moved = iter(torch.stack(flat).to(device).unbind() if flat else ())
        return Tally(
            sums={name: tuple(next(moved) for _ in sums) for name, sums in self.sums.items()},
            maxima={name: next(moved) for name in self.maxima},
        )

    def values(self) -> dict[str, float]:
        """Return totals, quotients and maxima. A name with a count of 0 is left out.

        The effective sample size (Σw)² / (n·Σw²) is a share: 1 if all weights are equal, 1/n if one weight is all.
        """
        flat = self._flat()
        numbers = iter(torch.stack(flat).tolist() if flat else [])
        found: dict[str, float] = {}
        for name, sums in self.sums.items():
            match [next(numbers) for _ in sums]:
                case [total]:
                    found[name] = total
                case [total, count] if count:
                    found[name] = total / count
                case [n, w, w2] if n and w2:
                    found[name] = w * w / (n * w2)
        found.update((name, next(numbers)) for name in self.maxima)
        return found

    def _flat(self) -> list[Tensor]:
        flat = [one for sums in self.sums.values() for one in sums]
        return [one.detach().double() for one in (*flat, *self.maxima.values())]


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
