"""`InlineJudge`: the engine on the caller's own event loop. The gateway and the synchronous reward path use it.

    async with InlineJudge(JudgeConfig(endpoint=…, model=…)) as judge:
        verdicts = await judge.score(requests)

`Judge` runs the same engine elsewhere, which is what a training process wants: here whatever blocks the loop blocks
the judging as well.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, Self

from freewheel.judge.asking import FROM_CONFIG, Requests, as_requests, deadline_at_of
from freewheel.judge.config import JudgeConfig
from freewheel.judge.engine import Engine, Request
from freewheel.judge.errors import JudgeClosed
from freewheel.judge.stats import JudgeStats
from freewheel.judge.verdict import Verdict


class InlineJudge:
    """Scores requests on the loop that started it, with the verdicts that `Judge` would give."""

    def __init__(self, config: JudgeConfig, *, spent: float = 0.0) -> None:
        """`spent`: what others have spent of `max_cost`."""
        self.config = config
        self.engine = Engine(config, deliver=self._deliver, spent=spent)
        self._numbers = itertools.count()
        self._open: dict[int, _Waiting] = {}
        self._running = False

    async def start(self) -> Self:
        try:
            await self.engine.start()
        except BaseException:
            await self.engine.close()
            raise
        self._running = True
        return self

    async def close(self) -> None:
        """What is open ends as `Failed("cancelled")`."""
        self._running = False
        await self.engine.close()

    async def score(self, requests: Requests, *, deadline_s: float | None = FROM_CONFIG) -> list[Verdict]:
        """One verdict a request, in their order. Cancelling the caller cancels the batch."""
        return await self.ask(as_requests(requests), deadline_at_of(deadline_s, self.config))

    async def ask(self, batch: Sequence[Request], deadline_at: float | None = None) -> list[Any]:
        """`score` for requests that are known to be well-formed, chat completions among them."""
        if not self._running:
            raise JudgeClosed("the judge is not running; use it within `async with`")
        if not batch:
            return []
        number = next(self._numbers)
        waiting = self._open[number] = _Waiting(len(batch))
        try:
            self.engine.submit(number, range(len(batch)), batch, deadline_at)
            await waiting.done.wait()
            return waiting.verdicts
        finally:
            if waiting.missing:
                self.engine.cancel(number)
            del self._open[number]

    def stats(self) -> JudgeStats:
        return self.engine.stats()

    @property
    def share_done(self) -> float:
        """Of the requests of all batches that are open."""
        total = sum(len(waiting.verdicts) for waiting in self._open.values())
        return 1 - sum(waiting.missing for waiting in self._open.values()) / total if total else 1.0

    def _deliver(self, number: int, index: int, verdict: Any) -> None:
        waiting = self._open[number]
        waiting.verdicts[index] = verdict
        waiting.missing -= 1
        if not waiting.missing:
            waiting.done.set()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class _Waiting:
    """One batch: its verdicts so far."""

    __slots__ = ("done", "missing", "verdicts")

    def __init__(self, count: int) -> None:
        self.verdicts: list[Any] = [None] * count
        self.missing = count
        self.done = asyncio.Event()
