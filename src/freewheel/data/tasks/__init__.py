"""Task families: how prompts are loaded, rendered and scored.

from freewheel.data.tasks import get_task

task = get_task("gsm8k")             # built in
task = get_task("my_package:task")   # your own: any object with the attributes of `Task`
"""

from __future__ import annotations

from freewheel.data.tasks.base import Score, Task
from freewheel.errors import ConfigError
from freewheel.utils.registry import find_object

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
    place = BUILTIN.get(name, name)
    if not all(place.partition(":")[::2]):
        raise ConfigError("data.task", name, f"choose {', '.join(BUILTIN)}, or give module:name of your own")
    task = find_object("data.task", place)
    if isinstance(task, type):
        try:
            task = task()
        except TypeError as error:
            raise ConfigError("data.task", name, f"it is a class, and is made without arguments: {error}") from error
    if missing := [wanted for wanted in ATTRIBUTES if not hasattr(task, wanted)]:
        raise ConfigError("data.task", name, f"a task needs {', '.join(missing)}; see docs/tasks.md")
    found: Task = task
    return found
