"""Learning on one device, CPU or GPU, with plain torch.

    [PromptGroup] ─▶ advantages ─▶ mini-batches ─▶ micro-batches ─▶ loss, gradients added up ─▶ clip ─▶ AdamW ─▶ metrics
                     └ PPO: the critic's values, then GAE ┘

One call of `step` is one training step; with `updates_per_batch` and `mini_batches` it makes several updates. The same
groups, settings and weights give the same result, on a CPU to the bit: there is no dropout, and the order of
mini-batches comes from (seed, step). Called by `FullyAsyncTrainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freewheel.data.group import PromptGroup
from freewheel.errors import ConfigError, DataError
from freewheel.trainer.advantages import estimate
from freewheel.trainer.backend import BackendState, NonFiniteLoss
from freewheel.trainer.batching import MicroBatch, Sample, micro_batches, mini_batches
from freewheel.trainer.critic import Critic, token_advantages
from freewheel.trainer.losses import PolicyTokens, policy_loss, value_loss
from freewheel.trainer.metrics import Tally, rollout_metrics
from freewheel.trainer.optim import Optimizer
from freewheel.trainer.options import AlgorithmConfig, LoraConfig, OptimizerConfig, describe
from freewheel.trainer.packing import packed_batches
from freewheel.trainer.policy import Policy, Precision, compute_dtype
from freewheel.trainer.schedules import lr_factor

GAP_MEAN, GAP_MAX = "rollout/logprob_gap_mean", "rollout/logprob_gap_max"
MAX_NONFINITE = 3
"""Updates in a row whose loss or gradient is not finite before it is no accident."""
CPU_MICRO_BATCH_TOKENS = 2048
"""Larger ones fall out of a CPU's cache: 16,384 tokens at a time of the embedded model took a third longer."""
CRITIC_LR_FACTOR = 10.0
"""The critic's learning rate over the policy's, where none is given: its head starts from nothing, and a value that
lags is worse than one that wavers."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A micro-batch on the device, with what was computed before the first update of the step."""

    batch: MicroBatch
    proximal: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


