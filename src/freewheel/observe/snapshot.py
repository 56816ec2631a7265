"""What a run looks like at a moment, for those who show it; and what it waits for, in words.

FullyAsyncMain fills a `RunSnapshot` about once a second from the components' statistics; `dashboard.terminal` shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Waits = Mapping[str, Mapping[str, float]]
"""Component → span → its share of the last interval."""

WAITING = 0.10
"""A part that waits less than a tenth of the time is busy: what is left is hand-over, which nothing would remove."""
UNMEASURED = "who waits for whom has not been measured"
"""Said of a run before both sides have been."""


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
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    elapsed_s: float = 0.0
    eta_s: float | None = None
    alerts: list[str] = field(default_factory=list)
    """Metrics that are out of bounds now."""
    events: list[str] = field(default_factory=list)
    """What happened, newest last."""
    run_dir: str = ""


def bottleneck(waits: Waits) -> str:
    """What the run would be faster without, in words that start with `generation`, `training`, `reward`, `sync`, `save`
    or `nothing`; or `UNMEASURED`. Shares of several rollouters (`rollouter`, `rollouter-0`, …) are averaged.

    Each is charged with the time for which others stood still because of it, and the largest charge names it:

        sync         the trainer's `pack`, or rollouters' `load_weights`, whichever is more
        save         the trainer's `save`, as far as it did nothing else meanwhile
        reward       rollouters' `wait_reward`, as far as the trainer waited for a batch
        generation   the trainer's `wait_batch`, less what reward is charged with
        training     rollouters' `wait_room`
    """
    trainer = dict(waits.get("trainer", {}))
    rollouter = _mean(shares for name, shares in waits.items() if name.partition("-")[0] == "rollouter")
    if not trainer or not rollouter:
        return UNMEASURED
    pack, starved = trainer.get("pack", 0.0), trainer.get("wait_batch", 0.0)
    sync = max(pack, rollouter.get("load_weights", 0.0))
    save = min(trainer.get("save", 0.0), max(0.0, 1 - trainer.get("train", 0.0) - starved - pack))
    reward = min(starved, rollouter.get("wait_reward", 0.0))
    held_back = rollouter.get("wait_room", 0.0)
    charges = {
        "sync": (sync, "of the time went into bringing weights to the engines"),
        "save": (save, "of the time went into writing checkpoints"),
        "reward": (reward, "of the time training and generation both waited for scores"),
        "generation": (starved - reward, "of the time the trainer waited for responses"),
        "training": (held_back, "of the time generation was held back, so that samples stay fresh"),
    }
    part, (share, why) = max(charges.items(), key=lambda item: item[1][0])
    if share < WAITING:
        return "nothing: generation and training keep each other busy"
    return f"{part}: {share:.0%} {why}"


def _mean(components: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found = list(components)
    names = dict.fromkeys(name for shares in found for name in shares)
    return {name: sum(shares.get(name, 0.0) for shares in found) / len(found) for name in names}
