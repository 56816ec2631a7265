"""Checks one run against this machine: its configuration, and what that needs of memory, disks and limits.

    overrides ─▶ read_run: TrainConfig, Plan ─▶ Finding, …      what a run would refuse at its start
    Plan ─▶ run_needs, weights_bytes, checkpoint_bytes ─▶ judged by `machine`
    TrainConfig ─▶ check_ports, check_existing_run
    Plan ─▶ find_concerns: what `freewheel train --dry-run` lists

Every setting that `freewheel train` would refuse is found, not only the first: a refused setting is reported, left out,
and the rest is read again. A second message about the same key is suppressed. Needs no torch and no Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from freewheel.doctor import judge, machine
from freewheel.errors import ConfigError, DataError
from freewheel.judge.config import parse_concurrency
from freewheel.observe.run_folder import CONFIG, saved_steps
from freewheel.runtime.cluster import ADDRESS_KEY as RAY
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.start import RESUME, RUNS, is_resume, read_config
from freewheel.utils.findings import Check, Finding, State, ok, problem, run_checks, warning

if TYPE_CHECKING:
    from freewheel.judge.config import JudgeConfig
    from freewheel.runtime.plan import Plan

WHAT = "configuration"
GPU_S = 3 * machine.SMI_S
"""nvidia-smi is asked three times."""
FOLDERS_BESIDE = 2
"""`best/` and `final/`, each with a model's weights."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a command line means, as far as it could be read."""

    config: TrainConfig | None = None
    """Without the refused settings."""
    plan: Plan | None = None
    """None if a setting had to be left out: the plan would belong to another run."""
    findings: list[Finding] = field(default_factory=list)


def read_run(overrides: Sequence[str], config_path: str | None, config_name: str | None) -> Run:
    """Read a command line as `freewheel train` would, but find everything that it would refuse."""
    from freewheel.doctor.run import read_every_error

    config, refused = read_every_error(overrides, config_path, config_name)
    if config is None:
        return Run(findings=[problem(WHAT, str(error)) for error in refused])
    plan, against = _make_plan(config)
    told = {error.key for error in refused}
    against = [*refused, *(error for error in against if getattr(error, "key", None) not in told)]
    if refused:
        plan = None
    if against or plan is None:
        texts = dict.fromkeys(map(str, against))
        return Run(config=config, plan=plan, findings=[problem(WHAT, text) for text in texts])
    steps = f"{plan.total_steps:,} step{'s' * (plan.total_steps != 1)}"
    said = f"{config.mode}, {steps} of {config.model.path} on {config.data.task}, nothing against it here"
    return Run(config=config, plan=plan, findings=[ok(WHAT, said)])


def _make_plan(config: TrainConfig) -> tuple[Plan | None, list[ConfigError | DataError]]:
    """Return the plan and everything against it; None if something that it names does not exist."""
    from freewheel.runtime.config import held_out_file
    from freewheel.runtime.placement import Machine, place
    from freewheel.runtime.preflight import refused
    from freewheel.runtime.start import make_plan

    try:
        plan = make_plan(config)
    except (ConfigError, DataError) as error:
        here = Machine.here()
        more = [*place(config, here).problems, *held_out_file(config)]
        return None, [error, *refused(config), *more]
    return plan, [error for error in plan.problems if error.key != RAY]  # it has its own check


def run_needs(plan: Plan | None) -> machine.Needs:
    """Return what the run needs of the machine. None: the smallest run. In a cluster, actors run elsewhere."""
    if plan is None:
        return machine.Needs()
    at_once = max(judge_connections(plan), plan.slots if plan.config.rollout.urls else 0)
    if plan.config.ray.address is not None:
        return machine.Needs(connections=at_once, actors=0, threads=0)
    return machine.Needs(
        connections=at_once, actors=plan.actor_count, memory_bytes=plan.cpu_bytes, threads=plan.busy_threads
    )


def judge_connections(plan: Plan) -> int:
    """Return the simultaneous judge connections of a process; 0 without a judge."""
    found, _ = judge.of_run(plan.config.reward.judge)
    if found is None:
        return 0
    bounds = [bound for bound in parse_concurrency(found.concurrency) if bound is not None]
    return min([plan.config.reward.concurrency, *bounds])


def gpu_bytes(plan: Plan | None) -> int:
    """Return what the run needs of one GPU, by the plan's estimate; 0 if it needs none here or it is unknown."""
    if plan is None or plan.config.ray.address is not None:
        return 0
    return plan.gpu_bytes


def weights_bytes(plan: Plan | None) -> int:
    """Return the size of a version of the weights in shared memory; 0 if it takes another path or is unknown."""
    if plan is None or plan.sync_bytes is None or plan.transport != "object_store":
        return 0
    return plan.sync_bytes


def checkpoint_bytes(plan: Plan | None) -> int:
    """Return the most that a run's checkpoints take: those kept, the one being written, `best` and `final`."""
    if plan is None or plan.sync_bytes is None:
        return 0
    parts = ("weights", "optimizer", "critic")
    state = plan.world_size * sum(plan.memory_trainer.get(part, 0) for part in parts)
    kept = plan.config.trainer.keep_last + 1
    return kept * (state + plan.sync_bytes) + FOLDERS_BESIDE * plan.sync_bytes


def run_folder(config: TrainConfig | None) -> str:
    return (config.run_dir if config is not None else None) or RUNS


