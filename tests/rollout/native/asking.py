"""Tiny random models and short ways to ask an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from freewheel.data.group import Response
from freewheel.rollout.engine import GenerationRequest, SamplingParams, generate_all
from freewheel.rollout.native.engine import NativeEngine

VOCABULARY = 61
ARCHITECTURES = ("qwen2", "llama", "gpt2")


def tiny(architecture: str, seed: int = 0) -> PreTrainedModel:
    """Weights of the size that makes distributions far from uniform, so that a wrong position shows."""
    torch.manual_seed(seed)
    if architecture == "gpt2":
        model: PreTrainedModel = GPT2LMHeadModel(
            GPT2Config(
                n_embd=32,
                n_layer=2,
                n_head=4,
                vocab_size=VOCABULARY,
                n_positions=256,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    else:
        shape: dict[str, Any] = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 256,
        }
        if architecture == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=4, tie_word_embeddings=True, **shape))
        else:
            model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)
    return model.eval()


@asynccontextmanager
async def running(model: PreTrainedModel, **settings: Any) -> AsyncIterator[NativeEngine]:
    engine = NativeEngine(model, **{"slots": 16, "max_prompt_tokens": 32, "max_new_tokens": 24, **settings})
    try:
        yield engine
    finally:
        await engine.close()


def prompt_of(seed: int, tokens: int | None = None) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCABULARY, rng.integers(1, 32) if tokens is None else tokens).astype(np.int32)


def request_of(seed: int, *, n: int = 1, new: int = 12, tokens: int | None = None, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        id=f"request {seed}",
        prompt=prompt_of(seed, tokens),
        samples=tuple(SamplingParams(max_new_tokens=new, seed=1000 * seed + i, **params) for i in range(n)),
        timeout_s=30.0,
    )


async def ask(engine: NativeEngine, request: GenerationRequest) -> list[Response]:
    return await generate_all(engine, request)


async def ask_all(engine: NativeEngine, requests: Sequence[GenerationRequest]) -> list[list[Response]]:
    return list(await asyncio.gather(*(ask(engine, request) for request in requests)))


def reference_logprobs(model: PreTrainedModel, prompt: Any, tokens: Any, temperature: float = 1.0) -> Any:
    """By a plain forward pass over prompt and response, as a trainer makes it."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


async def until(condition: Callable[[], bool], patience_s: float = 10.0) -> None:
    """The thread's progress has no future of its own to wait for."""
    async with asyncio.timeout(patience_s):
        while not condition():
            await asyncio.sleep(0.001)
