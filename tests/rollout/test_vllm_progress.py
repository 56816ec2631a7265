"""Who waits too long for a token, told from counts that are looked at now and then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freewheel.rollout.vllm.tracking import Stopwatch, Watch


def test_a_sample_without_a_new_token_is_late_and_one_that_gets_some_is_not() -> None:
    watch = Watch(4)
    for name in ("stuck", "goes on"):
        watch.begin(name, 10.0, 0.0)
    assert watch.look(5.0, {"stuck": 1, "goes on": 1}) == {}
    assert watch.look(10.0, {"stuck": 1, "goes on": 5}) == {}
    assert watch.look(16.0, {"stuck": 1, "goes on": 9}) == {"stuck": 11.0}
    watch.end("stuck", 16.0)
    assert watch.look(17.0, {"goes on": 9}) == {}


def test_who_has_no_slot_waits_without_end_and_begins_to_count_when_one_is_free() -> None:
    watch = Watch(1)
    watch.begin("first", 10.0, 0.0)
    watch.begin("second", 10.0, 0.0)
    for now in range(5, 60, 5):
        assert watch.look(float(now), {"first": now}) == {}
    watch.end("first", 55.0)
    assert watch.look(60.0, {}) == {}
    assert watch.look(66.0, {}) == {"second": 11.0}


def test_who_has_a_slot_and_no_token_yet_waits_while_others_get_some() -> None:
    """It may wait for memory; a core that hangs gives nobody any."""
    watch = Watch(4)
    watch.begin("writes", 10.0, 0.0)
    watch.begin("is read", 10.0, 0.0)
    assert watch.look(8.0, {"writes": 3}) == {}
    assert watch.look(16.0, {"writes": 6}) == {}
    assert watch.look(27.0, {"writes": 6}) == {"writes": 11.0, "is read": 11.0}


def test_a_core_that_never_makes_a_token_is_noticed() -> None:
    watch = Watch(2)
    for name in ("a", "b", "c"):
        watch.begin(name, 4.0, 1.0)
    assert watch.look_every_s == 1.0
    assert set(watch.look(6.0, {})) == {"a", "b"}


def test_without_samples_there_is_nothing_to_look_at() -> None:
    watch = Watch(2)
    assert watch.look_every_s is None
    watch.begin("a", 8.0, 0.0)
    watch.begin("b", 2.0, 0.0)
    assert watch.look_every_s == 0.5
    watch.end("a", 1.0)
    watch.end("b", 1.0)
    watch.end("b", 1.0)
    assert watch.look_every_s is None


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=20))
def test_a_stopwatch_adds_up_the_time_in_which_it_ran(said: list[tuple[float, bool]]) -> None:
    now, expected, running = 0.0, 0.0, False
    watch = Stopwatch(lambda: now)
    for passed_s, run in said:
        now += passed_s
        expected += passed_s * running
        watch.run(run)
        running = run
        assert abs(watch.elapsed_s - expected) < 1e-6
