"""A circuit breaker for one endpoint: while it is down, nothing is sent there but one probe at a time.

    CLOSED ──nearly all recent calls failed──▶ OPEN ──pause over──▶ PROBING ──probe answered──▶ CLOSED
                                                ▲                      │
                                                └──── probe failed ────┘  (the pause grows)

Requests wait meanwhile; a wait costs them no attempt.
"""

from __future__ import annotations

import math
from enum import Enum


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    CONSECUTIVE = 10
    """Failures in a row that open it. At a fault rate of 20% that happens once in ten million calls."""
    FIRST_PAUSE_S = 0.25
    """A restart behind a load balancer is often over by then."""
    GROWTH = 2.0
    """Pauses 0.25, 0.5, then 1 s each."""
    LONGEST_PAUSE_S = 1.0
    """The most time lost after the judge is back; one request a second harms nobody."""

    def __init__(self) -> None:
        self.state = State.CLOSED
        self.opened = 0
        self._failures = 0
        self._alive_at = -math.inf
        self._pause_s = self.FIRST_PAUSE_S
        self._until = 0.0
        self._probe_out = False

    def ready_at(self, now: float) -> float:
        """When something may be sent: `now` or before if at once, infinity while a probe is out."""
        if self.state is State.CLOSED:
            return now
        if self.state is State.OPEN and now >= self._until:
            self.state, self._probe_out = State.PROBING, False
        if self.state is State.PROBING:
            return math.inf if self._probe_out else now
        return self._until

    def sent(self) -> bool:
        """True if this call is the probe; its end must be told as such."""
        if self.state is State.PROBING:
            self._probe_out = True
            return True
        return False

    def answered(self, now: float) -> None:
        """The endpoint gave a sign of life: any reply of its own, a 429 included."""
        self.state, self._failures, self._alive_at, self._pause_s = State.CLOSED, 0, now, self.FIRST_PAUSE_S

    def failed(self, now: float, *, tells_of: float, probe: bool) -> None:
        """A call ended without a sign of life. An error tells of now, a hang of when the call was sent: one from before
        the last sign of life hung alone."""
        if probe:
            self._pause_s = min(self.LONGEST_PAUSE_S, self._pause_s * self.GROWTH)
            self._open(now)
        elif self.state is State.CLOSED and tells_of >= self._alive_at:
            self._failures += 1
            if self._failures >= self.CONSECUTIVE:
                self._open(now)

    def dropped(self, *, probe: bool) -> None:
        """A call ended without saying anything about the endpoint (it was cancelled)."""
        if probe:
            self._probe_out = False

    def probe_next(self) -> None:
        """After a halt: let one request find out whether the endpoint accepts us again."""
        self.state, self._probe_out = State.PROBING, False

    def _open(self, now: float) -> None:
        self.state, self._until = State.OPEN, now + self._pause_s
        self.opened += 1
