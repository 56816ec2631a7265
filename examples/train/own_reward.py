"""A task and a reward of your own: problems from a JSONL file, a prompt made of its fields, and credit for good steps.

    cd examples/train
    freewheel train --config-path . --config-name own_reward

`own_reward.yaml` names the two objects below. The embedded model knows only the words of its own task, so the
questions are sums of what somebody has, buys and finds. With your own model the same three methods read any data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freewheel.data.prompts import PLAIN, as_sample, render
from freewheel.data.sources import load_rows

STEP = re.compile(r"(\d+)\+(\d+)=(\d+)")
STEPS = 2
"""Of a good solution, `6+9=15;15+2=17#17`."""
STEP_CREDIT = 0.1
"""For each right step, added to 1 for the right answer. It is small because the answer is the goal."""


class Shopping:
    """Rows such as {"who": "Tom", "what": "apples", "has": 6, "buys": 9, "finds": 2}."""

    name = "shopping"
    max_new_tokens = 20
    stop = ()

    def load(self, split: str, path: str | Path | None = None, *, limit: int | None = None) -> list[dict[str, Any]]:
        return [self._sample(row, index, split) for index, row in enumerate(load_rows(path, split=split, limit=limit))]

    def _sample(self, row: Mapping[str, Any], index: int, split: str) -> dict[str, Any]:
        question = "{who} has {has} {what}, buys {buys} and finds {finds}. How many {what} is that?".format(**row)
        return as_sample(
            {**row, "prompt": question},
            index=index,
            data_source="examples/shopping",
            ground_truth=row["has"] + row["buys"] + row["finds"],
            question=question,
            split=split,
        )

    def render(self, row, tokenizer, rendering=PLAIN):
        return render(row, tokenizer, rendering)

    def score(self, response: str, row: Mapping[str, Any], *, finish: str = "stop") -> float:
        """Score a response if `reward.function` is not set."""
        return float(answer(response) == row["reward_model"]["ground_truth"])


def answer(response: str) -> int | None:
    """Return the number after the only `#`."""
    _, mark, number = response.partition("#")
    return int(number) if mark and number.isascii() and number.isdigit() else None


def reward(response: str, row: Mapping[str, Any], finish: str) -> dict[str, float]:
    """Return 1 for the right answer and a little for each right step. The other numbers are reported as metrics."""
    right = finish == "stop" and answer(response) == row["reward_model"]["ground_truth"]
    good = sum(int(a) + int(b) == int(c) for a, b, c in STEP.findall(response))
    return {"score": right + STEP_CREDIT * min(good, STEPS), "answer": float(right), "steps": float(good)}
