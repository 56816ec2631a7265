"""The staleness bound over arbitrary interleavings, and that nothing which could go on ever stops."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from freewheel.queue.ledger import Failure, Ledger, data_failure, infra_failure
from freewheel.queue.staleness import Bounds, PolicyState, StalenessPolicy

ENGINES = 3
PREFETCH = 2
"""Batches that a trainer may hold: the one it trains on and the next."""
ENOUGH_STEPS = 4
"""Further steps that show that an endless run goes on: past a version of three steps."""
ROUNDS = 60
"""Rounds of the fair schedule within which every small run must have ended."""


@dataclass
class Group:
    ordinal: int
    engine: int
    born: int
    """The version of its first token."""


class Pipeline:
    """The pure policy and ledger as `MessageQueue` uses them, with engines and a trainer that keep to the protocol."""

    def __init__(self, bounds: Bounds, prompts: int | None) -> None:
        self.policy = StalenessPolicy(bounds)
        self.ledger = Ledger(total=prompts)
        self.engines = [0] * ENGINES
        self.groups: dict[int, Group] = {}
        self.open: list[int] = []
        self.ready: list[int] = []
        self.steps: deque[list[int]] = deque()
        self.missing = 0
        """Groups of the last step in `steps` that are being replaced."""
        self.trained: list[int] = []
        """Ordinals."""
        self.steps_done = 0
        self.short_steps = 0

    def look(self) -> None:
        self.policy.exhausted = self.ledger.exhausted

    # -- rollouters ---------------------------------------------------------------------------------------------------

    @property
    def can_admit(self) -> bool:
        self.look()
        return self.policy.room > 0 and not self.policy.exhausted

    def admit(self, engine: int) -> None:
        issued = self.ledger.issue()
        assert issued is not None
        sequence = self.policy.admit()
        self.groups[sequence] = Group(issued[0], engine, self.engines[engine])
        self.open.append(sequence)
        assert self.policy.alive <= self.policy.bounds.capacity

    def finish(self, sequence: int) -> None:
        self.open.remove(sequence)
        self.ready.append(sequence)
        self.policy.finish(sequence)

    def fail(self, sequence: int, failure: Failure | None) -> None:
        """An attempt dies, open or ready; None: it is repeated at no cost."""
        (self.open if sequence in self.open else self.ready).remove(sequence)
        ordinal = self.groups.pop(sequence).ordinal
        self.policy.drop(sequence)
        if failure:
            self.ledger.fail(ordinal, failure)
        else:
            self.ledger.retry(ordinal, "stale")

    # -- trainer ------------------------------------------------------------------------------------------------------

    def take(self) -> bool:
        self.look()
        chosen = self.policy.select(self.policy.bounds.groups_per_step)
        if chosen:
            self.leave_the_queue(chosen)
            self.steps.append(chosen)
        return bool(chosen)

    def leave_the_queue(self, chosen: list[int]) -> None:
        for sequence in chosen:
            assert sequence < min(self.open + self.ready) + self.policy.bounds.window
            self.ready.remove(sequence)

    def replace(self, sequence: int) -> None:
        """A group of the last batch is given up as stale."""
        self.steps[-1].remove(sequence)
        self.policy.drop(sequence)
        self.ledger.retry(self.groups.pop(sequence).ordinal, "stale")
        self.missing += 1

    def refill(self) -> None:
        self.look()
        found = self.policy.select(self.missing, starting=False) if self.missing else []
        self.leave_the_queue(found)
        self.steps[-1] += found
        self.missing = 0 if self.policy.dry else self.missing - len(found)
        if not self.missing and not self.steps[-1]:
            self.steps.pop()

    def untake(self) -> None:
        given = self.steps.pop()
        self.policy.untake(given)
        self.ready += given
        self.missing = 0

    def commit(self) -> None:
        self.look()
        bounds, step = self.policy.bounds, self.steps.popleft()
        assert 0 < len(step) <= bounds.groups_per_step
        if len(step) < bounds.groups_per_step:
            assert not self.policy._untaken and self.policy.dry, "a short step, and more groups would have come"
            self.short_steps += 1
        for sequence in step:
            self.check_lag(self.groups[sequence])
        ordinals = [self.groups.pop(sequence).ordinal for sequence in step]
        self.ledger.train(ordinals)
        self.trained += ordinals
        self.policy.commit(step)
        self.steps_done += 1

    def check_lag(self, group: Group) -> None:
        assert self.policy.lag(group.born) <= self.policy.bounds.max_lag

    # -- the proof that it goes on ------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        self.look()
        return self.policy.finished

    def run_fairly(self) -> None:
        """Everybody does what they can, in turns: the run must end, or make some more steps."""
        enough = self.steps_done + ENOUGH_STEPS
        for _ in range(ROUNDS):
            if self.finished or self.steps_done >= enough:
                break
            while self.can_admit:
                self.admit(0)
            for sequence in list(self.open):
                self.finish(sequence)
            if self.missing:
                self.refill()
            if not self.steps:
                self.take()
            if self.steps and not self.missing:
                self.commit()
            self.engines = [self.policy.version] * ENGINES
            self.policy.publish(self.policy.version)
        assert self.finished or self.steps_done >= enough, self.stuck()
        assert len(set(self.trained)) == len(self.trained)

    def stuck(self) -> str:
        return f"{self.policy.__dict__} {self.missing=} {self.steps=} {self.ledger.__dict__}"


class UnreliablePipeline(Pipeline):
    """With engines that come back with old weights, only the check at consumption holds: it must catch all."""

    def commit(self) -> None:
        if len(self.steps) == 1:  # `replace` is for the last batch
            for sequence in self.stale():
                self.replace(sequence)
            if self.missing:
                self.refill()
                return
        elif self.stale():
            self.untake()  # the next batch goes back, so that the groups come in order
            self.commit()
            return
        super().commit()

    def stale(self) -> list[int]:
        born = [self.groups[one].born for one in self.steps[0]]
        return [self.steps[0][index] for index in self.policy.bounds.find_stale(born, self.policy.version)]

    def check_lag(self, group: Group) -> None:
        assert self.policy.version - group.born <= self.policy.bounds.max_lag_allowed


@st.composite
def some_bounds(draw: st.DrawFn) -> Bounds:
    """What the configuration lets through: its rules on pairs of keys are repeated here."""
    per_step, per_version = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    threshold = draw(st.integers(0, 3))
    bounds = Bounds(
        groups_per_step=per_step,
        steps_per_version=per_version,
        threshold=threshold,
        window=draw(st.integers(1, 3 * per_step * per_version)),
        max_alive=draw(st.integers(per_step * per_version, 4 * per_step * per_version + 2)),
        max_lag_allowed=0,
        total_groups=draw(st.none() | st.integers(1, 25)),
    )
    bounds = replace(bounds, max_lag_allowed=bounds.max_lag + draw(st.integers(0, 1)))
    return replace(bounds, min_batches=draw(st.integers(1, bounds.most_ready // per_step)))


class Interleavings(RuleBasedStateMachine):
    pipeline_type: type[Pipeline] = Pipeline

    @initialize(bounds=some_bounds(), prompts=st.none() | st.integers(1, 25))
    def start(self, bounds: Bounds, prompts: int | None) -> None:
        self.run = self.pipeline_type(bounds, prompts)

    # Rules that fill the pipeline come several at a time: long runs would otherwise be rare.
    @precondition(lambda self: self.run.can_admit)
    @rule(engine=st.integers(0, ENGINES - 1), count=st.integers(1, 8))
    def admissions(self, engine: int, count: int) -> None:
        for _ in range(count):
            if self.run.can_admit:
                self.run.admit(engine)

    @precondition(lambda self: self.run.open)
    @rule(choices=st.lists(st.integers(0, 99), min_size=1, max_size=8))
    def finishes(self, choices: list[int]) -> None:
        for choice in choices:
            if self.run.open:
                self.run.finish(self.run.open[choice % len(self.run.open)])

    @precondition(lambda self: len(self.run.open) > 1)
    @rule()
    def all_but_the_oldest_finish(self) -> None:
        for sequence in sorted(self.run.open)[1:]:
            self.run.finish(sequence)

    @precondition(lambda self: self.run.open or self.run.ready)
    @rule(
        choice=st.integers(0, 99),
        failure=st.sampled_from([infra_failure("engine", ""), data_failure("reward", ""), None]),
    )
    def one_fails(self, choice: int, failure: Failure | None) -> None:
        alive = self.run.open + self.run.ready
        self.run.fail(alive[choice % len(alive)], failure)

    @precondition(lambda self: self.run.open)
    @rule(engine=st.integers(0, ENGINES - 1))
    def an_engine_dies(self, engine: int) -> None:
        for sequence in [one for one in self.run.open if self.run.groups[one].engine == engine]:
            self.run.fail(sequence, infra_failure("lost", ""))
        self.run.engines[engine] = self.run.policy.version

    @precondition(lambda self: len(self.run.steps) < PREFETCH and not self.run.missing)
    @rule()
    def take(self) -> None:
        self.run.take()

    @precondition(lambda self: self.run.steps and self.run.steps[-1])
    @rule(choice=st.integers(0, 99))
    def one_is_stale(self, choice: int) -> None:
        step = self.run.steps[-1]
        self.run.replace(step[choice % len(step)])

    @precondition(lambda self: self.run.missing)
    @rule()
    def refill(self) -> None:
        self.run.refill()

    @precondition(lambda self: self.run.steps)
    @rule(everything=st.booleans())
    def give_back(self, everything: bool) -> None:
        self.run.untake()
        while everything and self.run.steps:
            self.run.untake()

    @precondition(lambda self: len(self.run.steps) > (1 if self.run.missing else 0))
    @rule()
    def commit(self) -> None:
        self.run.commit()

    @rule(engine=st.integers(0, ENGINES - 1), behind=st.integers(0, 2))
    def an_engine_loads(self, engine: int, behind: int) -> None:
        self.run.engines[engine] = max(self.run.engines[engine], self.run.policy.version - behind)

    @rule(behind=st.integers(0, 1))
    def a_version_is_published(self, behind: int) -> None:
        self.run.policy.publish(max(0, min(self.run.engines) - behind))

    @rule()
    def all_load_and_publish(self) -> None:
        self.run.engines = [self.run.policy.version] * ENGINES
        self.run.policy.publish(self.run.policy.version)

    @rule()
    def it_could_go_on_from_here(self) -> None:
        copy.deepcopy(self.run).run_fairly()

    @invariant()
    def the_policy_counts_what_is_there(self) -> None:
        if not hasattr(self, "run"):
            return
        policy = self.run.policy
        assert policy.alive <= policy.bounds.capacity
        assert (policy.open, policy.ready) == (len(self.run.open), len(self.run.ready))
        assert policy.bounds.total_groups is None or policy.trained <= policy.bounds.total_groups
        assert policy.finished is False or not self.run.groups

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.run_fairly()


class UnreliableInterleavings(Interleavings):
    pipeline_type = UnreliablePipeline

    @rule(engine=st.integers(0, ENGINES - 1), back=st.integers(1, 6))
    def an_engine_is_restored_with_old_weights(self, engine: int, back: int) -> None:
        self.run.engines[engine] = max(0, self.run.engines[engine] - back)

    @rule()
    def a_version_is_cut_short(self) -> None:
        self.run.policy.complete_version()

    @rule(behind=st.integers(0, 1))
    def a_version_is_published(self, behind: int) -> None:
        """Whatever engines hold: one of them came back with less than it had confirmed."""
        self.run.policy.publish(max(0, self.run.policy.version - behind))


_SETTINGS = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTheBoundHoldsAndNothingStops = Interleavings.TestCase
TestTheBoundHoldsAndNothingStops.settings = _SETTINGS
TestWhatIsTooOldIsAlwaysCaught = UnreliableInterleavings.TestCase
TestWhatIsTooOldIsAlwaysCaught.settings = _SETTINGS


# -- the bound, and that it is reached --------------------------------------------------------------------------------


def bounds(
    threshold: int = 0, window: int = 1, per_step: int = 2, per_version: int = 1, *, min_batches: int = 1, **more: int
) -> Bounds:
    made = Bounds(
        groups_per_step=per_step,
        steps_per_version=per_version,
        threshold=threshold,
        window=window,
        max_alive=more.pop("max_alive", 10_000),
        max_lag_allowed=0,
        min_batches=min_batches,
        **more,
    )
    return replace(made, max_lag_allowed=made.max_lag)


def straggler_lag(limits: Bounds) -> int:
    """The lag of the group that was admitted last under version 0 and waited for as long as the policy lets it wait."""
    run = Pipeline(limits, None)
    while run.can_admit:
        run.admit(0)
    straggler = max(run.open)
    while True:
        while run.can_admit:
            run.admit(0)
        for sequence in [one for one in run.open if one != straggler]:
            run.finish(sequence)
        if not run.take():
            break
        run.commit()
        run.engines = [run.policy.version] * ENGINES
        run.policy.publish(run.policy.version)
    run.finish(straggler)
    assert run.take()
    assert straggler in run.steps[0]
    return run.policy.lag(run.groups[straggler].born)


@pytest.mark.parametrize("threshold", [1, 3])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("per_step", [1, 2, 4])
@pytest.mark.parametrize("per_version", [1, 2])
def test_the_bound_is_reached_and_not_passed(threshold: int, window: int, per_step: int, per_version: int) -> None:
    limits = bounds(threshold, window, per_step, per_version)
    assert straggler_lag(limits) == limits.max_lag == limits.max_lag_allowed


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("per_version", [1, 2])
def test_at_threshold_zero_nothing_is_ever_overtaken_by_a_version(window: int, per_version: int) -> None:
    """A version takes every slot there is, the straggler's too: the window has nothing to let through."""
    assert straggler_lag(bounds(0, window, 2, per_version)) == 0


