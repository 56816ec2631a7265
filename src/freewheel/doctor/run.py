"""Checks one run against this machine: its configuration, and what that needs of memory, disks and limits.

    overrides ─▶ read_run: TrainConfig, RunPlan ─▶ Finding, …   what a run would refuse at its start
    RunPlan ─▶ run_needs ─▶ judged by `machine`
    list_checks: the checks of `freewheel doctor`; find_concerns: what `freewheel train --dry-run` lists

Every setting that `freewheel train` would refuse is found, not only the first: a refused setting is reported, left out,
and the rest is read again. A second message about the same key is suppressed. Needs no torch and no Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from freewheel.doctor import judge, machine, software
from freewheel.errors import ConfigError, DataError
from freewheel.judge.config import parse_concurrency
from freewheel.observe.run_folder import CONFIG, saved_steps
from freewheel.runtime.cluster import ADDRESS_KEY as RAY
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.start import RESUME, RUNS, is_resume, read_config
from freewheel.utils.findings import Check, Finding, State, count_of, ok, problem, run_checks, warning

if TYPE_CHECKING:
    from freewheel.judge.config import JudgeConfig
    from freewheel.runtime.run_plan import RunPlan

WHAT = "configuration"
READ_S = 240.0
"""Time to read a configuration: a child process may check vLLM."""
JUDGE_S = 40.0
"""Time for an endpoint. Its calls have their own limits, but resolving its name has none."""
RAY_S = 20.0
EXTRA_FOLDERS = 2
"""`best/` and `final/`, each with a model's weights."""


# -- the checks -------------------------------------------------------------------------------------------------------


def list_checks(
    overrides: Sequence[str], config_path: str | None, config_name: str | None, judges: Sequence[JudgeConfig]
) -> Iterator[Check]:
    """Yield every check of `freewheel doctor`. Run each before the next: later ones use what earlier ones saw."""
    driver: machine.GpuDriver | None = None
    run = CheckedRun()

    def ask_driver() -> list[Finding]:
        nonlocal driver
        driver = machine.read_driver()
        return []

    def read() -> list[Finding]:
        nonlocal run
        with redirect_stdout(sys.stderr):  # the user's modules may print
            run = read_run(overrides, config_path, config_name)
        return run.findings

    trains = not judges or bool(overrides or config_path or config_name)
    yield Check(what="Python", look=lambda: [software.python_release()])
    yield Check(what="packages", look=lambda: software.packages(trains=trains))
    yield Check(what="GPU", look=ask_driver, limit_s=machine.SMI_S + 10)
    yield Check(what="torch", look=lambda: software.torch(driver), limit_s=software.TORCH_S + 10)
    yield Check(what=WHAT, look=read, limit_s=READ_S)
    if driver is not None:
        yield Check(what="GPU", look=partial(machine.check_gpus, driver, needed_bytes=run_needs(run.plan).gpu_bytes))
    address = None if run.config is None else run.config.ray.address
    yield Check(what="vLLM", look=lambda: software.vllm(wanted=run.wants_vllm))
    yield Check(what="Ray", look=lambda: software.ray(address, os.environ), limit_s=RAY_S)
    yield from _list_needs(run.config, run.plan)
    if address is None:  # the machines of a cluster have their own folders
        yield Check(what="Ray's folder", look=machine.check_ray_folder)
    yield Check(what="memory", look=lambda: _check_memory_and_cpus(run.plan))
    yield from list_judges(run.config, judges)


def find_concerns(plan: RunPlan) -> list[Finding]:
    """Return the findings about this run that need no call, no measurement and no wait."""
    checks = [Check(what=judge.WHAT, look=lambda: judge.of_run(plan.config.reward.judge)[1])]
    if needed := run_needs(plan).gpu_bytes:
        look = partial(machine.check_gpus, needed_bytes=needed)
        checks.append(Check(what="GPU", look=lambda: look(machine.read_driver()), limit_s=machine.SMI_S + 10))
    checks += _list_needs(plan.config, plan, timed=False)
    return [finding for finding in run_checks(checks) if finding.state is not State.OK]


