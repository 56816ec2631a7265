"""The mock judge's decisions and replies, without a server and without a clock."""

import re
from itertools import accumulate
from statistics import fmean

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.errors import ConfigError
from freewheel.judge.testing import JudgeProfile, expected_score
from freewheel.judge.testing.profile import (
    SHARES,
    STYLES,
    UNPARSEABLE_REPLY,
    Ask,
    Behaviour,
    Content,
    Decision,
    Fault,
    Message,
    Outage,
    Part,
    Plan,
    ProcessorSharing,
    RateLimits,
    Refusal,
    plan_for,
    reply_text,
    usage,
    worded,
)


def content(number: int) -> Content:
    return Content.of(f"answer number {number}")


def decide(behaviour: Behaviour, now: float = 0.0, text: str = "an answer", **known: object) -> Decision:
    settings = {"authorization": None, "tokens": 1, "in_flight": 0, "attempt": 0} | known
    ask = Ask([Message("user", text)], model=str(settings.pop("model", "judge")))
    behaviour.begin(now)
    return behaviour.decide(now, ask, Content.of(text), **settings)


def refused(decision: Decision) -> tuple[int, str | None, dict[str, str]]:
    assert isinstance(decision, Refusal)
    return decision.status, msgspec.json.decode(decision.body)["error"]["code"], dict(decision.headers)


# -- plans


def test_a_plan_depends_only_on_seed_content_and_attempt() -> None:
    def plans(seed: int = 0, attempt: int = 0, order: int = 1) -> list[Plan]:
        profile = JudgeProfile(latency="lognormal", latency_s=1.0, seed=seed, **dict.fromkeys(SHARES, 1 / len(SHARES)))
        return [plan_for(profile, content(number), attempt) for number in range(100)[::order]][::order]

    assert plans() == plans(order=-1)
    assert plans() != plans(attempt=1)
    assert plans() != plans(seed=1)


def test_each_fault_occurs_as_often_as_its_share() -> None:
    shares = dict(zip(SHARES, (0.20, 0.15, 0.10, 0.10, 0.05, 0.05, 0.10, 0.05, 0.05), strict=True))
    faults = [plan_for(JudgeProfile(**shares), content(number), 0).fault for number in range(4000)]
    for fault, share in zip(Fault, shares.values(), strict=True):
        # Four standard deviations of a binomial share with p <= 0.2 and n = 4000 are below 0.026.
        assert faults.count(fault) / len(faults) == pytest.approx(share, abs=0.026)
    everything = JudgeProfile(hang_share=1.0)
    assert {plan_for(everything, content(number), 0).fault for number in range(200)} == {Fault.HANG}


def test_faults_per_content_ends_the_faults_of_a_content() -> None:
    profile = JudgeProfile(error_share=1.0, faults_per_content=2)
    assert plan_for(profile, content(0), 1, faults_so_far=1).fault is Fault.ERROR
    assert plan_for(profile, content(0), 2, faults_so_far=2).fault is None


def test_latencies_are_fixed_or_lognormal_with_the_configured_mean() -> None:
    profile = JudgeProfile(latency="lognormal", latency_s=2.0, sigma=0.5)
    times = [plan_for(profile, content(number), 0).service_s for number in range(4000)]
    # The standard error is 2 * sqrt(exp(0.25) - 1) / sqrt(4000) = 0.017; four of them are allowed.
    assert fmean(times) == pytest.approx(2.0, abs=0.068)
    assert min(times) > 0.0 and len(set(times)) == len(times)
    assert {plan_for(JudgeProfile(latency_s=0.3), content(number), 0).service_s for number in range(20)} == {0.3}


# -- schedule and limits


@pytest.mark.parametrize(("elapsed_s", "is_out"), [(0.9, False), (1.0, True), (2.9, True), (3.0, False), (5.5, True)])
def test_an_outage_counts_from_the_first_request_and_excludes_its_end(elapsed_s: float, is_out: bool) -> None:
    behaviour = Behaviour(JudgeProfile(outages=[(1.0, 2.0), (5.0, 1.0)]))
    assert not behaviour.in_outage(1001.5), "the schedule has not started"
    assert isinstance(decide(behaviour, now=1000.0), Plan)
    assert isinstance(decide(behaviour, now=1000.0 + elapsed_s), Outage if is_out else Plan)


def test_an_outage_can_answer_503_and_a_throttle_burst_sends_bare_429s() -> None:
    assert refused(decide(Behaviour(JudgeProfile(outages=[(0.0, 5.0)], outage_kind="503"))))[0] == 503
    behaviour = Behaviour(JudgeProfile(throttle_bursts=[(0.0, 1.0)], retry_after_s=None))
    assert refused(decide(behaviour, now=7.0)) == (429, None, {})
    assert isinstance(decide(behaviour, now=8.0), Plan)


