"""How close does the engine come to a judge's best throughput without knowing anything about that judge?

1,024 distinct requests against the test judge: lognormal latency with mean 2 s and sigma 0.5, saturating at 60 in
flight, 429 above 80 with `Retry-After: 1`; all times are scaled by 1:10. Engine and judge run in separate processes.
The engine has its default configuration with the persistent cache on. Each run starts with an empty cache directory, so
that it inherits neither replies nor the limiter's memory. The engine starts before the clock does (`startup_s`).

Per seed, one after the other: a slice one call at a time, the engine, a second run from its cache file, the engine with
half the content repeated, and each fixed concurrency. All of them meet the same latencies, because the judge draws them
from (seed, content). A fixed setting that is far behind after the first seed is not run again, since it cannot win.

The time of the naive run is extrapolated: seconds of the slice, times the service time of all requests, over the
service time of those in the slice.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from common import (
    at_least,
    at_most,
    exit_code,
    machine_facts,
    machine_line,
    markdown_table,
    median,
    parser,
    promise_table,
    running_judge,
    scratch_dir,
    service_s,
    write_json,
)
from freewheel.judge import JudgeConfig, JudgeRequest, Scored
from freewheel.judge.testing import Counts, JudgeProfile, MockJudge, RunningJudge

REQUESTS = 1024
GRID = (10, 20, 40, 60, 70, 80, 100, 150, 200)
SEEDS = 5
NAIVE_SLICE = 24
"""Calls made one at a time: five seconds."""
HOPELESS = 2.0
"""A setting slower than the first seed's best by this factor is not run again. Far above the noise of one run, so that
a hiccup cannot exclude the best setting."""
QUICK_REQUESTS, QUICK_GRID, QUICK_SLICE = 256, (20, 60), 8

PROFILE = JudgeProfile(
    latency="lognormal", latency_s=2.0, sigma=0.5, knee=60, reject_above=80, retry_after_s=1.0, time_scale=0.1
)


class Run(msgspec.Struct, kw_only=True):
    """One batch and the judge's counts of it."""

    seed: int
    wall_s: float
    startup_s: float
    scored: int
    failed: int
    sent: int
    """Calls that reached the judge."""
    rejected: int
    """Those answered with 429."""
    max_in_flight: int

    @property
    def rejected_share(self) -> float:
        return self.rejected / self.sent if self.sent else 0.0


