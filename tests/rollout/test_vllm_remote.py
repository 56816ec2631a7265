"""`VllmEngine` over a fake vLLM server: its requests and their order, what happens when the server fails, hangs or goes
away, and the versions of tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.errors import ConfigError
from freewheel.rollout import engine as protocol
from freewheel.rollout.engine import (
    EngineDied,
    EngineError,
    GenerationRequest,
    GenerationTimeout,
    PromptRefused,
    SamplingParams,
    generate_all,
)
from freewheel.rollout.vllm.api import Timeline, TokenVersions
from freewheel.rollout.vllm.engine import VllmEngine
from freewheel.rollout.vllm.remote import RemoteLlm, RemoteServer, find_server
from freewheel.sync.weights import AnyWeights

from .fake_server import WEIGHTS, FakeServer
from .helpers import WAIT_S, until

VOCABULARY = 100


class Shipments:
    """Ships weights in two buckets, and records the thread at the start and the end of each."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.ended: list[int] = []
        self.fails = False

    @contextmanager
    def __call__(self, weights: AnyWeights) -> Iterator[list[dict[str, Any]]]:
        if self.fails:
            raise EngineError("no space left")
        self.began.append(threading.get_ident())
        try:
            yield [{"part": 0, "parts": 2}, {"part": 1, "parts": 2}]
        finally:
            self.ended.append(threading.get_ident())


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    made = FakeServer()
    await made.server.start_server()
    yield made
    made.going.set()
    await made.server.close()


@pytest.fixture
async def engine(server: FakeServer) -> AsyncIterator[VllmEngine]:
    made = engine_over(server)
    yield made
    await made.close()


def engine_over(server: FakeServer, **settings: Any) -> VllmEngine:
    found = RemoteServer(str(server.server.make_url("/")).rstrip("/"), "a model")
    limits = {"slots": 4, "max_prompt_tokens": 8, "max_new_tokens": 16, "vocabulary": VOCABULARY}
    return VllmEngine(partial(RemoteLlm, found), ship=Shipments(), **limits, **settings)


def request_of(token: int, *, n: int = 1, new: int = 3, timeout_s: float = WAIT_S, **more: Any) -> GenerationRequest:
    samples = tuple(SamplingParams(max_new_tokens=new, seed=index, **more) for index in range(n))
    return GenerationRequest(id=f"{token}", prompt=np.array([7, token], np.int32), samples=samples, timeout_s=timeout_s)


ask = generate_all


async def versions(engine: VllmEngine, token: int) -> list[int]:
    """The versions of the three tokens of a response."""
    (one,) = await ask(engine, request_of(token))
    return list(one.versions.tolist())


async def update(engine: VllmEngine, version: int) -> None:
    await engine.update_weights(version, WEIGHTS, verify=False)


async def test_a_request_gets_whole_samples_with_its_own_parameters(engine: VllmEngine, server: FakeServer) -> None:
    found = await ask(engine, request_of(9, n=2, temperature=0.7, top_k=5, stop_token_ids=(4,)))
    for one in found:
        assert (one.tokens.tolist(), one.logprobs.tolist(), one.finish) == ([9] * 3, [-0.5] * 3, "length")
        assert one.versions.tolist() == [0] * 3
    sent = {key: server.bodies[0][key] for key in ("prompt", "temperature", "top_k", "stop_token_ids", "ignore_eos")}
    assert sent == {"prompt": [7, 9], "temperature": 0.7, "top_k": 5, "stop_token_ids": [4], "ignore_eos": True}
    (cut,) = await ask(engine, request_of(4, stop_token_ids=(4,)))
    assert (cut.tokens.tolist(), cut.finish) == ([4], "stop")
    stats = engine.stats()
    assert (stats.generated_tokens, stats.prompt_tokens, stats.running) == (7, 4, 0)
    with pytest.raises(PromptRefused):
        await ask(engine, request_of(VOCABULARY))
    _, second = await asyncio.gather(ask(engine, request_of(5)), ask(engine, request_of(5)), return_exceptions=True)
    assert "in flight already" in str(second)


