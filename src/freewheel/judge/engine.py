"""The engine: every request that is submitted ends as exactly one verdict. It lives on one event loop.

    submit ─▶ memory cache ─▶ single flight ─▶ disk cache ─▶ ready ─▶ choose endpoint ─▶ call ─▶ parse ─▶ deliver
                                                               ▲                          │
                                                               └─ back-off (no slot) ◀────┘ failed or unparseable

Requests of equal content share one `InFlightRequest`. It lives as long as anyone waits for it, and ends once. Requests
wait in `ready` for a free slot. The next calls are sent when a call ends, or when a back-off or a pause is over.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from freewheel.judge.cache import ReplyCache
from freewheel.judge.client import ChatClient, open_connector
from freewheel.judge.config import JudgeConfig
from freewheel.judge.endpoint import NEVER, EndpointState, Permit, choose_endpoint
from freewheel.judge.outcome import FINAL, HALTS, REASONS, WAITS, CallFailure, FailureKind, Reply
from freewheel.judge.pacing import backoff_s
from freewheel.judge.parse import Unparseable
from freewheel.judge.request import (
    ChatExchange,
    ChatRequest,
    Exchange,
    Identity,
    JudgeRequest,
    Relayed,
    RubricExchange,
)
from freewheel.judge.stats import JudgeStats
from freewheel.judge.verdict import Failed, Reason, Scored, Skipped, Usage, without_surrogates

log = logging.getLogger("freewheel.judge")

_SWEEP_S = 0.025
"""How often time limits are checked. Deadlines are met to within 100 ms, including the delivery of the verdict."""
_MOST_STALE = 2
"""How often a request may hit a connection that the server had already closed; after that it counts as a fault. The
pool may hold several such connections."""
_ELSEWHERE_S = 0.1
"""Pause before a request is tried at another endpoint, which may be full for a moment."""

LAG_WARN_S = 0.05
"""A mean delay of the event loop worth a warning: it is more than the network round trip to most judges."""
LAG_SMOOTHING = 1 / 128
"""Weight of one measurement of that delay: about three seconds of memory."""
_LAG_WARN_EVERY_S = 60.0
_STATS_EVERY_S = 60.0
"""How often a working engine logs its statistics."""
_REMEMBER_EVERY_S = 5.0
"""How often the limiters' memory is written: a kill -9 loses at most this much of it."""

Request = JudgeRequest | ChatRequest
EngineAnswer = Scored | Relayed | Failed | Skipped

Deliver = Callable[[int, int, Any], None]
"""Receives (batch, index, verdict): a `Verdict` for a `JudgeRequest`, `Relayed` or `Failed` for a chat completion."""


class Batch:
    """The requests of one handle that the engine has not answered yet."""

    def __init__(self, identity: int) -> None:
        self.id = identity
        self.open: dict[int, InFlightRequest] = {}
        self.timer: asyncio.TimerHandle | None = None


class InFlightRequest:
    """One content on its way to a verdict, and everyone who waits for it."""

    def __init__(self, request: Request, exchange: Exchange, identity: Identity, now: float) -> None:
        self.request: Any = request
        self.exchange = exchange
        self.key, self.size, self.keep_as, self.most_tokens, self.patient = identity
        self.held_s = 0.0
        """Time that the judge waited for this request's client."""
        self.committed = False
        """Its client has part of the answer: it cannot be repeated, and no time limit applies."""
        self.queued_at = now
        self.waiters: list[tuple[Batch, int, float]] = []
        """(batch, index, since when)."""
        self.calls = self.faults = self.throttles = self.timeouts = self.stales = self.asks = 0
        self.deadline_at = NEVER
        self.permit: Permit | None = None
        """The permit of the call under way."""
        self.overdue = False
        """`JudgeEngine._end_overdue` cancelled the call because it took too long."""
        self.task: asyncio.Task[None] | None = None
        self.avoid: EndpointState | None = None
        """The endpoint where it just failed. It is not sent there again before `avoid_until`."""
        self.avoid_until = -NEVER
        self.last = ""
        """The last failure, for the verdict's detail."""
        self.usage = Usage()
        self.done = False

    def commit(self) -> None:
        self.committed = True
        self.deadline_at = NEVER

    def is_overdue(self, now: float) -> bool:
        """True if its call has lasted longer than is now allowed for that endpoint."""
        permit = self.permit
        if permit is None or self.committed:
            return False
        patience = permit.endpoint.patience
        return now - permit.sent_at >= (patience.bound_s if self.patient else patience.allow_s(self.timeouts))


