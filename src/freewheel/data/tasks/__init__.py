"""Task families: how prompts are loaded, rendered and scored.

from freewheel.data.tasks import get_task

task = get_task("gsm8k")             # built in
task = get_task("my_package:task")   # your own: any object with the attributes of `Task`
"""

from __future__ import annotations

from importlib import import_module

from freewheel.data.tasks.base import Score, Task
from freewheel.judge.errors import ConfigError

__all__ = ["BUILTIN", "Score", "Task", "get_task"]

BUILTIN = {
    "word_problems": "freewheel.data.tasks.word_problems:TASK",
    "gsm8k": "freewheel.data.tasks.gsm8k:TASK",
    "rows": "freewheel.data.tasks.rows:TASK",
}
"""Where each is."""
ATTRIBUTES = ("name", "max_new_tokens", "stop", "load", "render", "score")


def get_task(name: str) -> Task:
    """A built-in task, or the object at `module:name`; a class is called without arguments."""
    module_name, colon, attribute = BUILTIN.get(name, name).partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError("data.task", name, f"choose {', '.join(BUILTIN)}, or give module:name of your own")
    try:
        task = getattr(import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        remedy = f"there is no module {error.name}: check its name, and that it is installed or on PYTHONPATH"
        raise ConfigError("data.task", name, remedy) from error
    except AttributeError as error:
        raise ConfigError("data.task", name, f"the module {module_name} has no {attribute}") from error
    if isinstance(task, type):
        task = task()
    if missing := [wanted for wanted in ATTRIBUTES if not hasattr(task, wanted)]:
        raise ConfigError("data.task", name, f"a task needs {', '.join(missing)}; see docs/tasks.md")
    found: Task = task
    return found
