"""What one client, broken or hostile, cannot do to the others."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from freewheel.gateway.limits import Limits, Load
from freewheel.gateway.problem import Problem
from freewheel.judge import ConfigError
from freewheel.judge.testing import RunningJudge

from .conftest import WAIT_S, Talk, chat

Mock = Callable[..., RunningJudge]
Start = Callable[..., Any]

CHAT = "/v1/chat/completions"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "wrong",
    [{"max_body_bytes": 0}, {"max_connections": -1}, {"drain_s": -1}, {"max_waiting": True}, {"max_waiting_bytes": 1}],
)
def test_a_limit_that_cannot_work_is_refused_with_its_name(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


def test_what_is_held_is_given_back_even_where_the_request_fails():
    load = Load(Limits(max_waiting=10))
    for _ in range(100):
        with pytest.raises(KeyError), load.hold_bytes(1 << 20), load.hold_requests(10):
            assert (load.requests, load.bytes) == (10, 1 << 20)
            raise KeyError
    assert (load.requests, load.bytes) == (0, 0)


def test_bodies_are_bounded_all_together_before_they_are_read():
    load = Load(Limits(max_body_bytes=100, max_waiting_bytes=250))
    known, unknown = load.hold_bytes(100), load.hold_bytes(None)  # which counts as the largest
    with known, unknown, load.hold_bytes(50), pytest.raises(Problem) as caught, load.hold_bytes(1):
        pass
    assert (caught.value.status, caught.value.code) == (429, "queue_full")


def test_a_body_of_unknown_length_counts_as_what_it_was_once_it_is_read():
    load = Load(Limits(max_body_bytes=100))
    with load.hold_bytes(None) as correct:
        assert load.bytes == 100
        correct(7)
        assert load.bytes == 7
    assert load.bytes == 0


async def test_a_body_that_is_too_large_is_refused_by_its_length_alone(mock: Mock, talk: Start):
    gateway = await talk(mock().url, limits={"max_body_bytes": 1000})
    reply = await gateway.post(CHAT, b"x" * 1001)
    assert (reply.status, reply.code) == (413, "body_too_large")
    assert "--max-body-bytes" in reply.message
    assert (await gateway.chat("small")).status == 200


async def test_a_body_that_hides_its_length_is_refused_while_it_comes(mock: Mock, talk: Start):
    gateway: Talk = await talk(mock().url, limits={"max_body_bytes": 1000})

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 100

    async with gateway.session.post(gateway.url + CHAT, data=chunks()) as reply:
        assert reply.status == 413


async def test_a_small_body_that_unpacks_to_a_large_one_is_refused(mock: Mock, talk: Start):
    gateway = await talk(mock().url, limits={"max_body_bytes": 100_000})
    packed = zlib.compress(b"x" * 50_000_000)
    assert len(packed) < 100_000
    reply = await gateway.post(CHAT, packed, headers={"Content-Encoding": "deflate"})
    assert reply.status == 413


async def test_a_full_queue_asks_clients_to_slow_down(mock: Mock, talk: Start):
    judge = mock(latency_s=0.5)
    gateway: Talk = await talk(judge.url, limits={"max_waiting": 3})
    taken = [asyncio.create_task(gateway.chat(f"q{n}")) for n in range(3)]
    await until(lambda: gateway.gateway._load.requests == 3)
    refused = await gateway.chat("one more")
    assert (refused.status, refused.code, refused.headers["Retry-After"]) == (429, "queue_full", "5")
    assert {(await reply).status for reply in taken} == {200}
    assert (await gateway.chat("one more")).status == 200
    assert gateway.gateway.counts.rejected["queue_full"] == 1


async def test_a_batch_that_never_fits_is_told_so_instead_of_being_sent_away_for_ever(mock: Mock, talk: Start):
    gateway = await talk(mock().url, limits={"max_waiting": 3})
    reply = await gateway.post("/score", ["a", "b", "c", "d"])
    assert (reply.status, reply.code, reply.headers["x-should-retry"]) == (413, "batch_too_large", "false")


async def test_connections_beyond_the_limit_are_refused_with_a_reason(mock: Mock, talk: Start):
    gateway: Talk = await talk(mock().url, limits={"max_connections": 2})
    held = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(2)]
    await until(lambda: len(gateway.gateway._connections) == 2)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    told = await asyncio.wait_for(reader.read(), WAIT_S)
    assert told.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 5" in told
    assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "connections"
    assert gateway.gateway.counts.rejected["connections"] == 1
    for _, one in [*held, (reader, writer)]:
        one.close()
    await until(lambda: len(gateway.gateway._connections) == 0)
    assert (await gateway.chat("hi")).status == 200


async def test_an_idle_connection_makes_way_for_a_new_one(mock: Mock, talk: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("freewheel.gateway.connections.EVICT_IDLE_S", 0.05)
    gateway: Talk = await talk(mock().url, limits={"max_connections": 1})
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    await asyncio.sleep(0.2)
    assert (await gateway.chat("hi")).status == 200
    assert await reader.read() == b""
    writer.close()


async def test_a_connection_that_never_sends_its_headers_is_closed(mock: Mock, talk: Start):
    gateway: Talk = await talk(mock().url, limits={"header_timeout_s": 0.2})
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST /score HTTP/1.1\r\nHost: x\r\nX-Slow")
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()
    assert gateway.gateway.counts.rejected["header_timeout"] == 1


async def test_a_body_that_does_not_come_is_a_408(mock: Mock, talk: Start):
    gateway: Talk = await talk(mock().url, limits={"body_timeout_s": 0.2})
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    assert (await asyncio.wait_for(reader.readline(), WAIT_S)).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_a_client_that_waits_for_a_go_ahead_gets_it(mock: Mock, talk: Start):
    gateway: Talk = await talk(mock().url)
    body = json.dumps(chat("hi")).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % (CHAT.encode(), len(body)))
    assert await asyncio.wait_for(reader.readline(), WAIT_S) == b"HTTP/1.1 100 Continue\r\n"
    await reader.readline()
    writer.write(body)
    assert (await asyncio.wait_for(reader.readline(), WAIT_S)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_broken_http_is_refused_and_its_bytes_do_not_reach_the_log(
    mock: Mock, talk: Start, caplog: pytest.LogCaptureFixture
):
    gateway: Talk = await talk(mock().url)
    with caplog.at_level(logging.DEBUG):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /score HTTP/1.1\r\nAuthorization: Bearer my-secret-token\x00\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), WAIT_S)).split()[1] == b"400"
        writer.close()
    assert "my-secret-token" not in caplog.text


async def test_a_page_in_a_browser_cannot_use_a_gateway_without_a_token(mock: Mock, talk: Start):
    judge = mock()
    gateway = await talk(judge.url)
    reply = await gateway.chat("hi", headers={"Origin": "https://evil.example"})
    assert (reply.status, judge.counts().received) == (403, 0)


async def test_clients_that_come_and_go_at_random_leave_nothing_behind(mock: Mock, talk: Start):
    judge = mock(latency="lognormal", latency_s=0.05, knee=8, reject_above=12, retry_after_s=0.05, error_share=0.1)
    gateway: Talk = await talk(judge.url)
    rng = random.Random(7)

    async def visit(number: int) -> str:
        await asyncio.sleep(rng.uniform(0, 0.5))
        asked = {
            0: gateway.chat(f"question {number % 50}"),
            1: gateway.chat(f"question {number}", stream=True),
            2: gateway.post("/score", [f"answer {number % 50}", f"answer {number}"]),
        }
        kind = rng.randrange(len(asked))
        for other in set(asked) - {kind}:
            asked[other].close()
        try:
            reply = await asyncio.wait_for(asked[kind], rng.choice([0.02, 0.1, WAIT_S]))
        except TimeoutError:
            return "left"
        return str(reply.status)

    ends = Counter(await asyncio.gather(*(visit(number) for number in range(400))))
    assert set(ends) == {"200", "left"} and min(ends.values()) > 50
    own = gateway.gateway
    await until(lambda: own._connections.busy == 0)
    await until(lambda: judge.counts().in_flight == 0)
    assert (own._load.requests, own._load.bytes, own.judge.engine.is_busy()) == (0, 0, False)
    stats = own.stats()
    assert (stats.queued, stats.in_flight) == (0, 0)
    assert stats.scored + stats.relayed + sum(stats.failed.values()) == stats.submitted
    assert (await gateway.chat("afterwards")).status == 200
