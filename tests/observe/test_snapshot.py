"""What a run waits for, in words."""

from __future__ import annotations

import pytest

from freewheel.observe.snapshot import UNMEASURED, bottleneck


@pytest.mark.parametrize(
    ("trainer", "rollouter", "named"),
    [
        # streaming: one of the two is slower, and the other waits for it
        ({"train": 0.6, "wait_batch": 0.4}, {"generate": 1.0}, "generation: 40%"),
        ({"train": 0.98, "wait_batch": 0.02}, {"generate": 0.6, "wait_room": 0.4}, "training: 40%"),
        ({"train": 0.95, "wait_batch": 0.05}, {"generate": 0.93, "wait_room": 0.07}, "nothing"),
        # a judge that takes its time: the trainer starves and nothing is generated
        ({"train": 0.2, "wait_batch": 0.8}, {"generate": 0.3, "wait_reward": 0.7, "wait_room": 0.0}, "reward: 70%"),
        # a judge that is slow but hidden: nobody waits for it
        ({"train": 0.97, "wait_batch": 0.03}, {"generate": 0.5, "wait_reward": 0.3, "wait_room": 0.2}, "training: 20%"),
        # by turns, as in mode sync: the longer of the two
        ({"train": 0.3, "wait_batch": 0.7}, {"generate": 0.7, "wait_room": 0.3}, "generation: 70%"),
        ({"train": 0.7, "wait_batch": 0.3}, {"generate": 0.3, "wait_room": 0.7}, "training: 70%"),
        # weights and checkpoints
        ({"train": 0.9, "wait_batch": 0.1}, {"generate": 0.7, "load_weights": 0.3}, "sync: 30%"),
        ({"train": 0.5, "pack": 0.4, "wait_batch": 0.1}, {"generate": 0.9, "wait_room": 0.1}, "sync: 40%"),
        ({"train": 0.6, "save": 0.4}, {"generate": 0.7, "wait_room": 0.3}, "save: 40%"),
        # a checkpoint that is written while training goes on costs nothing
        ({"train": 0.95, "save": 0.6, "wait_batch": 0.05}, {"generate": 0.98, "wait_room": 0.02}, "nothing"),
    ],
)
def test_who_is_waited_for_is_named(trainer, rollouter, named):
    assert bottleneck({"trainer": trainer, "rollouter": rollouter}).startswith(named)


def test_rollouters_are_averaged():
    waits = {
        "trainer": {"train": 1.0},
        "rollouter-0": {"generate": 1.0},
        "rollouter-1": {"generate": 0.4, "wait_room": 0.6},
    }
    assert bottleneck(waits).startswith("training: 30%")


@pytest.mark.parametrize("waits", [{}, {"trainer": {"train": 1.0}}, {"rollouter": {"generate": 1.0}}])
def test_before_both_were_measured_nothing_is_claimed(waits):
    assert bottleneck(waits) == UNMEASURED
