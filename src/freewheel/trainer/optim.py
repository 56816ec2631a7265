"""AdamW with clipping, which refuses gradients that are not finite, and whose state is names and tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from freewheel.trainer.options import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
CLIP_EPS = 1e-6
"""What torch adds to the norm that it divides by. Below it nothing is clipped, and gradients need not be read again."""


class Optimizer:
    """Owns the moments of named parameters. The learning rate is given with each step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        self._parameters = dict(parameters)
        self._clip = config.grad_clip
        self.updates_applied = 0
        matrices = [p for p in self._parameters.values() if p.ndim >= 2]
        others = [p for p in self._parameters.values() if p.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=0.0,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )

    def step(self, lr: float, loss: Tensor) -> tuple[Tensor, bool]:
        """(the gradient's norm before clipping, whether it was applied): not where it or `loss` is not finite."""
        parameters = [p for p in self._parameters.values() if p.grad is not None]
        norm = self._norm([p.grad for p in parameters if p.grad is not None])
        length, lost = torch.stack((norm, loss.to(norm))).tolist()  # the one time that an update waits for the device
        applied = math.isfinite(length) and math.isfinite(lost)
        if applied:
            if self._clip is not None and length + CLIP_EPS > self._clip:
                torch.nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            torch.autograd.graph.increment_version(parameters)  # the fused step does not, and copies go by it
            self.updates_applied += 1
        self.forget()
        return norm, applied

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of all of them together; on several ranks, of what each holds."""
        return torch.nn.utils.get_total_norm(gradients)

    def forget(self) -> None:
        """Drops the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """`NAME.exp_avg`, `NAME.exp_avg_sq` and `NAME.step`, of parameters that were stepped; on their device."""
        return {
            f"{name}.{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._adamw.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """What `state` gave. Parameters that it does not name start afresh."""
        self._adamw.state.clear()
        for name, parameter in self._parameters.items():
            if f"{name}.step" not in tensors:
                continue
            moments = {key: tensors[f"{name}.{key}"].to(parameter.device, torch.float32, copy=True) for key in MOMENTS}
            step = tensors[f"{name}.step"].to(parameter.device, torch.float32, copy=True)
            self._adamw.state[parameter] = {"step": step, **moments}
