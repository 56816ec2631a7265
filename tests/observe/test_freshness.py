"""Freshness, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from freewheel.observe.metrics import age_counts, describe, freshness


def test_ages_of_a_batch_by_hand():
    # lags 0, 1, 3, 4: (0 + 1 + 3 + 4) / 4 = 2; over the threshold of 3 is one of four. Ages: (1 + 2 + 3 + 6) / 4 = 3.
    assert freshness([0, 1, 3, 4], [1.0, 2.0, 3.0, 6.0], staleness_threshold=3) == {
        "avg_sample_age": 2.0,
        "max_sample_age": 4.0,
        "avg_sample_age_s": 3.0,
        "max_sample_age_s": 6.0,
        "stale_samples_ratio": 0.25,
    }


@pytest.mark.parametrize(("threshold", "ratio"), [(0, 0.5), (1, 0.25), (2, 0.0)])
def test_a_lag_at_the_threshold_is_not_stale(threshold, ratio):
    found = freshness(np.array([0, 0, 1, 2]), np.zeros(4), staleness_threshold=threshold)
    assert found["stale_samples_ratio"] == ratio


def test_values_are_plain_floats_under_described_names():
    found = freshness(np.array([1], dtype=np.int64), np.array([0.5], dtype=np.float32), staleness_threshold=1)
    assert all(type(value) is float for value in found.values())
    described = {name for name, metric in describe().items() if metric.component == "freshness"}
    assert {*found, "sample_age_counts"} == described


def test_an_empty_batch_has_no_age():
    assert freshness([], [], staleness_threshold=3) == {}


def test_lags_without_their_ages_are_refused():
    with pytest.raises(ValueError, match="2 lags and 1 ages"):
        freshness([1, 2], [1.0], staleness_threshold=3)


def test_groups_are_counted_by_their_lag():
    assert age_counts([0, 2, 2, 0, 0]) == [3, 0, 2]
    assert age_counts([]) == []
    assert all(type(count) is int for count in age_counts([1]))
