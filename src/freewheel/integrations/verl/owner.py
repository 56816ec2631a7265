"""One table for all reward workers of a run: a Ray actor that each of them finds by name.

    reward worker 0 ──put(rows)──▶ ┌────────────────────────┐
                    ◀─take()────── │ TableActor: one judge,  │
    reward worker 7 ──put(rows)──▶ │ one limit, one meeting  │
                    ◀─take()────── └────────────────────────┘
    `take` waits for: any row of this worker that is answered. An actor that dies is made again by the next to ask, and
    every row that has no answer is put again.

verl gives each row to a worker at random, so the rows of a group meet only outside them; and a judge a process would
mean as many limits as processes. With `reward.num_workers=1` there is no actor: `Table` runs in the worker.
"""

from __future__ import annotations

import asyncio
import logging
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
from freewheel.integrations.verl.settings import Settings
from freewheel.integrations.verl.table import Table

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
        self._answered: defaultdict[str, list[Answered]] = defaultdict(list)
        self._news: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._tasks: set[asyncio.Task[None]] = set()

    async def put(self, worker: str, rows: Sequence[Row]) -> None:
        """Rows come. They are answered by `take`."""
        for row in rows:
            task = asyncio.ensure_future(self._reward(worker, row))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def take(self, worker: str) -> list[Answered]:
        """The answers to this worker's rows since the last time; waits until there is one."""
        await self._news[worker].wait()
        self._news[worker].clear()
        return self._answered.pop(worker, [])

    async def _reward(self, worker: str, row: Row) -> None:
        answer: dict[str, Any] | Exception
        try:
            answer = await self._table.reward(row)
        except Exception as error:  # noqa: BLE001  # raised again in the worker
            answer = error
        self._answered[worker].append((row.id, answer))
        self._news[worker].set()


class SharedTable:
    """A worker's way to the run's table. On one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._me = uuid.uuid4().hex
        self._unanswered: dict[str, tuple[Row, asyncio.Future[dict[str, Any]]]] = {}
        self._not_put: list[Row] = []
        self._actor: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._taking = False

    async def reward(self, row: Row) -> dict[str, Any]:
        """Raises `TableLost` where the actor died again and again."""
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
        """Puts what comes within a moment, in one call. If the actor is dead, `_take` finds out and puts it again."""
        await asyncio.sleep(GATHER_S)
        rows, self._not_put = self._not_put, []
        if rows and self._actor is not None:
            self._actor.put.remote(self._me, rows)

    async def _take(self) -> None:
        """Runs while a row waits."""
        deaths, pause_s = 0, FIRST_PAUSE_S
        try:
            while self._unanswered:
                try:
                    if self._actor is None:
                        self._actor = await asyncio.to_thread(self._find)  # Ray's own calls block
                        self._not_put = []
                        self._actor.put.remote(self._me, [row for row, _ in self._unanswered.values()])
                    answered = await self._actor.take.remote(self._me)
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
