"""Checks that everything a configuration names exists, before anything starts: code, a model's folder, rows.

    rollout.engine, rollout.vllm                     ┐
    reward.function, *_class, algorithm.loss, …      ├─ preflight ─▶ nothing, or a `ConfigError`: exit code 2, no folder
    model.path, model.tokenizer                      │
    data.train, data.eval                            ┘

    RunPlan ─ engine_problems ─ child process ─▶ EngineFactory.check ─▶ problems of this machine

`freewheel train` calls both, also with `--dry-run`. Each name is resolved by the function that the run's processes use.
Names on the hub are left to them, because a check must not download.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from freewheel.data.tasks import get_task
from freewheel.errors import ConfigError, DataError
from freewheel.rollout.engine_factories import check_weights, find_engine
from freewheel.runtime.building import (
    Prompts,
    engine_settings,
    find_class,
    find_monitor,
    is_here,
    is_measured,
    load_tokenizer,
    read_rows,
)
from freewheel.runtime.config import ROLLOUTER_CLASSES, TRAINER_CLASSES, TrainConfig
from freewheel.trainer.checkpoint import HF_CONFIG
from freewheel.utils.processes import import_path, last_words

if TYPE_CHECKING:
    from freewheel.runtime.run_plan import RunPlan

CHECK_S = 180.0
"""Time for vLLM's import from a cold disk. A slower check is abandoned, and the rollouters find problems."""


def preflight(config: TrainConfig) -> int | None:
    """Check everything. Return the number of training rows; None if they are not on this machine."""
    for check in _checks(config):
        check()
    return _rows(config)


def collect_errors(config: TrainConfig) -> list[ConfigError | DataError]:
    """Return everything that `preflight` would raise, not only the first error."""
    found: list[ConfigError | DataError] = []
    checks: list[Callable[[], object]] = [*_checks(config), partial(_rows, config)]
    for check in checks:
        try:
            check()
        except (ConfigError, DataError) as error:
            found.append(error)
    return found


def _checks(config: TrainConfig) -> Iterator[Callable[[], object]]:
    """Independent checks. Default classes and built-in functions exist, and their modules import torch."""
    rollout, trainer, algorithm = config.rollout, config.trainer, config.algorithm
    yield lambda: find_engine(rollout.engine).check_options(rollout)
    if (function := config.reward.function) is not None:
        from freewheel.rollout.reward_functions import load_reward

        yield partial(load_reward, function, construct=False)
    if rollout.rollouter_class is not None:
        yield partial(find_class, "rollout.rollouter_class", rollout.rollouter_class, ROLLOUTER_CLASSES)
    if trainer.trainer_class is not None:
        yield partial(find_class, "trainer.trainer_class", trainer.trainer_class, TRAINER_CLASSES)
    if ":" in algorithm.loss:
        yield algorithm.find_loss
    if ":" in algorithm.advantage:
        yield algorithm.find_estimator
    yield partial(find_monitor, config)
    yield partial(_check_model, config)
    if config.model.tokenizer is not None:
        yield partial(_folder, "model.tokenizer", config.model.tokenizer)
    if is_measured(config) and is_here(config.data.task, config.data.eval):
        yield lambda: read_rows(config, get_task(config.data.task), "eval")


def _check_model(config: TrainConfig) -> None:
    if config.uses_embedded_model:
        return
    folder = _folder("model.path", config.model.path)
    if folder is not None and not (folder / HF_CONFIG).is_file():
        remedy = f"it has no {HF_CONFIG} of a model: give a HF folder, a hub id or embedded"
        raise ConfigError("model.path", config.model.path, remedy)
    if folder is not None and find_spec("safetensors") is not None:  # without it there is only a plan
        check_weights(folder)


def _folder(key: str, path: str) -> Path | None:
    """Return the folder on this machine; None for a possible hub id."""
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    if place.exists() or path.startswith((".", "/", "~")) or path.endswith("/") or path.count("/") > 1:
        what = "that is a file" if place.exists() else "there is no such folder"
        raise ConfigError(key, path, f"{what}: give a HF folder, a hub id or embedded")
    return None


def _rows(config: TrainConfig) -> int | None:
    data, task = config.data, get_task(config.data.task)
    return len(read_rows(config, task, "train")) if is_here(data.task, data.train) else None


# -- the engine on this machine ---------------------------------------------------------------------------------------


def engine_problems(plan: RunPlan, model: Path | None) -> list[ConfigError]:
    """Return why this machine cannot run the engine. `model`: its folder, if it is on this machine.

    Checks in a child process, because vLLM takes seconds to import, keeps threads and memory, and dies of a driver that
    does not fit. A check cannot download a model or look at other machines: then the rollouters find problems.
    """
    rollout = plan.config.rollout
    factory = find_engine(rollout.engine)
    try:
        factory.require(rollout)
    except ConfigError as error:
        return [error]
    if not factory.has_check or plan.config.ray.address is not None or model is None:
        return []
    return _check_in_child(plan, str(model))


def _check_in_child(plan: RunPlan, model: str) -> list[ConfigError]:
    command = [sys.executable, "-W", "ignore", "-m", __name__]  # no -P: a task may be in the working directory
    try:
        done = subprocess.run(
            command,
            input=pickle.dumps((plan, model)),
            capture_output=True,
            timeout=CHECK_S,
            check=False,
            env={**os.environ, "PYTHONPATH": import_path()},
        )
    except subprocess.TimeoutExpired:
        return []
    if done.returncode == 0:
        found: ConfigError | None = pickle.loads(done.stdout)  # from our own child
        return [] if found is None else [found]
    why = f"it cannot be used here: {last_words(done)}"
    return [ConfigError("rollout.engine", plan.config.rollout.engine, why)]


def _check_engine(given: BinaryIO) -> bytes:
    """In the child: return the pickled `ConfigError`, or None."""
    plan, model = pickle.load(given)  # from our own parent
    config = plan.config
    try:
        longest = 1
        if is_here(config.data.task, config.data.train):
            source = Prompts(config, load_tokenizer(config))
            source.train()
            longest = source.longest_tokens
        find_engine(config.rollout.engine).check(
            engine_settings(config, plan, model_path=model, longest_tokens=longest)
        )
    except ConfigError as error:
        return pickle.dumps(error)
    return pickle.dumps(None)


def main() -> None:
    """Check an engine in a child process. Standard output is for the answer alone, whatever libraries print."""
    answer_to = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answer_to, "wb") as out, contextlib.suppress(BrokenPipeError):
        out.write(_check_engine(sys.stdin.buffer))


if __name__ == "__main__":
    main()
