"""Models that the native engine cannot run are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from freewheel.rollout.native.engine import NativeEngine
from freewheel.rollout.native.support import UnsupportedModel

from .asking import tiny

SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 11,
    "head_dim": 8,
}


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=11, state_size=4))


def sliding() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(sliding_window=8, **SHAPE))


def mixed() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE))


def softcapped() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(layer_types=["full_attention"] * 2, **SHAPE))


def length_dependent() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return LlamaForCausalLM(LlamaConfig(rope_parameters=rope, max_position_embeddings=64, **SHAPE))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (mamba, "MambaForCausalLM.*static KV cache"),
        (sliding, "MistralForCausalLM.*sliding_attention"),
        (mixed, "Gemma2ForCausalLM.*sliding_attention"),
        (softcapped, "Gemma2ForCausalLM.*soft caps"),
        (length_dependent, "LlamaForCausalLM.*dynamic"),
    ],
)
def test_an_architecture_that_it_cannot_run_is_refused_by_name(make: object, said: str) -> None:
    assert callable(make)
    with pytest.raises(UnsupportedModel, match=said):
        NativeEngine(make(), slots=2, max_prompt_tokens=4, max_new_tokens=4)


def test_more_positions_than_the_model_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"200 \+ 100.*256 positions"):
        NativeEngine(tiny("gpt2"), slots=2, max_prompt_tokens=200, max_new_tokens=100)


def test_a_model_that_decodes_differently_from_its_forward_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one would that keeps the pages from its attention, or has positions of its own."""
    model = tiny("gpt2")
    forward = model.forward

    def shifted(position_ids: torch.Tensor | None = None, **given: Any) -> Any:
        return forward(position_ids=position_ids if position_ids is None else position_ids + 1, **given)

    monkeypatch.setattr(model, "forward", shifted)
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel.*away from its forward pass"):
        NativeEngine(model, slots=2, max_prompt_tokens=20, max_new_tokens=4)


@pytest.mark.parametrize("name", ["slots", "max_prompt_tokens", "max_new_tokens"])
def test_sizes_below_one_are_refused_by_name(name: str) -> None:
    sizes = {"slots": 2, "max_prompt_tokens": 4, "max_new_tokens": 4, name: 0}
    with pytest.raises(ValueError, match=f"{name} = 0"):
        NativeEngine(tiny("gpt2"), **sizes)
