"""The verdict on a live run: of the last minute, of replicas as they are, of scoring as it was counted."""

from __future__ import annotations

from freewheel.plan.verdict import Setting
from freewheel.plan.watching import OVER_S, Watching, held_back


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


def test_the_rate_of_scores_and_the_number_of_replicas_are_counted():
    watching = Watching(Setting(), is_judge=True)
    for second in (1, 11):
        spans = {
            "trainer": component(second, train=0.3 * second, wait_batch=0.7 * second),
            "rollouter-0": component(second, generate=0.4 * second, wait_reward=0.6 * second),
            "rollouter-1": component(second, generate=0.4 * second, wait_reward=0.6 * second),
        }
        watching.note(float(second), spans, {"scored": 20 * second, "failed": {"timeout": 5 * second}, "waiting": 3})
    assert "raising its rate limit to 62/s would lift throughput 2.5x" in str(watching.verdict())


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
