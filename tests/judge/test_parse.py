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
from freewheel.judge.parse import Reading, Unparseable, make_reader
from freewheel.judge.rubric import BUILTIN, Rubric
from freewheel.judge.scores import MAX_ANSWER_CHARS

from .replies import READ_AS_SEVEN, REFUSED

INTEGER = make_reader(BUILTIN["integer"])


def read(rubric: Rubric, reply: str) -> float:
    return make_reader(rubric)(reply).value


def rubric(parser: str, **fields: Any) -> Rubric:
    return Rubric(**{"name": "r", "system": "s", "parser": parser, **fields})


def test_the_tables_have_enough_different_replies() -> None:
    assert len(set(READ_AS_SEVEN)) == len(READ_AS_SEVEN) >= 100
    assert len(set(REFUSED)) == len(REFUSED) >= 75


@pytest.mark.parametrize("reply", READ_AS_SEVEN)
def test_a_clear_reply_reads_as_its_score(reply: str) -> None:
    assert INTEGER(reply) == Reading(7.0, {})


@pytest.mark.parametrize("reply", [reply.replace("7", "10") for reply in READ_AS_SEVEN if reply.isascii()])
def test_ten_does_not_read_as_one(reply: str) -> None:
    try:
        assert INTEGER(reply).value == 10.0
    except Unparseable:
        assert "010" in reply


@pytest.mark.parametrize("reply", REFUSED)
def test_an_unclear_reply_is_refused(reply: str) -> None:
    with pytest.raises(Unparseable) as error:
        INTEGER(reply)
    assert str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("place", "reply", "value"),
    [
        ("first", "Score: 7\nScore: 8", 7.0),
        ("last", "Score: 7\nScore: 8", 8.0),
        ("last", "Clarity score: 7\nAccuracy score: 5\nFinal score: 6", 6.0),
        ("last", "It has 3 parts, of which 2 are right, so 6", 6.0),
        ("first", "6, for it has 3 parts", 6.0),
        ("last", 'It says "Score: 10". Score: 3', 3.0),
        ("last", "It has 12 parts. Score: 3. It was published in 2024.", 3.0),
        ("last", "Score: 3\nReference answer: 10", 3.0),
        ("first", "Reference answer: 10\nScore: 3", 3.0),
    ],
)
def test_the_declared_place_chooses_among_several_scores(place: str, reply: str, value: float) -> None:
    assert read(rubric("integer", place=place), reply) == value


@pytest.mark.parametrize("reply", ["Answer: 10", "Correct answer: 7\nResponse answer: 7", "The answer is \\boxed{7}"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_repeated_answer_is_no_score_at_the_declared_place_either(place: str, reply: str) -> None:
    with pytest.raises(Unparseable):
        read(rubric("integer", place=place), reply)


@pytest.mark.parametrize("reply", ["Score: 7\nScore: 11", "Score: 7\nScore: 7.5", "7, 8, 12"])
def test_a_score_at_the_declared_place_must_still_be_in_range(reply: str) -> None:
    with pytest.raises(Unparseable):
        read(rubric("integer", place="last"), reply)


@pytest.mark.parametrize(
    ("low", "high", "reply", "value"),
    [
        (0, 1, "0.75", 0.75),
        (0, 1, " .75\n", 0.75),
        (0, 1, "1", 1.0),
        (0, 1, "1.0", 1.0),
        (0, 1, "0", 0.0),
        (0, 1, "75%", 0.75),
        (0, 1, "Score: **0.75**", 0.75),
        (0, 1, "7.5e-1", 0.75),
        (0, 1, "０．７５", 0.75),
        (0, 100, "75%", 75.0),
        (0, 100, "75/100", 75.0),
        (-1, 1, "-0.5", -0.5),
        (-1, 1, "Score: −0.5", -0.5),
        (1, 5, "4.5 out of 5", 4.5),
    ],
)
def test_a_number_is_read_within_its_range(low: float, high: float, reply: str, value: float) -> None:
    assert read(rubric("number", low=low, high=high), reply) == pytest.approx(value)


@pytest.mark.parametrize("reply", ["1.01", "7/10", "-0.1", "1e999", "150%", "nan", "0.7-0.8", "0,7"])
def test_a_number_outside_its_range_is_refused(reply: str) -> None:
    with pytest.raises(Unparseable):
        read(BUILTIN["number"], reply)


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        *(
            (reply, 1.0)
            for reply in ("yes", "Yes.", "YES", "**Yes**", "Yes, because it is right.", "是", "Verdict: yes")
        ),
        *(
            (reply, 1.0)
            for reply in ("<think>no?</think>yes", "True", '{"verdict": "yes"}', "Oui", "It is right. Yes.")
        ),
        *(
            (reply, 0.0)
            for reply in ("no", "No.", "No - it is wrong.", "否", "いいえ", "Answer: **No**", "Нет", "```\nno\n```")
        ),
    ],
)
def test_yes_and_no_are_read(reply: str, value: float) -> None:
    assert read(BUILTIN["yes_no"], reply) == value


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "maybe",
        "yes and no",
        "yes/no",
        "Yes.\nNo.",
        "No, wait. Yes.",
        "No doubt it is right",
        "Not sure",
        "1",
        "yesterday",
        "<think>yes",
        "Verdict: yes\nVerdict: no",
        'It says "Verdict: yes".',
        "The response tells me to answer: yes",
    ],
)
def test_neither_or_both_of_yes_and_no_is_refused(reply: str) -> None:
    with pytest.raises(Unparseable):
        read(BUILTIN["yes_no"], reply)


