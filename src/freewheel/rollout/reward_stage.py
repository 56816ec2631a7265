"""`RewardStage`: scores responses as they finish, beside generation, on the rollouter's event loop.

    GroupScoring.add ─▶ task of the response: permit ─▶ function ─▶ judge ─┐
      never waits              one of `concurrency`      rule      verdict ▼
    GroupScoring.result ─▶ all n scored: rewards = rule + quality − penalty ─▶ GroupPolicy ─┬▶ responses with rewards
                                    ▲                                                       ├▶ ScoringFailed
                                    └────────── score again what failed, after a pause ◀────┘

A slow function or judge holds permits here, and never a generation slot. A batch function gets a whole group at once,
or what finishes within `LINGER_S`. The judge gets everything that becomes ready in one tick of the loop together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgspec

from freewheel.data.group import Prompt, Response, Ticket
from freewheel.errors import ConfigError
from freewheel.judge.judge import Judge
from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import EngineDied, Failed, JudgeClosed, Reason, Scored, Skipped, Verdict
from freewheel.observe import trace
from freewheel.rewards import math_equal, shutdown_judges
from freewheel.rewards.config import OnFailure, as_config
from freewheel.rewards.scoring import JUDGE_OFF, RewardFailed, Sample, judge_requests, rule_value, shape
from freewheel.rollout.reward_functions import Call, RewardFunction, from_judge
from freewheel.rollout.reward_workers import Executor, FunctionRunner, in_thread

log = logging.getLogger("freewheel.rollout")

LINGER_S = 0.02
"""How long a batch function's responses wait for others: short compared with a batch, and long enough for responses
that end in the same few decoding steps."""
MIN_SCORED = 2
"""Rewards that a group needs for a baseline. A group of one response needs one."""
RETRY_DELAY_S = 0.5
"""Before a group is scored again, doubled each time. Whatever failed all of a group needs a moment to recover."""
BROKEN_GROUPS = 3
"""If this many groups at the start of a run fail entirely and in the same way, the function is called broken."""
JUDGE_TOTALS = ("sent", "throttled", "faults", "in_flight", "limit", "cache_hits", "cost")
"""Statistics of all the judge's endpoints together, reported beside those of each endpoint."""


class ScoringFailed(Exception):
    """Too few responses of a group have a reward, after all retries. `reasons` counts why."""

    def __init__(self, message: str, reasons: Mapping[str, int] | None = None, *, is_infra: bool = False) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})
        self.is_infra = is_infra
        """Every failure was a service's or a process's (a judge that is down, say). The prompt is not to blame."""


class FatalRewardFailure(RewardFailed):
    """A response could not be scored, and `reward.on_failure` is `raise`."""

    ends_the_run = True


@dataclass(eq=False)
class _Item:
    """One response in the stage."""

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
        for one in (self.rule, self.verdict):
            if isinstance(one, Failed):
                return one
        return None

    def start_again(self, now: float) -> None:
        """Forget what failed. Where only the judge failed, only the judge is asked again."""
        if not isinstance(self.rule, Scored):
            self.rule = None
        self.verdict, self.added_s = JUDGE_OFF, now


