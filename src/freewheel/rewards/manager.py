"""`LengthPenaltyRewardManager`: a batch of rollouts in, its rewards out, with the judge working beside the trainer.

    submit(batch) ─▶ snapshot ─▶ [thread: decode ─▶ rule ─▶ gate ─▶ judge.submit] ─▶ RewardHandle
                                                                                      │ result(): waits
    reward_tensor, extra info ◀─ combine ◀────────────────────────────── verdicts ◀───┘

With `use_async_io` off the same is done by `result()` itself, in the caller's thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from freewheel.errors import FreewheelError
from freewheel.judge import Failed, Handle, JudgeRequest, Reason, Verdict
from freewheel.rewards import math_equal
from freewheel.rewards.batch import Rollouts
from freewheel.rewards.config import LengthPenaltyConfig, as_config
from freewheel.rewards.handle import Beside, Prepared, RewardHandle, elapsed_s, judge_inline, wait_for
from freewheel.rewards.openai_manager import SHUTDOWN_TIMEOUT_S, AsyncOpenAIManager, run_privately
from freewheel.rewards.protocol import RewardBatch
from freewheel.rewards.rules import rule_score
from freewheel.rewards.scoring import (
    JUDGE_OFF,
    ComputeScore,
    Rewards,
    Sample,
    apply_rules,
    combine,
    judge_requests,
    rule_value,
)

log = logging.getLogger("freewheel.rewards")


class LengthPenaltyRewardManager:
    """Rule score + judge quality − length penalty, on each response's last token.

    Calling it waits for the judge; `submit` does not, so a training loop can score batch k while it works on k+1.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: ComputeScore | None = None,
        reward_fn_key: str = "data_source",
        length_penalty_config: LengthPenaltyConfig | Any = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or rule_score
        self.reward_fn_key = reward_fn_key
        self.config = as_config(length_penalty_config)
        self._reset()
        if self._judge_config is None:
            self._say_why_no_judge()
            return
        if not self.config.names_endpoint:
            log.warning(
                "The key goes to %s, the default endpoint; name api_endpoint if that is not your judge",
                self.config.api_endpoint,
            )
        if self.use_async_io:
            log.info("Initialized async OpenAI manager for TRUE ASYNC I/O (zero GPU wait)")
        else:
            log.info("OpenAI API key provided but use_async_io=False. Using synchronous fallback.")

    def _reset(self) -> None:
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._loops: dict[threading.Thread, asyncio.AbstractEventLoop] = {}
        # Read once: a key that comes to or goes from the environment later changes nothing.
        self._judge_config = self.config.judge_config() if self.config.judges else None
        self._spent = 0.0
        self.async_openai_manager = self._new_manager()

    def _new_manager(self) -> AsyncOpenAIManager | None:
        if self._judge_config is None or not self.use_async_io:
            return None
        return AsyncOpenAIManager.of(self._judge_config, self.config.reward_coefficient)

    @property
    def use_async_io(self) -> bool:
        return self.config.use_async_io

    def _say_why_no_judge(self) -> None:
        given = self.config.api_key
        if given is not None and not given:
            log.warning(
                "The API key from %s was left out when the manager was pickled: rewards are rule score and length "
                "penalty only. Name api_endpoint, and set OPENAI_API_KEY in this process",
                given.source,
            )
        elif self.config.key is not None:
            log.info("The judge is off (enable_openai_reward=False): rewards are rule score and length penalty only")
        else:
            log.log(
                logging.WARNING if self.config.names_endpoint else logging.INFO,  # a judge was meant
                "No API key: rewards are rule score and length penalty only, and no request is made. Give api_key, or "
                "api_endpoint together with the environment variable OPENAI_API_KEY",
            )

    # -- life ---------------------------------------------------------------------------------------------------------

    def start_workers(self) -> None:
        """Starts the judge's engine now instead of at the first batch. Does nothing if it runs, or without a judge."""
        if self.async_openai_manager is not None:
            self.async_openai_manager.start()

    def shutdown_workers(self) -> None:
        """Ends what was started, within 5 s, and leaves no process, thread, socket or file behind. Idempotent.

        The next batch starts it again.
        """
        until = time.monotonic() + SHUTDOWN_TIMEOUT_S
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
        self._close_loops(list(self._loops))
        math_equal.close(max(0.0, until - time.monotonic()))
        manager = self.async_openai_manager
        if manager is None or not manager.running:
            log.info("No OpenAI manager to shut down (not initialized)")
            return
        log.info("Shutting down async OpenAI manager...")
        if manager.pending:
            log.warning("%d batches are not judged yet: their missing rows end as failed", manager.pending)
        try:
            manager.shutdown(max(0.0, until - time.monotonic()))
        except (FreewheelError, OSError) as error:
            log.error("Error shutting down async manager: %s", error)
            return
        finally:
            self.async_openai_manager = self._new_manager()
        log.info("Async OpenAI manager shut down successfully.")

    def _ensure_event_loop(self) -> asyncio.AbstractEventLoop:
        """A loop that this thread may use: the running one, else one that is made for it and set as its own."""
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            pass
        self._close_loops([thread for thread in list(self._loops) if not thread.is_alive()])
        loop = self._loops.get(threading.current_thread())
        if loop is None or loop.is_closed():
            loop = self._loops[threading.current_thread()] = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
        return loop

    def _close_loops(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            if not self._loops[thread].is_running():  # one that runs is its thread's; it is closed the next time
                self._loops.pop(thread).close()

    # -- batches ------------------------------------------------------------------------------------------------------

    def __call__(self, data: RewardBatch, return_dict: bool = False) -> Any:
        """The reward tensor; with `return_dict` a dict of `reward_tensor` and `reward_extra_info`."""
        return self.submit(data, return_dict).result()

    def submit(self, data: RewardBatch, return_dict: bool = False) -> RewardHandle:
        """Takes a batch and returns at once; the handle's `result()` gives what `__call__` would have."""
        tensors = data.batch
        if tensors is not None and "rm_scores" in tensors.keys():  # noqa: SIM118  # a TensorDict has no `in`
            scores = tensors["rm_scores"]
            extra = {key: data.non_tensor_batch[key] for key in data.meta_info.get("reward_extra_keys", [])}
            ready = {"reward_tensor": scores, "reward_extra_info": extra} if return_dict else scores
            return RewardHandle(lambda: ready)
        rollouts = Rollouts(data, self.reward_fn_key)
        manager = self.async_openai_manager
        if manager is None:
            return RewardHandle(functools.partial(self._judge_here, rollouts, return_dict))
        log.info("Using TRUE ASYNC I/O for batch with %d responses (zero GPU wait)", len(rollouts))
        beside: Future[Beside] = Future()
        cancelled = threading.Event()
        thread = threading.Thread(
            target=self._prepare_beside, args=(rollouts, manager, beside, cancelled), name="freewheel-rewards"
        )
        try:
            thread.start()
        except RuntimeError as error:  # this process may have no more threads
            _say_degraded(error)
            return RewardHandle(functools.partial(self._judge_here, rollouts, return_dict))
        self._threads.add(thread)
        return RewardHandle(functools.partial(self._collect, rollouts, beside, return_dict), beside, cancelled)

    def _prepare(self, rollouts: Rollouts) -> Prepared:
        samples = rollouts.samples(self.tokenizer)
        rules = apply_rules(self.compute_score, samples)
        return Prepared(samples, rules, judge_requests(samples, rules, self.config), time.monotonic())

    def _prepare_beside(
        self, rollouts: Rollouts, manager: AsyncOpenAIManager, beside: Future[Beside], cancelled: threading.Event
    ) -> None:
        """In a thread of the batch's own: decoding and rules take time, and `submit` has none."""
        try:
            ready = self._prepare(rollouts)
            handle = _hand_over(manager, ready.requests)
            beside.set_result(Beside(ready, handle))
            if cancelled.is_set() and handle is not None:
                handle.cancel()
        except BaseException as error:  # noqa: BLE001  # `result()` raises it
            beside.set_exception(error)

    def _collect(self, rollouts: Rollouts, beside: Future[Beside], return_dict: bool) -> Any:
        """`result()` of a batch that is judged beside us."""
        ready, handle = beside.result()
        if handle is None:
            verdicts = self._get_batched_openai_quality_rewards_sync(ready.requests)
        else:
            verdicts = wait_for(handle)
            took_s = elapsed_s(handle, ready.since)
            if broken := _broken_rows(verdicts):
                again = self._get_batched_openai_quality_rewards_sync([ready.requests[row] for row in broken])
                _put_again(verdicts, broken, again)
            _say_completed(verdicts, took_s)
        return self._finish(rollouts, ready, verdicts, return_dict)

    def _judge_here(self, rollouts: Rollouts, return_dict: bool) -> Any:
        """`result()` of a batch on the synchronous path, and of one that no judge sees."""
        ready = self._prepare(rollouts)
        verdicts = self._get_batched_openai_quality_rewards_sync(ready.requests)
        return self._finish(rollouts, ready, verdicts, return_dict)

    def _finish(self, rollouts: Rollouts, ready: Prepared, verdicts: Sequence[Verdict], return_dict: bool) -> Any:
        rewards = combine(ready.samples, ready.rules, verdicts, self.config)
        self._examine(ready.samples, rewards)
        tensor = rollouts.tensor(rewards.reward)
        return {"reward_tensor": tensor, "reward_extra_info": rewards.extra_info()} if return_dict else tensor

    # -- the judge ----------------------------------------------------------------------------------------------------

    async def _get_batched_openai_quality_rewards_async(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """One verdict a request, all groups together, from the judge beside us. Does not block the loop.

        Without one beside us, and where that broke, it judges on the running loop.
        """
        if self._judge_config is None:
            return [JUDGE_OFF] * len(requests)
        manager, since = self.async_openai_manager, time.monotonic()
        handle = _hand_over(manager, requests) if manager is not None else None
        if handle is None:
            verdicts = await self._judge_on_loop(requests)
        else:
            try:
                verdicts = await handle
            finally:
                handle.cancel()
            if broken := _broken_rows(verdicts):
                _put_again(verdicts, broken, await self._judge_on_loop([requests[row] for row in broken]))
        _say_completed(verdicts, time.monotonic() - since)
        return verdicts

    def _get_batched_openai_quality_rewards_sync(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """The same verdicts, judged to the end on a private loop in this thread."""
        if self._judge_config is None:
            return [JUDGE_OFF] * len(requests)
        log.info(
            "Using synchronous method for batch with %d responses (set use_async_io=True for async)", len(requests)
        )
        since = time.monotonic()
        verdicts = run_privately(self._judge_on_loop(requests))
        _say_completed(verdicts, time.monotonic() - since)
        return verdicts

    async def _judge_on_loop(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """With an engine for this batch alone; what all of them spend counts against one `max_cost`."""
        assert self._judge_config is not None
        beside = self.async_openai_manager
        spent = self._spent + (beside.stats().cost if beside is not None else 0.0)
        verdicts, cost = await judge_inline(self._judge_config, requests, spent)
        self._spent += cost
        return verdicts

    def _examine(self, samples: Sequence[Sample], rewards: Rewards) -> None:
        """Logs the first `num_examine` samples of each data source of the batch."""
        examined: Counter[str] = Counter()
        for row, sample in enumerate(samples):
            if examined[sample.data_source] >= self.num_examine:
                continue
            examined[sample.data_source] += 1
            log.info(
                "[%s]\n[prompt] %s\n[response] %s\n[ground_truth] %s\n[reward] %.6g: rule %.6g, judge %s, length %.6g",
                sample.data_source,
                sample.question,
                sample.response,
                sample.ground_truth,
                rewards.reward[row],
                rule_value(rewards.rules[row]),
                f"{rewards.quality[row]:.6g}" if rewards.mask[row] else rewards.verdicts[row].status,
                rewards.penalty[row],
            )

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_threads", "_loops", "_judge_config", "_spent", "async_openai_manager")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
        if self._judge_config is None:
            self._say_why_no_judge()


def _hand_over(manager: AsyncOpenAIManager, requests: Sequence[JudgeRequest]) -> Handle | None:
    """None where the engine beside us is gone, or cannot be started: no file, thread or process is left for it."""
    try:
        manager.start()
    except (FreewheelError, OSError, RuntimeError) as error:
        _say_degraded(error)
        return None
    log.info("Starting async evaluation of %d responses", _judged_count(requests))
    try:
        return manager.submit(requests)
    except FreewheelError as error:
        _say_degraded(error)
        return None


def _say_degraded(error: Exception) -> None:
    log.warning("Async evaluation failed (%s: %s); using the synchronous path", type(error).__name__, error)


def _broken_rows(verdicts: Sequence[Verdict]) -> list[int]:
    """The rows that failed because the engine beside us broke."""
    rows = [row for row, one in enumerate(verdicts) if isinstance(one, Failed) and one.reason == Reason.ENGINE]
    if rows:
        why = verdicts[rows[0]]
        assert isinstance(why, Failed)
        log.warning(
            "Async evaluation failed for %d of %d responses (%s); using the synchronous path for them",
            len(rows),
            len(verdicts),
            why.detail,
        )
    return rows


def _put_again(verdicts: list[Verdict], rows: Sequence[int], again: Sequence[Verdict]) -> None:
    for row, verdict in zip(rows, again, strict=True):
        verdicts[row] = verdict


def _judged_count(requests: Sequence[JudgeRequest]) -> int:
    return sum(not request.skip for request in requests)


def _say_completed(verdicts: Sequence[Verdict], took_s: float) -> None:
    failed = [verdict for verdict in verdicts if isinstance(verdict, Failed)]
    counts = Counter(verdict.reason for verdict in failed)
    if timed_out := counts.pop(Reason.DEADLINE.value, 0):
        log.warning("OpenAI API evaluation timeout, using fallback: %d of %d failed", timed_out, len(verdicts))
    if counts:
        first = next(verdict for verdict in failed if verdict.reason in counts)
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.items())
        total = sum(counts.values())
        log.warning("%d of %d judgements failed (%s), the first with: %s", total, len(verdicts), reasons, first.detail)
    log.info("Completed in %.2fs, avg %.2fs per response", took_s, took_s / max(1, len(verdicts)))
