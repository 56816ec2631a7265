"""Samples tokens from logits for all rows at once, each row with its own parameters.

Randomness is counter-based: a draw is a function of (seed, token index) only, so neither the slot nor the batch nor the
time changes what is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's constants as signed 64-bit integers: torch wraps around
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_DRAW_BITS = 48
"""Bits used of 64. With 53, a draw times the sum of the probabilities could round up to the sum itself, past the last
token."""


def splitmix64(seeds: Tensor, index: Tensor) -> Tensor:
    """Return the `index`-th output of splitmix64 for each seed, as int64 bit patterns."""
    x = seeds + (index + 1) * _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def uniform(seeds: Tensor, index: Tensor) -> Tensor:
    """Return a float64 in [0, 1) for each (seed, index)."""
    return _shifted(splitmix64(seeds, index), 64 - _DRAW_BITS).double() * 2.0**-_DRAW_BITS


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right. torch's own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class Rows:
    """Sampling parameters of each row; vectors of one length."""

    seeds: Tensor
    index: Tensor
    """Index of the token to sample in its response."""
    temperature: Tensor
    """1 in greedy rows."""
    greedy: Tensor
    """bool."""
    top_p: Tensor
    top_k: Tensor
    """The vocabulary size if it is off."""
    any_random: bool
    any_greedy: bool
    any_truncated: bool
    """Whether any row has top_p or top_k. Without one the sort is skipped, which changes no bit of other rows."""


def sample(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return tokens (int64) and their log-probabilities (float32) at the row's temperature, before top_p and top_k."""
    scores = logits.float()
    if rows.any_random:
        scores = scores / rows.temperature.unsqueeze(1)
    logprobs = torch.log_softmax(scores, dim=-1)
    if rows.any_random:
        probs = logprobs.exp()
        if rows.any_truncated:
            probs = probs.masked_fill(_truncated(probs, rows.top_p, rows.top_k), 0.0)
        tokens = _inverse_cdf(probs, uniform(rows.seeds, rows.index))
        if rows.any_greedy:
            tokens = torch.where(rows.greedy, scores.argmax(dim=-1), tokens)
    else:
        tokens = scores.argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _inverse_cdf(probs: Tensor, draws: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds the draw, never one of probability zero."""
    summed = probs.cumsum(dim=-1, dtype=torch.float64)
    wanted = draws * summed[:, -1]
    found = torch.searchsorted(summed, wanted.unsqueeze(1), right=True).squeeze(1)
    return found.clamp_(max=probs.shape[-1] - 1)  # only a row of NaN gets there


def _truncated(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return which tokens top_k, and then top_p over the rest, remove. The likeliest token always stays."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    beyond_k = rank >= top_k.unsqueeze(1)
    ordered = ordered.masked_fill(beyond_k, 0.0).double()
    before = ordered.cumsum(dim=-1) - ordered
    total = ordered.sum(dim=-1, keepdim=True)
    gone = beyond_k | (before >= top_p.unsqueeze(1) * total)
    gone[:, 0] = False
    gone &= ~((top_p >= 1.0) & (top_k >= probs.shape[-1])).unsqueeze(1)  # rounding must not affect other rows
    return torch.zeros_like(gone).scatter_(1, order, gone)
