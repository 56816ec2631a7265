"""Which models the native engine can run: decoders whose layers all attend to everything before them."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from freewheel.rollout.engine import EngineError

FULL_ATTENTION = "full_attention"
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Their frequencies follow the longest sequence of the batch: a sequence would change with its neighbours."""


class UnsupportedModel(EngineError, ValueError):
    """The native engine cannot run this architecture. Another engine may."""

    def __init__(self, model: PreTrainedModel, reason: str) -> None:
        super().__init__(f"{type(model).__name__}: the native engine cannot run it, as {reason}; use another engine")


def check_supported(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModel` with the architecture's name and the reason."""
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
    if getattr(config, "sliding_window", None) is not None:  # configurations from before `layer_types`
        return {"sliding_attention"}
    return {"chunked_attention"} if getattr(config, "attention_chunk_size", None) is not None else {FULL_ATTENTION}


def check_length(model: PreTrainedModel, max_prompt_tokens: int, max_new_tokens: int) -> None:
    """A position past the model's last one would be an index error in the middle of a run, or worse, none."""
    config: Any = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_prompt_tokens + max_new_tokens > limit:
        raise ValueError(
            f"max_prompt_tokens + max_new_tokens = {max_prompt_tokens} + {max_new_tokens}: "
            f"{type(model).__name__} has {limit} positions; lower one of them"
        )


def vocabulary_size(model: PreTrainedModel) -> int:
    """Of the embedding, which may be padded past the tokenizer's."""
    return int(cast(Tensor, model.get_input_embeddings().weight).shape[0])
