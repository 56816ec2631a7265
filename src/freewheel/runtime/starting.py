"""From a command line to a config and a plan: how `freewheel train` begins, and what others need to know of a run.

    overrides, --config-path, --config-name ─▶ read_config ─▶ Given: what holds, whether a run goes on, what has changed
    TrainConfig ─ preflight, this machine, the engine, the cluster ─▶ planned ─▶ Plan, with what stands against it

What cannot work whatever the machine is raised as a `ConfigError`; what only stands in the way here is in
`Plan.problems`: `freewheel train` refuses it, and a dry run lists it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from freewheel.errors import ConfigError

if TYPE_CHECKING:
    from freewheel.runtime.config import TrainConfig
    from freewheel.runtime.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a command line says of a run."""

    config: TrainConfig
    resume: bool = False
    """It goes on in the folder that it has."""
    changed: list[str] = field(default_factory=list)
    """What has changed in it, in words."""


def read_config(overrides: Sequence[str], config_path: str | None, config_name: str | None) -> Given:
    from freewheel.runtime.compose import compose
    from freewheel.runtime.run_dir import new_run, resumption, split_resume

    resume, overrides = split_resume(overrides)
    if resume is None:
        return Given(config=new_run(compose(overrides, config_path=config_path, config_name=config_name)))
    given = "--config-path" if config_path else "--config-name" if config_name else None
    if given:
        raise ConfigError(given, config_path or config_name, "resume=RUN has the run's own: give overrides only")
    found = resumption(resume, overrides)
    return Given(config=found.config, resume=True, changed=found.changed)


def planned(config: TrainConfig) -> Plan:
    """Takes as long as vLLM's import does where that generates."""
    from freewheel.runtime.engine_check import engine_problems
    from freewheel.runtime.model_size import find_folder, read_model_size
    from freewheel.runtime.placement import Machine
    from freewheel.runtime.plan import resolve
    from freewheel.runtime.preflight import preflight

    rows = preflight(config)
    folder = find_folder(config)
    plan = resolve(config, Machine.here(), model=read_model_size(folder) if folder else None, rows=rows)
    found = [*plan.problems, *_cluster(config)]
    if not plan.problems:  # devices that are not there would be said twice, and after a child process had looked
        found += engine_problems(plan, folder)
    return replace(plan, problems=tuple(found))


def _cluster(config: TrainConfig) -> list[ConfigError]:
    from freewheel.runtime.reaching import check_cluster

    try:
        check_cluster(config.ray.address)
    except ConfigError as error:
        return [error]
    return []
