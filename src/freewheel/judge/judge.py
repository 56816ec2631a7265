"""The front door: `Judge` scores batches in an engine that runs elsewhere, `InlineJudge` on the caller's event loop."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import msgspec

from freewheel.errors import ConfigError
from freewheel.judge.config import JudgeConfig
from freewheel.judge.request import JudgeRequest
from freewheel.judge.stats import JudgeStats
from freewheel.judge.tracker import Desk, Handle
from freewheel.judge.transport import ProcessLink, ThreadLink
from freewheel.judge.verdict import JudgeClosed, Verdict
from freewheel.utils.checks import check_number

if TYPE_CHECKING:
    from freewheel.judge.engine import Request

FROM_CONFIG: Final = -1.0
"""A batch's deadline where the caller gives none: the config's `batch_deadline_s`."""

Requests = Iterable[JudgeRequest | str | Mapping[str, str]]


def as_requests(requests: Requests) -> list[JudgeRequest]:
    """The batch as requests. A plain string is a response without a question."""
    if isinstance(requests, str | bytes | Mapping) or not isinstance(requests, Iterable):
        raise ConfigError("requests", requests, "give several: a list, even for one")
    return [r if type(r) is JudgeRequest and _all_text(r) else _request(i, r) for i, r in enumerate(requests)]


def deadline_at_of(deadline_s: float | None, config: JudgeConfig) -> float | None:
    """In `time.monotonic()` seconds; None: no limit."""
    if deadline_s is FROM_CONFIG:
        deadline_s = config.batch_deadline_s
    elif deadline_s is not None:
        check_number("deadline_s", deadline_s, above=0, optional=True)
    return time.monotonic() + deadline_s if deadline_s is not None else None


def _all_text(r: JudgeRequest) -> bool:
    return type(r.response) is type(r.prompt) is type(r.reference) is type(r.id) is type(r.skip) is str


def _request(index: int, given: object) -> JudgeRequest:
    try:
        if isinstance(given, str):
            return JudgeRequest(str.__str__(given))
        if isinstance(given, JudgeRequest):
            given = msgspec.structs.asdict(given)
        if isinstance(given, Mapping):
            unknown = sorted(set(given) - set(JudgeRequest.__struct_fields__))
            if unknown:
                known = ", ".join(JudgeRequest.__struct_fields__)
                raise ConfigError(
                    f"requests[{index}].{unknown[0]}", given[unknown[0]], f"unknown field; known are {known}"
                )
            if type(given.get("id")) is int:
                given = {**given, "id": str(given["id"])}
            for key, value in given.items():
                if not isinstance(value, str):
                    raise ConfigError(f"requests[{index}].{key}", value, "give text")
            # str() makes plain text of a subclass, as numpy has one: only that can travel.
            return JudgeRequest(**{key: str.__str__(value) for key, value in given.items()})
    except TypeError as error:
        raise ConfigError(f"requests[{index}]", given, str(error)) from None
    raise ConfigError(
        f"requests[{index}]", given, "give a JudgeRequest, a response as text, or a mapping of its fields"
    )


log = logging.getLogger("freewheel.judge")

CLOSE_TIMEOUT_S = 5.0
"""How long a shutdown may take: connections are closed and the cache is written out."""
STATS_TIMEOUT_S = 2.0
"""An engine that does not answer by then is busy or dead; its last figures are given instead."""


class Link(Protocol):
    """Where the engine lives, and the way to it."""

    def start(self) -> None: ...
    def join(self, timeout_s: float) -> None: ...
    def abandon(self) -> None: ...
    def forget(self) -> None: ...


class Judge:
    """Scores responses with an LLM judge. Nothing happens until the first use; closing it leaves nothing behind.

    Safe from any thread and any number of event loops. Pickled or forked, it becomes a judge of its own with the same
    config (the key is not pickled; the other process reads it from its environment).
    """

    def __init__(self, config: JudgeConfig | Mapping[str, Any]) -> None:
        self.config = config if isinstance(config, JudgeConfig) else JudgeConfig.from_dict(config)
        self._reset()
        _judges.add(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a signal handler may close while its thread is in here
        self._desk = Desk()
        self._link: Link | None = None
        self._closed = False
        self._finalizer: weakref.finalize[..., Any] | None = None

    def start(self) -> Self:
        """Starts the engine now instead of at the first submit. Does nothing if it runs."""
        with self._lock:
            if self._closed:
                raise JudgeClosed("the judge is closed; make another one")
            if self._link is None:
                link = self._make_link()
                link.start()
                self._link = link
                self._finalizer = weakref.finalize(self, _abandon, link, os.getpid())
                self._finalizer.atexit = False  # _close_all does it, for all at once
        return self

    def _make_link(self) -> Link:
        if self.config.placement == "process":
            return ProcessLink(self.config, self._desk)
        return ThreadLink(self.config, self._desk)

    def submit(self, requests: Requests, *, deadline_s: float | None = FROM_CONFIG) -> Handle:
        """Hands a batch over and returns at once. A plain string is a response without a question.

        `deadline_s` overrides the config's `batch_deadline_s` for this batch (None: no limit).
        """
        batch = as_requests(requests)
        deadline_at = deadline_at_of(deadline_s, self.config)
        if batch:
            self.start()
        elif self._closed:
            raise JudgeClosed("the judge is closed; make another one")
        handle = self._desk.submit(batch, deadline_at)
        handle.judge = self  # a judge that nobody holds is closed; one with an open batch is held by its handle
        return handle

    async def score(self, requests: Requests, *, deadline_s: float | None = FROM_CONFIG) -> list[Verdict]:
        """Submit and wait, without blocking the loop. Cancelling the caller cancels the batch."""
        handle = self.submit(requests, deadline_s=deadline_s)
        try:
            return await handle
        finally:
            handle.cancel()

    @property
    def pending(self) -> int:
        """Batches that are not done."""
        return len(self._desk.open_handles())

    @property
    def running(self) -> bool:
        """True from the start of the engine until `close`."""
        return self._link is not None and not self._closed

    def stats(self) -> JudgeStats:
        """What the engine did so far. Zeros before the first use, the last figures after closing."""
        if self.running:
            answer = self._desk.ask_stats()
            try:
                answer.result(STATS_TIMEOUT_S)
            except concurrent.futures.TimeoutError:
                log.warning("the judge's engine gave no figures within %.3g s; these are older", STATS_TIMEOUT_S)
        return msgspec.structs.replace(self._desk.last_stats, restarts=self._desk.restarts)

    def recent_stats(self) -> JudgeStats:
        """The figures that the engine gave last, at once; others are asked for, and are there the next time."""
        if self.running and not self._desk.asked_for_stats:
            self._desk.ask_stats()
        return msgspec.structs.replace(self._desk.last_stats, restarts=self._desk.restarts)

    def close(self, *, drain: bool = False, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ends the engine. `drain` waits up to `timeout_s` for open batches; what is left then ends as cancelled.

        Idempotent; a judge that was never used closes at once.
        """
        with self._lock:
            if self._closed:
                return
            link = self._link
            if link is None:
                self._closed = True
                return
        if drain:
            until = time.monotonic() + timeout_s
            for handle in self._desk.open_handles():
                handle.wait(max(0.0, until - time.monotonic()))
        self._closed = True
        if self._finalizer is not None:
            self._finalizer.detach()
        self._desk.close("the judge was closed")
        link.join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._link is not None else "not started"
        urls = ", ".join(endpoint.url for endpoint in self.config.endpoints)
        return f"<Judge {self.config.model} at {urls}: {state}>"

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["config"])  # type: ignore[misc]

    def _forked(self) -> None:
        """In a forked process: the engine is the parent's; this copy starts its own when it is used."""
        if self._link is not None:
            self._link.forget()
        if self._finalizer is not None:
            self._finalizer.detach()
        closed = self._closed
        self._reset()
        self._closed = closed


