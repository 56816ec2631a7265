"""The engine over real HTTP: each failure class, deadlines, the breaker, several endpoints, and never twice."""

from __future__ import annotations

import asyncio
import gzip
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from freewheel.judge import Endpoint, Failed, JudgeRequest, Rubric, Scored, Skipped, Verdict
from freewheel.judge.endpoint import Breaker
from freewheel.judge.exchange import BodyWriter
from freewheel.judge.testing import JudgeProfile, RunningJudge

Mock = Callable[..., RunningJudge]
SLACK_S = 3.0
"""What a busy test machine may add to a deadline."""


def texts(count: int, mark: str = "answer") -> list[str]:
    return [f"{mark} number {index}" for index in range(count)]


def reasons(verdicts: list[Verdict]) -> set[str]:
    return {verdict.reason if isinstance(verdict, Failed) else verdict.status for verdict in verdicts}


def failed(verdict: Verdict) -> Failed:
    assert isinstance(verdict, Failed), verdict
    return verdict


def scored(verdict: Verdict) -> Scored:
    assert isinstance(verdict, Scored), verdict
    return verdict


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- verdicts --------------------------------------------------------------------------------------------------------


async def test_each_request_gets_the_score_of_its_own_content_and_a_skipped_one_makes_no_call(
    mock: Mock, bench: Any
) -> None:
    judge = mock(scores={f"number {i}.": str(i + 1) for i in range(10)})
    async with bench(judge.url) as engine:
        skipped, *verdicts = await engine.score(
            [JudgeRequest("a", skip="too short"), *(f"it is number {i}." for i in range(10))]
        )
    assert skipped == Skipped("too short")
    assert [scored(v).value for v in verdicts] == [float(i + 1) for i in range(10)]
    assert all(v.usage.prompt_tokens > 0 and v.attempts == 1 and not v.cached for v in verdicts)
    assert judge.counts().received == 10


@pytest.mark.parametrize(
    "odd",
    ["", " ", "\x00", "a\x00b", "\ud800", "x\udfffy", "\u2028\r\n", "𝟙\u202e", '"}\\', "{response}", "x" * 1_000_000],
)
async def test_any_text_can_be_judged(mock: Mock, bench: Any, odd: str) -> None:
    judge = mock()
    async with bench(judge.url) as engine:
        verdicts = await engine.score([JudgeRequest(odd, odd[:1000], odd[:1000])])
    assert isinstance(verdicts[0], Scored)


# -- never twice -----------------------------------------------------------------------------------------------------


async def test_identical_requests_in_flight_share_one_call_within_and_between_batches(mock: Mock, bench: Any) -> None:
    judge = mock(latency_s=0.1)
    async with bench(judge.url) as engine:
        first = engine.submit(["same"] * 50 + texts(5))
        while judge.counts().in_flight < 6:
            await asyncio.sleep(0.005)
        second = engine.submit(texts(5))
        verdicts = await engine.result(first, 55)
        await engine.result(second, 5)
        assert engine.engine.stats().shared == 49 + 5
    assert judge.counts().received == 6 and judge.counts().most_received == 1
    assert len({scored(v).value for v in verdicts[:50]}) == 1


async def test_a_sharer_that_cancels_leaves_the_other_its_verdict(mock: Mock, bench: Any) -> None:
    judge = mock(latency_s=0.2)
    async with bench(judge.url) as engine:
        first, second = engine.submit(["same"]), engine.submit(["same"])
        await asyncio.sleep(0.05)
        engine.engine.cancel(first)
        assert failed(engine.verdicts[first, 0]).reason == "cancelled"
        assert isinstance((await engine.result(second, 1))[0], Scored)
    assert judge.counts().received == 1 and judge.counts().gone == 0


