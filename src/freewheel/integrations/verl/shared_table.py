"""One table for all reward workers of a run: a Ray actor that each of them finds by name.

    reward worker 0 ──put(rows)──▶ ┌────────────────────────┐
                    ◀─take(seen)── │ TableActor: one judge,  │
    reward worker 7 ──put(rows)──▶ │ one limit, one meeting  │
                    ◀─take(seen)── └────────────────────────┘
    `take` waits for: any row of this worker that is answered. Answers are kept until the next `take` says that they
    were seen, so a reply that is lost on its way loses no row. An actor that dies is made again by the next to ask, and
    every row that has no answer is put again. A row that cannot be sent is put as a failed one.

verl gives each row to a worker at random, so the rows of a group meet only outside them; and a judge a process would
mean as many limits as processes. With `reward.num_workers=1` there is no actor: `Table` runs in the worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import pickle
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import ray  # type: ignore[import-not-found,unused-ignore]
from ray.exceptions import RayActorError  # type: ignore[import-not-found,unused-ignore]
from ray.util.scheduling_strategies import (  # type: ignore[import-not-found,unused-ignore]
    NodeAffinitySchedulingStrategy,
)

from freewheel.integrations.gathering import GATHER_S
from freewheel.integrations.verl.rows import Row
from freewheel.integrations.verl.saying import Sayings
from freewheel.integrations.verl.settings import Settings
from freewheel.integrations.verl.table import Table, plain_rule

log = logging.getLogger("freewheel.integrations.verl")

CALLS_AT_ONCE = 10_000
"""Calls that the actor runs at once: one `take` a worker that waits, and `put`s, which do not."""
DEATHS = 8
"""How many times in a row the actor may die, nothing answered in between, before its rows are given up."""
FIRST_PAUSE_S = 0.1
"""After the first death; doubled each time, 25 s in all. Ray needs a moment to forget a dead actor's name."""

Answered = tuple[str, dict[str, Any] | Exception]
"""A row's id, and its reward or what `on_failure: raise` raised."""


class TableLost(RuntimeError):
    """The run's table cannot be kept alive."""


class TableActor:
    """The table as an actor. It ends with the worker that made it."""

    def __init__(self, settings: Settings) -> None:
        self._table = Table(settings)
        self._answered: defaultdict[str, dict[str, dict[str, Any] | Exception]] = defaultdict(dict)
        """By worker and row: what no `take` has acknowledged yet."""
        self._news: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._tasks: set[asyncio.Task[None]] = set()

    async def put(self, worker: str, rows: Sequence[Row]) -> None:
        """Rows come. They are answered by `take`. One that comes again is still one row."""
        for row in rows:
            if row.id in self._answered[worker]:
                continue
            task = asyncio.ensure_future(self._reward(worker, row))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def take(self, worker: str, seen: Sequence[str]) -> list[Answered]:
        """The answers to this worker's rows less those it has `seen`; waits until there is one.

        One whose caller is gone takes nothing from the next: it only reads.
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
            answer = await self._table.reward(row)
        except Exception as error:  # noqa: BLE001  # raised again in the worker
            answer = _portable(error)
        self._answered[worker][row.id] = answer
        self._news[worker].set()


def _portable(error: Exception) -> Exception:
    """The error, or its words where it does not pickle: an answer that cannot be read would hold up all after it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # what an exception's own class does there is anybody's guess
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class SharedTable:
    """A worker's way to the run's table. On one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._me = uuid.uuid4().hex
        self._unanswered: dict[str, tuple[Row, asyncio.Future[dict[str, Any]]]] = {}
        self._not_put: list[Row] = []
        self._seen: list[str] = []
        """Answers that the actor still keeps for us."""
        self._actor: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._taking = False
        self._sayings = Sayings()

    async def reward(self, row: Row) -> dict[str, Any]:
        """Raises `TableLost` where the actor died again and again, or does not take the row."""
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
        """Puts what comes within a moment, in one call."""
        await asyncio.sleep(GATHER_S)
        rows, self._not_put = self._not_put, []
        if rows and self._actor is not None:
            await self._put(self._actor, rows)

    async def _put(self, actor: Any, rows: Sequence[Row]) -> None:
        """Returns when the actor has them. If it is dead, `_take` finds out, and puts them again elsewhere."""
        refused = False
        while rows and self._actor is actor:
            try:
                await actor.put.remote(self._me, rows)
                return
            except RayActorError:
                await asyncio.sleep(FIRST_PAUSE_S)
                rows = [row for row in rows if row.id in self._unanswered]
            except Exception as error:  # noqa: BLE001  # what a row holds may not pickle: the row fails, and not the run
                if len(rows) > 1:  # one of them, and the others are not to pay for it
                    await asyncio.gather(*(self._put(actor, [row]) for row in rows))
                    return
                if refused:
                    self._deliver([(rows[0].id, TableLost(str(error)))])
                    return
                self._sayings.failed("sending to the reward actor", error)
                refused, rows = True, [self._fail(rows[0], error)]

    def _fail(self, row: Row, error: Exception) -> Row:
        """The row without what may not travel: it still meets its group, and gets its mean."""
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
        """Runs while a row waits."""
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
                    told = str(error).partition("\n")[0]
                    deaths += 1
                    if deaths == DEATHS:
                        raise TableLost(told) from error
                    log.warning("the reward actor is gone; %d rows are put again: %s", len(self._unanswered), told)
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

    def _deliver(self, answered: Sequence[Answered]) -> None:
        for row_id, found in answered:
            _, answer = self._unanswered.pop(row_id, (None, None))
            if answer is None or answer.done():  # a row that was put twice, or whose caller is gone
                continue
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

    def _find(self) -> Any:
        context = ray.get_runtime_context()
        return (
            ray.remote(TableActor)
            .options(
                name=f"freewheel-rewards-{context.get_job_id()}-{self._settings.identity()}",
                get_if_exists=True,
                num_cpus=0,
                max_concurrency=CALLS_AT_ONCE,
                # Where the worker is: a key in the environment is known to be there.
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=context.get_node_id(), soft=True),
            )
            .remote(self._settings)
        )
