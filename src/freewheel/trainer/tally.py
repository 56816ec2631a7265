"""Numbers of a step that add up over its micro-batches: sums with their counts, never means of means.

Tensors stay where they are until `values`, which moves them all at once: no micro-batch waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tally:
    """Named sums. `merge` two of them and you have what one micro-batch with both's tokens would have given."""

    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Name → (numerator, denominator)."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    sample_sizes: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """Name → (n, Σw, Σw²), of importance weights w."""

    def merge(self, other: Tally) -> None:
        for name, (above, below) in other.means.items():
            mine = self.means.get(name)
            self.means[name] = (above, below) if mine is None else (mine[0] + above, mine[1] + below)
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value
        for name, (n, w, w2) in other.sample_sizes.items():
            have = self.sample_sizes.get(name)
            self.sample_sizes[name] = (n, w, w2) if have is None else (have[0] + n, have[1] + w, have[2] + w2)

    def values(self) -> dict[str, float]:
        """The quotients. A name that counted nothing is left out.

        The effective sample size (Σw)² / (n·Σw²) is a share: 1 where all weights are equal, 1/n where one is all.
        """
        flat = [one for pair in self.means.values() for one in pair]
        flat += self.maxima.values()
        flat += [one for three in self.sample_sizes.values() for one in three]
        numbers = iter(torch.stack([one.detach().double() for one in flat]).tolist() if flat else [])
        found: dict[str, float] = {}
        for name in self.means:
            above, below = next(numbers), next(numbers)
            if below:
                found[name] = above / below
        for name in self.maxima:
            found[name] = next(numbers)
        for name in self.sample_sizes:
            n, w, w2 = next(numbers), next(numbers), next(numbers)
            if n and w2:
                found[name] = w * w / (n * w2)
        return found
