"""Accelerators as a run measured them or as data sheets describe them. Any split of them becomes a `Scene`.

    RUN ─ read ─▶ RecordedRun ─ scene_of (replay) ─▶ MeasuredCluster ─┐
    Accelerator, Shape, Workload ──────────────────▶ TableCluster ────┴─ scene(bounds, split) ─▶ Scene

**A measured run.** Two numbers are in no file and are found by replay. The cost of a prompt: the decoding step is known
from when the responses of a group end, and the rest of the engine's time goes to reading prompts. The time of a
message: in synchronous modes it is what generation and training leave of a step; otherwise the time to store a group
stands for it. What is not recorded is None or empty, and `notes` lists it.

**A table.** `MFU` and `HOST_PER_SEQUENCE_S` were measured on one H200 with models of 0.5B and 1.5B
(docs/benchmarks.md). Everything else follows from data sheets and the assumed shares below, and is reported as
extrapolated. Imports neither torch nor Ray.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

import numpy as np

from freewheel.errors import ConfigError
from freewheel.inspect.metrics import FloatArray, RecordedMetrics
from freewheel.inspect.trace import US, RecordedTrace
from freewheel.plan.scene import (
    MESSAGE_S,
    Generation,
    HandOver,
    Lognormal,
    Measured,
    Scene,
    Scores,
    Training,
    WeightTransfer,
)
from freewheel.plan.simulation import simulate
from freewheel.queue.staleness import Bounds
from freewheel.rollout.engine_factories import find_engine
from freewheel.rollout.rollouter import PUT_LINGER_S
from freewheel.runtime.bottleneck import HELD_BACK, held_back
from freewheel.runtime.config import AsyncTrainingConfig, TrainConfig

# -- what a run recorded ----------------------------------------------------------------------------------------------

LEAST_STEPS = 3
"""Fewer steps say nothing: the first one waits for everything to start."""
LEAST_APART = 4
"""Tokens by which two responses must differ to reveal the time of a step."""
LEAST_GROUPS = 20
"""With fewer groups the shortest time says nothing."""
SHORTEST = 0.1
"""Share of the shortest such times that is skipped: they belong to responses that started at different steps."""
MOST_WARMING = 0.5
"""Largest share of a run's tokens that may be skipped as warm-up."""
LARGEST = 1e18
"""No number of a run exceeds this."""
ELAPSED, TRAIN = "timing/elapsed_s", "timing/train_s"
LENGTH = "rollout/response_length_mean"
STEP_NUMBERS = ("step", ELAPSED, TRAIN, LENGTH)
"""Fields of a step's row. Rows without all of them, such as those of another version, are skipped."""
COUNTERS = ("engine_busy_s", "generated_tokens", "reward_busy_s", "settled")
JUDGE_NUMBERS = ("waiting", "queued", "in_flight", "limit")
"""What tells whether responses waited for a limit; NaN without a judge."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The numbers of one measured run."""

    steps: int
    """Number of steps in the window."""
    step_s: float
    """Mean time from the end of a step to the end of the next."""
    train_s: tuple[float, ...]
    """Seconds of training, by step."""
    step_tokens: tuple[float, ...]
    """Trained tokens, by step."""
    replicas: int
    slots: int
    """Slots of each replica."""
    busy_per_token_s: float
    """Engine time per generated token."""
    decode_s: float | None = None
    """Time of a decoding step while no prompt is read: by how much later a longer response of a group ends."""
    lengths: tuple[float, ...] = ()
    """Tokens of single responses."""
    latencies_s: tuple[float, ...] = ()
    """Seconds of single scores."""
    scored_per_s: float | None = None
    """Scores per second, if responses waited for the judge's limit or a permit most of the time."""
    pack_s: float = 0.0
    load_s: float = 0.0
    """How long an engine pauses to load a version."""
    sync_s: float = 0.0
    """Seconds from a version's first transfer to its last confirmation."""
    put_s: float = 0.0
    shared_gpu: bool | None = None
    """Whether training and generation shared a GPU. None: not recorded."""
    notes: tuple[str, ...] = ()


