"""Parameters in float32 that learn, and a copy of the model in bfloat16 that computes.

    master (float32) ── cast, once after each update ──▶ copy (bfloat16) ── forward, backward ──▶ its gradients
           ▲                                                                                          │
           └──────────── AdamW ◀── gradients in float32, added up over micro-batches ◀────────────────┘

Autocast does the same, and casts every weight in every micro-batch, every activation before every matrix, and keeps
the casts. Used by `Policy` and `Critic`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from freewheel.trainer.head import add_up


class ComputingCopy:
    """`model` computes what the master would, in `dtype`. Gradients end up at the master's parameters."""

    def __init__(self, master: Any, dtype: torch.dtype) -> None:
        self.model = cast_parameters(copy.deepcopy(master), dtype)
        kept = dict(self.model.named_parameters())
        self._masters = [parameter for _, parameter in master.named_parameters()]
        self._copies = [kept[name] for name, _ in master.named_parameters()]
        self._seen: list[int] | None = None
        for mine, its in zip(self._masters, self._copies, strict=True):
            if its.requires_grad:
                its.register_post_accumulate_grad_hook(_HandOver(mine))

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over what has changed in the master since the last time, if anything has."""
        versions = [parameter._version for parameter in self._masters]
        if versions != self._seen:
            torch._foreach_copy_(self._copies, self._masters)
            self._seen = versions


class _HandOver:
    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, copied: Tensor) -> None:
        given = copied.grad
        assert given is not None
        first = self._master.grad is None
        if first:
            self._master.grad = torch.empty_like(self._master)
        assert self._master.grad is not None
        add_up(self._master.grad, given, first=first)
        copied.grad = None


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """In place. Buffers stay: the frequencies of rotary positions in bfloat16 would be off by whole turns."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model
