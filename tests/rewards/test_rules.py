"""The rules: what counts as an answer, what counts as the same answer, and which rule scores which data source."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.errors import ConfigError
from freewheel.judge.verdict import Scored
from freewheel.rewards import math_equal, rules
from freewheel.rewards.rules import (
    NO_ANSWER,
    answer_line,
    boxed_math,
    dapo_math,
    exact_match,
    format_tags,
    gsm8k,
    last_box,
    number_in,
    register_rule,
    rule_for,
    rule_score,
    tool_call,
)

RIGHT, WRONG = Scored(1.0), Scored(0.0)

needs_math = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="the extra [math] is not here")


@pytest.fixture(scope="module", autouse=True)
def _the_child_ends_with_these_tests() -> Iterator[None]:
    yield
    math_equal.close()


@pytest.mark.parametrize(
    ("number", "spellings"),
    [
        (42, ["42", "42.", "42.0", "042", "$42", r"\$42", "42%", r"42\%", "42 dollars.", "42 m²"]),
        (-42, ["-42", "−42", "-$42", "$-42"]),
        (1234, ["1,234", "1 234"]),
        (1234567, ["12,34,567", "1\u00a0234\u00a0567"]),
        (Fraction(2469135, 2), ["1,234,567.50"]),
        (Fraction(1, 2), [".5", "1/2"]),
        (Fraction(-1, 2), ["-.5"]),
        (Fraction(-3, 4), ["-3 / 4 cup"]),
        (Fraction(3, 2), ["1 1/2"]),
        (Fraction(1000, 3), ["1,000/3"]),
        (None, ["€1,5", "1/0", "1½", "12,34", "1.2.3", "1e3", "10^2", "42 or 43", "5-10", "-$-42"]),
        (None, [".", "", "9" * 100_000]),
    ],
)
def test_a_number_is_read_in_its_usual_spellings_and_never_guessed(
    number: Fraction | None, spellings: list[str]
) -> None:
    for spelling in spellings:
        assert number_in(spelling) == number, spelling[:20]


@given(st.integers(-(10**12), 10**12), st.integers(0, 999), st.booleans(), st.sampled_from(["", ".", "%", " apples"]))
def test_any_number_is_read_back_exactly(whole: int, thousandths: int, grouped: bool, tail: str) -> None:
    written = f"{whole:,}" if grouped else str(whole)
    sign = -1 if whole < 0 else 1
    assert number_in(f"{written}.{thousandths:03d}{tail}") == whole + sign * Fraction(thousandths, 1000)


@pytest.mark.parametrize(
    ("expected", "responses"),
    [
        (
            RIGHT,
            ["6 * 7 = 42\n#### 42", "#### 42\nI am sure.", "#### 41\nNo, wait.\n#### 42", "#### 42\n##### Remarks"],
        ),
        (WRONG, ["#### 42\nNo, wait.\n#### 41"]),
        (NO_ANSWER, ["The answer is 42.", "#### the answer is clear", "#### 42 or 43", "### 42", "##### 42"]),
    ],
)
def test_gsm8k_needs_the_right_number_after_the_last_mark(expected: Scored, responses: list[str]) -> None:
    for response in responses:
        assert gsm8k(response, "42", {}) == expected, response


def test_gsm8k_takes_its_ground_truth_bare_or_as_a_solution() -> None:
    for truth in ("42", 42, 42.0, "$42.00", "He has 6 * 7 = <<6*7=42>>42.\n#### 42"):
        assert gsm8k("#### 42", truth, {}) == RIGHT
        assert gsm8k("#### 6", truth, {}) == WRONG


@pytest.mark.parametrize("rule", [gsm8k, pytest.param(boxed_math, marks=needs_math)])
def test_a_missing_ground_truth_is_an_error_and_not_a_zero(rule: rules.Rule) -> None:
    for truth in (None, "", *(("many", "#### many") if rule is gsm8k else ("$$",))):
        with pytest.raises(ConfigError, match=r"^ground_truth = "):
            rule(r"#### 42, so \boxed{42}", truth, {})


def test_an_exact_match_ignores_space_and_case_unless_told_otherwise() -> None:
    assert exact_match("  new\n york ", "New York", {}) == RIGHT
    assert exact_match("New York City", "New York", {}) == WRONG
    assert exact_match("7", 7, {}) == RIGHT
    assert functools.partial(exact_match, ignore_case=False)("new york", "New York", {}) == WRONG
    assert functools.partial(exact_match, ignore_space=False)("New  York", "New York", {}) == WRONG


@pytest.mark.parametrize(
    ("find", "text", "found"),
    [
        (last_box, r"so \boxed{42}.", "42"),
        (last_box, r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (last_box, r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (last_box, r"\boxed {3}", "3"),
        (last_box, r"\boxed{\boxed{3}}", "3"),
        (last_box, r"\boxed{1} and \boxed{2", "1"),
        (last_box, r"{ \boxed{4} } }", "4"),
        (last_box, r"\boxed{}", ""),
        (last_box, r"\boxed{2", None),
        (last_box, "42", None),
        (answer_line, "Answer: 42", "42"),
        (answer_line, "answer : $\\frac{1}{2}$.\nBye", r"\frac{1}{2}"),
        (answer_line, "**Answer:** .5", ".5"),
        (answer_line, r"Answer: 1. Final Answer: \boxed{2}", "2"),
        (answer_line, "Answer:\n", ""),
        (answer_line, "unanswerable", None),
    ],
)
def test_the_last_balanced_box_and_the_last_answer_line_are_found(find: Any, text: str, found: str | None) -> None:
    assert find(text) == found


@pytest.mark.parametrize("piece", ["\\boxed{", "{", "<tool_call>", "<think>", "#### ", "Answer: ", "answer ", "1,111"])
def test_a_response_that_repeats_one_token_is_read_in_linear_time(piece: str) -> None:
    response = piece * (1_000_000 // len(piece))
    started_at = time.process_time()
    assert gsm8k(response, "42", {}).value == 0
    assert format_tags("think", "answer")(response, None, {}) == NO_ANSWER
    assert tool_call("search")(response, None, {}) == NO_ANSWER
    last_box(response)
    answer_line(response)
    assert time.process_time() - started_at < 10  # a quadratic search would take hours


@needs_math
@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("0.5", r"\frac{1}{2}", True),
        (r"\dfrac12", r"$\frac{1}{2}$", True),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        ("4", r"We get $2+2=\boxed{4}$.", True),
        (r"\frac{1}{3}", r"\frac{1}{2}", False),
        ("(1,2)", "(2,1)", False),
        (r"\frac{1}", "42", False),
    ],
)
def test_boxed_answers_are_compared_by_what_they_mean(answer: str, truth: object, same: bool) -> None:
    assert boxed_math(f"So \\boxed{{{answer}}}.", truth, {}) == (RIGHT if same else WRONG)


@needs_math
def test_the_box_counts_or_for_dapo_the_answer_line_before_the_box() -> None:
    assert boxed_math("Answer: 42", "42", {}) == boxed_math(r"\boxed{}", "42", {}) == NO_ANSWER
    assert dapo_math(r"\boxed{7}. Answer: $21/3 + 1$", "8", {}) == RIGHT
    assert dapo_math(r"\boxed{8}", "8", {}) == RIGHT
    assert dapo_math("8", "8", {}) == NO_ANSWER


@pytest.mark.parametrize(
    ("expected", "responses"),
    [
        (
            RIGHT,
            [
                "<think>hm</think><answer>42</answer>",
                "  <think>a\nb</think>\n\n<answer>42</answer>\n",
                "<think>1 < 2 and <b>bold</b></think><answer>42</answer>",
            ],
        ),
        (
            NO_ANSWER,
            [
                "<answer>42</answer><think>hm</think>",
                "<think>hm</think><answer>42</answer> bye",
                "well <think>hm</think><answer>42</answer>",
                "<think>hm</think> so <answer>42</answer>",
                "<think>hm<answer>42</answer></think>",
                "<think>hm</think><answer>42</answer><answer>43</answer>",
                "<think>hm</think><answer> </answer>",
                "",
            ],
        ),
    ],
)
def test_each_tag_must_occur_once_in_order_with_nothing_around(expected: Scored, responses: list[str]) -> None:
    for response in responses:
        assert format_tags("think", "answer")(response, None, {}) == expected, response


CALL = '<tool_call>{"name": "search", "arguments": {"q": "x"}}</tool_call>'


@pytest.mark.parametrize(
    ("expected", "responses"),
    [
        (RIGHT, [CALL, f"Let me look.\n{CALL}\nand\n{CALL}", CALL.replace("{", "\n{", 1)]),
        (WRONG, [CALL.replace("search", "rm"), CALL + CALL.replace("search", "rm")]),
        (NO_ANSWER, [CALL + "<tool_call>", CALL + "<tool_call>{}</tool_call>", f"<tool_call>{CALL}</tool_call>"]),
        (NO_ANSWER, [CALL.replace(', "arguments": {"q": "x"}', ""), CALL.replace('{"q": "x"}', '"{}"')]),
        (NO_ANSWER, [CALL.replace('"search"', "1"), "<tool_call>search(x)</tool_call>", "</tool_call><tool_call>"]),
        (NO_ANSWER, ["<tool_call>" + "[" * 100_000 + "</tool_call>"]),
    ],
)
def test_tool_calls_must_be_well_formed_and_of_known_tools(expected: Scored, responses: list[str]) -> None:
    for response in responses:
        assert tool_call("search", "open")(response, None, {}) == expected, response


@pytest.mark.parametrize("factory", [format_tags, tool_call])
@pytest.mark.parametrize("names", [(), ("",), (["think", "answer"],)])
def test_a_factory_without_names_is_refused(factory: Any, names: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=f"^{factory.__name__} = "):
        factory(*names)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers ends with it."""
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))


