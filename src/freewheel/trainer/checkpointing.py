"""`Checkpointing`: checkpoints beside training, one at a time, and the queue told of what they make superfluous.

    begin(snapshot) ─▶ the one before is written ─▶ read_frontier(step) ─▶ [thread] save ─▶ written
                          (waits for: the journal)                       └─▶ confirm_checkpoint(oldest kept)

The trainer stands still for the copy alone. Used by `FullyAsyncTrainer`.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from freewheel.observe.spans import Spans
from freewheel.queue.client import QueueClient
from freewheel.queue.ledger import Frontier
from freewheel.sync.weights import AnyWeights
from freewheel.trainer.backend import BackendState
from freewheel.trainer.checkpoint import CheckpointFailed
from freewheel.trainer.peers import Saver
from freewheel.trainer.taking import answered

log = logging.getLogger("freewheel.trainer")

TELL_S = 10.0
"""At the end of a run, for the queue to hear of the last checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A step's end, copied."""

    step: int
    version: int
    weights: AnyWeights
    state: BackendState


class Checkpointing:
    """One that cannot be written is no reason to lose the run: the next one may fit."""

    def __init__(
        self, *, queue: QueueClient, saver: Saver, disk: Executor, spans: Spans, step: int, wait_s: float
    ) -> None:
        """`wait_s`: the journal is asked anew this often."""
        self.saved_step = step
        self._wait_s = wait_s
        self._queue = queue
        self._saver = saver
        self._disk = disk
        self._spans = spans
        self._task: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def begin(self, snapshot: Snapshot) -> None:
        """Returns when it is being written. A disk slower than the steps slows them down instead of filling memory."""
        await self.done()
        step = snapshot.step
        frontier = await answered(
            partial(self._queue.read_frontier, step), wait_s=self._wait_s, waits=f"the checkpoint of step {step}"
        )
        self._task = asyncio.create_task(self._write(snapshot, frontier))

    async def done(self) -> None:
        """When what is being written is."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def settled(self) -> None:
        """The same, whatever came of it."""
        if self._task is not None:
            await asyncio.gather(asyncio.shield(self._task), return_exceptions=True)
        if self._telling is not None:
            await asyncio.wait([self._telling], timeout=TELL_S)
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)

    async def _write(self, snapshot: Snapshot, frontier: Frontier) -> None:
        step, about = snapshot.step, {"step": snapshot.step, "version": snapshot.version}
        saving = partial(self._saver.save, step, snapshot.version, frontier, snapshot.state, snapshot.weights)
        try:
            with self._spans("save", step=step):
                oldest = await asyncio.get_running_loop().run_in_executor(self._disk, saving)
        except CheckpointFailed as error:
            log.error("The checkpoint of step %d was not written, and training goes on: %s", step, error, extra=about)
            return
        self.saved_step = step
        log.info("Saved the checkpoint of step %d", step, extra=about)
        if self._telling is None or self._telling.done():  # else the next checkpoint tells of more
            self._telling = asyncio.create_task(self._tell(oldest))

    async def _tell(self, oldest: int) -> None:
        try:
            await self._queue.confirm_checkpoint(oldest)
        except Exception as error:  # noqa: BLE001  a journal that stays large is no reason to end a run
            why = f"{type(error).__name__}: {error}"
            log.warning("The queue keeps what the checkpoint of step %d covers, until the next: %s", oldest, why)
