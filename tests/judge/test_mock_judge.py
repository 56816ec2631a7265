"""The mock judge as an HTTP client on loopback sees it; its places: a loop, a thread, a child process, a program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge, expected_score
from freewheel.judge.verdict import JudgeError

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


async def test_a_reply_is_a_chat_completion_with_the_expected_score(client: aiohttp.ClientSession) -> None:
    with MockJudge(JudgeProfile(requests_per_minute=600)).in_thread() as judge:
        for number in range(5):
            assert await reply_to(client, judge, f"answer {number}") == str(expected_score(f"answer {number}"))
        async with client.post(judge.url, json=question("x" * 40, n=2)) as reply:
            body = await reply.json()
            assert reply.content_type == "application/json" and reply.headers["x-ratelimit-limit-requests"] == "600"
        async with client.get(f"{judge.base_url}/elsewhere") as reply:
            assert reply.status == 404
        assert judge.counts().received == judge.counts().answered == 6
    assert (body["object"], body["model"]) == ("chat.completion", "judge")
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
    assert body["usage"] == {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}


# -- counts


async def test_a_reset_restarts_the_counts_drops_what_is_in_flight_and_may_change_the_profile(
    client: aiohttp.ClientSession,
) -> None:
    with MockJudge(JudgeProfile(error_share=1.0, faults_per_content=1)).in_thread() as judge:
        assert [await status_of(client, judge) for _ in range(2)] == [500, 200]
        judge.reset()
        assert judge.counts().received == 0
        assert await status_of(client, judge) == 500
        judge.reset(JudgeProfile(hang_share=1.0))
        asked = asyncio.create_task(status_of(client, judge))
        await until(lambda: judge.counts().in_flight == 1)
        judge.reset(JudgeProfile())
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await asked
        assert await status_of(client, judge) == 200
        assert judge.counts().in_flight == 0
        assert judge.profile == JudgeProfile()
        async with client.post(f"http://127.0.0.1:{judge.port}/__reset", json={"error_share": 2}) as reply:
            assert reply.status == 400
            assert "error_share" in (await reply.json())["error"]["message"]


# -- faults


async def test_an_empty_reply_has_no_choices_or_no_content(client: aiohttp.ClientSession) -> None:
    shapes = set()
    with MockJudge(JudgeProfile(empty_share=1.0)).in_thread() as judge:
        for number in range(12):
            async with client.post(judge.url, json=question(f"answer {number}")) as reply:
                choices = (await reply.json())["choices"]
            shapes.add(tuple(choice["message"]["content"] for choice in choices))
    assert shapes == {(), (None,)}


# -- outages


async def test_an_outage_aborts_open_and_new_connections(client: aiohttp.ClientSession) -> None:
    with MockJudge(JudgeProfile(outages=[(0.05, 1000.0)])).in_thread() as judge:
        assert await status_of(client, judge) == 200
        await until(lambda: judge.counts().open_connections == 0)
        while judge.counts().connections_refused == 0:
            with pytest.raises(aiohttp.ClientConnectionError):
                await status_of(client, judge)
        assert judge.counts().received == 1


# -- bad requests


@pytest.mark.parametrize("body", [b"", b"not json", b'{"messages": 3}', b"\xff\xfe", b'{"messages": ' + b"[" * 5000])
async def test_a_body_that_is_not_a_chat_request_gets_400(client: aiohttp.ClientSession, body: bytes) -> None:
    with MockJudge().in_thread() as judge:
        async with client.post(judge.url, data=body) as reply:
            assert reply.status == 400
        assert judge.counts().contents == {}


# -- places


def ask(judge: RunningJudge) -> str:
    request = urllib.request.Request(judge.url, data=json.dumps(question()).encode())
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENCE_S) as reply:
        content: str = json.load(reply)["choices"][0]["message"]["content"]
        return content


@pytest.mark.parametrize("place", ["in_thread", "in_process"])
def test_a_synchronous_caller_can_use_a_judge_in_a_thread_or_a_process(place: str) -> None:
    profile = JudgeProfile(keep_requests=1, latency_s=0.01)
    with getattr(MockJudge(profile), place)() as judge:
        assert ask(judge) == str(expected_score("Rate this answer."))
        assert judge.counts().of("Rate this answer.").answered == 1
        assert judge.requests()[0].json() == question()
        judge.reset(JudgeProfile(scores={"Rate": "4"}))
        assert judge.counts().received == 0
        assert ask(judge) == "4"
    with pytest.raises(OSError, match=r"refused|reset|timed out"):
        ask(judge)


@pytest.mark.parametrize(("place", "error"), [("in_thread", OSError), ("in_process", JudgeError)])
def test_an_occupied_port_is_an_error_for_the_caller(
    place: str, error: type[Exception], capfd: pytest.CaptureFixture[str]
) -> None:
    taken = MockJudge().in_thread()
    with taken as judge, pytest.raises(error) as failed, getattr(MockJudge(port=judge.port), place)():
        pass
    assert "Address already in use" in str(failed.value) + capfd.readouterr().err


PARENT = """
import time
from freewheel.judge.testing import MockJudge
with MockJudge().in_process() as judge:
    print(judge.port, flush=True)
    time.sleep(3600)
"""


async def test_a_child_process_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(parent.stdout.readline()))
            parent.kill()
            with contextlib.suppress(ConnectionResetError):  # not accepted yet: the system resets it
                assert await reader.read() == b"", "the connection ends with the judge"
            writer.close()
