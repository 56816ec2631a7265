"""Evaluates a model on held-out prompts, with an engine in this process and without Ray.

    RUN, a checkpoint, a HF folder, a hub id or `embedded` ─▶ Target ─▶ model, task, prompts ─▶ evaluate ─▶ EvalResult

The configuration of a run names its task; any other model needs a task. Used by `freewheel eval` and
`freewheel.evaluate`. Errors name keys, and arguments of `freewheel.evaluate`: model, task, data and prompts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.observe.run_folder import BEST, CONFIG
from freewheel.rollout.engine import EngineError
from freewheel.rollout.engine_factories import VLLM_KEYS, PromptsTooLong
from freewheel.rollout.evaluation import EvalResult
from freewheel.runtime.building import RolloutSide
from freewheel.runtime.config import EMBEDDED, RolloutConfig, TrainConfig
from freewheel.runtime.config_files import compose
from freewheel.runtime.model_size import model_folder
from freewheel.runtime.placement import MOST_SLOTS, Machine
from freewheel.runtime.run_plan import resolve
from freewheel.runtime.start import load_run
from freewheel.trainer.checkpoint import HF_CONFIG, CheckpointStore

log = logging.getLogger("freewheel.runtime")

_LEVELS_UP = 2
"""From RUN/checkpoints/step_000040 to RUN."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model, and the configuration of its run, if it has one."""

    path: str
    run: TrainConfig | None


def find_target(name: str) -> Target:
    """Find a model by name. Of a run: its final weights, or those of its newest checkpoint."""
    if name == EMBEDDED:
        return Target(path=EMBEDDED, run=TrainConfig())
    folder = Path(name).expanduser()
    if not folder.exists() and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return Target(path=name, run=None)  # a hub id
    if not folder.is_dir():
        raise ConfigError("model", name, "there is no such folder: give a run, a HF folder, a hub id or embedded")
    if (folder / HF_CONFIG).is_file():
        run = next((up for up in list(folder.absolute().parents)[:_LEVELS_UP] if (up / CONFIG).is_file()), None)
        return Target(path=str(folder), run=load_run(run) if run else None)
    if not (folder / CONFIG).is_file():
        raise ConfigError("model", name, f"it has neither {HF_CONFIG} of a model nor {CONFIG} of a run")
    found = CheckpointStore(folder, keep_last=1).newest() or folder / BEST
    if not (found / HF_CONFIG).is_file():
        raise ConfigError("model", name, "this run has saved no weights yet")
    return Target(path=str(found), run=load_run(folder))


def eval_config(
    target: Target,
    *,
    task: str | None = None,
    data: str | None = None,
    prompts: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    engine: str | None = None,
) -> TrainConfig:
    """Return the run's configuration with the given settings."""
    if target.run is None and task is None:
        raise ConfigError("task", None, "a model without a run has no task: give word_problems, …")
    base = target.run or TrainConfig()
    if (base.eval.prompts if prompts is None else prompts) == 0:
        raise ConfigError("prompts", 0, "nothing would be evaluated: give 1 or more")
    settings: dict[str, Any] = {"model.path": target.path}
    settings |= {"model.lora": None, "rollout.replicas": "auto"}  # saved weights have their adapters merged
    if task is not None and task != base.data.task:
        settings |= dict.fromkeys(("data.train", "data.eval", "reward.function"))  # they belong to the run's own task
    if engine is not None:
        usual = RolloutConfig()
        settings |= {f"rollout.{key}": getattr(usual, key) for key in VLLM_KEYS}
    given: dict[str, Any] = {"data.task": task, "data.eval": data, "rollout.engine": engine}
    given |= {"eval.prompts": prompts, "eval.samples": samples, "eval.temperature": temperature}
    settings |= {key: value for key, value in given.items() if value is not None}
    if data is not None and settings.get("data.train", base.data.train) is None:
        settings["data.train"] = data  # unused, but required by a task without rows of its own
    return compose(base=base, settings=settings)


async def run_evaluation(config: TrainConfig, *, keep_responses: bool = False) -> EvalResult:
    """Load the model into this process and evaluate it."""
    plan = resolve(config, Machine.here())
    plan = replace(plan, slots=min(MOST_SLOTS, config.eval.prompts * config.eval.samples))
    try:
        side = RolloutSide(config=config, plan=plan, name="eval", model_path=model_folder(config), trains=False)
    except PromptsTooLong as error:
        remedy = f"its prompts are too long for this model ({error.why}): choose another task, other rows or a model"
        raise ConfigError("data.task", config.data.task, remedy) from error
    except EngineError as error:
        raise ConfigError(
            "rollout.engine", config.rollout.engine, f"it cannot run {config.model.path}: {error}"
        ) from error
    try:
        result = await side.evaluate(keep_responses=keep_responses)
        if result is None:
            raise ConfigError("data", config.data.eval, "the run names no held-out prompts: give a file")
        if len(side.held_out) < config.eval.prompts:
            log.warning("There are only %d prompts; %d were requested", len(side.held_out), config.eval.prompts)
        return result
    finally:
        await side.engine.close()
