"""Learning on one device, CPU or GPU, with plain torch.

    [PromptGroup] ─▶ advantages ─▶ mini-batches ─▶ micro-batches ─▶ loss, gradients added up ─▶ clip ─▶ AdamW ─▶ metrics
                     └ with a critic: values, then GAE ┘

One call of `step` is one training step. With `updates_per_batch` and `mini_batches` it makes several updates. The same
groups, settings and weights give the same result, on a CPU bit for bit: there is no dropout, and the order of
mini-batches follows from (seed, step). Called by `FullyAsyncTrainer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from freewheel.data.group import Array, PromptGroup
from freewheel.errors import DataError
from freewheel.trainer.advantages import estimate, gae, has_no_variance, whiten
from freewheel.trainer.backend import BackendState, NonFiniteLoss
from freewheel.trainer.batching import MicroBatch, TrainingSample, micro_batches, mini_batches, packed_batches
from freewheel.trainer.decoder import Precision, compute_dtype
from freewheel.trainer.losses import Tally, apply_loss, check_loss, value_loss
from freewheel.trainer.options import AlgorithmConfig, LoraConfig, OptimizerConfig, describe
from freewheel.trainer.policy import Critic, Policy
from freewheel.trainer.sharded_checkpoint import copy_to_host, read_rows, write_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

METRICS = {"policy": "actor", "critic": "critic"}
"""The prefix of the metrics of each model that learns."""
GAP_MEAN, GAP_MAX = "rollout/logprob_gap_mean", "rollout/logprob_gap_max"
STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
CLIP_EPS = 1e-6
"""torch adds this to the norm before dividing by it. A norm below it needs no clipping, so gradients are not read."""
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

    _rank, _size = 0, 1
    _host_mesh: DeviceMesh | None = None
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

        `compile`: use torch.compile for the decoder's layers; a failure is only a warning. `share_prompts`: compute a
        group's prompt once for several responses if that is cheaper and the model supports it. `temperature`: that of
        sampling, so that log-probabilities match.
        """
        self._algorithm = algorithm or AlgorithmConfig()
        self._config = optimizer or OptimizerConfig()
        assert self._config.lr != "auto", "the configuration of a run knows the rate"
        self._lr = {"policy": self._config.lr, "critic": self._config.critic_lr or CRITIC_LR_FACTOR * self._config.lr}
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
        self._shard()
        self._optimizers = {"policy": self._make_optimizer(self.policy.trainable())}
        if self._critic is not None:
            self._optimizers["critic"] = self._make_optimizer(dict(self._critic.named_parameters()))

    def _set_up_rows(self, *, compile: bool) -> bool:
        """Compile if requested. Returns whether rows are packed, which needs flash attention."""
        packed = self._device.type == "cuda" and self.policy.dtype is torch.bfloat16 and self.policy.can_pack()
        compiled = compile and self.policy.compile(packed=packed)
        if self._critic is not None:
            self._critic.set_up_rows(packed=packed, compiled=compiled)
        return packed

    def _shard(self) -> None:
        """Distribute the models over the ranks."""

    def _make_optimizer(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        return Optimizer(parameters, self._config)

    def describe(self) -> str:
        return describe(self._algorithm)

    @property
    def updates_applied(self) -> int:
        return sum(optimizer.updates_applied for optimizer in self._optimizers.values())

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
                tally.merge(self._update("policy", factor, minis[index], compute))
                version = None  # the first update changes the weights
                if self._critic is not None:
                    tally.merge(self._update("critic", factor, minis[index], self._critic_part))
        metrics = {**rollout, **tally.values()}
        if minis:
            metrics |= {f"{METRICS[name]}/lr": self._lr[name] * factor for name in self._optimizers}
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

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
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
        self, name: str, lr_factor: float, parts: Sequence[Part], compute: Callable[[Part], tuple[Tensor, Tally]]
    ) -> Tally:
        """Make one optimizer step of the policy or the critic over a mini-batch."""
        optimizer, prefix = self._optimizers[name], METRICS[name]
        optimizer.forget()  # leftovers of a failed attempt
        tally, losses = Tally(), []
        for index, part in enumerate(parts):
            loss, found = compute(part)
            self._backward(loss, last=index == len(parts) - 1)
            losses.append(loss.detach())
            tally.merge(found)
        loss, tally = self._over_ranks(torch.stack(losses).sum(), tally)
        norm, applied = optimizer.step(self._lr[name] * lr_factor, loss)
        one = torch.ones_like(loss)
        if applied:
            tally.sums.update({f"{prefix}/loss": (loss, one), f"{prefix}/grad_norm": (norm, one)})
        else:  # its metrics would make those of the other updates NaN
            tally = Tally()
        tally.sums[f"{prefix}/skipped_nonfinite"] = (one * (not applied),)
        if name == "policy":
            self._check_finite(applied, loss)
        return tally

    def _policy_part(self, part: Part, *, version: int | None) -> tuple[Tensor, Tally]:
        """`version`: compare log-probabilities with the engine's at tokens of this version."""
        batch = part.batch
        logp, entropy = self.policy.logprobs(batch, entropy_grad=self._algorithm.entropy_coef > 0)
        inputs = batch.loss_inputs(logp, entropy, self._algorithm, proximal=part.proximal, reference=part.reference)
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
                f"the weights are unchanged. To avoid it, {own or ''}lower optimizer.lr ({self._config.lr:g}), "
                "set algorithm.dual_clip to 3, or set model.dtype to float32"
            )

    # -- what is published and saved ----------------------------------------------------------------------------------

    def weights(self, stored: bool = False) -> Mapping[str, Tensor]:
        return self.policy.weights(stored)

    def state(self) -> BackendState:
        """Copy trained parameters and moments. A frozen base follows from the settings; there is no random state."""
        tensors = {name: copy_to_host(tensor, self._host_mesh) for name, tensor in self._named_state().items()}
        return BackendState(
            values={"algorithm": self._algorithm.name, "nonfinite": self._nonfinite},
            write=partial(write_rows, tensors=tensors, rank=self._rank, size=self._size),
        )

    def _named_state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part, optimizer in self._optimizers.items():
            found |= {f"{part}/{name}": parameter for name, parameter in optimizer.parameters.items()}
            found |= {f"{part}_optimizer/{name}": tensor for name, tensor in optimizer.state().items()}
        return found

    def load_files(self, files: Sequence[Path], values: Mapping[str, Any]) -> None:
        self._load(read_rows(files), values)

    def _load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load what `state` wrote. Raises `DataError` if it belongs to another model or other settings."""
        found = {part: _select(tensors, f"{part}/") for part in self._optimizers}
        for part, optimizer in self._optimizers.items():
            _check_fit(part, optimizer.parameters, found[part])
        for part, optimizer in self._optimizers.items():
            for name, parameter in optimizer.parameters.items():
                parameter.detach().copy_(found[part][name])
            optimizer.load(_select(tensors, f"{part}_optimizer/"))
        self._nonfinite = int(values["nonfinite"])


def _logprob_gap(logp: Tensor, batch: MicroBatch, version: int) -> Tally:
    """Measure how far the engine's log-probabilities are from ours at tokens that the same weights produced."""
    same = batch.versions == version
    gap = torch.where(same, (logp - batch.behaviour).abs(), 0.0)
    return Tally(sums={GAP_MEAN: (gap.sum(), same.sum())}, maxima={GAP_MAX: gap.max()})


