"""`Restarts`: whether a part that died is started anew, and when. Pure.

    died(part, step) ─▶ seconds to wait first, or None: it keeps dying, and the run ends

A part's deaths count in a row until the run has trained another step: what dies again and again in between has a cause
that restarting does not mend. Asked by `FullyAsyncMain`.
"""

from __future__ import annotations

from collections import Counter

LONGEST_BACKOFF_S = 30.0
MOST_DOUBLINGS = 32
"""More would only be more than a number can hold."""


class KeepsDying(RuntimeError):
    """A part dies again and again: what it dies of is not mended by starting it anew."""


class NotRecorded(RuntimeError):
    """A part died without which the run cannot go on, since there is no journal of it."""


class RayDied(RuntimeError):
    """There is nothing left to start a part on."""


class Restarts:
    """A budget for each part."""

    def __init__(self, *, max_restarts: int, backoff_s: float) -> None:
        self.total: Counter[str] = Counter()
        """Deaths by part, of the whole run."""
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._in_a_row: Counter[str] = Counter()
        self._step = 0

    def died(self, part: str, *, step: int) -> float | None:
        """`step`: the last that was trained. Gives how long to wait before `part` is started anew; None: no more."""
        if step > self._step:
            self._step = step
            self._in_a_row.clear()
        self.total[part] += 1
        self._in_a_row[part] += 1
        again = self._in_a_row[part] - 1
        if again >= self._max_restarts:
            return None
        if not again:
            return 0.0
        return min(self._backoff_s * 2.0 ** min(again - 1, MOST_DOUBLINGS), LONGEST_BACKOFF_S)
