"""A run's pulse: what it does at this moment, as a row of `metrics.jsonl` for those who show it from outside.

    RunSnapshot, at every look ─▶ Pulse.beat ─▶ a row, or None: too soon after the last one

Pure: the clock is the caller's. `RunAccount` records what comes back.
"""

from __future__ import annotations

import math
from typing import Any

from freewheel.observe.snapshot import RunSnapshot

EVERY_S = 0.95
"""Between two beats of a young run: each look has one, also where it comes a little early."""
LATER_S = 9.5
"""Between two beats of an old one: of a week there are 60,000 rows, and not ten times as many."""
OLD_AFTER = 3600
"""Beats come once in this part of a run's age, between the two: as fine as a chart of it can show."""
DIGITS = 4
"""Of a share of time."""


class Pulse:
    """Says a run's state as often as its age calls for."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def beat(self, now: float, snapshot: RunSnapshot, *, last: bool = False) -> dict[str, Any] | None:
        """`last`: however soon after the one before, for it says how the run ended, and says that it does."""
        pause_s = min(LATER_S, max(EVERY_S, snapshot.elapsed_s / OLD_AFTER))
        if not last and now - self._last_s < pause_s:
            return None
        self._last_s = now
        return {**pulse_of(snapshot), **({"last": True} if last else {})}


def pulse_of(snapshot: RunSnapshot) -> dict[str, Any]:
    return {
        "queue_size": snapshot.queue.get("queue_size"),
        "in_progress": snapshot.queue.get("in_progress"),
        "version": snapshot.version,
        "published_version": snapshot.published_version,
        "tokens_per_s": snapshot.tokens_per_s,
        "samples_per_s": snapshot.samples_per_s,
        "waits": {
            component: {name: round(share, DIGITS) for name, share in shares.items()}
            for component, shares in snapshot.waits.items()
        },
        "verdict": snapshot.verdict,
    }
