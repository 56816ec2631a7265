"""`LengthPenaltyRewardManager`: a batch of rollouts in, its rewards out. The judge works while the trainer does.

    submit(batch) ─▶ snapshot ─▶ [thread: decode ─▶ rule ─▶ gate ─▶ judge.submit] ─▶ RewardHandle
                                                                                      │ result(): waits
    reward_tensor, extra info ◀─ combine ◀────────────────────────────── verdicts ◀───┘

With `use_async_io` off, `result()` does all of this itself in the caller's thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from freewheel.errors import FreewheelError
from freewheel.judge import Failed, Handle, JudgeRequest, Reason, Verdict
from freewheel.rewards import math_equal
from freewheel.rewards.batch import RewardBatch, Rollouts
from freewheel.rewards.config import LengthPenaltyConfig, as_config
from freewheel.rewards.openai_manager import (
    SHUTDOWN_TIMEOUT_S,
    AsyncOpenAIManager,
    judge_inline,
    run_privately,
    wait_for,
)
from freewheel.rewards.rules import rule_score
from freewheel.rewards.scoring import (
    JUDGE_OFF,
    ComputeScore,
    Rewards,
    Sample,
    apply_rules,
    combine,
    describe_failures,
    judge_requests,
    rule_value,
)

log = logging.getLogger("freewheel.rewards")


class _Prepared(NamedTuple):
    """A batch whose rules are applied."""

    samples: list[Sample]
    rules: list[Verdict]
    requests: list[JudgeRequest]
    since: float
    handle: Handle | None
    """None: the judge's engine does not have the batch, and `result()` judges it."""


class RewardHandle:
    """The rewards of one batch. `result()` may be called any number of times, from any thread."""

    def __init__(self, collect: Callable[[], Any], submitted: Future[_Prepared] | None = None) -> None:
        self._collect = collect
        self._submitted = submitted
        self._lock = threading.Lock()
        self._result: Future[Any] = Future()

    def done(self) -> bool:
        """Return whether `result()` would not wait. On the synchronous path `result()` does the work itself."""
        if self._result.done():
            return True
        if self._submitted is None or not self._submitted.done():
            return False
        if self._submitted.exception() is not None:
            return True
        handle = self._submitted.result().handle
        return handle is not None and handle.done()

    def __await__(self) -> Generator[Any, None, Any]:
        """Return `result()` without blocking the loop."""
        return asyncio.to_thread(self.result).__await__()

    def result(self) -> Any:
        """Wait, and return or raise what calling the manager would have returned or raised."""
        with self._lock:
            if not self._result.done():
                try:
                    self._result.set_result(self._collect())
                except Exception as error:  # noqa: BLE001  # raised below, at every call
                    self._result.set_exception(error)
            return self._result.result()

    def cancel(self) -> None:
        """Give up judging: rows without a verdict have failed, and `result()` does not wait for them."""
        if self._submitted is not None:
            self._submitted.add_done_callback(_cancel)  # called now, or when the batch reaches the judge


def _cancel(submitted: Future[_Prepared]) -> None:
    if submitted.exception() is None and (handle := submitted.result().handle) is not None:
        handle.cancel()