def _list_needs(config: TrainConfig | None, plan: RunPlan | None, *, timed: bool = True) -> Iterator[Check]:
    needs = run_needs(plan)
    folder = (config.run_dir if config is not None else None) or RUNS
    disk = partial(machine.check_run_folder, folder, needed_bytes=needs.checkpoint_bytes, timed=timed)
    yield Check(what="shared memory", look=partial(machine.check_shared_memory, needed_bytes=needs.weights_bytes))
    yield Check(what="run directory", look=disk)
    if config is not None:
        yield Check(what="run directory", look=partial(check_existing_run, config))
        yield Check(what="port", look=partial(check_ports, config))
    yield Check(what="limits", look=lambda: machine.check_limits(machine.read_host(), needs))


def _check_memory_and_cpus(plan: RunPlan | None) -> Iterator[Finding]:
    from freewheel.runtime.placement import Machine

    here = plan.machine if plan is not None else Machine.of_host()
    return machine.check_memory_and_cpus(machine.read_host(), here, run_needs(plan))


def list_judges(config: TrainConfig | None, judges: Sequence[JudgeConfig]) -> Iterator[Check]:
    named, findings = judge.of_run(None if config is None else config.reward.judge)
    yield Check(what=judge.WHAT, look=lambda: findings)
    wanted = [(named, "reward.judge.model_name")] if named is not None else []
    for asked, model_key in [*wanted, *((one, "--judge-model") for one in judges)]:
        for endpoint in asked.endpoints:
            look = partial(judge.ask, asked, endpoint, model_key=model_key)
            yield Check(what=f"{judge.WHAT} {endpoint.url}", look=look, limit_s=JUDGE_S)


def check_ports(config: TrainConfig) -> Iterator[Finding]:
    """Report ports that the run should listen on but cannot."""
    from freewheel.utils.http import HOST, listen

    observe = config.observe
    page, metrics = observe.dashboard_port if observe.dashboard else 0, observe.prometheus_port or 0
    with ExitStack() as held:  # hold both ports at the same time, as the run would
        for key, port, state, so in (
            ("observe.prometheus_port", metrics, problem, ""),
            ("observe.dashboard_port", page, warning, ": the run would have no page"),
        ):
            try:
                if port:  # otherwise any free port
                    held.enter_context(listen(HOST, port))
            except OSError as error:
                yield state("port", f"{key} = {port}: the run cannot listen on it ({error.strerror}){so}", f"{key}=0")


def check_existing_run(config: TrainConfig) -> Iterator[Finding]:
    """Report problems of a run directory that is resumed."""
    if config.run_dir is None or not (Path(config.run_dir) / CONFIG).exists():
        return
    from freewheel.inspect.run import live_holder
    from freewheel.trainer.checkpoint import has_checkpoint

    folder = Path(config.run_dir)
    if holder := live_holder(folder):
        yield problem("run directory", f"{folder} is in use by {holder}: wait for it, or end it")
    if not has_checkpoint(folder):
        none = "no checkpoint that can be loaded" if saved_steps(folder) else "no checkpoint"
        yield warning("run directory", f"{folder} has {none}: the run starts over, with the groups of its journal")


# -- what the run needs -----------------------------------------------------------------------------------------------


def run_needs(plan: RunPlan | None) -> machine.Needs:
    """Return what the run needs of the machine. None: the smallest run. In a cluster, actors run elsewhere."""
    if plan is None:
        return machine.Needs()
    is_here = plan.config.ray.address is None
    weights, checkpoints = plan.sync_bytes or 0, 0
    if weights:  # else the model's size is unknown
        state = plan.world_size * sum(plan.memory_trainer.get(part, 0) for part in ("weights", "optimizer", "critic"))
        checkpoints = (plan.config.trainer.keep_last + 1) * (state + weights) + EXTRA_FOLDERS * weights
    return machine.Needs(
        connections=max(judge_connections(plan), plan.slots if plan.config.rollout.urls else 0),
        actors=plan.actor_count if is_here else 0,
        memory_bytes=plan.cpu_bytes if is_here else 0,
        threads=plan.busy_threads if is_here else 0,
        gpu_bytes=plan.gpu_bytes if is_here else 0,
        weights_bytes=weights if plan.transport == "object_store" else 0,
        checkpoint_bytes=checkpoints,
    )


