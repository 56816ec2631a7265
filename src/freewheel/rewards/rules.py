"""Rules: from a response and its ground truth to a score, by reading the text.

    rule_score(data_source, …) ─▶ rule_for: the longest registered prefix ─▶ the rule ─▶ Scored

The reward managers and `compute_score` call `rule_score` when the user gives no function. Math answers are compared in
a separate process (`math_equal`). Every search in a response takes time linear in its length: a response may be 100,000
characters of one tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from freewheel.errors import ConfigError
from freewheel.judge.verdict import Scored
from freewheel.rewards import math_equal

Rule = Callable[[str, object, Mapping[str, Any]], Scored]
"""`(response, ground_truth, extra_info)`."""

NO_ANSWER = Scored(0.0, format=0.0)


def gsm8k(response: str, ground_truth: object, extra_info: Mapping[str, Any]) -> Scored:
    """Return 1 if the right number follows the last `####`, in any usual spelling, compared exactly.

    The ground truth is a number, or a solution that ends in `#### 42`. A percent sign and a currency are ignored.
    """
    text = str(ground_truth)
    truth = number_in(marked_answer(text) or text)
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
    """Return 1 if the whole response is the ground truth. `partial(exact_match, ignore_case=False)` is a rule too.

    `ignore_space`: each run of white space counts as one space, and white space at the ends is ignored.
    """

    def normal(text: str) -> str:
        text = " ".join(text.split()) if ignore_space else text
        return text.casefold() if ignore_case else text

    return Scored(float(normal(response) == normal(str(ground_truth))))


def boxed_math(response: str, ground_truth: object, extra_info: Mapping[str, Any]) -> Scored:
    """Return 1 if the last `\\boxed{…}` equals the ground truth according to math-verify (the extra `[math]`)."""
    return _math_score(last_box(response), ground_truth)


def dapo_math(response: str, ground_truth: object, extra_info: Mapping[str, Any]) -> Scored:
    """Score like `boxed_math`, but read the last line `Answer: …`. Without such a line, the last box counts."""
    return _math_score(answer_line(response) or last_box(response), ground_truth)


def _math_score(answer: str | None, ground_truth: object) -> Scored:
    text = str(ground_truth if ground_truth is not None else "")
    truth = (last_box(text) or text).strip("$ \n")
    if not truth:
        raise ConfigError("ground_truth", ground_truth, "math needs an answer in LaTeX, or a solution that boxes it")
    if not answer:
        return NO_ANSWER
    try:
        return Scored(float(math_equal.equal(answer, truth)))
    except math_equal.NotComparable:  # but a `ComparisonFailed` is not the answer's fault, and so not a zero
        return Scored(0.0)


def format_tags(*tags: str) -> Rule:
    """Return a rule: 1 if the response is `<a>…</a> <b>…</b>`, each tag once, in order, not empty, and nothing else."""
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
    """Return a rule: 1 if each `<tool_call>{"name": …, "arguments": {…}}</tool_call>` is well-formed and in `names`.

    The format is right if there is a call and all calls are well-formed. Text around the calls is ignored.
    """
    _need_names("tool_call", names)
    known = frozenset(names)

    def rule(response: str, ground_truth: object, extra_info: Mapping[str, Any]) -> Scored:
        pieces = _TOOL_TAG.split(response)
        marks, called = pieces[1::2], [_find_call(body) for body in pieces[2::4]]
        if not marks or marks != ["<tool_call>", "</tool_call>"] * len(called) or None in called:
            return NO_ANSWER
        return Scored(float(known.issuperset(called)))

    return rule


_TOOL_TAG = re.compile("(</?tool_call>)")


def _find_call(body: str) -> str | None:
    """Return the tool's name, or None if the call is not well-formed."""
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
"""Rules by data source. The names are those of verl's own data preparation."""


def register_rule(data_source_prefix: str, rule: Rule) -> None:
    """Use `rule` for data sources with this prefix, unless a longer prefix is registered. `""` fits all others."""
    _rules[data_source_prefix] = rule


def rule_for(data_source: str) -> Rule:
    """Return the rule of the longest registered prefix of `data_source`."""
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
    """Score one response by its data source's rule. The keywords are verl's, so this is also a `compute_score`."""
    return rule_for(data_source)(solution_str, ground_truth, extra_info or {})


# -- finding the answer in a response ---------------------------------------------------------------------------------

LONGEST_ANSWER_CHARS = 200
"""Enough for a number, its unit and a remark. Reading thousands of digits takes quadratic time."""

_MARK = re.compile(r"(?<!#)####(?!#)")
_MINUS = str.maketrans(dict.fromkeys("−–‒﹣－", "-"))
_DIGITS = r"[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}|[0-9]{1,3}(?:\s[0-9]{3})+|[0-9]+"
"""Digits, grouped by commas (in thousands, or the Indian way), by spaces, or not at all."""
_NUMBER = re.compile(
    rf"""\s* (?P<sign>[+-]?) \s* (?:\\?[$€£¥₹])? \s* (?P<late_sign>[+-]?) \s*
    (?: (?: (?P<whole>[0-9]+) \s+ )? (?P<over>{_DIGITS}) \s?/\s? (?P<under>{_DIGITS})
      | (?P<integer>{_DIGITS})? (?P<decimals>\.[0-9]+)? )
    [^\d¼-¾⅐-⅞]* \Z""",
    re.VERBOSE,
)
"""One number with a currency, a percent sign and a unit. A second number makes the answer ambiguous."""
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"\banswer\s*:([^\n]*)", re.IGNORECASE)


def marked_answer(text: str) -> str | None:
    """Return the rest of the line after the last `####`."""
    marks = list(_MARK.finditer(text))
    if not marks:
        return None
    lines = text[marks[-1].end() :].strip().splitlines()
    return lines[0] if lines else ""


def number_in(text: str) -> Fraction | None:
    """Return the number in `text` exactly; None if there is no number or more than one."""
    found = _NUMBER.match(text.translate(_MINUS)) if len(text) <= LONGEST_ANSWER_CHARS else None
    if found is None or (found["sign"] and found["late_sign"]):
        return None
    if found["over"]:
        under = int(_bare(found["under"]))
        if not under:
            return None
        value = int(found["whole"] or 0) + Fraction(int(_bare(found["over"])), under)
    elif found["integer"] or found["decimals"]:
        value = Fraction(_bare(found["integer"] or "0") + (found["decimals"] or ""))
    else:
        return None
    return -value if "-" in (found["sign"], found["late_sign"]) else value


def _bare(digits: str) -> str:
    return re.sub(r"[,\s]", "", digits)


def last_box(text: str) -> str | None:
    """Return the content of the last `\\boxed{…}` with balanced braces; of nested boxes the innermost."""
    opened: list[tuple[int, bool]] = []
    boxes: list[tuple[int, int]] = []
    for token in _BRACES.finditer(text):
        is_box = token[0].startswith("\\boxed")
        if is_box or token[0] == "{":
            opened.append((token.end(), is_box))
        elif token[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box:
                boxes.append((start, token.start()))
    return text[slice(*max(boxes))].strip() if boxes else None


def answer_line(text: str) -> str | None:
    """Return the text after `Answer:` on the last line that has it, without dollars and stars."""
    lines = _ANSWER_LINE.findall(text)
    if not lines:
        return None
    return last_box(lines[-1]) or lines[-1].lstrip("*$ \t").rstrip("*$. \t\r")
