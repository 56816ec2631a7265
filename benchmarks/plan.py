"""Is the planner right? It predicts the scenes of async_vs_sync.py, and the predictions are compared with measurements.

    python benchmarks/plan.py [--json FILE] [--quick] [--seeds N] [--scenes plain tail judge] [--runs DIR] [--lives]

    seed 0, mode sync ─▶ distributions of each scene ─┐
    seed 0, plain, fully_async ─▶ what generation and training cost each other on this machine ─┴▶ 9 predictions
    all seeds, all modes ─▶ measured: the median ─▶ error of each

It compares the wall time of steps 5 to 35, as async_vs_sync.py counts it. One of the nine predictions, plain in
fully_async, is calibrated on the same mode and scene. The others are of modes and scenes that the planner has not seen,
except `sync` itself, whose distributions are used everywhere. The tail's long responses are cut before the pipeline
sees them, so their share and length, which async_scenes.py fixes, are given.

--runs: keep the runs there, and use those of async_vs_sync.py --runs or of an earlier time.
--lives: measure only the number of group lives simulated per minute, in one process and on all cores; 8 responses each.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from common import (
    Promise,
    at_least,
    at_most,
    exit_code,
    machine_facts,
    machine_line,
    markdown_table,
    median,
    parser,
    promise_table,
    write_json,
)
from freewheel.observe.recorder import read_metrics
from freewheel.plan.clusters import RecordedRun, read, scene_of
from freewheel.plan.planner import ending
from freewheel.plan.scene import Generation, Lognormal, Measured, Outcome, Scene, Scores, Slowdown, Training
from freewheel.plan.simulation import simulate
from freewheel.queue.staleness import Bounds

MOST_ERROR = 0.10
LIVES_PER_MINUTE = 2_000_000
LIVES = 128 * 300
"""Groups of one timed simulation."""
PREDICTED_SEEDS = 5
"""A prediction is the median of this many simulations."""


# -- how fast it simulates --------------------------------------------------------------------------------------------


def timed_scene() -> Scene:
    """The plain scene's shape: 128 groups of 8 a step, 256 slots, varied lengths and latencies."""
    bounds = Bounds(groups_per_step=128, threshold=3, window=257, max_alive=1000, max_lag_allowed=5, total_groups=LIVES)
    return Scene(
        bounds=bounds,
        n=8,
        lengths=Lognormal(12, 0.4, 20),
        generation=Generation(slots=256, step_s=0.012, refill=32),
        scores=Scores(latency_s=Lognormal(0.005, 0.5)),
        training=Training(base_s=0.4, varies=Measured((0.9, 1.0, 1.1))),
    )


def lives_per_minute(seed: int = 0) -> float:
    since = time.perf_counter()
    lives = simulate(timed_scene(), seed=seed).lives
    return lives / (time.perf_counter() - since) * 60


def measure_lives() -> dict[str, float]:
    """Rates of one process, and of all cores together, each warmed up by a first simulation."""
    one = median([lives_per_minute(seed) for seed in range(3)])
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(lives_per_minute, range(cores)))
        since = time.perf_counter()
        turns = 3 * cores
        list(pool.map(lives_per_minute, range(turns)))
        together = turns * LIVES / (time.perf_counter() - since) * 60
    return {"one_process": one, "all_cores": together, "cores": cores}


# -- how well it predicts ---------------------------------------------------------------------------------------------


def generated(scene: str, recorded: RecordedRun) -> Measured | None:
    """The engine's output, where the pipeline sees less of it."""
    import async_scenes

    if scene != "tail" or max(recorded.lengths) >= async_scenes.TAIL_TOKENS:
        return None
    every = round(1 / async_scenes.TAIL_SHARE)
    lengths = enumerate(recorded.lengths)
    return Measured(
        tuple(float(async_scenes.TAIL_TOKENS) if place % every == 0 else length for place, length in lengths)
    )


def measure_slowdown(alone: Scene, together: RecordedRun, bounds: Bounds) -> Slowdown:
    """Return how much the two sides slow each other down. `alone` was measured in a synchronous mode; `together` is the
    same run with both sides at work, under `bounds`. Each side is slowed for as long as the other works."""
    expected = simulate(replace(alone, bounds=bounds))
    per_token_s = sum(together.train_s) / sum(together.step_tokens)
    slower_training = per_token_s / (alone.training.per_token_s * alone.training.varies.mean)
    slower_generation = together.busy_per_token_s / expected.busy_per_token_s
    trains = sum(together.train_s) / (together.steps * together.step_s)
    return Slowdown(
        generation=max(1.0, 1 + (slower_generation - 1) / min(1.0, trains)),
        training=max(1.0, 1 + (slower_training - 1) / expected.engine_busy),
    )