class JudgeEngine:
    """Judges requests on the running loop. `deliver` receives each verdict, in the order in which they are reached."""

    def __init__(
        self,
        config: JudgeConfig,
        *,
        deliver: Deliver,
        answered_all: Callable[[], None] = lambda: None,
        spent: float = 0.0,
    ) -> None:
        """`answered_all` is called when no batch is open any more.

        `spent`: the part of `max_cost` that others have spent.
        """
        self._config = config
        self._deliver = deliver
        self._answered_all = answered_all
        self._spent_before = spent
        self._stats = JudgeStats()
        self._batches: dict[int, Batch] = {}
        self._inflight: dict[bytes, InFlightRequest] = {}
        self._ready: deque[InFlightRequest] = deque()
        self._started: set[InFlightRequest] = set()
        """Requests that have been sent at least once: their deadlines run."""
        self._busy = asyncio.Event()
        """Set while a batch is open."""
        self._lag_s = 0.0
        """Smoothed delay of this event loop."""
        self._backing_off = 0
        self._calls_out = 0
        self._wake_timer: asyncio.TimerHandle | None = None
        self._wake_at = NEVER
        self._down_since: float | None = None
        self._replies = ReplyCache(config)
        self._exchanges: dict[type, Exchange] = {}
        self._endpoints: list[EndpointState] = []
        self._connector: aiohttp.TCPConnector | None = None
        self._clients: dict[EndpointState, ChatClient] = {}
        self._tending: asyncio.Task[None] | None = None
        self._closing = False

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        config = self._config
        self._loop = asyncio.get_running_loop()
        try:
            self._replies.open()
            self._exchanges = {
                JudgeRequest: RubricExchange(config, self._replies.secret()),
                ChatRequest: ChatExchange(config),
            }
            self._connector = open_connector(config)
            for endpoint in config.endpoints:
                state = EndpointState(config, endpoint, self._replies.recall(endpoint.url))
                self._endpoints.append(state)
                self._clients[state] = ChatClient(self._connector, config, endpoint)
        except BaseException:
            await self.close()
            raise
        self._tending = self._loop.create_task(self._tend())

    async def close(self) -> None:
        """End open requests as `Failed("cancelled")`, close connections and write the cache."""
        self._closing = True
        tasks = [inflight.task for inflight in self._started if inflight.task is not None]
        if self._tending is not None:
            self._tending.cancel()
            tasks.append(self._tending)
        for batch in list(self._batches.values()):
            self.cancel(batch.id)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        for client in self._clients.values():
            await client.close()
        if self._connector is not None:
            await self._connector.close()
        self._remember()
        self._replies.close()

    async def _tend(self) -> None:
        """Keep time limits, measure this loop's delay, log statistics, and keep the limiters' memory on disk."""
        warned_at, logged, remembered_at = -_LAG_WARN_EVERY_S, 0, time.monotonic()
        log_at = remembered_at + _STATS_EVERY_S
        while True:
            await self._busy.wait()
            due = time.monotonic() + _SWEEP_S
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            self._end_overdue(now)
            self._pump()
            self._lag_s += LAG_SMOOTHING * (now - due - self._lag_s)
            if self._lag_s > LAG_WARN_S and now - warned_at > _LAG_WARN_EVERY_S:
                warned_at = now
                remedy = "the machine has no spare core, or other code blocks this loop"
                if self._config.placement == "thread":
                    remedy = "this process's Python code starves its thread; use placement='process'"
                log.warning("the judge's event loop runs %.0f ms late on average: %s", self._lag_s * 1e3, remedy)
            if now >= log_at:
                log_at = now + _STATS_EVERY_S
                if self._stats.submitted > logged:
                    logged = self._stats.submitted
                    log.info(self.stats().line())
            if now - remembered_at > _REMEMBER_EVERY_S:
                remembered_at = now
                self._remember()

    def _remember(self) -> None:
        """Write what the limiters learned, for the next run."""
        for endpoint in self._endpoints:
            self._replies.remember(endpoint.url, endpoint.limiter.memory())

    # -- requests in --------------------------------------------------------------------------------------------------

    def submit(
        self, batch_id: int, indexes: Sequence[int], requests: Sequence[Request], deadline_at: float | None = None
    ) -> None:
        """Take requests of a batch. `deadline_at` is in `time.monotonic()` seconds."""
        batch = self._batches.get(batch_id)
        if batch is None:
            batch = self._open_batch(batch_id, deadline_at)
        self._stats.submitted += len(requests)
        fresh: list[InFlightRequest] = []
        now = time.monotonic()
        for index, request in zip(indexes, requests, strict=True):
            inflight = self._admit(batch, index, request, now)
            if inflight is not None:
                fresh.append(inflight)
        if not batch.open:
            self._close_batch(batch)
        if not fresh:
            return
        found = self._replies.on_disk([inflight.key for inflight in fresh if inflight.keep_as == inflight.key])
        for inflight in fresh:
            cached = found.get(inflight.key)
            answer = inflight.exchange.revive(cached) if cached is not None else None
            if answer is None:
                self._ready.append(inflight)
            else:
                self._stats.cache_hits_disk += 1
                self._settle(inflight, answer)
        self._pump()

    def cancel(self, batch_id: int) -> None:
        """End the open requests of a batch as `Failed("cancelled")`. Calls that others wait for continue."""
        batch = self._batches.get(batch_id)
        if batch is not None:
            self._abandon(batch, Reason.CANCELLED, "")

    def stats(self) -> JudgeStats:
        return msgspec.structs.replace(
            self._stats,
            failed=dict(self._stats.failed),
            queued=len(self._ready) + self._backing_off,
            cost_before=self._spent_before,
            loop_lag_s=round(self._lag_s, 4),
            endpoints=[endpoint.snapshot() for endpoint in self._endpoints],
        )

    @property
    def spent(self) -> float:
        return self._spent_before + sum(endpoint.stats.cost for endpoint in self._endpoints)

    def _open_batch(self, batch_id: int, deadline_at: float | None) -> Batch:
        batch = self._batches[batch_id] = Batch(batch_id)
        self._busy.set()
        if deadline_at is not None:
            left_s = max(0.0, deadline_at - time.monotonic())
            why = "the batch's deadline is over; "
            batch.timer = self._loop.call_later(left_s, self._abandon, batch, Reason.DEADLINE, why)
        for endpoint in self._endpoints:
            endpoint.reconsider()
        return batch

    def _admit(self, batch: Batch, index: int, request: Request, now: float) -> InFlightRequest | None:
        """Answer from memory, join an equal request, or return a new one."""
        if type(request) is JudgeRequest and request.skip:
            self._answer(batch, index, Skipped(request.skip))
            return None
        exchange = self._exchanges[type(request)]
        identity = exchange.identify(request)
        key = identity.key
        if not self._config.cache:
            key += batch.id.to_bytes(8, "big")  # only equal requests of one batch share a call
            identity = identity._replace(key=key, keep_as=key if identity.keep_as else None)
        cached = self._replies.in_memory(key)
        answer = exchange.revive(cached) if cached is not None else None
        if answer is not None:
            self._stats.cache_hits_memory += 1
            self._answer(batch, index, answer)
            return None
        inflight = joined = self._inflight.get(key)
        if inflight is None:
            inflight = self._inflight[key] = InFlightRequest(request, exchange, identity, now)
        else:
            self._stats.shared += 1
        inflight.waiters.append((batch, index, now))
        batch.open[index] = inflight
        return inflight if joined is None else None

    # -- calls out ----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send every request that may be sent now, and schedule the next call for when more may be sent."""
        now = time.monotonic()
        ready = self._ready
        while ready:
            inflight = ready[0]
            if inflight.done:
                ready.popleft()
                continue
            endpoint, wake_at = choose_endpoint(
                self._endpoints, now, inflight.size, inflight.avoid, inflight.avoid_until
            )
            if endpoint is None and inflight.avoid_until > now and len(self._endpoints) > 1:
                # other requests may use the endpoint that this one avoids, so send them first
                self._send_after(_ELSEWHERE_S, ready.popleft())
            elif endpoint is None:
                if self._calls_out == 0 or self._down_since is not None:
                    self._give_up(now)
                if ready and wake_at < self._wake_at:
                    self._wake_later(wake_at, now)
                return
            elif not self._is_over_budget(endpoint, inflight):
                self._send(ready.popleft(), endpoint, now)
            elif self._calls_out:
                return  # wait: calls in flight may cost less than their reservation
            else:
                detail = f"max_cost = {self._config.max_cost:g} is reached ({self.spent:.6g} spent)"
                self._fail(ready.popleft(), Reason.BUDGET, detail)

    def _send(self, inflight: InFlightRequest, endpoint: EndpointState, now: float) -> None:
        if inflight.calls == 0:
            inflight.deadline_at = now + self._config.request_deadline_s
            self._started.add(inflight)
        inflight.calls += 1
        self._calls_out += 1
        self._stats.max_in_flight = max(self._stats.max_in_flight, self._calls_out)
        permit = endpoint.send(now, inflight.size, inflight.most_tokens)
        inflight.task = self._loop.create_task(self._call(inflight, permit))

    async def _call(self, inflight: InFlightRequest, permit: Permit) -> None:
        endpoint = permit.endpoint
        if inflight.done:  # abandoned before its call began
            self._drop(permit)
            return
        inflight.permit = permit
        outcome: Reply | CallFailure
        try:
            outcome = await inflight.exchange.call(self._clients[endpoint], endpoint.model, inflight)
        except asyncio.CancelledError:
            if inflight.done or not inflight.overdue:
                self._drop(permit)
                raise
            inflight.overdue = False  # `_end_overdue` ended the call
            waited_s = time.monotonic() - permit.sent_at
            outcome = CallFailure(FailureKind.TIMEOUT, f"{endpoint.url}: no reply within {waited_s:.3g} s")
        except Exception as error:  # a bug: this request fails, the others continue
            log.exception("a call to the judge broke")
            self._drop(permit)
            self._fail(inflight, Reason.ENGINE, f"{type(error).__name__}: {error}")
            return
        inflight.task = None
        inflight.permit = None
        self._calls_out -= 1
        now = time.monotonic()
        if isinstance(outcome, Reply):
            endpoint.replied(permit.without(inflight.held_s), now, outcome, inflight.size)
            if self._down_since is not None:
                self._watch_outage(now, "")
            self._read(inflight, outcome)
        else:
            if outcome.kind is FailureKind.STALE and inflight.stales >= _MOST_STALE:
                outcome = outcome._replace(kind=FailureKind.BROKEN)
            failure = endpoint.failed(permit, now, outcome)
            self._watch_outage(now, failure.detail)
            self._retry_or_fail(inflight, permit, failure, now)
        self._pump()

    def _drop(self, permit: Permit) -> None:
        """Nobody waits for this call any more."""
        self._calls_out -= 1
        permit.endpoint.dropped(permit, time.monotonic())
        if not self._closing:
            self._loop.call_soon(self._pump)

    def _read(self, inflight: InFlightRequest, reply: Reply) -> None:
        """Settle the request with the reply's score, or ask again if the reply has none."""
        inflight.usage += reply.usage
        try:
            answer = inflight.exchange.read(inflight, reply)
        except Unparseable as error:
            inflight.asks += 1
            if inflight.asks <= self._config.reasks:
                self._stats.reasks += 1
                self._ready.appendleft(inflight)
            else:
                self._fail(inflight, Reason.UNPARSEABLE, str(error))
            return
        if inflight.keep_as is not None and not reply.cut_off:
            self._replies.keep(inflight.keep_as, reply)
        self._settle(inflight, answer)

    def _retry_or_fail(self, inflight: InFlightRequest, permit: Permit, failure: CallFailure, now: float) -> None:
        """One call failed: try elsewhere, wait and try again, or give up, depending on the failure's kind."""
        kind, endpoint = failure.kind, permit.endpoint
        inflight.last, inflight.avoid = failure.detail, endpoint
        if endpoint.halted is failure:
            log.error("nothing more is sent to the judge: %s", failure.detail)
        if kind is FailureKind.STALE:
            inflight.stales += 1
        elif kind in WAITS:
            inflight.throttles += 1
        elif kind not in HALTS:
            inflight.faults += not permit.probe  # the endpoint was known to be down: not this request's fault
            inflight.timeouts += kind is FailureKind.TIMEOUT
        gives_up = kind in FINAL or inflight.committed or inflight.faults >= self._config.max_attempts
        if gives_up or (kind in HALTS and all(other.halted is not None for other in self._endpoints)):
            self._fail(inflight, REASONS[kind], failure.detail)
            return
        if kind is FailureKind.STALE or kind in HALTS:
            self._stats.retries += 1
            self._ready.appendleft(inflight)
            return
        failures = inflight.throttles if kind in WAITS else max(1, inflight.faults)
        wait_s = backoff_s(failures, failure.retry_after_s, random.random)
        if any(other.works() for other in self._endpoints if other is not endpoint):
            inflight.avoid_until = now + wait_s
            wait_s = min(wait_s, _ELSEWHERE_S)
        if now + wait_s >= inflight.deadline_at:
            left_s = inflight.deadline_at - now
            detail = f"{failure.detail} (next try in {wait_s:.3g} s, deadline in {left_s:.3g} s)"
            self._fail(inflight, REASONS[kind], detail)
            return
        self._stats.retries += 1
        self._send_after(wait_s, inflight)

    def _send_after(self, wait_s: float, inflight: InFlightRequest) -> None:
        self._backing_off += 1
        self._loop.call_later(wait_s, self._send_again, inflight)

    def _send_again(self, inflight: InFlightRequest) -> None:
        self._backing_off -= 1
        if not inflight.done:
            self._ready.appendleft(inflight)  # it has waited longest
            self._pump()

    def _wake_later(self, wake_at: float, now: float) -> None:
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        self._wake_at = wake_at
        self._wake_timer = self._loop.call_later(max(0.0, wake_at - now), self._wake)

    def _wake(self) -> None:
        self._wake_timer, self._wake_at = None, NEVER
        self._pump()

    def _watch_outage(self, now: float, detail: str) -> None:
        """A call ended, with the failure `detail`: note whether any endpoint still answers."""
        endpoints = self._endpoints
        down = all(not one.works() for one in endpoints) and any(one.halted is None for one in endpoints)
        if down and self._down_since is None:
            self._down_since = now
            log.warning("the judge does not answer (%s); requests wait while one at a time probes it", detail)
        elif not down and self._down_since is not None:
            log.info("the judge answers again after %.1f s", now - self._down_since)
            self._down_since = None

    def _give_up(self, now: float) -> None:
        """Fail what no endpoint will take: all are halted, or none answered for a whole `request_deadline_s`."""
        queued = [inflight for inflight in self._ready if not inflight.done]
        halts = [endpoint.halted for endpoint in self._endpoints if endpoint.halted is not None]
        if len(halts) == len(self._endpoints):
            for inflight in queued:
                self._fail(inflight, REASONS[halts[0].kind], halts[0].detail)
        elif self._down_since is not None:
            last = next((inflight.last for inflight in queued if inflight.last), "")
            detail = f"no endpoint answered for {now - self._down_since:.0f} s: {last}"
            for inflight in queued:
                if now - max(self._down_since, inflight.queued_at) > self._config.request_deadline_s:
                    self._fail(inflight, Reason.UNAVAILABLE, detail)

    def _is_over_budget(self, endpoint: EndpointState, inflight: InFlightRequest) -> bool:
        ceiling = self._config.max_cost
        if ceiling is None:
            return False
        if self._calls_out and not endpoint.knows_cost(inflight.most_tokens):
            return True
        reserved = sum(other.reserved_cost for other in self._endpoints)
        return self.spent + reserved + endpoint.most_cost(inflight.size, inflight.most_tokens) > ceiling

    # -- verdicts out -------------------------------------------------------------------------------------------------

    def _fail(self, inflight: InFlightRequest, reason: Reason, detail: str) -> None:
        self._settle(inflight, Failed(reason.value, inflight.calls, without_surrogates(detail), inflight.usage))

    def _settle(self, inflight: InFlightRequest, answer: EngineAnswer) -> None:
        """End the request: everyone who waits for it gets its verdict."""
        assert not inflight.done
        self._forget(inflight)
        self._answer_all(inflight.waiters, answer)

    def _answer_all(self, waiters: list[tuple[Batch, int, float]], answer: EngineAnswer) -> None:
        for batch, index, _ in waiters:
            self._answer(batch, index, answer)
            if not batch.open:
                self._close_batch(batch)

    def _forget(self, inflight: InFlightRequest) -> None:
        inflight.done = True
        del self._inflight[inflight.key]
        self._started.discard(inflight)
        # Do not cancel a task that has not started: it holds a permit, and only its own code returns it.
        has_begun = inflight.permit is not None
        if inflight.task is not None and has_begun and inflight.task is not asyncio.current_task(self._loop):
            inflight.task.cancel()

    def _answer(self, batch: Batch, index: int, answer: EngineAnswer) -> None:
        batch.open.pop(index, None)
        stats = self._stats
        if isinstance(answer, Scored):
            stats.scored += 1
        elif isinstance(answer, Relayed):
            stats.relayed += 1
        elif isinstance(answer, Skipped):
            stats.skipped += 1
        else:
            stats.failed[answer.reason] = stats.failed.get(answer.reason, 0) + 1
        self._deliver(batch.id, index, answer)

    def _close_batch(self, batch: Batch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        self._batches.pop(batch.id, None)
        if not self._batches:
            self._busy.clear()
            self._answered_all()

    def _end_overdue(self, now: float) -> None:
        """End the calls and requests whose time is over. One timer serves all of them."""
        for inflight in [one for one in self._started if one.deadline_at <= now or one.is_overdue(now)]:
            if inflight.deadline_at <= now:
                self._expire(inflight, now)
            elif inflight.task is not None and not inflight.overdue:
                inflight.overdue = True
                inflight.task.cancel()

    def _expire(self, inflight: InFlightRequest, now: float) -> None:
        """Those who have waited a whole `request_deadline_s` get a failure. Those who joined later continue to wait."""
        limit_s = self._config.request_deadline_s
        detail = f"request_deadline_s = {limit_s:g} is over; {inflight.last or 'no reply so far'}"
        later = [waiter for waiter in inflight.waiters if waiter[2] + limit_s > now]
        if not later:
            self._fail(inflight, Reason.DEADLINE, detail)
            return
        over = [waiter for waiter in inflight.waiters if waiter[2] + limit_s <= now]
        inflight.waiters = later
        inflight.deadline_at = min(since for _, _, since in later) + limit_s
        self._answer_all(over, Failed(Reason.DEADLINE.value, inflight.calls, detail, inflight.usage))

    def _abandon(self, batch: Batch, reason: Reason, detail: str) -> None:
        """Fail this batch's requests. Drop the calls that nobody else waits for."""
        abandoned = list(dict.fromkeys(batch.open.values()))
        for index, inflight in list(batch.open.items()):
            last = inflight.last or ("no reply so far" if inflight.calls else "not sent yet")
            self._answer(batch, index, Failed(reason.value, inflight.calls, detail + last, inflight.usage))
        for inflight in abandoned:
            inflight.waiters = [waiter for waiter in inflight.waiters if waiter[0] is not batch]
            if not inflight.waiters:
                self._forget(inflight)
        self._close_batch(batch)
