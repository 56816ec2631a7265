"""What a simulation showed, in the names that a run's own accounts have.

Tally (trainer), spans (rollouters) ─ Mark at the end of a step ─▶ between two of them: Outcome
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from freewheel.runtime.bottleneck import Scoring, Setting, Tried, Verdict, verdict

BUSY, FILLED = "busy", "filled"
"""Among a mark's spans: seconds in which engines decoded, and the same times the share of slots in use."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Between the ends of two steps, where nothing else is said."""

    steps: int
    wall_s: float
    groups: int
    samples: int
    tokens: int
    """Generated for the groups that were trained on."""
    waits: dict[str, dict[str, float]]
    """Component → span → share, as in `metrics.jsonl`; rollouters are averaged."""
    engine_busy: float
    """Share of the time in which an engine decoded, on average."""
    lag_mean: float
    lag_max: int
    lag_counts: list[int]
    """Index: versions that a group lagged when it was trained on."""
    ready_mean: float
    """Groups that were ready when a step began."""
    scores_per_s: float
    held_back: float | None = None
    """Share of the whole run in which responses waited for the judge's limit; None for one without limits."""
    slots_in_use: float
    """Share of the engines' slots, on average."""
    judge_limit: int | None = None
    """The limiter's, at the end; None for a judge without limits."""
    judge_refused: int = 0
    """429s, of the whole run."""
    whole_s: float
    """From the start to the end of the last step."""
    busy_per_token_s: float
    """Engine time of a token, of the whole run."""
    lives: int
    """Groups from admission to training, of the whole run."""

    @property
    def step_s(self) -> float:
        return self.wall_s / self.steps

    @property
    def groups_per_s(self) -> float:
        return self.groups / self.wall_s

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def trainer_waits(self) -> float:
        return self.waits["trainer"]["wait_batch"]

    @property
    def generation_waits(self) -> float:
        return 1 - self.engine_busy

    def verdict(
        self,
        setting: Setting,
        *,
        is_judge: bool = False,
        judge_in_use: float | None = None,
        tried: Tried | None = None,
    ) -> Verdict:
        """As a run of this kind would be told. `judge_in_use`: of what the judge can do, the share that it did."""
        scoring = Scoring(
            is_judge=is_judge,
            per_s=self.scores_per_s,
            held_back=self.held_back or 0.0,
            in_use=judge_in_use,
            slots_in_use=self.slots_in_use,
        )
        return verdict(self.waits, setting, scoring, tried=tried)


@dataclass(slots=True)
class Tally:
    """What is added up while a simulation goes on: seconds of the trainer, and what was trained."""

    train_s: float = 0.0
    wait_s: float = 0.0
    pack_s: float = 0.0
    groups: int = 0
    tokens: int = 0
    ready_sum: int = 0
    steps: int = 0
    scored: int = 0
    lag_counts: list[int] = field(default_factory=list)

    def note_lag(self, lag: int) -> None:
        if lag >= len(self.lag_counts):
            self.lag_counts += [0] * (lag + 1 - len(self.lag_counts))
        self.lag_counts[lag] += 1


@dataclass(frozen=True)
class Mark:
    """The accounts at a moment."""

    at: float
    tally: Tally
    spans: dict[str, float]
    """Of all rollouters together."""

    @classmethod
    def now(cls, at: float, tally: Tally, spans: dict[str, float]) -> Mark:
        return cls(at, replace(tally, lag_counts=list(tally.lag_counts)), spans)


def between(before: Mark, after: Mark, *, n: int, replicas: int) -> dict[str, object]:
    """The fields of an `Outcome` that follow from two marks."""
    wall_s = after.at - before.at
    first, last = before.tally, after.tally
    spent = {name: (spans - before.spans[name]) / (wall_s * replicas) for name, spans in after.spans.items()}
    known = [*first.lag_counts, *[0] * (len(last.lag_counts) - len(first.lag_counts))]
    lags = [many - some for many, some in zip(last.lag_counts, known, strict=True)]
    groups, steps = last.groups - first.groups, last.steps - first.steps
    return {
        "wall_s": wall_s,
        "groups": groups,
        "samples": groups * n,
        "tokens": last.tokens - first.tokens,
        "waits": {
            "trainer": {
                "train": (last.train_s - first.train_s) / wall_s,
                "wait_batch": (last.wait_s - first.wait_s) / wall_s,
                "pack": (last.pack_s - first.pack_s) / wall_s,
            },
            "rollouter": {name: share for name, share in spent.items() if name not in (BUSY, FILLED)},
        },
        "engine_busy": spent[BUSY],
        "slots_in_use": spent[FILLED],
        "lag_mean": sum(lag * many for lag, many in enumerate(lags)) / groups,
        "lag_max": max((lag for lag, many in enumerate(lags) if many), default=0),
        "lag_counts": lags,
        "ready_mean": (last.ready_sum - first.ready_sum) / steps,
        "scores_per_s": (last.scored - first.scored) / wall_s,
    }
