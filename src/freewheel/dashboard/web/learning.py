"""Does it learn? One sentence from two curves, and never a larger claim than they carry. Pure."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from freewheel.dashboard.web.columns import Numbers

Trend = Literal["up", "flat", "down", "unknown"]

SURE = 2.0
"""Standard errors by which two means must differ before one is called higher: 19 times of 20 it is."""
FEWEST_STEPS = 10
"""Steps before a curve of training rewards is said to go anywhere."""
END_SHARE = 0.1
"""Of a curve, what is averaged at either end of it."""


class Learning(NamedTuple):
    trend: Trend
    words: str


def learning(*, steps: Numbers, rewards: Numbers, eval_steps: Numbers, held_out: Numbers, errors: Numbers) -> Learning:
    """By held-out rewards where there are two of them, else by the rewards of training."""
    known = np.flatnonzero(np.isfinite(held_out))
    if len(known) >= 2:
        return _compared(
            "Held-out reward",
            (float(held_out[known[0]]), _or_zero(errors[known[0]]), int(eval_steps[known[0]])),
            (float(held_out[known[-1]]), _or_zero(errors[known[-1]]), int(eval_steps[known[-1]])),
        )
    known = np.flatnonzero(np.isfinite(rewards))
    if len(known) < FEWEST_STEPS:
        return Learning("unknown", "Too early to say whether it learns")
    width = max(FEWEST_STEPS // 2, round(len(known) * END_SHARE))
    first, last = known[:width], known[-width:]
    return _compared(
        "Training reward",
        (*_mean(rewards[first]), int(steps[known[0]])),
        (*_mean(rewards[last]), int(steps[known[-1]])),
    )


def _compared(what: str, first: tuple[float, float, int], last: tuple[float, float, int]) -> Learning:
    (was, was_error, was_at), (now, now_error, now_at) = first, last
    told = f"{was:.3f} at step {was_at:,} → {now:.3f} at step {now_at:,}"
    sure = abs(now - was) > SURE * math.hypot(was_error, now_error) and now != was
    if not sure:
        return Learning("flat", f"No clear change yet: {what.lower()} {told}")
    if now > was:
        return Learning("up", f"It learns: {what.lower()} {told}")
    return Learning("down", f"It gets worse: {what.lower()} {told}")


def _mean(values: Numbers) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def _or_zero(value: float) -> float:
    return float(value) if math.isfinite(value) else 0.0