@pytest.mark.parametrize(
    "reply",
    [
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
    ],
)
def test_json_is_read_anywhere_in_the_reply(reply: str) -> None:
    assert read(BUILTIN["json"], reply) == 7.0


@pytest.mark.parametrize(
    "reply",
    [
        "7",
        "",
        "{}",
        '{"rating": 7}',
        '{"score": null}',
        '{"score": true}',
        '{"score": [7]}',
        '{"score": {"value": 7}}',
        '{"score": NaN}',
        '{"score": Infinity}',
        '{"score": 1e999}',
        '{"score": 11}',
        '{"score": "seven"}',
        '{"score": 7, "score": 8}',
        '{"score": 10} {"score": 3}',
        '{"score": 7',
        '{"outer": {"score": 7}}',
        'The response contains {"score": 10}',
        "{" * 100_000,
        '{"a":' * 10_000,
        '{"score": ' + "9" * 5000 + "}",
    ],
)
def test_json_that_is_not_one_clear_score_is_refused(reply: str) -> None:
    with pytest.raises(Unparseable):
        read(BUILTIN["json"], reply)


def test_criteria_are_read_as_their_weighted_mean_and_their_parts() -> None:
    reply = '```json\n{"correctness": 8, "completeness": 6, "clarity": 10, "remark": "fine"}\n```'
    found = make_reader(BUILTIN["criteria"])(reply)
    assert found == Reading(8.0, {"correctness": 8.0, "completeness": 6.0, "clarity": 10.0})


@pytest.mark.parametrize(
    "reply",
    [
        '{"correctness": 8, "completeness": 6}',
        '{"correctness": 8, "completeness": 6, "clarity": 11}',
        '{"correctness": 8, "completeness": 6, "clarity": false}',
        "8",
    ],
)
def test_criteria_that_are_not_all_scored_are_refused(reply: str) -> None:
    with pytest.raises(Unparseable):
        read(BUILTIN["criteria"], reply)


def words(reply: str) -> float:
    return float(len(reply.split()))


def words_and_parts(reply: str) -> tuple[float, dict[str, float]]:
    return words(reply), {"characters": len(reply)}


def raising(reply: str) -> float:
    raise KeyError(reply)


def not_finite(reply: str) -> float:
    return float(reply)


def test_a_custom_parser_is_called_with_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    custom = import_path(monkeypatch, "words")
    assert make_reader(custom)("one two three") == Reading(3.0, {})
    parts = import_path(monkeypatch, "words_and_parts")
    assert make_reader(parts)("one two") == Reading(2.0, {"characters": 7.0})


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("words", ""),
        ("words", "w " * 11),
        ("raising", "x"),
        ("not_finite", "nan"),
        ("not_finite", "inf"),
        ("not_finite", "x"),
    ],
)
def test_a_custom_parser_that_fails_makes_the_reply_unparseable(
    monkeypatch: pytest.MonkeyPatch, name: str, reply: str
) -> None:
    with pytest.raises(Unparseable):
        make_reader(import_path(monkeypatch, name))(reply)


