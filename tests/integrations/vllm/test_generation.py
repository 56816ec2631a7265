"""What real vLLM generates through `VllmEngine`: the model's own numbers, as many as asked for, ended where told."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from transformers import PreTrainedModel

from freewheel.rollout.engine import PromptRefused
from freewheel.rollout.vllm.engine import VllmEngine

from .asking import LONGEST_PROMPT, NEW_TOKENS, SLOTS, VOCABULARY, Begun, ask, greedy, reference, request_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_log_probabilities_are_those_of_the_training_pass(
    engine: VllmEngine, old: PreTrainedModel, temperature: float
) -> None:
    request = request_of(1, n=3, new=20, temperature=temperature)
    for one in await ask(engine, request):
        assert len(one.tokens) == 20 and one.finish == "length"
        np.testing.assert_allclose(
            one.logprobs, reference(old, request.prompt, one.tokens, temperature), atol=2e-4, rtol=1e-4
        )
        assert one.versions.tolist() == [0] * 20
        assert (one.tokens.dtype, one.logprobs.dtype, one.versions.dtype) == (np.int32, np.float32, np.int32)


async def test_greedy_takes_the_likeliest_token_each_time(engine: VllmEngine, old: PreTrainedModel) -> None:
    request = request_of(2, new=16, temperature=0.0)
    (one,) = await ask(engine, request)
    assert one.tokens.tolist() == greedy(old, request.prompt, 16)


async def test_the_token_that_ends_a_response_is_its_last(engine: VllmEngine) -> None:
    (whole,) = await ask(engine, request_of(3, new=24, temperature=0.0))
    stop = int(whole.tokens[7])
    first = whole.tokens.tolist().index(stop)
    (cut,) = await ask(engine, request_of(3, new=24, temperature=0.0, stop_token_ids=(stop,)))
    assert cut.finish == "stop"
    assert cut.tokens.tolist() == whole.tokens.tolist()[: first + 1]
    assert len(cut.logprobs) == len(cut.versions) == first + 1


async def test_the_end_of_text_ends_nothing_unless_it_is_named(engine: VllmEngine) -> None:
    """The model's config calls 1 its end; sampled often enough it comes."""
    found = await ask(engine, request_of(4, n=6, new=200, temperature=2.0))
    assert any(1 in one.tokens[:-1] for one in found)
    assert {one.finish for one in found} == {"length"}


async def test_samples_of_a_request_differ_and_a_seed_repeats_them(engine: VllmEngine) -> None:
    request = request_of(5, n=SLOTS + 3, new=16)  # more than there are slots for
    first, again = await ask(engine, request), await ask(engine, request)
    assert len({tuple(one.tokens.tolist()) for one in first}) == len(first)
    assert [one.tokens.tolist() for one in first] == [one.tokens.tolist() for one in again]


async def test_a_cut_distribution_is_what_its_log_probabilities_are_of(
    engine: VllmEngine, old: PreTrainedModel
) -> None:
    """docs/engines.md says so: with top_k=1 there is one token left, and it is certain."""
    request = request_of(7, new=8, top_k=1)
    (one,) = await ask(engine, request)
    assert one.tokens.tolist() == greedy(old, request.prompt, 8)
    np.testing.assert_allclose(one.logprobs, 0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "token"), [(0, None), (LONGEST_PROMPT + 1, None), (4, VOCABULARY), (4, -1)], ids=str
)
async def test_a_prompt_that_cannot_be_generated_from_is_refused_before_vllm_sees_it(
    engine: VllmEngine, tokens: int, token: int | None
) -> None:
    request = request_of(8, tokens=tokens)
    if token is not None:
        request.prompt[-1] = token
    with pytest.raises(PromptRefused):
        await ask(engine, request)
    (fine,) = await ask(engine, request_of(8, tokens=LONGEST_PROMPT, new=NEW_TOKENS, temperature=0.0))
    assert len(fine.tokens) == NEW_TOKENS  # the longest prompt has room for the longest response


async def test_a_caller_that_leaves_ends_its_request_alone_and_frees_its_slots(engine: VllmEngine) -> None:
    doomed = Begun(engine, request_of(9, n=SLOTS, new=NEW_TOKENS))
    await doomed.wait()
    waiting = asyncio.create_task(ask(engine, request_of(10, n=2, new=5)))
    doomed.asked.cancel()
    await asyncio.gather(doomed.asked, return_exceptions=True)
    assert len(await waiting) == 2
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    twice = await asyncio.gather(*(ask(engine, request_of(13, new=5)) for _ in range(2)), return_exceptions=True)
    assert "in flight already" in str(twice[1])


async def test_counters_tell_what_was_made(engine: VllmEngine) -> None:
    before = engine.stats()
    assert before.slots == SLOTS
    await ask(engine, request_of(14, n=2, new=7, tokens=9))
    after = engine.stats()
    assert after.generated_tokens - before.generated_tokens == 14
    assert after.prompt_tokens - before.prompt_tokens == 9
    assert after.busy_s > before.busy_s
    idle = engine.stats()
    assert idle.busy_s == after.busy_s, "an engine without work is not busy"
