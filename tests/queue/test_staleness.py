"""The staleness bound holds over arbitrary interleavings, and a run that can continue never stops."""

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
"""Further steps that show that an endless run continues: past a version of three steps."""
ROUNDS = 60
"""Rounds of the fair schedule within which every small run must have ended."""


@dataclass
class Group:
    ordinal: int
    engine: int
    born: int
    """The version of its first token."""


class Pipeline:
    """The policy and the ledger as `MessageQueue` uses them, with engines and a trainer that follow the protocol."""

    def __init__(self, bounds: Bounds, prompts: int | None = None, *, reliable: bool = True) -> None:
        """`reliable`: no engine loses weights that it confirmed. Otherwise only the check at consumption holds."""
        self.policy = StalenessPolicy(bounds)
        self.ledger = Ledger(total=prompts)
        self.reliable = reliable
        self.engines = [0] * ENGINES
        self.groups: dict[int, Group] = {}
        self.open: list[int] = []
        self.ready: list[int] = []
        self.steps: deque[list[int]] = deque()
        self.missing = 0
        """Groups of the last step in `steps` that are being replaced."""
        self.trained: list[int] = []
        """Ordinals."""
        self.steps_done = self.short_steps = 0

    @property
    def can_admit(self) -> bool:
        self.policy.exhausted = self.ledger.exhausted
        return self.policy.room > 0 and not self.policy.exhausted

    def admit(self, engine: int = 0) -> None:
        issued = self.ledger.issue()
        assert issued is not None
        sequence = self.policy.admit()
        self.groups[sequence] = Group(issued[0], engine, self.engines[engine])
        self.open.append(sequence)
        assert self.policy.alive <= self.policy.bounds.capacity

    def admit_all(self) -> None:
        while self.can_admit:
            self.admit()

    def finish(self, sequence: int) -> None:
        self.open.remove(sequence)
        self.ready.append(sequence)
        self.policy.finish(sequence)

    def fail(self, sequence: int, failure: Failure | None) -> None:
        """An attempt fails, open or ready; None: it is repeated at no cost."""
        (self.open if sequence in self.open else self.ready).remove(sequence)
        ordinal = self.groups.pop(sequence).ordinal
        self.policy.drop(sequence)
        if failure:
            self.ledger.fail(ordinal, failure)
        else:
            self.ledger.retry(ordinal, "stale")

    def select(self, count: int, *, starting: bool = True) -> list[int]:
        self.policy.exhausted = self.ledger.exhausted
        chosen = self.policy.select(count, starting=starting)
        for sequence in chosen:
            assert sequence < min(self.open + self.ready) + self.policy.bounds.window
            self.ready.remove(sequence)
        return chosen

    def take(self) -> bool:
        chosen = self.select(self.policy.bounds.groups_per_step)
        if chosen:
            self.steps.append(chosen)
        return bool(chosen)

    def replace(self, sequence: int) -> None:
        """A group of the last batch is given up as stale."""
        self.steps[-1].remove(sequence)
        self.policy.drop(sequence)
        self.ledger.retry(self.groups.pop(sequence).ordinal, "stale")
        self.missing += 1

    def refill(self) -> None:
        found = self.select(self.missing, starting=False) if self.missing else []
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
        born = [self.groups[one].born for one in self.steps[0]]
        stale = self.policy.bounds.find_stale(born, self.policy.version)
        assert not (stale and self.reliable), "a group lags more than the proof allows"
        if stale and len(self.steps) > 1:  # the next batch goes back, so that the groups come in order
            self.untake()
        if stale:
            for sequence in [self.steps[0][index] for index in stale]:
                self.replace(sequence)
            self.refill()
            return
        bounds, step = self.policy.bounds, self.steps.popleft()
        assert 0 < len(step) <= bounds.groups_per_step
        if len(step) < bounds.groups_per_step:
            assert not self.policy._untaken and self.policy.dry, "a short step, and more groups would have come"
            self.short_steps += 1
        ordinals = [self.groups.pop(sequence).ordinal for sequence in step]
        self.ledger.train(ordinals)
        self.trained += ordinals
        self.policy.commit(step)
        self.steps_done += 1

    def publish(self) -> None:
        self.engines = [self.policy.version] * ENGINES
        self.policy.publish(self.policy.version)

    @property
    def finished(self) -> bool:
        self.policy.exhausted = self.ledger.exhausted
        return self.policy.finished

    def run_fairly(self) -> None:
        """Everybody works in turns: the run must end, or make some more steps."""
        enough = self.steps_done + ENOUGH_STEPS
        for _ in range(ROUNDS):
            if self.finished or self.steps_done >= enough:
                break
            self.admit_all()
            for sequence in list(self.open):
                self.finish(sequence)
            if self.missing:
                self.refill()
            if not self.steps:
                self.take()
            if self.steps and not self.missing:
                self.commit()
            self.publish()
        state = f"{self.policy.__dict__} {self.missing=} {self.steps=} {self.ledger.__dict__}"
        assert self.finished or self.steps_done >= enough, state
        assert len(set(self.trained)) == len(self.trained)


