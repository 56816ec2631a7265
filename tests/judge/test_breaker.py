"""The breaker: opens after failures in a row, probes one at a time, closes at the first sign of life."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freewheel.judge.endpoint import Breaker
from freewheel.judge.stats import State


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(Breaker.CONSECUTIVE):
        assert breaker.state is State.CLOSED
        breaker.failed(at, known_at=at, probe=breaker.sent())
    assert breaker.state is State.OPEN
    return breaker


def test_it_opens_after_failures_in_a_row_and_not_before() -> None:
    opened()


def test_one_answer_between_failures_keeps_it_closed() -> None:
    breaker = Breaker()
    for _ in range(10):
        for _ in range(Breaker.CONSECUTIVE - 1):
            breaker.failed(0.0, known_at=0.0, probe=False)
        breaker.answered(0.0)
    assert breaker.state is State.CLOSED


def test_open_it_lets_nothing_through_until_its_pause_is_over_and_then_one() -> None:
    breaker = opened(at=100.0)
    assert breaker.ready_at(100.0) == 100.0 + Breaker.FIRST_PAUSE_S
    now = 100.0 + Breaker.FIRST_PAUSE_S
    assert breaker.ready_at(now) <= now
    assert breaker.sent() is True
    assert breaker.ready_at(now) == float("inf")


def test_a_failed_probe_makes_the_pause_grow_up_to_its_bound() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(12):
        at = breaker.ready_at(now)
        pauses.append(at - now)
        now = at
        assert breaker.ready_at(now) <= now
        breaker.failed(now, known_at=now, probe=breaker.sent())
    assert pauses[0] == Breaker.FIRST_PAUSE_S
    assert pauses == sorted(pauses) and max(pauses) <= Breaker.LONGEST_PAUSE_S
    assert pauses[-1] == Breaker.LONGEST_PAUSE_S


def test_an_answered_probe_closes_it_and_forgets_the_pauses() -> None:
    breaker = opened()
    for now in (10.0, 20.0):
        breaker.ready_at(now)
        breaker.failed(now, known_at=now, probe=breaker.sent())
    breaker.ready_at(30.0)
    assert breaker.sent()
    breaker.answered(30.0)
    assert breaker.state is State.CLOSED and breaker.ready_at(30.0) <= 30.0 and not breaker.sent()
    for _ in range(Breaker.CONSECUTIVE):
        breaker.failed(40.0, known_at=40.0, probe=False)
    assert breaker.ready_at(40.0) == 40.0 + Breaker.FIRST_PAUSE_S


def test_a_call_sent_before_it_opened_does_not_move_it() -> None:
    breaker = opened(at=0.0)
    breaker.failed(0.1, known_at=0.1, probe=False)
    assert breaker.ready_at(0.1) == Breaker.FIRST_PAUSE_S
    breaker.ready_at(1.0)
    assert breaker.sent()
    breaker.failed(1.1, known_at=1.1, probe=False)
    assert breaker.state is State.PROBING


def test_hangs_from_before_a_sign_of_life_do_not_open_it() -> None:
    breaker = Breaker()
    breaker.answered(10.0)
    for _ in range(3 * Breaker.CONSECUTIVE):
        breaker.failed(12.0, known_at=9.0, probe=False)
    assert breaker.state is State.CLOSED


def test_a_cancelled_probe_makes_room_for_another() -> None:
    breaker = opened()
    breaker.ready_at(1.0)
    assert breaker.sent()
    breaker.dropped(probe=True)
    assert breaker.ready_at(1.0) <= 1.0 and breaker.sent()


def test_after_a_halt_one_request_finds_out() -> None:
    breaker = Breaker()
    breaker.probe_next()
    assert breaker.ready_at(0.0) <= 0.0 and breaker.sent() and breaker.ready_at(0.0) == float("inf")


@given(st.lists(st.sampled_from(["wait", "send", "fail", "answer", "drop"]), max_size=200))
def test_never_more_than_one_probe_is_out_and_it_always_comes_back(events: list[str]) -> None:
    breaker, now = Breaker(), 0.0
    out: list[bool] = []
    for event in events:
        if event == "wait":
            now += 1.0
        elif event == "send" and breaker.ready_at(now) <= now:
            out.append(breaker.sent())
            assert sum(out) <= 1 or breaker.state is State.CLOSED
        elif out and event in ("fail", "answer", "drop"):
            probe = out.pop(0)
            if event == "fail":
                breaker.failed(now, known_at=now, probe=probe)
            elif event == "answer":
                breaker.answered(now)
            else:
                breaker.dropped(probe=probe)
    for probe in out:
        breaker.failed(now, known_at=now, probe=probe)
    now += Breaker.LONGEST_PAUSE_S
    assert breaker.ready_at(now) <= now, "with nothing out and the pause over, something may be sent"
