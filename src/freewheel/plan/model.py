"""The steady state of a run in closed form: what each part could do, what they do together, what a change would give.

    capacities (groups a second, each part alone) ─┬─ streaming: the least of them
                                                   └─ in turns: one over the sum of their times
    busy shares of a run ─▶ capacity = rate / share ─▶ without what holds it up: up to the next part

The verdict on a live run and the planner's first guess are both made of these few functions; `simulation` knows what
they leave out (lengths that differ, a window that is full, latencies that overlap). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

LEAST_SHARE = 0.01
"""A part that was busy for less of the time was not seen at work: what it could do is not known from that."""


def streaming(capacities: Mapping[str, float]) -> tuple[str, float]:
    """The part that bounds a pipeline in which all work at once, and the rate that it allows."""
    return min(capacities.items(), key=lambda item: item[1])


def in_turns(capacities: Mapping[str, float]) -> float:
    """The rate of parts that wait for each other, one at work at a time."""
    return 1.0 / sum(1.0 / capacity for capacity in capacities.values())


def capacities(rate: float, busy: Mapping[str, float]) -> dict[str, float]:
    """What each part could do alone, from the rate that was measured and the share of the time that it was busy for.
    Parts that were hardly busy are left out."""
    return {part: rate / share for part, share in busy.items() if share >= LEAST_SHARE}


@dataclass(frozen=True)
class Lift:
    """What a change would give."""

    factor: float
    """Throughput after it over throughput before; never below 1."""
    then: str
    """What bounds it from there on; empty where nothing that was measured does."""


def without(busy: Mapping[str, float], part: str) -> Lift:
    """The most that a faster `part` gives where all parts work at once: until the next busiest is busy all the time."""
    others = {name: share for name, share in busy.items() if name != part and share >= LEAST_SHARE}
    if not others:
        return Lift(math.inf, "")
    then, share = max(others.items(), key=lambda item: item[1])
    return Lift(max(1.0, 1.0 / share), then)


def overlapped(busy: Mapping[str, float]) -> Lift:
    """The most that overlapping gives parts which work in turns: until the busiest is busy all the time."""
    return without(busy, "")


def lessened(share: float, by: float, bound: Lift) -> Lift:
    """What it gives to do away with a part `by` of something that takes `share` of everybody's time, and no more than
    `bound` allows."""
    factor = 1.0 / max(1.0 - share * by, LEAST_SHARE)
    return bound if factor >= bound.factor or not math.isfinite(bound.factor) else Lift(factor, "")
