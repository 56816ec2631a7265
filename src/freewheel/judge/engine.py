"""The engine: every request that is submitted ends as exactly one verdict. It lives on one event loop.

    submit ─▶ memory cache ─▶ single flight ─▶ disk cache ─▶ ready ─▶ pick a lane ─▶ call ─▶ parse ─▶ deliver
                                                              ▲                       │
                                                              └── back-off (no slot) ◀┘ failed, or unparseable

Waits for: a free slot of the lanes' limiters. Unblocked by: a call that ends, a back-off or a pause that is over.
Requests of equal content share one flight; a flight lives on while anyone waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from freewheel.judge.cache import Replies
from freewheel.judge.client import ChatClient, open_connector
from freewheel.judge.config import JudgeConfig
from freewheel.judge.endpoint import NEVER, Lane, Permit, pick
from freewheel.judge.exchange import (
    ChatExchange,
    ChatRequest,
    ChatStream,
    Exchange,
    Relayed,
    RubricExchange,
    StreamExchange,
)
from freewheel.judge.outcome import FINAL, HALTS, REASONS, WAITS, Failure, Kind, Reply
from freewheel.judge.parse import Unparseable
from freewheel.judge.prompt import local_secret
from freewheel.judge.request import JudgeRequest
from freewheel.judge.retry import RetryLine, backoff_s
from freewheel.judge.stats import JudgeStats
from freewheel.judge.verdict import Failed, Reason, Scored, Skipped, Usage

if TYPE_CHECKING:
    from freewheel.judge.exchange import Exchange, Identity


class Batch:
    """The requests of one handle that the engine has not answered yet."""

    __slots__ = ("id", "open", "timer")

    def __init__(self, identity: int) -> None:
        self.id = identity
        self.open: dict[int, Flight] = {}
        self.timer: asyncio.TimerHandle | None = None


class Flight:
    """Requests of equal content share one; it lives on while anyone waits for it, and ends once."""

    __slots__ = ("asks", "avoid", "avoid_until", "calls", "committed", "deadline_at", "done", "exchange", "faults",
                 "held_s", "is_retry", "keep_as", "key", "last", "most_tokens", "overdue", "patient", "permit",
                 "queued_at", "request", "size", "stales", "task", "throttles", "timeouts", "usage",
                 "waiters")  # fmt: skip

    def __init__(
        self,
        request: JudgeRequest | ChatRequest | ChatStream,
        exchange: Exchange,
        identity: Identity,
        now: float,
    ) -> None:
        self.request = request
        self.exchange = exchange
        self.key, self.size, self.keep_as, self.most_tokens, self.patient = identity
        self.held_s = 0.0
        """How long its own client kept it waiting: no fault of the judge's."""
        self.committed = False
        """Part of its answer is with its client: it can be asked for no second time, and takes what time it takes."""
        self.queued_at = now
        self.waiters: list[tuple[Batch, int, float]] = []
        """(batch, index, since when)."""
        self.calls = self.faults = self.throttles = self.timeouts = self.stales = self.asks = 0
        self.is_retry = False
        """It waits for the retry budget."""
        self.deadline_at = NEVER
        self.permit: Permit | None = None
        """Of the call that is under way."""
        self.overdue = False
        self.task: asyncio.Task[None] | None = None
        self.avoid: Lane | None = None
        """Where it just failed, and until when it must not be sent there again."""
        self.avoid_until = -NEVER
        self.last = ""
        """What went wrong last, for the verdict's detail."""
        self.usage = Usage()
        self.done = False

    def commit(self) -> None:
        self.committed = True
        self.deadline_at = NEVER

    def is_overdue(self, now: float) -> bool:
        """True if its call takes longer than calls there do, by what is known now and not when it was sent."""
        permit = self.permit
        if permit is None or self.committed:
            return False
        patience = permit.lane.patience
        return now - permit.sent_at >= (patience.bound_s if self.patient else patience.allow_s(self.timeouts))


log = logging.getLogger("freewheel.judge")


