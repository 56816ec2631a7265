"""What an engine does while it runs: new weights, pauses, aborts, timeouts, failures, its end."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from freewheel.rollout.engine import (
    EngineError,
    GenerationAborted,
    GenerationRequest,
    GenerationTimeout,
    PromptRefused,
    SamplingParams,
)
from freewheel.rollout.native.engine import NativeEngine
from freewheel.sync.weights import pack

from .asking import ask, ask_all, reference_logprobs, request_of, running, tiny, until


class Gate:
    """Lets decode steps pass one by one, so that a test knows between which tokens it acts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._permits = threading.Semaphore(0)
        self.steps = 0
        self._forward = model.forward
        self.fail_with: Exception | None = None
        self.open = False
        model.forward = self.forward  # type: ignore[method-assign]

    def forward(self, **given: Any) -> Any:
        if not self.open:
            self._permits.acquire()
        self.steps += 1
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        return self._forward(**given)

    async def let(self, steps: int) -> None:
        target = self.steps + steps
        self._permits.release(steps)
        await until(lambda: self.steps >= target)

    def open_up(self) -> None:
        self.open = True
        self._permits.release()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_new_weights_take_effect_between_two_tokens_of_what_is_in_flight() -> None:
    old, new = tiny("qwen2", seed=0), tiny("qwen2", seed=1)
    model = copy.deepcopy(old)
    async with running(model, version=4) as engine:
        gate = Gate(model)
        request = request_of(1, n=2, new=10, tokens=12)
        asked = asyncio.create_task(ask(engine, request))
        await gate.let(4)
        updated = asyncio.create_task(engine.update_weights(5, pack(new.state_dict()), verify=True))
        await asyncio.sleep(0)
        gate.open_up()
        assert await updated == pack(new.state_dict()).checksum
        assert engine.version == engine.stats().version == 5
        for one in await asked:
            changed = one.versions.tolist().count(4)
            assert 4 <= changed < 10 and one.versions.tolist() == [4] * changed + [5] * (10 - changed)
            before = reference_logprobs(old, request.prompt, one.tokens)
            np.testing.assert_allclose(one.logprobs[:changed], before[:changed], atol=1e-5)
            after = mixed_reference(old, new, request.prompt, one.tokens, changed)
            np.testing.assert_allclose(one.logprobs[changed:], after, atol=1e-5)
        (fresh,) = await ask(engine, request_of(2))
        np.testing.assert_allclose(
            fresh.logprobs, reference_logprobs(new, request_of(2).prompt, fresh.tokens), atol=1e-5
        )


