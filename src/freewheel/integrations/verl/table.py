"""The table at which rows are judged and meet their group. One a run: in the reward worker, or in an actor for all.

Row ─▶ Gathering ─▶ Judge ─▶ Verdict ─▶ Meeting ─▶ group ─▶ combine ─▶ each row's reward
       waits for: others, 5 ms          waits for: the rows of its uid, or the deadline
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from freewheel.errors import FreewheelError
from freewheel.integrations.gathering import Gathering
from freewheel.integrations.meeting import Closed, Meeting
from freewheel.integrations.verl.rows import Row, results
from freewheel.integrations.verl.saying import Sayings
from freewheel.integrations.verl.settings import Settings
from freewheel.judge import Judge
from freewheel.judge.verdict import Failed, Reason, Scored, Verdict
from freewheel.rewards.config import LengthPenaltyConfig
from freewheel.rewards.scoring import JUDGE_OFF, RULE_FAILED, combine

log = logging.getLogger("freewheel.integrations.verl")

Judged = tuple[Row, Verdict]


class Table:
    """Rewards rows, each with its group. On one event loop; nothing starts before the first row."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = settings.rewards()
        self._without_penalty = dataclasses.replace(self.config, enable=False, num_async_workers=None)
        self.judge = Judge(self.config.judge_config()) if self.config.judges else None
        self._gathering = Gathering(self.judge) if self.judge is not None else None
        if settings.wants_judge and self.judge is None:
            _say_why_no_judge(self.config)
        self._meeting: Meeting[Judged] = Meeting(
            deadline_s=settings.group_deadline_s, settle_s=settings.settle_s, clock=clock
        )
        self._clock = clock
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._means: dict[str, _Means] = {}
        self._sayings = Sayings()

    async def reward(self, row: Row) -> dict[str, Any]:
        """What verl gets for this row. A row that is asked for again while it waits is still one row."""
        answer = self._answers.get(row.id)
        if answer is None:
            answer = self._answers[row.id] = asyncio.get_running_loop().create_future()
            task = asyncio.ensure_future(self._work(row, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(answer)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.judge is not None:
            self.judge.close()

    async def _work(self, row: Row, answer: asyncio.Future[dict[str, Any]]) -> None:
        try:
            verdict = await self._verdict(row)
            # From here on only the numbers matter; a group that waits, or is remembered, holds no text.
            kept = dataclasses.replace(row, request=None, sample=dataclasses.replace(row.sample, response=""))
            closed = self._meeting.join(row.sample.group, (kept, verdict), row.sizes)
            if closed is not None:
                self._answer(closed)
            self._set_timer()
        except Exception as error:  # noqa: BLE001  # raised again where the row is awaited
            self._answers.pop(row.id, None)
            if not answer.done():
                answer.set_exception(error)

    async def _verdict(self, row: Row) -> Verdict:
        if row.failure:
            return Failed(RULE_FAILED.reason if row.rule is None else Reason.ENGINE.value, 0, row.failure)
        if row.request is None or self._gathering is None:
            return JUDGE_OFF
        try:
            verdict = await self._gathering.score(row.request)
        except (FreewheelError, OSError) as error:  # the engine could not be started, or was closed
            verdict = Failed(Reason.ENGINE.value, 0, str(error))
        if isinstance(verdict, Failed):
            self._sayings.failed(f"judge: {verdict.reason}", verdict.detail)
        return verdict

    def _set_timer(self) -> None:
        """One timer for all groups. No group is due earlier than `settle_s` from its last row, so none is missed."""
        due_at = self._meeting.next_due_at() if self._timer is None else math.inf
        if due_at < math.inf:
            wait_s = min(max(0.0, due_at - self._clock()), self._meeting.settle_s)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._time_is_over)

    def _time_is_over(self) -> None:
        self._timer = None
        for closed in self._meeting.due():
            self._answer(closed)
        self._set_timer()

    def _answer(self, closed: Closed[Judged]) -> None:
        """Rewards a group and answers those of its rows that wait."""
        rows, verdicts = [row for row, _ in closed.rows], [verdict for _, verdict in closed.rows]
        fresh = rows[-closed.unanswered :]
        self._say(closed)
        try:
            means = self._means.setdefault(rows[0].sample.data_source, _Means())
            rules, accuracy = means.fill([row.rule for row in rows], fresh=closed.unanswered)
            config = self.config if closed.whole else self._without_penalty
            rewards = combine([row.sample for row in rows], rules, verdicts, config)
            told = results(rows, verdicts, rewards, accuracy, whole=closed.whole)[-closed.unanswered :]
        except Exception as error:  # noqa: BLE001  # each row's caller raises it; RewardFailed is what on_failure asked for
            for row in fresh:
                self._answers.pop(row.id).set_exception(error)
            return
        for row, result in zip(fresh, told, strict=True):
            answer = self._answers.pop(row.id)
            if not answer.done():
                answer.set_result(result)

    def _say(self, closed: Closed[Judged]) -> None:
        if closed.whole:
            return
        if closed.late:
            log.warning(
                "uid %s: %d rows came when the others of this uid had been answered; no length penalty for them",
                closed.key,
                closed.unanswered,
            )
        else:
            log.warning(
                "uid %s: %d of %d rows came, and no other for %g s; they are scored without the length penalty",
                closed.key,
                len(closed.rows),
                closed.expected,
                self._meeting.deadline_s,
            )


def _say_why_no_judge(config: LengthPenaltyConfig) -> None:
    remedy = f"Set {config.key_variable} where Ray is started, on every node (EMPTY for a server without keys)"
    if config.names_endpoint:
        told = f"a judge is named at {config.api_endpoint}, but there is no key for it: nothing is judged. {remedy}"
    else:
        told = f"a judge is asked for, but no api_endpoint is named: nothing is judged. Name it. {remedy}"
    log.warning(told)


class _Means:
    """The rule scores of one data source so far: what a row is taken for whose whole group has none."""

    def __init__(self) -> None:
        self._count = 0
        self._value = 0.0
        self._accuracy = 0.0

    def fill(self, rules: Sequence[Scored | None], *, fresh: int) -> tuple[list[Scored], list[float]]:
        """A score and an accuracy for every row: where `compute_score` raised, the mean of its group's, or of all."""
        known = [rule for rule in rules if rule is not None]
        for rule in rules[-fresh:]:
            if rule is not None:
                self._count += 1
                self._value += (rule.value - self._value) / self._count
                self._accuracy += (accuracy_of(rule) - self._accuracy) / self._count
        value = statistics.fmean(rule.value for rule in known) if known else self._value
        accuracy = statistics.fmean(map(accuracy_of, known)) if known else self._accuracy
        return (
            [rule if rule is not None else Scored(value) for rule in rules],
            [accuracy_of(rule) if rule is not None else accuracy for rule in rules],
        )


def plain_rule(rule: Scored) -> Scored:
    """What a table needs of it. The rest of a user's dict may be large, or not even fit into a pickle."""
    return Scored(rule.value, parts={"acc": accuracy_of(rule)}, format=rule.format)


def accuracy_of(rule: Scored) -> float:
    """verl's core metric of a validation: the dict's own `acc`, or the score."""
    try:
        found = float(rule.parts["acc"])
    except (KeyError, TypeError, ValueError):
        return rule.value
    return found if math.isfinite(found) else rule.value