class OutageWatch:
    """Since when no endpoint answers, and which requests have waited long enough for one that does."""

    def __init__(self, lanes: Sequence[Lane], patience_s: float) -> None:
        self._lanes = lanes
        self._patience_s = patience_s
        self.down_since: float | None = None

    def look(self, now: float, detail: str) -> None:
        """After a call ended; `detail` is what went wrong with it."""
        down = all(not lane.works for lane in self._lanes) and any(lane.halted is None for lane in self._lanes)
        if down and self.down_since is None:
            self.down_since = now
            log.warning("the judge does not answer (%s); requests wait while one at a time probes it", detail)
        elif not down and self.down_since is not None:
            log.info("the judge answers again after %.1f s", now - self.down_since)
            self.down_since = None

    def given_up(self, now: float, queued: Iterable[Flight]) -> Iterator[tuple[Flight, Reason, str]]:
        """What no endpoint will take: all are halted, or none answered for as long as this request may wait."""
        halts = [lane.halted for lane in self._lanes if lane.halted is not None]
        if len(halts) == len(self._lanes):
            for flight in queued:
                yield flight, REASONS[halts[0].kind], halts[0].detail
        elif self.down_since is not None:
            flights = list(queued)
            last = next((flight.last for flight in flights if flight.last), "")
            detail = f"no endpoint answered for {now - self.down_since:.0f} s: {last}"
            for flight in flights:
                if now - max(self.down_since, flight.queued_at) > self._patience_s:
                    yield flight, Reason.UNAVAILABLE, detail


SWEEP_S = 0.025
"""How often time limits are looked at: deadlines are kept to within 100 ms, this leaves room for the way back."""

MOST_STALE = 2
"""How often one request may meet a connection that the server had closed: the pool may hold more than one of them."""
ELSEWHERE_S = 0.1
"""Pause of a request that another endpoint may take: that one may be full for a moment."""

Request = JudgeRequest | ChatRequest | ChatStream
Answer = Scored | Relayed | Failed

Deliver = Callable[[int, int, Any], None]
"""Takes (batch, index, verdict): a `Verdict` for a `JudgeRequest`, `Relayed` or `Failed` for a chat completion."""


