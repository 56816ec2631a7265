"""The judge's API: `Judge` scores batches in another process or thread, `InlineJudge` on the caller's event loop.

    with Judge(JudgeConfig(endpoint=…, model=…)) as judge:
        handle = judge.submit(requests)      # returns at once, from any thread
        …                                    # the GPU continues
        verdicts = handle.result()

    async with InlineJudge(JudgeConfig(endpoint=…, model=…)) as judge:
        verdicts = await judge.score(requests)

Training uses `Judge`, because a blocked loop blocks an `InlineJudge`. The gateway and the synchronous reward path use
`InlineJudge`.
"""

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
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from freewheel.errors import ConfigError
from freewheel.judge.config import JudgeConfig
from freewheel.judge.request import JudgeRequest
from freewheel.judge.stats import JudgeStats
from freewheel.judge.tracker import Handle, RequestTracker
from freewheel.judge.transport import Link
from freewheel.judge.verdict import JudgeClosed, Verdict
from freewheel.utils.checks import check_number

if TYPE_CHECKING:
    from freewheel.judge.engine import Request

log = logging.getLogger("freewheel.judge")

_CLOSE_TIMEOUT_S = 5.0
"""How long `close` may take: it closes connections and writes the cache."""
STATS_TIMEOUT_S = 2.0
"""How long `stats` waits. An engine that takes longer is busy or dead, and its last statistics are returned."""
_FROM_CONFIG: Final = -1.0
"""Default of `deadline_s`: the config's `batch_deadline_s`."""

Requests = Iterable[JudgeRequest | str | Mapping[str, str]]


def as_requests(requests: Requests) -> list[JudgeRequest]:
    """Check a batch and convert it to requests. A plain string is a response without a question."""
    if isinstance(requests, str | bytes | Mapping) or not isinstance(requests, Iterable):
        raise ConfigError("requests", requests, "give several: a list, even for one")
    return [r if type(r) is JudgeRequest and _is_plain(r) else _as_request(i, r) for i, r in enumerate(requests)]


def _is_plain(r: JudgeRequest) -> bool:
    """Whether all fields are text that UTF-8 can carry. (Encoding is much faster than a search for surrogates.)"""
    if not type(r.response) is type(r.prompt) is type(r.reference) is type(r.id) is type(r.skip) is str:
        return False
    try:
        return "".join((r.response, r.prompt, r.reference, r.id, r.skip)).encode() is not None
    except UnicodeEncodeError:
        return False


def _as_request(index: int, given: object) -> JudgeRequest:
    key = f"requests[{index}]"
    if isinstance(given, str):
        given = {"response": given}
    elif isinstance(given, JudgeRequest):
        given = msgspec.structs.asdict(given)
    if not isinstance(given, Mapping):
        raise ConfigError(key, given, "give a JudgeRequest, a response as text, or a mapping of its fields")
    fields = JudgeRequest.__struct_fields__
    for name, value in given.items():
        if name not in fields:
            raise ConfigError(f"{key}.{name}", value, f"unknown field; known are {', '.join(fields)}")
        if not isinstance(value, str) and not (name == "id" and type(value) is int):
            raise ConfigError(f"{key}.{name}", value, "give text")
    if "response" not in given:
        raise ConfigError(f"{key}.response", None, "it is missing; give the text to judge")
    # str.__str__ makes plain text of a subclass such as numpy's: only plain text can be sent.
    texts = {name: str(value) if isinstance(value, int) else str.__str__(value) for name, value in given.items()}
    return JudgeRequest(**texts).encodable()


def _deadline_at(deadline_s: float | None, config: JudgeConfig) -> float | None:
    """Return the deadline in `time.monotonic()` seconds; None means no limit."""
    if deadline_s is _FROM_CONFIG:
        deadline_s = config.batch_deadline_s
    elif deadline_s is not None:
        check_number("deadline_s", deadline_s, above=0, optional=True)
    return time.monotonic() + deadline_s if deadline_s is not None else None


