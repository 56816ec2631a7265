"""Learning on one device, CPU or GPU, with plain torch.

    [PromptGroup] ─▶ advantages ─▶ mini-batches ─▶ micro-batches ─▶ loss, gradients added up ─▶ clip ─▶ AdamW ─▶ metrics
                     └ with a critic: values, then GAE ┘

One call of `step` is one training step. With `updates_per_batch` and `mini_batches` it makes several updates. The same
groups, settings and weights give the same result, on a CPU bit for bit: there is no dropout, and the order of
mini-batches follows from (seed, step). Called by `FullyAsyncTrainer`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from freewheel.data.group import Array, PromptGroup
from freewheel.errors import DataError
from freewheel.trainer.advantages import estimate, gae, whiten
from freewheel.trainer.backend import BackendState, NonFiniteLoss
from freewheel.trainer.batching import MicroBatch, Sample, micro_batches, mini_batches, packed_batches
from freewheel.trainer.decoder import (
    ComputingCopy,
    Precision,
    autocast,
    compile_layers,
    compute_dtype,
    enable_checkpointing,
    use_tree_attention,
)
from freewheel.trainer.losses import LossInputs, apply_loss, check_loss, value_loss
from freewheel.trainer.metrics import Tally, rollout_metrics
from freewheel.trainer.optim import Optimizer, lr_factor
from freewheel.trainer.options import AlgorithmConfig, LoraConfig, OptimizerConfig, describe
from freewheel.trainer.policy import Policy
from freewheel.trainer.sharded_checkpoint import read_shards

T = TypeVar("T")

GAP_MEAN, GAP_MAX = "rollout/logprob_gap_mean", "rollout/logprob_gap_max"
MAX_NONFINITE = 3
"""Consecutive updates with a loss or gradient that is not finite before the run ends."""
CPU_MICRO_BATCH_TOKENS = 2048
"""Larger micro-batches do not fit in a CPU's cache: 16,384 tokens of the embedded model took a third longer."""
CRITIC_LR_FACTOR = 10.0
"""The default learning rate of the critic, relative to the policy's. Its head starts from zero, and values that lag are
worse than values that fluctuate."""


@dataclass(kw_only=True)
class Part:
    """A micro-batch on the device, with everything computed before the first update of the step."""

    batch: MicroBatch
    proximal: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


