"""The mock judge's words."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.judge.testing import JudgeProfile, expected_score
from freewheel.judge.testing.profile import (
    STYLES,
    UNPARSEABLE_REPLY,
    Ask,
    Content,
    Message,
    Part,
    reply_text,
    stream_events,
    usage,
    worded,
)


@given(st.text(), st.integers(-3, 3), st.integers(0, 10))
def test_a_score_is_on_its_scale_and_always_the_same(text: str, low: int, span: int) -> None:
    score = expected_score(text, low, low + span)
    assert low <= score <= low + span
    assert score == expected_score(text, low, low + span)


def test_scores_use_the_whole_scale() -> None:
    assert {expected_score(f"answer {number}") for number in range(300)} == set(range(1, 11))


def test_a_nonce_is_not_content() -> None:
    plain = Content.of("Rate <> this")
    assert Content.of("Rate <0123456789abcdef> this") == plain
    assert Content.of("Rate <0123456789ABCDEF0123456789abcdef> this").key == plain.key
    assert Content.of("Rate <0123456789abcde> this") != plain


@pytest.mark.parametrize("style", STYLES)
def test_every_style_ends_with_the_score(style: str) -> None:
    text = worded(7, style, 1, 10)
    spoken = text.split("</think>")[-1]
    assert re.findall(r"\d+", spoken)[0] == "7"


def test_mixed_uses_every_style() -> None:
    profile = JudgeProfile(reply_style="mixed")
    contents = [Content.of(f"answer {number}") for number in range(100)]
    shapes = {re.sub(r"\d+", "N", reply_text(profile, content)) for content in contents}
    assert len(shapes) == len(STYLES)


def test_a_dictated_reply_wins_and_the_first_key_decides() -> None:
    profile = JudgeProfile(scores={"good": "9", "bad": "I refuse."})
    assert reply_text(profile, Content.of("a good answer with a bad end")) == "9"
    assert reply_text(profile, Content.of("a bad answer")) == "I refuse."
    assert reply_text(profile, Content.of("another")) == str(expected_score("another"))


def test_an_unparseable_reply_holds_no_number() -> None:
    assert not re.search(r"\d", UNPARSEABLE_REPLY)


def test_the_last_user_message_is_judged_whatever_its_shape() -> None:
    parts = [Part(text="this "), Part(type="image_url"), Part(text="one")]
    ask = Ask([Message("user", "not this"), Message("user", parts), Message("assistant", "nor this")])
    assert ask.user_content == "this one"


def test_usage_counts_prompt_and_reply() -> None:
    ask = Ask([Message("system", "x" * 40), Message("user", "y" * 40)])
    assert usage(ask, "z" * 8) == {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}


def test_streamed_deltas_join_to_the_reply() -> None:
    text = worded(7, "bold", 1, 10)
    events = stream_events(Ask([]), Content.of(""), text, model="m", used={})
    assert events[-1] == b"data: [DONE]\n\n"
    chunks = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(chunks) > 3
