"""Simulates every sensible split of N accelerators, and the scaling of the best one.

    RUN ─▶ RecordedRun ─▶ Scene by replay ─▶ MeasuredCluster ─┐
    --model, --accelerator ─▶ Cluster ────────────────────────┴▶ Planned ─▶ the splits, and the scaling

    N ─▶ candidates, by the closed form ─▶ simulate, on all cores ─▶ neighbours of the best ─▶ rows
    N, 2N, 4N, … ─▶ the best of a few splits each ─▶ scaling, with equally many groups per step and accelerator

A row is `measured` if its parts were measured in a run with that split and those bounds, and `extrapolated` if they
follow from data sheets and a model of scaling. Used by `freewheel plan`.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import msgspec

from freewheel.errors import ConfigError
from freewheel.inspect.run import find_run
from freewheel.observe.run_folder import CONFIG
from freewheel.plan.calibration import MeasuredCluster, RunSettings, read, scene_of, simulate_slice, sliced
from freewheel.plan.hardware import Cluster, Workload, accelerator, shape
from freewheel.plan.scene import Outcome, Scene, Scores
from freewheel.queue.staleness import Bounds
from freewheel.rollout.engines import find_engine
from freewheel.runtime.bottleneck import Bound, Setting, Tried
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import load, to_config
from freewheel.runtime.placement import Gpu, Machine, place

REPLAYED_STEPS = 40
"""Steps of the replay that finds what no file contains: the default number of steps."""
GROUPS_PER_ACCELERATOR = 16
"""Default groups per step and accelerator: twice as many are then alive as engines run at a time."""

ONE_GPU = Machine(cpus=1, memory_bytes=0, gpus=(Gpu(name="any", memory_bytes=0),))
"""The least hardware a run can have had if its settings leave it open."""
SHARED = "training and generation shared one GPU"
MAY_SHARE = "its settings let training and generation share one GPU, and it did not record whether they did"
COUNTED = (
    "each is counted as an accelerator of its own, as fast as it was beside the other, and no split is called measured"
)
FEW_STEPS = 10
"""With fewer measured steps the figures come with a warning, because the first steps are a large part."""
UNSURE = "the figures may be off by a factor"
HELD_UP = "responses waited for the judge's limit, or for a permit, most of the time"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is to be simulated."""

    about: str
    """A description in words."""
    config: TrainConfig
    cluster: Plannable
    accelerators: int
    groups_per_step: int
    seed: int = 0

    def splits(self) -> list[Row]:
        found = sweep(
            self.cluster,
            self.accelerators,
            self.bounds,
            groups_per_step=self.groups_per_step,
            mode=self.config.mode,
            seed=self.seed,
        )
        if not found:
            least = self.cluster.least_trainers + self.cluster.per_replica
            raise ConfigError("--accelerators", self.accelerators, f"it takes {least} at least")
        return found

    def scaling(self, last: int, known: Sequence[Row] = ()) -> list[Row]:
        """Double the requested number, whose rows are `known`, up to `last`, with as many groups per step for each
        accelerator. Empty if that is only one number."""
        counts = [self.accelerators]
        while counts[-1] * 2 <= last:
            counts.append(counts[-1] * 2)
        if len(counts) == 1:
            return []
        each = self.groups_per_step / self.accelerators
        return scaling(
            self.cluster,
            counts,
            self.bounds,
            groups_per_step=lambda count: max(1, round(each * count)),
            known=known,
            mode=self.config.mode,
            seed=self.seed,
        )

    def bounds(self, groups_per_step: int) -> Bounds:
        """Return the bounds from the run's settings. With other numbers of groups, `max_queue_size` does not limit."""
        if groups_per_step == self.config.trainer.groups_per_step:
            return self.config.bounds
        per_version = groups_per_step * self.config.async_training.sync_every_steps
        alive = max(self.config.async_training.max_queue_size, (self.config.staleness_threshold + 1) * per_version)
        changes = {"trainer": {"groups_per_step": groups_per_step}, "async_training": {"max_queue_size": alive}}
        return changed(self.config, changes).bounds


