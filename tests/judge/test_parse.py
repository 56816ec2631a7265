"""Replies as judges really send them: clear ones are read, unclear ones are refused."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import types
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.errors import ConfigError
from freewheel.judge.parse import MAX_ANSWER_CHARS, Reading, Unparseable, make_reader
from freewheel.judge.rubric import BUILTIN, Rubric

from .replies import READ_AS_SEVEN, REFUSED

INTEGER = make_reader(BUILTIN["integer"])


def read(rubric: Rubric, reply: str) -> float | None:
    """The score, or None for a reply that is refused."""
    try:
        return make_reader(rubric)(reply).value
    except Unparseable as error:
        assert 0 < len(str(error)) < 300
        return None


def rubric(parser: str, **fields: Any) -> Rubric:
    return Rubric(**{"name": "r", "system": "s", "parser": parser, **fields})


@pytest.mark.parametrize("reply", READ_AS_SEVEN)
def test_a_clear_reply_reads_as_its_score_and_ten_does_not_read_as_one(reply: str) -> None:
    assert INTEGER(reply) == Reading(7.0, {})
    if reply.isascii():
        assert read(BUILTIN["integer"], reply.replace("7", "10")) == 10.0


@pytest.mark.parametrize("reply", REFUSED)
def test_an_unclear_reply_is_refused(reply: str) -> None:
    assert read(BUILTIN["integer"], reply) is None


@pytest.mark.parametrize(
    ("reply", "first", "last"),
    [
        ("Score: 7\nScore: 8", 7.0, 8.0),
        ("Clarity score: 7\nAccuracy score: 5\nFinal score: 6", 7.0, 6.0),
        ("It has 3 parts, of which 2 are right, so 6", 3.0, 6.0),
        ("6, for it has 3 parts", 6.0, 6.0),
        ('It says "Score: 10". Score: 3', 10.0, 3.0),
        ("It has 12 parts. Score: 3. It was published in 2024.", 3.0, 3.0),
        ("Score: 3\nReference answer: 10", 3.0, 3.0),
        ("Reference answer: 10\nScore: 3", 3.0, 3.0),
        ("Answer: 10", None, None),
        ("Correct answer: 7\nResponse answer: 7", None, None),
        ("The answer is \\boxed{7}", None, None),
        ("Score: 7\nScore: 11", 7.0, None),
        ("Score: 7\nScore: 7.5", 7.0, None),
        ("7, 8, 12", None, None),
        ("Score: 3. It says\n</think>\n\nScore: 10", None, None),
    ],
)
def test_the_declared_place_chooses_among_several_scores_in_range(
    reply: str, first: float | None, last: float | None
) -> None:
    assert read(rubric("integer", place="first"), reply) == first
    assert read(rubric("integer", place="last"), reply) == last


NUMBERS: list[tuple[float, float, str, float | None]] = [
    *((0, 1, reply, 0.75) for reply in ("0.75", " .75\n", "75%", "Score: **0.75**", "7.5e-1", "０．７５")),
    *((0, 1, reply, float(reply)) for reply in ("1", "1.0", "0")),
    (0, 100, "75%", 75.0),
    (0, 100, "75/100", 75.0),
    (-1, 1, "-0.5", -0.5),
    (-1, 1, "Score: −0.5", -0.5),
    (1, 5, "4.5 out of 5", 4.5),
    *((0, 1, reply, None) for reply in ("1.01", "7/10", "-0.1", "1e999", "150%", "nan", "0.7-0.8", "0,7")),
]


@pytest.mark.parametrize(("low", "high", "reply", "value"), NUMBERS)
def test_a_number_is_read_within_its_range_and_refused_outside(
    low: float, high: float, reply: str, value: float | None
) -> None:
    found = read(rubric("number", low=low, high=high), reply)
    assert found == (value if value is None else pytest.approx(value))


YES = ["yes", "Yes.", "YES", "**Yes**", "Yes, because it is right.", "是", "Verdict: yes", "<think>no?</think>yes"]
YES += ["True", '{"verdict": "yes"}', "Oui", "It is right. Yes."]
NO = ["no", "No.", "No - it is wrong.", "否", "いいえ", "Answer: **No**", "Нет", "```\nno\n```"]
NEITHER = ["", "maybe", "yes and no", "yes/no", "Yes.\nNo.", "No, wait. Yes.", "No doubt it is right", "Not sure", "1"]
NEITHER += ["yesterday", "<think>yes", "Verdict: yes\nVerdict: no", 'It says "Verdict: yes".']
NEITHER += ["The response tells me to answer: yes"]


def test_yes_and_no_are_read_and_neither_or_both_is_refused() -> None:
    expected = {**dict.fromkeys(YES, 1.0), **dict.fromkeys(NO, 0.0), **dict.fromkeys(NEITHER)}
    assert {reply: read(BUILTIN["yes_no"], reply) for reply in expected} == expected


SEVEN_IN_JSON = [
    '{"score": 7}',
    ' {"score": 7.0, "reason": "x {y} \\" z"} ',
    '```json\n{"score": 7}\n```',
    'Here is my verdict:\n{"score": 7}',
    'Sure! {"score": 7}',
    '{"score": "7"}',
    '{"score": "7/10"}',
    '<think>{"score": 9}</think>{"score": 7}',
    '{"score": 7}\n{"score": 7}',
    '{"reason": "says {\\"score\\": 10}", "score": 7}',
    '{"score": 7, "score": 7}',
    '{"reason": "one\ntwo", "score": 7}',
    '[{"score": 7}]',
    '{broken {"score": 7}',
    "{" * 63 + '{"score": 7}',
]
NOT_ONE_CLEAR_SCORE = [
    *("7", "", "{}", '{"rating": 7}', '{"score": null}', '{"score": true}', '{"score": [7]}'),
    *('{"score": {"value": 7}}', '{"score": NaN}', '{"score": Infinity}', '{"score": 1e999}', '{"score": 11}'),
    *('{"score": "seven"}', '{"score": 7, "score": 8}', '{"score": 10} {"score": 3}', '{"score": 7'),
    *('{"outer": {"score": 7}}', 'The response contains {"score": 10}', "{" * 100_000, '{"a":' * 10_000),
    *('{"score": ' + "9" * 5000 + "}", "{" * 64 + '{"score": 7}'),
]


@pytest.mark.parametrize("reply", [*SEVEN_IN_JSON, *NOT_ONE_CLEAR_SCORE], ids=lambda reply: reply[:40])
def test_json_is_read_anywhere_in_the_reply_if_it_is_one_clear_score(reply: str) -> None:
    assert read(BUILTIN["json"], reply) == (7.0 if reply in SEVEN_IN_JSON else None)


def test_criteria_are_read_as_their_weighted_mean_and_their_parts_if_all_are_scored() -> None:
    reply = '```json\n{"correctness": 8, "completeness": 6, "clarity": 10, "remark": "fine"}\n```'
    found = make_reader(BUILTIN["criteria"])(reply)
    assert found == Reading(8.0, {"correctness": 8.0, "completeness": 6.0, "clarity": 10.0})
    for clarity in ("", ', "clarity": 11', ', "clarity": false'):
        assert read(BUILTIN["criteria"], f'{{"correctness": 8, "completeness": 6{clarity}}}') is None
    assert read(BUILTIN["criteria"], "8") is None
    rounding = rubric("criteria", criteria={"a": 0.24000000000000002, "b": 0.24000000000000002, "c": 0.23})
    assert read(rounding, '{"a": 10, "b": 10, "c": 10}') == 10.0, "rounding does not leave the range"


# -- parsers of the user ---------------------------------------------------------------------------------------


def words(reply: str) -> float:
    return float(len(reply.split()))


def words_and_parts(reply: str) -> tuple[float, dict[str, float]]:
    return words(reply), {"characters": len(reply)}


def part_that_is_not_finite(reply: str) -> tuple[float, dict[str, float]]:
    return 5.0, {"x": float("nan")}


def raising(reply: str) -> float:
    raise KeyError(reply)


@pytest.mark.parametrize(
    ("function", "reply", "expected"),
    [
        (words, "one two three", Reading(3.0, {})),
        (words_and_parts, "one two", Reading(2.0, {"characters": 7.0})),
        (words, "", None),
        (words, "w " * 11, None),
        (part_that_is_not_finite, "x", None),
        (raising, "x", None),
        (float, "nan", None),
    ],
)
def test_a_custom_parser_reads_the_reply_and_its_failure_makes_it_unparseable(
    monkeypatch: pytest.MonkeyPatch, function: Any, reply: str, expected: Reading | None
) -> None:
    module = types.ModuleType("custom_parsers")
    module.function = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "custom_parsers", module)
    reader = make_reader(rubric("custom_parsers:function"))
    with pytest.raises(Unparseable) if expected is None else contextlib.nullcontext():
        assert reader(reply) == expected


def test_a_custom_parser_that_cannot_be_called_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"^rubric.parser = "):
        make_reader(rubric("json:__doc__"))


# -- properties ------------------------------------------------------------------------------------------------

WRAPPINGS = [
    *("{}", " {}\n", "**{}**", "`{}`", "```\n{}\n```", "<score>{}</score>", "\\boxed{{{}}}", '{{"score": {}}}'),
    *("Score: {}", "**Score:** {}", "Score: {}/10", "Final score: **{}**", "Rating = {}", "{}/10", "{} out of 10"),
    *("最终评分 {}", "评分：{}分", "{}分", "Оценка: {}", "It is clear. {}", "{}. It is clear.", "I'd rate it a {}."),
    *("<think>Maybe 3 or 4.</think>{}", "{}.0"),
]
WIDE = str.maketrans("0123456789", "０１２３４５６７８９")


@given(st.integers(-3, 14) | st.integers(), st.sampled_from(WRAPPINGS), st.booleans())
def test_an_integer_is_read_in_any_wrapping_if_and_only_if_it_is_in_range(
    value: int, wrapping: str, wide: bool
) -> None:
    digits = str(value).translate(WIDE) if wide else str(value)
    assert read(BUILTIN["integer"], wrapping.format(digits)) == (value if 1 <= value <= 10 else None)


@given(st.floats(0, 1), st.sampled_from(["{}", "Score: {}", "**{}**", '{{"score": {}}}']))
def test_a_number_in_range_is_read_exactly(value: float, wrapping: str) -> None:
    assert read(BUILTIN["number"], wrapping.format(value)) == value


@given(st.integers(1, 10), st.integers(1, 10), st.sampled_from(["Score: {}\nScore: {}", "{}\n{}", "{}/10 and {}/10"]))
def test_two_scores_are_read_if_and_only_if_they_agree(first: int, second: int, form: str) -> None:
    found = read(BUILTIN["integer"], form.format(first, second))
    assert found == (first if first == second and "and" not in form else None) or (first == second and "and" in form)


PIECES = st.sampled_from(
    [
        *"0123456789.,:;/-–~%^*_`\"'{}[]()<>\\$#\n\t |e７٧½分",
        *("Score", "评分", "yes", "no", " or ", " out of ", "10", "NaN", "boxed{", '{"score": ', '"clarity": ', "}"),
        *("<think>", "</think>", "\ud800", "\u200b", "\u0301"),
    ]
)
FIELDS = st.sampled_from(["score", "clarity", "correctness", "completeness"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
).map(json.dumps)
READERS = [
    (built_in, make_reader(msgspec.structs.replace(built_in, place=place)))
    for built_in in BUILTIN.values()
    for place in ("only", "first", "last")
]


@given(st.text() | st.lists(PIECES, max_size=30).map("".join) | JSON)
def test_a_reader_gives_a_score_in_range_or_raises_unparseable_and_nothing_else(reply: str) -> None:
    for built_in, reader in READERS:
        with contextlib.suppress(Unparseable):
            found = reader(reply)
            assert built_in.low <= found.value <= built_in.high
            assert built_in.parser != "integer" or found.value == int(found.value)


HOSTILE = [
    *("7", "7 ", "７", "Score: 7 ", "score ", "1:", "1/", '"7" ', "{", '{"a":', "[", '"', "“", "*", "_", "\n", " "),
    *(".", "<", "1. ", "<think>", "</think>\n", "<think></think>", "<a>", "\\boxed{", "\u0301\u0323", "\u200b", "得"),
    *("I give it a ", "yes\n", "verdict: yes ", '{"score": [', '{"score": 7, "a": [['),
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_megabyte_of_anything_is_parsed_in_linear_time(piece: str) -> None:
    for chars in (MAX_ANSWER_CHARS, 1_000_000):
        reply = piece * (chars // len(piece))
        for built_in in BUILTIN.values():
            reader = make_reader(built_in)
            began = time.perf_counter()
            with contextlib.suppress(Unparseable):
                reader(reply)
            assert time.perf_counter() - began < 20.0


def test_long_thinking_before_a_short_answer_is_skipped() -> None:
    assert INTEGER("<think>" + "Score: 3? " * 100_000 + "</think>7").value == 7.0
