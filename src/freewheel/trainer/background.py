"""Checkpoints and evaluations that run next to training, one of each at a time. Used by `FullyAsyncTrainer`.

    CheckpointWriter      begin ─▶ [thread] save ─▶ the queue hears which steps no resume will need again
    BackgroundEvaluation  start(step, version) ─▶ the version reaches the engines ─▶ evaluate ─▶ a row ─▶ best/
                                                  publish(v): keep the weights of versions that arrive meanwhile

Engines may switch to newer versions during an evaluation, so a score can cover several versions. The weights kept as
the best are then those of the newest version that produced responses, with a record of the first and the last. If these
weights are not available (training continued before the version was complete, or too many versions followed), nothing
is kept and the log says so. The evaluation at the end of a run always covers exactly one version.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

from freewheel.observe.spans import Spans
from freewheel.queue.client import QueueClient
from freewheel.queue.ledger import Frontier
from freewheel.sync.weights import AnyWeights, Weights
from freewheel.trainer.backend import BackendState, Evaluate, Publisher, Row
from freewheel.trainer.checkpoint import CheckpointFailed, RunSaver
from freewheel.utils.waiting import unless_stopped

log = logging.getLogger("freewheel.trainer")

CONFIRM_S = 10.0
"""How long a checkpoint waits for the queue to compact its journal."""
PUBLISH_S = 120.0
"""How long an evaluation waits until its version reaches the engines."""
KEPT_VERSIONS = 8
"""Versions whose weights are kept during an evaluation. Each is a copy of the model in host memory."""
REWARD, OLDEST, NEWEST = "eval/reward", "eval/version_min", "eval/version_max"


class CheckpointWriter:
    """Writes one checkpoint at a time. A failure is logged and does not end the run: the next one may succeed."""

    def __init__(self, *, queue: QueueClient, saver: RunSaver, disk: Executor, spans: Spans, step: int) -> None:
        self.saved_step = step
        self._queue = queue
        self._saver = saver
        self._disk = disk
        self._spans = spans
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self, step: int, version: int, frontier: Frontier, state: BackendState, weights: AnyWeights) -> None:
        """Start writing. The previous checkpoint must be finished."""
        assert not self.running
        self._task = asyncio.create_task(self._write(step, version, frontier, state, weights))

    async def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written and ignore how it ends."""
        if self._task is not None:
            await asyncio.gather(asyncio.shield(self._task), return_exceptions=True)

    async def _write(
        self, step: int, version: int, frontier: Frontier, state: BackendState, weights: AnyWeights
    ) -> None:
        context = {"step": step, "version": version}
        save = partial(self._saver.save, step, version, frontier, state, weights)
        try:
            with self._spans("save", step=step):
                oldest = await asyncio.get_running_loop().run_in_executor(self._disk, save)
        except CheckpointFailed as error:
            log.error("The checkpoint of step %d was not written; training continues: %s", step, error, extra=context)
            return
        self.saved_step = step
        log.info("Saved the checkpoint of step %d", step, extra=context)
        try:
            await asyncio.wait_for(self._queue.confirm_checkpoint(oldest), CONFIRM_S)
        except Exception as error:  # noqa: BLE001  # a journal that stays large is no reason to end a run
            reason = f"{type(error).__name__}: {error}"
            log.warning("Journal compaction up to step %d failed; retrying at the next checkpoint: %s", oldest, reason)


class BackgroundEvaluation:
    """Runs one evaluation at a time. A failed evaluation does not end the run."""

    def __init__(
        self,
        *,
        publisher: Publisher,
        saver: RunSaver,
        evaluate: Evaluate,
        disk: Executor,
        add_row: Callable[[Row], None],
        keep_best: bool,
    ) -> None:
        self._publisher = publisher
        self._saver = saver
        self._evaluate = evaluate
        self._disk = disk
        self._add_row = add_row
        self._keep_best = keep_best
        self._task: asyncio.Task[None] | None = None
        self._kept: dict[int, tuple[int, Future[Weights]]] = {}
        """Version → the step that completed it, and its weights on their way to host memory."""
        # A separate thread: in the disk's thread, GPU memory would stay occupied until a checkpoint is written.
        self._fetching = ThreadPoolExecutor(1, thread_name_prefix="fetch")

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, step: int, version: int, weights: AnyWeights | None) -> None:
        """Start an evaluation unless one is running. `weights`: those of `version`, if `step` completed it."""
        if self.running:
            log.warning(
                "Skipping the evaluation at step %d: the previous one is still running", step, extra={"step": step}
            )
            return
        self._kept = {}
        if weights is not None and self._keep_best:
            self._keep(step, version, weights)
        self._task = asyncio.create_task(self._run(step, version))
        self._task.add_done_callback(lambda _: self._drop(0))

    def publish(self, step: int, version: int, weights: AnyWeights) -> None:
        """Keep the weights of a version that engines are about to receive: the running evaluation may use it."""
        if self.running and self._keep_best:
            self._keep(step, version, weights)
            self._drop(KEPT_VERSIONS)

    async def finish(self, *, unless: asyncio.Event) -> None:
        """Wait for the running evaluation, or return early when `unless` is set."""
        if self._task is not None:
            await unless_stopped(self._wait(self._task), unless)

    async def _wait(self, task: asyncio.Task[None]) -> None:
        await asyncio.shield(task)

    async def abandon(self) -> None:
        """Cancel the running evaluation and release all weights."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fetching.shutdown(wait=False, cancel_futures=True)

    def _keep(self, step: int, version: int, weights: AnyWeights) -> None:
        self._kept[version] = (step, self._fetching.submit(weights.on_host))

    def _drop(self, count: int) -> None:
        """Release the oldest versions until `count` are left."""
        while len(self._kept) > count:
            _, fetched = self._kept.pop(min(self._kept))
            fetched.cancel()

    async def _run(self, step: int, version: int) -> None:
        context = {"step": step, "version": version}
        try:
            if not await self._publisher.wait_published(version, wait_s=PUBLISH_S):
                log.warning(
                    "No evaluation at step %d: version %d has not reached the engines", step, version, extra=context
                )
                return
            scores = await self._evaluate(step)
        except Exception:  # for example a dead engine; training does not depend on it
            log.exception("The evaluation at step %d failed; training continues", step, extra=context)
            return
        if scores is None:
            return
        self._add_row(Row("eval", step, dict(scores)))
        listed = ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
        log.info("Held-out %s at step %d", listed, step, extra=context)
        if self._keep_best and not math.isnan(scores[REWARD]):
            await self._save_best(step, scores[REWARD], int(scores[OLDEST]), int(scores[NEWEST]))

    async def _save_best(self, step: int, score: float, oldest: int, newest: int) -> None:
        if newest not in self._kept:
            log.info("The score at step %d cannot be the best: the weights of version %d are gone", step, newest)
            return
        trained_step, fetched = self._kept[newest]

        def save() -> bool:
            return self._saver.save_best(trained_step, score, fetched.result(), versions=(oldest, newest))

        try:
            is_best = await asyncio.get_running_loop().run_in_executor(self._disk, save)
        except CheckpointFailed as error:
            log.error("The best weights so far (step %d) were not written: %s", trained_step, error)
            return
        if is_best:
            versions = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
            log.info(
                "Best so far: %.3f at step %d, measured on %s; keeping the weights of step %d",
                score,
                step,
                versions,
                trained_step,
            )
