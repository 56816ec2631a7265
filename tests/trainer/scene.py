"""A trainer with a real queue and fake neighbours: the fixture of the `FullyAsyncTrainer` tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from freewheel.data.group import EncodedGroups, Prompt, PromptGroup, Ticket
from freewheel.queue.client import Starved, Taken
from freewheel.queue.ledger import Frontier
from freewheel.queue.message_queue import MessageQueue
from freewheel.queue.staleness import Bounds
from freewheel.sync.weights import Weights
from freewheel.trainer.backend import BackendState
from freewheel.trainer.checkpoint import CheckpointFailed
from freewheel.trainer.trainer import FullyAsyncTrainer, Schedule

from .groups import make_response

WAIT_S = 30.0
"""Longer than anything here takes on a busy machine."""
P = 3
REWARD = "eval/reward"


def group_of(ticket: Ticket, version: int) -> PromptGroup:
    responses = [make_response([1, 2], value=float(index), version=version) for index in range(2)]
    return PromptGroup.of(ticket, Prompt(tokens=torch.tensor([ticket.ordinal]).numpy(), row={}), responses, 0.0)


class RecordingQueue(MessageQueue):
    """Records the trainer's requests in order."""

    def __init__(self, events: list[Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.events = events

    async def take(self, step: int, *, wait_s: float) -> Taken | Starved | None:
        self.events.append(("take", step))
        taken = await super().take(step, wait_s=wait_s)
        self.events.append(("taken", step))
        return taken

    async def commit(self, step: int, *, wait_s: float) -> int | None:
        self.events.append(("commit", step))
        return await super().commit(step, wait_s=wait_s)

    async def confirm_checkpoint(self, step: int, *, wait_s: float = 1.0) -> None:
        self.events.append(("checkpointed", step))
        await super().confirm_checkpoint(step, wait_s=wait_s)

    async def give_back(self, step: int) -> None:
        self.events.append(("give back", step))
        await super().give_back(step)


class FakeBackend:
    """Its only weight counts its steps, including those `before` it was loaded. `on_step` runs in the training thread
    and may raise."""

    def __init__(self, events: list[Any], *, before: int = 0) -> None:
        self.events = events
        self.before = before
        self.on_step: Callable[[int], object] = lambda step: None
        self.trained: list[list[PromptGroup]] = []
        self.versions: list[int | None] = []
        self.updates_applied = 0

    def step(
        self, groups: Sequence[PromptGroup], *, version: int | None, step: int, total_steps: int
    ) -> dict[str, float]:
        self.events.append(("begin", step + 1))
        self.on_step(step + 1)
        self.updates_applied += 1
        self.trained.append(list(groups))
        self.versions.append(version)
        self.events.append(("end", step + 1))
        return {"actor/loss": 0.5}

    def weights(self, stored: bool = False) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor([float(self.before + len(self.trained))])}

    def state(self) -> BackendState:
        weights = self.weights()["w"].tolist()
        return BackendState(values={"w": weights}, write=lambda folder: "")

    def describe(self) -> str:
        return "fake"


class FakePublisher:
    """Engines that receive each version at once, unless `holding`."""

    def __init__(self, events: list[Any], queue: MessageQueue) -> None:
        self.events = events
        self.queue = queue
        self.version = 0
        self.holding = False

    async def submit(self, version: int, weights: Weights) -> None:
        self.events.append(("publish", version, int(weights.tensors()["w"][0])))
        if not self.holding:
            self.version = version
            await self.queue.confirm_published(version)

    async def prime(self, version: int, weights: Weights) -> None:
        self.primed = version, int(weights.tensors()["w"][0])

    async def wait_published(self, version: int, *, wait_s: float) -> bool:
        return self.version >= version


class FakeSaver:
    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.saved: list[tuple[int, int, Frontier, int]] = []
        self.best: list[tuple[int, float, int]] = []
        self.measured: list[tuple[int, int]] = []
        self.fails: set[int] = set()

    def save(self, step: int, version: int, frontier: Frontier, state: BackendState, weights: Weights) -> int:
        if step in self.fails:
            raise CheckpointFailed("No space left on device")
        assert weights.tensors()["w"].tolist() == state.values["w"]
        self.events.append(("save", step))
        self.saved.append((step, version, frontier, int(weights.tensors()["w"][0])))
        return self.saved[-2][0] if len(self.saved) > 1 else 0

    def save_best(self, step: int, score: float, weights: Weights, *, versions: tuple[int, int]) -> bool:
        self.best.append((step, score, int(weights.tensors()["w"][0])))
        self.measured.append(versions)
        return True


class Scene:
    """A trainer, its queue, and a task that fills the queue."""

    def __init__(
        self,
        *,
        kind: type[FullyAsyncTrainer] = FullyAsyncTrainer,
        bounds: dict[str, Any] | None = None,
        schedule: dict[str, Any] | None = None,
        evaluate: Callable[[int], Awaitable[dict[str, float] | None]] | None = None,
        total_prompts: int | None = None,
        born_old: bool = False,
        after: Scene | None = None,
        **settings: Any,
    ) -> None:
        """`after`: continue with the queue and the engines of another scene, whose trainer is gone."""
        self.events: list[Any] = []
        usual = {"groups_per_step": P, "threshold": 1, "window": 1, "max_alive": 100, "max_lag_allowed": 5}
        self.bounds = Bounds(**{**usual, **(bounds or {})})
        begun = {name: settings[name] for name in ("step", "version") if name in settings}
        journal = settings.pop("journal", None)
        if after is None:
            begun = {} if journal is not None else begun
            self.queue = RecordingQueue(
                self.events, bounds=self.bounds, total_prompts=total_prompts, journal=journal, **begun
            )
        else:
            self.queue = after.queue
            self.queue.events = self.events
        self.backend = FakeBackend(self.events, before=settings.get("step", 0))
        self.publisher = FakePublisher(self.events, self.queue)
        self.publisher.version = 0 if after is None else after.publisher.version
        self.saver = FakeSaver(self.events)
        self.evaluated: list[int] = []
        self.born_old = born_old
        """First attempts claim to be generated by version 0, whatever the engines hold."""
        self.trainer = kind(
            backend=self.backend,
            queue=self.queue,
            publisher=self.publisher,
            saver=self.saver,
            evaluate=evaluate or self._evaluate,
            bounds=self.bounds,
            schedule=Schedule(
                **{
                    "total_steps": 4,
                    "batch_timeout_s": 30.0,
                    "max_errors": 3,
                    "eval_at_start": False,
                    **(schedule or {}),
                }
            ),
            **{"keep_best": True, **settings},
        )
        self.feeding: asyncio.Task[None] | None = None

    async def _evaluate(self, step: int) -> dict[str, float]:
        self.evaluated.append(step)
        return self.scored(step / 10)

    def scored(self, value: float, oldest: int | None = None) -> dict[str, float]:
        """Scores from the engines' current version, and from versions since `oldest`."""
        newest = self.publisher.version
        return {REWARD: value, "eval/version_min": newest if oldest is None else oldest, "eval/version_max": newest}

    def feed(self) -> None:
        self.feeding = asyncio.create_task(self._feed())

    async def _feed(self) -> None:
        while True:
            admission = await self.queue.admit("r", want=8, holding=(), load=0, wait_s=WAIT_S)
            version = self.publisher.version
            groups = [group_of(one, 0 if self.born_old and not one.attempt else version) for one in admission.tickets]
            if groups:
                await self.queue.put(EncodedGroups.encode(groups), wait_s=WAIT_S)
            if admission.closed:
                return
            await asyncio.sleep(0)

    async def run(self, *, feed: bool = True) -> str:
        if feed:
            self.feed()
        return await asyncio.wait_for(self.trainer.run(), WAIT_S)

    def fail_at(self, step: int, error: Exception, *, times: int = 99, updates: int = 0) -> None:
        """Make the backend raise at `step`, after applying `updates` of its updates."""
        left = [error] * times

        def fail(now: int) -> None:
            if now == step and left:
                self.backend.updates_applied += updates
                raise left.pop()

        self.backend.on_step = fail

    def hold_saves(self) -> tuple[threading.Event, threading.Event]:
        """Return (started, gate): saving sets the first and waits for the second."""
        started, gate, save = threading.Event(), threading.Event(), self.saver.save

        def held(*args: Any) -> int:
            started.set()
            gate.wait(WAIT_S)
            return save(*args)

        self.saver.save = held  # type: ignore[method-assign]
        return started, gate

    def published(self) -> list[tuple[int, int]]:
        """(version, weight) in the order of publication."""
        return [(event[1], event[2]) for event in self.events if event[0] == "publish"]

    @property
    def saved_steps(self) -> list[int]:
        return [saved[0] for saved in self.saver.saved]

    @property
    def ordinals(self) -> list[list[int]]:
        return [sorted(group.ordinal for group in groups) for groups in self.backend.trained]

    def at(self, *event: Any) -> int:
        return next(place for place, found in enumerate(self.events) if found[: len(event)] == event)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await asyncio.sleep(0.002)


Build = Callable[..., Scene]
