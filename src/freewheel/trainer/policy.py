"""The model that is trained: a HF decoder, with adapters or without, seen as log-probabilities of given tokens.

    MicroBatch ─▶ decoder ─▶ hidden states of `positions` only ─▶ output head, some rows at a time ─▶ logp, entropy [T]

Dropout is always off: what is trained must be what the engine sampled with. `plain` holds what is trained, named and
saved; in bfloat16 a copy of it computes (`ComputingCopy`). Called by `TorchBackend`.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from freewheel.errors import ConfigError
from freewheel.trainer.batching import MicroBatch
from freewheel.trainer.compiling import compile_layers, leave_uncompiled
from freewheel.trainer.head import head_logprobs, logits_at_a_time, logits_kept
from freewheel.trainer.master import ComputingCopy, cast_parameters
from freewheel.trainer.options import LoraConfig
from freewheel.trainer.probing import N_PROMPT, REFUSALS, TOLERANCE, Probe, probe_batch
from freewheel.trainer.tree import leave_tree_attention, use_tree_attention

log = logging.getLogger("freewheel.trainer")

Precision = Literal["auto", "float32", "bfloat16"]

ADAPTER = "default"
"""What peft calls the adapter that it makes."""
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
        computing_copy: bool = False,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        """`seed`: for the adapters' first values. `temperature`: that of sampling.

        `computing_copy`: in bfloat16, compute with a copy of the weights in it in place of autocast: faster, for two
        bytes a parameter. Adapters need none: the base is in bfloat16 as it is.
        """
        self.device = device
        self.dtype = compute_dtype(dtype, device)
        self.storage_dtype: torch.dtype = model.dtype
        self.lora = lora
        self._temperature = temperature
        # Small updates would be lost in bfloat16, and autocast computes in it all the same; a base that is not trained
        # needs no more than what is computed in.
        self.plain = model.to(device, torch.float32) if lora is None else cast_parameters(model.to(device), self.dtype)
        self._names = {name for name, _ in _published(self.plain)}
        self.model = _with_adapters(self.plain, lora, seed) if lora is not None else self.plain
        self.model.eval()
        if activation_checkpointing:
            enable_checkpointing(self.plain)
        if lora is not None and activation_checkpointing:
            self.plain.enable_input_require_grads()  # else nothing before the first adapter asks for a gradient
        copied = computing_copy and lora is None and self.dtype is not torch.float32
        self._copy = ComputingCopy(self.plain, self.dtype) if copied else None
        self._mixed = not copied
        self._compiled = False
        self._plain_head = self._head_is_all()

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def logprobs(self, batch: MicroBatch, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """(log π, entropy) of each of the batch's tokens, float32, at the sampling temperature."""
        with self._computing() as model:
            if not self._plain_head:
                return self._scored(_logits(model, batch), batch.targets, entropy_grad)
            hidden = _hidden(model, batch.decoder_inputs()).flatten(0, 1)[batch.positions]
            return self._at_head(model.get_output_embeddings(), hidden, batch.targets, entropy_grad)

    def _at_head(self, head: Any, hidden: Tensor, targets: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        weight: Tensor = head.weight
        at_once = max(1, logits_at_a_time(self.device) // weight.shape[0])
        if len(hidden) <= at_once and self.device.type == "cpu":
            return self._scored(head(hidden), targets, entropy_grad)
        if type(head) is nn.Linear and getattr(head, "bias", None) is None:
            return head_logprobs(
                hidden.to(self.dtype),
                weight.to(self.dtype),
                targets,
                temperature=self._temperature,
                entropy_grad=entropy_grad,
                at_once=at_once,
                kept=logits_kept(self.device) // weight.shape[0],
            )

        def scored(some: Tensor, its: Tensor) -> tuple[Tensor, Tensor]:
            return self._scored(head(some), its, entropy_grad)

        parts = zip(torch.split(hidden, at_once), torch.split(targets, at_once), strict=True)
        found = [checkpoint(scored, some, its, use_reentrant=False) for some, its in parts]
        logp, entropy = zip(*found, strict=True)
        return torch.cat(logp), torch.cat(entropy)

    @property
    def token_cost(self) -> float:
        """What a token costs outside attention, in pairs of tokens inside it."""
        return PAIRS_PER_HIDDEN.get(self.device.type, PAIRS_PER_HIDDEN["cuda"]) * float(
            self.plain.config.get_text_config().hidden_size
        )

    def can_share(self) -> bool:
        """Whether responses that share a prompt in one row get the log-probabilities that each would get alone."""
        return self._probe().can_share()

    def can_pack(self) -> bool:
        """Whether sequences packed into one row (`packing`) do. A model that can takes such rows from then on."""
        if all(use_tree_attention(model) for model in (self.plain, self._runs())):
            if self._probe().can_pack() and self._packs_as_it_computes():
                return True
            log.warning("%s takes no packed rows: they are padded, and training is slower", type(self.plain).__name__)
        self.leave_trees()
        return False

    @torch.no_grad()
    def _packs_as_it_computes(self) -> bool:
        """Once more in the precision that is computed in, whose kernels are others, and do not take every head."""
        alone, packed = (probe_batch(self._vocabulary(), packed=True, share=share) for share in (False, True))
        try:
            gap = self.logprobs(alone.to(self.device))[0] - self.logprobs(packed.to(self.device))[0]
        except REFUSALS:
            return False
        return float(gap.abs().max()) <= TOLERANCE[self.dtype]

    def leave_trees(self) -> None:
        """Back to rows that are padded."""
        for model in (self.plain, self._runs()):
            leave_tree_attention(model)

    def compile(self, *, packed: bool) -> bool:
        """Compiles the decoder's layers for rows as they will come, gradients included; False where that fails.

        What was compiled gives the log-probabilities of what was not, or it is not used.
        """
        batch = probe_batch(self._vocabulary(), packed=packed, share=packed).to(self.device)
        with torch.no_grad():
            wanted = self.logprobs(batch)[0]
        compile_layers(self._runs())
        self._compiled = True
        began = time.monotonic()
        try:
            found = self.logprobs(batch)[0]
            found.sum().backward()  # type: ignore[no-untyped-call]
            gap = float((found.detach() - wanted).abs().max())
            if gap <= TOLERANCE[self.dtype]:
                log.info("Compiled the decoder's layers in %.0f s", time.monotonic() - began)
                return True
            log.warning("The compiled decoder's log-probabilities are off by %.2g: it goes on uncompiled", gap)
        except Exception:
            log.warning("torch.compile failed: the decoder goes on uncompiled", exc_info=True)
        finally:
            self.model.zero_grad(set_to_none=True)
        leave_uncompiled(self._runs())
        self._compiled = False
        return False

    def _probe(self) -> Probe:
        """In float32 where the weights are, so that rounding hides nothing."""
        rounded = self.lora is not None
        within = autocast(self.device, self.dtype) if rounded else nullcontext()
        return Probe(self.plain, device=self.device, dtype=self.dtype if rounded else torch.float32, within=within)

    def _vocabulary(self) -> int:
        return int(self.plain.config.get_text_config().vocab_size)

    def _runs(self) -> Any:
        """The model that computes."""
        return self.plain if self._copy is None else self._copy.model

    @contextmanager
    def _computing(self) -> Iterator[Any]:
        """That model, up to date, in the precision that is computed in."""
        if self._copy is not None:
            self._copy.refresh()
        with autocast(self.device, self.dtype) if self._mixed else nullcontext():
            yield self._runs()

    def frozen_copy(self) -> Policy:
        """As it is now, never to change: the reference of a KL term."""
        if self.lora is None:
            kept = copy.copy(self)
            if self._copy is not None:
                self._copy.refresh()
            kept.plain = kept.model = copy.deepcopy(self._runs()).requires_grad_(False)
            kept._copy = None
            if self._compiled:
                compile_layers(kept.plain)
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
        ids = (torch.arange(N_PROMPT) % self._vocabulary())[None].to(self.device)
        with self._computing() as model:
            own = model(input_ids=ids, use_cache=False).logits.float()
            ours = model.get_output_embeddings()(_hidden(model, {"input_ids": ids})).float()
        return bool((own - ours).abs().max() <= PROBE_TOLERANCE * own.abs().max().clamp(min=1e-3))


class _WithoutAdapters(Policy):
    """The base model under adapters, which are off while it is asked. It shares everything with the policy."""

    def __init__(self, policy: Policy) -> None:
        self.__dict__.update(policy.__dict__)

    def logprobs(self, batch: MicroBatch, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        with self.model.disable_adapter():
            return super().logprobs(batch, entropy_grad=entropy_grad)


def _hidden(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    hidden: Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden


def _logits(model: Any, batch: MicroBatch) -> Tensor:
    """The model's own way from hidden states to logits, at the wanted positions only."""
    with _only_at(model.get_output_embeddings(), batch.positions):
        logits: Tensor = model(**batch.decoder_inputs(), use_cache=False).logits[0]
    return logits


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
