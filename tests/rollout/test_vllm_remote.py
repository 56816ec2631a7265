"""`VllmEngine` over a server that is no vLLM but speaks like one: what is asked of it, in which order, and what follows
when it fails, hangs or goes away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from freewheel.data.group import Response
from freewheel.errors import ConfigError
from freewheel.rollout.engine import (
    EngineDied,
    EngineError,
    GenerationAborted,
    GenerationRequest,
    GenerationTimeout,
    PromptRefused,
    SamplingParams,
    generate_all,
)
from freewheel.rollout.vllm import remote
from freewheel.rollout.vllm.engine import VllmEngine
from freewheel.rollout.vllm.remote import RemoteLlm, Server, find_server
from freewheel.sync.weights import AnyWeights

from .fake_server import WEIGHTS, Speaks

WAIT_S = 20.0
VLLM_KEEPS_S = 5.0
"""A connection that is idle (`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`)."""
VOCABULARY = 100


@contextmanager
def in_two(weights: AnyWeights) -> Iterator[list[dict[str, Any]]]:
    yield [{"part": 0, "parts": 2}, {"part": 1, "parts": 2}]


@pytest.fixture
async def speaks() -> AsyncIterator[Speaks]:
    made = Speaks()
    await made.server.start_server()
    yield made
    made.going.set()
    await made.server.close()


@pytest.fixture
async def engine(speaks: Speaks) -> AsyncIterator[VllmEngine]:
    made = engine_over(speaks)
    yield made
    await made.close()


def engine_over(speaks: Speaks, **settings: Any) -> VllmEngine:
    server = Server(str(speaks.server.make_url("/")).rstrip("/"), "a model", 64)
    return VllmEngine(
        partial(RemoteLlm, server),
        shipped=in_two,
        slots=4,
        max_prompt_tokens=8,
        max_new_tokens=16,
        vocabulary=VOCABULARY,
        **settings,
    )


def request_of(token: int, *, n: int = 1, new: int = 3, timeout_s: float = WAIT_S, **more: Any) -> GenerationRequest:
    samples = tuple(SamplingParams(max_new_tokens=new, seed=index, **more) for index in range(n))
    return GenerationRequest(id=f"{token}", prompt=np.array([7, token], np.int32), samples=samples, timeout_s=timeout_s)


async def ask(engine: VllmEngine, request: GenerationRequest) -> list[Response]:
    return await generate_all(engine, request)


async def until(holds: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.001)


async def test_a_request_asks_for_what_it_says_and_gets_whole_samples(engine: VllmEngine, speaks: Speaks) -> None:
    found = await ask(engine, request_of(9, n=2, temperature=0.7, top_k=5, stop_token_ids=(4,)))
    for one in found:
        assert (one.tokens.tolist(), one.logprobs.tolist(), one.finish) == ([9] * 3, [-0.5] * 3, "length")
        assert one.versions.tolist() == [0] * 3
    said = {key: speaks.bodies[0][key] for key in ("prompt", "temperature", "top_k", "stop_token_ids", "ignore_eos")}
    assert said == {"prompt": [7, 9], "temperature": 0.7, "top_k": 5, "stop_token_ids": [4], "ignore_eos": True}
    (cut,) = await ask(engine, request_of(4, stop_token_ids=(4,)))
    assert (cut.tokens.tolist(), cut.finish) == ([4], "stop")
    stats = engine.stats()
    assert (stats.generated_tokens, stats.prompt_tokens, stats.running) == (7, 4, 0)
    with pytest.raises(PromptRefused):
        await ask(engine, request_of(VOCABULARY))


async def test_an_update_is_told_in_order_and_prompts_of_two_versions_share_nothing(
    engine: VllmEngine, speaks: Speaks
) -> None:
    await ask(engine, request_of(1))
    assert await engine.update_weights(3, WEIGHTS, verify=True) == WEIGHTS.checksum
    (one,) = await ask(engine, request_of(2))
    assert speaks.calls == [
        *("pause", "start_weight_update", "update_weights", "update_weights", "finish_weight_update", "resume"),
        "collective_rpc",
    ]
    assert one.versions.tolist() == [3] * 3
    assert await engine.update_weights(4, WEIGHTS, verify=False) is None


async def test_what_a_server_has_cached_serves_one_engine_and_one_load_alone(speaks: Speaks) -> None:
    salts: list[set[str]] = []

    async def asked(engine: VllmEngine) -> None:
        speaks.bodies.clear()
        await ask(engine, request_of(1, n=2))
        await ask(engine, request_of(2))
        salts.append({body["cache_salt"] for body in speaks.bodies})

    for _ in range(2):  # a run, and the next one on the same server
        engine = engine_over(speaks)
        await asked(engine)
        for _ in range(2):  # a trainer, and its successor: other numbers under the same version
            await engine.update_weights(3, WEIGHTS, verify=False)
            await asked(engine)
        speaks.fails = {"start_weight_update"}
        with pytest.raises(EngineError, match="goes on serving"):
            await engine.update_weights(4, WEIGHTS, verify=False)
        speaks.fails = set()
        kept = salts[-1]
        await asked(engine)
        assert salts.pop() == kept, "what was not overwritten is not read again"
        await engine.close()
    assert [len(found) for found in salts] == [1] * 6
    assert len(set.union(*salts)) == 6


async def test_a_sample_in_flight_keeps_the_version_it_began_with(engine: VllmEngine, speaks: Speaks) -> None:
    await engine.pause()
    begun = asyncio.create_task(ask(engine, request_of(1)))
    await until(lambda: speaks.bodies)
    await engine.update_weights(1, WEIGHTS, verify=False)
    assert engine.stats().paused, "whose pause it is"
    await engine.resume()
    assert (await begun)[0].versions.tolist() == [0] * 3


async def test_who_comes_during_an_update_waits_for_the_new_version(engine: VllmEngine, speaks: Speaks) -> None:
    updating = asyncio.create_task(engine.update_weights(1, WEIGHTS, verify=False))
    await until(lambda: "pause" in speaks.calls)
    (one,) = await ask(engine, request_of(1))
    await updating
    assert one.versions.tolist() == [1] * 3


@pytest.mark.parametrize("fails", ["pause", "start_weight_update"])
async def test_what_fails_before_anything_is_overwritten_leaves_the_old_version_serving(
    engine: VllmEngine, speaks: Speaks, fails: str
) -> None:
    speaks.fails = {fails}
    for _ in range(3):
        with pytest.raises(EngineError) as failed:
            await engine.update_weights(1, WEIGHTS, verify=False)
        assert not isinstance(failed.value, EngineDied)
    assert (await ask(engine, request_of(1)))[0].versions.tolist() == [0] * 3


@pytest.mark.parametrize("fails", ["update_weights", "finish_weight_update"])
async def test_what_fails_later_is_healed_by_the_next_update_or_ends_the_engine(
    engine: VllmEngine, speaks: Speaks, fails: str
) -> None:
    speaks.fails = {fails}
    with pytest.raises(EngineError, match="nothing is generated until an update succeeds"):
        await engine.update_weights(1, WEIGHTS, verify=False)
    assert speaks.calls[-1] == fails, "it is not resumed"
    waiting = asyncio.create_task(ask(engine, request_of(1)))
    await asyncio.sleep(0)
    speaks.fails = set()
    await engine.update_weights(1, WEIGHTS, verify=False)
    assert (await waiting)[0].versions.tolist() == [1] * 3
    speaks.fails = {fails}
    doomed = asyncio.create_task(ask(engine, request_of(2, new=16)))
    await until(lambda: speaks.told > 3)
    for kind in (EngineError, EngineDied):
        with pytest.raises(kind):
            await engine.update_weights(2, WEIGHTS, verify=False)
    found = await asyncio.gather(doomed, return_exceptions=True)
    assert isinstance(found[0], EngineDied) or len(found[0][0].tokens) == 16  # unless it was done before
    with pytest.raises(EngineDied):
        await ask(engine, request_of(3))


async def test_a_caller_that_goes_away_leaves_a_whole_update(engine: VllmEngine, speaks: Speaks) -> None:
    given_up = asyncio.create_task(engine.update_weights(1, WEIGHTS, verify=False))
    await until(lambda: "pause" in speaks.calls)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert (await ask(engine, request_of(1)))[0].versions.tolist() == [1] * 3


async def test_no_token_in_time_is_a_timeout_and_a_pause_is_not(engine: VllmEngine, speaks: Speaks) -> None:
    await engine.pause()
    waiting = asyncio.create_task(ask(engine, request_of(1, timeout_s=0.05)))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await engine.resume()
    assert len((await waiting)[0].tokens) == 3
    speaks.going.clear()  # without a word
    with pytest.raises(GenerationTimeout):
        await ask(engine, request_of(2, timeout_s=0.05))


async def test_an_abort_ends_the_stream(engine: VllmEngine, speaks: Speaks) -> None:
    await engine.pause()
    doomed = asyncio.create_task(ask(engine, request_of(1, n=2)))
    await until(lambda: len(speaks.bodies) == 2)
    await engine.abort("1")
    with pytest.raises(GenerationAborted):
        await doomed
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


async def test_a_server_that_goes_away_is_a_dead_engine(engine: VllmEngine, speaks: Speaks) -> None:
    await engine.pause()
    doomed = asyncio.create_task(ask(engine, request_of(1)))
    await until(lambda: speaks.bodies)
    speaks.going.set()
    await speaks.server.close()
    found = (await asyncio.gather(doomed, return_exceptions=True))[0]
    assert isinstance(found, EngineDied) or len(found[0].tokens) == 3  # its last words may still arrive
    for _ in range(2):
        with pytest.raises(EngineDied):
            await ask(engine, request_of(2))
    with pytest.raises(EngineDied):
        await engine.update_weights(1, WEIGHTS, verify=False)


async def test_a_server_that_closes_an_idle_connection_has_not_died(
    engine: VllmEngine, speaks: Speaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remote.KEPT_S < VLLM_KEEPS_S
    monkeypatch.setattr(remote, "KEPT_S", remote.KEPT_S / 50)
    speaks.idle_s = VLLM_KEEPS_S / 50
    await engine.pause()
    await asyncio.sleep(1.5 * speaks.idle_s)
    await engine.resume()
    assert len((await ask(engine, request_of(1)))[0].tokens) == 3


async def test_weights_to_begin_with_are_loaded_before_the_first_token_and_not_after_others(speaks: Speaks) -> None:
    engine = engine_over(speaks, initial=lambda: WEIGHTS, version=5)
    one, other = await asyncio.gather(ask(engine, request_of(1)), ask(engine, request_of(2)))
    assert one[0].versions.tolist() == other[0].versions.tolist() == [5] * 3
    assert speaks.calls.count("finish_weight_update") == 1
    await engine.close()
    engine = engine_over(speaks, initial=lambda: WEIGHTS, version=5)
    await engine.update_weights(9, WEIGHTS, verify=False)
    assert (await ask(engine, request_of(1)))[0].versions.tolist() == [9] * 3
    assert speaks.calls.count("finish_weight_update") == 2
    await engine.close()


async def test_of_updates_in_the_wrong_order_the_newer_one_stays(engine: VllmEngine, speaks: Speaks) -> None:
    newer = asyncio.create_task(engine.update_weights(2, WEIGHTS, verify=False))
    await until(lambda: "pause" in speaks.calls)
    with pytest.raises(ValueError, match="version 1 comes late: the engine holds 2"):
        await engine.update_weights(1, WEIGHTS, verify=False)
    await newer
    assert (await ask(engine, request_of(1)))[0].versions.tolist() == [2] * 3
    assert speaks.calls.count("finish_weight_update") == 1
    await engine.update_weights(2, WEIGHTS, verify=False)  # another attempt


@pytest.mark.parametrize("version", [5, 6])
async def test_weights_to_begin_with_that_were_overtaken_while_they_were_read_are_not_loaded(
    speaks: Speaks, version: int
) -> None:
    reading, read = threading.Event(), threading.Event()

    def initial() -> AnyWeights:
        reading.set()
        assert read.wait(WAIT_S)
        return WEIGHTS

    engine = engine_over(speaks, initial=initial, version=5)
    asked = asyncio.create_task(ask(engine, request_of(1)))
    await until(reading.is_set)
    newer = asyncio.create_task(engine.update_weights(version, WEIGHTS, verify=False))
    await until(engine._updating.locked)
    read.set()
    await newer
    assert (await asked)[0].versions.tolist() == [version] * 3
    assert engine._priming is not None
    await engine._priming
    assert speaks.calls.count("finish_weight_update") == 1
    assert engine.version == version
    await engine.close()


async def test_weights_to_begin_with_that_cannot_be_loaded_end_the_engine(speaks: Speaks) -> None:
    speaks.fails = {"start_weight_update"}
    engine = engine_over(speaks, initial=lambda: WEIGHTS)
    with pytest.raises(EngineDied, match="weights to begin with"):
        await ask(engine, request_of(1))
    assert not speaks.bodies, "nothing was generated from weights that nobody knows"
    await engine.close()


async def test_a_server_is_looked_at_before_it_is_used(speaks: Speaks) -> None:
    url = str(speaks.server.make_url("/"))
    assert (await asyncio.to_thread(find_server, url, 64, "bfloat16")).model == "a model"
    with pytest.raises(ConfigError, match="serves bfloat16, and the run has float32: start it with --dtype float32"):
        await asyncio.to_thread(find_server, url, 64, "float32")
    with pytest.raises(ConfigError, match="--max-model-len 65"):
        await asyncio.to_thread(find_server, url, 65, "bfloat16")
    for fails, said in (("is_paused", "VLLM_SERVER_DEV_MODE=1"), ("collective_rpc", "--worker-extension-cls")):
        speaks.fails = {fails}
        with pytest.raises(ConfigError, match=said):
            await asyncio.to_thread(find_server, url, 64, "bfloat16")
    with pytest.raises(ConfigError, match="there is no vLLM server"):
        await asyncio.to_thread(find_server, "http://127.0.0.1:9", 64, "bfloat16")
