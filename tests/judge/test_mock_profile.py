"""The mock judge's decisions and replies, without a server and without a clock."""

import re
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
    AdmittedRequest,
    Ask,
    Behaviour,
    Content,
    Fault,
    Message,
    ProcessorSharing,
    RateLimits,
    Refusal,
    plan_for,
    reply_text,
    usage,
)


def content(number: int) -> Content:
    return Content.of(f"answer number {number}")


def decide(behaviour: Behaviour, now: float = 0.0) -> AdmittedRequest | Refusal | None:
    return behaviour.decide(now, Ask([Message("user", "an answer")]))


def refused(decision: AdmittedRequest | Refusal | None) -> tuple[int, str | None, dict[str, str]]:
    assert isinstance(decision, Refusal)
    return decision.status, msgspec.json.decode(decision.body)["error"]["code"], decision.headers


def test_a_plan_depends_only_on_seed_content_and_attempt() -> None:
    def plans(seed: int = 0, attempt: int = 0, order: int = 1) -> list[AdmittedRequest]:
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


def test_latencies_are_fixed_or_lognormal_with_the_configured_mean() -> None:
    profile = JudgeProfile(latency="lognormal", latency_s=2.0, sigma=0.5)
    times = [plan_for(profile, content(number), 0).service_s for number in range(4000)]
    # The standard error is 2 * sqrt(exp(0.25) - 1) / sqrt(4000) = 0.017; four of them are allowed.
    assert fmean(times) == pytest.approx(2.0, abs=0.068)
    assert min(times) > 0.0 and len(set(times)) == len(times)
    assert {plan_for(JudgeProfile(latency_s=0.3), content(number), 0).service_s for number in range(20)} == {0.3}


@pytest.mark.parametrize(("elapsed_s", "is_out"), [(0.9, False), (1.0, True), (2.9, True), (3.0, False), (5.5, True)])
def test_an_outage_counts_from_the_first_request_and_excludes_its_end(elapsed_s: float, is_out: bool) -> None:
    behaviour = Behaviour(JudgeProfile(outages=[(1.0, 2.0), (5.0, 1.0)]))
    assert not behaviour.in_outage(1001.5), "the schedule has not started"
    assert isinstance(decide(behaviour, now=1000.0), AdmittedRequest)
    assert (decide(behaviour, now=1000.0 + elapsed_s) is None) == is_out
    assert behaviour.counts.faults == ({"outage": 1} if is_out else {})


def test_a_throttle_burst_sends_bare_429s() -> None:
    behaviour = Behaviour(JudgeProfile(throttle_bursts=[(0.0, 1.0)], retry_after_s=None))
    assert refused(decide(behaviour, now=7.0)) == (429, None, {})
    assert isinstance(decide(behaviour, now=8.0), AdmittedRequest)
    count = behaviour.counts.of("an answer")
    assert (count.received, count.rejected, count.admitted) == (2, 1, 1), "a rejection is no attempt"
    assert behaviour.counts.most_received == 2 and behaviour.counts.of("never sent").received == 0


def test_a_crowded_judge_rejects_and_sends_the_wait_in_wall_time() -> None:
    behaviour = Behaviour(JudgeProfile(reject_above=2, time_scale=0.05))
    assert [type(decide(behaviour)) for _ in range(3)] == [AdmittedRequest, AdmittedRequest, Refusal]
    assert refused(decide(behaviour)) == (429, "concurrency_limit_exceeded", {"Retry-After": "0.05"})
    assert (behaviour.counts.in_flight, behaviour.counts.rejected, behaviour.counts.by_status) == (2, 2, {429: 2})


def test_a_rate_limit_names_the_limit_and_the_wait() -> None:
    behaviour = Behaviour(JudgeProfile(requests_per_minute=60, rate_window_s=2.0))
    assert [type(decide(behaviour, now=5.0)) for _ in range(2)] == [AdmittedRequest, AdmittedRequest]
    decision = decide(behaviour, now=5.25)
    assert isinstance(decision, Refusal) and b"Rate limit reached for requests" in decision.body
    assert decision.headers == {
        "Retry-After": "0.75",
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1.75s",
    }
    assert [type(decide(behaviour, now=6.0)) for _ in range(2)] == [AdmittedRequest, Refusal]


def test_both_rate_limits_must_have_room_and_a_rejected_request_is_not_charged() -> None:
    limits = RateLimits(JudgeProfile(requests_per_minute=60, tokens_per_minute=100))
    assert limits.admit(0.0, 100) is None
    assert limits.admit(0.0, 10) == ("tokens", pytest.approx(6.0))
    assert limits.headers(0.0)["x-ratelimit-remaining-requests"] == "59"
    full = RateLimits(JudgeProfile(tokens_per_minute=100))
    assert full.admit(0.0, 1000) is None, "a request larger than the bucket passes when the bucket is full"
    assert full.admit(0.0, 1000) == ("tokens", pytest.approx(60.0))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"error_share": 1.5}, "error_share"),
        ({"error_share": 0.6, "hang_share": 0.6}, "shares"),
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


