"""Tasks: how prompts are loaded, rendered and scored.

load(split, path) ─▶ rows ─▶ render(row, tokenizer) ─▶ Prompt ─▶ engine ─▶ text ─▶ score(text, row) ─▶ reward

    from freewheel.data.tasks import get_task

    task = get_task("gsm8k")             # built in
    task = get_task("my_package:task")   # your own: any object with the attributes of `Task`

The rest of freewheel uses a task only through this protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from freewheel.data.group import Finish, Prompt
from freewheel.data.prompts import Rendering, Row, TokenizerLike
from freewheel.errors import ConfigError
from freewheel.judge.verdict import Scored
from freewheel.utils.registry import Registry

Score = Scored | float | Mapping[str, Any]
"""A number, the result of a rule of `freewheel.rewards`, or a dict with `score` and other named numbers."""


class Task(Protocol):
    """The data and the score of a run: its environment, if responses have one turn. Any object with these attributes is
    a task. (For several turns, see `Rollouter._custom_generation_logic`.)"""

    @property
    def name(self) -> str: ...

    @property
    def max_new_tokens(self) -> int:
        """Tokens that a good response needs, with room. A bound that cuts answers off looks like a learning plateau."""

    @property
    def stop(self) -> Sequence[str]:
        """Tokens that end a response, in addition to the model's own end-of-sequence tokens."""

    def load(self, split: str, path: str | Path | None = None, *, limit: int | None = None) -> Sequence[Row]:
        """Return the rows of a split in a fixed order, each with the fields of a sample. Without a path, return the
        data that ships with the task."""

    def render(self, row: Row, tokenizer: TokenizerLike, rendering: Rendering = ...) -> Prompt:
        """Return the prompt of a row. Must be a pure function of its arguments: a resumed run renders a prompt again
        and must get the same tokens."""

    def score(self, response: str, row: Row, *, finish: Finish = ...) -> Score:
        """Score the text of a response, without special tokens. `finish` is `length` if the response was cut off."""


TASKS: Registry[Task] = Registry(
    {
        "word_problems": "freewheel.data.tasks.word_problems:TASK",
        "gsm8k": "freewheel.data.tasks.gsm8k:TASK",
        "rows": "freewheel.data.tasks.rows:TASK",
    },
    example="my_tasks:task",
)
"""The values of `data.task`. To add a task, write one file and one line here, or name your own `module:name`."""


def get_task(name: str) -> Task:
    """Return a built-in task, or the object at `module:name`. A class is called without arguments."""
    task = TASKS.find("data.task", name)
    if isinstance(task, type):
        try:
            task = task()
        except TypeError as error:
            raise ConfigError("data.task", name, f"this class cannot be made without arguments: {error}") from error
    attributes = ("name", "max_new_tokens", "stop", "load", "render", "score")
    if missing := [attribute for attribute in attributes if not hasattr(task, attribute)]:
        raise ConfigError("data.task", name, f"a task needs {', '.join(missing)}; see docs/tasks.md")
    return task