@pytest.mark.parametrize("path", ["no_such_package:f", "json:no_such_function", "json:__doc__"])
def test_a_custom_parser_that_cannot_be_imported_is_a_config_error(path: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_reader(rubric(path))
    assert error.value.key == "rubric.parser"


def import_path(monkeypatch: pytest.MonkeyPatch, name: str) -> Rubric:
    """A rubric whose parser is the function `name` of this file."""
    module = types.ModuleType("custom_parsers")
    setattr(module, name, globals()[name])
    monkeypatch.setitem(sys.modules, "custom_parsers", module)
    return rubric(f"custom_parsers:{name}")


WRAPPINGS = [
    *("{}", " {}\n", "**{}**", "`{}`", "```\n{}\n```", "<score>{}</score>", "\\boxed{{{}}}", '{{"score": {}}}'),
    *("Score: {}", "**Score:** {}", "Score: {}/10", "Final score: **{}**", "Rating = {}", "{}/10", "{} out of 10"),
    *("最终评分 {}", "评分：{}分", "{}分", "Оценка: {}", "It is clear. {}", "{}. It is clear.", "I'd rate it a {}."),
    *("<think>Maybe 3 or 4.</think>{}", "{}.0"),
]
WIDE = str.maketrans("0123456789", "０１２３４５６７８９")


@given(st.integers(1, 10), st.sampled_from(WRAPPINGS), st.booleans())
def test_any_integer_in_range_is_read_in_any_wrapping(value: int, wrapping: str, wide: bool) -> None:
    digits = str(value).translate(WIDE) if wide else str(value)
    assert INTEGER(wrapping.format(digits)).value == value


@given(st.integers().filter(lambda value: not 1 <= value <= 10), st.sampled_from(WRAPPINGS))
def test_an_integer_out_of_range_is_never_read(value: int, wrapping: str) -> None:
    with pytest.raises(Unparseable):
        INTEGER(wrapping.format(value))


@given(st.floats(0, 1), st.sampled_from(["{}", "Score: {}", "**{}**", '{{"score": {}}}']))
def test_a_number_in_range_is_read_exactly(value: float, wrapping: str) -> None:
    assert read(BUILTIN["number"], wrapping.format(value)) == value


@given(st.integers(1, 10), st.integers(1, 10), st.sampled_from(["Score: {}\nScore: {}", "{}\n{}", "{}/10 and {}/10"]))
def test_two_scores_are_read_if_and_only_if_they_agree(first: int, second: int, form: str) -> None:
    reply = form.format(first, second)
    if first == second and "and" not in form:
        assert INTEGER(reply).value == first
    elif first != second:
        with pytest.raises(Unparseable):
            INTEGER(reply)


PIECES = st.sampled_from(
    [
        *"0123456789.,:;/-–~%^*_`\"'{}[]()<>\\$#\n\t |e７٧½分",
        *("Score", "评分", "yes", "no", " or ", " out of ", "10", "NaN", "boxed{", '{"score": ', '"clarity": ', "}"),
        *("<think>", "</think>", "\ud800", "\u200b", "\u0301"),
    ]
)
READERS = [
    make_reader(replaced)
    for built_in in BUILTIN.values()
    for place in ("only", "first", "last")
    for replaced in [msgspec.structs.replace(built_in, place=place)]
]


@given(st.one_of(st.text(), st.lists(PIECES, max_size=30).map("".join)))
def test_a_reader_gives_a_score_in_range_or_raises_unparseable_and_nothing_else(reply: str) -> None:
    for number, reader in enumerate(READERS):
        built_in = list(BUILTIN.values())[number // 3]
        try:
            found = reader(reply)
        except Unparseable:
            continue
        assert built_in.low <= found.value <= built_in.high
        if built_in.parser == "integer":
            assert found.value == int(found.value)


FIELDS = st.sampled_from(["score", "clarity", "correctness", "completeness"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
)


@given(VALUES)
def test_any_json_reads_as_a_score_in_range_or_is_refused(value: object) -> None:
    for name in ("json", "criteria", "integer"):
        try:
            found = make_reader(BUILTIN[name])(json.dumps(value))
        except Unparseable:
            continue
        assert 1 <= found.value <= 10


HOSTILE = [
    *(
        "7",
        "7 ",
        "７",
        "Score: 7 ",
        "score ",
        "1:",
        "1/",
        '"7" ',
        "{",
        '{"a":',
        "[",
        '"',
        "“",
        "*",
        "_",
        "\n",
        " ",
        ".",
        "<",
    ),
    *("<think>", "</think>\n", "<think></think>", "<a>", "\\boxed{", "\u0301\u0323", "\u200b", "得", "I give it a "),
    *("yes\n", "verdict: yes ", '{"score": [', '{"score": 7, "a": [['),
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
