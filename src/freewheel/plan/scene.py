"""`Scene`: everything a simulation needs to know about a run, as numbers. `Outcome`: what a simulation found.

    Scene ─┬─ bounds        what may be generated and trained on (`freewheel.queue.staleness`)
           ├─ generation    replicas, slots, the time of a decoding step
           ├─ scores        the time of a score; a judge's knee and rate
           ├─ training      the time of a step
           ├─ weights       the time of a sync
           ├─ hand-over     the time of a message between components
           └─ slowdown      how much both sides slow each other down on shared hardware

`clusters` makes scenes. Draws are frozen descriptions of distributions; `stream` turns one into numbers from a seeded
generator, so equal seeds give equal runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from freewheel.queue.staleness import Bounds
from freewheel.rollout.rollouter import PUT_LINGER_S
from freewheel.runtime.bottleneck import Scoring, Setting, Tried, Verdict, in_turns, streaming, verdict

BLOCK = 4096
"""Numbers drawn at once, because single draws are slow."""
HALVINGS = 60
"""Bisections of an interval until floats are exhausted."""


Values = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Lognormal:
    """Mostly short and sometimes long, like response lengths and judge latencies."""

    middle: float
    """The mean before values are cut off."""
    sigma: float
    """Standard deviation of the logarithm."""
    most: float = math.inf
    """Larger values are cut off here, like responses at `max_new_tokens`."""

    @property
    def mean(self) -> float:
        """Return the mean with the cut: E[min(X, m)] = E[X]·Φ((ln m − μ)/σ − σ) + m·(1 − Φ((ln m − μ)/σ))."""
        if math.isinf(self.most) or self.sigma == 0:
            return min(self.middle, self.most)
        z = (math.log(self.most) - self._mu) / self.sigma
        return self.middle * _phi(z - self.sigma) + self.most * (1 - _phi(z))

    @classmethod
    def of_mean(cls, mean: float, sigma: float, most: float) -> Lognormal:
        """Return the distribution with this mean after the cut."""
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

    def block(self, rng: np.random.Generator, count: int) -> Values:
        return np.minimum(rng.lognormal(self._mu, self.sigma, count), self.most)


@dataclass(frozen=True)
class Measured:
    """Draws one of the given values, at least one, each with its frequency."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    def block(self, rng: np.random.Generator, count: int) -> Values:
        return rng.choice(np.asarray(self.values, dtype=np.float64), count)


Draw = Lognormal | Measured


def stream(draw: Draw, rng: np.random.Generator) -> Iterator[float]:
    """Yield values forever."""
    while True:
        yield from draw.block(rng, BLOCK).tolist()


def whole_stream(draw: Draw, rng: np.random.Generator) -> Iterator[int]:
    """Yield whole numbers of at least 1: tokens."""
    while True:
        yield from np.maximum(1, np.rint(draw.block(rng, BLOCK))).astype(np.int64).tolist()