async def test_a_call_that_nobody_waits_for_any_more_is_dropped_and_its_slot_freed(mock: Mock, bench: Any) -> None:
    judge = mock(latency_s=0.3, scores={"quick": "5"})
    async with bench(judge.url, concurrency="fixed:1") as engine:
        first = engine.submit(texts(3))
        await asyncio.sleep(0.1)
        engine.engine.cancel(first)
        assert isinstance((await engine.score(["quick"]))[0], Scored)
        assert engine.engine.stats().in_flight == 0
    assert judge.counts().received == 2 and judge.counts().gone == 1


async def test_a_call_that_is_cancelled_before_it_begins_gives_its_slot_back(mock: Mock, bench: Any) -> None:
    judge = mock()
    async with bench(judge.url, concurrency="fixed:2") as engine:
        for _ in range(5):
            engine.engine.cancel(engine.submit(texts(4)))
        assert reasons(await engine.score(["later"])) == {"scored"}
        assert engine.engine.stats().in_flight == 0


async def test_an_answered_request_comes_from_memory_and_in_a_new_engine_from_the_file(mock: Mock, bench: Any) -> None:
    judge = mock()
    async with bench(judge.url) as engine:
        first = await engine.score(texts(20))
        again = await engine.score(texts(20))
        assert engine.engine.stats().cache_hits_memory == 20
    async with bench(judge.url) as engine:
        later = await engine.score(texts(20))
        assert engine.engine.stats().cache_hits_disk == 20
    assert judge.counts().received == 20
    for verdicts in (again, later):
        assert [scored(v).value for v in verdicts] == [scored(v).value for v in first]
        assert all(scored(v).cached and v.attempts == 0 for v in verdicts)


async def test_an_expired_reply_is_asked_for_again(mock: Mock, bench: Any) -> None:
    judge = mock()
    async with bench(judge.url, cache_ttl_s=60.0) as engine:
        await engine.score(["one"])
        await engine.score(["one"])
    assert judge.counts().received == 1
    async with bench(judge.url, cache_ttl_s=0.2) as engine:
        await asyncio.sleep(0.3)
        await engine.score(["one"])
    assert judge.counts().received == 2


async def test_without_a_cache_the_pieces_of_a_batch_share_calls_and_nothing_is_kept(
    mock: Mock, bench: Any, tmp_path: Any
) -> None:
    judge = mock()
    async with bench(judge.url, cache=False) as engine:
        await engine.score(["same", "same", "other"])
        assert judge.counts().received == 2
        await engine.score(["same", "other"])
        assert judge.counts().received == 4
        for index in range(2):
            engine.engine.submit(7, [index], [JudgeRequest("same")])
            await engine.result(7, index + 1)
    assert judge.counts().received == 5
    assert not list(tmp_path.rglob("*.sqlite3"))


@pytest.mark.parametrize(
    "change", [{"rubric": "yes_no"}, {"temperature": 0.5}, {"sampling": {"top_p": 0.9}}, {"max_tokens": 9}]
)
async def test_another_question_is_another_call(mock: Mock, bench: Any, change: dict[str, Any]) -> None:
    judge = mock(scores={"same": "10", "yes": "10"})
    async with bench(judge.url) as engine:
        await engine.score(["same"])
    async with bench(judge.url, **change) as engine:
        await engine.score(["same"])
    assert judge.counts().received >= 2


async def test_a_better_parser_rereads_what_was_answered_without_a_call(mock: Mock, bench: Any) -> None:
    judge = mock(scores={"same": "first 3, on reflection 8"})
    strict = Rubric(name="r", system="Judge.", low=1, high=10)
    async with bench(judge.url, rubric=Rubric(name="r", system="Judge.", low=1, high=10, place="first")) as engine:
        assert scored((await engine.score(["same"]))[0]).value == 3.0
    async with bench(judge.url, rubric=Rubric(name="r", system="Judge.", low=1, high=10, place="last")) as engine:
        verdict = scored((await engine.score(["same"]))[0])
        assert verdict.value == 8.0 and verdict.cached and verdict.raw == "first 3, on reflection 8"
    assert judge.counts().received == 1
    async with bench(judge.url, rubric=strict, reasks=0) as engine:
        assert reasons(await engine.score(["same"])) == {"unparseable"}
    assert judge.counts().received == 2, "a stricter parser that cannot read the cached reply asks again"


