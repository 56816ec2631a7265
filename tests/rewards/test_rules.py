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
    ("written", "number"),
    [
        ("42", 42),
        ("42.", 42),
        ("42.0", 42),
        ("042", 42),
        ("-42", -42),
        ("−42", -42),
        ("$42", 42),
        (r"\$42", 42),
        ("-$42", -42),
        ("$-42", -42),
        ("€1,5", None),
        ("42%", 42),
        (r"42\%", 42),
        ("42 dollars.", 42),
        ("42 m²", 42),
        ("1,234", 1234),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("12,34,567", 1234567),
        ("1 234", 1234),
        ("1\u00a0234\u00a0567", 1234567),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("1/2", Fraction(1, 2)),
        ("-3 / 4 cup", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        ("1,000/3", Fraction(1000, 3)),
        ("1/0", None),
        ("1½", None),
        ("12,34", None),
        ("1.2.3", None),
        ("1e3", None),
        ("10^2", None),
        ("42 or 43", None),
        ("5-10", None),
        ("-$-42", None),
        (".", None),
        ("", None),
        ("9" * 100_000, None),
    ],
)
def test_a_number_is_read_in_its_usual_spellings_and_never_guessed(written: str, number: Fraction | None) -> None:
    assert number_in(written) == number


@given(st.integers(-(10**12), 10**12), st.integers(0, 999), st.booleans(), st.sampled_from(["", ".", "%", " apples"]))
def test_any_number_is_read_back_exactly(whole: int, thousandths: int, grouped: bool, tail: str) -> None:
    written = f"{whole:,}" if grouped else str(whole)
    sign = -1 if whole < 0 else 1
    assert number_in(f"{written}.{thousandths:03d}{tail}") == whole + sign * Fraction(thousandths, 1000)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("6 * 7 = 42\n#### 42", RIGHT),
        ("#### 42\nI am sure.", RIGHT),
        ("#### 41\nNo, wait.\n#### 42", RIGHT),
        ("#### 42\nNo, wait.\n#### 41", WRONG),
        ("#### 42\n##### Remarks", RIGHT),
        ("The answer is 42.", NO_ANSWER),
        ("#### the answer is clear", NO_ANSWER),
        ("#### 42 or 43", NO_ANSWER),
        ("### 42", NO_ANSWER),
        ("##### 42", NO_ANSWER),
    ],
)
def test_gsm8k_needs_the_right_number_after_the_last_mark(response: str, expected: Scored) -> None:
    assert gsm8k(response, "42", {}) == expected


@pytest.mark.parametrize("truth", ["42", 42, 42.0, "$42.00", "He has 6 * 7 = <<6*7=42>>42.\n#### 42"])
def test_gsm8k_takes_its_ground_truth_bare_or_as_a_solution(truth: object) -> None:
    assert gsm8k("#### 42", truth, {}) == RIGHT
    assert gsm8k("#### 6", truth, {}) == WRONG


@pytest.mark.parametrize("truth", [None, "", "many", "#### many"])
def test_a_ground_truth_without_a_number_is_an_error_and_not_a_zero(truth: object) -> None:
    with pytest.raises(ConfigError, match=r"^ground_truth = "):
        gsm8k("#### 42", truth, {})


def test_an_exact_match_ignores_space_and_case_unless_told_otherwise() -> None:
    assert exact_match("  new\n york ", "New York", {}) == RIGHT
    assert exact_match("New York City", "New York", {}) == WRONG
    assert exact_match("7", 7, {}) == RIGHT
    assert functools.partial(exact_match, ignore_case=False)("new york", "New York", {}) == WRONG
    assert functools.partial(exact_match, ignore_space=False)("New  York", "New York", {}) == WRONG


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed {3}", "3"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"{ \boxed{4} } }", "4"),
        (r"\boxed{}", ""),
        (r"\boxed{2", None),
        ("42", None),
    ],
)
def test_the_last_balanced_box_is_found(text: str, held: str | None) -> None:
    assert last_box(text) == held


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 42", "42"),
        ("answer : $\\frac{1}{2}$.\nBye", r"\frac{1}{2}"),
        ("**Answer:** .5", ".5"),
        (r"Answer: 1. Final Answer: \boxed{2}", "2"),
        ("Answer:\n", ""),
        ("unanswerable", None),
    ],
)
def test_the_last_answer_line_is_found(text: str, answer: str | None) -> None:
    assert answer_line(text) == answer


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
def test_without_a_filled_box_there_is_no_answer() -> None:
    assert boxed_math("Answer: 42", "42", {}) == boxed_math(r"\boxed{}", "42", {}) == NO_ANSWER


