"""`RewardStage`: scores responses as they finish, beside generation, on the rollouter's event loop.

    GroupScoring.add ─▶ waiting ─▶ permit ─▶ function ─▶ judge ─▶ settled ─▶ all n of the group settled
      never waits       one of `concurrency`  rule       verdict                 │ rewards = rule + quality − penalty
                                                                                 ▼
                                      GroupPolicy: responses with rewards, another try, or ScoringFailed

A slow function or judge holds permits here, and never a generation slot. A batch function gets a whole group at once,
or what finishes within `LINGER_S`. Everything that becomes ready in one tick of the loop is submitted together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from freewheel.rollout.reward_workers import Executor, FunctionRunner, Job, in_thread

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
        for one in (self.rule, self.verdict):
            if isinstance(one, Failed):
                return one
        return None


class GroupScoring:
    """The scoring of one prompt's responses. `RewardStage.group` makes it."""

    def __init__(self, stage: RewardStage, ticket: Ticket, prompt: Prompt, n: int) -> None:
        self._stage = stage
        self._prompt = prompt
        self._result: asyncio.Future[list[Response]] = asyncio.get_running_loop().create_future()
        self._result.add_done_callback(_retrieve)
        self.ordinal = ticket.ordinal
        self.items: list[_Item | None] = [None] * n
        self.unsettled = n
        """Responses that are not added, or not scored yet."""
        self.tries = 0

    def add(self, index: int, text: str, response: Response) -> None:
        """Start the scoring of response `index`. Never waits."""
        assert self.items[index] is None, f"response {index} of prompt {self.ordinal} was added twice"
        self.items[index] = self._stage._admit(self, index, self._prompt, text, response)

    async def result(self) -> list[Response]:
        """Return all responses with their rewards, in the order of the indexes. Raises `ScoringFailed` or
        `FatalRewardFailure`. Cancelling the caller gives up the group."""
        return await self._result

    def cancel(self) -> None:
        """Give up the group: responses that wait for a permit are not scored."""
        self._result.cancel()

    @property
    def missing(self) -> int:
        """Responses that were not added."""
        return self.items.count(None)

    @property
    def over(self) -> bool:
        return self._result.done()

    def finish(self, rewarded: list[Response]) -> None:
        if not self.over:
            self._result.set_result(rewarded)

    def fail(self, error: Exception) -> None:
        if not self.over:
            self._result.set_exception(error)


