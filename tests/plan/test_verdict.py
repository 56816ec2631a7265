"""The verdict names what limits a run and what would help, with a number, and claims nothing that was not measured."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.runtime.bottleneck import (
    OVER_S,
    UNMEASURED,
    Scoring,
    Setting,
    Watching,
    held_back,
    in_turns,
    in_use,
    streaming,
    verdict,
)

STREAMING = Setting(mode="fully_async", replicas=3, threshold=3, save_every_steps=20)
SHARE = st.floats(0, 1)
MODES, THRESHOLDS = st.sampled_from(["sync", "one_step_off", "fully_async"]), st.none() | st.integers(0, 3)


def of(trainer, rollouter, setting=STREAMING, scoring=None):
    return verdict({"trainer": trainer, "rollouter": rollouter}, setting, scoring)


# -- the steady state -------------------------------------------------------------------------------------------------

PARTS = st.dictionaries(st.sampled_from(["generation", "judge", "training", "sync"]), st.floats(0.01, 1e4), min_size=1)


@given(PARTS, st.sampled_from(["generation", "judge", "training", "sync"]), st.floats(1, 10))
def test_a_pipeline_is_as_fast_as_its_slowest_part_and_no_faster_part_slows_it_down(parts, part, factor):
    name, rate = streaming(parts)
    assert parts[name] == rate == min(parts.values())
    assert in_turns(parts) <= rate * (1 + 1e-9)
    faster = {**parts, part: parts[part] * factor} if part in parts else parts
    assert streaming(faster)[1] >= rate and in_turns(faster) >= in_turns(parts) * (1 - 1e-9)


# -- who is named -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "rollouter", "named", "share"),
    [
        # streaming: one of the two is slower, and the other waits for it
        ({"train": 0.6, "wait_batch": 0.4}, {"generate": 1.0}, "generation", 0.4),
        ({"train": 0.98, "wait_batch": 0.02}, {"generate": 0.6, "wait_room": 0.4}, "training", 0.4),
        ({"train": 0.95, "wait_batch": 0.05}, {"generate": 0.93, "wait_room": 0.07}, "balanced", 0.07),
        ({"train": 0.0, "wait_batch": 0.05}, {"generate": 1.0}, "unmeasured", 0.0),
        # a slow judge: the trainer starves and nothing is generated
        ({"train": 0.2, "wait_batch": 0.8}, {"generate": 0.3, "wait_reward": 0.7, "wait_room": 0.0}, "reward", 0.7),
        # a slow but hidden judge: nobody waits for it
        ({"train": 0.97, "wait_batch": 0.03}, {"generate": 0.5, "wait_reward": 0.3, "wait_room": 0.2}, "training", 0.2),
        # in turns, as in mode sync: the longer of the two
        ({"train": 0.3, "wait_batch": 0.7}, {"generate": 0.7, "wait_room": 0.3}, "generation", 0.7),
        ({"train": 0.7, "wait_batch": 0.3}, {"generate": 0.3, "wait_room": 0.7}, "training", 0.7),
        # weights and checkpoints
        ({"train": 0.7, "wait_batch": 0.3}, {"generate": 0.7, "load_weights": 0.3}, "sync", 0.3),
        ({"train": 0.5, "pack": 0.4, "wait_batch": 0.1}, {"generate": 0.9, "wait_room": 0.1}, "sync", 0.4),
        # generation is not charged with the time in which engines load weights
        ({"train": 0.4, "wait_batch": 0.6}, {"generate": 0.8, "load_weights": 0.2}, "generation", 0.4),
        ({"train": 0.6, "save": 0.4}, {"generate": 0.7, "wait_room": 0.3}, "save", 0.4),
        # engines that pause while the trainer never starves delay nobody
        ({"train": 1.0, "wait_batch": 0.0}, {"generate": 0.7, "load_weights": 0.3}, "balanced", 0.0),
        # a checkpoint that is written during training costs nothing
        ({"train": 0.95, "save": 0.6, "wait_batch": 0.05}, {"generate": 0.98, "wait_room": 0.02}, "balanced", 0.05),
    ],
)
def test_the_part_that_others_wait_for_is_named(trainer, rollouter, named, share):
    found = of(trainer, rollouter)
    assert found.bound == named and found.share == pytest.approx(share)
    assert str(found) == found.sentence


def test_rollouters_are_averaged_and_one_side_alone_gives_no_verdict():
    several = {"rollouter-0": {"generate": 1.0}, "rollouter-1": {"generate": 0.4, "wait_room": 0.6}}
    assert str(verdict({"trainer": {"train": 1.0}, **several}, STREAMING)).startswith("training-bound: 30%")
    for waits in ({}, {"trainer": {"train": 1.0}}, {"rollouter": {"generate": 1.0}}):
        assert str(verdict(waits, STREAMING)) == UNMEASURED


# -- what would help --------------------------------------------------------------------------------------------------

JUDGED = {"train": 0.38, "wait_batch": 0.62}, {"generate": 0.526, "wait_reward": 0.62}
SLOW = Scoring(is_judge=True, per_s=47.4, latency_s=1.25, held_back=0.1)
STARVED = {"train": 0.1, "wait_batch": 0.9}
FEW_GROUPS = {"train": 0.33, "wait_batch": 0.67}, {"generate": 0.95, "wait_room": 0.05}
HALF = {"train": 0.5, "wait_batch": 0.5}, {"generate": 1.0}
STREAMED = {"train": 0.6, "wait_batch": 0.4}, {"generate": 1.0}
PACKS = {"train": 0.5, "pack": 0.4, "wait_batch": 0.1}
MORE_ROOM = "; async_training.staleness_threshold above 3 or more groups per step"


def judge(**measured):
    return Scoring(is_judge=True, **measured)


@pytest.mark.parametrize(
    ("waits", "scoring", "words"),
    [
        (
            JUDGED,
            judge(per_s=47.4, latency_s=1.0, held_back=1.0, in_use=1.0),
            "judge-bound: 62% of trainer time waits for verdicts; raising its rate limit to 90/s would lift throughput "
            "1.9x, where generation is the limit",
        ),
        (
            JUDGED,
            SLOW,
            "judge-bound: 62% of trainer time waits for verdicts; async_training.staleness_threshold above 3, which "
            "hides its latency of 1.2 s, or a faster judge could lift throughput 1.9x, where generation is the limit",
        ),
        (JUDGED, judge(), "(its rate was not measured) could"),
        (JUDGED, judge(per_s=47.4), "raising its rate limit to 90/s could lift"),
        (JUDGED, Scoring(per_s=500.0, held_back=1.0), "raising reward.concurrency or reward.workers for 951/s would"),
        (({"wait_batch": 1.0}, {"wait_reward": 1.0}), None, "no remedy is known, because no other part has worked yet"),
        # the judge's limit is in use while a few groups are in generation
        (
            FEW_GROUPS,
            judge(per_s=5.0, held_back=1.0, slots_in_use=0.2),
            "to 15/s would lift throughput 3.0x",
        ),
        (FEW_GROUPS, judge(per_s=5.0, held_back=0.0, slots_in_use=0.2), "generation-bound: "),
        (
            STREAMED,
            None,
            "generation-bound: 40% of trainer time waits for responses; 1.7x the generation speed (5 replicas instead "
            "of 3) would lift throughput up to 1.7x, where training is the limit",
        ),
        (
            ({"train": 0.98}, {"generate": 0.6, "wait_room": 0.4}),
            None,
            "training-bound: 40% of generation time is held back so that samples stay fresh; 1.7x the training speed "
            "would lift throughput up to 1.7x, where generation is the limit",
        ),
        ((PACKS, {"generate": 0.5, "wait_room": 0.3}), None, "sync_every_steps = 2 would lift throughput 1.2x"),
        ((PACKS, {"generate": 0.9, "load_weights": 0.1}), None, "sync_every_steps = 2 would lift throughput 1.11x"),
        # time that is neither work nor waiting stays: 1 / 0.52 and not 1 / 0.17
        (({"train": 0.17, "wait_batch": 0.52}, {"generate": 0.95, "wait_reward": 0.04}), None, "1.9x"),
        (({"train": 0.6, "save": 0.4}, {"generate": 0.5, "wait_room": 0.3}), None, "= 40 would lift throughput 1.2x"),
        (
            ({"train": 0.85, "wait_batch": 0.15}, {"generate": 0.97, "wait_reward": 0.15}),
            None,
            "is busy 97%",
        ),
        (HALF, judge(in_use=0.8), "1.2x, where the judge is the limit"),
        (HALF, judge(in_use=0.99), "there is little to gain, because the judge is busy 99% of the time"),
        (HALF, judge(), "2.0x, where training is the limit"),
        # engines with too little work: more of them would have less each
        ((STARVED, {"generate": 0.8, "wait_room": 0.2}), None, MORE_ROOM),
        ((STARVED, {"generate": 1.0}), Scoring(slots_in_use=0.1), MORE_ROOM),
        ((STARVED, {"generate": 1.0}), Scoring(slots_in_use=1.0), "(30 replicas instead of 3)"),
    ],
)
def test_the_remedy_fits_what_was_measured(waits, scoring, words):
    assert words in str(of(*waits, scoring=scoring))


def test_the_remedy_fits_the_mode_and_an_unknown_threshold():
    raised = "async_training.staleness_threshold raised, which hides its latency of 1.2 s, or a faster judge"
    assert raised in str(of(*JUDGED, Setting(threshold=None), SLOW))
    in_sync = str(of({"train": 0.4, "wait_batch": 0.6}, {"generate": 0.5, "wait_room": 0.5}, Setting(mode="sync")))
    assert in_sync.startswith("generation-bound: 60% of trainer time waits for responses; mode=fully_async would lift")
    assert in_sync.endswith(" throughput up to 2.0x, where generation is the limit")


@pytest.mark.parametrize("bound", ["generation", "training"])
def test_a_threshold_of_0_means_turns_in_every_mode(bound):
    """A faster half of a turn gains at most that half."""
    waits = {"train": 0.4, "wait_batch": 0.6}, {"generate": 0.6, "wait_room": 0.4}
    if bound == "training":
        waits = {"train": 0.6, "wait_batch": 0.4}, {"generate": 0.4, "wait_room": 0.6}
    found = of(*waits, Setting(threshold=0))
    assert found.bound == bound and found.lift == pytest.approx(of(*waits, Setting(mode="sync")).lift)
    assert "staleness_threshold above 0, which gives generation room, could lift throughput up to 1.7x" in str(found)


def test_a_simulated_remedy_replaces_the_estimate():
    waits = {"trainer": STARVED, "rollouter": {"generate": 1.0}}
    found = verdict(
        waits, STREAMING, tried=lambda part, speed: 3.0 if (part, round(speed)) == ("generation", 10) else 0
    )
    assert found.lift == 3.0 and "(30 replicas instead of 3) would lift throughput 3.0x" in str(found)
    assert "replicas" not in str(verdict(waits, STREAMING, tried=lambda part, speed: 1.0))


SCORING = st.builds(
    Scoring,
    is_judge=st.booleans(),
    per_s=st.none() | st.floats(0.01, 1e5),
    latency_s=st.none() | st.floats(0.001, 100),
    held_back=st.none() | SHARE,
    in_use=st.none() | SHARE,
    slots_in_use=st.none() | SHARE,
)


@st.composite
def spent(draw, *names):
    """Shares of one component's time that add up to at most 1."""
    cuts = sorted(draw(st.tuples(*[SHARE] * len(names))))
    return dict(zip(names, (after - before for before, after in pairwise([0.0, *cuts])), strict=True))


