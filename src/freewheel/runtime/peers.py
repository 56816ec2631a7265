"""`Peers`: how a component calls another one, across that one's death.

    call("queue", …) ─▶ answer
         └─ it died, or is silent ─▶ (waits for: `meet`, by FullyAsyncMain) ─▶ the same call to its successor

So every call may arrive twice, and what is called that way must not mind. Used by every actor and by `FullyAsyncMain`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from freewheel.utils.waiting import Signal

START_S = 600.0
"""Longest time for an actor to load its model."""
CALL_S = 60.0
"""Longest time for a call that does not wait for anything."""
RECOVERY_S = 900.0
"""Longest time for a successor: as long as a large model takes to load, and some steps to be trained again."""
ASK_AGAIN_S = 1.0
"""Before one that did not answer is asked again: it may be busy, or out of reach for a moment."""


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


class Peers:
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
                raise PeerSilent(f"{name} was not there for {method} within {deadline_s + RECOVERY_S:g} s")
            handle = self._handles[name]
            try:
                return await call(handle, method, *args, deadline_s=deadline_s, **kwargs)
            except (RayActorError, PeerSilent) as error:
                left_s = until - clock()
                if isinstance(error, RayTaskError) or left_s <= 0:  # another's death, which it met with
                    raise
                gone = isinstance(error, ActorDiedError)
                wait_s = left_s if gone else min(left_s, ASK_AGAIN_S)
                if not await self._replaced(name, handle, wait_s) and gone:
                    raise

    async def _replaced(self, name: str, handle: Any, wait_s: float) -> bool:
        return await self._changed.until(lambda: self._handles[name] is not handle, wait_s)