def test_the_default_window_uses_up_what_the_configuration_allows() -> None:
    threshold, allowed, per_step = 3, 5, 32
    limits = bounds(threshold, (allowed - threshold) * per_step + 1, per_step)
    assert limits.max_lag == allowed
    assert replace(limits, window=limits.window + 1).max_lag == allowed + 1


def test_a_group_that_is_exactly_at_the_limit_is_trained_and_one_older_is_not() -> None:
    limits = bounds(threshold=3)
    oldest = 7 - limits.max_lag_allowed
    assert limits.find_stale([7, oldest - 1, oldest, oldest + 1], version=7) == [1]


# -- counter-examples that shaped the rules ---------------------------------------------------------------------------


def test_a_dropped_group_gives_its_slot_back_at_once() -> None:
    """Were it to wait for the next version, threshold 0 would stop: that version needs the group itself."""
    run = Pipeline(bounds(threshold=0, per_step=2), None)
    run.admit(0)
    run.admit(0)
    assert run.policy.room == 0
    run.fail(run.open[0], infra_failure("engine", "died"))
    assert run.policy.room == 1
    run.run_fairly()
    assert run.steps_done == ENOUGH_STEPS


def test_a_straggler_is_waited_for_however_many_others_finish() -> None:
    """A window over *finished* groups never fills up behind a straggler, and let one lag by 122 versions."""
    window, per_step = 5, 2
    run = Pipeline(bounds(threshold=1, window=window, per_step=per_step), None)
    run.admit(0)
    straggler = run.open[0]
    for _ in range(100):
        while run.can_admit:
            run.admit(0)
        for sequence in run.open[1:]:
            run.finish(sequence)
        if run.take():
            run.commit()
        run.engines = [run.policy.version] * ENGINES
        run.policy.publish(run.policy.version)
    assert run.open == [straggler]
    assert run.policy.trained == window - 1
    assert run.policy.lag(0) <= run.policy.bounds.max_lag
    run.run_fairly()


