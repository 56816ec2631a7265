"""`rows`: data that already consists of samples, such as verl's Parquet files. The rule of its `data_source` scores it.

    {"prompt": text | messages, "data_source": …, "reward_model": {"ground_truth": …}}

Use it to train on your own data without writing a task. `reward.function` replaces the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from freewheel.data.group import Finish, Prompt
from freewheel.data.prompts import PLAIN, Rendering, Row, TokenizerLike, as_sample, conversation, render
from freewheel.data.sources import load_rows
from freewheel.errors import ConfigError, DataError
from freewheel.judge.verdict import Scored
from freewheel.rewards.rules import rule_score


@dataclass(frozen=True)
class Rows:
    """Rows as they are. Without a `reward_model`, a row's `ground_truth` or `answer` is the truth."""

    name: str = "rows"
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()

    def load(self, split: str, path: str | Path | None = None, *, limit: int | None = None) -> list[Row]:
        if path is None:
            raise ConfigError("data.train", None, "the task rows has no data: give a file, a folder or a hub id")
        found: list[Row] = []
        for index, row in enumerate(load_rows(path, split=split, limit=limit)):
            try:
                found.append(_sample(row, index, split))
            except DataError as error:
                raise DataError(f"{path}, row {index}: {error}") from error
        return found

    def render(self, row: Row, tokenizer: TokenizerLike, rendering: Rendering = PLAIN) -> Prompt:
        prompt = render(row, tokenizer, rendering)
        return Prompt(tokens=prompt.tokens, row=row)  # a reward function gets the row as it was given

    def score(self, response: str, row: Row, *, finish: Finish = "stop") -> Scored:
        return rule_score(row["data_source"], response, row["reward_model"]["ground_truth"], row["extra_info"])


def _sample(row: Row, index: int, split: str) -> Row:
    truth = row.get("ground_truth", row.get("answer"))
    question = str(conversation(row)[-1]["content"])
    return as_sample(
        row, index=index, data_source="", ground_truth=truth, question=question, answer=str(truth or ""), split=split
    )


TASK = Rows()
