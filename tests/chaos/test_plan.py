"""The plan depends on its seed only and covers every role."""

from __future__ import annotations

from collections import Counter

from .plan import PAIRS, ROLES, Part, Strike, campaign, deal


def dealt(seed: int, kills: int = 24) -> list[Strike]:
    targets = [(role,) for role in ROLES]
    return deal(seed=seed, targets=targets, kills=kills, first_step=2, gap_steps=4, last_step=58, longest_delay_s=0.5)


def test_the_seed_determines_the_strikes() -> None:
    assert dealt(1) == dealt(1)
    assert dealt(1) != dealt(2)


def test_every_role_is_struck_equally_often() -> None:
    assert Counter(role for strike in dealt(3) for role in strike.roles) == dict.fromkeys(ROLES, 6)


def test_strikes_go_forward_and_none_comes_after_the_last_step() -> None:
    steps = [strike.after_step for strike in dealt(4, kills=60) if strike.after_step]
    assert steps == sorted(steps)
    assert min(steps) == 2 and max(steps) == 58


def test_some_strikes_hit_a_run_that_is_recovering_but_never_the_first() -> None:
    firsts = [dealt(seed)[0].after_step for seed in range(20)]
    assert all(firsts)
    assert any(strike.after_step == 0 for seed in range(20) for strike in dealt(seed))


def test_pairs_count_as_two() -> None:
    strikes = deal(seed=0, targets=PAIRS, kills=8, first_step=3, gap_steps=4, last_step=58, longest_delay_s=0.5)
    assert sorted(strike.roles for strike in strikes) == sorted(PAIRS)


FIXED = [("tree", 5), ("pairs", 8), ("driver", 2)]


def drawn_up(kills: int, seed: int = 0) -> list[Part]:
    return campaign(kills=kills, seed=seed, fixed=FIXED, soak="roles", soak_kills=12)


def test_a_campaign_has_every_scenario_once_and_exactly_the_kills_that_were_asked_for() -> None:
    parts = drawn_up(100)
    assert sum(part.kills for part in parts) == 100
    assert Counter(part.scenario for part in parts) == {"tree": 1, "pairs": 1, "driver": 1, "roles": 8}
    assert max(part.kills for part in parts if part.scenario == "roles") <= 12
    assert len({part.seed for part in parts}) == len(parts)
    assert {part.seed for part in parts}.isdisjoint(part.seed for part in drawn_up(100, seed=1))


def test_a_small_campaign_has_the_scenarios_that_fit() -> None:
    assert [part.scenario for part in drawn_up(6)] == ["tree", "pairs"]
    assert [(part.scenario, part.kills) for part in drawn_up(17)] == [
        ("roles", 2),
        ("tree", 5),
        ("pairs", 8),
        ("driver", 2),
    ]
