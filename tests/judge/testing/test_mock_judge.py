"""The mock judge as an HTTP client on loopback sees it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge, expected_score

PATIENCE_S = 10.0
"""Far more than any test needs."""


def question(text: str = "Rate this answer.", **more: object) -> dict[str, Any]:
    return {"model": "judge", "messages": [{"role": "user", "content": text}], **more}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def reply_to(client: aiohttp.ClientSession, judge: RunningJudge, text: str = "Rate this answer.") -> str:
    async with client.post(judge.url, json=question(text)) as reply:
        assert reply.status == 200
        content: str = (await reply.json())["choices"][0]["message"]["content"]
        return content


async def status_of(client: aiohttp.ClientSession, judge: RunningJudge, text: str = "Rate this answer.") -> int:
    async with client.post(judge.url, json=question(text)) as reply:
        await reply.read()
        return reply.status


# -- answers


async def test_the_default_judge_answers_with_the_expected_score_over_one_connection(
    client: aiohttp.ClientSession,
) -> None:
    async with MockJudge() as judge:
        for number in range(5):
            assert await reply_to(client, judge, f"answer {number}") == str(expected_score(f"answer {number}"))
        assert judge.counts().connections == 1


async def test_a_reply_has_the_shape_of_a_chat_completion(client: aiohttp.ClientSession) -> None:
    async with MockJudge() as judge, client.post(judge.url, json=question("x" * 40, n=2)) as reply:
        body = await reply.json()
        assert reply.content_type == "application/json"
    assert body["object"] == "chat.completion"
    assert body["model"] == "judge"
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
    assert body["usage"] == {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}


async def test_a_stream_has_the_same_content(client: aiohttp.ClientSession) -> None:
    profile = JudgeProfile(reply_style="bold")
    asked = question(stream=True, stream_options={"include_usage": True})
    async with MockJudge(profile) as judge:
        whole = await reply_to(client, judge)
        async with client.post(judge.url, json=asked) as reply:
            assert reply.content_type == "text/event-stream"
            lines = [line.decode().removeprefix("data: ").strip() async for line in reply.content if line.strip()]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    deltas = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(deltas) == whole
    assert chunks[-1]["usage"]["total_tokens"] > 0


async def test_models_and_health_are_served_and_other_paths_are_not(client: aiohttp.ClientSession) -> None:
    async with MockJudge(JudgeProfile(model="judge-7b")) as judge:
        async with client.get(f"{judge.base_url}/models") as reply:
            assert (await reply.json())["data"][0]["id"] == "judge-7b"
        async with client.get(f"http://127.0.0.1:{judge.port}/healthz") as reply:
            assert reply.status == 200
        async with client.get(f"{judge.base_url}/elsewhere") as reply:
            assert reply.status == 404
        assert judge.counts().received == 0


async def test_the_connection_closes_for_a_client_without_keep_alive(client: aiohttp.ClientSession) -> None:
    async with MockJudge() as judge:
        async with client.post(judge.url, json=question(), headers={"Connection": "close"}) as reply:
            assert reply.headers["Connection"] == "close"
            await reply.read()
        await until(lambda: judge.counts().open_connections == 0)


# -- counts


async def test_counts_prove_that_each_content_was_sent_once(client: aiohttp.ClientSession) -> None:
    async with MockJudge() as judge:
        await asyncio.gather(*(reply_to(client, judge, f"answer {number}") for number in range(20)))
        counts = judge.counts()
        assert (counts.received, counts.answered, counts.most_received, len(counts.contents)) == (20, 20, 1, 20)
        await reply_to(client, judge, "answer 3")
        assert judge.counts().most_received == 2
        assert judge.counts().of("answer 3").received == 2
        assert judge.counts().of("never sent").received == 0


async def test_counts_are_served_with_or_without_contents(client: aiohttp.ClientSession) -> None:
    async with MockJudge() as judge:
        await reply_to(client, judge)
        async with client.get(f"http://127.0.0.1:{judge.port}/__counts?contents=0") as reply:
            served = await reply.json()
        assert served["answered"] == 1
        assert served["by_status"] == {"200": 1}
        assert served["contents"] == {}
        assert served["bytes_received"] > 0
        assert served["bytes_sent"] > 0


async def test_the_latest_requests_are_kept_unchanged(client: aiohttp.ClientSession) -> None:
    async with MockJudge(JudgeProfile(keep_requests=2)) as judge:
        for number in range(3):
            headers = {"Authorization": f"Bearer key-{number}"}
            async with client.post(judge.url, json=question(f"answer {number}"), headers=headers) as reply:
                await reply.read()
        kept = judge.requests()
    assert [request.headers["authorization"] for request in kept] == ["Bearer key-1", "Bearer key-2"]
    assert kept[1].json() == question("answer 2")
    assert kept[1].path == "/v1/chat/completions"


async def test_a_reset_restarts_the_counts_and_may_change_the_profile(client: aiohttp.ClientSession) -> None:
    async with MockJudge(JudgeProfile(error_share=1.0, faults_per_content=1)) as judge:
        assert [await status_of(client, judge) for _ in range(2)] == [500, 200]
        judge.reset()
        assert judge.counts().received == 0
        assert await status_of(client, judge) == 500
        judge.reset(JudgeProfile())
        assert await status_of(client, judge) == 200
        assert judge.profile == JudgeProfile()


async def test_a_reset_drops_requests_in_flight(client: aiohttp.ClientSession) -> None:
    async with MockJudge(JudgeProfile(hang_share=1.0)) as judge:
        asked = asyncio.create_task(status_of(client, judge))
        await until(lambda: judge.counts().in_flight == 1)
        judge.reset(JudgeProfile())
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await asked
        assert await status_of(client, judge) == 200
        assert judge.counts().in_flight == 0


async def test_a_reset_refuses_a_bad_profile(client: aiohttp.ClientSession) -> None:
    async with MockJudge() as judge:
        root = f"http://127.0.0.1:{judge.port}"
        async with client.post(f"{root}/__reset", json={"error_share": 2}) as reply:
            assert reply.status == 400
            assert "error_share" in (await reply.json())["error"]["message"]
        assert await status_of(client, judge) == 200


# -- capacity and rates


async def test_beyond_its_limit_the_judge_rejects_at_once(client: aiohttp.ClientSession) -> None:
    async with MockJudge(JudgeProfile(hang_share=1.0, reject_above=2, retry_after_s=3)) as judge:
        hanging = [asyncio.create_task(status_of(client, judge, f"answer {number}")) for number in range(2)]
        await until(lambda: judge.counts().in_flight == 2)
        async with client.post(judge.url, json=question("one too many")) as reply:
            assert reply.status == 429
            assert reply.headers["Retry-After"] == "3"
            assert (await reply.json())["error"]["code"] == "concurrency_limit_exceeded"
        counts = judge.counts()
        assert (counts.rejected, counts.max_in_flight, counts.of("one too many").rejected) == (1, 2, 1)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        await until(lambda: judge.counts().in_flight == 0)
        assert judge.counts().gone == 2


async def test_a_rejection_does_not_count_as_an_attempt(client: aiohttp.ClientSession) -> None:
    profile = JudgeProfile(error_share=1.0, faults_per_content=1, throttle_bursts=[(0.0, 0.05)])
    async with MockJudge(profile) as judge:
        seen = [await status_of(client, judge)]
        while seen[-1] != 200:
            seen.append(await status_of(client, judge))
        assert [status for status in seen if status != 429] == [500, 200]
        assert seen[0] == 429
        count = judge.counts().of("Rate this answer.")
        assert (count.admitted, count.faults, count.answered) == (2, 1, 1)


async def test_a_client_that_disconnects_frees_its_place(client: aiohttp.ClientSession) -> None:
    async with MockJudge(JudgeProfile(latency_s=1000.0, knee=1)) as judge:
        asked = asyncio.create_task(status_of(client, judge))
        await until(lambda: judge.counts().in_flight == 1)
        asked.cancel()
        await until(lambda: judge.counts().in_flight == 0)
        assert judge.counts().gone == 1


# -- faults


@pytest.mark.parametrize(
    ("profile", "status", "content_type", "start", "answered"),
    [
        ({"error_share": 1.0, "error_status": 529}, 529, "application/json", '{"error":', 0),
        ({"garbage_share": 1.0}, 200, "application/json", "upstream", 0),
        ({"wrong_type_share": 1.0}, 200, "text/html", "<!doctype html>", 0),
        ({"unparseable_share": 1.0}, 200, "application/json", '{"id":', 1),
        ({"api_key": "right"}, 401, "application/json", '{"error":', 0),
        ({"requests_per_minute": 0.001}, 200, "application/json", '{"id":', 1),
    ],
)
async def test_a_fault_has_its_status_type_and_body(
    client: aiohttp.ClientSession, profile: dict[str, Any], status: int, content_type: str, start: str, answered: int
) -> None:
    async with MockJudge(JudgeProfile(**profile)) as judge:
        async with client.post(judge.url, json=question()) as reply:
            assert (reply.status, reply.content_type) == (status, content_type)
            assert (await reply.text()).startswith(start)
            assert ("x-ratelimit-remaining-requests" in reply.headers) == ("requests_per_minute" in profile)
        assert judge.counts().answered == answered


async def test_a_disconnect_happens_before_any_reply(client: aiohttp.ClientSession) -> None:
    async with MockJudge(JudgeProfile(disconnect_share=1.0)) as judge:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await status_of(client, judge)
        assert judge.counts().by_status == {}
        assert judge.counts().of("Rate this answer.").received == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_truncated_body_is_shorter_than_its_content_length(client: aiohttp.ClientSession, stream: bool) -> None:
    async with MockJudge(JudgeProfile(truncate_share=1.0)) as judge:
        async with client.post(judge.url, json=question(stream=stream)) as reply:
            assert reply.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await reply.read()
        assert judge.counts().answered == 0


async def test_a_hang_lasts_until_the_client_disconnects(client: aiohttp.ClientSession) -> None:
    async with MockJudge(JudgeProfile(hang_share=1.0)) as judge:
        with pytest.raises(asyncio.TimeoutError):
            await client.post(judge.url, json=question(), timeout=aiohttp.ClientTimeout(total=0.05))
        await until(lambda: judge.counts().in_flight == 0)
        assert judge.counts().by_status == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dripping_answer_is_correct_and_arrives_in_pieces(client: aiohttp.ClientSession, stream: bool) -> None:
    async with MockJudge(JudgeProfile(drip_share=1.0, drip_s=0.05)) as judge:
        async with client.post(judge.url, json=question(stream=stream)) as reply:
            pieces = [piece async for piece in reply.content.iter_any()]
        assert len(pieces) > 2
        assert str(expected_score("Rate this answer.")).encode() in b"".join(pieces)
        assert judge.counts().answered == 1


async def test_an_empty_reply_has_no_choices_or_no_content(client: aiohttp.ClientSession) -> None:
    shapes = set()
    async with MockJudge(JudgeProfile(empty_share=1.0)) as judge:
        for number in range(12):
            async with client.post(judge.url, json=question(f"answer {number}")) as reply:
                choices = (await reply.json())["choices"]
            shapes.add(tuple(choice["message"]["content"] for choice in choices))
    assert shapes == {(), (None,)}


# -- outages


async def test_an_outage_aborts_open_and_new_connections(client: aiohttp.ClientSession) -> None:
    async with MockJudge(JudgeProfile(outages=[(0.05, 1000.0)])) as judge:
        assert await status_of(client, judge) == 200
        await until(lambda: judge.counts().open_connections == 0)
        while judge.counts().connections_refused == 0:
            with pytest.raises(aiohttp.ClientConnectionError):
                await status_of(client, judge)
        assert judge.counts().received == 1


async def test_after_an_outage_the_judge_answers_again(client: aiohttp.ClientSession) -> None:
    failures = 0
    async with MockJudge(JudgeProfile(outages=[(0.0, 0.05)])) as judge:
        while judge.counts().answered == 0:
            try:
                await status_of(client, judge)
            except aiohttp.ClientConnectionError:
                failures += 1
    assert failures > 0


async def test_a_stopped_judge_refuses_and_can_start_again_at_its_address(client: aiohttp.ClientSession) -> None:
    judge = MockJudge()
    await judge.start()
    url = judge.url
    await judge.stop()
    with pytest.raises(aiohttp.ClientConnectorError):
        await status_of(client, judge)
    await judge.start()
    assert judge.url == url
    assert await status_of(client, judge) == 200
    await judge.stop()


# -- bad requests


@pytest.mark.parametrize("said", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), b"\x16\x03\x01 no HTTP\r\n\r\n"])
async def test_bytes_that_are_no_http_are_refused_without_a_traceback(
    caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    async with MockJudge() as judge, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(judge.url).port)
        writer.write(said)
        assert b" 400 " in await reader.readline()
        writer.close()
    assert not caplog.records


@pytest.mark.parametrize("body", [b"", b"not json", b'{"messages": 3}', b"\xff\xfe", b'{"messages": ' + b"[" * 5000])
async def test_a_body_that_is_no_chat_request_gets_400(client: aiohttp.ClientSession, body: bytes) -> None:
    async with MockJudge() as judge, client.post(judge.url, data=body) as reply:
        assert reply.status == 400
        assert judge.counts().contents == {}
