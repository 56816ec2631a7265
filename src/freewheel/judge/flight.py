"""One content on its way to a verdict, and the batches that wait for it: the engine's two kinds of bookkeeping."""

from __future__ import annotations

import asyncio

from freewheel.judge.lane import NEVER, Lane, Permit
from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import Usage


class Batch:
    """The requests of one handle that the engine has not answered yet."""

    __slots__ = ("id", "open", "timer")

    def __init__(self, identity: int) -> None:
        self.id = identity
        self.open: dict[int, Flight] = {}
        self.timer: asyncio.TimerHandle | None = None


class Flight:
    """Requests of equal content share one; it lives on while anyone waits for it, and ends once."""

    __slots__ = ("asks", "avoid", "avoid_until", "calls", "deadline_at", "done", "faults", "is_retry", "key", "last",
                 "overdue", "permit", "queued_at", "request", "size", "stales", "task", "throttles", "timeouts",
                 "usage", "waiters")  # fmt: skip

    def __init__(self, key: bytes, request: JudgeRequest, size: int, now: float) -> None:
        self.key = key
        self.request = request
        self.size = size
        """Bytes to be sent: what its tokens are estimated from."""
        self.queued_at = now
        self.waiters: list[tuple[Batch, int, float]] = []
        """(batch, index, since when)."""
        self.calls = self.faults = self.throttles = self.timeouts = self.stales = self.asks = 0
        self.is_retry = False
        """It waits for the retry budget."""
        self.deadline_at = NEVER
        self.permit: Permit | None = None
        """Of the call that is under way."""
        self.overdue = False
        self.task: asyncio.Task[None] | None = None
        self.avoid: Lane | None = None
        """Where it just failed, and until when it must not be sent there again."""
        self.avoid_until = -NEVER
        self.last = ""
        """What went wrong last, for the verdict's detail."""
        self.usage = Usage()
        self.done = False

    def is_overdue(self, now: float) -> bool:
        """True if its call takes longer than calls there do, by what is known now and not when it was sent."""
        permit = self.permit
        return permit is not None and now - permit.sent_at >= permit.lane.patience.allow_s(self.timeouts)
