"""Ray's side of the components: an actor around each, and clients that look like the plain class to its callers.

    RollouterActor ── RemoteQueue ──▶ QueueActor ◀── RemoteQueue ── TrainerActor
          ▲  load_weights([ref])                                        │ submit(version, [ref])
          └──────────── RemoteReplica ── SynchronizerActor ◀────────────┘

Beside `FullyAsyncMain` and `freewheel.runtime.cluster` the only module that knows Ray. Actors build their component
(`freewheel.runtime.building`) and pass calls on. Every call has a deadline: an answer that does not come is a
`PeerSilent`, a peer that died is Ray's own error, and both end the caller's loop, which `FullyAsyncMain` watches.

Weights travel as a reference inside a list, so that Ray does not fetch them on the way; groups travel as values.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from freewheel.data.group import Block, Ticket
from freewheel.queue.failures import Failure
from freewheel.queue.ledger import Frontier
from freewheel.queue.message_queue import Admission, MessageQueue, Taken
from freewheel.queue.staleness import Bounds
from freewheel.runtime.config import TrainConfig
from freewheel.sync.synchronizer import ParameterSynchronizer, ReplicaGone
from freewheel.sync.weights import Weights, pack

if TYPE_CHECKING:
    from freewheel.rollout.evaluating import EvalResult

log = logging.getLogger("freewheel.runtime")

CALL_S = 60.0
"""Longest time for a call that does not wait for anything."""
EVALUATION_S = 3600.0
"""Longest time for an evaluation."""
BESIDE_TRAINER = 5
"""Niceness of generation on a CPU: where cores are few it fills what training leaves. A trainer that waits for it takes
nothing away."""
GARBAGE_AFTER = 100_000
"""Objects between two collections in the queue's process: groups by the thousand are alive in it and none is garbage
in a cycle, so that looking through them is a pause and nothing else."""
MANY = 1000
"""Calls that an actor may have in progress: those that wait must not keep others out."""


class PeerSilent(RuntimeError):
    """A component did not answer in time."""


async def call(handle: Any, method: str, *args: Any, deadline_s: float | None = CALL_S, **kwargs: Any) -> Any:
    """A remote call that ends. `deadline_s` None: the caller has a deadline of its own."""
    reference = getattr(handle, method).remote(*args, **kwargs)
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            return await reference
    except TimeoutError:
        if not limit.expired():  # the peer's own: it answered
            raise
        raise PeerSilent(f"{method} gave no answer within {deadline_s:g} s") from None


def died(error: BaseException) -> bool:
    """The actor itself, and not one that it was talking to."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def cause(error: BaseException) -> BaseException:
    """What a component raised, out of Ray's wrapping."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error


# -- clients ----------------------------------------------------------------------------------------------------------


class RemoteQueue:
    """A `MessageQueue` in another process."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def _call(self, method: str, *args: Any, wait_s: float | None = None, **kwargs: Any) -> Any:
        more = {} if wait_s is None else {"wait_s": wait_s}
        return await call(self._handle, "call", method, args, kwargs | more, deadline_s=CALL_S + (wait_s or 0.0))

    async def admit(self, replica: str, *, want: int, load: int, wait_s: float) -> Admission:
        found: Admission = await self._call("admit", replica, want=want, load=load, wait_s=wait_s)
        return found

    async def put(self, block: Block) -> None:
        await self._call("put", block)

    async def fail(self, ticket: Ticket, failure: Failure) -> None:
        await self._call("fail", ticket, failure)

    async def abandon(self, ticket: Ticket, reason: str) -> None:
        await self._call("abandon", ticket, reason)

    async def replica_lost(self, replica: str) -> int:
        return int(await self._call("replica_lost", replica))

    async def fence(self, replica: str, *, fenced: bool) -> None:
        await self._call("fence", replica, fenced=fenced)

    async def take(self, step: int, *, wait_s: float) -> Taken:
        found: Taken = await self._call("take", step, wait_s=wait_s)
        return found

    async def replace_stale(self, step: int, sequences: Sequence[int], *, wait_s: float) -> Taken:
        found: Taken = await self._call("replace_stale", step, list(sequences), wait_s=wait_s)
        return found

    async def commit(self, step: int) -> int:
        return int(await self._call("commit", step))

    async def give_back(self, step: int) -> None:
        await self._call("give_back", step)

    async def frontier(self) -> Frontier:
        found: Frontier = await self._call("frontier")
        return found

    async def complete_version(self) -> int:
        return int(await self._call("complete_version"))

    async def published(self, version: int) -> None:
        await self._call("published", version)

    async def settled(self, *, wait_s: float) -> bool:
        return bool(await self._call("settled", wait_s=wait_s))

    async def close(self) -> None:
        await self._call("close")

    async def stats(self) -> dict[str, Any]:
        return dict(await self._call("stats"))