class Judge:
    """Scores responses with an LLM judge. The first use starts the engine; `close` leaves nothing behind.

    Safe from any thread and any number of event loops. Pickled or forked, it becomes a separate judge with the same
    config. The key is not pickled: the other process reads it from its environment.
    """

    _link: Link | None = None

    def __init__(self, config: JudgeConfig | Mapping[str, Any]) -> None:
        self.config = config if isinstance(config, JudgeConfig) else JudgeConfig.from_dict(config)
        self._reset()
        _judges.add(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a signal handler may close while its thread holds the lock
        self._tracker = RequestTracker()
        self._link = None
        self._closed = False

    def start(self) -> Self:
        """Start the engine now instead of at the first `submit`. Does nothing if it is running."""
        with self._lock:
            self._check_open()
            if self._link is None:
                link = self._link = Link(self.config, self._tracker)
                try:
                    link.start()
                except BaseException:  # Ctrl-C may come while the thread starts: do not leave the thread behind
                    self._link = None
                    link.join(_CLOSE_TIMEOUT_S)
                    raise
        return self

    def submit(self, requests: Requests, *, deadline_s: float | None = _FROM_CONFIG) -> Handle:
        """Submit a batch and return at once. A plain string is a response without a question.

        `deadline_s` overrides the config's `batch_deadline_s` for this batch; None means no limit.
        """
        batch = as_requests(requests)
        deadline_at = _deadline_at(deadline_s, self.config)
        if batch:
            self.start()
        else:
            self._check_open()
        handle = self._tracker.submit(batch, deadline_at)
        handle.judge = self
        return handle

    def _check_open(self) -> None:
        if self._closed:
            raise JudgeClosed("the judge is closed; make another one")

    async def score(self, requests: Requests, *, deadline_s: float | None = _FROM_CONFIG) -> list[Verdict]:
        """Submit and wait, without blocking the loop. Cancelling the caller cancels the batch."""
        handle = self.submit(requests, deadline_s=deadline_s)
        try:
            return await handle
        finally:
            handle.cancel()

    @property
    def pending(self) -> int:
        """Number of batches that are not done."""
        return len(self._tracker.open_handles())

    @property
    def running(self) -> bool:
        """True from the start of the engine until `close`."""
        return self._link is not None and not self._closed

    def stats(self) -> JudgeStats:
        """Return the engine's statistics. They are zero before the first use, and the last ones after closing."""
        if self.running:
            try:
                self._tracker.ask_stats().result(STATS_TIMEOUT_S)
            except concurrent.futures.TimeoutError:
                log.warning("the judge's engine sent no statistics within %.3g s; these are older", STATS_TIMEOUT_S)
        return self._last_stats()

    def recent_stats(self) -> JudgeStats:
        """Return the engine's last known statistics without waiting, and request newer ones for the next call."""
        if self.running:
            self._tracker.ask_stats()
        return self._last_stats()

    def _last_stats(self) -> JudgeStats:
        return msgspec.structs.replace(self._tracker.last_stats, restarts=self._tracker.restarts)

    def close(self, *, drain: bool = False, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """End the engine. Open batches end as cancelled; `drain` waits up to `timeout_s` for them first.

        Idempotent. A judge that was never used closes at once.
        """
        with self._lock:
            link = self._link
            if self._closed or link is None:
                self._closed = True
                return
        if drain:
            until = time.monotonic() + timeout_s
            for handle in self._tracker.open_handles():
                handle.wait(max(0.0, until - time.monotonic()))
        self._closed = True
        self._tracker.end(JudgeClosed("the judge was closed"))
        link.join(timeout_s)

    def __del__(self) -> None:
        if self._link is not None:
            self._link.end()

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

    def _become_a_forks(self) -> None:
        """Reset this judge in a forked process: the engine belongs to the parent. This copy starts another one when it
        is used."""
        if self._link is not None:
            self._link.forget()
        closed = self._closed
        self._reset()
        self._closed = closed


_judges: weakref.WeakSet[Judge] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for judge in list(_judges):
        judge.close()


def _after_fork() -> None:
    for judge in list(_judges):
        judge._become_a_forks()


os.register_at_fork(after_in_child=_after_fork)


class InlineJudge:
    """Scores requests on the event loop that started it, with the same verdicts as `Judge`."""

    def __init__(self, config: JudgeConfig, *, spent: float = 0.0) -> None:
        """`spent`: the part of `max_cost` that others have spent."""
        from freewheel.judge.engine import JudgeEngine  # imports aiohttp

        self.config = config
        self.engine = JudgeEngine(config, deliver=self._deliver, spent=spent)
        self._numbers = itertools.count()
        self._open: dict[int, Handle] = {}
        self._running = False

    async def start(self) -> Self:
        await self.engine.start()
        self._running = True
        return self

    async def close(self) -> None:
        """End the engine. Open requests end as `Failed("cancelled")`."""
        self._running = False
        await self.engine.close()

    async def score(self, requests: Requests, *, deadline_s: float | None = _FROM_CONFIG) -> list[Verdict]:
        """Return one verdict per request, in their order. Cancelling the caller cancels the batch."""
        return await self.ask(as_requests(requests), _deadline_at(deadline_s, self.config))

    async def ask(self, batch: Sequence[Request], deadline_at: float | None = None) -> list[Any]:
        """Do the same as `score` for requests that are known to be well-formed, including chat completions."""
        if not self._running:
            raise JudgeClosed("the judge is not running; use it within `async with`")
        handle = Handle(next(self._numbers), batch, deadline_at, lambda handle: self.engine.cancel(handle.batch))
        self._open[handle.batch] = handle
        try:
            self.engine.submit(handle.batch, range(len(batch)), batch, deadline_at)
            return await handle
        finally:
            handle.cancel()
            del self._open[handle.batch]

    def stats(self) -> JudgeStats:
        return self.engine.stats()

    @property
    def share_done(self) -> float:
        """Share of the requests of all open batches that are done."""
        progress = [handle.progress() for handle in self._open.values()]
        return sum(one.done for one in progress) / (sum(one.total for one in progress) or 1) if progress else 1.0

    def _deliver(self, number: int, index: int, verdict: Any) -> None:
        handle = self._open[number]
        handle.put(index, verdict)
        handle.wake()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
