"""Composition: weighted sums, penalties, and what a failed row holds; against a slow reference, group by group."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.errors import ConfigError
from freewheel.rewards.length import group_index
from freewheel.rewards.scoring import compose, fill_failed, group_mean

NUMBERS = st.floats(-100, 100)
ROWS = st.lists(st.tuples(NUMBERS, st.sampled_from("abcd"), st.booleans(), NUMBERS), min_size=1, max_size=40)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_raw_is_the_weighted_sum_and_shaped_is_less_the_penalties() -> None:
    composed = compose(
        {"rule": floats(1, 0), "quality": floats(8, 6)},
        {"quality": 0.5},
        {"length": floats(0.25, 1), "overlong": floats(0, 2)},
    )
    assert composed.raw.tolist() == [5.0, 3.0]
    assert composed.shaped.tolist() == [4.75, 0.0]
    assert {name: part.tolist() for name, part in composed.parts.items()} == {"rule": [1, 0], "quality": [4, 3]}
    assert composed.raw.dtype == composed.shaped.dtype == np.float64


def test_without_penalties_shaped_is_raw() -> None:
    assert compose({"rule": floats(1, 2)}, {}, {}).shaped.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_failed_part_fails_its_row_and_no_other_even_under_weight_zero(weight: float) -> None:
    composed = compose({"rule": floats(1, 1), "quality": floats(math.nan, 3)}, {"quality": weight}, {"l": floats(1, 1)})
    for rewards in (composed.raw, composed.shaped):
        assert np.isnan(rewards).tolist() == [True, False]


def test_a_weight_for_a_part_that_is_not_there_is_refused_and_the_parts_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"^weights\.qualty = 0\.5: .*rule, quality"):
        compose({"rule": floats(1), "quality": floats(1)}, {"qualty": 0.5}, {})


def test_the_callers_arrays_are_left_as_they_were() -> None:
    rule, penalty = floats(1, 2), floats(1, 1)
    compose({"rule": rule}, {"rule": 3.0}, {"length": penalty})
    assert rule.tolist() == [1, 2] and penalty.tolist() == [1, 1]


@given(ROWS)
def test_means_are_those_of_the_valid_rows_of_each_group(rows: list[tuple[float, str, bool, float]]) -> None:
    values, uids, valid, nonsense = (list(column) for column in zip(*rows, strict=True))
    held = np.where(valid, values, nonsense)  # what failed is never looked at
    means, counts = group_mean(held, group_index(uids), np.array(valid))
    for row, uid in enumerate(uids):
        own = [value for value, of, good in zip(values, uids, valid, strict=True) if of == uid and good]
        assert counts[row] == len(own)
        assert means[row] == pytest.approx(fmean(own), abs=1e-9) if own else math.isnan(means[row])


@given(ROWS)
def test_failed_rows_hold_their_groups_mean_or_what_else_they_were_given(
    rows: list[tuple[float, str, bool, float]],
) -> None:
    values, uids, valid, otherwise = (list(column) for column in zip(*rows, strict=True))
    held = np.where(valid, values, math.nan)
    filled = fill_failed(held, group_index(uids), np.array(valid), np.array(otherwise))
    for row, uid in enumerate(uids):
        own = [value for value, of, good in zip(values, uids, valid, strict=True) if of == uid and good]
        if valid[row]:
            assert filled[row] == values[row]
        elif own:
            assert filled[row] == pytest.approx(fmean(own), abs=1e-9)
        else:
            assert filled[row] == otherwise[row]


def test_a_filled_row_leaves_its_groups_mean_where_it_was() -> None:
    groups = np.array([0, 0, 0, 1])
    filled = fill_failed(floats(1, 4, math.nan, 9), groups, np.array([True, True, False, True]), floats(0, 0, 0, 0))
    assert filled.tolist() == [1, 4, 2.5, 9]
    assert filled[:3].mean() == 2.5
