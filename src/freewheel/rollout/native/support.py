"""Models for the native engine: which ones it can run, a test of its numbers at the start, and new weights.

`check_supported` reads the model's configuration. Architectures also differ in what they pass to their attention, and a
new one may do something that no flag shows. So `check_agreement` compares one decode step with the model's own forward
pass before the engine serves anything. Called by `NativeEngine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from freewheel.data.group import Array
from freewheel.rollout.engine import EngineError

if TYPE_CHECKING:
    from freewheel.rollout.native.runner import Runner

FULL_ATTENTION = "full_attention"
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Position embeddings that depend on the longest sequence of the batch: a sequence's numbers would depend on it too."""
PROMPT_TOKENS = 12
"""Length of the test prompt. A wrong mask or position shows at each token."""
FULL_PRECISION_GAP = 1e-3
HALF_PRECISION_GAP = 0.25
"""Far above rounding, far below the effect of a wrong mask or position."""
NAMES_SHOWN = 3


class UnsupportedModel(EngineError, ValueError):
    """The native engine cannot run this architecture. Another engine may."""

    def __init__(self, model: PreTrainedModel, reason: str) -> None:
        super().__init__(f"{type(model).__name__}: the native engine cannot run it, as {reason}; use another engine")


def check_supported(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModel` unless all layers of the decoder attend to everything before them."""
    config: Any = model.config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(model, "it is an encoder-decoder")
    if not model._can_compile_fullgraph or not model._supports_attention_backend:
        raise UnsupportedModel(model, "it does not support a static KV cache with an attention of the caller's")
    kinds = sorted(_layer_kinds(config) - {FULL_ATTENTION})
    if kinds:
        raise UnsupportedModel(model, f"it has layers of the kind {', '.join(kinds)}")
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModel(model, "its layers share keys and values")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModel(model, f"its position embedding ({rope['rope_type']}) depends on the longest of a batch")


def _layer_kinds(config: Any) -> set[str]:
    named = getattr(config, "layer_types", None)
    if named is not None:
        return set(named)
    if getattr(config, "sliding_window", None) is not None:  # configurations older than `layer_types`
        return {"sliding_attention"}
    return {"chunked_attention"} if getattr(config, "attention_chunk_size", None) is not None else {FULL_ATTENTION}


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the embedding, which may be larger than the tokenizer's vocabulary."""
    return int(cast(Tensor, model.get_input_embeddings().weight).shape[0])


# -- its numbers ------------------------------------------------------------------------------------------------------


def compute_logprobs(model: PreTrainedModel, max_prompt_tokens: int) -> tuple[Array, Tensor]:
    """A test prompt, and the distribution over its next token by the model's own forward pass."""
    vocabulary = vocabulary_size(model)
    prompt = (np.arange(1, 1 + min(PROMPT_TOKENS, max_prompt_tokens)) * 7 % vocabulary).astype(np.int32)
    ids = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0).to(model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1]
    return prompt, torch.log_softmax(logits.float(), dim=-1)


def check_agreement(runner: Runner, prompt: Array, expected: Tensor) -> None:
    """Raises `UnsupportedModel` if the engine's own numbers differ from `compute_logprobs`."""
    token, logprob = runner.next_token(prompt)
    gap = abs(logprob - float(expected[token]))
    full = runner.model.dtype in (torch.float32, torch.float64)
    if not gap <= (FULL_PRECISION_GAP if full else HALF_PRECISION_GAP):
        raise UnsupportedModel(runner.model, f"its log-probabilities there are {gap:.3g} away from its forward pass")


# -- its weights ------------------------------------------------------------------------------------------------------


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copy `weights` into a running model; returns the model's own tensors under the same names.

    A tied parameter may come under one of its names or under all of them. All weights are checked before the first one
    is copied: a ValueError leaves the model unchanged.
    """
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    _check_weights(own, weights)
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in own.values()):
        torch.cuda.synchronize()  # the source may be freed or overwritten after this call
    return {name: own[name] for name in weights}


def _check_weights(own: Mapping[str, Tensor], weights: Mapping[str, Any]) -> None:
    unknown = sorted(set(weights) - set(own))
    if unknown:
        raise ValueError(f"weights: {_listed(unknown)} not in the model; send what its state_dict names")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != tuple(own[name].shape):
            raise ValueError(
                f"weights: {name} has the shape {tuple(tensor.shape)}, the model's has {tuple(own[name].shape)}"
            )
    given = {own[name].data_ptr(): name for name in weights}
    missing = sorted(name for name, tensor in own.items() if tensor.numel() and tensor.data_ptr() not in given)
    if missing:
        raise ValueError(f"weights: {_listed(missing)} missing; send all parameters (tied ones once)")
    for name, tensor in weights.items():
        twin = given[own[name].data_ptr()]
        if twin != name and not torch.equal(_bytes(tensor), _bytes(weights[twin])):
            raise ValueError(
                f"weights: {name} and {twin} are one tensor in the model, and differ here; send one of them"
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)  # NaN equals NaN here


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