@given(
    trainer=st.fixed_dictionaries(dict.fromkeys(("train", "wait_batch", "pack", "save"), SHARE)),
    rollouter=st.fixed_dictionaries(dict.fromkeys(("generate", "wait_reward", "wait_room", "load_weights"), SHARE)),
    mode=MODES,
    threshold=THRESHOLDS,
    scoring=SCORING,
)
def test_any_measurement_gives_one_whole_sentence(trainer, rollouter, mode, threshold, scoring):
    found = of(trainer, rollouter, Setting(mode=mode, threshold=threshold), scoring)
    assert "\n" not in str(found) and "inf" not in str(found) and "nan" not in str(found)
    assert ";" in str(found) or found.bound == "unmeasured"
    assert found.lift is None or found.lift >= 1
    full = 1.0 if scoring.slots_in_use is None or found.bound == "training" else scoring.slots_in_use
    busiest = max(trainer["train"] + trainer["pack"], min(rollouter["generate"], full))
    if mode != "fully_async" and found.lift is not None and found.bound not in ("sync", "save"):
        assert found.lift * busiest <= max(1.0, busiest) + 1e-9


@given(
    trainer=spent("train", "wait_batch", "pack"),
    rollouter=spent("generate", "wait_reward", "wait_room", "load_weights"),
    mode=MODES,
    threshold=THRESHOLDS,
    scoring=SCORING,
    tried=st.none() | st.floats(0.5, 100).map(lambda found: lambda part, speed: found),
)
def test_a_verdict_promises_at_most_the_waiting_of_the_other_side(trainer, rollouter, mode, threshold, scoring, tried):
    waits = {"trainer": trainer, "rollouter": rollouter}
    found = verdict(waits, Setting(mode=mode, threshold=threshold), scoring, tried=tried)
    if found.lift is None or found.bound == "balanced":
        return
    rests = sum(rollouter.values()) - rollouter["generate"]
    waits_for_it = {"training": rests, "sync": 0.5 * found.share, "save": 0.5 * found.share}
    wait = waits_for_it.get(found.bound, trainer["wait_batch"])
    assert found.lift * (1 - wait) <= 1 + 1e-6