class RemoteReplica:
    """A rollouter as the synchronizer sees it, which has a deadline of its own. `weights`: a list with a reference."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def load_weights(self, version: int, weights: Any) -> int:
        try:
            return int(await call(self._handle, "load_weights", version, weights, deadline_s=None))
        except ActorDiedError as error:
            if isinstance(error, RayTaskError):  # another's death, which the replica met with
                raise
            raise ReplicaGone(str(error).splitlines()[0]) from error


class RemotePublisher:
    """The synchronizer as the trainer sees it."""

    def __init__(self, handle: Any, *, verify: bool) -> None:
        self._handle = handle
        self._verify = verify

    async def submit(self, version: int, weights: Weights) -> None:
        await self._send("submit", version, weights)

    async def prime(self, version: int, weights: Weights) -> None:
        await self._send("prime", version, weights)

    async def _send(self, method: str, version: int, weights: Weights) -> None:
        reference = ray.put(weights)
        await call(self._handle, method, version, [reference], weights.checksum if self._verify else None)

    async def wait_published(self, version: int, *, wait_s: float) -> bool:
        return bool(await call(self._handle, "wait_published", version, wait_s, deadline_s=CALL_S + wait_s))


# -- actors -----------------------------------------------------------------------------------------------------------


class QueueActor:
    """Around a `MessageQueue`. `open` comes first."""

    def __init__(self, run_dir: str) -> None:
        _attach(run_dir, "queue")
        gc.freeze()
        gc.set_threshold(GARBAGE_AFTER)
        self._queue: MessageQueue | None = None

    def open(self, bounds: Bounds, total_prompts: int | None, frontier: Frontier, version: int, step: int) -> None:
        self._queue = MessageQueue(
            bounds=bounds, total_prompts=total_prompts, frontier=frontier, version=version, step=step
        )

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await getattr(self._queue, method)(*args, **kwargs)


class SynchronizerActor:
    """Around a `ParameterSynchronizer`."""

    def __init__(self, run_dir: str) -> None:
        _attach(run_dir, "sync")
        self._sync: ParameterSynchronizer

    async def open(self, config: TrainConfig, queue: Any, rollouters: dict[str, Any], version: int) -> None:
        replicas = {name: RemoteReplica(handle) for name, handle in rollouters.items()}
        from freewheel.runtime.building import synchronizer

        self._sync = synchronizer(config, replicas, RemoteQueue(queue), version=version)

    async def run(self) -> None:
        await self._sync.run()

    async def submit(self, version: int, weights: list[Any], checksum: int | None) -> None:
        await self._sync.submit(version, weights, checksum)

    async def prime(self, version: int, weights: list[Any], checksum: int | None) -> None:
        await self._sync.prime(version, weights, checksum)

    async def wait_published(self, version: int, wait_s: float) -> bool:
        return await self._sync.wait_published(version, wait_s=wait_s)

    async def join(self, name: str, handle: Any) -> None:
        await self._sync.join(name, RemoteReplica(handle))

    async def stats(self) -> dict[str, Any]:
        return self._sync.stats()


class RollouterActor:
    """Around a `Rollouter` with its engine and reward stage."""

    def __init__(self, config: TrainConfig, plan: Any, name: str, run_dir: str, model_path: str, version: int) -> None:
        _attach(run_dir, name)
        self._given = {"config": config, "plan": plan, "name": name, "model_path": model_path, "version": version}
        self._rollouter: Any = None
        self._closing = asyncio.Event()

    async def open(self, queue: Any) -> dict[str, Any]:
        """Loads the model, and gives what the coordinator must know before it starts anything.

        Not done by the constructor: what a constructor raises reaches the user as the death of an actor."""
        from freewheel.runtime.building import RolloutSide

        if self._given["plan"].device_rollout == "cpu":
            os.nice(BESIDE_TRAINER)
        self._side = RolloutSide(**self._given)
        self._rollouter = self._side.rollouter(RemoteQueue(queue))
        gc.freeze()  # what was imported and loaded is no garbage: collections need not look through it
        return {"total_prompts": self._side.prompts.total, "prompts": len(self._side.prompts)}

    async def run(self) -> None:
        """Until `close`: when there is nothing left to generate, the last version and evaluation still need it, and its
        death must still be noticed."""
        await self._rollouter.run()
        await self._closing.wait()

    async def load_weights(self, version: int, weights: list[Any]) -> int:
        return int(await self._rollouter.load_weights(version, await weights[0]))

    async def evaluate(self, share: int, shares: int) -> EvalResult | None:
        """This replica's share of the held-out prompts."""
        return await self._side.evaluate(share, shares)

    async def stats(self) -> dict[str, Any]:
        return {} if self._rollouter is None else dict(self._rollouter.stats())

    async def close(self) -> None:
        self._closing.set()
        if self._rollouter is not None:
            await self._rollouter.stop()
            await self._rollouter.close()