def of_run(
    run: str,
    *,
    mode: str | None = None,
    threshold: int | None = None,
    sync_every_steps: int | None = None,
    accelerators: int | None = None,
    groups_per_step: int | None = None,
    scores: Scores | None = None,
    seed: int = 0,
) -> Planned:
    """Plan from a run. None keeps the run's own value."""
    found = find_run(run)
    config = found.config or load(found.folder / CONFIG)  # raises with the reason
    recorded = read(found.folder, n=config.rollout.n, groups_per_step=config.trainer.groups_per_step)
    scene = scene_of(recorded, settings_of(config))
    if scores is not None:
        scene = replace(scene, scores=scores)
    placed = place(config, ONE_GPU)
    may_share = placed.shared_gpu and placed.world_size == 1 and placed.replicas == recorded.replicas
    shared = SHARED if recorded.shared_gpu else MAY_SHARE if recorded.shared_gpu is None and may_share else ""
    cluster = MeasuredCluster(
        run=scene,
        trainers=placed.world_size,
        per_replica=config.rollout.tensor_parallel_size * config.rollout.pipeline_parallel_size,
        as_measured=not shared and scores is None,
    )
    split = f"{cluster.trainers} to train, {cluster.generators} to generate"
    said = [*recorded.notes]
    if shared:
        said.append(f"{shared}: {COUNTED}")
    if scores is None and recorded.scored_per_s is not None:
        said.append(f"{HELD_UP}: scoring is bounded by the {recorded.scored_per_s:.3g}/s that were measured")
    if recorded.steps < FEW_STEPS:
        said.append(f"{FEW_STEPS} steps or more tell what a run gives, and {recorded.steps} were measured: {UNSURE}")
    notes = "".join(f"\nnote: {note}" for note in said)
    asked = _asked(config, mode, threshold, sync_every_steps, groups_per_step)
    return Planned(
        about=f"{found.folder}, measured over {recorded.steps} steps ({split}){notes}",
        config=asked,
        cluster=cluster,
        accelerators=accelerators or cluster.accelerators,
        groups_per_step=asked.trainer.groups_per_step,
        seed=seed,
    )


def of_model(
    model: str,
    accelerator_name: str,
    accelerators: int,
    work: Workload,
    *,
    mode: str | None = None,
    threshold: int | None = None,
    sync_every_steps: int | None = None,
    seed: int = 0,
) -> Planned:
    cluster = Cluster(accelerator=accelerator(accelerator_name), shape=shape(model), workload=work)
    config = changed(_asked(TrainConfig(), mode, threshold, sync_every_steps), {"rollout": {"n": work.n}})
    return Planned(
        about=f"{cluster.shape.name} on {accelerators:,} x {cluster.accelerator.name} ({cluster.accelerator.source})",
        config=config,
        cluster=cluster,
        accelerators=accelerators,
        groups_per_step=work.groups_per_step,
        seed=seed,
    )


def settings_of(config: TrainConfig, *, steps: int = REPLAYED_STEPS) -> RunSettings:
    """Return what the replay of a run needs from its configuration."""
    return RunSettings(
        bounds=ending(config.bounds, steps),
        n=config.rollout.n,
        refill_slots=find_engine(config.rollout.engine).refill_slots,
        interval_s=config.async_training.batch_generation_interval,
        is_judge=config.reward.judge is not None,
    )


def changed(config: TrainConfig, changes: Mapping[str, object]) -> TrainConfig:
    """Return a checked configuration with changes: sections are merged, keys are replaced."""
    values = config.to_dict()
    for name, value in changes.items():
        values[name] = {**values[name], **value} if isinstance(value, Mapping) else value
    return to_config(values)


def _asked(
    config: TrainConfig,
    mode: str | None,
    threshold: int | None,
    sync_every_steps: int | None,
    groups_per_step: int | None = None,
) -> TrainConfig:
    """Check the changes as `freewheel train` would: what it refuses cannot be planned."""
    given: dict[str, object] = {}
    if threshold is not None:
        given["staleness_threshold"] = threshold
        given["max_staleness_allowed"] = max(config.async_training.max_staleness_allowed, threshold)
    if sync_every_steps is not None:
        given["sync_every_steps"] = sync_every_steps
    asked = changed(config, {"mode": mode or config.mode, "async_training": given})
    if groups_per_step is None:
        return asked
    try:
        return changed(asked, {"trainer": {"groups_per_step": groups_per_step}})
    except ConfigError as error:
        raise ConfigError("--groups-per-step", groups_per_step, f"freewheel train would refuse it: {error}") from error


Basis = Literal["measured", "extrapolated"]

AROUND = (0.0, -0.1, 0.1, -0.25, 0.25, -0.5, 0.5, -0.8, 1.0)
"""Splits to simulate: the closed form's number of generators, changed by these shares."""
CANDIDATES = len(AROUND)
"""Number of splits to simulate for one number of accelerators."""
REFINED = 4
"""Further splits between the best one and its neighbours."""
NEARBY = 3
"""Splits to simulate for each of many numbers of accelerators: the first of `AROUND`."""
LIVES = 20_000
"""Groups of a simulation: enough for one percent."""
LEAST_STEPS, MOST_STEPS = 12, 40
HUGE_LIVES = 400_000
"""From here on a simulation has as few steps as possible, because it has enough groups."""
HUGE_STEPS = 4
"""Steps beyond those that fill the pipeline."""
MOST_SAMPLES = 1_000_000
"""Most responses per step of a slice; more would take minutes."""
PARALLEL_LIVES = 100_000
"""Fewer groups are simulated faster here than in new processes."""
SECONDS_PER_HOUR = 3600.0
PRICED_SAMPLES = 1_000_000


