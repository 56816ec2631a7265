"""`Judge`: hands batches to an engine that runs elsewhere, and gives back handles. The package's front door.

with Judge(JudgeConfig(endpoint=…, model=…)) as judge:
    handle = judge.submit(requests)      # returns at once, from any thread
    …                                    # the GPU goes on
    verdicts = handle.result()
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, Self

import msgspec

from freewheel.judge.asking import FROM_CONFIG, Requests, as_requests, deadline_at_of
from freewheel.judge.config import JudgeConfig
from freewheel.judge.desk import Desk
from freewheel.judge.errors import JudgeClosed
from freewheel.judge.handle import Handle
from freewheel.judge.process_link import ProcessLink
from freewheel.judge.stats import JudgeStats
from freewheel.judge.verdict import Verdict

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
        from freewheel.judge.thread_link import ThreadLink  # brings the HTTP client into this process

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
