"""What happens to a request, decided without a server and without a clock."""

from statistics import fmean

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.errors import ConfigError
from freewheel.judge.testing import JudgeProfile
from freewheel.judge.testing.profile import (
    SHARES,
    Ask,
    Behaviour,
    Bucket,
    Content,
    Decision,
    Fault,
    Message,
    Outage,
    Plan,
    RateLimits,
    Refusal,
    duration,
    inside,
    plan_for,
)

EVEN_SHARES = dict.fromkeys(SHARES, 1 / len(SHARES))


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


def test_a_plan_depends_on_seed_content_and_attempt_only() -> None:
    profile = JudgeProfile(latency="lognormal", latency_s=1.0, **EVEN_SHARES)
    forwards = [plan_for(profile, content(number), 0) for number in range(100)]
    backwards = [plan_for(profile, content(number), 0) for number in reversed(range(100))]
    assert forwards == backwards[::-1]
    assert forwards != [plan_for(profile, content(number), 1) for number in range(100)]
    reseeded = JudgeProfile(latency="lognormal", latency_s=1.0, seed=1, **EVEN_SHARES)
    assert forwards != [plan_for(reseeded, content(number), 0) for number in range(100)]


def test_each_fault_comes_as_often_as_its_share_says() -> None:
    shares = dict(zip(SHARES, (0.20, 0.15, 0.10, 0.10, 0.05, 0.05, 0.10, 0.05, 0.05), strict=True))
    profile = JudgeProfile(**shares)
    faults = [plan_for(profile, content(number), 0).fault for number in range(4000)]
    for fault, share in zip(Fault, shares.values(), strict=True):
        # Four standard deviations of a binomial share with p <= 0.2 and n = 4000 are below 0.026.
        assert faults.count(fault) / len(faults) == pytest.approx(share, abs=0.026)


def test_a_share_of_one_hits_everything() -> None:
    profile = JudgeProfile(hang_share=1.0)
    assert {plan_for(profile, content(number), 0).fault for number in range(200)} == {Fault.HANG}


def test_faults_per_content_ends_the_faults_of_a_content() -> None:
    profile = JudgeProfile(error_share=1.0, faults_per_content=2)
    assert plan_for(profile, content(0), 1, faults_so_far=1).fault is Fault.ERROR
    assert plan_for(profile, content(0), 2, faults_so_far=2).fault is None


def test_lognormal_latencies_have_the_mean_that_was_asked_for() -> None:
    profile = JudgeProfile(latency="lognormal", latency_s=2.0, sigma=0.5)
    times = [plan_for(profile, content(number), 0).service_s for number in range(4000)]
    # The standard error is 2 * sqrt(exp(0.25) - 1) / sqrt(4000) = 0.017; four of them are allowed.
    assert fmean(times) == pytest.approx(2.0, abs=0.068)
    assert min(times) > 0.0
    assert len(set(times)) == len(times)


def test_a_fixed_latency_is_fixed() -> None:
    assert {plan_for(JudgeProfile(latency_s=0.3), content(number), 0).service_s for number in range(20)} == {0.3}


# -- schedule


@pytest.mark.parametrize(("elapsed_s", "hit"), [(0.9, False), (1.0, True), (2.9, True), (3.0, False), (5.5, True)])
def test_a_window_holds_its_start_and_not_its_end(elapsed_s: float, hit: bool) -> None:
    assert inside(((1.0, 2.0), (5.0, 1.0)), elapsed_s) is hit


def test_an_outage_is_counted_from_the_first_request() -> None:
    behaviour = Behaviour(JudgeProfile(outages=[(10.0, 5.0)]))
    assert not behaviour.in_outage(1012.0)
    assert isinstance(decide(behaviour, now=1000.0), Plan)
    assert isinstance(decide(behaviour, now=1012.0), Outage)
    assert isinstance(decide(behaviour, now=1015.0), Plan)


def test_an_outage_may_answer_503_instead() -> None:
    behaviour = Behaviour(JudgeProfile(outages=[(0.0, 5.0)], outage_kind="503"))
    assert refused(decide(behaviour))[0] == 503


def test_a_throttle_burst_rejects_everything_while_it_lasts() -> None:
    behaviour = Behaviour(JudgeProfile(throttle_bursts=[(0.0, 1.0)], retry_after_s=None))
    assert refused(decide(behaviour, now=7.0)) == (429, None, {})
    assert isinstance(decide(behaviour, now=8.0), Plan)


# -- limits


def test_a_crowded_judge_rejects_at_once_with_a_wait() -> None:
    behaviour = Behaviour(JudgeProfile(reject_above=80, retry_after_s=2.0))
    assert isinstance(decide(behaviour, in_flight=79), Plan)
    assert refused(decide(behaviour, in_flight=80)) == (429, "concurrency_limit_exceeded", {"Retry-After": "2"})


def test_a_wait_is_told_in_wall_time() -> None:
    behaviour = Behaviour(JudgeProfile(reject_above=0, retry_after_s=1.0, time_scale=0.05))
    assert refused(decide(behaviour))[2] == {"Retry-After": "0.05"}


