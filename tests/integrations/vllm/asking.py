"""A tiny model that vLLM runs on a CPU, engines over it, and a request in flight."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from freewheel.data.group import Response
from freewheel.data.tasks.word_problems import model_path
from freewheel.rollout.engine import Engine, GenerationRequest
from freewheel.rollout.vllm.engine import VllmEngine
from freewheel.runtime.building import load_engine
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import to_config
from freewheel.runtime.model_size import read_model_size
from freewheel.runtime.placement import Machine
from freewheel.runtime.run_plan import RunPlan, resolve
from freewheel.sync.weights import Weights, pack

from ...rollout.helpers import VOCABULARY, ask, assert_agrees, random_model, until

SLOTS = 6
LONGEST_PROMPT = 128
NEW_TOKENS = 300
WAIT_S = 60.0
BLOCK = 32
"""Tokens of a block of the prefix cache: vLLM's own on a CPU, 128, would keep no prompt of a test."""
EAGER = {"enforce_eager": True, "block_size": BLOCK}
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Heads of 32, which vLLM has kernels for on a CPU. The vocabulary is that of the embedded model's tokenizer."""

assert_computed_by = partial(assert_agrees, atol=5e-4, rtol=1e-3)
"""vLLM's kernels sum in another order than torch's."""


def tiny(seed: int = 0) -> PreTrainedModel:
    return random_model(lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)), seed, 8.0)


def weights_of(model: PreTrainedModel) -> Weights:
    """As a trainer sends them: tied parameters once."""
    return pack({name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"})


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder)
    return folder


def config_of(folder: Path, *, vllm: dict[str, Any] | None = None, **rollout: Any) -> TrainConfig:
    usual = {"engine": "vllm", "device": "cpu", "slots": SLOTS, "max_new_tokens": NEW_TOKENS}
    return to_config(
        {"model": {"path": str(folder)}, "rollout": {**usual, "vllm": EAGER if vllm is None else vllm, **rollout}}
    )


def plan_of(config: TrainConfig) -> RunPlan:
    size = read_model_size(Path(config.model.path))
    return resolve(config, Machine(cpus=2, memory_bytes=8 << 30), model=size)


def engine_of(folder: Path, **given: Any) -> VllmEngine:
    config = config_of(folder, **given)
    loaded = load_engine(
        config=config, plan=plan_of(config), model_path=str(folder), longest_tokens=LONGEST_PROMPT, version=0
    )
    assert isinstance(loaded.engine, VllmEngine)
    return loaded.engine


async def begin(engine: Engine, request: GenerationRequest, tokens: int = 3) -> asyncio.Task[list[Response]]:
    """Return the task that asks, once it has tokens."""
    wanted = engine.stats().generated_tokens + tokens
    asked = asyncio.create_task(ask(engine, request))
    await until(lambda: engine.stats().generated_tokens >= wanted or asked.done(), WAIT_S)
    assert not asked.done(), asked  # the message shows how it ended
    return asked
