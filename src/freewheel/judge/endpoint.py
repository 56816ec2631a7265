"""The state of one endpoint: whether a request may be sent there now, and what its calls have shown.

    choose_endpoint ─▶ EndpointState.ready_at ─▶ send ─▶ Permit ─▶ replied | failed | dropped

An `EndpointState` owns the endpoint's limiter, pacer, breaker, latencies and accounts. Everything here is pure: the
engine passes the time and makes the calls.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from freewheel.judge.config import Endpoint, JudgeConfig, parse_concurrency
from freewheel.judge.limiter import Limiter, LimiterMemory, Ticket
from freewheel.judge.outcome import HALTS, INFRA, WAITS, CallFailure, FailureKind, Reply
from freewheel.judge.pacing import Pacer
from freewheel.judge.stats import BreakerState, EndpointStats

NEVER = math.inf

_BYTES_PER_TOKEN = 4.0
"""First estimate of a prompt's UTF-8 bytes per token. The judge's own counts correct it."""
_FIRST_COMPLETION_TOKENS = 64.0
"""First estimate of a reply's tokens where `max_tokens` is not set. The judge's own counts correct it."""
_LEARNING = 1 / 16
"""Weight of one reply in those corrections."""
LATENCIES_KEPT = 1024
"""The most recent latencies decide: enough for a 99th percentile, and few enough to sort."""


def quantiles(latencies: Iterable[float], shares: Sequence[float]) -> list[float]:
    """The latencies below which these shares of the samples are; 0.0 without samples."""
    ordered = sorted(latencies)
    return [ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0 for share in shares]


class AttemptPatience:
    """How long one call may take: three times the 99th percentile of the latencies, within the configured bound.

    A request that timed out gets twice as long the next time. If calls do nothing but time out, the judge has become
    slower: then all calls get longer, because giving up early would only add to its load.
    """

    FACTOR = 3.0
    """Multiple of p99. With lognormal latencies about one call in a million is cut off that would have been
    answered."""
    FLOOR_S = 1.0
    """Never less than this: a garbage collection or a TLS handshake would look like a hang."""
    SAMPLES_NEEDED = 64
    """With fewer latencies a 99th percentile is a guess."""
    IN_A_ROW = 8
    """After this many time-outs in a row, of calls sent after the last answered one, the judge counts as slower. If 5%
    of calls hang at random, that happens once in 10^10 calls. If the judge did become slower, it happens at once."""
    MOST_DOUBLINGS = 2
    """One request gets at most four times as long. Otherwise a request that hangs repeatedly would delay its whole
    batch."""
    REFRESH_EVERY = 32
    """Latencies between two computations of the percentile, which costs more than everything else here."""

    def __init__(self, bound_s: float, latencies: deque[float]) -> None:
        self.bound_s = bound_s
        self._latencies = latencies
        self._usual_s = bound_s
        self._stretch = 1.0
        self._in_a_row = 0
        self._answered_sent_at = -math.inf
        self._until_refresh = self.SAMPLES_NEEDED

    def allow_s(self, timeouts_before: int) -> float:
        return float(min(self.bound_s, self._usual_s * self._stretch * 2 ** min(timeouts_before, self.MOST_DOUBLINGS)))

    def answered(self, sent_at: float) -> None:
        if sent_at > self._answered_sent_at:
            self._answered_sent_at = sent_at
            self._in_a_row = 0
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            self._until_refresh = self.REFRESH_EVERY
            self._usual_s = max(self.FLOOR_S, self.FACTOR * quantiles(self._latencies, [0.99])[0])
            self._stretch = 1.0

    def timed_out(self, sent_at: float) -> None:
        if sent_at <= self._answered_sent_at:
            return  # later calls were answered, so only this one hung
        self._in_a_row += 1
        if self._in_a_row >= self.IN_A_ROW:
            self._in_a_row = 0
            self._stretch = min(self._stretch * 2, self.bound_s / self._usual_s)


class Breaker:
    """A circuit breaker: while the endpoint is down, it is sent one probe at a time and nothing else.

        CLOSED ──nearly all recent calls failed──▶ OPEN ──pause over──▶ PROBING ──probe answered──▶ CLOSED
                                                    ▲                      │
                                                    └──── probe failed ────┘  (the pause grows)

    Requests wait meanwhile, and a wait costs them no attempt.
    """

    CONSECUTIVE = 10
    """Failures in a row that open it. At a fault rate of 20% that happens once in ten million calls."""
    FIRST_PAUSE_S = 0.25
    """A restart behind a load balancer is often over by then."""
    GROWTH = 2.0
    """Pauses of 0.25, 0.5, then 1 s each."""
    LONGEST_PAUSE_S = 1.0
    """The most time lost after the judge is back. One request per second does no harm."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._alive_at = -math.inf
        self._pause_s = self.FIRST_PAUSE_S
        self._until = 0.0
        self._probe_out = False

    def ready_at(self, now: float) -> float:
        """When a request may be sent: `now` or earlier means at once; infinity while a probe is in flight."""
        if self.state is BreakerState.CLOSED:
            return now
        if self.state is BreakerState.OPEN and now >= self._until:
            self.probe_next()
        if self.state is BreakerState.PROBING:
            return math.inf if self._probe_out else now
        return self._until

    def sent(self) -> bool:
        """Returns True if this call is the probe. Its end must be reported with `probe=True`."""
        if self.state is BreakerState.PROBING:
            self._probe_out = True
            return True
        return False

    def answered(self, now: float) -> None:
        """The endpoint is alive: it replied, and a 429 is a reply."""
        self.state, self._failures, self._alive_at, self._pause_s = BreakerState.CLOSED, 0, now, self.FIRST_PAUSE_S

    def failed(self, now: float, *, known_at: float, probe: bool) -> None:
        """A call ended without a sign of life.

        `known_at`: the time that the failure gives evidence about: now for an error, the time of sending for a
        time-out. If a call was sent before the last sign of life, only that call hung, and it does not count.
        """
        if probe:
            self._pause_s = min(self.LONGEST_PAUSE_S, self._pause_s * self.GROWTH)
            self.state, self._until = BreakerState.OPEN, now + self._pause_s
        elif self.state is BreakerState.CLOSED and known_at >= self._alive_at:
            self._failures += 1
            if self._failures >= self.CONSECUTIVE:
                self.state, self._until = BreakerState.OPEN, now + self._pause_s

    def dropped(self, *, probe: bool) -> None:
        """A call was cancelled, which says nothing about the endpoint."""
        if probe:
            self._probe_out = False

    def probe_next(self) -> None:
        """Let one request test whether the endpoint accepts requests again."""
        self.state, self._probe_out = BreakerState.PROBING, False


