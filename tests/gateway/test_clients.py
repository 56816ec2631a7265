"""The clients that the gateway is for, each as it is: only an address is changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest

from freewheel.judge import JudgeConfig, JudgeRequest, Scored
from freewheel.judge.judge import InlineJudge
from freewheel.judge.testing import RunningJudge

from .conftest import MODEL, Talk

Mock = Callable[..., RunningJudge]
Start = Callable[..., Any]

TOKEN = "the-gateways-own-token"
CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Rate this."}]


def sdk(gateway: Talk, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.url + "/v1", **{"api_key": TOKEN, **options})


def asked(gateway: Talk, path: str = CHAT) -> int:
    """How often a client asked, whatever it got."""
    return sum(number for (route, _), number in gateway.gateway.counts.requests.items() if route == path)


# -- the openai SDK ---------------------------------------------------------------------------------------------------


async def test_the_openai_sdk_needs_only_another_base_url(mock: Mock, talk: Start):
    judge = mock()
    gateway = await talk(judge.url, token=TOKEN)
    async with sdk(gateway) as client:
        first = await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
        again = await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
        assert first.choices[0].message.content and first == again
        assert [model.id async for model in client.models.list()] == [MODEL]
    assert judge.counts().received == 1


async def test_the_openai_sdk_streams_through_the_gateway(mock: Mock, talk: Start):
    gateway = await talk(mock(reply_style="labelled").url, token=TOKEN)
    async with sdk(gateway) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        plain = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens > 0
    await asyncio.sleep(0)
    assert gateway.gateway.stats().endpoints[0].prompt_tokens > 0, "a stream's tokens are counted too"


async def test_the_openai_sdk_raises_where_a_stream_breaks(mock: Mock, talk: Start):
    gateway = await talk(mock(truncate_share=1.0).url, token=TOKEN)
    async with sdk(gateway) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


@pytest.mark.parametrize(
    ("profile", "kind", "code"),
    [
        ({"max_prompt_chars": 1}, openai.BadRequestError, "rejected"),
        ({"api_key": "another"}, openai.InternalServerError, "auth"),
        ({"insufficient_quota": True}, openai.APIStatusError, "quota"),
    ],
)
async def test_the_openai_sdk_does_not_repeat_what_is_final(
    mock: Mock, talk: Start, profile: dict[str, Any], kind: type[openai.APIStatusError], code: str
):
    gateway = await talk(mock(**profile).url)
    async with sdk(gateway, max_retries=3) as client:
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert caught.value.code == code and caught.value.response.headers["x-should-retry"] == "false"
    assert asked(gateway) == 1


async def test_the_openai_sdk_comes_back_after_what_may_pass(mock: Mock, talk: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("freewheel.gateway.problem.RETRY_AFTER_S", 0.05)
    judge = mock(error_share=1.0, faults_per_content=1)
    gateway = await talk(judge.url, max_attempts=1)
    async with sdk(gateway, max_retries=1) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert reply.choices and asked(gateway) == 2


async def test_the_openai_sdk_is_told_of_a_wrong_token(mock: Mock, talk: Start):
    gateway = await talk(mock().url, token=TOKEN)
    async with sdk(gateway, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="token is missing or wrong"):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)


# -- freewheel's own judge --------------------------------------------------------------------------------------------


async def test_a_freewheel_judge_may_stand_before_a_gateway(mock: Mock, talk: Start):
    judge = mock()
    gateway = await talk(judge.url, token=TOKEN)
    config = JudgeConfig(endpoint=gateway.url + "/v1", model=MODEL, api_key=TOKEN, cache=False)
    async with InlineJudge(config) as worker:
        verdicts = await worker.score([JudgeRequest(f"answer {n}") for n in range(20)])
    assert all(isinstance(verdict, Scored) for verdict in verdicts)
    assert judge.counts().received == 20


# -- trainers' remote rewards -----------------------------------------------------------------------------------------


class RemoteReward:
    """Posts JSON with aiohttp, raises on an error status, parses the reply, and tries again a number of times.

    That is what OpenRLHF's `SingleTurnAgentExecutor` and slime's `remote_rm` do, with longer pauses between.
    """

    def __init__(self, url: str, tries: int) -> None:
        self._url = url
        self._tries = tries

    async def __call__(self, payload: dict[str, Any]) -> Any:
        for left in reversed(range(self._tries)):
            try:
                async with aiohttp.ClientSession() as session, session.post(self._url, json=payload) as response:
                    response.raise_for_status()
                    return await response.json()
            except aiohttp.ClientError:
                if not left:
                    raise
            await asyncio.sleep(0.01)
        raise AssertionError("unreachable")


def with_token(gateway: Talk, path: str) -> str:
    """The one way in for clients that have no setting for a header."""
    return f"http://worker:{TOKEN}@127.0.0.1:{gateway.port}{path}"


async def test_openrlhf_gets_rewards_through_remote_rm_url(mock: Mock, talk: Start):
    gateway = await talk(mock(scores={"right": "9", "wrong": "2"}).url, token=TOKEN)
    fetch = RemoteReward(with_token(gateway, "/openrlhf"), tries=5)
    prompt = "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n"
    for word, value in (("right", 9.0), ("wrong", 2.0)):
        payload = {"query": [f"{prompt}{word}<|im_end|>"], "prompts": [prompt], "labels": ["yes"]}
        told = await fetch(payload)
        # As its executor takes it: a list of one for one query.
        assert (told.get("rewards"), told.get("scores") or told.get("rewards")) == ([value], [value])
        assert (told.get("extra_logs") or {}) == {}


async def test_openrlhf_of_a_time_with_batches_gets_them_in_order(mock: Mock, talk: Start):
    gateway = await talk(mock(scores={"right": "9", "wrong": "2"}).url)
    fetch = RemoteReward(gateway.url + "/openrlhf", tries=5)
    told = await fetch({"query": ["Q right", "Q wrong"] * 20, "prompts": ["Q "] * 40, "labels": [None] * 40})
    assert told["rewards"] == [9.0, 2.0] * 20


async def test_slime_gets_its_reward_through_rm_url(mock: Mock, talk: Start):
    gateway = await talk(mock(scores={"right": "9"}).url, token=TOKEN)
    payload = {"prompt": [{"role": "user", "content": "Is it?"}], "response": "right", "label": "yes"}
    assert await RemoteReward(with_token(gateway, "/slime"), tries=10)(payload) == 9.0
    assert await RemoteReward(with_token(gateway, "/slime?key=score"), tries=10)(payload) == {"score": 9.0}


@pytest.mark.parametrize(
    ("path", "payload", "tries"),
    [
        ("/openrlhf", {"query": ["Q bad", "Q good"], "prompts": ["Q ", "Q "], "labels": ["", ""]}, 5),
        ("/slime", {"prompt": "Q", "response": "bad", "label": None}, 10),
    ],
)
async def test_a_trainer_whose_judgement_failed_gets_an_error_and_asks_for_the_missing_one_again(
    mock: Mock, talk: Start, path: str, payload: dict[str, Any], tries: int
):
    judge = mock(scores={"bad": "I cannot rate this.", "good": "9"})
    gateway = await talk(judge.url, reasks=0)
    with pytest.raises(aiohttp.ClientResponseError) as caught:
        await RemoteReward(gateway.url + path, tries=tries)(payload)
    assert caught.value.status == 502
    by_text = {count.text: count.received for count in judge.counts().contents.values()}
    assert sorted(by_text.values()) in ([tries], [1, tries]), "what was scored is not asked for again"


async def test_a_trainer_whose_judge_recovers_gets_a_number(mock: Mock, talk: Start):
    judge = mock(unparseable_share=1.0, faults_per_content=2)
    gateway = await talk(judge.url, reasks=0)
    reward = await RemoteReward(gateway.url + "/slime", tries=10)({"prompt": "Q", "response": "a", "label": None})
    assert isinstance(reward, float) and asked(gateway, "/slime") == 3


async def test_no_reply_to_a_trainer_ever_holds_null_or_nan(mock: Mock, talk: Start):
    judge = mock(unparseable_share=0.3, error_share=0.2, empty_share=0.2, seed=3)
    gateway = await talk(judge.url, reasks=0, max_attempts=1)
    for number in range(60):
        reply = await gateway.post("/slime", {"prompt": "Q", "response": f"answer {number}", "label": None})
        if reply.status == 200:
            assert isinstance(json.loads(reply.content, parse_constant=pytest.fail), float)
        else:
            assert reply.status in (502, 503) and set(reply.json) == {"error"}
