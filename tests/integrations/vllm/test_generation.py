"""Real vLLM through `VllmEngine` generates with the model's own numbers, as many tokens as asked for, and no more."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from transformers import PreTrainedModel

from freewheel.rollout.vllm.engine import VllmEngine

from ...rollout.helpers import ask, request_of
from .asking import LONGEST_PROMPT, NEW_TOKENS, SLOTS, assert_computed_by, begin

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_log_probabilities_are_those_of_a_training_forward_pass(
    engine: VllmEngine, old: PreTrainedModel, temperature: float
) -> None:
    request = request_of(1, n=3, new=20, temperature=temperature)
    for one in await ask(engine, request):
        assert len(one.tokens) == 20 and one.finish == "length"
        assert_computed_by(old, request, one)
        assert one.versions.tolist() == [0] * 20
        assert (one.tokens.dtype, one.logprobs.dtype, one.versions.dtype) == (np.int32, np.float32, np.int32)


async def test_a_response_ends_with_its_stop_token_and_the_models_end_of_text_is_none(engine: VllmEngine) -> None:
    (whole,) = await ask(engine, request_of(3, new=24, temperature=0.0))
    stop = int(whole.tokens[7])
    first = whole.tokens.tolist().index(stop)
    (cut,) = await ask(engine, request_of(3, new=24, temperature=0.0, stop_token_ids=(stop,)))
    assert cut.finish == "stop"
    assert cut.tokens.tolist() == whole.tokens.tolist()[: first + 1]
    assert len(cut.logprobs) == len(cut.versions) == first + 1
    found = await ask(engine, request_of(4, n=6, new=200, temperature=2.0))
    assert any(1 in one.tokens[:-1] for one in found), "the model's config calls 1 its end"
    assert {one.finish for one in found} == {"length"}


async def test_samples_of_a_request_differ_and_their_seeds_repeat_them(engine: VllmEngine) -> None:
    request = request_of(5, n=SLOTS + 3, new=16)  # more than there are slots for
    first, again = await ask(engine, request), await ask(engine, request)
    assert len({tuple(one.tokens.tolist()) for one in first}) == len(first)
    assert [one.tokens.tolist() for one in first] == [one.tokens.tolist() for one in again]


async def test_log_probabilities_are_those_after_top_k(engine: VllmEngine) -> None:
    """As docs/engines.md says: with top_k=1 one token is left, and it is certain."""
    (one,) = await ask(engine, request_of(7, new=8, top_k=1))
    (greedy,) = await ask(engine, request_of(7, new=8, temperature=0.0))
    assert one.tokens.tolist() == greedy.tokens.tolist()
    np.testing.assert_allclose(one.logprobs, 0.0, atol=1e-6)


async def test_the_longest_prompt_has_room_for_the_longest_response(engine: VllmEngine) -> None:
    (one,) = await ask(engine, request_of(8, tokens=LONGEST_PROMPT, new=NEW_TOKENS))
    assert len(one.tokens) == NEW_TOKENS


async def test_a_caller_that_leaves_ends_its_request_alone_and_frees_its_slots(engine: VllmEngine) -> None:
    doomed = await begin(engine, request_of(9, n=SLOTS, new=NEW_TOKENS))
    waiting = asyncio.create_task(ask(engine, request_of(10, n=2, new=5)))
    doomed.cancel()
    await asyncio.gather(doomed, return_exceptions=True)
    assert len(await waiting) == 2
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
