"""The model that is trained: a Hugging Face decoder, with or without adapters, as log-probabilities of given tokens.

    MicroBatch ─▶ decoder ─▶ hidden states at `positions` ─▶ output head, some rows at a time ─▶ logp, entropy [T]

Dropout is always off: what is trained must be what the engine sampled with. `plain` holds the parameters that are
trained, named and saved; in bfloat16 a copy of it computes (`ComputingCopy`). Called by `TorchBackend`.

Before training relies on an optimisation (shared prompts, packed rows, a head without full logits, compiled layers),
the policy tries it on two responses to one prompt and compares the log-probabilities. A model with its own idea of
positions or of attention fails this test and trains without the optimisation.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from freewheel.errors import ConfigError
from freewheel.trainer.batching import MAX_SHARED_TOKENS, MicroBatch, Sample, micro_batches, packed_batches
from freewheel.trainer.decoder import (
    ComputingCopy,
    Precision,
    autocast,
    cast_parameters,
    compile_layers,
    compute_dtype,
    enable_checkpointing,
    leave_tree_attention,
    undo_compile,
    use_tree_attention,
)
from freewheel.trainer.head import head_logprobs, logits_at_a_time, logits_kept
from freewheel.trainer.options import LoraConfig

log = logging.getLogger("freewheel.trainer")

ADAPTER = "default"
"""peft's name for the adapter that it creates."""
PAIRS_PER_HIDDEN = {"cpu": 3.0, "cuda": 0.5}
"""The cost of a token outside attention, in pairs of tokens inside it, relative to the hidden size. Counting operations
of a decoder layer gives 6. On a CPU attention runs at half the speed of matrix products. On an H200 a mask prevents the
fastest kernels: 1,024 prompt tokens shared by 8 responses of 128 take a third of the time; 200 prompt tokens shared by
responses of 512 took 15% more with 3.0."""
HEAD_TOLERANCE = 1e-2
"""How far the head's result may be from the model's own logits, relative to their size. Rounding in bfloat16 stays
below this; a logit cap or a scale does not."""
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.2}
"""How far a log-probability may move when its row changes. In bfloat16 logits near 16 are 0.06 apart. A token that sees
something it should not moves by whole units."""
ALWAYS_SHARE = 1e9
N_PROMPT = 4
N_RESPONSE = {"padded": 4, "packed": 37}
"""Tokens of a probe's responses. Odd if packed, so that the probe ends within a tile."""
REFUSALS = (TypeError, ValueError, IndexError, RuntimeError, NotImplementedError)
"""The exceptions of a model or a kernel that does not support a mask, positions or heads."""


