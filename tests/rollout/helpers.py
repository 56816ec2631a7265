"""Shared by the tests of engines and rollouters: waiting, tiny random models, requests, and what a trainer computes."""

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
from freewheel.rollout.engine import Engine, GenerationRequest, SamplingParams, generate_all
from freewheel.rollout.native.engine import NativeEngine

WAIT_S = 30.0
"""Longer than anything here takes on a busy machine, shorter than pytest's own limit."""
VOCABULARY = 61
ARCHITECTURES = ("qwen2", "llama", "gpt2")

ask = generate_all


async def until(holds: Callable[[], object], wait_s: float = WAIT_S) -> None:
    async with asyncio.timeout(wait_s):
        while not holds():
            await asyncio.sleep(0.002)


def random_model(make: Callable[[], PreTrainedModel], seed: int, scale: float) -> PreTrainedModel:
    """Multiply random weights by `scale`, so that distributions are far from uniform and a wrong position shows."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model.eval()


def tiny(architecture: str, seed: int = 0) -> PreTrainedModel:
    heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    shape = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 256, **heads}
    gpt2 = {"n_embd": 32, "n_positions": 256, "bos_token_id": None, "eos_token_id": None, **heads}
    makers: dict[str, Callable[[], PreTrainedModel]] = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**gpt2)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=4, tie_word_embeddings=True, **shape)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **shape)),
    }
    return random_model(makers[architecture], seed, 10.0)


@asynccontextmanager
async def running(model: PreTrainedModel, **settings: Any) -> AsyncIterator[NativeEngine]:
    engine = NativeEngine(model, **{"slots": 16, "max_prompt_tokens": 32, "max_new_tokens": 24, **settings})
    try:
        yield engine
    finally:
        await engine.close()


def request_of(
    seed: int, *, n: int = 1, new: int = 12, tokens: int | None = None, timeout_s: float = WAIT_S, **params: Any
) -> GenerationRequest:
    rng = np.random.default_rng(seed)
    return GenerationRequest(
        id=f"request {seed}",
        prompt=rng.integers(0, VOCABULARY, rng.integers(1, 32) if tokens is None else tokens).astype(np.int32),
        samples=tuple(SamplingParams(max_new_tokens=new, seed=1000 * seed + i, **params) for i in range(n)),
        timeout_s=timeout_s,
    )


async def ask_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[Response]]:
    return list(await asyncio.gather(*(ask(engine, request) for request in requests)))


def assert_agrees(
    model: PreTrainedModel, request: GenerationRequest, response: Response, *, atol: float = 1e-5, rtol: float = 0.0
) -> None:
    """The log-probabilities equal those of a plain forward pass over prompt and response, as a trainer makes it."""
    ids = torch.from_numpy(np.concatenate([request.prompt, response.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1].float()
    temperature = request.samples[0].temperature
    if not temperature:
        assert response.tokens.tolist() == logits.argmax(-1).tolist()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    # Near-uniform distributions would hide a mistake in attention.
    assert logprobs.exp().amax(-1).mean() > 5 / VOCABULARY
    expected = logprobs.gather(1, ids[0, len(request.prompt) :, None])[:, 0].numpy()
    np.testing.assert_allclose(response.logprobs, expected, atol=atol, rtol=rtol)


def mixed_logprobs(old: PreTrainedModel, new: PreTrainedModel, prompt: Any, tokens: Any, changed: int) -> Any:
    """By `old` for the first tokens, then by `new` over the keys and values that `old` made for them."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    cut = len(prompt) + changed - 1  # the first input that the new weights see
    with torch.no_grad():
        before = old(input_ids=ids[:, :cut], use_cache=True)
        after = new(input_ids=ids[:, cut:-1], past_key_values=before.past_key_values, use_cache=True)
    logits = torch.cat([before.logits[0, len(prompt) - 1 :], after.logits[0]])
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
