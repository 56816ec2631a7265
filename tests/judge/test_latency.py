"""Percentiles within one bin, in constant memory, of what was seen last."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.judge.endpoint import LatencyHistogram


def test_nothing_seen_is_zero() -> None:
    assert LatencyHistogram().quantile(0.5) == 0.0


@given(st.lists(st.floats(1e-4, 500.0), min_size=1, max_size=400), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_right_to_within_one_bin(latencies: list[float], share: float) -> None:
    histogram = LatencyHistogram()
    for latency_s in latencies:
        histogram.add(latency_s)
    exact = sorted(latencies)[max(0, math.ceil(share * len(latencies) - 1e-9) - 1)]
    assert histogram.quantile(share) == pytest.approx(exact, rel=LatencyHistogram.RATIO - 1 + 1e-6)


def test_what_lies_outside_the_bins_is_counted_at_their_ends() -> None:
    histogram = LatencyHistogram()
    for latency_s in (0.0, -1.0, 1e-9, 1e9, 1e-12):
        histogram.add(latency_s)
    assert histogram.quantile(0.1) < 2e-4
    assert histogram.quantile(1.0) > 500


def test_old_latencies_fade() -> None:
    histogram = LatencyHistogram()
    for _ in range(LatencyHistogram.FADE_EVERY):
        histogram.add(10.0)
    for _ in range(4 * LatencyHistogram.FADE_EVERY):
        histogram.add(0.1)
    assert histogram.quantile(0.9) < 0.2
