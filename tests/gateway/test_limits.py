"""Who may use the gateway, and what one client, broken or hostile, cannot do to the others."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from freewheel.gateway.limits import Doorkeeper, Limits, Load, Problem
from freewheel.judge import ConfigError, Secret

from .conftest import CHAT, TOKEN, WAIT_S, Mock, Start, Talk, chat, until

# -- the token --------------------------------------------------------------------------------------------------------


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_other_machines_need_a_token_and_web_pages_need_one_on_loopback():
    for host in ("0.0.0.0", "::", "10.0.0.7", "judge.example"):
        with pytest.raises(ConfigError, match=r"set FREEWHEEL_GATEWAY_TOKEN, or use 127\.0\.0\.1"):
            Doorkeeper(host)
        with pytest.raises(ConfigError, match="at least 16") as caught:
            Doorkeeper(host, Secret("sesame"))
        assert "sesame" not in str(caught.value)
    for host in ("127.0.0.1", "::1", "localhost"):
        Doorkeeper(host).check({})
        with pytest.raises(Problem) as refused:
            Doorkeeper(host).check({"Origin": "https://evil.example"})
        assert refused.value.status == 403


@pytest.mark.parametrize(
    ("header", "is_known"),
    [
        *((header, True) for header in (f"Bearer {TOKEN}", f"bearer  {TOKEN}", basic("", TOKEN), basic("any", TOKEN))),
        *((header, False) for header in ("", TOKEN, "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}")),
        *((header, False) for header in ("Bearer \udcff", "Basic %", basic(TOKEN, ""))),
    ],
)
def test_the_token_is_a_bearer_or_a_password_and_a_401_does_not_show_it(header: str, is_known: bool):
    door = Doorkeeper("0.0.0.0", Secret(TOKEN))
    if is_known:
        return door.check({"Authorization": header})
    with pytest.raises(Problem) as caught:
        door.check({"Authorization": header})
    assert caught.value.status == 401 and TOKEN not in caught.value.body().decode()


# -- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"max_body_bytes": 0}, {"max_connections": -1}, {"drain_s": -1}, {"max_waiting": True}, {"max_waiting_bytes": 1}],
)
def test_a_limit_that_cannot_work_is_refused_with_its_name(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


def test_bodies_count_together_until_their_requests_end_even_if_those_fail():
    load = Load(Limits(max_body_bytes=100, max_waiting_bytes=250))
    with pytest.raises(KeyError), load.hold_bytes(100), load.hold_bytes(None) as correct:
        assert load.bytes == 200, "an unknown length counts as the largest"
        with load.hold_bytes(50), pytest.raises(Problem) as caught, load.hold_bytes(1):
            pass
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        correct(7)
        assert load.bytes == 107
        raise KeyError
    assert load.bytes == 0


async def test_a_body_that_is_too_large_is_refused_however_it_hides_its_size(mock: Mock, talk: Start):
    gateway: Talk = await talk(mock().url, limits={"max_body_bytes": 100_000})

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 10_000

    packed = zlib.compress(b"x" * 50_000_000)
    assert len(packed) < 100_000
    for body, headers in ((b"x" * 100_001, {}), (chunks(), {}), (packed, {"Content-Encoding": "deflate"})):
        reply = await gateway.post(CHAT, body, headers=headers)
        assert (reply.status, reply.code) == (413, "body_too_large") and "--max-body-bytes" in reply.message
    assert (await gateway.chat("small")).status == 200


async def test_a_full_queue_asks_clients_to_slow_down(mock: Mock, talk: Start):
    gateway: Talk = await talk(mock(latency_s=0.5).url, limits={"max_waiting": 3})
    taken = [asyncio.create_task(gateway.chat(f"q{n}")) for n in range(3)]
    await until(lambda: gateway.gateway._load.requests == 3)
    refused = await gateway.chat("one more")
    assert (refused.status, refused.code, refused.headers["Retry-After"]) == (429, "queue_full", "5")
    assert {(await reply).status for reply in taken} == {200}
    assert (await gateway.chat("one more")).status == 200
    assert gateway.gateway.counts.rejected["queue_full"] == 1
    never_fits = await gateway.post("/score", ["a", "b", "c", "d"])
    assert (never_fits.status, never_fits.code) == (413, "batch_too_large")
    assert never_fits.headers["x-should-retry"] == "false"


# -- connections ------------------------------------------------------------------------------------------------------


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


async def test_an_idle_connection_makes_way_for_a_new_one_and_a_busy_one_does_not(
    mock: Mock, talk: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("freewheel.gateway.server.EVICT_IDLE_S", 0.0)
    gateway: Talk = await talk(mock().url, limits={"max_connections": 1})
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    await until(lambda: len(gateway.gateway._connections) == 1)
    assert (await gateway.chat("hi")).status == 200
    assert await reader.read() == b""
    writer.close()
    gateway = await talk(mock(latency_s=0.5).url, limits={"max_connections": 1})
    busy = asyncio.create_task(gateway.chat("hi"))
    await until(lambda: gateway.gateway._connections.busy == 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    assert (await reader.read()).startswith(b"HTTP/1.1 503 ") and (await busy).status == 200
    writer.close()


BODY = json.dumps(chat("hi")).encode()


@pytest.mark.parametrize(
    ("head", "body", "lines"),
    [
        (b"X-Slow", None, [b""]),  # its headers never end
        (b"Content-Length: 10\r\n\r\n{", None, [b"HTTP/1.1 408 "]),
        (
            b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY),
            BODY,
            [b"HTTP/1.1 100 ", b"\r\n", b"HTTP/1.1 200 "],
        ),
        (b"Authorization: Bearer my-secret-token\x00\r\n\r\n", None, [b"HTTP/1.0 400 "]),
    ],
    ids=["no headers", "no body", "waits for a go-ahead", "broken HTTP"],
)
async def test_odd_clients_get_their_answer_and_no_header_reaches_the_log(
    mock: Mock, talk: Start, caplog: pytest.LogCaptureFixture, head: bytes, body: bytes | None, lines: list[bytes]
):
    gateway: Talk = await talk(mock().url, limits={"header_timeout_s": 0.2, "body_timeout_s": 0.2})
    with caplog.at_level(logging.DEBUG):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\n" % CHAT.encode() + head)
        for number, line in enumerate(lines):
            if number == 1 and body is not None:
                writer.write(body)
            found = await asyncio.wait_for(reader.readline(), WAIT_S)
            assert found.startswith(line) if line else found == b""
        writer.close()
    assert gateway.gateway.counts.rejected["header_timeout"] == (lines == [b""])
    assert "my-secret-token" not in caplog.text


async def test_clients_that_come_and_go_at_random_leave_nothing_behind(mock: Mock, talk: Start):
    judge = mock(latency="lognormal", latency_s=0.05, knee=8, reject_above=12, retry_after_s=0.05, error_share=0.1)
    gateway: Talk = await talk(judge.url)
    rng = random.Random(7)

    async def visit(number: int) -> str:
        await asyncio.sleep(rng.uniform(0, 0.5))
        kind, patience_s = rng.randrange(3), rng.choice([0.02, 0.1, WAIT_S])
        if kind == 2:
            asking = gateway.post("/score", [f"answer {number % 50}", f"answer {number}"])
        else:
            asking = gateway.chat(f"question {number if kind else number % 50}", stream=bool(kind))
        try:
            return str((await asyncio.wait_for(asking, patience_s)).status)
        except TimeoutError:
            return "left"

    ends = Counter(await asyncio.gather(*(visit(number) for number in range(400))))
    assert set(ends) == {"200", "left"} and min(ends.values()) > 50
    own = gateway.gateway
    await until(lambda: own._connections.busy == 0 and judge.counts().in_flight == 0)
    assert (own._load.requests, own._load.bytes, own.judge.engine._batches) == (0, 0, {})
    stats = own.judge.stats()
    assert (stats.queued, stats.in_flight) == (0, 0)
    assert stats.scored + stats.relayed + sum(stats.failed.values()) == stats.submitted
    assert (await gateway.chat("afterwards")).status == 200
