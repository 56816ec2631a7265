"""Chat completions of the gateway's clients on the judge's engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from freewheel.judge import Endpoint, Failed, JudgeConfig, JudgeRequest
from freewheel.judge.endpoint import AttemptPatience, EndpointState
from freewheel.judge.engine import InFlightRequest
from freewheel.judge.exchange import (
    ChatExchange,
    ChatRequest,
    Relayed,
    RubricExchange,
)
from freewheel.judge.judge import InlineJudge
from freewheel.judge.verdict import Usage


def body(text: str = "Is it so?", **fields: Any) -> bytes:
    whole = {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return json.dumps({key: value for key, value in whole.items() if value is not None}).encode()


def judge_at(endpoint: Any, **settings: Any) -> InlineJudge:
    return InlineJudge(JudgeConfig(endpoint=endpoint, model="m", **settings))


async def ask(judge: InlineJudge, *bodies: bytes) -> list[Any]:
    return await asyncio.gather(*(one(judge, ChatRequest(content)) for content in bodies))


async def one(judge: InlineJudge, request: ChatRequest) -> Any:
    [answer] = await judge.ask([request])
    return answer


async def test_the_body_goes_up_and_the_reply_comes_back_as_they_are(scripted: Any, replying: Any) -> None:
    reply = replying("yes", system_fingerprint="fp", service_tier="flex")
    server = scripted(lambda number, headers, sent: (200, {}, reply))
    sent = body(top_logprobs=3, tools=[{"type": "function"}])
    async with judge_at(server.url) as judge:
        answer = await one(judge, ChatRequest(sent))
    assert answer == Relayed(reply, Usage(100, 1), cached=False, attempts=1)
    assert [content for _, content in server.seen] == [sent]


async def test_equal_bodies_are_sent_once_whatever_their_spelling_and_sender(mock: Any) -> None:
    running = mock(latency_s=0.05)
    async with judge_at(running.url) as judge:
        plain = body("same", max_tokens=5)
        respelt = json.dumps(dict(reversed(json.loads(plain).items())), indent=1).encode()
        answers = await ask(judge, plain, respelt, body("same", max_tokens=5, user="me"))
        later = await one(judge, ChatRequest(plain))
        assert running.counts().received == 1
    assert len({answer.content for answer in answers}) == 1
    assert later.cached
    assert later.content == answers[0].content


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
        await asyncio.gather(*(one(judge, ChatRequest(sample, shares_samples=True)) for _ in range(2)))
        assert running.counts().received == 4
        await ask(judge, body("a"), body("b"), body("a", max_tokens=5), body("a", seed=1))
        assert running.counts().received == 8


async def test_a_fresh_answer_is_shared_with_nobody_and_kept_for_the_next(scripted: Any, replying: Any) -> None:
    server = scripted(lambda number, headers, sent: (200, {}, replying(str(number))))
    async with judge_at(server.url) as judge:
        await one(judge, ChatRequest(body()))
        fresh = await one(judge, ChatRequest(body(), fresh=True))
        later = await one(judge, ChatRequest(body()))
    assert len(server.seen) == 2
    assert later.cached
    assert later.content == fresh.content == replying("2")


async def test_only_what_came_to_its_own_end_is_kept(scripted: Any, replying: Any) -> None:
    server = scripted(lambda number, headers, sent: (200, {}, replying("half", "length")))
    async with judge_at(server.url) as judge:
        for _ in range(2):
            assert (await one(judge, ChatRequest(body()))).content == replying("half", "length")
    assert len(server.seen) == 2


async def test_an_error_inside_a_200_is_taken_for_what_it_is(scripted: Any, replying: Any) -> None:
    def play(number: int, headers: dict[str, str], sent: bytes) -> Any:
        return (
            (200, {}, b'{"error": {"code": 400, "message": "too long"}}') if number == 1 else (200, {}, replying("7"))
        )

    async with judge_at(scripted(play).url) as judge:
        refused = await one(judge, ChatRequest(body()))
        assert refused.reason == "rejected" and "too long" in refused.detail
        assert (await one(judge, ChatRequest(body()))).content == replying("7"), "and it was not kept"


async def test_the_endpoints_own_model_is_part_of_the_key(scripted: Any, replying: Any) -> None:
    server = scripted(lambda number, headers, sent: (200, {}, replying(str(number))))
    contents = []
    for model in ("old", "new"):
        async with judge_at(Endpoint(url=server.url, model=model)) as judge:
            contents.append((await one(judge, ChatRequest(body()))).content)
    assert contents == [replying("1"), replying("2")]


@pytest.mark.parametrize(("request_", "given_up"), [(JudgeRequest("short"), True), (ChatRequest(body("long")), False)])
def test_a_long_completion_is_not_measured_by_quick_ones(request_: Any, given_up: bool) -> None:
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
    assert [answer.status for answer in answers] == ["failed"] * 3
    assert answers[0].reason == "budget"
    assert running.counts().received == 0


async def test_what_a_slow_reader_takes_is_not_the_judges_latency(mock: Any) -> None:
    class Slow(Sink):
        async def __call__(self, chunk: bytes) -> None:
            await super().__call__(chunk)
            await asyncio.sleep(0.5)

    async with judge_at(mock().url) as judge:
        await one(judge, ChatRequest(body(stream=True), sink=Slow()))
        assert judge.stats().endpoints[0].latency_p99_s < 0.4


async def test_an_endpoints_own_name_for_the_model_is_used_there(scripted: Any, replying: Any) -> None:
    server = scripted(lambda number, headers, sent: (200, {}, replying("7")))
    async with judge_at(Endpoint(url=server.url, model="theirs")) as judge:
        await ask(judge, body(), body("another model", model="other"))
    assert sorted(json.loads(content)["model"] for _, content in server.seen) == ["other", "theirs"]


async def test_a_refusal_a_tool_call_and_a_cut_off_reply_are_the_clients_to_read(scripted: Any, replying: Any) -> None:
    replies = {
        "refusal": replying(None, "content_filter"),
        "tool": json.dumps({"choices": [{"message": {"role": "assistant", "tool_calls": [{}]}}]}).encode(),
        "cut": replying("half of", "length"),
    }
    server = scripted(lambda number, headers, sent: (200, {}, replies[json.loads(sent)["messages"][0]["content"]]))
    async with judge_at(server.url) as judge:
        answers = await ask(judge, *(body(name) for name in replies))
    assert [answer.content for answer in answers] == list(replies.values())


async def test_a_refused_request_is_a_failure_and_garbage_is_asked_for_again(scripted: Any, replying: Any) -> None:
    def play(number: int, headers: dict[str, str], sent: bytes) -> Any:
        if b"bad" in sent:
            return 400, {}, b'{"error": {"message": "no such field"}}'
        return (200, {}, b"<html>") if number == 1 else (200, {}, replying("7"))

    async with judge_at(scripted(play).url) as judge:
        answer = await one(judge, ChatRequest(body("good")))
        refused = await one(judge, ChatRequest(body("bad")))
    assert answer.attempts == 2
    assert isinstance(refused, Failed)
    assert refused.reason == "rejected"
    assert "no such field" in refused.detail


class Sink:
    def __init__(self, fails_at: int | None = None) -> None:
        self.chunks: list[bytes] = []
        self._fails_at = fails_at

    async def __call__(self, chunk: bytes) -> None:
        if len(self.chunks) == self._fails_at:
            raise ConnectionResetError("gone")
        self.chunks.append(chunk)


async def test_a_stream_reaches_its_sink_and_its_usage_the_accounts(mock: Any) -> None:
    running = mock(latency_s=0.02)
    sink = Sink()
    asked = body(stream=True, stream_options={"include_usage": True})
    async with judge_at(running.url) as judge:
        answer = await one(judge, ChatRequest(asked, sink=sink))
        stats = judge.stats()
    assert isinstance(answer, Relayed)
    assert b"".join(sink.chunks).rstrip().endswith(b"data: [DONE]")
    assert answer.usage.prompt_tokens > 0
    assert stats.endpoints[0].prompt_tokens == answer.usage.prompt_tokens
    assert stats.relayed == 1


async def test_a_stream_is_retried_until_its_first_byte_and_not_after(scripted: Any) -> None:
    events = b'data: {"choices": []}\n\n'

    def play(number: int, headers: dict[str, str], sent: bytes) -> Any:
        if number == 1:
            return 503, {}, b""
        return 200, {"Content-Length": str(len(events) + 100)}, events  # it promises more than it sends

    server = scripted(play)
    sink = Sink()
    async with judge_at(server.url, attempt_timeout_s=0.3) as judge:
        answer = await one(judge, ChatRequest(body(stream=True), sink=sink))
    assert len(server.seen) == 2
    assert b"".join(sink.chunks) == events
    assert isinstance(answer, Failed)
    assert answer.reason == "unavailable"


async def test_a_client_that_hangs_up_is_not_held_against_the_judge(mock: Any) -> None:
    async with judge_at(mock().url) as judge:
        answer = await one(judge, ChatRequest(body(stream=True), sink=Sink(fails_at=0)))
        stats = judge.stats()
    assert isinstance(answer, Failed)
    assert "hung up" in answer.detail
    assert stats.endpoints[0].breaker == "closed"
    assert stats.in_flight == 0


async def test_streams_take_slots_like_all_others(mock: Any) -> None:
    running = mock(latency_s=0.05, reject_above=4)
    async with judge_at(running.url, concurrency=4) as judge:
        sinks = [Sink() for _ in range(12)]
        await asyncio.gather(*(one(judge, ChatRequest(body(stream=True), sink=sink)) for sink in sinks))
        assert judge.stats().max_in_flight <= 4
        assert judge.stats().throttled == 0
    assert all(sink.chunks for sink in sinks)
