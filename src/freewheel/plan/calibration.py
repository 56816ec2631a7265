"""Builds a `Scene` from a measured run, and finds by replay what no file contains.

    RUN/metrics.jsonl ─┬─ step: train_s, response lengths, wall time ─┐
                       ├─ event: whether a GPU was shared             │
                       └─ statistics: engine time, tokens, slots      ├─▶ RecordedRun ─▶ Scene ─▶ simulate ─┐
    RUN/trace/*.jsonl ─── lengths, scores, packing, loading, storing ─┘                  ▲                  │ compare
                                                                                         └──────────────────┘

Two numbers are found by replay. The cost of a prompt: the decoding step is known from when the responses of a group
end, and the rest of the engine's time goes to reading prompts. The time of a message: in synchronous modes it is what
generation and training leave of a step; otherwise the time to store a group stands for it. What is not recorded is None
or empty and listed in `notes`.

`MeasuredCluster` is a measured run on other numbers of the same accelerators. `simulate_slice` simulates a large run by
a proportional slice: engines are alike, so a tenth of the engines with a tenth of the groups and of the judge's rate
behaves like the whole, as long as there are enough of each to average over. Times of a step, a version and a message do
not shrink. A test compares slices with wholes. Imports neither torch nor Ray.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from freewheel.errors import ConfigError
from freewheel.observe.recorder import read_metrics
from freewheel.observe.trace import read_trace
from freewheel.plan.hardware import SCALING, training_at_once
from freewheel.plan.scene import (
    MESSAGE_S,
    Beside,
    Generation,
    HandOver,
    Measured,
    Outcome,
    Scene,
    Scores,
    Training,
    Weights,
)
from freewheel.plan.simulation import simulate
from freewheel.queue.staleness import Bounds
from freewheel.rollout.rollouter import PUT_LINGER_S
from freewheel.runtime.bottleneck import HELD_BACK, held_back, settled

REPLAYS = 4
"""Rounds until replay and run agree. Time scales with the step, so the second round is already close."""
MOST_VALUES = 20_000
"""Values kept of a distribution; more add nothing."""
MESSAGES = 4
"""Admit, put, take, commit."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The part of a run's configuration that matters here. `bounds` includes the steps to simulate."""

    bounds: Bounds
    n: int
    refill_slots: Callable[[int], int]
    """How many of the engine's slots must be free before it refills them."""
    interval_s: float
    is_judge: bool = False


def scene_of(recorded: RecordedRun, settings: RunSettings, *, generated: Measured | None = None) -> Scene:
    """Return the run as it was. `generated`: lengths that the engine made, if only a part of them was trained on."""
    per_token_s = sum(recorded.train_s) / sum(recorded.step_tokens)
    varies = Measured.of(
        [took / (per_token_s * tokens) for took, tokens in zip(recorded.train_s, recorded.step_tokens, strict=True)]
    )
    lengths = Measured(_thinned(recorded.lengths))
    scene = Scene(
        bounds=settings.bounds,
        n=settings.n,
        lengths=generated or lengths,
        trained_lengths=lengths if generated else None,
        generation=Generation(
            replicas=recorded.replicas,
            slots=recorded.slots,
            step_s=recorded.decode_s or recorded.busy_per_token_s * recorded.slots,
            refill=settings.refill_slots(recorded.slots),
        ),
        scores=Scores(
            is_judge=settings.is_judge,
            latency_s=Measured(_thinned(recorded.latencies_s)),
            rate_per_s=recorded.scored_per_s,
        ),
        training=Training(
            per_token_s=per_token_s * fmean(recorded.step_tokens) / _step_tokens(lengths, settings),
            varies=varies,
            pack_s=recorded.pack_s,
        ),
        weights=Weights(transfer_s=max(0.0, recorded.sync_s - recorded.load_s), pause_s=recorded.load_s),
        hand_over=_hand_over(recorded.put_s or MESSAGE_S, settings),
    )
    scene = _with_prompts(scene, recorded) if recorded.decode_s else _with_step(scene, recorded)
    if settings.bounds.in_turns:
        scene = _with_messages(scene, recorded, settings)
    return scene


