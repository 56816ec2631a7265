"""How old the samples are that a step trains on, in weight versions and in seconds. Called by the trainer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Numbers = Sequence[float] | npt.NDArray[np.number]


def freshness(lags: Numbers, ages_s: Numbers, *, staleness_threshold: int) -> dict[str, float]:
    """`lags`: for each sample, the trainer's version less the oldest version among its tokens. `ages_s`: for each, the
    seconds since it was generated. `stale_samples_ratio` is the share with a lag over the threshold; at the threshold
    a sample is as old as the user allowed, not stale.

    A batch without samples has no age: nothing is said of it.
    """
    lag, age = np.asarray(lags, dtype=np.float64), np.asarray(ages_s, dtype=np.float64)
    if lag.shape != age.shape:
        raise ValueError(f"{lag.size} lags and {age.size} ages: each sample has one of both")
    if not lag.size:
        return {}
    return {
        "avg_sample_age": float(lag.mean()),
        "max_sample_age": float(lag.max()),
        "avg_sample_age_s": float(age.mean()),
        "max_sample_age_s": float(age.max()),
        "stale_samples_ratio": float((lag > staleness_threshold).mean()),
    }


def age_counts(lags: Sequence[int]) -> list[int]:
    """How many of the groups have a lag of 0, of 1, and so on: `lags` has one for each."""
    return [int(count) for count in np.bincount(np.maximum(np.asarray(lags, dtype=np.int64), 0))]
