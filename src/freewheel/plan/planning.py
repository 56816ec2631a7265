"""From what `freewheel plan` is given to what is simulated: a run's folder and its settings, or a model and a table.

    RUN ─▶ Recorded ─▶ Scene by replay ─▶ MeasuredCluster ─┐
    --model, --accelerator ─▶ Cluster ─────────────────────┴▶ Planned ─▶ the splits, and the scaling

The shell of this package, with `command`: it knows a run's settings (`freewheel.runtime`), as nothing else in here
does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from freewheel.errors import ConfigError
from freewheel.inspect.run import find_run
from freewheel.observe.run_folder import CONFIG
from freewheel.plan.hardware import Cluster, Workload, accelerator, shape
from freewheel.plan.measured import RunSettings, scene_of
from freewheel.plan.measured_cluster import MeasuredCluster
from freewheel.plan.recorded import read
from freewheel.plan.scene import Scores
from freewheel.plan.sweep import Plannable, Row, ending, scaling, sweep
from freewheel.queue.staleness import Bounds
from freewheel.runtime.compose import load
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.placement import Gpu, Machine, place
from freewheel.runtime.typed import to_config

REPLAYED_STEPS = 40
"""Of a run's own settings, to find what no file says: as many as its default has."""
GROUPS_PER_ACCELERATOR = 16
"""Groups a step for each accelerator, where nothing is said: then twice as many are alive as engines run at a time."""

ONE_GPU = Machine(cpus=1, memory_bytes=0, gpus=(Gpu(name="any", memory_bytes=0),))
"""The least that a run can have had where its settings leave it open: what they say themselves goes first."""
SHARED = "training and generation shared one GPU"
MAY_SHARE = "its settings let training and generation share one GPU, and it did not record whether they did"
COUNTED = (
    "each is counted as an accelerator of its own, as fast as it was beside the other, and no split is called measured"
)
FEW_STEPS = 10
"""Measured steps from which on figures are told without a warning: of fewer, the first ones are a large part."""
UNSURE = "the figures may be off by a factor"
HELD_UP = "responses waited for the judge's limit, or for a permit, most of the time"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is to be looked at."""

    about: str
    """In words."""
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
        """From the number that was asked for, whose rows are `known`, doubled while it is not above `last`; as many
        groups a step for each accelerator. Empty where that is one number only."""
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
        """As the run's settings make them. With other numbers of groups, and of a model, `max_queue_size` is no
        obstacle."""
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
    """What is None is as the run had it."""
    found = find_run(run)
    config = found.config or load(found.folder / CONFIG)  # which says what is wrong with it
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
    """What the replay of a run needs of its configuration."""
    return RunSettings(
        bounds=ending(config.bounds, steps),
        n=config.rollout.n,
        is_native=config.rollout.engine == "native",
        interval_s=config.async_training.batch_generation_interval,
        is_judge=config.reward.judge is not None,
    )


def changed(config: TrainConfig, changes: Mapping[str, object]) -> TrainConfig:
    """Checked as if it were written so: sections are merged, keys are replaced."""
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
    """Checked as `freewheel train` checks it: what that refuses is no plan."""
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
