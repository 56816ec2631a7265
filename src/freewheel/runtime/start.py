"""How a run begins: from a command line to a configuration and a plan, in a new folder or in the one of an earlier run.

    key=value, --config-path, --config-name ─▶ read_config ─▶ RunRequest: the configuration, and whether a run continues
    TrainConfig ─ preflight, this machine, the engine, the cluster ─▶ make_plan ─▶ RunPlan with its problems

    resume=RUN        RUN/config.yaml ◀─ overrides: each change is refused, or reported with its meaning

A setting that works on no machine is raised as a `ConfigError`. Problems of this machine are in `RunPlan.problems`:
`freewheel train` refuses them, and a dry run lists them. A resumed run trains the steps since its last checkpoint
again, from the journal, and uses the groups that are stored there. `resume` refuses changes that contradict them.

Called by `freewheel.cli.train` and `freewheel.doctor`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from freewheel.errors import ConfigError
from freewheel.observe.run_folder import CONFIG, FINAL, saved_steps
from freewheel.runtime.building import check_journal
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import compose, find_differences, load, to_config, to_yaml
from freewheel.trainer.checkpoint import has_checkpoint
from freewheel.utils.files import private_folder, write_atomically

if TYPE_CHECKING:
    from freewheel.runtime.run_plan import RunPlan

RUNS = "runs"
RESUME = "resume"
"""Given among the overrides like a setting: `resume=RUN` names the run to continue."""

_SAME_PROMPTS = "the order of prompts follows from it, and a resumed run neither skips nor repeats one"
_KEPT = {
    "seed": _SAME_PROMPTS,
    "data": _SAME_PROMPTS,
    "trainer.groups_per_step": "steps that were taken are counted in groups of this size",
    "rollout.n": "groups that were generated have this size",
    "model.path": "the checkpoint's weights are of this model",
    "model.tokenizer": "the prompts and the checkpoint's weights depend on its tokens",
    "model.lora": "the checkpoint has the weights that this trains",
    "journal.enabled": "the journal has what was trained since the checkpoint, or has nothing of this run",
}
"""Keys and sections that a resumed run must keep, and why."""
_TRAINED_AGAIN = "also for steps since the last checkpoint, which are trained again"
_MADE_BEFORE = "groups that are stored were made with the old value and are used"
_MEANING = {
    "data.eval": "scores from now on are of other prompts",
    "data.eval_split": "scores from now on are of other prompts",
    "algorithm": _TRAINED_AGAIN,
    "optimizer": _TRAINED_AGAIN,
    "trainer.trainer_class": _TRAINED_AGAIN,
    "model.dtype": _TRAINED_AGAIN,
    "rollout.temperature": _MADE_BEFORE,
    "rollout.top_p": _MADE_BEFORE,
    "rollout.top_k": _MADE_BEFORE,
    "rollout.max_new_tokens": _MADE_BEFORE,
    "rollout.rollouter_class": _MADE_BEFORE,
    "reward": "groups that are stored keep the rewards that they have, and abandoned prompts stay abandoned",
    "async_training.sync_every_steps": "steps that were trained keep the versions that they made",
}
"""Keys and sections that may change, and what the change means for stored data. It takes precedence over `_KEPT`."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What a command line asks for."""

    config: TrainConfig
    resume: bool = False
    """The run continues in its existing folder."""
    changed: list[str] = field(default_factory=list)
    """Settings that differ from the earlier run's, a line each: key, old and new value, and the consequence."""


def find_local_modules() -> None:
    """Let `module:name` be in the working directory, after everything else: nothing there replaces an installed module.
    Ray's workers search the same places as this process."""
    with contextlib.suppress(FileNotFoundError):  # the working directory was removed
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)


def read_config(overrides: Sequence[str], config_path: str | None, config_name: str | None) -> RunRequest:
    run, overrides = split_resume(overrides)
    if run is None:
        return RunRequest(config=new_run(compose(overrides, config_path=config_path, config_name=config_name)))
    flag = "--config-path" if config_path else "--config-name" if config_name else None
    if flag:
        raise ConfigError(flag, config_path or config_name, "resume=RUN has the run's own: give overrides only")
    return resume(run, overrides)


def make_plan(config: TrainConfig) -> RunPlan:
    """Check `config` on this machine and place its processes. May import vLLM, which is slow."""
    from freewheel.runtime.cluster import check_cluster
    from freewheel.runtime.model_size import find_folder, read_model_size
    from freewheel.runtime.placement import Machine
    from freewheel.runtime.preflight import engine_problems, preflight
    from freewheel.runtime.run_plan import resolve

    rows = preflight(config)
    folder = find_folder(config)
    plan = resolve(config, Machine.here(), model=read_model_size(folder) if folder else None, rows=rows)
    problems = list(plan.problems)
    try:
        check_cluster(config.ray.address)
    except ConfigError as error:
        problems.append(error)
    if not plan.problems:  # the engine's check would repeat missing devices, after starting a child process
        problems += engine_problems(plan, folder)
    return replace(plan, problems=tuple(problems))


