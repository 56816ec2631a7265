"""Where lengths and latencies come from."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.plan.scene import Constant, Lognormal, Measured, stream, whole_stream

DRAWS = [
    Constant(3.0),
    Lognormal(100, 0.6),
    Lognormal(100, 1.0, 150),
    Lognormal(20, 0.0),
    Measured((1.0, 2.0, 9.0)),
]


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_what_is_drawn_has_the_mean_that_it_says(draw):
    values = list(islice(stream(draw, np.random.default_rng(1)), 40_000))
    assert np.mean(values) == pytest.approx(draw.mean, rel=0.02)


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_the_same_seed_gives_the_same_numbers(draw):
    first, second = (list(islice(stream(draw, np.random.default_rng(7)), 100)) for _ in range(2))
    assert first == second


def test_only_what_was_measured_is_drawn():
    values = set(islice(stream(Measured((1.0, 2.0, 9.0)), np.random.default_rng(1)), 1000))
    assert values == {1.0, 2.0, 9.0}
    with pytest.raises(ValueError, match="at least one"):
        Measured(())


@given(st.floats(0, 5))
def test_tokens_are_whole_and_at_least_one(value):
    assert next(whole_stream(Constant(value), np.random.default_rng(0))) == max(1, round(value))


@pytest.mark.parametrize("mean", [1.0, 60.0, 100.0, 149.0, 150.0])
def test_a_mean_is_kept_whatever_is_cut_off(mean):
    draw = Lognormal.of_mean(mean, 0.6, 150.0)
    assert draw.mean == pytest.approx(mean) and draw.most == 150.0
    assert np.mean(list(islice(stream(draw, np.random.default_rng(1)), 40_000))) == pytest.approx(mean, rel=0.02)


def test_a_length_is_cut_off_where_it_is_longest():
    assert max(islice(stream(Lognormal(100, 1.0, 150), np.random.default_rng(1)), 1000)) == 150
