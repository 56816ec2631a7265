"""A prompt stream is a pure mapping: an epoch has every prompt once, and an ordinal always means the same prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.data.prompts import PromptStream
from freewheel.errors import ConfigError, DataError

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**64 - 1)


@given(sizes, seeds, st.integers(0, 5))
def test_each_epoch_has_every_row_once(size: int, seed: int, epoch: int):
    stream = PromptStream(range(size), seed=seed)
    places = [stream.place(ordinal) for ordinal in range(epoch * size, (epoch + 1) * size)]
    assert {at for at, _ in places} == {epoch}
    assert sorted(index for _, index in places) == list(range(size))


@given(sizes, seeds, st.data())
def test_an_ordinal_means_the_same_prompt_in_any_order_of_calls(size: int, seed: int, data: st.DataObject):
    """So a resumed run, which starts in the middle, continues with the next prompt."""
    forwards = PromptStream(range(size), seed=seed)
    expected = [forwards.place(ordinal) for ordinal in range(7 * size)]
    asked = data.draw(st.lists(st.integers(0, 7 * size - 1), max_size=50))
    resumed = PromptStream(range(size), seed=seed)
    assert [resumed.place(ordinal) for ordinal in asked] == [expected[ordinal] for ordinal in asked]


def test_neighbouring_seeds_do_not_share_epochs():
    """Epoch 1 of seed 7 must not be epoch 0 of seed 8, as it would be with seed + epoch."""
    orders = {
        tuple(PromptStream(range(50), seed=seed).place(epoch * 50 + place)[1] for place in range(50))
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


def test_the_order_of_prompts_never_changes():
    """Otherwise a run that is resumed with another version skips some prompts and repeats others."""
    stream = PromptStream(range(8), seed=42)
    assert [stream.place(ordinal)[1] for ordinal in range(16)] == [3, 6, 0, 4, 7, 1, 2, 5, 0, 1, 6, 5, 3, 7, 4, 2]
    in_order = PromptStream(range(8), seed=42, shuffle=False)
    assert [in_order.place(ordinal)[1] for ordinal in range(16)] == [*range(8)] * 2


def test_a_stream_ends_after_its_epochs_and_without_a_number_of_them_it_is_endless():
    finite, endless = PromptStream("abc", seed=0, epochs=2), PromptStream("abc", seed=0)
    assert sorted(map(finite.prompt, range(3))) == ["a", "b", "c"]
    assert (len(finite), finite.total) == (3, 6)
    assert (len(endless), endless.total) == (3, None)
    assert finite.place(5)[0] == 1 and endless.place(3 * 10**9)[0] == 10**9
    for ordinal in (6, -1):
        with pytest.raises(IndexError, match=f"ordinal {ordinal} of a stream with 6"):
            finite.place(ordinal)


def test_a_stream_needs_prompts_and_a_seed_of_64_bits():
    with pytest.raises(DataError, match="at least one prompt"):
        PromptStream([], seed=0)
    with pytest.raises(ConfigError, match="seed = -1: give a whole number"):
        PromptStream([1], seed=-1)
