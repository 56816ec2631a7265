"""A rubric's requests: the hash that identifies equal ones, and the messages that fence off the content by a code."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freewheel.judge import Endpoint, JudgeConfig, JudgeRequest, Rubric, load_rubric
from freewheel.judge.request import CODE_HEX_DIGITS, PromptBuilder, RequestHasher
from freewheel.judge.rubric import ANNOUNCE, BUILTIN, DATA_RULE

ONE = JudgeRequest("response", "prompt", "reference")
OWN_WORDS = Rubric(name="r", system="s", template="{prompt}{reference}{response}", closing="c", reminder="r")
SECRET = bytes(range(32))
BUILDER = PromptBuilder(BUILTIN["integer"], SECRET)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
CONTENTS = st.tuples(TEXTS, TEXTS, TEXTS)


def digest(request: JudgeRequest = ONE, **settings: Any) -> bytes:
    return RequestHasher(JudgeConfig(**{"endpoint": "http://h", "model": "m", **settings}))(request)


def code_of(message: str) -> str:
    found = re.match(rf"{ANNOUNCE}([0-9a-f]{{{CODE_HEX_DIGITS}}})\.\n", message)
    assert found
    return found[1]


def test_the_hash_is_the_same_in_every_process_and_release() -> None:
    """If this changes, cached replies are lost: change HASH_VERSION then, and say so in the changelog."""
    assert digest(rubric=OWN_WORDS).hex() == "f41861047a77baccdc81a724f7c946868f3294df42f6333aaa77fd2b9b775a61"
    assert digest(sampling={"a": 1, "b": 2}) == digest(sampling={"b": 2, "a": 1}), "in any order"


@given(CONTENTS, CONTENTS)
@example(("ab", "c", ""), ("a", "bc", ""))
@example(("", "abc", ""), ("", "", "abc"))
def test_hashes_and_codes_are_equal_exactly_if_the_contents_are(
    first: tuple[str, str, str], second: tuple[str, str, str]
) -> None:
    one, other = JudgeRequest(*first, id="1"), JudgeRequest(*second, id="2")
    assert (digest(one) == digest(other)) == (first == second)
    assert (code_of(BUILDER.user(one)) == code_of(BUILDER.user(other))) == (first == second)
    assert code_of(PromptBuilder(BUILTIN["integer"], b"x" * 32).user(one)) != code_of(BUILDER.user(one))


@pytest.mark.parametrize(
    ("decides", "settings"),
    [
        (True, {"endpoint": "http://other"}),
        (True, {"model": "m2"}),
        (True, {"endpoint": Endpoint(url="http://h", model="m2")}),
        (True, {"rubric": "yes_no"}),
        (True, {"temperature": 0.5}),
        (True, {"temperature": None}),
        (True, {"max_tokens": 5}),
        (True, {"sampling": {"top_p": 0.5}}),
        (False, {"concurrency": 3}),
        (False, {"api_key": "k"}),
        (False, {"placement": "thread"}),
        (False, {"max_attempts": 2}),
        (False, {"cache_ttl_s": 5.0}),
        (False, {"endpoint": [Endpoint(url="http://h"), Endpoint(url="http://other")]}),
        (False, {"endpoint": "http://h/v1/chat/completions"}),
        (False, {"rubric": msgspec.structs.replace(load_rubric("integer"), place="last")}),
    ],
)
def test_the_settings_that_decide_a_reply_are_in_the_hash(decides: bool, settings: dict[str, Any]) -> None:
    assert (digest(**settings) != digest()) == decides


def test_a_lone_surrogate_is_replaced_and_nothing_else() -> None:
    odd = JudgeRequest("a\ud800b\udfff\U0001f600\x00", "\udc80", "", "\ud800", "\ud800")
    assert odd.encodable() == JudgeRequest("a\ufffdb\ufffd\U0001f600\x00", "\ufffd", "", "\ufffd", "\ufffd")
    digest(odd.encodable())


# -- messages --------------------------------------------------------------------------------------------------------


def test_a_request_with_all_parts_is_sent_as_documented() -> None:
    message = BUILDER.user(JudgeRequest("It is 4.", "What is 2+2?", "4"))
    code = code_of(message)
    assert message == (
        f"The code of this message is {code}.\n\n"
        f"[BEGIN QUESTION {code}]\nWhat is 2+2?\n[END QUESTION {code}]\n\n"
        f"[BEGIN REFERENCE ANSWER {code}]\n4\n[END REFERENCE ANSWER {code}]\n\n"
        f"[BEGIN RESPONSE {code}]\nIt is 4.\n[END RESPONSE {code}]\n\n"
        "Now judge the response. Output one integer from 1 to 10 and nothing else."
    )


def test_a_rubrics_own_instructions_and_reminder_are_sent() -> None:
    rubric = msgspec.structs.replace(BUILTIN["integer"], system="My own instructions.\n", reminder="Digits only.")
    builder = PromptBuilder(rubric, SECRET)
    assert builder.system == f"My own instructions.\n\n{DATA_RULE}"
    assert builder.reask(ONE) == f"{builder.user(ONE)}\n\nDigits only."
    assert BUILDER.reask(ONE).endswith(BUILTIN["integer"].reminder_text())


@given(CONTENTS)
@example(("", "", ""))
def test_every_text_is_sent_unchanged_between_its_marker_lines(content: tuple[str, str, str]) -> None:
    """An empty question or reference is left out; an empty response is not."""
    message = BUILDER.user(JudgeRequest(*content))
    code = code_of(message)
    for label, text in zip(("RESPONSE", "QUESTION", "REFERENCE ANSWER"), content, strict=True):
        if text or label == "RESPONSE":
            assert f"\n[BEGIN {label} {code}]\n{text}\n[END {label} {code}]\n" in message
        else:
            assert f"{label} {code}" not in message


def test_a_template_keeps_marker_lines_on_separate_lines() -> None:
    rubric = Rubric(name="r", system="s", template="Asked: {prompt} {{as it is}} Said: {response} Decide.")
    message = PromptBuilder(rubric, SECRET).user(JudgeRequest("R", "P"))
    code = code_of(message)
    assert message == (
        f"The code of this message is {code}.\n\n"
        f"Asked: \n[BEGIN QUESTION {code}]\nP\n[END QUESTION {code}]\n\n"
        f" {{as it is}} Said: \n[BEGIN RESPONSE {code}]\nR\n[END RESPONSE {code}]\n\n"
        " Decide.\n\nNow judge the response. Output one integer from 1 to 10 and nothing else."
    )
