"""What holds a run up, in words: who is named, the number, and nothing that was not measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.runtime.bottleneck import UNMEASURED, Scoring, Setting, verdict

STREAMING = Setting(mode="fully_async", replicas=3, threshold=3, save_every_steps=20)


def of(trainer, rollouter, setting=STREAMING, scoring=None):
    return verdict({"trainer": trainer, "rollouter": rollouter}, setting, scoring)


@pytest.mark.parametrize(
    ("trainer", "rollouter", "named", "share"),
    [
        # streaming: one of the two is slower, and the other waits for it
        ({"train": 0.6, "wait_batch": 0.4}, {"generate": 1.0}, "generation", 0.4),
        ({"train": 0.98, "wait_batch": 0.02}, {"generate": 0.6, "wait_room": 0.4}, "training", 0.4),
        ({"train": 0.95, "wait_batch": 0.05}, {"generate": 0.93, "wait_room": 0.07}, "balanced", 0.07),
        ({"train": 0.0, "wait_batch": 0.05}, {"generate": 1.0}, "unmeasured", 0.0),
        # a judge that takes its time: the trainer starves and nothing is generated
        ({"train": 0.2, "wait_batch": 0.8}, {"generate": 0.3, "wait_reward": 0.7, "wait_room": 0.0}, "reward", 0.7),
        # a judge that is slow but hidden: nobody waits for it
        ({"train": 0.97, "wait_batch": 0.03}, {"generate": 0.5, "wait_reward": 0.3, "wait_room": 0.2}, "training", 0.2),
        # by turns, as in mode sync: the longer of the two
        ({"train": 0.3, "wait_batch": 0.7}, {"generate": 0.7, "wait_room": 0.3}, "generation", 0.7),
        ({"train": 0.7, "wait_batch": 0.3}, {"generate": 0.3, "wait_room": 0.7}, "training", 0.7),
        # weights and checkpoints
        ({"train": 0.7, "wait_batch": 0.3}, {"generate": 0.7, "load_weights": 0.3}, "sync", 0.3),
        ({"train": 0.5, "pack": 0.4, "wait_batch": 0.1}, {"generate": 0.9, "wait_room": 0.1}, "sync", 0.4),
        # generation is not charged with the time in which engines load weights
        ({"train": 0.4, "wait_batch": 0.6}, {"generate": 0.8, "load_weights": 0.2}, "generation", 0.4),
        ({"train": 0.6, "save": 0.4}, {"generate": 0.7, "wait_room": 0.3}, "save", 0.4),
        # engines that pause while the trainer never starves hold nobody up
        ({"train": 1.0, "wait_batch": 0.0}, {"generate": 0.7, "load_weights": 0.3}, "balanced", 0.0),
        # a checkpoint that is written while training goes on costs nothing
        ({"train": 0.95, "save": 0.6, "wait_batch": 0.05}, {"generate": 0.98, "wait_room": 0.02}, "balanced", 0.05),
    ],
)
def test_who_is_waited_for_is_named(trainer, rollouter, named, share):
    found = of(trainer, rollouter)
    assert found.bound == named and found.share == pytest.approx(share)
    assert str(found) == found.sentence


JUDGED = {"train": 0.38, "wait_batch": 0.62}, {"generate": 0.526, "wait_reward": 0.62}


def test_a_judge_with_a_limit_is_told_the_rate_that_would_help():
    scoring = Scoring(is_judge=True, per_s=47.4, latency_s=1.0, held_back=1.0)
    assert str(of(*JUDGED, scoring=scoring)) == (
        "judge-bound: 62% of trainer time waits for verdicts; raising its rate limit to 90/s would lift throughput 1.9x"
        ", where generation is the limit"
    )


def test_a_judge_that_holds_nothing_back_is_slow_and_a_higher_limit_is_not_advised():
    scoring = Scoring(is_judge=True, per_s=47.4, latency_s=1.25, held_back=0.1)
    assert str(of(*JUDGED, scoring=scoring)) == (
        "judge-bound: 62% of trainer time waits for verdicts; async_training.staleness_threshold above 3, which hides"
        " its latency of 1.2 s, or a faster judge could lift throughput 1.9x, where generation is the limit"
    )


def test_of_a_threshold_that_nobody_knows_no_number_is_told():
    scoring = Scoring(is_judge=True, per_s=47.4, latency_s=1.25, held_back=0.1)
    said = str(of(*JUDGED, Setting(threshold=None), scoring))
    assert "async_training.staleness_threshold raised, which hides its latency of 1.2 s, or a faster judge" in said


def test_what_is_not_measured_is_not_claimed():
    assert "(its rate was not measured) could" in str(of(*JUDGED, scoring=Scoring(is_judge=True)))
    unsure = str(of(*JUDGED, scoring=Scoring(is_judge=True, per_s=47.4)))
    assert "raising its rate limit to 90/s could lift" in unsure
    nobody = of({"train": 0.0, "wait_batch": 1.0}, {"generate": 0.0, "wait_reward": 1.0})
    assert nobody.lift is None and "not known: no other part has been seen at work" in str(nobody)


def test_a_judge_whose_limit_is_in_use_is_named_also_while_a_few_groups_are_in_generation():
    trainer, rollouter = {"train": 0.33, "wait_batch": 0.67}, {"generate": 0.95, "wait_room": 0.05}
    scoring = Scoring(is_judge=True, per_s=5.0, held_back=1.0, slots_in_use=0.2)
    assert str(of(trainer, rollouter, scoring=scoring)).startswith(
        "judge-bound: 67% of trainer time waits for verdicts; raising its rate limit to 15/s would lift throughput 3.0x"
    )
    assert of(trainer, rollouter, scoring=replace(scoring, held_back=0.0)).bound == "generation"


def test_a_function_is_told_its_own_settings():
    scoring = Scoring(per_s=500.0, held_back=1.0)
    assert "raising reward.concurrency or reward.workers for 951/s would" in str(of(*JUDGED, scoring=scoring))


def test_generation_is_told_in_replicas_and_training_in_speed():
    assert str(of({"train": 0.6, "wait_batch": 0.4}, {"generate": 1.0})) == (
        "generation-bound: 40% of trainer time waits for responses; 1.7x the generation speed (5 replicas instead of 3)"
        " would lift throughput up to 1.7x, where training is the limit"
    )
    assert str(of({"train": 0.98}, {"generate": 0.6, "wait_room": 0.4})) == (
        "training-bound: 40% of generation time is held back so that samples stay fresh; 1.7x the training speed would "
        "lift throughput up to 1.7x, where generation is the limit"
    )


def test_a_mode_that_takes_turns_is_told_what_overlapping_would_give():
    found = of({"train": 0.4, "wait_batch": 0.6}, {"generate": 0.5, "wait_room": 0.5}, Setting(mode="sync"))
    assert str(found) == (
        "generation-bound: 60% of trainer time waits for responses; mode=fully_async would lift throughput up to 2.0x, "
        "where generation is the limit"
    )


def test_weights_and_checkpoints_are_told_how_many_fewer():
    sync = of({"train": 0.5, "pack": 0.4, "wait_batch": 0.1}, {"generate": 0.5, "wait_room": 0.3})
    assert "async_training.sync_every_steps = 2 would lift throughput 1.2x" in str(sync)
    assert sync.lift == pytest.approx(1.25)
    save = of({"train": 0.6, "save": 0.4}, {"generate": 0.5, "wait_room": 0.3})
    assert "trainer.save_every_steps = 40 would lift throughput 1.2x" in str(save)


def test_a_remedy_ends_where_the_next_part_is_busy():
    found = of({"train": 0.5, "pack": 0.4, "wait_batch": 0.1}, {"generate": 0.9, "load_weights": 0.1})
    assert found.bound == "sync" and found.lift == pytest.approx(1 / 0.9)
    hopeless = of({"train": 0.85, "wait_batch": 0.15}, {"generate": 0.97, "wait_reward": 0.15})
    assert "there is little to gain, as generation is busy 97% of the time" in str(hopeless)


def test_a_judge_whose_limit_is_known_is_where_a_remedy_ends():
    waits = {"train": 0.5, "wait_batch": 0.5}, {"generate": 1.0}
    assert "1.2x, where the judge is the limit" in str(of(*waits, scoring=Scoring(is_judge=True, in_use=0.8)))
    busy = str(of(*waits, scoring=Scoring(is_judge=True, in_use=0.99)))
    assert "there is little to gain, as the judge is busy 99% of the time" in busy
    assert "2.0x, where training is the limit" in str(of(*waits, scoring=Scoring(is_judge=True)))
    bound = of(*JUDGED, scoring=Scoring(is_judge=True, per_s=47.4, held_back=1.0, in_use=1.0))
    assert bound.lift == pytest.approx(1 / 0.526), "its own limit is what is raised"


def test_rollouters_are_averaged():
    waits = {
        "trainer": {"train": 1.0},
        "rollouter-0": {"generate": 1.0},
        "rollouter-1": {"generate": 0.4, "wait_room": 0.6},
    }
    assert str(verdict(waits, STREAMING)).startswith("training-bound: 30%")


@pytest.mark.parametrize("waits", [{}, {"trainer": {"train": 1.0}}, {"rollouter": {"generate": 1.0}}])
def test_before_both_were_measured_nothing_is_claimed(waits):
    assert str(verdict(waits, STREAMING)) == UNMEASURED


SHARE = st.floats(0, 1)
MODE, THRESHOLD = st.sampled_from(["sync", "one_step_off", "fully_async"]), st.none() | st.integers(0, 3)
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
    """Shares of one component's time, which are one in all; the last is of what has no name."""
    cuts = sorted(draw(st.tuples(*[SHARE] * len(names))))
    return dict(zip(names, (after - before for before, after in pairwise([0.0, *cuts])), strict=True))


