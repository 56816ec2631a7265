"""The engine over real HTTP: each failure class, deadlines, the breaker, several endpoints, and never twice."""

from __future__ import annotations

import asyncio
import errno
import gzip
import itertools
import random
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme

from freewheel.judge import Endpoint, Failed, JudgeRequest, Rubric, Scored
from freewheel.judge.client import MAX_REPLY_BYTES, proxy_for
from freewheel.judge.endpoint import Breaker
from freewheel.judge.request import BodyWriter
from freewheel.judge.testing import JudgeProfile, RunningJudge

from .helpers import SLACK_S, failed, reasons, scored, texts, until

Mock = Callable[..., RunningJudge]
SEVEN = b'{"choices": [{"message": {"content": "7"}}], "usage": {"prompt_tokens": 10, "completion_tokens": 4000}}'


def dead_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


# -- verdicts --------------------------------------------------------------------------------------------------------


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


# -- never twice -----------------------------------------------------------------------------------------------------


async def test_identical_requests_share_one_call_which_ends_when_the_last_one_is_cancelled(
    mock: Mock, bench: Any
) -> None:
    judge = mock(latency_s=0.3)
    async with bench(judge.url) as engine:
        first = engine.submit(["same"] * 50 + texts(5))
        await until(lambda: judge.counts().in_flight == 6)
        second = engine.submit(["same", *texts(4)])
        engine.engine.cancel(first)
        assert reasons(await engine.result(first, 55)) == {"cancelled"}
        assert reasons(await engine.result(second, 5)) == {"scored"}
        stats = engine.engine.stats()
    assert stats.shared == 49 + 5 and stats.in_flight == 0
    assert judge.counts().received == 6 and judge.counts().most_received == 1 and judge.counts().gone == 1


async def test_an_answered_request_is_cached_in_memory_and_in_the_file_until_it_expires(mock: Mock, bench: Any) -> None:
    judge = mock()
    async with bench(judge.url) as engine:
        first = await engine.score(texts(20))
        assert all(not v.cached and v.attempts == 1 and v.usage.prompt_tokens > 0 for v in first)
        again = await engine.score(texts(20))
        assert engine.engine.stats().cache_hits_memory == 20
    async with bench(judge.url, cache_ttl_s=60.0) as engine:
        later = await engine.score(texts(20))
        assert engine.engine.stats().cache_hits_disk == 20
    assert judge.counts().received == 20
    for verdicts in (again, later):
        assert [scored(v).value for v in verdicts] == [scored(v).value for v in first]
        assert all(scored(v).cached and v.attempts == 0 for v in verdicts)
    async with bench(judge.url, cache_ttl_s=0.001) as engine:
        await engine.score(texts(20))
    assert judge.counts().received == 40