def beside(alone: Scene, together: RecordedRun, bounds: Bounds) -> Beside:
    """Return how much the two sides slow each other down. `alone` was measured in a synchronous mode; `together` is the
    same run with both sides at work, under `bounds`. Each side is slowed for as long as the other works."""
    expected = simulate(replace(alone, bounds=bounds))
    per_token_s = sum(together.train_s) / sum(together.step_tokens)
    slower_training = per_token_s / (alone.training.per_token_s * alone.training.varies.mean)
    slower_generation = together.busy_per_token_s / expected.busy_per_token_s
    trains = sum(together.train_s) / (together.steps * together.step_s)
    return Beside(
        generation=max(1.0, 1 + (slower_generation - 1) / min(1.0, trains)),
        training=max(1.0, 1 + (slower_training - 1) / expected.engine_busy),
    )


def _step_tokens(lengths: Measured, settings: RunSettings) -> float:
    return settings.bounds.groups_per_step * settings.n * lengths.mean


def _hand_over(message_s: float, settings: RunSettings) -> HandOver:
    return HandOver(
        admit_s=message_s, put_s=message_s, take_s=message_s, commit_s=message_s, interval_s=settings.interval_s
    )


def _with_step(scene: Scene, recorded: RecordedRun) -> Scene:
    """Find the decoding step that gives the measured engine time per token."""
    for _ in range(REPLAYS):
        found = simulate(scene).busy_per_token_s
        step_s = scene.generation.step_s * recorded.busy_per_token_s / found
        scene = replace(scene, generation=replace(scene.generation, step_s=step_s))
    return scene


def _with_prompts(scene: Scene, recorded: RecordedRun) -> Scene:
    """Find the cost of a prompt for a known decoding step. If the step alone takes more than measured, find the step
    instead."""
    tokens = scene.n * scene.lengths.mean
    for _ in range(REPLAYS):
        missing_s = (recorded.busy_per_token_s - simulate(scene).busy_per_token_s) * tokens
        prefill_s = scene.generation.prefill_s + missing_s
        if prefill_s < 0:
            return _with_step(replace(scene, generation=replace(scene.generation, prefill_s=0.0)), recorded)
        scene = replace(scene, generation=replace(scene.generation, prefill_s=prefill_s))
    return scene


def _with_messages(scene: Scene, recorded: RecordedRun, settings: RunSettings) -> Scene:
    """Find the time of a message. In synchronous modes it is what is missing in a step."""
    message_s = scene.hand_over.put_s
    for _ in range(REPLAYS):
        missing_s = recorded.step_s - simulate(scene).step_s
        message_s = max(0.0, message_s + missing_s / MESSAGES)
        scene = replace(scene, hand_over=_hand_over(message_s, settings))
    return scene


