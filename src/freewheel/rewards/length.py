"""Penalties for a response's length, for a whole batch at once. Pure numpy.

`freewheel.rewards.scoring` calls `median_penalty`; `soft_overlong` is for rewards of your own.
A penalty is never negative and is subtracted from the reward.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from freewheel.errors import ConfigError
from freewheel.utils.checks import check_number

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def group_index(uids: Sequence[Hashable] | npt.NDArray[Any]) -> Ints:
    """Return each sample's group as a number: 0 for the first uid, and so on by first appearance."""
    numbers: dict[Hashable, int] = {}
    return np.fromiter((numbers.setdefault(uid, len(numbers)) for uid in uids), dtype=np.int64, count=len(uids))


def check_penalty(**settings: float) -> None:
    """Raise a `ConfigError` on settings with which `median_penalty` cannot work."""
    for key, value in settings.items():
        check_number(key, value, low=0)
    peak_ratio, outer_ratio = settings["peak_ratio"], settings["outer_ratio"]
    if outer_ratio <= peak_ratio:
        remedy = f"the penalty rises from peak_ratio ({peak_ratio:g}) to outer_ratio: give more than that"
        raise ConfigError("outer_ratio", outer_ratio, remedy)


def median_penalty(
    lengths: npt.ArrayLike,
    groups: npt.NDArray[np.integer[Any]],
    *,
    penalty_scale: float,
    max_penalty: float,
    peak_ratio: float,
    outer_ratio: float,
) -> tuple[Floats, Floats]:
    """Return each sample's penalty, and the median length m of its group (`groups` comes from `group_index`).

    With d = |length − m| / m:  penalty = scale · max · clip((d − peak) / (outer − peak), 0, 1);  none where m = 0.
    """
    check_penalty(penalty_scale=penalty_scale, max_penalty=max_penalty, peak_ratio=peak_ratio, outer_ratio=outer_ratio)
    tokens = np.asarray(lengths, dtype=np.int64)
    median = _group_medians(tokens, groups)[groups]
    distance = np.divide(np.abs(tokens - median), median, out=np.zeros_like(median), where=median > 0)
    rise = np.clip((distance - peak_ratio) / (outer_ratio - peak_ratio), 0.0, 1.0)
    return penalty_scale * max_penalty * rise, median


def _group_medians(tokens: Ints, groups: npt.NDArray[np.integer[Any]]) -> Floats:
    """Return each group's median, from one sort of group · stride + length: 3 times faster than a sort by two keys."""
    stride = tokens.max(initial=0) + 1
    in_order = np.sort(groups * stride + tokens) % stride
    sizes = np.bincount(groups)
    starts = np.cumsum(sizes) - sizes
    middles: Floats = (in_order[starts + (sizes - 1) // 2] + in_order[starts + sizes // 2]) / 2
    return middles


def soft_overlong(lengths: npt.ArrayLike, *, max_length: int, buffer_length: int, factor: float) -> Floats:
    """Return DAPO's soft overlong punishment (Yu et al. 2025) as a positive penalty.

    It is 0 up to max − buffer, rises linearly to `factor` at max, and stays there (verl's own lacks this bound).
    """
    check_number("max_length", max_length, low=0)
    check_number("factor", factor, low=0)
    if not 0 < buffer_length <= max_length:
        raise ConfigError("buffer_length", buffer_length, f"give 1 to max_length ({max_length})")
    over = np.asarray(lengths, dtype=np.float64) - (max_length - buffer_length)
    return factor * np.clip(over / buffer_length, 0.0, 1.0)
