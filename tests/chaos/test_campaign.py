"""The audit of a disturbed run finds violations, and none in a correct one. The plan of strikes covers every role."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .account import Kill, Result, Trained, as_json, audit_witness, last_reward, path, table
from .plan import FIRST_STEP, ROLES, SOAK_STEPS, campaign, deal


def step(number: int, *ordinals: int, lag: int = 0, reward: float | None = 0.5) -> Trained:
    return Trained(step=number, ordinals=ordinals, lag=lag, reward=reward)


def test_a_step_that_is_trained_again_undoes_those_after_it() -> None:
    lines = [step(1, 0, 1), step(2, 2, 3), step(3, 4, 5), step(2, 2, 4), step(3, 3, 5)]
    assert [one.ordinals for one in path(lines).values()] == [(0, 1), (2, 4), (3, 5)]
    assert list(path(lines[:4])) == [1, 2]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([step(1, 0, 2), step(2, 1, 3)], (0, 0, 0, 0)),
        ([step(1, 0, 1), step(2, 2, 3), step(1, 0, 1), step(2, 2, 3)], (0, 0, 0, 0)),
        ([step(1, 0, 2)], (2, 0, 0, 0)),
        ([step(1, 0, 2), step(2, 1, 2)], (1, 1, 0, 0)),
        ([step(1, 0, 2), step(2, 1, 3, lag=6)], (0, 0, 1, 0)),
        ([step(1, 0, 1, lag=6), step(1, 0, 1), step(2, 2, 3)], (0, 0, 1, 0)),
        ([step(1, 0, 1), step(2, 2, 4)], (1, 0, 0, 1)),
        ([step(1, 0, 1), step(3, 2, 3)], (0, 0, 0, 1)),
    ],
    ids=["clean", "trained again", "lost", "repeated", "stale", "stale and undone", "beyond the end", "a gap"],
)
def test_lost_repeated_and_stale_prompts_and_gaps_are_found(lines: list[Trained], found: tuple[int, ...]) -> None:
    seen = audit_witness(lines, total=4, max_lag=5)
    assert (seen.lost, seen.repeated, seen.stale_trained, len(seen.problems)) == found
    dropping = audit_witness(lines, total=None, max_lag=5)
    assert (dropping.lost, dropping.repeated) == (0, found[1]), (
        "prompts may be dropped, and only repeats are violations"
    )


def test_the_reward_at_the_end_is_that_of_the_last_steps_of_the_path() -> None:
    lines = [step(number, number, reward=number / 10) for number in range(1, 9)]
    assert last_reward(lines) == pytest.approx(0.6)
    assert last_reward([*lines[:2], step(2, 2, reward=None)]) == pytest.approx(0.1)
    assert last_reward([]) is None


def kill(role: str, recovery_s: float | None, how: str = "SIGKILL") -> Kill:
    return Kill(role=role, how=how, during="", step=1, at_s=10.0, recovery_s=recovery_s)


def result(**given: Any) -> Result:
    usual: dict[str, Any] = {"scenario": "roles", "seed": 0, "kills": [], "lost": 0, "repeated": 0, "stale_trained": 0}
    return Result(**{**usual, **given})


@pytest.mark.parametrize(
    "bad", [{"lost": 1}, {"repeated": 1}, {"stale_trained": 1}, {"violations": ("x",)}, {"problems": ("x",)}]
)
def test_nothing_that_is_wrong_counts_as_fine(bad: dict[str, Any]) -> None:
    assert result().fine and result(reward=0.8).compared(0.85).fine and result(reward=0.5).compared(None).fine
    assert not result(**bad).fine and not result(reward=0.5).compared(0.85).fine
    assert not as_json([result(), result(**bad)])["fine"]
    assert "NOT FINE" in table([result(), result(**bad)])


def test_the_table_has_kills_by_role_with_the_seconds_of_their_recovery() -> None:
    kills = [kill("queue", 1.0), kill("queue", 3.0), kill("trainer", None), kill("queue", 9.0, "SIGSTOP")]
    lines = [line.split() for line in table([result(kills=kills, reward=0.5, seconds=9.6)]).splitlines()]
    for line in ("queue 2 2.0 3.0", "queue (SIGSTOP) 1 9.0 9.0", "trainer 1 - -", "roles 1 4 0 0 0 0.50 10"):
        assert line.split() in lines
    told = as_json([result(kills=kills)])
    assert (told["kills"], told["recovery_s"]) == (4, {"median": 3.0, "max": 9.0})
    recoveries = [kill("queue", None).recovered(at_s).recovery_s for at_s in (12.5, None, 7210.0, 9.0)]
    assert recoveries == [2.5, None, None, None], "only a time after the kill, and within an hour"


# -- the plan of strikes ----------------------------------------------------------------------------------------------

SINGLE = [(role,) for role in ROLES]


@given(seed=st.integers(0, 10**6), rounds=st.integers(1, 15))
def test_every_role_is_struck_equally_often_forward_and_never_after_the_last_step(seed: int, rounds: int) -> None:
    strikes = deal(seed=seed, targets=SINGLE, kills=4 * rounds)
    assert strikes == deal(seed=seed, targets=SINGLE, kills=4 * rounds)
    assert Counter(role for strike in strikes for role in strike.roles) == dict.fromkeys(ROLES, rounds)
    steps = [strike.after_step for strike in strikes if strike.after_step]
    assert steps == sorted(steps) and steps[0] == strikes[0].after_step == FIRST_STEP and steps[-1] <= SOAK_STEPS - 2


@given(seed=st.integers(0, 99), kills=st.integers(1, 100))
def test_a_campaign_has_every_scenario_that_fits_once_and_kills_of_single_roles_between_them(
    seed: int, kills: int
) -> None:
    fixed = [("tree", 5), ("pairs", 8), ("driver", 2)]
    parts = campaign(kills=kills, seed=seed, fixed=fixed, soak="roles", soak_kills=12)
    chosen = [part.scenario for part in parts if part.scenario != "roles"]
    assert chosen == [name for name, _ in fixed][: 1 + (kills > 5) + (kills > 13)]
    assert sum(part.kills for part in parts) == max(kills, sum(dict(fixed)[name] for name in chosen))
    assert all(0 < part.kills <= 12 for part in parts if part.scenario == "roles")
    assert [part.scenario for part in parts[:1]] == (
        ["roles"] if kills > sum(count for _, count in fixed) else chosen[:1]
    )
    assert len({part.seed for part in parts}) == len(parts)
