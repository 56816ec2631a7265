"""A whole run in one process and without Ray: the real components, connected by direct calls.

    Rollouter, Rollouter … ─▶ MessageQueue ─▶ FullyAsyncTrainer ─▶ ParameterSynchronizer ─▶ Rollouter …

`run_pipeline` returns what runs are compared by: the groups of each step, its metrics, and the weights. With a `Fate`
the run dies at one of its calls between parts: its memory is lost, and nothing in progress reaches the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from freewheel.data.group import PromptGroup
from freewheel.observe.run_folder import JOURNAL
from freewheel.queue.journal import CheckpointMark, Journal
from freewheel.queue.ledger import Frontier
from freewheel.rollout.reward_functions import load_reward
from freewheel.runtime.building import OpenedQueue, RolloutSide, TrainSide, evaluation_metrics, open_queue, synchronizer
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import to_config
from freewheel.runtime.model_size import find_folder, model_folder, read_model_size
from freewheel.runtime.placement import Machine
from freewheel.runtime.run_plan import RunPlan, resolve
from freewheel.sync.synchronizer import ParameterSynchronizer
from freewheel.sync.weights import Weights
from freewheel.trainer.backend import MetricsRow
from freewheel.trainer.checkpoint import CheckpointFailed
from freewheel.trainer.trainer import Ending, FullyAsyncTrainer

RUN_S = 60.0
"""A run takes seconds, or tens of seconds on a busy machine."""
SMALL: dict[str, Any] = {
    "trainer": {"total_steps": 4, "groups_per_step": 4, "save_every_steps": None},
    "rollout": {"n": 4, "device": "cpu"},
    "data": {"limit": 128},
    "optimizer": {"lr": 3e-3},
    "eval": {"prompts": 0, "at_start": False},
    "async_training": {"sync_retry_delay": 0.01},
}
"""A second on one core with the embedded model. It learns so fast that different weights give different responses."""


def small_config(**sections: Any) -> TrainConfig:
    """`SMALL` with changes, section by section: `small_config(mode="sync", rollout={"slots": 3})`."""
    values: dict[str, Any] = {name: dict(section) for name, section in SMALL.items()}
    for name, given in sections.items():
        values[name] = values.get(name, {}) | given if isinstance(given, dict) else given
    return to_config(values)


def plan_of(config: TrainConfig) -> RunPlan:
    """Return the plan for a machine with two cores."""
    folder = find_folder(config)
    assert folder is not None
    return resolve(config, Machine(cpus=2, memory_bytes=8 << 30), model=read_model_size(folder))


@dataclass(kw_only=True)
class Finished:
    """How a run went."""

    ending: Ending
    trained: list[list[PromptGroup]] = field(default_factory=list)
    """The groups of each step, in the order in which the loss sees them."""
    steps: list[int] = field(default_factory=list)
    """The number of each step; one that was undone by a death comes again."""
    versions: list[int] = field(default_factory=list)
    """The trainer's version before each step."""
    deaths: int = 0
    rows: list[MetricsRow] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    queue: dict[str, Any] = field(default_factory=dict)
    rollouters: list[dict[str, Any]] = field(default_factory=list)
    sync: dict[str, Any] = field(default_factory=dict)
    frontier: Frontier = Frontier()  # noqa: RUF009  # frozen

    @property
    def ordinals(self) -> list[list[int]]:
        return [[group.ordinal for group in groups] for groups in self.trained]

    @property
    def attempts(self) -> dict[int, list[list[int]]]:
        """The ordinals of each time that a step was trained, by step."""
        found: dict[int, list[list[int]]] = {}
        for step, ordinals in zip(self.steps, self.ordinals, strict=True):
            found.setdefault(step, []).append(ordinals)
        return found

    @property
    def lags(self) -> list[int]:
        """The lags of all trained groups."""
        pairs = zip(self.versions, self.trained, strict=True)
        return [version - group.min_version for version, groups in pairs for group in groups]

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of the steps, without times."""
        return [
            {name: value for name, value in row.values.items() if not name.endswith("_s") and name != SUBMITTED}
            for row in self.rows
            if row.kind == "step"
        ]

    def same_groups_as(self, other: Finished) -> bool:
        """Compare tokens, log-probabilities, versions and rewards, bit for bit."""
        return [[_facts(group) for group in step] for step in self.trained] == [
            [_facts(group) for group in step] for step in other.trained
        ]

    def same_weights_as(self, other: Finished) -> bool:
        return self.weights.keys() == other.weights.keys() and all(
            torch.equal(tensor, other.weights[name]) for name, tensor in self.weights.items()
        )


SUBMITTED = "param_sync_count"
"""A step's row is written during the hand-over of the version before it, so whether that counts depends on timing."""