def test_a_trained_group_holds_its_slot_until_all_engines_hold_its_version() -> None:
    run = Pipeline(bounds(threshold=0, per_step=2), None)
    for _ in range(2):
        run.admit(0)
        run.finish(run.open[0])
    run.take()
    run.commit()
    assert run.policy.room == 0
    run.policy.publish(1)
    assert run.policy.room == 2


def test_a_publication_that_skips_versions_frees_all_that_it_covers() -> None:
    run = Pipeline(bounds(threshold=2, per_step=1), None)
    for _ in range(3):
        run.admit(0)
        run.finish(run.open[0])
        run.take()
        run.commit()
    assert run.policy.room == 0
    run.policy.publish(2)
    assert run.policy.room == 2
    run.policy.publish(1)
    assert run.policy.published == 2


def test_window_one_takes_groups_strictly_in_the_order_of_admission() -> None:
    policy = StalenessPolicy(bounds(threshold=1, window=1, per_step=2))
    for _ in range(4):
        policy.admit()
    for sequence in (1, 2, 3):
        policy.finish(sequence)
    assert policy.select(2) == []
    policy.finish(0)
    assert policy.select(2) == [0, 1]
    assert policy.select(2) == [2, 3]


def test_a_group_moves_into_the_window_when_the_ones_before_it_are_taken_with_it() -> None:
    policy = StalenessPolicy(bounds(threshold=1, window=2, per_step=2))
    for _ in range(4):
        policy.admit()
    for sequence in (1, 2):
        policy.finish(sequence)
    assert policy.select(2) == []  # 2 is out of reach while 0 is the oldest
    policy.finish(0)
    assert policy.select(3) == [0, 1, 2]


