"""The learning rate of each step: a pure function of the step's number, so a resumed run has nothing to restore."""

from __future__ import annotations

import math

from freewheel.trainer.options import OptimizerConfig


def lr_factor(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The share of the highest learning rate at `step` (0 is the first).

    Linear growth over `warmup_steps`, the last of which has the full rate; then, with p the share of the remaining
    steps that are done and m = `min_lr_ratio`:

        constant: 1        linear: 1 − (1 − m)·p        cosine: m + (1 − m)·(1 + cos πp)/2
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    rest = total_steps - config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / rest) if rest > 0 else 1.0
    floor = config.min_lr_ratio
    if config.schedule == "linear":
        return 1 - (1 - floor) * done
    return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2