# -- a live run -------------------------------------------------------------------------------------------------------


def component(elapsed, **seconds):
    return {"spans": {"elapsed": elapsed, **seconds}}


def test_the_last_minute_counts_once_both_sides_have_reported():
    watching = Watching(Setting(), is_judge=False)
    assert watching.verdict().bound == "unmeasured"
    watching.note(0.5, {"trainer": component(0.5, train=0.5)}, {})
    assert watching.verdict().bound == "unmeasured"
    for second in range(1, 400):
        late = max(0, second - 200)
        spans = {
            "trainer": component(second, train=second - late, wait_batch=late),
            "rollouter-0": component(second, generate=float(second)),
        }
        watching.note(float(second), spans, {})
    found = watching.verdict()
    assert found.bound == "generation" and found.share > 0.95
    assert len(watching._past) <= OVER_S + 2


def test_a_component_that_misses_a_report_keeps_its_last_one():
    watching = Watching(Setting(), is_judge=False)
    for second in (2.0, 10.0):
        trainer = component(second, train=second / 2, wait_batch=second / 2)
        both = {"trainer": trainer, "rollouter-0": component(second, generate=second)}
        watching.note(second, both, {})
    before = watching.verdict()
    assert (before.bound, before.share) == ("generation", 0.5)
    for missed in ({"trainer": {}}, {"rollouter-0": {}}, {"trainer": {}, "rollouter-0": {}}):
        watching.note(11.0, {**both, **missed}, {})
        assert str(watching.verdict()) == str(before)