def test_the_window_begins_at_the_oldest_of_several_stragglers() -> None:
    policy = StalenessPolicy(bounds(threshold=2, window=4, per_step=2))
    for _ in range(6):
        policy.admit()
    for sequence in (1, 4, 5):
        policy.finish(sequence)
    assert policy.select(2) == []  # 3 is a straggler too, and 4 and 5 lie within its window: 0 is older
    policy.finish(2)
    assert policy.select(2) == [1, 2]


def test_groups_that_are_given_back_come_before_later_ones() -> None:
    policy = StalenessPolicy(bounds(threshold=1, window=4, per_step=2))
    for _ in range(4):
        policy.finish(policy.admit())
    first = policy.select(2)
    policy.untake(first)
    assert policy.select(2) == first


# -- batches ----------------------------------------------------------------------------------------------------------


def test_min_batches_holds_a_step_back_until_as_many_are_ready() -> None:
    policy = StalenessPolicy(bounds(threshold=1, per_step=2, min_batches=2))
    for _ in range(4):
        policy.admit()
    for sequence in range(3):
        policy.finish(sequence)
    assert policy.select(2) == []
    assert policy.select(1, starting=False) == [0]
    policy.finish(3)
    assert policy.select(2) == []  # one was taken: only three are ready
    policy.untake([0])
    assert policy.select(2) == [0, 1]