def _facts(group: PromptGroup) -> tuple[Any, ...]:
    arrays = (group.prompt, group.lengths, group.tokens, group.logprobs, group.versions, group.mask)
    rewards = (*group.rewards.tolist(), *(verdict.status for verdict in group.verdicts))
    return (group.ordinal, *(array.tobytes() for array in arrays), group.finish, rewards)


class DirectPublisher:
    """The synchronizer as the trainer sees it, without a process in between."""

    def __init__(self, sync: ParameterSynchronizer) -> None:
        self._sync = sync

    async def submit(self, version: int, weights: Weights) -> None:
        await self._sync.submit(version, weights, weights.checksum)

    async def prime(self, version: int, weights: Weights) -> None:
        await self._sync.prime(version, weights, weights.checksum)

    async def wait_published(self, version: int, *, wait_s: float) -> bool:
        return await self._sync.wait_published(version, wait_s=wait_s)


class Watched:
    """A backend that keeps its inputs."""

    def __init__(self, trainer: FullyAsyncTrainer, finished: Finished) -> None:
        self._trainer = trainer
        self._backend = trainer.backend
        self._finished = finished

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, groups: Sequence[PromptGroup], *, step: int, **told: Any) -> dict[str, float]:
        found: dict[str, float] = self._backend.step(groups, step=step, **told)
        self._finished.steps.append(step + 1)
        self._finished.trained.append(sorted(groups, key=lambda group: group.ordinal))
        self._finished.versions.append(self._trainer.current_param_version)
        return found


class Killed(BaseException):
    """Never handled: a killed part does nothing more."""


