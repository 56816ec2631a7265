"""`ActorDirectory`: how a component calls another one, across that one's death.

    call("queue", …) ─▶ answer
         └─ it died, or is silent ─▶ (waits for: `meet`, by FullyAsyncMain) ─▶ the same call to its successor

So every call may arrive twice, and what is called that way must not mind. Used by every actor and by `FullyAsyncMain`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from freewheel.data.group import Block, Ticket
from freewheel.queue.client import Admission, Taken
from freewheel.queue.ledger import Failure, Frontier
from freewheel.queue.message_queue import MessageQueue
from freewheel.sync.device import DeviceWeights
from freewheel.sync.synchronizer import ReplicaGone
from freewheel.sync.weights import AnyWeights
from freewheel.utils.waiting import Signal

START_S = 600.0
"""Longest time for an actor to load its model."""
CALL_S = 60.0
"""Longest time for a call that does not wait for anything."""
RECOVERY_S = 900.0
"""Longest time for a successor: as long as a large model takes to load, and some steps to be trained again."""
ASK_AGAIN_S = 1.0
"""Before one that did not answer is asked again: it may be busy, or out of reach for a moment."""


class NoAnswer(RuntimeError):
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
        raise NoAnswer(f"{method} gave no answer within {deadline_s:g} s") from None


def died(error: BaseException) -> bool:
    """The actor itself, and not one that it was talking to."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def cause(error: BaseException) -> BaseException:
    """What a component raised, out of Ray's wrapping."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error


class ActorDirectory:
    """The components that are in use, by name."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        self._changed = Signal()

    def meet(self, handles: Mapping[str, Any]) -> None:
        """These are the ones in use now."""
        self._handles |= handles
        self._changed.notify()

    def __getitem__(self, name: str) -> Any:
        return self._handles[name]

    async def call(self, name: str, method: str, *args: Any, deadline_s: float = CALL_S, **kwargs: Any) -> Any:
        """The answer of `name`, or of its successor. Raises what the last try did, when none comes."""
        clock = asyncio.get_running_loop().time
        until = clock() + deadline_s + RECOVERY_S
        while True:
            if not await self._changed.until(lambda: name in self._handles, until - clock()):  # it is being replaced
                raise NoAnswer(f"{name} was not there for {method} within {deadline_s + RECOVERY_S:g} s")
            handle = self._handles[name]
            try:
                return await call(handle, method, *args, deadline_s=deadline_s, **kwargs)
            except (RayActorError, NoAnswer) as error:
                left_s = until - clock()
                if isinstance(error, RayTaskError) or left_s <= 0:  # another's death, which it met with
                    raise
                gone = isinstance(error, ActorDiedError)
                wait_s = left_s if gone else min(left_s, ASK_AGAIN_S)
                if not await self._replaced(name, handle, wait_s) and gone:
                    raise

    async def _replaced(self, name: str, handle: Any, wait_s: float) -> bool:
        return await self._changed.until(lambda: self._handles[name] is not handle, wait_s)


P = ParamSpec("P")
T = TypeVar("T")


class RemoteQueue:
    """The `QueueClient` of a `MessageQueue` in another process, or of its successor."""

    def __init__(self, peers: ActorDirectory) -> None:
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

    def __init__(self, peers: ActorDirectory) -> None:
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
