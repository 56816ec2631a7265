"""Judges rows and rewards each row with its group: `GroupScorer` in a reward worker, or one per run in a Ray actor.

    DecodedRow ─▶ Judge ─▶ Verdict ─▶ GroupCollector ─▶ group ─▶ combine ─▶ each row's reward
                               waits for the rows of its uid, or the deadline

    reward worker 0 ──reward(row)──▶ ┌──────────────────────────┐
                                     │ GroupScorerActor:        │
    reward worker 7 ──reward(row)──▶ │ one judge, one collector │
                                     └──────────────────────────┘

verl gives each row to a random worker, so only the actor sees whole groups; and one judge per worker would mean one
limit per worker. With `reward.num_workers=1` there is no actor.

If the actor dies, the next caller makes another one, and every row without an answer is sent again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import statistics
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray  # type: ignore[import-not-found,unused-ignore]
from ray.exceptions import RayActorError, RayTaskError  # type: ignore[import-not-found,unused-ignore]
from ray.util.scheduling_strategies import (  # type: ignore[import-not-found,unused-ignore]
    NodeAffinitySchedulingStrategy,
)

from freewheel.errors import FreewheelError
from freewheel.integrations.grouping import Closed, GroupCollector
from freewheel.integrations.verl.rows import DecodedRow, results
from freewheel.integrations.verl.settings import Settings
from freewheel.judge import Judge
from freewheel.judge.verdict import Failed, Reason, Scored, Verdict
from freewheel.rewards.scoring import JUDGE_OFF, RULE_FAILED, combine

log = logging.getLogger("freewheel.integrations.verl")

CALLS_AT_ONCE = 100_000
"""Concurrent calls of the actor: one per row that waits."""
ANSWERS_KEPT = 16_384
"""Rows whose answers the actor keeps, in case the reply is lost and the row is sent again."""
DEATHS = 8
"""After this many deaths of the actor a row is given up."""
FIRST_PAUSE_S = 0.1
"""After the first death; doubled each time, 25 s in all. Ray needs a moment to forget a dead actor's name."""


class RepeatedLog:
    """Logs events that happen to many rows: a warning once, a failure the first time, the tenth and so on."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._failures: Counter[str] = Counter()

    def once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            log.warning(message)

    def failed(self, kind: str, detail: object) -> None:
        """Count one more failed row of this kind. An exception is logged with its traceback the first time."""
        self._failures[kind] += 1
        count = self._failures[kind]
        if str(count).strip("0") == "1":
            trace = detail if isinstance(detail, Exception) and count == 1 else None
            log.error(
                "%s: %d rows failed so far; each gets its group's mean and judge_status=failed: %s",
                kind,
                count,
                detail,
                exc_info=trace,
            )


# -- in one process ---------------------------------------------------------------------------------------------------


class _Judged(NamedTuple):
    """A row that waits for its group."""

    row: DecodedRow
    verdict: Verdict
    answer: asyncio.Future[dict[str, Any]]


class GroupScorer:
    """Rewards rows, each with its group. Belongs to one event loop; nothing starts before the first row."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = settings.length_penalty_config
        self._without_penalty = dataclasses.replace(self.config, enable=False, num_async_workers=None)
        self.judge = Judge(self.config.judge_config()) if self.config.judges else None
        if settings.wants_judge and self.judge is None:
            log.warning(
                "%s where Ray is started, on every node (EMPTY for a server without keys)", self.config.lacks_key
            )
        self._collector: GroupCollector[_Judged] = GroupCollector(
            deadline_s=settings.group_deadline_s, settle_s=settings.settle_s, clock=clock
        )
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._means: defaultdict[str, _RuleMeans] = defaultdict(_RuleMeans)
        self._log = RepeatedLog()

    async def reward(self, row: DecodedRow) -> dict[str, Any]:
        """Return verl's result for this row. A caller that is cancelled does not take its row from the group."""
        return await asyncio.shield(self._reward(row))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.judge is not None:
            self.judge.close()

    async def _reward(self, row: DecodedRow) -> dict[str, Any]:
        verdict = await self._verdict(row)
        # Only numbers matter from here on: a group that waits, or is remembered, holds no text.
        kept = dataclasses.replace(row, request=None)
        judged = _Judged(kept, verdict, asyncio.get_running_loop().create_future())
        closed = self._collector.join(row.sample.group, judged, row.sizes)
        if closed is not None:
            self._answer(closed)
        self._set_timer()
        return await judged.answer

    async def _verdict(self, row: DecodedRow) -> Verdict:
        if row.failure:
            return Failed(RULE_FAILED.reason if row.rule is None else Reason.ENGINE.value, 0, row.failure)
        if row.request is None or self.judge is None:
            return JUDGE_OFF
        try:
            if not self.judge.running:
                await asyncio.to_thread(self.judge.start)  # it starts a process, which would block the loop
            [verdict] = await self.judge.score([row.request])
        except (FreewheelError, OSError) as error:  # the engine could not be started, or was closed
            verdict = Failed(Reason.ENGINE.value, 0, str(error))
        if isinstance(verdict, Failed):
            self._log.failed(f"judge: {verdict.reason}", verdict.detail)
        return verdict

    def _set_timer(self) -> None:
        """Set one timer for all groups. No group is due within `settle_s` of its last row, so none is missed."""
        due_at = self._collector.next_due_at() if self._timer is None else math.inf
        if due_at < math.inf:
            wait_s = min(max(0.0, due_at - self._clock()), self._collector.settle_s)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._answer_due)

    def _answer_due(self) -> None:
        self._timer = None
        for closed in self._collector.due():
            self._answer(closed)
        self._set_timer()

    def _answer(self, closed: Closed[_Judged]) -> None:
        """Reward a group and answer its waiting rows."""
        rows, verdicts = [judged.row for judged in closed.rows], [judged.verdict for judged in closed.rows]
        waiting = [judged.answer for judged in closed.rows[-closed.unanswered :]]
        self._log_incomplete(closed)
        try:
            means = self._means[rows[0].sample.data_source]
            rules, accuracy = means.fill([row.rule for row in rows], fresh=closed.unanswered)
            config = self.config if closed.whole else self._without_penalty
            rewards = combine([row.sample for row in rows], rules, verdicts, config)
            found = results(rows, rewards, accuracy, whole=closed.whole)[-closed.unanswered :]
        except Exception as error:  # noqa: BLE001  # each row's caller raises it, RewardFailed of on_failure among them
            for answer in waiting:
                answer.set_exception(error)
            return
        for answer, result in zip(waiting, found, strict=True):
            answer.set_result(result)

    def _log_incomplete(self, closed: Closed[_Judged]) -> None:
        if closed.whole:
            return
        if closed.late:
            log.warning(
                "uid %s: %d rows came after the others of this uid had been answered; they get no length penalty",
                closed.key,
                closed.unanswered,
            )
        else:
            log.warning(
                "uid %s: %d of %d rows came, and no other for %g s; they are scored without the length penalty",
                closed.key,
                len(closed.rows),
                closed.expected,
                self._collector.deadline_s,
            )