def judge_connections(plan: RunPlan) -> int:
    """Return the simultaneous judge connections of a process; 0 without a judge."""
    found, _ = judge.of_run(plan.config.reward.judge)
    if found is None:
        return 0
    bounds = [bound for bound in parse_concurrency(found.concurrency) if bound is not None]
    return min([plan.config.reward.concurrency, *bounds])


# -- the configuration ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """What a command line means, as far as it could be read."""

    config: TrainConfig | None = None
    """The configuration without the refused settings."""
    plan: RunPlan | None = None
    """None if a setting had to be left out: the plan would belong to another run."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def wants_vllm(self) -> bool:
        from freewheel.rollout.engine_factories import find_engine

        if self.config is None:
            return False
        return "vllm" in find_engine(self.config.rollout.engine).packages(self.config.rollout)


def read_run(overrides: Sequence[str], config_path: str | None, config_name: str | None) -> CheckedRun:
    """Read a command line as `freewheel train` would, but find everything that it would refuse."""
    config, refused = read_every_error(overrides, config_path, config_name)
    if config is None:
        return CheckedRun(findings=[problem(WHAT, str(error)) for error in refused])
    plan, more = _make_plan(config)
    told = {error.key for error in refused}
    errors = [*refused, *(error for error in more if getattr(error, "key", None) not in told)]
    if refused:
        plan = None
    if errors or plan is None:
        return CheckedRun(
            config=config, plan=plan, findings=[problem(WHAT, text) for text in dict.fromkeys(map(str, errors))]
        )
    steps = count_of(plan.total_steps, "step")
    detail = f"{config.mode}, {steps} of {config.model.path} on {config.data.task}, no problem found"
    return CheckedRun(config=config, plan=plan, findings=[ok(WHAT, detail)])


def _make_plan(config: TrainConfig) -> tuple[RunPlan | None, list[ConfigError | DataError]]:
    """Return the plan and everything against it; None if something that it names does not exist."""
    from freewheel.runtime.config import held_out_file
    from freewheel.runtime.placement import Machine, place
    from freewheel.runtime.preflight import collect_errors
    from freewheel.runtime.start import make_plan

    try:
        plan = make_plan(config)
    except (ConfigError, DataError) as error:
        here = Machine.here()
        more = [*place(config, here).problems, *held_out_file(config)]
        return None, [error, *collect_errors(config), *more]
    return plan, [error for error in plan.problems if error.key != RAY]  # it has its own check


GRAMMAR = "override"
"""The key of an override that cannot be parsed."""


def read_every_error(
    overrides: Sequence[str], config_path: str | None, config_name: str | None
) -> tuple[TrainConfig | None, list[ConfigError]]:
    """Return the configuration without refused settings, and the refusals. None if the rest cannot be read, such as a
    file that is not YAML."""
    left: list[str] | None = list(overrides)
    found: list[ConfigError] = []
    while left is not None:
        try:
            return read_config(left, config_path, config_name).config, found
        except ConfigError as error:
            if error.key == GRAMMAR or all(error.key != earlier.key for earlier in found):
                found.append(error)
            left = _leave_out(left, error, in_file=bool(config_path or config_name))
    return None, found


def _leave_out(overrides: list[str], error: ConfigError, *, in_file: bool) -> list[str] | None:
    """Return the overrides without those that set the refused key, or with the file's value of it removed.

    None if neither is possible. `resume` is never left out, because the rest would describe another run.
    """

    def is_refused(override: str) -> bool:
        if error.key == GRAMMAR:
            return str(error).startswith(f"{GRAMMAR} = {override!r}")
        name = override.lstrip("+~").partition("=")[0]
        return not is_resume(override) and (f"{name}.".startswith(f"{error.key}.") or error.key.startswith(f"{name}."))

    rest = [override for override in overrides if override.startswith("~") or not is_refused(override)]
    if len(rest) < len(overrides):
        return rest
    removal = f"~{error.key}"
    return [*rest, removal] if in_file and error.key != RESUME and removal not in rest else None
