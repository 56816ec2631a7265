"""Tiny random models and short ways to ask an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
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
    heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    shape = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 256, **heads}
    model: PreTrainedModel
    if architecture == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_positions=256, bos_token_id=None, eos_token_id=None, **heads))
    elif architecture == "qwen2":
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


def request_of(
    seed: int, *, n: int = 1, new: int = 12, tokens: int | None = None, timeout_s: float = 30.0, **params: Any
) -> GenerationRequest:
    rng = np.random.default_rng(seed)
    return GenerationRequest(
        id=f"request {seed}",
        prompt=rng.integers(0, VOCABULARY, rng.integers(1, 32) if tokens is None else tokens).astype(np.int32),
        samples=tuple(SamplingParams(max_new_tokens=new, seed=1000 * seed + i, **params) for i in range(n)),
        timeout_s=timeout_s,
    )


ask = generate_all


async def ask_all(engine: NativeEngine, requests: Sequence[GenerationRequest]) -> list[list[Response]]:
    return list(await asyncio.gather(*(ask(engine, request) for request in requests)))


def assert_agrees(
    model: PreTrainedModel, request: GenerationRequest, response: Response, temperature: float = 1.0
) -> None:
    """The log-probabilities are those of a plain forward pass over prompt and response, as a trainer makes it."""
    ids = torch.from_numpy(np.concatenate([request.prompt, response.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1].float()
    if not temperature:
        assert response.tokens.tolist() == logits.argmax(-1).tolist()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    # Near-uniform distributions would hide a mistake in attention.
    assert logprobs.exp().amax(-1).mean() > 5 / VOCABULARY
    expected = logprobs.gather(1, ids[0, len(request.prompt) :, None])[:, 0].numpy()
    np.testing.assert_allclose(response.logprobs, expected, atol=1e-5, rtol=0)