@st.composite
def some_bounds(draw: st.DrawFn) -> Bounds:
    """Bounds that the configuration accepts."""
    per_step, per_version = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    bounds = Bounds(
        groups_per_step=per_step,
        steps_per_version=per_version,
        threshold=draw(st.integers(0, 3)),
        window=draw(st.integers(1, 3 * per_step * per_version)),
        max_alive=draw(st.integers(per_step * per_version, 4 * per_step * per_version + 2)),
        max_lag_allowed=0,
        total_groups=draw(st.none() | st.integers(1, 25)),
    )
    bounds = replace(bounds, max_lag_allowed=bounds.max_lag)
    return replace(bounds, min_batches=draw(st.integers(1, bounds.most_ready // per_step)))


class Interleavings(RuleBasedStateMachine):
    reliable = True

    @initialize(bounds=some_bounds(), prompts=st.none() | st.integers(1, 25))
    def start(self, bounds: Bounds, prompts: int | None) -> None:
        self.run = Pipeline(bounds, prompts, reliable=self.reliable)

    # Rules that fill the pipeline come several at a time: long runs would otherwise be rare.
    @precondition(lambda self: self.run.can_admit)
    @rule(engine=st.integers(0, ENGINES - 1), count=st.integers(1, 8))
    def groups_are_admitted(self, engine: int, count: int) -> None:
        for _ in range(count):
            if self.run.can_admit:
                self.run.admit(engine)

    @precondition(lambda self: self.run.open)
    @rule(choices=st.lists(st.integers(0, 99), max_size=8))
    def groups_finish(self, choices: list[int]) -> None:
        """No choice: all but the oldest."""
        chosen = sorted(self.run.open)[1:] if not choices else []
        for choice in choices:
            chosen.append(self.run.open[choice % len(self.run.open)])
        for sequence in dict.fromkeys(chosen):
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
        self.run.publish()

    @rule()
    def the_run_could_continue_from_here(self) -> None:
        copy.deepcopy(self.run).run_fairly()

    @invariant()
    def the_policy_counts_the_groups(self) -> None:
        if hasattr(self, "run"):
            policy = self.run.policy
            assert policy.alive <= policy.bounds.capacity
            assert (policy.open, policy.ready) == (len(self.run.open), len(self.run.ready))
            assert policy.bounds.total_groups is None or policy.trained <= policy.bounds.total_groups
            assert policy.finished is False or not self.run.groups

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.run_fairly()


class UnreliableInterleavings(Interleavings):
    reliable = False

    @rule(engine=st.integers(0, ENGINES - 1), back=st.integers(1, 6))
    def an_engine_is_restored_with_old_weights(self, engine: int, back: int) -> None:
        self.run.engines[engine] = max(0, self.run.engines[engine] - back)

    @rule()
    def a_version_ends_early(self) -> None:
        self.run.policy.complete_version()

    @rule(behind=st.integers(0, 1))
    def a_version_is_published(self, behind: int) -> None:
        """An engine may have come back with less than it had confirmed."""
        self.run.policy.publish(max(0, self.run.policy.version - behind))


_SETTINGS = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTheBoundHoldsAndNothingStops = Interleavings.TestCase
TestTheBoundHoldsAndNothingStops.settings = _SETTINGS
TestStaleGroupsAreAlwaysFound = UnreliableInterleavings.TestCase
TestStaleGroupsAreAlwaysFound.settings = _SETTINGS


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
    lag = run.policy.version - run.groups[straggler].born
    assert lag == (limits.max_lag if threshold else 0)


def test_the_oldest_group_is_waited_for_however_many_others_finish() -> None:
    """A window over *finished* groups never fills up behind a straggler, and let one lag by 122 versions."""
    run = Pipeline(bounds(threshold=1, window=5))
    run.admit()
    hold_up(run, run.open[0])
    assert run.open == [0]
    assert run.policy.trained == 4
    run.run_fairly()


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
    run.fail(run.open[0], infra_failure("engine", "died"))
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


def test_a_run_does_not_start_more_groups_than_it_will_train_on() -> None:
    run = Pipeline(bounds(threshold=3, total_groups=5))
    run.admit_all()
    assert len(run.open) == 5


def test_a_queue_is_settled_when_nothing_is_or_will_be_in_progress() -> None:
    policy = StalenessPolicy(bounds())
    settled = [policy.settled]
    for _ in range(2):
        policy.admit()
        settled.append(policy.settled)
    for sequence in (1, 0):
        policy.finish(sequence)
        settled.append(policy.settled)
    assert settled == [False, False, False, False, True]


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
    assert run.finished
    assert run.policy.trained == min(one for one in (total_groups, prompts) if one is not None)
    assert run.short_steps == 1


def test_a_version_is_complete_after_its_steps_or_at_the_end() -> None:
    run = Pipeline(bounds(threshold=1, per_step=1, per_version=3))
    versions = []
    for _ in range(7):
        run.admit()
        run.finish(run.open[0])
        run.take()
        run.commit()
        versions.append(run.policy.version)
        run.publish()
    assert versions == [0, 0, 1, 1, 1, 2, 2]
    assert run.policy.complete_version() == run.policy.complete_version() == 3


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


def test_nothing_is_admitted_before_the_published_version_is_known() -> None:
    state = PolicyState(version=4, published=None, next_sequence=9, held={1: 2, 3: 2, 4: 2})
    policy = StalenessPolicy(bounds(threshold=2), state)
    assert policy.room == 0
    policy.publish(3)
    assert (policy.room, policy.alive, policy.published) == (4, 2, 3)


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
