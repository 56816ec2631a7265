"""The plan depends on its seed only and covers every role."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from .plan import FIRST_STEP, ROLES, SOAK_STEPS, campaign, deal

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