@given(
    trainer=st.fixed_dictionaries(dict.fromkeys(("train", "wait_batch", "pack", "save"), SHARE)),
    rollouter=st.fixed_dictionaries(dict.fromkeys(("generate", "wait_reward", "wait_room", "load_weights"), SHARE)),
    mode=MODE,
    threshold=THRESHOLD,
    scoring=SCORING,
)
def test_whatever_was_measured_gives_one_whole_sentence(trainer, rollouter, mode, threshold, scoring):
    found = of(trainer, rollouter, Setting(mode=mode, threshold=threshold), scoring)
    assert "\n" not in str(found) and "inf" not in str(found) and "nan" not in str(found)
    assert ";" in str(found) or found.bound == "unmeasured"
    assert found.lift is None or found.lift >= 1
    full = 1.0 if scoring.slots_in_use is None or found.bound == "training" else scoring.slots_in_use
    busiest = max(trainer["train"] + trainer["pack"], min(rollouter["generate"], full))
    if mode != "fully_async" and found.lift is not None and found.bound not in ("sync", "save"):
        assert found.lift <= max(1.0, 1 / busiest) + 1e-9


@given(
    trainer=spent("train", "wait_batch", "pack"),
    rollouter=spent("generate", "wait_reward", "wait_room", "load_weights"),
    mode=MODE,
    threshold=THRESHOLD,
    scoring=SCORING,
    tried=st.none() | st.floats(0.5, 100).map(lambda found: lambda part, speed: found),
)
def test_no_more_is_promised_than_the_waiting_of_the_other_side(trainer, rollouter, mode, threshold, scoring, tried):
    waits = {"trainer": trainer, "rollouter": rollouter}
    found = verdict(waits, Setting(mode=mode, threshold=threshold), scoring, tried=tried)
    if found.lift is None or found.bound == "balanced":
        return
    rests = sum(rollouter.values()) - rollouter["generate"]
    waits_for_it = {"training": rests, "sync": 0.5 * found.share, "save": 0.5 * found.share}
    wait = waits_for_it.get(found.bound, trainer["wait_batch"])
    assert found.lift * (1 - wait) <= 1 + 1e-6


