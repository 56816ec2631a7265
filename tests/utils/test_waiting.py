"""Waits and the time they take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freewheel.utils.waiting import Stopwatch


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=20))
def test_a_stopwatch_adds_up_the_time_while_it_ran(said: list[tuple[float, bool]]) -> None:
    now, expected, running = 0.0, 0.0, False
    watch = Stopwatch(lambda: now)
    for passed_s, run in said:
        now += passed_s
        expected += passed_s * running
        watch.run(run)
        running = run
        assert abs(watch.elapsed_s - expected) < 1e-6