class Engine:
    """Judges requests on the running loop; `deliver` gets each verdict, in the order in which they are reached."""

    def __init__(
        self,
        config: JudgeConfig,
        *,
        deliver: Deliver,
        answered_all: Callable[[], None] = lambda: None,
        spent: float = 0.0,
    ) -> None:
        self._config = config
        self._deliver = deliver
        self._answered_all = answered_all
        self._spent_before = spent
        self._stats = JudgeStats()
        self._batches: dict[int, Batch] = {}
        self._newest_batch = -1
        self._flights: dict[bytes, Flight] = {}
        self._ready: deque[Flight] = deque()
        self._started: set[Flight] = set()
        self._sweeping = False
        self._calls_out = 0
        self._wake_timer: asyncio.TimerHandle | None = None
        self._wake_at = NEVER
        self._replies = Replies(config)
        self._exchanges: dict[type, Exchange] = {}
        self._lanes: list[Lane] = []
        self._connector: aiohttp.TCPConnector | None = None
        self._clients: dict[Lane, ChatClient] = {}
        self._closing = False

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        config = self._config
        self._loop = asyncio.get_running_loop()
        self._replies.open()
        self._exchanges = {
            JudgeRequest: RubricExchange(config, local_secret(self._replies.directory)),
            ChatRequest: ChatExchange(config),
            ChatStream: StreamExchange(config),
        }
        self._lanes = [Lane(config, endpoint, self._replies.recall(endpoint.url)) for endpoint in config.endpoints]
        self._again = RetryLine(self._loop, self._send_again)
        self._outage = OutageWatch(self._lanes, config.request_deadline_s)
        self._connector = open_connector(config)
        pairs = list(zip(self._lanes, config.endpoints, strict=True))
        self._clients = {lane: ChatClient(self._connector, config, endpoint) for lane, endpoint in pairs}

    async def close(self) -> None:
        """Answers what is open with `Failed("cancelled")`, closes connections, writes the cache out."""
        self._closing = True
        tasks = [flight.task for flight in self._started if flight.task is not None]
        for batch in list(self._batches.values()):
            self.cancel(batch.id)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        for client in self._clients.values():
            await client.close()
        if self._connector is not None:
            await self._connector.close()
        self.remember()
        self._replies.close()

    def remember(self) -> None:
        """Writes down what the limiters learnt, for the next run."""
        for lane in self._lanes:
            self._replies.remember(lane.url, lane.limiter.memory())

    # -- requests in --------------------------------------------------------------------------------------------------

    def submit(
        self, batch_id: int, indexes: Sequence[int], requests: Sequence[Request], deadline_at: float | None = None
    ) -> None:
        """Takes requests of a batch; `deadline_at` is in `time.monotonic()` seconds."""
        batch = self._batches.get(batch_id)
        if batch is None:
            batch = self._open_batch(batch_id, deadline_at)
        self._stats.submitted += len(requests)
        fresh: list[Flight] = []
        now = time.monotonic()
        for index, request in zip(indexes, requests, strict=True):
            flight = self._admit(batch, index, request, now)
            if flight is not None:
                fresh.append(flight)
        if not batch.open:
            self._close_batch(batch)
        if not fresh:
            return
        found = self._replies.on_disk([flight.key for flight in fresh if flight.keep_as == flight.key])
        for flight in fresh:
            cached = found.get(flight.key)
            answer = flight.exchange.revive(cached) if cached is not None else None
            if answer is None:
                self._ready.append(flight)
            else:
                self._stats.cache_hits_disk += 1
                self._settle(flight, answer)
        self._pump()

    def cancel(self, batch_id: int) -> None:
        """Answers what is open of a batch with `Failed("cancelled")`. Calls that others wait for go on."""
        batch = self._batches.get(batch_id)
        if batch is not None:
            self._abandon(batch, Reason.CANCELLED, "")

    def stats(self) -> JudgeStats:
        return msgspec.structs.replace(
            self._stats,
            failed=dict(self._stats.failed),
            queued=len(self._ready) + len(self._again),
            cost_before=self._spent_before,
            endpoints=[lane.snapshot() for lane in self._lanes],
        )

    @property
    def busy(self) -> bool:
        return bool(self._batches)

    @property
    def spent(self) -> float:
        return self._spent_before + sum(lane.stats.cost for lane in self._lanes)

    def _open_batch(self, batch_id: int, deadline_at: float | None) -> Batch:
        batch = self._batches[batch_id] = Batch(batch_id)
        if deadline_at is not None:
            left_s = max(0.0, deadline_at - time.monotonic())
            batch.timer = self._loop.call_later(left_s, self._batch_expired, batch)
        if batch_id > self._newest_batch:
            self._newest_batch = batch_id
            for lane in self._lanes:
                lane.reconsider()
        return batch

    def _admit(self, batch: Batch, index: int, request: Request, now: float) -> Flight | None:
        """Answers from memory, joins a flight, or starts one (returned)."""
        if type(request) is JudgeRequest and request.skip:
            self._stats.skipped += 1
            self._deliver(batch.id, index, Skipped(request.skip))
            return None
        exchange = self._exchanges[type(request)]
        identity = exchange.identify(request)
        key = identity.key
        if not self._config.cache:
            key += batch.id.to_bytes(8, "big")  # equal requests of one batch still share a call
            identity = identity._replace(key=key, keep_as=key if identity.keep_as else None)
        cached = self._replies.in_memory(key)
        answer = exchange.revive(cached) if cached is not None else None
        if answer is not None:
            self._stats.cache_hits_memory += 1
            self._count(answer)
            self._deliver(batch.id, index, answer)
            return None
        joined = self._flights.get(key)
        if joined is not None:
            self._stats.shared += 1
            flight = joined
        else:
            flight = self._flights[key] = Flight(request, exchange, identity, now)
        flight.waiters.append((batch, index, now))
        batch.open[index] = flight
        return flight if joined is None else None

    # -- calls out ----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Sends what may be sent now, and arranges to be called when more may be."""
        now = time.monotonic()
        while self._ready:
            ready = self._ready
            flight = ready[0]
            if flight.done:
                ready.popleft()
                continue
            lane, wake_at = pick(self._lanes, now, flight.size, flight.avoid, flight.avoid_until)
            if lane is None and flight.avoid_until > now and len(self._lanes) > 1:
                self._again.add(ready.popleft(), ELSEWHERE_S)  # it may not go where others may: let them pass
                continue
            if lane is None:
                if self._calls_out == 0 or self._outage.down_since is not None:
                    self._give_up(now)
                if self._ready and wake_at < self._wake_at:
                    self._wake_later(wake_at, now)
                return
            if self._config.max_cost is not None and self._over_budget(lane, flight, self._config.max_cost):
                if self._calls_out:
                    return  # those under way may turn out cheaper than was set aside for them
                detail = f"max_cost = {self._config.max_cost:g} is reached ({self.spent:.6g} spent)"
                self._fail(ready.popleft(), Reason.BUDGET, detail)
                continue
            self._send(ready.popleft(), lane, now)

    def _send(self, flight: Flight, lane: Lane, now: float) -> None:
        if flight.calls == 0:
            flight.deadline_at = now + self._config.request_deadline_s
            self._started.add(flight)
            if not self._sweeping:
                self._sweeping = True
                self._loop.call_later(SWEEP_S, self._sweep)
        flight.calls += 1
        self._calls_out += 1
        self._stats.max_in_flight = max(self._stats.max_in_flight, self._calls_out)
        flight.task = self._loop.create_task(self._call(flight, lane.send(now, flight.size, flight.most_tokens)))

    async def _call(self, flight: Flight, permit: Permit) -> None:
        lane = permit.lane
        if flight.done:  # abandoned before its call began
            self._dropped(permit)
            return
        flight.permit = permit
        outcome: Reply | Failure
        try:
            outcome = await flight.exchange.call(self._clients[lane], lane.model, flight)
        except asyncio.CancelledError:
            if flight.done or not flight.overdue:
                self._dropped(permit)
                raise
            flight.overdue = False  # `_sweep` ended the call
            waited_s = time.monotonic() - permit.sent_at
            outcome = Failure(Kind.TIMEOUT, f"{lane.url}: no reply within {waited_s:.3g} s")
        except Exception as error:
            # A fault of ours: this request ends with it, the others go on.
            log.exception("a call to the judge broke")
            self._calls_out -= 1
            lane.dropped(permit, time.monotonic())
            self._fail(flight, Reason.ENGINE, f"{type(error).__name__}: {error}")
            self._pump()
            return
        flight.task = None
        flight.permit = None
        self._calls_out -= 1
        now = time.monotonic()
        if isinstance(outcome, Reply):
            lane.replied(permit.without(flight.held_s), now, outcome, flight.size)
            if self._outage.down_since is not None:
                self._outage.look(now, "")
            self._again.replied(now)
            self._replied(flight, outcome)
        else:
            if outcome.kind is Kind.STALE and flight.stales >= MOST_STALE:
                outcome = outcome._replace(kind=Kind.BROKEN)
            failure = lane.failed(permit, now, outcome)
            self._outage.look(now, failure.detail)
            self._failed(flight, permit, failure, now)
        self._pump()

    def _dropped(self, permit: Permit) -> None:
        """Nobody waits for this call any more."""
        self._calls_out -= 1
        permit.lane.dropped(permit, time.monotonic())
        if not self._closing:
            self._loop.call_soon(self._pump)

    def _replied(self, flight: Flight, reply: Reply) -> None:
        flight.usage += reply.usage
        try:
            answer = flight.exchange.read(flight, reply)
        except Unparseable as error:
            flight.asks += 1
            if flight.asks <= self._config.reasks:
                self._stats.reasks += 1
                self._ready.appendleft(flight)
            else:
                self._fail(flight, Reason.UNPARSEABLE, str(error))
            return
        if flight.keep_as is not None and not reply.cut_off:
            self._replies.keep(flight.keep_as, reply)
        self._settle(flight, answer)

    def _failed(self, flight: Flight, permit: Permit, failure: Failure, now: float) -> None:
        """One call failed: try elsewhere, wait and try again, or give up, as the failure's kind says."""
        kind, lane = failure.kind, permit.lane
        flight.last = failure.detail
        flight.avoid = lane
        if kind in HALTS:
            if lane.halted is failure:
                log.error("nothing more is sent to the judge: %s", failure.detail)
            if all(other.halted is not None for other in self._lanes):
                self._fail(flight, REASONS[kind], failure.detail)
            else:
                self._ready.appendleft(flight)
            return
        if kind in FINAL or flight.committed:
            self._fail(flight, REASONS[kind], failure.detail)
            return
        if kind is Kind.STALE:
            flight.stales += 1
            self._stats.retries += 1
            self._ready.appendleft(flight)
            return
        if kind in WAITS:
            flight.throttles += 1
            wait_s = backoff_s(flight.throttles, failure.retry_after_s, random.random)
        else:
            flight.faults += not permit.probe  # that the endpoint is down was known, and is not this request's fault
            flight.timeouts += kind is Kind.TIMEOUT
            if flight.faults >= self._config.max_attempts:
                self._fail(flight, REASONS[kind], failure.detail)
                return
            wait_s = backoff_s(max(1, flight.faults), failure.retry_after_s, random.random)
            flight.is_retry = True
        if any(other.works for other in self._lanes if other is not lane):
            flight.avoid_until = now + wait_s
            wait_s = min(wait_s, ELSEWHERE_S)
        if now + wait_s >= flight.deadline_at:
            left_s = flight.deadline_at - now
            self._fail(
                flight, REASONS[kind], f"{failure.detail} (next try in {wait_s:.3g} s, deadline in {left_s:.3g} s)"
            )
            return
        self._stats.retries += 1
        self._again.add(flight, wait_s)

    def _send_again(self, flight: Flight) -> None:
        self._ready.appendleft(flight)  # it has waited longest
        self._pump()

    def _wake_later(self, wake_at: float, now: float) -> None:
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        self._wake_at = wake_at
        self._wake_timer = self._loop.call_later(max(0.0, wake_at - now), self._woken)

    def _woken(self) -> None:
        self._wake_timer, self._wake_at = None, NEVER
        self._pump()

    def _give_up(self, now: float) -> None:
        self._ready = deque(flight for flight in self._ready if not flight.done)
        for flight, reason, detail in list(self._outage.given_up(now, self._ready)):
            self._fail(flight, reason, detail)

    def _over_budget(self, lane: Lane, flight: Flight, ceiling: float) -> bool:
        if self._calls_out and not lane.knows_cost(flight.most_tokens):
            return True
        reserved = sum(other.reserved_cost for other in self._lanes)
        return self.spent + reserved + lane.most_cost(flight.size, flight.most_tokens) > ceiling

    # -- verdicts out -------------------------------------------------------------------------------------------------

    def _fail(self, flight: Flight, reason: Reason, detail: str) -> None:
        self._settle(flight, Failed(reason.value, flight.calls, detail, flight.usage))

    def _settle(self, flight: Flight, answer: Answer) -> None:
        """The flight ends; all who wait for it get its verdict."""
        assert not flight.done
        self._land(flight)
        self._answer_all(flight.waiters, answer)

    def _answer_all(self, waiters: list[tuple[Batch, int, float]], answer: Answer) -> None:
        for batch, index, _ in waiters:
            self._answer(batch, index, answer)
            if not batch.open:
                self._close_batch(batch)

    def _land(self, flight: Flight) -> None:
        flight.done = True
        del self._flights[flight.key]
        self._started.discard(flight)
        # A task that has not begun must begin: it holds a permit, and cancelled now it would never give it back.
        begun = flight.permit is not None
        if flight.task is not None and begun and flight.task is not asyncio.current_task(self._loop):
            flight.task.cancel()

    def _answer(self, batch: Batch, index: int, answer: Answer) -> None:
        del batch.open[index]
        self._count(answer)
        self._deliver(batch.id, index, answer)

    def _count(self, answer: Answer) -> None:
        if isinstance(answer, Scored):
            self._stats.scored += 1
        elif isinstance(answer, Relayed):
            self._stats.relayed += 1
        else:
            self._stats.failed[answer.reason] = self._stats.failed.get(answer.reason, 0) + 1

    def _close_batch(self, batch: Batch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        self._batches.pop(batch.id, None)
        if not self._batches:
            self._answered_all()

    def _sweep(self) -> None:
        """Ends the calls and the requests whose time is over: one timer for all of them, not one for each."""
        now = time.monotonic()
        for flight in [f for f in self._started if f.deadline_at <= now or f.is_overdue(now)]:
            if flight.deadline_at <= now:
                self._expire(flight, now)
            elif flight.task is not None and not flight.overdue:
                flight.overdue = True
                flight.task.cancel()
        self._again.passed(now, sum(lane.limiter.limit for lane in self._lanes))
        self._sweeping = bool(self._started)
        if self._sweeping:
            self._loop.call_later(SWEEP_S, self._sweep)
        self._pump()

    def _expire(self, flight: Flight, now: float) -> None:
        """Who has waited for a whole `request_deadline_s` gets a failure; who joined later waits on."""
        limit_s = self._config.request_deadline_s
        detail = f"request_deadline_s = {limit_s:g} is over; {flight.last or 'no reply so far'}"
        later = [waiter for waiter in flight.waiters if waiter[2] + limit_s > now]
        if not later:
            self._fail(flight, Reason.DEADLINE, detail)
            return
        over = [waiter for waiter in flight.waiters if waiter[2] + limit_s <= now]
        flight.waiters = later
        flight.deadline_at = min(since for _, _, since in later) + limit_s
        self._answer_all(over, Failed(Reason.DEADLINE.value, flight.calls, detail, flight.usage))

    def _batch_expired(self, batch: Batch) -> None:
        self._abandon(batch, Reason.DEADLINE, "the batch's deadline is over; ")
        self._pump()

    def _abandon(self, batch: Batch, reason: Reason, detail: str) -> None:
        """This batch's waiters get a failure; flights that nobody else waits for are dropped."""
        flights = list(dict.fromkeys(batch.open.values()))
        for index, flight in list(batch.open.items()):
            last = flight.last or ("no reply so far" if flight.calls else "not sent yet")
            self._answer(batch, index, Failed(reason.value, flight.calls, detail + last, flight.usage))
        for flight in flights:
            flight.waiters = [waiter for waiter in flight.waiters if waiter[0] is not batch]
            if not flight.waiters:
                self._land(flight)
        self._close_batch(batch)
