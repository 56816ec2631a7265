"""Length penalties: each against the formula, worked out for one sample at a time."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.errors import ConfigError
from freewheel.rewards.length import check_penalty, group_index, median_penalty, soft_overlong

USUAL: dict[str, float] = {"penalty_scale": 1.0, "max_penalty": 1.0, "peak_ratio": 0.3, "outer_ratio": 0.5}


def one_penalty(length: int, m: float, *, scale: float, most: float, peak: float, outer: float) -> float:
    """SPEC 1.1, in its own words."""
    if m == 0:
        return 0.0
    if m * (1 - peak) <= length <= m * (1 + peak):
        return 0.0
    if length <= m * (1 - outer) or length >= m * (1 + outer):
        return scale * most
    inner_edge, outer_edge = (m * (1 - peak), m * (1 - outer)) if length < m else (m * (1 + peak), m * (1 + outer))
    return scale * most * (length - inner_edge) / (outer_edge - inner_edge)


def penalties(lengths: list[int], groups: list[int] | None = None, **changes: float) -> list[float]:
    where = np.array(groups if groups is not None else [0] * len(lengths), dtype=np.int64)
    return median_penalty(np.array(lengths, dtype=np.int64), where, **{**USUAL, **changes})[0].tolist()


@given(
    samples=st.lists(st.tuples(st.integers(0, 3000), st.sampled_from("abcdefg")), min_size=1, max_size=60),
    scale=st.floats(0, 10),
    most=st.floats(0, 10),
    peak=st.floats(0, 1),
    width=st.floats(0.01, 2),
)
def test_each_sample_gets_what_the_formula_says_of_it_and_its_groups_median(
    samples: list[tuple[int, str]], scale: float, most: float, peak: float, width: float
) -> None:
    lengths, uids = [length for length, _ in samples], [uid for _, uid in samples]
    penalty, median = median_penalty(
        lengths,
        group_index(uids),
        penalty_scale=scale,
        max_penalty=most,
        peak_ratio=peak,
        outer_ratio=peak + width,
    )
    medians = {uid: statistics.median(length for length, of in samples if of == uid) for uid in uids}
    assert median.tolist() == [medians[uid] for uid in uids]
    expected = [
        one_penalty(length, medians[uid], scale=scale, most=most, peak=peak, outer=peak + width)
        for length, uid in samples
    ]
    assert penalty == pytest.approx(expected, abs=1e-9)
    assert penalty.dtype == median.dtype == np.float64


def test_the_edges_of_the_free_band_and_of_the_slope_are_exact() -> None:
    around_100 = [100, 70, 130, 60, 140, 50, 150, 49, 151, 0, 10_000]
    assert statistics.median(around_100) == 100
    assert penalties(around_100) == pytest.approx([0, 0, 0, 0.5, 0.5, 1, 1, 1, 1, 1, 1])
    assert penalties(around_100)[:3] == [0.0, 0.0, 0.0]


def test_a_group_whose_median_is_zero_is_not_punished() -> None:
    assert penalties([0, 0, 900]) == [0.0, 0.0, 0.0]


def test_an_empty_batch_has_no_penalties() -> None:
    assert penalties([]) == []


@pytest.mark.parametrize("key", USUAL)
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "1", None, True])
def test_a_setting_that_is_no_finite_number_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key} = "):
        check_penalty(**{**USUAL, key: value})


@pytest.mark.parametrize("outer", [0.3, 0.2])
def test_an_outer_ratio_that_is_not_beyond_the_peak_is_refused(outer: float) -> None:
    with pytest.raises(ConfigError, match=rf"^outer_ratio = {outer}: .*peak_ratio \(0\.3\)"):
        median_penalty([1], np.array([0]), **{**USUAL, "outer_ratio": outer})


@given(st.lists(st.one_of(st.text(max_size=2), st.integers(0, 5), st.none(), st.tuples(st.integers(0, 1)))))
def test_groups_are_numbered_by_first_appearance_whatever_the_uids_are(uids: list[Any]) -> None:
    order = list(dict.fromkeys(uids))
    array = np.empty(len(uids), dtype=object)
    array[:] = uids
    expected = [order.index(uid) for uid in uids]
    assert group_index(uids).tolist() == expected
    assert group_index(array).tolist() == expected


def test_groups_are_found_in_plain_number_and_string_arrays() -> None:
    assert group_index(np.array([9, 4, 9, 7])).tolist() == [0, 1, 0, 2]
    assert group_index(np.array(["b", "a", "b"])).tolist() == [0, 1, 0]
    assert group_index([1, "1", 1]).tolist() == [0, 1, 0]


def test_the_soft_overlong_penalty_starts_at_the_buffer_and_is_bounded_beyond_the_maximum() -> None:
    lengths = [0, 80, 85, 100, 101, 10_000]
    penalty = soft_overlong(lengths, max_length=100, buffer_length=20, factor=2.0)
    assert penalty == pytest.approx([0, 0, 0.5, 2, 2, 2])


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("buffer_length", {"buffer_length": 0}),
        ("buffer_length", {"buffer_length": 101}),
        ("max_length", {"max_length": math.nan}),
        ("factor", {"factor": -1.0}),
    ],
)
def test_an_overlong_buffer_that_cannot_work_is_refused(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{key} = "):
        soft_overlong([1], **{"max_length": 100, "buffer_length": 20, "factor": 1.0, **changes})
