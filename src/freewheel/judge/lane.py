"""One endpoint as the engine sees it: may something be sent, and what did the last call teach?

A lane owns the endpoint's limiter, pacer, breaker and latencies, and keeps its accounts. It is pure: the engine brings
the clock and makes the calls. `pick` chooses between lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from freewheel.judge.breaker import Breaker, State
from freewheel.judge.config import Endpoint, JudgeConfig, parse_concurrency
from freewheel.judge.latency import LatencyHistogram
from freewheel.judge.limiter import Limiter, LimiterMemory, Ticket
from freewheel.judge.outcome import HALTS, INFRA, WAITS, Failure, Kind, Reply
from freewheel.judge.pacing import Pacer
from freewheel.judge.retry import AttemptPatience
from freewheel.judge.stats import EndpointStats

NEVER = math.inf

BYTES_PER_TOKEN = 4.0
"""First guess for a prompt's tokens, of UTF-8 bytes; corrected by what the judge reports."""
FIRST_COMPLETION_TOKENS = 64.0
"""First guess for a reply's tokens where max_tokens says nothing; corrected likewise."""
LEARNING = 1 / 16
"""Weight of one reply in those corrections."""


class Permit(NamedTuple):
    """One call under way: what must be given back when it ends."""

    lane: Lane
    ticket: Ticket
    sent_at: float
    tokens: int
    reserved_cost: float
    probe: bool

    def without(self, held_s: float) -> Permit:
        """As if it had been sent that much later: what a slow client takes is not the judge's latency."""
        if not held_s:
            return self
        sent_at, level = self.ticket
        return self._replace(ticket=(sent_at + held_s, level), sent_at=self.sent_at + held_s)