# -- retries by class ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["error", "disconnect", "truncate", "garbage", "wrong_type"])
async def test_a_passing_fault_costs_a_retry_and_no_verdict(mock: Mock, bench: Any, fault: str) -> None:
    judge = mock(**{f"{fault}_share": 1.0}, faults_per_content=1)
    async with bench(judge.url) as engine:
        verdicts = await engine.score(texts(6))
    assert [(v.status, v.attempts) for v in verdicts] == [("scored", 2)] * 6
    assert judge.counts().received == 12 and judge.counts().faults == {fault: 6}


@pytest.mark.parametrize(
    "odd",
    [
        b'{"choices": []}', b'{"choices": null}', b"{}", b"[]", b"", b"null", b'{"error": {"message": "sorry"}}',
        b'{"choices": [{"message": {"content": 7}}]}', b'{"choices": [{"message": {"content": null}}]}',
        b'{"choices": [{"message": {"content": "half \\ud83d"}}]}', b'{"choices": [{}]}', b"\xff\xfe", b"[" * 1200,
    ],
)  # fmt: skip
async def test_a_completion_that_is_none_is_asked_for_again(
    scripted: Any, replying: Any, bench: Any, odd: bytes
) -> None:
    judge = scripted(lambda number, headers, body: (200, {}, odd if number == 1 else replying("7")))
    async with bench(judge.url) as engine:
        verdict = scored((await engine.score(["one"]))[0])
    assert verdict.value == 7.0 and verdict.attempts == len(judge.seen) == 2


async def test_a_hang_ends_with_the_attempts_time_and_is_tried_again(mock: Mock, bench: Any) -> None:
    judge = mock(hang_share=1.0, faults_per_content=1)
    async with bench(judge.url, attempt_timeout_s=0.2) as engine:
        verdicts = await engine.score(texts(4))
        assert engine.engine.stats().endpoints[0].faults == {"timeout": 4}
    assert reasons(verdicts) == {"scored"}
    assert judge.counts().gone == 4


async def test_a_mix_of_all_faults_ends_scored(mock: Mock, bench: Any) -> None:
    judge = mock(seed=3, error_share=0.1, disconnect_share=0.05, truncate_share=0.05, garbage_share=0.05,
                 wrong_type_share=0.05, hang_share=0.03, faults_per_content=3)  # fmt: skip
    async with bench(judge.url, attempt_timeout_s=3.0) as engine:
        verdicts = await engine.score(texts(120))
    assert reasons(verdicts) == {"scored"}
    assert all(count.answered == 1 for count in judge.counts().contents.values())


async def test_after_max_attempts_the_request_fails_with_the_last_detail(mock: Mock, bench: Any) -> None:
    judge = mock(error_share=1.0, error_status=503)
    async with bench(judge.url, max_attempts=3) as engine:
        verdict = failed((await engine.score(["one"]))[0])
    assert (verdict.reason, verdict.attempts) == ("unavailable", 3)
    assert "503" in verdict.detail and "The judge had an error" in verdict.detail
    assert judge.counts().received == 3


async def test_a_rejected_request_is_not_asked_again_and_the_others_go_on(mock: Mock, bench: Any) -> None:
    judge = mock(max_prompt_chars=5000)
    async with bench(judge.url) as engine:
        verdicts = await engine.score(["short", "x" * 9000])
    assert isinstance(verdicts[0], Scored)
    verdict = failed(verdicts[1])
    assert (verdict.reason, verdict.attempts) == ("rejected", 1) and "maximum context length" in verdict.detail
    assert judge.counts().most_received == 1


async def test_retry_after_is_waited_for_and_costs_no_attempt(mock: Mock, bench: Any) -> None:
    judge = mock(throttle_bursts=((0.0, 0.4),), retry_after_s=0.5)
    began = time.monotonic()
    async with bench(judge.url, max_attempts=1) as engine:
        verdicts = await engine.score(texts(3))
    assert [(v.status, v.attempts) for v in verdicts] == [("scored", 2)] * 3
    assert time.monotonic() - began >= 0.5
    assert judge.counts().rejected == 3


