"""Simulates every sensible split of N accelerators, and the scaling of the best one.

    RUN ─▶ RecordedRun ─▶ Scene by replay ─▶ MeasuredCluster ─┐
    --model, --accelerator ─▶ TableCluster ───────────────────┴▶ Planned ─▶ the splits, and the scaling

    N ─▶ candidates, by the closed form ─▶ simulate, on all cores ─▶ neighbours of the best ─▶ rows
    N, 2N, 4N, … ─▶ the best of a few splits each ─▶ scaling, with equally many groups per step and accelerator

A row is `measured` if its parts were measured in a run with that split and those bounds, and `extrapolated` if they
follow from data sheets and a model of scaling. Used by `freewheel plan`.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from freewheel.errors import ConfigError
from freewheel.inspect.run import find_run
from freewheel.observe.run_folder import CONFIG
from freewheel.plan.clusters import (
    MeasuredCluster,
    TableCluster,
    Workload,
    find_accelerator,
    find_shape,
    read,
    scene_of,
)
from freewheel.plan.scene import Outcome, Scene, Scores
from freewheel.plan.simulation import simulate_slice, slice_of
from freewheel.queue.staleness import Bounds
from freewheel.runtime.bottleneck import Bound, Setting, Tried
from freewheel.runtime.config import Mode, TrainConfig
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
    "each counts as a separate accelerator with the speed it had on the shared one, and no split is called measured"
)
FEW_STEPS = 10
"""With fewer measured steps the figures come with a warning, because the first steps are a large part."""
UNSURE = "the figures may be off by a factor"
HELD_BACK = "responses waited for the judge's limit, or for a free place, most of the time"


AROUND = (0.0, -0.1, 0.1, -0.25, 0.25, -0.5, 0.5, -0.8, 1.0)
"""Splits to simulate: the closed form's number of generators, changed by these shares."""
REFINED = 4
"""Further splits between the best one and its neighbours."""
NEARBY = 3
"""Splits to simulate for each of many numbers of accelerators: the first of `AROUND`."""
LIVES = 20_000
"""Groups per simulation: enough for figures within one percent."""
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


Basis = Literal["measured", "extrapolated"]
Split = tuple[int, int]
"""Number of trainers and of generators."""


