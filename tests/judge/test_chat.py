"""Chat completions of the gateway's clients on the judge's engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from freewheel.judge import Endpoint, Failed, JudgeConfig, JudgeRequest
from freewheel.judge.endpoint import AttemptPatience, EndpointState
from freewheel.judge.engine import InFlightRequest
from freewheel.judge.judge import InlineJudge
from freewheel.judge.request import ChatExchange, ChatRequest, Relayed, RubricExchange
from freewheel.judge.verdict import Usage


def body(text: str = "Is it so?", **fields: Any) -> bytes:
    whole = {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return json.dumps({key: value for key, value in whole.items() if value is not None}).encode()


def judge_at(endpoint: Any, **settings: Any) -> InlineJudge:
    return InlineJudge(JudgeConfig(endpoint=endpoint, model="m", **settings))


async def ask(judge: InlineJudge, *bodies: bytes, **fields: Any) -> list[Any]:
    """Ask for all of them at once."""
    asking = (judge.ask([ChatRequest(content, **fields)]) for content in bodies)
    return [answer for [answer] in await asyncio.gather(*asking)]


async def test_body_and_reply_are_passed_on_unchanged(scripted: Any, replying: Any) -> None:
    reply = replying("yes", system_fingerprint="fp", service_tier="flex")
    server = scripted(lambda number, headers, sent: (200, {}, reply))
    sent = body(top_logprobs=3, tools=[{"type": "function"}])
    async with judge_at(server.url) as judge:
        assert await ask(judge, sent) == [Relayed(reply, Usage(100, 1), cached=False, attempts=1)]
    assert [content for _, content in server.seen] == [sent]


async def test_equal_bodies_are_sent_once_whatever_their_spelling_and_sender(mock: Any) -> None:
    running = mock(latency_s=0.05)
    async with judge_at(running.url) as judge:
        plain = body("same", max_tokens=5)
        respelt = json.dumps(dict(reversed(json.loads(plain).items())), indent=1).encode()
        answers = await ask(judge, plain, respelt, body("same", max_tokens=5, user="me"))
        [later] = await ask(judge, plain)
        assert running.counts().received == 1
    assert {answer.content for answer in answers} == {later.content} and later.cached


@pytest.mark.parametrize("temperature", [0.7, None])
async def test_samples_and_different_bodies_are_not_shared_unless_that_is_requested(
    mock: Any, temperature: float | None
) -> None:
    running = mock()
    sample = body(temperature=temperature)
    async with judge_at(running.url) as judge:
        await ask(judge, sample, sample)
        assert running.counts().received == 2
        await ask(judge, *[body(temperature=temperature, seed=3)] * 2)
        assert running.counts().received == 3
        await ask(judge, sample, sample, shares_samples=True)
        assert running.counts().received == 4
        await ask(judge, body("a"), body("b"), body("a", max_tokens=5), body("a", seed=1))
        assert running.counts().received == 8


async def test_a_fresh_answer_is_not_shared_and_is_kept_for_the_next_request(scripted: Any, replying: Any) -> None:
    server = scripted(lambda number, headers, sent: (200, {}, replying(str(number))))
    async with judge_at(server.url) as judge:
        await ask(judge, body())
        [fresh] = await ask(judge, body(), fresh=True)
        [later] = await ask(judge, body())
    assert len(server.seen) == 2 and later.cached
    assert later.content == fresh.content == replying("2")


async def test_a_refusal_a_tool_call_and_a_truncated_reply_are_passed_on_and_not_all_cached(
    scripted: Any, replying: Any
) -> None:
    replies = {
        "refusal": replying(None, "content_filter"),
        "tool": json.dumps(
            {"choices": [{"message": {"role": "assistant", "tool_calls": [{}]}, "finish_reason": "tool_calls"}]}
        ).encode(),
        "cut": replying("half of", "length"),
    }
    server = scripted(lambda number, headers, sent: (200, {}, replies[json.loads(sent)["messages"][0]["content"]]))
    async with judge_at(server.url) as judge:
        for _ in range(2):
            answers = await ask(judge, *(body(name) for name in replies))
            assert [answer.content for answer in answers] == list(replies.values())
    assert len(server.seen) == 5, "the tool call is cached"


async def test_an_endpoints_own_name_for_the_model_is_sent_there_and_part_of_the_key(
    scripted: Any, replying: Any
) -> None:
    server = scripted(lambda number, headers, sent: (200, {}, replying(str(number))))
    for model in ("theirs", "new"):
        async with judge_at(Endpoint(url=server.url, model=model)) as judge:
            await ask(judge, body(), body("another model", model="other"))
    assert sorted(json.loads(content)["model"] for _, content in server.seen) == ["new", "other", "other", "theirs"]


@pytest.mark.parametrize(("request_", "given_up"), [(JudgeRequest("short"), True), (ChatRequest(body("long")), False)])
def test_a_chat_completion_may_take_the_whole_timeout_however_fast_others_are(request_: Any, given_up: bool) -> None:
    config = JudgeConfig(endpoint="http://127.0.0.1:1", model="m")
    exchange: Any = RubricExchange(config, bytes(32)) if given_up else ChatExchange(config)
    endpoint = EndpointState(config, config.endpoints[0])
    for number in range(AttemptPatience.SAMPLES_NEEDED):
        endpoint.latencies.append(0.05)
        endpoint.patience.answered(float(number))
    inflight = InFlightRequest(request_, exchange, exchange.identify(request_), 0.0)
    inflight.permit = endpoint.send(0.0, inflight.size)
    assert inflight.is_overdue(20.0) is given_up
    assert inflight.is_overdue(config.attempt_timeout_s)


async def test_a_clients_own_bound_on_the_reply_counts_against_the_budget(mock: Any) -> None:
    running = mock()
    price = {"m": {"input": 0.0, "output": 1e6}}  # 1 a token
    async with judge_at(running.url, prices=price, max_cost=100.0, max_tokens=4) as judge:
        answers = await ask(judge, *(body(f"{number}", max_tokens=60, n=2) for number in range(3)))
    assert {answer.reason for answer in answers} == {"budget"}
    assert running.counts().received == 0


# -- streams ---------------------------------------------------------------------------------------------------------


class Sink:
    def __init__(self, *, is_gone: bool = False, takes_s: float = 0.0) -> None:
        self.chunks: list[bytes] = []
        self._is_gone = is_gone
        self._takes_s = takes_s

    async def __call__(self, chunk: bytes) -> None:
        if self._is_gone:
            raise ConnectionResetError("gone")
        self.chunks.append(chunk)
        await asyncio.sleep(self._takes_s)


async def test_a_stream_reaches_its_sink_and_its_usage_the_accounts(mock: Any) -> None:
    sink = Sink(takes_s=0.5)
    asked = body(stream=True, stream_options={"include_usage": True})
    async with judge_at(mock().url) as judge:
        [answer] = await ask(judge, asked, sink=sink)
        stats = judge.stats()
    assert isinstance(answer, Relayed) and b"".join(sink.chunks).rstrip().endswith(b"data: [DONE]")
    assert stats.endpoints[0].prompt_tokens == answer.usage.prompt_tokens > 0
    assert stats.relayed == 1 and stats.endpoints[0].latency_p99_s < 0.4, "the sink's time is not the judge's"


async def test_a_client_that_hangs_up_is_not_counted_against_the_judge(mock: Any) -> None:
    async with judge_at(mock().url) as judge:
        [answer] = await ask(judge, body(stream=True), sink=Sink(is_gone=True))
        stats = judge.stats()
    assert isinstance(answer, Failed) and "hung up" in answer.detail
    assert stats.endpoints[0].breaker == "closed" and stats.in_flight == 0


async def test_streams_take_slots_like_all_others(mock: Any) -> None:
    running = mock(latency_s=0.05, reject_above=4)
    sink = Sink()
    async with judge_at(running.url, concurrency=4) as judge:
        await ask(judge, *[body(stream=True)] * 12, sink=sink)
        assert judge.stats().max_in_flight <= 4 and judge.stats().throttled == 0
    assert b"".join(sink.chunks).count(b"[DONE]") == running.counts().received == 12