class TorchBackend:
    """See `Backend`. Methods that say so are what several ranks do otherwise (`FsdpBackend`)."""

    _copies = True
    """Whether a copy of the model computes where that is faster. Ranks gather such a copy layer by layer."""

    def __init__(
        self,
        model: Any,
        *,
        algorithm: AlgorithmConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        lr: float | None = None,
        device: str | torch.device = "cpu",
        dtype: Precision = "auto",
        lora: LoraConfig | None = None,
        activation_checkpointing: bool = False,
        micro_batch_tokens: int,
        compile: bool = False,
        share_prompts: bool = True,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        """`model`: a HF causal language model, which is then the backend's own.

        `lr`: where `optimizer.lr` is `auto`. `compile`: the decoder's layers, by torch.compile; where that fails,
        a warning says so. `share_prompts`: compute a group's prompt once for several responses, where that is cheaper
        and the model can. `temperature`: that of sampling, so that log-probabilities are of the same distribution.
        """
        self._algorithm = algorithm or AlgorithmConfig()
        self._config = optimizer or OptimizerConfig()
        self._lr = _learning_rate(self._config, lr)
        self._critic_lr = self._config.critic_lr or CRITIC_LR_FACTOR * self._lr
        self._device = torch.device(device)
        on_cpu = self._device.type == "cpu"
        self._budget = min(micro_batch_tokens, CPU_MICRO_BATCH_TOKENS) if on_cpu else micro_batch_tokens
        self._seed = seed
        self._nonfinite = 0
        self._critic = None
        if self._algorithm.name == "ppo":  # before adapters are put into the decoder that it is a copy of
            self._critic = Critic(
                model.base_model,
                device=self._device,
                dtype=compute_dtype(dtype, self._device),
                activation_checkpointing=activation_checkpointing,
                computing_copy=self._copies and not on_cpu,
            )
        self.policy = Policy(
            model,
            device=self._device,
            dtype=dtype,
            lora=lora,
            activation_checkpointing=activation_checkpointing,
            computing_copy=self._copies and not on_cpu,
            temperature=temperature,
            seed=seed,
        )
        self._share_prompts = share_prompts
        self._packed = self._speed_up(compile=compile)
        padded_share = share_prompts and not self._packed and self.policy.can_share()
        self._share = self.policy.token_cost if padded_share else None
        self._reference = self.policy.frozen_copy() if self._algorithm.kl_coef else None
        self._optimizer = Optimizer(self.policy.trainable(), self._config)
        self._critic_optimizer = (
            Optimizer(dict(self._critic.named_parameters()), self._config) if self._critic else None
        )

    def _speed_up(self, *, compile: bool) -> bool:
        """Compiles where wanted, and says whether rows are packed: where there is flash attention."""
        packed = self._device.type == "cuda" and self.policy.dtype is torch.bfloat16 and self.policy.can_pack()
        compiled = compile and self.policy.compile(packed=packed)
        if self._critic is not None:
            self._critic.follow(packed=packed, compiled=compiled)
        return packed

    def describe(self) -> str:
        return describe(self._algorithm)

    @property
    def updates_applied(self) -> int:
        optimizers = (self._optimizer, self._critic_optimizer)
        return sum(one.updates_applied for one in optimizers if one is not None)

    def step(
        self, groups: Sequence[PromptGroup], *, version: int | None, step: int, total_steps: int
    ) -> dict[str, float]:
        factor = lr_factor(self._config, step, total_steps)
        told = rollout_metrics(groups)  # before the first update, as all that may fail: a step is then tried again
        minis = self._prepare(groups)
        tally, updates = Tally(), _Updates()
        for epoch in range(self._algorithm.updates_per_batch):
            order = np.random.default_rng([self._seed, step, epoch]).permutation(len(minis))
            for place in order if len(minis) > 1 else range(len(minis)):
                fresh = updates.made == 0
                tally.merge(self._update_policy(minis[place], factor, updates, version if fresh else None))
                if self._critic is not None:
                    tally.merge(self._update_critic(minis[place], factor))
        found = {**told, **tally.values()}
        if updates.made:
            found["actor/lr"] = self._lr * factor
            found["actor/skipped_nonfinite"] = float(updates.skipped)
            if self._critic is not None:
                found["critic/lr"] = self._critic_lr * factor
        if GAP_MEAN not in found:  # no token of this version: the greatest of none is no number
            found.pop(GAP_MAX, None)
        return found

    def weights(self) -> Mapping[str, Tensor]:
        return self.policy.weights()

    def save_hf(self, folder: Path, tokenizer: Any = None) -> None:
        self.policy.save(folder, tokenizer)

    def state(self) -> BackendState:
        """Parameters that are trained, and the moments; a frozen base comes with the settings. No RNG: none is used."""
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._named_state().items()}
        return BackendState(tensors=tensors, values=self._state_values())

    def _named_state(self) -> dict[str, Tensor]:
        return {
            f"{part}/{name}": tensor
            for part, found in self._stateful().items()
            for name, tensor in (found.state() if isinstance(found, Optimizer) else found).items()
        }

    def _state_values(self) -> dict[str, Any]:
        return {"algorithm": self._algorithm.name, "nonfinite": self._nonfinite}

    def load_state(self, state: BackendState) -> None:
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.tensors.items():
            part, _, inner = name.partition("/")
            parts.setdefault(part, {})[inner] = tensor
        stateful = self._stateful()
        for part, target in stateful.items():
            if not isinstance(target, Optimizer):
                _check_fit(part, target, parts.get(part, {}))
        for part, target in stateful.items():
            given = parts.get(part, {})
            if isinstance(target, Optimizer):
                target.load(given)
            else:
                with torch.no_grad():
                    for name, parameter in target.items():
                        parameter.copy_(given[name])
        self._nonfinite = int(state.values["nonfinite"])

    def _stateful(self) -> dict[str, Optimizer | dict[str, Any]]:
        found: dict[str, Optimizer | dict[str, Any]] = {
            "policy": self.policy.trainable(),
            "policy_optimizer": self._optimizer,
        }
        if self._critic is not None and self._critic_optimizer is not None:
            found["critic"] = dict(self._critic.named_parameters())
            found["critic_optimizer"] = self._critic_optimizer
        return found

    def _prepare(self, groups: Sequence[PromptGroup]) -> list[list[Part]]:
        """Micro-batches of each mini-batch, with what must be computed before the first update changes the policy."""
        a = self._algorithm
        by_token = self._critic is not None
        advantages = [np.zeros(len(group)) for group in groups] if by_token else estimate(groups, a)
        minis = [
            [Part(batch=batch.to(self._device)) for batch in self._micro_batches(samples)]
            for samples in mini_batches(groups, advantages, a)
        ]
        several = a.updates_per_batch * len(minis) > 1
        with torch.no_grad():
            for parts in minis:
                for i, part in enumerate(parts):
                    if a.proximal == "recomputed" and several:
                        part = replace(part, proximal=self.policy.logprobs(part.batch)[0])
                    if self._reference is not None:
                        part = replace(part, reference=self._reference.logprobs(part.batch)[0])
                    if self._critic is not None:
                        part = replace(part, values=self._critic(part.batch))
                    parts[i] = part
        return self._with_gae(minis) if by_token else minis

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        if self._packed:
            return packed_batches(samples, self._budget, share=self._share_prompts)
        return micro_batches(samples, self._budget, self._share)

    def _with_gae(self, minis: list[list[Part]]) -> list[list[Part]]:
        flat = [part for parts in minis for part in parts]
        values = [part.values for part in flat if part.values is not None]
        found = iter(self._token_advantages([part.batch for part in flat], values))
        made: list[list[Part]] = []
        for parts in minis:
            made.append([])
            for part in parts:
                advantages, returns = next(found)
                batch = replace(part.batch, advantages=advantages.to(self._device))
                made[-1].append(replace(part, batch=batch, returns=returns.to(self._device)))
        return made

    def _token_advantages(self, batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Over all batches of the step; on several ranks, over theirs too."""
        return token_advantages(batches, values, self._algorithm) if batches else []

    def _update_policy(self, parts: Sequence[Part], factor: float, updates: _Updates, version: int | None) -> Tally:
        """One optimizer step of the policy over a mini-batch. `version`: whose log-probabilities to compare."""
        self._optimizer.forget()
        loss, tally = self._added_up(parts, lambda part: self._policy_part(part, version))
        norm, applied = self._optimizer.step(self._lr * factor, loss)
        one = torch.ones_like(loss)
        if not applied:  # its numbers would make those of the other updates NaN
            tally = Tally()
        else:
            tally.means["actor/loss"] = (loss, one)
            tally.means["actor/grad_norm"] = (norm, one)
        self._count(applied, updates, loss)
        return tally

    def _update_critic(self, parts: Sequence[Part], factor: float) -> Tally:
        assert self._critic is not None and self._critic_optimizer is not None
        self._critic_optimizer.forget()
        loss, tally = self._added_up(parts, self._critic_part)
        norm, applied = self._critic_optimizer.step(self._critic_lr * factor, loss)
        one = torch.ones_like(loss)
        if not applied:
            tally = Tally()
        else:
            tally.means["critic/loss"] = (loss, one)
            tally.means["critic/grad_norm"] = (norm, one)
        tally.maxima["critic/skipped_nonfinite"] = one * (not applied)
        return tally

    def _added_up(
        self, parts: Sequence[Part], found_in: Callable[[Part], tuple[Tensor, Tally]]
    ) -> tuple[Tensor, Tally]:
        """Gradients, loss and numbers of a mini-batch."""
        tally, losses = Tally(), []
        for place, part in enumerate(parts):
            loss, found = found_in(part)
            self._backward(loss, last=place == len(parts) - 1)
            losses.append(loss.detach())
            tally.merge(found)
        return self._over_ranks(torch.stack(losses).sum(), tally)

    def _policy_part(self, part: Part, version: int | None) -> tuple[Tensor, Tally]:
        """On several ranks: also of one that is there for company alone."""
        batch = part.batch
        logp, entropy = self.policy.logprobs(batch, entropy_grad=self._algorithm.entropy_coef > 0)
        tokens = PolicyTokens(
            behaviour=batch.behaviour,
            advantages=batch.advantages,
            weights=batch.weights,
            sequence=batch.sequence,
            n_sequences=batch.n_sequences,
            proximal=part.proximal,
            reference=part.reference,
        )
        loss, tally = policy_loss(logp, entropy, tokens, self._algorithm)
        if version is not None:
            tally.merge(_logprob_gap(logp.detach(), batch, version))
        return loss, tally

    def _critic_part(self, part: Part) -> tuple[Tensor, Tally]:
        """Likewise."""
        assert self._critic is not None and part.values is not None and part.returns is not None
        values = self._critic(part.batch)
        return value_loss(values, part.values, part.returns, part.batch.weights, self._algorithm.value_clip)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """`last`: of an update; on several ranks, when gradients are exchanged."""
        loss.backward()  # type: ignore[no-untyped-call]

    def _over_ranks(self, loss: Tensor, tally: Tally) -> tuple[Tensor, Tally]:
        """What all ranks found; here there is one."""
        return loss, tally

    def _count(self, applied: bool, updates: _Updates, loss: Tensor) -> None:
        updates.made += 1
        updates.skipped += not applied
        self._nonfinite = 0 if applied else self._nonfinite + 1
        if self._nonfinite >= MAX_NONFINITE:
            raise NonFiniteLoss(
                f"{self._nonfinite} updates in a row had a loss or a gradient that is not finite (loss {float(loss)}); "
                f"the weights are as before them. Lower optimizer.lr ({self._lr:g}), set algorithm.dual_clip to 3, or "
                "set model.dtype to float32"
            )


@dataclass
class _Updates:
    """Of one step."""

    made: int = 0
    skipped: int = 0


def _learning_rate(config: OptimizerConfig, resolved: float | None) -> float:
    if resolved is not None:
        return resolved
    if config.lr == "auto":
        raise ConfigError("optimizer.lr", config.lr, "give a number, or the backend the one that it stands for")
    return config.lr


def _logprob_gap(logp: Tensor, batch: MicroBatch, version: int) -> Tally:
    """How far the engine's log-probabilities are from ours at tokens that the same weights made."""
    same = batch.versions == version
    gap = torch.where(same, (logp - batch.behaviour).abs(), 0.0)
    return Tally(means={GAP_MEAN: (gap.sum(), same.sum())}, maxima={GAP_MAX: gap.max()})


def _check_fit(part: str, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    found = {name: tuple(tensor.shape) for name, tensor in given.items()}
    if shapes != found:
        name = min(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise DataError(
            f"{part}/{name} has shape {found.get(name)} in the checkpoint and {shapes.get(name)} here: "
            "resume with the model and the settings that it was made with"
        )