class Lane:
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
        self.latencies = LatencyHistogram()
        self.patience = AttemptPatience(config.attempt_timeout_s, self.latencies)
        self.halted: Failure | None = None
        self.reserved_cost = 0.0
        self.stats = EndpointStats(url=self.url, model=self.model)
        self._price = config.prices.get(self.model)
        self._bytes_per_token = BYTES_PER_TOKEN
        longest = config.max_tokens or config.sampling.get("max_completion_tokens")
        self._completion_tokens = float(longest or FIRST_COMPLETION_TOKENS)
        self._longest_completion = float(longest or 0)
        self._longest_is_bound = longest is not None

    def ready_at(self, now: float, body_bytes: int) -> float:
        """`now` or before: send. Later: ask again then. `NEVER`: ask again when a call ends."""
        if self.halted is not None or not self.limiter.has_room():
            return NEVER
        if self.breaker.state is not State.CLOSED and (at := self.breaker.ready_at(now)) > now:
            return at
        if self.limiter.quiet_until > now:
            return self.limiter.quiet_until
        return self.pacer.ready_at(now, self._tokens(body_bytes))

    @property
    def works(self) -> bool:
        """False while the endpoint is known to be down or to refuse us."""
        return self.halted is None and self.breaker.state is State.CLOSED

    def knows_cost(self, most_tokens: int | None = None) -> bool:
        """False while the longest reply is neither bounded nor seen: then one call at a time finds out."""
        bounded = self._longest_is_bound if most_tokens is None else most_tokens > 0
        return bounded or self.stats.answered > 0

    def most_cost(self, body_bytes: int, most_tokens: int | None = None) -> float:
        """What a call may cost: by `most_tokens`, by `max_tokens` where that is None, else by the longest reply yet."""
        if self._price is None:
            return 0.0
        prompt_tokens = body_bytes / min(self._bytes_per_token, BYTES_PER_TOKEN)
        return self._price.of(prompt_tokens, most_tokens or self._longest_completion or FIRST_COMPLETION_TOKENS)

    def send(self, now: float, body_bytes: int, most_tokens: int | None = None) -> Permit:
        tokens = self._tokens(body_bytes)
        self.pacer.sent(now, tokens)
        reserved = self.most_cost(body_bytes, most_tokens)
        self.reserved_cost += reserved
        self.stats.sent += 1
        return Permit(self, self.limiter.sent(now), now, tokens, reserved, self.breaker.sent())

    def replied(self, permit: Permit, now: float, reply: Reply, body_bytes: int) -> None:
        """The judge answered; whether the answer parses is not the endpoint's affair."""
        latency_s, usage, stats = now - permit.sent_at, reply.usage, self.stats
        self.limiter.succeeded(permit.ticket, now)
        self.breaker.answered(now)
        self.latencies.add(latency_s)
        self.patience.answered(permit.sent_at)
        self.reserved_cost -= permit.reserved_cost
        stats.answered += 1
        used = usage.prompt_tokens + usage.completion_tokens
        if used:
            stats.prompt_tokens += usage.prompt_tokens
            stats.completion_tokens += usage.completion_tokens
            if usage.prompt_tokens:
                self._bytes_per_token += LEARNING * (body_bytes / usage.prompt_tokens - self._bytes_per_token)
            self._completion_tokens += LEARNING * (usage.completion_tokens - self._completion_tokens)
            self._longest_completion = max(self._longest_completion, usage.completion_tokens)
            if self._price is not None:
                stats.cost += self._price.of(usage.prompt_tokens, usage.completion_tokens)
        elif self._price is not None:
            stats.cost += permit.reserved_cost  # no usage in the reply: the estimate stands
        self.pacer.settled(now, permit.tokens, used or permit.tokens, latency_s)
        if reply.rate is not None:
            self.pacer.observed(now, reply.rate)

    def failed(self, permit: Permit, now: float, failure: Failure) -> Failure:
        """The call failed. Returns what that means here: a 403 from an endpoint that never answered is about our key,
        one from an endpoint that did is about this request."""
        if failure.kind is Kind.FORBIDDEN and not self.stats.answered:
            failure = failure._replace(kind=Kind.AUTH)
        kind = failure.kind
        self.reserved_cost -= permit.reserved_cost
        if failure.billed:
            self.stats.cost += permit.reserved_cost
        if kind is Kind.THROTTLED:
            self.limiter.throttled(permit.ticket, now)
        elif kind in INFRA:
            self.limiter.faulted(permit.ticket, now, overload=kind is Kind.OVERLOADED)
        else:
            self.limiter.released(permit.ticket, now)
        if kind is Kind.RATE:
            self.pacer.rejected(now, failure.retry_after_s)
        if kind is Kind.TIMEOUT:
            self.patience.timed_out(permit.sent_at)
        if kind in INFRA:
            tells_of = permit.sent_at if kind is Kind.TIMEOUT else now
            self.breaker.failed(now, tells_of=tells_of, probe=permit.probe)
        elif kind is Kind.STALE:
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
        """A new batch came after a halt: one request may find out whether the endpoint takes us now."""
        if self.halted is not None:
            self.halted = None
            self.breaker.probe_next()

    def snapshot(self) -> EndpointStats:
        return msgspec.structs.replace(
            self.stats,
            faults=dict(self.stats.faults),
            in_flight=self.limiter.in_flight,
            limit=self.limiter.limit,
            breaker=self.breaker.state.value,
            halted=self.halted.detail if self.halted is not None else "",
            latency_p50_s=self.latencies.quantile(0.5),
            latency_p90_s=self.latencies.quantile(0.9),
            latency_p99_s=self.latencies.quantile(0.99),
        )

    def _tokens(self, body_bytes: int) -> int:
        return int(body_bytes / self._bytes_per_token + self._completion_tokens)


def pick(
    lanes: Sequence[Lane], now: float, body_bytes: int, avoid: Lane | None = None, avoid_until: float = -NEVER
) -> tuple[Lane | None, float]:
    """The lane to send on now, or None and the time to ask again.

    The lane furthest below its weight's share goes first; a standby (weight 0) only while no other works; `avoid`, the
    lane on which the request just failed, not before `avoid_until`, and then only if there is no other.
    """
    if len(lanes) == 1:
        at = lanes[0].ready_at(now, body_bytes)
        return (lanes[0], now) if at <= now else (None, at)
    standby = not any(lane.works for lane in lanes if lane.weight > 0)
    best: Lane | None = None
    best_rank, wake_at = (True, math.inf), NEVER
    for lane in lanes:
        if lane.weight == 0 and not standby:
            continue
        at = lane.ready_at(now, body_bytes)
        if lane is avoid:
            at = max(at, avoid_until)
        if at > now:
            wake_at = min(wake_at, at)
            continue
        rank = (lane is avoid, (lane.limiter.in_flight + 1) / (lane.weight or 1.0))
        if rank < best_rank:
            best, best_rank = lane, rank
    return (best, now) if best is not None else (None, wake_at)