class Policy:
    """Gives log-probabilities with gradients, and the weights under the names of the plain Hugging Face model."""

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

        `computing_copy`: in bfloat16, compute with a copy of the weights instead of autocast. This is faster and costs
        two bytes per parameter. Adapters need no copy, because their base is in bfloat16 already.
        """
        self.device = device
        self.dtype = compute_dtype(dtype, device)
        self.storage_dtype: torch.dtype = model.dtype
        self.lora = lora
        self._temperature = temperature
        # Trained parameters are in float32, because bfloat16 would lose small updates. A frozen base needs only the
        # precision of the computation.
        self.plain = model.to(device, torch.float32) if lora is None else cast_parameters(model.to(device), self.dtype)
        self._names = {name for name, _ in _published(self.plain)}
        self.model = _with_adapters(self.plain, lora, seed) if lora is not None else self.plain
        self.model.eval()
        if activation_checkpointing:
            enable_checkpointing(self.plain)
        if lora is not None and activation_checkpointing:
            self.plain.enable_input_require_grads()  # otherwise no input of the first adapter requires a gradient
        copied = computing_copy and lora is None and self.dtype is not torch.float32
        self._copy = ComputingCopy(self.plain, self.dtype) if copied else None
        self._mixed = not copied
        self._without_adapters = False
        """Set in a frozen copy, which shares the model and leaves out its adapters."""
        self._compiled = False
        self._plain_head = self._head_is_plain()

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    # -- log-probabilities --------------------------------------------------------------------------------------------

    def logprobs(self, batch: MicroBatch, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Return (log π, entropy) of each of the batch's tokens in float32, at the sampling temperature."""
        with self._computing() as model:
            if not self._plain_head:
                return self._score(_logits(model, batch), batch.targets, entropy_grad)
            hidden = _hidden(model, batch.decoder_inputs()).flatten(0, 1)[batch.positions]
            return self._at_head(model.get_output_embeddings(), hidden, batch.targets, entropy_grad)

    def _at_head(self, head: Any, hidden: Tensor, targets: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        weight: Tensor = head.weight
        at_once = max(1, logits_at_a_time(self.device) // weight.shape[0])
        if len(hidden) <= at_once and self.device.type == "cpu":
            return self._score(head(hidden), targets, entropy_grad)
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

        def score(rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self._score(head(rows), ids, entropy_grad)

        parts = zip(torch.split(hidden, at_once), torch.split(targets, at_once), strict=True)
        found = [checkpoint(score, rows, ids, use_reentrant=False) for rows, ids in parts]
        logp, entropy = zip(*found, strict=True)
        return torch.cat(logp), torch.cat(entropy)

    def _score(self, logits: Tensor, targets: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        if self._temperature != 1:
            logits = logits / self._temperature
        log_p = logits.log_softmax(-1)
        chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
        with nullcontext() if entropy_grad else torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
        return chosen, entropy

    def _computing_model(self) -> Any:
        return self.plain if self._copy is None else self._copy.model

    @contextmanager
    def _computing(self) -> Iterator[Any]:
        """Yield the computing model with current weights, in the precision of the computation."""
        if self._copy is not None:
            self._copy.refresh()
        with (
            autocast(self.device, self.dtype) if self._mixed else nullcontext(),
            self.model.disable_adapter() if self._without_adapters else nullcontext(),
        ):
            yield self._computing_model()

    def frozen_copy(self) -> Policy:
        """Return the reference of a KL term: the policy as it is now, which is the base model under new adapters."""
        kept = copy.copy(self)
        if self.lora is not None:
            kept._without_adapters = True
            return kept
        if self._copy is not None:
            self._copy.refresh()
        kept.plain = kept.model = copy.deepcopy(self._computing_model()).requires_grad_(False)
        kept._copy = None
        if self._compiled:
            compile_layers(kept.plain)
        return kept

    # -- optimisations that are tried first ---------------------------------------------------------------------------

    @property
    def token_cost(self) -> float:
        """The cost of a token outside attention, in pairs of tokens inside it."""
        return PAIRS_PER_HIDDEN.get(self.device.type, PAIRS_PER_HIDDEN["cuda"]) * float(
            self.plain.config.get_text_config().hidden_size
        )

    def can_share(self) -> bool:
        """Whether responses that share a prompt in one row get the same log-probabilities as in separate rows."""
        window = self.plain.config.get_text_config().to_dict().get("sliding_window")
        if window is not None and window < MAX_SHARED_TOKENS:  # it would only show in longer rows
            return False
        return self._agree(*(probe_batch(self.vocabulary, packed=False, share=share) for share in (False, True)))

    def can_pack(self) -> bool:
        """Whether sequences packed into one row do. If so, the model accepts such rows from now on."""
        if all(use_tree_attention(model) for model in (self.plain, self._computing_model())):
            n_tokens = N_RESPONSE["packed"]
            (padded,) = micro_batches(_probe_samples(self.vocabulary, n_tokens), 4 * (N_PROMPT + n_tokens))
            alone, packed = (probe_batch(self.vocabulary, packed=True, share=share) for share in (False, True))
            if self._agree(padded, packed) and self._agree(alone, packed, plain=False):
                return True
            log.warning("%s does not support packed rows: rows are padded, which is slower", type(self.plain).__name__)
        self.leave_trees()
        return False

    @torch.no_grad()
    def _agree(self, *batches: MicroBatch, plain: bool = True) -> bool:
        """Compare the log-probabilities of two batches.

        `plain`: those of the plain model, in float32 if its weights are, because rounding must hide nothing. Otherwise
        in the precision of the computation, whose kernels do not support every head.
        """
        rounded = self.lora is not None or not plain
        try:
            one, other = (self._try(batch.to(self.device), plain=plain) for batch in batches)
        except REFUSALS:
            return False
        return bool((one - other).abs().max() <= TOLERANCE[self.dtype if rounded else torch.float32])

    def _try(self, batch: MicroBatch, *, plain: bool) -> Tensor:
        if not plain:
            return self.logprobs(batch)[0]
        with autocast(self.device, self.dtype) if self.lora is not None else nullcontext():
            logits = self.plain(**batch.decoder_inputs(), use_cache=False).logits
        log_p: Tensor = logits.flatten(0, 1)[batch.positions].float().log_softmax(-1)
        return log_p.gather(-1, batch.targets[:, None])

    def leave_trees(self) -> None:
        """Return to padded rows."""
        for model in (self.plain, self._computing_model()):
            leave_tree_attention(model)

    def compile(self, *, packed: bool) -> bool:
        """Compile the decoder's layers, for the kind of rows that will come. Returns whether they are used.

        They are not used if they fail or give different log-probabilities.
        """
        batch = probe_batch(self.vocabulary, packed=packed, share=packed).to(self.device)
        with torch.no_grad():
            wanted = self.logprobs(batch)[0]
        compile_layers(self._computing_model())
        self._compiled = True
        began = time.monotonic()
        try:
            found = self.logprobs(batch)[0]
            found.sum().backward()  # type: ignore[no-untyped-call]
            gap = float((found.detach() - wanted).abs().max())
            if gap <= TOLERANCE[self.dtype]:
                log.info("Compiled the decoder's layers in %.0f s", time.monotonic() - began)
                return True
            log.warning("The compiled decoder's log-probabilities are off by %.2g: continuing without compiling", gap)
        except Exception:
            log.warning("torch.compile failed: continuing without compiling", exc_info=True)
        finally:
            self.model.zero_grad(set_to_none=True)
        undo_compile(self._computing_model())
        self._compiled = False
        return False

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        """Whether logits are the output head applied to the last hidden states, and nothing else."""
        if self.plain.get_output_embeddings() is None:
            raise ConfigError(
                "model.path", type(self.plain).__name__, "it has no output head: give a causal language model"
            )
        ids = (torch.arange(N_PROMPT) % self.vocabulary)[None].to(self.device)
        with self._computing() as model:
            own = model(input_ids=ids, use_cache=False).logits.float()
            ours = model.get_output_embeddings()(_hidden(model, {"input_ids": ids})).float()
        return bool((own - ours).abs().max() <= HEAD_TOLERANCE * own.abs().max().clamp(min=1e-3))

    @property
    def vocabulary(self) -> int:
        return int(self.plain.config.get_text_config().vocab_size)

    # -- weights ------------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Return every parameter and buffer of the plain model, adapters merged, in the precision of the computation.

        Tied parameters appear once, under their name in `named_parameters`. The tensors are detached, on the device,
        and copied only if something was merged or cast: `sync.pack` copies them.
        """
        return {
            name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor for name, tensor in self._merged()
        }

    def save(self, folder: Path, tokenizer: Any = None) -> None:
        """Write a Hugging Face folder in the floating-point type of the model's files."""
        config = self.plain.config
        state = {
            name: tensor.to("cpu", self.storage_dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self._merged()
        }
        self.plain.save_pretrained(folder, state_dict=state)
        config.dtype = self.storage_dtype  # save_pretrained writes the type of the master weights
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


def probe_batch(vocabulary: int, *, packed: bool, share: bool = True) -> MicroBatch:
    """Return a micro-batch of two responses to one prompt."""
    samples = _probe_samples(vocabulary, N_RESPONSE["packed" if packed else "padded"])
    budget = 4 * (N_PROMPT + len(samples[0].tokens))
    if packed:
        return packed_batches(samples, budget, share=share)[0]
    return micro_batches(samples, budget, ALWAYS_SHARE if share else None)[0]


def _probe_samples(vocabulary: int, n_tokens: int) -> list[Sample]:
    """Return two responses to one prompt. The second is the first in reverse."""
    ids, indices = np.arange(n_tokens, dtype=np.int64) % vocabulary, np.arange(n_tokens)
    one = Sample(
        key=(0, 0),
        prompt=ids[:N_PROMPT],
        tokens=ids,
        made=indices,
        behaviour=indices,
        versions=indices,
    )
    return [one, replace(one, key=(0, 1), tokens=ids[::-1])]


def _hidden(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    hidden: Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden


def _logits(model: Any, batch: MicroBatch) -> Tensor:
    """Return the model's own logits, computed only at the batch's positions."""
    with _only_at(model.get_output_embeddings(), batch.positions):
        logits: Tensor = model(**batch.decoder_inputs(), use_cache=False).logits[0]
    return logits


@contextmanager
def _only_at(head: nn.Module, positions: Tensor) -> Iterator[None]:
    def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1)[positions][None], *inputs[1:])

    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def _published(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, tied ones once, and the buffers that a checkpoint holds."""
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
        "fan_in_fan_out": any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 transposes its weights
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
