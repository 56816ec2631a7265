"""A judge under a virtual clock: exact processor sharing, and the ways in which real judges refuse.

`run_batch` drives the engine's own limiter and pacer through a whole batch in about 20 ms, without sleeping, so a seed
always gives the same figures. Used by the tests and by `benchmarks/limiter_sim.py`.

    pending ──▶ Pacer.ready_at ──▶ Limiter.has_room ──▶ VirtualJudge.offer ──accepted──▶ shares the capacity ──▶ done
       ▲                                                      │ refused
       └───────── back-off (the slot is free) ◀───────────────┘
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from freewheel.judge.pacing import Pacer

REFERENCE_RTT_S = 2.0
"""Mean service time of every profile before scaling. All other times are relative to it."""
SIGMA = 0.5
"""Spread of the lognormal service time, for the tail of a judge that writes a short reasoning."""
REFUSAL_S = 0.02
"""Time of a refusal: a network round trip and no work."""
BACKOFF_BASE_S = 0.5
"""First back-off of a refused request, doubled each time, with full jitter."""
BACKOFF_CAP_S = 8.0
"""No back-off is longer."""
LOCKOUT_BURST = 20
"""Refusals within `LOCKOUT_WINDOW_S` that make a judge with a lockout refuse everything."""
LOCKOUT_WINDOW_S = 1.0
LOCKOUT_S = 3.0
RATE_BURST_S = 1.0
"""A rate-limited judge's bucket holds this many seconds of its rate."""
GIVE_UP_S = 3600.0
"""Virtual time after which a batch counts as stuck."""


class Answer(Enum):
    """The judge's response to an arriving request."""

    ACCEPTED = "accepted"
    THROTTLED = "throttled"
    RATE_LIMITED = "rate_limited"
    """Refused because of its rate, with a label that names it."""
    DOWN = "down"


@dataclass(frozen=True)
class Profile:
    """One kind of judge. Times are for a mean service time of 2 s; `scale` multiplies all of them."""

    name: str
    title: str
    capacity: Callable[[int], float]
    """The total service rate for n simultaneous requests, in requests at full speed: the shape of the knee."""
    refuse_above: int | None = None
    """429 when this many requests are in service."""
    moving_share: float = 1.0
    """In every second period of `move_every_s`, capacity and refusal level are multiplied by this."""
    move_every_s: float = math.inf
    rate_per_s: float | None = None
    labelled: bool = False
    lockout: bool = False
    outage_s: tuple[float, float] | None = None
    """Start and end of an outage: everything is refused with 503, and requests in service are lost."""
    scale: float = 1.0


def _knee(at: int) -> Callable[[int], float]:
    return lambda n: float(min(n, at))


def _soft_knee(n: int) -> float:
    return 60.0 * n / (n + 60.0)


def _retrograde(n: int) -> float:
    return n / (1.0 + n * (n - 1.0) / 3600.0)


def _no_knee(n: int) -> float:
    return float(n)


_KNEE_60 = Profile("A", "knee 60, 429 > 80", _knee(60), refuse_above=80)
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        _KNEE_60,
        Profile("B", "soft knee, 429 > 80", _soft_knee, refuse_above=80),
        Profile("C", "no knee, 429 > 80", _no_knee, refuse_above=80),
        Profile("D", "25 req/s, unlabelled", _no_knee, rate_per_s=25.0),
        Profile("DL", "25 req/s, labelled", _no_knee, rate_per_s=25.0, labelled=True),
        Profile("F", "knee 60, no 429", _knee(60)),
        Profile("G", "retrograde, peak 60", _retrograde),
        Profile("H", "knee 400", _knee(400)),
        replace(_KNEE_60, name="P", title="A + lockout", lockout=True),
        replace(_KNEE_60, name="M", title="A moving 60/30", moving_share=0.5, move_every_s=10.0),
        replace(_KNEE_60, name="O", title="A + 5 s outage", outage_s=(10.0, 15.0)),
        replace(_KNEE_60, name="N", title="A at 0.2 s", scale=0.1),
    )
}
"""The judges of the benchmark. Each name is a column of the table in the design notes, except M, O and N."""


