"""Who is struck when: a seeded plan, made before anything runs, so that the same seed strikes the same way again.

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
"""The processes of a run, beside the driver. `rollouter` is any of them."""
PAIRS = (("queue", "trainer"), ("trainer", "rollouter"), ("queue", "rollouter"), ("sync", "trainer"))
"""Two at once whose recoveries need each other."""
AT_ONCE_SHARE = 0.2
"""Strikes that do not wait for the one before to be over: they hit a run that is recovering."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """`roles` die together, `delay_s` after `after_step` was trained (0: after the strike before)."""

    after_step: int
    delay_s: float
    roles: tuple[str, ...]


def deal(
    *,
    seed: int,
    targets: Sequence[tuple[str, ...]],
    kills: int,
    first_step: int,
    gap_steps: int,
    last_step: int,
    longest_delay_s: float,
) -> list[Strike]:
    """Strikes until `kills` processes are struck: each of `targets` equally often, in a shuffled order, `gap_steps`
    apart on average and none after `last_step`."""
    draw = random.Random(f"{seed}-deal")
    strikes: list[Strike] = []
    deck: list[tuple[str, ...]] = []
    step = first_step
    while sum(len(strike.roles) for strike in strikes) < kills:
        if not deck:
            deck = list(targets)
            draw.shuffle(deck)
        again = bool(strikes) and draw.random() < AT_ONCE_SHARE
        at = 0 if again else min(step, last_step)
        strikes.append(Strike(after_step=at, delay_s=draw.uniform(0.0, longest_delay_s), roles=deck.pop()))
        step += 0 if again else draw.randint(1, 2 * gap_steps - 1)
    return strikes


@dataclass(frozen=True, kw_only=True)
class Part:
    """One scenario with a seed of its own; `kills` where it is told how many."""

    scenario: str
    seed: int
    kills: int


def campaign(*, kills: int, seed: int, fixed: Sequence[tuple[str, int]], soak: str, soak_kills: int) -> list[Part]:
    """Each of `fixed` (scenario, its kills) once, as many as fit into `kills`; the rest are dealt to runs of `soak`,
    about `soak_kills` in each, which come between them."""
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
