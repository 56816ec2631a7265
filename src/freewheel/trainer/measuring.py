"""`Measuring`: held-out evaluations beside training, and which weights the best score belongs to.

    start(step, version) ─▶ the version reaches the engines ─▶ evaluate ─▶ a row ─▶ best/, if no score was higher
                             published(v) ┄ versions that arrive meanwhile are kept ┄┘

Engines go on to newer versions while they are measured, so a score may be of several neighbouring ones. What is kept as
the best is then the newest of them: weights that a part of the responses came from, with a record of both ends. A
version whose weights are not at hand (they were trained on before it was complete, or too many came after it) is not
kept, and the log says so. The evaluation at the end of a run sees one version alone. Nothing is kept where nobody wants
the best (`trainer.keep_best`). What is kept is in host memory: a GPU's is for training. Used by `FullyAsyncTrainer`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from freewheel.sync.weights import AnyWeights, Weights
from freewheel.trainer.checkpoint import CheckpointFailed
from freewheel.trainer.peers import Evaluate, Publisher, Row, Saver

log = logging.getLogger("freewheel.trainer")

KEPT_VERSIONS = 8
"""Packed weights that are held while an evaluation runs: each is a copy of the model, and an evaluation that takes
longer than so many versions measures none of them."""
REWARD, OLDEST, NEWEST = "eval/reward", "eval/version_min", "eval/version_max"


class Measuring:
    """One evaluation at a time. None that fails ends the run."""

    def __init__(
        self,
        *,
        publisher: Publisher,
        saver: Saver,
        evaluate: Evaluate,
        disk: Executor,
        tell: Callable[[Row], None],
        publish_timeout_s: float,
        keep_best: bool,
    ) -> None:
        self._publisher = publisher
        self._saver = saver
        self._evaluate = evaluate
        self._disk = disk
        self._tell = tell
        self._publish_timeout_s = publish_timeout_s
        self._keeps = keep_best
        self._task: asyncio.Task[None] | None = None
        self._kept: dict[int, tuple[int, Future[Weights]]] = {}
        """Version → the step that completed it, and its weights, which are being fetched."""
        # Of its own: behind a checkpoint that is being written a GPU's memory would wait for the disk.
        self._fetching = ThreadPoolExecutor(1, thread_name_prefix="fetch")

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, step: int, version: int, weights: AnyWeights | None) -> None:
        """Begins one, unless another is under way. `weights`: those of `version`, where `step` completed it."""
        if self.running:
            log.warning(
                "The evaluation at step %d is left out: the one before is still running", step, extra={"step": step}
            )
            return
        self._kept = {}
        if weights is not None and self._keeps:
            self._keep(step, version, weights)
        self._task = asyncio.create_task(self._run(step, version))
        self._task.add_done_callback(lambda _: self._drop(0))

    def published(self, step: int, version: int, weights: AnyWeights) -> None:
        """Before engines can hold a version: one that is being measured may be made of it."""
        if self.running and self._keeps:
            self._keep(step, version, weights)
            self._drop(KEPT_VERSIONS)

    def _keep(self, step: int, version: int, weights: AnyWeights) -> None:
        self._kept[version] = (step, self._fetching.submit(weights.on_host))

    def _drop(self, most: int) -> None:
        """The oldest, until `most` are left."""
        while len(self._kept) > most:
            _, fetched = self._kept.pop(min(self._kept))
            fetched.cancel()

    async def done(self, *, unless: asyncio.Event) -> None:
        """When what is under way has ended, or `unless` is set, which leaves it as it is."""
        if self._task is None:
            return
        stopping = asyncio.create_task(unless.wait())
        try:
            await asyncio.wait([self._task, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if self._task.done():
            self._task.result()

    async def abandon(self) -> None:
        """For good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fetching.shutdown(wait=False, cancel_futures=True)

    async def _run(self, step: int, version: int) -> None:
        about = {"step": step, "version": version}
        try:
            if not await self._publisher.wait_published(version, wait_s=self._publish_timeout_s):
                log.warning(
                    "No evaluation at step %d: version %d has not reached the engines", step, version, extra=about
                )
                return
            found = await self._evaluate(step)
        except Exception:  # an engine may have died in it; what it was measuring is not lost
            log.exception("The evaluation at step %d failed; training goes on", step, extra=about)
            return
        if found is None:
            return
        self._tell(Row("eval", step, dict(found)))
        said = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        log.info("Held-out %s at step %d", said, step, extra=about)
        if self._keeps and not math.isnan(found[REWARD]):
            await self._keep_best(step, found[REWARD], (int(found[OLDEST]), int(found[NEWEST])))

    async def _keep_best(self, step: int, score: float, versions: tuple[int, int]) -> None:
        oldest, newest = versions
        if newest not in self._kept:
            log.info("The score at step %d is not kept as a best one: version %d is not at hand", step, newest)
            return
        made_by, fetched = self._kept[newest]

        def saving() -> bool:
            return self._saver.save_best(made_by, score, fetched.result(), versions=versions)

        try:
            is_best = await asyncio.get_running_loop().run_in_executor(self._disk, saving)
        except CheckpointFailed as error:
            log.error("The best weights so far (step %d) were not written: %s", made_by, error)
            return
        if is_best:
            seen = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
            log.info("Best so far: %.3f at step %d, measured on %s; kept is step %d", score, step, seen, made_by)