# -- run directories --------------------------------------------------------------------------------------------------


def new_run(config: TrainConfig, *, now_s: float | None = None) -> TrainConfig:
    """Return `config` with a `run_dir` that holds no run yet. Creates nothing."""
    if config.run_dir is None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
        task = config.data.task.rpartition(":")[2]
        folder = Path(RUNS) / f"{task}-{config.mode}-{stamp}"
        count = 1
        while folder.exists():
            count += 1
            folder = folder.with_name(f"{task}-{config.mode}-{stamp}-{count}")
        return msgspec.structs.replace(config, run_dir=str(folder))
    if Path(config.run_dir).exists() and not Path(config.run_dir).is_dir():
        raise ConfigError("run_dir", config.run_dir, "that is a file: give a folder")
    if (Path(config.run_dir) / CONFIG).exists():
        remedy = f"a run is there already: continue it with {RESUME}={config.run_dir}, or give another folder"
        raise ConfigError("run_dir", config.run_dir, remedy)
    return config


def split_resume(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the run that `resume=RUN` names, and the other overrides."""
    runs = [text.partition("=")[2].strip("'\"") for text in overrides if is_resume(text)]
    if len(runs) > 1 or runs == [""]:
        raise ConfigError(RESUME, ", ".join(runs) or None, "name one run's folder: resume=runs/…")
    return (runs[0] if runs else None), [text for text in overrides if not is_resume(text)]


def is_resume(override: str) -> bool:
    return override.lstrip("+").partition("=")[0] == RESUME


def load_run(folder: Path) -> TrainConfig:
    """Read the configuration of the run in `folder`. If the folder was moved, paths inside it move with it."""
    config = load(folder / CONFIG)
    values, before, here = config.to_dict(), config.run_dir, str(folder)
    if before is not None and Path(before).absolute() != folder.absolute():
        for section, name in (("data", "train"), ("data", "eval"), ("model", "path"), ("model", "tokenizer")):
            path = Path(values[section][name] or "")
            if path.is_absolute() and path.is_relative_to(Path(before).absolute()):
                values[section][name] = str(folder.absolute() / path.relative_to(Path(before).absolute()))
    return to_config(values | {"run_dir": here})


def resume(run_dir: str, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> RunRequest:
    """Continue the run in `run_dir` with `overrides` or `settings` on top. Refuses a change that contradicts its
    history."""
    folder = Path(run_dir)
    if not (folder / CONFIG).is_file():
        remedy = f"there is no {CONFIG} in it: give the folder that the run named at its start"
        raise ConfigError(RESUME, run_dir, remedy if folder.is_dir() else "there is no such folder")
    before = load_run(folder)
    config = compose(overrides, base=before, settings=settings)
    changed = []
    for key, (old, new) in find_differences(before, config).items():
        meaning = _look_up(_MEANING, key)
        reason = _look_up(_KEPT, key) if meaning is None else None
        if key.startswith("algorithm.") and before.algorithm.uses_critic != config.algorithm.uses_critic:
            reason = "the checkpoint has a critic, or has none"
        if key == "run_dir":
            reason = "the run continues in its own folder"
        if reason is not None:
            raise ConfigError(key, new, f"a resumed run keeps {old!r}: {reason}; start a new run to change it")
        changed.append(f"{key}: {_as_yaml(old)} → {_as_yaml(new)}" + (f" ({meaning})" if meaning else ""))
    _check_work_is_left(folder, config)
    return RunRequest(config=config, resume=True, changed=changed)


def _check_work_is_left(folder: Path, config: TrainConfig) -> None:
    """A run without final weights always has some left: it may have been killed before it wrote them."""
    saved, wanted = saved_steps(folder), config.trainer.total_steps
    reached = max(saved, default=0)
    if reached > wanted or (reached == wanted and (folder / FINAL).is_dir()):
        raise ConfigError("trainer.total_steps", wanted, f"the run is at step {reached} already: give more to continue")
    if saved and not has_checkpoint(folder):
        check_journal(folder)


def _look_up(table: Mapping[str, str], key: str) -> str | None:
    """Return the text for a key, or for the section that it is in."""
    return next((text for name, text in table.items() if f"{key}.".startswith(f"{name}.")), None)


def _as_yaml(value: Any) -> str:
    plain = msgspec.to_builtins(value)
    return "null" if plain is None else str(plain).lower() if isinstance(plain, bool) else str(plain)


def write_config(config: TrainConfig) -> Path:
    """Write `config.yaml` into the run directory, whole or not at all, so that a killed run can be resumed."""
    assert config.run_dir is not None
    path = private_folder(config.run_dir) / CONFIG
    write_atomically(path, to_yaml(config).encode())
    return path
