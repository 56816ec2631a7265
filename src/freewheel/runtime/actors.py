"""Ray actors around the components.

    RollouterActor ── QueueClient ───▶ QueueActor ◀── QueueClient ─── TrainerActor
          ▲  load_weights([ref])                                        │ submit(version, [ref])
          └──────────── RemoteReplica ── SynchronizerActor ◀────────────┘

An actor builds its component (`freewheel.runtime.building`) and forwards calls to it. How actors call each other is in
`freewheel.runtime.remote`; `Supervisor` starts and replaces them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import OwnerDiedError

from freewheel.data.group import Ticket
from freewheel.queue.journal import CheckpointMark
from freewheel.rollout.engine import EngineDied
from freewheel.runtime.building import (
    OpenedQueue,
    RolloutSide,
    TrainSide,
    end_recording,
    evaluation_metrics,
    open_queue,
    start_recording,
    synchronizer,
)
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.remote import ActorDirectory, RemotePublisher, remote_queue
from freewheel.runtime.training_ranks import Ranks
from freewheel.sync.weights import WeightsGone
from freewheel.utils.registry import receive_in_memory

if TYPE_CHECKING:
    from freewheel.rollout.evaluation import EvalResult
    from freewheel.sync.synchronizer import Replica

log = logging.getLogger("freewheel.runtime")

MAX_CALLS = 1000
"""Calls that an actor may have in progress. Many of them only wait, and must not block others."""
_EVALUATION_S = 3600.0
"""Longest time for an evaluation."""
_GARBAGE_THRESHOLD = 100_000
"""Objects between two collections in the queue's process. It holds thousands of live groups and no garbage cycles, so a
collection is only a pause."""
_ENGINE_DIED = 3
"""Exit code of a rollouter's process whose engine died."""


class _ComponentActor:
    """What all actors have.

    Loading happens in `open`, not in the constructor: Ray reports an exception of a constructor as the actor's death.
    `run` ends with the component, so that its death is noticed.
    """

    def __init__(self, name: str, run_dir: str, objects: Mapping[str, Any] | None = None, **settings: Any) -> None:
        """`objects`: what settings name as `in_memory:name`. `settings`: of the component."""
        from freewheel.observe.logs import attach_log

        attach_log(run_dir, name)
        receive_in_memory(objects or {})
        self._name, self._run_dir, self._settings = name, run_dir, settings
        self._actors = ActorDirectory()
        self._part: Any = None
        """The component, once it is open."""

    async def connect(self, handles: Mapping[str, Any]) -> None:
        """Receive the other actors, or their successors."""
        self._actors.update(handles)

    async def process(self) -> tuple[int, str]:
        """Return the process id and the Ray node."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the component; only `ActorDirectory.ask` does."""
        return await getattr(self._part, method)(*args, **kwargs)

    async def stats(self) -> dict[str, Any]:
        return {} if self._part is None else dict(self._part.stats())

    async def rows(self) -> list[Any]:
        """Return the component's records since the last call."""
        return [] if self._part is None else list(self._part.drain_rows())

    async def close(self) -> None:
        """Close the component. No call follows."""
        end_recording()


class QueueActor(_ComponentActor):
    """Holds a `MessageQueue`."""

    def __init__(self, name: str, run_dir: str) -> None:
        super().__init__(name, run_dir)
        gc.freeze()
        gc.set_threshold(_GARBAGE_THRESHOLD)
        self._opened: OpenedQueue | None = None
        self._closing = asyncio.Event()

    async def open(
        self,
        config: TrainConfig,
        total_prompts: int | None,
        checkpoint: CheckpointMark | None,
        in_flight: Mapping[str, Sequence[Ticket]] | None,
    ) -> list[str]:
        """Return notes about the journal. `checkpoint`: where a run begins; None for a restarted queue."""
        self._opened = await open_queue(
            config, Path(self._run_dir), total_prompts=total_prompts, checkpoint=checkpoint, in_flight=in_flight
        )
        self._part = self._opened.queue
        return self._opened.notes

    async def run(self) -> None:
        await self._closing.wait()

    async def stats(self) -> dict[str, Any]:
        return {} if self._part is None else dict(await self._part.stats())

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()
        self._closing.set()
        await super().close()


class SynchronizerActor(_ComponentActor):
    """Holds a `ParameterSynchronizer`."""

    async def open(
        self, config: TrainConfig, replicas: Mapping[str, Replica], version: int, versions: Mapping[str, int] | None
    ) -> None:
        """`versions`: what each rollouter holds, for a restarted synchronizer."""
        start_recording(config.observe, self._run_dir, self._name)
        self._part = synchronizer(config, replicas, remote_queue(self._actors), version=version, versions=versions)

    async def run(self) -> None:
        await self._part.run()


