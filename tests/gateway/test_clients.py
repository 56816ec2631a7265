"""The clients that the gateway serves. Each needs only another address."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import pytest

from .conftest import CHAT, MODEL, TOKEN, Mock, Start, Talk

MESSAGES: Any = [{"role": "user", "content": "Rate this."}]


def sdk(gateway: Talk, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.url + "/v1", **{"api_key": TOKEN, **options})


def count_requests(gateway: Talk) -> int:
    return sum(number for (route, _), number in gateway.gateway.counts.requests.items() if route == CHAT)


# -- the openai SDK ---------------------------------------------------------------------------------------------------


async def test_the_openai_sdk_needs_only_another_base_url(mock: Mock, talk: Start):
    judge = mock(reply_style="labelled")
    gateway = await talk(judge.url, token=TOKEN)
    async with sdk(gateway) as client:
        first, again = [
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0) for _ in range(2)
        ]
        assert first.choices[0].message.content and first == again and judge.counts().received == 1
        assert [model.id async for model in client.models.list()] == [MODEL]
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == first.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens > 0
    async with sdk(gateway, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="token is missing or wrong"):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)


async def test_the_openai_sdk_raises_where_a_stream_breaks(mock: Mock, talk: Start):
    gateway = await talk(mock(truncate_share=1.0).url, token=TOKEN)
    async with sdk(gateway) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_the_openai_sdk_does_not_repeat_a_permanent_failure(mock: Mock, talk: Start):
    gateway = await talk(mock(insufficient_quota=True).url)
    async with sdk(gateway, max_retries=3) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert caught.value.code == "quota" and count_requests(gateway) == 1


async def test_the_openai_sdk_repeats_a_temporary_failure(mock: Mock, talk: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("freewheel.gateway.limits.RETRY_AFTER_S", 0.05)
    gateway = await talk(mock(error_share=1.0, faults_per_content=1).url, max_attempts=1)
    async with sdk(gateway, max_retries=1) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert reply.choices and count_requests(gateway) == 2


# -- trainers' remote rewards -----------------------------------------------------------------------------------------


async def fetch(url: str, payload: dict[str, Any], tries: int) -> Any:
    """Post JSON with aiohttp, raise on an error status, parse the reply, and try again a number of times.

    That is what OpenRLHF's `SingleTurnAgentExecutor` and slime's `remote_rm` do, with longer pauses between.
    """
    for left in reversed(range(tries)):
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=payload) as response:
                response.raise_for_status()
                return await response.json()
        except aiohttp.ClientError:
            if not left:
                raise
        await asyncio.sleep(0.01)


def with_token(gateway: Talk, path: str) -> str:
    """Return a URL with the token: the only way for clients that cannot set a header."""
    return f"http://worker:{TOKEN}@127.0.0.1:{gateway.port}{path}"


async def test_openrlhf_gets_rewards_in_order_through_remote_rm_url(mock: Mock, talk: Start):
    gateway = await talk(mock(scores={"right": "9", "wrong": "2"}).url, token=TOKEN)
    prompt = "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n"
    queries = [f"{prompt}{word}<|im_end|>" for word in ("right", "wrong")] * 20
    payload = {"query": queries, "prompts": [prompt] * 40, "labels": ["yes", None] * 20}
    told = await fetch(with_token(gateway, "/openrlhf"), payload, tries=5)
    # As its executor takes it.
    assert (told.get("rewards"), told.get("scores") or told.get("rewards")) == ([9.0, 2.0] * 20, [9.0, 2.0] * 20)
    assert (told.get("extra_logs") or {}) == {}


async def test_slime_gets_its_reward_through_rm_url(mock: Mock, talk: Start):
    gateway = await talk(mock(scores={"right": "9"}).url, token=TOKEN)
    payload = {"prompt": [{"role": "user", "content": "Is it?"}], "response": "right", "label": "yes"}
    assert await fetch(with_token(gateway, "/slime"), payload, tries=10) == 9.0
    assert await fetch(with_token(gateway, "/slime?key=score"), payload, tries=10) == {"score": 9.0}


@pytest.mark.parametrize(
    ("path", "payload", "tries"),
    [
        ("/openrlhf", {"query": ["Q bad", "Q good"], "prompts": ["Q ", "Q "], "labels": ["", ""]}, 5),
        ("/slime", {"prompt": "Q", "response": "bad", "label": None}, 10),
    ],
)
async def test_a_trainer_gets_an_error_for_a_failed_judgement_and_its_retry_asks_only_for_the_missing_one(
    mock: Mock, talk: Start, path: str, payload: dict[str, Any], tries: int
):
    judge = mock(scores={"bad": "I cannot rate this.", "good": "9"})
    gateway = await talk(judge.url, reasks=0)
    with pytest.raises(aiohttp.ClientResponseError) as caught:
        await fetch(gateway.url + path, payload, tries=tries)
    assert caught.value.status == 502
    by_text = {count.text: count.received for count in judge.counts().contents.values()}
    assert sorted(by_text.values()) in ([tries], [1, tries]), "a scored response is not judged again"
