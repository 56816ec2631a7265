"""The models that train: the policy as log-probabilities of given tokens, and the critic as values.

    MicroBatch ─▶ decoder ─▶ hidden states at `positions` ─┬▶ output head, some rows at a time ─▶ logp, entropy [T]
                                                           └▶ critic's scalar head ─────────────▶ values [T]

Dropout is always off: what is trained must be what the engine sampled with. `plain` holds the parameters that are
trained, named and saved. In bfloat16 a copy of them computes (`Computation`). Called by `TorchBackend`.

Before training relies on an optimisation (shared prompts, packed rows, a head without full logits, compiled layers),
the policy tries it on two responses to one prompt and compares the log-probabilities. A model with its own idea of
positions or of attention fails this test and trains without the optimisation.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError
from freewheel.trainer.batching import MAX_SHARED_TOKENS, MicroBatch, TrainingSample, micro_batches, packed_batches
from freewheel.trainer.decoder import (
    Computation,
    Precision,
    cast_parameters,
    compile_layers,
    compute_dtype,
    enable_checkpointing,
    leave_tree_attention,
    undo_compile,
    use_tree_attention,
)
from freewheel.trainer.head import head_logprobs, limit_rows, logits_to_logprobs
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
        self._storage_dtype: torch.dtype = model.dtype
        self.lora = lora
        self._temperature = temperature
        # Trained parameters are in float32, because bfloat16 would lose small updates. A frozen base needs only the
        # precision of the computation.
        self.plain = model.to(device, torch.float32) if lora is None else cast_parameters(model.to(device), self.dtype)
        self._names = {name for name, _ in _iterate_parameters(self.plain)}
        self.model = _with_adapters(self.plain, lora, seed) if lora is not None else self.plain
        self.model.eval()
        if activation_checkpointing:
            enable_checkpointing(self.plain)
            if lora is not None:
                self.plain.enable_input_require_grads()  # otherwise no input of the first adapter requires a gradient
        self.computation = Computation(self.plain, device, self.dtype, copied=computing_copy and lora is None)
        self._without_adapters = False
        """Set in a frozen copy, which shares the model and leaves out its adapters."""
        self._compiled = False
        self._head_is_matrix = self._check_head()

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    # -- log-probabilities --------------------------------------------------------------------------------------------

    def logprobs(self, batch: MicroBatch, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Return (log π, entropy) of each of the batch's tokens in float32, at the sampling temperature."""
        with (
            self.computation.running() as model,
            self.model.disable_adapter() if self._without_adapters else nullcontext(),
        ):
            if not self._head_is_matrix:
                logits = _logits(model, batch)
                return logits_to_logprobs(logits, batch.targets, self._temperature, entropy_grad=entropy_grad)
            hidden = _hidden(model, batch.inputs).flatten(0, 1)[batch.positions]
            weight = model.get_output_embeddings().weight
            at_once, kept = limit_rows(self.device, len(weight))
            return head_logprobs(
                hidden.to(self.dtype),
                weight.to(self.dtype),
                batch.targets,
                temperature=self._temperature,
                entropy_grad=entropy_grad,
                at_once=at_once,
                kept=kept,
            )

    def frozen_copy(self) -> Policy:
        """Return the reference of a KL term: the policy as it is now, which is the base model under new adapters."""
        kept = copy.copy(self)
        if self.lora is not None:
            kept._without_adapters = True
            return kept
        kept.computation = self.computation.frozen_copy()
        kept.plain = kept.model = kept.computation.model
        if self._compiled:
            compile_layers(kept.plain)
        return kept

    # -- optimisations that are tried first ---------------------------------------------------------------------------

    @property
    def vocabulary(self) -> int:
        return int(self.plain.config.get_text_config().vocab_size)

    @property
    def token_cost(self) -> float:
        """The cost of a token outside attention, in pairs of tokens inside it."""
        return PAIRS_PER_HIDDEN[self.device.type] * float(self.plain.config.get_text_config().hidden_size)

    def can_share(self) -> bool:
        """Whether responses that share a prompt in one row get the same log-probabilities as in separate rows."""
        window = self.plain.config.get_text_config().to_dict().get("sliding_window")
        if window is not None and window < MAX_SHARED_TOKENS:  # it would only show in longer rows
            return False
        separate, shared = (probe_batch(self.vocabulary, packed=False, share=share) for share in (False, True))
        return self._agree(separate, shared)

    def can_pack(self) -> bool:
        """Whether sequences packed into one row do. If so, the model accepts such rows from now on."""
        models = (self.plain, self.computation.model)
        if all(use_tree_attention(model) for model in models):
            n_tokens = N_RESPONSE["packed"]
            (padded,) = micro_batches(_probe_samples(self.vocabulary, n_tokens), 4 * (N_PROMPT + n_tokens))
            alone, packed = (probe_batch(self.vocabulary, packed=True, share=share) for share in (False, True))
            if self._agree(padded, packed) and self._agree(alone, packed, plain=False):
                return True
            log.warning("%s does not support packed rows: rows are padded, which is slower", type(self.plain).__name__)
        for model in models:
            leave_tree_attention(model)
        return False

    @torch.no_grad()
    def _agree(self, *batches: MicroBatch, plain: bool = True) -> bool:
        """Compare the log-probabilities of two batches.

        `plain`: those of the plain model, in float32 if its weights are, because rounding must hide nothing. Otherwise
        in the precision of the computation, whose kernels do not support every head.
        """
        exact = plain and self.lora is None
        try:
            one, other = (self._try(batch.to(self.device), plain=plain) for batch in batches)
        except REFUSALS:
            return False
        return bool((one - other).abs().max() <= TOLERANCE[torch.float32 if exact else self.dtype])

    def _try(self, batch: MicroBatch, *, plain: bool) -> Tensor:
        if not plain:
            return self.logprobs(batch)[0]
        with nullcontext() if self.lora is None else self.computation.running():
            return logits_to_logprobs(_logits(self.plain, batch), batch.targets)[0]

    def compile(self, *, packed: bool) -> bool:
        """Compile the decoder's layers, for the kind of rows that will come. Returns whether they are used.

        They are not used if they fail or give different log-probabilities.
        """
        batch = probe_batch(self.vocabulary, packed=packed, share=packed).to(self.device)
        with torch.no_grad():
            wanted = self.logprobs(batch)[0]
        compile_layers(self.computation.model)
        began = time.monotonic()
        try:
            found = self.logprobs(batch)[0]
            found.sum().backward()  # type: ignore[no-untyped-call]
            gap = float((found.detach() - wanted).abs().max())
            self._compiled = gap <= TOLERANCE[self.dtype]
            if self._compiled:
                log.info("Compiled the decoder's layers in %.0f s", time.monotonic() - began)
                return True
            log.warning("The compiled decoder's log-probabilities are off by %.2g: continuing without compiling", gap)
        except Exception:
            log.warning("torch.compile failed: continuing without compiling", exc_info=True)
        finally:
            self.model.zero_grad(set_to_none=True)
        undo_compile(self.computation.model)
        return False

    @torch.no_grad()
    def _check_head(self) -> bool:
        """Whether logits are the last hidden states times one matrix, and nothing else."""
        head = self.plain.get_output_embeddings()
        if head is None:
            raise ConfigError(
                "model.path", type(self.plain).__name__, "it has no output head: give a causal language model"
            )
        if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
            return False
        ids = (torch.arange(N_PROMPT) % self.vocabulary)[None].to(self.device)
        with self.computation.running() as model:
            own = model(input_ids=ids, use_cache=False).logits.float()
            ours = model.get_output_embeddings()(_hidden(model, {"input_ids": ids})).float()
        return bool((own - ours).abs().max() <= HEAD_TOLERANCE * own.abs().max().clamp(min=1e-3))

    # -- weights ------------------------------------------------------------------------------------------------------

    def weights(self, stored: bool = False) -> dict[str, Tensor]:
        """Return every parameter and buffer of the plain model, adapters merged, in the type of the computation.

        `stored`: in the type of the model's files. Tied parameters appear once, under their name in
        `named_parameters`. The tensors are detached, on the device, and copied only if something was merged or cast:
        `sync.pack` copies them.
        """
        return dict(self._cast_weights(stored))

    def _cast_weights(self, stored: bool) -> Iterator[tuple[str, Tensor]]:
        dtype = self._storage_dtype if stored else self.dtype
        for name, tensor in self._merged_weights():
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def _merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.lora is None:
            yield from _iterate_parameters(self.plain)
            return
        adapted = {f"{name}.weight": m for name, m in self.plain.named_modules() if hasattr(m, "get_delta_weight")}
        for name, tensor in _iterate_parameters(self.plain):
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


