"""Calls between actors that survive the death of the called one.

    RollouterActor, TrainerActor, SynchronizerActor ── QueueClient ──▶ QueueActor
    TrainerActor ── RemotePublisher: submit(version, [ref]) ──▶ SynchronizerActor
    SynchronizerActor ── RemoteReplica: load_weights(version, [ref]) ──▶ RollouterActor

    ActorDirectory.call("queue", …) ─▶ answer
         └─ it died, or is silent ─▶ (waits for: `update`, by FullyAsyncMain) ─▶ the same call to its successor

A call may arrive twice: remote methods must be idempotent. Every call has a deadline. Weights travel as a reference
inside a list, so that Ray does not fetch them on the way; groups travel as values.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from freewheel.queue.client import QueueClient
from freewheel.sync.device import DeviceWeights
from freewheel.sync.synchronizer import ReplicaGone
from freewheel.sync.weights import AnyWeights
from freewheel.utils.waiting import Signal

START_S = 600.0
"""Longest time for an actor to load its model."""
CALL_S = 60.0
"""Longest time for a call that does not wait for anything."""
RECOVERY_S = 900.0
"""Longest wait for a successor: it loads a large model and may train some steps again."""
RETRY_S = 1.0
"""Wait before a silent actor is called again: it may be busy, or unreachable for a moment."""


class NoAnswer(RuntimeError):
    """An actor did not answer in time."""


async def call(handle: Any, method: str, *args: Any, deadline_s: float | None = CALL_S, **kwargs: Any) -> Any:
    """Call a remote method; `NoAnswer` after `deadline_s`. None: the caller has its own deadline."""
    reference = getattr(handle, method).remote(*args, **kwargs)
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            return await reference
    except TimeoutError:
        if not limit.expired():  # raised by the remote method, so the actor answered
            raise
        raise NoAnswer(f"{method} gave no answer within {deadline_s:g} s") from None


def is_death(error: BaseException) -> bool:
    """Whether the called actor itself died, not one that it was calling."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def unwrap(error: BaseException) -> BaseException:
    """Return what a component raised, without Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error


def kill_process(process: int, node: str) -> None:
    """Kill a process if it is on this machine. Ray cannot end a stopped process (SIGSTOP)."""
    if process and node == ray.get_runtime_context().get_node_id():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


class ActorDirectory:
    """The actors in use, by component name."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        self._changed = Signal()

    def update(self, handles: Mapping[str, Any]) -> None:
        """Add actors, or replace dead ones by their successors."""
        self._handles |= handles
        self._changed.notify()

    async def call(self, name: str, method: str, *args: Any, deadline_s: float = CALL_S, **kwargs: Any) -> Any:
        """Call `name`, or its successor. Raises the error of the last try if no answer comes."""
        clock = asyncio.get_running_loop().time
        until = clock() + deadline_s + RECOVERY_S
        while True:
            if not await self._changed.until(lambda: name in self._handles, until - clock()):
                raise NoAnswer(f"{name} was not there for {method} within {deadline_s + RECOVERY_S:g} s")
            handle = self._handles[name]
            try:
                return await call(handle, method, *args, deadline_s=deadline_s, **kwargs)
            except (RayActorError, NoAnswer) as error:
                left_s = until - clock()
                if isinstance(error, RayTaskError) or left_s <= 0:  # a third actor died, which `name` was calling
                    raise
                is_gone = isinstance(error, ActorDiedError)
                wait_s = left_s if is_gone else min(left_s, RETRY_S)
                replaced = await self._changed.until(partial(self._is_replaced, name, handle), wait_s)
                if not replaced and is_gone:
                    raise

    def _is_replaced(self, name: str, handle: Any) -> bool:
        return self._handles[name] is not handle

    async def ask(self, name: str, method: str, *args: Any, deadline_s: float = CALL_S, **kwargs: Any) -> Any:
        """Call a method of the component in actor `name`. One with `wait_s` gets as much more time to answer."""
        deadline_s += kwargs.get("wait_s", 0.0)
        return await self.call(name, "call", method, args, kwargs, deadline_s=deadline_s)


def remote_queue(actors: ActorDirectory) -> QueueClient:
    """Return a client of the queue in another process, or of its successor."""
    return QueueClient(partial(actors.ask, "queue"))


class RemoteReplica:
    """A rollouter as the synchronizer sees it. The synchronizer has its own deadline."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def load_weights(self, version: int, weights: Any, *, verify: bool) -> int | None:
        """`weights`: a list with a reference."""
        try:
            found: int | None = await call(self._handle, "load_weights", version, weights, verify, deadline_s=None)
            return found
        except ActorDiedError as error:
            if isinstance(error, RayTaskError):  # a third actor died, which the replica was calling
                raise
            raise ReplicaGone(str(error).splitlines()[0]) from error


class RemotePublisher:
    """The synchronizer as the trainer sees it, or its successor."""

    def __init__(self, actors: ActorDirectory) -> None:
        self._actors = actors
        self._last: tuple[Any, ...] | None = None
        """The last message, which a restarted synchronizer has not seen."""
        self._held: list[tuple[int, DeviceWeights]] = []
        """Weights on a GPU that engines may still read. Their memory is reused once they are dropped here."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")

    async def submit(self, version: int, weights: AnyWeights) -> None:
        await self._publish("submit", version, weights)

    async def prime(self, version: int, weights: AnyWeights) -> None:
        await self._publish("prime", version, weights)

    async def _publish(self, method: str, version: int, weights: AnyWeights) -> None:
        if isinstance(weights, DeviceWeights):
            self._held.append((version, weights))
        # In a thread: copying a large model must not delay other answers of this process.
        reference = await asyncio.get_running_loop().run_in_executor(self._thread, ray.put, weights)
        self._last = (method, version, [reference], weights.checksum, weights.n_bytes)
        await self.publish_again()

    async def publish_again(self) -> None:
        """Send the last message, also to a restarted synchronizer. Drops weights that no engine uses any more; the
        synchronizer answers None while it does not know which."""
        if self._last is None:
            return
        method, *args = self._last
        in_use = await self._actors.ask("sync", method, *args)
        if in_use is not None:
            self._held = [held for held in self._held if held[0] in in_use]

    async def wait_published(self, version: int, *, wait_s: float) -> bool:
        return bool(await self._actors.ask("sync", "wait_published", version, wait_s=wait_s))
