"""`RewardStage`: scores responses as they finish, during generation, on the rollouter's event loop.

    GroupScoring.add ─▶ task of the response: permit ─▶ function ─▶ judge ─┐
      never waits              one of `concurrency`      rule      verdict ▼
    GroupScoring.result ─▶ all n scored: rewards = rule + quality − penalty ─▶ GroupPolicy ─┬▶ responses with rewards
                                    ▲                                                       ├▶ ScoringFailed
                                    └────────── score again what failed, after a pause ◀────┘

A slow function or judge holds permits here, and never a generation slot. A batch function gets a whole group at once,
or what finishes within `LINGER_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from freewheel.data.group import Prompt, Response, Ticket
from freewheel.errors import ConfigError
from freewheel.judge.judge import Judge
from freewheel.judge.request import JudgeRequest
from freewheel.judge.tracker import Handle
from freewheel.judge.verdict import Failed, JudgeClosed, JudgeDied, Reason, Scored, Skipped, Verdict
from freewheel.observe import trace
from freewheel.rewards import math_equal, shutdown_judges
from freewheel.rewards.config import OnFailure, as_config
from freewheel.rewards.scoring import JUDGE_OFF, RewardFailed, Sample, judge_requests, rule_value, shape
from freewheel.rollout.reward_functions import Call, RewardFunction, from_judge
from freewheel.rollout.reward_workers import Executor, FunctionRunner, in_thread, is_power_of_ten
from freewheel.utils.waiting import Stopwatch

log = logging.getLogger("freewheel.rollout")

LINGER_S = 0.02
"""How long a batch function's responses wait for others: short compared with a batch, and long enough for responses
that end in the same few decoding steps."""
MIN_SCORED = 2
"""Rewards that a group needs for a baseline. A group of one response needs one."""
RETRY_DELAY_S = 0.5
"""Before a group is scored again, doubled each time. If all of a group failed, the cause needs a moment to recover."""
JUDGE_TOTALS = ("sent", "throttled", "faults", "in_flight", "limit", "cache_hits", "cost")
"""Statistics of all the judge's endpoints together, reported next to those of each endpoint."""


class ScoringFailed(Exception):
    """Too few responses of a group have a reward, after all retries."""

    def __init__(self, message: str, *, is_infra: bool = False) -> None:
        super().__init__(message)
        self.is_infra = is_infra
        """Every failure was a service's or a process's (a judge that is down, say). The prompt is not the cause."""


class FatalRewardFailure(RewardFailed):
    """A response could not be scored, and `reward.on_failure` is `raise`: the run ends."""


@dataclass(eq=False)
class _Item:
    """One response in the stage."""

    index: int
    response: Response
    call: Call
    sample: Sample | None
    """The response as the judge and the length penalty need it."""
    added_s: float = 0.0
    rule: Verdict | None = None
    """The function's verdict."""
    verdict: Verdict = JUDGE_OFF
    """The judge's verdict."""

    @property
    def failure(self) -> Failed | None:
        return next((one for one in (self.rule, self.verdict) if isinstance(one, Failed)), None)


