"""`Scene`: all that a simulation needs to know of a run, in numbers. Facts only; `measured` and `hardware` make them.

Scene ─┬─ bounds        what may be generated, and what trained (`freewheel.queue.staleness`)
       ├─ generation    replicas, slots, the time of a decoding step
       ├─ scores        the time of a score; a judge's knee, refusals and rate
       ├─ training      the time of a step
       ├─ weights       the time of a sync
       ├─ hand-over     what a message between them costs
       └─ beside        what they cost each other where they share a machine

What a simulation showed, in the names that a run's own accounts have.

Tally (trainer), spans (rollouters) ─ Mark at the end of a step ─▶ between two of them: Outcome
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec
import numpy as np

from freewheel.queue.staleness import Bounds
from freewheel.rollout.outbox import PUT_LINGER_S
from freewheel.runtime.bottleneck import Scoring, Setting, Tried, Verdict, in_turns, streaming, verdict

BLOCK = 4096
"""Numbers drawn at a time: then a draw costs what an iterator does."""
HALVINGS = 60
"""Of an interval, until it is as narrow as a float tells numbers apart."""


class Draw(Protocol):
    @property
    def mean(self) -> float: ...

    def block(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]: ...


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    value: float

    @property
    def mean(self) -> float:
        return self.value

    def block(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.full(count, self.value)


@dataclass(frozen=True)
class Uniform:
    low: float
    high: float

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def block(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return rng.uniform(self.low, self.high, count)


@dataclass(frozen=True)
class Lognormal:
    """Most are short and a few are long, as lengths of responses and latencies of judges are."""

    middle: float
    """The mean before anything is cut off."""
    sigma: float
    """Spread of the logarithm."""
    most: float = math.inf
    """Longer ones are cut off here, as responses are at `max_new_tokens`."""

    @property
    def mean(self) -> float:
        """With the cut: E[min(X, m)] = E[X]·Φ((ln m − μ)/σ − σ) + m·(1 − Φ((ln m − μ)/σ))."""
        if math.isinf(self.most) or self.sigma == 0:
            return min(self.middle, self.most)
        z = (math.log(self.most) - self._mu) / self.sigma
        return self.middle * _phi(z - self.sigma) + self.most * (1 - _phi(z))

    @classmethod
    def of_mean(cls, mean: float, sigma: float, most: float) -> Lognormal:
        """The one that has this mean with the cut, which is not above `most`."""
        low = high = mean
        while cls(high, sigma, most).mean < mean:
            high *= 2
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, sigma, most).mean < mean else (low, middle)
        return cls(high, sigma, most)

    @property
    def _mu(self) -> float:
        return math.log(self.middle) - self.sigma**2 / 2

    def block(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.minimum(rng.lognormal(self._mu, self.sigma, count), self.most)


@dataclass(frozen=True)
class Measured:
    """One of the values that were seen, each as likely as it was frequent."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values = (): give at least one that was measured")

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        return cls(tuple(values))

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    def block(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return rng.choice(np.asarray(self.values, dtype=np.float64), count)


def stream(draw: Draw, rng: np.random.Generator) -> Iterator[float]:
    """Without end."""
    while True:
        yield from draw.block(rng, BLOCK).tolist()


def whole_stream(draw: Draw, rng: np.random.Generator) -> Iterator[int]:
    """The same in whole numbers of at least 1: tokens."""
    while True:
        yield from np.maximum(1, np.rint(draw.block(rng, BLOCK))).astype(np.int64).tolist()


def _phi(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


MESSAGE_S = 0.005
"""Where nothing is known of it: a call between Ray actors with a batch in it takes some milliseconds."""
AT_ONCE, STEADY = Constant(0.0), Constant(1.0)
"""A latency of nothing; a factor that does not vary."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Engines with continuous batching, all alike."""

    replicas: int = 1
    slots: int
    """Sequences at a time, of each."""
    step_s: float
    """Of one decoding step, a token for every sequence that runs, as far as it does not depend on how many do."""
    per_sequence_s: float = 0.0
    """What each of them adds to it."""
    prefill_s: float = 0.0
    """For which decoding stands still when a group's prompt is read."""
    resolution: int = 1
    """Tokens that lengths are rounded to: ends that fall together are simulated together."""
    refill: int = 1
    """Slots that must be free before samples enter beside others (the native engine's: an eighth of them)."""

    def token_s(self, running: int) -> float:
        return self.step_s + self.per_sequence_s * running

    @property
    def tokens_per_s(self) -> float:
        """Of all replicas, with all slots in use and no prompt to read."""
        return self.replicas * self.slots / self.token_s(self.slots)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How a response gets its score. Without `knee`, `refuse_above` and `rate_per_s` as many as there are at a time."""

    is_judge: bool = False
    """An LLM judge scores, and not a function alone."""
    latency_s: Draw = AT_ONCE
    """Of one that is alone."""
    knee: int | None = None
    """From so many at a time on, the judge gives each a smaller share of itself."""
    refuse_above: int | None = None
    """It answers 429 to more than so many at a time."""
    rate_per_s: float | None = None
    """It answers 429 to more than so many a second; the pacer is told of it (`requests_per_minute`)."""

    @property
    def is_limited(self) -> bool:
        return any(one is not None for one in (self.knee, self.refuse_above, self.rate_per_s))

    @property
    def per_s(self) -> float | None:
        """The most that it can score; None: any number."""
        widest = min((one for one in (self.knee, self.refuse_above) if one is not None), default=None)
        bounds = [self.rate_per_s, None if widest is None else widest / max(self.latency_s.mean, 1e-9)]
        return min((one for one in bounds if one is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The time of a step: `base_s` + `per_token_s` × its tokens, prompts included, times what varies."""

    base_s: float = 0.0
    per_token_s: float = 0.0
    varies: Draw = STEADY
    prompt_tokens: float = 0.0
    """Of each response's prompt, as far as a step computes it."""
    pack_s: float = 0.0
    """For which the trainer stands still to copy the weights."""

    def step_s(self, tokens: float) -> float:
        return self.base_s + self.per_token_s * tokens


@dataclass(frozen=True, kw_only=True)
class Weights:
    """How a version gets to the engines."""

    transfer_s: float = 0.0
    """While they go on generating."""
    pause_s: float = 0.0
    """For which they stand still."""


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """Between the components: from one's word to the other's, the journal included."""

    admit_s: float = 0.0
    put_s: float = 0.0
    take_s: float = 0.0
    commit_s: float = 0.0
    linger_s: float = PUT_LINGER_S
    """As long as finished groups wait for others to share a message with."""
    interval_s: float = 0.0
    """`async_training.batch_generation_interval`."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What each side's work takes longer while the other is at work too, as a factor: they share cores, or a GPU."""

    generation: float = 1.0
    training: float = 1.0

    @property
    def apart(self) -> bool:
        return self.generation == 1.0 and self.training == 1.0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One run."""

    bounds: Bounds
    """With `total_groups`: when the simulation ends."""
    n: int
    """Responses to a prompt."""
    lengths: Draw
    """Tokens that the engine generates for a response."""
    trained_lengths: Draw | None = None
    """Tokens that are trained on, where they differ."""
    generation: Generation
    scores: Scores = field(default_factory=Scores)
    training: Training
    weights: Weights = field(default_factory=Weights)
    hand_over: HandOver = field(default_factory=HandOver)
    beside: Beside = field(default_factory=Beside)
    window: tuple[int, int] | None = None
    """Steps between whose ends is measured. None: without what fills the pipeline and what empties it."""

    def __post_init__(self) -> None:
        if self.bounds.total_groups is None or self.bounds.total_groups % self.bounds.groups_per_step:
            raise ValueError(f"total_groups = {self.bounds.total_groups}: give a multiple of groups_per_step")
        first, last = self.measured
        if not 0 <= first < last <= self.steps:
            raise ValueError(f"window = {self.window}: give two steps of the {self.steps}, the earlier first")

    @property
    def steps(self) -> int:
        assert self.bounds.total_groups is not None
        return self.bounds.total_groups // self.bounds.groups_per_step

    @property
    def measured(self) -> tuple[int, int]:
        """Generation runs up to `threshold` versions ahead: so many steps fill it, and so many empty it."""
        if self.window is not None:
            return self.window
        ahead = (self.bounds.threshold + 2) * self.bounds.steps_per_version
        return min(ahead, self.steps // 3), max(self.steps - ahead, 2 * self.steps // 3, 1)

    @property
    def tokens_per_step(self) -> float:
        """As the trainer computes them, on average."""
        lengths = self.trained_lengths or self.lengths
        return self.bounds.groups_per_step * self.n * (lengths.mean + self.training.prompt_tokens)

    @property
    def capacities(self) -> dict[str, float]:
        """Groups a second that each part could do alone; engines with the pauses that versions cost them."""
        made, bounds = self.generation, self.bounds
        per_group_s = self.n * self.lengths.mean / made.tokens_per_s + made.prefill_s / made.replicas
        found = {"generation": 1 / (per_group_s + self.weights.pause_s / bounds.groups_per_version)}
        if (scored := self.scores.per_s) is not None:
            found["judge"] = scored / self.n
        step_s = self.training.step_s(self.tokens_per_step) * self.training.varies.mean
        found["training"] = bounds.groups_per_step / (step_s + self.training.pack_s / bounds.steps_per_version)
        return found

    @property
    def guess(self) -> float:
        """Groups a second by `freewheel.runtime.bottleneck` alone."""
        if self.bounds.in_turns:
            return in_turns(self.capacities)
        return streaming(self.capacities)[1]


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
