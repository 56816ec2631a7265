"""Ray's side of the components: an actor around each.

    RollouterActor ── RemoteQueue ──▶ QueueActor ◀── RemoteQueue ── TrainerActor
          ▲  load_weights([ref])                                        │ submit(version, [ref])
          └──────────── RemoteReplica ── SynchronizerActor ◀────────────┘

Actors build their component (`freewheel.runtime.building`) and pass calls on. How they call each other is in
`freewheel.runtime.remote`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import OwnerDiedError

from freewheel.data.group import Ticket
from freewheel.queue.journal import CheckpointMark
from freewheel.rollout.engine import EngineDied
from freewheel.runtime.building import OpenedQueue, end_recording, open_queue, start_recording
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.remote import ActorDirectory, RemotePublisher, RemoteQueue, RemoteReplica
from freewheel.runtime.training_ranks import Ranks
from freewheel.sync.weights import WeightsGone
from freewheel.utils.registry import receive_in_memory

if TYPE_CHECKING:
    from freewheel.rollout.evaluating import EvalResult

log = logging.getLogger("freewheel.runtime")

EVALUATION_S = 3600.0
"""Longest time for an evaluation."""
GARBAGE_AFTER = 100_000
"""Objects between two collections in the queue's process: groups by the thousand are alive in it and none is garbage
in a cycle, so that looking through them is a pause and nothing else."""
ENGINE_DIED = 3
"""What a rollouter's process ends with when its engine has."""
MANY = 1000
"""Calls that an actor may have in progress: those that wait must not keep others out."""


