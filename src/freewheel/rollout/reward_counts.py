"""What happened in a reward stage, counted by kind, and what of it is worth a line in the log. No I/O, no clock."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from freewheel.judge.verdict import Failed

log = logging.getLogger("freewheel.rollout")

BROKEN_GROUPS = 3
"""Groups at the start of a run that fail whole and in the same way before the function is called broken."""


class RewardCounts:
    """What happened, and what of it is worth a line in the log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.scored = self.skipped = 0
        self.failed: Counter[str] = Counter()
        self.retried_groups = self.dropped_groups = 0
        self._latency_s = 0.0
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._broken_groups = 0
        self._first_failure = ""

    def started(self, now: float, *, idle: bool) -> None:
        if idle and self._busy_since is None:
            self._busy_since = now

    def idle(self, now: float) -> None:
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = None

    def settled(self, failure: Failed | None, status: str, latency_s: float) -> None:
        self._latency_s += latency_s
        if failure is not None:
            self._note(failure)
        elif status == "skipped":
            self.skipped += 1
        else:
            self.scored += 1

    def _note(self, failure: Failed) -> None:
        """Says the first of a kind, the tenth, the hundredth and so on: a broken function fails thousands of times."""
        self.failed[failure.reason] += 1
        count = self.failed[failure.reason]
        self._first_failure = self._first_failure or failure.summary
        if count == 1:
            trace = f"\n{failure.trace.rstrip()}" if failure.trace else ""
            log.warning("Scoring failed (%s): %s%s", self._name, failure.summary, trace)
        elif str(count).strip("0") == "1":
            log.warning("Scoring failed (%s) %d times by now: %s", self._name, count, failure.summary)

    def grouped(self, n: int, failures: Sequence[Failed]) -> None:
        """A function that has never scored anything is broken rather than unlucky."""
        if self.scored or len(failures) < n or len({failure.reason for failure in failures}) > 1:
            return
        self._broken_groups += 1
        if self._broken_groups == BROKEN_GROUPS:
            log.error(
                "The reward function %s looks broken: nothing was scored so far, and every response of the first %d "
                "groups failed the same way: %s. Check reward.function against your data",
                *(self._name, BROKEN_GROUPS, failures[0].summary),
            )

    def snapshot(self, now: float) -> dict[str, Any]:
        settled = self.scored + self.skipped + self.failed.total()
        return {
            "scored": self.scored,
            "skipped": self.skipped,
            "failed": dict(self.failed),
            **({"first_failure": self._first_failure} if self._first_failure else {}),
            "retried_groups": self.retried_groups,
            "dropped_groups": self.dropped_groups,
            "mean_latency_s": self._latency_s / settled if settled else 0.0,
            "busy_s": self._busy_s + (now - self._busy_since if self._busy_since is not None else 0.0),
        }
