"""From the parts of a reward to the reward: weights, penalties, and what a row without a reward holds instead.

    parts ─ weights ─▶ raw ─ penalties ─▶ shaped ─▶ fill_failed, for a trainer that cannot mask rows

NaN means "failed" all the way: no sum, weight or penalty turns it into a number. The reward managers call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from freewheel.errors import ConfigError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Composed:
    """The rewards of a batch, one row a sample."""

    raw: Floats
    """The weighted sum of the parts."""
    shaped: Floats
    """`raw` less the penalties."""
    parts: Mapping[str, Floats]
    """What each part adds to `raw`: its values times its weight."""


def compose(parts: Mapping[str, Floats], weights: Mapping[str, float], penalties: Mapping[str, Floats]) -> Composed:
    """raw = Σ weight · part (weight 1 where none is given);  shaped = raw − Σ penalty."""
    assert parts, "a reward has at least one part"
    unknown = [name for name in weights if name not in parts]
    if unknown:
        raise ConfigError(f"weights.{unknown[0]}", weights[unknown[0]], f"no such part; there are {', '.join(parts)}")
    weighted = {name: weights.get(name, 1.0) * np.asarray(part, dtype=np.float64) for name, part in parts.items()}
    raw = np.sum(list(weighted.values()), axis=0)
    return Composed(raw, raw - sum(penalties.values(), np.zeros_like(raw)), weighted)


def group_mean(
    values: Floats, groups: npt.NDArray[np.integer[Any]], valid: npt.NDArray[np.bool_]
) -> tuple[Floats, Ints]:
    """For each sample, over the valid rows of its group: their mean (NaN if there are none) and their number.

    `groups` as `group_index` gives them.
    """
    counts = np.bincount(groups[valid], minlength=len(values))
    sums = np.bincount(groups[valid], weights=values[valid], minlength=len(values))
    means = np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)
    return means[groups], counts[groups]


def fill_failed(
    values: Floats, groups: npt.NDArray[np.integer[Any]], valid: npt.NDArray[np.bool_], otherwise: Floats
) -> Floats:
    """`values`, but a row that is not valid holds the mean of its group's valid values, so that its advantage over that
    mean is 0; or its own of `otherwise` where the group has no valid row."""
    means, counts = group_mean(values, groups, valid)
    return np.where(valid, values, np.where(counts > 0, means, otherwise))