class Permit(NamedTuple):
    """One call under way, with everything that is given back when it ends."""

    endpoint: EndpointState
    ticket: Ticket
    sent_at: float
    tokens: int
    reserved_cost: float
    probe: bool

    def without(self, held_s: float) -> Permit:
        """Count the call as sent `held_s` later: the time of a slow client is not the judge's latency."""
        if not held_s:
            return self
        sent_at, level = self.ticket
        return self._replace(ticket=(sent_at + held_s, level), sent_at=self.sent_at + held_s)


class EndpointState:
    def __init__(self, config: JudgeConfig, endpoint: Endpoint, memory: LimiterMemory | None = None) -> None:
        ceiling, fixed = parse_concurrency(config.concurrency)
        self.url = endpoint.url
        self.model = endpoint.model or config.model
        self.weight = endpoint.weight
        self.limiter = Limiter(start=config.concurrency_start, ceiling=ceiling, fixed=fixed, memory=memory)
        self.pacer = Pacer(
            requests_per_minute=endpoint.requests_per_minute or config.requests_per_minute,
            tokens_per_minute=endpoint.tokens_per_minute or config.tokens_per_minute,
        )
        self.breaker = Breaker()
        self.latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)
        self.patience = AttemptPatience(config.attempt_timeout_s, self.latencies)
        self.halted: CallFailure | None = None
        """The failure after which nothing more is sent here."""
        self.reserved_cost = 0.0
        """The most that the calls under way may cost."""
        self.stats = EndpointStats(url=self.url, model=self.model)
        self._price = config.prices.get(self.model)
        self._bytes_per_token = _BYTES_PER_TOKEN
        longest = config.max_tokens or config.sampling.get("max_completion_tokens")
        self._completion_tokens = float(longest or _FIRST_COMPLETION_TOKENS)
        self._longest_completion = float(longest or 0)
        self._longest_is_bound = longest is not None

    def ready_at(self, now: float, body_bytes: int) -> float:
        """When a request may be sent: `now` or earlier means at once, `NEVER` means to ask again when a call ends."""
        if self.halted is not None or not self.limiter.has_room():
            return NEVER
        if self.breaker.state is not BreakerState.CLOSED and (at := self.breaker.ready_at(now)) > now:
            return at
        if self.limiter.quiet_until > now:
            return self.limiter.quiet_until
        return self.pacer.ready_at(now, self._tokens(body_bytes))

    def works(self) -> bool:
        """False while the endpoint is known to be down or to refuse us."""
        return self.halted is None and self.breaker.state is BreakerState.CLOSED

    def knows_cost(self, most_tokens: int | None = None) -> bool:
        """False while no limit bounds a reply's length and no reply has arrived. Until one has, calls go out one at a
        time."""
        bounded = self._longest_is_bound if most_tokens is None else most_tokens > 0
        return bounded or self.stats.answered > 0

    def most_cost(self, body_bytes: int, most_tokens: int | None = None) -> float:
        """What a call may cost, by `most_tokens`, else by `max_tokens`, else by the longest reply so far."""
        if self._price is None:
            return 0.0
        prompt_tokens = body_bytes / min(self._bytes_per_token, _BYTES_PER_TOKEN)
        return self._price.of(prompt_tokens, most_tokens or self._longest_completion or _FIRST_COMPLETION_TOKENS)

    def send(self, now: float, body_bytes: int, most_tokens: int | None = None) -> Permit:
        tokens = self._tokens(body_bytes)
        self.pacer.sent(now, tokens)
        reserved = self.most_cost(body_bytes, most_tokens)
        self.reserved_cost += reserved
        self.stats.sent += 1
        return Permit(self, self.limiter.sent(now), now, tokens, reserved, self.breaker.sent())

    def replied(self, permit: Permit, now: float, reply: Reply, body_bytes: int) -> None:
        """The judge answered. Whether the answer parses does not concern the endpoint."""
        latency_s, usage, stats = now - permit.sent_at, reply.usage, self.stats
        self.limiter.succeeded(permit.ticket, now)
        self.breaker.answered(now)
        self.latencies.append(latency_s)
        self.patience.answered(permit.sent_at)
        self.reserved_cost -= permit.reserved_cost
        stats.answered += 1
        used = usage.prompt_tokens + usage.completion_tokens
        if used:
            stats.prompt_tokens += usage.prompt_tokens
            stats.completion_tokens += usage.completion_tokens
            if usage.prompt_tokens:
                self._bytes_per_token += _LEARNING * (body_bytes / usage.prompt_tokens - self._bytes_per_token)
            self._completion_tokens += _LEARNING * (usage.completion_tokens - self._completion_tokens)
            self._longest_completion = max(self._longest_completion, usage.completion_tokens)
            if self._price is not None:
                stats.cost += self._price.of(usage.prompt_tokens, usage.completion_tokens)
        elif self._price is not None:
            stats.cost += permit.reserved_cost  # the reply reports no usage, so the estimate counts
        self.pacer.settled(now, permit.tokens, used or permit.tokens, latency_s)
        if reply.rate is not None:
            self.pacer.observed(now, reply.rate)

    def failed(self, permit: Permit, now: float, failure: CallFailure) -> CallFailure:
        """The call failed. Returns what the failure means at this endpoint.

        A 403 from an endpoint that never answered is about our key. After an answer it is about the request.
        """
        if failure.kind is FailureKind.FORBIDDEN and not self.stats.answered:
            failure = failure._replace(kind=FailureKind.AUTH)
        kind = failure.kind
        self.reserved_cost -= permit.reserved_cost
        if failure.billed:
            self.stats.cost += permit.reserved_cost
        if kind is FailureKind.THROTTLED:
            self.limiter.throttled(permit.ticket, now)
        elif kind in INFRA:
            self.limiter.faulted(permit.ticket, now, overload=kind is FailureKind.OVERLOADED)
        else:
            self.limiter.released(permit.ticket, now)
        if kind is FailureKind.RATE:
            self.pacer.rejected(now, failure.retry_after_s)
        if kind is FailureKind.TIMEOUT:
            self.patience.timed_out(permit.sent_at)
        if kind in INFRA:
            known_at = permit.sent_at if kind is FailureKind.TIMEOUT else now
            self.breaker.failed(now, known_at=known_at, probe=permit.probe)
        elif kind is FailureKind.STALE:
            self.breaker.dropped(probe=permit.probe)
        else:
            self.breaker.answered(now)
        if kind in HALTS and self.halted is None:
            self.halted = failure
        if kind in WAITS:
            self.stats.throttled += 1
        else:
            self.stats.faults[kind.value] = self.stats.faults.get(kind.value, 0) + 1
        return failure

    def dropped(self, permit: Permit, now: float) -> None:
        """The call was cancelled."""
        self.reserved_cost -= permit.reserved_cost
        self.limiter.released(permit.ticket, now)
        self.breaker.dropped(probe=permit.probe)

    def reconsider(self) -> None:
        """A new batch arrived. After a halt, one request may find out whether the endpoint accepts us now."""
        if self.halted is not None:
            self.halted = None
            self.breaker.probe_next()

    def snapshot(self) -> EndpointStats:
        p50_s, p90_s, p99_s = quantiles(self.latencies, (0.5, 0.9, 0.99))
        return msgspec.structs.replace(
            self.stats,
            faults=dict(self.stats.faults),
            in_flight=self.limiter.in_flight,
            limit=self.limiter.limit,
            breaker=self.breaker.state.value,
            halted=self.halted.detail if self.halted is not None else "",
            latency_p50_s=p50_s,
            latency_p90_s=p90_s,
            latency_p99_s=p99_s,
        )

    def _tokens(self, body_bytes: int) -> int:
        return int(body_bytes / self._bytes_per_token + self._completion_tokens)


