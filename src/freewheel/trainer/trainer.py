"""`FullyAsyncTrainer`: takes groups, trains, publishes versions, and never waits for anybody but the queue.

    take(k+1) ─────────────────────────┐ (asked for while k trains)
    [thread] step k ─▶ pack weights ───┼──▶ [thread] step k+1 …
                          └─▶ afterwards, in order: commit(k) ─▶ publish(v+1) ─▶ checkpoint, evaluation when due

`wait_batch` is the time in which there was nothing to train on. The learning itself is a `Backend`'s; what a batch may
hold is the queue's to say, and is checked again here, because this is where the promise is kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from freewheel.data.group import PromptGroup
from freewheel.observe.freshness import freshness
from freewheel.observe.spans import ELAPSED, Spans
from freewheel.queue.ledger import Frontier
from freewheel.queue.message_queue import Taken
from freewheel.queue.staleness import Bounds
from freewheel.sync.weights import Weights, pack
from freewheel.trainer.backend import Backend, BackendState, NonFiniteLoss
from freewheel.trainer.checkpoint import CheckpointFailed
from freewheel.trainer.measuring import Measuring
from freewheel.trainer.peers import Evaluate, Publisher, QueueClient, Row, Saver

__all__ = [
    "Ending",
    "Evaluate",
    "FullyAsyncTrainer",
    "Publisher",
    "QueueClient",
    "Row",
    "Saver",
    "Schedule",
    "TrainingFailed",
]

log = logging.getLogger("freewheel.trainer")

T = TypeVar("T")
Ending = Literal["finished", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When things are due."""

    total_steps: int
    batch_timeout_s: float
    max_errors: int
    save_every: int | None = None
    eval_every: int | None = None
    eval_at_start: bool = True
    publish_timeout_s: float = 120.0
    """How long an evaluation waits for its version to reach the engines."""

    def saves(self, step: int) -> bool:
        return self.save_every is not None and step % self.save_every == 0

    def evaluates(self, step: int) -> bool:
        return self.eval_every is not None and step % self.eval_every == 0 and step < self.total_steps


@dataclass(frozen=True)
class _Done:
    """A step that was taken, and what has to be told of it."""

    step: int
    version: int
    """After it."""
    completes: bool
    """It made a new version."""
    weights: Weights | None
    state: BackendState | None
    """Where a checkpoint is due."""