def _probe_samples(vocabulary: int, n_tokens: int) -> list[TrainingSample]:
    """Return two responses to one prompt. The second is the first in reverse."""
    ids, indices = np.arange(n_tokens, dtype=np.int64) % vocabulary, np.arange(n_tokens)
    one = TrainingSample(
        key=(0, 0), prompt=ids[:N_PROMPT], tokens=ids, made=indices, behaviour=indices, versions=indices
    )
    return [one, replace(one, key=(0, 1), tokens=ids[::-1])]


def _hidden(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    hidden: Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden


def _logits(model: Any, batch: MicroBatch) -> Tensor:
    """Return the model's own logits, computed only at the batch's positions."""

    def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1)[batch.positions][None], *inputs[1:])

    with model.get_output_embeddings().register_forward_pre_hook(select):
        logits: Tensor = model(**batch.inputs, use_cache=False).logits[0]
    return logits


def _iterate_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
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

    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes any number
        target_modules=lora.target_modules,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 transposes its weights
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(model, config)


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
        if activation_checkpointing:
            enable_checkpointing(self.decoder)
        self._computation = Computation(self.decoder, device, dtype, copied=computing_copy)

    def set_up_rows(self, *, packed: bool, compiled: bool) -> None:
        """Compute like the policy, which has the same kind of decoder."""
        if packed:
            use_tree_attention(self._computation.model)
        if compiled:
            compile_layers(self._computation.model)

    def forward(self, batch: MicroBatch) -> Tensor:
        with self._computation.running() as decoder:
            hidden = decoder(**batch.inputs, use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden.flatten(0, 1)[batch.positions].float()).squeeze(-1)
        return values
