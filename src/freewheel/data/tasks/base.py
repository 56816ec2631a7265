"""`Task`: how prompts are loaded, rendered and scored. The rollouter and the reward stage know a task by this alone.

load(split, path) ─▶ rows ─▶ render(row, tokenizer) ─▶ Prompt ─▶ engine ─▶ text ─▶ score(text, row) ─▶ reward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from freewheel.data.group import Finish, Prompt
from freewheel.data.rendering import Rendering, Row, TokenizerLike
from freewheel.judge.verdict import Scored

Score = Scored | float | Mapping[str, Any]
"""A number, what a rule of `freewheel.rewards` gives, or a dict with `score` and named numbers beside it."""


class Task(Protocol):
    """What a run needs to know about its data. Any object with these attributes is one."""

    @property
    def name(self) -> str: ...

    @property
    def max_new_tokens(self) -> int:
        """What a good response needs, with room. A lower bound that cuts answers off looks like a learning plateau."""

    @property
    def stop(self) -> Sequence[str]:
        """Tokens that end a response beside the model's own end-of-sequence tokens."""

    def load(self, split: str, path: str | Path | None = None, *, limit: int | None = None) -> Sequence[Row]:
        """The rows of a split, in a fixed order, each with the fields of a sample. No path: what comes with it."""

    def render(self, row: Row, tokenizer: TokenizerLike, rendering: Rendering = ...) -> Prompt:
        """A pure function of its arguments: a resumed run renders a prompt again and must get the same tokens."""

    def score(self, response: str, row: Row, *, finish: Finish = ...) -> Score:
        """Of a response's text without special tokens. `finish` is `length` where it was cut off."""