def mixed_reference(old: PreTrainedModel, new: PreTrainedModel, prompt: Any, tokens: Any, changed: int) -> Any:
    """By `new` over keys and values that `old` made for the first tokens: what keeping a sequence in flight means."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    cut = len(prompt) + changed - 1  # the first input that the new weights see
    with torch.no_grad():
        past = old(input_ids=ids[:, :cut], use_cache=True).past_key_values
        logits = new(input_ids=ids[:, cut:-1], past_key_values=past, use_cache=True).logits[0]
    return torch.log_softmax(logits, -1).gather(1, ids[0, cut + 1 :, None])[:, 0].numpy()


async def test_a_prompt_that_waits_through_an_update_is_read_by_the_new_weights() -> None:
    old, new = tiny("llama", seed=0), tiny("llama", seed=1)
    model = copy.deepcopy(old)
    async with running(model, slots=2) as engine:
        gate = Gate(model)
        requests = [request_of(seed, n=2, new=4, tokens=20 + seed) for seed in range(4)]
        asked = asyncio.create_task(ask_all(engine, requests))
        await gate.let(2)
        updated = asyncio.create_task(engine.update_weights(1, pack(new.state_dict()), verify=False))
        await asyncio.sleep(0)
        gate.open_up()
        await updated
        for request, completions in list(zip(requests, await asked, strict=True))[1:]:
            for one in completions:
                assert set(one.versions.tolist()) == {1}
                expected = reference_logprobs(new, request.prompt, one.tokens)
                np.testing.assert_allclose(one.logprobs, expected, atol=1e-5)


async def test_tied_embeddings_may_come_once_or_twice_and_packed() -> None:
    new = tiny("qwen2", seed=1)
    state = new.state_dict()
    async with running(tiny("qwen2")) as engine:
        for version, left_out in enumerate(("lm_head.weight", "model.embed_tokens.weight", ""), start=1):
            sent = pack({name: tensor for name, tensor in state.items() if name != left_out})
            assert await engine.update_weights(version, sent, verify=True) == sent.checksum
        (one,) = await ask(engine, request_of(1))
    np.testing.assert_allclose(one.logprobs, reference_logprobs(new, request_of(1).prompt, one.tokens), atol=1e-5)


async def test_of_updates_in_the_wrong_order_the_newer_one_stays() -> None:
    model, older, newer = (tiny("qwen2", seed=seed) for seed in range(3))
    async with running(model) as engine:
        gate = Gate(model)
        asked = asyncio.create_task(ask(engine, request_of(1, new=4)))
        await gate.let(1)
        given = ((2, newer), (1, older))
        both = [asyncio.create_task(engine.update_weights(v, pack(m.state_dict()), verify=False)) for v, m in given]
        await asyncio.sleep(0)
        gate.open_up()
        await both[0]
        with pytest.raises(ValueError, match="version 1 comes late: the engine holds 2"):
            await both[1]
        await asked
        (one,) = await ask(engine, request_of(2))
    np.testing.assert_allclose(one.logprobs, reference_logprobs(newer, request_of(2).prompt, one.tokens), atol=1e-5)


@pytest.mark.parametrize("change", ["missing", "unknown", "misshapen", "untied"])
async def test_weights_that_do_not_fit_are_refused_whole(change: str) -> None:
    state = {name: tensor.clone() for name, tensor in tiny("qwen2", seed=1).state_dict().items()}
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del state[name]
    elif change == "unknown":
        name = "model.layers.2.mlp.up_proj.weight"
        state[name] = torch.zeros(3)
    elif change == "misshapen":
        state[name] = state[name][:, :-1]
    else:
        name = "lm_head.weight"
        state[name] += 1
    async with running(tiny("qwen2")) as engine:
        before = await ask(engine, request_of(1))
        with pytest.raises(ValueError, match=name):
            await engine.update_weights(1, pack(state), verify=False)
        assert engine.version == 0
        after = await ask(engine, request_of(1))
    assert before[0].tokens.tolist() == after[0].tokens.tolist()


async def test_a_pause_keeps_what_is_in_flight() -> None:
    model = tiny("qwen2")
    async with running(model) as engine:
        whole = await ask(engine, request_of(1))
        gate = Gate(model)
        asked = asyncio.create_task(ask(engine, request_of(1)))
        await gate.let(3)
        paused = asyncio.create_task(engine.pause())
        await asyncio.sleep(0)
        gate.open_up()
        await paused
        made = gate.steps
        assert engine.stats().paused and engine.stats().running == 1
        later = asyncio.create_task(ask(engine, request_of(2)))
        await asyncio.sleep(0.05)
        assert gate.steps == made and not asked.done() and not later.done()
        await engine.resume()
        assert [one.tokens.tolist() for one in await asked] == [one.tokens.tolist() for one in whole]
        await later


async def test_an_aborted_request_raises_and_frees_its_slots_for_the_others() -> None:
    model = tiny("qwen2")
    async with running(model, slots=2) as engine:
        gate = Gate(model)
        doomed = asyncio.create_task(ask(engine, request_of(1, n=5, new=24)))
        other = asyncio.create_task(ask(engine, request_of(2, n=2)))
        await gate.let(2)
        aborted = asyncio.create_task(engine.abort("request 1"))
        await asyncio.sleep(0)
        gate.open_up()
        await aborted
        with pytest.raises(GenerationAborted, match="request 1"):
            await doomed
        assert len(await other) == 2
        await engine.abort("nobody knows it")
        assert engine.stats().running == engine.stats().waiting == 0


async def test_closing_the_iterator_early_aborts_the_request() -> None:
    async with running(tiny("qwen2"), slots=2) as engine:
        responses = engine.generate(request_of(1, n=8))
        await anext(responses)
        await responses.aclose()  # type: ignore[attr-defined]
        await until(lambda: engine.stats().running == engine.stats().waiting == 0)
        assert len(await ask(engine, request_of(1))) == 1


async def test_time_in_a_pause_does_not_count() -> None:
    model, clock = tiny("qwen2"), Clock()
    async with running(model, clock=clock) as engine:
        gate = Gate(model)
        asked = asyncio.create_task(ask(engine, with_timeout(request_of(1), 5.0)))
        await gate.let(2)
        paused = asyncio.create_task(engine.pause())
        await asyncio.sleep(0)
        gate.open_up()
        await paused
        clock.now += 1000.0
        await asyncio.sleep(0)
        await engine.resume()
        assert len(await asked) == 1


async def test_a_step_that_hangs_fails_a_request_after_its_timeout_and_not_a_more_patient_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("freewheel.rollout.native.engine.WATCH_S", 0.01)
    model, clock = tiny("qwen2"), Clock()
    async with running(model, clock=clock) as engine:
        gate = Gate(model)
        hasty, patient = with_timeout(request_of(1), 5.0), with_timeout(request_of(2), 50.0)
        first, second = asyncio.create_task(ask(engine, hasty)), asyncio.create_task(ask(engine, patient))
        await gate.let(2)
        clock.now += 5.0
        await asyncio.sleep(0.05)
        assert not first.done(), "exactly at its timeout"
        clock.now += 20.0
        with pytest.raises(GenerationTimeout, match=r"request 1.*timeout_s = 5"):
            await first
        gate.open_up()
        assert len(await second) == 1
        assert len(await ask(engine, request_of(3))) == 1


def with_timeout(request: GenerationRequest, timeout_s: float) -> GenerationRequest:
    return GenerationRequest(id=request.id, prompt=request.prompt, samples=request.samples, timeout_s=timeout_s)


async def test_a_failing_forward_pass_fails_what_is_in_flight_and_the_engine_goes_on() -> None:
    model = tiny("qwen2")
    async with running(model, slots=2) as engine:
        whole = await ask(engine, request_of(3))
        gate = Gate(model)
        doomed = asyncio.create_task(ask(engine, request_of(1, n=2)))
        waiting = asyncio.create_task(ask(engine, request_of(3)))
        await gate.let(2)
        gate.fail_with = RuntimeError("out of memory")
        gate.open_up()
        with pytest.raises(EngineError, match="out of memory"):
            await doomed
        assert (await waiting)[0].tokens.tolist() == whole[0].tokens.tolist()


async def test_numbers_that_are_not_finite_fail_the_request_and_leave_nothing_behind() -> None:
    model = tiny("qwen2")
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}
    async with running(model) as engine:
        whole = await ask(engine, request_of(1))
        await engine.update_weights(1, pack(bad), verify=False)
        with pytest.raises(EngineError, match=r"not finite.*version 1"):
            await ask(engine, request_of(1, n=20))
        await engine.update_weights(2, pack(good), verify=False)
        found = await ask_all(engine, [request_of(seed, n=4) for seed in range(1, 8)])
        assert found[0][0].tokens.tolist() == whole[0].tokens.tolist()
        assert all(np.isfinite(one.logprobs).all() for completions in found for one in completions)


async def test_a_broken_thread_ends_every_wait() -> None:
    engine = NativeEngine(tiny("qwen2"), slots=2, max_prompt_tokens=32, max_new_tokens=24)
    asked = asyncio.create_task(ask(engine, request_of(1)))

    def broken() -> None:
        raise SystemExit("the thread is told to go")

    engine._loop.turn = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError):
        await asked
    with pytest.raises(EngineError, match="closed"):
        await ask(engine, request_of(2))
    with pytest.raises(EngineError, match="closed"):
        await engine.pause()
    await engine.close()


@contextmanager
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if "native" in thread.name]
    assert left == []


async def test_closing_ends_requests_and_the_thread() -> None:
    with no_thread_left():
        model = tiny("qwen2")
        engine = NativeEngine(model, slots=2, max_prompt_tokens=32, max_new_tokens=24)
        gate = Gate(model)
        asked = [asyncio.create_task(ask(engine, request_of(seed, n=3))) for seed in range(3)]
        await gate.let(1)
        closed = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        gate.open_up()
        await closed
        for task in asked:
            with pytest.raises(GenerationAborted):
                await task
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await ask(engine, request_of(5))


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([], "0 tokens"), ([1] * 33, "33 tokens.*32"), ([1, 61], "token 61.*0 to 60"), ([5, -2], "token -2")],
)
async def test_a_prompt_that_cannot_be_used_is_refused_by_its_values(prompt: list[int], said: str) -> None:
    async with running(tiny("qwen2")) as engine:
        request = GenerationRequest(
            id="a",
            prompt=np.array(prompt, np.int32),
            samples=(SamplingParams(max_new_tokens=1, seed=0),),
            timeout_s=30.0,
        )
        with pytest.raises(PromptRefused, match=said):
            await ask(engine, request)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"new": 25}, "max_new_tokens = 25.*24"),
        ({"new": 0}, "max_new_tokens = 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p = 0"),
        ({"top_k": -1}, "top_k = -1"),
    ],
)
async def test_impossible_parameters_are_refused_by_name(params: dict[str, Any], said: str) -> None:
    async with running(tiny("qwen2")) as engine:
        with pytest.raises(ValueError, match=said):
            await ask(engine, request_of(1, **params))


async def test_stats_count_a_prompt_once_and_every_token() -> None:
    async with running(tiny("qwen2"), slots=3) as engine:
        await ask(engine, request_of(1, n=8, new=5, tokens=11))
        stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (11, 40)
    assert stats.slots == 3 and stats.busy_s > 0 and not stats.paused
