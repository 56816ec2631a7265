"""`Taking`: the groups of a step, asked for until they come, and fresh enough to be trained on.

    take(k) ─▶ groups ─▶ none too old? ─▶ Batch            (waits for: the queue; ended by: a stop)
                            └─ replace_stale ─▶ others

Steps that a trainer before this one took and committed come back as they were (`Batch.recorded`): they are a part of
the way to the weights that engines hold, so nothing in them is replaced. Used by `FullyAsyncTrainer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from freewheel.data.group import PromptGroup
from freewheel.observe import trace
from freewheel.observe.spans import Spans
from freewheel.queue.client import QueueClient, Taken
from freewheel.queue.staleness import Bounds

log = logging.getLogger("freewheel.trainer")

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """What a step is trained on."""

    step: int
    groups: list[PromptGroup]
    recorded_until: int
    """Steps up to this one were committed before this trainer began."""
    taken_s: float = field(default_factory=trace.now)
    """By the clock of the trace."""

    @property
    def recorded(self) -> bool:
        return self.step <= self.recorded_until

    def committed(self, version: int, *, trained_at: int) -> None:
        """For the trace: each of its groups has come to its end. `trained_at`: the version before the step, from which
        lags are counted; `version`: the one after it."""
        for group in self.groups:
            lag = trained_at - group.min_version
            trace.phase("train", group.ordinal, self.taken_s, step=self.step, version=version, lag=lag)


class Taking:
    """Gives batches of exactly P groups, none older than the bound; None when there is nothing more to train on, or the
    run is to stop."""

    def __init__(
        self, *, queue: QueueClient, bounds: Bounds, batch_timeout_s: float, stop: asyncio.Event, spans: Spans
    ) -> None:
        self.dropped_stale_samples = 0
        self._queue = queue
        self._bounds = bounds
        self._batch_timeout_s = batch_timeout_s
        self._stop = stop
        self._spans = spans

    async def take(self, step: int) -> Batch | None:
        while not self._stop.is_set():
            taken = await self._unless_stopped(self._queue.take(step, wait_s=self._batch_timeout_s))
            if taken is None or taken.state == "finished":
                return None
            if taken.block is not None:
                return Batch(step, taken.block.groups(), taken.recorded_until)
            log.warning(
                "No batch for step %d within async_training.batch_timeout = %g s: %s",
                step,
                self._batch_timeout_s,
                taken.waiting_for,
                extra={"step": step},
            )
        return None

    async def fresh(self, batch: Batch, *, version: int) -> Batch | None:
        """The check at consumption: what is too old by now goes back to the stream, and others come in its place."""
        found: Batch | None = batch
        while found is not None and not found.recorded:
            stale = [group for group in found.groups if self._bounds.too_old(version - group.min_version)]
            if not stale:
                break
            self.dropped_stale_samples += sum(len(group) for group in stale)
            log.warning(
                "%d groups of step %d lag more than async_training.max_staleness_allowed = %d versions: issued again",
                len(stale),
                found.step,
                self._bounds.max_lag_allowed,
                extra={"step": found.step, "version": version},
            )
            with self._spans("wait_batch"):
                found = await self._others(found, [group.ticket.sequence for group in stale])
        return found

    async def _others(self, batch: Batch, sequences: list[int]) -> Batch | None:
        while not self._stop.is_set():
            asked = self._queue.replace_stale(batch.step, sequences, wait_s=self._batch_timeout_s)
            taken = await self._unless_stopped(asked)
            if taken is None or taken.state == "finished":
                break
            if taken.block is not None:
                return Batch(batch.step, taken.block.groups(), batch.recorded_until)
            log.warning("Step %d waits for fresh groups: %s", batch.step, taken.waiting_for, extra={"step": batch.step})
            sequences = []
        return None

    async def _unless_stopped(self, asked: Coroutine[Any, Any, Taken]) -> Taken | None:
        asking, stopping = asyncio.create_task(asked), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([asking, stopping], return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            stopping.cancel()


async def answered(ask: Callable[..., Awaitable[T | None]], *, wait_s: float, waits: str) -> T:
    """What the queue answers once its journal can. `waits`: what does meanwhile, in words."""
    while (answer := await ask(wait_s=wait_s)) is None:
        log.warning("The journal cannot be written yet: %s waits", waits)
    return answer


async def unless_failed(beside: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. It may wait for what `beside` does (no batch comes before a version is published), so that
    what goes wrong there is raised at once."""
    working = asyncio.create_task(work)
    try:
        while not working.done():
            both = {working} if beside.done() else {working, beside}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if beside.done():
                beside.result()
        return working.result()
    finally:
        working.cancel()
