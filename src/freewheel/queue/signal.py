"""`Signal`: many waiters on one event loop, each for a condition of its own and with its own deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """`notify` looks at what each waits for, and wakes only those who have it."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def notify(self) -> None:
        for waiter, holds in list(self._waiting.items()):
            if not waiter.done() and holds():
                waiter.set_result(None)

    async def until(self, holds: Callable[[], bool], wait_s: float) -> bool:
        """True when `holds()` does; False if it does not within `wait_s`. `holds` may take what it finds: once it has
        said yes it is not asked again."""
        if holds():
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = holds
        try:
            await asyncio.wait([waiter], timeout=wait_s)
        finally:
            del self._waiting[waiter]
        return waiter.done() or holds()