@pytest.mark.parametrize(
    ("settings", "header"),
    [
        ({"retry_after_s": 2.0}, "2"),
        ({"retry_after_s": 1.0, "time_scale": 0.05}, "0.05"),
    ],
)
def test_a_crowded_judge_rejects_and_sends_the_wait_in_wall_time(settings: dict[str, object], header: str) -> None:
    behaviour = Behaviour(JudgeProfile(reject_above=80, **settings))
    assert isinstance(decide(behaviour, in_flight=79), Plan)
    rejected = refused(decide(behaviour, in_flight=80))
    assert rejected == (429, "concurrency_limit_exceeded", {"Retry-After": header})


def test_a_labelled_rate_limit_names_the_limit_and_the_wait() -> None:
    behaviour = Behaviour(JudgeProfile(requests_per_minute=60, rate_window_s=2.0))
    assert [type(decide(behaviour, now=5.0)) for _ in range(2)] == [Plan, Plan]
    decision = decide(behaviour, now=5.25)
    assert isinstance(decision, Refusal) and b"Rate limit reached for requests" in decision.body
    assert dict(decision.headers) == {
        "Retry-After": "0.75",
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1.75s",
    }
    assert isinstance(decide(behaviour, now=6.0), Plan)


def test_both_rate_limits_must_have_room_and_a_rejected_request_is_not_charged() -> None:
    limits = RateLimits(JudgeProfile(requests_per_minute=60, tokens_per_minute=100))
    assert limits.admit(0.0, 100) is None
    assert limits.admit(0.0, 10) == ("tokens", pytest.approx(6.0))
    assert dict(limits.headers(0.0))["x-ratelimit-remaining-requests"] == "59"
    full = RateLimits(JudgeProfile(tokens_per_minute=100))
    assert full.admit(0.0, 1000) is None, "a request larger than the bucket passes when the bucket is full"
    assert full.admit(0.0, 1000) == ("tokens", pytest.approx(60.0))


@given(st.floats(1.0, 6000.0), st.floats(0.1, 60.0), st.lists(st.floats(0.0, 5.0), max_size=60))
def test_a_rate_limit_never_admits_more_than_its_burst_and_its_rate(
    per_minute: float, window_s: float, gaps: list[float]
) -> None:
    limits = RateLimits(JudgeProfile(requests_per_minute=per_minute, rate_window_s=window_s))
    times = list(accumulate(gaps, initial=0.0))
    admitted = [limits.admit(now, 1) is None for now in times]
    burst = max(1.0, per_minute * window_s / 60)
    for now, count in zip(times, accumulate(admitted), strict=True):
        assert count <= burst + now * per_minute / 60 + 1e-6
    assert admitted[0]


# -- refusals and settings


@pytest.mark.parametrize(
    ("settings", "known", "status", "code"),
    [
        ({"api_key": "right"}, {"authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ({"api_key": "right"}, {"authorization": None}, 401, "invalid_api_key"),
        ({"model": "this"}, {"model": "that"}, 404, "model_not_found"),
        ({"insufficient_quota": True}, {}, 429, "insufficient_quota"),
        ({"max_prompt_chars": 5}, {"text": "longer"}, 400, "context_length_exceeded"),
    ],
)
def test_an_unacceptable_request_is_refused_with_its_code(
    settings: dict[str, object], known: dict[str, object], status: int, code: str
) -> None:
    assert refused(decide(Behaviour(JudgeProfile(**settings)), **known))[:2] == (status, code)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"error_share": 1.5}, "error_share"),
        ({"error_share": 0.6, "hang_share": 0.6}, "shares"),
        ({"latency_s": float("nan")}, "latency_s"),
        ({"time_scale": 0.0}, "time_scale"),
        ({"knee": 0}, "knee"),
        ({"error_status": 200}, "error_status"),
        ({"score_low": 5, "score_high": 4}, "score_low"),
        ({"outages": [(1.0, -1.0)]}, "outages"),
        ({"throttle_bursts": [(1.0,)]}, "throttle_bursts"),
        ({"reply_style": "shouted"}, "reply_style"),
    ],
)
def test_a_profile_that_cannot_work_names_its_key(settings: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as problem:
        JudgeProfile(**settings)
    assert problem.value.key == key


# -- replies


@given(st.text(), st.integers(-3, 3), st.integers(0, 10))
def test_a_score_is_on_its_scale_and_repeatable(text: str, low: int, span: int) -> None:
    assert low <= expected_score(text, low, low + span) == expected_score(text, low, low + span) <= low + span
    assert {expected_score(f"answer {number}") for number in range(300)} == set(range(1, 11))


def test_a_nonce_is_not_part_of_the_content() -> None:
    plain = Content.of("Rate <> this")
    assert Content.of("Rate <0123456789abcdef> this") == plain
    assert Content.of("Rate <0123456789ABCDEF0123456789abcdef> this").key == plain.key
    assert Content.of("Rate <0123456789abcde> this") != plain


@pytest.mark.parametrize("style", STYLES)
def test_every_style_ends_with_the_score(style: str) -> None:
    answer = worded(7, style, 1, 10).split("</think>")[-1]
    assert re.findall(r"\d+", answer)[0] == "7"
    assert not re.search(r"\d", UNPARSEABLE_REPLY)


def test_the_mixed_style_uses_every_style() -> None:
    profile = JudgeProfile(reply_style="mixed")
    shapes = {re.sub(r"\d+", "N", reply_text(profile, content(number))) for number in range(100)}
    assert len(shapes) == len(STYLES)


def test_a_configured_reply_wins_and_the_first_key_decides() -> None:
    profile = JudgeProfile(scores={"good": "9", "bad": "I refuse."})
    assert reply_text(profile, Content.of("a good answer with a bad end")) == "9"
    assert reply_text(profile, Content.of("a bad answer")) == "I refuse."
    assert reply_text(profile, Content.of("another")) == str(expected_score("another"))


def test_the_last_user_message_is_judged_in_any_shape_and_every_character_is_counted() -> None:
    parts = [Part(text="this "), Part(type="image_url"), Part(text="one")]
    ask = Ask([Message("user", "x" * 32), Message("user", parts), Message("assistant", None)])
    assert ask.user_content == "this one"
    assert usage(ask, "z" * 8) == {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}


# -- processor sharing

ARRIVALS = st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.01, 10.0)), min_size=1, max_size=30)
KNEES = st.none() | st.floats(0.5, 8.0)