async def test_without_a_cache_the_pieces_of_a_batch_share_calls_and_nothing_is_kept(
    mock: Mock, bench: Any, tmp_path: Path
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


async def test_another_parser_rereads_the_cached_reply_and_asks_again_if_it_cannot(mock: Mock, bench: Any) -> None:
    judge = mock(scores={"same": "first 3, on reflection 8"})
    for place, value, received in (("first", 3.0, 1), ("last", 8.0, 1), ("only", None, 2)):
        rubric = Rubric(name="r", system="Judge.", low=1, high=10, place=place)
        async with bench(judge.url, rubric=rubric, reasks=0) as engine:
            [verdict] = await engine.score(["same"])
        assert (verdict.value if isinstance(verdict, Scored) else None) == value
        assert judge.counts().received == received


# -- retries by class ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["error", "disconnect", "truncate", "garbage", "wrong_type", "hang"])
async def test_a_passing_fault_costs_a_retry_and_no_verdict(mock: Mock, bench: Any, fault: str) -> None:
    judge = mock(**{f"{fault}_share": 1.0}, faults_per_content=1)
    async with bench(judge.url, attempt_timeout_s=0.5 if fault == "hang" else 60.0) as engine:
        verdicts = await engine.score(texts(6))
    assert [(v.status, v.attempts) for v in verdicts] == [("scored", 2)] * 6
    assert judge.counts().received == 12 and judge.counts().faults == {fault: 6}


@pytest.mark.parametrize(
    ("profile", "settings", "expected", "received", "detail"),
    [
        ({"error_share": 1.0, "error_status": 503}, {"max_attempts": 3}, ("unavailable", 3), 3, "503"),
        ({"max_prompt_chars": 1}, {}, ("rejected", 1), 1, "maximum context length"),
        ({"throttle_bursts": ((0.0, 60.0),), "retry_after_s": 60.0}, {"request_deadline_s": 5.0},
         ("throttled", 1), 1, "next try in"),
        ({"unparseable_share": 1.0}, {}, ("unparseable", 2), 2, ""),
        ({"unparseable_share": 1.0}, {"reasks": 3}, ("unparseable", 4), 4, ""),
        ({"hang_share": 1.0}, {"request_deadline_s": 0.5}, ("deadline", 1), 1, "request_deadline_s"),
    ],
)  # fmt: skip
async def test_a_request_fails_after_the_attempts_of_its_class_with_the_last_detail_and_is_not_cached(
    mock: Mock, bench: Any, profile: Any, settings: Any, expected: tuple[str, int], received: int, detail: str
) -> None:
    judge = mock(**profile)
    for times in (1, 2):
        began = time.monotonic()
        async with bench(judge.url, **settings) as engine:
            verdict = failed((await engine.score(["one"]))[0])
        assert (verdict.reason, verdict.attempts) == expected and detail in verdict.detail
        assert judge.counts().received == times * received and time.monotonic() - began < 0.5 + SLACK_S
    if expected[0] == "unparseable":
        assert verdict.usage.prompt_tokens > 100 * received, "all asks are paid for"


async def test_a_second_ask_reminds_the_judge_of_the_form(mock: Mock, bench: Any) -> None:
    judge = mock(unparseable_share=1.0, keep_requests=2)
    async with bench(judge.url) as engine:
        await engine.score(["one"])
    first, second = (request.json()["messages"][-1]["content"] for request in judge.requests())
    assert first != second


async def test_retry_after_is_waited_for_without_a_slot_and_costs_no_attempt(mock: Mock, bench: Any) -> None:
    judge = mock(throttle_bursts=((0.0, 0.2),), retry_after_s=2.0)
    began = time.monotonic()
    async with bench(judge.url, concurrency="fixed:1", max_attempts=1) as engine:
        first = engine.submit(["waits"])
        await until(lambda: judge.counts().rejected == 1)
        await asyncio.sleep(0.25)  # the burst is over
        assert reasons(await engine.score(["passes"])) == {"scored"}
        assert (first, 0) not in engine.verdicts
        (verdict,) = await engine.result(first, 1)
    assert (verdict.status, verdict.attempts) == ("scored", 2) and time.monotonic() - began >= 2.0


async def test_cut_off_compressed_and_oversized_replies_are_recognized(
    scripted: Any, replying: Any, bench: Any
) -> None:
    replies = {
        b"cut": ({}, replying("1", "length")),
        b"free": ({}, replying("7", usage=None)),
        b"packed": ({"Content-Encoding": "gzip"}, gzip.compress(replying("7"))),
        b"bomb": ({"Content-Encoding": "gzip"}, gzip.compress(b" " * (MAX_REPLY_BYTES * 4))),
    }
    judge = scripted(
        lambda number, headers, body: (200, *next(reply for mark, reply in replies.items() if mark in body))
    )
    async with bench(judge.url, max_attempts=1) as engine:
        cut, free, packed, bomb = await engine.score([mark.decode() for mark in replies])
    assert failed(cut).reason == "unparseable" and "cut off" in cut.detail
    assert scored(free).value == scored(packed).value == 7.0
    assert failed(bomb).reason == "unavailable" and "more than" in bomb.detail


async def test_a_connection_that_the_server_had_closed_costs_no_attempt(bench: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request per connection, and drops the connection when the second one comes."""
        for turn in itertools.count():
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            if turn:
                break
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(SEVEN), SEVEN))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with bench(url, max_attempts=1, concurrency="fixed:8") as engine:
        for step in range(3):
            assert reasons(await engine.score(texts(8, f"step {step}"))) == {"scored"}
        faults = engine.engine.stats().endpoints[0].faults
    server.close()
    assert set(faults) == {"stale"} and faults["stale"] >= 8


async def test_running_out_of_open_files_is_reported_and_not_taken_for_an_outage(
    mock: Mock, bench: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judge = mock(latency_s=0.05)

    def open_socket(*address: Any) -> socket.socket:
        if judge.counts().open_connections >= 10:
            raise OSError(errno.EMFILE, "Too many open files")
        return socket.socket(*address)

    monkeypatch.setattr("freewheel.judge.client.socket", SimpleNamespace(**{**vars(socket), "socket": open_socket}))
    async with bench(judge.url) as engine:
        assert reasons(await engine.score(texts(100))) == {"scored"}
        assert engine.engine.stats().endpoints[0].faults == {}
    assert caplog.text.count("ulimit -n") == 1 and "does not answer" not in caplog.text


# -- refusals that stop an endpoint ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "settings", "reason", "detail"),
    [
        ({"api_key": "right"}, {"api_key": "wrong-key-of-some-length"}, "auth", "sent with the key from the api_key"),
        ({"api_key": "right"}, {}, "auth", "no key was sent: set OPENAI_API_KEY"),
        ({"model": "other"}, {}, "not_found", "`m` does not exist"),
        ({"insufficient_quota": True}, {}, "quota", "exceeded your current quota"),  # although it is a 429
    ],
)
async def test_a_refusal_stops_everything_until_a_probe_of_a_new_batch_is_accepted(
    mock: Mock, bench: Any, profile: dict[str, Any], settings: dict[str, Any], reason: str, detail: str
) -> None:
    judge = mock(**profile)
    async with bench(judge.url, **settings) as engine:
        verdicts = await engine.score(texts(300))
        assert reasons(verdicts) == {reason} and detail in failed(verdicts[0]).detail
        assert judge.counts().received <= 64
        before = judge.counts().received
        assert reasons(await engine.score(texts(200, "second"))) == {reason}
        assert judge.counts().received == before + 1, "one probe"
        judge.reset(JudgeProfile())
        assert reasons(await engine.score(texts(20, "third"))) == {"scored"}


async def test_a_403_is_about_the_key_until_the_judge_has_answered_once(scripted: Any, bench: Any) -> None:
    refuses = scripted(lambda number, headers, body: (403, {}, b'{"error": {"message": "no access"}}'))
    async with bench(refuses.url, api_key="k" * 20) as engine:
        assert reasons(await engine.score(texts(300))) == {"auth"} and len(refuses.seen) <= 64
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


# -- where requests go -----------------------------------------------------------------------------------------------


async def test_an_endpoint_gets_its_own_model_name_and_key_header(mock: Mock, bench: Any) -> None:
    judge = mock(model="its-name", keep_requests=1)
    endpoint = Endpoint(url=judge.url, model="its-name", api_key="k-1", api_key_header="api-key")
    async with bench(endpoint) as engine:
        assert reasons(await engine.score(["one"])) == {"scored"}
    headers = judge.requests()[0].headers
    assert headers["api-key"] == "k-1" and "authorization" not in headers


async def test_requests_move_from_an_endpoint_that_is_dead_throttled_or_refuses_us_until_all_do(
    mock: Mock, scripted: Any, bench: Any
) -> None:
    judge, refusing = mock(), mock(api_key="right")
    busy = scripted(lambda number, headers, body: (429, {"Retry-After": "3600"}, b"later"))
    for step, url in enumerate((dead_url(), busy.url, refusing.url)):
        began = time.monotonic()
        async with bench([Endpoint(url=url, weight=5), Endpoint(url=judge.url)]) as engine:
            assert reasons(await engine.score(texts(100, f"step {step}"))) == {"scored"}
            if step == 0:
                assert engine.engine.stats().endpoints[0].breaker != "closed"
            if step == 2:
                judge.reset(JudgeProfile(model="other"))
                assert reasons(await engine.score(texts(100, "later"))) <= {"auth", "not_found"}
        assert time.monotonic() - began < 10, "Retry-After concerns one endpoint only"
    assert refusing.counts().received <= 64


def test_a_proxy_is_taken_from_the_environment_but_not_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "inside.example.org")
    assert proxy_for("https://api.example.org/v1") == "http://proxy:3128"
    assert proxy_for("http://api.example.org/v1") is None
    assert proxy_for("https://inside.example.org/v1") is None
    assert proxy_for("https://127.0.0.1:8000/v1") is None
    monkeypatch.setenv("ALL_PROXY", "http://any:3128")
    assert proxy_for("http://api.example.org/v1") == "http://any:3128"


async def test_a_judge_behind_a_proxy_is_reached_through_it(
    scripted: Any, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = scripted(lambda number, headers, body: (200, {}, SEVEN))
    monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1/chat/completions"))
    async with bench("http://judge.invalid/v1") as engine:
        assert reasons(await engine.score(["one"])) == {"scored"}
    assert proxy.seen[0][0]["Host"] == "judge.invalid"


async def test_a_certificate_is_checked_against_the_configured_bundle(
    scripted: Any, bench: Any, tmp_path: Path
) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(bundle)
    judge = scripted(lambda number, headers, body: (200, {}, SEVEN))
    judge.use_tls(context)
    async with bench(judge.url, ca_file=str(bundle)) as engine:
        assert reasons(await engine.score(["one"])) == {"scored"}
    async with bench(judge.url, max_attempts=1, cache=False) as engine:
        (verdict,) = await engine.score(["one"])
    assert "certificate" in failed(verdict).detail.lower() and len(judge.seen) == 1


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


async def test_probes_that_fail_cost_their_request_no_attempt(mock: Mock, bench: Any) -> None:
    judge = mock(outages=((0.0, 1.2),), outage_kind="503")  # two probes of one request
    async with bench(judge.url, concurrency=f"fixed:{Breaker.CONSECUTIVE}", max_attempts=3) as engine:
        verdicts = await engine.score(texts(Breaker.CONSECUTIVE))
    assert reasons(verdicts) == {"scored"}


@pytest.mark.parametrize("kind", ["dead", "hangs", "nameless"])
async def test_an_endpoint_that_never_answers_fails_everything_within_the_requests_deadline(
    mock: Mock, bench: Any, kind: str
) -> None:
    hanging = mock(hang_share=1.0).url
    url = {"dead": dead_url(), "hangs": hanging, "nameless": "http://no-such-host.invalid/v1"}[kind]
    began = time.monotonic()
    async with bench(url, request_deadline_s=1.5, attempt_timeout_s=0.3) as engine:
        verdicts = await engine.score(texts(300))
    assert time.monotonic() - began < 0.3 + 1.5 + 2 * SLACK_S
    assert reasons(verdicts) <= {"unavailable", "deadline"}
    if kind != "hangs":
        assert all("Connect" in failed(v).detail or "no endpoint answered" in failed(v).detail for v in verdicts)


async def test_after_any_outage_the_judge_scores_the_next_batch(mock: Mock, bench: Any) -> None:
    judge = mock(latency_s=0.01, outages=((0.0, 1000.0),))
    async with bench(judge.url, request_deadline_s=3.0) as engine:  # which a good batch needs on a busy machine
        assert "scored" not in reasons(await engine.score(texts(40, "lost")))
        judge.reset(JudgeProfile(latency_s=0.01))
        assert reasons(await engine.score(texts(100, "next"))) == {"scored"}


async def test_a_batchs_deadline_is_kept_and_earlier_scores_stay(mock: Mock, bench: Any) -> None:
    judge = mock(scores={"quick": "5"}, latency_s=0.2)
    async with bench(judge.url, concurrency="fixed:1") as engine:
        began = time.monotonic()
        verdicts = await engine.score(["quick", *texts(9)], deadline_at=began + 0.5)
        assert 0.45 < time.monotonic() - began < 0.5 + SLACK_S
        assert reasons(verdicts) == {"scored", "deadline"} and isinstance(verdicts[0], Scored)
        assert failed(verdicts[-1]).attempts == 0 and "not sent yet" in failed(verdicts[-1]).detail
        assert reasons(await engine.score(["another"])) == {"scored"}, "the slot is free again"


async def test_a_request_that_joins_a_running_call_late_gets_a_whole_deadline(mock: Mock, bench: Any) -> None:
    judge = mock(latency_s=2.4)
    async with bench(judge.url, request_deadline_s=2.0) as engine:
        first = engine.submit(["same"])
        await asyncio.sleep(1.0)
        second = engine.submit(["same"])
        assert reasons(await engine.result(first, 1)) == {"deadline"}
        assert reasons(await engine.result(second, 1)) == {"scored"}
    assert judge.counts().received == 1


async def test_a_batch_of_one_text_many_times_is_cancelled_quickly(mock: Mock, bench: Any) -> None:
    async with bench(mock(hang_share=1.0).url) as engine:
        batch = engine.submit(["same"] * 40_000)
        began = time.monotonic()
        engine.engine.cancel(batch)
        assert time.monotonic() - began < 8.0, "looking at all waiters for each one takes half a minute"
        assert len(engine.verdicts) == 40_000


# -- money and pace --------------------------------------------------------------------------------------------------


async def test_max_cost_stops_new_calls_and_is_not_exceeded(mock: Mock, bench: Any) -> None:
    judge = mock()
    prices = {"m": {"input": 1000.0, "output": 1000.0}}
    async with bench(judge.url, prices=prices, max_cost=5.0, concurrency="fixed:4", max_tokens=4) as engine:
        verdicts = await engine.score(texts(200))
        assert reasons(verdicts) == {"scored", "budget"} and 4.0 < engine.engine.spent <= 5.0 * 1.02
        assert "max_cost = 5" in failed(next(v for v in verdicts if isinstance(v, Failed))).detail
        before = judge.counts().received
        assert reasons(await engine.score(texts(200, "more"))) == {"budget"} and judge.counts().received == before
        assert reasons(await engine.score([texts(200)[0]])) == {"scored"}, "a cached reply costs nothing"


@pytest.mark.parametrize(
    ("reply", "settings", "expected"),
    [(SEVEN, {}, {"scored", "budget"}), (b"<html>", {"max_tokens": 4000}, {"budget"})],
    ids=["unbounded replies", "unusable replies"],
)
async def test_max_cost_holds_where_replies_are_unbounded_or_unusable(
    scripted: Any, bench: Any, reply: bytes, settings: dict[str, Any], expected: set[str]
) -> None:
    judge = scripted(lambda number, headers, body: (200, {}, reply))
    prices = {"m": {"input": 0.0, "output": 10.0}}  # a reply of 4,000 tokens costs 0.04
    async with bench(judge.url, prices=prices, max_cost=0.1, **settings) as engine:
        assert reasons(await engine.score(texts(50))) == expected
        assert engine.engine.spent <= 0.1 and len(judge.seen) == 2


async def test_a_judges_rate_limit_is_learned_without_a_storm(mock: Mock, bench: Any) -> None:
    judge = mock(requests_per_minute=3000.0, rate_window_s=0.5, latency_s=0.05)
    async with bench(judge.url) as engine:
        assert reasons(await engine.score(texts(120))) == {"scored"}
    assert judge.counts().rejected < 120, "25 in half a second: all at once, again and again, would be 230 refusals"


# -- life ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_any_mixture_of_batches_faults_cancels_and_deadlines_leaves_the_accounts_empty(
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
        core = engine.engine
        await until(lambda: not core._calls_out)
        stats = core.stats()
        assert not (core._inflight or core._batches or core._started or stats.in_flight), "a request was forgotten"
        assert sum(one.reserved_cost for one in core._endpoints) == pytest.approx(0.0, abs=1e-9)
        assert stats.submitted == stats.scored + sum(stats.failed.values()) == len(engine.verdicts)


async def test_an_exception_in_the_engine_ends_one_request_and_not_the_others(
    mock: Mock, bench: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = BodyWriter.write

    def broken(self: BodyWriter, request: JudgeRequest, *, reask: bool) -> bytes:
        if "poison" in request.response:
            raise RuntimeError("a bug")
        return plain(self, request, reask=reask)

    monkeypatch.setattr(BodyWriter, "write", broken)
    async with bench(mock().url) as engine:
        verdicts = await engine.score(["fine", "poison", "well"])
        assert engine.engine.stats().in_flight == 0
    assert [v.status for v in verdicts] == ["scored", "failed", "scored"]
    assert failed(verdicts[1]).reason == "engine" and "a bug" in failed(verdicts[1]).detail
    assert "broke" in caplog.text
