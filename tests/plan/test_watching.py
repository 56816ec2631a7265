"""The verdict on a live run: of the last minute, of replicas as they are, of scoring as it was counted."""

from __future__ import annotations

import pytest

from freewheel.runtime.bottleneck import OVER_S, Setting, Watching, held_back, in_use


def component(elapsed, **seconds):
    return {"spans": {"elapsed": elapsed, **seconds}}


def test_nothing_is_said_before_both_sides_were_heard():
    watching = Watching(Setting(), is_judge=False)
    assert watching.verdict().bound == "unmeasured"
    watching.note(1.0, {"trainer": component(1.0, train=1.0)}, {})
    assert watching.verdict().bound == "unmeasured"


def test_the_last_minute_counts_and_not_the_start():
    watching = Watching(Setting(), is_judge=False)
    for second in range(400):
        late = max(0, second - 200)
        watching.note(
            float(second),
            {
                "trainer": component(second + 0.001, train=second - late, wait_batch=late),
                "rollouter-0": component(second + 0.001, generate=float(second)),
            },
            {},
        )
    found = watching.verdict()
    assert found.bound == "generation" and found.share > 0.95
    assert len(watching._past) <= OVER_S + 2


def judged(rewards, *, is_judge):
    """The verdict on a run whose trainer waits for scores; `rewards`: as they grow in a second."""
    watching = Watching(Setting(), is_judge=is_judge)
    for second in (1, 11):
        spans = {
            "trainer": component(second, train=0.3 * second, wait_batch=0.7 * second),
            "rollouter-0": component(second, generate=0.4 * second, wait_reward=0.6 * second),
            "rollouter-1": component(second, generate=0.4 * second, wait_reward=0.6 * second),
        }
        watching.note(float(second), spans, {**rewards(second), "waiting": 3})
    return str(watching.verdict())


def test_the_rate_of_scores_and_the_number_of_replicas_are_counted():
    said = judged(lambda second: {"scored": 20 * second, "failed": {"timeout": 5 * second}}, is_judge=False)
    assert "reward.workers for 62/s would lift throughput 2.5x" in said


def test_a_judges_rate_is_that_of_its_requests_and_not_of_what_needed_none():
    said = judged(lambda second: {"scored": 20 * second, "judge": {"sent": 8 * second}}, is_judge=True)
    assert "raising its rate limit to 20/s would lift throughput 2.5x" in said
    assert "(its rate was not measured)" in judged(lambda second: {"scored": 20 * second}, is_judge=True)


def test_a_component_that_misses_a_look_keeps_what_was_known():
    watching = Watching(Setting(), is_judge=False)
    both = {"trainer": component(10, train=5.0, wait_batch=5.0), "rollouter-0": component(10, generate=10.0)}
    watching.note(10.0, both, {})
    watching.note(11.0, {"trainer": {}, "rollouter-0": {}}, {})
    assert watching.verdict().bound in ("generation", "unmeasured")


def test_a_limit_in_use_holds_back_and_one_that_is_not_does_not():
    def judge(in_flight, queued=0):
        return {"waiting": 0, "judge": {"queued": queued, "endpoints": [{"limit": 100, "in_flight": in_flight}]}}

    assert held_back({"waiting": 4}, is_judge=False) is True
    assert held_back({"waiting": 0}, is_judge=False) is False
    assert held_back({}, is_judge=False) is None
    assert held_back({"waiting": 0}, is_judge=True) is None, "nobody has said what the judge's limit is"
    assert held_back(judge(90), is_judge=True) is True
    assert held_back(judge(10, queued=7), is_judge=True) is True
    assert held_back(judge(10), is_judge=True) is False


def test_a_limit_is_known_once_the_judge_has_refused_something():
    endpoints = [{"limit": 30, "in_flight": 20}, {"limit": 10, "in_flight": 4}]
    assert in_use({"judge": {"throttled": 3, "endpoints": endpoints}}) == 0.6
    assert in_use({"judge": {"throttled": 0, "endpoints": endpoints}}) is None
    assert in_use({"judge": {"throttled": 3}}) is None and in_use({}) is None


def test_steps_that_a_journal_has_are_left_out():
    """They wait for nobody, and generation is held back while they are trained again."""
    watching = Watching(Setting(threshold=3), is_judge=False)

    def look(now, step, trained, waited, generated):
        trainer = {"global_steps": step, "recorded_until": 28, **component(now, train=trained, wait_batch=waited)}
        rollouter = component(now, generate=generated, wait_room=now - generated)
        watching.note(now, {"trainer": trainer, "rollouter-0": rollouter}, {})

    look(1.0, 3, 1.0, 0.0, 0.05)
    look(90.0, 27, 90.0, 0.0, 0.1)
    assert watching.replays and watching.verdict().bound == "unmeasured"
    look(94.0, 30, 94.0, 0.0, 0.2)
    assert watching.replays, "the last of them ended before this look"
    look(104.0, 33, 99.0, 5.0, 10.2)
    assert not watching.replays
    for found in (watching.verdict(), watching.verdict_on(watching.whole)):
        assert found.bound == "generation" and found.share == pytest.approx(0.5)
    known = {"trainer": component(94.0, train=94.0)["spans"], "rollouter-0": {"elapsed": 94.0, "generate": 0.2}}
    again = Watching(Setting(threshold=3), is_judge=False, replayed=known)
    spans = {"trainer": component(104.0, train=99.0, wait_batch=5.0), "rollouter-0": component(104.0, generate=10.2)}
    again.note(104.0, spans, {})
    assert again.verdict_on(again.whole).share == pytest.approx(0.5)


def test_where_nearly_no_response_gets_a_score_no_remedy_for_waiting_is_told():
    def said(rewards):
        watching = Watching(Setting(), is_judge=False)
        spans = {"trainer": component(10, wait_batch=9.0, train=1.0), "rollouter-0": component(10, generate=10.0)}
        watching.note(10.0, spans, rewards)
        return watching.verdict()

    broken = said({"scored": 1, "skipped": 1, "failed": {"ValueError": 1398}})
    assert str(broken).startswith("rewards failed: 1,398 of 1,400 responses got no score (ValueError 1,398); ")
    assert broken.bound == "failing" and broken.lift is None
    assert said({"scored": 700, "failed": {"ValueError": 700}}).bound == "generation"
    assert said({}).bound == "generation"
