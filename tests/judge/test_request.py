"""The hash that identifies equal requests: all that decides a verdict is in it, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freewheel.judge import Endpoint, JudgeConfig, JudgeRequest, Rubric, load_rubric
from freewheel.judge.request import RequestHasher

CONTENTS = st.tuples(st.text(max_size=12), st.text(max_size=12), st.text(max_size=12))
ONE = JudgeRequest("response", "prompt", "reference")
OWN_WORDS = Rubric(name="r", system="s", template="{prompt}{reference}{response}", closing="c", reminder="r")


def digest(request: JudgeRequest = ONE, **settings: Any) -> bytes:
    return RequestHasher(JudgeConfig(**{"endpoint": "http://h", "model": "m", **settings}))(request)


def test_it_is_the_same_in_every_process_and_release() -> None:
    """If this changes, cached replies are lost: change HASH_VERSION then, and say so in the changelog."""
    assert digest(rubric=OWN_WORDS).hex() == "f41861047a77baccdc81a724f7c946868f3294df42f6333aaa77fd2b9b775a61"


@given(CONTENTS, CONTENTS)
@example(("ab", "c", ""), ("a", "bc", ""))
@example(("", "abc", ""), ("", "", "abc"))
def test_two_requests_are_equal_exactly_if_their_contents_are(
    first: tuple[str, str, str], second: tuple[str, str, str]
) -> None:
    assert (digest(JudgeRequest(*first, id="1")) == digest(JudgeRequest(*second, id="2"))) == (first == second)


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
def test_a_setting_that_decides_a_reply_is_in_it(settings: dict[str, Any]) -> None:
    assert digest(**settings) != digest()


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
        {"rubric": msgspec.structs.replace(load_rubric("integer"), place="last")},
    ],
)
def test_a_setting_that_does_not_decide_a_reply_is_not_in_it(settings: dict[str, Any]) -> None:
    assert digest(**settings) == digest()


def test_the_order_of_sampling_fields_does_not_matter() -> None:
    assert digest(sampling={"a": 1, "b": 2}) == digest(sampling={"b": 2, "a": 1})


def test_a_lone_surrogate_is_replaced_and_nothing_else() -> None:
    odd = JudgeRequest("a\ud800b\udfff\U0001f600\x00", "\udc80", "", "\ud800", "\ud800")
    assert odd.encodable() == JudgeRequest("a\ufffdb\ufffd\U0001f600\x00", "\ufffd", "", "\ufffd", "\ufffd")
    digest(odd.encodable())
