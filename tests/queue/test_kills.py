"""Whatever is killed at any moment, every prompt ends exactly once in the weights, and the run continues.

`World`: replicas, a trainer with checkpoints and a synchronizer around one `MessageQueue` with a journal. Every answer
may be lost and every write may be late. At any moment the queue, the trainer, replicas or everything dies.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from freewheel.data.group import EncodedGroups, Ticket
from freewheel.queue import journal as journal_module
from freewheel.queue.client import Starved, Taken
from freewheel.queue.journal import CheckpointMark, Journal, JournalDamaged
from freewheel.queue.ledger import Frontier, data_failure, infra_failure
from freewheel.queue.message_queue import MessageQueue
from freewheel.queue.restore import restore
from freewheel.queue.staleness import Bounds

from .journals import LONG_S, ManualWriter, cut_power, light_block

REPLICAS = st.sampled_from(["a", "b"])
PREFETCH = 2
"""Batches that a trainer may hold: the one it trains on and the next."""
KEEP_LAST = 2
"""Checkpoints."""
TICKS = 4
"""Turns of the loop after each rule: enough for an answer that is ready."""
ROUNDS = 150
"""Rounds of the fair schedule within which every small run must have ended."""
PAGE_BYTES = 4096
"""The journal's pages here: its own large ones make each small transaction slow."""
PLACE = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


@dataclass
class Replica:
    version: int
    """The version that its engine holds."""
    tickets: dict[int, tuple[Ticket, int]] = field(default_factory=dict)
    """By sequence, with the version at the start of generation; until the queue has confirmed that it stored the
    group."""
    made: set[int] = field(default_factory=set)


@dataclass
class Trainer:
    """Its weights are the list of steps that they were trained on."""

    path: list[tuple[int, ...]] = field(default_factory=list)
    version: int = 0
    steps_in_version: int = 0
    batches: dict[int, Taken] = field(default_factory=dict)
    uncommitted: int = 0
    """The step that was trained and whose commit is not confirmed."""
    recorded_until: int = 0
    unsent: int | None = None
    """A version that engines have not been sent."""

    @property
    def step(self) -> int:
        return len(self.path)


@dataclass(frozen=True)
class Checkpoint:
    mark: CheckpointMark
    path: list[tuple[int, ...]]


