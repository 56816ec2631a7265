"""Finds a model's folder and estimates how large the model is and how much memory a run needs, without loading it.

    config.json ┐
                ├─▶ ModelSize ─▶ trainer_memory, replica_memory: estimates by part
    safetensors ┘ headers only: names and shapes

`freewheel.runtime.run_plan` shows them. Allocators, kernels and Ray need more.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freewheel.rollout.engine_factories import NUMBER_BYTES
from freewheel.runtime.config import TrainConfig
from freewheel.trainer.options import LOGITS_AT_A_TIME

MASTER_BYTES = 4
"""Trained parameters and gradients are float32: small updates would be lost in bfloat16."""
MOMENT_BYTES = 8
"""AdamW's two moments per parameter, in float32."""
ACTIVATIONS_PER_LAYER = 24
"""Numbers of the hidden size that a layer keeps per token for the backward pass, without materialised attention.
Measured with a 1.5B model on an H200, compiled (34 uncompiled; Korthikanti et al. 2022 count 17 for a narrower model).
"""
CHECKPOINTED_PER_LAYER = 1
"""With gradient checkpointing: the layer's input."""
LOGIT_COPIES = 3
"""Logits in float32, their log-softmax, and the gradient."""
HEADER_LENGTH = 8
LARGEST_HEADER = 100 << 20
"""The bound of the safetensors format."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The numbers that memory depends on."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    kv_width: int
    """Number of key heads times their size: numbers per token in each of a layer's two caches."""
    architecture: str = ""
    positions: int | None = None
    """Longest sequence that it supports."""


def model_folder(config: TrainConfig) -> str:
    """Return the folder or hub id that the model is loaded from."""
    if config.uses_embedded_model:
        from freewheel.data.tasks.word_problems import model_path

        return str(model_path())
    return str(Path(config.model.path).expanduser())


def find_folder(config: TrainConfig) -> Path | None:
    """Return the model's folder on this machine. None: it must be downloaded first."""
    folder = Path(model_folder(config))
    if folder.is_dir():
        return folder
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    folders = hub.glob(f"models--{config.model.path.replace('/', '--')}/snapshots/*")
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def read_model_size(folder: Path) -> ModelSize | None:
    """Read the size of a Hugging Face folder; None if its files do not say it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        parameters = sum(_parameters(file) for file in sorted(folder.glob("*.safetensors")))
        return _size(config, parameters)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def _size(config: Mapping[str, Any], parameters: int) -> ModelSize:
    text = config.get("text_config") or config
    hidden, heads = int(_first(text, "hidden_size", "n_embd")), int(_first(text, "num_attention_heads", "n_head"))
    head = int(text.get("head_dim") or hidden // heads)
    layers, vocabulary = int(_first(text, "num_hidden_layers", "n_layer")), int(text["vocab_size"])
    return ModelSize(
        parameters=parameters or _guess(text, hidden, layers, vocabulary),
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        kv_width=int(text.get("num_key_value_heads") or heads) * head,
        architecture=str((config.get("architectures") or [config.get("model_type", "")])[0]),
        positions=text.get("max_position_embeddings") or text.get("n_positions"),
    )


def _guess(text: Mapping[str, Any], hidden: int, layers: int, vocabulary: int) -> int:
    """Estimate without safetensors: attention 4·h², a gated feed-forward 3·h·f, and the embeddings."""
    inner = int(text.get("intermediate_size") or 4 * hidden)
    tied = bool(text.get("tie_word_embeddings", True))
    return layers * (4 * hidden**2 + 3 * hidden * inner) + vocabulary * hidden * (1 if tied else 2)


def _first(values: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if name in values:
            return values[name]
    raise KeyError(names[0])


def _parameters(file: Path) -> int:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(HEADER_LENGTH))
        if length > LARGEST_HEADER:
            raise ValueError("not a safetensors file")
        header = json.loads(stream.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def trainer_memory(
    config: TrainConfig, size: ModelSize, *, dtype: str, longest_tokens: int, processes: int = 1
) -> dict[str, int]:
    """Return bytes by part, for one training process."""
    lora = config.model.lora
    trained = size.parameters if lora is None else 4 * size.layers * lora.rank * 2 * size.hidden
    base = 0 if lora is None else size.parameters * NUMBER_BYTES[dtype]
    parts = {
        "weights": trained * MASTER_BYTES + base,
        "gradients": trained * MASTER_BYTES,
        "optimizer": trained * MOMENT_BYTES,
    }
    copied = NUMBER_BYTES[dtype] if dtype != "float32" else 0
    if copied and lora is None:
        parts["computing copy"] = size.parameters * copied
    if config.algorithm.uses_critic:
        parts["critic"] = size.parameters * (2 * MASTER_BYTES + MOMENT_BYTES + copied)
    if config.algorithm.kl_coef and lora is None:
        parts["reference"] = size.parameters * NUMBER_BYTES[dtype]
    parts = {name: part // processes for name, part in parts.items()}
    step = config.trainer.groups_per_step * config.rollout.n * longest_tokens
    tokens = min(step, max(config.trainer.micro_batch_tokens, longest_tokens))
    kept = CHECKPOINTED_PER_LAYER if config.model.gradient_checkpointing else ACTIVATIONS_PER_LAYER
    logits = min(tokens * size.vocabulary, LOGITS_AT_A_TIME) * LOGIT_COPIES * MASTER_BYTES
    parts["activations"] = tokens * size.hidden * size.layers * kept * NUMBER_BYTES[dtype] + logits
    return parts


def replica_memory(size: ModelSize, *, dtype: str, slots: int, longest_tokens: int) -> dict[str, int]:
    """Return bytes by part, for one rollouter."""
    return {
        "weights": size.parameters * NUMBER_BYTES[dtype],
        "KV cache": slots * longest_tokens * size.layers * 2 * size.kv_width * NUMBER_BYTES[dtype],
    }
