"""`RewardStage`: scores responses as they finish, one by one, with permits of its own, on the rollouter's event loop.

    GroupScoring.add ─▶ waiting ─ permit ─▶ function ─▶ rule ─▶ judge ─▶ verdict ─▶ settled
      │ never waits        │ waits for: one of `concurrency` permits                     │ all n of the group
      ▼                    ▼ batch functions: the whole group, or a short linger         ▼
    generation goes on                                          composed ─▶ result(), or again, or ScoringFailed

A slow function or judge holds permits and threads here, and never a generation slot. What becomes ready within one tick
of the loop crosses to the threads in one step, and comes back in one.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from freewheel.data.group import Prompt, Response, Ticket
from freewheel.judge.verdict import Failed, Scored, Verdict
from freewheel.observe import trace
from freewheel.rewards import math_equal, shutdown_judges
from freewheel.rewards.scoring import JUDGE_OFF, Sample
from freewheel.rollout.reward_counts import RewardCounts
from freewheel.rollout.reward_functions import Call, RewardFunction, failed, from_judge
from freewheel.rollout.reward_judging import Judging, with_plain_reward
from freewheel.rollout.reward_policy import Again, FatalRewardFailure, GroupPolicy, ScoringFailed
from freewheel.rollout.reward_workers import CLOSE_S, Executor, Job, Workers, in_thread, timed_out

__all__ = ["FatalRewardFailure", "GroupScoring", "RewardStage", "ScoringFailed"]

LINGER_S = 0.02
"""As long as a batch function's responses wait for others: short beside a batch's own time, and long enough for those
that end in the same few decoding steps."""


@dataclass(eq=False)
class _Item:
    """One response on its way."""

    group: GroupScoring
    index: int
    response: Response
    call: Call
    sample: Sample | None
    """For the judge and the length penalty."""
    added_s: float
    rule: Verdict | None = None
    """The function's verdict."""
    verdict: Verdict = JUDGE_OFF
    """The judge's verdict."""

    @property
    def failure(self) -> Failed | None:
        """What it failed with, if it did."""
        for one in (self.rule, self.verdict):
            if isinstance(one, Failed):
                return one
        return None


class GroupScoring:
    """The scoring of one prompt's responses. Made by `RewardStage.group`."""

    def __init__(self, stage: RewardStage, ticket: Ticket, prompt: Prompt, n: int) -> None:
        self._stage = stage
        self._ticket = ticket
        self._prompt = prompt
        self._result: asyncio.Future[list[Response]] = asyncio.get_running_loop().create_future()
        self._result.add_done_callback(_look)
        self.items: list[_Item | None] = [None] * n
        self.unsettled = n
        """Responses that are not added, or not scored yet."""
        self.tries = 0

    def __len__(self) -> int:
        return len(self.items)

    @property
    def ordinal(self) -> int:
        return self._ticket.ordinal

    def add(self, index: int, text: str, response: Response) -> None:
        """Response `index` has finished, and its scoring starts. Never waits."""
        assert self.items[index] is None, f"response {index} of prompt {self._ticket.ordinal} was added twice"
        self.items[index] = self._stage._admit(self, index, self._prompt, text, response)

    async def result(self) -> list[Response]:
        """All responses with their rewards, in the order of the indexes. Raises `ScoringFailed` or
        `FatalRewardFailure`. Cancelling the caller gives the group up."""
        return await self._result

    def cancel(self) -> None:
        """Nobody wants the rewards any more: what waits for a permit is not scored."""
        self._result.cancel()

    @property
    def missing(self) -> int:
        """Responses that were not added."""
        return self.items.count(None)

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def over(self) -> bool:
        return self._result.done()

    def finish(self, rewarded: list[Response]) -> None:
        if not self.over:
            self._result.set_result(rewarded)

    def fail(self, error: Exception) -> None:
        if not self.over:
            self._result.set_exception(error)


def _look(result: asyncio.Future[list[Response]]) -> None:
    """A group whose generation failed is never asked for its result; asyncio must not complain about that."""
    if not result.cancelled():
        result.exception()


def _close_shared() -> None:
    """What rules and `compute_score` keep for the whole process; both start again when they are used again."""
    math_equal.close()
    shutdown_judges()