class SimulatedSplit(msgspec.Struct, frozen=True, kw_only=True):
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


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A split to simulate."""

    scene: Scene
    trainers: int
    generators: int
    basis: Basis
    mode: Mode
    seed: int

    @property
    def lives(self) -> int:
        """Number of groups to simulate."""
        return slice_of(self.scene)[0].bounds.total_groups or 0

    def simulate(self) -> SimulatedSplit:
        outcome = simulate_slice(self.scene, seed=self.seed)
        return SimulatedSplit(
            accelerators=self.trainers + self.generators,
            trainers=self.trainers,
            generators=self.generators,
            replicas=self.scene.generation.replicas,
            groups_per_step=self.scene.bounds.groups_per_step,
            basis=self.basis,
            outcome=outcome,
            verdict=self.verdict_on(outcome),
        )

    def verdict_on(self, outcome: Outcome, tried: Tried | None = None) -> str:
        bounds, replicas = self.scene.bounds, self.scene.generation.replicas
        every = bounds.steps_per_version
        setting = Setting(mode=self.mode, replicas=replicas, threshold=bounds.threshold, sync_every_steps=every)
        return str(outcome.verdict(setting, self.scene.scores, tried=tried))


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is to be simulated."""

    about: str
    """A description in words."""
    config: TrainConfig
    cluster: MeasuredCluster | TableCluster
    accelerators: int
    groups_per_step: int
    seed: int = 0
    processes: int | None = None
    """None: as many as there are cores, if that is faster."""

    def splits(self) -> list[SimulatedSplit]:
        """Return the simulated splits, ordered by the number of trainers."""
        bounds = self.bounds(self.groups_per_step)
        chosen = candidates_of(self.cluster, self.accelerators, bounds, len(AROUND))
        rows = self._simulate([self.job(*split, bounds) for split in chosen])
        if not rows:
            least = self.cluster.least_trainers + self.cluster.per_replica
            raise ConfigError("--accelerators", self.accelerators, f"this model needs at least {least}: give more")
        known = splits(self.cluster, self.accelerators)
        nearer = between(known, [row.trainers for row in rows], best(rows).trainers)
        rows += self._simulate([self.job(*split, bounds) for split in nearer])
        rows.append(self._try_remedy(rows.pop(rows.index(best(rows))), bounds))
        return sorted(rows, key=lambda row: row.trainers)

    def scaling(self, last: int, known: Sequence[SimulatedSplit]) -> list[SimulatedSplit]:
        """Return the best split of each number of accelerators: the requested one, whose rows are `known`, doubled up
        to `last`, with groups per step in proportion. Empty if that is only one number."""
        counts = [self.accelerators]
        while counts[-1] * 2 <= last:
            counts.append(counts[-1] * 2)
        jobs = []
        for count in counts[1:]:
            bounds = self.bounds(max(1, round(self.groups_per_step / self.accelerators * count)))
            jobs += [self.job(*split, bounds) for split in candidates_of(self.cluster, count, bounds, NEARBY)]
        rows = [*known, *self._simulate(jobs)]
        return [best([row for row in rows if row.accelerators == count]) for count in counts if jobs]

    def bounds(self, groups_per_step: int) -> Bounds:
        """Return the bounds from the run's settings. With other numbers of groups, `max_queue_size` does not limit."""
        if groups_per_step == self.config.trainer.groups_per_step:
            return self.config.bounds
        per_version = groups_per_step * self.config.async_training.sync_every_steps
        alive = max(self.config.async_training.max_queue_size, (self.config.staleness_threshold + 1) * per_version)
        changes = {"trainer": {"groups_per_step": groups_per_step}, "async_training": {"max_queue_size": alive}}
        return changed(self.config, changes).bounds

    def job(self, trainers: int, generators: int, bounds: Bounds) -> _Job:
        scene = self.cluster.scene(ending(bounds, LEAST_STEPS), trainers=trainers, generators=generators)
        groups = slice_of(scene)[0].bounds.groups_per_step
        if groups * scene.n > MOST_SAMPLES:
            remedy = (
                f"one step has {groups * scene.n:,} responses, and at most {MOST_SAMPLES:,} are simulated: give fewer"
            )
            raise ConfigError("--groups-per-step", bounds.groups_per_step, remedy)
        measured = self.cluster.is_measured(bounds, trainers=trainers, generators=generators)
        return _Job(
            scene=replace(scene, bounds=ending(bounds, _steps(bounds, groups))),
            trainers=trainers,
            generators=generators,
            basis="measured" if measured else "extrapolated",
            mode=self.config.mode,
            seed=self.seed,
        )

    def _simulate(self, jobs: Sequence[_Job]) -> list[SimulatedSplit]:
        wanted = min(self.processes or os.cpu_count() or 1, len(jobs))
        if wanted <= 1 or (self.processes is None and sum(job.lives for job in jobs) < PARALLEL_LIVES):
            return [job.simulate() for job in jobs]
        largest_first = sorted(jobs, key=lambda job: -job.lives)
        with ProcessPoolExecutor(wanted, mp_context=multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(_Job.simulate, largest_first))

    def _try_remedy(self, row: SimulatedSplit, bounds: Bounds) -> SimulatedSplit:
        """Simulate the remedy of the verdict, so that its number is not only an estimate."""
        job = self.job(row.trainers, row.generators, bounds)

        def simulate_remedy(part: Bound, speed: float) -> float:
            scene = job.scene
            if part == "generation":
                generators = math.ceil(row.replicas * speed) * self.cluster.per_replica
                scene = self.cluster.scene(scene.bounds, trainers=row.trainers, generators=generators)
            else:
                scene = replace(scene, training=scene.training.faster(speed))
            return simulate_slice(scene, seed=self.seed).groups_per_s / row.outcome.groups_per_s

        return msgspec.structs.replace(row, verdict=job.verdict_on(row.outcome, simulate_remedy))


def best(rows: Sequence[SimulatedSplit]) -> SimulatedSplit:
    """Return the row with the most samples per second; of equal ones the freshest."""
    return max(rows, key=lambda row: (row.samples_per_s, -row.outcome.lag_mean))


def splits(cluster: MeasuredCluster | TableCluster, accelerators: int) -> list[Split]:
    """Return all possible splits. Accelerators that fill no replica train."""
    most = (accelerators - cluster.least_trainers) // cluster.per_replica
    generators = [replicas * cluster.per_replica for replicas in range(1, most + 1)]
    return [(accelerators - each, each) for each in generators]


def candidates_of(cluster: MeasuredCluster | TableCluster, accelerators: int, bounds: Bounds, most: int) -> list[Split]:
    """Return the split that the closed form prefers and others around it, because the closed form is approximate."""
    known = splits(cluster, accelerators)
    if len(known) <= most:
        return known
    bounded = ending(bounds, LEAST_STEPS)
    guess = max(known, key=lambda one: cluster.scene(bounded, trainers=one[0], generators=one[1]).guess)
    wanted = [guess[1] * (1 + share) for share in AROUND]
    found = dict.fromkeys(min(known, key=lambda one: abs(one[1] - each)) for each in wanted)
    return sorted([*found][:most])


