"""One run against this machine: what its configuration says, and what that asks of memory, disks and limits.

    overrides ─▶ read: TrainConfig, Plan ─▶ Finding, …      what a run would refuse at its start
    Plan ─▶ needs, weights_bytes, checkpoint_bytes ─▶ host and storage judge by them
    Plan ─▶ concerns: what `freewheel train --dry-run` lists

Needs no torch and no Ray; hydra merges the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from freewheel.judge.config import parse_concurrency
from freewheel.judge.errors import ConfigError
from freewheel.runtime.doctor import gpu, host, judge, storage
from freewheel.runtime.doctor.finding import Check, Finding, State, examine, ok, problem, warning
from freewheel.runtime.reaching import KEY as RAY
from freewheel.runtime.run_dir import RUNS

if TYPE_CHECKING:
    from freewheel.judge.config import JudgeConfig
    from freewheel.runtime.config import TrainConfig
    from freewheel.runtime.plan import Plan

WHAT = "configuration"
MERGES = "hydra"
GPU_S = 3 * gpu.SMI_S
"""nvidia-smi is asked three things."""
FOLDERS_BESIDE = 2
"""`best/` and `final/`, each with a model's weights."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a command line means here, as far as it could be read."""

    config: TrainConfig | None = None
    plan: Plan | None = None
    findings: list[Finding] = field(default_factory=list)


def read(overrides: Sequence[str], config_path: str | None, config_name: str | None) -> Run:
    """As `freewheel train` would, and further: everything that it would refuse is found, not the first alone."""
    from freewheel.data.errors import DataError
    from freewheel.runtime.starting import planned, read_config

    if find_spec(MERGES) is None:
        said = "it cannot be read without hydra-core, which merges settings"
        return Run(findings=[warning(WHAT, said, "pip install 'freewheel[train]'")])
    config: TrainConfig | None = None
    try:
        config = read_config(overrides, config_path, config_name).config
        plan = planned(config)
    except (ConfigError, DataError) as error:
        return Run(config=config, findings=[problem(WHAT, str(error))])
    against = [error for error in plan.problems if error.key != RAY]  # which has a check of its own
    if against:
        return Run(config=config, plan=plan, findings=[problem(WHAT, str(error)) for error in against])
    steps = f"{plan.total_steps:,} step{'s' * (plan.total_steps != 1)}"
    said = f"{config.mode}, {steps} of {config.model.path} on {config.data.task}, nothing against it here"
    return Run(config=config, plan=plan, findings=[ok(WHAT, said)])


def needs(plan: Plan | None) -> host.Needs:
    """Of the machine. None: of the smallest run. In a cluster the actors are wherever that has room."""
    if plan is None:
        return host.Needs()
    at_once = max(connections(plan), plan.slots if plan.config.rollout.urls else 0)
    if plan.config.ray.address is not None:
        return host.Needs(connections=at_once, actors=0, threads=0)
    on_cpu = plan.world_size * sum(plan.memory_trainer.values()) * (plan.device_trainer == "cpu")
    on_cpu += plan.replicas * sum(plan.memory_replica.values()) * (plan.device_rollout == "cpu")
    threads = plan.world_size * plan.threads_trainer * (plan.device_trainer == "cpu")
    threads += plan.replicas * plan.threads_rollout * (plan.device_rollout == "cpu")
    return host.Needs(
        connections=at_once,
        actors=sum(actor.count for actor in plan.actors),
        memory_bytes=on_cpu,
        threads=threads,
    )


def connections(plan: Plan) -> int:
    """To a judge, at once, by the process that asks it; 0 without one."""
    found, _ = judge.of_run(plan.config.reward.judge)
    if found is None:
        return 0
    bounds = [bound for bound in parse_concurrency(found.concurrency) if bound is not None]
    return min([plan.config.reward.concurrency, *bounds])


def gpu_bytes(plan: Plan | None) -> int:
    """What it wants of one GPU, by the plan's estimate; 0 where it wants none here, or that is not known."""
    if plan is None or plan.config.ray.address is not None:
        return 0
    trainer = sum(plan.memory_trainer.values()) * (plan.device_trainer == "cuda")
    replica = sum(plan.memory_replica.values()) * (plan.device_rollout == "cuda")
    if plan.shared_gpu:
        return trainer + replica * plan.replicas
    together = max(1, round(1 / plan.gpus_per_replica)) if plan.gpus_per_replica else 1
    return max(trainer, replica * together)


def weights_bytes(plan: Plan | None) -> int:
    """What a version of the weights takes in shared memory; 0 where it takes another way, or is of unknown size."""
    if plan is None or plan.sync_bytes is None or plan.transport != "object_store":
        return 0
    return plan.sync_bytes


def checkpoint_bytes(plan: Plan | None) -> int:
    """What a run's checkpoints take at most: those that are kept, the one that is being written, `best` and `final`."""
    if plan is None or plan.sync_bytes is None:
        return 0
    parts = ("weights", "optimizer", "critic")
    state = plan.world_size * sum(plan.memory_trainer.get(part, 0) for part in parts)
    kept = plan.config.trainer.keep_last + 1
    return kept * (state + plan.sync_bytes) + FOLDERS_BESIDE * plan.sync_bytes


def folder(config: TrainConfig | None) -> str:
    return (config.run_dir if config is not None else None) or RUNS


def named_judge(config: TrainConfig | None) -> tuple[JudgeConfig | None, list[Finding]]:
    return (None, []) if config is None else judge.of_run(config.reward.judge)


def concerns(plan: Plan) -> list[Finding]:
    """What is not as it should be for this run here, and can be seen without a call, a measurement or a wait."""
    wanted = needs(plan)
    checks = (
        Check(what="judge", look=lambda: named_judge(plan.config)[1]),
        Check(what="GPU", look=lambda: _gpus(gpu_bytes(plan)), limit_s=GPU_S),
        Check(what="shared memory", look=lambda: _shared(weights_bytes(plan))),
        Check(what="run directory", look=lambda: _disk(plan)),
        Check(what="limits", look=lambda: _limits(wanted)),
    )
    return [finding for finding in examine(checks) if finding.state is not State.OK]


def _gpus(needed: int) -> list[Finding]:
    return list(gpu.memory(gpu.look(), needed_bytes=needed)) if needed else []


def _shared(needed: int) -> list[Finding]:
    """Leftovers matter to a run where they leave it no room."""
    found = list(storage.shared_memory(needed_bytes=needed))
    return found if found and found[0].state is not State.OK else []


def _disk(plan: Plan) -> list[Finding]:
    return list(storage.run_folder(folder(plan.config), needed_bytes=checkpoint_bytes(plan), timed=False))


def _limits(wanted: host.Needs) -> list[Finding]:
    here = host.look()
    return [host.files(here, wanted), host.processes(here, wanted)]
