"""One content on its way to a verdict, and the batches that wait for it: the engine's two kinds of bookkeeping."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from freewheel.judge.chat import ChatRequest, ChatStream
from freewheel.judge.lane import NEVER, Lane, Permit
from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import Usage

if TYPE_CHECKING:
    from freewheel.judge.exchange import Exchange


class Batch:
    """The requests of one handle that the engine has not answered yet."""

    __slots__ = ("id", "open", "timer")

    def __init__(self, identity: int) -> None:
        self.id = identity
        self.open: dict[int, Flight] = {}
        self.timer: asyncio.TimerHandle | None = None


class Flight:
    """Requests of equal content share one; it lives on while anyone waits for it, and ends once."""

    __slots__ = ("asks", "avoid", "avoid_until", "calls", "committed", "deadline_at", "done", "exchange", "faults",
                 "is_retry", "keeps", "key", "last", "overdue", "permit", "queued_at", "request", "size", "stales",
                 "task", "throttles", "timeouts", "usage", "waiters")  # fmt: skip

    def __init__(
        self,
        key: bytes,
        request: JudgeRequest | ChatRequest | ChatStream,
        exchange: Exchange,
        size: int,
        keeps: bool,
        now: float,
    ) -> None:
        self.key = key
        self.request = request
        self.exchange = exchange
        self.size = size
        """Bytes to be sent: what its tokens are estimated from."""
        self.keeps = keeps
        """Its reply may serve later requests."""
        self.committed = False
        """Part of its answer is with its client: it can be asked for no second time, and takes what time it takes."""
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

    def commit(self) -> None:
        self.committed = True
        self.deadline_at = NEVER

    def is_overdue(self, now: float) -> bool:
        """True if its call takes longer than calls there do, by what is known now and not when it was sent."""
        permit = self.permit
        return (
            permit is not None
            and not self.committed
            and now - permit.sent_at >= permit.lane.patience.allow_s(self.timeouts)
        )
