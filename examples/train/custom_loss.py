"""Train with your own loss and your own advantage estimator.

    cd examples/train
    freewheel train algorithm.loss=custom_loss:cispo algorithm.advantage=custom_loss:above_median

    rewards of a group ─▶ above_median ─▶ an advantage per response ─▶ cispo ─▶ a loss per token

The trainer's process imports both functions by name. The run checks them before anything is generated.
"""

from __future__ import annotations

import numpy as np
import torch

from freewheel.trainer.advantages import AdvantageInputs
from freewheel.trainer.losses import LossInputs, LossOutputs


def cispo(inputs: LossInputs) -> LossOutputs:
    """CISPO: l_t = −min(ρ_t, 1 + clip_high)·A_t·log π_t, where ρ_t = π_t/μ_t gets no gradient.

    PPO-clip drops the gradient of a token whose ratio is too large. CISPO keeps it and limits its weight.
    """
    ratio = (inputs.logprobs.detach() - inputs.behaviour).exp()
    weight = ratio.clamp(max=1 + inputs.settings.clip_high)
    loss = -weight * inputs.advantages * inputs.logprobs
    # Metrics are (sum, count): micro-batches are added up before they are divided.
    metrics = {"cispo/truncated_ratio": ((ratio > weight).sum(), torch.ones_like(ratio).sum())}
    return LossOutputs(loss=loss, metrics=metrics)


def above_median(inputs: AdvantageInputs) -> list[np.ndarray]:
    """A_i = r_i − median of the group's rewards. A response that could not be scored has the reward NaN."""
    return [np.zeros(len(r)) if np.isnan(r).all() else r - np.nanmedian(r) for r in inputs.rewards]
