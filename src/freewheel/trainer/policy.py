"""The model that is trained: a HF decoder, with adapters or without, seen as log-probabilities of given tokens.

    MicroBatch ─▶ decoder ─▶ hidden states of `positions` only ─▶ output head ─▶ logp, entropy [T]

Dropout is always off: what is trained must be what the engine sampled with. Called by `TorchBackend`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from freewheel.data.group import Array
from freewheel.judge.errors import ConfigError
from freewheel.trainer.batching import MAX_SHARED_TOKENS, MicroBatch, Sample, micro_batches
from freewheel.trainer.options import LOGITS_AT_A_TIME, LoraConfig

Precision = Literal["auto", "float32", "bfloat16"]

ADAPTER = "default"
"""What peft calls the adapter that it makes."""
PROBE_TOKENS = 4
ALWAYS_SHARE = 1e9
PAIRS_PER_HIDDEN = {"cpu": 3.0, "cuda": 0.5}
"""6 by counting operations of a decoder layer. Attention runs at half the speed of the matrices on a CPU; on an H200 a
mask keeps the fastest kernels out (1,024 tokens of prompt shared by 8 responses of 128: a third of the time; 200 by
responses of 512 with 3.0: 15% more)."""
PROBE_TOLERANCE = 1e-2
"""How far the head on the hidden states may be from the model's own logits, relative to their size. Rounding in
bfloat16 stays below; a logit cap or a scale does not."""


class Policy:
    """Gives log-probabilities with gradients, and the weights as the plain HF model names them."""

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device,
        dtype: Precision = "auto",
        lora: LoraConfig | None = None,
        activation_checkpointing: bool = False,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        """`seed`: for the adapters' first values. `temperature`: that of sampling."""
        self.device = device
        self.dtype = compute_dtype(dtype, device)
        self.storage_dtype: torch.dtype = model.dtype
        self.lora = lora
        self._temperature = temperature
        # Small updates would be lost in bfloat16, and autocast computes in it all the same; a base that is not trained
        # needs no more than what is computed in.
        self.plain = model.to(device, torch.float32 if lora is None else self.dtype)
        self._names = {name for name, _ in _published(self.plain)}
        self.model = _with_adapters(self.plain, lora, seed) if lora is not None else self.plain
        self.model.eval()
        if activation_checkpointing:
            enable_checkpointing(self.plain)
        if lora is not None and activation_checkpointing:
            self.plain.enable_input_require_grads()  # else nothing before the first adapter asks for a gradient
        self._plain_head = self._head_is_all()

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def logprobs(self, batch: MicroBatch, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """(log π, entropy) of each of the batch's tokens, float32, at the sampling temperature."""
        with autocast(self.device, self.dtype):
            if not self._plain_head:
                return self._scored(self._own_logits(batch), batch.targets, entropy_grad)
            hidden = self._hidden(batch.inputs).flatten(0, 1)[batch.positions]
            head = self.plain.get_output_embeddings()
            at_once = max(1, LOGITS_AT_A_TIME // head.weight.shape[0])
            if len(hidden) <= at_once:
                return self._scored(head(hidden), batch.targets, entropy_grad)
            parts = []
            for start in range(0, len(hidden), at_once):
                part = slice(start, start + at_once)

                def scored(some: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
                    return self._scored(head(some), targets, entropy_grad)

                parts.append(checkpoint(scored, hidden[part], batch.targets[part], use_reentrant=False))
            logp, entropy = zip(*parts, strict=True)
            return torch.cat(logp), torch.cat(entropy)

    @property
    def token_cost(self) -> float:
        """What a token costs outside attention, in pairs of tokens inside it."""
        return PAIRS_PER_HIDDEN.get(self.device.type, PAIRS_PER_HIDDEN["cuda"]) * float(
            self.plain.config.get_text_config().hidden_size
        )

    @torch.no_grad()
    def can_share(self) -> bool:
        """Whether responses that share a prompt in one row get the log-probabilities that each would get alone.

        A model with its own idea of positions, or of who sees whom, cannot: tried out. A sliding window would show
        only in rows longer than it.
        """
        window = self.plain.config.get_text_config().to_dict().get("sliding_window")
        if window is not None and window < MAX_SHARED_TOKENS:
            return False
        ids, places = self._probe_ids(), np.arange(PROBE_TOKENS)
        alone = Sample(
            key=(0, 0),
            prompt=ids,
            tokens=ids,
            made=places,
            behaviour=places,
            versions=places,
            reward=0.0,
            advantage=0.0,
            weight=0.0,
        )
        samples = [alone, replace(alone, key=(0, 1), tokens=ids[::-1])]
        try:
            apart, together = (
                self.logprobs(micro_batches(samples, len(samples) * 2 * PROBE_TOKENS, share)[0].to(self.device))[0]
                for share in (None, ALWAYS_SHARE)
            )
        except (TypeError, ValueError, IndexError, RuntimeError):  # it refuses such a mask, or such positions
            return False
        return bool((together - apart).abs().max() <= PROBE_TOLERANCE)

    def _probe_ids(self) -> Array:
        return np.arange(PROBE_TOKENS, dtype=np.int64) % int(self.plain.config.get_text_config().vocab_size)

    def frozen_copy(self) -> Policy:
        """As it is now, never to change: the reference of a KL term."""
        if self.lora is None:
            kept = copy.copy(self)
            kept.plain = kept.model = copy.deepcopy(self.plain).requires_grad_(False)
            return kept
        return _WithoutAdapters(self)

    def weights(self) -> dict[str, Tensor]:
        """Every parameter and buffer of the plain model, adapters merged, in the precision that is computed in.

        Tied parameters stand there once, under the name that `named_parameters` gives them. Detached, on the device,
        and not copied where nothing had to be merged or cast: `sync.pack` copies.
        """
        return {
            name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor for name, tensor in self._merged()
        }

    def save(self, folder: Path, tokenizer: Any = None) -> None:
        """An ordinary HF folder, in the floating-point type that the model was given in."""
        config = self.plain.config
        state = {
            name: tensor.to("cpu", self.storage_dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self._merged()
        }
        self.plain.save_pretrained(folder, state_dict=state)
        config.dtype = self.storage_dtype  # save_pretrained writes that of the master weights
        config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        if self.lora is None:
            yield from _published(self.plain)
            return
        adapted = {f"{name}.weight": m for name, m in self.plain.named_modules() if hasattr(m, "get_delta_weight")}
        for name, tensor in _published(self.plain):
            name = name.replace(".base_layer.", ".")
            if name in adapted:
                yield name, tensor.float() + adapted[name].get_delta_weight(ADAPTER).detach().float()
            elif name in self._names:
                yield name, tensor

    def _hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        hidden: Tensor = self.plain.base_model(**inputs, use_cache=False).last_hidden_state
        return hidden

    def _own_logits(self, batch: MicroBatch) -> Tensor:
        """The model's own way from hidden states to logits, at the wanted positions only."""
        with _only_at(self.plain.get_output_embeddings(), batch.positions):
            logits: Tensor = self.plain(**batch.inputs, use_cache=False).logits[0]
        return logits

    def _scored(self, logits: Tensor, targets: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        if self._temperature != 1:
            logits = logits / self._temperature
        log_p = logits.log_softmax(-1)
        chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
        with nullcontext() if entropy_grad else torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
        return chosen, entropy

    @torch.no_grad()
    def _head_is_all(self) -> bool:
        """Whether logits are the output head on the last hidden states, and nothing besides."""
        if self.plain.get_output_embeddings() is None:
            raise ConfigError(
                "model.path", type(self.plain).__name__, "it has no output head: give a causal language model"
            )
        ids = torch.from_numpy(self._probe_ids())[None].to(self.device)
        with autocast(self.device, self.dtype):
            own = self.plain(input_ids=ids, use_cache=False).logits.float()
            ours = self.plain.get_output_embeddings()(self._hidden({"input_ids": ids})).float()
        return bool((own - ours).abs().max() <= PROBE_TOLERANCE * own.abs().max().clamp(min=1e-3))


class _WithoutAdapters(Policy):
    """The base model under adapters, which are off while it is asked. It shares everything with the policy."""

    def __init__(self, policy: Policy) -> None:
        self.__dict__.update(policy.__dict__)

    def logprobs(self, batch: MicroBatch, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        with self.model.disable_adapter():
            return super().logprobs(batch, entropy_grad=entropy_grad)


def compute_dtype(wanted: Precision, device: torch.device) -> torch.dtype:
    if wanted == "auto":
        on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if on_gpu else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)


def enable_checkpointing(model: Any) -> None:
    """Layers keep no activations. HF asks `training` of them for that, which dropout elsewhere must not see."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def _published(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and the buffers that a checkpoint holds."""
    kept = model.state_dict()
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, buffer


def _with_adapters(model: Any, lora: LoraConfig, seed: int) -> Any:
    try:
        import peft
    except ModuleNotFoundError:
        raise ConfigError("model.lora", lora, "adapters need peft: pip install peft") from None
    from transformers.pytorch_utils import Conv1D

    options: dict[str, Any] = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": lora.target_modules,
        "fan_in_fan_out": any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 stores them so
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))


@contextmanager
def _only_at(head: nn.Module, positions: Tensor) -> Iterator[None]:
    def narrowed(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1)[positions][None], *inputs[1:])

    handle = head.register_forward_pre_hook(narrowed)
    try:
        yield
    finally:
        handle.remove()
