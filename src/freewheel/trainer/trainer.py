"""`FullyAsyncTrainer`: takes groups from the queue, trains on them, publishes versions, saves and evaluates.

    take(k+1) ─────────────────────────┐ (requested while step k trains)
    [thread] step k ─▶ pack weights ───┼──▶ [thread] step k+1 …
                          └─▶ meanwhile, in this order: commit(k) ─▶ publish(v+1) ─▶ checkpoint, evaluation if due

The trainer waits only for the queue; `wait_batch` is the time in which it had nothing to train on. A `Backend` does the
learning. The queue decides which groups form a batch, and the trainer checks their staleness again before training on
them, because this is where the promise is kept.

After a crash, steps that were committed after the last checkpoint are replayed first: the queue returns the recorded
groups and the recorded versions. Engines hold these weights already, or receive them after the last replayed step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from freewheel.data.group import PromptGroup
from freewheel.observe import trace
from freewheel.observe.metrics import age_counts, freshness
from freewheel.observe.spans import ELAPSED, Spans
from freewheel.queue.client import QueueClient, Taken
from freewheel.queue.staleness import Bounds
from freewheel.sync.weights import AnyWeights, Packer, pack
from freewheel.trainer.backend import Backend, BackendState, Evaluate, MetricsRow, NonFiniteLoss, Publisher
from freewheel.trainer.checkpoint import RunSaver
from freewheel.trainer.evaluation import BackgroundEvaluation
from freewheel.utils.waiting import unless_failed, unless_stopped

log = logging.getLogger("freewheel.trainer")

T = TypeVar("T")

CONFIRM_S = 10.0
"""How long a checkpoint waits for the queue to compact its journal."""

Ending = Literal["finished", "stopped"]


class TrainingFailed(RuntimeError):
    """A step failed too often, or after some of its updates were applied. The last checkpoint is intact."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When steps, checkpoints and evaluations are due."""

    total_steps: int
    batch_timeout_s: float
    """How long to wait for a batch or the journal before logging a warning and asking again."""
    max_errors: int
    eval_at_start: bool
    save_every: int | None = None
    eval_every: int | None = None

    def saves(self, step: int, *, since: int) -> bool:
        """Whether a checkpoint became due after step `since`. It is then written at the end of a version."""
        return self.save_every is not None and step // self.save_every > since // self.save_every

    def evaluates(self, step: int) -> bool:
        return self.eval_every is not None and step % self.eval_every == 0 and step < self.total_steps


