"""The plan depends on its seed only and covers every role."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .plan import FIRST_STEP, PAIRS, ROLES, SOAK_STEPS, campaign, deal

SINGLE = [(role,) for role in ROLES]


@given(seed=st.integers(0, 10**6), rounds=st.integers(1, 15))
def test_every_role_is_struck_equally_often_forward_and_never_after_the_last_step(seed: int, rounds: int) -> None:
    strikes = deal(seed=seed, targets=SINGLE, kills=4 * rounds)
    assert strikes == deal(seed=seed, targets=SINGLE, kills=4 * rounds)
    assert Counter(role for strike in strikes for role in strike.roles) == dict.fromkeys(ROLES, rounds)
    steps = [strike.after_step for strike in strikes if strike.after_step]
    assert steps == sorted(steps) and steps[0] == strikes[0].after_step == FIRST_STEP and steps[-1] <= SOAK_STEPS - 2


def test_seeds_differ_and_some_strikes_hit_a_run_that_is_recovering() -> None:
    dealt = [deal(seed=seed, targets=SINGLE, kills=24) for seed in range(20)]
    assert dealt[1] != dealt[2]
    assert any(strike.after_step == 0 for strikes in dealt for strike in strikes)
    pairs = deal(seed=0, targets=PAIRS, kills=8)
    assert sorted(strike.roles for strike in pairs) == sorted(PAIRS), "a pair counts as two"


@pytest.mark.parametrize(
    ("kills", "scenarios"),
    [
        (6, ["tree", "pairs"]),
        (17, ["roles", "tree", "pairs", "driver"]),
        (100, ["roles", "tree", "roles", "pairs", "roles", "driver", *["roles"] * 5]),
    ],
)
def test_a_campaign_has_every_scenario_that_fits_once_and_kills_of_single_roles_between_them(
    kills: int, scenarios: list[str]
) -> None:
    fixed = [("tree", 5), ("pairs", 8), ("driver", 2)]
    one, other = (campaign(kills=kills, seed=seed, fixed=fixed, soak="roles", soak_kills=12) for seed in (0, 1))
    assert [part.scenario for part in one] == scenarios
    assert sum(part.kills for part in one) == (13 if kills == 6 else kills)
    assert max((part.kills for part in one if part.scenario == "roles"), default=0) <= 12
    seeds = [part.seed for part in (*one, *other)]
    assert len(set(seeds)) == len(seeds)
