"""Asynchronous reinforcement-learning post-training in which no accelerator waits for work that it does not depend on.

    import freewheel as fw

    run = fw.train(model="Qwen/Qwen2.5-0.5B-Instruct", data=rows, reward=score, config={"trainer.total_steps": 100})

The names below are the public API; docs/api.md describes each. Everything else is internal and may change. A name is
imported when it is first used, so that `import freewheel` imports neither torch nor ray nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freewheel.api import Evaluation, Run, RunFailed, evaluate, train
    from freewheel.errors import ConfigError, DataError, FreewheelError
    from freewheel.judge import Failed, Judge, JudgeConfig, JudgeRequest, Rubric, Scored, Skipped
    from freewheel.runtime.config import TrainConfig

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DataError",
    "Evaluation",
    "Failed",
    "FreewheelError",
    "Judge",
    "JudgeConfig",
    "JudgeRequest",
    "Rubric",
    "Run",
    "RunFailed",
    "Scored",
    "Skipped",
    "TrainConfig",
    "evaluate",
    "train",
]

_HOMES = {
    "freewheel.api": ("Evaluation", "Run", "RunFailed", "evaluate", "train"),
    "freewheel.errors": ("ConfigError", "DataError", "FreewheelError"),
    "freewheel.judge": ("Failed", "Judge", "JudgeConfig", "JudgeRequest", "Rubric", "Scored", "Skipped"),
    "freewheel.runtime.config": ("TrainConfig",),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'freewheel' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
