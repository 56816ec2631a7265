"""Log-probabilities and entropies of given tokens from hidden states, without storing all logits at once.

    hidden [T, H] ─ some rows ─▶ logits ─▶ log π, entropy, log Σ exp          forward: most logits are dropped
                  ─ some rows ─▶ logits ─▶ their gradient ─▶ hidden, weight   backward: they are computed again

With a vocabulary of 151,936, one token's logits take 300 KB, and a softmax keeps six times that. Called by `Policy` for
heads that are one matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from freewheel.trainer.options import LOGITS_AT_A_TIME

LOGITS_AT_A_TIME_GPU = 1 << 29
"""1 GiB of bfloat16. The weight's gradient is read and written once per part, which would dominate with small parts."""
LOGITS_KEPT_GPU = 5 << 28
"""Logits kept for the backward pass instead of computing them again: 2.5 GiB, enough for all of 8,192 response tokens.
It saves a thirtieth of a step of a 1.5B model."""


def limit_rows(device: torch.device, vocabulary: int) -> tuple[int, int]:
    """Return the limits `at_once` and `kept` of `head_logprobs`."""
    at_once, kept = LOGITS_AT_A_TIME_GPU, LOGITS_KEPT_GPU
    if device.type == "cpu":
        at_once = kept = LOGITS_AT_A_TIME
    return max(1, at_once // vocabulary), kept // vocabulary


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    entropy_grad: bool,
    at_once: int,
    kept: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return (log π of `targets`, entropy) [T] in float32 of softmax(hidden·weightᵀ / temperature).

    `hidden` and `weight` have the type of the product. `at_once`: rows whose logits may exist at the same time. `kept`:
    rows whose logits may stay until the backward pass. The entropy has a gradient only with `entropy_grad`.
    """
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    given = (hidden, weight, targets, temperature, entropy_grad, at_once, kept if learns else 0)
    logp, entropy = _HeadLogprobs.apply(*given)  # type: ignore[no-untyped-call]
    return logp, entropy


def logits_to_logprobs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, *, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the same from complete logits, for models whose head is more than one matrix."""
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    log_p = logits.log_softmax(-1)
    with nullcontext() if entropy_grad else torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_grad: bool,
        at_once: int,
        kept: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.kept, found = {}, []
        for rows in _parts(len(hidden), at_once):
            logits = _product(hidden[rows], weight.t())
            found.append(_score(logits, targets[rows], temperature))
            if rows.stop <= kept:
                ctx.kept[rows.start] = logits
        logp, entropy, log_sum = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropy)
        ctx.temperature, ctx.entropy_grad, ctx.at_once = temperature, entropy_grad, at_once
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_logp = gradients[0].contiguous()
        of_entropy = gradients[1].contiguous() if ctx.entropy_grad else None
        hidden, weight, targets, log_sum, entropy = ctx.saved_tensors
        to_hidden, to_weight = ctx.needs_input_grad[:2]
        for_hidden = torch.empty_like(hidden) if to_hidden else None
        for_weight = torch.empty_like(weight, dtype=torch.float32) if to_weight else None
        for rows in _parts(len(hidden), ctx.at_once):
            given = (targets[rows], log_sum[rows], of_logp[rows], entropy[rows])
            logits = ctx.kept.pop(rows.start, None)
            if logits is None:
                logits = _product(hidden[rows], weight.t())
            of_logits = _slope(logits, ctx.temperature, *given, None if of_entropy is None else of_entropy[rows])
            if for_hidden is not None:
                for_hidden[rows] = _product(of_logits, weight)
            if for_weight is not None:  # in float32: in bfloat16, rounding would lose small parts
                add_up(for_weight, _product(of_logits.t(), hidden[rows]), first=rows.start == 0)
        return for_hidden, None if for_weight is None else for_weight.to(weight.dtype), *[None] * 5


def _parts(rows: int, at_once: int) -> Iterator[slice]:
    """Return equal parts: a short last part would cost as much memory traffic for the weight as the others."""
    size = math.ceil(rows / max(1, math.ceil(rows / max(1, at_once)))) if rows else 1
    return (slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), size))


def _product(left: Tensor, right: Tensor) -> Tensor:
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def _score(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log π of `targets`, entropy, log Σ exp) [T]."""
    if kernels := find_kernels(logits.device.type):
        scored: tuple[Tensor, Tensor, Tensor] = kernels.score(logits, targets, temperature)
        return scored
    x = logits.float() / temperature
    log_sum = x.logsumexp(-1)
    log_p = x - log_sum[:, None]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return x.gather(-1, targets[:, None]).squeeze(-1) - log_sum, entropy, log_sum


def _slope(
    logits: Tensor,
    temperature: float,
    targets: Tensor,
    log_sum: Tensor,
    of_logp: Tensor,
    entropy: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """Return the logits' gradient, possibly in place. With x = logits / temperature and chosen token y:

    ∂ log π_y / ∂ x_j = [j = y] − p_j        ∂ H / ∂ x_j = −p_j (log p_j + H)
    """
    if kernels := find_kernels(logits.device.type):
        slope: Tensor = kernels.slope(logits, temperature, targets, log_sum, of_logp, entropy, of_entropy)
        return slope
    log_p = logits.float() / temperature - log_sum[:, None]
    p = log_p.exp()
    found = -p * of_logp[:, None]
    if of_entropy is not None:
        found -= p * (log_p + entropy[:, None]) * of_entropy[:, None]
    found.scatter_add_(-1, targets[:, None], of_logp[:, None])
    return (found / temperature).to(logits.dtype)


def add_up(into: Tensor, given: Tensor, *, first: bool) -> None:
    """Add `given`, which may have another type, to `into`. If `first`, overwrite `into` instead."""
    kernels = find_kernels(into.device.type)
    if kernels and into.is_contiguous() and given.is_contiguous():
        kernels.add_up(into, given, first=first)
    elif first:
        into.copy_(given)
    else:
        into.add_(given)


@functools.cache
def find_kernels(device_type: str) -> Any:
    """Return the module `freewheel.trainer.kernels` if it runs on this device, otherwise None."""
    from torch.utils._triton import has_triton

    if device_type != "cuda" or not has_triton():
        return None
    from freewheel.trainer import kernels

    return kernels
