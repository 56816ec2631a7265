"""Models of known shapes with random weights, for benchmarks on a GPU: speed does not depend on the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
}
"""Shapes of Qwen2.5, whose weights are published under these names."""
VOCABULARY, POSITIONS = 151_936, 4096


def model_config(shape: str) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        **SHAPES[shape],
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        rope_theta=1e6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def write_model(folder: Path, shape: str, *, device: str = "cuda") -> Path:
    """Write a HF folder of that shape in bfloat16, without a tokenizer."""
    import torch
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(model_config(shape)).to(torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder
