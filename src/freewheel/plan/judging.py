"""Scoring under a virtual clock: `LimitedJudge`, a judge that has limits, asked by the engine's own limiter and pacer.

    submit ─▶ waiting ─ Pacer.ready_at, Limiter.has_room ─▶ VirtualJudge ─ done ─▶ scored
                 ▲                                              │ refused
                 └──── backoff_s, the slot is free ◀────────────┘

One for all replicas, as behind `freewheel serve`. A judge without limits needs none of this: `simulation` then knows
when a score comes at the moment it is asked for.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator

from freewheel.judge.limiter import Limiter, Ticket
from freewheel.judge.pacing import MINUTE_S, Pacer
from freewheel.judge.retry import backoff_s
from freewheel.judge.testing.virtual import REFUSAL_S, Answer, Profile, VirtualJudge
from freewheel.plan.engine import Group
from freewheel.plan.scene import Scores


class LimitedJudge:
    """Every response that is submitted is scored once. `pump` is to be called at `next_at`, and after `submit`."""

    def __init__(self, scores: Scores, latencies: Iterator[float], seed: int) -> None:
        knee = scores.knee
        self._judge = VirtualJudge(
            Profile(
                "plan",
                "as the scene has it",
                (lambda n: float(n)) if knee is None else (lambda n: float(min(n, knee))),
                refuse_above=scores.refuse_above,
                rate_per_s=scores.rate_per_s,
                labelled=True,
            )
        )
        self.limiter = Limiter()
        per_minute = None if scores.rate_per_s is None else scores.rate_per_s * MINUTE_S
        self._pacer = Pacer(requests_per_minute=per_minute)
        self._latencies = latencies
        self._random = random.Random(seed).random
        self._asked: dict[int, tuple[Group, float]] = {}  # by number, until it is scored: its group and its work
        self._fresh: deque[int] = deque()
        self._resting: list[tuple[float, int]] = []
        self._refusals: list[tuple[float, int, Answer]] = []
        self._tickets: dict[int, Ticket] = {}
        self._failures: dict[int, int] = {}
        self._numbers = 0
        self._wake_at = math.inf
        self._now = 0.0
        self._holds_back = False
        self.held_back_s = 0.0
        """For which responses waited to be sent."""

    @property
    def refused(self) -> int:
        return self._judge.refused

    def submit(self, group: Group) -> None:
        number = self._numbers
        self._numbers += 1
        self._asked[number] = (group, next(self._latencies))
        self._fresh.append(number)

    def pump(self, now: float) -> list[Group]:
        """What the time up to `now` has brought, and what may be sent is: the group of each score that came."""
        if self._holds_back:
            self.held_back_s += now - self._now
        self._now = now
        done, _ = self._judge.advance(now)
        scored = []
        for number in done:
            group, work_s = self._asked.pop(number)
            self.limiter.succeeded(self._tickets.pop(number), now)
            self._pacer.settled(now, 0, 0, work_s)
            self._failures.pop(number, None)
            scored.append(group)
        self._hear_refusals(now)
        self._send(now)
        self._holds_back = bool(self._fresh or self._resting)
        return scored

    def _hear_refusals(self, now: float) -> None:
        while self._refusals and self._refusals[0][0] <= now:
            _, number, answer = heapq.heappop(self._refusals)
            ticket = self._tickets.pop(number)
            failures = self._failures[number] = self._failures.get(number, 0) + 1
            if answer is Answer.RATE_LIMITED:
                self.limiter.released(ticket, now)
                self._pacer.rejected(now, None)
            else:
                self.limiter.throttled(ticket, now)
            heapq.heappush(self._resting, (now + backoff_s(failures, None, self._random), number))

    def _send(self, now: float) -> None:
        self._wake_at = math.inf
        while self.limiter.has_room():
            rested = bool(self._resting) and self._resting[0][0] <= now
            if not rested and not self._fresh:
                if self._resting:
                    self._wake_at = self._resting[0][0]
                return
            at = max(self.limiter.quiet_until, self._pacer.ready_at(now, 0))
            if at > now:
                self._wake_at = at
                return
            number = heapq.heappop(self._resting)[1] if rested else self._fresh.popleft()
            self._pacer.sent(now, 0)
            self._tickets[number] = self.limiter.sent(now)
            answer = self._judge.offer(number, self._asked[number][1])
            if answer is not Answer.ACCEPTED:
                heapq.heappush(self._refusals, (now + REFUSAL_S, number, answer))

    def next_at(self) -> float:
        """When something happens by itself."""
        at = min(self._judge.next_event_at(), self._wake_at)
        return min(at, self._refusals[0][0]) if self._refusals else at
