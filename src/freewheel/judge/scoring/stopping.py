"""When a job must not go on: a pure rule over verdicts in the order of the rows.

verdict ─▶ WRITE  the row is decided
        ─▶ HOLD   the judge may be down: wait for what the next rows say before the row is called failed
        ─▶ STOP   this row and all that are held stay undecided; a later run asks for them again
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from freewheel.judge.outcome import INFRA
from freewheel.judge.stats import EndpointStats, JudgeStats
from freewheel.judge.verdict import Failed, Reason, Scored, Verdict

FATAL = frozenset({Reason.AUTH, Reason.NOT_FOUND, Reason.QUOTA, Reason.BUDGET, Reason.ENGINE, Reason.CANCELLED})
"""No row would fare better than this one."""
OUTAGE = frozenset({Reason.UNAVAILABLE, Reason.DEADLINE, Reason.THROTTLED})
"""Says as much about the judge as about the row."""
OUTAGE_ROWS = 64
"""So many rows in a row lost to an outage: the judge is out, even where its endpoint still gives signs of life."""
SILENCE = frozenset(kind.value for kind in INFRA)
"""Failed calls that are no sign of life."""
FIRST_FAILURES = 256
"""Failures without a single score from which on the fault is the setup's (rubric, model, a proxy's page), not the
rows': the rest of a large file must not be paid for."""


class Ruling(Enum):
    WRITE = "write"
    HOLD = "hold"
    STOP = "stop"


class StopRule:
    """Fed with each judged row's verdict, in order. `why` is the verdict that stopped it."""

    def __init__(self, is_down: Callable[[], bool]) -> None:
        self._is_down = is_down
        self._outage_rows = 0
        self._failures = 0
        self._scores = 0
        self.why: Failed | None = None

    def judge(self, verdict: Verdict) -> Ruling:
        if isinstance(verdict, Scored):
            self._scores += 1
            self._outage_rows = 0
        if not isinstance(verdict, Failed):
            return Ruling.WRITE
        if verdict.reason in FATAL:
            return self._stop(verdict)
        if verdict.reason in OUTAGE:
            self._outage_rows += 1
            if self._outage_rows >= OUTAGE_ROWS or (self._outage_rows == 1 and self._is_down()):
                return self._stop(verdict)
            self.why = verdict
            return Ruling.HOLD
        self._outage_rows = 0
        self._failures += 1
        if not self._scores and self._failures >= FIRST_FAILURES:
            detail = f"{self._failures} rows failed and none was scored; the last: {verdict.detail}"
            return self._stop(Failed(verdict.reason, verdict.attempts, detail))
        return Ruling.WRITE

    def end(self) -> Ruling:
        """After the last row: are the ones still held failures of their own?"""
        return Ruling.STOP if self._outage_rows and self._is_down() else Ruling.WRITE

    def _stop(self, verdict: Failed) -> Ruling:
        self.why = verdict
        return Ruling.STOP


def is_down(stats: JudgeStats) -> bool:
    """No endpoint works at this moment. One that has been silent since the first call does not, either: the few calls
    of a row or two open no breaker."""
    asked = [e for e in stats.endpoints if e.up and e.sent]
    if asked and all(_is_silent(e) for e in asked):
        return True
    return bool(stats.endpoints) and not any(e.up for e in stats.endpoints)


def _is_silent(endpoint: EndpointStats) -> bool:
    return not (endpoint.answered or endpoint.throttled or endpoint.faults.keys() - SILENCE)