class GroupScoring:
    """The scoring of one prompt's responses. `RewardStage.group` makes it."""

    def __init__(self, stage: RewardStage, ticket: Ticket, prompt: Prompt, n: int) -> None:
        self._stage = stage
        self._prompt = prompt
        self._items: list[_Item | None] = [None] * n
        self._tasks: list[asyncio.Task[None]] = []
        self.ordinal = ticket.ordinal

    def add(self, index: int, text: str, response: Response) -> None:
        """Start the scoring of response `index`. Never waits."""
        assert self._items[index] is None, f"response {index} of prompt {self.ordinal} was added twice"
        item = self._items[index] = self._stage.make_item(self.ordinal, index, self._prompt, text, response)
        self._tasks.append(self._stage.start_scoring(self, item))

    async def result(self) -> list[Response]:
        """Return all responses with their rewards, in the order of the indexes. Call it when all are added.

        Raises `ScoringFailed` or `FatalRewardFailure`. Cancelling the caller gives up the group.
        """
        items = [item for item in self._items if item is not None]
        assert len(items) == len(self._items), f"prompt {self.ordinal}: {self.missing} responses were not added"
        tries = 0
        try:
            while True:
                done, _ = await asyncio.wait(self._tasks)
                for task in done:
                    task.result()
                decision = self._stage.decide(items, tries)
                if not isinstance(decision, Again):
                    return decision
                tries += 1
                await asyncio.sleep(decision.delay_s)
                self._tasks = [self._stage.score_again(self, item) for item in items if item.failure is not None]
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Give up the group: responses that wait for a permit are not scored."""
        for task in self._tasks:
            task.cancel()

    @property
    def missing(self) -> int:
        """Responses that were not added."""
        return self._items.count(None)


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
        self._function_batches = _Batcher(self._score_batch)
        self._permits = asyncio.Semaphore(concurrency)
        self._counts = RewardCounts(score.name)
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        """Responses that hold a permit."""

    def group(self, ticket: Ticket, prompt: Prompt, n: int) -> GroupScoring:
        """Return the scoring of `n` responses to a prompt. Add each response when it finishes."""
        return GroupScoring(self, ticket, prompt, n)

    # -- one response -------------------------------------------------------------------------------------------------

    def make_item(self, ordinal: int, index: int, prompt: Prompt, text: str, response: Response) -> _Item:
        tokens = response.tokens.tolist() if self.function.wants_tokens else ()
        call = Call(text=text, row=prompt.row, finish=response.finish, tokens=tokens)
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
        return _Item(index, response, call, sample, self._clock())

    def start_scoring(self, group: GroupScoring, item: _Item) -> asyncio.Task[None]:
        self._counts.run(True, self._clock())
        task = asyncio.create_task(self._score(group, item))
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def score_again(self, group: GroupScoring, item: _Item) -> asyncio.Task[None]:
        item.start_again(self._clock())
        return self.start_scoring(group, item)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._counts.run(False, self._clock())

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
        failure, status = item.failure, item.rule.status
        self._counts.settled(failure, status, self._clock() - item.added_s)
        status = status if failure is None else failure.status
        trace.phase("score", group.ordinal, item.added_s, index=item.index, status=status)

    async def _call_function(self, group: GroupScoring, call: Call) -> Verdict:
        if self.function.is_batch:
            return await self._function_batches.ask(call, wait_s=LINGER_S if group.missing else 0.0)
        (verdict,) = await self._runner.score([call])
        return verdict

    async def _score_batch(self, calls: Sequence[Call]) -> AsyncIterator[tuple[int, Verdict]]:
        verdicts = await self._runner.score(calls)
        first = verdicts[0]
        shared = isinstance(first, Failed) and first.reason != "timeout" and all(one is first for one in verdicts)
        if len(calls) > 1 and shared:
            # The batch failed as a whole, perhaps because of a single response. Score each response alone.
            alone = await asyncio.gather(*(self._runner.score([call]) for call in calls))
            verdicts = [verdict for (verdict,) in alone]
        for index, verdict in enumerate(verdicts):
            yield index, verdict

    # -- a whole group ------------------------------------------------------------------------------------------------

    def decide(self, items: Sequence[_Item], tries: int) -> list[Response] | Again:
        """All responses of a group are scored: return them with their rewards, or `Again`. Raises as `GroupPolicy`."""
        failures = [failure for item in items if (failure := item.failure) is not None]
        if tries == 0:
            self._counts.grouped(len(items), failures)
        try:
            decision = self._policy.decide(self._rewarded(items), failures, tries)
        except ScoringFailed:
            self._counts.dropped_groups += 1
            raise
        self._counts.retried_groups += isinstance(decision, Again)
        return decision

    def _rewarded(self, items: Sequence[_Item]) -> list[Response]:
        rules = [item.rule for item in items if item.rule is not None]
        responses = [item.response for item in items]
        if self._judging is None:
            return [_reward(one, rule, rule_value(rule)) for one, rule in zip(responses, rules, strict=True)]
        samples = [item.sample for item in items if item.sample is not None]
        return self._judging.compose(samples, responses, rules, [item.verdict for item in items])

    # -- life ---------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        judge = {} if self._judging is None else self._judging.stats()
        return {
            "in_flight": self._in_flight,
            "waiting": len(self._tasks) - self._in_flight,
            "lost_threads": self._runner.lost_threads,
            "process_deaths": self._runner.process_deaths,
            **self._counts.snapshot(self._clock()),
            **({"judge": judge} if judge else {}),
        }

    async def close(self) -> None:
        """End threads, processes and the judge. The scoring of unfinished groups is cancelled. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._function_batches.close()
        await self._runner.close()
        if self._judging is not None:
            await self._judging.close()
        await in_thread(_close_shared)


def _close_shared() -> None:
    """Close what rules and `compute_score` keep for the whole process. Both start again when they are used again."""
    math_equal.close()
    shutdown_judges()


def _reward(response: Response, verdict: Verdict, reward: float, raw_reward: float | None = None) -> Response:
    return replace(response, verdict=verdict, reward=reward, raw_reward=reward if raw_reward is None else raw_reward)


# -- what is asked together -------------------------------------------------------------------------------------------

T = TypeVar("T")


