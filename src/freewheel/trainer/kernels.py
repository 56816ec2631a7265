"""Triton kernels for operations that need several passes over memory in torch. Each has an equivalent in plain torch.

    score, slope     the output head: `head._score`, `head._slope`
    add_up           a gradient in bfloat16 onto one in float32: `head.add_up`

A separate module, because `freewheel.trainer.head` imports it only if there are Triton and a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SCORED_AT_ONCE, SLOPED_AT_ONCE, ADDED_AT_ONCE = 8192, 4096, 4096
"""Elements per program: enough to keep loads in flight, few enough for the registers."""
WARPS = 8


def score(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """One pass: rescale the sums whenever a larger logit appears."""
    rows, vocabulary = logits.shape
    logp, entropy, log_sum = (torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(3))
    _launch(_score, (rows,), logits, targets, logp, entropy, log_sum, vocabulary, 1 / temperature, block=SCORED_AT_ONCE)
    return logp, entropy, log_sum


def slope(
    logits: Tensor,
    temperature: float,
    targets: Tensor,
    log_sum: Tensor,
    of_logp: Tensor,
    entropy: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """Works in place: the logits are no longer needed."""
    rows, vocabulary = logits.shape
    given = (targets, log_sum, of_logp, entropy, of_logp if of_entropy is None else of_entropy)
    grid = (rows, triton.cdiv(vocabulary, SLOPED_AT_ONCE))
    options = {"with_entropy": of_entropy is not None, "block": SLOPED_AT_ONCE}
    _launch(_slope, grid, logits, *given, vocabulary, 1 / temperature, **options)
    return logits


def add_up(into: Tensor, given: Tensor, *, first: bool) -> None:
    """Overwrites `into` if `first`. Both are contiguous."""
    n = into.numel()
    _launch(_add_up, (triton.cdiv(n, ADDED_AT_ONCE),), into, given, n, first=first, block=ADDED_AT_ONCE)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options, num_warps=WARPS)


@triton.jit
def _score(logits, targets, logp, entropy, log_sum, n, inverse, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * n
    top, total, weighted = float("-inf"), 0.0, 0.0
    for start in range(0, n, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < n, other=float("-inf")).to(tl.float32) * inverse
        higher = tl.maximum(top, tl.max(x, 0))
        shrunk = tl.exp(top - higher)
        e = tl.exp(x - higher)
        total = total * shrunk + tl.sum(e, 0)
        weighted = weighted * shrunk + tl.sum(tl.where(at < n, e * x, 0.0), 0)
        top = higher
    found = top + tl.log(total)
    chosen = tl.load(logits + tl.load(targets + row)).to(tl.float32) * inverse
    tl.store(logp + row, chosen - found)
    tl.store(entropy + row, found - weighted / total)
    tl.store(log_sum + row, found)


@triton.jit
def _slope(
    logits,
    targets,
    log_sum,
    of_logp,
    entropy,
    of_entropy,
    n,
    inverse,
    with_entropy: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    place = logits + row * n + at
    log_p = tl.load(place, mask=at < n, other=0.0).to(tl.float32) * inverse - tl.load(log_sum + row)
    p = tl.exp(log_p)
    found = (tl.where(at == tl.load(targets + row), 1.0, 0.0) - p) * tl.load(of_logp + row)
    if with_entropy:
        found -= p * (log_p + tl.load(entropy + row)) * tl.load(of_entropy + row)
    tl.store(place, found * inverse, mask=at < n)


@triton.jit
def _add_up(into, given, n, first: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    found = tl.load(given + at, mask=at < n).to(tl.float32)
    if not first:
        found += tl.load(into + at, mask=at < n)
    tl.store(into + at, found, mask=at < n)
