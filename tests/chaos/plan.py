"""A seeded plan of strikes, made before anything runs, so that the same seed always strikes the same way.

    deal(seed, …) ─▶ Strike, Strike, …        in one run          (`scenarios.py` carries them out)
    campaign(kills, seed) ─▶ Part, Part, …     over many runs      (`scripts/chaos.py`)

Pure. A strike is placed by steps of training and a delay, and not by the clock: what a run is doing when it is struck
then depends on the seed and not on how busy the machine is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

ROLES = ("queue", "trainer", "rollouter", "sync")
"""The processes of a run without the driver. `rollouter` is any of them."""
PAIRS = (("queue", "trainer"), ("trainer", "rollouter"), ("queue", "rollouter"), ("sync", "trainer"))
"""Pairs whose recoveries need each other."""
SOAK_STEPS, FIRST_STEP, GAP_STEPS = 60, 2, 4
"""Steps of a run with room for about a dozen strikes, and where they come."""
LONGEST_DELAY_S = 0.6
"""Longest delay between a step and a strike: a few steps' time, so that strikes hit any moment of a step."""
AT_ONCE_SHARE = 0.2
"""Share of strikes that do not wait for the last recovery."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """`roles` die together, `delay_s` after `after_step` was trained (0: after the last strike)."""

    after_step: int
    delay_s: float
    roles: tuple[str, ...]


def deal(*, seed: int, targets: Sequence[tuple[str, ...]], kills: int, last_step: int = SOAK_STEPS - 2) -> list[Strike]:
    """Plan strikes for `kills` processes: each of `targets` equally often, in a shuffled order, `GAP_STEPS` apart on
    average and none after `last_step`."""
    draw = random.Random(f"{seed}-deal")
    strikes: list[Strike] = []
    deck: list[tuple[str, ...]] = []
    step = FIRST_STEP
    while sum(len(strike.roles) for strike in strikes) < kills:
        if not deck:
            deck = list(targets)
            draw.shuffle(deck)
        again = bool(strikes) and draw.random() < AT_ONCE_SHARE
        at = 0 if again else min(step, last_step)
        strikes.append(Strike(after_step=at, delay_s=draw.uniform(0.0, LONGEST_DELAY_S), roles=deck.pop()))
        step += 0 if again else draw.randint(1, 2 * GAP_STEPS - 1)
    return strikes


@dataclass(frozen=True, kw_only=True)
class Part:
    """One scenario with its seed, and its number of kills if given."""

    scenario: str
    seed: int
    kills: int


def campaign(*, kills: int, seed: int, fixed: Sequence[tuple[str, int]], soak: str, soak_kills: int) -> list[Part]:
    """Plan each of `fixed` (scenario, kills) once, as far as they fit into `kills`. The rest goes to runs of `soak`
    between them, about `soak_kills` each."""
    chosen: list[tuple[str, int]] = []
    left = kills
    for scenario, count in fixed:
        if left > 0:
            chosen.append((scenario, count))
            left -= count
    runs = -(-max(0, left) // soak_kills)
    soaks = [(soak, left // runs + (index < left % runs)) for index in range(runs)]
    mixed = [one for pair in zip_longest(soaks, chosen) for one in pair if one is not None]
    return [Part(scenario=name, seed=seed * 1000 + number, kills=count) for number, (name, count) in enumerate(mixed)]