def requests_of(seed: int, count: int) -> list[JudgeRequest]:
    """Word problems with an answer each, all different."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        boxes, each = rng.randint(2, 99), rng.randint(2, 99)
        made.append(
            JudgeRequest(
                prompt=f"Problem {number}: {boxes} boxes hold {each} pencils each. How many pencils are there?",
                response=f"Each box holds {each}, so {boxes} * {each} = {boxes * each}. The answer is {boxes * each}.",
            )
        )
    return made


def half_repeated(requests: Sequence[JudgeRequest], seed: int) -> list[JudgeRequest]:
    """As many requests with half the contents, each twice, in random order."""
    half = list(requests[: len(requests) // 2])
    doubled = half + half
    random.Random(seed).shuffle(doubled)
    return doubled


class Scene:
    """A test judge in a separate process, and the batches that run against it."""

    def __init__(self, mock: RunningJudge) -> None:
        self._mock = mock

    def run(
        self, requests: Sequence[JudgeRequest], seed: int, cache_dir: str, concurrency: str = "auto"
    ) -> tuple[Run, Counts]:
        self._mock.reset(msgspec.structs.replace(PROFILE, seed=seed))
        config = JudgeConfig(endpoint=self._mock.url, model="mock-judge", cache_dir=cache_dir, concurrency=concurrency)
        with running_judge(config) as (judge, startup_s):
            began = time.perf_counter()
            verdicts = judge.submit(requests).result()
            wall_s = time.perf_counter() - began
        counts = self._mock.counts()
        scored = sum(isinstance(verdict, Scored) for verdict in verdicts)
        run = Run(
            seed=seed,
            wall_s=wall_s,
            startup_s=startup_s,
            scored=scored,
            failed=len(requests) - scored,
            sent=counts.received,
            rejected=counts.rejected,
            max_in_flight=counts.max_in_flight,
        )
        return run, counts

    def run_cold(self, requests: Sequence[JudgeRequest], seed: int, concurrency: str = "auto") -> tuple[Run, Counts]:
        with scratch_dir() as cache_dir:
            return self.run(requests, seed, cache_dir, concurrency)


class Measurement:
    """All runs of all seeds, by setting."""

    def __init__(self, *, count: int, grid: Sequence[int], naive_slice: int) -> None:
        self._count = count
        self._grid = list(grid)
        self._slice = naive_slice
        self.engine: list[Run] = []
        self.second: list[Run] = []
        self.cached: list[Run] = []
        self.naive_s: list[float] = []
        self.naive_repeated_s: list[float] = []
        self.fixed: dict[int, list[Run]] = {level: [] for level in grid}

    def run_seed(self, scene: Scene, seed: int) -> None:
        requests = requests_of(seed, self._count)
        profile = msgspec.structs.replace(PROFILE, seed=seed)
        sliced, sliced_counts = scene.run_cold(requests[: self._slice], seed, "fixed:1")
        with scratch_dir() as cache_dir:
            run, counts = scene.run(requests, seed, cache_dir)
            self.engine.append(run)
            self.second.append(scene.run(requests, seed, cache_dir)[0])
        cached, cached_counts = scene.run_cold(half_repeated(requests, seed), seed)
        self.cached.append(cached)
        stretch = sliced.wall_s / service_s(profile, sliced_counts)
        self.naive_s.append(stretch * service_s(profile, counts))
        self.naive_repeated_s.append(stretch * service_s(profile, cached_counts, calls_per_content=2))
        for level in self._grid:
            self.fixed[level].append(scene.run_cold(requests, seed, f"fixed:{level}")[0])
        if len(self.engine) == 1:
            best_s = min(runs[0].wall_s for runs in self.fixed.values())
            self._grid = [level for level in self._grid if self.fixed[level][0].wall_s <= HOPELESS * best_s]

    def fields(self) -> dict[str, Any]:
        """The figures that the promises are about."""
        engine_s = median([run.wall_s for run in self.engine])
        fixed_s = {level: median([run.wall_s for run in runs]) for level, runs in self.fixed.items() if runs}
        # A setting that ran for the first seed only was slow, and cannot be compared.
        best = min((level for level in fixed_s if level in self._grid), key=lambda level: fixed_s[level])
        return {
            "speedup_vs_naive": median(
                [naive / run.wall_s for naive, run in zip(self.naive_s, self.engine, strict=True)]
            ),
            "ratio_to_best_fixed": engine_s / fixed_s[best],
            "rejected_share": median([run.rejected_share for run in self.engine]),
            "failed": sum(run.failed for run in self.engine + self.second + self.cached),
            "speedup_cached": median(
                [naive / run.wall_s for naive, run in zip(self.naive_repeated_s, self.cached, strict=True)]
            ),
            "second_run_sent": max(run.sent for run in self.second),
            "best_fixed": best,
            "best_fixed_s": fixed_s[best],
            "engine_s": engine_s,
            "naive_s": median(self.naive_s),
            "cached_s": median([run.wall_s for run in self.cached]),
            "second_run_s": median([run.wall_s for run in self.second]),
            "startup_s": median([run.startup_s for run in self.engine]),
            "worst_rejected_share": max(run.rejected_share for run in self.engine),
        }

    def settings(self) -> list[dict[str, Any]]:
        """Medians by setting, for the table and the file."""
        naive_s = median(self.naive_s)
        named = [(f"fixed {level}", runs) for level, runs in self.fixed.items()]
        named += [("engine, cold", self.engine), ("half repeated", self.cached), ("second run", self.second)]
        rows = [
            {
                "setting": f"naive, from {self._slice} calls",
                "seeds": len(self.naive_s),
                "wall_s": naive_s,
                "speedup": 1.0,
            }
        ]
        for name, runs in named:
            wall_s = median([run.wall_s for run in runs])
            base_s = median(self.naive_repeated_s) if runs is self.cached else naive_s
            rows.append(
                {
                    "setting": name,
                    "seeds": len(runs),
                    "wall_s": wall_s,
                    "speedup": base_s / wall_s,
                    "sent": median([run.sent for run in runs]),
                    "rejected": median([run.rejected for run in runs]),
                    "max_in_flight": median([run.max_in_flight for run in runs]),
                    "failed": sum(run.failed for run in runs),
                }
            )
        return rows


def settings_table(rows: Sequence[dict[str, Any]], count: int) -> str:
    """Times are as measured, at 1:10; samples/s are converted to the judge's own time.

    A run that sends nothing does not wait for the judge, so its time is not scaled.
    """
    cells = []
    for row in rows:
        from_cache = row.get("sent") == 0
        figures = [row.get(key) for key in ("sent", "rejected", "max_in_flight", "failed")]
        per_s = count / row["wall_s"] * (1.0 if from_cache else PROFILE.time_scale)
        cells.append(
            (
                row["setting"],
                row["seeds"],
                f"{row['wall_s']:.3g}",
                f"{per_s:.2f}",
                "" if from_cache else f"{row['speedup']:.1f}",
                *("" if figure is None else f"{figure:.0f}" for figure in figures),
            )
        )
    head = ("setting", "seeds", "s (1:10)", "samples/s", "speed-up", "calls", "429s", "max in flight", "failed")
    return markdown_table(head, cells)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=SEEDS, help=f"repetitions, interleaved (default {SEEDS})")
    options.add_argument("--grid", type=int, nargs="+", default=list(GRID), metavar="N", help="fixed concurrencies")
    asked = options.parse_args()
    count, naive_slice = (QUICK_REQUESTS, QUICK_SLICE) if asked.quick else (REQUESTS, NAIVE_SLICE)
    grid, seeds = (QUICK_GRID, 1) if asked.quick else (asked.grid, asked.seeds)

    facts = machine_facts()
    began = time.perf_counter()
    measurement = Measurement(count=count, grid=grid, naive_slice=naive_slice)
    with MockJudge(PROFILE).in_process() as mock:
        for seed in range(1, seeds + 1):
            measurement.run_seed(Scene(mock), seed)
            print(f"seed {seed} of {seeds}: {time.perf_counter() - began:.0f} s", file=sys.stderr)

    fields, rows = measurement.fields(), measurement.settings()
    promises = [
        at_least("speedup_vs_naive", fields["speedup_vs_naive"], 50),
        at_most("ratio_to_best_fixed", fields["ratio_to_best_fixed"], 1.05),
        at_most("rejected_share", fields["rejected_share"], 0.02),
        at_most("failed", fields["failed"], 0),
        at_least("speedup_cached", fields["speedup_cached"], 90),
        at_most("second_run_sent", fields["second_run_sent"], 0),
    ]
    print(f"{count} requests, judge of 2 s on average, saturating at 60, 429 beyond 80 (Retry-After 1 s), time 1:10")
    print(f"medians of {seeds} seeds; {machine_line(facts)}; engine ready in {fields['startup_s']:.2f} s\n")
    print(settings_table(rows, count))
    print()
    print("A quick run is too short for these promises:" if asked.quick else "What was promised:")
    print(promise_table(promises))
    write_json(
        asked.json,
        {
            **fields,
            "promises_kept": all(promise.kept for promise in promises),
            "requests": count,
            "seeds": seeds,
            "naive_slice": naive_slice,
            "profile": PROFILE,
            "settings": rows,
            "runs": {
                "engine": measurement.engine,
                "second_run": measurement.second,
                "half_repeated": measurement.cached,
                "naive_s": measurement.naive_s,
                "naive_repeated_s": measurement.naive_repeated_s,
                "fixed": measurement.fixed,
            },
            "wall_s": time.perf_counter() - began,
            "machine": facts,
        },
    )
    return exit_code(promises, quick=asked.quick)


if __name__ == "__main__":
    sys.exit(main())