class TrainingFailed(RuntimeError):
    """A step could not be taken, however often it was tried, or was half taken. The last checkpoint is intact."""


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
        step: int = 0,
        version: int = 0,
        pad_token_id: int = 0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.backend = backend
        self.global_steps = step
        self.current_param_version = version
        self.processed_samples = 0
        self.param_sync_count = 0
        self.dropped_stale_samples = 0
        self.errors = 0
        self.spans = Spans()
        self.rows: list[Row] = []
        self._spans_before: dict[str, float] = {}
        self._queue = queue
        self._publisher = publisher
        self._saver = saver
        self._bounds = bounds
        self._schedule = schedule
        self._pad_token_id = pad_token_id
        self._wall_clock = wall_clock
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._stop = asyncio.Event()
        self._steps_in_version = 0
        self._training = False
        self._saving: asyncio.Task[None] | None = None
        self._saved_step = step
        self._committed_step = step
        self._updates_at_step = backend.updates_applied
        """The backend's count when the last whole step was done."""
        self._measuring = Measuring(
            publisher=publisher,
            saver=saver,
            evaluate=evaluate,
            disk=self._disk,
            tell=lambda row: self.rows.append(row),
            publish_timeout_s=schedule.publish_timeout_s,
        )

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> Ending:
        """Until all steps are done, the prompts end, or `request_stop`. The state is saved in each case, and as far as
        it can be also where an error ends the run."""
        if self._schedule.eval_at_start and self.global_steps == 0:
            self._measuring.start(0, self.current_param_version, None)
        after = asyncio.create_task(_nothing())
        taking = asyncio.create_task(self._take(self.global_steps + 1))
        try:
            while self.global_steps < self._schedule.total_steps:
                with self.spans("wait_batch"):
                    groups = await taking
                if not groups or self._stop.is_set():  # what was asked for ahead is given back
                    break
                step = self.global_steps + 1
                groups = await self._fresh(step, groups)
                if not groups:
                    break
                if step < self._schedule.total_steps:
                    taking = asyncio.create_task(self._take(step + 1))
                done = await self._train(step, groups)
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
            if self._saving is not None:
                await asyncio.wait([self._saving])  # a checkpoint that is half written is worth the wait

    def request_stop(self) -> None:
        """Finish the step, save, and end."""
        self._stop.set()

    def close(self) -> None:
        self._torch.shutdown(wait=False, cancel_futures=True)
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def _finish(self) -> Ending:
        """The end of a run: what is under way is waited for, the last weights are published, judged and saved.

        A stop that comes while they are judged costs the evaluation alone: all steps are taken."""
        stopped = self._stop.is_set()
        if stopped:
            await self._queue.give_back(self.global_steps + 1)
        weights = await self._in_torch(self._pack)
        version = await self._queue.complete_version()
        if version > self.current_param_version:
            self.current_param_version = version
            await self._publish(self.global_steps, version, weights)
        await self._save(self.global_steps, version, weights)
        if not stopped:
            await self._until_stopped(self._measuring.done())
        if not self._stop.is_set():
            self._measuring.start(self.global_steps, version, weights)
            await self._until_stopped(self._measuring.done())
        return "stopped" if stopped else "finished"

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        working, stopping = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            working.cancel()
            stopping.cancel()

    async def _rescue(self, error: Exception) -> None:
        """Saves the last whole step on the way out of a run that failed."""
        if self._saving is not None:
            await asyncio.wait([self._saving])
        step = self.global_steps
        if step <= self._saved_step:
            return
        if self.backend.updates_applied != self._updates_at_step:
            log.error("Nothing more is saved: step %d was half done when it failed (%s)", step + 1, error)
            return
        try:
            for told in range(self._committed_step + 1, step + 1):
                await self._queue.commit(told)
            weights = await self._in_torch(self._pack)
            await self._save(step, self.current_param_version, weights)
        except Exception as failure:  # noqa: BLE001  # what ended the run is raised; this comes on top of it
            why = f"{type(failure).__name__}: {failure}"
            log.error("Step %d is not saved: what a checkpoint of it needs could not be had (%s)", step, why)

    # -- a step -------------------------------------------------------------------------------------------------------

    async def _take(self, step: int) -> list[PromptGroup]:
        """The groups of `step`; none when the run has nothing more to train on, or is to stop."""
        while not self._stop.is_set():
            taken = await self._unless_stopped(self._queue.take(step, wait_s=self._schedule.batch_timeout_s))
            if taken is None or taken.state == "finished":
                return []
            if taken.block is not None:
                return taken.block.groups()
            log.warning(
                "No batch for step %d within async_training.batch_timeout = %g s: %s",
                step,
                self._schedule.batch_timeout_s,
                taken.waiting_for,
            )
        return []

    async def _fresh(self, step: int, groups: list[PromptGroup]) -> list[PromptGroup]:
        """The check at consumption: what is too old by now goes back to the stream, and others come in its place."""
        while stale := [group for group in groups if self._bounds.too_old(self._lag(group))]:
            self.dropped_stale_samples += sum(len(group) for group in stale)
            log.warning(
                "%d groups of step %d lag more than async_training.max_staleness_allowed = %d versions: issued again",
                len(stale),
                step,
                self._bounds.max_lag_allowed,
            )
            sequences = [group.ticket.sequence for group in stale]
            with self.spans("wait_batch"):
                groups = await self._others(step, sequences)
        return groups

    async def _others(self, step: int, sequences: list[int]) -> list[PromptGroup]:
        while not self._stop.is_set():
            asked = self._queue.replace_stale(step, sequences, wait_s=self._schedule.batch_timeout_s)
            taken = await self._unless_stopped(asked)
            if taken is None or taken.state == "finished":
                break
            if taken.block is not None:
                return taken.block.groups()
            log.warning("Step %d waits for fresh groups: %s", step, taken.waiting_for)
            sequences = []
        return []

    async def _unless_stopped(self, asked: Coroutine[Any, Any, Taken]) -> Taken | None:
        asking, stopping = asyncio.create_task(asked), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([asking, stopping], return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            stopping.cancel()

    def _lag(self, group: PromptGroup) -> int:
        return self.current_param_version - group.min_version

    async def _train(self, step: int, groups: list[PromptGroup]) -> _Done:
        """One step, tried again where it fails before it changed anything: a batch is not lost because memory was short
        for a moment, and none is trained on twice."""
        for attempt in range(1, self._schedule.max_errors + 1):
            try:
                metrics = await self._learned(step, groups)
                break
            except NonFiniteLoss:
                raise
            except Exception as error:
                self.errors += 1
                log.exception("Step %d failed (attempt %d of %d)", step, attempt, self._schedule.max_errors)
                why = f"{type(error).__name__}: {error}"
                applied = self.backend.updates_applied - self._updates_at_step
                if applied:
                    raise TrainingFailed(
                        f"step {step} failed after {applied} of its updates were applied, and trying it again would "
                        f"train on its groups twice: {why}. Go on from the last checkpoint (--resume)"
                    ) from error
                if attempt == self._schedule.max_errors:
                    raise TrainingFailed(f"step {step} failed {attempt} times (trainer.max_errors): {why}") from error
        self._updates_at_step = self.backend.updates_applied
        self._steps_in_version = (self._steps_in_version + 1) % self._bounds.steps_per_version
        completes, saves = self._steps_in_version == 0, self._schedule.saves(step)
        self._account(step, groups, metrics, completes=completes)
        with self.spans("pack"):
            weights = await self._in_torch(self._pack) if completes or saves else None
            state = await self._in_torch(self.backend.state) if saves else None
        return _Done(step, self.current_param_version, completes, weights, state)

    async def _learned(self, step: int, groups: list[PromptGroup]) -> dict[str, float]:
        self._training = True
        try:
            with self.spans("train"):
                return await self._in_torch(lambda: self._learn(step, groups))
        finally:
            self._training = False

    def _learn(self, step: int, groups: list[PromptGroup]) -> dict[str, float]:
        # In the middle of a version the weights are no longer those that any engine has.
        version = None if self._steps_in_version else self.current_param_version
        return self.backend.step(groups, version=version, step=step - 1, total_steps=self._schedule.total_steps)

    def _pack(self) -> Weights:
        return pack(self.backend.weights())

    async def _in_torch(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch, work)

    def _account(self, step: int, groups: list[PromptGroup], metrics: dict[str, float], *, completes: bool) -> None:
        """The counters move on, and the step gets its row: ages as it began, counters as they are after it."""
        lags = np.repeat([self._lag(group) for group in groups], [len(group) for group in groups])
        born = np.repeat([group.created_s for group in groups], [len(group) for group in groups])
        assert not self._bounds.too_old(int(lags.max())), f"lag {lags.max()} was trained on"
        custom = self._custom_metrics(groups)
        self.global_steps = step
        self.processed_samples += len(lags)
        self.current_param_version += completes
        fresh = freshness(lags, self._wall_clock() - born, staleness_threshold=self._bounds.threshold)
        self.rows.append(Row("step", step, {**metrics, **fresh, **custom, **self.counters(), **self._timing()}))

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
        await self._queue.commit(done.step)
        self._committed_step = done.step
        if done.completes and done.weights is not None:
            await self._publish(done.step, done.version, done.weights)
        if done.state is not None and done.weights is not None:
            await self._saved()  # a disk slower than the steps slows them down instead of filling memory
            frontier = await self._queue.frontier()
            self._saving = asyncio.create_task(self._write(done, frontier))
        if self._schedule.evaluates(done.step):
            self._measuring.start(done.step, done.version, done.weights if done.completes else None)

    async def _publish(self, step: int, version: int, weights: Weights) -> None:
        self.param_sync_count += 1
        self._measuring.published(step, version, weights)
        await self._publisher.submit(version, weights)

    async def _saved(self) -> None:
        """When the checkpoint that is being written is."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    async def _save(self, step: int, version: int, weights: Weights) -> None:
        await self._saved()
        if step > self._saved_step:
            state = await self._in_torch(self.backend.state)
            frontier = await self._queue.frontier()
            self._saving = asyncio.create_task(self._write(_Done(step, version, True, weights, state), frontier))
            await self._saved()

    async def _write(self, done: _Done, frontier: Frontier) -> None:
        """A checkpoint that cannot be written is no reason to lose the run: the next one may fit."""
        assert done.state is not None and done.weights is not None
        saving = partial(self._saver.save, done.step, done.version, frontier, done.state, done.weights)
        try:
            with self.spans("save"):
                await asyncio.get_running_loop().run_in_executor(self._disk, saving)
            self._saved_step = done.step
            log.info("Saved the checkpoint of step %d", done.step)
        except CheckpointFailed as error:
            log.error("The checkpoint of step %d was not written, and training goes on: %s", done.step, error)

    # -- what it knows ------------------------------------------------------------------------------------------------

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
            "evaluating": self._measuring.running,
            "saved_step": self._saved_step,
            "spans": self.spans.snapshot(),
        }

    def drain_rows(self) -> list[Row]:
        """Metrics since the last call."""
        rows, self.rows = self.rows, []
        return rows


async def _nothing() -> None:
    pass
