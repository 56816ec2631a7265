"""Run directories: a new one, what a run wrote down about itself, and the same run again.

    RUN/config.yaml   every setting with its value, `auto` as it was given
    resume=RUN        config.yaml ◀─ overrides ─▶ Resumption: what holds now, and what is to be said of each change

A resumed run trains the steps since its last checkpoint again, from the journal, and goes on with the groups that are
stored there. What would contradict them is refused; what only changes their meaning is said.
Called by `freewheel.cli.train`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from freewheel.errors import ConfigError
from freewheel.observe.run_folder import CONFIG, FINAL, saved_steps
from freewheel.runtime.compose import compose, differing, load, to_yaml
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.queue_opening import reaches_the_start
from freewheel.trainer.checkpoint import has_checkpoint
from freewheel.utils.files import open_private, private_folder

RUNS = "runs"
RESUME = "resume"
"""Among the overrides, where a setting's name stands: the run that goes on."""

SAME_PROMPTS = "the order of prompts follows from it, and a resumed run neither skips nor repeats one"
KEPT = {
    "seed": SAME_PROMPTS,
    "data": SAME_PROMPTS,
    "trainer.groups_per_step": "steps that were taken are counted in groups of this size",
    "rollout.n": "groups that were generated have this size",
    "model.path": "the checkpoint's weights are of this model",
    "model.tokenizer": "prompts and the checkpoint's weights go by its tokens",
    "model.lora": "the checkpoint has the weights that this trains",
    "journal.enabled": "the journal has what was trained since the checkpoint, or has nothing of this run",
}
"""Keys and sections that a resumed run must have as it began, and why."""
TRAINED_AGAIN = "also for steps since the last checkpoint, which are trained again"
MADE_BEFORE = "groups that are stored were made with the old value and are used"
MEANING = {
    "data.eval": "scores from here on are of other prompts",
    "data.eval_split": "scores from here on are of other prompts",
    "algorithm": TRAINED_AGAIN,
    "optimizer": TRAINED_AGAIN,
    "trainer.trainer_class": TRAINED_AGAIN,
    "model.dtype": TRAINED_AGAIN,
    "rollout.temperature": MADE_BEFORE,
    "rollout.top_p": MADE_BEFORE,
    "rollout.top_k": MADE_BEFORE,
    "rollout.max_new_tokens": MADE_BEFORE,
    "rollout.rollouter_class": MADE_BEFORE,
    "reward": "groups that are stored keep the rewards that they have, and prompts that were given up stay so",
    "async_training.sync_every_steps": "steps that were trained keep the versions that they made",
}
"""Keys and sections that may change, and what that means for what is there already; this table is looked at first."""


@dataclass(frozen=True)
class Resumption:
    """A run that goes on."""

    config: TrainConfig
    changed: list[str]
    """For the user, a line each: a key, its old and its new value, and what follows."""


def new_run(config: TrainConfig, *, now_s: float | None = None) -> TrainConfig:
    """With a `run_dir` that holds no run yet. Nothing is created."""
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
        raise ConfigError(
            "run_dir",
            config.run_dir,
            f"a run is there already: continue it with {RESUME}={config.run_dir}, or give another",
        )
    return config


def split_resume(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """The run that is named by `resume=RUN`, and the other overrides."""
    given = [text.partition("=")[2].strip("'\"") for text in overrides if is_resume(text)]
    if len(given) > 1 or given == [""]:
        raise ConfigError(RESUME, ", ".join(given) or None, "name one run's folder: resume=runs/…")
    return (given[0] if given else None), [text for text in overrides if not is_resume(text)]


def is_resume(override: str) -> bool:
    return override.lstrip("+").partition("=")[0] == RESUME


def resumption(run_dir: str, overrides: Sequence[str]) -> Resumption:
    """How the run in `run_dir` goes on with `overrides` on top. What would break its history is refused."""
    folder = Path(run_dir)
    if not (folder / CONFIG).is_file():
        remedy = f"there is no {CONFIG} in it: give the folder that the run said at its start"
        raise ConfigError(RESUME, run_dir, remedy if folder.is_dir() else "there is no such folder")
    before = msgspec.structs.replace(load(folder / CONFIG), run_dir=str(folder))
    config = compose(overrides, base=before)
    changed = []
    for key, (old, new) in differing(before, config).items():
        meaning = _nearest(MEANING, key)
        reason = _nearest(KEPT, key) if meaning is None else None
        if key == "algorithm.name" and "ppo" in (old, new):
            reason = "the checkpoint has a critic, or has none"
        if key == "run_dir":
            reason = "the run goes on in its own folder"
        if reason is not None:
            raise ConfigError(key, new, f"a resumed run keeps {old!r}: {reason}; start a new run to change it")
        changed.append(f"{key}: {_shown(old)} → {_shown(new)}" + (f" ({meaning})" if meaning else ""))
    _check_goes_on(folder, config)
    return Resumption(config, changed)


def _check_goes_on(folder: Path, config: TrainConfig) -> None:
    """There is something left to do. Without final weights there is: a run may have been killed before they were."""
    saved, wanted = saved_steps(folder), config.trainer.total_steps
    reached = max(saved, default=0)
    if reached > wanted or (reached == wanted and (folder / FINAL).is_dir()):
        raise ConfigError("trainer.total_steps", wanted, f"the run is at step {reached} already: give more to go on")
    if saved and not has_checkpoint(folder):
        check_journal(folder)


def check_journal(folder: Path) -> None:
    """Where no checkpoint can be loaded the journal must have every step."""
    if not reaches_the_start(folder):
        raise ConfigError(RESUME, str(folder), "there is no checkpoint in it that can be loaded: start a new run")


def _nearest(table: Mapping[str, str], key: str) -> str | None:
    """What a table says of a key, or of the section that it is in."""
    return next((text for name, text in table.items() if f"{key}.".startswith(f"{name}.")), None)


def _shown(value: Any) -> str:
    """As a YAML file has it, on one line."""
    plain = msgspec.to_builtins(value)
    return "null" if plain is None else str(plain).lower() if isinstance(plain, bool) else str(plain)


def write_config(config: TrainConfig) -> Path:
    """Whole or not at all, so that a run that is killed can be resumed."""
    assert config.run_dir is not None
    path = Path(config.run_dir) / CONFIG
    private_folder(path.parent)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    with os.fdopen(open_private(beside, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(to_yaml(config))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    return path