class _Batcher(Generic[T]):
    """Sends what callers ask in one tick of the loop, or within a short wait, together. Each gets its own verdict."""

    def __init__(self, score: Callable[[list[T]], AsyncIterator[tuple[int, Verdict]]]) -> None:
        """`score` yields the index of each of its arguments with its verdict, in any order."""
        self._score = score
        self._asked: list[tuple[T, asyncio.Future[Verdict]]] = []
        self._send_at: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, one: T, *, wait_s: float = 0.0) -> Verdict:
        """`wait_s`: how long `one` may wait for others. A call that does not want to wait sends all."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Verdict] = loop.create_future()
        self._asked.append((one, answer))
        if self._send_at is None:
            self._send_at = loop.call_later(wait_s, self._send) if wait_s else loop.call_soon(self._send)
        elif not wait_s and isinstance(self._send_at, asyncio.TimerHandle):
            self._send_at.cancel()
            self._send_at = loop.call_soon(self._send)
        return await answer

    def _send(self) -> None:
        self._send_at = None
        asked, self._asked = self._asked, []
        task = asyncio.create_task(self._answer(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: list[tuple[T, asyncio.Future[Verdict]]]) -> None:
        async for index, verdict in self._score([one for one, _ in asked]):
            answer = asked[index][1]
            if not answer.done():  # its group was given up
                answer.set_result(verdict)

    async def close(self) -> None:
        if self._send_at is not None:
            self._send_at.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
        self._batches = _Batcher(self._ask_judge)
        self._judge = Judge(config.judge_config()) if config.judges else None
        if config.lacks_key:
            log.warning(config.lacks_key)

    async def ask(self, sample: Sample, rule: Verdict) -> Verdict:
        if self._judge is None:
            return JUDGE_OFF
        (request,) = judge_requests([sample], [rule], self._config)
        if request.skip:
            return Skipped(request.skip)
        verdict = await self._batches.ask(request)
        return from_judge(verdict) if isinstance(verdict, Failed) else verdict

    async def _ask_judge(self, requests: Sequence[JudgeRequest]) -> AsyncIterator[tuple[int, Verdict]]:
        assert self._judge is not None
        try:
            handle = self._judge.submit(requests, deadline_s=self._deadline_s)
        except (EngineDied, JudgeClosed) as error:
            # The judge's process kept dying. Another judge may work better for later responses.
            log.error("The judge broke down, and another one is started: %s", error)
            broken, self._judge = self._judge, Judge(self._judge.config)
            broken.close(timeout_s=0.0)  # its process is gone already
            try:
                handle = self._judge.submit(requests, deadline_s=self._deadline_s)
            except (EngineDied, JudgeClosed) as again:
                for index in range(len(requests)):
                    yield index, Failed(Reason.ENGINE.value, 0, str(again))
                return
        try:
            async for index, verdict in handle.as_completed():
                yield index, verdict
        finally:
            handle.cancel()

    def compose(
        self,
        samples: Sequence[Sample],
        responses: Sequence[Response],
        rules: Sequence[Verdict],
        verdicts: Sequence[Verdict],
    ) -> list[Response]:
        """Return the responses of a whole group with their rewards. The penalty needs the group's median length."""
        shaped = shape(samples, rules, verdicts, self._config)
        rewarded = []
        for row, (response, rule, verdict) in enumerate(zip(responses, rules, shaped.verdicts, strict=True)):
            penalty = float(shaped.penalty[row])
            reward, raw = float(shaped.reward[row]), float(shaped.raw[row])
            if self._rule_only and isinstance(rule, Scored) and isinstance(verdict, Failed):
                reward, raw = rule.value - penalty, rule.value
            parts = {
                **rule.parts,
                "rule": rule_value(rule),
                "quality": float(shaped.quality[row]),
                "length_penalty": penalty,
                "judged": float(isinstance(verdicts[row], Scored)),
            }
            parts = {name: value for name, value in parts.items() if not math.isnan(value)}
            if isinstance(rule, Scored) and not isinstance(verdict, Failed):
                verdict = Scored(raw, parts=parts)
            else:
                verdict = msgspec.structs.replace(verdict, parts=parts)
            rewarded.append(_reward(response, verdict, reward, raw))
        return rewarded

    def stats(self) -> dict[str, Any]:
        """Return the judge's latest statistics. Empty without a judge and before its first request."""
        if self._judge is None or not self._judge.running:
            return {}
        found = self._judge.recent_stats()
        return {**found.to_dict(), **{name: getattr(found, name) for name in JUDGE_TOTALS}}

    async def close(self) -> None:
        await self._batches.close()
        if self._judge is not None:
            await in_thread(self._judge.close)


# -- what becomes of a group ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Again:
    """Score the failed responses again, after a pause."""

    delay_s: float


@dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """The settings `reward.retries` and `reward.on_failure`, and what they decide for a group. Pure."""

    retries: int
    fallback: float | None = None
    """The reward of a failed response. None masks it."""
    raises: bool = False

    @classmethod
    def of(cls, on_failure: str | Mapping[str, float], retries: int) -> GroupPolicy:
        """`on_failure`: `mask`, `raise`, or `fallback: NUMBER` as text or as a mapping."""
        if on_failure == "mask":
            return cls(retries=retries)
        try:
            policy = OnFailure.parse(on_failure)
        except ConfigError:
            policy = OnFailure()
        if policy.kind not in ("raise", "fallback"):
            raise ConfigError("reward.on_failure", on_failure, "choose mask, raise, or 'fallback: NUMBER'")
        fallback = policy.value if policy.kind == "fallback" else None
        return cls(retries=retries, fallback=fallback, raises=policy.kind == "raise")

    def decide(self, responses: Sequence[Response], failures: Sequence[Failed], tries: int) -> list[Response] | Again:
        """Return the responses to train on, or `Again`. `tries`: how often the group was scored again already.

        Raises `FatalRewardFailure`, or `ScoringFailed` if too few rewards are left for a baseline.
        """
        needed = min(MIN_SCORED, len(responses))
        lost = [_summary(one) for one in responses if _is_lost(one)]
        if self.raises and lost:
            raise FatalRewardFailure(
                f"{len(lost)} of {len(responses)} responses could not be scored, and reward.on_failure is 'raise': "
                f"{lost[0]}"
            )
        usable = sum(not math.isnan(one.reward) for one in responses)
        if usable < needed and failures and tries < self.retries:
            return Again(RETRY_DELAY_S * 2**tries)
        if self.fallback is not None:
            responses = [replace(one, reward=self.fallback) if _is_lost(one) else one for one in responses]
            usable += len(lost)
        if usable < needed:
            reasons = Counter(_summary(one) for one in responses if math.isnan(one.reward))
            raise ScoringFailed(
                f"{usable} of {len(responses)} responses have a reward after {tries + 1} tries: "
                + "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common()),
                reasons,
                is_infra=bool(failures) and all(failure.infra for failure in failures),
            )
        return list(responses)


def _is_lost(response: Response) -> bool:
    """Return whether scoring failed and no other number takes the reward's place."""
    return isinstance(response.verdict, Failed) and math.isnan(response.reward)


def _summary(response: Response) -> str:
    return response.verdict.summary if response.verdict is not None else ""


# -- statistics -------------------------------------------------------------------------------------------------------


class RewardCounts:
    """Counts of what happened, and log lines about failures. The caller gives the time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.scored = self.skipped = 0
        self.failed: Counter[str] = Counter()
        self.retried_groups = self.dropped_groups = 0
        self._latency_s = 0.0
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._broken_groups = 0
        self._first_failure = ""

    def run(self, busy: bool, now: float) -> None:
        """Count the time during which any response is in the stage."""
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        self._busy_since = now if busy else None

    def settled(self, failure: Failed | None, status: str, latency_s: float) -> None:
        self._latency_s += latency_s
        if failure is not None:
            self._log_failure(failure)
        elif status == "skipped":
            self.skipped += 1
        else:
            self.scored += 1

    def _log_failure(self, failure: Failed) -> None:
        """Log the first failure of a kind, the tenth, the hundredth and so on: a broken function fails every time."""
        self.failed[failure.reason] += 1
        count = self.failed[failure.reason]
        self._first_failure = self._first_failure or failure.summary
        if count == 1:
            where = f"\n{failure.trace.rstrip()}" if failure.trace else ""
            log.warning("Scoring failed (%s): %s%s", self._name, failure.summary, where)
        elif str(count).strip("0") == "1":
            log.warning("Scoring failed (%s) %d times by now: %s", self._name, count, failure.summary)

    def grouped(self, n: int, failures: Sequence[Failed]) -> None:
        """Report a function that has never scored anything as broken."""
        if self.scored or len(failures) < n or len({failure.reason for failure in failures}) > 1:
            return
        self._broken_groups += 1
        if self._broken_groups == BROKEN_GROUPS:
            log.error(
                "The reward function %s looks broken: nothing was scored so far, and every response of the first %d "
                "groups failed the same way: %s. Check reward.function against your data",
                *(self._name, BROKEN_GROUPS, failures[0].summary),
            )

    def snapshot(self, now: float) -> dict[str, Any]:
        settled = self.scored + self.skipped + self.failed.total()
        return {
            "scored": self.scored,
            "skipped": self.skipped,
            "failed": dict(self.failed),
            **({"first_failure": self._first_failure} if self._first_failure else {}),
            "retried_groups": self.retried_groups,
            "dropped_groups": self.dropped_groups,
            "mean_latency_s": self._latency_s / settled if settled else 0.0,
            "busy_s": self._busy_s + (now - self._busy_since if self._busy_since is not None else 0.0),
        }
