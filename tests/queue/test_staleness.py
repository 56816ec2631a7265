"""The staleness bound holds and is reached, and a run that can continue never stops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from freewheel.queue.staleness import Bounds, PolicyState, StalenessPolicy

ENOUGH_STEPS = 4
"""Further steps that show that an endless run continues: past a version of three steps."""
ROUNDS = 60
"""Rounds of the fair schedule within which every small run must have ended."""


class Pipeline:
    """The policy with engines and a trainer that follow the protocol. test_kills.py has all interleavings."""

    def __init__(self, bounds: Bounds, prompts: int | None = None) -> None:
        self.policy = StalenessPolicy(bounds)
        self.prompts_left = prompts
        self.born: dict[int, int] = {}
        """Sequence → the version of its first token."""
        self.open: list[int] = []
        self.steps: list[list[int]] = []
        self.steps_done = self.short_steps = 0

    def admit(self) -> bool:
        self.policy.exhausted = self.prompts_left == 0
        if self.policy.room == 0 or self.policy.exhausted:
            return False
        sequence = self.policy.admit()
        self.born[sequence] = self.policy.published
        self.open.append(sequence)
        if self.prompts_left is not None:
            self.prompts_left -= 1
        assert self.policy.alive <= self.policy.bounds.capacity
        return True

    def admit_all(self) -> None:
        while self.admit():
            pass

    def finish(self, sequence: int) -> None:
        self.open.remove(sequence)
        self.policy.finish(sequence)

    def take(self) -> bool:
        chosen = self.policy.select(self.policy.bounds.groups_per_step)
        self.steps += [chosen] if chosen else []
        return bool(chosen)

    def commit(self) -> None:
        step = self.steps.pop(0)
        assert not self.policy.bounds.find_stale([self.born[one] for one in step], self.policy.version)
        self.short_steps += len(step) < self.policy.bounds.groups_per_step
        self.policy.commit(step)
        self.steps_done += 1

    def publish(self) -> None:
        self.policy.publish(self.policy.version)

    def run_fairly(self) -> None:
        """Everybody works in turns: the run must end, or make some more steps."""
        enough = self.steps_done + ENOUGH_STEPS
        for _ in range(ROUNDS):
            if self.policy.finished or self.steps_done >= enough:
                return
            self.admit_all()
            for sequence in list(self.open):
                self.finish(sequence)
            if self.take():
                self.commit()
            self.publish()
        raise AssertionError(f"it stopped: {vars(self.policy)}")


# -- the bound, and that it is reached --------------------------------------------------------------------------------


def bounds(threshold: int = 0, window: int = 1, per_step: int = 2, per_version: int = 1, **more: Any) -> Bounds:
    made = Bounds(
        groups_per_step=per_step,
        steps_per_version=per_version,
        threshold=threshold,
        window=window,
        max_lag_allowed=0,
        **{"max_alive": 10_000, **more},
    )
    return replace(made, max_lag_allowed=made.max_lag)


def hold_up(run: Pipeline, straggler: int) -> None:
    """Finish and train everything but the straggler, for as long as the policy lets the others pass."""
    while True:
        run.admit_all()
        for sequence in [one for one in run.open if one != straggler]:
            run.finish(sequence)
        if not run.take():
            return
        run.commit()
        run.publish()


@pytest.mark.parametrize("threshold", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("per_step", [1, 2, 4])
@pytest.mark.parametrize("per_version", [1, 2])
def test_the_bound_is_reached_and_not_passed(threshold: int, window: int, per_step: int, per_version: int) -> None:
    """At threshold 0 a version takes all slots, also the straggler's: no version can overtake it."""
    limits = bounds(threshold, window, per_step, per_version)
    run = Pipeline(limits)
    run.admit_all()
    straggler = max(run.open)
    hold_up(run, straggler)
    run.finish(straggler)
    assert run.take() and straggler in run.steps[0]
    lag = run.policy.version - run.born[straggler]
    assert lag == (limits.max_lag if threshold else 0)


def test_the_default_window_uses_up_what_the_configuration_allows() -> None:
    threshold, allowed, per_step = 3, 5, 32
    limits = bounds(threshold, (allowed - threshold) * per_step + 1, per_step)
    assert limits.max_lag == allowed
    assert replace(limits, window=limits.window + 1).max_lag == allowed + 1
    assert limits.find_stale([7, 1, 2, 3], version=7) == [1], "a group exactly at the limit is trained"


# -- admission --------------------------------------------------------------------------------------------------------


def test_a_dropped_group_frees_its_slot_at_once_and_a_trained_one_when_its_version_is_published() -> None:
    run = Pipeline(bounds(threshold=2, per_step=1))
    run.admit_all()
    run.policy.drop(run.open.pop(0))
    assert run.policy.room == 1, "at threshold 0 the next version may need this very group"
    run.admit()
    for _ in range(3):
        run.finish(run.open[0])
        run.take()
        run.commit()
    rooms = [run.policy.room]
    for version in (2, 1, 3):
        run.policy.publish(version)
        rooms.append(run.policy.room)
    assert rooms == [0, 2, 2, 3] and run.policy.published == 3


