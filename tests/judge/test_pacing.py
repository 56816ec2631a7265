"""Budgets of requests and tokens: configured, read from headers, or learnt from a refusal for the rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from freewheel.judge.pacing import (
    BASE_BACKOFF_S,
    MAX_BACKOFF_S,
    MOST_PAUSE_S,
    RETRY_AFTER_SPREAD,
    HeaderBudget,
    Pacer,
    RateHeaders,
    backoff_s,
    parse_duration_s,
    read_rate_headers,
)

WALL_NOW = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC


def send_for(pacer: Pacer, seconds: float, tokens: int = 1, start: float = 0.0) -> list[float]:
    """Sends as fast as the pacer allows; returns when each left."""
    now = start
    left_at = []
    while True:
        at = pacer.ready_at(now, tokens)
        if at <= now:
            pacer.sent(now, tokens)
            left_at.append(now)
        elif at >= start + seconds:
            return left_at
        else:
            now = at
        assert len(left_at) < 100_000


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1.0),
        ("6m0s", 360.0),
        ("20ms", 0.02),
        ("1h2m3s", 3723.0),
        ("7.66s", 7.66),
        ("1d", 86400.0),
        ("12", 12.0),
        (" 0.5 ", 0.5),
        ("0", 0.0),
        ("-3", 0.0),
        ("Fri, 15 Jan 2027 08:00:30 GMT", 30.0),
        ("Fri, 15 Jan 2027 07:00:00 GMT", 0.0),
        ("1800000090", 90.0),
        ("1800000090500", 90.5),
        *((text, None) for text in ("", "soon", "5 parsecs", "1s later", "nan", "inf", "m", "1e999", "Fri, 99 Foo")),
    ],
)
def test_a_duration_is_read_in_every_form_that_judges_send(text: str, seconds: float | None) -> None:
    assert parse_duration_s(text, WALL_NOW) == (seconds and pytest.approx(seconds, abs=1e-3))


@given(st.text(max_size=30))
def test_no_text_breaks_the_duration_parser(text: str) -> None:
    seconds = parse_duration_s(text, WALL_NOW)
    assert seconds is None or (math.isfinite(seconds) and seconds >= 0.0)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Content-Type": "application/json"}, None),
        ({"x-ratelimit-limit-requests": "60"}, None),
        (
            {
                "X-RateLimit-Limit-Requests": "60",
                "X-RateLimit-Remaining-Requests": "59",
                "X-RateLimit-Reset-Requests": "1s",
                "x-ratelimit-limit-tokens": "150000",
                "x-ratelimit-remaining-tokens": "149984",
                "x-ratelimit-reset-tokens": "6m0s",
            },
            RateHeaders(HeaderBudget(60.0, 59.0, 1.0), HeaderBudget(150000.0, 149984.0, 360.0)),
        ),
        (
            {"x-ratelimit-limit": "60", "x-ratelimit-remaining": "1"},
            RateHeaders(HeaderBudget(60.0, 1.0)),
        ),
        ({"x-ratelimit-limit-requests": "many", "x-ratelimit-remaining-requests": "-1"}, RateHeaders()),
    ],
    ids=["none", "limit alone", "requests and tokens", "unnamed", "damaged"],
)
def test_rate_headers_are_read_whatever_their_case(headers: dict[str, str], expected: RateHeaders | None) -> None:
    assert read_rate_headers(CIMultiDict(headers), WALL_NOW) == expected


@pytest.mark.parametrize(
    ("pacer", "tokens", "least", "most"),
    [
        (Pacer(requests_per_minute=600), 1, 590, 600 * (1 + 1 / 60) + 1),
        (Pacer(tokens_per_minute=60_000), 500, 115, 124),
    ],
)
def test_a_configured_budget_holds_over_a_minute(pacer: Pacer, tokens: int, least: int, most: float) -> None:
    assert least <= len(send_for(pacer, 60.0, tokens)) <= most


def test_a_request_larger_than_the_bucket_leaves_and_the_next_one_waits_for_it() -> None:
    pacer = Pacer(tokens_per_minute=6_000)
    assert pacer.ready_at(0.0, 1_000_000) <= 0.0
    pacer.sent(0.0, 12_000)
    assert pacer.ready_at(0.0, 100) == pytest.approx(120.0, rel=0.02)
    pacer.settled(0.0, 12_000, 6_000, 1.0)
    assert pacer.ready_at(0.0, 100) == pytest.approx(60.0, rel=0.02), "unused tokens are given back"


def test_after_a_refusal_the_pace_is_what_was_accepted_and_rises_slowly() -> None:
    pacer = Pacer()
    for index in range(100):  # 25 a second over four seconds, then one too many
        pacer.sent(index * 0.04, 0)
    pacer.sent(4.0, 0)
    pacer.rejected(4.0, 1.0)
    left_at = send_for(pacer, 10.0, start=5.0)
    assert 240 <= len(left_at) <= 252
    pace = len(left_at) / 10.0
    now = 15.0
    for _ in range(4):  # replies come while it is sent at the full pace
        pacer.settled(now, 0, 0, 2.0)
        now += 2.0
        send_for(pacer, 2.0, start=now - 2.0)
    assert len(send_for(pacer, 10.0, start=now)) / 10.0 == pytest.approx(pace * 1.05**4, rel=0.05)


def test_a_pause_between_steps_does_not_forget_the_pace() -> None:
    pacer = Pacer()
    for index in range(100):
        pacer.sent(index * 0.04, 0)
    pacer.rejected(4.0, 1.0)
    pacer.settled(100.0, 0, 0, 2.0)
    pacer.settled(500.0, 0, 0, 2.0)
    assert len(send_for(pacer, 10.0, start=500.0)) <= 252


def test_a_burst_of_refusals_counts_once() -> None:
    pacer = Pacer()
    for index in range(50):
        pacer.sent(index * 0.02, 0)
    for _ in range(10):
        pacer.rejected(1.0, 3600.0)
    assert 1.0 < pacer.ready_at(1.0, 0) <= 1.0 + MOST_PAUSE_S, "the pause is short, whatever the server requests"
    assert len(send_for(pacer, 10.0, start=3.0)) > 450, "one refusal leaves 48 per second"


def test_a_pace_that_nothing_refuses_any_more_is_forgotten() -> None:
    pacer = Pacer()
    pacer.sent(0.0, 0)
    pacer.rejected(0.1, None)
    now = 1.0
    for _ in range(200):
        now = max(now + 1.0, pacer.ready_at(now, 0))
        pacer.sent(now, 0)
        pacer.settled(now, 0, 0, 1.0)
    for _ in range(100):
        assert pacer.ready_at(now, 0) <= now
        pacer.sent(now, 0)


def test_headers_bind_only_when_little_is_left() -> None:
    pacer = Pacer()
    pacer.observed(0.0, RateHeaders(HeaderBudget(600.0, 500.0, 10.0)))
    for _ in range(300):
        assert pacer.ready_at(0.01, 0) <= 0.01
        pacer.sent(0.01, 0)
    pacer.observed(0.01, RateHeaders(HeaderBudget(600.0, 0.0, 60.0)))
    pacer.observed(0.01, RateHeaders(HeaderBudget(600.0, 60.0, 60.0)))  # a reply that was delayed
    assert pacer.ready_at(0.01, 0) > 0.01
    pacer.observed(0.01, RateHeaders(HeaderBudget(600.0, 0.0, 60.0)))
    assert pacer.ready_at(0.01, 0) == pytest.approx(0.11)
    assert len(send_for(pacer, 10.0, start=0.01)) == pytest.approx(100, abs=2)
    pacer.observed(20.0, RateHeaders(HeaderBudget(600.0, 600.0, 0.0)))
    assert pacer.ready_at(20.0, 0) <= 20.0


def test_scarce_tokens_in_the_headers_hold_back_large_requests() -> None:
    pacer = Pacer()
    pacer.observed(0.0, RateHeaders(tokens=HeaderBudget(60_000.0, 1_000.0, 59.0)))
    assert pacer.ready_at(0.0, 500) <= 0.0
    assert pacer.ready_at(0.0, 3_000) == pytest.approx(2.0)


any_amount = st.none() | st.floats(0.0, 1e12)
steps = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 10**7)),
    st.tuples(st.just("settle"), st.integers(0, 10**7)),
    st.tuples(st.just("reject"), st.none() | st.floats(allow_nan=True)),
    st.tuples(
        st.just("observe"),
        st.builds(RateHeaders, *[st.builds(HeaderBudget, any_amount, any_amount, any_amount)] * 2),
    ),
)


@given(
    st.none() | st.floats(0.01, 1e6),
    st.none() | st.floats(0.01, 1e9),
    st.lists(st.tuples(steps, st.floats(0.0, 100.0)), max_size=50),
)
def test_a_request_never_waits_forever(requests: float | None, tokens: float | None, script: list) -> None:  # type: ignore[type-arg]
    pacer = Pacer(requests_per_minute=requests, tokens_per_minute=tokens)
    now = 0.0
    for (what, value), after_s in script:
        now += after_s
        if what == "send" and pacer.ready_at(now, value) <= now:
            pacer.sent(now, value)
        elif what == "settle":
            pacer.settled(now, value // 2, value, 1.0)
        elif what == "reject":
            pacer.rejected(now, value)
        elif what == "observe":
            pacer.observed(now, value)
        at = pacer.ready_at(now, 1000)
        assert now <= at < math.inf
    for _ in range(20):
        at = pacer.ready_at(now, 1000)
        if at <= now:
            break
        now = at
    assert pacer.ready_at(now, 1000) <= now


# -- back-off ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10_000), st.none() | st.floats(0, 1e6), st.floats(0, 1, exclude_max=True))
def test_back_off_is_what_the_server_requests_or_full_jitter_under_a_cap(
    failures: int, requested_s: float | None, luck: float
) -> None:
    wait_s = backoff_s(failures, requested_s, lambda: luck)
    if requested_s:
        assert requested_s <= wait_s <= requested_s * (1 + RETRY_AFTER_SPREAD)
    else:
        assert wait_s == min(MAX_BACKOFF_S, BASE_BACKOFF_S * 2.0 ** min(failures - 1, 30)) * luck