@given(st.text(), st.integers(-3, 3), st.integers(0, 10))
def test_a_score_is_on_its_scale_and_repeatable(text: str, low: int, span: int) -> None:
    assert low <= expected_score(text, low, low + span) == expected_score(text, low, low + span) <= low + span
    assert {expected_score(f"answer {number}") for number in range(300)} == set(range(1, 11))


def test_a_nonce_is_not_part_of_the_content() -> None:
    plain = Content.of("Rate <> this")
    assert Content.of("Rate <0123456789abcdef> this") == plain
    assert Content.of("Rate <0123456789ABCDEF0123456789abcdef> this").key == plain.key
    assert Content.of("Rate <0123456789abcde> this") != plain


def test_every_style_ends_with_the_score_and_the_mixed_style_uses_them_all() -> None:
    for style in STYLES:
        reply = reply_text(JudgeProfile(reply_style=style), content(0)).split("</think>")[-1]
        assert re.findall(r"\d+", reply)[0] == str(expected_score("answer number 0"))
    profile = JudgeProfile(reply_style="mixed")
    shapes = {re.sub(r"\d+", "N", reply_text(profile, content(number))) for number in range(100)}
    assert len(shapes) == len(STYLES)


def test_a_configured_reply_wins_and_the_first_key_decides() -> None:
    profile = JudgeProfile(scores={"good": "9", "bad": "I refuse."})
    assert reply_text(profile, Content.of("a good answer with a bad end")) == "9"
    assert reply_text(profile, Content.of("a bad answer")) == "I refuse."
    assert reply_text(profile, Content.of("another")) == str(expected_score("another"))


def test_the_last_user_message_is_judged_in_any_shape_and_every_character_is_counted() -> None:
    parts = [{"type": "text", "text": "this "}, {"type": "image_url"}, {"text": "one"}]
    ask = Ask([Message("user", "x" * 32), Message("user", parts), Message("assistant", None)])
    assert ask.content.text == "this one"
    assert usage(ask, "z" * 8) == {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}


# -- processor sharing

ARRIVALS = st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.01, 10.0)), min_size=1, max_size=30)


def find_ends(knee: float | None, arrivals: list[tuple[float, float]]) -> dict[int, float]:
    """The ends by ticket, following each request's remaining work from event to event."""
    waiting, left, ends, now = list(enumerate(sorted(arrivals))), dict[int, float](), dict[int, float](), 0.0
    while waiting or left:
        rate = 1.0 if knee is None or not left else min(1.0, knee / len(left))
        first = min(left, key=lambda ticket: left[ticket], default=-1)
        end = now + left[first] / rate if left else float("inf")
        arrives = waiting[0][1][0] if waiting else float("inf")
        left = {ticket: work - (min(end, arrives) - now) * rate for ticket, work in left.items()}
        now = min(end, arrives)
        if arrives <= end:
            ticket, (_, work) = waiting.pop(0)
            left[ticket] = work
        else:
            del left[first]
            ends[first] = now
    return ends


@given(knee=st.none() | st.floats(0.5, 8.0), arrivals=ARRIVALS)
def test_every_request_ends_by_definition_for_a_prompt_and_for_a_late_caller(
    knee: float | None, arrivals: list[tuple[float, float]]
) -> None:
    expected = find_ends(knee, arrivals)
    prompt, late, waiting, ends = ProcessorSharing(knee), ProcessorSharing(knee), sorted(arrivals), dict[int, float]()
    for arrival in waiting:
        late.join(*arrival)
    while waiting or len(prompt):
        now = prompt.next_finish()
        if waiting and waiting[0][0] <= now:
            now, service_s = waiting.pop(0)
            prompt.join(now, service_s)
        ends |= dict.fromkeys(prompt.finished(now), now)
    assert ends == pytest.approx(expected, abs=1e-6)
    order = [expected[ticket] for ticket in late.finished(1e6)]
    assert len(order) == len(expected) and order == pytest.approx(sorted(order), abs=1e-6)


def test_a_request_that_leaves_gives_its_share_to_the_others_and_never_ends() -> None:
    sharing = ProcessorSharing(1)
    stays, leaves = sharing.join(0.0, 1.0), sharing.join(0.0, 1.0)
    sharing.leave(1.0, leaves)
    assert sharing.next_finish() == pytest.approx(1.5)
    assert sharing.finished(1.5) == [stays]
    assert sharing.next_finish() == float("inf")


def test_an_end_that_was_not_fetched_is_due_at_once() -> None:
    sharing = ProcessorSharing(None)
    first = sharing.join(0.0, 1.0)
    sharing.join(2.0, 1.0)
    assert (sharing.next_finish(), sharing.finished(2.0), sharing.next_finish()) == (2.0, [first], 3.0)