class Measurements:
    """Runs of async_vs_sync.py, kept until they are read."""

    def __init__(self, folder: Path, *, steps: int, window: tuple[int, int]) -> None:
        self._folder = folder
        self._steps = steps
        self._window = window
        self.found: dict[tuple[str, str, int], dict[str, Any]] = {}

    def run(self, scene: str, mode: str, seed: int) -> None:
        import async_vs_sync

        config = self.config(scene, mode, seed)
        rows = read_metrics(config.run_dir, "step")
        if len(rows) < self._steps:
            rows = async_vs_sync.run(config)
        self.found[scene, mode, seed] = one = async_vs_sync.counted(rows, *self._window)
        said = f"wall {one['wall_s']:.2f} s, trainer waits {one['trainer_wait_share']:.1%}"
        said += f", lag {one['avg_sample_age']:.2f}, load {os.getloadavg()[0]:.1f}"
        print(f"  {scene} seed {seed} {mode}: {said}", flush=True)

    def config(self, scene: str, mode: str, seed: int) -> Any:
        import async_vs_sync

        return async_vs_sync.settings(scene, mode, seed, self._folder, self._steps)

    def recorded(self, scene: str, mode: str, seed: int) -> RecordedRun:
        config = self.config(scene, mode, seed)
        return read(
            Path(config.run_dir),
            n=config.rollout.n,
            groups_per_step=config.trainer.groups_per_step,
            window=self._window,
        )

    def replayed(self, scene: str, mode: str, seed: int) -> Scene:
        """The run as a scene."""
        recorded = self.recorded(scene, mode, seed)
        config = self.config(scene, mode, seed)
        bounds = ending(config.bounds, self._steps)
        return replace(scene_of(recorded, config, bounds, generated=generated(scene, recorded)), window=self._window)

    def sharing(self) -> Slowdown:
        """What the two sides cost each other, from the plain scene."""
        bounds = ending(self.config("plain", "fully_async", 0).bounds, self._steps)
        return measure_slowdown(self.replayed("plain", "sync", 0), self.recorded("plain", "fully_async", 0), bounds)

    def predicted(self, scene: str, mode: str, sharing: Slowdown) -> Outcome:
        base = self.replayed(scene, "sync", 0)
        bounds = ending(self.config(scene, mode, 0).bounds, self._steps)
        outcomes = [
            simulate(replace(base, bounds=bounds, slowdown=sharing), seed=seed) for seed in range(PREDICTED_SEEDS)
        ]
        return sorted(outcomes, key=lambda one: one.wall_s)[PREDICTED_SEEDS // 2]

    def measured(self, scene: str, mode: str, name: str) -> float:
        return median([one[name] for (of, in_mode, _), one in self.found.items() if (of, in_mode) == (scene, mode)])


def validate(scenes: list[str], seeds: int, folder: Path, *, quick: bool) -> dict[str, Any]:
    import async_vs_sync

    steps, first, last = (8, 2, 7) if quick else (async_vs_sync.STEPS, async_vs_sync.FIRST, async_vs_sync.LAST)
    runs = Measurements(folder, steps=steps, window=(first, last))
    for seed in range(seeds):
        for scene in dict.fromkeys(["plain", *scenes]):
            for mode in async_vs_sync.MODES:
                runs.run(scene, mode, seed)
    sharing = runs.sharing()
    figures: dict[str, Any] = {
        "slowdown": {"generation": sharing.generation, "training": sharing.training},
        "scenes": {},
    }
    for scene in scenes:
        for mode in async_vs_sync.MODES:
            found = runs.predicted(scene, mode, sharing)
            wall_s = runs.measured(scene, mode, "wall_s")
            figures["scenes"][f"{scene}/{mode}"] = {
                "measured_s": wall_s,
                "predicted_s": found.wall_s,
                "error": found.wall_s / wall_s - 1,
                "measured_waits": runs.measured(scene, mode, "trainer_wait_share"),
                "predicted_waits": found.trainer_waits,
                "measured_lag": runs.measured(scene, mode, "avg_sample_age"),
                "predicted_lag": found.lag_mean,
                "measured_all_s": [one["wall_s"] for key, one in runs.found.items() if key[:2] == (scene, mode)],
            }
    return figures


def promises(figures: dict[str, Any]) -> list[Promise]:
    found = [
        at_most(f"{name}: error of the wall time", abs(one["error"]), MOST_ERROR)
        for name, one in figures.get("scenes", {}).items()
    ]
    return [*found, at_least("group lives a minute", figures["lives"]["all_cores"], LIVES_PER_MINUTE)]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--scenes", nargs="+", choices=["plain", "tail", "judge"], default=["plain", "tail", "judge"])
    options.add_argument("--runs", type=Path, metavar="DIR", help="keep the runs there, and use those that are there")
    options.add_argument("--lives", action="store_true", help="only the speed of simulation")
    given = options.parse_args()
    facts = machine_facts()
    print(machine_line(facts), flush=True)
    figures: dict[str, Any] = {"machine": facts}
    if not given.lives:
        with tempfile.TemporaryDirectory(prefix="freewheel-bench-") as folder:
            seeds = 1 if given.quick else given.seeds
            figures |= validate(given.scenes, seeds, given.runs or Path(folder), quick=given.quick)
        head = (
            "scene / mode",
            "measured, s",
            "predicted, s",
            "error",
            "trainer waits",
            "predicted",
            "lag",
            "predicted",
        )
        table = [
            (
                name,
                f"{one['measured_s']:.2f}",
                f"{one['predicted_s']:.2f}",
                f"{one['error']:+.1%}",
                f"{one['measured_waits']:.1%}",
                f"{one['predicted_waits']:.1%}",
                f"{one['measured_lag']:.2f}",
                f"{one['predicted_lag']:.2f}",
            )
            for name, one in figures["scenes"].items()
        ]
        print("\n" + markdown_table(head, table))
        slower = figures["slowdown"]
        said = f"generation takes {slower['generation']:.2f} and training {slower['training']:.2f} times as long"
        print(f"\nside by side {said}")
    figures["lives"] = lives = measure_lives()
    said = f"{lives['one_process']:,.0f} in one process, {lives['all_cores']:,.0f} on {lives['cores']} cores"
    print(f"\ngroup lives simulated a minute: {said}")
    kept = promises(figures)
    print("\n" + promise_table(kept))
    write_json(given.json, figures)
    return exit_code(kept, quick=given.quick)


if __name__ == "__main__":
    raise SystemExit(main())
