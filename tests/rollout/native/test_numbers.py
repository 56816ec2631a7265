"""What the engine computes: a training forward pass's log-probabilities, and the same bits in any batch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from freewheel.data.group import Response
from freewheel.rollout.engine import GenerationRequest, SamplingParams

from ..helpers import ARCHITECTURES, ask, ask_all, assert_agrees, request_of, running, tiny

LONG = {"max_prompt_tokens": 100, "max_new_tokens": 100}
"""Several pages of keys and values."""


def same(left: Response, right: Response) -> bool:
    return bool(
        np.array_equal(left.tokens, right.tokens)
        and np.array_equal(left.logprobs.view(np.int32), right.logprobs.view(np.int32))
        and left.finish == right.finish
    )


SHORT = [request_of(seed, n=2, temperature=(1.0, 0.6, 0.0)[seed % 3]) for seed in range(9)]
SEVERAL_PAGES = [request_of(seed, new=100, tokens=[1, 2, 16, 17, 64, 65, 66, 100][seed]) for seed in range(8)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("requests", "settings"), [(SHORT, {}), (SEVERAL_PAGES, LONG)], ids=["short", "long"])
async def test_log_probabilities_equal_a_training_forward_pass(architecture: str, requests: Any, settings: Any) -> None:
    model = tiny(architecture)
    async with running(copy.deepcopy(model), **settings) as engine:
        for request, responses in zip(requests, await ask_all(engine, requests), strict=True):
            for one in responses:
                assert_agrees(model, request, one)


@pytest.mark.parametrize(("longest", "new"), [(250, 6), (255, 1), (136, 4), (1, 255)])
async def test_prompts_and_responses_may_fill_every_position_of_the_model(longest: int, new: int) -> None:
    model = tiny("gpt2")  # 256 positions, each with its own embedding
    requests = [request_of(seed, n=2, new=new, tokens=max(1, longest - seed)) for seed in range(3)]
    async with running(copy.deepcopy(model), slots=4, max_prompt_tokens=longest, max_new_tokens=new) as engine:
        for request, responses in zip(requests, await ask_all(engine, requests), strict=True):
            for one in responses:
                assert_agrees(model, request, one)


def crowd(seed: int, count: int, longest: int) -> list[GenerationRequest]:
    """Other requests of all kinds."""
    rng = np.random.default_rng(seed)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 5}, {"stop_token_ids": (3, 7)}]
    return [
        request_of(
            100 + seed * 1000 + i,
            n=int(rng.integers(1, 5)),
            new=int(rng.integers(1, longest)),
            tokens=int(rng.integers(1, longest)),
            **kinds[i % len(kinds)],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("slots", [5, 40])
async def test_a_sample_is_the_same_to_the_bit_alone_in_a_crowd_and_in_any_slot(architecture: str, slots: int) -> None:
    requests = crowd(5, 20, 100)
    async with running(tiny(architecture), slots=slots, **LONG) as engine:
        together = await ask_all(engine, requests)
        backwards = (await ask_all(engine, requests[::-1]))[::-1]
        alone = [await ask(engine, request) for request in requests[::4]]
        everywhere = await ask(engine, replace(requests[0], samples=requests[0].samples[:1] * slots))
    for left, right in [*zip(together, backwards, strict=True), *zip(together[::4], alone, strict=True)]:
        assert all(same(a, b) for a, b in zip(left, right, strict=True))
    assert all(same(alone[0][0], one) for one in everywhere)


async def test_a_seed_of_64_bits_determines_a_response() -> None:
    request = request_of(1, tokens=10)
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1, 0]
    samples = tuple(SamplingParams(max_new_tokens=24, seed=seed, temperature=3.0) for seed in seeds)
    async with running(tiny("qwen2")) as engine:
        found = await ask(engine, replace(request, samples=samples))
    texts = [tuple(one.tokens.tolist()) for one in found]
    assert texts[0] == texts[-1] and len(set(texts)) == len(seeds) - 1


async def test_a_response_ends_with_its_own_stop_token_or_at_its_own_length() -> None:
    samples = tuple(
        SamplingParams(max_new_tokens=new, seed=seed, temperature=2.0, stop_token_ids=stops)
        for seed in range(10)
        for new, stops in ((24, (1, 2, 3, 4, 5, 6)), (7, ()), (24, (9,)))
    )
    async with running(tiny("qwen2")) as engine:
        found = await ask(engine, replace(request_of(4, tokens=10), samples=samples))
    for params, one in zip(samples, found, strict=True):
        *body, last = one.tokens.tolist()
        assert not set(body) & set(params.stop_token_ids)
        assert (one.finish == "stop") == (last in params.stop_token_ids)
        assert len(one.tokens) == params.max_new_tokens or one.finish == "stop"
    assert {one.finish for one in found} == {"stop", "length"}