class Component:
    """What all actors have. `open` comes first: what a constructor raises reaches the user as the death of an actor.
    `run` ends with the component, so that its death is noticed."""

    def __init__(self, name: str, run_dir: str) -> None:
        from freewheel.observe.logs import attach_log

        attach_log(run_dir, name)
        self._name, self._folder = name, run_dir
        self._peers = ActorDirectory()

    async def meet(self, handles: Mapping[str, Any]) -> None:
        self._peers.meet(handles)

    async def process(self) -> tuple[int, str]:
        """Its number, and the node that it is on."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    async def close(self) -> None:
        """The last that is asked of it."""
        end_recording()


class QueueActor(Component):
    """Around a `MessageQueue`."""

    def __init__(self, name: str, run_dir: str) -> None:
        super().__init__(name, run_dir)
        gc.freeze()
        gc.set_threshold(GARBAGE_AFTER)
        self._run_dir = Path(run_dir)
        self._opened: OpenedQueue | None = None
        self._closing = asyncio.Event()

    async def open(
        self,
        config: TrainConfig,
        total_prompts: int | None,
        checkpoint: CheckpointMark | None,
        in_flight: Mapping[str, Sequence[Ticket]] | None,
    ) -> list[str]:
        """Gives what is to be said of the journal. `checkpoint`: where a run begins; None: in a dead one's place."""
        self._opened = await open_queue(
            config, self._run_dir, total_prompts=total_prompts, checkpoint=checkpoint, in_flight=in_flight
        )
        return self._opened.notes

    async def run(self) -> None:
        await self._closing.wait()

    async def call(self, method: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of `MessageQueue`; only `RemoteQueue` does."""
        assert self._opened is not None
        return await method(self._opened.queue, *args, **kwargs)

    async def stats(self) -> dict[str, Any]:
        return {} if self._opened is None else dict(await self._opened.queue.stats())

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()
        self._closing.set()
        await super().close()


class SynchronizerActor(Component):
    """Around a `ParameterSynchronizer`."""

    def __init__(self, name: str, run_dir: str) -> None:
        super().__init__(name, run_dir)
        self._sync: Any = None

    async def open(
        self, config: TrainConfig, rollouters: dict[str, Any], version: int, versions: Mapping[str, int] | None
    ) -> None:
        """`versions`: what each rollouter holds, where this one takes a dead one's place."""
        from freewheel.runtime.building import synchronizer

        start_recording(config.observe, self._folder, self._name)
        replicas = {name: RemoteReplica(handle) for name, handle in rollouters.items()}
        queue = RemoteQueue(self._peers)
        self._sync = synchronizer(config, replicas, queue, version=version, versions=versions)

    async def run(self) -> None:
        await self._sync.run()

    async def announce(self) -> None:
        if self._sync is not None:
            await self._sync.announce()

    async def submit(self, version: int, weights: list[Any], checksum: int | None, n_bytes: int) -> list[int] | None:
        in_use: list[int] | None = await self._sync.submit(version, weights, checksum, n_bytes)
        return in_use

    async def prime(self, version: int, weights: list[Any], checksum: int | None, n_bytes: int) -> list[int] | None:
        in_use: list[int] | None = await self._sync.prime(version, weights, checksum, n_bytes)
        return in_use

    async def wait_published(self, version: int, wait_s: float) -> bool:
        return bool(await self._sync.wait_published(version, wait_s=wait_s))

    async def join(self, name: str, handle: Any) -> None:
        await self._sync.join(name, RemoteReplica(handle))

    async def stats(self) -> dict[str, Any]:
        return {} if self._sync is None else dict(self._sync.stats())

    async def rows(self) -> list[dict[str, Any]]:
        """What is to be recorded of syncs since the last call."""
        return [] if self._sync is None else self._sync.drain_rows()


class RollouterActor(Component):
    """Around a `Rollouter` with its engine and reward stage."""

    def __init__(
        self,
        name: str,
        run_dir: str,
        config: TrainConfig,
        plan: Any,
        objects: Mapping[str, Any],
        model_path: str,
        version: int,
    ) -> None:
        """`objects`: what settings name as `in_memory:name`."""
        super().__init__(name, run_dir)
        receive_in_memory(objects)
        self._given = {"config": config, "plan": plan, "name": name, "model_path": model_path, "version": version}
        self._rollouter: Any = None
        self._closing = asyncio.Event()

    async def open(self) -> dict[str, Any]:
        """Loads the model, and gives what the coordinator must know before it starts anything."""
        from freewheel.runtime.building import RolloutSide

        start_recording(self._given["config"].observe, self._folder, self._name, samples=True)
        self._side = RolloutSide(**self._given)
        self._rollouter = self._side.rollouter(RemoteQueue(self._peers))
        gc.freeze()  # what was imported and loaded is no garbage: collections need not look through it
        return {"total_prompts": self._side.prompts.total, "prompts": len(self._side.prompts)}

    async def run(self) -> None:
        """Until `close`: when there is nothing left to generate, the last version and evaluation still need it, and its
        death must still be noticed."""
        async with self._mortal():
            await self._rollouter.run()
        await self._closing.wait()

    @asynccontextmanager
    async def _mortal(self) -> AsyncIterator[None]:
        """With the engine this process ends, so that another is started in its place."""
        try:
            yield
        except EngineDied as error:
            log.error("The engine died, and this process ends with it: %s", error)
            with suppress(Exception):  # what it leaves behind would be in its successor's way
                await self._rollouter.close()
            end_recording()
            os._exit(ENGINE_DIED)

    async def load_weights(self, version: int, weights: list[Any], verify: bool) -> int | None:
        try:
            loaded = await weights[0]
        except OwnerDiedError as error:
            raise WeightsGone(str(error).splitlines()[0]) from error
        async with self._mortal():
            found: int | None = await self._rollouter.load_weights(version, loaded, verify=verify)
        return found

    async def tickets(self) -> list[Ticket]:
        """What it works on; a queue that comes in a dead one's place is told."""
        return [] if self._rollouter is None else list(self._rollouter.tickets())

    async def evaluate(self, share: int, shares: int) -> EvalResult | None:
        """This replica's share of the held-out prompts."""
        async with self._mortal():
            found: EvalResult | None = await self._side.evaluate(share, shares)
        return found

    async def stats(self) -> dict[str, Any]:
        return {} if self._rollouter is None else dict(self._rollouter.stats())

    async def close(self) -> None:
        self._closing.set()
        if self._rollouter is not None:
            await self._rollouter.stop()
            await self._rollouter.close()
        await super().close()


class TrainerActor(Component):
    """Around a `FullyAsyncTrainer` with its backend and checkpoints."""

    def __init__(
        self,
        name: str,
        run_dir: str,
        config: TrainConfig,
        plan: Any,
        objects: Mapping[str, Any],
        rank_options: Sequence[Mapping[str, Any]],
        resume: str | None,
    ) -> None:
        """`objects`: what settings name as `in_memory:name`. `rank_options`: what Ray is told of each training process
        beside this one."""
        super().__init__(name, run_dir)
        receive_in_memory(objects)
        self._given = {"config": config, "plan": plan, "run_dir": run_dir, "resume": resume}
        self._rank_options = rank_options
        self._ranks: Ranks | None = None
        self._trainer: Any = None
        self._stop = False

    async def open(self, replicas: Sequence[str]) -> str:
        """Loads the model, and gives what the learning settings do together."""
        from freewheel.runtime.building import TrainSide

        start_recording(self._given["config"].observe, self._folder, self._name)
        if self._rank_options:
            told = (self._given["config"], self._given["plan"])
            self._ranks = ranks = await Ranks.start(*told, self._given["run_dir"], self._rank_options)
            self._side = await ranks.opened(*told, lambda: TrainSide(**self._given, ranks=ranks))
        else:
            self._side = TrainSide(**self._given)
        self._replicas = list(replicas)
        self._publisher = RemotePublisher(self._peers)
        self._trainer = self._side.trainer(RemoteQueue(self._peers), self._publisher, self._evaluate)
        if self._stop:
            self._trainer.request_stop()
        gc.freeze()
        return self._side.backend.describe()

    async def _evaluate(self, step: int) -> dict[str, float] | None:
        from freewheel.runtime.building import evaluation_metrics

        if not self._side.config.eval.prompts:
            return None
        shares = [
            self._peers.call(name, "evaluate", share, len(self._replicas), deadline_s=EVALUATION_S)
            for share, name in enumerate(self._replicas)
        ]
        return evaluation_metrics(await asyncio.gather(*shares))

    async def run(self) -> str:
        return str(await self._trainer.run())

    async def publish_again(self) -> None:
        """For a synchronizer that came in a dead one's place."""
        if self._trainer is not None:
            await self._publisher.again()

    async def ranks(self) -> dict[str, tuple[int, str]]:
        """The processes that train beside this one: number and node, by name."""
        return {} if self._ranks is None else self._ranks.processes

    async def request_stop(self) -> None:
        self._stop = True
        if self._trainer is not None:
            self._trainer.request_stop()

    async def export(self, folder: str) -> None:
        await asyncio.to_thread(self._side.export, folder)

    async def stats(self) -> dict[str, Any]:
        return {} if self._trainer is None else dict(self._trainer.stats())

    async def rows(self) -> list[Any]:
        return [] if self._trainer is None else list(self._trainer.drain_rows())

    async def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
        if self._ranks is not None:
            self._ranks.close()
        await super().close()
