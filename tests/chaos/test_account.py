"""The audit of the witness finds violations, and none in a correct run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .account import Kill, Result, Trained, as_json, audit_witness, last_reward, path, table


def step(number: int, *ordinals: int, lag: int = 0, reward: float | None = 0.5) -> Trained:
    return Trained(step=number, ordinals=ordinals, lag=lag, reward=reward, process=1, wall_s=0.0)


def test_a_log_line_is_parsed() -> None:
    told = {"step": 2, "ordinals": [4, 5], "lag": 1, "reward": None, "process": 7, "wall_s": 1.5}
    assert Trained.read(json.dumps(told).encode()) == Trained(
        step=2, ordinals=(4, 5), lag=1, reward=None, process=7, wall_s=1.5
    )


def test_a_step_that_is_trained_again_undoes_those_after_it() -> None:
    lines = [step(1, 0, 1), step(2, 2, 3), step(3, 4, 5), step(2, 2, 4), step(3, 3, 5)]
    assert [one.ordinals for one in path(lines).values()] == [(0, 1), (2, 4), (3, 5)]
    assert list(path(lines[:4])) == [1, 2]


def audited(*lines: Trained, total: int = 4) -> tuple[int, int, int, int]:
    seen = audit_witness(lines, total=total, max_lag=5)
    return seen.lost, seen.repeated, seen.stale_trained, len(seen.problems)


def test_a_run_that_trained_every_prompt_once_has_no_violations() -> None:
    assert audited(step(1, 0, 2), step(2, 1, 3)) == (0, 0, 0, 0)
    assert audited(step(1, 0, 1), step(2, 2, 3), step(1, 0, 1), step(2, 2, 3)) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([step(1, 0, 2)], (2, 0, 0, 0)),
        ([step(1, 0, 2), step(2, 1, 2)], (1, 1, 0, 0)),
        ([step(1, 0, 2), step(2, 1, 3, lag=6)], (0, 0, 1, 0)),
        ([step(1, 0, 1, lag=6), step(1, 0, 1), step(2, 2, 3)], (0, 0, 1, 0)),
        ([step(1, 0, 1), step(2, 2, 4)], (1, 0, 0, 1)),
        ([step(1, 0, 1), step(3, 2, 3)], (0, 0, 0, 1)),
    ],
    ids=["lost", "repeated", "stale", "stale and taken back", "beyond the end", "a step is missing"],
)
def test_violations_are_found(lines: list[Trained], found: tuple[int, ...]) -> None:
    assert audited(*lines) == found


def test_only_repeats_are_violations_if_prompts_may_be_dropped() -> None:
    seen = audit_witness([step(1, 0, 7), step(2, 7, 9)], total=None, max_lag=5)
    assert (seen.lost, seen.repeated, seen.problems) == (0, 1, [])


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
    assert result().fine
    assert not result(**bad).fine
    assert not as_json([result(), result(**bad)])["fine"]
    assert "NOT FINE" in table([result(), result(**bad)])


def test_a_run_that_learned_less_than_an_undisturbed_one_is_not_fine() -> None:
    assert result(reward=0.8).compared(0.85).fine
    assert not result(reward=0.5).compared(0.85).fine
    assert result(reward=0.5).compared(None).fine


def test_the_table_has_kills_by_role_with_the_seconds_of_their_recovery() -> None:
    kills = [kill("queue", 1.0), kill("queue", 3.0), kill("trainer", None), kill("queue", 9.0, "SIGSTOP")]
    lines = [line.split() for line in table([result(kills=kills, reward=0.5, seconds=9.6)]).splitlines()]
    assert ["queue", "2", "2.0", "3.0"] in lines
    assert ["queue", "(SIGSTOP)", "1", "9.0", "9.0"] in lines
    assert ["trainer", "1", "-", "-"] in lines
    assert ["roles", "1", "4", "0", "0", "0", "0.50", "10"] in lines
    told = as_json([result(kills=kills)])
    assert (told["kills"], told["recovery_s"]) == (4, {"median": 3.0, "max": 9.0})


def test_a_recovery_is_counted_from_the_kill() -> None:
    assert kill("queue", None).recovered(12.5).recovery_s == 2.5
    assert kill("queue", None).recovered(None).recovery_s is None
    assert kill("queue", None).recovered(7210.0).recovery_s is None
    assert kill("queue", None).recovered(9.0).recovery_s is None
