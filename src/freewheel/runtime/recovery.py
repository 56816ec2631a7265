"""When a component is restarted, and when a run is given up. Pure: callers pass the time and the steps.

    a component died at step s ───────────────────▶ Restarts.died ──▶ seconds to wait first, or None: give up

    steps, groups, tokens, scores ────────┐
    training, saving, evaluating, paused ─┴─▶ StallDetector.stalled ──▶ restart what stands still; then `Stalled`
    abandoned and filtered prompts ─────────▶ AbandonedPrompts ──▶ `NothingToTrainOn`

`RunAccount` feeds `StallDetector` and `AbandonedPrompts` once a second; `FullyAsyncMain` asks all three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LONGEST_BACKOFF_S = 30.0
_MOST_DOUBLINGS = 32
"""Keeps the power of two within a float."""

STEP_S = 3600.0
"""The least time that a training step may take: the first one compiles and allocates, and an engine on the same
accelerator may delay it. A save or an evaluation counts as activity for as long."""
STEP_TIMES = 20
"""A step may also take this many times as long as the longest before it."""
_LONG_WORK = ("training", "saving", "evaluating")
"""What the trainer may do for long without visible progress, by its names in the trainer's statistics."""

HOPELESS_BATCHES = 4
"""Give up after this many batches' worth of prompts were abandoned without a step: a reward function that always raises
would otherwise use up every prompt."""
SAME_BATCHES = 64
"""The same for groups that a filter rejected. More than for failures: at the start of a hard task, or near the end of
an easy one, one group in thirty may be worth training on."""
_FILTERS = ("zero_variance",)
"""Reasons for which a prompt is rejected on purpose."""


class KeepsDying(RuntimeError):
    """A component dies repeatedly; restarting it does not fix the cause."""


class NotRecorded(RuntimeError):
    """A component died whose state was not journaled, and the run cannot continue without it."""


class RayDied(RuntimeError):
    """Ray itself died, and every component with it."""


class Stalled(RuntimeError):
    """Nothing moved for a long time, and work remains."""


class NothingToTrainOn(RuntimeError):
    """Many prompts in a row are abandoned, and no step is taken."""


class Restarts:
    """Counts each component's deaths in a row. A trained step clears all counts."""

    def __init__(self, *, max_restarts: int, backoff_s: float) -> None:
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._deaths: Counter[str] = Counter()
        self._step = 0

    def died(self, name: str, *, step: int) -> float | None:
        """Return how many seconds to wait before `name` is restarted, or None to give up. `step`: the last trained."""
        if step > self._step:
            self._step = step
            self._deaths.clear()
        earlier = self._deaths[name]
        self._deaths[name] += 1
        if earlier >= self._max_restarts:
            return None
        if not earlier:
            return 0.0
        return min(self._backoff_s * 2.0 ** min(earlier - 1, _MOST_DOUBLINGS), LONGEST_BACKOFF_S)


@dataclass(frozen=True)
class Stall:
    """The run makes no progress."""

    why: str
    is_training: bool
    """True: a step takes too long. False: no group arrives."""


class StallDetector:
    """Notices when a run makes no progress, whether or not all processes are alive."""

    def __init__(self, now: float) -> None:
        self.longest_step_s = 0.0
        self.stalls = 0
        """Stalls reported since anything last moved."""
        self._marks: object = None
        self._since = now
        self._step = 0
        self._work: dict[str, float] = {}
        """Current work among `_LONG_WORK`, and when it began."""

    def note(self, marks: object, *, trainer: Mapping[str, Any], paused: bool = False, now: float) -> None:
        """Take in a look. `marks` differ when anything moved; `trainer` is its statistics, or empty without an answer.

        Activity and an intended pause stop the clock, but only movement clears earlier stalls: a trainer that hangs in
        a step hangs in it again after a restart.
        """
        if trainer:
            self._note_work(trainer, now)
        active = bool(trainer) and any(now - since <= self._step_deadline_s for since in self._work.values())
        if marks != self._marks:
            self._marks, self.stalls = marks, 0
        elif not active and not paused:
            return
        self._since = now

    def _note_work(self, trainer: Mapping[str, Any], now: float) -> None:
        step = int(trainer.get("global_steps", 0))
        is_next = step != self._step
        if "training" in self._work and (is_next or not trainer.get("training")):
            self.longest_step_s = max(self.longest_step_s, now - self._work["training"])
        before = {} if is_next else self._work
        self._step = step
        self._work = {kind: before.get(kind, now) for kind in _LONG_WORK if trainer.get(kind)}

    @property
    def _step_deadline_s(self) -> float:
        return max(STEP_S, STEP_TIMES * self.longest_step_s)

    def stalled_s(self, now: float) -> float:
        """Return the seconds since anything moved."""
        return now - self._since

    def stalled(self, now: float, *, patience_s: float) -> Stall | None:
        """Return what the run is stuck with, if it is. A reported stall restarts the clock."""
        trained_s = now - self._work.get("training", now)
        stall = None
        if trained_s > self._step_deadline_s:
            longest = f"the longest before it took {self.longest_step_s:.0f} s"
            stall = Stall(f"step {self._step + 1} has been trained for {trained_s:.0f} s, and {longest}", True)
        elif self.stalled_s(now) > patience_s:
            stall = Stall(f"no step, no token and no score for {patience_s:g} s", False)
        if stall is not None:
            self.stalls += 1
            self._since, self._work = now, {}
        return stall


class AbandonedPrompts:
    """Counts prompts that ended without training since the last step."""

    def __init__(self, *, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._abandoned: Counter[str] = Counter()
        self._before: Counter[str] = Counter()
        self._step: int | None = None

    def note(self, queue: Mapping[str, Any]) -> None:
        """Take in the queue's statistics; empty ones, without an answer, change nothing."""
        if "abandoned" not in queue:
            return
        self._abandoned = Counter(queue["abandoned"])
        step = int(queue.get("step", 0))
        if self._step is None or step > self._step:
            self._step, self._before = step, self._abandoned

    @property
    def hopeless(self) -> str:
        """Why no further step can be expected; empty while one can."""
        since = self._abandoned - self._before
        filtered = Counter({reason: since[reason] for reason in _FILTERS if reason in since})
        failed = since - filtered
        if failed.total() >= HOPELESS_BATCHES * self._groups_per_step:
            reasons = ", ".join(f"{reason} {count}" for reason, count in failed.most_common())
            return (
                f"{failed.total()} prompts were abandoned since step {self._step} ({reasons}): see the warnings in the "
                "log for the cause"
            )
        if filtered.total() >= SAME_BATCHES * self._groups_per_step:
            return (
                f"every group scores the same, or nearly every one: {filtered.total()} were dropped since step "
                f"{self._step} (algorithm.zero_variance = drop). Set algorithm.zero_variance=keep, give harder "
                "prompts, or take fewer steps"
            )
        return ""
