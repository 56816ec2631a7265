"""What a run trains on and is measured on: rows of `data.train` and `data.eval`, read, checked and rendered.

    data.train, data.eval ─ read_rows ─▶ rows that the task can score ─ Prompts ─▶ rendered prompts

`freewheel.runtime.preflight` reads them before anything starts; a rollouter's process and `freewheel eval` render them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from freewheel.data.prompts import PromptStream
from freewheel.data.rendering import Rendering, render_rows
from freewheel.data.sources import is_on_hub
from freewheel.data.tasks import BUILTIN, Task, get_task
from freewheel.errors import ConfigError, DataError
from freewheel.runtime.checks import OWN_ROWS
from freewheel.runtime.config import TrainConfig

if TYPE_CHECKING:
    from freewheel.data.group import Prompt

Use = Literal["train", "eval"]
"""Of rows: the key of `data` that names them."""


def is_here(task: str, path: str | None) -> bool:
    """Whether rows can be read without fetching them. `path`: of `data.train` or `data.eval`."""
    return task == OWN_ROWS or (path is not None and not is_on_hub(path))


def is_measured(config: TrainConfig) -> bool:
    """Whether there are held-out rows: none where a file is trained on and none is given to measure on."""
    return config.eval.prompts > 0 and (config.data.eval is not None or config.data.train is None)


def read_rows(config: TrainConfig, task: Task, use: Use) -> Sequence[Any]:
    """The rows of `data.train` or `data.eval`. What cannot be read, or not be scored, is said by that key."""
    data, key = config.data, f"data.{use}"
    path, split = (data.train, data.train_split) if use == "train" else (data.eval, data.eval_split)
    try:
        rows = task.load(split, path, limit=data.limit if use == "train" else None)
    except DataError as error:
        raise ConfigError(key, path, str(error)) from error
    except OSError as error:
        raise ConfigError(key, path, f"it cannot be read ({error}): give a file that can") from error
    except ConfigError as error:
        raise error.renamed(f"{key}_split") if error.key == "split" else error from None
    if config.reward.function is None and data.task in BUILTIN:  # the score of another's task may take long
        for place, row in enumerate(rows):
            if why := _unscorable(task, row):
                remedy = "correct it (docs/tasks.md has the fields), or give a reward.function of your own"
                raise ConfigError(key, path, f"row {place} cannot be scored: {why}: {remedy}")
    return rows


def _unscorable(task: Task, row: Any) -> str:
    """Why the task's rule refuses the row, whatever the response; empty where it does not."""
    try:
        task.score("", row)
    except ConfigError as error:
        return f"no rule is for its data_source {row['data_source']!r}" if error.key == "data_source" else str(error)
    except DataError as error:
        return str(error)
    except Exception:  # noqa: BLE001  # a registered rule may fail for having no response
        return ""
    return ""


class Prompts:
    """What a run trains on and is measured on, rendered."""

    def __init__(self, config: TrainConfig, tokenizer: Any) -> None:
        self.task: Task = get_task(config.data.task)
        self.longest_tokens = 1
        """Of the prompts rendered so far: what an engine's slots must hold."""
        self._config = config
        self._tokenizer = tokenizer

    def train(self) -> PromptStream:
        data = self._config.data
        prompts = self._rendered(read_rows(self._config, self.task, "train"), "train")
        return PromptStream(prompts, seed=self._config.seed, shuffle=data.shuffle, epochs=data.epochs)

    def held_out(self) -> list[Prompt]:
        """`eval.prompts` of them, spread over all that there are: rows may be sorted. None where the task has no
        held-out rows of its own and no file is given."""
        if not is_measured(self._config):
            return []
        rows = read_rows(self._config, self.task, "eval")
        count = min(self._config.eval.prompts, len(rows))
        return self._rendered([rows[place * len(rows) // count] for place in range(count)], "eval")

    def _rendered(self, rows: Sequence[Any], use: Use) -> list[Prompt]:
        data = self._config.data
        rendering = Rendering(system_prompt=data.system_prompt, chat_template=data.chat_template)
        try:
            prompts = render_rows(
                rows,
                lambda row: self.task.render(row, self._tokenizer, rendering),
                max_prompt_tokens=data.max_prompt_tokens,
                too_long=data.too_long,
            )
        except DataError as error:
            raise ConfigError(f"data.{use}", getattr(data, use), str(error)) from error
        self.longest_tokens = max(self.longest_tokens, *(len(prompt.tokens) for prompt in prompts))
        return prompts
