"""`Stepping`: one step of a backend in a thread of its own, tried again where that trains on nothing twice.

    learn(batch) ─▶ [thread] backend.step ─▶ metrics ─▶ whole()       an error before any update: the same batch again
    pack, state ─▶ [thread] copies of what was learnt                 after one: the end, the last whole step is intact

Used by `FullyAsyncTrainer`, which says when a step counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from freewheel.observe.spans import Spans
from freewheel.sync.weights import AnyWeights, Packer
from freewheel.trainer.backend import Backend, BackendState, NonFiniteLoss
from freewheel.trainer.taking import Batch

log = logging.getLogger("freewheel.trainer")

T = TypeVar("T")


class TrainingFailed(RuntimeError):
    """A step could not be taken, however often it was tried, or was half taken. The last checkpoint is intact."""


class Stepping:
    """A batch is not lost because memory was short for a moment, and none is trained on twice."""

    def __init__(self, *, backend: Backend, packer: Packer, max_errors: int, total_steps: int, spans: Spans) -> None:
        self.backend = backend
        self.errors = 0
        self.training = False
        self._packer = packer
        self._max_errors = max_errors
        self._total_steps = total_steps
        self._spans = spans
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._updates = backend.updates_applied
        """When the last whole step was done."""

    @property
    def half_done(self) -> bool:
        """Weights are in the middle of a step."""
        return self.backend.updates_applied != self._updates

    def whole(self) -> None:
        """The step that was learnt counts."""
        self._updates = self.backend.updates_applied

    async def learn(self, batch: Batch, *, version: int | None) -> dict[str, float]:
        """Metrics. `version`: of the weights before it; None where they are between two."""
        step, attempt = batch.step, 0
        while True:
            attempt += 1
            try:
                return await self._learned(batch, version)
            except NonFiniteLoss:
                raise
            except Exception as error:
                self.errors += 1
                log.exception(
                    "Step %d failed (attempt %d of %d)", step, attempt, self._max_errors, extra={"step": step}
                )
                why = f"{type(error).__name__}: {error}"
                applied = self.backend.updates_applied - self._updates
                if applied:
                    raise TrainingFailed(
                        f"step {step} failed after {applied} of its updates were applied, and trying it again would "
                        f"train on its groups twice: {why}. Go on from the last checkpoint (resume=RUN)"
                    ) from error
                if attempt >= self._max_errors:
                    raise TrainingFailed(f"step {step} failed {attempt} times (trainer.max_errors): {why}") from error

    async def _learned(self, batch: Batch, version: int | None) -> dict[str, float]:
        def work() -> dict[str, float]:
            taken = batch.step - 1
            return self.backend.step(batch.groups, version=version, step=taken, total_steps=self._total_steps)

        self.training = True
        try:
            with self._spans("train", step=batch.step):
                return await self._in_thread(work)
        finally:
            self.training = False

    async def weights(self) -> AnyWeights:
        return await self._in_thread(lambda: self._packer(self.backend.weights()))

    async def state(self) -> BackendState:
        return await self._in_thread(lambda: self.backend.state())

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
