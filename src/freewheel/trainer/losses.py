"""The losses, one screen each, over flat tokens: no padding gets this far.

    logp, behaviour, advantages, weights [T] ─▶ policy_loss ─▶ loss, Tally         sequence [T]: whose token each is
    values, old values, returns, weights [T] ─▶ value_loss  ─▶ loss, Tally

Every loss is Σ_t w_t·l_t with weights w from `token_weights`, made for the whole mini-batch at once. So micro-batches
add up to the same loss and the same gradient however they are cut. Called by backends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freewheel.data.group import Array
from freewheel.trainer.metrics import Tally
from freewheel.trainer.options import Aggregation, AlgorithmConfig, Importance, KlKind

LOG_RATIO_BOUND = 20.0
"""exp of more is no ratio of anything any more, and its square overflows float32: such tokens get no gradient."""


def token_weights(lengths: Array, aggregation: Aggregation, constant_tokens: int | None = None) -> Array:
    """What a token of each response counts, for the N responses of a mini-batch with `lengths` trained tokens:

    token_mean: 1 / Σ lengths        sequence_mean: 1 / (N·length_i)        constant: 1 / (N·constant_tokens)
    """
    n = len(lengths)
    if aggregation == "token_mean":
        return np.full(n, 1 / max(1, lengths.sum()))
    if aggregation == "sequence_mean":
        each: Array = 1 / (n * np.maximum(1.0, lengths))
        return each
    assert constant_tokens is not None, "AlgorithmConfig sees to it"
    return np.full(n, 1 / (n * constant_tokens))


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> Tensor:
    """PPO-clip: l_t = −min(ρ_t·A_t, clip(ρ_t, 1 − low, 1 + high)·A_t).

    With dual clip, where A_t < 0: l_t = −max(min(…), dual·A_t).
    """
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
    return -objective


def sequence_sum(values: Tensor, sequence: Tensor, n: int) -> Tensor:
    """Σ over each response's tokens, [n]."""
    return torch.zeros(n, dtype=values.dtype, device=values.device).index_add(0, sequence, values)


def sequence_ratio(log_ratio: Tensor, sequence: Tensor, n: int) -> Tensor:
    """GSPO: s_i = exp(mean over its tokens of log ρ_t), for each token of response i."""
    lengths = sequence_sum(torch.ones_like(log_ratio), sequence, n).clamp(min=1)
    return (sequence_sum(log_ratio, sequence, n) / lengths).exp()[sequence]


def importance_weights(
    log_weight: Tensor, sequence: Tensor, n: int, kind: Importance, *, cap: float, floor: float = 0.0
) -> Tensor:
    """w_t = π_prox / μ of the token, or of its response (their product over the response).

    truncate: min(w, cap)        mask: w where floor ≤ w ≤ cap, else 0        none: w
    """
    if kind.startswith("sequence"):
        log_weight = sequence_sum(log_weight, sequence, n)[sequence]
    weight = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    if kind.endswith("truncate"):
        return weight.clamp(max=cap)
    if kind.endswith("mask"):
        return torch.where((weight >= floor) & (weight <= cap), weight, 0.0)
    return weight


def kl_estimate(logp: Tensor, reference: Tensor, kind: KlKind) -> Tensor:
    """KL(π ‖ ref) at tokens sampled from π. With x = log ref − log π:

    k1: −x        k2: x²/2        k3: exp(x) − x − 1
    """
    x = reference - logp
    if kind == "k1":
        return -x
    if kind == "k2":
        return x.square() / 2
    return x.clamp(max=LOG_RATIO_BOUND).exp() - x - 1


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """What the policy loss is told of a micro-batch's T tokens beside the policy's own log-probabilities."""

    behaviour: Tensor
    """log μ: what the engine sampled each token with."""
    advantages: Tensor
    weights: Tensor
    """`token_weights`, a token each."""
    sequence: Tensor
    """int64: which of the `n_sequences` responses."""
    n_sequences: int
    proximal: Tensor | None = None
    """log π_prox, for `proximal: recomputed`. None: the policy as it is, without gradient."""
    reference: Tensor | None = None
    """log ref, for `kl_coef` above 0."""