class Plannable(Protocol):
    """What can be split: `hardware.Cluster` or `MeasuredCluster`."""

    @property
    def per_replica(self) -> int: ...

    @property
    def least_trainers(self) -> int: ...

    def is_measured(self, bounds: Bounds, *, trainers: int, generators: int) -> bool: ...

    def scene(self, bounds: Bounds, *, trainers: int, generators: int) -> Scene: ...


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated split."""

    accelerators: int
    trainers: int
    generators: int
    replicas: int
    groups_per_step: int
    basis: Basis
    outcome: Outcome
    verdict: str

    @property
    def samples_per_s(self) -> float:
        return self.outcome.samples_per_s

    @property
    def hours_per_million(self) -> float:
        """Accelerator-hours per million samples."""
        return PRICED_SAMPLES / self.samples_per_s * self.accelerators / SECONDS_PER_HOUR

    def cost(self, price_per_hour: float) -> float:
        """Cost per million samples."""
        return self.hours_per_million * price_per_hour


@dataclass(frozen=True, kw_only=True)
class _Job:
    scene: Scene
    trainers: int
    generators: int
    basis: Basis
    setting: Setting
    seed: int


def sweep(
    cluster: Plannable,
    accelerators: int,
    bounds: Callable[[int], Bounds],
    *,
    groups_per_step: int,
    mode: str = "fully_async",
    candidates: int = CANDIDATES,
    seed: int = 0,
    processes: int | None = None,
) -> list[Row]:
    """Simulate the splits of N accelerators. `bounds`: of so many groups per step, without an end. Rows are ordered by
    the number of trainers."""
    bounded = bounds(groups_per_step)
    chosen = candidates_of(cluster, accelerators, bounded, candidates)
    rows = _done(_jobs(cluster, chosen, bounded, mode, seed), processes)
    if rows:
        nearer = between(splits(cluster, accelerators), [row.trainers for row in rows], best(rows).trainers)
        rows += _done(_jobs(cluster, nearer, bounded, mode, seed), processes)
        rows.append(_tried(cluster, rows.pop(rows.index(best(rows))), bounded, mode, seed))
    return sorted(rows, key=lambda row: row.trainers)


def scaling(
    cluster: Plannable,
    counts: Iterable[int],
    bounds: Callable[[int], Bounds],
    *,
    groups_per_step: Callable[[int], int],
    mode: str = "fully_async",
    known: Sequence[Row] = (),
    seed: int = 0,
    processes: int | None = None,
) -> list[Row]:
    """Return the best split for each number of accelerators. `groups_per_step`: by number. `known`: rows that exist;
    their numbers are not simulated again."""
    jobs = []
    counts = [count for count in counts if not any(row.accelerators == count for row in known)]
    for count in counts:
        bounded = bounds(groups_per_step(count))
        jobs += _jobs(cluster, candidates_of(cluster, count, bounded, NEARBY), bounded, mode, seed)
    found: dict[int, Row] = {}
    for row in [*known, *_done(jobs, processes)]:
        before = found.get(row.accelerators)
        found[row.accelerators] = row if before is None else best([before, row])
    return [found[count] for count in sorted(found)]


def best(rows: Sequence[Row]) -> Row:
    """Return the row with the most samples per second; of equal ones the freshest."""
    return max(rows, key=lambda row: (row.samples_per_s, -row.outcome.lag_mean))


def splits(cluster: Plannable, accelerators: int) -> list[tuple[int, int]]:
    """Return all possible (trainers, generators). What whole replicas leave over trains."""
    found = []
    for replicas in range(1, accelerators // cluster.per_replica + 1):
        generators = replicas * cluster.per_replica
        if accelerators - generators >= cluster.least_trainers:
            found.append((accelerators - generators, generators))
    return found


def candidates_of(cluster: Plannable, accelerators: int, bounds: Bounds, most: int) -> list[tuple[int, int]]:
    """Return the split that the closed form prefers and others around it, because the closed form is approximate."""
    known = splits(cluster, accelerators)
    if len(known) <= most:
        return known
    bounded = ending(bounds, LEAST_STEPS)
    guess = max(known, key=lambda one: cluster.scene(bounded, trainers=one[0], generators=one[1]).guess)
    found: dict[tuple[int, int], None] = {}
    for share in AROUND:
        wanted = guess[1] * (1 + share)
        found[min(known, key=lambda one: abs(one[1] - wanted))] = None
    return sorted([*found][:most])


def between(known: Sequence[tuple[int, int]], tried: Sequence[int], winner: int) -> list[tuple[int, int]]:
    """Return some splits on either side of the best one, up to its simulated neighbours."""
    below = max((one for one in tried if one < winner), default=winner)
    above = min((one for one in tried if one > winner), default=winner)
    found = [split for split in known if below < split[0] < above and split[0] != winner]
    every = -(-len(found) // REFINED)
    return found[::every] if found else []


def ending(bounds: Bounds, steps: int) -> Bounds:
    return replace(bounds, total_groups=steps * bounds.groups_per_step)


def _steps(bounds: Bounds, groups: int) -> int:
    """Return the number of steps to simulate: enough groups, and enough steps beyond those that fill and empty the
    pipeline. `groups`: simulated groups per step."""
    filled = (bounds.threshold + 2) * bounds.steps_per_version
    steps = max(LEAST_STEPS, 2 * filled + 6, min(MOST_STEPS, LIVES // bounds.groups_per_step))
    return steps if steps * groups < HUGE_LIVES else filled + HUGE_STEPS


def _jobs(cluster: Plannable, chosen: Iterable[tuple[int, int]], bounds: Bounds, mode: str, seed: int) -> list[_Job]:
    jobs = []
    for trainers, generators in chosen:
        scene = cluster.scene(ending(bounds, LEAST_STEPS), trainers=trainers, generators=generators)
        groups = sliced(scene)[0].bounds.groups_per_step
        if groups * scene.n > MOST_SAMPLES:
            remedy = (
                f"{groups * scene.n:,} responses of a step would have to be simulated, and {MOST_SAMPLES:,} are the"
            )
            raise ConfigError("--groups-per-step", bounds.groups_per_step, f"{remedy} most: give fewer")
        scene = replace(scene, bounds=ending(bounds, _steps(bounds, groups)))
        setting = Setting(
            mode=mode,
            replicas=scene.generation.replicas,
            threshold=bounds.threshold,
            sync_every_steps=bounds.steps_per_version,
        )
        measured = cluster.is_measured(bounds, trainers=trainers, generators=generators)
        jobs.append(
            _Job(
                scene=scene,
                trainers=trainers,
                generators=generators,
                basis="measured" if measured else "extrapolated",
                setting=setting,
                seed=seed,
            )
        )
    return jobs


def _done(jobs: Sequence[_Job], processes: int | None) -> list[Row]:
    wanted = min(processes or os.cpu_count() or 1, len(jobs))
    lives = {id(job): sliced(job.scene)[0].bounds.total_groups or 0 for job in jobs}
    if wanted <= 1 or (processes is None and sum(lives.values()) < PARALLEL_LIVES):
        return [_row(job) for job in jobs]
    largest_first = sorted(jobs, key=lambda job: -lives[id(job)])
    with ProcessPoolExecutor(wanted, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_row, largest_first))


def _tried(cluster: Plannable, row: Row, bounds: Bounds, mode: str, seed: int) -> Row:
    """Simulate the remedy of the verdict, so that its number is not only an estimate."""
    (job,) = _jobs(cluster, [(row.trainers, row.generators)], bounds, mode, seed)

    def tried(part: Bound, speed: float) -> float:
        scene, training = job.scene, job.scene.training
        if part == "generation":
            generators = math.ceil(row.replicas * speed) * cluster.per_replica
            scene = cluster.scene(scene.bounds, trainers=row.trainers, generators=generators)
        else:
            faster = replace(training, base_s=training.base_s / speed, per_token_s=training.per_token_s / speed)
            scene = replace(scene, training=faster)
        return simulate_slice(scene, seed=seed).groups_per_s / row.outcome.groups_per_s

    return msgspec.structs.replace(row, verdict=_verdict(job, row.outcome, tried))


def _verdict(job: _Job, outcome: Outcome, tried: Tried | None = None) -> str:
    scores = job.scene.scores
    in_use = None if scores.per_s is None else outcome.scores_per_s / scores.per_s
    return str(outcome.verdict(job.setting, is_judge=scores.is_judge, judge_in_use=in_use, tried=tried))


def _row(job: _Job) -> Row:
    outcome = simulate_slice(job.scene, seed=job.seed)
    return Row(
        accelerators=job.trainers + job.generators,
        trainers=job.trainers,
        generators=job.generators,
        replicas=job.scene.generation.replicas,
        groups_per_step=job.scene.bounds.groups_per_step,
        basis=job.basis,
        outcome=outcome,
        verdict=_verdict(job, outcome),
    )