def _retrieve(result: asyncio.Future[list[Response]]) -> None:
    """Retrieve the exception, so that asyncio does not warn: nobody awaits a group whose generation failed."""
    if not result.cancelled():
        result.exception()


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
        self._concurrency = concurrency
        self._policy = GroupPolicy.of(on_failure, retries)
        self._clock = clock
        self._runner = FunctionRunner(score, workers=workers, executor=executor, timeout_s=timeout_s)
        self._timers: set[asyncio.TimerHandle] = set()
        self._waiting: deque[_Item] = deque()
        self._pump_at: asyncio.Handle | None = None
        self._in_flight = 0
        self._groups: weakref.WeakSet[GroupScoring] = weakref.WeakSet()
        self._counts = RewardCounts(score.name)
        self._closed = False

    def group(self, ticket: Ticket, prompt: Prompt, n: int) -> GroupScoring:
        """Return the scoring of `n` responses to a prompt. Add each response when it finishes."""
        assert not self._closed, "the reward stage is closed"
        group = GroupScoring(self, ticket, prompt, n)
        self._groups.add(group)
        return group

    # -- permits ------------------------------------------------------------------------------------------------------

    def _admit(self, group: GroupScoring, index: int, prompt: Prompt, text: str, response: Response) -> _Item:
        tokens = response.tokens.tolist() if self.function.wants_tokens else ()
        call = Call(text=text, row=prompt.row, finish=response.finish, tokens=tokens)
        sample = None
        if self._judging is not None:
            sample = Sample(
                response=text,
                length=int(response.mask.sum()),  # without the tokens that the policy did not make
                group=group.ordinal,
                data_source=call.data_source,
                ground_truth=call.ground_truth,
                question=call.question,
                extra_info=call.extra_info,
            )
        item = _Item(group, index, response, call, sample, self._clock())
        self._queue([item], item.added_s)
        # The group does not hold this response yet, so a group that misses one is complete.
        lingers = self.function.is_batch and group.missing > 1
        self._pump_soon(LINGER_S if lingers else 0.0)
        return item

    def _queue(self, items: Sequence[_Item], now: float) -> None:
        self._counts.started(now, idle=self._in_flight == 0 and not self._waiting)
        self._waiting.extend(items)

    def _pump_soon(self, delay_s: float) -> None:
        """Call `_pump` in the next tick or after a linger, whichever was requested first."""
        if self._pump_at is not None:
            if delay_s or not isinstance(self._pump_at, asyncio.TimerHandle):
                return
            self._pump_at.cancel()
        loop = asyncio.get_running_loop()
        self._pump_at = loop.call_later(delay_s, self._pump) if delay_s else loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Give permits to waiting responses."""
        self._pump_at = None
        taken: list[_Item] = []
        while self._waiting and self._in_flight + len(taken) < self._concurrency:
            item = self._waiting.popleft()
            if not item.group.over:
                taken.append(item)
        self._in_flight += len(taken)
        self._note_idle()
        if self._closed:
            return
        fresh = [item for item in taken if item.rule is None]
        for item in taken:
            if item.rule is not None:  # in the last try only the judge failed
                self._judge(item)
        self._call([fresh] if self.function.is_batch and fresh else [[item] for item in fresh])

    def _note_idle(self) -> None:
        if self._in_flight == 0 and not self._waiting:
            self._counts.idle(self._clock())

    # -- one response -------------------------------------------------------------------------------------------------

    def _call(self, batches: Sequence[list[_Item]]) -> None:
        self._runner.submit([Job([item.call for item in batch], partial(self._scored, batch)) for batch in batches])

    def _scored(self, batch: list[_Item], verdicts: Sequence[Verdict]) -> None:
        """The function returned."""
        if self._closed:
            return
        first = verdicts[0]
        shared = isinstance(first, Failed) and first.reason != "timeout" and all(one is first for one in verdicts)
        if len(batch) > 1 and shared:
            # The batch failed as a whole, perhaps because of a single response. Score each response alone.
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
        """Return the permit of a scored response. The last response of a group decides the group."""
        self._in_flight -= 1
        assert item.rule is not None
        failure = item.failure
        self._counts.settled(failure, item.rule.status, self._clock() - item.added_s)
        status = item.rule.status if failure is None else failure.status
        trace.phase("score", item.group.ordinal, item.added_s, index=item.index, status=status)
        self._note_idle()
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
        except Exception as error:  # noqa: BLE001  # whoever awaits the group receives it
            item.group.fail(error)

    # -- a whole group ------------------------------------------------------------------------------------------------

    def _decide(self, group: GroupScoring) -> None:
        """All responses are settled: finish the group, score it again, or fail it."""
        items = [item for item in group.items if item is not None]
        failures = [(item, failure) for item in items if (failure := item.failure) is not None]
        if group.tries == 0:
            self._counts.grouped(len(items), [failure for _, failure in failures])
        decision = self._policy.decide(self._rewarded(items), [failure for _, failure in failures], group.tries)
        if not isinstance(decision, Again):
            group.finish(decision)
            return
        group.tries += 1
        self._counts.retried_groups += 1

        def score_again() -> None:
            self._timers.discard(timer)
            self._score_again(group, [item for item, _ in failures])

        timer = asyncio.get_running_loop().call_later(decision.delay_s, score_again)
        self._timers.add(timer)

    def _rewarded(self, items: Sequence[_Item]) -> list[Response]:
        rules = [item.rule for item in items if item.rule is not None]
        responses = [item.response for item in items]
        if self._judging is None:
            return [_reward(one, rule, rule_value(rule)) for one, rule in zip(responses, rules, strict=True)]
        samples = [item.sample for item in items if item.sample is not None]
        return self._judging.compose(samples, responses, rules, [item.verdict for item in items])

    def _score_again(self, group: GroupScoring, failures: Sequence[_Item]) -> None:
        """Score the failed responses again. Where only the judge failed, only the judge is asked again."""
        if group.over or self._closed:
            return
        now = self._clock()
        group.unsettled = len(failures)
        for item in failures:
            if not isinstance(item.rule, Scored):
                item.rule = None
            item.verdict, item.added_s = JUDGE_OFF, now
        self._queue(failures, now)
        self._pump_soon(0.0)

    # -- life ---------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        judge = {} if self._judging is None else self._judging.stats()
        return {
            "in_flight": self._in_flight,
            "waiting": len(self._waiting),
            "lost_threads": self._runner.lost_threads,
            "process_deaths": self._runner.process_deaths,
            **self._counts.snapshot(self._clock()),
            **({"judge": judge} if judge else {}),
        }

    async def close(self) -> None:
        """End threads, processes and the judge. Unfinished groups raise `ScoringFailed`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._pump_at is not None:
            self._pump_at.cancel()
        for timer in self._timers:
            timer.cancel()
        await self._runner.close()
        if self._judging is not None:
            await self._judging.close()
        await in_thread(_close_shared)
        for group in list(self._groups):
            group.fail(ScoringFailed("the reward stage was closed", {"closed": len(group.items)}))


def _close_shared() -> None:
    """Close what rules and `compute_score` keep for the whole process. Both start again when they are used again."""
    math_equal.close()
    shutdown_judges()


def _reward(response: Response, verdict: Verdict, reward: float, raw_reward: float | None = None) -> Response:
    return replace(response, verdict=verdict, reward=reward, raw_reward=reward if raw_reward is None else raw_reward)


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
        self._asked: list[tuple[JudgeRequest, Callable[[Verdict], None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._judge = Judge(config.judge_config()) if config.judges else None
        if config.lacks_key:
            log.warning(config.lacks_key)

    def ask(self, sample: Sample, rule: Verdict, then: Callable[[Verdict], None]) -> None:
        """Request a verdict; `then` receives it on the loop. Requests of one tick of the loop are sent as one batch."""
        if self._judge is None:
            then(JUDGE_OFF)
            return
        (request,) = judge_requests([sample], [rule], self._config)
        if request.skip:
            then(Skipped(request.skip))
            return
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._send)
        self._asked.append((request, then))

    def _send(self) -> None:
        asked, self._asked = self._asked, []
        task = asyncio.get_running_loop().create_task(self._collect(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _collect(self, asked: list[tuple[JudgeRequest, Callable[[Verdict], None]]]) -> None:
        assert self._judge is not None
        requests = [request for request, _ in asked]
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
                for _, then in asked:
                    then(Failed(Reason.ENGINE.value, 0, str(again)))
                return
        try:
            async for index, verdict in handle.as_completed():
                asked[index][1](verdict)
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
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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

    def started(self, now: float, *, idle: bool) -> None:
        if idle and self._busy_since is None:
            self._busy_since = now

    def idle(self, now: float) -> None:
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = None

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
