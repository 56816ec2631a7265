"""The state of a run at a moment, for the terminal view and for `pulse` rows of `metrics.jsonl`.

    FullyAsyncMain, about once a second ─▶ RunSnapshot ─┬─▶ dashboard.terminal
                                                        └─▶ Pulse.beat ─▶ a row, or None if it is too soon

Pure: the caller provides the clock. `RunAccount` records the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Waits = Mapping[str, Mapping[str, float]]
"""Component → span → share of the last interval."""


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """One moment of a run. Unknown values are None or empty."""

    mode: str
    step: int
    total_steps: int
    reward: float | None = None
    """Mean reward of the last step."""
    reward_curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, mean reward) pairs."""
    eval_curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out accuracy) pairs."""
    version: int = 0
    """The trainer's version."""
    published_version: int = 0
    """The newest version that all engines in use hold."""
    queue: Mapping[str, float] = field(default_factory=dict)
    """The queue's statistics."""
    freshness: Mapping[str, float] = field(default_factory=dict)
    """The result of `freshness` for the last step."""
    waits: Waits = field(default_factory=dict)
    verdict: str = ""
    """The bottleneck in words (`freewheel.runtime.bottleneck`); empty until it has been measured."""
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    elapsed_s: float = 0.0
    eta_s: float | None = None
    alerts: list[str] = field(default_factory=list)
    """Metrics that are out of bounds now."""
    events: list[str] = field(default_factory=list)
    """Recent events, newest last."""
    run_dir: str = ""


PULSE_MIN_S = 0.95
"""Seconds between two pulses of a young run. Slightly less than a second, so that every look has a pulse."""
PULSE_MAX_S = 9.5
"""Seconds between two pulses of an old run: 60,000 rows per week."""
OLD_AFTER = 3600
"""The interval between pulses is the run's age divided by this, within the two bounds: as fine as a chart can show."""
DIGITS = 4
"""Decimal digits of a share of time."""


class Pulse:
    """Emits a run's state at intervals that grow with its age."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def beat(self, now: float, snapshot: RunSnapshot, *, last: bool = False) -> dict[str, Any] | None:
        """`last`: emit the row however soon it comes, and mark it, because it says how the run ended."""
        pause_s = min(PULSE_MAX_S, max(PULSE_MIN_S, snapshot.elapsed_s / OLD_AFTER))
        if not last and now - self._last_s < pause_s:
            return None
        self._last_s = now
        row = {
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
        return row | {"last": True} if last else row
