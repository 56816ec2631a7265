"""What a reply to a GSM8K question is worth: 1 for the right answer, and a little for the form that was asked for.

    There are 4 + 3 = 7 pens.
    They cost 7 * 2 = 14.        format: an equation, then `#### number`, then the end
    #### 14                      correct: that number is the answer
                                 last_number: the last one anywhere is (pays nothing, to compare with)

`reward.function: reward:score` in `config.yaml`. The parts are reported apart, in training and on held-out questions,
so that a model that has only learnt to write `####` cannot be taken for one that has learnt to calculate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from freewheel.rewards.rules import gsm8k, number_in

FORMAT_CREDIT = 0.2
MARK = "####"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")
TAIL_CHARS = 200
"""Of a reply, in which its last number is looked for."""


def score(response: str, row: Mapping[str, Any], finish: str) -> dict[str, float]:
    """`finish` is `length` where the reply was cut off."""
    truth = str(row["reward_model"]["ground_truth"])
    found = gsm8k(response, truth, {})
    in_form = float(bool(found.format) and finish == "stop" and has_form(response))
    return {
        "score": found.value + FORMAT_CREDIT * in_form,
        "correct": found.value,
        "format": in_form,
        "last_number": last_number_is(response, truth),
    }


def has_form(response: str) -> bool:
    """An equation, and nothing after the answer's line. Without the first, replies shrink to a guess."""
    before, _, answer = response.rpartition(MARK)
    return "=" in before and len(answer.strip().splitlines()) == 1


def last_number_is(response: str, truth: str) -> float:
    """What a lenient reader would count: it moves with calculation alone, and not with the mark."""
    numbers = NUMBER.findall(response[-TAIL_CHARS:])
    return float(bool(numbers) and number_in(numbers[-1]) == number_in(truth))
