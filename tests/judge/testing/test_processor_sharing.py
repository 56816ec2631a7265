"""Processor sharing, compared with its definition in virtual time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.judge.testing.server import ProcessorSharing

SERVICE = st.floats(min_value=0.01, max_value=10.0)
ARRIVALS = st.lists(st.tuples(st.floats(min_value=0.0, max_value=20.0), SERVICE), min_size=1, max_size=30)
KNEES = st.one_of(st.none(), st.floats(min_value=0.5, max_value=8.0))


def run_to_the_end(sharing: ProcessorSharing, arrivals: list[tuple[float, float]]) -> dict[int, float]:
    """Ends by ticket, for a caller that looks exactly at the events."""
    ends: dict[int, float] = {}
    waiting = sorted(arrivals)
    while waiting or len(sharing):
        at = sharing.next_finish()
        if waiting and (at is None or waiting[0][0] <= at):
            now, service_s = waiting.pop(0)
            sharing.join(now, service_s)
        else:
            assert at is not None
            now = at
        ends |= dict.fromkeys(sharing.finished(now), now)
    return ends


def by_definition(knee: float | None, arrivals: list[tuple[float, float]]) -> dict[int, float]:
    """The ends by following each request's remaining work from event to event."""
    waiting = sorted(arrivals)
    left: dict[int, float] = {}
    ends: dict[int, float] = {}
    now, ticket = 0.0, 0
    while waiting or left:
        rate = 1.0 if knee is None or not left else min(1.0, knee / len(left))
        first = min(left, key=lambda key: left[key]) if left else None
        end = now + left[first] / rate if first is not None else float("inf")
        until = min(end, waiting[0][0]) if waiting else end
        left = {key: work - (until - now) * rate for key, work in left.items()}
        now = until
        if waiting and waiting[0][0] <= end:
            left[ticket] = waiting.pop(0)[1]
            ticket += 1
        else:
            assert first is not None
            del left[first]
            ends[first] = now
    return ends


@given(knee=KNEES, arrivals=ARRIVALS)
def test_every_request_ends_as_the_definition_says(knee: float | None, arrivals: list[tuple[float, float]]) -> None:
    assert run_to_the_end(ProcessorSharing(knee), arrivals) == pytest.approx(by_definition(knee, arrivals), abs=1e-6)


@pytest.mark.parametrize(("in_flight", "lasts_s"), [(1, 2.0), (60, 2.0), (61, 2.0 * 61 / 60), (240, 8.0)])
def test_throughput_saturates_at_the_knee(in_flight: int, lasts_s: float) -> None:
    ends = run_to_the_end(ProcessorSharing(60), [(0.0, 2.0)] * in_flight)
    assert len(ends) == in_flight
    assert list(ends.values()) == pytest.approx([lasts_s] * in_flight)


def test_without_a_knee_requests_do_not_slow_each_other() -> None:
    ends = run_to_the_end(ProcessorSharing(None), [(0.0, 1.0)] * 1000)
    assert set(ends.values()) == {1.0}


def test_a_request_that_leaves_gives_its_share_to_the_others_and_never_ends() -> None:
    sharing = ProcessorSharing(1)
    stays, leaves = sharing.join(0.0, 1.0), sharing.join(0.0, 1.0)
    sharing.leave(1.0, leaves)
    assert sharing.next_finish() == pytest.approx(1.5)
    assert sharing.finished(1.5) == [stays]
    assert sharing.next_finish() is None


@given(knee=KNEES, arrivals=ARRIVALS)
def test_a_caller_that_looks_late_sees_the_same_order(knee: float | None, arrivals: list[tuple[float, float]]) -> None:
    prompt = run_to_the_end(ProcessorSharing(knee), arrivals)
    late = ProcessorSharing(knee)
    for now, service_s in sorted(arrivals):
        late.join(now, service_s)
    seen = late.finished(1e6)
    assert sorted(seen) == sorted(prompt)
    ends = [prompt[ticket] for ticket in seen]
    assert ends == pytest.approx(sorted(ends), abs=1e-6)


def test_an_end_that_was_not_fetched_is_due_at_once() -> None:
    sharing = ProcessorSharing(None)
    first = sharing.join(0.0, 1.0)
    sharing.join(2.0, 1.0)
    assert sharing.next_finish() == 2.0
    assert sharing.finished(2.0) == [first]
    assert sharing.next_finish() == 3.0