def between(known: Sequence[Split], tried: Sequence[int], winner: int) -> list[Split]:
    """Return some splits on either side of the best one, up to its simulated neighbours."""
    below = max((one for one in tried if one < winner), default=winner)
    above = min((one for one in tried if one > winner), default=winner)
    found = [split for split in known if below < split[0] < above and split[0] != winner]
    return found[:: -(-len(found) // REFINED) or 1]


def ending(bounds: Bounds, steps: int) -> Bounds:
    return replace(bounds, total_groups=steps * bounds.groups_per_step)


def _steps(bounds: Bounds, groups: int) -> int:
    """Return the number of steps to simulate: enough groups, and enough steps beyond those that fill and empty the
    pipeline. `groups`: simulated groups per step."""
    filled = (bounds.threshold + 2) * bounds.steps_per_version
    steps = max(LEAST_STEPS, 2 * filled + 6, min(MOST_STEPS, LIVES // bounds.groups_per_step))
    return steps if steps * groups < HUGE_LIVES else filled + HUGE_STEPS


def of_run(
    run: str, *, accelerators: int | None = None, scores: Scores | None = None, seed: int = 0, **asked: Any
) -> Planned:
    """Plan from a run. `asked`: the arguments of `_change`; None keeps the run's own value."""
    found = find_run(run)
    config = found.config or load(found.folder / CONFIG)  # raises with the reason
    recorded = read(found.folder, n=config.rollout.n, groups_per_step=config.trainer.groups_per_step)
    scene = scene_of(recorded, config, ending(config.bounds, REPLAYED_STEPS))
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
    notes = [*recorded.notes]
    if shared:
        notes.append(f"{shared}: {COUNTED}")
    if scores is None and recorded.scored_per_s is not None:
        notes.append(f"{HELD_BACK}: scoring is limited to the measured {recorded.scored_per_s:.3g}/s")
    if recorded.steps < FEW_STEPS:
        notes.append(f"only {recorded.steps} steps were measured: {UNSURE}. {FEW_STEPS} or more are enough")
    split = f"{cluster.trainers} to train, {cluster.generators} to generate"
    about = [f"{found.folder}, measured over {recorded.steps} steps ({split})", *(f"note: {note}" for note in notes)]
    config = _change(config, **asked)
    return Planned(
        about="\n".join(about),
        config=config,
        cluster=cluster,
        accelerators=accelerators or cluster.trainers + cluster.generators,
        groups_per_step=config.trainer.groups_per_step,
        seed=seed,
    )


def of_model(
    model: str, accelerator_name: str, accelerators: int, work: Workload, *, seed: int = 0, **asked: Any
) -> Planned:
    cluster = TableCluster(accelerator=find_accelerator(accelerator_name), shape=find_shape(model), workload=work)
    return Planned(
        about=f"{cluster.shape.name} on {accelerators:,} x {cluster.accelerator.name} ({cluster.accelerator.source})",
        config=changed(_change(TrainConfig(), **asked), {"rollout": {"n": work.n}}),
        cluster=cluster,
        accelerators=accelerators,
        groups_per_step=work.groups_per_step,
        seed=seed,
    )


def changed(config: TrainConfig, changes: Mapping[str, object]) -> TrainConfig:
    """Return a checked configuration with changes: sections are merged, keys are replaced."""
    values = config.to_dict()
    for name, value in changes.items():
        values[name] = {**values[name], **value} if isinstance(value, Mapping) else value
    return to_config(values)


def _change(
    config: TrainConfig,
    *,
    mode: str | None = None,
    threshold: int | None = None,
    sync_every_steps: int | None = None,
    groups_per_step: int | None = None,
) -> TrainConfig:
    """Return the configuration with these settings. Raises what `freewheel train` would raise."""
    given: dict[str, object] = {}
    if threshold is not None:
        given["staleness_threshold"] = threshold
        given["max_staleness_allowed"] = max(config.async_training.max_staleness_allowed, threshold)
    if sync_every_steps is not None:
        given["sync_every_steps"] = sync_every_steps
    config = changed(config, {"mode": mode or config.mode, "async_training": given})
    if groups_per_step is None:
        return config
    try:
        return changed(config, {"trainer": {"groups_per_step": groups_per_step}})
    except ConfigError as error:
        raise ConfigError("--groups-per-step", groups_per_step, f"freewheel train would refuse it: {error}") from error
