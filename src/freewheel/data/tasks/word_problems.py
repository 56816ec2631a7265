"""`word_problems`: arithmetic in words, small enough to be learnt on a CPU in a minute. Ships with a base model.

    Tom has 6 apples, buys 9 and finds 2. How many apples is that?   ─▶   6+9=15;15+2=17#17

The base model (`model_path`, made by scripts/make_base_checkpoint.py) usually guesses an answer such as `#21`, and
sometimes writes the steps. The reward is for the right number only, so reinforcement learning discovers that steps
help. The number combinations of the `test` split occur in no demonstration and in no prompt of `train`, so a score on
`test` does not measure memorization.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from freewheel.data.group import Finish, Prompt
from freewheel.data.prompts import PLAIN, Rendering, Row, TokenizerLike, as_sample, render
from freewheel.errors import ConfigError, DataError
from freewheel.judge.verdict import Scored
from freewheel.rewards.rules import NO_ANSWER, register_rule

DATA_SOURCE = "freewheel/word_problems"
SPLITS = ("train", "test")

SMALL = range(2, 10)
"""Without 0 and 1, which would make steps that change nothing."""
LARGE = range(11, 20)
"""Larger than any small number, so that small numbers can be subtracted; and close to them, so that almost every single
step of a held-out problem occurs in other problems. Only the combinations are unseen, not the sums."""
HELD_OUT = 8
"""One combination of numbers in this many is held out for `test`."""
VARIANTS = 3
"""How often each combination occurs in `train`, with different names and things."""

NAMES = ("Ada", "Ben", "Eva", "Ian", "Ivy", "Kim", "Leo", "Mia", "Noa", "Sam", "Tom", "Zoe")
THINGS = (
    *("apples", "books", "cakes", "cards", "coins", "eggs"),
    *("keys", "pears", "pens", "shells", "stamps", "stones"),
)

Sign = Literal["+", "-"]


@dataclass(frozen=True)
class Template:
    """A problem with two steps: `first` combines the numbers a and b, `second` combines the result and c."""

    name: str
    text: str
    first: Sign
    second: Sign
    begin: range = SMALL
    """Range of a; b and c are small."""

    def steps(self, a: int, b: int, c: int) -> tuple[int, int]:
        """Return the result of each step."""
        middle = a + b if self.first == "+" else a - b
        return middle, middle + c if self.second == "+" else middle - c


TEMPLATES = (
    Template("find", "{name} has {a} {thing}, buys {b} and finds {c}. How many {thing} is that?", "+", "+"),
    Template("lose", "{name} has {a} {thing}, gets {b} and loses {c}. How many {thing} are left?", "+", "-"),
    Template(
        "take",
        "There are {a} {thing}. {name} takes {b} and brings {c} more. How many {thing} is that?",
        *("-", "+"),
        begin=LARGE,
    ),
)


@dataclass(frozen=True)
class WordProblem:
    """One template with its numbers."""

    template: Template
    a: int
    b: int
    c: int

    @property
    def answer(self) -> int:
        return self.template.steps(self.a, self.b, self.c)[1]

    @property
    def solution(self) -> str:
        """`6+9=15;15+2=17#17`."""
        middle, answer = self.template.steps(self.a, self.b, self.c)
        first, second = self.template.first, self.template.second
        return f"{self.a}{first}{self.b}={middle};{middle}{second}{self.c}={answer}#{answer}"

    @property
    def held_out(self) -> bool:
        """Whether the problem is in `test`. A hash of the numbers decides, so it is the same on every machine, even if
        the task grows later."""
        name = f"{self.template.name} {self.a} {self.b} {self.c}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % HELD_OUT == 0

    def question(self, name: str, thing: str) -> str:
        return self.template.text.format(name=name, thing=thing, a=self.a, b=self.b, c=self.c)


def problems(split: str) -> Iterator[WordProblem]:
    """Iterate over all combinations of numbers of a split, in a fixed order."""
    for template in TEMPLATES:
        for a, b, c in product(template.begin, SMALL, SMALL):
            problem = WordProblem(template, a, b, c)
            # Nobody can lose more than they have, and the answer should not be 0.
            if problem.answer > 0 and problem.held_out == (split == "test"):
                yield problem


def rows(split: str) -> list[Row]:
    if split not in SPLITS:
        raise ConfigError("split", split, f"word_problems has {' and '.join(SPLITS)}")
    # Seeded by the split alone: the rows are part of the task. A run's seed only changes their order.
    draw = np.random.default_rng([SPLITS.index(split)])
    found: list[Row] = []
    for problem in problems(split):
        for _ in range(VARIANTS if split == "train" else 1):
            name, thing = NAMES[draw.integers(len(NAMES))], THINGS[draw.integers(len(THINGS))]
            question = problem.question(name, thing)
            found.append(
                as_sample(
                    {"prompt": question},
                    index=len(found),
                    data_source=DATA_SOURCE,
                    ability="math",
                    ground_truth=str(problem.answer),
                    question=question,
                    answer=problem.solution,
                    split=split,
                )
            )
    return found


_ANSWER = re.compile(r"[^#]*#([0-9]+)\Z")


def score(response: str, ground_truth: object, extra_info: Mapping[str, Any]) -> Scored:
    """Return 1 if the response has one `#` with exactly the right number after it. A rule of `freewheel.rewards`.

    The steps before it are not checked: the policy has to discover that they help.
    """
    truth = str(ground_truth)
    if not truth.isascii() or not truth.isdigit():
        raise DataError(f"ground_truth = {ground_truth!r}: word_problems needs a whole number")
    answer = _ANSWER.fullmatch(response.strip())
    return NO_ANSWER if answer is None else Scored(float(answer[1] == truth))


def model_path() -> Path:
    """Return the folder of the base model and its tokenizer. `from_pretrained` opens it without a network."""
    return Path(__file__).parent.parent / "embedded" / "word_problems"


@dataclass(frozen=True)
class WordProblems:
    """Generated word problems. This task reads no file."""

    name: str = "word_problems"
    max_new_tokens: int = 20
    """The longest solution, `19-2=17;17+2=19#19`, has 19 tokens with its end."""
    stop: tuple[str, ...] = ()

    def load(self, split: str, path: str | Path | None = None, *, limit: int | None = None) -> list[Row]:
        if path is not None:
            raise ConfigError("path", str(path), "word_problems makes its own rows: remove data.train and data.eval")
        return rows(split)[:limit]

    def render(self, row: Row, tokenizer: TokenizerLike, rendering: Rendering = PLAIN) -> Prompt:
        return render(row, tokenizer, rendering)

    def score(self, response: str, row: Row, *, finish: Finish = "stop") -> Scored:
        """Score a response. If it was cut off, its number may be incomplete, and the score is 0."""
        if finish == "length":
            return NO_ANSWER
        return score(response, row["reward_model"]["ground_truth"], row.get("extra_info") or {})


TASK = WordProblems()
register_rule(DATA_SOURCE, score)  # reward managers and `compute_score` find it by the data source of the rows
