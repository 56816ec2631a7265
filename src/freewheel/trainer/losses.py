"""Losses, one function each, over flat tokens: padding is removed earlier.

    LossInputs: logprobs, advantages, … [T] ─▶ loss function ─▶ LossOutputs: loss [T], metrics
    values, old values, returns, weights [T] ─▶ value_loss ─▶ loss, Tally

A policy loss returns one number per token. `apply_loss` forms Σ_t w_t·l_t with weights from `token_weights`, which are
computed once for the whole mini-batch. So micro-batches add up to the same loss and the same gradient however the batch
is split. Backends call `apply_loss`; `algorithm.loss` selects the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freewheel.data.group import Array
from freewheel.errors import ConfigError
from freewheel.trainer.options import Aggregation, AlgorithmConfig, Importance, KlKind

LOG_RATIO_BOUND = 20.0
"""A larger log-ratio is no longer meaningful, and the square of its exp overflows float32. Such tokens get no
gradient."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The T trained tokens of a micro-batch, which holds whole responses. Prompts, padding and tool replies are not
    among them. Tensors are [T] and on the training device."""

    logprobs: Tensor
    """log π of each token under the current policy, with gradient."""
    entropy: Tensor
    """Entropy of the policy at each token. It has a gradient only if `entropy_coef` is above 0."""
    behaviour: Tensor
    """log μ: the log-probability the engine sampled each token with."""
    advantages: Tensor
    weights: Tensor
    """How much each token counts, from `algorithm.aggregation`. The loss is multiplied by it after the function."""
    response: Tensor
    """int64: the index of the token's response in this micro-batch."""
    n_responses: int
    tokens: Tensor
    """int64: the token ids."""
    settings: AlgorithmConfig
    proximal: Tensor | None = None
    """log π when the step began, with `proximal: recomputed` and several updates per step. Otherwise None."""
    reference: Tensor | None = None
    """log π of the model at the start of the run, with `kl_coef` above 0. Otherwise None."""


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    """The result of a loss function."""

    loss: Tensor
    """[T]: the loss of each token. It is summed with `LossInputs.weights`: do not average it."""
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Name → (sum, count), both scalars. Sums and counts of all micro-batches are added before they are divided."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → a scalar, of which the step reports the largest."""


Loss = Callable[[LossInputs], LossOutputs]


@dataclass(frozen=True)
class Tally:
    """Named sums over tokens. Merging the tallies of two micro-batches gives the tally of one micro-batch with all
    their tokens.

    Tensors stay on their device until `values` moves them all at once, so that no micro-batch waits for the device.
    """

    sums: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """Name → (total), (sum, count) of a mean, or (n, Σw, Σw²) of importance weights w."""
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def merge(self, other: Tally) -> None:
        for name, sums in other.sums.items():
            mine = self.sums.get(name)
            self.sums[name] = sums if mine is None else tuple(a + b for a, b in zip(mine, sums, strict=True))
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def to(self, device: torch.device) -> Tally:
        """Return a copy in double precision on another device. All numbers move at once."""
        flat = self._flat()
        moved = iter(torch.stack(flat).to(device).unbind() if flat else ())
        return Tally(
            sums={name: tuple(next(moved) for _ in sums) for name, sums in self.sums.items()},
            maxima={name: next(moved) for name in self.maxima},
        )

    def values(self) -> dict[str, float]:
        """Return totals, quotients and maxima. A name with a count of 0 is left out.

        The effective sample size (Σw)² / (n·Σw²) is a share: 1 if all weights are equal, 1/n if one weight is all.
        """
        flat = self._flat()
        numbers = iter(torch.stack(flat).tolist() if flat else [])
        found: dict[str, float] = {}
        for name, sums in self.sums.items():
            match [next(numbers) for _ in sums]:
                case [total]:
                    found[name] = total
                case [total, count] if count:
                    found[name] = total / count
                case [n, w, w2] if n and w2:
                    found[name] = w * w / (n * w2)
        found.update((name, next(numbers)) for name in self.maxima)
        return found

    def _flat(self) -> list[Tensor]:
        flat = [one for sums in self.sums.values() for one in sums]
        return [one.detach().double() for one in (*flat, *self.maxima.values())]


