"""The gateway over real sockets, with a real mock judge behind it."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from freewheel.judge import Endpoint

from .conftest import CHAT, MODEL, TOKEN, Mock, Start, Talk, chat, until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- chat completions -------------------------------------------------------------------------------------------------


async def test_equal_completions_share_one_call_unless_a_fresh_one_or_a_sample_is_wanted(mock: Mock, talk: Start):
    judge = mock(latency_s=0.1)
    gateway = await talk(judge.url)

    async def ask(expected_calls: int, cache: str, attempts: int, **options: Any) -> bytes:
        reply = await gateway.chat("same", **options)
        told = reply.headers["x-freewheel-cache"], reply.headers["x-freewheel-attempts"]
        assert (reply.status, told, judge.counts().received) == (200, (cache, str(attempts)), expected_calls)
        return bytes(reply.content)

    first = await asyncio.gather(*(ask(1, "miss", 1) for _ in range(20)))
    assert {await ask(1, "hit", 0)} == set(first)
    await ask(2, "miss", 1, headers={"Cache-Control": "no-cache"})
    await ask(3, "miss", 1, temperature=1.0)
    await ask(4, "miss", 1, temperature=1.0)
    shares = await talk(judge.url, shares_samples=True)
    for _ in range(2):
        await shares.chat("same", temperature=1.0)
    assert judge.counts().received == 5


async def test_a_client_that_hangs_up_frees_its_slot_unless_another_waits_for_the_same(mock: Mock, talk: Start):
    judge = mock(latency_s=1.0)
    gateway: Talk = await talk(judge.url)
    stays, goes = (asyncio.create_task(gateway.chat("shared")) for _ in range(2))
    alone = asyncio.create_task(gateway.chat("alone"))
    await until(lambda: gateway.gateway.judge.stats().submitted == 3 and judge.counts().in_flight == 2)
    alone.cancel()
    goes.cancel()
    await until(lambda: judge.counts().gone == 1 and gateway.gateway.counts.requests[CHAT, 499] == 2)
    assert (await stays).status == 200
    assert judge.counts().received == 2


async def test_neither_the_clients_token_nor_its_headers_go_upstream(mock: Mock, talk: Start):
    judge = mock(keep_requests=10, api_key="the-upstream-key")
    gateway = await talk(judge.url, token=TOKEN, api_key="the-upstream-key")
    headers = {"Authorization": f"Bearer {TOKEN}", "OpenAI-Organization": "org-mine", "X-Mine": "1"}
    assert (await gateway.chat("hi", headers=headers)).status == 200
    sent = judge.requests()[0].headers
    assert sent["authorization"] == "Bearer the-upstream-key"
    assert TOKEN not in json.dumps(sent) and "openai-organization" not in sent and "x-mine" not in sent


@pytest.mark.parametrize(
    ("profile", "settings", "fields", "expected"),
    [
        (None, {"max_attempts": 1}, {}, (503, "unavailable", True)),
        ({"max_prompt_chars": 1}, {}, {}, (400, "rejected", False)),
        ({"api_key": "right"}, {"api_key": "wrong-upstream-key"}, {}, (502, "auth", False)),
        ({}, {}, {"model": "another"}, (404, "model_not_found", False)),
        ({"latency_s": 30.0}, {}, {"headers": {"x-freewheel-deadline-s": "0.2"}}, (504, "deadline", False)),
        ({}, {}, {"headers": {"x-freewheel-deadline-s": "soon"}}, (400, "invalid_value", False)),
    ],
)
async def test_a_failure_has_its_status_and_tells_whether_to_try_again(
    mock: Mock, talk: Start, profile: Any, settings: Any, fields: Any, expected: tuple[int, str, bool]
):
    url = mock(**profile).url if profile is not None else f"http://127.0.0.1:{free_port()}/v1"
    gateway = await talk(url, **settings)
    reply = await gateway.chat("hi", **fields)
    assert (reply.status, reply.code, "Retry-After" in reply.headers) == expected
    assert reply.headers.get("x-should-retry") == (None if expected[2] else "false")
    assert "wrong-upstream-key" not in reply.content.decode()


# -- streams ----------------------------------------------------------------------------------------------------------


_BODY = json.dumps(chat("hi", stream=True)).encode()
RAW_STREAM = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(_BODY), _BODY)


async def read_stream(gateway: Talk, content: str) -> tuple[list[float], bytes]:
    loop, at, whole = asyncio.get_running_loop(), [], b""
    async with gateway.session.post(gateway.url + CHAT, json=chat(content, stream=True)) as reply:
        assert reply.status == 200 and reply.headers["Content-Type"].startswith("text/event-stream")
        async for chunk in reply.content.iter_any():
            at.append(loop.time())
            whole += chunk
    return at, whole


async def test_a_stream_is_passed_on_while_it_comes(mock: Mock, talk: Start):
    gateway = await talk(mock(drip_share=1.0, drip_s=1.0).url)
    at, whole = await read_stream(gateway, "hi")
    assert whole.endswith(b"data: [DONE]\n\n")
    assert len(at) >= 3 and at[-1] - at[0] > 0.3


async def test_a_stream_is_retried_until_its_first_byte_and_neither_shared_nor_cached(mock: Mock, talk: Start):
    judge = mock(error_share=1.0, faults_per_content=1)
    gateway = await talk(judge.url)
    for received in (2, 3):
        _, whole = await read_stream(gateway, "same")
        assert whole.endswith(b"data: [DONE]\n\n") and judge.counts().received == received
    gateway = await talk(mock(error_share=1.0).url, max_attempts=1)
    reply = await gateway.chat("hi", stream=True)
    assert (reply.status, reply.code) == (503, "unavailable")


async def test_a_drain_breaks_a_stream_off_as_any_other_failure_does(mock: Mock, talk: Start):
    """An error event and a cut connection; not a second reply in the middle of the first."""
    gateway: Talk = await talk(mock(drip_share=1.0, drip_s=20.0).url)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(RAW_STREAM)
    assert (await reader.readuntil(b"data: ")).startswith(b"HTTP/1.1 200")
    stopping = asyncio.create_task(gateway.gateway.stop(0.0))
    rest = await reader.read()
    await stopping
    writer.close()
    assert b"HTTP/1.1" not in rest and b'"code":"draining"' in rest
    assert not rest.endswith(b"0\r\n\r\n"), "nobody may take this for the end"


async def test_a_client_that_leaves_its_stream_ends_it_upstream(mock: Mock, talk: Start):
    judge = mock(drip_share=1.0, drip_s=6.0)
    gateway: Talk = await talk(judge.url)
    reply = await gateway.session.post(gateway.url + CHAT, json=chat("hi", stream=True))
    await reply.content.readany()
    reply.close()
    await until(lambda: judge.counts().in_flight == 0 and judge.counts().gone == 1)


async def test_a_client_that_does_not_read_its_stream_is_cut_off(mock: Mock, talk: Start):
    judge = mock(drip_share=1.0, drip_s=1.0, scores={"hi": "long " * 2_000_000})
    gateway: Talk = await talk(judge.url, limits={"write_timeout_s": 0.5})
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.connect(("127.0.0.1", gateway.port))
        client.sendall(RAW_STREAM)
        await until(lambda: judge.counts().received == 1)
        await until(lambda: len(gateway.gateway._connections) == 0 and judge.counts().in_flight == 0)


# -- rewards ----------------------------------------------------------------------------------------------------------


async def test_all_shapes_share_one_cache(mock: Mock, talk: Start):
    judge = mock()
    gateway = await talk(judge.url)
    scored = (await gateway.post("/score", {"response": "a", "prompt": "q", "reference": "r"})).json["verdicts"][0]
    slime = (await gateway.post("/slime", {"response": "a", "prompt": "q", "label": "r"})).json
    openrlhf = (await gateway.post("/openrlhf", {"query": ["qa"], "prompts": ["q"], "labels": ["r"]})).json
    assert slime == openrlhf["rewards"][0] == scored["value"]
    assert judge.counts().received == 1


async def test_a_body_that_is_not_json_or_nested_too_deep_is_refused_everywhere(mock: Mock, talk: Start):
    gateway = await talk(mock().url)
    for path in (CHAT, "/score", "/openrlhf", "/slime"):
        for content in (b"", b"{", b"nonsense", b"[" * 200_000, b"\xff"):
            reply = await gateway.post(path, content)
            assert (reply.status, reply.code) == (400, "invalid_json")
    for depth in (900, 990, 1000, 100_000):
        nested = b'{"model": "%b", "messages": [%b]}' % (MODEL.encode(), b"[" * depth + b"]" * depth)
        assert (await gateway.post(CHAT, nested)).status in (200, 400)
    assert (await gateway.chat("afterwards")).status == 200


# -- the other routes -------------------------------------------------------------------------------------------------


async def test_unknown_paths_and_methods_are_refused_with_a_list_of_the_known_ones(mock: Mock, talk: Start):
    gateway = await talk(mock().url)
    reply = await gateway.post("/v1/embeddings", {})
    assert reply.status == 404 and CHAT in reply.message
    wrong = await gateway.get(CHAT)
    assert (wrong.status, wrong.headers["Allow"]) == (405, "POST")


async def test_metrics_count_the_engine_and_the_gateway(mock: Mock, talk: Start):
    gateway = await talk(Endpoint(url=mock(model="served-as-this").url, model="served-as-this"))
    await gateway.chat("hi")
    await gateway.post(CHAT, b"{")
    text = (await gateway.get("/metrics")).content.decode()
    assert "freewheel_judge_relayed_total 1\n" in text
    assert f'freewheel_gateway_requests_total{{route="{CHAT}",status="200"}} 1\n' in text
    assert f'freewheel_gateway_requests_total{{route="{CHAT}",status="400"}} 1\n' in text
    assert "freewheel_gateway_open_connections 1\n" in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a family appears twice"


async def test_with_a_token_only_health_is_open_and_reports_little(mock: Mock, talk: Start):
    gateway = await talk(mock().url, token=TOKEN)
    for path in (CHAT, "/score", "/openrlhf", "/slime"):
        assert (await gateway.post(path, {})).status == 401
    assert (await gateway.get("/v1/models")).status == 401
    assert (await gateway.get("/healthz")).json == {"status": "ok", "judge": "up"}
    known = await gateway.get("/healthz", headers={"Authorization": f"Bearer {TOKEN}"})
    assert known.json["endpoints"][0]["up"] is True
    assert (await gateway.get("/metrics")).status == 200, "it listens on loopback"
    gateway.gateway._door.open_here = False
    assert (await gateway.get("/metrics")).status == 401


async def test_health_is_ok_while_the_judge_is_down(talk: Start):
    gateway = await talk(f"http://127.0.0.1:{free_port()}/v1", request_deadline_s=1.0)
    replies = await asyncio.gather(*(gateway.chat(f"question {n}") for n in range(20)))
    assert {reply.status for reply in replies} <= {503, 504}
    health = await gateway.get("/healthz")
    assert (health.status, health.json["status"], health.json["judge"]) == (200, "ok", "down")