def choose_endpoint(
    endpoints: Sequence[EndpointState],
    now: float,
    body_bytes: int,
    avoid: EndpointState | None = None,
    avoid_until: float = -NEVER,
) -> tuple[EndpointState | None, float]:
    """Return the endpoint to send to now, or None and the time to ask again.

    The endpoint furthest below its weight's share comes first. A standby (weight 0) is used only while no other works.
    `avoid`: the endpoint where the request just failed. It is not chosen before `avoid_until`, and later only if no
    other is ready.
    """
    if len(endpoints) == 1:
        at = endpoints[0].ready_at(now, body_bytes)
        return (endpoints[0], now) if at <= now else (None, at)
    standby = not any(one.works() for one in endpoints if one.weight > 0)
    best: EndpointState | None = None
    best_rank, wake_at = (True, math.inf), NEVER
    for one in endpoints:
        if one.weight == 0 and not standby:
            continue
        at = one.ready_at(now, body_bytes)
        if one is avoid:
            at = max(at, avoid_until)
        if at > now:
            wake_at = min(wake_at, at)
            continue
        rank = (one is avoid, (one.limiter.in_flight + 1) / (one.weight or 1.0))
        if rank < best_rank:
            best, best_rank = one, rank
    return (best, now) if best is not None else (None, wake_at)
