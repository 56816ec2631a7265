"""AdamW with clipping, which refuses gradients that are not finite, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from freewheel.trainer.options import OptimizerConfig

STATE = ("step", "exp_avg", "exp_avg_sq")
CLIP_EPS = 1e-6
"""torch adds this to the norm before dividing by it. A norm below it needs no clipping, so gradients are not read."""


def lr_factor(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the share of the highest learning rate at `step` (the first is 0).

    It grows linearly over `warmup_steps`, the last of which has the full rate. Then, with p the share of the remaining
    steps that are done and m = `min_lr_ratio`:

        constant: 1        linear: 1 − (1 − m)·p        cosine: m + (1 − m)·(1 + cos πp)/2

    It depends on nothing but the step, so a resumed run has nothing to restore.
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


class Optimizer:
    """AdamW on named parameters, with its moments. The caller passes the learning rate with each step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters = dict(parameters)
        self.updates_applied = 0
        self._clip = config.grad_clip
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        others = [p for p in self.parameters.values() if p.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=0.0,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def step(self, lr: float, loss: Tensor) -> tuple[Tensor, bool]:
        """Apply the gradients if they and `loss` are finite. Returns their norm and whether they were applied."""
        parameters = [p for p in self.parameters.values() if p.grad is not None]
        norm = self._norm([p.grad for p in parameters if p.grad is not None])
        length, total = torch.stack((norm, loss.to(norm))).tolist()  # the only wait for the device in an update
        applied = math.isfinite(length) and math.isfinite(total)
        if applied:
            if self._clip is not None and length + CLIP_EPS > self._clip:
                torch.nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            torch.autograd.graph.increment_version(parameters)  # the fused step does not, and `Computation` needs it
            self.updates_applied += 1
        self.forget()
        return norm, applied

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients together. With several ranks, of all their shards."""
        return torch.nn.utils.get_total_norm(gradients)

    def forget(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return `NAME.exp_avg`, `NAME.exp_avg_sq` and `NAME.step` of parameters that were stepped, on their device."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self._adamw.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `state`. Parameters that it does not contain start with no moments."""
        self._adamw.state.clear()
        for name, parameter in self.parameters.items():
            if f"{name}.step" in tensors:
                self._adamw.state[parameter] = {
                    key: tensors[f"{name}.{key}"].to(parameter.device, torch.float32, copy=True) for key in STATE
                }