class GroupScoring:
    """The scoring of one prompt's responses. `RewardStage.group` makes it."""

    def __init__(self, stage: RewardStage, ticket: Ticket, prompt: Prompt, n: int) -> None:
        self._stage = stage
        self._prompt = prompt
        self._items: dict[int, _Item] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._n = n
        self.ordinal = ticket.ordinal

    def add(self, index: int, text: str, response: Response) -> None:
        """Start the scoring of response `index`. Never waits."""
        assert index not in self._items, f"response {index} of prompt {self.ordinal} was added twice"
        item = self._items[index] = self._stage.make_item(self.ordinal, index, self._prompt, text, response)
        self._tasks.append(self._stage.start_scoring(self, item))

    async def result(self) -> list[Response]:
        """Return all responses with their rewards, in the order of the indexes. Call it when all are added.

        Raises `ScoringFailed` or `FatalRewardFailure`. Cancelling the caller gives up the group.
        """
        assert not self.missing, f"prompt {self.ordinal}: {self.missing} responses were not added"
        items = [self._items[index] for index in range(self._n)]
        tries = 0
        try:
            while True:
                done, _ = await asyncio.wait(self._tasks)
                for task in done:
                    task.result()
                responses = self._stage.decide(items, tries)
                if responses is not None:
                    return responses
                await asyncio.sleep(RETRY_DELAY_S * 2**tries)
                tries += 1
                self._tasks = [self._stage.start_scoring(self, item) for item in items if item.failure is not None]
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Give up the group: responses that wait for a permit are not scored."""
        for task in self._tasks:
            task.cancel()

    @property
    def missing(self) -> int:
        """Responses that were not added."""
        return self._n - len(self._items)


class RewardStage:
    """Every added response ends as scored, failed or skipped. Nothing that a function does stops the others.

    Belongs to the event loop on which it is first used. The arguments are the settings under `reward`.
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
        self._judging = None if judge is None else _Judging(judge, timeout_s=timeout_s)
        self._policy = GroupPolicy.of(on_failure, retries)
        self._clock = clock
        self._runner = FunctionRunner(score, workers=workers, executor=executor, timeout_s=timeout_s)
        self._batches = _Batches(self._runner)
        self._permits = asyncio.Semaphore(concurrency)
        self._counts = RewardCounts(score.name)
        self._busy = Stopwatch(clock)
        """Runs while any response is in the stage."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        """Responses that hold a permit."""

    def group(self, ticket: Ticket, prompt: Prompt, n: int) -> GroupScoring:
        """Return the scoring of `n` responses to a prompt. Add each response when it finishes."""
        return GroupScoring(self, ticket, prompt, n)

    # -- one response -------------------------------------------------------------------------------------------------

    def make_item(self, ordinal: int, index: int, prompt: Prompt, text: str, response: Response) -> _Item:
        call = self.function.call_for(prompt, text, response)
        sample = None
        if self._judging is not None:
            sample = Sample(
                response=text,
                length=int(response.mask.sum()),  # without the tokens that the policy did not make
                group=ordinal,
                data_source=call.data_source,
                ground_truth=call.ground_truth,
                question=call.question,
                extra_info=call.extra_info,
            )
        return _Item(index, response, call, sample)

    def start_scoring(self, group: GroupScoring, item: _Item) -> asyncio.Task[None]:
        """Start the scoring of a response. One that failed is scored again, from what failed on."""
        if not isinstance(item.rule, Scored):
            item.rule = None
        item.verdict, item.added_s = JUDGE_OFF, self._clock()
        self._busy.run(True)
        task = asyncio.create_task(self._score(group, item))
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._busy.run(bool(self._tasks))

    async def _score(self, group: GroupScoring, item: _Item) -> None:
        """Score one response: wait for a permit, call the function, ask the judge."""
        async with self._permits:
            self._in_flight += 1
            try:
                if item.rule is None:
                    item.rule = await self._call_function(group, item.call)
                if isinstance(item.rule, Scored) and self._judging is not None and item.sample is not None:
                    item.verdict = await self._judging.ask(item.sample, item.rule)
            finally:
                self._in_flight -= 1
        verdict = item.failure or item.rule
        self._counts.settle(verdict, self._clock() - item.added_s)
        trace.phase("score", group.ordinal, item.added_s, index=item.index, status=verdict.status)

    async def _call_function(self, group: GroupScoring, call: Call) -> Verdict:
        if self.function.is_batch:
            return await self._batches.score(call, wait_s=LINGER_S if group.missing else 0.0)
        (verdict,) = await self._runner.score([call])
        return verdict

    # -- a whole group ------------------------------------------------------------------------------------------------

    def decide(self, items: Sequence[_Item], tries: int) -> list[Response] | None:
        """All responses of a group are scored: do as `GroupPolicy.decide`, and count it."""
        if self._judging is not None:
            rewarded = self._judging.compose(items)
        else:
            rewarded = [_with_rule(item.response, item.rule) for item in items if item.rule is not None]
        try:
            responses = self._policy.decide(rewarded, tries)
        except ScoringFailed:
            self._counts.dropped_groups += 1
            raise
        self._counts.retried_groups += responses is None
        return responses

    # -- life ---------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        judge = {} if self._judging is None else self._judging.stats()
        return {
            "in_flight": self._in_flight,
            "waiting": len(self._tasks) - self._in_flight,
            "lost_threads": self._runner.lost_threads,
            "process_deaths": self._runner.process_deaths,
            "busy_s": self._busy.elapsed_s,
            **self._counts.snapshot(),
            **({"judge": judge} if judge else {}),
        }

    async def close(self) -> None:
        """End threads, processes and the judge. The scoring of unfinished groups is cancelled. Idempotent."""
        await _cancel(self._tasks)
        await self._batches.close()
        await self._runner.close()
        if self._judging is not None:
            await self._judging.close()
        await in_thread(_close_shared)


def _with_rule(response: Response, rule: Verdict) -> Response:
    return replace(response, verdict=rule, reward=rule_value(rule), raw_reward=rule_value(rule))


def _close_shared() -> None:
    """Close what rules and `compute_score` keep for the whole process. Both start again when they are used again."""
    math_equal.close()
    shutdown_judges()


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Batches:
    """Passes the responses of one tick of the loop, or of a short wait, to a batch function together."""

    def __init__(self, runner: FunctionRunner) -> None:
        self._runner = runner
        self._waiting: list[tuple[Call, asyncio.Future[Verdict]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def score(self, call: Call, *, wait_s: float) -> Verdict:
        """`wait_s`: how long the call may wait for others. A call that does not want to wait sends all."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Verdict] = loop.create_future()
        self._waiting.append((call, answer))
        if self._timer is None or not wait_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(wait_s, self._send)
        return await answer

    def _send(self) -> None:
        self._timer = None
        batch, self._waiting = self._waiting, []
        task = asyncio.create_task(self._score(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _score(self, batch: Sequence[tuple[Call, asyncio.Future[Verdict]]]) -> None:
        calls = [call for call, _ in batch]
        verdicts = await self._runner.score(calls)
        first = verdicts[0]
        shared = isinstance(first, Failed) and first.reason != "timeout" and all(one is first for one in verdicts)
        if len(calls) > 1 and shared:
            # The batch failed as a whole, perhaps because of a single response. Score each response alone.
            alone = await asyncio.gather(*(self._runner.score([call]) for call in calls))
            verdicts = [verdict for (verdict,) in alone]
        for (_, answer), verdict in zip(batch, verdicts, strict=True):
            if not answer.done():  # its group was given up
                answer.set_result(verdict)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await _cancel(self._tasks)


# -- the judge and the length penalty ---------------------------------------------------------------------------------


class _Judging:
    """One judge for all groups, and the composition of a group's rewards.

    A reward is that of `freewheel.rewards.scoring`, except for failures: freewheel's trainer masks them, so they are
    NaN here. The judge starts with the first request.
    """

    def __init__(self, settings: Any, *, timeout_s: float) -> None:
        """`settings`: a `LengthPenaltyConfig` in any of its forms."""
        self._config = config = as_config(settings)
        kind = config.failure_policy.kind
        if kind in ("raise", "fallback"):
            remedy = "reward.on_failure covers the whole reward: set that, and leave this out or at rule_only"
            raise ConfigError("reward.judge.on_failure", kind, remedy)
        self._rule_only = kind == "rule_only"
        self._deadline_s = min(timeout_s, config.batch_timeout_s)
        self._judge = Judge(config.judge_config()) if config.judges else None
        if config.lacks_key:
            log.warning(config.lacks_key)

    async def ask(self, sample: Sample, rule: Verdict) -> Verdict:
        if self._judge is None:
            return JUDGE_OFF
        (request,) = judge_requests([sample], [rule], self._config)
        if request.skip:
            return Skipped(request.skip)
        try:
            handle = self._submit(request)
        except (JudgeDied, JudgeClosed) as error:
            return from_judge(Failed(Reason.ENGINE.value, 0, str(error)))
        try:
            (verdict,) = await handle
        finally:
            handle.cancel()
        return from_judge(verdict) if isinstance(verdict, Failed) else verdict

    def _submit(self, request: JudgeRequest) -> Handle:
        assert self._judge is not None
        try:
            return self._judge.submit([request], deadline_s=self._deadline_s)
        except (JudgeDied, JudgeClosed) as error:
            # The judge's process kept dying. Another judge may work better for later responses.
            log.error("The judge broke down, and another one is started: %s", error)
            self._judge.close(timeout_s=0.0)  # its process has ended already
            self._judge = Judge(self._judge.config)
            return self._judge.submit([request], deadline_s=self._deadline_s)

    def compose(self, items: Sequence[_Item]) -> list[Response]:
        """Return the responses of a whole group with their rewards. The penalty needs the group's median length."""
        rules = [item.rule for item in items if item.rule is not None]
        samples = [item.sample for item in items if item.sample is not None]
        shaped = shape(samples, rules, [item.verdict for item in items], self._config)
        rewarded = []
        for row, (item, rule, verdict) in enumerate(zip(items, rules, shaped.verdicts, strict=True)):
            penalty = float(shaped.penalty[row])
            reward, raw = float(shaped.reward[row]), float(shaped.raw[row])
            if self._rule_only and isinstance(rule, Scored) and isinstance(verdict, Failed):
                reward, raw = rule.value - penalty, rule.value
            parts = {
                **rule.parts,
                "rule": rule_value(rule),
                "quality": float(shaped.quality[row]),
                "length_penalty": penalty,
                "judged": float(isinstance(item.verdict, Scored)),
            }
            parts = {name: value for name, value in parts.items() if not math.isnan(value)}
            if isinstance(rule, Scored) and not isinstance(verdict, Failed):
                verdict = Scored(raw, parts=parts)
            else:
                verdict = msgspec.structs.replace(verdict, parts=parts)
            rewarded.append(replace(item.response, verdict=verdict, reward=reward, raw_reward=raw))
        return rewarded

    def stats(self) -> dict[str, Any]:
        """Return the judge's latest statistics. Empty without a judge and before its first request."""
        if self._judge is None or not self._judge.running:
            return {}
        found = self._judge.recent_stats()
        return {**found.to_dict(), **{name: getattr(found, name) for name in JUDGE_TOTALS}}

    async def close(self) -> None:
        if self._judge is not None:
            await in_thread(self._judge.close)


# -- the decision about a group ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """The settings `reward.retries` and `reward.on_failure`, and what they decide for a group. Pure."""

    retries: int
    on_failure: float | Literal["mask", "raise"]
    """A number: the reward of a failed response."""

    @classmethod
    def of(cls, on_failure: str | Mapping[str, float], retries: int) -> GroupPolicy:
        """`on_failure`: `mask`, `raise`, or `fallback: NUMBER` as text or as a mapping."""
        if on_failure == "mask":
            return cls(retries=retries, on_failure="mask")
        with contextlib.suppress(ConfigError):
            policy = OnFailure.parse(on_failure)
            if policy.kind == "raise":
                return cls(retries=retries, on_failure="raise")
            if policy.kind == "fallback":
                return cls(retries=retries, on_failure=policy.value)
        raise ConfigError("reward.on_failure", on_failure, "choose mask, raise, or 'fallback: NUMBER'")

    def decide(self, responses: Sequence[Response], tries: int) -> list[Response] | None:
        """Return the responses to train on, or None: score the failed ones again. `tries`: earlier decisions.

        Raises `FatalRewardFailure`, or `ScoringFailed` if too few rewards are left for a baseline.
        """
        needed = min(MIN_SCORED, len(responses))
        failures = [one.verdict for one in responses if isinstance(one.verdict, Failed)]
        lost = [one.verdict for one in responses if _is_lost(one)]
        if self.on_failure == "raise" and lost:
            raise FatalRewardFailure(
                f"{len(lost)} of {len(responses)} responses could not be scored, and reward.on_failure is 'raise': "
                f"{lost[0].summary if lost[0] is not None else ''}"
            )
        if _count_rewards(responses) < needed and failures and tries < self.retries:
            return None
        if isinstance(self.on_failure, float):
            responses = [replace(one, reward=self.on_failure) if _is_lost(one) else one for one in responses]
        usable = _count_rewards(responses)
        if usable < needed:
            verdicts = [one.verdict for one in responses if math.isnan(one.reward)]
            reasons = Counter(verdict.summary for verdict in verdicts if verdict is not None)
            raise ScoringFailed(
                f"{usable} of {len(responses)} responses have a reward after {tries + 1} tries: "
                + "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common()),
                is_infra=bool(failures) and all(failure.infra for failure in failures),
            )
        return list(responses)


def _is_lost(response: Response) -> bool:
    """Whether scoring failed and no other number takes the reward's place."""
    return isinstance(response.verdict, Failed) and math.isnan(response.reward)


def _count_rewards(responses: Sequence[Response]) -> int:
    return sum(not math.isnan(one.reward) for one in responses)


# -- statistics -------------------------------------------------------------------------------------------------------


class RewardCounts:
    """Counts of what happened, and log lines about failures."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self.retried_groups = self.dropped_groups = 0
        self._latency_s = 0.0
        self._first_failure = ""

    def settle(self, verdict: Verdict, latency_s: float) -> None:
        """Count a response, and log the first failure of a kind, the tenth, the hundredth and so on: a broken function
        fails every time."""
        self._latency_s += latency_s
        self._counts[verdict.status] += 1
        if not isinstance(verdict, Failed):
            return
        self._failed[verdict.reason] += 1
        count = self._failed[verdict.reason]
        self._first_failure = self._first_failure or verdict.summary
        if count == 1:
            where = f"\n{verdict.trace.rstrip()}" if verdict.trace else ""
            log.warning("Scoring failed (%s): %s%s", self._name, verdict.summary, where)
        elif is_power_of_ten(count):
            log.warning("Scoring failed (%s) %d times by now: %s", self._name, count, verdict.summary)

    def snapshot(self) -> dict[str, Any]:
        return {
            "scored": self._counts["scored"],
            "skipped": self._counts["skipped"],
            "failed": dict(self._failed),
            **({"first_failure": self._first_failure} if self._first_failure else {}),
            "retried_groups": self.retried_groups,
            "dropped_groups": self.dropped_groups,
            "mean_latency_s": self._latency_s / self._counts.total() if self._counts else 0.0,
        }