class RewardStage:
    """Every response that is added ends as scored, failed or skipped; nothing that a function does stops the others.

    Belongs to the event loop on which it is first used. The settings are those of `reward` in a run's configuration.
    """

    def __init__(
        self,
        *,
        score: RewardFunction,
        judge: Any,
        concurrency: int,
        timeout_s: float,
        workers: int,
        executor: Executor,
        retries: int,
        on_failure: str | Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.function = score
        self._judging = None if judge is None else Judging(judge, timeout_s=timeout_s)
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._policy = GroupPolicy.of(on_failure, retries)
        self._clock = clock
        self._workers = (
            None if score.is_async else Workers(score, count=workers, executor=executor, timeout_s=timeout_s)
        )
        self._tasks: set[asyncio.Task[list[Verdict]]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._waiting: deque[_Item] = deque()
        self._pump_at: asyncio.Handle | None = None
        self._in_flight = 0
        self._groups: weakref.WeakSet[GroupScoring] = weakref.WeakSet()
        self._counts = RewardCounts(score.name)
        self._closed = False

    # -- groups -------------------------------------------------------------------------------------------------------

    def group(self, ticket: Ticket, prompt: Prompt, n: int) -> GroupScoring:
        """The scoring of `n` responses to a prompt; `add` each as it finishes."""
        assert not self._closed, "the reward stage is closed"
        made = GroupScoring(self, ticket, prompt, n)
        self._groups.add(made)
        return made

    def _admit(self, group: GroupScoring, index: int, prompt: Prompt, text: str, response: Response) -> _Item:
        tokens = response.tokens.tolist() if self.function.wants_tokens else ()
        call = Call(text=text, row=prompt.row, finish=response.finish, tokens=tokens)
        sample = None
        if self._judging is not None:
            sample = Sample(
                response=text,
                length=int(response.mask.sum()),  # what another wrote into it is not its length
                group=group.ordinal,
                data_source=call.data_source,
                ground_truth=call.ground_truth,
                question=call.question,
                extra_info=call.extra_info,
            )
        item = _Item(group, index, response, call, sample, self._clock())
        self._counts.started(item.added_s, idle=self._in_flight == 0 and not self._waiting)
        self._waiting.append(item)
        # The response itself is not in its group's list yet.
        lingers = self.function.is_batch and sum(one is None for one in group.items) > 1
        self._pump_soon(LINGER_S if lingers else 0.0)
        return item

    def _pump_soon(self, delay_s: float) -> None:
        """One look at what waits, in the next tick or after a linger, whichever was asked for first."""
        if self._pump_at is not None:
            if delay_s or not isinstance(self._pump_at, asyncio.TimerHandle):
                return
            self._pump_at.cancel()
        loop = asyncio.get_running_loop()
        self._pump_at = loop.call_later(delay_s, self._pump) if delay_s else loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Gives permits to what waits."""
        self._pump_at = None
        taken: list[_Item] = []
        while self._waiting and self._in_flight + len(taken) < self._concurrency:
            item = self._waiting.popleft()
            if not item.group.over:
                taken.append(item)
        self._in_flight += len(taken)
        self._idle_now()
        if self._closed:
            return
        again = [item for item in taken if item.rule is not None]  # only their verdict failed the last time
        for item in again:
            self._judge(item)
        fresh = [item for item in taken if item.rule is None]
        self._call([fresh] if self.function.is_batch and fresh else [[item] for item in fresh])

    def _call(self, batches: Sequence[list[_Item]]) -> None:
        jobs = [Job([item.call for item in batch], partial(self._scored, batch)) for batch in batches]
        if self._workers is not None:
            if jobs:
                self._workers.submit(jobs)
            return
        for job in jobs:
            self._call_async(job)

    def _call_async(self, job: Job) -> None:
        """A task that is cancelled when its time is over, but not waited for: it may not care."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(self.function.score_async(job.calls))
        late = False

        def over() -> None:
            nonlocal late
            late = True
            task.cancel()
            job.done([timed_out(self._timeout_s)] * len(job.calls))

        def done(_: object) -> None:
            timer.cancel()
            self._tasks.discard(task)
            if late:
                return
            itself = failed("CancelledError", "the function cancelled itself")
            job.done([itself] * len(job.calls) if task.cancelled() else task.result())

        timer = loop.call_later(self._timeout_s, over)
        self._tasks.add(task)
        task.add_done_callback(done)

    # -- one response -------------------------------------------------------------------------------------------------

    def _scored(self, batch: list[_Item], verdicts: Sequence[Verdict]) -> None:
        """The function has spoken."""
        if self._closed:
            return
        first = verdicts[0]
        shared = isinstance(first, Failed) and first.reason != "timeout" and all(one is first for one in verdicts)
        if len(batch) > 1 and shared:
            # A batch that failed as a whole: one response may have brought it down, and the others are not to blame.
            self._call([[item] for item in batch])
            return
        for item, rule in zip(batch, verdicts, strict=True):
            item.rule = rule
            if isinstance(rule, Scored) and self._judging is not None and not item.group.over:
                self._judge(item)
            else:
                self._settle(item)

    def _judge(self, item: _Item) -> None:
        assert self._judging is not None and item.sample is not None and item.rule is not None
        self._judging.ask(item.sample, item.rule, partial(self._judged, item))

    def _judged(self, item: _Item, verdict: Verdict) -> None:
        if not self._closed:
            item.verdict = from_judge(verdict) if isinstance(verdict, Failed) else verdict
            self._settle(item)

    def _settle(self, item: _Item) -> None:
        """The response has its end; its permit goes to another."""
        self._in_flight -= 1
        assert item.rule is not None
        failure, status = item.failure, item.rule.status
        self._counts.settled(failure, status, self._clock() - item.added_s)
        ended = "failed" if failure is not None else status
        trace.phase("score", item.group.ordinal, item.added_s, index=item.index, status=ended)
        self._idle_now()
        if self._waiting and self._pump_at is None:
            self._pump_soon(0.0)
        item.group.unsettled -= 1
        if item.group.unsettled or item.group.over:
            return
        try:
            self._decide(item.group)
        except ScoringFailed as error:
            self._counts.dropped_groups += 1
            item.group.fail(error)
        except Exception as error:  # noqa: BLE001  # whoever awaits the group hears of it, whatever it is
            item.group.fail(error)

    def _idle_now(self) -> None:
        if self._in_flight == 0 and not self._waiting:
            self._counts.idle(self._clock())

    # -- a whole group ------------------------------------------------------------------------------------------------

    def _decide(self, group: GroupScoring) -> None:
        """All its responses are settled: rewards, another try, or the end of the group."""
        items = [item for item in group.items if item is not None]
        failures = [(item, failure) for item in items if (failure := item.failure) is not None]
        if group.tries == 0:
            self._counts.grouped(len(items), [failure for _, failure in failures])
        decision = self._policy.decide(self._compose(items), [failure for _, failure in failures], group.tries)
        if isinstance(decision, Again):
            group.tries += 1
            self._counts.retried_groups += 1
            self._later(decision.delay_s, partial(self._again, group, [item for item, _ in failures]))
        else:
            group.finish(decision)

    def _compose(self, items: Sequence[_Item]) -> list[Response]:
        rules = [item.rule for item in items if item.rule is not None]
        responses = [item.response for item in items]
        if self._judging is None:
            return list(map(with_plain_reward, responses, rules))
        samples = [item.sample for item in items if item.sample is not None]
        return self._judging.compose(samples, responses, rules, [item.verdict for item in items])

    def _later(self, delay_s: float, work: Callable[[], None]) -> None:
        def run() -> None:
            self._timers.discard(timer)
            work()

        timer = asyncio.get_running_loop().call_later(delay_s, run)
        self._timers.add(timer)

    def _again(self, group: GroupScoring, failures: Sequence[_Item]) -> None:
        """Scores what failed once more; a rule's score that is known stays, and only its judge is asked."""
        if group.over or self._closed:
            return
        now = self._clock()
        self._counts.started(now, idle=self._in_flight == 0 and not self._waiting)
        group.unsettled = len(failures)
        for item in failures:
            if not isinstance(item.rule, Scored):
                item.rule = None
            item.verdict, item.added_s = JUDGE_OFF, now
            self._waiting.append(item)
        self._pump_soon(0.0)

    # -- life ---------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What it did so far, and does now."""
        judge = {} if self._judging is None else self._judging.stats()
        return {
            "in_flight": self._in_flight,
            "waiting": len(self._waiting),
            "lost_threads": self._workers.written_off if self._workers is not None else 0,
            "process_deaths": self._workers.process_deaths if self._workers is not None else 0,
            **self._counts.snapshot(self._clock()),
            **({"judge": judge} if judge else {}),
        }

    async def close(self) -> None:
        """Ends threads, processes and the judge. Groups that are not done raise `ScoringFailed`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._pump_at is not None:
            self._pump_at.cancel()
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        if self._workers is not None:
            await self._workers.close()
        if self._judging is not None:
            await self._judging.close()
        await in_thread(_close_shared)
        for group in list(self._groups):
            group.fail(ScoringFailed("the reward stage was closed", {"closed": len(group)}))
