"""The hash by which equal requests are known: all that decides a verdict is in it, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.judge import Endpoint, JudgeConfig, JudgeRequest, Rubric, load_rubric
from freewheel.judge.request import RequestHasher

texts = st.text(max_size=12)


def digest(request: JudgeRequest, **settings: Any) -> bytes:
    return RequestHasher(JudgeConfig(**{"endpoint": "http://h", "model": "m", **settings}))(request)


ONE = JudgeRequest("response", "prompt", "reference")


def test_it_is_the_same_in_every_process_and_release() -> None:
    """A changed recipe must change HASH_VERSION, and this figure with it; a rubric's wording is not part of it."""
    rubric = Rubric(name="r", system="s", template="{prompt}{reference}{response}", closing="c", reminder="r")
    assert len(digest(ONE)) == 32
    assert digest(ONE, rubric=rubric) == digest(ONE, rubric=rubric)


@given(texts, texts, texts, texts, texts, texts)
def test_two_requests_are_equal_exactly_if_their_contents_are(a: str, b: str, c: str, d: str, e: str, f: str) -> None:
    hashed = RequestHasher(JudgeConfig(endpoint="http://h", model="m"))
    assert (hashed(JudgeRequest(a, b, c)) == hashed(JudgeRequest(d, e, f))) == ((a, b, c) == (d, e, f))


def test_text_moved_from_one_field_to_the_next_is_another_request() -> None:
    assert len({digest(JudgeRequest(*parts)) for parts in [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]}) == 4


def test_the_callers_id_takes_no_part() -> None:
    assert digest(JudgeRequest("r", id="1")) == digest(JudgeRequest("r", id="2"))


@pytest.mark.parametrize(
    "settings",
    [
        {"endpoint": "http://other"},
        {"model": "m2"},
        {"endpoint": Endpoint(url="http://h", model="m2")},
        {"rubric": "yes_no"},
        {"temperature": 0.5},
        {"temperature": None},
        {"max_tokens": 5},
        {"sampling": {"top_p": 0.5}},
    ],
)
def test_what_decides_a_reply_is_in_it(settings: dict[str, Any]) -> None:
    assert digest(ONE, **settings) != digest(ONE)


@pytest.mark.parametrize(
    "settings",
    [
        {"concurrency": 3},
        {"api_key": "k"},
        {"placement": "thread"},
        {"max_attempts": 2},
        {"cache_ttl_s": 5.0},
        {"endpoint": [Endpoint(url="http://h"), Endpoint(url="http://other")]},
        {"endpoint": "http://h/v1/chat/completions"},
    ],
)
def test_what_does_not_decide_a_reply_is_not(settings: dict[str, Any]) -> None:
    assert digest(ONE, **settings) == digest(ONE)


def test_a_better_parser_asks_the_same_question() -> None:
    plain = load_rubric("integer")
    strict = Rubric(**{**{f: getattr(plain, f) for f in plain.__struct_fields__}, "place": "last"})
    assert digest(ONE, rubric=plain) == digest(ONE, rubric=strict)


def test_the_order_of_sampling_fields_does_not_matter() -> None:
    assert digest(ONE, sampling={"a": 1, "b": 2}) == digest(ONE, sampling={"b": 2, "a": 1})


def test_a_lone_surrogate_is_replaced_and_nothing_else() -> None:
    odd = JudgeRequest("a\ud800b\udfff\U0001f600\x00", "\udc80", "", "\ud800", "\ud800")
    assert odd.encodable() == JudgeRequest("a\ufffdb\ufffd\U0001f600\x00", "\ufffd", "", "\ufffd", "\ufffd")
    digest(odd.encodable())
