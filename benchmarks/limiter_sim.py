"""How near is the adaptive limit to the best fixed concurrency, on judges it knows nothing about?

Drives the engine's own `Limiter` and `Pacer` through the profiles of `tests/judge/virtual.py` under a virtual clock,
and compares them with fixed limits of 60 and 200 and a plain AIMD. Each figure is the mean time of a batch over the
mean time at the best fixed concurrency, found by search on the same batches. Cold is a first batch; warm starts from
the limiter's memory of a batch with another seed.

    python benchmarks/limiter_sim.py [--seeds 30] [--first-seed 0] [--requests 1024] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from freewheel.judge.limiter import Limiter, LimiterMemory, Ticket
from freewheel.judge.pacing import Pacer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/judge"))

from virtual import PROFILES, Outcome, Profile, lognormal_works, run_batch  # the bench of the tests

FIXED_GRID = (30, 40, 50, 56, 60, 64, 70, 76, 80, 90, 110, 150, 200)
"""Candidates for the best fixed concurrency; all profiles but H have theirs between 50 and 150."""
FIXED_GRID_WIDE = (200, 300, 350, 400, 450, 512, 700, 1024)
"""Candidates for a judge with its knee at 400."""
WIDE_PROFILES = frozenset({"H"})
WARM_SEED_OFFSET = 1000
"""The batch that fills the memory has another seed than the batch that starts from it."""
QUICK_SEEDS = 3


class Aimd:
    """The textbook controller: add a fixed step each round trip, cut by a factor at a 429. It uses no other signal."""

    START = 32.0
    """The adaptive limit's own start, so that the two differ only in what follows."""
    INCREASE = 8.0
    """Added per round trip. One, as in TCP, would need a minute from 32 to 64."""
    DECREASE = 0.75
    """Between TCP's 0.5, which leaves a judge without a knee half idle, and the 0.9 that storms."""

    def __init__(self, window: float = START) -> None:
        self.window = window
        self.in_flight = 0
        self.quiet_until = -math.inf
        self._cut_at = -math.inf

    def has_room(self) -> bool:
        return self.in_flight < int(self.window)

    def sent(self, now: float) -> Ticket:
        self.in_flight += 1
        return (now, self.in_flight)

    def succeeded(self, ticket: Ticket, now: float) -> None:
        self.in_flight -= 1
        self.window += self.INCREASE / self.window

    def throttled(self, ticket: Ticket, now: float) -> None:
        self.in_flight -= 1
        if ticket[0] >= self._cut_at:
            self.window = max(1.0, self.window * self.DECREASE)
            self._cut_at = now

    def faulted(self, ticket: Ticket, now: float, *, overload: bool) -> None:
        self.throttled(ticket, now)

    def released(self, ticket: Ticket, now: float) -> None:
        self.in_flight -= 1


@dataclass(frozen=True)
class Cell:
    """One controller on one profile, cold or warm."""

    over_best: float
    """Mean time over that of the best fixed concurrency, minus one."""
    refused: float
    """Mean number of 429s per batch."""
    most_refused: int
    elapsed_s: float


Batch = Callable[[Profile, int], Outcome]


def fixed(limit: int) -> tuple[Batch, Batch]:
    def run(profile: Profile, seed: int) -> Outcome:
        return run_batch(profile, Limiter(fixed=limit), works(seed), seed=seed, pacer=Pacer())

    return run, run


def aimd() -> tuple[Batch, Batch]:
    def cold(profile: Profile, seed: int) -> Outcome:
        return run_batch(profile, Aimd(), works(seed), seed=seed, pacer=Pacer())

    def warm(profile: Profile, seed: int) -> Outcome:
        first = Aimd()
        run_batch(profile, first, works(seed + WARM_SEED_OFFSET), seed=seed + WARM_SEED_OFFSET, pacer=Pacer())
        return run_batch(profile, Aimd(first.window), works(seed), seed=seed, pacer=Pacer())

    return cold, warm


