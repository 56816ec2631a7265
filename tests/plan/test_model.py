"""The steady state in closed form: bounded by the next part, and monotone in every part."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.runtime.bottleneck import (
    LEAST_SHARE,
    Lift,
    in_turns,
    lessened,
    streaming,
    without,
)

PARTS = st.dictionaries(st.sampled_from(["generation", "judge", "training", "sync"]), st.floats(0.01, 1e4), min_size=1)
SHARES = st.dictionaries(st.sampled_from(["generation", "judge", "training"]), st.floats(0, 1), min_size=1)


@given(PARTS)
def test_a_pipeline_is_as_fast_as_its_slowest_part_and_turns_are_slower_than_each(parts):
    name, rate = streaming(parts)
    assert parts[name] == rate == min(parts.values())
    assert in_turns(parts) <= rate * (1 + 1e-9)


@given(PARTS, st.sampled_from(["generation", "judge", "training", "sync"]), st.floats(1, 10))
def test_a_faster_part_never_makes_it_slower(parts, part, factor):
    faster = {**parts, part: parts.get(part, math.inf) * factor}
    faster = {name: rate for name, rate in faster.items() if math.isfinite(rate)}
    assert streaming(faster)[1] >= streaming(parts)[1]
    assert in_turns(faster) >= in_turns(parts) * (1 - 1e-9)


@given(SHARES, st.sampled_from(["generation", "judge", "training"]))
def test_what_a_faster_part_gives_ends_where_the_next_is_busy_all_the_time(busy, part):
    lift = without(busy, part)
    assert lift.factor >= 1
    others = [share for name, share in busy.items() if name != part and share >= LEAST_SHARE]
    if not others:
        assert lift == Lift(math.inf, "")
    else:
        assert lift.factor * max(others) == pytest.approx(max(1.0, max(others)))
        assert lift.then != part


def test_overlapping_ends_with_the_busiest_part():
    assert without({"generation": 0.5, "training": 0.4}) == Lift(2.0, "generation")


@given(st.floats(0, 1), st.floats(0, 1), st.floats(1, 10))
def test_less_of_an_overhead_gives_no_more_than_its_share_and_no_more_than_the_bound(share, by, most):
    lift = lessened(share, by, Lift(most, "training"))
    assert 1 <= lift.factor <= most + 1e-9
    assert lift.factor <= 1 / max(1 - share * by, LEAST_SHARE) + 1e-9
