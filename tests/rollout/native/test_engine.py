"""What an engine does while it runs: new weights, timeouts, failures, its end; and what it refuses."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
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

from freewheel.rollout import engine as protocol
from freewheel.rollout.engine import EngineError, GenerationAborted, GenerationTimeout, PromptRefused
from freewheel.rollout.native.engine import NativeEngine
from freewheel.rollout.native.runner import UnsupportedModel
from freewheel.sync.weights import Weights, pack

from ..helpers import ask, ask_all, assert_agrees, mixed_logprobs, request_of, running, tiny, until


class Clock:
    now = 100.0
    reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


class Gate:
    """An engine whose decode steps pass one by one, so that a test knows between which tokens it acts."""

    def __init__(self, model: PreTrainedModel, engine: NativeEngine, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        self.steps = self._arrived = 0
        self.fail_with: Exception | None = None
        self._permits = threading.Semaphore(0)
        self._forward = model.forward
        self._is_open = False
        model.forward = self.forward  # type: ignore[method-assign]

    def forward(self, **given: Any) -> Any:
        self._arrived += 1
        if not self._is_open:
            self._permits.acquire()
        self.steps += 1
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        return self._forward(**given)

    async def let(self, steps: int) -> None:
        """Return when the engine waits for the step after these."""
        target = self.steps + steps
        self._permits.release(steps)
        await until(lambda: self._arrived > target)

    async def open_after(self, *work: Any) -> list[asyncio.Task[Any]]:
        """Start `work` between two steps, then let all steps pass."""
        tasks = [asyncio.ensure_future(one) for one in work]
        await asyncio.sleep(0)
        self._is_open = True
        self._permits.release()
        return tasks


@asynccontextmanager
async def gated(model: PreTrainedModel, **settings: Any) -> AsyncIterator[Gate]:
    clock = Clock()
    async with running(model, clock=clock, **settings) as engine:
        gate = Gate(model, engine, clock)
        try:
            yield gate
        finally:
            await gate.open_after()


def weights_of(model: PreTrainedModel) -> Weights:
    return pack(model.state_dict())


async def test_new_weights_take_effect_between_two_tokens_of_samples_in_flight() -> None:
    old, new = tiny("qwen2", seed=0), tiny("qwen2", seed=1)
    model = copy.deepcopy(old)
    async with gated(model, version=4) as gate:
        request = request_of(1, n=2, new=10, tokens=12)
        asked = asyncio.create_task(ask(gate.engine, request))
        await gate.let(4)
        (updated,) = await gate.open_after(gate.engine.update_weights(5, weights_of(new), verify=True))
        assert await updated == weights_of(new).checksum
        assert gate.engine.version == gate.engine.stats().version == 5
        for one in await asked:
            changed = one.versions.tolist().count(4)
            assert 4 <= changed < 10 and one.versions.tolist() == [4] * changed + [5] * (10 - changed)
            expected = mixed_logprobs(old, new, request.prompt, one.tokens, changed)
            np.testing.assert_allclose(one.logprobs, expected, atol=1e-5)
        (fresh,) = await ask(gate.engine, request_of(2))
        assert_agrees(new, request_of(2), fresh)


async def test_a_prompt_that_waits_through_an_update_is_read_by_the_new_weights() -> None:
    model, new = tiny("llama", seed=0), tiny("llama", seed=1)
    async with gated(model, slots=2) as gate:
        requests = [request_of(seed, n=2, new=4, tokens=20 + seed) for seed in range(4)]
        asked = asyncio.create_task(ask_all(gate.engine, requests))
        await gate.let(2)
        await gate.open_after(gate.engine.update_weights(1, weights_of(new), verify=False))
        for request, responses in list(zip(requests, await asked, strict=True))[1:]:
            for one in responses:
                assert set(one.versions.tolist()) == {1}
                assert_agrees(new, request, one)


async def test_tied_embeddings_may_come_once_or_twice() -> None:
    new = tiny("qwen2", seed=1)
    async with running(tiny("qwen2")) as engine:
        for version, left_out in enumerate(("lm_head.weight", "model.embed_tokens.weight", ""), start=1):
            sent = pack({name: tensor for name, tensor in new.state_dict().items() if name != left_out})
            assert await engine.update_weights(version, sent, verify=True) == sent.checksum
        (one,) = await ask(engine, request_of(1))
    assert_agrees(new, request_of(1), one)


@pytest.mark.parametrize("change", ["missing", "unknown", "misshapen", "untied"])
async def test_weights_that_do_not_fit_are_refused_whole(change: str) -> None:
    state = {name: tensor.clone() for name, tensor in tiny("qwen2", seed=1).state_dict().items()}
    name = "lm_head.weight" if change == "untied" else "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del state[name]
    elif change == "unknown":
        name = "model.layers.2.mlp.up_proj.weight"
        state[name] = torch.zeros(3)
    elif change == "misshapen":
        state[name] = state[name][:, :-1]
    else:
        state[name] += 1
    model = tiny("qwen2")
    async with running(copy.deepcopy(model)) as engine:
        with pytest.raises(ValueError, match=name):
            await engine.update_weights(1, pack(state), verify=False)
        assert engine.version == 0
        (one,) = await ask(engine, request_of(1))
    assert_agrees(model, request_of(1), one)


async def test_a_caller_that_leaves_frees_its_slots_for_the_others() -> None:
    async with gated(tiny("qwen2"), slots=2) as gate:
        engine = gate.engine
        doomed = asyncio.create_task(ask(engine, request_of(1, n=5, new=24)))
        other = asyncio.create_task(ask(engine, request_of(2, n=2)))
        await gate.let(2)
        doomed.cancel()
        await gate.open_after()
        assert len(await other) == 2
        assert engine.stats().running == engine.stats().waiting == 0
        assert engine.stats().generated_tokens < 2 * 12 + 24, "of 144 in all"
        responses = engine.generate(request_of(3, n=8))
        await anext(responses)
        await responses.aclose()  # type: ignore[attr-defined]
        await until(lambda: engine.stats().running == engine.stats().waiting == 0)


async def test_a_step_that_hangs_fails_a_request_after_its_timeout_and_not_a_more_patient_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "WATCH_S", 0.01)
    async with gated(tiny("qwen2")) as gate:
        asked = [asyncio.create_task(ask(gate.engine, request_of(seed, timeout_s=s))) for seed, s in ((1, 5), (2, 50))]
        await gate.let(2)
        gate.clock.now += 5.0
        looks = gate.clock.reads + 3
        await until(lambda: gate.clock.reads > looks)  # only the watch reads it while the step hangs
        assert not asked[0].done(), "exactly at its timeout"
        gate.clock.now += 1.0
        with pytest.raises(GenerationTimeout, match=r"request 1.*timeout_s = 5"):
            await asked[0]
        await gate.open_after()
        assert len(await asked[1]) == 1


async def test_a_failing_forward_pass_fails_only_the_samples_in_flight() -> None:
    async with gated(tiny("qwen2"), slots=2) as gate:
        doomed = asyncio.create_task(ask(gate.engine, request_of(1, n=2)))
        waiting = asyncio.create_task(ask(gate.engine, request_of(3)))
        await gate.let(2)
        gate.fail_with = RuntimeError("out of memory")
        await gate.open_after()
        with pytest.raises(EngineError, match="out of memory"):
            await doomed
        assert_agrees(tiny("qwen2"), request_of(3), (await waiting)[0])


async def test_numbers_that_are_not_finite_fail_the_request_and_leave_nothing_behind() -> None:
    model = tiny("qwen2")
    bad = pack({name: torch.full_like(tensor, torch.nan) for name, tensor in model.state_dict().items()})
    async with running(copy.deepcopy(model)) as engine:
        await engine.update_weights(1, bad, verify=False)
        with pytest.raises(EngineError, match=r"not finite.*version 1"):
            await ask(engine, request_of(1, n=20))
        await engine.update_weights(2, weights_of(model), verify=False)
        requests = [request_of(seed, n=4) for seed in range(1, 8)]
        for request, responses in zip(requests, await ask_all(engine, requests), strict=True):
            for one in responses:
                assert_agrees(model, request, one)


async def test_a_broken_thread_ends_every_wait() -> None:
    async with running(tiny("qwen2"), slots=2) as engine:

        def broken() -> None:
            raise SystemExit("the thread ends")

        engine._loop.turn = broken  # type: ignore[method-assign]
        with pytest.raises(EngineError):
            await ask(engine, request_of(1))
        with pytest.raises(EngineError, match="closed"):
            await ask(engine, request_of(2))
        with pytest.raises(EngineError, match="closed"):
            await engine.update_weights(1, weights_of(tiny("qwen2")), verify=False)


async def test_closing_ends_requests_and_the_thread() -> None:
    before = set(threading.enumerate())
    async with gated(tiny("qwen2"), slots=2) as gate:
        asked = [asyncio.create_task(ask(gate.engine, request_of(seed, n=3))) for seed in range(3)]
        await gate.let(1)
        (closed,) = await gate.open_after(gate.engine.close())
        await closed
        for task in asked:
            with pytest.raises(GenerationAborted):
                await task
        with pytest.raises(EngineError, match="closed"):
            await ask(gate.engine, request_of(5))
    assert not [thread.name for thread in set(threading.enumerate()) - before if "native" in thread.name]


async def test_statistics_count_a_prompt_once_and_every_token() -> None:
    async with running(tiny("qwen2"), slots=3) as engine:
        await ask(engine, request_of(1, n=8, new=5, tokens=11))
        stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (11, 40)
    assert stats.slots == 3 and stats.busy_s > 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "0 tokens"),
        ([1] * 33, {}, "33 tokens.*32"),
        ([1, 61], {}, "token 61.*0 to 60"),
        ([5, -2], {}, "token -2"),
        ([1], {"new": 25}, "max_new_tokens = 25.*24"),
        ([1], {"new": 0}, "max_new_tokens = 0"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p = 0"),
        ([1], {"top_k": -1}, "top_k = -1"),
    ],
)
async def test_an_impossible_request_is_refused_by_name(
    prompt: list[int], params: dict[str, Any], message: str
) -> None:
    async with running(tiny("qwen2")) as engine:
        with pytest.raises(ValueError, match=message) as refused:
            await ask(engine, replace(request_of(1, **params), prompt=np.array(prompt, np.int32)))
        assert isinstance(refused.value, PromptRefused) == (not params)


SIZE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 11, "head_dim": 8}
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, **SIZE}
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        (MambaForCausalLM, MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=11, state_size=4), "static KV"),
        (MistralForCausalLM, MistralConfig(sliding_window=8, **SHAPE), "sliding_attention"),
        (Gemma2ForCausalLM, Gemma2Config(**SHAPE), "sliding_attention"),
        (Gemma2ForCausalLM, Gemma2Config(layer_types=["full_attention"] * 2, **SHAPE), "soft caps"),
        (LlamaForCausalLM, LlamaConfig(rope_parameters=ROPE, max_position_embeddings=64, **SHAPE), "dynamic"),
    ],
)
def test_an_architecture_that_it_cannot_run_is_refused_by_name(kind: Any, config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{kind.__name__}.*{message}"):
        NativeEngine(kind(config), slots=2, max_prompt_tokens=4, max_new_tokens=4)


def test_a_model_that_decodes_differently_from_its_forward_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a model that keeps the pages from its attention, or has its own positions."""
    model = tiny("gpt2")
    forward = model.forward

    def shifted(position_ids: torch.Tensor | None = None, **given: Any) -> Any:
        return forward(position_ids=position_ids if position_ids is None else position_ids + 1, **given)

    monkeypatch.setattr(model, "forward", shifted)
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel.*away from its forward pass"):
        NativeEngine(model, slots=2, max_prompt_tokens=20, max_new_tokens=4)
