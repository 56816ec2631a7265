"""`VllmEngine` over a server that is no vLLM but speaks like one: what is asked of it, in which order, and what follows
when it fails, hangs or goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from freewheel.judge.errors import ConfigError
from freewheel.rollout.engine import (
    Collector,
    Completion,
    EngineDied,
    EngineError,
    GenerationAborted,
    GenerationRequest,
    GenerationTimeout,
    PromptRefused,
    SamplingParams,
)
from freewheel.rollout.vllm.engine import VllmEngine
from freewheel.rollout.vllm.remote import RemoteLlm, Server, find_server
from freewheel.sync.weights import AnyWeights, pack

WAIT_S = 20.0
VOCABULARY = 100
WEIGHTS = pack({"w": torch.ones(3)})


class Speaks:
    """Says the last token of the prompt again and again, one at a time while it is not paused."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.fails: set[str] = set()
        self.going = asyncio.Event()
        self.going.set()
        self.told = 0
        self.held = 0
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/{call}", self._call)
        self.server = TestServer(app)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a model", "max_model_len": 64}]})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=404 if "is_paused" in self.fails else 200)

    async def _call(self, request: web.Request) -> web.Response:
        call = request.match_info["call"]
        self.calls.append(call)
        if call in self.fails:
            return web.json_response({"error": f"{call} failed"}, status=500)
        if call == "pause":
            assert dict(request.query) == {"mode": "keep", "clear_cache": "false"}
            self.going.clear()
        elif call == "resume":
            self.going.set()
        elif call == "update_weights":
            self.held += (await request.json())["update_info"]["part"] + 1
        elif call == "collective_rpc":
            return web.json_response({"results": [str(WEIGHTS.checksum - 5), "5"]})
        return web.json_response({})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        answer = web.StreamResponse()
        await answer.prepare(request)
        token, wanted = body["prompt"][-1], body["max_tokens"]
        for made in range(wanted):
            await self.going.wait()
            finish = "stop" if token in body["stop_token_ids"] else "length" if made + 1 == wanted else None
            choice = {"token_ids": [token], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": finish}
            await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            self.told += 1
            await asyncio.sleep(0)
            if finish == "stop":
                break
        await answer.write(b"data: [DONE]\n\n")
        return answer


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


async def ask(engine: VllmEngine, request: GenerationRequest) -> list[Completion]:
    collector, whole = Collector(), {}
    async for chunk in engine.generate(request):
        done = collector.add(chunk)
        if done is not None:
            whole[chunk.index] = done
    return [whole[index] for index in sorted(whole)]


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
    assert [body["cache_salt"] for body in speaks.bodies] == ["0", "3"]
    assert one.versions.tolist() == [3] * 3
    assert await engine.update_weights(4, WEIGHTS, verify=False) is None


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
    await until(lambda: engine.stats().paused)
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


async def test_weights_to_begin_with_that_cannot_be_loaded_end_the_engine(speaks: Speaks) -> None:
    speaks.fails = {"start_weight_update"}
    engine = engine_over(speaks, initial=lambda: WEIGHTS)
    with pytest.raises(EngineDied, match="weights to begin with"):
        await ask(engine, request_of(1))
    assert not speaks.bodies, "nothing was generated from weights that nobody knows"
    await engine.close()


async def test_a_server_is_looked_at_before_it_is_used(speaks: Speaks) -> None:
    url = str(speaks.server.make_url("/"))
    assert (await asyncio.to_thread(find_server, url, 64)).model == "a model"
    with pytest.raises(ConfigError, match="--max-model-len 65"):
        await asyncio.to_thread(find_server, url, 65)
    speaks.fails = {"is_paused"}
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        await asyncio.to_thread(find_server, url, 64)
    with pytest.raises(ConfigError, match="there is no vLLM server"):
        await asyncio.to_thread(find_server, "http://127.0.0.1:9", 64)