_judges: weakref.WeakSet[Judge] = weakref.WeakSet()


def _abandon(link: Link, pid: int) -> None:
    if pid == os.getpid():
        link.abandon()


def _close_all() -> None:
    for judge in list(_judges):
        judge.close()


def _forked_all() -> None:
    for judge in list(_judges):
        judge._forked()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forked_all)


class InlineJudge:
    """Scores requests on the loop that started it, with the verdicts that `Judge` would give."""

    def __init__(self, config: JudgeConfig, *, spent: float = 0.0) -> None:
        """`spent`: what others have spent of `max_cost`."""
        from freewheel.judge.engine import Engine  # brings the HTTP client

        self.config = config
        self.engine = Engine(config, deliver=self._deliver, spent=spent)
        self._numbers = itertools.count()
        self._open: dict[int, _Waiting] = {}
        self._running = False

    async def start(self) -> Self:
        try:
            await self.engine.start()
        except BaseException:
            await self.engine.close()
            raise
        self._running = True
        return self

    async def close(self) -> None:
        """What is open ends as `Failed("cancelled")`."""
        self._running = False
        await self.engine.close()

    async def score(self, requests: Requests, *, deadline_s: float | None = FROM_CONFIG) -> list[Verdict]:
        """One verdict a request, in their order. Cancelling the caller cancels the batch."""
        return await self.ask(as_requests(requests), deadline_at_of(deadline_s, self.config))

    async def ask(self, batch: Sequence[Request], deadline_at: float | None = None) -> list[Any]:
        """`score` for requests that are known to be well-formed, chat completions among them."""
        if not self._running:
            raise JudgeClosed("the judge is not running; use it within `async with`")
        if not batch:
            return []
        number = next(self._numbers)
        waiting = self._open[number] = _Waiting(len(batch))
        try:
            self.engine.submit(number, range(len(batch)), batch, deadline_at)
            await waiting.done.wait()
            return waiting.verdicts
        finally:
            if waiting.missing:
                self.engine.cancel(number)
            del self._open[number]

    def stats(self) -> JudgeStats:
        return self.engine.stats()

    @property
    def share_done(self) -> float:
        """Of the requests of all batches that are open."""
        total = sum(len(waiting.verdicts) for waiting in self._open.values())
        return 1 - sum(waiting.missing for waiting in self._open.values()) / total if total else 1.0

    def _deliver(self, number: int, index: int, verdict: Any) -> None:
        waiting = self._open[number]
        waiting.verdicts[index] = verdict
        waiting.missing -= 1
        if not waiting.missing:
            waiting.done.set()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class _Waiting:
    """One batch: its verdicts so far."""

    __slots__ = ("done", "missing", "verdicts")

    def __init__(self, count: int) -> None:
        self.verdicts: list[Any] = [None] * count
        self.missing = count
        self.done = asyncio.Event()
