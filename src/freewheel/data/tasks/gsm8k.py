"""`gsm8k`: grade-school mathematics (Cobbe et al. 2021), read from any of its usual files.

{"question", "answer"} of OpenAI and the hub (JSONL, Parquet)           ┐
verl's Parquet: `prompt`, `reward_model.ground_truth`, `extra_info`     ┴─▶ samples; `#### 72` is scored
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from freewheel.data.group import Finish, Prompt
from freewheel.data.prompts import PLAIN, Rendering, Row, TokenizerLike, as_sample, render
from freewheel.data.sources import load_rows, require
from freewheel.errors import DataError
from freewheel.judge.verdict import Scored
from freewheel.rewards.rules import gsm8k, marked_answer, number_in

DATA_SOURCE = "openai/gsm8k"
HUB = "openai/gsm8k"
HUB_NAME = "main"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""The instruction of verl's data preparation, so that scores can be compared."""


@dataclass(frozen=True)
class Gsm8k:
    """Questions whose answers are numbers, marked `#### 72`."""

    name: str = "gsm8k"
    max_new_tokens: int = 512
    """The longest solutions of the training set have about 400 tokens, and models write more words than people."""
    stop: tuple[str, ...] = ()
    instruction: str = INSTRUCTION
    """Follows the question. A row that has a `prompt` is left as it is."""

    def load(self, split: str, path: str | Path | None = None, *, limit: int | None = None) -> list[Row]:
        """Without a path, load from the hub. This needs `datasets` and a network."""
        found = load_rows(path or HUB, split=split, name=HUB_NAME if path is None else None, limit=limit)
        return [self._sample(row, index, split, path or HUB) for index, row in enumerate(found)]

    def render(self, row: Row, tokenizer: TokenizerLike, rendering: Rendering = PLAIN) -> Prompt:
        return render(row, tokenizer, rendering)

    def score(self, response: str, row: Row, *, finish: Finish = "stop") -> Scored:
        """Score a response, cut off or not. The parts distinguish a wrong number from a missing one."""
        found = gsm8k(response, row["reward_model"]["ground_truth"], row.get("extra_info") or {})
        return msgspec.structs.replace(found, parts={"correct": found.value, "format": found.format})

    def _sample(self, row: dict[str, Any], index: int, split: str, path: str | Path) -> Row:
        where = f"{path}, row {index}"
        if "prompt" in row:
            require(row, ["prompt", "reward_model"], where)
            require(row["reward_model"], ["ground_truth"], f"{where}, reward_model")
            truth = str(row["reward_model"]["ground_truth"])
            question, answer = "", ""  # as_sample keeps the row's own extra_info
        else:
            require(row, ["question", "answer"], where)
            question, answer = str(row["question"]), str(row["answer"])
            truth = marked_answer(answer) or answer
            row = {"prompt": f"{question} {self.instruction}"}
        number = number_in(truth)
        if number is None:
            raise DataError(f"{where}: the answer {truth!r} is not a number; answers of gsm8k end in '#### 72'")
        return as_sample(
            row,
            index=index,
            data_source=DATA_SOURCE,
            ability="math",
            ground_truth=str(number),
            question=question,
            answer=answer,
            split=split,
        )


TASK = Gsm8k()
