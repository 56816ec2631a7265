"""`Outbox`: finished groups on their way into the queue, kept until they are stored there.

    add ─▶ waiting ─▶ put, all that wait in one message ─▶ True: stored, forgotten here
              ▲                                            False: not yet (a full disk, a queue that came back)
              └──────────── said again ◀───────────────────┘

Nobody waits for it: how much can gather here is bounded by admission. Used by `Rollouter`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from freewheel.data.group import EncodedGroup, EncodedGroups, Ticket
from freewheel.observe import trace

PUT_LINGER_S = 0.05
"""Groups that finish within it share a message: a message costs more than a group."""
PUT_WAIT_S = 5.0
"""A put is said again this often, with what was finished since, so that a queue that went away is noticed."""
PUT_AGAIN_S = 0.5
"""Before that: a queue that cannot store anything now has nothing from being asked without a pause."""


class Put(Protocol):
    def __call__(self, groups: EncodedGroups, *, wait_s: float) -> Awaitable[bool]: ...


class Outbox:
    """Whatever was added is said to the queue until it answers that it is stored."""

    def __init__(self, *, put: Put, quiet: asyncio.Event) -> None:
        """`quiet`: set while no other group is about to be added."""
        self._put = put
        self._quiet = quiet
        self._groups: dict[int, EncodedGroup] = {}  # by sequence
        self._since: dict[int, float] = {}  # the same
        self._mail = asyncio.Event()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def tickets(self) -> list[Ticket]:
        return [group.ticket for group in self._groups.values()]

    def add(self, group: EncodedGroup) -> None:
        self._groups[group.ticket.sequence] = group
        self._since[group.ticket.sequence] = trace.now()
        self._mail.set()

    async def run(self) -> None:
        """Until cancelled. Raises what `put` does."""
        while True:
            await self._mail.wait()
            await wait(self._quiet, PUT_LINGER_S)
            self._mail.clear()
            groups = list(self._groups.values())
            if await self._put(EncodedGroups(groups), wait_s=PUT_WAIT_S):
                for ticket, _, _ in groups:
                    del self._groups[ticket.sequence]
                    trace.phase("store", ticket.ordinal, self._since.pop(ticket.sequence))
            else:
                self._mail.set()
                await asyncio.sleep(PUT_AGAIN_S)


async def wait(event: asyncio.Event, wait_s: float) -> None:
    """For `event`, and not longer than `wait_s`."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=wait_s)
    finally:
        waiting.cancel()
