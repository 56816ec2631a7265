"""Clients of actors, which look like the plain class to its callers: the queue, a replica, the synchronizer.

    RollouterActor, TrainerActor, SynchronizerActor ── RemoteQueue ──▶ QueueActor
    TrainerActor ── RemotePublisher: submit(version, [ref]) ──▶ SynchronizerActor
    SynchronizerActor ── RemoteReplica: load_weights(version, [ref]) ──▶ RollouterActor

Every call has a deadline, and one that meets a dead peer is made again to its successor (`Peers`). Weights travel as a
reference inside a list, so that Ray does not fetch them on the way; groups travel as values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayTaskError

from freewheel.data.group import Block, Ticket
from freewheel.queue.client import Admission, Taken
from freewheel.queue.ledger import Failure, Frontier
from freewheel.queue.message_queue import MessageQueue
from freewheel.runtime.peers import CALL_S, Peers, call
from freewheel.sync.device import DeviceWeights
from freewheel.sync.synchronizer import ReplicaGone
from freewheel.sync.weights import AnyWeights

P = ParamSpec("P")
T = TypeVar("T")


class RemoteQueue:
    """The `QueueClient` of a `MessageQueue` in another process, or of its successor."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def _call(
        self, method: Callable[Concatenate[MessageQueue, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        wait_s = kwargs.get("wait_s", 0.0)
        assert isinstance(wait_s, int | float)
        result: T = await self._peers.call("queue", "call", method, args, kwargs, deadline_s=CALL_S + wait_s)
        return result

    async def admit(self, replica: str, *, want: int, load: int, wait_s: float, holding: Collection[int]) -> Admission:
        return await self._call(MessageQueue.admit, replica, want=want, load=load, wait_s=wait_s, holding=list(holding))

    async def put(self, block: Block, *, wait_s: float) -> bool:
        return await self._call(MessageQueue.put, block, wait_s=wait_s)

    async def fail(self, ticket: Ticket, failure: Failure) -> None:
        await self._call(MessageQueue.fail, ticket, failure)

    async def abandon(self, ticket: Ticket, reason: str) -> None:
        await self._call(MessageQueue.abandon, ticket, reason)

    async def release_replica(self, replica: str) -> int:
        return await self._call(MessageQueue.release_replica, replica)

    async def fence(self, replica: str, *, fenced: bool) -> None:
        await self._call(MessageQueue.fence, replica, fenced=fenced)

    async def begin(self, step: int) -> None:
        await self._call(MessageQueue.begin, step)

    async def take(self, step: int, *, wait_s: float) -> Taken:
        return await self._call(MessageQueue.take, step, wait_s=wait_s)

    async def replace_stale(self, step: int, sequences: Collection[int], *, wait_s: float) -> Taken:
        return await self._call(MessageQueue.replace_stale, step, list(sequences), wait_s=wait_s)

    async def commit(self, step: int, *, wait_s: float) -> int | None:
        return await self._call(MessageQueue.commit, step, wait_s=wait_s)

    async def give_back(self, step: int) -> None:
        await self._call(MessageQueue.give_back, step)

    async def read_frontier(self, step: int, *, wait_s: float) -> Frontier | None:
        return await self._call(MessageQueue.read_frontier, step, wait_s=wait_s)

    async def confirm_checkpoint(self, step: int) -> None:
        await self._call(MessageQueue.confirm_checkpoint, step)

    async def complete_version(self, *, wait_s: float) -> int | None:
        return await self._call(MessageQueue.complete_version, wait_s=wait_s)

    async def confirm_published(self, version: int) -> None:
        await self._call(MessageQueue.confirm_published, version)

    async def wait_settled(self, *, wait_s: float) -> bool:
        return await self._call(MessageQueue.wait_settled, wait_s=wait_s)


class RemoteReplica:
    """A rollouter as the synchronizer sees it, which has a deadline of its own. `weights`: a list with a reference."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def load_weights(self, version: int, weights: Any, *, verify: bool) -> int | None:
        try:
            found: int | None = await call(self._handle, "load_weights", version, weights, verify, deadline_s=None)
            return found
        except ActorDiedError as error:
            if isinstance(error, RayTaskError):  # another's death, which the replica met with
                raise
            raise ReplicaGone(str(error).splitlines()[0]) from error


class RemotePublisher:
    """The synchronizer as the trainer sees it, or its successor."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._last: tuple[Any, ...] | None = None
        """What was sent last, which a synchronizer's successor has not seen."""
        self._held: list[tuple[int, DeviceWeights]] = []
        """What engines may still read: a GPU's memory is used again when nobody here holds it."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")

    async def submit(self, version: int, weights: AnyWeights) -> None:
        await self._send("submit", version, weights)

    async def prime(self, version: int, weights: AnyWeights) -> None:
        await self._send("prime", version, weights)

    async def _send(self, method: str, version: int, weights: AnyWeights) -> None:
        if isinstance(weights, DeviceWeights):
            self._held.append((version, weights))
        # In a thread: a copy of a large model must not hold up what else this process answers for.
        reference = await asyncio.get_running_loop().run_in_executor(self._thread, ray.put, weights)
        self._last = (method, version, [reference], weights.checksum, weights.n_bytes)
        await self._say()

    async def _say(self) -> None:
        """And lets go of what is not in use any more; what that is, a successor may not know for a while."""
        assert self._last is not None
        method, *args = self._last
        in_use = await self._peers.call("sync", method, *args)
        if in_use is not None:
            self._held = [held for held in self._held if held[0] in in_use]

    async def again(self) -> None:
        """To a successor, which has not seen it."""
        if self._last is not None:
            await self._say()

    async def wait_published(self, version: int, *, wait_s: float) -> bool:
        deadline_s = CALL_S + wait_s
        return bool(await self._peers.call("sync", "wait_published", version, wait_s, deadline_s=deadline_s))
