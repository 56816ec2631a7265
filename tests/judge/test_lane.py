"""A lane's books balance whatever happens to its calls, and `pick` honours weights, standbys and `avoid`."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.judge import Endpoint, JudgeConfig, Usage
from freewheel.judge.endpoint import NEVER, Breaker, EndpointState, Permit, State, choose_endpoint
from freewheel.judge.outcome import HALTS, INFRA, Failure, Kind, Reply

REPLY = Reply("7", Usage(100, 2))


def lanes(*endpoints: Endpoint, **settings: Any) -> list[EndpointState]:
    config = JudgeConfig(endpoint=list(endpoints), model="m", **settings)
    return [EndpointState(config, endpoint) for endpoint in config.endpoints]


def lane(**settings: Any) -> EndpointState:
    return lanes(Endpoint(url="http://a"), **settings)[0]


def fail(one: EndpointState, kind: Kind, times: int = 1, now: float = 0.0) -> None:
    for _ in range(times):
        one.failed(one.send(now, 400), now, Failure(kind, "detail"))


def test_room_is_what_the_concurrency_says() -> None:
    one = lane(concurrency="fixed:3")
    for _ in range(3):
        assert one.ready_at(0.0, 10) <= 0.0
        one.send(0.0, 10)
    assert one.ready_at(0.0, 10) == NEVER


@given(st.lists(st.sampled_from([*Kind, "reply", "drop"]), max_size=120))
def test_the_books_balance_whatever_happens_to_the_calls(events: list[Kind | str]) -> None:
    one = lane(prices={"m": {"input": 1000.0, "output": 1000.0}})
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
            assert isinstance(event, Kind)
            one.failed(permit, now, Failure(event, "detail"))
        assert one.limiter.in_flight == 0
        assert one.reserved_cost == pytest.approx(0.0, abs=1e-9)
        assert one.stats.sent == number + 1
    replies = events.count("reply")
    assert one.stats.answered == replies
    assert one.stats.cost == pytest.approx(replies * 0.102)
    counted = replies + one.stats.throttled + sum(one.stats.faults.values()) + events.count("drop")
    assert counted == len(events)


@pytest.mark.parametrize("kind", list(Kind))
def test_only_an_unwell_endpoint_opens_the_breaker_and_only_a_refusal_halts(kind: Kind) -> None:
    one = lane()
    fail(one, kind, times=12)
    assert (one.breaker.state is State.OPEN) == (kind in INFRA)
    assert (one.halted is not None) == (kind in HALTS or kind is Kind.FORBIDDEN)
    assert one.works() == (kind not in INFRA | HALTS | {Kind.FORBIDDEN})


def test_a_halted_lane_sends_nothing_until_it_is_reconsidered_and_then_one() -> None:
    one = lane()
    fail(one, Kind.AUTH)
    assert one.ready_at(1e9, 10) == NEVER
    assert one.snapshot().halted == "detail"
    one.reconsider()
    assert one.ready_at(0.0, 10) <= 0.0
    permit = one.send(0.0, 10)
    assert permit.probe and one.ready_at(0.0, 10) == NEVER
    one.replied(permit, 1.0, REPLY, 10)
    assert one.works() and one.ready_at(1.0, 10) <= 1.0


def test_a_reply_without_usage_costs_its_estimate() -> None:
    one = lane(prices={"m": {"input": 1.0, "output": 1.0}})
    permit = one.send(0.0, 4_000_000)
    one.replied(permit, 1.0, Reply("7", Usage()), 4_000_000)
    assert one.stats.cost == pytest.approx(permit.reserved_cost) and one.stats.cost > 0.9


def test_what_a_call_may_cost_follows_the_prompts_and_the_longest_reply_seen() -> None:
    one = lane(prices={"m": {"input": 1e6, "output": 1e6}})
    assert not one.knows_cost()
    for tokens in (10, 4000, *[10] * 200):
        one.replied(one.send(0.0, 1000), 0.1, Reply("7", Usage(500, tokens)), 1000)
    assert one.knows_cost() and one.most_cost(1000) == pytest.approx(4500, rel=0.01)


@pytest.mark.parametrize("settings", [{"max_tokens": 7}, {"sampling": {"max_completion_tokens": 7}}])
def test_what_a_call_may_cost_is_bounded_by_max_tokens(settings: dict[str, Any]) -> None:
    one = lane(prices={"m": {"input": 0.0, "output": 1e6}}, **settings)
    assert one.knows_cost() and one.most_cost(1000) == 7


def test_requests_per_minute_of_the_endpoint_win_over_the_judges() -> None:
    own, common = lanes(
        Endpoint(url="http://a", requests_per_minute=60), Endpoint(url="http://b"), requests_per_minute=6000
    )

    def burst(one: EndpointState) -> int:
        count = 0
        while one.ready_at(0.0, 10) <= 0.0 and count < 30:
            one.replied(one.send(0.0, 10), 0.0, REPLY, 10)
            count += 1
        return count

    assert burst(own) < 5 < burst(common)


def choose(candidates: list[EndpointState], count: int) -> Counter[str]:
    chosen: Counter[str] = Counter()
    for _ in range(count):
        one, _ = choose_endpoint(candidates, 0.0, 10)
        assert one is not None
        one.send(0.0, 10)
        chosen[one.url.split("/")[2]] += 1
    return chosen


def test_weights_share_what_is_in_flight() -> None:
    two = lanes(Endpoint(url="http://a", weight=3), Endpoint(url="http://b"), concurrency="fixed:100")
    assert choose(two, 80) == {"a": 60, "b": 20}


def test_a_full_lane_leaves_the_rest_to_the_others() -> None:
    two = lanes(Endpoint(url="http://a", weight=9), Endpoint(url="http://b"), concurrency="fixed:5")
    assert choose(two, 10) == {"a": 5, "b": 5}
    assert choose_endpoint(two, 0.0, 10) == (None, NEVER)


def test_a_standby_is_used_only_while_no_other_works() -> None:
    main, standby = two = lanes(Endpoint(url="http://a"), Endpoint(url="http://b", weight=0), concurrency="fixed:2")
    assert choose(two, 2) == {"a": 2}
    assert choose_endpoint(two, 0.0, 10)[0] is None, "a full main lane is no reason"
    fail(main, Kind.AUTH)
    assert choose_endpoint(two, 0.0, 10)[0] is standby
    main.reconsider()


def test_a_request_avoids_the_lane_it_failed_on_if_there_is_another() -> None:
    first, second = two = lanes(Endpoint(url="http://a", weight=1000), Endpoint(url="http://b"), concurrency="fixed:1")
    assert choose_endpoint(two, 0.0, 10, avoid=first)[0] is second
    second.send(0.0, 10)
    assert choose_endpoint(two, 0.0, 10, avoid=first)[0] is first


def test_pick_says_when_to_ask_again() -> None:
    first, second = two = lanes(Endpoint(url="http://a"), Endpoint(url="http://b"))
    fail(first, Kind.BROKEN, times=10, now=0.0)
    fail(second, Kind.BROKEN, times=10, now=0.2)
    one, at = choose_endpoint(two, 0.2, 10)
    assert one is None and at == Breaker.FIRST_PAUSE_S
    assert math.isfinite(at)