class _RuleMeans:
    """The mean rule score of one data source so far, for a row whose whole group has no rule score."""

    def __init__(self) -> None:
        self._count = 0
        self._value = 0.0
        self._accuracy = 0.0

    def fill(self, rules: Sequence[Scored | None], *, fresh: int) -> tuple[list[Scored], list[float]]:
        """Return a score and an accuracy for every row: its own, else the group's mean, else the mean of all rows."""
        known = [rule for rule in rules if rule is not None]
        for rule in rules[-fresh:]:
            if rule is not None:
                self._count += 1
                self._value += (rule.value - self._value) / self._count
                self._accuracy += (_accuracy(rule) - self._accuracy) / self._count
        value = statistics.fmean(rule.value for rule in known) if known else self._value
        accuracy = statistics.fmean(map(_accuracy, known)) if known else self._accuracy
        return (
            [rule if rule is not None else Scored(value) for rule in rules],
            [_accuracy(rule) if rule is not None else accuracy for rule in rules],
        )


def plain_rule(rule: Scored) -> Scored:
    """Return only what scoring needs. The rest of a user's dict may be large, or may not pickle."""
    return Scored(rule.value, parts={"acc": _accuracy(rule)}, format=rule.format)


def _accuracy(rule: Scored) -> float:
    """Return verl's core metric of a validation: the dict's own `acc`, or the score."""
    try:
        found = float(rule.parts["acc"])
    except (KeyError, TypeError, ValueError):
        return rule.value
    return found if math.isfinite(found) else rule.value


# -- in an actor ------------------------------------------------------------------------------------------------------


class ScorerLost(RuntimeError):
    """The run's actor cannot be kept alive."""


class GroupScorerActor:
    """The scorer as an actor. It ends with the worker that made it."""

    def __init__(self, settings: Settings) -> None:
        self._scorer = GroupScorer(settings)
        self._answers: OrderedDict[str, asyncio.Future[dict[str, Any]]] = OrderedDict()

    async def reward(self, row: DecodedRow) -> dict[str, Any]:
        """Return verl's result for this row. A row that is sent again, because the reply was lost, is still one row."""
        if row.id not in self._answers:
            self._answers[row.id] = asyncio.ensure_future(self._scorer.reward(row))
            if len(self._answers) > ANSWERS_KEPT:
                self._answers.popitem(last=False)
        return await asyncio.shield(self._answers[row.id])


class SharedGroupScorer:
    """A worker's connection to the run's actor. Belongs to one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._actor: Any = None
        self._finding = asyncio.Lock()
        self._log = RepeatedLog()

    async def reward(self, row: DecodedRow) -> dict[str, Any]:
        """Return verl's result for this row. Raises `ScorerLost` if the actor keeps dying."""
        actor, pause_s, reason = None, FIRST_PAUSE_S, ""
        for _ in range(DEATHS):
            try:
                actor = await self._live_actor(dead=actor)
                answer: dict[str, Any] = await actor.reward.remote(row)
                return answer
            except RayTaskError as error:
                raise error.cause from None  # what `on_failure: raise` raised
            except (RayActorError, ValueError) as error:  # ValueError: the name went while Ray looked for it
                reason = str(error).partition("\n")[0]
                self._log.once(f"the reward actor is gone; its rows are sent again: {reason}")
                await asyncio.sleep(pause_s)
                pause_s *= 2
        raise ScorerLost(reason)

    async def _live_actor(self, dead: Any) -> Any:
        async with self._finding:
            if self._actor is None or self._actor is dead:
                self._actor = await asyncio.to_thread(self._find)  # Ray's own calls block
            return self._actor

    def _find(self) -> Any:
        context = ray.get_runtime_context()
        return (
            ray.remote(GroupScorerActor)
            .options(
                name=f"freewheel-rewards-{context.get_job_id()}-{self._settings.identity()}",
                get_if_exists=True,
                num_cpus=0,
                max_concurrency=CALLS_AT_ONCE,
                # On this worker's node, where the environment is known to hold the key.
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=context.get_node_id(), soft=True),
            )
            .remote(self._settings)
        )
