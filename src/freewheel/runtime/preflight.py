"""Checks that everything a configuration names exists, before anything starts: code, a model's folder, rows.

    rollout.engine, rollout.vllm                     ┐
    reward.function, *_class, algorithm.loss, …      ├─ preflight ─▶ nothing, or a `ConfigError`: exit code 2, no folder
    model.path, model.tokenizer                      │
    data.train, data.eval                            ┘

`freewheel train` calls it, also with `--dry-run`. Each name is resolved by the function that the run's processes use.
Names on the hub are left to them, because a check must not download. Afterwards `freewheel.runtime.engines` checks that
this machine has the engine and that its servers answer.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from freewheel.data.tasks import get_task
from freewheel.errors import ConfigError, DataError
from freewheel.rollout.engines import find_engine
from freewheel.rollout.models import check_weights
from freewheel.runtime.building import find_class, find_monitor, is_here, is_measured, read_rows
from freewheel.runtime.config import ROLLOUTER_CLASSES, TRAINER_CLASSES, TrainConfig

MODEL_CONFIG = "config.json"
"""A model's folder contains this file."""


def preflight(config: TrainConfig) -> int | None:
    """Check everything. Return the number of training rows; None if they are not on this machine."""
    for check in CHECKS:
        check(config)
    return _rows(config)


def refused(config: TrainConfig) -> list[ConfigError | DataError]:
    """Return everything that `preflight` would raise, not only the first error."""
    found: list[ConfigError | DataError] = []
    for check in (*CHECKS, _rows):
        try:
            check(config)
        except (ConfigError, DataError) as error:
            found.append(error)
    return found


def _engine(config: TrainConfig) -> None:
    find_engine(config.rollout.engine).check_options(config.rollout)


def _reward(config: TrainConfig) -> None:
    if config.reward.function is not None:
        from freewheel.rollout.reward_functions import check_reward

        check_reward(config.reward.function)


def _rollouter(config: TrainConfig) -> None:
    if config.rollout.rollouter_class is not None:
        find_class("rollout.rollouter_class", config.rollout.rollouter_class, ROLLOUTER_CLASSES)


def _trainer(config: TrainConfig) -> None:
    if config.trainer.trainer_class is not None:
        find_class("trainer.trainer_class", config.trainer.trainer_class, TRAINER_CLASSES)


def _algorithm(config: TrainConfig) -> None:
    """Find functions of the user. The built-in ones exist, and their modules import torch."""
    if ":" in config.algorithm.loss:
        config.algorithm.find_loss()
    if ":" in config.algorithm.advantage:
        config.algorithm.find_estimator()


def _monitor(config: TrainConfig) -> None:
    find_monitor(config)


def _model(config: TrainConfig) -> None:
    if config.uses_embedded_model:
        return
    folder = _folder("model.path", config.model.path)
    if folder is not None and not (folder / MODEL_CONFIG).is_file():
        remedy = f"it has no {MODEL_CONFIG} of a model: give a HF folder, a hub id or embedded"
        raise ConfigError("model.path", config.model.path, remedy)
    if folder is not None and find_spec("safetensors") is not None:  # without it there is only a plan
        check_weights(folder)


def _tokenizer(config: TrainConfig) -> None:
    if config.model.tokenizer is not None:
        _folder("model.tokenizer", config.model.tokenizer)


def _folder(key: str, path: str) -> Path | None:
    """Return the folder on this machine; None for a possible hub id."""
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    if place.exists() or path.startswith((".", "/", "~")) or path.endswith("/") or path.count("/") > 1:
        what = "that is a file" if place.exists() else "there is no such folder"
        raise ConfigError(key, path, f"{what}: give a HF folder, a hub id or embedded")
    return None


def _held_out(config: TrainConfig) -> None:
    if is_measured(config) and is_here(config.data.task, config.data.eval):
        read_rows(config, get_task(config.data.task), "eval")


def _rows(config: TrainConfig) -> int | None:
    data, task = config.data, get_task(config.data.task)
    return len(read_rows(config, task, "train")) if is_here(data.task, data.train) else None


CHECKS = (_engine, _reward, _rollouter, _trainer, _algorithm, _monitor, _model, _tokenizer, _held_out)
"""Independent checks; the training rows come last."""