class VirtualJudge:
    """Serves accepted requests by processor sharing: with n in service, each progresses at capacity(n) / n."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._scale = profile.scale
        self._now = 0.0
        self._progress = 0.0  # service that a request present from the start would have had
        self._serving: list[tuple[float, int]] = []
        self._refusals: deque[float] = deque(maxlen=LOCKOUT_BURST)
        self._locked_until = -math.inf
        self._allowance = (profile.rate_per_s or 0.0) * RATE_BURST_S
        self._refilled_at = 0.0
        self.refused = 0

    def _share(self) -> float:
        profile = self._profile
        if profile.move_every_s == math.inf:
            return 1.0
        return profile.moving_share if int(self._now / (profile.move_every_s * self._scale) + 1e-9) % 2 else 1.0

    def _speed(self) -> float:
        n = len(self._serving)
        share = self._share()
        # Half the capacity is the same curve at twice the load.
        return share * self._profile.capacity(round(n / share)) / n if share != 1.0 else self._profile.capacity(n) / n

    def next_event_at(self) -> float:
        """When the next request is done, the capacity moves or the outage begins, whichever is first."""
        at = math.inf
        profile = self._profile
        if self._serving:
            at = self._now + max(0.0, self._serving[0][0] - self._progress) / self._speed()
        if profile.move_every_s != math.inf:
            period = profile.move_every_s * self._scale
            at = min(at, (math.floor(self._now / period + 1e-9) + 1) * period)
        if profile.outage_s is not None and self._now < profile.outage_s[0] * self._scale:
            at = min(at, profile.outage_s[0] * self._scale)
        return at

    def advance(self, now: float) -> tuple[list[int], list[int]]:
        """Move the clock to `now`, at most `next_event_at()`. Returns the requests done and those lost."""
        due_at = self.next_event_at()
        if self._serving:
            self._progress += (now - self._now) * self._speed()
        finishing = now >= due_at and bool(self._serving)
        self._now = now
        done: list[int] = []
        slack = 1e-9 * max(1.0, self._progress)
        while finishing and self._serving and self._serving[0][0] <= self._progress + slack:
            done.append(heapq.heappop(self._serving)[1])
        lost: list[int] = []
        if self._is_down() and self._serving:
            lost = [key for _, key in self._serving]
            self._serving.clear()
        return done, lost

    def _is_down(self) -> bool:
        outage = self._profile.outage_s
        return outage is not None and outage[0] * self._scale <= self._now < outage[1] * self._scale

    def offer(self, key: int, work_s: float) -> Answer:
        """A request arrives now. Refusals are counted."""
        answer = self._decide()
        if answer is Answer.ACCEPTED:
            heapq.heappush(self._serving, (self._progress + work_s, key))
        elif answer is not Answer.DOWN:
            self.refused += 1
        return answer

    def _decide(self) -> Answer:
        profile, now, scale = self._profile, self._now, self._scale
        if self._is_down():
            return Answer.DOWN
        if now < self._locked_until:
            return Answer.THROTTLED
        if profile.refuse_above is not None and len(self._serving) >= profile.refuse_above * self._share():
            if profile.lockout:
                self._refusals.append(now)
                if len(self._refusals) == LOCKOUT_BURST and now - self._refusals[0] < LOCKOUT_WINDOW_S * scale:
                    self._locked_until = now + LOCKOUT_S * scale
                    self._refusals.clear()
            return Answer.THROTTLED
        if profile.rate_per_s is not None:
            rate = profile.rate_per_s / scale
            self._allowance = min(profile.rate_per_s * RATE_BURST_S, self._allowance + (now - self._refilled_at) * rate)
            self._refilled_at = now
            if self._allowance < 1.0:
                return Answer.RATE_LIMITED if profile.labelled else Answer.THROTTLED
            self._allowance -= 1.0
        return Answer.ACCEPTED


@dataclass(frozen=True)
class Outcome:
    """One batch: its virtual time and its refusals."""

    elapsed_s: float
    refused: int
    """429s."""
    faults: int
    """503s and requests lost to an outage."""


def lognormal_works(count: int, *, seed: int, mean_s: float = REFERENCE_RTT_S, sigma: float = SIGMA) -> list[float]:
    """Service times of a batch."""
    rng = random.Random(seed)
    mu = math.log(mean_s) - sigma * sigma / 2.0
    return [rng.lognormvariate(mu, sigma) for _ in range(count)]


def run_batch(
    profile: Profile,
    controller: Any,
    works_s: Sequence[float],
    *,
    seed: int,
    pacer: Pacer | None = None,
) -> Outcome:
    """Send every request until it is done. `controller` has the methods of `Limiter`."""
    judge = VirtualJudge(profile)
    rng = random.Random(seed)
    scale = profile.scale
    works = [work * scale for work in works_s]
    pacer = pacer if pacer is not None else Pacer()
    fresh: deque[int] = deque(range(len(works)))
    tickets: dict[int, Any] = {}
    attempts: dict[int, int] = {}
    backing_off: list[tuple[float, int]] = []
    refusals: list[tuple[float, int, Answer]] = []
    now = 0.0
    left = len(works)
    faults = 0
    while left:
        assert now < GIVE_UP_S, f"the batch is stuck: {left} requests left after {now} s"
        wake_at = math.inf
        while controller.has_room():
            retry_due = bool(backing_off) and backing_off[0][0] <= now
            if not retry_due and not fresh:
                break
            wake_at = max(controller.quiet_until, pacer.ready_at(now, 0))
            if wake_at > now:
                break
            wake_at = math.inf
            key = heapq.heappop(backing_off)[1] if retry_due else fresh.popleft()
            pacer.sent(now, 0)
            tickets[key] = controller.sent(now)
            answer = judge.offer(key, works[key])
            if answer is not Answer.ACCEPTED:
                heapq.heappush(refusals, (now + REFUSAL_S * scale, key, answer))
        at = min(judge.next_event_at(), wake_at)
        if refusals:
            at = min(at, refusals[0][0])
        if backing_off and controller.has_room() and wake_at == math.inf:
            at = min(at, max(now, backing_off[0][0]))
        assert at < math.inf, f"nothing will happen any more: {left} requests left at {now} s"
        now = at
        done, lost = judge.advance(now)
        for key in done:
            ticket = tickets.pop(key)
            controller.succeeded(ticket, now)
            pacer.settled(now, 0, 0, works[key])
            left -= 1
        failed = [(key, Answer.DOWN) for key in lost]
        while refusals and refusals[0][0] <= now:
            _, key, answer = heapq.heappop(refusals)
            failed.append((key, answer))
        for key, answer in failed:
            ticket = tickets.pop(key)
            attempts[key] = attempts.get(key, 0) + 1
            wait_s = rng.uniform(0.0, min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** attempts[key])) * scale
            if answer is Answer.DOWN:
                faults += 1
                controller.faulted(ticket, now, overload=True)
            elif answer is Answer.RATE_LIMITED:
                controller.released(ticket, now)
                pacer.rejected(now, None)
            else:
                controller.throttled(ticket, now)
            heapq.heappush(backing_off, (now + wait_s, key))
    return Outcome(now, judge.refused, faults)
