"""New weights arrive while real vLLM generates: which version made a token, and what is kept."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from transformers import PreTrainedModel

from freewheel.rollout.vllm.engine import VllmEngine

from ...rollout.helpers import ask, mixed_logprobs, request_of, until
from .asking import BLOCK, NEW_TOKENS, assert_computed_by, begin, weights_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


async def update(engine: VllmEngine, model: PreTrainedModel) -> None:
    weights = weights_of(model)
    assert await engine.update_weights(engine.version + 1, weights, verify=True) == weights.checksum


@pytest.mark.parametrize("labels", [True, False], ids=["labelled batches", "batches by their time"])
async def test_new_weights_take_effect_between_two_tokens_of_samples_in_flight(
    engine: VllmEngine, old: PreTrainedModel, new: PreTrainedModel, labels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await update(engine, old)
    monkeypatch.setattr(engine._llm, "labels", labels)  # releases before weight versions have none
    before = engine.version
    request = request_of(1, n=2, new=NEW_TOKENS)
    begun = await begin(engine, request, tokens=20)
    await update(engine, new)
    assert engine.version == engine.stats().version == before + 1
    for one in await begun:
        versions = one.versions.tolist()
        changed = versions.count(before)
        assert 1 <= changed < NEW_TOKENS
        assert versions == [before] * changed + [before + 1] * (NEW_TOKENS - changed)
        expected = mixed_logprobs(old, new, request.prompt, one.tokens, changed)
        np.testing.assert_allclose(one.logprobs, expected, atol=5e-4, rtol=1e-3)
    monkeypatch.undo()
    await update(engine, new)  # a label again for what follows


async def test_a_prompt_in_the_prefix_cache_is_read_again_by_new_weights(
    engine: VllmEngine, old: PreTrainedModel, new: PreTrainedModel
) -> None:
    request = request_of(2, n=2, tokens=3 * BLOCK, new=20, temperature=0.0)
    for model in (old, new, old):
        await update(engine, model)
        for one in [*await ask(engine, request), *await ask(engine, request)]:
            assert_computed_by(model, request, one)
            assert set(one.versions.tolist()) == {engine.version}


async def test_a_request_that_arrives_during_an_update_gets_the_new_version(
    engine: VllmEngine, old: PreTrainedModel, new: PreTrainedModel
) -> None:
    await update(engine, old)
    request = request_of(3, tokens=2 * BLOCK, new=10, temperature=0.0)
    await ask(engine, request)  # in the cache
    updating = asyncio.create_task(update(engine, new))
    await until(lambda: engine._is_paused)
    (one,) = await ask(engine, request)
    await updating
    assert_computed_by(new, request, one)
    assert set(one.versions.tolist()) == {engine.version}