def read(run_dir: Path, *, n: int, groups_per_step: int, window: tuple[int, int] | None = None) -> RecordedRun:
    """Read a run. `window`: two steps; measure between their ends. None: all but the steps that fill the pipeline."""
    metrics, trace = RecordedMetrics(run_dir), RecordedTrace(run_dir)
    metrics.look()
    trace.look()
    columns = metrics.read_metrics(*STEP_NUMBERS[1:])
    steps = _since_restart({name: columns[name] for name in STEP_NUMBERS}, ELAPSED)
    numbers = {name: metrics.statistics[name] for name in COUNTERS}
    numbers |= {name: np.nan_to_num(metrics.statistics[name]) for name in JUDGE_NUMBERS}
    counted = _since_restart(numbers, *COUNTERS[:2])
    known = [row for row in metrics.latest_statistics if math.isfinite(row.rollouter.engine_busy_s)]
    every = steps["step"].tolist()
    if len(every) < LEAST_STEPS or not known:
        remedy = (
            f"{len(every)} steps are recorded there since its last start: at least {LEAST_STEPS}, and one `statistics` "
            "row with the engines' numbers, are needed"
        )
        raise ConfigError("RUN", str(run_dir), remedy)
    first, last = window or (every[max(0, len(every) // 5 - 1)], every[-1])
    chosen = (steps["step"] > first) & (steps["step"] <= last)
    within = {name: values[chosen].tolist() for name, values in steps.items()}
    elapsed_s = within[ELAPSED][-1] - steps[ELAPSED].tolist()[every.index(first)]
    step_s = elapsed_s / (within["step"][-1] - first)
    if not (step_s > 0 and sum(within[TRAIN]) > 0 and min(within[LENGTH]) > 0):
        raise ConfigError("RUN", str(run_dir), "its steps took no time or its responses are empty: it is damaged")
    busy_s, tokens = _growth(counted["engine_busy_s"], counted["generated_tokens"])
    if busy_s <= 0 or tokens <= 0:
        raise ConfigError("RUN", str(run_dir), "its engines have not reported their busy time: let it run longer")
    made, judge = known[-1].rollouter, known[-1].rollouter.rewards.judge
    phases = [phase for life in trace.phases.values() for phase in life]
    parts = {part for part, _ in trace.spans} | {phase.component for phase in phases}
    waited = {part for waits in metrics.waits for part in waits}
    replicas = max(1, *(sum(part.startswith("rollouter") for part in found) for found in (parts, waited)))
    seconds = defaultdict(list)
    for phase in phases:
        seconds[phase.name].append((phase.end_us - phase.start_us) / US)
    lengths = [float(one.args.tokens) for one in phases if one.name == "response" and one.args and one.args.tokens]
    latencies_s, notes = seconds["score"], []
    if not lengths:
        notes.append("single lengths are not recorded (observe.trace_every): every response has the mean length")
        lengths = [fmean(within[LENGTH])]
    scored_per_s = _scored_per_s(counted, replicas)
    if scored_per_s is not None and judge is not None:
        latencies_s = [one.latency_p50_s for one in judge.endpoints if one.latency_p50_s > 0] or latencies_s
    if not latencies_s:
        notes.append("single scores are not recorded (observe.trace_every): each takes the mean time")
        latencies_s = [made.rewards.mean_latency_s]
    return RecordedRun(
        steps=len(within["step"]),
        step_s=step_s,
        train_s=tuple(within[TRAIN]),
        step_tokens=tuple(n * groups_per_step * length for length in within[LENGTH]),
        replicas=replicas,
        slots=max(1, int(made.slots or replicas) // replicas),
        busy_per_token_s=busy_s / tokens,
        decode_s=decode_step(_response_ends(trace)),
        lengths=tuple(lengths),
        latencies_s=tuple(latencies_s),
        scored_per_s=scored_per_s,
        pack_s=_mean_span_s(trace, "pack"),
        load_s=_mean_span_s(trace, "load_weights"),
        sync_s=known[-1].sync.mean_sync_s,
        # Groups that share a message wait for each other first. The rest of the time is the queue's.
        put_s=max(0.0, median(seconds["store"]) - PUT_LINGER_S) if seconds["store"] else 0.0,
        shared_gpu=metrics.shared_gpu,
        notes=tuple(notes),
    )


def _since_restart(columns: Mapping[str, FloatArray], *counters: str) -> dict[str, FloatArray]:
    """Return the complete rows since one of the counters last fell: at a resume, or when a component restarted."""
    complete = np.logical_and.reduce([(values >= 0) & (values <= LARGEST) for values in columns.values()])
    found = {name: values[complete] for name, values in columns.items()}
    fell = np.flatnonzero(np.logical_or.reduce([np.diff(found[name]) < 0 for name in counters]))
    start = int(fell[-1]) + 1 if fell.size else 0
    return {name: values[start:] for name, values in found.items()}


def _growth(spent_s: FloatArray, count: FloatArray) -> tuple[float, float]:
    """Return seconds, and what was counted in them. Leaves out the time before the first row, if most of the run
    remains: engines warm up."""
    if count[0] < count[-1] * MOST_WARMING:
        return float(spent_s[-1] - spent_s[0]), float(count[-1] - count[0])
    return float(spent_s[-1]), float(count[-1])


def _scored_per_s(counted: Mapping[str, FloatArray], replicas: int) -> float | None:
    """Return the scores per second that limits let through; None if few responses waited for them."""
    rows = zip(*(counted[name].tolist() for name in JUDGE_NUMBERS), strict=True)
    waited = [
        held_back({"waiting": waiting, "judge": {"queued": queued, "endpoints": [end]}}, is_judge=True)
        for waiting, queued, end in ((*row[:2], dict(zip(JUDGE_NUMBERS[2:], row[2:], strict=True))) for row in rows)
    ]
    if fmean(one is True for one in waited) < HELD_BACK:
        return None
    busy_s, scored = _growth(counted["reward_busy_s"], counted["settled"])
    return scored / (busy_s / replicas) if busy_s > 0 and scored > 0 else None


def _mean_span_s(trace: RecordedTrace, name: str) -> float:
    found = [(end - start) / US for (_, of), spans in trace.spans.items() if of == name for start, end in spans]
    return fmean(found) if found else 0.0


def _response_ends(trace: RecordedTrace) -> Iterable[Sequence[tuple[float, float]]]:
    """Return (tokens, end in seconds) of each group's responses."""
    ends: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for ordinal, phases in trace.phases.items():
        for one in phases:
            if one.name == "response" and one.args and one.args.tokens is not None:
                ends[one.component, ordinal].append((one.args.tokens, one.end_us / US))
    return ends.values()


def decode_step(groups: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Return the time of a decoding step, from (tokens, end) of each group's responses. They start together, so a
    response with more tokens ends that many steps later. Prompts that are read meanwhile make the time longer, earlier
    starts make it shorter, so a low quantile counts. None if no two lengths of a group differ enough."""
    found = []
    for ends in groups:
        (fewest, first), (most, last) = min(ends), max(ends)
        if most - fewest >= LEAST_APART and last > first:
            found.append((last - first) / (most - fewest))
    return sorted(found)[int(len(found) * SHORTEST)] if len(found) >= LEAST_GROUPS else None


# -- replay -----------------------------------------------------------------------------------------------------------

REPLAYS = 4
"""Rounds until replay and run agree. Time scales with the step, so the second round is already close."""
MOST_VALUES = 20_000
"""Values kept of a distribution; more add nothing."""
MESSAGES = 4
"""Admit, put, take, commit."""


def scene_of(recorded: RecordedRun, config: TrainConfig, bounds: Bounds, *, generated: Measured | None = None) -> Scene:
    """Return the run as it was. `bounds` includes the steps to simulate. `generated`: lengths that the engine made, if
    only a part of them was trained on."""
    per_token_s = sum(recorded.train_s) / sum(recorded.step_tokens)
    n, interval_s = config.rollout.n, config.async_training.batch_generation_interval
    steps = zip(recorded.train_s, recorded.step_tokens, strict=True)
    lengths = generated or Measured(_thin_out(recorded.lengths))
    scene = Scene(
        bounds=bounds,
        n=n,
        lengths=lengths,
        generation=Generation(
            replicas=recorded.replicas,
            slots=recorded.slots,
            step_s=recorded.decode_s or recorded.busy_per_token_s * recorded.slots,
            refill=find_engine(config.rollout.engine).refill_slots(recorded.slots),
        ),
        scores=Scores(
            is_judge=config.reward.judge is not None,
            latency_s=Measured(_thin_out(recorded.latencies_s)),
            rate_per_s=recorded.scored_per_s,
        ),
        training=Training(
            per_token_s=per_token_s * fmean(recorded.step_tokens) / (bounds.groups_per_step * n * lengths.mean),
            varies=Measured(tuple(took / (per_token_s * tokens) for took, tokens in steps)),
            pack_s=recorded.pack_s,
        ),
        weights=WeightTransfer(transfer_s=max(0.0, recorded.sync_s - recorded.load_s), pause_s=recorded.load_s),
        hand_over=HandOver(message_s=recorded.put_s or MESSAGE_S, interval_s=interval_s),
    )
    if recorded.decode_s:
        scene = _fit_prompts(scene, recorded)
    if scene.generation.prefill_s <= 0:
        scene = _fit_step(scene, recorded)
    if bounds.in_turns:
        scene = _fit_messages(scene, recorded)
    return scene


def _fit_step(scene: Scene, recorded: RecordedRun) -> Scene:
    """Find the decoding step that gives the measured engine time per token."""
    scene = replace(scene, generation=replace(scene.generation, prefill_s=0.0))
    for _ in range(REPLAYS):
        step_s = scene.generation.step_s * recorded.busy_per_token_s / simulate(scene).busy_per_token_s
        scene = replace(scene, generation=replace(scene.generation, step_s=step_s))
    return scene


def _fit_prompts(scene: Scene, recorded: RecordedRun) -> Scene:
    """Find the cost of a prompt for a known decoding step; not positive if the step alone takes more than measured."""
    for _ in range(REPLAYS):
        missing_s = (recorded.busy_per_token_s - simulate(scene).busy_per_token_s) * scene.n * scene.lengths.mean
        scene = replace(scene, generation=replace(scene.generation, prefill_s=scene.generation.prefill_s + missing_s))
        if scene.generation.prefill_s <= 0:
            break
    return scene


def _fit_messages(scene: Scene, recorded: RecordedRun) -> Scene:
    """Find the time of a message. In synchronous modes it is what is missing in a step."""
    for _ in range(REPLAYS):
        missing_s = recorded.step_s - simulate(scene).step_s
        message_s = max(0.0, scene.hand_over.message_s + missing_s / MESSAGES)
        scene = replace(scene, hand_over=replace(scene.hand_over, message_s=message_s))
    return scene


def _thin_out(values: tuple[float, ...]) -> tuple[float, ...]:
    """Take values evenly over the run, because lengths change while a model learns."""
    return values[:: -(-len(values) // MOST_VALUES)]


SCALING = 0.97
"""Speed kept with each doubling of the trainers: assumed."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCluster:
    """A measured run on other numbers of accelerators. Its own split is as measured. Otherwise engines keep their
    speed, a training step is divided among the trainers, and a version takes longer to reach more engines."""

    run: Scene
    trainers: int
    """Accelerators (or CPU processes) that trained."""
    per_replica: int = 1
    least_trainers: int = 1
    as_measured: bool = True
    """False if a part differs from the run, or may have shared an accelerator there."""

    @property
    def generators(self) -> int:
        return self.run.generation.replicas * self.per_replica

    def is_measured(self, bounds: Bounds, *, trainers: int, generators: int) -> bool:
        """Only with the run's own settings, because they decide how long sides wait for each other."""
        same = replace(bounds, total_groups=self.run.bounds.total_groups) == self.run.bounds
        return self.as_measured and same and (trainers, generators) == (self.trainers, self.generators)

    def scene(self, bounds: Bounds, *, trainers: int, generators: int) -> Scene:
        replicas = generators // self.per_replica
        run = self.run
        more = _count_busy(trainers, bounds, run.n) / _count_busy(self.trainers, run.bounds, run.n)
        speed = more * SCALING ** abs(math.log2(more)) if more > 1 else more
        transfer_s = run.weights.transfer_s * max(1.0, replicas / run.generation.replicas)
        return replace(
            run,
            bounds=bounds,
            generation=replace(run.generation, replicas=replicas),
            training=run.training.faster(speed),
            weights=replace(run.weights, transfer_s=transfer_s),
            window=None,
        )


def _count_busy(trainers: int, bounds: Bounds, n: int) -> int:
    """Return how many trainers have work in a step: a sequence is trained on by one of them."""
    return min(trainers, bounds.groups_per_step * n)


# -- a table ----------------------------------------------------------------------------------------------------------

BYTES = 2
"""Bytes of a weight or cached number: bfloat16."""
TRAINED_BYTES = 18
"""Bytes per parameter in training: float32 weight, gradient and two moments, and a bfloat16 copy."""
TRAINING_MEMORY = 0.7
"""Share of an accelerator's memory for them; the rest is for activations."""
ENGINE_MEMORY = 0.9
"""`rollout.gpu_memory_share` if generation has the accelerator to itself."""
LEAST_CACHE = 0.3
"""Share of that which must remain for keys and values. A larger model is spread over more accelerators."""
MFU = 0.48
"""Share of peak arithmetic that a training step reaches: measured with a 1.5B model on an H200."""
FLOPS_PER_PARAMETER = 6
"""Operations per parameter and token: two for the forward pass, four for the backward pass."""
HOST_PER_SEQUENCE_S = 46e-6
"""Host time of a decoding step per sequence. 20,700 tokens/s of a 0.5B model with 256 sequences on an H200 are 12.4 ms
per step, of which the accelerator needs 0.6 ms."""
BANDWIDTH_SHARE = 0.7
"""Share of memory bandwidth that decoding reaches: a usual value, not measured here."""
LINK_SHARE = 0.7
"""Share of a link that a broadcast reaches: a usual value, not measured here."""
TENSOR_PARALLEL = 0.9
"""Speed kept with each doubling of a replica's tensor parallelism: assumed."""
NODE = 8
"""Accelerators of a machine, which share the fast link."""
RESOLUTION = 64
"""Steps into which a mean length is divided; more would slow the simulation of large models."""
MOST_SLOTS = 256
"""Upper bound of `rollout.slots: auto`."""


@dataclass(frozen=True)
class Accelerator:
    """One device, by its data sheet."""

    name: str
    flops: float
    """Dense bfloat16 operations per second."""
    memory_bytes: float
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    node_link: float
    """Speed of the link to other accelerators of the same machine, in bytes per second and direction."""
    network: float
    """Speed of the link to other machines: 400 Gb/s each, as in reference designs, unless the source says otherwise."""
    source: str


ACCELERATORS = {
    one.name: one
    for one in (
        Accelerator("h200", 989e12, 141e9, 4.8e12, 450e9, 50e9, "NVIDIA H200 Tensor Core GPU data sheet, SXM"),
        Accelerator("h100", 989e12, 80e9, 3.35e12, 450e9, 50e9, "NVIDIA H100 Tensor Core GPU data sheet, SXM"),
        Accelerator(
            *("a100", 312e12, 80e9, 2.04e12, 300e9, 25e9),
            "NVIDIA A100 80GB Tensor Core GPU data sheet, SXM; 200 Gb/s network",
        ),
        Accelerator("b200", 2250e12, 180e9, 7.7e12, 900e9, 50e9, "NVIDIA HGX B200 data sheet, a GPU's part"),
        Accelerator("mi300x", 1307e12, 192e9, 5.3e12, 448e9, 50e9, "AMD Instinct MI300X data sheet"),
        Accelerator("l40s", 362e12, 48e9, 0.864e12, 32e9, 25e9, "NVIDIA L40S data sheet; PCIe 4.0, 200 Gb/s network"),
    )
}
"""Accelerators by the name that `--accelerator` takes."""


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that determine speed."""

    name: str
    parameters: float
    layers: int
    kv_width: int
    """Number of key heads times their size."""

    @property
    def weight_bytes(self) -> float:
        return self.parameters * BYTES

    @property
    def cache_bytes(self) -> float:
        """Bytes of a token's keys and values."""
        return 2.0 * self.layers * self.kv_width * BYTES


SHAPES = {
    one.name: one
    for one in (
        Shape("0.5b", 0.494e9, 24, 128),
        Shape("1.5b", 1.54e9, 28, 256),
        Shape("3b", 3.09e9, 36, 256),
        Shape("7b", 7.62e9, 28, 512),
        Shape("14b", 14.8e9, 48, 1024),
        Shape("32b", 32.8e9, 64, 1024),
        Shape("72b", 72.7e9, 80, 1024),
    )
}
"""The dense Qwen2.5 models, from their configuration files. Other models of a size differ little in speed."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained."""

    n: int = 8
    groups_per_step: int
    prompt_tokens: float = 256.0
    response_tokens: float = 1024.0
    """Mean, including responses that are cut off at `max_new_tokens`."""
    spread: float = 0.6
    """σ of the logarithm of lengths."""
    max_new_tokens: float = 4096.0
    scores: Scores = field(default_factory=Scores)

    def __post_init__(self) -> None:
        if self.response_tokens > self.max_new_tokens:
            remedy = f"a response has {self.max_new_tokens:,.0f} at most (--max-new-tokens): give less, or raise that"
            raise ConfigError("--response-tokens", self.response_tokens, remedy)

    @property
    def longest(self) -> float:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class TableCluster:
    """A model on accelerators of one kind."""

    accelerator: Accelerator
    shape: Shape
    workload: Workload

    def __post_init__(self) -> None:
        if self._cached_tokens < self.workload.longest:
            remedy = (
                f"a replica ({self.per_replica} x {self.accelerator.name}) has cache for {self._cached_tokens:,} tokens"
                f", and a prompt has {self.workload.prompt_tokens:,.0f}: give fewer"
            )
            raise ConfigError("--max-new-tokens", self.workload.max_new_tokens, remedy)

    @property
    def per_replica(self) -> int:
        """Accelerators for a replica's weights and cache: a power of two."""
        room = self.accelerator.memory_bytes * ENGINE_MEMORY * (1 - LEAST_CACHE)
        return 1 << max(0, math.ceil(math.log2(self.shape.weight_bytes / room)))

    @property
    def least_trainers(self) -> int:
        room = self.accelerator.memory_bytes * TRAINING_MEMORY
        return max(1, math.ceil(self.shape.parameters * TRAINED_BYTES / room))

    @property
    def slots(self) -> int:
        """Sequences that fit into a replica's cache, at most 256."""
        return min(MOST_SLOTS, int(self._cached_tokens / self.workload.longest))

    @property
    def _cached_tokens(self) -> int:
        """Tokens whose keys and values fit into a replica."""
        room = self.accelerator.memory_bytes * ENGINE_MEMORY * self.per_replica - self.shape.weight_bytes
        return int(room / self.shape.cache_bytes)

    def is_measured(self, bounds: Bounds, *, trainers: int, generators: int) -> bool:
        """False: no such run was measured."""
        return False

    def scene(self, bounds: Bounds, *, trainers: int, generators: int) -> Scene:
        replicas = generators // self.per_replica
        work, interval_s = self.workload, AsyncTrainingConfig().batch_generation_interval
        busy = _count_busy(trainers, bounds, work.n)
        flops = self.accelerator.flops * MFU * busy * math.pow(SCALING, math.log2(busy))
        # One accelerator sends to every replica separately, so replicas share its link.
        link = self.accelerator.node_link if trainers + generators <= NODE else self.accelerator.network
        return Scene(
            bounds=bounds,
            n=work.n,
            lengths=Lognormal.of_mean(work.response_tokens, work.spread, work.max_new_tokens),
            generation=self._generation(replicas),
            scores=work.scores,
            training=Training(
                per_token_s=FLOPS_PER_PARAMETER * self.shape.parameters / flops,
                prompt_tokens=work.prompt_tokens / work.n,
            ),
            weights=WeightTransfer(pause_s=replicas * self.shape.weight_bytes / (link * LINK_SHARE)),
            hand_over=HandOver(message_s=MESSAGE_S, interval_s=interval_s),
        )

    def _generation(self, replicas: int) -> Generation:
        work, slots = self.workload, self.slots
        shared = self.per_replica * TENSOR_PARALLEL ** math.log2(self.per_replica)
        bandwidth = self.accelerator.bandwidth * BANDWIDTH_SHARE * shared
        fixed_s = self.shape.weight_bytes / bandwidth
        each_s = (work.prompt_tokens + work.response_tokens / 2) * self.shape.cache_bytes / bandwidth
        # The host prepares a step while the accelerator computes one, so the slower of the two counts.
        host_s = (HOST_PER_SEQUENCE_S * slots - fixed_s) / slots
        return Generation(
            replicas=replicas,
            slots=slots,
            step_s=fixed_s,
            resolution=max(1, round(work.response_tokens / RESOLUTION)),
            per_sequence_s=max(each_s, host_s),
            prefill_s=work.prompt_tokens * 2 * self.shape.parameters / (self.accelerator.flops * MFU * shared),
        )


Known = TypeVar("Known", Accelerator, Shape)


def find_accelerator(name: str) -> Accelerator:
    return _find(name, ACCELERATORS, "--accelerator", "")


def find_shape(name: str) -> Shape:
    return _find(name, SHAPES, "--model", "; take the nearest size")


def _find(name: str, known: Mapping[str, Known], flag: str, remedy: str) -> Known:
    if name.lower() not in known:
        raise ConfigError(flag, name, f"give one of {', '.join(known)}{remedy}")
    return known[name.lower()]