def _select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_fit(part: str, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    found = {name: tuple(tensor.shape) for name, tensor in given.items()}
    if shapes != found:
        name = min(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise DataError(
            f"{part}/{name} has shape {found.get(name)} in the checkpoint and {shapes.get(name)} here: "
            "resume with the model and the settings of the checkpoint"
        )


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


# -- the optimizer ----------------------------------------------------------------------------------------------------


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
                    key: tensors[f"{name}.{key}"].to(parameter.device, torch.float32, copy=True) for key in STATE_KEYS
                }


# -- metrics of a step ------------------------------------------------------------------------------------------------


def rollout_metrics(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Return metrics about generation and scoring of a step's groups.

    Rewards are means over scored responses, reward parts over the responses that have them. Lengths count the policy's
    own tokens of all responses.
    """
    if not groups:
        return {}
    values = np.concatenate([group.rewards for group in groups])
    scored = values[~np.isnan(values)]
    lengths = np.concatenate([np.add.reduceat(group.mask != 0, group.offsets[:-1], dtype=np.int64) for group in groups])
    status = np.array([verdict.status for group in groups for verdict in group.verdicts])
    raw = np.concatenate([group.raw_rewards for group in groups])
    raw = raw[~np.isnan(raw)]
    found = {
        "rollout/response_length_mean": lengths.mean(),
        "rollout/response_length_max": lengths.max(),
        "rollout/truncation_ratio": np.mean([reason == "length" for group in groups for reason in group.finish]),
        "rollout/masked_ratio": (np.isnan(values) & (status != "skipped")).mean(),
        "rollout/skipped_ratio": (status == "skipped").mean(),
        "rollout/zero_variance_ratio": np.mean([has_no_variance(group) for group in groups]),
    }
    if len(scored):
        found |= {"rollout/reward_mean": scored.mean(), "rollout/reward_std": scored.std()}
    if len(raw):
        found["rollout/raw_reward_mean"] = raw.mean()
    return {name: float(value) for name, value in found.items()} | _reward_parts(groups)


def _reward_parts(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Return the mean of each part of the reward, as the reward function or the judge named it."""
    found: dict[str, list[float]] = {}
    for group in groups:
        for verdict in group.verdicts:
            for name, value in verdict.parts.items():
                if math.isfinite(value):
                    found.setdefault(name, []).append(value)
    return {f"reward/{name}": math.fsum(values) / len(values) for name, values in sorted(found.items())}