def test_a_wait_may_be_told_as_a_date() -> None:
    behaviour = Behaviour(JudgeProfile(reject_above=0, retry_after_s=1.5, retry_after_style="date"))
    headers = refused(decide(behaviour, wall_time=0.0))[2]
    assert headers == {"Retry-After": "Thu, 01 Jan 1970 00:00:02 GMT"}


def test_a_labelled_rate_limit_says_what_is_over_and_for_how_long() -> None:
    behaviour = Behaviour(JudgeProfile(requests_per_minute=60, rate_window_s=2.0))
    assert [type(decide(behaviour, now=5.0)) for _ in range(2)] == [Plan, Plan]
    decision = decide(behaviour, now=5.25)
    assert isinstance(decision, Refusal)
    assert b"Rate limit reached for requests" in decision.body
    assert dict(decision.headers) == {
        "Retry-After": "0.75",
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1.75s",
    }
    assert isinstance(decide(behaviour, now=6.0), Plan)


def test_an_unlabelled_rate_limit_looks_like_any_429() -> None:
    behaviour = Behaviour(JudgeProfile(requests_per_minute=60, rate_window_s=1.0, label_rate=False, retry_after_s=None))
    assert isinstance(decide(behaviour), Plan)
    decision = decide(behaviour)
    assert isinstance(decision, Refusal)
    assert b"rate" not in decision.body.lower()
    assert decision.headers == ()
    assert behaviour.rate_headers(0.0) == ()


def test_a_request_rejected_for_tokens_is_not_charged_as_a_request() -> None:
    limits = RateLimits(JudgeProfile(requests_per_minute=60, tokens_per_minute=100))
    assert limits.admit(0.0, 100) is None
    assert limits.admit(0.0, 10) == ("tokens", pytest.approx(6.0))
    assert dict(limits.headers(0.0))["x-ratelimit-remaining-requests"] == "59"


def test_a_request_larger_than_the_bucket_passes_when_it_is_full() -> None:
    limits = RateLimits(JudgeProfile(tokens_per_minute=100))
    assert limits.admit(0.0, 1000) is None
    assert limits.admit(0.0, 1000) == ("tokens", pytest.approx(60.0))


@given(
    per_minute=st.floats(min_value=1.0, max_value=6000.0),
    window_s=st.floats(min_value=0.1, max_value=60.0),
    gaps=st.lists(st.floats(min_value=0.0, max_value=5.0), max_size=60),
)
def test_a_bucket_never_admits_more_than_its_burst_and_its_rate(
    per_minute: float, window_s: float, gaps: list[float]
) -> None:
    bucket = Bucket(per_minute, window_s)
    now, admitted = 0.0, 0
    for gap in gaps:
        now += gap
        if bucket.wait_s(now, 1.0) == 0.0:
            bucket.take(now, 1.0)
            admitted += 1
        assert -1e-9 <= bucket.level(now) <= bucket.capacity
        assert admitted <= bucket.capacity + now * per_minute / 60 + 1e-6


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0ms"), (0.0201, "21ms"), (1.5, "1.5s"), (59.9999, "1m0s"), (360.0, "6m0s")]
)
def test_durations_are_written_as_the_public_apis_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# -- requests that no retry can mend


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


def test_a_body_that_is_no_chat_request_is_refused() -> None:
    decision = Behaviour(JudgeProfile()).decide(
        0.0, None, Content.of(""), authorization=None, tokens=0, in_flight=0, attempt=0
    )
    assert refused(decision)[0] == 400


# -- profile


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"error_share": 1.5}, "error_share"),
        ({"hang_share": -0.1}, "hang_share"),
        ({"error_share": 0.6, "hang_share": 0.6}, "shares"),
        ({"latency_s": -1.0}, "latency_s"),
        ({"latency_s": float("nan")}, "latency_s"),
        ({"time_scale": 0.0}, "time_scale"),
        ({"knee": 0}, "knee"),
        ({"reject_above": -1}, "reject_above"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"error_status": 200}, "error_status"),
        ({"score_low": 5, "score_high": 4}, "score_low"),
        ({"outages": [(1.0, -1.0)]}, "outages"),
        ({"throttle_bursts": [(1.0,)]}, "throttle_bursts"),
        ({"reply_style": "shouted"}, "reply_style"),
        ({"latency": "gamma"}, "latency"),
    ],
)
def test_a_profile_that_cannot_work_names_its_key(settings: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as problem:
        JudgeProfile(**settings)
    assert problem.value.key == key


def test_a_profile_survives_json() -> None:
    profile = JudgeProfile(latency="lognormal", outages=[(1, 2)], scores={"good": "9"}, knee=60, api_key="k")
    assert msgspec.json.decode(msgspec.json.encode(profile), type=JudgeProfile) == profile


def test_a_misspelt_key_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError, match="latncy"):
        msgspec.json.decode(b'{"latncy": 1}', type=JudgeProfile)


def test_shares_that_add_up_to_one_are_fine() -> None:
    assert JudgeProfile(error_share=0.1, hang_share=0.2, drip_share=0.7).error_share == 0.1
