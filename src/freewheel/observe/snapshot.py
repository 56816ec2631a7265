"""What a run looks like at a moment, for those who show it.

FullyAsyncMain fills a `RunSnapshot` about once a second from the components' statistics; `dashboard.terminal` shows it.

A run's pulse: what it does at this moment, as a row of `metrics.jsonl` for those who show it from outside.

    RunSnapshot, at every look ─▶ Pulse.beat ─▶ a row, or None: too soon after the last one

Pure: the clock is the caller's. `RunAccount` records what comes back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Waits = Mapping[str, Mapping[str, float]]
"""Component → span → its share of the last interval."""


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """One moment of a run. What is not known yet is None or empty."""

    mode: str
    step: int
    total_steps: int
    reward: float | None = None
    """Mean of the last step."""
    reward_curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, reward)."""
    eval_curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out accuracy)."""
    version: int = 0
    """The trainer's."""
    published_version: int = 0
    """The newest that all engines in use hold."""
    queue: Mapping[str, float] = field(default_factory=dict)
    """As the queue's statistics have it."""
    freshness: Mapping[str, float] = field(default_factory=dict)
    """As `freshness` gave it for the last step."""
    waits: Waits = field(default_factory=dict)
    verdict: str = ""
    """What holds the run up, in words (`freewheel.runtime.bottleneck`); empty before that was measured."""
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    elapsed_s: float = 0.0
    eta_s: float | None = None
    alerts: list[str] = field(default_factory=list)
    """Metrics that are out of bounds now."""
    events: list[str] = field(default_factory=list)
    """What happened, newest last."""
    run_dir: str = ""


PULSE_MIN_S = 0.95
"""Between two beats of a young run: each look has one, also where it comes a little early."""
PULSE_MAX_S = 9.5
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
        pause_s = min(PULSE_MAX_S, max(PULSE_MIN_S, snapshot.elapsed_s / OLD_AFTER))
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