def judged(rewards, *, is_judge):
    """Return the verdict on a run whose trainer waits for scores. `rewards`: counters after so many seconds."""
    watching = Watching(Setting(), is_judge=is_judge)
    for second in (1, 11):
        waiting = component(second, generate=0.4 * second, wait_reward=0.6 * second)
        trainer = component(second, train=0.3 * second, wait_batch=0.7 * second)
        spans = {"trainer": trainer, "rollouter-0": waiting, "rollouter-1": waiting}
        watching.note(float(second), spans, {**rewards(second), "waiting": 3})
    return str(watching.verdict())


def test_a_judges_rate_counts_its_requests_and_a_functions_rate_its_scores():
    said = judged(lambda second: {"scored": 20 * second, "failed": {"timeout": 5 * second}}, is_judge=False)
    assert "reward.workers for 62/s would lift throughput 2.5x" in said
    said = judged(lambda second: {"scored": 20 * second, "judge": {"sent": 8 * second}}, is_judge=True)
    assert "raising its rate limit to 20/s would lift throughput 2.5x" in said
    assert "(its rate was not measured)" in judged(lambda second: {"scored": 20 * second}, is_judge=True)


def test_a_limit_holds_back_while_it_is_in_use():
    def judge(in_flight, queued=0):
        return {"waiting": 0, "judge": {"queued": queued, "endpoints": [{"limit": 100, "in_flight": in_flight}]}}

    assert held_back({"waiting": 4}, is_judge=False) is True
    assert held_back({"waiting": 0}, is_judge=False) is False
    assert held_back({}, is_judge=False) is None
    assert held_back({"waiting": 0}, is_judge=True) is None, "the judge's limit is unknown"
    assert [held_back(judge(*one), is_judge=True) for one in ((90,), (10, 7), (10,))] == [True, True, False]
    endpoints = [{"limit": 30, "in_flight": 20}, {"limit": 10, "in_flight": 4}]
    assert in_use({"judge": {"throttled": 3, "endpoints": endpoints}}) == 0.6
    assert in_use({"judge": {"throttled": 0, "endpoints": endpoints}}) is None, "a limit is known after a refusal"
    assert in_use({"judge": {"throttled": 3}}) is None and in_use({}) is None


