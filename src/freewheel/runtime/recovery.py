"""`Restarts`: whether a part that died is started anew, and when. Pure.

    died(part, step) ─▶ seconds to wait first, or None: it keeps dying, and the run ends

A part's deaths count in a row until the run has trained another step: what dies again and again in between has a cause
that restarting does not mend. Asked by `FullyAsyncMain`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


STEP_S = 3600.0
"""A training step may take this long however short the others were: the first one compiles and allocates, and an
engine on the same accelerator may hold it up. So may a save or an evaluation before it no longer counts as activity."""
STEP_TIMES = 20
"""A step may also take this many times as long as the longest before it."""
LONG_WORK = ("training", "saving", "evaluating")
"""What the trainer may be at for a long time without anything to show for it, by its names in its statistics."""
HOPELESS_BATCHES = 4
"""Batches' worth of prompts that were given up since the last step, after which a step is not to be expected: a reward
function that always raises would otherwise use up every prompt there is, or go on for ever."""
SAME_BATCHES = 64
"""Batches' worth of groups that a filter turned down since the last step, after which the same holds. More than
failures: at the start of a hard task, or near the end of an easy one, one group in thirty may be worth training on."""
FILTERS = ("zero_variance",)
"""Reasons for which a prompt is given up on purpose."""


class Stalled(RuntimeError):
    """Nothing moved for a long time, and work remains."""


class NothingToTrainOn(RuntimeError):
    """Prompt after prompt is given up, and no step comes of it."""


@dataclass(frozen=True)
class Stall:
    """Nothing moves."""

    why: str
    training: bool
    """It is a step that takes too long; else no group comes."""


class Progress:
    """Since when nothing has moved: not whether processes live, but whether work gets done."""

    def __init__(self, now: float) -> None:
        self.longest_step_s = 0.0
        self.stalls = 0
        """Times that it was found to be stuck since it last moved."""
        self._marks: object = None
        self._since = now
        self._step = 0
        self._work: dict[str, float] = {}  # what of `LONG_WORK` goes on, since when

    def note(self, marks: object, *, trainer: Mapping[str, Any], paused: bool = False, now: float) -> None:
        """`trainer`: its statistics; empty where it did not answer. `paused`: on purpose, until there is room."""
        if trainer:
            self._note_work(trainer, now)
        active = bool(trainer) and any(now - since <= self.step_deadline_s for since in self._work.values())
        if marks != self._marks:
            self._marks, self.stalls = marks, 0
        elif not active and not paused:
            return
        self._since = now

    def _note_work(self, trainer: Mapping[str, Any], now: float) -> None:
        step = int(trainer.get("global_steps", 0))
        on_the_next = step != self._step
        if "training" in self._work and (on_the_next or not trainer.get("training")):
            self.longest_step_s = max(self.longest_step_s, now - self._work["training"])
        before = {} if on_the_next else self._work
        self._step = step
        self._work = {kind: before.get(kind, now) for kind in LONG_WORK if trainer.get(kind)}

    @property
    def step_deadline_s(self) -> float:
        return max(STEP_S, STEP_TIMES * self.longest_step_s)

    def stalled_s(self, now: float) -> float:
        return now - self._since

    def stalled(self, now: float, *, patience_s: float) -> Stall | None:
        """What the run is stuck with; None while it is not. Once it is said, time is counted anew."""
        trained_s = now - self._work.get("training", now)
        stall = None
        if trained_s > self.step_deadline_s:
            longest = f"the longest before it took {self.longest_step_s:.0f} s"
            stall = Stall(f"step {self._step + 1} has been trained for {trained_s:.0f} s, and {longest}", training=True)
        elif self.stalled_s(now) > patience_s:
            stall = Stall(f"no step, no token and no score for {patience_s:g} s", training=False)
        if stall is not None:
            self.stalls += 1
            self._since, self._work = now, {}
        return stall


class GivenUp:
    """Prompts that came to nothing since the last step."""

    def __init__(self, *, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._abandoned: Counter[str] = Counter()
        self._before: Counter[str] = Counter()
        self._step: int | None = None

    def note(self, queue: Mapping[str, Any]) -> None:
        """`queue`: its statistics; empty where it did not answer."""
        if "abandoned" not in queue:
            return
        self._abandoned = Counter(queue["abandoned"])
        step = int(queue.get("step", 0))
        if self._step is None or step > self._step:
            self._step, self._before = step, self._abandoned

    @property
    def hopeless(self) -> str:
        """Why no step is to be expected any more; empty while one is."""
        since = self._abandoned - self._before
        filtered = Counter({reason: since[reason] for reason in FILTERS if reason in since})
        failed = since - filtered
        if failed.total() >= HOPELESS_BATCHES * self._groups_per_step:
            reasons = ", ".join(f"{reason} {count}" for reason, count in failed.most_common())
            return (
                f"{failed.total()} prompts were given up since step {self._step} ({reasons}): see the warnings in the "
                "log for why"
            )
        if filtered.total() >= SAME_BATCHES * self._groups_per_step:
            return (
                f"every group scores the same, or nearly every one: {filtered.total()} were dropped since step "
                f"{self._step} (algorithm.zero_variance = drop). Set algorithm.zero_variance=keep, give harder "
                "prompts, or take fewer steps"
            )
        return ""