class RollouterActor(_ComponentActor):
    """Holds a `Rollouter` with its engine and reward stage. `settings`: of `RolloutSide`."""

    async def open(self) -> dict[str, Any]:
        """Load the model. Returns the number of prompts, which the queue needs."""
        self._closing = asyncio.Event()
        start_recording(self._settings["config"].observe, self._run_dir, self._name, samples=True)
        self._side = RolloutSide(name=self._name, **self._settings)
        self._part = self._side.rollouter(remote_queue(self._actors))
        gc.freeze()  # imported modules and the model are not garbage: collections need not visit them
        return {"total_prompts": self._side.prompts.total, "prompts": len(self._side.prompts)}

    async def run(self) -> None:
        """Run until `close`. With nothing left to generate, the last sync and evaluation still need this process."""
        async with self._dying_with_engine():
            await self._part.run()
        await self._closing.wait()

    @asynccontextmanager
    async def _dying_with_engine(self) -> AsyncIterator[None]:
        """End this process when the engine dies, so that both are restarted."""
        try:
            yield
        except EngineDied as error:
            log.error("The engine died, so this process ends: %s", error)
            with suppress(Exception):  # leftovers would disturb the next engine
                await self._part.close()
            end_recording()
            os._exit(_ENGINE_DIED)

    async def load_weights(self, version: int, weights: list[Any], verify: bool) -> int | None:
        try:
            loaded = await weights[0]
        except OwnerDiedError as error:
            raise WeightsGone(str(error).splitlines()[0]) from error
        async with self._dying_with_engine():
            checksum: int | None = await self._part.load_weights(version, loaded, verify=verify)
        return checksum

    async def tickets(self) -> list[Ticket]:
        """Return the tickets of all groups in progress, for a restarted queue."""
        return [] if self._part is None else list(self._part.tickets())

    async def evaluate(self, share: int, shares: int) -> EvalResult | None:
        """Evaluate this replica's share of the held-out prompts."""
        async with self._dying_with_engine():
            result: EvalResult | None = await self._side.evaluate(share, shares)
        return result

    async def close(self) -> None:
        if self._part is not None:
            self._closing.set()
            await self._part.stop()
            await self._part.close()
        await super().close()


class TrainerActor(_ComponentActor):
    """Holds a `FullyAsyncTrainer` with its backend and checkpoints."""

    def __init__(self, *args: Any, rank_options: Sequence[Mapping[str, Any]], **settings: Any) -> None:
        """`rank_options`: Ray's options of each other training process. `settings`: of `TrainSide`."""
        super().__init__(*args, **settings)
        self._config, self._plan = settings["config"], settings["plan"]
        self._rank_options = rank_options
        self._ranks: Ranks | None = None
        self._stop_requested = False

    async def open(self, replicas: Sequence[str]) -> str:
        """Load the model. Returns the learning settings in words."""
        start_recording(self._config.observe, self._run_dir, self._name)
        build = partial(TrainSide, run_dir=self._run_dir, **self._settings)
        if self._rank_options:
            self._ranks = ranks = await Ranks.start(self._run_dir, self._rank_options)
            self._side = await ranks.opened(self._config, self._plan, partial(build, ranks=ranks))
        else:
            self._side = build()
        self._replicas = list(replicas)
        self._publisher = RemotePublisher(self._actors)
        self._part = self._side.trainer(remote_queue(self._actors), self._publisher, self._evaluate)
        if self._stop_requested:
            self._part.request_stop()
        gc.freeze()
        return self._side.backend.describe()

    async def _evaluate(self, step: int) -> dict[str, float] | None:
        if not self._config.eval.prompts:
            return None
        shares = [
            self._actors.call(name, "evaluate", share, len(self._replicas), deadline_s=_EVALUATION_S)
            for share, name in enumerate(self._replicas)
        ]
        return evaluation_metrics(await asyncio.gather(*shares))

    async def run(self) -> str:
        return str(await self._part.run())

    async def publish_again(self) -> None:
        """Send the last weights to a restarted synchronizer."""
        if self._part is not None:
            await self._publisher.publish_again()

    async def ranks(self) -> dict[str, tuple[int, str]]:
        """Return process id and Ray node of the other training processes, by name."""
        return {} if self._ranks is None else self._ranks.processes

    async def request_stop(self) -> None:
        self._stop_requested = True
        if self._part is not None:
            self._part.request_stop()

    async def export(self, folder: str) -> None:
        await asyncio.to_thread(self._side.export, folder)

    async def close(self) -> None:
        if self._part is not None:
            self._part.close()
        if self._ranks is not None:
            self._ranks.close()
        await super().close()