class TorchBackend:
    """See `Backend`. `FsdpBackend` overrides the methods that depend on the number of ranks."""

    _rank = 0
    _copies = True
    """Whether a computing copy of the model may be used. FSDP gathers a copy layer by layer instead."""

    def __init__(
        self,
        model: Any,
        *,
        algorithm: AlgorithmConfig | None = None,
        optimizer: OptimizerConfig | None = None,
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
        """`model`: a Hugging Face causal language model, which the backend takes over.

        `compile`: use torch.compile for the decoder's layers; a failure is a warning. `share_prompts`: compute a
        group's prompt once for several responses if that is cheaper and the model supports it. `temperature`: that of
        sampling, so that log-probabilities match.
        """
        self._algorithm = algorithm or AlgorithmConfig()
        self._config = optimizer or OptimizerConfig()
        assert self._config.lr != "auto", "the configuration of a run knows the rate"
        self._lr = self._config.lr
        self._critic_lr = self._config.critic_lr or CRITIC_LR_FACTOR * self._lr
        self._device = torch.device(device)
        self._loss = self._algorithm.find_loss()
        check_loss(self._loss, self._algorithm, self._device)
        on_cpu = self._device.type == "cpu"
        self._budget = min(micro_batch_tokens, CPU_MICRO_BATCH_TOKENS) if on_cpu else micro_batch_tokens
        self._seed = seed
        self._nonfinite = 0
        computes: dict[str, Any] = {
            "device": self._device,
            "activation_checkpointing": activation_checkpointing,
            "computing_copy": self._copies and not on_cpu,
        }
        self._critic = None
        if self._algorithm.uses_critic:  # copies the decoder before adapters are added to it
            self._critic = Critic(model.base_model, dtype=compute_dtype(dtype, self._device), **computes)
        self.policy = Policy(model, dtype=dtype, lora=lora, temperature=temperature, seed=seed, **computes)
        self._share_prompts = share_prompts
        self._packed = self._set_up_rows(compile=compile)
        padded_share = share_prompts and not self._packed and self.policy.can_share()
        self._share = self.policy.token_cost if padded_share else None
        self._reference = self.policy.frozen_copy() if self._algorithm.kl_coef else None
        self._optimizer = Optimizer(self.policy.trainable(), self._config)
        self._critic_optimizer = (
            Optimizer(dict(self._critic.named_parameters()), self._config) if self._critic else None
        )

    def _set_up_rows(self, *, compile: bool) -> bool:
        """Compile if requested. Returns whether rows are packed, which needs flash attention."""
        packed = self._device.type == "cuda" and self.policy.dtype is torch.bfloat16 and self.policy.can_pack()
        compiled = compile and self.policy.compile(packed=packed)
        if self._critic is not None:
            self._critic.set_up_rows(packed=packed, compiled=compiled)
        return packed

    def describe(self) -> str:
        return describe(self._algorithm)

    @property
    def updates_applied(self) -> int:
        optimizers = (self._optimizer, self._critic_optimizer)
        return sum(one.updates_applied for one in optimizers if one is not None)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(
        self, groups: Sequence[PromptGroup], *, version: int | None, step: int, total_steps: int
    ) -> dict[str, float]:
        factor = lr_factor(self._config, step, total_steps)
        # Do everything that can raise before the first update, so that the step can be retried.
        rollout = rollout_metrics(groups)
        minis = self._prepare(groups)
        tally = Tally()
        for epoch in range(self._algorithm.updates_per_batch):
            order = np.random.default_rng([self._seed, step, epoch]).permutation(len(minis))
            for index in order if len(minis) > 1 else range(len(minis)):
                compute = partial(self._policy_part, version=version)
                tally.merge(self._update("actor", self._optimizer, self._lr * factor, minis[index], compute))
                version = None  # the first update changes the weights
                if self._critic_optimizer is not None:
                    lr = self._critic_lr * factor
                    tally.merge(self._update("critic", self._critic_optimizer, lr, minis[index], self._critic_part))
        metrics = {**rollout, **tally.values()}
        if minis:
            metrics["actor/lr"] = self._lr * factor
            if self._critic is not None:
                metrics["critic/lr"] = self._critic_lr * factor
        if GAP_MEAN not in metrics:  # no token has this version, so there is no largest gap either
            metrics.pop(GAP_MAX, None)
        return metrics

    def _prepare(self, groups: Sequence[PromptGroup]) -> list[list[Part]]:
        """Return the micro-batches of each mini-batch, with everything that the first update would change."""
        a = self._algorithm
        advantages = [np.zeros(len(group)) for group in groups] if a.uses_critic else estimate(groups, a)
        minis = [
            [Part(batch=batch.to(self._device)) for batch in self._micro_batches(samples)]
            for samples in mini_batches(groups, advantages, a)
        ]
        several = a.updates_per_batch * len(minis) > 1
        parts = [part for mini in minis for part in mini]
        with torch.no_grad():
            for part in parts:
                if a.proximal == "recomputed" and several:
                    part.proximal = self.policy.logprobs(part.batch)[0]
                if self._reference is not None:
                    part.reference = self._reference.logprobs(part.batch)[0]
                if self._critic is not None:
                    part.values = self._critic(part.batch)
        if a.uses_critic and parts:
            self._add_gae(parts)
        return minis

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        if self._packed:
            return packed_batches(samples, self._budget, share=self._share_prompts)
        return micro_batches(samples, self._budget, self._share)

    def _add_gae(self, parts: Sequence[Part]) -> None:
        """Set the advantages and returns of all micro-batches of the step.

        With `batch_std`, advantages are normalised over all tokens of all micro-batches, those of other ranks included.
        """
        found = [token_gae(part, self._algorithm) for part in parts]
        advantages = np.concatenate([one for one, _ in found])
        if self._algorithm.normalisation == "batch_std":
            by_rank = self._gather(advantages)
            ends = np.cumsum([len(one) for one in by_rank])[:-1]
            advantages = np.split(whiten(np.concatenate(by_rank)), ends)[self._rank]
        own = np.split(advantages, np.cumsum([len(one) for one, _ in found])[:-1])
        for part, one, (_, returns) in zip(parts, own, found, strict=True):
            part.batch = replace(part.batch, advantages=self._tensor(one))
            part.returns = self._tensor(returns)

    def _tensor(self, values: Array) -> Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(self._device)

    def _update(
        self,
        name: str,
        optimizer: Optimizer,
        lr: float,
        parts: Sequence[Part],
        compute: Callable[[Part], tuple[Tensor, Tally]],
    ) -> Tally:
        """Make one optimizer step over a mini-batch. `name`: the prefix of its metrics, `actor` or `critic`."""
        optimizer.forget()
        loss, tally = self._accumulate(parts, compute)
        norm, applied = optimizer.step(lr, loss)
        one = torch.ones_like(loss)
        if applied:
            tally.sums.update({f"{name}/loss": (loss, one), f"{name}/grad_norm": (norm, one)})
        else:  # its metrics would make those of the other updates NaN
            tally = Tally()
        tally.sums[f"{name}/skipped_nonfinite"] = (one * (not applied),)
        if optimizer is self._optimizer:
            self._check_finite(applied, loss)
        return tally

    def _accumulate(
        self, parts: Sequence[Part], compute: Callable[[Part], tuple[Tensor, Tally]]
    ) -> tuple[Tensor, Tally]:
        """Add up the gradients, the loss and the metrics of a mini-batch."""
        tally, losses = Tally(), []
        for index, part in enumerate(parts):
            loss, found = compute(part)
            self._backward(loss, last=index == len(parts) - 1)
            losses.append(loss.detach())
            tally.merge(found)
        return self._over_ranks(torch.stack(losses).sum(), tally)

    def _policy_part(self, part: Part, *, version: int | None) -> tuple[Tensor, Tally]:
        """`version`: compare log-probabilities with the engine's at tokens of this version."""
        batch = part.batch
        logp, entropy = self.policy.logprobs(batch, entropy_grad=self._algorithm.entropy_coef > 0)
        inputs = LossInputs(
            logprobs=logp,
            entropy=entropy,
            behaviour=batch.behaviour,
            advantages=batch.advantages,
            weights=batch.weights,
            response=batch.sequence,
            n_responses=batch.n_sequences,
            tokens=batch.targets,
            settings=self._algorithm,
            proximal=part.proximal,
            reference=part.reference,
        )
        loss, tally = apply_loss(self._loss, inputs)
        if version is not None:
            tally.merge(_logprob_gap(logp.detach(), batch, version))
        return loss, tally

    def _critic_part(self, part: Part) -> tuple[Tensor, Tally]:
        assert self._critic is not None and part.values is not None and part.returns is not None
        values = self._critic(part.batch)
        return value_loss(values, part.values, part.returns, part.batch.weights, self._algorithm.value_clip)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """`last`: the last micro-batch of an update, when ranks exchange gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def _over_ranks(self, loss: Tensor, tally: Tally) -> tuple[Tensor, Tally]:
        """Return the loss and metrics of all ranks together."""
        return loss, tally

    def _gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        return [value]

    def _check_finite(self, applied: bool, loss: Tensor) -> None:
        self._nonfinite = 0 if applied else self._nonfinite + 1
        if self._nonfinite >= MAX_NONFINITE:
            own = self._algorithm.loss != "auto" and f"check that {self._algorithm.loss} returns finite numbers, "
            raise NonFiniteLoss(
                f"{self._nonfinite} updates in a row had a loss or a gradient that is not finite (loss {float(loss)}); "
                f"the weights are unchanged. To avoid it, {own or ''}"
                f"lower optimizer.lr ({self._lr:g}), set algorithm.dual_clip to 3, or set model.dtype to float32"
            )

    # -- what is published and saved ----------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        return self.policy.weights()

    def save_hf(self, folder: Path, tokenizer: Any = None) -> None:
        self.policy.save(folder, tokenizer)

    def state(self) -> BackendState:
        """Return trained parameters and moments. A frozen base follows from the settings; there is no random state."""
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in self._named_state().items()
        }
        return BackendState(tensors=tensors, values=self._state_values())

    def _named_state(self) -> dict[str, Tensor]:
        return {
            f"{part}/{name}": tensor
            for part, found in self._stateful().items()
            for name, tensor in (found.state() if isinstance(found, Optimizer) else found).items()
        }

    def _state_values(self) -> dict[str, Any]:
        return {"algorithm": self._algorithm.name, "nonfinite": self._nonfinite}

    def load_files(self, files: Sequence[Path], values: Mapping[str, Any]) -> None:
        self.load_state(BackendState(tensors=read_shards(files), values=values))

    def load_state(self, state: BackendState) -> None:
        """Load the result of `state`. Raises `DataError` if it belongs to another model or other settings."""
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
                continue
            for name, parameter in target.items():
                parameter.detach().copy_(given[name])
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


def _logprob_gap(logp: Tensor, batch: MicroBatch, version: int) -> Tally:
    """Measure how far the engine's log-probabilities are from ours at tokens that the same weights produced."""
    same = batch.versions == version
    gap = torch.where(same, (logp - batch.behaviour).abs(), 0.0)
    return Tally(sums={GAP_MEAN: (gap.sum(), same.sum())}, maxima={GAP_MAX: gap.max()})


def _check_fit(part: str, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    found = {name: tuple(tensor.shape) for name, tensor in given.items()}
    if shapes != found:
        name = min(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise DataError(
            f"{part}/{name} has shape {found.get(name)} in the checkpoint and {shapes.get(name)} here: "
            "resume with the model and the settings of the checkpoint"
        )


# -- the critic -------------------------------------------------------------------------------------------------------


class Critic(nn.Module):
    """A copy of the policy's decoder with a scalar head: the reward that each state promises.

    A token's value is that of the state before it was chosen, from the hidden state that predicts it. The head starts
    at 0, so all values do.
    """

    def __init__(
        self,
        decoder: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        activation_checkpointing: bool,
        computing_copy: bool = False,
    ) -> None:
        """`computing_copy`: see `Policy`."""
        super().__init__()
        self.decoder = copy.deepcopy(decoder).float().to(device).eval()
        self.head = nn.Linear(decoder.config.get_text_config().hidden_size, 1, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._device, self._dtype = device, dtype
        if activation_checkpointing:
            enable_checkpointing(self.decoder)
        copied = computing_copy and dtype is not torch.float32
        self._copy = ComputingCopy(self.decoder, dtype) if copied else None

    def set_up_rows(self, *, packed: bool, compiled: bool) -> None:
        """Compute like the policy, which has the same kind of decoder."""
        if packed:
            use_tree_attention(self._computing_decoder())
        if compiled:
            compile_layers(self._computing_decoder())

    def _computing_decoder(self) -> Any:
        return self.decoder if self._copy is None else self._copy.model

    def forward(self, batch: MicroBatch) -> Tensor:
        if self._copy is not None:
            self._copy.refresh()
        with autocast(self._device, self._dtype) if self._copy is None else nullcontext():
            hidden = self._computing_decoder()(**batch.decoder_inputs(), use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden.flatten(0, 1)[batch.positions].float()).squeeze(-1)
        return values


def token_gae(part: Part, config: AlgorithmConfig) -> tuple[Array, Array]:
    """Return (advantages, returns) [T]: GAE with the reward on each response's last own token."""
    batch = part.batch
    if not batch.n_sequences:
        return np.zeros(0), np.zeros(0)
    assert part.values is not None
    lengths = np.array(batch.lengths)
    present = np.arange(lengths.max())[None, :] < lengths[:, None]
    padded, rewards = np.zeros(present.shape), np.zeros(present.shape)
    padded[present] = part.values.double().cpu().numpy()
    rewards[np.arange(len(lengths)), lengths - 1] = batch.rewards
    advantages, returns = gae(rewards, padded, present, gamma=config.gamma, lam=config.lam)
    return advantages[present], returns[present]