@dataclass(frozen=True)
class _Batch:
    """The groups of a step."""

    step: int
    groups: list[PromptGroup]
    recorded_until: int
    """The last step that an earlier trainer committed."""
    taken_s: float = field(default_factory=trace.now)

    @property
    def recorded(self) -> bool:
        """Whether the step is replayed from the journal. None of its groups may then be replaced."""
        return self.step <= self.recorded_until


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A finished step and everything that follows from it."""

    batch: _Batch
    trained_at: int
    """The version before the step. Lags are counted from it."""
    version: int
    """The version after the step."""
    weights: AnyWeights | None
    """Packed weights, if the step completed a version."""
    state: BackendState | None
    """The state to save, if a checkpoint is due."""


class FullyAsyncTrainer:
    """Trains on exactly P groups per step, none older than the bound. Subclass it for `_compute_custom_metrics`."""

    def __init__(
        self,
        *,
        backend: Backend,
        queue: QueueClient,
        publisher: Publisher,
        saver: RunSaver,
        evaluate: Evaluate,
        bounds: Bounds,
        schedule: Schedule,
        keep_best: bool,
        step: int = 0,
        version: int = 0,
        pad_token_id: int = 0,
        packer: Packer = pack,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`step` and `version`: those of the checkpoint that `backend` was loaded from."""
        self.backend = backend
        self.global_steps = step
        self.current_param_version = version
        self.processed_samples = 0
        self.param_sync_count = 0
        self.dropped_stale_samples = 0
        self.errors = 0
        self.spans = Spans(on_close=trace.span)
        self.rows: list[MetricsRow] = []
        self._queue = queue
        self._publisher = publisher
        self._bounds = bounds
        self._schedule = schedule
        self._pad_token_id = pad_token_id
        self._packer = packer
        self._wall_clock = wall_clock
        self._stop = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._training = False
        self._updates_before = backend.updates_applied
        """Updates applied when the last whole step ended."""
        self._steps_in_version = 0
        self._recorded_until = step
        self._committed_step = step
        self._last_due = step
        """The last step at which a checkpoint was due, whether or not it was written."""
        self._unsent: tuple[int, int, AnyWeights] | None = None
        """Step, version and weights of the newest version, if the engines have not received it."""
        self._spans_before: dict[str, float] = {}
        self._saver = saver
        self._saving: asyncio.Task[None] | None = None
        """Writes the newest checkpoint."""
        self._saved_step = step
        self._evaluation = BackgroundEvaluation(
            publisher=publisher,
            saver=saver,
            evaluate=evaluate,
            disk=self._disk,
            add_row=self.rows.append,
            keep_best=keep_best,
        )

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> Ending:
        """Train until all steps are done, the prompts run out, or `request_stop` is called.

        Saves the state at the end. After an error it saves the last whole step if that is possible.
        """
        await self._queue.begin(self.global_steps)
        await self._publisher.prime(self.current_param_version, await self._pack_weights())
        # Untrained weights are evaluated for comparison, unless an earlier trainer has published newer ones.
        starts = self._schedule.eval_at_start and not self.global_steps
        if starts and not await self._publisher.wait_published(self.current_param_version + 1, wait_s=0.0):
            self._evaluation.start(0, self.current_param_version, None)
        reporting = asyncio.create_task(asyncio.sleep(0))
        taking = asyncio.create_task(self._take(self.global_steps + 1))
        try:
            while self.global_steps < self._last_step:
                # The next batch may depend on the report (no batch before a version is published): raise its error now.
                batch = await unless_failed(self._next_batch(taking), reporting)
                if batch is None:
                    break
                if batch.recorded:
                    self._recorded_until = batch.recorded_until
                if batch.step < self._last_step:
                    taking = asyncio.create_task(self._take(batch.step + 1))
                step = await self._train(batch)
                await reporting  # steps are reported in order, and an error while reporting ends the run here
                reporting = asyncio.create_task(self._report(step))
            await reporting
            return await self._finish()
        except Exception as error:
            taking.cancel()
            await asyncio.wait([reporting])
            await self._save_after(error)
            raise
        finally:
            for task in (taking, reporting):
                task.cancel()
            await self._evaluation.abandon()
            await asyncio.gather(taking, reporting, return_exceptions=True)
            await self._settle_checkpoint()  # a half-written checkpoint is worth the wait

    def request_stop(self) -> None:
        """Finish the current step, save, and end. If called before `run`, the run ends as soon as it starts."""
        self._stop.set()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._disk.shutdown(wait=False, cancel_futures=True)

    @property
    def _last_step(self) -> int:
        """Recorded steps are part of the run, even if `total_steps` is smaller now."""
        return max(self._schedule.total_steps, self._recorded_until)

    # -- take ---------------------------------------------------------------------------------------------------------

    async def _next_batch(self, taking: asyncio.Task[_Batch | None]) -> _Batch | None:
        """Return the batch to train on, with stale groups replaced. None: there are no more, or the run stops."""
        with self.spans("wait_batch"):
            batch = await taking
        while batch is not None and not self._stop.is_set():
            stale = self._find_stale(batch)
            if not stale:
                return batch
            self.dropped_stale_samples += sum(len(group) for group in stale)
            log.warning(
                "%d groups of step %d lag more than async_training.max_staleness_allowed = %d versions: issued again",
                len(stale),
                batch.step,
                self._bounds.max_lag_allowed,
                extra={"step": batch.step, "version": self.current_param_version},
            )
            with self.spans("wait_batch"):
                batch = await self._take(batch.step, replace=[group.ticket.sequence for group in stale])
        return None  # the queue gets the batch back at the end of the run

    def _find_stale(self, batch: _Batch) -> list[PromptGroup]:
        """The staleness check at consumption. Recorded steps led to weights that engines hold and stay as they were."""
        if batch.recorded:
            return []
        stale = self._bounds.find_stale([group.min_version for group in batch.groups], self.current_param_version)
        return [batch.groups[index] for index in stale]

    async def _take(self, step: int, *, replace: Sequence[int] = ()) -> _Batch | None:
        """Wait for the groups of `step`. None: there are no more, or the run stops.

        `replace`: sequences of groups in the batch of `step` that return to the stream. Others take their place.
        """
        wait_s = self._schedule.batch_timeout_s
        while not self._stop.is_set():
            if replace:
                request = self._queue.replace_stale(step, replace, wait_s=wait_s)
            else:
                request = self._queue.take(step, wait_s=wait_s)
            taken = await unless_stopped(request, self._stop)
            if taken is None:
                return None
            if isinstance(taken, Taken):
                return _Batch(step, taken.groups.decode(), taken.recorded_until)
            log.warning(
                "No batch for step %d within async_training.batch_timeout = %g s: %s",
                step,
                wait_s,
                taken.waiting_for,
                extra={"step": step},
            )
        return None

    # -- train --------------------------------------------------------------------------------------------------------

    async def _train(self, batch: _Batch) -> _Step:
        trained_at = self.current_param_version
        metrics = await self._learn(batch)
        version = await self._version_after(batch)
        completes = version > trained_at
        self._steps_in_version = 0 if completes else self._steps_in_version + 1
        self._updates_before = self.backend.updates_applied
        self._account(batch, metrics, version)
        saves = completes and self._schedule.saves(batch.step, since=self._last_due)
        self._last_due = batch.step if saves else self._last_due
        with self.spans("pack", step=batch.step):
            weights = await self._pack_weights() if completes else None
            state = await self._in_thread(self.backend.state) if saves else None
        return _Step(batch=batch, trained_at=trained_at, version=version, weights=weights, state=state)

    async def _learn(self, batch: _Batch) -> dict[str, float]:
        """Run the backend's step in its thread and return its metrics.

        A step that fails before its first update is retried. After an update a retry would train on the groups twice.
        """
        step, attempt = batch.step, 0
        # In the middle of a version no engine has exactly these weights.
        version = None if self._steps_in_version else self.current_param_version
        total_steps = self._schedule.total_steps

        def work() -> dict[str, float]:
            return self.backend.step(batch.groups, version=version, step=step - 1, total_steps=total_steps)

        while True:
            attempt += 1
            self._training = True
            try:
                with self.spans("train", step=step):
                    return await self._in_thread(work)
            except NonFiniteLoss:
                raise
            except Exception as error:
                self.errors += 1
                max_errors = self._schedule.max_errors
                log.exception("Step %d failed (attempt %d of %d)", step, attempt, max_errors, extra={"step": step})
                reason = f"{type(error).__name__}: {error}"
                if updates := self._updates_in_progress:
                    raise TrainingFailed(
                        f"step {step} failed after {updates} of its updates were applied, and a retry would "
                        f"train on its groups twice: {reason}. Continue from the last checkpoint (resume=RUN)"
                    ) from error
                if attempt >= max_errors:
                    raise TrainingFailed(
                        f"step {step} failed {attempt} times (trainer.max_errors): {reason}"
                    ) from error
            finally:
                self._training = False

    @property
    def _updates_in_progress(self) -> int:
        """Updates of a step that has not ended. Above 0, the weights belong to no whole step."""
        return self.backend.updates_applied - self._updates_before

    async def _version_after(self, batch: _Batch) -> int:
        if not batch.recorded:
            return self.current_param_version + (self._steps_in_version + 1 >= self._bounds.steps_per_version)
        version = await self._commit(batch.step)  # as recorded: a run that ended there may have completed it early
        assert 0 <= version - self.current_param_version <= 1, f"step {batch.step} is recorded with version {version}"
        return version

    def _account(self, batch: _Batch, metrics: dict[str, float], version: int) -> None:
        """Advance the counters and add the step's row: ages from before the step, counters from after it."""
        groups = batch.groups
        assert not self._find_stale(batch), "the batch holds groups that are too old"
        samples = [len(group) for group in groups]
        lags_by_group = [self.current_param_version - group.min_version for group in groups]
        lags = np.repeat(lags_by_group, samples)
        created_s = np.repeat([group.created_s for group in groups], samples)
        custom = self._custom_metrics(groups)
        self.global_steps = batch.step
        self.processed_samples += len(lags)
        self.current_param_version = version
        fresh = freshness(lags, self._wall_clock() - created_s, staleness_threshold=self._bounds.threshold)
        values: dict[str, Any] = {**metrics, **fresh, "sample_age_counts": age_counts(lags_by_group), **custom}
        self.rows.append(MetricsRow("step", batch.step, {**values, **self.counters(), **self._timing()}))

    def _timing(self) -> dict[str, float]:
        """Return the time spent since the previous step, and the trainer's total running time."""
        before, now = self._spans_before, self.spans.snapshot()
        self._spans_before = now
        spent = {f"timing/{name}_s": now.get(name, 0.0) - before.get(name, 0.0) for name in ("train", "wait_batch")}
        return {**spent, "timing/elapsed_s": now[ELAPSED]}

    def _custom_metrics(self, groups: list[PromptGroup]) -> dict[str, Any]:
        if type(self)._compute_custom_metrics is FullyAsyncTrainer._compute_custom_metrics:
            return {}  # build a padded batch only for a hook that reads it
        from freewheel.data.padded import to_data_proto

        try:
            return dict(self._compute_custom_metrics(to_data_proto(groups, pad_token_id=self._pad_token_id)))
        except Exception:  # a user's hook; the step is trained already
            log.exception("_compute_custom_metrics failed; the step counts without its metrics")
            return {}

    def _compute_custom_metrics(self, batch: Any) -> dict[str, float]:
        """Hook: return metrics by name. `batch`: the step's samples as a padded `DataProto`."""
        return {}

    async def _pack_weights(self) -> AnyWeights:
        return await self._in_thread(lambda: self._packer(self.backend.weights()))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # -- report: commit, publish, save, evaluate ----------------------------------------------------------------------

    async def _report(self, step: _Step) -> None:
        """While the next step trains: commit the step, publish its version, and start what is due."""
        batch, number = step.batch, step.batch.step
        if not batch.recorded:
            version = await self._commit(number)
            assert version == step.version, f"the queue is at version {version} after step {number}, not {step.version}"
        for group in batch.groups:
            lag = step.trained_at - group.min_version
            trace.phase("train", group.ordinal, batch.taken_s, step=number, version=step.version, lag=lag)
        if step.weights is not None:
            self._unsent = (number, step.version, step.weights)
        replaying = number < batch.recorded_until  # engines hear nothing before the last recorded step
        if not replaying and self._unsent is not None:  # in the middle of a version, this is the previous version
            unsent, self._unsent = self._unsent, None
            await self._publish(*unsent)
        if step.state is not None and step.weights is not None:
            await self._checkpoint(number, step.version, step.state, step.weights)
        if not replaying and self._schedule.evaluates(number):
            self._evaluation.start(number, step.version, step.weights)

    async def _commit(self, step: int) -> int:
        """Return the version after `step`, once the journal records that it was trained."""
        version = await self._until_durable(partial(self._queue.commit, step), f"step {step}")
        self._committed_step = max(self._committed_step, step)
        return version

    async def _until_durable(self, request: Callable[..., Awaitable[T | None]], waiting: str) -> T:
        """Repeat a request to the queue until its journal has been written. `waiting`: what waits for it, in words."""
        while (answer := await request(wait_s=self._schedule.batch_timeout_s)) is None:
            log.warning("The journal cannot be written yet: %s waits for it", waiting)
        return answer

    async def _publish(self, step: int, version: int, weights: AnyWeights) -> None:
        self.param_sync_count += 1
        self._evaluation.keep(step, version, weights)
        await self._publisher.submit(version, weights)

    async def _checkpoint(self, step: int, version: int, state: BackendState, weights: AnyWeights) -> None:
        """Return when the checkpoint is being written. A slow disk slows the steps down instead of filling memory."""
        await self._settle_checkpoint()
        waiting = f"the checkpoint of step {step}"
        frontier = await self._until_durable(partial(self._queue.read_frontier, step), waiting)
        save = partial(self._saver.save, step, version, frontier, state, weights)
        self._saving = asyncio.create_task(self._save(step, save, {"step": step, "version": version}))

    async def _save(self, step: int, save: Callable[[], int], context: dict[str, int]) -> None:
        """Write a checkpoint. A failure is logged and does not end the run: the next one may succeed."""
        try:
            with self.spans("save", step=step):
                oldest = await asyncio.get_running_loop().run_in_executor(self._disk, save)
        except Exception as error:  # noqa: BLE001  # for example a full disk; training does not depend on it
            log.error("The checkpoint of step %d was not written; training continues: %s", step, error, extra=context)
            return
        self._saved_step = step
        log.info("Saved the checkpoint of step %d", step, extra=context)
        try:
            await asyncio.wait_for(self._queue.confirm_checkpoint(oldest), CONFIRM_S)
        except Exception as error:  # noqa: BLE001  # a run need not end because its journal stays large
            reason = f"{type(error).__name__}: {error}"
            log.warning("Journal compaction up to step %d failed; retrying at the next checkpoint: %s", oldest, reason)

    async def _settle_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._saving is not None:
            await asyncio.wait([self._saving])

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _finish(self) -> Ending:
        """Publish, save and evaluate the last weights.

        All steps are done at this point, so a stop request only cancels the evaluation.
        """
        stopped = self._stop.is_set()
        if stopped:
            await self._queue.give_back(self.global_steps + 1)
        weights = await self._pack_weights()
        before = self.current_param_version
        if await self._complete_version():
            if self.current_param_version > before:
                await self._publish(self.global_steps, self.current_param_version, weights)
            await self._save_last(weights)
        if not stopped:
            await self._evaluation.finish(unless=self._stop)
        if not self._stop.is_set():
            self._evaluation.start(self.global_steps, self.current_param_version, weights)
            await self._evaluation.finish(unless=self._stop)
        return "stopped" if stopped else "finished"

    async def _complete_version(self) -> bool:
        """Complete the current version early, because the run ends.

        Returns False if recorded steps follow that belong to the same version. The journal has all of them, and the
        next trainer replays them.
        """
        if self._steps_in_version and self.global_steps >= self._recorded_until:
            waiting = f"the end of step {self.global_steps}"
            version = await self._until_durable(self._queue.complete_version, waiting)
            assert version == self.current_param_version + 1, f"the queue is at version {version}"
            self.current_param_version, self._steps_in_version = version, 0
        return not self._steps_in_version

    async def _save_last(self, weights: AnyWeights) -> None:
        """Save the last step, unless it is saved already."""
        await self._settle_checkpoint()
        if self.global_steps > self._saved_step:
            state = await self._in_thread(self.backend.state)
            await self._checkpoint(self.global_steps, self.current_param_version, state, weights)
            await self._settle_checkpoint()

    async def _save_after(self, error: Exception) -> None:
        """Save the last whole step before `error` ends the run."""
        await self._settle_checkpoint()
        step, context = self.global_steps, {"step": self.global_steps}
        if step <= self._saved_step:
            return
        if self._updates_in_progress:
            log.error(
                "Not saving: step %d failed (%s) after some of its updates were applied", step + 1, error, extra=context
            )
            return
        try:
            for uncommitted in range(self._committed_step + 1, step + 1):
                await self._commit(uncommitted)
            if await self._complete_version():
                await self._save_last(await self._pack_weights())
        except Exception as failure:  # noqa: BLE001  # the first error is raised; this one comes on top
            reason = f"{type(failure).__name__}: {failure}"
            log.error("Step %d cannot be saved: %s", step, reason, extra=context)

    # -- status -------------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        return {
            "global_steps": self.global_steps,
            "processed_samples": self.processed_samples,
            "current_param_version": self.current_param_version,
            "param_sync_count": self.param_sync_count,
            "dropped_stale_samples": self.dropped_stale_samples,
        }

    def stats(self) -> dict[str, Any]:
        return {
            **self.counters(),
            "errors": self.errors,
            "training": self._training,
            "saving": self._saving is not None and not self._saving.done(),
            "evaluating": self._evaluation.running,
            "saved_step": self._saved_step,
            "recorded_until": self._recorded_until,
            "spans": self.spans.snapshot(),
        }

    def drain_rows(self) -> list[MetricsRow]:
        """Return the metrics since the last call."""
        rows = list(self.rows)
        self.rows.clear()
        return rows
