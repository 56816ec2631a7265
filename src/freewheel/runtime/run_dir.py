"""Run directories: a new one, what a run wrote down about itself, and the same run again.

    RUN/config.yaml   every setting with its value, `auto` as it was given
    --resume RUN      config.yaml ◀─ overrides, as far as they keep what the run has promised

Called by `freewheel.runtime.commands`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from freewheel.judge.errors import ConfigError
from freewheel.runtime.compose import compose, differing, load, to_yaml
from freewheel.runtime.config import TrainConfig

CONFIG = "config.yaml"
RUNS = "runs"

SAME_PROMPTS = "the order of prompts follows from it, and a resumed run neither skips nor repeats one"
KEPT = {
    "seed": SAME_PROMPTS,
    "data": SAME_PROMPTS,
    "trainer.groups_per_step": "steps that were taken are counted in groups of this size",
    "rollout.n": "groups that were generated have this size",
    "model.path": "the checkpoint's weights are of this model",
    "model.tokenizer": "prompts and the checkpoint's weights go by its tokens",
    "model.lora": "the checkpoint has the weights that this trains",
}
"""Keys and sections that a resumed run must have as it began, and why."""


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
            f"a run is there already: continue it with --resume {config.run_dir}, or give another",
        )
    return config


def resumed_run(run_dir: str, overrides: Sequence[str]) -> TrainConfig:
    """The config of a run that goes on, with `overrides` on top."""
    folder = Path(run_dir)
    if not (folder / CONFIG).is_file():
        remedy = f"there is no {CONFIG} in it: give the folder that the run said at its start"
        raise ConfigError("--resume", run_dir, remedy if folder.is_dir() else "there is no such folder")
    before = msgspec.structs.replace(load(folder / CONFIG), run_dir=str(folder))
    config = compose(overrides, base=before)
    for key, (old, new) in differing(before, config).items():
        reason = next((why for kept, why in KEPT.items() if f"{key}.".startswith(f"{kept}.")), None)
        if key == "algorithm.name" and "ppo" in (old, new):
            reason = "the checkpoint has a critic, or has none"
        if key == "run_dir":
            reason = "the run goes on in its own folder"
        if reason is not None:
            raise ConfigError(key, new, f"a resumed run keeps {old!r}: {reason}; start a new run to change it")
    return config


def write_config(config: TrainConfig) -> Path:
    """Whole or not at all, so that a run that is killed can be resumed."""
    assert config.run_dir is not None
    path = Path(config.run_dir) / CONFIG
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(to_yaml(config), encoding="utf-8")
    beside.replace(path)
    return path
