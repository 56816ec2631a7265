"""Rules: from a response and its ground truth to a score, by reading text. Math alone asks a process (`math_equal`).

    rule_score(data_source, …) ─▶ rule_for: the longest registered prefix ─▶ the rule ─▶ Scored

The reward managers and `compute_score` call `rule_score` where the user gives no function of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from freewheel.errors import ConfigError
from freewheel.judge.verdict import Scored
from freewheel.rewards import math_equal
from freewheel.rewards.answers import answer_line, last_box, marked_answer, number_in

Rule = Callable[[str, object, Mapping[str, Any]], Scored]
"""`(response, ground_truth, extra_info)`."""

NO_ANSWER = Scored(0.0, format=0.0)


def gsm8k(response: str, ground_truth: object, extra_info: Mapping[str, Any]) -> Scored:
    """1 if the last `####` is followed by the right number, in any usual spelling and compared exactly.

    The ground truth is a number, or a solution that ends in `#### 42`. A percent sign and a currency do not count.
    """
    told = str(ground_truth)
    truth = number_in(marked_answer(told) or told)
    if truth is None:
        raise ConfigError("ground_truth", ground_truth, "gsm8k needs a number, or a solution that ends in '#### 42'")
    marked = marked_answer(response)
    answer = number_in(marked) if marked is not None else None
    return NO_ANSWER if answer is None else Scored(float(answer == truth))


def exact_match(
    response: str,
    ground_truth: object,
    extra_info: Mapping[str, Any],
    *,
    ignore_space: bool = True,
    ignore_case: bool = True,
) -> Scored:
    """1 if the whole response is the ground truth; `functools.partial(exact_match, ignore_case=False)` is a rule too.

    `ignore_space`: any run of white space is one space, and there is none at the ends.
    """

    def normal(text: str) -> str:
        text = " ".join(text.split()) if ignore_space else text
        return text.casefold() if ignore_case else text

    return Scored(float(normal(response) == normal(str(ground_truth))))


def boxed_math(response: str, ground_truth: object, extra_info: Mapping[str, Any]) -> Scored:
    """1 if the last `\\boxed{…}` means the same as the ground truth, by math-verify (the extra `[math]`)."""
    return _math_score(last_box(response), ground_truth)


def dapo_math(response: str, ground_truth: object, extra_info: Mapping[str, Any]) -> Scored:
    """As `boxed_math`, for data whose prompts ask for a last line `Answer: …`; without one, the last box counts."""
    return _math_score(answer_line(response) or last_box(response), ground_truth)


def _math_score(answer: str | None, ground_truth: object) -> Scored:
    told = str(ground_truth if ground_truth is not None else "")
    truth = (last_box(told) or told).strip("$ \n")
    if not truth:
        raise ConfigError("ground_truth", ground_truth, "math needs an answer in LaTeX, or a solution that boxes it")
    if not answer:
        return NO_ANSWER
    try:
        return Scored(float(math_equal.equal(answer, truth)))
    except math_equal.NotComparable:  # a `ComparisonFailed` is no answer's fault, and no zero
        return Scored(0.0)


def format_tags(*tags: str) -> Rule:
    """A rule: 1 if the response is `<a>…</a> <b>…</b>`: each tag once, in this order and filled, and nothing else."""
    _need_names("format_tags", tags)
    any_tag = re.compile("(" + "|".join(f"</?{re.escape(tag)}>" for tag in tags) + ")")
    wanted = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]

    def rule(response: str, ground_truth: object, extra_info: Mapping[str, Any]) -> Scored:
        pieces = any_tag.split(response)
        outside, marks, inside = pieces[0::4], pieces[1::2], pieces[2::4]
        right = marks == wanted and not any(map(str.strip, outside)) and all(map(str.strip, inside))
        return Scored(float(right), format=float(right))

    return rule


def tool_call(*names: str) -> Rule:
    """A rule: 1 if each `<tool_call>{"name": …, "arguments": {…}}</tool_call>` is well-formed and calls one of `names`.

    The format is right where there is a call and all are well-formed. The text around the calls is free.
    """
    _need_names("tool_call", names)
    known = frozenset(names)

    def rule(response: str, ground_truth: object, extra_info: Mapping[str, Any]) -> Scored:
        pieces = _TOOL_TAG.split(response)
        marks, called = pieces[1::2], [_called(body) for body in pieces[2::4]]
        if not marks or marks != ["<tool_call>", "</tool_call>"] * len(called) or None in called:
            return NO_ANSWER
        return Scored(float(known.issuperset(called)))

    return rule


_TOOL_TAG = re.compile("(</?tool_call>)")


def _called(body: str) -> str | None:
    """The name of the tool that a well-formed call names."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    well_formed = isinstance(call, dict) and isinstance(call.get("arguments"), dict)
    return call["name"] if well_formed and isinstance(call.get("name"), str) else None


def _need_names(factory: str, names: tuple[str, ...]) -> None:
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(factory, names, f"give names, as in {factory}('think', 'answer')")


_rules: dict[str, Rule] = {
    "openai/gsm8k": gsm8k,
    "lighteval/MATH": boxed_math,
    "DigitalLearningGmbH/MATH-lighteval": boxed_math,
    "HuggingFaceH4/MATH-500": boxed_math,
    "math_dapo": dapo_math,
    "aime": dapo_math,
}
"""By data source, under the names that verl's own data preparation gives them."""


def register_rule(data_source_prefix: str, rule: Rule) -> None:
    """From now on `rule` scores the data sources that begin so, unless a longer prefix fits. `""` is for all others."""
    _rules[data_source_prefix] = rule


def rule_for(data_source: str) -> Rule:
    """The rule of the longest registered prefix of `data_source`."""
    fitting = [prefix for prefix in _rules if data_source.startswith(prefix)]
    if not fitting:
        known = ", ".join(sorted(_rules))
        raise ConfigError(
            "data_source",
            data_source,
            f"no rule is registered for it; known prefixes are {known}; "
            "add yours with freewheel.rewards.register_rule(prefix, rule), or give a compute_score",
        )
    return _rules[max(fitting, key=len)]


def rule_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, Any] | None = None
) -> Scored:
    """The score of one response by its data source's rule. The keywords are verl's, so it serves as `compute_score`."""
    return rule_for(data_source)(solution_str, ground_truth, extra_info or {})
