"""`Checkpointing`: checkpoints beside training, one at a time, and the queue told of what they make superfluous.

    begin(snapshot) ─▶ the one before is written ─▶ frontier(step) ─▶ [thread] save ─▶ checkpointed(oldest kept)

The trainer stands still for the copy alone. Used by `FullyAsyncTrainer`.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from freewheel.observe.spans import Spans
from freewheel.queue.ledger import Frontier
from freewheel.sync.weights import Weights
from freewheel.trainer.backend import BackendState
from freewheel.trainer.checkpoint import CheckpointFailed
from freewheel.trainer.peers import QueueClient, Saver

log = logging.getLogger("freewheel.trainer")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A step's end, copied."""

    step: int
    version: int
    weights: Weights
    state: BackendState


class Checkpointing:
    """One that cannot be written is no reason to lose the run: the next one may fit."""

    def __init__(self, *, queue: QueueClient, saver: Saver, disk: Executor, spans: Spans, step: int) -> None:
        self.saved_step = step
        self._queue = queue
        self._saver = saver
        self._disk = disk
        self._spans = spans
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def begin(self, snapshot: Snapshot) -> None:
        """Returns when it is being written. A disk slower than the steps slows them down instead of filling memory."""
        await self.done()
        frontier = await self._queue.frontier(snapshot.step)
        self._task = asyncio.create_task(self._write(snapshot, frontier))

    async def done(self) -> None:
        """When what is being written is."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def settled(self) -> None:
        """The same, whatever came of it."""
        if self._task is not None:
            await asyncio.gather(asyncio.shield(self._task), return_exceptions=True)

    async def _write(self, snapshot: Snapshot, frontier: Frontier) -> None:
        step = snapshot.step
        saving = partial(self._saver.save, step, snapshot.version, frontier, snapshot.state, snapshot.weights)
        try:
            with self._spans("save"):
                oldest = await asyncio.get_running_loop().run_in_executor(self._disk, saving)
        except CheckpointFailed as error:
            log.error("The checkpoint of step %d was not written, and training goes on: %s", step, error)
            return
        self.saved_step = step
        log.info("Saved the checkpoint of step %d", step)
        await self._queue.checkpointed(oldest)
