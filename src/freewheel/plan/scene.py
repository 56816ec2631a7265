"""`Scene`: all that a simulation needs to know of a run, in numbers. Facts only; `measured` and `hardware` make them.

Scene ─┬─ bounds        what may be generated, and what trained (`freewheel.queue.staleness`)
       ├─ generation    replicas, slots, the time of a decoding step
       ├─ scores        the time of a score; a judge's knee, refusals and rate
       ├─ training      the time of a step
       ├─ weights       the time of a sync
       ├─ hand-over     what a message between them costs
       └─ beside        what they cost each other where they share a machine
"""

from __future__ import annotations

from dataclasses import dataclass, field

from freewheel.plan.draws import Constant, Draw
from freewheel.queue.staleness import Bounds
from freewheel.rollout.outbox import PUT_LINGER_S
from freewheel.runtime.bottleneck import in_turns, streaming

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