@pytest.mark.parametrize("per_version", [1, 2, 3])
@pytest.mark.parametrize("threshold", [0, 1, 2])
@pytest.mark.parametrize("max_alive", [6, 9, 100])
def test_as_many_batches_as_the_configuration_allows_can_be_ready(
    per_version: int, threshold: int, max_alive: int
) -> None:
    limits = bounds(threshold, 1, 2, per_version, max_alive=max_alive)
    batches = limits.most_ready // limits.groups_per_step
    run = Pipeline(replace(limits, min_batches=batches), None)
    run.run_fairly()
    assert run.steps_done == ENOUGH_STEPS


def test_more_batches_than_that_would_stop_the_run() -> None:
    limits = bounds(threshold=1, per_step=2, per_version=2)
    too_many = limits.most_ready // limits.groups_per_step + 1
    with pytest.raises(AssertionError):
        Pipeline(replace(limits, min_batches=too_many), None).run_fairly()


@pytest.mark.parametrize("total_groups, prompts", [(7, None), (None, 7), (7, 9), (9, 7), (1, None), (None, 1)])
def test_only_the_last_step_is_short(total_groups: int | None, prompts: int | None) -> None:
    limits = replace(bounds(threshold=1, window=4, per_step=2, min_batches=2), total_groups=total_groups)
    run = Pipeline(limits, prompts)
    run.run_fairly()
    assert run.finished
    assert run.policy.trained == min(one for one in (total_groups, prompts) if one is not None)
    assert run.short_steps == 1


def test_a_run_does_not_begin_more_groups_than_it_will_train_on() -> None:
    run = Pipeline(replace(bounds(threshold=3, per_step=2), total_groups=5), None)
    while run.can_admit:
        run.admit(0)
    assert len(run.open) == 5


