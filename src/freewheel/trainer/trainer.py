"""`FullyAsyncTrainer`: takes groups, trains, publishes versions, and never waits for anybody but the queue.

    take(k+1) ─────────────────────────┐ (asked for while k trains)
    [thread] step k ─▶ pack weights ───┼──▶ [thread] step k+1 …
                          └─▶ afterwards, in order: commit(k) ─▶ publish(v+1) ─▶ checkpoint, evaluation when due

`wait_batch` is the time in which there was nothing to train on. The learning itself is a `Backend`'s; what a batch may
hold is the queue's to say, and is checked again here, because this is where the promise is kept.

One that starts from a checkpoint behind what was committed goes the same way again first: the queue gives it the groups
of those steps as they were recorded, and the version after each. Engines hold what came of them, or get it when the
last of them is done, and hear nothing before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from freewheel.data.group import PromptGroup
from freewheel.observe import trace
from freewheel.observe.metrics import age_counts, freshness
from freewheel.observe.spans import ELAPSED, Spans
from freewheel.queue.client import QueueClient
from freewheel.queue.staleness import Bounds
from freewheel.sync.weights import AnyWeights, Packer, pack
from freewheel.trainer.backend import Backend, BackendState
from freewheel.trainer.checkpointing import Checkpointing, Snapshot
from freewheel.trainer.due import Schedule
from freewheel.trainer.measuring import Measuring
from freewheel.trainer.peers import Evaluate, Publisher, Row, Saver
from freewheel.trainer.stepping import Stepping, TrainingFailed
from freewheel.trainer.taking import Batch, Taking, answered, unless_failed

__all__ = [
    "Ending",
    "Evaluate",
    "FullyAsyncTrainer",
    "Publisher",
    "Row",
    "Saver",
    "Schedule",
    "TrainingFailed",
]

log = logging.getLogger("freewheel.trainer")

Ending = Literal["finished", "stopped"]


@dataclass(frozen=True, kw_only=True)
class _Done:
    """A step that was taken, and what has to be told of it."""

    batch: Batch
    version: int
    """After it."""
    trained_at: int
    """The version before it, which lags are counted from."""
    weights: AnyWeights | None
    """Where it made a new version."""
    state: BackendState | None
    """Where a checkpoint is due."""

    @property
    def tells(self) -> bool:
        """Engines are to hear of it: nothing that was recorded comes after it."""
        return self.batch.step >= self.batch.recorded_until


class FullyAsyncTrainer:
    """Trains on exactly P groups a step, none older than the bound. Subclass it for `_compute_custom_metrics`."""

    def __init__(
        self,
        *,
        backend: Backend,
        queue: QueueClient,
        publisher: Publisher,
        saver: Saver,
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
        """`step` and `version`: of the checkpoint that `backend` was loaded from."""
        self.global_steps = step
        self.current_param_version = version
        self.processed_samples = 0
        self.param_sync_count = 0
        self.spans = Spans(on_close=trace.span)
        self.rows: list[Row] = []
        self._spans_before: dict[str, float] = {}
        self._queue = queue
        self._publisher = publisher
        self._bounds = bounds
        self._schedule = schedule
        self._pad_token_id = pad_token_id
        self._wall_clock = wall_clock
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._stop = asyncio.Event()
        self._steps_in_version = 0
        self._recorded_until = step
        """Steps up to this one were committed by a trainer before."""
        self._committed_step = step
        self._last_due = step
        """The last one of which a checkpoint was due, whatever came of it."""
        self._unsent: tuple[int, int, AnyWeights] | None = None
        """Step, version and weights that engines have not been sent."""
        self._stepping = Stepping(
            backend=backend,
            packer=packer,
            max_errors=schedule.max_errors,
            total_steps=schedule.total_steps,
            spans=self.spans,
        )
        self._taking = Taking(
            queue=queue,
            bounds=bounds,
            batch_timeout_s=schedule.batch_timeout_s,
            stop=self._stop,
            spans=self.spans,
        )
        self._checkpoints = Checkpointing(
            queue=queue,
            saver=saver,
            disk=self._disk,
            spans=self.spans,
            step=step,
            wait_s=schedule.batch_timeout_s,
        )
        self._measuring = Measuring(
            publisher=publisher,
            saver=saver,
            evaluate=evaluate,
            disk=self._disk,
            tell=lambda row: self.rows.append(row),
            publish_timeout_s=schedule.publish_timeout_s,
            keep_best=keep_best,
        )

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> Ending:
        """Until all steps are done, the prompts end, or `request_stop`. The state is saved in each case, and as far as
        it can be also where an error ends the run."""
        await self._queue.begin(self.global_steps)
        await self._publisher.prime(self.current_param_version, await self._stepping.weights())
        await self._measure_start()
        after = asyncio.create_task(_nothing())
        taking = asyncio.create_task(self._taking.take(self.global_steps + 1))
        try:
            while self.global_steps < self._last_step:
                batch = await unless_failed(after, self._batch(taking))
                if batch is None:
                    break
                if batch.recorded:
                    self._recorded_until = batch.recorded_until
                if batch.step < self._last_step:
                    taking = asyncio.create_task(self._taking.take(batch.step + 1))
                done = await self._train(batch)
                await after  # steps are told of in order, and what went wrong in telling ends the run here
                after = asyncio.create_task(self._afterwards(done))
            await after
            return await self._finish()
        except Exception as error:
            taking.cancel()
            await asyncio.wait([after])
            await self._rescue(error)
            raise
        finally:
            for task in (taking, after):
                task.cancel()
            await self._measuring.abandon()
            await asyncio.gather(taking, after, return_exceptions=True)
            await self._checkpoints.settled()  # one that is half written is worth the wait

    @property
    def _last_step(self) -> int:
        """What was recorded is a part of the run, also where it is to be shorter now."""
        return max(self._schedule.total_steps, self._recorded_until)

    async def _measure_start(self) -> None:
        """What there is to compare with, unless a trainer before this one had begun."""
        if not self._schedule.eval_at_start or self.global_steps:
            return
        if not await self._publisher.wait_published(self.current_param_version + 1, wait_s=0.0):
            self._measuring.start(0, self.current_param_version, None)

    def request_stop(self) -> None:
        """Finish the step, save, and end. Before `run`: it ends as soon as it begins."""
        self._stop.set()

    def close(self) -> None:
        self._stepping.close()
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def _finish(self) -> Ending:
        """The end of a run: what is under way is waited for, the last weights are published, judged and saved.

        A stop that comes while they are judged costs the evaluation alone: all steps are taken."""
        stopped = self._stop.is_set()
        if stopped:
            await self._queue.give_back(self.global_steps + 1)
        weights = await self._stepping.weights()
        before = self.current_param_version
        if await self._at_version():
            if self.current_param_version > before:
                await self._publish(self.global_steps, self.current_param_version, weights)
            await self._save(weights)
        if not stopped:
            await self._measuring.done(unless=self._stop)
        if not self._stop.is_set():
            self._measuring.start(self.global_steps, self.current_param_version, weights)
            await self._measuring.done(unless=self._stop)
        return "stopped" if stopped else "finished"

    async def _at_version(self) -> bool:
        """Makes the end of the run the end of a version. False: recorded steps come after it, in which that version
        goes on; the journal has them all, and the next trainer takes them again."""
        if self._steps_in_version and self.global_steps >= self._recorded_until:
            version = await self._durable(self._queue.complete_version)
            assert version == self.current_param_version + 1, f"the queue is at version {version}"
            self.current_param_version, self._steps_in_version = version, 0
        return not self._steps_in_version

    async def _rescue(self, error: Exception) -> None:
        """Saves the last whole step on the way out of a run that failed."""
        await self._checkpoints.settled()
        step, about = self.global_steps, {"step": self.global_steps}
        if step <= self._checkpoints.saved_step:
            return
        if self._stepping.half_done:
            log.error("Nothing more is saved: step %d was half done when it failed (%s)", step + 1, error, extra=about)
            return
        try:
            for told in range(self._committed_step + 1, step + 1):
                await self._commit(told)
            if await self._at_version():
                await self._save(await self._stepping.weights())
        except Exception as failure:  # noqa: BLE001  # what ended the run is raised; this comes on top of it
            why = f"{type(failure).__name__}: {failure}"
            log.error(
                "Step %d is not saved: what a checkpoint of it needs could not be had (%s)", step, why, extra=about
            )

    # -- a step -------------------------------------------------------------------------------------------------------

    async def _batch(self, taking: asyncio.Task[Batch | None]) -> Batch | None:
        """What to train on next; None: nothing more."""
        with self.spans("wait_batch"):
            batch = await taking
        if batch is None or self._stop.is_set():  # what was asked for ahead is given back
            return None
        return await self._taking.fresh(batch, version=self.current_param_version)

    async def _train(self, batch: Batch) -> _Done:
        # In the middle of a version the weights are no longer those that any engine has.
        before = None if self._steps_in_version else self.current_param_version
        metrics = await self._stepping.learn(batch, version=before)
        version = await self._version_after(batch)
        trained_at = self.current_param_version
        completes = version > trained_at
        self._steps_in_version = 0 if completes else self._steps_in_version + 1
        self._stepping.whole()
        self._account(batch, metrics, version)
        saves = completes and self._schedule.saves(batch.step, since=self._last_due)
        self._last_due = batch.step if saves else self._last_due
        with self.spans("pack", step=batch.step):
            weights = await self._stepping.weights() if completes else None
            state = await self._stepping.state() if saves else None
        return _Done(batch=batch, version=version, trained_at=trained_at, weights=weights, state=state)

    async def _version_after(self, batch: Batch) -> int:
        if not batch.recorded:
            return self.current_param_version + (self._steps_in_version + 1 >= self._bounds.steps_per_version)
        version = await self._commit(batch.step)  # as it was: a run that ended after it may have completed one early
        assert 0 <= version - self.current_param_version <= 1, f"step {batch.step} is recorded with version {version}"
        return version

    def _account(self, batch: Batch, metrics: dict[str, float], version: int) -> None:
        """The counters move on, and the step gets its row: ages as it began, counters as they are after it."""
        groups = batch.groups
        samples = [len(group) for group in groups]
        lags_by_group = [self.current_param_version - group.min_version for group in groups]
        lags = np.repeat(lags_by_group, samples)
        born = np.repeat([group.created_s for group in groups], samples)
        # What was recorded kept the bound that held then.
        assert batch.recorded or not self._bounds.too_old(int(lags.max())), f"lag {lags.max()} was trained on"
        custom = self._custom_metrics(groups)
        self.global_steps = batch.step
        self.processed_samples += len(lags)
        self.current_param_version = version
        fresh = freshness(lags, self._wall_clock() - born, staleness_threshold=self._bounds.threshold)
        told: dict[str, Any] = {**metrics, **fresh, "sample_age_counts": age_counts(lags_by_group), **custom}
        self.rows.append(Row("step", batch.step, {**told, **self.counters(), **self._timing()}))

    def _timing(self) -> dict[str, float]:
        """Where the time since the step before went, and how long the trainer has run."""
        before, self._spans_before = self._spans_before, self.spans.snapshot()
        now = self._spans_before
        spent = {f"timing/{name}_s": now.get(name, 0.0) - before.get(name, 0.0) for name in ("train", "wait_batch")}
        return {**spent, "timing/elapsed_s": now[ELAPSED]}

    def _custom_metrics(self, groups: list[PromptGroup]) -> dict[str, Any]:
        if type(self)._compute_custom_metrics is FullyAsyncTrainer._compute_custom_metrics:
            return {}  # a padded batch is only made for somebody who reads it
        from freewheel.data.padded import to_data_proto

        try:
            return dict(self._compute_custom_metrics(to_data_proto(groups, pad_token_id=self._pad_token_id)))
        except Exception:  # a user's hook; the step is taken already
            log.exception("_compute_custom_metrics failed; the step counts all the same")
            return {}

    def _compute_custom_metrics(self, batch: Any) -> dict[str, float]:
        """Hook. `batch`: the step's samples as a padded DataProto. Gives metrics by name."""
        return {}

    # -- after a step -------------------------------------------------------------------------------------------------

    async def _afterwards(self, done: _Done) -> None:
        """While the next step trains: the queue hears of it, engines get the weights, and what is due is begun."""
        step, version = done.batch.step, done.version
        if not done.batch.recorded:
            found = await self._commit(step)
            assert found == version, f"the queue is at version {found} after step {step}, and the trainer at {version}"
        done.batch.committed(version, trained_at=done.trained_at)
        if done.weights is not None:
            self._unsent = (step, version, done.weights)
        if done.tells and self._unsent is not None:  # in the middle of a version: the one before
            unsent, self._unsent = self._unsent, None
            await self._publish(*unsent)
        if done.state is not None and done.weights is not None:
            snapshot = Snapshot(step=step, version=version, weights=done.weights, state=done.state)
            await self._checkpoints.begin(snapshot)
        if done.tells and self._schedule.evaluates(step):
            self._measuring.start(step, version, done.weights)

    async def _commit(self, step: int) -> int:
        """The version after `step`, once it is written down that it was trained."""
        version = await self._durable(partial(self._queue.commit, step))
        self._committed_step = max(self._committed_step, step)
        return version

    async def _durable(self, ask: Callable[..., Awaitable[int | None]]) -> int:
        waits = f"what was trained up to step {self.global_steps}"
        return await answered(ask, wait_s=self._schedule.batch_timeout_s, waits=waits)

    async def _publish(self, step: int, version: int, weights: AnyWeights) -> None:
        self.param_sync_count += 1
        self._measuring.published(step, version, weights)
        await self._publisher.submit(version, weights)

    async def _save(self, weights: AnyWeights) -> None:
        """The last step, unless it is saved."""
        await self._checkpoints.done()
        step = self.global_steps
        if step > self._checkpoints.saved_step:
            state = await self._stepping.state()
            last = Snapshot(step=step, version=self.current_param_version, weights=weights, state=state)
            await self._checkpoints.begin(last)
            await self._checkpoints.done()

    # -- what it knows ------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> Backend:
        return self._stepping.backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        self._stepping.backend = backend

    @property
    def errors(self) -> int:
        return self._stepping.errors

    @property
    def dropped_stale_samples(self) -> int:
        return self._taking.dropped_stale_samples

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
            "training": self._stepping.training,
            "saving": self._checkpoints.running,
            "evaluating": self._measuring.running,
            "saved_step": self._checkpoints.saved_step,
            "recorded_until": self._recorded_until,
            "spans": self.spans.snapshot(),
        }

    def drain_rows(self) -> list[Row]:
        """Metrics since the last call."""
        rows, self.rows = self.rows, []
        return rows


async def _nothing() -> None:
    pass