# -- selection --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "finished", "count", "chosen"),
    [
        (1, (1, 2, 3), 2, []),
        (1, (0, 1, 2), 2, [0, 1]),
        (2, (1, 2), 2, []),
        (2, (0, 1, 2), 3, [0, 1, 2]),
        (4, (1, 4, 5), 2, []),
        (4, (1, 2, 4, 5), 2, [1, 2]),
        (6, (1, 4, 5), 2, [1, 4]),
    ],
)
def test_only_groups_within_the_window_of_the_oldest_are_taken(
    window: int, finished: tuple[int, ...], count: int, chosen: list[int]
) -> None:
    policy = StalenessPolicy(bounds(threshold=2, window=window))
    for _ in range(6):
        policy.admit()
    for sequence in finished:
        policy.finish(sequence)
    assert policy.select(count) == chosen
    policy.untake(chosen)
    assert policy.select(count) == chosen, "groups that were given back come before later ones"


def test_min_batches_holds_a_step_back_until_as_many_are_ready() -> None:
    policy = StalenessPolicy(bounds(threshold=1, min_batches=2))
    for _ in range(4):
        policy.admit()
    for sequence in range(3):
        policy.finish(sequence)
    assert policy.select(2) == []
    assert policy.select(1, starting=False) == [0], "a replacement does not wait"
    policy.finish(3)
    assert policy.select(2) == [], "only three are ready"
    policy.untake([0])
    assert policy.select(2) == [0, 1]


@pytest.mark.parametrize("per_version", [1, 2, 3])
@pytest.mark.parametrize("threshold", [0, 1, 2])
@pytest.mark.parametrize("max_alive", [6, 9, 100])
def test_exactly_as_many_batches_as_the_configuration_allows_can_be_ready(
    per_version: int, threshold: int, max_alive: int
) -> None:
    limits = bounds(threshold, 1, 2, per_version, max_alive=max_alive)
    batches = limits.most_ready // limits.groups_per_step
    run = Pipeline(replace(limits, min_batches=batches))
    run.run_fairly()
    assert run.steps_done == ENOUGH_STEPS
    with pytest.raises(AssertionError):
        Pipeline(replace(limits, min_batches=batches + 1)).run_fairly()


@pytest.mark.parametrize("total_groups, prompts", [(7, None), (None, 7), (7, 9), (9, 7), (1, None), (None, 1)])
def test_only_the_last_step_is_short(total_groups: int | None, prompts: int | None) -> None:
    run = Pipeline(bounds(threshold=1, window=4, min_batches=2, total_groups=total_groups), prompts)
    run.run_fairly()
    assert run.policy.finished
    assert run.policy.trained == min(one for one in (total_groups, prompts) if one is not None)
    assert run.short_steps == 1


# -- after a restart --------------------------------------------------------------------------------------------------


def test_a_policy_continues_from_its_state() -> None:
    state = PolicyState(
        version=4,
        published=2,
        trained=9,
        steps_in_version=1,
        next_sequence=20,
        untaken={15: True, 12: False},
        taken=[10, 11],
        held={3: 2, 5: 1},
    )
    policy = StalenessPolicy(bounds(threshold=4, window=5, per_step=1, per_version=2), state)
    assert (policy.alive, policy.open, policy.ready, policy.trained) == (7, 1, 1, 9)
    assert policy.admit() == 20
    policy.publish(3)
    assert policy.alive == 6
    assert policy.version_after_step == 5
    assert policy.commit([10]) and policy.version == 5


@pytest.mark.parametrize("done", [1, 2, 5])
def test_the_next_step_completes_a_version_that_had_more_steps_before(done: int) -> None:
    """A run resumed in the middle of a version may have fewer steps per version than before."""
    state = PolicyState(version=4, published=4, steps_in_version=done, next_sequence=9, taken=[7], held={5: done})
    policy = StalenessPolicy(bounds(threshold=1, per_step=1, per_version=2), state)
    assert policy.room > 0, "there is room for the step that completes the version"
    assert policy.version_after_step == 5
    assert policy.commit([7]) and policy.version == 5


def test_sequences_that_a_restart_skips_count_in_the_window() -> None:
    """Some of them may have been taken before the oldest group."""
    state = PolicyState(next_sequence=1024, untaken={7: False, 8: True})
    policy = StalenessPolicy(bounds(threshold=2, window=4), state)
    policy.finish(policy.admit())
    assert policy.select(2) == []
    policy.finish(7)
    assert policy.select(3) == [7, 8, 1024]


@pytest.mark.parametrize(
    "wrong",
    [
        {"next_sequence": 3, "untaken": {3: True}},
        {"next_sequence": 9, "untaken": {3: True}, "taken": [3]},
        {"version": 1, "published": 2},
        {"version": 3, "published": 2, "held": {2: 1}},
        {"version": 3, "published": 2, "held": {5: 1}},
    ],
    ids=["sequence issued twice", "taken twice", "published too early", "held too long", "held for ever"],
)
def test_an_impossible_state_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        PolicyState(**wrong)


def test_a_run_with_more_groups_alive_than_it_will_train_on_still_ends() -> None:
    """The record of a failed attempt was lost: it is alive next to the attempt that replaced it."""
    state = PolicyState(next_sequence=6, untaken=dict.fromkeys(range(6), True))
    policy = StalenessPolicy(bounds(threshold=3, per_step=4, total_groups=5), state)
    assert policy.room == 0
    for count in (4, 2):
        chosen = policy.select(4)
        assert len(chosen) == count
        policy.commit(chosen)
    assert policy.finished