@needs_math
@pytest.mark.parametrize("truth", [None, "", "$$"])
def test_math_without_a_ground_truth_is_an_error_and_not_a_zero(truth: object) -> None:
    with pytest.raises(ConfigError, match=r"^ground_truth = "):
        boxed_math(r"\boxed{42}", truth, {})


@needs_math
def test_dapos_answer_line_counts_and_without_one_the_box() -> None:
    assert dapo_math(r"\boxed{7}. Answer: $21/3 + 1$", "8", {}) == RIGHT
    assert dapo_math(r"\boxed{8}", "8", {}) == RIGHT
    assert dapo_math("8", "8", {}) == NO_ANSWER


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<think>hm</think><answer>42</answer>", True),
        ("  <think>a\nb</think>\n\n<answer>42</answer>\n", True),
        ("<think>1 < 2 and <b>bold</b></think><answer>42</answer>", True),
        ("<answer>42</answer><think>hm</think>", False),
        ("<think>hm</think><answer>42</answer> bye", False),
        ("well <think>hm</think><answer>42</answer>", False),
        ("<think>hm</think> so <answer>42</answer>", False),
        ("<think>hm<answer>42</answer></think>", False),
        ("<think>hm</think><answer>42</answer><answer>43</answer>", False),
        ("<think>hm</think><answer> </answer>", False),
        ("", False),
    ],
)
def test_tags_must_stand_once_in_order_and_alone(response: str, right: bool) -> None:
    assert format_tags("think", "answer")(response, None, {}) == (RIGHT if right else NO_ANSWER)


CALL = '<tool_call>{"name": "search", "arguments": {"q": "x"}}</tool_call>'


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (CALL, RIGHT),
        (f"Let me look.\n{CALL}\nand\n{CALL}", RIGHT),
        ('<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>', RIGHT),
        (CALL.replace("search", "rm"), WRONG),
        (CALL + CALL.replace("search", "rm"), WRONG),
        (CALL + "<tool_call>", NO_ANSWER),
        (CALL + "<tool_call>{}</tool_call>", NO_ANSWER),
        (f"<tool_call>{CALL}</tool_call>", NO_ANSWER),
        ('<tool_call>{"name": "search"}</tool_call>', NO_ANSWER),
        ('<tool_call>{"name": "search", "arguments": "{}"}</tool_call>', NO_ANSWER),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', NO_ANSWER),
        ("<tool_call>search(x)</tool_call>", NO_ANSWER),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", NO_ANSWER),
        ("</tool_call><tool_call>", NO_ANSWER),
    ],
)
def test_tool_calls_must_be_well_formed_and_of_known_tools(response: str, expected: Scored) -> None:
    assert tool_call("search", "open")(response, None, {}) == expected


@pytest.mark.parametrize("factory", [format_tags, tool_call])
@pytest.mark.parametrize("names", [(), ("",), (["think", "answer"],)])
def test_a_factory_without_names_is_refused(factory: Any, names: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=f"^{factory.__name__} = "):
        factory(*names)


@pytest.mark.parametrize(
    ("data_source", "rule"),
    [
        ("openai/gsm8k", gsm8k),
        ("lighteval/MATH", boxed_math),
        ("DigitalLearningGmbH/MATH-lighteval", boxed_math),
        ("HuggingFaceH4/MATH-500", boxed_math),
        ("math_dapo", dapo_math),
        ("aime_2024", dapo_math),
        ("aime25", dapo_math),
    ],
)
def test_the_data_sources_that_verl_knows_have_rules(data_source: str, rule: rules.Rule) -> None:
    assert rule_for(data_source) is rule


def test_an_unknown_data_source_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"^data_source = 'mine/quiz': .*openai/gsm8k.*register_rule\(prefix, rule\)"):
        rule_for("mine/quiz")


def test_the_longest_prefix_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))
    register_rule("mine/", exact_match)
    register_rule("mine/numbers", gsm8k)
    assert rule_for("mine/quiz") is exact_match
    assert rule_for("mine/numbers_hard") is gsm8k
    register_rule("", exact_match)
    assert rule_for("anything") is exact_match
    assert rule_for("openai/gsm8k") is gsm8k


def test_a_rule_is_given_all_that_verl_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))
    given_to_rule: list[tuple[str, object, Any]] = []

    def rule(response: str, ground_truth: object, extra_info: Any) -> Scored:
        given_to_rule.append((response, ground_truth, extra_info))
        return Scored(0.5)

    register_rule("mine", rule)
    assert rule_score(data_source="mine", solution_str="r", ground_truth="g", extra_info={"index": 1}).value == 0.5
    rule_score(data_source="mine", solution_str="r", ground_truth="g")
    assert given_to_rule == [("r", "g", {"index": 1}), ("r", "g", {})]