def test_replayed_steps_do_not_count():
    """They wait for nobody, and generation is held back while they are trained again."""
    watching = Watching(Setting(threshold=3), is_judge=False)

    def note(now, step, trained, waited, generated):
        trainer = {"global_steps": step, "recorded_until": 28, **component(now, train=trained, wait_batch=waited)}
        rollouter = component(now, generate=generated, wait_room=now - generated)
        watching.note(now, {"trainer": trainer, "rollouter-0": rollouter}, {})

    note(1.0, 3, 1.0, 0.0, 0.05)
    note(90.0, 27, 90.0, 0.0, 0.1)
    assert watching.replays and watching.verdict().bound == "unmeasured"
    note(94.0, 30, 94.0, 0.0, 0.2)
    assert watching.replays, "the last of them ended before this report"
    note(104.0, 33, 99.0, 5.0, 10.2)
    assert not watching.replays
    for found in (watching.verdict(), watching.verdict_on(watching.whole)):
        assert found.bound == "generation" and found.share == pytest.approx(0.5)


def test_a_run_without_scores_is_called_broken_and_not_slow():
    def said(rewards):
        watching = Watching(Setting(), is_judge=False)
        spans = {"trainer": component(10, wait_batch=9.0, train=1.0), "rollouter-0": component(10, generate=10.0)}
        watching.note(10.0, spans, rewards)
        return watching.verdict()

    broken = said({"scored": 1, "skipped": 1, "failed": {"ValueError": 1398}})
    assert str(broken).startswith("rewards failed: 1,398 of 1,400 responses got no score (ValueError 1,398); ")
    assert broken.bound == "failing" and broken.lift is None
    assert said({"scored": 700, "failed": {"ValueError": 700}}).bound == said({}).bound == "generation"
