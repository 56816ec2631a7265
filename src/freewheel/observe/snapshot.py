"""What a run looks like at a moment, for those who show it.

FullyAsyncMain fills a `RunSnapshot` about once a second from the components' statistics; `dashboard.terminal` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