async def test_a_retry_after_beyond_the_deadline_fails_at_once_as_throttled(mock: Mock, bench: Any) -> None:
    judge = mock(throttle_bursts=((0.0, 60.0),), retry_after_s=60.0)
    began = time.monotonic()
    async with bench(judge.url, request_deadline_s=5.0) as engine:
        verdicts = await engine.score(texts(2))
    assert reasons(verdicts) == {"throttled"} and time.monotonic() - began < 20.0
    assert "429" in failed(verdicts[0]).detail and "next try in" in failed(verdicts[0]).detail


async def test_the_slot_is_free_during_back_off(mock: Mock, bench: Any) -> None:
    judge = mock(throttle_bursts=((0.0, 0.2),), retry_after_s=2.0)
    async with bench(judge.url, concurrency="fixed:1") as engine:
        first = engine.submit(["waits"])
        await asyncio.sleep(0.3)
        assert reasons(await engine.score(["goes by"])) == {"scored"}
        assert (first, 0) not in engine.verdicts
        assert reasons(await engine.result(first, 1)) == {"scored"}


async def test_an_unparseable_reply_is_asked_again_once_and_never_cached(mock: Mock, bench: Any) -> None:
    judge = mock(unparseable_share=1.0, keep_requests=10)
    async with bench(judge.url) as engine:
        verdict = failed((await engine.score(["one"]))[0])
        assert (verdict.reason, verdict.attempts) == ("unparseable", 2)
        assert verdict.usage.prompt_tokens > 200, "both asks are paid for"
        assert judge.counts().received == 2
        await engine.score(["one"])
        assert judge.counts().received == 4
    first, second = (request.json()["messages"][-1]["content"] for request in judge.requests()[:2])
    assert first != second, "the second ask reminds the judge of the form"
    async with bench(judge.url) as engine:
        await engine.score(["one"])
    assert judge.counts().received == 6


@pytest.mark.parametrize("reasks", [0, 3])
async def test_reasks_are_as_many_as_configured(mock: Mock, bench: Any, reasks: int) -> None:
    judge = mock(unparseable_share=1.0)
    async with bench(judge.url, reasks=reasks) as engine:
        await engine.score(["one"])
    assert judge.counts().received == 1 + reasks


async def test_a_reply_that_was_cut_off_is_not_read_as_a_score(scripted: Any, replying: Any, bench: Any) -> None:
    judge = scripted(lambda number, headers, body: (200, {}, replying("1", "length")))
    async with bench(judge.url) as engine:
        verdict = failed((await engine.score(["one"]))[0])
    assert verdict.reason == "unparseable" and "cut off" in verdict.detail and len(judge.seen) == 2


async def test_a_reply_without_usage_is_scored(scripted: Any, replying: Any, bench: Any) -> None:
    judge = scripted(lambda number, headers, body: (200, {}, replying("7", usage=None)))
    async with bench(judge.url) as engine:
        assert scored((await engine.score(["one"]))[0]).value == 7.0


async def test_a_compressed_reply_is_read_and_one_that_swells_is_refused(
    scripted: Any, replying: Any, bench: Any
) -> None:
    packed = [gzip.compress(replying("7")), gzip.compress(b" " * (64 << 20))]
    judge = scripted(lambda number, headers, body: (200, {"Content-Encoding": "gzip"}, packed[b"bomb" in body]))
    async with bench(judge.url, max_attempts=1) as engine:
        fair, bomb = await engine.score(["fair", "bomb"])
    assert scored(fair).value == 7.0
    assert failed(bomb).reason == "unavailable" and "more than" in failed(bomb).detail


# -- endpoints that refuse us ----------------------------------------------------------------------------------------


