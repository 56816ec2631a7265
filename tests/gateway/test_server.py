"""The gateway over real sockets, with a real mock judge behind it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from freewheel.judge import Endpoint, Price
from freewheel.judge.testing import RunningJudge

from .conftest import MODEL, WAIT_S, Talk, chat

Mock = Callable[..., RunningJudge]
Start = Callable[..., Any]

CHAT = "/v1/chat/completions"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


# -- chat completions -------------------------------------------------------------------------------------------------


async def test_a_chat_completion_comes_back_as_the_upstream_gave_it(mock: Mock, talk: Start):
    judge = mock(keep_requests=1)
    gateway = await talk(judge.url)
    sent = json.dumps({**chat("What is it?"), "top_p": 0.5, "custom": [1, {"a": None}]}, indent=3).encode()
    reply = await gateway.post(CHAT, sent)
    assert reply.status == 200 and reply.headers["Content-Type"] == "application/json"
    assert reply.json["object"] == "chat.completion" and reply.json["usage"]["total_tokens"] > 0
    assert judge.requests()[0].body == sent.decode()


async def test_the_second_equal_completion_comes_from_the_cache(mock: Mock, talk: Start):
    judge = mock()
    gateway = await talk(judge.url)
    first, second = await gateway.chat("same"), await gateway.chat("same")
    assert (first.headers["x-freewheel-cache"], first.headers["x-freewheel-attempts"]) == ("miss", "1")
    assert (second.headers["x-freewheel-cache"], second.headers["x-freewheel-attempts"]) == ("hit", "0")
    assert first.content == second.content
    assert judge.counts().received == 1


async def test_equal_completions_in_flight_share_one_call(mock: Mock, talk: Start):
    judge = mock(latency_s=0.3)
    gateway = await talk(judge.url)
    replies = await asyncio.gather(*(gateway.chat("same") for _ in range(20)))
    assert {reply.status for reply in replies} == {200}
    assert judge.counts().received == 1


async def test_a_client_that_wants_a_fresh_answer_gets_one(mock: Mock, talk: Start):
    judge = mock()
    gateway = await talk(judge.url)
    for _ in range(2):
        reply = await gateway.chat("same", headers={"Cache-Control": "no-cache"})
        assert reply.headers["x-freewheel-cache"] == "miss"
    assert judge.counts().received == 2


async def test_a_client_that_hangs_up_gives_its_slot_free(mock: Mock, talk: Start):
    judge = mock(latency_s=30.0)
    gateway: Talk = await talk(judge.url)
    asking = asyncio.create_task(gateway.chat("long"))
    await until(lambda: judge.counts().in_flight == 1)
    asking.cancel()
    await until(lambda: judge.counts().in_flight == 0)
    assert judge.counts().gone == 1
    await until(lambda: gateway.gateway.counts.requests[CHAT, 499] == 1)


async def test_one_of_two_who_ask_the_same_may_hang_up(mock: Mock, talk: Start):
    judge = mock(latency_s=0.5)
    gateway: Talk = await talk(judge.url)
    stays, goes = (asyncio.create_task(gateway.chat("shared")) for _ in range(2))
    await until(lambda: gateway.gateway.stats().submitted == 2)
    goes.cancel()
    assert (await stays).status == 200
    assert judge.counts().received == 1


async def test_neither_the_clients_token_nor_its_headers_go_upstream(mock: Mock, talk: Start):
    token = "the-gateways-own-token"
    judge = mock(keep_requests=10, api_key="the-upstream-key")
    gateway = await talk(judge.url, token=token, api_key="the-upstream-key")
    headers = {"Authorization": f"Bearer {token}", "OpenAI-Organization": "org-mine", "X-Mine": "1"}
    assert (await gateway.chat("hi", headers=headers)).status == 200
    sent = judge.requests()[0].headers
    assert sent["authorization"] == "Bearer the-upstream-key"
    assert token not in json.dumps(sent) and "openai-organization" not in sent and "x-mine" not in sent


async def test_a_storm_of_429s_below_is_not_seen_above(mock: Mock, talk: Start):
    judge = mock(latency_s=0.02, knee=4, reject_above=6, retry_after_s=0.05)
    gateway = await talk(judge.url)
    replies = await asyncio.gather(*(gateway.chat(f"question {n}") for n in range(300)))
    assert {reply.status for reply in replies} == {200}
    assert judge.counts().rejected > 0


async def test_faults_below_are_tried_again_and_the_attempts_are_told(mock: Mock, talk: Start):
    judge = mock(error_share=1.0, faults_per_content=2)
    gateway = await talk(judge.url)
    reply = await gateway.chat("hi")
    assert (reply.status, reply.headers["x-freewheel-attempts"]) == (200, "3")


async def test_an_upstream_that_is_down_is_a_503_with_a_time_to_come_back(talk: Start):
    gateway = await talk(f"http://127.0.0.1:{free_port()}/v1", max_attempts=1)
    reply = await gateway.chat("hi")
    assert (reply.status, reply.code) == (503, "unavailable")
    assert int(reply.headers["Retry-After"]) > 0 and "x-should-retry" not in reply.headers


async def test_health_tells_of_a_judge_that_is_down_and_of_a_gateway_that_is_well(talk: Start):
    gateway = await talk(f"http://127.0.0.1:{free_port()}/v1", request_deadline_s=1.0)
    replies = await asyncio.gather(*(gateway.chat(f"question {n}") for n in range(20)))
    assert {reply.status for reply in replies} <= {503, 504}
    health = await gateway.get("/healthz")
    assert (health.status, health.json["status"], health.json["judge"]) == (200, "ok", "down")


async def test_a_request_that_the_upstream_refuses_is_refused_and_the_next_goes_on(mock: Mock, talk: Start):
    judge = mock(max_prompt_chars=100)
    gateway = await talk(judge.url)
    reply = await gateway.chat("x" * 200)
    assert (reply.status, reply.code, reply.headers["x-should-retry"]) == (400, "rejected", "false")
    assert (await gateway.chat("short")).status == 200


async def test_a_key_that_the_upstream_refuses_is_the_gateways_fault_and_not_the_clients(mock: Mock, talk: Start):
    gateway = await talk(mock(api_key="right").url, api_key="wrong-upstream-key")
    reply = await gateway.chat("hi")
    assert (reply.status, reply.code, reply.headers["x-should-retry"]) == (502, "auth", "false")
    assert "wrong-upstream-key" not in reply.content.decode()


async def test_a_wrong_model_never_reaches_the_upstream_whose_404_would_stop_all_others(mock: Mock, talk: Start):
    judge = mock(model=MODEL)
    gateway = await talk(judge.url)
    assert (await gateway.chat("hi", model="another")).code == "model_not_found"
    assert judge.counts().received == 0
    assert (await gateway.chat("hi")).status == 200


async def test_an_endpoint_gets_its_own_name_for_the_model(mock: Mock, talk: Start):
    judge = mock(model="served-as-this")
    gateway = await talk(Endpoint(url=judge.url, model="served-as-this"))
    assert (await gateway.chat("hi")).status == 200
    listed = [model["id"] for model in (await gateway.get("/v1/models")).json["data"]]
    assert listed == [MODEL, "served-as-this"]


async def test_the_budget_is_one_for_all_clients(mock: Mock, talk: Start):
    judge = mock(latency_s=0.01)
    # A reply of the mock is one token, a prompt of 400 characters about a hundred: some ten of them fit.
    prices = {MODEL: Price(input=1000.0, output=1000.0)}
    gateway = await talk(judge.url, prices=prices, max_cost=1.2, max_tokens=4)
    replies = await asyncio.gather(*(gateway.chat(f"{n:>400}") for n in range(60)))
    statuses = [reply.status for reply in replies]
    assert set(statuses) == {200, 402}
    refused = next(reply for reply in replies if reply.status == 402)
    assert (refused.code, refused.headers["x-should-retry"]) == ("budget", "false")
    assert 0 < gateway.gateway.stats().cost <= 1.2
    assert judge.counts().answered == statuses.count(200)


async def test_a_clients_own_deadline_is_kept(mock: Mock, talk: Start):
    gateway = await talk(mock(latency_s=30.0).url)
    reply = await gateway.chat("hi", headers={"x-freewheel-deadline-s": "0.2"})
    assert (reply.status, reply.code) == (504, "deadline")
    wrong = await gateway.chat("hi", headers={"x-freewheel-deadline-s": "soon"})
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "x-freewheel-deadline-s")


# -- streams ----------------------------------------------------------------------------------------------------------


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


async def test_streams_are_neither_shared_nor_cached(mock: Mock, talk: Start):
    judge = mock()
    gateway = await talk(judge.url)
    for _ in range(2):
        await read_stream(gateway, "same")
    assert judge.counts().received == 2


async def test_a_stream_is_tried_again_until_its_first_byte(mock: Mock, talk: Start):
    judge = mock(error_share=1.0, faults_per_content=1)
    gateway = await talk(judge.url)
    _, whole = await read_stream(gateway, "hi")
    assert whole.endswith(b"data: [DONE]\n\n") and judge.counts().received == 2


async def test_a_stream_that_never_began_fails_with_a_status(mock: Mock, talk: Start):
    gateway = await talk(mock(error_share=1.0).url, max_attempts=1)
    reply = await gateway.chat("hi", stream=True)
    assert (reply.status, reply.code) == (503, "unavailable")


async def test_a_stream_that_breaks_in_the_middle_does_not_look_whole(mock: Mock, talk: Start):
    gateway: Talk = await talk(mock(truncate_share=1.0).url)
    whole = b""
    async with gateway.session.post(gateway.url + CHAT, json=chat("hi", stream=True)) as reply:
        with pytest.raises(aiohttp.ClientPayloadError):
            async for chunk in reply.content.iter_any():
                whole += chunk
    assert b"[DONE]" not in whole
    last = whole.strip().rpartition(b"data: ")[2]
    assert json.loads(last)["error"]["code"] == "unavailable"


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
    body = json.dumps(chat("hi", stream=True)).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.connect(("127.0.0.1", gateway.port))
        client.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
        )
        await until(lambda: judge.counts().received == 1)
        await until(lambda: len(gateway.gateway._connections) == 0)
        await until(lambda: judge.counts().in_flight == 0)


# -- rewards ----------------------------------------------------------------------------------------------------------


async def test_score_gives_a_verdict_for_each_request_in_their_order(mock: Mock, talk: Start):
    judge = mock(scores={"bad": "no number", "good": "9"})
    gateway = await talk(judge.url, reasks=0)
    given = {
        "requests": [{"response": "good", "id": "a"}, {"response": "bad", "id": "b"}, {"response": "c", "skip": "s"}]
    }
    told = (await gateway.post("/score", given)).json["verdicts"]
    assert [(entry["status"], entry.get("value"), entry.get("reason")) for entry in told] == [
        ("scored", 9.0, None), ("failed", None, "unparseable"), ("skipped", None, "s")
    ]  # fmt: skip


async def test_all_shapes_share_one_cache(mock: Mock, talk: Start):
    judge = mock()
    gateway = await talk(judge.url)
    scored = (await gateway.post("/score", {"response": "a", "prompt": "q", "reference": "r"})).json["verdicts"][0]
    slime = (await gateway.post("/slime", {"response": "a", "prompt": "q", "label": "r"})).json
    openrlhf = (await gateway.post("/openrlhf", {"query": ["qa"], "prompts": ["q"], "labels": ["r"]})).json
    assert slime == openrlhf["rewards"][0] == scored["value"]
    assert judge.counts().received == 1


async def test_an_empty_batch_is_answered_at_once(mock: Mock, talk: Start):
    gateway = await talk(mock().url)
    assert (await gateway.post("/score", [])).json == {"verdicts": []}


@pytest.mark.parametrize("path", [CHAT, "/score", "/openrlhf", "/slime"])
@pytest.mark.parametrize("content", [b"", b"{", b"nonsense", b"[" * 200_000, b"\xff"])
async def test_a_body_that_is_not_json_is_a_400_everywhere(mock: Mock, talk: Start, path: str, content: bytes):
    gateway = await talk(mock().url)
    reply = await gateway.post(path, content)
    assert (reply.status, reply.code, reply.json["error"]["type"]) == (400, "invalid_json", "invalid_request_error")


# -- asides -----------------------------------------------------------------------------------------------------------


async def test_unknown_paths_and_methods_are_told_what_there_is(mock: Mock, talk: Start):
    gateway = await talk(mock().url)
    reply = await gateway.post("/v1/embeddings", {})
    assert reply.status == 404 and CHAT in reply.message
    wrong = await gateway.get(CHAT)
    assert (wrong.status, wrong.headers["Allow"]) == (405, "POST")


async def test_metrics_tell_of_the_engine_and_of_the_gateway(mock: Mock, talk: Start):
    gateway = await talk(mock().url)
    await gateway.chat("hi")
    await gateway.post(CHAT, b"{")
    text = (await gateway.get("/metrics")).content.decode()
    assert "freewheel_judge_relayed_total 1\n" in text
    assert f'freewheel_gateway_requests_total{{route="{CHAT}",status="200"}} 1\n' in text
    assert f'freewheel_gateway_requests_total{{route="{CHAT}",status="400"}} 1\n' in text
    assert "freewheel_gateway_open_connections 1\n" in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a family stands there twice"


async def test_with_a_token_only_health_is_open_and_says_little(mock: Mock, talk: Start):
    token = "the-gateways-own-token"
    gateway = await talk(mock().url, token=token)
    for path in (CHAT, "/score", "/openrlhf", "/slime"):
        assert (await gateway.post(path, {})).status == 401
    assert (await gateway.get("/v1/models")).status == 401
    assert (await gateway.get("/healthz")).json == {"status": "ok", "judge": "up"}
    known = await gateway.get("/healthz", headers={"Authorization": f"Bearer {token}"})
    assert known.json["endpoints"][0]["up"] is True
    assert (await gateway.get("/metrics")).status == 200, "it listens on loopback"
    gateway.gateway._door.open_here = False
    assert (await gateway.get("/metrics")).status == 401


async def test_a_drain_breaks_a_stream_off_as_any_other_failure_does(mock: Mock, talk: Start):
    """An error event and a cut connection; not a second reply in the middle of the first."""
    gateway: Talk = await talk(mock(drip_share=1.0, drip_s=20.0).url)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = json.dumps(chat("hi", stream=True)).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    begun = await reader.readuntil(b"data: ")
    stopping = asyncio.create_task(gateway.gateway.stop(0.0))
    rest = await reader.read()
    await stopping
    writer.close()
    assert begun.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1" not in rest
    assert b'"code":"draining"' in rest
    assert not rest.endswith(b"0\r\n\r\n"), "nobody may take this for the end"


async def test_samples_are_shared_where_the_gateway_is_told_so(mock: Mock, talk: Start):
    judge = mock()
    gateway = await talk(judge.url, shares_samples=True)
    for _ in range(2):
        await gateway.chat("same", temperature=1.0)
    assert judge.counts().received == 1