def named_judge(config: TrainConfig | None) -> tuple[JudgeConfig | None, list[Finding]]:
    return (None, []) if config is None else judge.of_run(config.reward.judge)


def check_ports(config: TrainConfig | None) -> Iterator[Finding]:
    """Report ports that the run should listen on but cannot."""
    from freewheel.utils.http import HOST, listen

    if config is None:
        return
    observe = config.observe
    page, metrics = observe.dashboard_port if observe.dashboard else 0, observe.prometheus_port or 0
    with ExitStack() as held:  # both at once, as the run would
        for key, port, judged, so in (
            ("observe.prometheus_port", metrics, problem, ""),
            ("observe.dashboard_port", page, warning, ": the run would have no page"),
        ):
            try:
                if port:  # otherwise any free port
                    held.enter_context(listen(HOST, port))
            except OSError as error:
                yield judged("port", f"{key} = {port}: it cannot be listened on ({error.strerror}){so}", f"{key}=0")


def check_existing_run(config: TrainConfig | None) -> Iterator[Finding]:
    """Report problems of a run directory that is resumed."""
    if config is None or config.run_dir is None or not (Path(config.run_dir) / CONFIG).exists():
        return
    from freewheel.inspect.run import live_holder
    from freewheel.trainer.checkpoint import has_checkpoint

    folder = Path(config.run_dir)
    if holder := live_holder(folder):
        yield problem("run directory", f"{folder} is in use by {holder}: wait for it, or end it")
    if not has_checkpoint(folder):
        none = "no checkpoint that can be loaded" if saved_steps(folder) else "no checkpoint"
        yield warning("run directory", f"{folder} has {none}: the run begins anew, with what its journal has")


def find_concerns(plan: Plan) -> list[Finding]:
    """Return the findings about this run that need no call, no measurement and no wait."""
    wanted = run_needs(plan)
    checks = (
        Check(what="judge", look=lambda: named_judge(plan.config)[1]),
        Check(what="GPU", look=lambda: _gpus(gpu_bytes(plan)), limit_s=GPU_S),
        Check(what="shared memory", look=lambda: _shared(weights_bytes(plan))),
        Check(what="run directory", look=lambda: _disk(plan)),
        Check(what="run directory", look=lambda: check_existing_run(plan.config)),
        Check(what="port", look=lambda: check_ports(plan.config)),
        Check(what="limits", look=lambda: _limits(wanted)),
    )
    return [finding for finding in run_checks(checks) if finding.state is not State.OK]


def _gpus(needed: int) -> list[Finding]:
    return list(machine.check_gpus(machine.read_driver(), needed_bytes=needed)) if needed else []


def _shared(needed: int) -> list[Finding]:
    """Report leftovers in shared memory only if they leave the run no room."""
    found = list(machine.check_shared_memory(needed_bytes=needed))
    return found if found and found[0].state is not State.OK else []


def _disk(plan: Plan) -> list[Finding]:
    return list(machine.check_run_folder(run_folder(plan.config), needed_bytes=checkpoint_bytes(plan), timed=False))


def _limits(wanted: machine.Needs) -> list[Finding]:
    here = machine.read_host()
    return [machine.check_files(here, wanted), machine.check_processes(here, wanted)]


GRAMMAR = "override"
"""The key of an override that cannot be parsed."""


def read_every_error(
    overrides: Sequence[str], config_path: str | None, config_name: str | None
) -> tuple[TrainConfig | None, list[ConfigError]]:
    """Return the configuration without refused settings, and the refusals. None if the rest cannot be read, such as a
    file that is not YAML."""
    left, found = list(overrides), list[ConfigError]()
    read = _read(left, config_path, config_name)
    while isinstance(read, ConfigError):
        refused = read
        if refused.key != GRAMMAR and any(refused.key == told.key for told in found):
            return None, found
        found.append(refused)
        for rest in _without(left, refused.key, in_file=bool(config_path or config_name)):
            read = _read(rest, config_path, config_name)
            if _settles(read, refused):
                left = rest
                break
        else:
            return None, found
    return read, found


def _read(overrides: list[str], config_path: str | None, config_name: str | None) -> TrainConfig | ConfigError:
    try:
        return read_config(overrides, config_path, config_name).config
    except ConfigError as error:
        return error


def _settles(now: TrainConfig | ConfigError, before: ConfigError) -> bool:
    """Return whether the earlier refusal is resolved."""
    if isinstance(now, TrainConfig):
        return True
    return str(now) != str(before) if before.key == GRAMMAR else now.key not in (before.key, GRAMMAR)


def _without(overrides: list[str], key: str, *, in_file: bool) -> Iterator[list[str]]:
    """Yield ways to leave out a refused key: the override that sets it, its value in a file, and what it contradicts.
    Never drop `resume`, because the rest would describe another run."""
    if key == RESUME:
        return
    others = [override for override in overrides if is_resume(override) or not _sets(override, key)]
    if len(others) < len(overrides):
        yield others
    if in_file:  # it may contain another wrong setting
        yield [*others, f"~{key}"]
    for place, override in enumerate(overrides):
        if not is_resume(override):
            yield [*overrides[:place], *overrides[place + 1 :]]


def _sets(override: str, key: str) -> bool:
    """Return whether an override sets the key or a section with it."""
    given = override.lstrip("+~").partition("=")[0]
    return f"{given}.".startswith(f"{key}.") or f"{key}.".startswith(f"{given}.")