def test_the_rule_of_the_longest_prefix_scores_a_data_source(own_registry: None) -> None:
    known = {
        gsm8k: ["openai/gsm8k"],
        boxed_math: ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"],
        dapo_math: ["math_dapo", "aime_2024", "aime25"],
    }
    for rule, data_sources in known.items():
        assert [rule_for(name) for name in data_sources] == [rule] * len(data_sources)
    with pytest.raises(ConfigError, match=r"^data_source = 'mine/quiz': .*openai/gsm8k.*register_rule\(prefix, rule\)"):
        rule_for("mine/quiz")
    register_rule("mine/", exact_match)
    register_rule("mine/numbers", gsm8k)
    assert (rule_for("mine/quiz"), rule_for("mine/numbers_hard")) == (exact_match, gsm8k)
    register_rule("", exact_match)
    assert (rule_for("anything"), rule_for("openai/gsm8k")) == (exact_match, gsm8k)


def test_a_rule_receives_the_response_the_truth_and_the_extra_info(own_registry: None) -> None:
    received: list[tuple[str, object, Any]] = []

    def rule(response: str, ground_truth: object, extra_info: Any) -> Scored:
        received.append((response, ground_truth, extra_info))
        return Scored(0.5)

    register_rule("mine", rule)
    assert rule_score(data_source="mine", solution_str="r", ground_truth="g", extra_info={"index": 1}).value == 0.5
    rule_score(data_source="mine", solution_str="r", ground_truth="g")
    assert received == [("r", "g", {"index": 1}), ("r", "g", {})]
