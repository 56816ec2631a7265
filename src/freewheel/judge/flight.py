"""One content on its way to a verdict, and the batches that wait for it: the engine's two kinds of bookkeeping."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from freewheel.judge.chat import ChatRequest, ChatStream
from freewheel.judge.lane import NEVER, Lane, Permit
from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import Usage

if TYPE_CHECKING:
    from freewheel.judge.exchange import Exchange, Identity


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
                 "held_s", "is_retry", "keep_as", "key", "last", "most_tokens", "overdue", "patient", "permit",
                 "queued_at", "request", "size", "stales", "task", "throttles", "timeouts", "usage",
                 "waiters")  # fmt: skip

    def __init__(
        self,
        request: JudgeRequest | ChatRequest | ChatStream,
        exchange: Exchange,
        identity: Identity,
        now: float,
    ) -> None:
        self.request = request
        self.exchange = exchange
        self.key, self.size, self.keep_as, self.most_tokens, self.patient = identity
        self.held_s = 0.0
        """How long its own client kept it waiting: no fault of the judge's."""
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
        if permit is None or self.committed:
            return False
        patience = permit.lane.patience
        return now - permit.sent_at >= (patience.bound_s if self.patient else patience.allow_s(self.timeouts))
