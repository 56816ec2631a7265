"""Samples: text by version, a few per second, and never a reason to lose a group."""

from __future__ import annotations

import itertools
import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.observe import samples
from freewheel.observe.samples import SampleWriter, attach_samples, detach_samples, read_samples, segments


@pytest.fixture(autouse=True)
def detached():
    yield
    detach_samples()


# -- segments ---------------------------------------------------------------------------------------------------------


def by_bytes(tokens) -> str:
    """As tokenizers of bytes decode: half a character is a replacement character."""
    return bytes(tokens).decode(errors="replace")


def by_words(tokens) -> str:
    """As tokenizers of words do: the space is between two, and belongs to neither."""
    return " ".join(f"w{token}" for token in tokens)


BYTES = list("aü€".encode())  # 1, 2 and 3 bytes


@pytest.mark.parametrize(
    ("decode", "tokens", "versions", "expected"),
    [
        (by_words, [1, 2, 3, 4], [5, 5, 6, -1], [(5, "w1 w2"), (6, " w3"), (-1, " w4")]),
        (by_words, [1, 2], [5, 5], [(5, "w1 w2")]),
        (by_bytes, BYTES, [1, 1, 2, 2, 2, 3], [(1, "a"), (2, "ü"), (3, "€")]),
        (by_bytes, BYTES[3:], [1, 2, 3], [(1, ""), (2, ""), (3, "€")]),
    ],
    ids=["words", "one version", "a character belongs to the version that completed it", "nothing completed, no text"],
)
def test_a_text_is_cut_where_the_version_changes(decode, tokens, versions, expected):
    assert segments(decode, tokens, versions) == expected


def cleans_up(tokens) -> str:
    """What comes later changes what was said before, as where a tokenizer tidies spaces."""
    return by_bytes(tokens).replace(" .", ".")


@pytest.mark.parametrize("decode", [by_bytes, by_words, cleans_up])
@given(st.lists(st.tuples(st.sampled_from([*b"ab .", *"ü€😀".encode(), 0xFF]), st.integers(-1, 3)), min_size=1))
def test_the_pieces_joined_are_the_text_and_versions_keep_their_order(decode, given_tokens):
    tokens, versions = zip(*given_tokens, strict=True)
    found = segments(decode, tokens, versions)
    assert "".join(text for _, text in found) == decode(tokens)
    kept = [version for version, _ in found]
    assert all(one != other for one, other in itertools.pairwise(kept))
    assert kept == [version for place, version in enumerate(versions) if place == 0 or versions[place - 1] != version]


# -- keeping ----------------------------------------------------------------------------------------------------------


def test_a_limited_number_per_second_is_kept_and_the_others_are_not_built(tmp_path, clock):
    kept = SampleWriter(tmp_path, "rollouter-0", per_s=2.0, most_bytes=10**9, clock=clock)
    made = []

    def sample(number):
        made.append(number)
        return {"number": number, "value": math.nan}

    for number in range(40):
        kept.offer(lambda number=number: sample(number))
        clock.now += 0.125
    kept.lines.close()
    assert made == list(range(0, 40, 4))
    assert list(read_samples(tmp_path)) == [{"number": number, "value": None} for number in made]


def test_a_sample_that_cannot_be_built_is_logged_once_and_skipped(tmp_path, caplog, clock):
    caplog.set_level(logging.INFO, logger="freewheel")
    kept = SampleWriter(tmp_path, "rollouter-0", per_s=1.0, most_bytes=10**9, clock=clock)
    for _ in range(3):
        kept.offer(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
        clock.now += 1.0
    kept.offer(lambda: {"ordinal": 1})
    kept.lines.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["Samples are not recorded: ZeroDivisionError: division by zero. Training continues"]
    assert list(read_samples(tmp_path)) == [{"ordinal": 1}]


def test_any_row_can_be_kept_and_none_are_kept_unless_requested(tmp_path):
    for settings in ({"per_s": 0.0, "most_bytes": 1000}, {"per_s": 1.0, "most_bytes": 0}):
        samples.offer(lambda: {"ordinal": 1})
        attach_samples(tmp_path, "rollouter-0", **settings)
        samples.offer(lambda: {"ordinal": 1})
        detach_samples()
        assert not list(tmp_path.iterdir())
    attach_samples(tmp_path, "rollouter-0", per_s=1.0, most_bytes=10**9)
    samples.offer(lambda: {"row": {"thing": object, "text": "\ud800", "odd": {1: {2}}}})
    detach_samples()
    (sample,) = read_samples(tmp_path)
    assert sample["row"]["odd"] == {"1": [2]}