def _thinned(values: tuple[float, ...]) -> tuple[float, ...]:
    """Take values evenly over the run, because lengths change while a model learns."""
    every = -(-len(values) // MOST_VALUES)
    return values[::every]


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

    @property
    def accelerators(self) -> int:
        return self.trainers + self.generators

    def is_measured(self, bounds: Bounds, *, trainers: int, generators: int) -> bool:
        """Only with the run's own settings, because they decide how long sides wait for each other."""
        same = replace(bounds, total_groups=self.run.bounds.total_groups) == self.run.bounds
        return self.as_measured and same and (trainers, generators) == (self.trainers, self.generators)

    def scene(self, bounds: Bounds, *, trainers: int, generators: int) -> Scene:
        replicas = generators // self.per_replica
        if replicas < 1 or trainers < 1:
            raise ConfigError("split", f"{trainers} + {generators}", f"a replica needs {self.per_replica} to generate")
        run = self.run
        more = training_at_once(trainers, bounds, run.n) / training_at_once(self.trainers, run.bounds, run.n)
        speed = more * SCALING ** abs(math.log2(more)) if more > 1 else more
        return replace(
            run,
            bounds=bounds,
            generation=replace(run.generation, replicas=replicas),
            training=replace(
                run.training, base_s=run.training.base_s / speed, per_token_s=run.training.per_token_s / speed
            ),
            weights=replace(
                run.weights, transfer_s=run.weights.transfer_s * max(1.0, replicas / run.generation.replicas)
            ),
            window=None,
        )


LEAST_STEPS = 3
"""Fewer steps say nothing: the first one waits for everything to start."""
MICROSECOND = 1e-6
LEAST_APART = 4
"""Tokens by which two responses must differ to reveal the time of a step."""
SHORTEST = 0.1
"""Share of the shortest such times that is skipped: they belong to responses that started at different steps."""
MOST_WARMING = 0.5
"""Largest share of a run's tokens that may be skipped as warm-up."""
BUSY_AND_TOKENS = ("engine_busy_s", "generated_tokens")
ELAPSED, TRAIN, WAIT = "timing/elapsed_s", "timing/train_s", "timing/wait_batch_s"
LENGTH = "rollout/response_length_mean"
STEP_NUMBERS = ("step", ELAPSED, TRAIN, WAIT, LENGTH, "avg_sample_age", "max_sample_age")
"""Fields of a step's row. Rows without all of them, such as those of another version, are skipped."""
LARGEST = 1e18
"""No number of a run exceeds this."""
LEAST_GROUPS = 20
"""With fewer groups the shortest time says nothing."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The numbers of one measured run."""

    steps: int
    """Number of steps in the window."""
    step_s: float
    """Mean time from the end of a step to the end of the next."""
    train_s: tuple[float, ...]
    """By step."""
    step_tokens: tuple[float, ...]
    """Trained tokens, by step."""
    trainer_waits: float
    lag_mean: float
    lag_max: int
    replicas: int
    slots: int
    """Per replica."""
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
    """From a version's first transfer to its last confirmation."""
    put_s: float = 0.0
    shared_gpu: bool | None = None
    """Whether training and generation shared a GPU. None: not recorded."""
    notes: tuple[str, ...] = ()


def read(run_dir: Path, *, n: int, groups_per_step: int, window: tuple[int, int] | None = None) -> RecordedRun:
    """Read a run. `window`: two steps; measure between their ends. None: all but the steps that fill the pipeline."""
    everything = read_metrics(run_dir)
    rows, statistics = _steps(everything), _statistics(everything)
    if len(rows) < LEAST_STEPS or not statistics:
        remedy = (
            f"{len(rows)} steps are recorded there since it last began: at least {LEAST_STEPS}, and one `statistics` "
            "row with the engines' numbers, are needed"
        )
        raise ConfigError("RUN", str(run_dir), remedy)
    first, last = window or (_filled(sorted(rows)), max(rows))
    within = [row for step, row in sorted(rows.items()) if first < step <= last]
    if first not in rows or not within:
        raise ConfigError("window", (first, last), f"{run_dir} has not recorded these steps since it last began")
    step_s = (within[-1][ELAPSED] - rows[first][ELAPSED]) / (within[-1]["step"] - first)
    train_s, lengths_mean = tuple(row[TRAIN] for row in within), [row[LENGTH] for row in within]
    if not (step_s > 0 and sum(train_s) > 0 and min(lengths_mean) > 0):
        raise ConfigError("RUN", str(run_dir), "its steps took no time, or have responses without a token: no run does")
    traced = Traced.of(read_trace(run_dir))
    rollouter = _part(statistics[-1], "rollouter")
    replicas = max(1, len(traced.rollouters) or len(_rollouters(everything)))
    notes = []
    lengths = traced.lengths
    if not lengths:
        notes.append("single lengths are not recorded (observe.trace_every): every response has the mean length")
        lengths = (fmean(lengths_mean),)
    scored_per_s = _scored_per_s(statistics, replicas)
    latencies = traced.latencies_s if scored_per_s is None else _asked_alone(rollouter) or traced.latencies_s
    if not latencies:
        notes.append("single scores are not recorded (observe.trace_every): each takes the mean time")
        latencies = (_number(_part(rollouter, "rewards").get("mean_latency_s")) or 0.0,)
    busy_s, tokens = _grown([_counted(row) for row in statistics])
    if busy_s <= 0 or tokens <= 0:
        raise ConfigError("RUN", str(run_dir), "its engines have not said how long they were busy: let it run longer")
    samples = n * groups_per_step
    return RecordedRun(
        steps=len(within),
        step_s=step_s,
        train_s=train_s,
        step_tokens=tuple(samples * length for length in lengths_mean),
        trainer_waits=fmean(row[WAIT] for row in within) / step_s,
        lag_mean=fmean(row["avg_sample_age"] for row in within),
        lag_max=int(max(row["max_sample_age"] for row in within)),
        replicas=replicas,
        slots=max(1, int(_number(rollouter.get("slots")) or replicas) // replicas),
        busy_per_token_s=busy_s / tokens,
        decode_s=traced.decode_s,
        lengths=tuple(lengths),
        latencies_s=tuple(latencies),
        scored_per_s=scored_per_s,
        pack_s=_mean(traced.spans.get("pack", ())),
        load_s=_mean(traced.spans.get("load_weights", ())),
        sync_s=_number(_part(statistics[-1], "sync").get("mean_sync_s")) or 0.0,
        put_s=_unshared(traced.stores_s),
        shared_gpu=_shared_gpu(everything),
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The parts of a trace that matter here."""

    lengths: tuple[float, ...]
    latencies_s: tuple[float, ...]
    stores_s: tuple[float, ...]
    decode_s: float | None
    spans: Mapping[str, Sequence[float]]
    """Seconds by name, of trainer and rollouters."""
    rollouters: frozenset[str]

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Traced:
        phases: dict[str, list[float]] = {"response": [], "score": [], "store": []}
        spans: dict[str, list[float]] = {}
        rollouters = set()
        ends: dict[tuple[str, int], list[tuple[float, float]]] = {}
        begun: Mapping[str, Any] = {}
        for event in events:
            kind, name = event["ph"], event["name"]
            if event["pid"].startswith("rollouter"):
                rollouters.add(event["pid"])
            if kind == "X":
                spans.setdefault(name, []).append(event["dur"] * MICROSECOND)
            elif kind == "b" and name in phases:
                begun = event
            elif kind == "e" and name in phases and (begun.get("id"), begun.get("name")) == (event["id"], name):
                if name != "response":
                    phases[name].append((event["ts"] - begun["ts"]) * MICROSECOND)
                elif (tokens := begun.get("args", {}).get("tokens")) is not None:
                    phases[name].append(float(tokens))
                    ended = (float(tokens), event["ts"] * MICROSECOND)
                    ends.setdefault((event["pid"], event["id"]), []).append(ended)
        return cls(
            lengths=tuple(phases["response"]),
            latencies_s=tuple(phases["score"]),
            stores_s=tuple(phases["store"]),
            decode_s=decode_step(ends.values()),
            spans=spans,
            rollouters=frozenset(rollouters),
        )


def decode_step(groups: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Return the time of a decoding step, from (tokens, end) of each group's responses. They start together, so a
    response with more tokens ends that many steps later. Prompts that are read meanwhile make the time longer, earlier
    starts make it shorter, so a low quantile counts. None if no two lengths of a group differ enough."""
    found = []
    for ends in groups:
        ordered = sorted(ends)
        (fewest, first), (most, last) = ordered[0], ordered[-1]
        if most - fewest >= LEAST_APART and last > first:
            found.append((last - first) / (most - fewest))
    return sorted(found)[int(len(found) * SHORTEST)] if len(found) >= LEAST_GROUPS else None


def _filled(steps: Sequence[int]) -> int:
    """Return the step at which the pipeline is full: a fifth of the steps, at least one."""
    return steps[max(0, len(steps) // 5 - 1)]


def _number(value: object) -> float | None:
    """Return None for a value that is not a number of a run."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST
    return float(value) if is_number else None  # type: ignore[arg-type]


def _part(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = row.get(name)
    return found if isinstance(found, Mapping) else {}


def _steps(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return complete rows by step, since the trainer's clock last started (at a resume or a trainer restart)."""
    found: dict[int, dict[str, float]] = {}
    before = 0.0
    for row in rows:
        numbers = {name: number for name in STEP_NUMBERS if (number := _number(row.get(name))) is not None}
        if row.get("kind") != "step" or len(numbers) < len(STEP_NUMBERS):
            continue
        if numbers[ELAPSED] <= before:
            found = {}
        before = numbers[ELAPSED]
        found[int(numbers["step"])] = numbers
    return found


def _statistics(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return rows with the engines' counters, since these last started."""
    found: list[Mapping[str, Any]] = []
    for row in rows:
        engines = _part(row, "rollouter")
        if row.get("kind") != "statistics" or any(_number(engines.get(name)) is None for name in BUSY_AND_TOKENS):
            continue
        if found and any(now < before for now, before in zip(_counted(row), _counted(found[-1]), strict=True)):
            found = []
        found.append(row)
    return found


def _counted(row: Mapping[str, Any]) -> tuple[float, float]:
    busy_s, tokens = (_number(_part(row, "rollouter").get(name)) or 0.0 for name in BUSY_AND_TOKENS)
    return busy_s, tokens


def _rollouters(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    return {
        name
        for row in rows
        if row.get("kind") == "pulse"
        for name in _part(row, "waits")
        if name.startswith("rollouter")
    }


def _shared_gpu(rows: Iterable[Mapping[str, Any]]) -> bool | None:
    """Return what the run recorded at its last start."""
    said = [row["shared_gpu"] for row in rows if row.get("kind") == "event" and isinstance(row.get("shared_gpu"), bool)]
    return said[-1] if said else None


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _unshared(stores_s: Sequence[float]) -> float:
    """Return the queue's share of a store: groups that share a message wait for each other first."""
    return max(0.0, median(stores_s) - PUT_LINGER_S) if stores_s else 0.0


def _grown(said: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return seconds, and what was counted in them. Leaves out the time before the first row, if most of the run
    remains: engines warm up."""
    (spent_before_s, before), (spent_s, count) = said[0], said[-1]
    return (spent_s - spent_before_s, count - before) if before < count * MOST_WARMING else (spent_s, count)


def _scored_per_s(statistics: Sequence[Mapping[str, Any]], replicas: int) -> float | None:
    """Return the scores per second that limits let through; None if few responses waited for them."""
    rewards = [_part(_part(row, "rollouter"), "rewards") for row in statistics]
    if fmean(held_back(one, is_judge=True) is True for one in rewards) < HELD_BACK:
        return None
    busy_s, scored = _grown([(_number(one.get("busy_s")) or 0.0, settled(one)) for one in rewards])
    return scored / (busy_s / replicas) if busy_s > 0 and scored > 0 else None


def _asked_alone(rollouter: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the judge's own latencies, without the wait for its limit; empty if not recorded."""
    endpoints = _part(_part(rollouter, "rewards"), "judge").get("endpoints") or ()
    return tuple(median_s for one in endpoints if (median_s := _number(one.get("latency_p50_s"))))


MOST_GROUPS = 768
"""Most groups per step of a slice: their lengths average to within a percent."""
LEAST_REPLICAS = 8
"""Fewest engines of a slice. One is enough if each has that many groups."""


def simulate_slice(scene: Scene, *, seed: int = 0) -> Outcome:
    """Simulate a scene of any size; small ones are simulated whole."""
    one, parts = sliced(scene)
    found = simulate(one, seed=seed)
    if parts == 1.0:
        return found
    return msgspec.structs.replace(
        found,
        groups=round(found.groups * parts),
        samples=round(found.samples * parts),
        tokens=round(found.tokens * parts),
        lag_counts=[round(count * parts) for count in found.lag_counts],
        ready_mean=found.ready_mean * parts,
        scores_per_s=found.scores_per_s * parts,
        judge_limit=None if found.judge_limit is None else round(found.judge_limit * parts),
        judge_refused=round(found.judge_refused * parts),
        lives=round(found.lives * parts),
    )


def sliced(scene: Scene) -> tuple[Scene, float]:
    """Return a slice, and how many slices make the whole."""
    bounds, made = scene.bounds, scene.generation
    fewest = LEAST_REPLICAS if bounds.groups_per_step < MOST_GROUPS * made.replicas else 1
    into = min(bounds.groups_per_step // MOST_GROUPS, made.replicas // fewest)
    if into < 2:
        return scene, 1.0
    replicas = round(made.replicas / into)
    groups = round(bounds.groups_per_step * replicas / made.replicas)
    parts = bounds.groups_per_step / groups
    return (
        replace(
            scene,
            bounds=replace(
                bounds,
                groups_per_step=groups,
                window=round((bounds.window - 1) / parts) + 1,
                max_alive=max(groups * bounds.steps_per_version, round(bounds.max_alive / parts)),
                total_groups=scene.steps * groups,
            ),
            generation=replace(made, replicas=replicas),
            scores=replace(
                scene.scores,
                knee=_cut_slice(scene.scores.knee, parts),
                refuse_above=_cut_slice(scene.scores.refuse_above, parts),
                rate_per_s=None if scene.scores.rate_per_s is None else scene.scores.rate_per_s / parts,
            ),
            training=replace(scene.training, per_token_s=scene.training.per_token_s * parts),
        ),
        parts,
    )


def _cut_slice(count: int | None, parts: float) -> int | None:
    return None if count is None else max(1, round(count / parts))