async def test_no_token_in_time_is_a_timeout_for_requests_with_slots(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(protocol, "WATCH_S", 0.01)
    engine = engine_over(server, clock=lambda: now)
    server.going.clear()
    hangs = [asyncio.create_task(ask(engine, request_of(token, n=4, timeout_s=5.0))) for token in (2, 3)]
    await until(lambda: len(server.bodies) == 8)
    now = 6.0
    with pytest.raises(GenerationTimeout, match="request '2'"):
        await hangs[0]
    server.going.set()
    assert len(await hangs[1]) == 4, "it had no slot, and its time starts when it gets one"
    await engine.close()


async def test_an_engine_is_busy_and_may_time_out_only_while_tokens_can_be_made(server: FakeServer) -> None:
    now = 0.0
    engine = engine_over(server, clock=lambda: now)
    server.going.clear()
    waiting = asyncio.create_task(ask(engine, request_of(1)))
    await until(lambda: server.bodies)
    now = 5.0
    assert engine._idle_s() == engine.stats().busy_s == 5.0
    await engine._pause()  # for an update
    now = 1000.0
    assert engine._idle_s() == engine.stats().busy_s == 5.0
    await engine._resume()
    assert len((await waiting)[0].tokens) == 3
    now = 2000.0
    assert engine.stats().busy_s == 5.0, "an engine without requests is not busy"
    await engine.close()


async def test_a_caller_that_leaves_ends_its_streams(engine: VllmEngine, server: FakeServer) -> None:
    server.going.clear()
    doomed = asyncio.create_task(ask(engine, request_of(1, n=2)))
    await until(lambda: len(server.bodies) == 2)
    doomed.cancel()
    await asyncio.gather(doomed, return_exceptions=True)
    await until(lambda: (engine.stats().running, engine.stats().waiting) == (0, 0))


async def test_the_calls_of_an_update_come_in_order(engine: VllmEngine, server: FakeServer) -> None:
    assert await versions(engine, 1) == [0] * 3
    assert await engine.update_weights(3, WEIGHTS, verify=True) == WEIGHTS.checksum
    assert server.calls == [
        *("pause", "start_weight_update", "update_weights", "update_weights", "finish_weight_update", "resume"),
        "collective_rpc",
    ]
    assert await versions(engine, 2) == [3] * 3
    assert await engine.update_weights(4, WEIGHTS, verify=False) is None


async def test_a_servers_cached_prompts_serve_one_engine_and_one_load_only(server: FakeServer) -> None:
    salts: list[set[str]] = []

    async def record_salts(engine: VllmEngine) -> None:
        server.bodies.clear()
        await ask(engine, request_of(1, n=2))
        await ask(engine, request_of(2))
        salts.append({body["cache_salt"] for body in server.bodies})

    for _ in range(2):  # a run, and the next one on the same server
        engine = engine_over(server)
        await record_salts(engine)
        for _ in range(2):  # a trainer, and its successor: other weights under the same version
            await update(engine, 3)
            await record_salts(engine)
        server.fails = {"start_weight_update"}
        with pytest.raises(EngineError, match="continues to serve"):
            await update(engine, 4)
        server.fails = set()
        kept = salts[-1]
        await record_salts(engine)
        assert salts.pop() == kept, "nothing was overwritten"
        await engine.close()
    assert [len(found) for found in salts] == [1] * 6
    assert len(set.union(*salts)) == 6


async def test_a_sample_in_flight_keeps_its_first_version_and_a_new_one_waits_for_an_update(
    engine: VllmEngine, server: FakeServer
) -> None:
    server.going.clear()
    begun = asyncio.create_task(versions(engine, 1))
    await until(lambda: server.bodies)
    await update(engine, 1)
    assert await begun == [0] * 3
    server.calls.clear()
    updating = asyncio.create_task(update(engine, 2))
    await until(lambda: "pause" in server.calls)
    assert await versions(engine, 2) == [2] * 3
    await updating


@pytest.mark.parametrize("fails", ["ship", "pause", "start_weight_update"])
async def test_a_failure_before_anything_is_overwritten_leaves_the_old_version_serving(
    engine: VllmEngine, server: FakeServer, fails: str
) -> None:
    server.fails = {fails}
    engine._ship.fails = fails == "ship"
    for _ in range(3):
        with pytest.raises(EngineError) as failed:
            await update(engine, 1)
        assert not isinstance(failed.value, EngineDied)
    assert await versions(engine, 1) == [0] * 3


@pytest.mark.parametrize("fails", ["update_weights", "finish_weight_update"])
async def test_a_later_failure_is_repaired_by_the_next_update_or_ends_the_engine(
    engine: VllmEngine, server: FakeServer, fails: str
) -> None:
    server.fails = {fails}
    with pytest.raises(EngineError, match="nothing is generated until an update succeeds"):
        await update(engine, 1)
    assert server.calls[-1] == fails, "it is not resumed"
    ship = engine._ship
    assert len(ship.ended) == 1 and threading.get_ident() not in {*ship.began, *ship.ended}, "they copy: in a thread"
    waiting = asyncio.create_task(versions(engine, 1))
    await asyncio.sleep(0)
    server.fails = set()
    await update(engine, 1)
    assert await waiting == [1] * 3
    doomed = asyncio.create_task(ask(engine, request_of(2, new=16)))
    await until(lambda: server.sent > 3)
    for kind, call in ((EngineError, fails), (EngineDied, "start_weight_update")):
        server.fails = {call}
        with pytest.raises(kind):
            await update(engine, 2)
    found = await asyncio.gather(doomed, return_exceptions=True)
    assert isinstance(found[0], EngineDied) or len(found[0][0].tokens) == 16  # unless it was done before
    with pytest.raises(EngineDied):
        await ask(engine, request_of(3))


async def test_a_caller_that_is_cancelled_leaves_a_whole_update(engine: VllmEngine, server: FakeServer) -> None:
    given_up = asyncio.create_task(update(engine, 1))
    await until(lambda: "pause" in server.calls)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert await versions(engine, 1) == [1] * 3


async def test_the_first_weights_are_loaded_before_the_first_token_unless_others_came(server: FakeServer) -> None:
    engine = engine_over(server, initial=lambda: WEIGHTS, version=5)
    assert await asyncio.gather(versions(engine, 1), versions(engine, 2)) == [[5] * 3] * 2
    assert server.calls.count("finish_weight_update") == 1
    await engine.close()
    engine = engine_over(server, initial=lambda: WEIGHTS, version=5)
    await update(engine, 9)
    assert await versions(engine, 1) == [9] * 3
    assert server.calls.count("finish_weight_update") == 2
    await engine.close()
    server.bodies.clear()
    server.fails = {"start_weight_update"}
    engine = engine_over(server, initial=lambda: WEIGHTS)
    with pytest.raises(EngineDied, match="first weights"):
        await ask(engine, request_of(1))
    assert not server.bodies, "nothing was generated from unknown weights"
    await engine.close()


@pytest.mark.parametrize("version", [5, 6])
async def test_first_weights_that_are_read_while_others_arrive_are_not_loaded(server: FakeServer, version: int) -> None:
    reading, read = threading.Event(), threading.Event()

    def initial() -> AnyWeights:
        reading.set()
        assert read.wait(WAIT_S)
        return WEIGHTS

    engine = engine_over(server, initial=initial, version=5)
    asked = asyncio.create_task(versions(engine, 1))
    await until(reading.is_set)
    newer = asyncio.create_task(update(engine, version))
    await until(engine._updating.locked)
    read.set()
    await newer
    assert await asked == [version] * 3
    assert engine._priming is not None
    await engine._priming
    assert server.calls.count("finish_weight_update") == 1
    assert engine.version == version
    await engine.close()


async def test_a_server_that_goes_away_is_a_dead_engine(engine: VllmEngine, server: FakeServer) -> None:
    server.going.clear()
    doomed = asyncio.create_task(ask(engine, request_of(1)))
    await until(lambda: server.bodies)
    server.going.set()
    await server.server.close()
    found = (await asyncio.gather(doomed, return_exceptions=True))[0]
    assert isinstance(found, EngineDied) or len(found[0].tokens) == 3  # its last tokens may still arrive
    for _ in range(2):
        with pytest.raises(EngineDied):
            await ask(engine, request_of(2))
    with pytest.raises(EngineDied):
        await update(engine, 1)


async def test_connections_are_closed_before_the_server_closes_them(engine: VllmEngine, server: FakeServer) -> None:
    """A call that meets the server's close would count as its death. vLLM closes a connection after 5 s."""
    await update(engine, 1)
    connector: Any = engine._llm._session.connector
    assert connector._keepalive_timeout <= 2.0


@pytest.mark.parametrize(
    ("fails", "max_model_len", "dtype", "message"),
    [
        ("", 64, "float32", "serves bfloat16, and the run has float32: start it with --dtype float32"),
        ("", 65, "bfloat16", "--max-model-len 65"),
        ("is_paused", 64, "bfloat16", "VLLM_SERVER_DEV_MODE=1"),
        ("collective_rpc", 64, "bfloat16", "--worker-extension-cls"),
        ("all", 64, "bfloat16", "there is no vLLM server"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused_with_the_remedy(
    server: FakeServer, fails: str, max_model_len: int, dtype: str, message: str
) -> None:
    url = str(server.server.make_url("/"))
    assert (await asyncio.to_thread(find_server, url, 64, "bfloat16")).model == "a model"
    server.fails = {fails}
    with pytest.raises(ConfigError, match=message):
        await asyncio.to_thread(find_server, "http://127.0.0.1:9" if fails == "all" else url, max_model_len, dtype)


steps = st.lists(st.sampled_from(["update", "add", "end", "batch", "batch", "batch", "late end"]), max_size=60)


@given(steps=steps, data=st.data())
def test_every_token_has_the_version_that_made_it(steps: list[str], data: st.DataObject) -> None:
    """A model of an engine: a batch gives every live request some tokens under the current weights. A request's
    versions are read while it lives, also after later versions were seen."""
    version, number = 0, 0
    tags = TokenVersions(version)
    truth: dict[str, list[int]] = {}
    live: list[str] = []
    for step in steps:
        if step == "update":
            version += data.draw(st.integers(1, 2))
        elif step == "add":
            name = f"request {number}"
            number += 1
            tags.begin(name)
            truth[name] = []
            live.append(name)
        elif step == "batch":
            tags.batch(version, {name: len(truth[name]) for name in live})
            for name in live:
                truth[name] += [version] * data.draw(st.integers(0, 3))
        elif live:
            name = live.pop(data.draw(st.integers(0, len(live) - 1)))
            if step == "end":
                assert tags.of(name, len(truth[name])).tolist() == truth[name]
                tags.end(name)
                del truth[name]
    for name, made in truth.items():
        count = data.draw(st.integers(0, len(made)))
        assert tags.of(name, count).tolist() == made[:count]


def test_a_request_that_is_on_its_way_while_the_version_changes_keeps_the_older_version() -> None:
    tags = TokenVersions(3)
    tags.begin("on its way")
    tags.batch(4, {})
    assert tags.of("on its way", 2).tolist() == [3, 3]
    tags.batch(5, {"on its way": 1, "not ours": 7})
    assert tags.of("on its way", 3).tolist() == [3, 5, 5]


@given(st.lists(st.tuples(st.floats(0.001, 5), st.floats(0, 5)), max_size=8), st.data())
def test_tokens_made_between_two_changes_have_the_version_between_them(
    pauses: list[tuple[float, float]], data: st.DataObject
) -> None:
    """No tokens are made from a pause to the change at its end. At the moment of a change the older version counts."""
    line, now = Timeline(10), 0.0
    for version, (worked_s, paused_s) in enumerate(pauses, start=10):
        began, made_s = now, data.draw(st.floats(now, now + worked_s))
        now += worked_s + paused_s
        line.changed(now, version + 1)
        assert line.at(made_s) <= version and line.at(now) <= version, "never newer"
        if began < made_s < now:
            assert line.at(made_s) == version
    assert line.at(now + 0.1) == 10 + len(pauses)