class World:
    def __init__(self, bounds: Bounds, prompts: int | None, folder: Path) -> None:
        self.bounds = bounds
        self.prompts = prompts
        self.loop = asyncio.new_event_loop()
        self.journal = Journal(folder / "journal.sqlite")
        self.calls: dict[tuple[Any, ...], asyncio.Task[Any]] = {}
        self.zombies: list[asyncio.Task[Any]] = []
        self.replicas = {name: Replica(0) for name in "ab"}
        self.trainer = Trainer()
        self.submitted = 0
        """The newest version that the synchronizer was given."""
        self.synced = 0
        """The newest version that all engines held."""
        self.announced = True
        """The queue knows `synced`."""
        self.checkpoints = {0: Checkpoint(CheckpointMark(), [])}
        self.sequences: dict[int, int] = {}
        self.acknowledged: dict[int, int] = {}
        """Groups whose storage was confirmed: sequence → ordinal."""
        self.history_was_lost = False
        """By a power cut, or by damage."""
        self.lags_may_exceed = False
        """An engine had older weights than it had confirmed, or a resume changed the bounds."""
        self.bounds_changed = False
        self.start_queue(CheckpointMark(), {})

    # -- the queue's life ---------------------------------------------------------------------------------------------

    def start_queue(self, checkpoint: CheckpointMark | None, in_flight: dict[str, list[Ticket]]) -> None:
        restored = restore(self.journal, total=self.prompts, checkpoint=checkpoint, in_flight=in_flight)
        self.writer: Any = ManualWriter(self.journal)
        self.queue = MessageQueue(bounds=self.bounds, journal=self.writer, restored=restored, retry_delay_s=0.0)
        given_up = {one.ticket.sequence for one in self.journal.failures()}
        for sequence, ordinal in self.acknowledged.items():
            kept = sequence in restored.stored or restored.ledger.has_ended(ordinal) or sequence in given_up
            assert kept or self.history_was_lost, f"the group of sequence {sequence} was stored, and is lost"

    def stop_queue(self) -> None:
        for task in [*self.calls.values(), *self.zombies]:
            task.cancel()
        self.calls.clear()
        self.zombies.clear()
        self.run_loop()
        self.answer(self.queue.close())

    def kill_queue(self, lost: set[str]) -> None:
        """Kill it together with some of the replicas."""
        for name in lost:
            self.replicas[name] = Replica(self.synced)
        self.stop_queue()
        held = {name: [ticket for ticket, _ in one.tickets.values()] for name, one in self.replicas.items()}
        self.start_queue(None, {name: tickets for name, tickets in held.items() if name not in lost})
        self.announced = False

    def kill_trainer(self, checkpoint: Checkpoint) -> None:
        for key in [one for one in self.calls if one[0] not in ("admit", "put")]:
            self.zombies.append(self.calls.pop(key))  # they continue in the queue, and nobody receives the answer
        self.begin_trainer(checkpoint)

    def begin_trainer(self, checkpoint: Checkpoint) -> None:
        self.trainer = Trainer(list(checkpoint.path), checkpoint.mark.version, recorded_until=len(checkpoint.path))
        self.answer(self.queue.begin(self.trainer.step))

    def kill_everything(
        self, checkpoint: Checkpoint, *, bounds: Bounds | None = None, lost_bytes: int = 0, damage: int | None = None
    ) -> None:
        """`bounds`: those of the resumed run, if they differ. `damage`: chooses a group that is gone."""
        self.stop_queue()
        if bounds is not None:
            self.bounds = bounds
            self.bounds_changed = self.lags_may_exceed = True
        if lost_bytes:
            self.journal = cut_power(self.journal, lost_bytes)
            self.history_was_lost = True
        stored = [row[0] for row in self.journal._db.execute("SELECT sequence FROM groups ORDER BY sequence")]
        if damage is not None and stored:
            self.journal._db.execute("DELETE FROM groups WHERE sequence = ?", (stored[damage % len(stored)],))
            self.history_was_lost = True
        self.checkpoints = {at: one for at, one in self.checkpoints.items() if at <= checkpoint.mark.step}
        version = checkpoint.mark.version
        self.replicas = {name: Replica(version) for name in self.replicas}
        self.submitted = self.synced = version
        self.start_queue(checkpoint.mark, {})
        self.announced = True
        self.begin_trainer(checkpoint)

    # -- calls --------------------------------------------------------------------------------------------------------

    def run_loop(self) -> None:
        async def turn() -> None:
            for _ in range(TICKS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turn())

    def ask(self, *key: Any, call: Callable[[], Coroutine[Any, Any, Any]], twice: bool = False) -> None:
        """Start a call unless it is under way. `twice`: send it again, and lose the second answer."""
        if key not in self.calls:
            self.calls[key] = self.loop.create_task(call())
        self.run_loop()
        if twice and key in self.calls:
            self.zombies.append(self.loop.create_task(call()))
            self.run_loop()

    def answer(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return the answer of a call that does not wait."""
        return self.loop.run_until_complete(call)

    def hear(self) -> None:
        """Process all answers. If a recorded step is gone from the journal, the run ends and must be resumed."""
        self.run_loop()
        for key, task in list(self.calls.items()):
            if not task.done():
                continue
            del self.calls[key]
            try:
                answer = task.result()
            except JournalDamaged:
                assert key[0] == "take" and self.history_was_lost
                step = max(step for step in self.checkpoints if step <= self.trainer.step)
                self.kill_everything(self.checkpoints[step])
                return
            getattr(self, f"heard_{key[0]}")(answer, *key[1:])

    def disk(self, jobs: int = 1_000_000) -> None:
        self.writer.work(jobs)
        self.run_loop()

    # -- replicas -----------------------------------------------------------------------------------------------------

    def admit(self, name: str, want: int) -> None:
        held = list(self.replicas[name].tickets)
        call = lambda: self.queue.admit(name, want=want, load=len(held), wait_s=LONG_S, holding=held)  # noqa: E731
        self.ask("admit", name, call=call)

    def lose_admission(self, name: str, *, cancel: bool) -> None:
        """The replica gives up waiting for the answer, which may have come or not. Both live on."""
        if ("admit", name) in self.calls:
            call = self.calls.pop(("admit", name))
            self.zombies.append(call)
            if cancel:
                call.cancel()

    def heard_admit(self, admission: Any, name: str) -> None:
        in_bounds = self.queue.policy.alive <= self.bounds.capacity
        assert in_bounds or not admission.tickets or self.bounds_changed or self.history_was_lost
        for ticket in admission.tickets:
            assert self.sequences.setdefault(ticket.sequence, ticket.ordinal) == ticket.ordinal or self.history_was_lost
            assert ticket.sequence not in self.replicas[name].tickets
            self.replicas[name].tickets[ticket.sequence] = ticket, self.replicas[name].version

    def put(self, name: str) -> None:
        replica = self.replicas[name]
        parts = tuple(replica.tickets[one] for one in sorted(replica.made))
        if parts:
            call = lambda: self.queue.put(light_block(parts), wait_s=LONG_S)  # noqa: E731
            self.ask("put", name, parts, call=call, twice=True)

    def heard_put(self, stored: bool, name: str, parts: tuple[tuple[Ticket, int], ...]) -> None:
        assert stored
        for ticket, _ in parts:
            self.replicas[name].tickets.pop(ticket.sequence, None)
            self.replicas[name].made.discard(ticket.sequence)
            if ticket.sequence in self.queue._stored:
                self.acknowledged[ticket.sequence] = ticket.ordinal

    def give_up(self, name: str, sequence: int, how: str) -> None:
        ticket, _ = self.replicas[name].tickets.pop(sequence)
        if how == "abandon":
            self.answer(self.queue.abandon(ticket, "zero_variance"))
        else:
            failure = infra_failure("engine", "") if how == "infra" else data_failure("reward", "")
            self.answer(self.queue.fail(ticket, failure))

    def kill_replica(self, name: str) -> None:
        self.calls.pop(("admit", name), asyncio.Future(loop=self.loop)).cancel()
        self.run_loop()
        for key in [key for key in self.calls if key[:2] == ("put", name)]:
            self.zombies.append(self.calls.pop(key))
        self.replicas[name] = Replica(self.synced)
        self.answer(self.queue.release_replica(name))

    # -- versions -----------------------------------------------------------------------------------------------------

    def load(self, name: str) -> None:
        self.replicas[name].version = max(self.replicas[name].version, self.submitted)
        self.synced = max(self.synced, min(one.version for one in self.replicas.values()))
        self.announced = False

    def announce(self) -> None:
        self.answer(self.queue.confirm_published(self.synced))
        self.announced = True

    # -- the trainer --------------------------------------------------------------------------------------------------

    def take(self) -> None:
        step = self.trainer.step + 1
        while step in self.trainer.batches:
            step += 1
        if step <= self.trainer.step + PREFETCH:
            self.ask("take", step, call=lambda: self.queue.take(step, wait_s=LONG_S))

    def heard_take(self, taken: Taken | Starved | None, step: int) -> None:
        if isinstance(taken, Taken):
            short = step > taken.recorded_until and len(taken.groups) < self.bounds.groups_per_step
            assert not short or self.queue.policy.dry or self.history_was_lost, "more groups would have come"
            self.trainer.batches[step] = taken

    heard_stale = heard_take

    def train(self) -> None:
        trainer = self.trainer
        step = trainer.step + 1
        taken = trainer.batches.get(step)
        if taken is None or trainer.uncommitted:
            return
        recorded = step <= taken.recorded_until
        stale = self.bounds.find_stale([one.min_version for one in taken.groups], trainer.version)
        old = [taken.groups[index].ticket.sequence for index in stale]
        if old and not (recorded and self.bounds_changed):
            assert not recorded, "a recorded step lags more than it did"
            assert self.history_was_lost or self.lags_may_exceed, f"{old} lag more than {self.bounds.max_lag} versions"
            if step + 1 in trainer.batches or ("take", step + 1) in self.calls:
                trainer.batches.pop(step + 1, None)  # a trainer checks a batch before it requests the next
                self.calls.pop(("take", step + 1), asyncio.Future(loop=self.loop)).cancel()
                self.answer(self.queue.give_back(step + 1))
            del trainer.batches[step]
            self.ask("stale", step, call=lambda: self.queue.replace_stale(step, old, wait_s=LONG_S))
            return
        self.check_batch(taken.groups, recorded=recorded)
        trainer.path.append(tuple(one.ticket.ordinal for one in taken.groups))
        trainer.batches.pop(step)
        trainer.recorded_until = max(trainer.recorded_until, taken.recorded_until)
        trainer.uncommitted = step

    def check_batch(self, groups: EncodedGroups, *, recorded: bool) -> None:
        assert len(groups) > 0 and (recorded or len(groups) <= self.bounds.groups_per_step)
        seen = {ordinal for step in self.trainer.path for ordinal in step}
        assert not seen.intersection(one.ticket.ordinal for one in groups), "trained twice"

    def commit(self) -> None:
        step = self.trainer.uncommitted
        if step:
            self.ask("commit", step, call=lambda: self.queue.commit(step, wait_s=LONG_S), twice=True)

    def heard_commit(self, version: int, step: int) -> None:
        trainer = self.trainer
        assert step == trainer.uncommitted == trainer.step
        trainer.uncommitted = 0
        if step > trainer.recorded_until:
            assert version - trainer.version == (trainer.steps_in_version + 1 >= self.bounds.steps_per_version)
        trainer.steps_in_version = 0 if version > trainer.version else trainer.steps_in_version + 1
        trainer.version = version
        if trainer.steps_in_version == 0:
            trainer.unsent = version
        if trainer.unsent is not None and step >= trainer.recorded_until:
            self.submitted = max(self.submitted, trainer.unsent)
            trainer.unsent = None

    def save(self) -> None:
        trainer = self.trainer
        if trainer.step and not trainer.uncommitted and not trainer.steps_in_version:
            checkpoint = Checkpoint(CheckpointMark(trainer.step, trainer.version), list(trainer.path))
            self.ask("frontier", trainer.step, call=lambda: self.saved(checkpoint))

    async def saved(self, checkpoint: Checkpoint) -> tuple[Checkpoint, Frontier]:
        frontier = await self.queue.read_frontier(checkpoint.mark.step, wait_s=LONG_S)
        assert frontier is not None
        journaled = {one.ordinal for one in self.journal.abandoned()}
        known = ended(frontier).issubset(journaled.union(*checkpoint.path))
        assert known or self.history_was_lost, "a checkpoint counts what the journal does not have"
        return checkpoint, frontier

    def heard_frontier(self, found: tuple[Checkpoint, Frontier], _: Any) -> None:
        checkpoint, frontier = found
        mark = CheckpointMark(checkpoint.mark.step, checkpoint.mark.version, frontier)
        trained = [ordinal for step in checkpoint.path for ordinal in step]
        assert frontier.trained == len(trained) and ended(frontier).issuperset(trained)
        assert len(ended(frontier)) == frontier.trained + sum(frontier.abandoned.values())
        self.checkpoints[mark.step] = replace(checkpoint, mark=mark)
        while len(self.checkpoints) > KEEP_LAST:
            del self.checkpoints[min(self.checkpoints)]
        oldest = min(self.checkpoints)
        self.ask("checkpointed", oldest, call=lambda: self.queue.confirm_checkpoint(oldest, wait_s=LONG_S))

    def heard_checkpointed(self, _: None, step: int) -> None:
        pass

    # -- the run continues --------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        return self.queue.finished and self.trainer.step == self.queue.step and not self.trainer.uncommitted

    def run_fairly(self) -> None:
        for _ in range(ROUNDS):
            self.hear()
            if self.has_ended:
                break
            if not self.announced:
                self.announce()
            for name, replica in self.replicas.items():
                self.load(name)
                self.admit(name, 3)
                replica.made.update(replica.tickets)
                self.put(name)
            self.disk()
            self.take()
            self.train()
            self.commit()
            self.disk()
        assert self.has_ended, f"the run makes no progress: {self.queue.describe_wait()}, {self.trainer}, {self.calls}"
        self.disk()  # nobody waits for the record of an abandoned prompt
        self.check_the_end()

    def check_the_end(self) -> None:
        trained = [ordinal for step in self.trainer.path for ordinal in step]
        assert len(set(trained)) == len(trained) == self.queue.ledger.trained
        abandoned = {one.ordinal for one in self.journal.abandoned()}
        assert not abandoned.intersection(trained)
        frontier = self.queue.ledger.frontier()
        assert ended(frontier) == abandoned.union(trained)
        if self.bounds.total_groups is None or len(ended(frontier)) < self.bounds.total_groups:
            assert ended(frontier) == set(range(self.prompts or 0))
        if self.bounds.total_groups is None:
            queue = self.queue
            assert not any((queue._tickets, queue._owners, queue._stored, queue._steps, queue.memory_bytes))
        restored = restore(self.journal, total=self.prompts, checkpoint=None)
        assert restored.ledger.frontier() == frontier
        assert restored.step == self.trainer.step

    def close(self) -> None:
        self.stop_queue()
        self.run_loop()
        self.loop.close()
        self.journal.close()


def ended(frontier: Frontier) -> set[int]:
    return {*range(frontier.low), *frontier.ended}


@st.composite
def some_bounds(draw: st.DrawFn) -> Bounds:
    """Bounds that the configuration accepts."""
    per_step, per_version = draw(st.integers(1, 3)), draw(st.integers(1, 3))
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


class Kills(RuleBasedStateMachine):
    @initialize(bounds=some_bounds(), prompts=st.integers(1, 25))
    def start(self, bounds: Bounds, prompts: int) -> None:
        self.page_bytes, journal_module.PAGE_BYTES = journal_module.PAGE_BYTES, PAGE_BYTES
        self.folder = Path(tempfile.mkdtemp(prefix="freewheel-", dir=PLACE))
        self.world = World(bounds, prompts, self.folder)

    def checkpoint(self, choice: int) -> Checkpoint:
        kept = sorted(self.world.checkpoints)
        return self.world.checkpoints[kept[choice % len(kept)]]

    # Rules that fill the pipeline do several things: long runs would otherwise be rare.
    @rule(count=st.integers(1, 8), disk=st.booleans(), straggler=st.booleans())
    def everybody_works(self, count: int, disk: bool, straggler: bool) -> None:
        """`straggler`: the oldest group is not finished."""
        world = self.world
        for _ in range(count):
            oldest = min((one for replica in world.replicas.values() for one in replica.tickets), default=0)
            for name, replica in world.replicas.items():
                world.admit(name, 4)
                replica.made.update(one for one in replica.tickets if one != oldest or not straggler)
                world.put(name)
            if disk:
                world.disk()
            world.take()
            world.hear()
            world.train()
            world.commit()
            if disk:
                world.disk()
                world.hear()
            world.load("a")
            world.load("b")
            world.announce()

    @rule(name=REPLICAS, want=st.integers(1, 6), heard=st.booleans(), lost=st.sampled_from(["", "answer", "call"]))
    def a_replica_asks(self, name: str, want: int, heard: bool, lost: str) -> None:
        """`lost`: the answer to its earlier call, which continues in the queue or is cancelled."""
        if lost:
            self.world.lose_admission(name, cancel=lost == "call")
        self.world.admit(name, want)
        if heard:
            self.world.hear()

    @rule(name=REPLICAS, choices=st.lists(st.integers(0, 99), max_size=6))
    def groups_are_made(self, name: str, choices: list[int]) -> None:
        replica = self.world.replicas[name]
        for choice in choices:
            if replica.tickets:
                replica.made.add(list(replica.tickets)[choice % len(replica.tickets)])

    @rule(name=REPLICAS, all_are_made=st.booleans())
    def groups_are_put(self, name: str, all_are_made: bool) -> None:
        replica = self.world.replicas[name]
        if all_are_made:
            replica.made.update(replica.tickets)
        self.world.put(name)
        self.world.hear()

    @rule(
        name=REPLICAS,
        choice=st.integers(0, 99),
        how=st.sampled_from(["infra", "data", "abandon"]),
        queue_dies=st.booleans(),
    )
    def an_attempt_ends(self, name: str, choice: int, how: str, queue_dies: bool) -> None:
        """`queue_dies`: before the end of the attempt is on the disk."""
        replica = self.world.replicas[name]
        open_now = [one for one in replica.tickets if one not in replica.made]
        if open_now:
            self.world.give_up(name, open_now[choice % len(open_now)], how)
            if queue_dies:
                self.world.kill_queue(set())

    @rule(jobs=st.integers(1, 6))
    def the_disk_works(self, jobs: int) -> None:
        self.world.disk(jobs)

    @rule(what=st.sampled_from(["take", "train", "commit", "save"]), heard=st.booleans())
    def the_trainer_works(self, what: str, heard: bool) -> None:
        getattr(self.world, what)()
        if heard:
            self.world.hear()

    @rule(name=REPLICAS, announce=st.booleans())
    def an_engine_loads(self, name: str, announce: bool) -> None:
        self.world.load(name)
        if announce:
            self.world.announce()

    @rule(name=REPLICAS)
    def a_replica_dies(self, name: str) -> None:
        self.world.kill_replica(name)

    @rule(lost=st.sets(REPLICAS))
    def the_queue_dies(self, lost: set[str]) -> None:
        self.world.kill_queue(lost)

    @rule(choice=st.integers(0, 99))
    def the_trainer_dies(self, choice: int) -> None:
        self.world.kill_trainer(self.checkpoint(choice))

    @rule(choice=st.integers(0, 99), bounds=st.none() | some_bounds())
    def everything_dies(self, choice: int, bounds: Bounds | None) -> None:
        """The run is resumed, perhaps with other settings."""
        self.world.kill_everything(self.checkpoint(choice), bounds=bounds)

    @rule()
    def the_run_continues_to_its_end(self) -> None:
        """Kills may follow: they must not change the end."""
        self.world.run_fairly()

    @invariant()
    def the_ledger_has_what_was_trained(self) -> None:
        if hasattr(self, "world"):
            queue, trainer = self.world.queue, self.world.trainer
            committed = trainer.step - (trainer.uncommitted > 0)
            if committed == queue.step:
                assert queue.ledger.trained == sum(len(one) for one in trainer.path[:committed])
            assert queue.memory_bytes == sum(len(one.data) for one in queue._stored.values())

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.run_fairly()
            finally:
                journal_module.PAGE_BYTES = self.page_bytes
                self.world.close()
                shutil.rmtree(self.folder)


class PowerCuts(Kills):
    """The journal may also lose the end of its log or a group, and engines may come back with old weights."""

    @rule(name=REPLICAS, back=st.integers(1, 6))
    def an_engine_is_restored_with_old_weights(self, name: str, back: int) -> None:
        replica = self.world.replicas[name]
        replica.version = max(0, replica.version - back)
        self.world.lags_may_exceed = True

    @rule(choice=st.integers(0, 99), lost_pages=st.integers(1, 60))
    def the_power_fails(self, choice: int, lost_pages: int) -> None:
        self.world.kill_everything(self.checkpoint(choice), lost_bytes=lost_pages * PAGE_BYTES)

    @rule(choice=st.integers(0, 99), damage=st.integers(0, 99))
    def a_group_is_damaged(self, choice: int, damage: int) -> None:
        self.world.kill_everything(self.checkpoint(choice), damage=damage)


SCALE = int(os.environ.get("FREEWHEEL_EXAMPLES", "1"))
"""Multiplies the number of examples, for a longer search."""


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples * SCALE,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


TestNothingIsLostWhateverIsKilled = Kills.TestCase
TestNothingIsLostWhateverIsKilled.settings = _settings(100)
TestNothingIsLostWhenThePowerFails = PowerCuts.TestCase
TestNothingIsLostWhenThePowerFails.settings = _settings(100)