def adaptive() -> tuple[Batch, Batch]:
    def cold(profile: Profile, seed: int) -> Outcome:
        return run_batch(profile, Limiter(), works(seed), seed=seed, pacer=Pacer())

    def warm(profile: Profile, seed: int) -> Outcome:
        first = Limiter()
        run_batch(profile, first, works(seed + WARM_SEED_OFFSET), seed=seed + WARM_SEED_OFFSET, pacer=Pacer())
        kept = msgspec.json.decode(msgspec.json.encode(first.memory()), type=LimiterMemory)
        return run_batch(profile, Limiter(memory=kept), works(seed), seed=seed, pacer=Pacer())

    return cold, warm


CONTROLLERS: dict[str, Callable[[], tuple[Batch, Batch]]] = {
    "fixed 60": lambda: fixed(60),
    "fixed 200": lambda: fixed(200),
    "AIMD": aimd,
    "freewheel": adaptive,
}

_requests = 1024
_works: dict[int, list[float]] = {}


def works(seed: int) -> list[float]:
    if seed not in _works:
        _works[seed] = lognormal_works(_requests, seed=seed)
    return _works[seed]


def best_fixed(profile: Profile, seeds: Sequence[int]) -> tuple[float, int]:
    """Mean time and level of the best fixed concurrency on these batches."""
    grid = FIXED_GRID_WIDE if profile.name in WIDE_PROFILES else FIXED_GRID
    return min((fmean(fixed(limit)[0](profile, seed).elapsed_s for seed in seeds), limit) for limit in grid)


def measure(batch: Batch, profile: Profile, seeds: Sequence[int], best_s: float) -> Cell:
    outcomes = [batch(profile, seed) for seed in seeds]
    elapsed_s = fmean(outcome.elapsed_s for outcome in outcomes)
    return Cell(
        over_best=elapsed_s / best_s - 1.0,
        refused=fmean(outcome.refused for outcome in outcomes),
        most_refused=max(outcome.refused for outcome in outcomes),
        elapsed_s=elapsed_s,
    )


def describe(cold: Cell, warm: Cell) -> str:
    over = f"{cold.over_best:+.1%} / {warm.over_best:+.1%}"
    return over if cold.refused + warm.refused == 0 else f"{over} ({cold.refused:,.0f} / {warm.refused:,.0f})"


def main() -> None:
    global _requests
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30, help="batches per figure")
    parser.add_argument("--first-seed", type=int, default=0, help="where they start: the constants were tuned on 0-29")
    parser.add_argument("--requests", type=int, default=_requests, help="requests per batch")
    parser.add_argument("--profiles", default=",".join(PROFILES), help="which judges, by letter")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} seeds: half a minute at most")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    options = parser.parse_args()
    _requests = options.requests
    count = QUICK_SEEDS if options.quick else options.seeds
    seeds = range(options.first_seed, options.first_seed + count)
    began = time.perf_counter()
    report: dict[str, Any] = {
        "first_seed": options.first_seed,
        "seeds": len(seeds),
        "requests": _requests,
        "profiles": {},
    }
    print(
        f"{_requests} requests, {len(seeds)} seeds; time over the best fixed concurrency, cold / warm (429s a batch)\n"
    )
    print(f"| judge | best fixed | {' | '.join(CONTROLLERS)} |")
    print("|---" * (2 + len(CONTROLLERS)) + "|")
    for name in options.profiles.split(","):
        profile = PROFILES[name]
        best_s, level = best_fixed(profile, seeds)
        row: dict[str, Any] = {"title": profile.title, "best_fixed": level, "best_s": best_s}
        texts = []
        for label, make in CONTROLLERS.items():
            cold, warm = (measure(batch, profile, seeds, best_s) for batch in make())
            row[label] = {"cold": asdict(cold), "warm": asdict(warm)}
            texts.append(describe(cold, warm))
        report["profiles"][name] = row
        print(f"| {name} {profile.title} | {level}: {best_s:.1f} s | {' | '.join(texts)} |", flush=True)
    report["wall_s"] = time.perf_counter() - began
    print(f"\n{report['wall_s']:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
