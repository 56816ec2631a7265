"""Evaluations that run next to training, one at a time, and the best weights so far. Used by `FullyAsyncTrainer`.

    start(step, version) ─▶ the version reaches the engines ─▶ evaluate ─▶ a row ─▶ best/
                            keep(v): the weights of versions that are published meanwhile

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
from dataclasses import dataclass, field

from freewheel.sync.weights import AnyWeights, Weights
from freewheel.trainer.backend import Evaluate, MetricsRow, Publisher
from freewheel.trainer.checkpoint import CheckpointFailed, RunSaver
from freewheel.utils.waiting import unless_stopped

log = logging.getLogger("freewheel.trainer")

PUBLISH_S = 120.0
"""How long an evaluation waits until its version reaches the engines."""
KEPT_VERSIONS = 8
"""Versions whose weights are kept during an evaluation. Each is a copy of the model in host memory."""
REWARD, OLDEST, NEWEST = "eval/reward", "eval/version_min", "eval/version_max"


@dataclass(kw_only=True)
class BackgroundEvaluation:
    """Runs one evaluation at a time. A failed evaluation does not end the run."""

    publisher: Publisher
    saver: RunSaver
    evaluate: Evaluate
    disk: Executor
    """Writes to the disk."""
    add_row: Callable[[MetricsRow], None]
    keep_best: bool
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _kept: dict[int, tuple[int, Future[Weights]]] = field(default_factory=dict, init=False)
    """Version → the step that completed it, and its weights on their way to host memory."""

    def __post_init__(self) -> None:
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
        self._task = asyncio.create_task(self._run(step, version))
        if weights is not None:
            self.keep(step, version, weights)

    def keep(self, step: int, version: int, weights: AnyWeights) -> None:
        """Keep the weights of a version that engines are about to receive, if a running evaluation may use it."""
        if self.running and self.keep_best:
            self._kept[version] = (step, self._fetching.submit(weights.on_host))
            self._drop(KEPT_VERSIONS)

    async def finish(self, *, unless: asyncio.Event) -> None:
        """Wait for the running evaluation, or return early when `unless` is set."""
        if self._task is not None:
            await unless_stopped(asyncio.wait([self._task]), unless)
            if self._task.done():
                self._task.result()

    async def abandon(self) -> None:
        """Cancel the running evaluation and release all weights."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fetching.shutdown(wait=False, cancel_futures=True)

    def _drop(self, count: int) -> None:
        """Release the oldest versions until `count` are left."""
        while len(self._kept) > count:
            _, fetched = self._kept.pop(min(self._kept))
            fetched.cancel()

    async def _run(self, step: int, version: int) -> None:
        try:
            scores = await self._measure(step, version)
            if scores is not None and self.keep_best and not math.isnan(scores[REWARD]):
                await self._save_best(step, scores[REWARD], int(scores[OLDEST]), int(scores[NEWEST]))
        finally:
            self._drop(0)

    async def _measure(self, step: int, version: int) -> dict[str, float] | None:
        context = {"step": step, "version": version}
        try:
            if not await self.publisher.wait_published(version, wait_s=PUBLISH_S):
                log.warning(
                    "No evaluation at step %d: version %d has not reached the engines", step, version, extra=context
                )
                return None
            scores = await self.evaluate(step)
        except Exception:  # for example a dead engine; training does not depend on it
            log.exception("The evaluation at step %d failed; training continues", step, extra=context)
            return None
        if scores is not None:
            self.add_row(MetricsRow("eval", step, dict(scores)))
            listed = ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
            log.info("Held-out %s at step %d", listed, step, extra=context)
        return scores

    async def _save_best(self, step: int, score: float, oldest: int, newest: int) -> None:
        if newest not in self._kept:
            log.info("The score at step %d cannot be the best: the weights of version %d are gone", step, newest)
            return
        trained_step, fetched = self._kept[newest]

        def save() -> bool:
            return self.saver.save_best(trained_step, score, fetched.result(), versions=(oldest, newest))

        try:
            is_best = await asyncio.get_running_loop().run_in_executor(self.disk, save)
        except CheckpointFailed as error:
            log.error("The best weights so far (step %d) were not written: %s", trained_step, error)
            return
        if is_best:
            measured = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
            found = f"Best so far: {score:.3f} at step {step}, measured on {measured}"
            log.info("%s; keeping the weights of step %d", found, trained_step)
