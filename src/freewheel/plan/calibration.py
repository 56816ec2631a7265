"""From what a run recorded to a `Scene`: its distributions as they are, and what no file says found by replay.

    Recorded ─▶ Scene ─▶ simulate ─▶ engine time a token, wall time a step ─┐
                  ▲                                                         │ compared with the run's own
                  └──────── the time of a prompt, of a message ◀────────────┘

Two numbers are found this way. What a prompt costs an engine: the decoding step shows in when the responses of a group
end, and what is left of the engine's time is for reading prompts and giving them slots. (Where lengths do not tell the
step, prompts are taken to cost nothing.) A message between components: in turns it is what generation and training
leave of a step; where they overlap, what a group took to be stored stands for it.

`MeasuredCluster`: a run that was measured, on other numbers of the same accelerators.

`Recorded`: what a run directory says of a run, in numbers. Read beside a live run or on a dead one; never written.

    RUN/metrics.jsonl ─┬─ step: train_s, response lengths, wall time ─┐
                       ├─ event: whether a GPU was shared             │
                       └─ statistics: engine time, tokens, slots      ├─▶ Recorded ─▶ `freewheel.plan.calibration`
    RUN/trace/*.jsonl ─── lengths, scores, packing, loading, storing ─┘

What is not recorded is None, or empty, and said in `notes`. Imports neither torch nor ray.

A large run by a slice of it: as many engines, groups and verdicts for each other, fewer of all. Pure.

Engines are alike, and a step takes its groups from all of them: a tenth of the engines, a tenth of the groups a step
and a judge with a tenth of the rate behave as the whole does, as long as there are enough of each to average over. What
does not shrink (the time of a step, of a version, of a message) is as it was. A test compares slices with wholes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
from freewheel.rollout.outbox import PUT_LINGER_S
from freewheel.runtime.bottleneck import HELD_BACK, held_back, settled

REPLAYS = 4
"""Rounds until replay and run agree: time scales with the step, so that the second is close already."""
MOST_VALUES = 20_000
"""Of a distribution: more say nothing more."""
NATIVE_REFILL = 8
"""The native engine fills an eighth of its slots at a time; vLLM every one as it is free."""
MESSAGES = 4
"""Admit, put, take, commit."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What of a run's configuration matters here. `bounds` with the steps that are to be simulated."""

    bounds: Bounds
    n: int
    is_native: bool
    interval_s: float
    is_judge: bool = False