class TrainerActor:
    """Around a `FullyAsyncTrainer` with its backend and checkpoints."""

    def __init__(self, config: TrainConfig, plan: Any, run_dir: str, resume: str | None) -> None:
        _attach(run_dir, "trainer")
        self._given = {"config": config, "plan": plan, "run_dir": run_dir, "resume": resume}
        self._trainer: Any = None

    async def open(self, queue: Any, sync: Any, rollouters: dict[str, Any]) -> str:
        """Loads the model, and gives what the learning settings do together."""
        from freewheel.runtime.building import TrainSide

        self._side = TrainSide(**self._given)
        self._rollouters = rollouters
        self._publisher = RemotePublisher(sync, verify=self._side.config.async_training.verify_weights)
        self._trainer = self._side.trainer(RemoteQueue(queue), self._publisher, self._evaluate)
        gc.freeze()
        return self._side.backend.describe()

    async def _evaluate(self, step: int) -> dict[str, float] | None:
        from freewheel.runtime.building import evaluation_metrics

        if not self._side.config.eval.prompts:
            return None
        handles = list(self._rollouters.values())
        shares = [
            call(handle, "evaluate", share, len(handles), deadline_s=EVALUATION_S)
            for share, handle in enumerate(handles)
        ]
        return evaluation_metrics(await asyncio.gather(*shares))

    async def replace_rollouter(self, name: str, handle: Any) -> None:
        self._rollouters[name] = handle

    async def run(self) -> str:
        await self._publisher.prime(self._trainer.current_param_version, pack(self._side.backend.weights()))
        return str(await self._trainer.run())

    async def request_stop(self) -> None:
        self._trainer.request_stop()

    async def export(self, folder: str) -> None:
        await asyncio.to_thread(self._side.export, folder)

    async def stats(self) -> dict[str, Any]:
        return dict(self._trainer.stats())

    async def rows(self) -> list[Any]:
        return list(self._trainer.drain_rows())

    async def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()


def _attach(run_dir: str, component: str) -> None:
    """The process of an actor: its log goes to the run's file."""
    from freewheel.observe.logs import attach_log

    attach_log(run_dir, component)
