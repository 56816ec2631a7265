"""The adaptive limit: invariants that hold from every reachable state, and bounds on the profiles of the bench."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import fmean
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.judge.limiter import CUT, MOST, START, Limiter, LimiterMemory, Ticket

from .virtual import PROFILES, Outcome, lognormal_works, run_batch

SEEDS = range(5)
EVENTS = ("send", "succeed", "throttle", "overload", "break", "release")

events = st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0.0, 3.0)), max_size=200)
memories = st.fixed_dictionaries(
    {},
    optional={
        "window": st.floats(-1, 5000),
        "bound": st.floats(-1, 5000),
        "rtt_s": st.floats(-1, 1e9),
        "levels": st.dictionaries(
            st.integers(-1, 60).map(str), st.tuples(st.floats(-1, 1e12), st.floats(-1, 1e4)), max_size=8
        ),
    },
)


def play(limiter: Limiter, script: list[tuple[str, float]]) -> float:
    """Plays events `(what, seconds since the last)`; sends only where there is room. Returns the time at the end."""
    now = 0.0
    out: list[Ticket] = []
    for what, after_s in script:
        now += after_s
        if what == "send":
            while limiter.has_room():
                out.append(limiter.sent(now))
        elif out:
            ticket = out.pop(0)
            if what == "succeed":
                limiter.succeeded(ticket, now)
            elif what == "throttle":
                limiter.throttled(ticket, now)
            elif what == "release":
                limiter.released(ticket, now)
            else:
                limiter.faulted(ticket, now, overload=what == "overload")
        assert limiter.limit >= 1
        assert limiter.in_flight == len(out)
        assert limiter.quiet_until < now + 1e4
    for ticket in out:
        limiter.released(ticket, now)
    assert limiter.in_flight == 0
    return now


def serve(limiter: Limiter, now: float, replies: int, latency_s: float = 1.0) -> float:
    """A judge that answers everything after `latency_s`, one after the other, kept as full as the limiter allows."""
    out: deque[Ticket] = deque()
    for _ in range(replies):
        now = max(now, limiter.quiet_until) if not out else now
        while limiter.has_room() and limiter.quiet_until <= now:
            out.append(limiter.sent(now))
        ticket = out.popleft()
        now = max(now, ticket[0] + latency_s)
        limiter.succeeded(ticket, now)
    for ticket in out:
        limiter.released(ticket, now)
    return now


def fill(limiter: Limiter, now: float) -> list[Ticket]:
    out = []
    while limiter.has_room():
        out.append(limiter.sent(now))
    return out


@given(events, st.none() | st.integers(1, 100), st.booleans())
def test_the_limit_stays_in_its_bounds_and_nothing_in_flight_is_forgotten(
    script: list[tuple[str, float]], bound: int | None, is_fixed: bool
) -> None:
    limiter = Limiter(fixed=bound) if is_fixed else Limiter(ceiling=bound)
    now = play(limiter, script)
    serve(limiter, now, 200)
    if bound is not None:
        assert limiter.limit == bound if is_fixed else limiter.limit <= bound


@given(events)
def test_from_every_state_successes_let_the_limit_grow_again(script: list[tuple[str, float]]) -> None:
    limiter = Limiter()
    now = play(limiter, script)
    level = min(limiter.limit, START)
    for _ in range(100):
        now = serve(limiter, now, START)
        if limiter.limit > level:
            break
    assert limiter.limit > level


@given(memories, events)
def test_a_damaged_memory_is_refused_or_harmless(stored: dict[str, Any], script: list[tuple[str, float]]) -> None:
    try:
        memory = msgspec.json.decode(msgspec.json.encode(stored), type=LimiterMemory)
    except msgspec.ValidationError:
        return
    limiter = Limiter(memory=memory)
    assert 1 <= limiter.limit <= MOST
    now = play(limiter, script)
    serve(limiter, now, 100)


@given(events)
def test_a_limiter_starts_from_the_encoded_memory_of_another(script: list[tuple[str, float]]) -> None:
    limiter = Limiter()
    serve(limiter, play(limiter, script), 100)
    memory = msgspec.json.decode(msgspec.json.encode(limiter.memory()), type=LimiterMemory)
    assert memory == limiter.memory() and Limiter(memory=memory).limit >= limiter.limit


@given(st.integers(1, 31))
def test_after_a_burst_of_refusals_the_limit_is_at_most_what_was_accepted(accepted: int) -> None:
    limiter = Limiter()
    out = fill(limiter, 0.0)
    for ticket in out[accepted:]:
        limiter.throttled(ticket, 0.02)
    assert limiter.in_flight == accepted
    assert limiter.limit <= accepted
    assert not limiter.has_room()


def test_a_burst_of_refusals_cuts_the_limit_once_and_by_little() -> None:
    limiter = Limiter()
    now = serve(limiter, 0.0, START // 2)
    out = fill(limiter, now)
    level = limiter.limit
    limiter.throttled(out.pop(), now + 0.02)
    assert limiter.limit == int((level - 1) * CUT)
    after_cut = limiter.limit
    # Two more of the same burst: what is accepted is still above the limit, so they change nothing.
    limiter.throttled(out.pop(), now + 0.02)
    limiter.throttled(out.pop(), now + 0.03)
    assert limiter.limit == min(after_cut, limiter.in_flight)


@pytest.mark.parametrize(("faults", "rounds", "lowers"), [(1, 20, False), (10, 3, True)])
def test_only_sustained_overload_errors_lower_the_limit(faults: int, rounds: int, lowers: bool) -> None:
    limiter = Limiter(memory=LimiterMemory(window=40.0, bound=40.0, rtt_s=1.0))
    now = 0.0
    for number in range(rounds):
        out = fill(limiter, now)
        now += 1.0
        for index, ticket in enumerate(out):
            if index % 4 == 0 and index < 4 * faults and (lowers or number % 2):
                limiter.faulted(ticket, now, overload=True)
            else:
                limiter.succeeded(ticket, now)
    assert (limiter.limit < 40) is lowers


def test_a_judge_that_refuses_everything_is_asked_seldom_and_found_again_when_it_is_back() -> None:
    limiter = Limiter(memory=LimiterMemory(window=60.0, bound=60.0, rtt_s=1.0))
    now = 0.0
    tries = 0
    while now < 10.0:
        now = max(now, limiter.quiet_until)
        ticket = limiter.sent(now)
        tries += 1
        now += 0.01
        limiter.faulted(ticket, now, overload=True)
    assert tries < 60
    assert limiter.limit <= 2
    serve(limiter, now, 120)
    assert limiter.limit > 50


def batches(name: str, *, warm: bool) -> list[Outcome]:
    outcomes = []
    for seed in SEEDS:
        memory = None
        if warm:
            first = Limiter()
            run_batch(PROFILES[name], first, lognormal_works(1024, seed=seed + 1000), seed=seed + 1000)
            memory = first.memory()
        outcomes.append(run_batch(PROFILES[name], Limiter(memory=memory), lognormal_works(1024, seed=seed), seed=seed))
    return outcomes


def best_fixed_s(name: str, level: int) -> float:
    """Mean time at the level that `benchmarks/limiter_sim.py` finds to be the best fixed one."""
    return fmean(
        run_batch(PROFILES[name], Limiter(fixed=level), lognormal_works(1024, seed=seed), seed=seed).elapsed_s
        for seed in SEEDS
    )


@pytest.mark.parametrize(
    ("name", "level", "cold", "warm", "refused_share"),
    [
        ("A", 64, 0.05, 0.02, 0.02),
        ("B", 80, 0.05, 0.02, 0.02),
        ("C", 80, 0.06, 0.02, 0.02),
        ("D", 50, 0.08, 0.08, 0.20),
        ("DL", 76, 0.03, 0.03, 0.10),
        ("F", 64, 0.05, 0.03, 0.0),
        ("G", 60, 0.15, 0.08, 0.0),
        ("H", 400, 0.40, 0.10, 0.0),
        ("P", 64, 0.05, 0.02, 0.02),
        ("M", 80, 0.08, 0.08, 0.12),
        ("O", 60, 0.09, 0.08, 0.03),
        ("N", 64, 0.05, 0.02, 0.02),
    ],
)
def test_a_batch_takes_little_longer_than_at_the_best_fixed_concurrency(
    name: str, level: int, cold: float, warm: float, refused_share: float
) -> None:
    best_s = best_fixed_s(name, level)
    for outcomes, over in ((batches(name, warm=False), cold), (batches(name, warm=True), warm)):
        assert fmean(outcome.elapsed_s for outcome in outcomes) <= best_s * (1.0 + over)
        assert fmean(outcome.refused for outcome in outcomes) <= refused_share * 1024


def test_a_judge_that_is_down_is_probed_and_not_flooded() -> None:
    works = lognormal_works(1024, seed=0)
    assert run_batch(PROFILES["O"], Limiter(), works, seed=0).faults < 120  # some 80 were in flight when it began


# The pacer knows seconds: judges count requests in seconds and minutes, not in round trips.
UNPACED = sorted(name for name, profile in PROFILES.items() if profile.scale == 1.0 and not profile.labelled)


@settings(max_examples=10)
@given(st.sampled_from(UNPACED), st.sampled_from((1 / 64, 1 / 8, 8.0)), st.integers(0, 1000))  # exact in binary
def test_scaling_all_times_of_a_judge_scales_the_time_of_the_batch(name: str, scale: float, seed: int) -> None:
    works = lognormal_works(256, seed=seed)
    plain = run_batch(PROFILES[name], Limiter(), works, seed=seed)
    scaled = run_batch(replace(PROFILES[name], scale=scale), Limiter(), works, seed=seed)
    assert scaled.elapsed_s / scale == pytest.approx(plain.elapsed_s, rel=1e-6)


def test_slow_failures_in_a_row_do_not_cause_pauses_as_long_as_themselves() -> None:
    limiter = Limiter()
    now = 0.0
    for _ in range(100):
        ticket = limiter.sent(now)
        now += 0.2
        limiter.succeeded(ticket, now)
    for _ in range(60):
        while limiter.has_room():
            limiter.sent(now)
        limiter.faulted((now - 30.0, limiter.in_flight), now, overload=False)
        assert limiter.quiet_until <= now + 0.2