def test_time_that_is_neither_work_nor_waiting_is_not_taken_away():
    found = of({"train": 0.17, "wait_batch": 0.52}, {"generate": 0.95, "wait_reward": 0.04})
    assert found.lift == pytest.approx(1 / 0.52), "and not 1 / 0.17: loading and saving stay"


@pytest.mark.parametrize("bound", ["generation", "training"])
def test_a_threshold_of_none_is_turns_whatever_the_mode_is_called(bound):
    """A faster half of a turn gives no more than that half, and the other half stays."""
    waits = {"train": 0.4, "wait_batch": 0.6}, {"generate": 0.6, "wait_room": 0.4}
    if bound == "training":
        waits = {"train": 0.6, "wait_batch": 0.4}, {"generate": 0.4, "wait_room": 0.6}
    found = of(*waits, Setting(threshold=0))
    assert found.bound == bound and found.lift == pytest.approx(of(*waits, Setting(mode="sync")).lift)
    assert "staleness_threshold above 0, which gives generation room, could lift throughput up to 1.7x" in str(found)


def test_a_side_that_waits_itself_is_not_told_to_be_faster():
    """Engines that have too little in hand: more of them would have less each."""
    for waits, scoring in (
        (({"train": 0.1, "wait_batch": 0.9}, {"generate": 0.8, "wait_room": 0.2}), None),
        (({"train": 0.1, "wait_batch": 0.9}, {"generate": 1.0}), Scoring(slots_in_use=0.1)),
    ):
        said = str(of(*waits, scoring=scoring))
        assert "replicas" not in said and "staleness_threshold above 3 or more groups a step" in said
    assert "replicas" in str(
        of({"train": 0.1, "wait_batch": 0.9}, {"generate": 1.0}, scoring=Scoring(slots_in_use=1.0))
    )


def test_what_was_tried_is_told_and_not_what_the_waiting_would_allow():
    waits = {"trainer": {"train": 0.1, "wait_batch": 0.9}, "rollouter": {"generate": 1.0}}
    found = verdict(
        waits, STREAMING, tried=lambda part, speed: 3.0 if (part, round(speed)) == ("generation", 10) else 0
    )
    assert found.lift == 3.0
    assert "(30 replicas instead of 3) would lift throughput 3.0x" in str(found)
    assert "replicas" not in str(verdict(waits, STREAMING, tried=lambda part, speed: 1.0))