def _phi(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


MESSAGE_S = 0.005
"""Default: a call between Ray actors with a batch takes some milliseconds."""
AT_ONCE, STEADY = Measured((0.0,)), Measured((1.0,))
"""No latency; a factor that does not vary."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Identical engines with continuous batching."""

    replicas: int = 1
    slots: int
    """Sequences at a time, per engine."""
    step_s: float
    """Fixed part of the time of a decoding step, which makes one token for every running sequence."""
    per_sequence_s: float = 0.0
    """Additional time per running sequence."""
    prefill_s: float = 0.0
    """How long decoding stops while a group's prompt is read."""
    resolution: int = 1
    """Tokens to which lengths are rounded, so that simultaneous ends are simulated together."""
    refill: int = 1
    """Slots that must be free before new samples enter (native engine: an eighth of the slots)."""

    def token_s(self, running: int) -> float:
        return self.step_s + self.per_sequence_s * running

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all replicas with all slots in use and no prompts to read."""
        return self.replicas * self.slots / self.token_s(self.slots)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How a response gets its score. Without `knee` and `rate_per_s` there is no limit."""

    is_judge: bool = False
    """An LLM judge scores, not only a function."""
    latency_s: Draw = AT_ONCE
    """Latency of a single request."""
    knee: int | None = None
    """Beyond this many requests at a time each one gets a smaller share of the judge."""
    rate_per_s: float | None = None
    """The judge answers 429 beyond this many requests per second; the pacer knows it (`requests_per_minute`)."""

    @property
    def per_s(self) -> float | None:
        """Most scores per second; None: unlimited."""
        of_knee = None if self.knee is None else self.knee / max(self.latency_s.mean, 1e-9)
        return min((one for one in (self.rate_per_s, of_knee) if one is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The time of a step: (`base_s` + `per_token_s` × its tokens, prompts included) times what varies."""

    base_s: float = 0.0
    per_token_s: float = 0.0
    varies: Draw = STEADY
    prompt_tokens: float = 0.0
    """Prompt tokens per response that a step computes."""
    pack_s: float = 0.0
    """How long the trainer pauses to copy the weights."""

    def step_s(self, tokens: float) -> float:
        return self.base_s + self.per_token_s * tokens

    def faster(self, factor: float) -> Training:
        return replace(self, base_s=self.base_s / factor, per_token_s=self.per_token_s / factor)


@dataclass(frozen=True, kw_only=True)
class WeightTransfer:
    """How a version reaches the engines."""

    transfer_s: float = 0.0
    """Transfer time, during which engines generate."""
    pause_s: float = 0.0
    """How long engines pause."""


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """Times of messages between components, journal included."""

    message_s: float = 0.0
    """Time to admit, to put, to take, and to commit: each is a message."""
    linger_s: float = PUT_LINGER_S
    """How long finished groups wait to share a message."""
    interval_s: float = 0.0
    """`async_training.batch_generation_interval`."""


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Factors by which each side slows down while the other works: they share cores or a GPU."""

    generation: float = 1.0
    training: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One run."""

    bounds: Bounds
    """Its `total_groups`, a multiple of `groups_per_step`, ends the simulation."""
    n: int
    """Responses per prompt."""
    lengths: Draw
    """Tokens per response."""
    generation: Generation
    scores: Scores = field(default_factory=Scores)
    training: Training
    weights: WeightTransfer = field(default_factory=WeightTransfer)
    hand_over: HandOver = field(default_factory=HandOver)
    slowdown: Slowdown = field(default_factory=Slowdown)
    window: tuple[int, int] | None = None
    """Steps to measure between. None: leave out what fills and empties the pipeline."""

    @property
    def steps(self) -> int:
        assert self.bounds.total_groups is not None
        return self.bounds.total_groups // self.bounds.groups_per_step

    @property
    def measured(self) -> tuple[int, int]:
        """Return the steps to measure between. Generation runs up to `threshold` versions ahead, so that many steps
        fill and empty the pipeline."""
        if self.window is not None:
            return self.window
        ahead = (self.bounds.threshold + 2) * self.bounds.steps_per_version
        return min(ahead, self.steps // 3), max(self.steps - ahead, 2 * self.steps // 3, 1)

    @property
    def capacities(self) -> dict[str, float]:
        """Groups per second that each part could do alone; engines with the pauses for versions."""
        made, bounds = self.generation, self.bounds
        per_group_s = self.n * self.lengths.mean / made.tokens_per_s + made.prefill_s / made.replicas
        found = {"generation": 1 / (per_group_s + self.weights.pause_s / bounds.groups_per_version)}
        if (scored := self.scores.per_s) is not None:
            found["judge"] = scored / self.n
        step_tokens = bounds.groups_per_step * self.n * (self.lengths.mean + self.training.prompt_tokens)
        step_s = self.training.step_s(step_tokens) * self.training.varies.mean
        found["training"] = bounds.groups_per_step / (step_s + self.training.pack_s / bounds.steps_per_version)
        return found

    @property
    def guess(self) -> float:
        """Groups per second by the closed form of `freewheel.runtime.bottleneck`."""
        if self.bounds.in_turns:
            return in_turns(self.capacities)
        return streaming(self.capacities)[1]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation found between the ends of two steps, unless a field says otherwise."""

    steps: int
    wall_s: float
    groups: int
    samples: int
    tokens: int
    """Generated for the groups that were trained on."""
    waits: dict[str, dict[str, float]]
    """Component → span → share, as in `metrics.jsonl`; rollouters are averaged."""
    engine_busy: float
    """Mean share of the time in which an engine decoded."""
    lag_mean: float
    lag_max: int
    lag_counts: list[int]
    """Number of groups by lag at training."""
    scores_per_s: float
    held_back: float | None = None
    """Share of the whole run in which responses waited for the judge's limit; None without a limit."""
    slots_in_use: float
    """Mean share of the engines' slots in use."""
    whole_s: float
    """Seconds from the start to the end of the last step."""
    busy_per_token_s: float
    """Engine time per token, over the whole run."""
    lives: int
    """Groups from admission to training, over the whole run."""

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

    def verdict(self, setting: Setting, scores: Scores, *, tried: Tried | None = None) -> Verdict:
        """Return the verdict that such a run would show."""
        scoring = Scoring(
            is_judge=scores.is_judge,
            per_s=self.scores_per_s,
            held_back=self.held_back or 0.0,
            in_use=None if scores.per_s is None else self.scores_per_s / scores.per_s,
            slots_in_use=self.slots_in_use,
        )
        return verdict(self.waits, setting, scoring, tried=tried)