def apply_loss(loss: Loss, inputs: LossInputs) -> tuple[Tensor, Tally]:
    """Return the weighted sum of a loss over its tokens, and its metrics. Raises `ConfigError` for a wrong result."""
    outputs = loss(inputs)
    if problem := _find_problem(outputs, inputs):
        raise ConfigError("algorithm.loss", inputs.settings.loss, problem)
    tally = _policy_tally(inputs)
    device = inputs.logprobs.device
    sums: dict[str, tuple[Tensor, ...]] = {
        name: (torch.as_tensor(total, device=device).detach(), torch.as_tensor(count, device=device).detach())
        for name, (total, count) in outputs.metrics.items()
    }
    tally.merge(Tally(sums=sums, maxima={name: one.detach() for name, one in outputs.maxima.items()}))
    return (inputs.weights * outputs.loss).sum(), tally


def check_loss(loss: Loss, settings: AlgorithmConfig, device: torch.device) -> None:
    """Call a loss on three tokens of two responses. Raises `ConfigError` if it does not work."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], device=device, requires_grad=True)
    zeros = torch.zeros(3, device=device)
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=zeros + 1,
        behaviour=logprobs.detach() + torch.tensor([0.1, 0.0, -0.1], device=device),
        advantages=torch.tensor([1.0, 1.0, -1.0], device=device),
        weights=zeros + 1 / 3,
        response=torch.tensor([0, 0, 1], device=device),
        n_responses=2,
        tokens=torch.tensor([5, 6, 7], device=device),
        settings=settings,
        proximal=logprobs.detach() if settings.proximal == "recomputed" else None,
        reference=logprobs.detach() if settings.kl_coef else None,
    )
    try:
        total, _ = apply_loss(loss, inputs)
    except ConfigError:
        raise
    except Exception as error:  # a user's function may raise anything
        problem = f"it raised {type(error).__name__} on a test batch of three tokens: {error}"
        raise ConfigError("algorithm.loss", settings.loss, problem) from error
    if not bool(torch.isfinite(total)):
        problem = f"the loss of a test batch of three tokens is {total.item()}: return finite numbers"
        raise ConfigError("algorithm.loss", settings.loss, problem)


def _find_problem(outputs: Any, inputs: LossInputs) -> str:
    """Describe why a result cannot be used; empty if it can."""
    if not isinstance(outputs, LossOutputs):
        return f"it returned {type(outputs).__name__}: return LossOutputs(loss=...)"
    loss, n = outputs.loss, len(inputs.logprobs)
    if not isinstance(loss, Tensor) or loss.shape != inputs.logprobs.shape:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        return f"it returned a loss of {shape} for {n} tokens: return one number per token, [{n}], and do not average"
    if torch.is_grad_enabled() and inputs.logprobs.requires_grad and not loss.requires_grad:
        return "its loss has no gradient: compute it from logprobs without detach or torch.no_grad"
    for name, pair in outputs.metrics.items():
        if not isinstance(pair, tuple) or len(pair) != 2 or any(torch.as_tensor(one).numel() != 1 for one in pair):
            return f"its metric {name!r} is not a (sum, count) pair of two scalars"
    return ""


# -- the PPO family ---------------------------------------------------------------------------------------------------


def ppo_clip(inputs: LossInputs) -> LossOutputs:
    """l_t = v_t·clip(π_t/prox_t, A_t) + kl_coef·KL_t − entropy_coef·H_t

    `proximal: behaviour`: prox = μ, and v is 1, or the 0/1 of an importance mask. `recomputed`: prox is the policy when
    the step began, and v = prox/μ, limited by `importance`. With `kl_kind: k1`, A is A − kl_coef·k1 and there is no KL
    term.
    """
    t, c = inputs, inputs.settings
    logp, now = t.logprobs, t.logprobs.detach()
    anchor = t.behaviour if c.proximal == "behaviour" else now if t.proximal is None else t.proximal
    log_ratio = (logp - anchor).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp() if c.ratio == "token" else sequence_ratio(log_ratio, t.response, t.n_responses)
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
    weight = _correction(now if c.proximal == "behaviour" else anchor, t)
    per_token = surrogate if weight is None else weight * surrogate
    if c.entropy_coef:
        penalty = penalty - c.entropy_coef * t.entropy
    ratio, n = ratio.detach(), torch.ones_like(now).sum()
    metrics = {
        "actor/clip_ratio_low": (((ratio < 1 - c.clip_low) & (advantages < 0)).sum(), n),
        "actor/clip_ratio_high": (((ratio > 1 + c.clip_high) & (advantages > 0)).sum(), n),
    }
    if kl is not None:
        metrics["actor/kl_reference"] = (kl.sum(), n)
    if weight is not None:
        metrics["actor/importance_weight"] = (weight.sum(), n)
        metrics["actor/importance_masked"] = ((weight == 0).sum(), n)
    return LossOutputs(loss=per_token + penalty, metrics=metrics, maxima={"actor/ratio_max": ratio.max()})


def _correction(proximal: Tensor, t: LossInputs) -> Tensor | None:
    """Return v_t of `ppo_clip`; None if it is 1 everywhere."""
    c = t.settings
    if c.proximal == "behaviour" and c.importance == "none":
        return None
    bounds = {"cap": c.importance_cap, "floor": c.importance_floor}
    weight = importance_weights(proximal - t.behaviour, t.response, t.n_responses, c.importance, **bounds)
    return (weight > 0).to(weight.dtype) if c.proximal == "behaviour" else weight


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> Tensor:
    """PPO-clip: l_t = −min(ρ_t·A_t, clip(ρ_t, 1 − low, 1 + high)·A_t).

    With dual clip, if A_t < 0: l_t = −max(min(…), dual·A_t).
    """
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
    return -objective


def sequence_sum(values: Tensor, response: Tensor, n: int) -> Tensor:
    """Σ over the tokens of each response, [n]."""
    return torch.zeros(n, dtype=values.dtype, device=values.device).index_add(0, response, values)


def sequence_ratio(log_ratio: Tensor, response: Tensor, n: int) -> Tensor:
    """GSPO: s_i = exp(mean over its tokens of log ρ_t), for each token of response i."""
    lengths = sequence_sum(torch.ones_like(log_ratio), response, n).clamp(min=1)
    return (sequence_sum(log_ratio, response, n) / lengths).exp()[response]


def importance_weights(
    log_weight: Tensor, response: Tensor, n: int, kind: Importance, *, cap: float, floor: float = 0.0
) -> Tensor:
    """w_t = π_prox / μ of the token, or of its response (the product over its tokens).

    truncate: min(w, cap)        mask: w if floor ≤ w ≤ cap, else 0        none: w
    """
    if kind.startswith("sequence"):
        log_weight = sequence_sum(log_weight, response, n)[response]
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


# -- for every loss ---------------------------------------------------------------------------------------------------


def token_weights(lengths: Array, aggregation: Aggregation, constant_tokens: int | None = None) -> Array:
    """Return the weight of a token of each response, for the N responses of a mini-batch with `lengths` trained tokens:

    token_mean: 1 / Σ lengths        sequence_mean: 1 / (N·length_i)        constant: 1 / (N·constant_tokens)
    """
    n = len(lengths)
    if aggregation == "token_mean":
        return np.full(n, 1 / max(1, lengths.sum()))
    if aggregation == "sequence_mean":
        each: Array = 1 / (n * np.maximum(1.0, lengths))
        return each
    assert constant_tokens is not None, "AlgorithmConfig checks this"
    return np.full(n, 1 / (n * constant_tokens))


@torch.no_grad()
def _policy_tally(t: LossInputs) -> Tally:
    """Return metrics about the policy that do not depend on the loss."""
    now = t.logprobs.detach()
    n = torch.ones_like(now).sum()
    log_w = now - t.behaviour
    w = log_w.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    whole = sequence_sum(log_w, t.response, t.n_responses).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return Tally(
        sums={
            "actor/kl": ((-log_w).sum(), n),
            "actor/kl_k3": ((w - 1 - log_w).sum(), n),
            "actor/entropy": (t.entropy.sum(), n),
            "actor/ess": (n, w.sum(), w.square().sum()),
            "actor/ess_sequence": (torch.ones_like(whole).sum(), whole.sum(), whole.square().sum()),
        },
    )


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float | None
) -> tuple[Tensor, Tally]:
    """L = ½ Σ_t w_t·max((V_t − R_t)², (V'_t − R_t)²), where V' is V limited to within `clip` of the old value."""
    error = (values - returns).square()
    clipped = old_values + (values - old_values).clamp(-clip, clip) if clip is not None else values
    loss = 0.5 * (weights * torch.maximum(error, (clipped - returns).square())).sum()
    with torch.no_grad():
        n = torch.ones_like(values).sum()
        tally = Tally(
            sums={
                "critic/value": (values.sum(), n),
                "critic/return": (returns.sum(), n),
                "critic/error": (error.sum(), n),
                "critic/clip_ratio": ((clipped != values).sum(), n),
            }
        )
    return loss, tally
