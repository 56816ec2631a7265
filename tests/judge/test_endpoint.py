"""An endpoint's state: its accounts balance whatever happens, and choosing honours weights, standbys and `avoid`."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.judge import Endpoint, JudgeConfig, Usage
from freewheel.judge.endpoint import (
    LATENCIES_KEPT,
    NEVER,
    AttemptPatience,
    Breaker,
    EndpointState,
    Permit,
    choose_endpoint,
    quantiles,
)
from freewheel.judge.outcome import HALTS, INFRA, CallFailure, FailureKind, Reply
from freewheel.judge.stats import BreakerState

REPLY = Reply("7", Usage(100, 2))


def states(*endpoints: Endpoint, **settings: Any) -> list[EndpointState]:
    config = JudgeConfig(endpoint=list(endpoints), model="m", **settings)
    return [EndpointState(config, endpoint) for endpoint in config.endpoints]


def state(**settings: Any) -> EndpointState:
    return states(Endpoint(url="http://a"), **settings)[0]


def fail(one: EndpointState, kind: FailureKind, times: int = 1, now: float = 0.0) -> None:
    for _ in range(times):
        one.failed(one.send(now, 400), now, CallFailure(kind, "detail"))


@given(st.lists(st.sampled_from([*FailureKind, "reply", "drop"]), max_size=120))
def test_the_accounts_balance_whatever_happens_to_the_calls(events: list[FailureKind | str]) -> None:
    one = state(prices={"m": {"input": 1000.0, "output": 1000.0}})
    now = 0.0
    for number, event in enumerate(events):
        now += 0.01
        permit: Permit = one.send(now, 400)
        assert one.limiter.in_flight == 1 and one.reserved_cost > 0
        if event == "reply":
            one.replied(permit, now, REPLY, 400)
        elif event == "drop":
            one.dropped(permit, now)
        else:
            assert isinstance(event, FailureKind)
            one.failed(permit, now, CallFailure(event, "detail"))
        assert one.limiter.in_flight == 0
        assert one.reserved_cost == pytest.approx(0.0, abs=1e-9)
        assert one.stats.sent == number + 1
    replies = events.count("reply")
    assert one.stats.answered == replies
    assert one.stats.cost == pytest.approx(replies * 0.102)
    counted = replies + one.stats.throttled + sum(one.stats.faults.values()) + events.count("drop")
    assert counted == len(events)


@pytest.mark.parametrize("kind", list(FailureKind))
def test_only_an_endpoint_with_a_fault_opens_the_breaker_and_only_a_refusal_halts(kind: FailureKind) -> None:
    one = state()
    fail(one, kind, times=12)
    assert (one.breaker.state is BreakerState.OPEN) == (kind in INFRA)
    assert (one.halted is not None) == (kind in HALTS or kind is FailureKind.FORBIDDEN)
    assert one.works() == (kind not in INFRA | HALTS | {FailureKind.FORBIDDEN})


def test_a_halted_endpoint_sends_nothing_until_it_is_reconsidered_and_then_one() -> None:
    one = state()
    fail(one, FailureKind.AUTH)
    assert one.ready_at(1e9, 10) == NEVER
    assert one.snapshot().halted == "detail"
    one.reconsider()
    assert one.ready_at(0.0, 10) <= 0.0
    permit = one.send(0.0, 10)
    assert permit.probe and one.ready_at(0.0, 10) == NEVER
    one.replied(permit, 1.0, REPLY, 10)
    assert one.works() and one.ready_at(1.0, 10) <= 1.0


def test_the_cost_of_a_call_is_bounded_by_its_longest_reply_and_estimated_without_usage() -> None:
    one = state(prices={"m": {"input": 1e6, "output": 1e6}})
    assert not one.knows_cost()
    for tokens in (10, 4000, *[10] * 200):
        one.replied(one.send(0.0, 1000), 0.1, Reply("7", Usage(500, tokens)), 1000)
    assert one.knows_cost() and one.most_cost(1000) == pytest.approx(4500, rel=0.01)
    before, permit = one.stats.cost, one.send(0.0, 1000)
    one.replied(permit, 1.0, Reply("7", Usage()), 1000)
    assert one.stats.cost - before == pytest.approx(permit.reserved_cost) and permit.reserved_cost > 4000
    for settings in ({"max_tokens": 7}, {"sampling": {"max_completion_tokens": 7}}):
        bounded = state(prices={"m": {"input": 0.0, "output": 1e6}}, **settings)
        assert bounded.knows_cost() and bounded.most_cost(1000) == 7


def test_an_endpoints_own_requests_per_minute_override_the_judges() -> None:
    own, common = states(
        Endpoint(url="http://a", requests_per_minute=60), Endpoint(url="http://b"), requests_per_minute=6000
    )

    def burst(one: EndpointState) -> int:
        count = 0
        while one.ready_at(0.0, 10) <= 0.0 and count < 30:
            one.replied(one.send(0.0, 10), 0.0, REPLY, 10)
            count += 1
        return count

    assert burst(own) < 5 < burst(common)


# -- choosing --------------------------------------------------------------------------------------------------------


def choose(candidates: list[EndpointState], count: int) -> Counter[str]:
    chosen: Counter[str] = Counter()
    for _ in range(count):
        one, _ = choose_endpoint(candidates, 0.0, 10)
        assert one is not None
        one.send(0.0, 10)
        chosen[one.url.split("/")[2]] += 1
    return chosen


@pytest.mark.parametrize(
    ("weights", "room", "expected"),
    [
        ((3, 1), 100, {"a": 60, "b": 20}),
        ((9, 1), 5, {"a": 5, "b": 5}),  # a full one leaves the rest to the other
        ((1, 0), 2, {"a": 2}),  # a full main endpoint is no reason to use the standby
    ],
)
def test_weights_share_what_is_in_flight(weights: tuple[int, int], room: int, expected: dict[str, int]) -> None:
    endpoints = [Endpoint(url=f"http://{name}", weight=weight) for name, weight in zip("ab", weights, strict=True)]
    main, standby = two = states(*endpoints, concurrency=f"fixed:{room}")
    assert choose(two, sum(expected.values())) == expected
    if sum(expected.values()) == room * len(expected):
        assert choose_endpoint(two, 0.0, 10) == (None, NEVER)
    if not weights[1]:
        fail(main, FailureKind.AUTH)
        assert choose_endpoint(two, 0.0, 10)[0] is standby


def test_a_request_avoids_the_endpoint_it_failed_on_if_there_is_another() -> None:
    first, second = two = states(Endpoint(url="http://a", weight=1000), Endpoint(url="http://b"), concurrency="fixed:1")
    assert choose_endpoint(two, 0.0, 10, avoid=first)[0] is second
    second.send(0.0, 10)
    assert choose_endpoint(two, 0.0, 10, avoid=first)[0] is first
    assert choose_endpoint(two, 0.0, 10, avoid=first, avoid_until=1.0) == (None, 1.0)


def test_if_no_endpoint_is_ready_the_choice_is_the_time_to_ask_again() -> None:
    first, second = two = states(Endpoint(url="http://a"), Endpoint(url="http://b"))
    fail(first, FailureKind.BROKEN, times=10, now=0.0)
    fail(second, FailureKind.BROKEN, times=10, now=0.2)
    assert choose_endpoint(two, 0.2, 10) == (None, Breaker.FIRST_PAUSE_S)


# -- the breaker -----------------------------------------------------------------------------------------------------


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(Breaker.CONSECUTIVE):
        assert breaker.state is BreakerState.CLOSED
        breaker.failed(at, known_at=at, probe=breaker.sent())
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_one_answer_between_failures_keeps_the_breaker_closed() -> None:
    breaker = Breaker()
    for _ in range(10):
        for _ in range(Breaker.CONSECUTIVE - 1):
            breaker.failed(0.0, known_at=0.0, probe=False)
        breaker.answered(0.0)
    assert breaker.state is BreakerState.CLOSED


def test_failed_probes_lengthen_the_pause_up_to_its_bound_and_an_answer_resets_it() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(12):
        at = breaker.ready_at(now)
        pauses.append(at - now)
        now = at
        assert breaker.ready_at(now) <= now and breaker.sent() and breaker.ready_at(now) == math.inf
        breaker.dropped(probe=True)
        assert breaker.ready_at(now) <= now and breaker.sent(), "a cancelled probe makes room for another"
        breaker.failed(now, known_at=now, probe=True)
    assert pauses[:3] == [0.25, 0.5, 1.0] and set(pauses[2:]) == {Breaker.LONGEST_PAUSE_S}
    breaker.answered(now)
    assert breaker.state is BreakerState.CLOSED and breaker.ready_at(now) <= now and not breaker.sent()
    for _ in range(Breaker.CONSECUTIVE):
        breaker.failed(now, known_at=now, probe=False)
    assert breaker.ready_at(now) == now + Breaker.FIRST_PAUSE_S


def test_calls_sent_before_the_last_answer_do_not_change_the_breaker() -> None:
    breaker = opened(at=0.0)
    breaker.failed(0.1, known_at=0.1, probe=False)
    assert breaker.ready_at(0.1) == Breaker.FIRST_PAUSE_S
    breaker.ready_at(1.0)
    assert breaker.sent()
    breaker.failed(1.1, known_at=1.1, probe=False)
    assert breaker.state is BreakerState.PROBING
    breaker.answered(10.0)
    for _ in range(3 * Breaker.CONSECUTIVE):
        breaker.failed(12.0, known_at=9.0, probe=False)
    assert breaker.state is BreakerState.CLOSED, "those calls were sent before the last sign of life"


@given(st.lists(st.sampled_from(["wait", "send", "fail", "answer", "drop"]), max_size=200))
def test_at_most_one_probe_is_out_and_it_always_comes_back(events: list[str]) -> None:
    breaker, now = Breaker(), 0.0
    out: list[bool] = []
    for event in events:
        if event == "wait":
            now += 1.0
        elif event == "send" and breaker.ready_at(now) <= now:
            out.append(breaker.sent())
            assert sum(out) <= 1 or breaker.state is BreakerState.CLOSED
        elif out and event == "fail":
            breaker.failed(now, known_at=now, probe=out.pop(0))
        elif out and event == "drop":
            breaker.dropped(probe=out.pop(0))
        elif out and event == "answer":
            out.pop(0)
            breaker.answered(now)
    for probe in out:
        breaker.failed(now, known_at=now, probe=probe)
    now += Breaker.LONGEST_PAUSE_S
    assert breaker.ready_at(now) <= now, "with nothing out and the pause over, something may be sent"


# -- latencies -------------------------------------------------------------------------------------------------------


def test_quantiles_are_latencies_of_the_samples() -> None:
    assert quantiles([], [0.5]) == [0.0]
    assert quantiles([3.0], [0.01, 1.0]) == [3.0, 3.0]
    assert quantiles([float(n) for n in range(100, 0, -1)], [0.5, 0.9, 0.99, 1.0]) == [50.0, 90.0, 99.0, 100.0]


def answer(one: AttemptPatience, latency_s: float, times: int, sent_at: float = 0.0) -> None:
    for _ in range(times):
        one._latencies.append(latency_s)
        one.answered(sent_at)


def patience(bound_s: float = 60.0, latency_s: float = 1.0, sent_at: float = 0.0) -> AttemptPatience:
    one = AttemptPatience(bound_s, deque(maxlen=LATENCIES_KEPT))
    answer(one, latency_s, AttemptPatience.SAMPLES_NEEDED - 1, sent_at)
    assert one.allow_s(0) == bound_s, "until latencies are known"
    answer(one, latency_s, 1, sent_at)
    return one


def test_patience_doubles_per_time_out_up_to_four_times_and_stays_between_its_floor_and_its_bound() -> None:
    one = patience()
    assert 2.8 < one.allow_s(0) < 3.3
    assert [one.allow_s(timeouts) / one.allow_s(0) for timeouts in (1, 2, 7)] == [2, 4, 4]
    one = patience(bound_s=2.0, latency_s=0.001)
    assert one.allow_s(0) == AttemptPatience.FLOOR_S
    assert one.allow_s(1) == one.allow_s(10_000) == 2.0


def test_patience_stretches_for_a_judge_that_became_slower_and_not_for_single_hangs() -> None:
    one = patience(sent_at=10.0)
    before_s = one.allow_s(0)
    for number in range(50):
        for _ in range(AttemptPatience.IN_A_ROW - 1):
            one.timed_out(sent_at=11.0 + 2 * number)
        answer(one, 1.0, 1, sent_at=12.0 + 2 * number)
        one.timed_out(sent_at=5.0)
    assert one.allow_s(0) <= before_s * 1.06, "later calls were answered"
    for number in range(2 * AttemptPatience.IN_A_ROW):
        one.timed_out(sent_at=1000.0 + number)
    assert one.allow_s(0) == pytest.approx(4 * before_s, rel=0.06)
    for number in range(1000):
        one.timed_out(sent_at=2000.0 + number)
    assert one.allow_s(0) == 60.0