def run_to_the_end(sharing: ProcessorSharing, arrivals: list[tuple[float, float]]) -> dict[int, float]:
    """Ends by ticket, for a caller that looks exactly at the events."""
    ends: dict[int, float] = {}
    waiting = sorted(arrivals)
    while waiting or len(sharing):
        now = sharing.next_finish()
        if waiting and waiting[0][0] <= now:
            now, service_s = waiting.pop(0)
            sharing.join(now, service_s)
        ends |= dict.fromkeys(sharing.finished(now), now)
    return ends


def by_definition(knee: float | None, arrivals: list[tuple[float, float]]) -> dict[int, float]:
    """The ends by following each request's remaining work from event to event."""
    waiting = sorted(arrivals)
    left: dict[int, float] = {}
    ends: dict[int, float] = {}
    now, ticket = 0.0, 0
    while waiting or left:
        rate = 1.0 if knee is None or not left else min(1.0, knee / len(left))
        first = min(left, key=lambda key: left[key]) if left else None
        end = now + left[first] / rate if first is not None else float("inf")
        until = min(end, waiting[0][0]) if waiting else end
        left = {key: work - (until - now) * rate for key, work in left.items()}
        now = until
        if waiting and waiting[0][0] <= end:
            left[ticket] = waiting.pop(0)[1]
            ticket += 1
        else:
            assert first is not None
            del left[first]
            ends[first] = now
    return ends


@given(knee=KNEES, arrivals=ARRIVALS)
def test_every_request_ends_as_the_definition_says(knee: float | None, arrivals: list[tuple[float, float]]) -> None:
    assert run_to_the_end(ProcessorSharing(knee), arrivals) == pytest.approx(by_definition(knee, arrivals), abs=1e-6)


def test_a_request_that_leaves_gives_its_share_to_the_others_and_never_ends() -> None:
    sharing = ProcessorSharing(1)
    stays, leaves = sharing.join(0.0, 1.0), sharing.join(0.0, 1.0)
    sharing.leave(1.0, leaves)
    assert sharing.next_finish() == pytest.approx(1.5)
    assert sharing.finished(1.5) == [stays]
    assert sharing.next_finish() == float("inf")


@given(knee=KNEES, arrivals=ARRIVALS)
def test_a_caller_that_looks_late_sees_the_same_order(knee: float | None, arrivals: list[tuple[float, float]]) -> None:
    prompt = run_to_the_end(ProcessorSharing(knee), arrivals)
    late = ProcessorSharing(knee)
    for now, service_s in sorted(arrivals):
        late.join(now, service_s)
    seen = late.finished(1e6)
    assert sorted(seen) == sorted(prompt)
    ends = [prompt[ticket] for ticket in seen]
    assert ends == pytest.approx(sorted(ends), abs=1e-6)


def test_an_end_that_was_not_fetched_is_due_at_once() -> None:
    sharing = ProcessorSharing(None)
    first = sharing.join(0.0, 1.0)
    sharing.join(2.0, 1.0)
    assert sharing.next_finish() == 2.0
    assert sharing.finished(2.0) == [first]
    assert sharing.next_finish() == 3.0