class Fate:
    """Decides when a run dies: at its `last` call between two parts. None: never."""

    def __init__(self, last: int | None = None) -> None:
        self.left = last
        self.dead = asyncio.Event()

    def passes(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                self.dead.set()
        if self.dead.is_set():
            raise Killed

    async def strikes(self) -> None:
        await self.dead.wait()
        raise Killed


class Through:
    """A part as another one calls it."""

    def __init__(self, part: Any, fate: Fate) -> None:
        self._part = part
        self._fate = fate

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self._fate.passes()
            found = await getattr(self._part, name)(*args, **kwargs)
            self._fate.passes()
            return found

        return call


class MortalSaver:
    """Writes no checkpoint after the run's death."""

    def __init__(self, saver: Any, fate: Fate) -> None:
        self._saver, self._fate = saver, fate

    def save(self, *args: Any) -> int:
        if self._fate.dead.is_set():
            raise CheckpointFailed("killed")
        return int(self._saver.save(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._saver, name)


def silence(opened: OpenedQueue) -> None:
    """Keep everything that is not on the disk yet from getting there."""
    assert opened.journal is not None

    def dead(*_: Any, **__: Any) -> None:
        raise OSError("killed")

    for name in ("append", "compact"):
        setattr(opened.journal._journal, name, dead)


async def run_pipeline(
    config: TrainConfig,
    *,
    run_dir: Path,
    replicas: int = 1,
    reward: Callable[..., Any] | None = None,
    resume: Path | None = None,
    stop_after: int | None = None,
    fate: Fate | None = None,
    record: Finished | None = None,
) -> Finished:
    """Run `config` to its end, or raise `Killed`. `reward` replaces the task's own. `stop_after`: the trainer is
    asked to stop after this step. `record` also has the steps of earlier lives."""
    fate = fate or Fate()
    config = msgspec.structs.replace(config, run_dir=str(run_dir))
    run_dir.mkdir(exist_ok=True)
    plan = plan_of(config)
    train_side = TrainSide(
        config=config, plan=plan, run_dir=str(run_dir), resume=None if resume is None else str(resume)
    )
    mark = mark_of(train_side)
    sides = rollout_sides(config, plan, train_side, replicas, reward)
    opened = await open_queue(config, run_dir, total_prompts=sides[0].prompts.total, checkpoint=mark)
    queue = opened.queue
    called: Any = Through(queue, fate)
    rollouters = [side.rollouter(called) for side in sides]
    replicas_called: Any = {rollouter.name: Through(rollouter, fate) for rollouter in rollouters}
    sync = synchronizer(config, replicas_called, called, version=mark.version)

    async def evaluate(_: int) -> dict[str, float] | None:
        return evaluation_metrics([await side.evaluate(i, len(sides)) for i, side in enumerate(sides)])

    finished = record or Finished(ending="finished")
    train_side.saver = MortalSaver(train_side.saver, fate)  # type: ignore[assignment]
    publisher: Any = Through(DirectPublisher(sync), fate)
    trainer = train_side.trainer(called, publisher, evaluate)
    trainer.backend = Watched(trainer, finished)  # type: ignore[assignment]
    working = [asyncio.create_task(part.run()) for part in (*rollouters, sync)]
    working.append(asyncio.create_task(fate.strikes()))
    training = asyncio.create_task(trainer.run())
    if stop_after is not None:
        working.append(asyncio.create_task(_stop(trainer, stop_after)))
    try:
        async with asyncio.timeout(RUN_S):
            await _first_error(training, working)
        finished.ending = training.result()
        finished.rows = trainer.drain_rows()
        finished.weights = {name: tensor.clone() for name, tensor in train_side.backend.weights().items()}
        finished.queue, finished.sync = await queue.stats(), sync.stats()
        finished.rollouters = [rollouter.stats() for rollouter in rollouters]
        finished.frontier = queue.ledger.frontier()
    finally:
        if fate.dead.is_set():
            silence(opened)
        await queue.close()
        for task in (training, *working):
            task.cancel()
        await asyncio.gather(training, *working, return_exceptions=True)
        for rollouter in rollouters:
            await rollouter.close()
        trainer.close()
        with contextlib.suppress(OSError):  # of a killed run
            await opened.close()
    return finished


async def _stop(trainer: FullyAsyncTrainer, step: int) -> None:
    while trainer.global_steps < step:
        await asyncio.sleep(0.002)
    trainer.request_stop()


def journal_of(run_dir: Path) -> dict[int, list[int]]:
    """Read each step's ordinals from the journal."""
    with contextlib.closing(Journal(run_dir / JOURNAL, readonly=True)) as journal:
        return {one.step: sorted(ticket.ordinal for ticket in one.tickets) for one in journal.steps(after=0)}


def mark_of(side: TrainSide) -> CheckpointMark:
    """Return where a run continues or begins."""
    found = side.resumed
    return CheckpointMark() if found is None else CheckpointMark(found.step, found.version, found.frontier)


def rollout_sides(
    config: TrainConfig, plan: RunPlan, train_side: TrainSide, replicas: int, reward: Callable[..., Any] | None = None
) -> list[RolloutSide]:
    """Build rollouters whose engines hold the trainer's first weights."""
    path = train_side.resumed.path if train_side.resumed else model_folder(config)
    version = mark_of(train_side).version
    sides = [
        RolloutSide(config=config, plan=plan, name=f"rollouter-{index}", model_path=path, version=version)
        for index in range(replicas)
    ]
    if reward is not None:
        for side in sides:
            side.reward = load_reward(reward)
    return sides


async def _first_error(training: asyncio.Task[Ending], others: list[asyncio.Task[None]]) -> None:
    """Wait for the trainer; raise the error of another part at once."""
    waiting = {training, *others}
    while not training.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
