"""What a job came to: rows by how they ended, and what the judge was asked and paid."""

from __future__ import annotations

import msgspec

from freewheel.judge.scoring.rows import MALFORMED, WrittenEntry
from freewheel.judge.stats import JudgeStats
from freewheel.judge.verdict import Failed, Scored, Verdict


class Tally(msgspec.Struct, kw_only=True):
    """Rows by how they ended. `scored`, `failed`, `skipped` and `malformed` add up to the rows of the output."""

    scored: int = 0
    failed: int = 0
    skipped: int = 0
    malformed: int = 0
    cached: int = 0
    """Of `scored`: those that were answered before and cost nothing."""
    reasons: dict[str, int] = {}
    """`failed` by reason."""
    first_failure: str = ""
    """Of `failed`, the first: its line, and what went wrong there."""

    @property
    def rows(self) -> int:
        return self.scored + self.failed + self.skipped + self.malformed

    def count(self, verdict: Verdict, line: int) -> None:
        if isinstance(verdict, Scored):
            self.scored += 1
            self.cached += verdict.cached
        elif isinstance(verdict, Failed):
            self._count_failed(verdict.reason, line, verdict.detail)
        else:
            self.skipped += 1

    def count_written(self, entry: WrittenEntry) -> None:
        """A row of an earlier run."""
        if entry.status == "scored":
            self.scored += 1
            self.cached += entry.cached
        elif entry.reason == MALFORMED:
            self.malformed += 1
        elif entry.status == "skipped":
            self.skipped += 1
        else:
            self._count_failed(entry.reason, entry.line, entry.detail)

    def _count_failed(self, reason: str, line: int, detail: str) -> None:
        self.failed += 1
        self.first_failure = self.first_failure or f"line {line}: {detail or reason}"
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


class Calls(msgspec.Struct, kw_only=True):
    """What this run asked of the judge; `in_flight` and `limit` are of this moment."""

    sent: int = 0
    throttled: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    restarts: int = 0
    in_flight: int = 0
    limit: int = 0


_SUMS = ("sent", "throttled", "prompt_tokens", "completion_tokens")


class CallsMeter:
    """Adds up an engine's counts over its restarts, each of which begins at 0 again; the cost goes on by itself."""

    def __init__(self) -> None:
        self._before = Calls()
        self._latest = Calls()

    def update(self, stats: JudgeStats) -> Calls:
        sums = {name: sum(getattr(e, name) for e in stats.endpoints) for name in _SUMS}
        # Counters only grow, so lower ones are a new engine's.
        if sums["sent"] + self._before.sent < self._latest.sent:
            self._before = self._latest
        for name in _SUMS:
            sums[name] += getattr(self._before, name)
        self._latest = Calls(
            **sums, cost=stats.cost, restarts=stats.restarts, in_flight=stats.in_flight, limit=stats.limit
        )
        return self._latest