def policy_loss(logp: Tensor, entropy: Tensor, tokens: PolicyTokens, config: AlgorithmConfig) -> tuple[Tensor, Tally]:
    """L = Σ_t w_t·[ v_t·clip(π_t/prox_t, A_t) + kl_coef·KL_t − entropy_coef·H_t ]

    `behaviour`: prox = μ, and v is 1, or the 0/1 of an importance mask. `recomputed`: prox is the policy when the step
    began, and v = prox/μ, bounded as `importance` says. With k1, A is A − kl_coef·k1 and the KL term is gone.
    """
    t, c = tokens, config
    now = logp.detach()
    anchor = t.behaviour if c.proximal == "behaviour" else now if t.proximal is None else t.proximal
    log_ratio = (logp - anchor).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp() if c.ratio == "token" else sequence_ratio(log_ratio, t.sequence, t.n_sequences)
    advantages, penalty = t.advantages, torch.zeros_like(logp)
    kl = None
    if c.kl_coef:
        assert t.reference is not None
        kl = kl_estimate(logp, t.reference, c.kl_kind)
        if c.kl_kind == "k1":
            advantages = advantages - c.kl_coef * kl.detach()
        else:
            penalty = c.kl_coef * kl
    surrogate = clipped_surrogate(ratio, advantages, low=c.clip_low, high=c.clip_high, dual=c.dual_clip)
    weight = _correction(now if c.proximal == "behaviour" else anchor, t, c)
    per_token = surrogate if weight is None else weight * surrogate
    if c.entropy_coef:
        penalty = penalty - c.entropy_coef * entropy
    loss = (t.weights * (per_token + penalty)).sum()
    return loss, _policy_tally(now, ratio.detach(), advantages, entropy, kl, weight, t, c)


def _correction(proximal: Tensor, t: PolicyTokens, c: AlgorithmConfig) -> Tensor | None:
    """v_t of `policy_loss`; None where it is 1 for all."""
    if c.proximal == "behaviour" and c.importance == "none":
        return None
    bounds = {"cap": c.importance_cap, "floor": c.importance_floor}
    weight = importance_weights(proximal - t.behaviour, t.sequence, t.n_sequences, c.importance, **bounds)
    return (weight > 0).to(weight.dtype) if c.proximal == "behaviour" else weight


@torch.no_grad()
def _policy_tally(
    now: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    entropy: Tensor,
    kl: Tensor | None,
    weight: Tensor | None,
    t: PolicyTokens,
    c: AlgorithmConfig,
) -> Tally:
    n = torch.ones_like(now).sum()
    log_w = now - t.behaviour
    w = log_w.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    whole = sequence_sum(log_w, t.sequence, t.n_sequences).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    tally = Tally()
    tally.means.update(
        {
            "actor/clip_ratio_low": (((ratio < 1 - c.clip_low) & (advantages < 0)).sum(), n),
            "actor/clip_ratio_high": (((ratio > 1 + c.clip_high) & (advantages > 0)).sum(), n),
            "actor/kl": ((-log_w).sum(), n),
            "actor/kl_k3": ((w - 1 - log_w).sum(), n),
            "actor/entropy": (entropy.sum(), n),
        }
    )
    if kl is not None:
        tally.means["actor/kl_reference"] = (kl.sum(), n)
    if weight is not None:
        tally.means["actor/importance_weight"] = (weight.sum(), n)
        tally.means["actor/importance_masked"] = ((weight == 0).sum(), n)
    tally.maxima["actor/ratio_max"] = ratio.max()
    tally.sample_sizes["actor/ess"] = (n, w.sum(), w.square().sum())
    tally.sample_sizes["actor/ess_sequence"] = (torch.ones_like(whole).sum(), whole.sum(), whole.square().sum())
    return tally


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float | None
) -> tuple[Tensor, Tally]:
    """L = ½ Σ_t w_t·max((V_t − R_t)², (V'_t − R_t)²), where V' is V held to within `clip` of the old value."""
    error = (values - returns).square()
    held = old_values + (values - old_values).clamp(-clip, clip) if clip is not None else values
    loss = 0.5 * (weights * torch.maximum(error, (held - returns).square())).sum()
    with torch.no_grad():
        n = torch.ones_like(values).sum()
        tally = Tally()
        tally.means["critic/value"] = (values.sum(), n)
        tally.means["critic/return"] = (returns.sum(), n)
        tally.means["critic/error"] = (error.sum(), n)
        tally.means["critic/clip_ratio"] = ((held != values).sum(), n)
    return loss, tally
