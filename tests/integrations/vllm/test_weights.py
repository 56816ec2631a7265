"""New weights for real vLLM while it generates: which tokens are whose, what is kept, and what a failure leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from freewheel.rollout.engine import EngineError, GenerationTimeout
from freewheel.rollout.vllm.engine import VllmEngine
from freewheel.rollout.vllm.transfer import ship
from freewheel.sync.weights import AnyWeights

from .asking import (
    BLOCK,
    NEW_TOKENS,
    SLOTS,
    Begun,
    ask,
    greedy,
    mixed_reference,
    reference,
    request_of,
    weights_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


async def update(engine: VllmEngine, model: PreTrainedModel, *, verify: bool = False) -> int | None:
    return await engine.update_weights(engine.version + 1, weights_of(model), verify=verify)


@pytest.mark.parametrize("labels", [True, False], ids=["labelled batches", "batches by their time"])
async def test_new_weights_take_effect_between_two_tokens_of_what_is_in_flight(
    engine: VllmEngine, old: PreTrainedModel, new: PreTrainedModel, labels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await update(engine, old)
    monkeypatch.setattr(engine._llm, "labels", labels)  # releases before weight versions have none
    before = engine.version
    request = request_of(1, n=2, new=NEW_TOKENS)
    begun = Begun(engine, request, tokens=20)
    await begun.wait()
    assert await update(engine, new, verify=True) == weights_of(new).checksum
    assert engine.version == engine.stats().version == before + 1
    for one in await begun.asked:
        versions = one.versions.tolist()
        changed = versions.count(before)
        assert 1 <= changed < NEW_TOKENS
        assert versions == [before] * changed + [before + 1] * (NEW_TOKENS - changed)
        expected = reference(old, request.prompt, one.tokens)[:changed]
        np.testing.assert_allclose(one.logprobs[:changed], expected, atol=5e-4, rtol=1e-3)
        after = mixed_reference(old, new, request.prompt, one.tokens, changed)
        np.testing.assert_allclose(one.logprobs[changed:], after, atol=5e-4, rtol=1e-3)
    monkeypatch.undo()
    await update(engine, new)  # a label again for what follows


async def test_a_prompt_that_was_seen_under_old_weights_is_read_anew(
    engine: VllmEngine, old: PreTrainedModel, new: PreTrainedModel
) -> None:
    """Its blocks are in the prefix cache, and must not serve the new model."""
    request = request_of(2, n=2, tokens=3 * BLOCK, new=20, temperature=0.0)
    for model in (old, new, old):
        await update(engine, model)
        for _ in range(2):
            for one in await ask(engine, request):
                assert one.tokens.tolist() == greedy(model, request.prompt, 20)
                expected = reference(model, request.prompt, one.tokens)
                np.testing.assert_allclose(one.logprobs, expected, atol=5e-4, rtol=1e-3)
                assert set(one.versions.tolist()) == {engine.version}


async def test_who_comes_during_an_update_gets_the_new_version(
    engine: VllmEngine, old: PreTrainedModel, new: PreTrainedModel
) -> None:
    await update(engine, old)
    request = request_of(3, tokens=2 * BLOCK, new=10, temperature=0.0)
    await ask(engine, request)  # in the cache
    updating = asyncio.create_task(update(engine, new))
    while not engine._is_paused:
        await asyncio.sleep(0)
    (one,) = await ask(engine, request)
    await updating
    assert one.tokens.tolist() == greedy(new, request.prompt, 10)
    assert set(one.versions.tolist()) == {engine.version}


async def test_a_pause_keeps_what_is_in_flight_and_its_timeout_stands_still(engine: VllmEngine) -> None:
    (whole,) = await ask(engine, request_of(4, new=NEW_TOKENS))
    begun = Begun(engine, request_of(4, new=NEW_TOKENS, timeout_s=1.0))
    await begun.wait()
    await engine._pause()
    made, busy_s = engine.stats().generated_tokens, engine.stats().busy_s
    await asyncio.sleep(1.5)  # longer than the timeout
    assert engine._is_paused and not begun.asked.done()
    assert (engine.stats().generated_tokens, engine.stats().busy_s) == (made, busy_s)
    await engine._resume()
    assert (await begun.asked)[0].tokens.tolist() == whole.tokens.tolist()


async def test_a_sample_without_a_token_in_time_fails_and_one_without_a_slot_waits(engine: VllmEngine) -> None:
    """The core stops making tokens without saying so."""
    await engine._llm.pause()  # behind the engine's back
    stuck = asyncio.create_task(ask(engine, request_of(6, n=SLOTS, new=8, timeout_s=0.4)))
    waiting = asyncio.create_task(ask(engine, request_of(7, n=2, new=8, timeout_s=0.4)))
    with pytest.raises(GenerationTimeout, match="request 6"):
        await stuck
    await engine._llm.resume()
    assert len(await waiting) == 2


# -- failures ---------------------------------------------------------------------------------------------------------


@contextmanager
def damaged(weights: AnyWeights) -> Iterator[list[dict[str, Any]]]:
    """In two parts, of which the second cannot be read."""
    with ship(weights) as (info,):
        half = len(info["names"]) // 2
        listed = ("names", "dtype_names", "shapes", "starts")
        first = info | {key: info[key][:half] for key in listed} | {"part": 0, "parts": 2}
        second = info | {key: info[key][half:] for key in listed} | {"part": 1, "parts": 2}
        yield [first, second | {"starts": [10**9] * (len(info["names"]) - half)}]


async def test_after_half_an_update_nothing_is_generated_until_another_succeeds(
    engine: VllmEngine, old: PreTrainedModel, new: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    await update(engine, old)
    before = engine.version
    begun = Begun(engine, request_of(8, new=NEW_TOKENS))
    await begun.wait()
    monkeypatch.setattr(engine, "_ship", damaged)
    with pytest.raises(EngineError, match="nothing is generated until"):
        await update(engine, new)
    assert (engine.version, engine._is_paused) == (before, True)
    made = engine.stats().generated_tokens
    fresh = asyncio.create_task(ask(engine, request_of(9, new=12, temperature=0.0)))
    await asyncio.sleep(0.3)
    assert engine.stats().generated_tokens == made and not fresh.done()
    monkeypatch.undo()
    assert await update(engine, new, verify=True) == weights_of(new).checksum
    assert (await fresh)[0].tokens.tolist() == greedy(new, request_of(9).prompt, 12)
    assert set((await begun.asked)[0].versions.tolist()) == {before, before + 1}


async def test_what_cannot_be_prepared_leaves_the_old_version_serving(
    engine: VllmEngine, old: PreTrainedModel, new: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    await update(engine, old)
    before = engine.version

    @contextmanager
    def refuses(weights: AnyWeights) -> Iterator[list[dict[str, Any]]]:
        raise OSError("no space left")
        yield []

    monkeypatch.setattr(engine, "_ship", refuses)
    with pytest.raises(OSError, match="no space left"):
        await update(engine, new)
    (one,) = await ask(engine, request_of(10, new=12, temperature=0.0))
    assert one.tokens.tolist() == greedy(old, request_of(10).prompt, 12)
    assert engine.version == before


async def test_a_caller_that_goes_away_leaves_no_half_update(
    engine: VllmEngine, old: PreTrainedModel, new: PreTrainedModel
) -> None:
    await update(engine, old)
    given_up = asyncio.create_task(update(engine, new))
    while not engine._is_paused:
        await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    (one,) = await ask(engine, request_of(11, new=12, temperature=0.0))
    assert one.tokens.tolist() == greedy(new, request_of(11).prompt, 12)