async def test_a_wrong_key_stops_everything_at_once_and_says_which(
    mock: Mock, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = mock(api_key="right", latency_s=0.02)
    monkeypatch.setenv("SOME_KEY", "wrong-one")
    async with bench(judge.url, api_key_env="SOME_KEY") as engine:
        verdicts = await engine.score(texts(1000))
        assert reasons(verdicts) == {"auth"}
        assert judge.counts().received <= 64
        assert all("environment variable SOME_KEY" in failed(v).detail for v in verdicts)
        assert not any("wrong-one" in failed(v).detail for v in verdicts)
        judge.reset(JudgeProfile(api_key="wrong-one"))
        assert reasons(await engine.score(texts(20))) == {"scored"}, "a new batch finds out that the key is taken now"


async def test_a_new_batch_after_a_refusal_sends_one_probe(mock: Mock, bench: Any) -> None:
    judge = mock(api_key="right")
    async with bench(judge.url) as engine:
        verdict = failed((await engine.score(texts(5)))[0])
        assert "no key was sent: set OPENAI_API_KEY" in verdict.detail
        before = judge.counts().received
        await engine.score(texts(200))
    assert judge.counts().received == before + 1


@pytest.mark.parametrize(
    ("profile", "reason", "detail"),
    [
        ({"model": "other"}, "not_found", "`m` does not exist"),
        ({"insufficient_quota": True}, "quota", "exceeded your current quota"),  # although it is a 429
    ],
)
async def test_an_unknown_model_or_an_empty_account_stops_everything_at_once(
    mock: Mock, bench: Any, profile: dict[str, Any], reason: str, detail: str
) -> None:
    judge = mock(**profile)
    async with bench(judge.url) as engine:
        verdicts = await engine.score(texts(300))
    assert reasons(verdicts) == {reason} and detail in failed(verdicts[0]).detail
    assert judge.counts().received <= 64


SEVEN = b'{"choices": [{"message": {"content": "7"}}]}'


async def test_a_403_is_about_the_key_until_the_judge_has_answered_once(scripted: Any, bench: Any) -> None:
    refuses = scripted(lambda number, headers, body: (403, {}, b'{"error": {"message": "no access"}}'))
    async with bench(refuses.url, api_key="k" * 20) as engine:
        verdicts = await engine.score(texts(300))
    assert reasons(verdicts) == {"auth"} and len(refuses.seen) <= 64
    moderates = scripted(lambda number, headers, body: (403, {}, b"no") if b"text 7 " in body else (200, {}, SEVEN))
    async with bench(moderates.url, concurrency="fixed:1") as engine:
        verdicts = await engine.score([f"text {n} " for n in range(20)])
    assert [failed(v).reason for v in verdicts if not isinstance(v, Scored)] == ["rejected"]


async def test_a_redirect_is_not_followed(mock: Mock, scripted: Any, bench: Any) -> None:
    elsewhere = mock()
    judge = scripted(lambda number, headers, body: (307, {"Location": elsewhere.url}, b"moved"))
    async with bench(judge.url, api_key="k") as engine:
        verdict = failed((await engine.score(["one"]))[0])
    assert verdict.reason == "not_found" and elsewhere.url in verdict.detail and "not followed" in verdict.detail
    assert elsewhere.counts().received == 0


async def test_the_key_goes_into_the_header_that_the_endpoint_names(mock: Mock, bench: Any) -> None:
    judge = mock(keep_requests=4)
    azure = Endpoint(url=judge.url, api_key="k-1", api_key_header="api-key")
    async with bench(azure) as engine:
        await engine.score(["one"])
    headers = judge.requests()[0].headers
    assert headers["api-key"] == "k-1" and "authorization" not in headers


# -- several endpoints -----------------------------------------------------------------------------------------------


async def test_requests_move_from_a_dead_endpoint_to_the_living(mock: Mock, bench: Any) -> None:
    judge = mock()
    dead = f"http://127.0.0.1:{free_port()}/v1"
    async with bench([Endpoint(url=dead), Endpoint(url=judge.url)]) as engine:
        verdicts = await engine.score(texts(60))
        assert engine.engine.stats().endpoints[0].breaker != "closed"
    assert reasons(verdicts) == {"scored"} and judge.counts().received == 60


async def test_requests_move_from_an_endpoint_that_refuses_us_until_all_do(mock: Mock, bench: Any) -> None:
    refusing, judge = mock(api_key="right"), mock()
    async with bench([Endpoint(url=refusing.url, weight=5), Endpoint(url=judge.url)]) as engine:
        assert reasons(await engine.score(texts(200))) == {"scored"}
        assert judge.counts().received == 200 and refusing.counts().received <= 64
        judge.reset(JudgeProfile(model="other"))
        assert reasons(await engine.score(texts(100, "later"))) <= {"auth", "not_found"}


async def test_weights_are_respected(mock: Mock, bench: Any) -> None:
    """While both have room. An endpoint at its limit leaves the rest to the other."""
    heavy, light = mock(latency_s=0.1), mock(latency_s=0.1)
    both = [Endpoint(url=heavy.url, weight=3), Endpoint(url=light.url, weight=1)]
    async with bench(both, concurrency="fixed:100") as engine:
        for step in range(4):
            await engine.score(texts(40, f"step {step}"))
    assert (heavy.counts().received, light.counts().received) == (120, 40)


async def test_a_standby_is_asked_only_when_needed(mock: Mock, bench: Any) -> None:
    main, standby = mock(), mock()
    both = [Endpoint(url=main.url), Endpoint(url=standby.url, weight=0)]
    async with bench(both) as engine:
        await engine.score(texts(50))
        assert standby.counts().received == 0
        main.reset(JudgeProfile(api_key="right"))
        assert reasons(await engine.score(texts(50, "later"))) == {"scored"}
    assert standby.counts().received == 50


async def test_an_endpoints_own_model_name_is_sent_there(mock: Mock, bench: Any) -> None:
    judge = mock(model="its-name")
    async with bench(Endpoint(url=judge.url, model="its-name")) as engine:
        assert reasons(await engine.score(["one"])) == {"scored"}


# -- outages and deadlines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["refuse", "503"])
async def test_an_outage_meets_few_calls_and_costs_no_verdict(mock: Mock, bench: Any, kind: str) -> None:
    judge = mock(latency_s=0.05, outages=((0.1, 1.2),), outage_kind=kind)
    async with bench(judge.url, concurrency="fixed:20") as engine:
        verdicts = await engine.score(texts(100))
        assert engine.engine.stats().endpoints[0].breaker == "closed"
    assert reasons(verdicts) == {"scored"}
    counts = judge.counts()
    wasted = counts.received + counts.connections_refused - counts.answered
    in_flight = 20
    assert wasted <= 2 * in_flight + Breaker.CONSECUTIVE + 10, "those in flight, twice; the breaker's; a few probes"


@pytest.mark.parametrize("hangs", [False, True], ids=["dead", "hangs"])
async def test_an_endpoint_that_never_answers_fails_everything_within_the_requests_deadline(
    mock: Mock, bench: Any, hangs: bool
) -> None:
    url = mock(hang_share=1.0).url if hangs else f"http://127.0.0.1:{free_port()}/v1"
    began = time.monotonic()
    async with bench(url, request_deadline_s=1.5, attempt_timeout_s=0.3) as engine:
        verdicts = await engine.score(texts(300))
    assert time.monotonic() - began < 0.3 + 1.5 + 2 * SLACK_S
    assert reasons(verdicts) <= {"unavailable", "deadline"}
    if not hangs:
        assert all("Connect" in failed(v).detail or "no endpoint answered" in failed(v).detail for v in verdicts)


async def test_a_host_without_a_name_is_unavailable(bench: Any) -> None:
    async with bench("http://no-such-host.invalid/v1", max_attempts=2) as engine:
        verdict = failed((await engine.score(["one"]))[0])
    assert verdict.reason == "unavailable" and "no-such-host.invalid" in verdict.detail


async def test_a_requests_deadline_is_kept(mock: Mock, bench: Any) -> None:
    judge = mock(hang_share=1.0)
    began = time.monotonic()
    async with bench(judge.url, request_deadline_s=0.5) as engine:
        verdict = failed((await engine.score(["one"]))[0])
        assert 0.45 < time.monotonic() - began < 0.5 + SLACK_S
    assert verdict.reason == "deadline" and verdict.attempts == 1 and "request_deadline_s" in verdict.detail


async def test_a_batchs_deadline_is_kept_and_leaves_what_was_scored(mock: Mock, bench: Any) -> None:
    judge = mock(scores={"quick": "5"}, latency_s=0.2)
    async with bench(judge.url, concurrency="fixed:1") as engine:
        began = time.monotonic()
        verdicts = await engine.score(["quick", *texts(9)], deadline_at=began + 0.5)
        assert 0.45 < time.monotonic() - began < 0.5 + SLACK_S
        assert reasons(verdicts) == {"scored", "deadline"} and isinstance(verdicts[0], Scored)
        assert failed(verdicts[-1]).attempts == 0 and "not sent yet" in failed(verdicts[-1]).detail
        assert reasons(await engine.score(["another"])) == {"scored"}, "the slot is free again"


async def test_a_batch_of_one_text_many_times_is_cancelled_quickly(mock: Mock, bench: Any) -> None:
    judge = mock(hang_share=1.0)
    async with bench(judge.url) as engine:
        batch = engine.submit(["same"] * 40_000)
        await asyncio.sleep(0.05)
        began = time.monotonic()
        engine.engine.cancel(batch)
        assert time.monotonic() - began < 8.0, "looking at all waiters for each one takes half a minute"
        assert len(engine.verdicts) == 40_000


# -- money and pace --------------------------------------------------------------------------------------------------


async def test_the_ceiling_stops_new_calls_and_is_not_passed(mock: Mock, bench: Any) -> None:
    judge = mock()
    prices = {"m": {"input": 1000.0, "output": 1000.0}}
    async with bench(judge.url, prices=prices, max_cost=5.0, concurrency="fixed:4", max_tokens=4) as engine:
        verdicts = await engine.score(texts(200))
        spent = engine.engine.spent
        assert reasons(verdicts) == {"scored", "budget"}
        assert 4.0 < spent <= 5.0 * 1.02
        assert "max_cost = 5" in failed(next(v for v in verdicts if isinstance(v, Failed))).detail
        before = judge.counts().received
        again = await engine.score(texts(200, "more"))
        assert reasons(again) == {"budget"} and judge.counts().received == before
        assert reasons(await engine.score([texts(200)[0]])) == {"scored"}, "what was answered costs nothing"


async def test_requests_per_minute_are_kept(mock: Mock, bench: Any) -> None:
    judge = mock()
    async with bench(judge.url, requests_per_minute=600.0) as engine:
        batch = engine.submit(texts(100))
        await asyncio.sleep(1.5)
        received = judge.counts().received
        engine.engine.cancel(batch)
    assert 5 <= received <= 10 + 15 + 3, "a second's burst and 10 a second"


async def test_a_judge_with_a_rate_limit_is_not_stormed(mock: Mock, bench: Any) -> None:
    judge = mock(requests_per_minute=3000.0, rate_window_s=0.5, latency_s=0.05)
    async with bench(judge.url) as engine:
        verdicts = await engine.score(texts(120))
    assert reasons(verdicts) == {"scored"}
    assert judge.counts().rejected < 120, "25 in half a second: all at once, again and again, would be 230 refusals"


# -- life ------------------------------------------------------------------------------------------------------------


async def test_closing_answers_what_is_open_and_leaves_no_task(mock: Mock, bench: Any) -> None:
    judge = mock(hang_share=1.0)
    before = asyncio.all_tasks()
    async with bench(judge.url, concurrency="fixed:4") as engine:
        batch = engine.submit(texts(10))
        await asyncio.sleep(0.1)
    assert reasons(await engine.result(batch, 10)) == {"cancelled"}
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("seed", range(3))
async def test_any_mixture_of_batches_faults_cancels_and_deadlines_leaves_the_books_empty(
    mock: Mock, bench: Any, seed: int
) -> None:
    """`Bench` refuses a second verdict; here none may be missing, and nothing may be left behind."""
    dice = random.Random(seed)
    judges = [
        mock(seed=seed, latency="lognormal", latency_s=0.02, error_share=0.1, disconnect_share=0.05, hang_share=0.05,
             unparseable_share=0.05, reject_above=12, retry_after_s=0.05, faults_per_content=2),
        mock(seed=seed + 1, latency_s=0.01, truncate_share=0.1, garbage_share=0.1, outages=((0.3, 0.4),)),
    ]  # fmt: skip
    endpoints = [Endpoint(url=judge.url) for judge in judges]
    prices = {"m": {"input": 1.0, "output": 1.0}}
    async with bench(
        endpoints, attempt_timeout_s=0.2, request_deadline_s=3.0, prices=prices, cache=seed != 1
    ) as engine:
        batches: list[tuple[int, int]] = []
        for _ in range(25):
            count = dice.randrange(1, 25)
            deadline = time.monotonic() + dice.uniform(0.0, 0.5) if dice.random() < 0.3 else None
            batch = engine.submit([f"answer {dice.randrange(120)}" for _ in range(count)], deadline)
            batches.append((batch, count))
            if dice.random() < 0.5:
                await asyncio.sleep(dice.uniform(0.0, 0.05))
            if dice.random() < 0.3:
                engine.engine.cancel(dice.choice(batches)[0])
        for batch, count in batches:
            verdicts = await engine.result(batch, count)
            assert reasons(verdicts) <= {"scored", "cancelled", "deadline", "unparseable", "unavailable"}
        await asyncio.sleep(0.05)
        core, stats = engine.engine, engine.engine.stats()
        assert not (core._inflight or core._batches or core._started or core._calls_out), "a request was forgotten"
        assert stats.in_flight == 0 and sum(one.reserved_cost for one in core._endpoints) == pytest.approx(
            0.0, abs=1e-9
        )
        assert stats.submitted == stats.scored + sum(stats.failed.values()) == len(engine.verdicts)


async def test_stats_add_up(mock: Mock, bench: Any) -> None:
    judge = mock(error_share=1.0, faults_per_content=1)
    async with bench(judge.url, prices={"m": {"input": 1.0, "output": 1.0}}) as engine:
        await engine.score([*texts(8), texts(8)[0], JudgeRequest("x", skip="s")])
        await engine.score(texts(2))
        stats = engine.engine.stats()
    assert (stats.submitted, stats.scored, stats.skipped, stats.failed) == (12, 11, 1, {})
    assert (stats.sent, stats.retries, stats.cache_hits_memory, stats.shared) == (16, 8, 2, 1)
    (endpoint,) = stats.endpoints
    assert endpoint.answered == 8 and endpoint.faults == {"overloaded": 8} and endpoint.in_flight == 0
    assert endpoint.cost == pytest.approx((endpoint.prompt_tokens + endpoint.completion_tokens) / 1e6)
    assert stats.queued == 0 and 1 <= stats.max_in_flight <= 32 and endpoint.latency_p50_s > 0


async def test_a_bug_of_ours_ends_one_request_and_not_the_others(
    mock: Mock, bench: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judge = mock()
    async with bench(judge.url) as engine:
        plain = BodyWriter.write

        def broken(self: BodyWriter, request: JudgeRequest, *, reask: bool) -> bytes:
            if "poison" in request.response:
                raise RuntimeError("a bug")
            return plain(self, request, reask=reask)

        monkeypatch.setattr(BodyWriter, "write", broken)
        verdicts = await engine.score(["fine", "poison", "well"])
        assert engine.engine.stats().in_flight == 0
    assert [v.status for v in verdicts] == ["scored", "failed", "scored"]
    assert failed(verdicts[1]).reason == "engine" and "a bug" in failed(verdicts[1]).detail
    assert "broke" in caplog.text
