"""A tiny model that vLLM runs on a CPU, engines over it, and short ways to ask them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from freewheel.data.group import Response
from freewheel.data.tasks.word_problems import model_path
from freewheel.rollout.engine import Engine, GenerationRequest, SamplingParams, generate_all
from freewheel.rollout.vllm.engine import VllmEngine
from freewheel.runtime.building import load_engine
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import to_config
from freewheel.runtime.model_size import read_model_size
from freewheel.runtime.placement import Machine
from freewheel.runtime.plan import Plan, resolve
from freewheel.sync.weights import Weights, pack

VOCABULARY = 61
"""Of the embedded model's tokenizer, which comes along."""
POSITIONS = 512
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
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Heads of 32, which vLLM has kernels for on a CPU."""


def tiny(seed: int = 0) -> PreTrainedModel:
    """Its weights make distributions far from uniform."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model.eval()


def weights_of(model: PreTrainedModel) -> Weights:
    """As a trainer sends them: what is tied, once."""
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


def plan_of(config: TrainConfig) -> Plan:
    size = read_model_size(Path(config.model.path))
    return resolve(config, Machine(cpus=2, memory_bytes=8 << 30), model=size)


def engine_of(folder: Path, **given: Any) -> VllmEngine:
    config = config_of(folder, **given)
    loaded = load_engine(
        config=config, plan=plan_of(config), model_path=str(folder), longest_tokens=LONGEST_PROMPT, version=0
    )
    assert isinstance(loaded.engine, VllmEngine)
    return loaded.engine


def prompt_of(seed: int, tokens: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(2, VOCABULARY, tokens).astype(np.int32)


def request_of(
    seed: int,
    *,
    n: int = 1,
    new: int = 12,
    tokens: int = 10,
    timeout_s: float = WAIT_S,
    **params: Any,
) -> GenerationRequest:
    return GenerationRequest(
        id=f"request {seed}",
        prompt=prompt_of(seed, tokens),
        samples=tuple(SamplingParams(max_new_tokens=new, seed=1000 * seed + i, **params) for i in range(n)),
        timeout_s=timeout_s,
    )


async def ask(engine: Engine, request: GenerationRequest) -> list[Response]:
    return await generate_all(engine, request)


class Begun:
    """A request in flight that has tokens already."""

    def __init__(self, engine: Engine, request: GenerationRequest, tokens: int = 3) -> None:
        self._engine = engine
        self._tokens = engine.stats().generated_tokens + tokens
        self.asked = asyncio.create_task(ask(engine, request))

    async def wait(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while self._engine.stats().generated_tokens < self._tokens and not self.asked.done():
                await asyncio.sleep(0.001)
        assert not self.asked.done(), self.asked  # the message shows how it ended


def reference(model: PreTrainedModel, prompt: Any, tokens: Any, temperature: float = 1.0) -> Any:
    """By a plain forward pass over prompt and response, as a trainer makes it."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def mixed_reference(old: PreTrainedModel, new: PreTrainedModel, prompt: Any, tokens: Any, changed: int) -> Any:
    """By `new` over keys and values that `old` made for the first tokens: what keeping a sequence in flight means."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    cut = len(prompt) + changed - 1  # the first input that the new weights see
    with torch.no_grad():
        past = old(input_ids=ids[:, :cut], use_cache=True).past_key_values
        logits = new(input_ids=ids[:, cut:-1], past_key_values=past, use_cache=True).logits[0]
    return torch.log_softmax(logits, -1).gather(1, ids[0, cut + 1 :, None])[:, 0].numpy()


def greedy(model: PreTrainedModel, prompt: Any, new: int) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    with torch.no_grad():
        for _ in range(new):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()