def test_a_version_is_complete_after_its_steps() -> None:
    run = Pipeline(bounds(threshold=1, per_step=1, per_version=3), None)
    versions = []
    for _ in range(6):
        run.admit(0)
        run.finish(run.open[0])
        run.take()
        run.commit()
        versions.append(run.policy.version)
    assert versions == [0, 0, 1, 1, 1, 2]
    assert run.policy.complete_version() == 2


def test_weights_may_change_under_drain_only_when_nothing_is_or_will_be_in_progress() -> None:
    policy = StalenessPolicy(bounds(threshold=0, per_step=2))
    assert not policy.settled
    policy.admit()
    policy.finish(policy.admit())
    assert not policy.settled
    policy.finish(0)
    assert policy.settled


# -- after a restart --------------------------------------------------------------------------------------------------


def test_a_policy_goes_on_where_it_stood() -> None:
    standing = PolicyState(
        version=4,
        published=2,
        trained=9,
        steps_in_version=1,
        next_sequence=20,
        untaken={15: True, 12: False},
        taken=[10, 11],
        held={3: 2, 5: 1},
    )
    policy = StalenessPolicy(bounds(threshold=4, window=5, per_step=1, per_version=2), standing)
    assert (policy.alive, policy.open, policy.ready, policy.trained) == (7, 1, 1, 9)
    assert policy.admit() == 20
    policy.publish(3)
    assert policy.alive == 6
    assert policy.version_after_step == 5
    assert policy.commit([10]) and policy.version == 5


@pytest.mark.parametrize("done", [1, 2, 5])
def test_where_a_version_had_more_steps_before_the_next_one_completes_it(done: int) -> None:
    """A resume in the middle of a version may have fewer steps a version than the run before it."""
    standing = PolicyState(version=4, published=4, steps_in_version=done, next_sequence=9, taken=[7, 8])
    policy = StalenessPolicy(bounds(threshold=4, per_step=1, per_version=2), standing)
    told = policy.version_after_step
    assert policy.commit([7]) and policy.version == told == 5
    assert policy.version_after_step == 5


def test_a_version_that_had_more_steps_before_a_resume_leaves_room_for_the_step_that_completes_it() -> None:
    standing = PolicyState(version=4, published=4, steps_in_version=7, next_sequence=99, held={5: 7 * 2})
    policy = StalenessPolicy(bounds(threshold=1, per_step=2), standing)
    assert policy.room == 4
    for _ in range(4):
        policy.finish(policy.admit())
    assert policy.commit(policy.select(2)) and policy.version == 5
    assert policy.room == 0
    policy.publish(5)
    assert policy.room == 2


def test_before_anybody_said_what_engines_hold_nothing_is_admitted() -> None:
    standing = PolicyState(version=4, published=None, next_sequence=9, held={1: 2, 3: 2, 4: 2})
    policy = StalenessPolicy(bounds(threshold=2, per_step=2), standing)
    assert policy.room == 0
    policy.publish(3)
    assert (policy.room, policy.alive, policy.published) == (4, 2, 3)


def test_sequences_that_a_restart_skips_count_in_the_window() -> None:
    """Some of them may have been taken before the group that is waited for."""
    policy = StalenessPolicy(
        bounds(threshold=2, window=4, per_step=2), PolicyState(next_sequence=1024, untaken={7: False, 8: True})
    )
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
    ids=["a sequence would come twice", "taken twice", "published too early", "held by the past", "held for ever"],
)
def test_a_standing_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        PolicyState(**wrong)


def test_a_run_that_has_more_alive_than_it_will_train_on_still_ends() -> None:
    """An attempt that was given up, and of which the giving up was lost, lives on beside the one in its place."""
    limits = replace(bounds(threshold=3, per_step=4), total_groups=5)
    policy = StalenessPolicy(limits, PolicyState(next_sequence=6, untaken=dict.fromkeys(range(6), True)))
    assert policy.room == 0
    for count in (4, 2):
        chosen = policy.select(4)
        assert len(chosen) == count
        policy.commit(chosen)
    assert policy.finished