class LengthPenaltyRewardManager:
    """Rule score + judge quality − length penalty, on each response's last token.

    Calling it waits for the judge. `submit` does not, so a training loop can score batch k while it works on k+1.
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
        # Read once: a later change of the key in the environment has no effect.
        self._judge_config = self.config.judge_config() if self.config.judges else None
        self._spent = 0.0
        self.async_openai_manager = self._new_manager()
        if self._judge_config is None:
            self._log_why_no_judge()

    def _new_manager(self) -> AsyncOpenAIManager | None:
        if self._judge_config is None or not self.use_async_io:
            return None
        return AsyncOpenAIManager.of(self._judge_config, self.config.reward_coefficient)

    @property
    def use_async_io(self) -> bool:
        return self.config.use_async_io

    def _log_why_no_judge(self) -> None:
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
                # With an endpoint, the user expects a judge.
                logging.WARNING if self.config.names_endpoint else logging.INFO,
                "No API key: rewards are rule score and length penalty only, and no request is made. Give api_key, or "
                "api_endpoint together with the environment variable OPENAI_API_KEY",
            )

    # -- life ---------------------------------------------------------------------------------------------------------

    def start_workers(self) -> None:
        """Start the judge's engine now instead of with the first batch. Does nothing if it runs or is off."""
        if self.async_openai_manager is not None:
            self.async_openai_manager.start()

    def shutdown_workers(self) -> None:
        """End everything that was started, within 5 s: processes, threads, sockets and files. Idempotent.

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
            log.warning("%d batches are not complete: their rows without a verdict have failed", manager.pending)
        try:
            manager.shutdown(max(0.0, until - time.monotonic()))
        except (FreewheelError, OSError) as error:
            log.error("Error shutting down async manager: %s", error)
            return
        finally:
            self.async_openai_manager = self._new_manager()
        log.info("Async OpenAI manager shut down successfully.")

    def _ensure_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop, or a loop that is made for this thread and set as its own."""
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
            if not self._loops[thread].is_running():  # its thread uses a running loop; the next call closes it
                self._loops.pop(thread).close()

    # -- batches ------------------------------------------------------------------------------------------------------

    def __call__(self, data: RewardBatch, return_dict: bool = False) -> Any:
        """Return the reward tensor; with `return_dict` a dict of `reward_tensor` and `reward_extra_info`."""
        return self.submit(data, return_dict).result()

    def submit(self, data: RewardBatch, return_dict: bool = False) -> RewardHandle:
        """Take a batch and return at once. The handle's `result()` returns what `__call__` would have returned."""
        tensors = data.batch
        if tensors is not None and "rm_scores" in tensors.keys():  # noqa: SIM118  # a TensorDict has no `in`
            scores = tensors["rm_scores"]
            extra = {key: data.non_tensor_batch[key] for key in data.meta_info.get("reward_extra_keys", [])}
            ready = {"reward_tensor": scores, "reward_extra_info": extra} if return_dict else scores
            return RewardHandle(lambda: ready)
        rollouts = Rollouts(data, self.reward_fn_key)
        manager = self.async_openai_manager
        if manager is None:
            return RewardHandle(partial(self._collect, rollouts, None, return_dict))
        log.info("Using TRUE ASYNC I/O for batch with %d responses (zero GPU wait)", len(rollouts))
        submitted: Future[_Prepared] = Future()
        # Decoding and rules take time that `submit` must not take.
        thread = threading.Thread(
            target=self._prepare_in_thread, args=(rollouts, manager, submitted), name="freewheel-rewards"
        )
        try:
            thread.start()
        except RuntimeError as error:  # this process may have no more threads
            _log_degraded(error)
            return RewardHandle(partial(self._collect, rollouts, None, return_dict))
        self._threads.add(thread)
        return RewardHandle(partial(self._collect, rollouts, submitted, return_dict), submitted)

    def _prepare(self, rollouts: Rollouts, manager: AsyncOpenAIManager | None = None) -> _Prepared:
        """Decode a batch, apply the rules, and submit it if there is a manager."""
        samples = rollouts.samples(self.tokenizer)
        rules = apply_rules(self.compute_score, samples)
        requests, since = judge_requests(samples, rules, self.config), time.monotonic()
        handle = _submit_to(manager, requests) if manager is not None else None
        return _Prepared(samples, rules, requests, since, handle)

    def _prepare_in_thread(self, rollouts: Rollouts, manager: AsyncOpenAIManager, into: Future[_Prepared]) -> None:
        try:
            into.set_result(self._prepare(rollouts, manager))
        except BaseException as error:  # noqa: BLE001  # `result()` raises it
            into.set_exception(error)

    def _collect(self, rollouts: Rollouts, submitted: Future[_Prepared] | None, return_dict: bool) -> Any:
        """Return the result of a batch. Without `submitted` this does all the work."""
        ready = self._prepare(rollouts) if submitted is None else submitted.result()
        if ready.handle is None:
            verdicts = self._get_batched_openai_quality_rewards_sync(ready.requests)
        else:
            verdicts = wait_for(ready.handle)
            took_s = (ready.handle.finished_at or time.monotonic()) - ready.since  # however late `result` was called
            if broken := _broken_rows(verdicts):
                again = self._get_batched_openai_quality_rewards_sync([ready.requests[row] for row in broken])
                _replace_rows(verdicts, broken, again)
            _log_completed(verdicts, took_s)
        rewards = combine(ready.samples, ready.rules, verdicts, self.config)
        self._examine(ready.samples, rewards)
        tensor = rollouts.tensor(rewards.reward)
        return {"reward_tensor": tensor, "reward_extra_info": rewards.extra_info()} if return_dict else tensor

    # -- the judge ----------------------------------------------------------------------------------------------------

    async def _get_batched_openai_quality_rewards_async(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """Return one verdict per request, for all groups together, without blocking the loop.

        If the judge's engine is off or broke, the requests are judged on the running loop.
        """
        if self._judge_config is None:
            return [JUDGE_OFF] * len(requests)
        manager, since = self.async_openai_manager, time.monotonic()
        handle = _submit_to(manager, requests) if manager is not None else None
        if handle is None:
            verdicts = await self._judge_on_loop(requests)
        else:
            try:
                verdicts = await handle
            finally:
                handle.cancel()
            if broken := _broken_rows(verdicts):
                _replace_rows(verdicts, broken, await self._judge_on_loop([requests[row] for row in broken]))
        _log_completed(verdicts, time.monotonic() - since)
        return verdicts

    def _get_batched_openai_quality_rewards_sync(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """Return the same verdicts, judged on a private loop in this thread."""
        if self._judge_config is None:
            return [JUDGE_OFF] * len(requests)
        log.info(
            "Using synchronous method for batch with %d responses (set use_async_io=True for async)", len(requests)
        )
        since = time.monotonic()
        verdicts = run_privately(self._judge_on_loop(requests))
        _log_completed(verdicts, time.monotonic() - since)
        return verdicts

    async def _judge_on_loop(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """Judge a batch with a separate engine. All engines count against the same `max_cost`."""
        assert self._judge_config is not None
        manager = self.async_openai_manager
        spent = self._spent + (manager.stats().cost if manager is not None else 0.0)
        verdicts, cost = await judge_inline(self._judge_config, requests, spent)
        self._spent += cost
        return verdicts

    def _examine(self, samples: Sequence[Sample], rewards: Rewards) -> None:
        """Log the first `num_examine` samples of each data source."""
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


def _submit_to(manager: AsyncOpenAIManager, requests: Sequence[JudgeRequest]) -> Handle | None:
    """Submit a batch. Returns None if the engine is gone or cannot start (no file, thread or process is left)."""
    try:
        manager.start()
    except (FreewheelError, OSError, RuntimeError) as error:
        _log_degraded(error)
        return None
    log.info("Starting async evaluation of %d responses", sum(not request.skip for request in requests))
    try:
        return manager.submit(requests)
    except FreewheelError as error:
        _log_degraded(error)
        return None


def _log_degraded(error: Exception) -> None:
    log.warning("Async evaluation failed (%s: %s); using the synchronous path", type(error).__name__, error)


def _broken_rows(verdicts: Sequence[Verdict]) -> list[int]:
    """Return the rows that failed because the judge's engine broke."""
    broken = {row: one for row, one in enumerate(verdicts) if isinstance(one, Failed) and one.reason == Reason.ENGINE}
    if broken:
        log.warning(
            "Async evaluation failed for %d of %d responses (%s); using the synchronous path for them",
            len(broken),
            len(verdicts),
            next(iter(broken.values())).detail,
        )
    return list(broken)


def _replace_rows(verdicts: list[Verdict], rows: Sequence[int], replacements: Sequence[Verdict]) -> None:
    for row, verdict in zip(rows, replacements, strict=True):
        verdicts[row] = verdict


def _log_completed(verdicts: Sequence[Verdict], took_s: float) -> None:
    failed = [verdict for verdict in verdicts if isinstance(verdict, Failed)]
    others = [verdict for verdict in failed if verdict.reason != Reason.DEADLINE]
    if timed_out := len(failed) - len(others):
        log.warning("OpenAI API evaluation timeout, using fallback: %d of %d failed", timed_out, len(verdicts))
    if others:
        log.warning("%s", describe_failures(others, len(verdicts)))
    log.info("Completed in %.2fs, avg %.2fs per response", took_s, took_s / max(1, len(verdicts)))
