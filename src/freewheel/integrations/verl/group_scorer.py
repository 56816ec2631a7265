"""Judges rows and rewards each row with its group: `GroupScorer` in a reward worker, or one per run in a Ray actor.

    Row ─▶ RequestBatcher ─▶ Judge ─▶ Verdict ─▶ GroupCollector ─▶ group ─▶ combine ─▶ each row's reward
           waits 5 ms for others                 waits for the rows of its uid, or the deadline

    reward worker 0 ──put(rows)──▶ ┌──────────────────────────┐
                    ◀─take(seen)── │ GroupScorerActor:        │
    reward worker 7 ──put(rows)──▶ │ one judge, one collector │
                    ◀─take(seen)── └──────────────────────────┘

verl gives each row to a random worker, so only the actor sees whole groups; and one judge per worker would mean one
limit per worker. With `reward.num_workers=1` there is no actor.

`take` waits for any answered row of its worker. Answers are kept until the next `take` confirms them, so a lost reply
loses no row. If the actor dies, the next caller makes another one, and every row without an answer is put again. A row
that cannot be sent is put as a failed row.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import pickle
import statistics
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import ray  # type: ignore[import-not-found,unused-ignore]
from ray.exceptions import RayActorError  # type: ignore[import-not-found,unused-ignore]
from ray.util.scheduling_strategies import (  # type: ignore[import-not-found,unused-ignore]
    NodeAffinitySchedulingStrategy,
)

from freewheel.errors import FreewheelError
from freewheel.integrations.grouping import GATHER_S, Closed, GroupCollector, RequestBatcher
from freewheel.integrations.verl.rows import Row, results
from freewheel.integrations.verl.settings import Settings
from freewheel.judge import Judge
from freewheel.judge.verdict import Failed, Reason, Scored, Verdict
from freewheel.rewards.config import LengthPenaltyConfig
from freewheel.rewards.scoring import JUDGE_OFF, RULE_FAILED, combine

log = logging.getLogger("freewheel.integrations.verl")

CALLS_AT_ONCE = 10_000
"""Concurrent calls of the actor: one waiting `take` per worker, and `put`s, which do not wait."""
DEATHS = 8
"""After this many deaths of the actor without an answer in between, its rows are given up."""
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

_Judged = tuple[Row, Verdict]


class GroupScorer:
    """Rewards rows, each with its group. Belongs to one event loop; nothing starts before the first row."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = settings.length_penalty_config
        self._without_penalty = dataclasses.replace(self.config, enable=False, num_async_workers=None)
        self.judge = Judge(self.config.judge_config()) if self.config.judges else None
        self._batcher = RequestBatcher(self.judge) if self.judge is not None else None
        if settings.wants_judge and self.judge is None:
            _warn_without_key(self.config)
        self._collector: GroupCollector[_Judged] = GroupCollector(
            deadline_s=settings.group_deadline_s, settle_s=settings.settle_s, clock=clock
        )
        self._clock = clock
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._means: defaultdict[str, _RuleMeans] = defaultdict(_RuleMeans)
        self._log = RepeatedLog()

    async def reward(self, row: Row) -> dict[str, Any]:
        """Return verl's result for this row. A row that is submitted again while it waits is still one row."""
        answer = self._answers.get(row.id)
        if answer is None:
            answer = self._answers[row.id] = asyncio.get_running_loop().create_future()
            task = asyncio.ensure_future(self._judge_and_collect(row, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(answer)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.judge is not None:
            self.judge.close()

    async def _judge_and_collect(self, row: Row, answer: asyncio.Future[dict[str, Any]]) -> None:
        try:
            verdict = await self._verdict(row)
            # Only numbers matter from here on: a group that waits, or is remembered, holds no text.
            kept = dataclasses.replace(row, request=None, sample=dataclasses.replace(row.sample, response=""))
            closed = self._collector.join(row.sample.group, (kept, verdict), row.sizes)
            if closed is not None:
                self._answer(closed)
            self._set_timer()
        except Exception as error:  # noqa: BLE001  # raised where the row is awaited
            self._answers.pop(row.id, None)
            if not answer.done():
                answer.set_exception(error)

    async def _verdict(self, row: Row) -> Verdict:
        if row.failure:
            return Failed(RULE_FAILED.reason if row.rule is None else Reason.ENGINE.value, 0, row.failure)
        if row.request is None or self._batcher is None:
            return JUDGE_OFF
        try:
            verdict = await self._batcher.score(row.request)
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
        rows, verdicts = [row for row, _ in closed.rows], [verdict for _, verdict in closed.rows]
        waiting = rows[-closed.unanswered :]
        self._log_incomplete(closed)
        try:
            means = self._means[rows[0].sample.data_source]
            rules, accuracy = means.fill([row.rule for row in rows], fresh=closed.unanswered)
            config = self.config if closed.whole else self._without_penalty
            rewards = combine([row.sample for row in rows], rules, verdicts, config)
            found = results(rows, verdicts, rewards, accuracy, whole=closed.whole)[-closed.unanswered :]
        except Exception as error:  # noqa: BLE001  # each row's caller raises it, RewardFailed of on_failure among them
            for row in waiting:
                self._answers.pop(row.id).set_exception(error)
            return
        for row, result in zip(waiting, found, strict=True):
            answer = self._answers.pop(row.id)
            if not answer.done():
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


def _warn_without_key(config: LengthPenaltyConfig) -> None:
    remedy = f"Set {config.key_variable} where Ray is started, on every node (EMPTY for a server without keys)"
    if config.names_endpoint:
        message = f"a judge is named at {config.api_endpoint}, but there is no key for it: nothing is judged. {remedy}"
    else:
        message = f"a judge is asked for, but no api_endpoint is named: nothing is judged. Name it. {remedy}"
    log.warning(message)


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

_Answered = tuple[str, dict[str, Any] | Exception]
"""A row's id, and its result or what `on_failure: raise` raised."""


class ScorerLost(RuntimeError):
    """The run's actor cannot be kept alive."""


class GroupScorerActor:
    """The scorer as an actor. It ends with the worker that made it."""

    def __init__(self, settings: Settings) -> None:
        self._scorer = GroupScorer(settings)
        self._answered: defaultdict[str, dict[str, dict[str, Any] | Exception]] = defaultdict(dict)
        """By worker and row: answers that no `take` has confirmed."""
        self._news: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._tasks: set[asyncio.Task[None]] = set()

    async def put(self, worker: str, rows: Sequence[Row]) -> None:
        """Accept rows; `take` answers them. A row that is put again is still one row."""
        for row in rows:
            if row.id in self._answered[worker]:
                continue
            task = asyncio.ensure_future(self._reward(worker, row))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def take(self, worker: str, seen: Sequence[str]) -> list[_Answered]:
        """Return the answers to this worker's rows except those it has `seen`. Waits until there is one.

        It only reads, so a call whose caller is gone takes nothing from the next call.
        """
        answered, news = self._answered[worker], self._news[worker]
        for row_id in seen:
            answered.pop(row_id, None)
        while not answered:
            news.clear()
            await news.wait()
        return list(answered.items())

    async def _reward(self, worker: str, row: Row) -> None:
        answer: dict[str, Any] | Exception
        try:
            answer = await self._scorer.reward(row)
        except Exception as error:  # noqa: BLE001  # raised in the worker
            answer = _portable(error)
        self._answered[worker][row.id] = answer
        self._news[worker].set()


def _portable(error: Exception) -> Exception:
    """Return the error, or its text if it does not pickle: an unreadable answer would block all later answers."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # a class of exceptions may do anything there
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class SharedGroupScorer:
    """A worker's connection to the run's actor. Belongs to one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._me = uuid.uuid4().hex
        self._unanswered: dict[str, tuple[Row, asyncio.Future[dict[str, Any]]]] = {}
        self._not_put: list[Row] = []
        self._seen: list[str] = []
        """Answers that the actor still keeps for this worker."""
        self._actor: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._taking = False
        self._log = RepeatedLog()

    async def reward(self, row: Row) -> dict[str, Any]:
        """Return verl's result for this row. Raises `ScorerLost` if the actor keeps dying, or refuses the row."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._unanswered[row.id] = (row, answer)
        self._not_put.append(row)
        if not self._taking:
            self._taking = True
            self._start(self._take())
        if self._actor is not None and len(self._not_put) == 1:
            self._start(self._put_soon())
        return await answer

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # a loop holds its tasks weakly
        task.add_done_callback(self._tasks.discard)

    async def _put_soon(self) -> None:
        """Put the rows that come within a moment in one call."""
        await asyncio.sleep(GATHER_S)
        rows, self._not_put = self._not_put, []
        if rows and self._actor is not None:
            await self._put(self._actor, rows)

    async def _put(self, actor: Any, rows: Sequence[Row]) -> None:
        """Return when the actor has the rows. If it is dead, `_take` notices and puts them again elsewhere."""
        refused = False
        while rows and self._actor is actor:
            try:
                await actor.put.remote(self._me, rows)
                return
            except RayActorError:
                await asyncio.sleep(FIRST_PAUSE_S)
                rows = [row for row in rows if row.id in self._unanswered]
            except Exception as error:  # noqa: BLE001  # a row may not pickle: the row fails, and not the run
                if len(rows) > 1:  # send each row alone, so that only the culprit fails
                    await asyncio.gather(*(self._put(actor, [row]) for row in rows))
                    return
                if refused:
                    self._deliver([(rows[0].id, ScorerLost(str(error)))])
                    return
                self._log.failed("sending to the reward actor", error)
                refused, rows = True, [self._as_failed(rows[0], error)]

    def _as_failed(self, row: Row, error: Exception) -> Row:
        """Return the row without the values that do not pickle. It still joins its group and gets the mean."""
        failed = dataclasses.replace(
            row,
            rule=plain_rule(row.rule) if row.rule is not None else None,
            request=None,
            extra=dict.fromkeys(row.extra),
            failure=row.failure or f"{type(error).__name__}: {error}",
        )
        if row.id in self._unanswered:
            self._unanswered[row.id] = (failed, self._unanswered[row.id][1])
        return failed

    async def _take(self) -> None:
        """Take answers as long as a row waits."""
        deaths, pause_s = 0, FIRST_PAUSE_S
        try:
            while self._unanswered:
                try:
                    if self._actor is None:
                        self._actor = await asyncio.to_thread(self._find)  # Ray's own calls block
                        self._not_put = []
                        self._start(self._put(self._actor, [row for row, _ in self._unanswered.values()]))
                    answered = await self._actor.take.remote(self._me, self._seen)
                except (RayActorError, ValueError) as error:  # ValueError: the name went while Ray looked for it
                    self._actor = None
                    reason = str(error).partition("\n")[0]
                    deaths += 1
                    if deaths == DEATHS:
                        raise ScorerLost(reason) from error
                    log.warning("the reward actor is gone; %d rows are put again: %s", len(self._unanswered), reason)
                    await asyncio.sleep(pause_s)
                    pause_s *= 2
                else:
                    deaths, pause_s = 0, FIRST_PAUSE_S
                    self._seen = [row_id for row_id, _ in answered]
                    self._deliver(answered)
        except Exception as error:  # noqa: BLE001  # each row's caller raises it
            self._deliver([(row_id, error) for row_id in self._unanswered])
        finally:
            self._taking = False

    def _deliver(self, answered: Sequence[_Answered]) -> None:
        for row_id, found in answered:
            _, answer = self._unanswered.pop(row_id, (None, None))
            if answer is None or answer.done():  # the row was put twice, or its caller is gone
                continue
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

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
