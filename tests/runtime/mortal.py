"""A whole run in one process with deaths at seeded awaits: of everything, of the trainer or of the queue.

    every call between two parts ─▶ Fate.passes ─▶ the part's own code ─▶ Fate.passes        (one of them is the last)

A dead part loses its memory, and nothing that it had in progress reaches the disk, as after a kill. `live` continues
from the run directory, as the coordinator does for processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from freewheel.observe.run_folder import JOURNAL
from freewheel.queue.journal import Journal
from freewheel.runtime.building import OpenedQueue, RolloutSide, TrainSide, open_queue, synchronizer
from freewheel.runtime.config import TrainConfig
from freewheel.trainer.checkpoint import CheckpointFailed, CheckpointStore

from .pipeline import RUN_S, DirectPublisher, Finished, Watched, mark_of, plan_of, rollout_sides


class Killed(BaseException):
    """Never handled: a killed part does nothing more."""


class Fate:
    """Decides when a part dies: at its `last` await. None: never."""

    def __init__(self, last: int | None = None) -> None:
        self.left = last
        self.passed = 0
        self.dead = asyncio.Event()

    def passes(self) -> None:
        self.passed += 1
        if self.left is not None and self.passed >= self.left:
            self.dead.set()
        if self.dead.is_set():
            raise Killed


class Through:
    """A part as another one calls it. `fates`: of the caller, and of the whole run."""

    def __init__(self, part: Any, *fates: Fate) -> None:
        self._part = part
        self._fates = fates

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            for fate in self._fates:
                fate.passes()
            found = await getattr(self._part, name)(*args, **kwargs)
            for fate in self._fates:
                fate.passes()
            return found

        return call


class Door:
    """Calls the queue, and repeats a call to a dead queue to its replacement."""

    def __init__(self, opened: OpenedQueue, fate: Fate) -> None:
        self.opened = opened
        self.fate = fate
        self.deaths = 0
        self._reopened = asyncio.Event()

    def reopen(self, opened: OpenedQueue, fate: Fate) -> None:
        self.opened, self.fate = opened, fate
        self.deaths += 1
        self._reopened.set()
        self._reopened = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            while True:
                fate, reopened = self.fate, self._reopened
                asked = asyncio.ensure_future(Through(self.opened.queue, fate).__getattr__(name)(*args, **kwargs))
                dying = asyncio.ensure_future(fate.dead.wait())
                try:
                    await asyncio.wait([asked, dying], return_when=asyncio.FIRST_COMPLETED)
                    if not fate.dead.is_set():
                        return asked.result()
                finally:
                    asked.cancel()
                    dying.cancel()
                    await asyncio.gather(asked, dying, return_exceptions=True)
                await reopened.wait()

        return call


class MortalSaver:
    """Writes nothing after its death."""

    def __init__(self, saver: Any, *fates: Fate) -> None:
        self._saver, self._fates = saver, fates

    def save(self, *args: Any) -> int:
        if any(fate.dead.is_set() for fate in self._fates):
            raise CheckpointFailed("killed")
        return int(self._saver.save(*args))


def silence(opened: OpenedQueue) -> None:
    """Keep everything that is not on the disk yet from getting there."""
    assert opened.journal is not None

    def dead(*_: Any, **__: Any) -> None:
        raise OSError("killed")

    for name in ("append", "compact"):
        setattr(opened.journal._journal, name, dead)


class Life:
    """One process tree, from the current run directory to the end of the run or to its death."""

    def __init__(
        self, config: TrainConfig, run_dir: Path, record: Finished, fate: Fate, *, replicas: int, trainers: list[int]
    ) -> None:
        self.config = msgspec.structs.replace(config, run_dir=str(run_dir))
        self.run_dir = run_dir
        self.record = record
        self.fate = fate
        self.replicas = replicas
        self.plan = plan_of(self.config)
        self.trainers = trainers
        """When each trainer but the last dies."""
        self.finished = False

    def train_side(self) -> TrainSide:
        found = CheckpointStore(self.run_dir, keep_last=2).latest()
        resume = None if found is None else str(found)
        return TrainSide(config=self.config, plan=self.plan, run_dir=str(self.run_dir), resume=resume)

    async def live(self, queues: list[int]) -> None:
        side = self.train_side()
        sides = rollout_sides(self.config, self.plan, side, self.replicas)
        total = sides[0].prompts.total
        opened = await open_queue(self.config, self.run_dir, total_prompts=total, checkpoint=mark_of(side))
        self.door = Door(opened, Fate(queues.pop(0) if queues else None))
        self.rollouters = [one.rollouter(Through(self.door, self.fate)) for one in sides]
        mortal: Any = {one.name: Through(one, self.fate) for one in self.rollouters}
        self.sync = synchronizer(self.config, mortal, Through(self.door, self.fate), version=mark_of(side).version)
        beside = [asyncio.create_task(part.run()) for part in (*self.rollouters, self.sync)]
        watching = asyncio.create_task(self.watch_queue(queues, sides))
        training = asyncio.create_task(self.train(side))
        dying = asyncio.create_task(self.fate.dead.wait())
        tasks = [training, dying, watching, *beside]
        try:
            async with asyncio.timeout(RUN_S):
                waiting = {training, dying, watching, *beside}
                while not training.done() and not self.fate.dead.is_set():
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in done - {training, dying}:  # a part that ended by itself
                        task.result()
            if training.done() and not self.fate.dead.is_set():
                training.result()
                self.finished = True
        finally:
            silence(self.door.opened)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for rollouter in self.rollouters:
                await rollouter.close()
            with contextlib.suppress(OSError):
                await self.door.opened.close()

    async def watch_queue(self, queues: list[int], sides: list[RolloutSide]) -> None:
        """Replace a dead queue, with the tickets of live rollouters."""
        announcing: set[asyncio.Task[None]] = set()
        while True:
            await self.door.fate.dead.wait()
            silence(self.door.opened)
            with contextlib.suppress(OSError):
                await self.door.opened.close()
            in_flight = {one.name: one.tickets() for one in self.rollouters}
            opened = await open_queue(
                self.config,
                self.run_dir,
                total_prompts=sides[0].prompts.total,
                checkpoint=None,
                in_flight=in_flight,
            )
            self.door.reopen(opened, Fate(queues.pop(0) if queues else None))
            announcing.add(asyncio.create_task(self.sync.announce()))  # concurrently: the next death may interrupt it

    async def train(self, side: TrainSide) -> None:
        """Run one trainer after the other, each from the newest checkpoint."""
        while True:
            own = Fate(self.trainers.pop(0) if self.trainers else None)
            publisher = DirectPublisher(self.sync)
            queue: Any = Through(self.door, self.fate, own)
            side.saver = MortalSaver(side.saver, self.fate, own)  # type: ignore[assignment]
            trainer = side.trainer(queue, Through(publisher, self.fate, own), no_evaluation)
            trainer.backend = Watched(trainer, self.record)  # type: ignore[assignment]
            try:
                await trainer.run()
                self.record.weights = {name: one.clone() for name, one in side.backend.weights().items()}
                return
            except Killed:
                if self.fate.dead.is_set():
                    raise
                self.record.deaths += 1
            finally:
                trainer.close()
            side = self.train_side()


async def no_evaluation(_: int) -> None:
    return None


async def live(
    config: TrainConfig,
    run_dir: Path,
    *,
    kills: Iterator[int] | None = None,
    trainers: Sequence[int] = (),
    queues: Sequence[int] = (),
    replicas: Sequence[int] = (1,),
) -> Finished:
    """Run from start to end through deaths of everything (`kills`), of trainers and of queues.
    `replicas`: the number of rollouters in each life."""
    record = Finished(ending="finished")
    run_dir.mkdir(exist_ok=True)
    for count in itertools.cycle(replicas):
        last = next(kills, None) if kills is not None else None
        life = Life(config, run_dir, record, Fate(last), replicas=count, trainers=list(trainers))
        with contextlib.suppress(Killed):
            await life.live(list(queues))
        record.deaths += life.door.deaths
        if life.finished:
            break
        record.deaths += 1
    return record


def journal_of(run_dir: Path) -> dict[int, list[int]]:
    """Read each step's ordinals from the journal."""
    with contextlib.closing(Journal(run_dir / JOURNAL, readonly=True)) as journal:
        return {one.step: sorted(ticket.ordinal for ticket in one.tickets) for one in journal.steps(after=0)}