def scene_of(recorded: Recorded, settings: RunSettings, *, generated: Measured | None = None) -> Scene:
    """The run as it was. `generated`: lengths that the engine made, where what was trained on is only a part."""
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
            refill=max(1, recorded.slots // NATIVE_REFILL) if settings.is_native else 1,
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


def beside(alone: Scene, together: Recorded, bounds: Bounds) -> Beside:
    """What the two sides cost each other: `alone` as it was measured in turns, `together` a run of the same, side by
    side on the same machine, under `bounds`. Each side felt the other for as long as that was at work."""
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


def _with_step(scene: Scene, recorded: Recorded) -> Scene:
    """The decoding step that makes engines take the time a token that they took."""
    for _ in range(REPLAYS):
        found = simulate(scene).busy_per_token_s
        step_s = scene.generation.step_s * recorded.busy_per_token_s / found
        scene = replace(scene, generation=replace(scene.generation, step_s=step_s))
    return scene


def _with_prompts(scene: Scene, recorded: Recorded) -> Scene:
    """The same for what a prompt costs, with a step that is known; where that is more than all, the step is less."""
    tokens = scene.n * scene.lengths.mean
    for _ in range(REPLAYS):
        missing_s = (recorded.busy_per_token_s - simulate(scene).busy_per_token_s) * tokens
        prefill_s = scene.generation.prefill_s + missing_s
        if prefill_s < 0:
            return _with_step(replace(scene, generation=replace(scene.generation, prefill_s=0.0)), recorded)
        scene = replace(scene, generation=replace(scene.generation, prefill_s=prefill_s))
    return scene


def _with_messages(scene: Scene, recorded: Recorded, settings: RunSettings) -> Scene:
    """In turns everything adds up: what is missing in a step is what messages took."""
    message_s = scene.hand_over.put_s
    for _ in range(REPLAYS):
        missing_s = recorded.step_s - simulate(scene).step_s
        message_s = max(0.0, message_s + missing_s / MESSAGES)
        scene = replace(scene, hand_over=_hand_over(message_s, settings))
    return scene


def _thinned(values: tuple[float, ...]) -> tuple[float, ...]:
    """Evenly over the run: lengths change while a model learns."""
    every = -(-len(values) // MOST_VALUES)
    return values[::every]


@dataclass(frozen=True, kw_only=True)
class MeasuredCluster:
    """What was measured holds as it is for the run's own split. With more or fewer, engines are as fast each, a
    training step is divided among those that train, and a version takes longer to bring to more engines."""

    run: Scene
    trainers: int
    """Accelerators (or processes, on CPUs) that trained."""
    per_replica: int = 1
    least_trainers: int = 1
    as_measured: bool = True
    """False where a part is not as it was in the run, or may not have had an accelerator of its own there."""

    @property
    def generators(self) -> int:
        return self.run.generation.replicas * self.per_replica

    @property
    def accelerators(self) -> int:
        return self.trainers + self.generators

    def is_measured(self, bounds: Bounds, *, trainers: int, generators: int) -> bool:
        """With the run's own settings only: how often sides wait for each other depends on them."""
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
"""Of fewer nothing can be told: the first waits for everything to start."""
MICROSECOND = 1e-6
LEAST_APART = 4
"""Tokens by which two responses must differ to tell the time of a step."""
SHORTEST = 0.1
"""Of such times, the share that is passed over: the shortest are of responses that began at different steps."""
MOST_WARMING = 0.5
"""Of a run's tokens, what may be passed over as its beginning."""
BUSY_AND_TOKENS = ("engine_busy_s", "generated_tokens")
ELAPSED, TRAIN, WAIT = "timing/elapsed_s", "timing/train_s", "timing/wait_batch_s"
LENGTH = "rollout/response_length_mean"
STEP_NUMBERS = ("step", ELAPSED, TRAIN, WAIT, LENGTH, "avg_sample_age", "max_sample_age")
"""Of a step's row: one that lacks any of them, such as another version's, is passed over."""
LARGEST = 1e18
"""No number of a run is above it: one that is was not written by a run."""
LEAST_GROUPS = 20
"""Of fewer the shortest says nothing."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One run."""

    steps: int
    """That are looked at."""
    step_s: float
    """From the end of a step to the end of the next, on average."""
    train_s: tuple[float, ...]
    """By step."""
    step_tokens: tuple[float, ...]
    """By step: tokens of the responses that were trained on."""
    trainer_waits: float
    lag_mean: float
    lag_max: int
    replicas: int
    slots: int
    """Of each replica."""
    busy_per_token_s: float
    """Time of an engine that decodes, for each token that it made."""
    decode_s: float | None = None
    """Of one decoding step while no prompt is read: by how much later a longer response of a group ends."""
    lengths: tuple[float, ...] = ()
    """Tokens of single responses."""
    latencies_s: tuple[float, ...] = ()
    """Of single scores."""
    scored_per_s: float | None = None
    """Where responses waited for the judge's limit, or for a permit, most of the time: those that got their score."""
    pack_s: float = 0.0
    load_s: float = 0.0
    """For which an engine stands still to take a version."""
    sync_s: float = 0.0
    """Of a version, from the first transfer to the last confirmation."""
    put_s: float = 0.0
    shared_gpu: bool | None = None
    """Training and generation had one GPU between them. None: the run did not say."""
    notes: tuple[str, ...] = ()


def read(run_dir: Path, *, n: int, groups_per_step: int, window: tuple[int, int] | None = None) -> Recorded:
    """`window`: steps between whose ends is looked; None: all but those that fill the pipeline."""
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
    return Recorded(
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
    """What of a trace matters here."""

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
    """The time of a step, from (tokens, end) of each group's responses: they begin together, so that one with more
    tokens ends so many steps later. Prompts that are read meanwhile make it longer, and what entered earlier shorter:
    the shortest but a few count. None where no two lengths of a group differ enough."""
    found = []
    for ends in groups:
        ordered = sorted(ends)
        (fewest, first), (most, last) = ordered[0], ordered[-1]
        if most - fewest >= LEAST_APART and last > first:
            found.append((last - first) / (most - fewest))
    return sorted(found)[int(len(found) * SHORTEST)] if len(found) >= LEAST_GROUPS else None


def _filled(steps: Sequence[int]) -> int:
    """A fifth of the steps fills the pipeline, at least one."""
    return steps[max(0, len(steps) // 5 - 1)]


def _number(value: object) -> float | None:
    """None: it is no number of a run."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST
    return float(value) if is_number else None  # type: ignore[arg-type]


def _part(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = row.get(name)
    return found if isinstance(found, Mapping) else {}


def _steps(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Whole rows by step, since the trainer's clock last began: it does with a resumed run, and with a trainer that
    takes another's place."""
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
    """Rows with the engines' counters, since these last began."""
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
    """As it was said when the run last began."""
    said = [row["shared_gpu"] for row in rows if row.get("kind") == "event" and isinstance(row.get("shared_gpu"), bool)]
    return said[-1] if said else None


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _unshared(stores_s: Sequence[float]) -> float:
    """What of a store is the queue's: groups that share a message wait for each other first."""
    return max(0.0, median(stores_s) - PUT_LINGER_S) if stores_s else 0.0


def _grown(said: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds, and what was counted in them. Without what came before the first look, where that leaves most of the
    run: engines warm up."""
    (spent_before_s, before), (spent_s, count) = said[0], said[-1]
    return (spent_s - spent_before_s, count - before) if before < count * MOST_WARMING else (spent_s, count)


def _scored_per_s(statistics: Sequence[Mapping[str, Any]], replicas: int) -> float | None:
    """What limits let through, while anything was being scored; None where little waited for them."""
    rewards = [_part(_part(row, "rollouter"), "rewards") for row in statistics]
    if fmean(held_back(one, is_judge=True) is True for one in rewards) < HELD_BACK:
        return None
    busy_s, scored = _grown([(_number(one.get("busy_s")) or 0.0, settled(one)) for one in rewards])
    return scored / (busy_s / replicas) if busy_s > 0 and scored > 0 else None


def _asked_alone(rollouter: Mapping[str, Any]) -> tuple[float, ...]:
    """What the judge itself takes, without the wait for its limit; empty where it has not said."""
    endpoints = _part(_part(rollouter, "rewards"), "judge").get("endpoints") or ()
    return tuple(median_s for one in endpoints if (median_s := _number(one.get("latency_p50_s"))))


MOST_GROUPS = 768
"""Groups a step of a slice, about: their lengths average out to a percent."""
LEAST_REPLICAS = 8
"""Engines of a slice, at least; one is enough where each has as many groups to itself."""


def simulate_slice(scene: Scene, *, seed: int = 0) -> Outcome:
    """As `simulate`, for scenes of any size; small ones are simulated whole."""
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
    """A slice, and how many of it make the whole."""
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
