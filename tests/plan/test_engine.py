"""One engine's decoding: slots, steps and pauses, against what can be said by hand."""

from __future__ import annotations

import itertools

import pytest

from freewheel.plan.scene import Generation
from freewheel.plan.simulation import Engine, Group


def engine(lengths, **model):
    return Engine(Generation(**{"slots": 2, "step_s": 1.0, **model}), itertools.cycle(lengths))


def ends(one, until=1000):
    """(time, groups whose response ended then), until nothing runs."""
    found = []
    while (at := one.due_at()) <= until:
        found.append((at, [group.sequence for group in one.finish(at)]))
    return found


def put(one, *sequences, samples=1, at=0.0):
    one.advance(at)
    groups = [Group(sequence, samples, 0) for sequence in sequences]
    for group in groups:
        one.add(group)
    one.enter()
    return groups


def test_a_slot_that_is_free_is_given_on_at_once():
    one = engine([3, 5, 4])
    put(one, 0, 1, 2)
    assert ends(one) == [(3.0, [0]), (5.0, [1]), (7.0, [2])]
    assert (one.busy_s, one.tokens, one.running) == (7.0, 12, 0)


def test_a_step_takes_longer_with_more_that_run():
    one = engine([4, 8], per_sequence_s=0.5)
    put(one, 0, 1)
    assert ends(one) == [(8.0, [0]), (14.0, [1])]


def test_what_comes_in_the_middle_of_a_step_enters_with_the_next():
    one = engine([4])
    put(one, 0)
    put(one, 1, at=1.5)
    assert ends(one) == [(4.0, [0]), (6.0, [1])]


def test_a_few_free_slots_are_not_filled_while_others_run():
    one = engine([2, 4, 4, 4, 1], slots=4, refill=2)
    put(one, 0, 1, 2, 3, 4, 5)
    assert [at for at, _ in ends(one)] == [2.0, 4.0, 5.0, 6.0]
    # the slot of the first stays empty until the others end: two wait, and one slot is free


def test_a_pause_holds_everything_and_loses_nothing():
    one = engine([4])
    put(one, 0)
    one.advance(1.0)
    one.paused = True
    assert one.due_at() == float("inf")
    one.advance(6.0)
    one.paused = False
    assert ends(one) == [(9.0, [0])]
    assert one.busy_s == 4.0


def test_prompts_are_read_before_the_next_step_and_once_a_group():
    one = engine([2], slots=4, prefill_s=0.5)
    put(one, 0, 1, samples=2)
    assert ends(one) == [(3.0, [0, 0, 1, 1])]


def test_what_goes_on_beside_it_slows_it_from_then_on():
    one = engine([4])
    put(one, 0)
    one.advance(2.0)
    one.slow(2.0)
    assert ends(one) == [(6.0, [0])]


def test_ends_that_are_not_told_apart_fall_together_and_none_before_its_time_by_much():
    one = engine([3, 5, 9, 14], slots=4, resolution=4)
    groups = put(one, 0, 1, 2, 3)
    assert ends(one) == [(4.0, [0, 1]), (8.0, [2]), (16.0, [3])] and [group.tokens for group in groups] == [3, 5, 9, 14]
    one = engine([1], slots=1, resolution=4)
    put(one, 0, 1)
    assert ends(one) == [(4.0, [0]), (8.0, [1])], "each takes a step at least"


def test_a_group_has_the_version_of_its_first_token():
    one = engine([4, 6])
    first, second, third = put(one, 0, 1, 2)
    one.finish(one.due_at())
    one.version = 7
    assert (first.version, second.version, third.version) == (0, 0, 0), "the third entered when the first ended"
    (fourth,) = put(one, 3, at=5.0)
    one.finish(one.due_at())
    assert fourth.version == 7


def test_slots_are_filled_as_the_native_scheduler_fills_them():
    pytest.importorskip("torch")
    from freewheel.rollout.native.loop import Scheduler

    real = Scheduler(slots=8, refill=2)
    simulated = engine([3, 5, 2, 7, 4, 6, 1], slots=8, refill=2)
    lengths = itertools.cycle([3, 5, 2, 7, 4, 6, 1])
    put(simulated, *range(12), samples=3)
    for sequence in range(12):
        real.add(sequence, 3)
    left: dict[int, int] = {}
    expected = []
    for step in range(1, 100):
        for placed in real.admit():
            left[placed.slot] = next(lengths)
        ended = [slot for slot in left if left[slot] == 1]
        left = {slot: rest - 1 for slot, rest in left.items()}
        left = {slot: rest for slot, rest in left.items() if slot not in ended}
        if groups := sorted(real.release(slot)[0] for slot in ended):
            expected.append((float(step), groups))
    assert [(at, sorted(groups)) for at, groups in ends(simulated)] == expected
