"""Measures what asynchrony gains: the same training in three modes, side by side.

    python benchmarks/async_vs_sync.py [--json FILE] [--quick] [--seeds N] [--scenes plain tail judge] [--runs DIR]
    python benchmarks/async_vs_sync.py --engine vllm      on one GPU that both share: see async_gpu.py

    plain   word problems, 128 prompts x 8 a step, 40 steps
    tail    one response in twenty is six times as long as the others
    judge   a score takes 0.5 to 1.5 s; every mode scores responses as they finish, sync included

Each run starts its own Ray, as `freewheel train` does: a Ray that many runs have used watches all their log files
(measured: 4% of the wall time). Each actor has one thread. There are no checkpoints, evaluations or pages.
Seeds and modes take turns, so that a noisy minute affects all of them. Steps 5 to 35 count, because the first steps
fill the pipeline and the last ones empty it. A step has 128 groups instead of 32: with the tiny model a step of 32 is
so short that a judge of one second cannot be hidden within 3 versions. `--runs` keeps the runs for plan.py.

Generation has one core and training the other, in a run and alone. A rollouter's threads take turns anyway, and without
binding the scheduler moves them onto the trainer's core (measured: 7% of the wall time).

`efficiency` is the time of the slower side alone, for the same tokens and steps, over the wall time; 1 means that the
other side costs nothing. Training alone is the time of the steps in `sync`, where nothing else runs. Generation alone
is a whole rollouter (engine, decoding, the task's score, encoding) whose groups are removed as they arrive. It is
measured with the weights of the end after each mode's run (the median counts) and with those of the start. Responses
grow from 7 tokens to 17 meanwhile, and a token of a long one takes less time; a line through the two measurements gives
the time for the responses of a step.
`final_reward` is the mean of the last five steps; `reward_at_equal_wall` is that of the five steps before the fastest
mode finished. The judge is an async function that sleeps; the judge's own benchmarks measure what a real one costs.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import async_scenes
from common import (
    Promise,
    at_least,
    exit_code,
    machine_facts,
    machine_line,
    markdown_table,
    median,
    parser,
    promise_table,
    write_json,
)
from freewheel.data.tasks.word_problems import model_path
from freewheel.observe.recorder import read_metrics
from freewheel.queue.message_queue import MessageQueue
from freewheel.queue.staleness import Bounds
from freewheel.rollout.reward_functions import load_reward
from freewheel.runtime.building import RolloutSide
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import compose
from freewheel.runtime.main import FullyAsyncMain
from freewheel.runtime.placement import Machine
from freewheel.runtime.run_plan import resolve

MODES = ("sync", "one_step_off", "fully_async")
FIRST, LAST, STEPS = 5, 35, 40
SMOOTH = 5
"""Number of steps over which a reward is averaged."""
COMMON = [
    "trainer.groups_per_step=128",
    f"trainer.total_steps={STEPS}",
    "trainer.save_every_steps=null",
    "eval.prompts=0",
    "observe.dashboard=false",
    "reward.concurrency=8192",
    "rollout.rollouter_class=async_scenes:BoundRollouter",
    "trainer.trainer_class=async_scenes:BoundTrainer",
]
SCENES = {
    "plain": [],
    "tail": [
        f"rollout.max_new_tokens={async_scenes.TAIL_TOKENS}",
        "rollout.rollouter_class=async_scenes:TailRollouter",
    ],
    "judge": ["reward.function=async_scenes:judged"],
}
GENERATED_ALONE = 10
"""Number of batches that measure the speed of generation alone."""


def settings(scene: str, mode: str, seed: int, runs: Path, steps: int) -> TrainConfig:
    """Settings of the run that is kept in `runs`."""
    run_dir = runs / f"{scene}-{mode}-{seed}"
    own = [f"mode={mode}", f"seed={seed}", f"run_dir={run_dir}", f"trainer.total_steps={steps}"]
    return compose([*COMMON, *SCENES[scene], *own])


def run(config: TrainConfig) -> list[dict[str, Any]]:
    """Run one training and return its metrics, one row a step."""
    result = FullyAsyncMain(config=config, plan=resolve(config, Machine.here())).run()
    if result.outcome != "finished":
        raise SystemExit("\n".join(result.summary))
    return [row for row in read_metrics(result.run_dir) if row["kind"] == "step"]


class Alone(NamedTuple):
    """Generation alone: a rollouter whose groups are removed as they arrive."""

    tokens: float
    """Per response."""
    response_s: float


def generates_alone(scene: str, config: TrainConfig, model: Path) -> Alone:
    try:
        return asyncio.run(_generate_alone(scene, config, model))
    finally:
        gc.unfreeze()
        async_scenes.bind(set(async_scenes.CORES))


async def _generate_alone(scene: str, config: TrainConfig, model: Path) -> Alone:
    plan = resolve(config, Machine.here())
    side = RolloutSide(config=config, plan=plan, name="alone", model_path=str(model), version=0)
    groups = config.trainer.groups_per_step
    bounds = Bounds(groups_per_step=groups, threshold=3, window=2 * groups + 1, max_alive=10**6, max_lag_allowed=10**6)
    queue = MessageQueue(bounds=bounds)
    if scene == "judge":  # this measures generation
        side.reward = load_reward(None, side.task)
    rollouter = side.rollouter(queue)
    gc.collect()
    gc.freeze()  # as a rollouter's actor does
    running = asyncio.create_task(rollouter.run())
    since, tokens, responses = 0.0, 0, 0
    for step in range(1, GENERATED_ALONE + 2):
        while (await queue.take(step, wait_s=10.0)).groups is None:
            pass
        version = await queue.commit(step, wait_s=10.0)
        assert version is not None
        await queue.confirm_published(version)
        if step == 1:
            since = time.perf_counter()
            tokens, responses = side.engine.stats().generated_tokens, rollouter.total_generated_samples
    took = time.perf_counter() - since
    tokens = side.engine.stats().generated_tokens - tokens
    responses = rollouter.total_generated_samples - responses
    await rollouter.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await rollouter.close()
    return Alone(tokens / responses, took / responses)


def generation_alone_s(
    scene: str, config: TrainConfig, rows: list[dict[str, Any]], first: Alone, last: list[Alone]
) -> float:
    """Seconds that generation alone takes for the responses of these steps.

    Of the tail's long responses the pipeline sees only the beginning.
    """
    samples = config.trainer.groups_per_step * config.rollout.n
    share = async_scenes.TAIL_SHARE if scene == "tail" else 0.0
    end = Alone(median([one.tokens for one in last]), median([one.response_s for one in last]))
    token_s = (end.response_s - first.response_s) / (end.tokens - first.tokens)
    lengths = [(1 - share) * row["rollout/response_length_mean"] + share * async_scenes.TAIL_TOKENS for row in rows]
    return sum(samples * (end.response_s + token_s * (length - end.tokens)) for length in lengths)


def counted(rows: list[dict[str, Any]], first: int, last: int) -> dict[str, Any]:
    """The figures of a run between two steps."""
    within = [row for row in rows if first < row["step"] <= last]
    ends = {row["step"]: row["timing/elapsed_s"] for row in rows}
    wall = ends[last] - ends[first]
    return {
        "rows": within,
        "wall_s": wall,
        "train_s": sum(row["timing/train_s"] for row in within),
        "trainer_wait_share": sum(row["timing/wait_batch_s"] for row in within) / wall,
        "avg_sample_age": sum(row["avg_sample_age"] for row in within) / len(within),
        "final_reward": reward_at(rows, ends[rows[-1]["step"]]),
        "whole_s": ends[rows[-1]["step"]],
    }


def reward_at(rows: list[dict[str, Any]], elapsed_s: float) -> float:
    """Mean reward of the last steps that were done by then."""
    done = [row["rollout/reward_mean"] for row in rows if row["timing/elapsed_s"] <= elapsed_s]
    return sum(done[-SMOOTH:]) / len(done[-SMOOTH:])


def one_seed(scene: str, seed: int, runs: Path, steps: int, first: int, last: int) -> dict[str, dict[str, float]]:
    """Run all modes once, in an order that changes from seed to seed."""
    order = [MODES[(seed + place) % len(MODES)] for place in range(len(MODES))]
    found: dict[str, dict[str, Any]] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    ends: list[Alone] = []
    config = settings(scene, "sync", seed, runs, steps)
    for mode in order:
        trained = settings(scene, mode, seed, runs, steps)
        rows[mode] = run(trained)
        found[mode] = counted(rows[mode], first, last)
        ends.append(generates_alone(scene, config, Path(trained.run_dir) / "final"))
    start = generates_alone(scene, config, model_path())
    earliest = min(one["whole_s"] for one in found.values())
    for mode, one in found.items():
        generation = generation_alone_s(scene, config, one.pop("rows"), start, ends)
        training = found["sync"]["train_s"]
        one["generation_alone_s"], one["training_alone_s"] = generation, training
        one["efficiency"] = max(generation, training) / one["wall_s"]
        one["speedup_vs_sync"] = found["sync"]["wall_s"] / one["wall_s"]
        one["reward_at_equal_wall"] = reward_at(rows[mode], earliest)
        print(f"  {scene} seed {seed} {mode}: " + ", ".join(f"{k} {v:.3f}" for k, v in one.items()), flush=True)
    return found


def summarised(seeds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians of times and ratios, means of rewards."""
    means = ("final_reward", "reward_at_equal_wall")
    return {
        mode: {
            name: sum(one[mode][name] for one in seeds) / len(seeds)
            if name in means
            else median([one[mode][name] for one in seeds])
            for name in seeds[0][mode]
        }
        for mode in MODES
    }


def promises(figures: dict[str, Any]) -> list[Promise]:
    found = []
    for scene, least in (("plain", 0.88), ("tail", 0.88), ("judge", 0.75)):
        if scene not in figures:
            continue
        sync, ours = figures[scene]["sync"], figures[scene]["fully_async"]
        found.append(at_least(f"{scene}.fully_async.efficiency", ours["efficiency"], least))
        lost = ours["final_reward"] - sync["final_reward"]
        found.append(at_least(f"{scene}: final_reward against sync", lost, -0.03))
        won = ours["reward_at_equal_wall"] - sync["reward_at_equal_wall"]
        found.append(at_least(f"{scene}: reward at equal wall time against sync", won, 0.0))
    if "judge" in figures:
        found.append(
            at_least("judge.fully_async.speedup_vs_sync", figures["judge"]["fully_async"]["speedup_vs_sync"], 3)
        )
    return found


def on_a_gpu(given: Any) -> int:
    import async_gpu

    facts = machine_facts()
    print(machine_line(facts), flush=True)
    with tempfile.TemporaryDirectory(prefix="freewheel-bench-") as folder:
        figures = async_gpu.compare(given.scenes, Path(folder))
    kept = async_gpu.promises(figures)
    print("\n" + async_gpu.tables(figures) + "\n\n" + promise_table(kept))
    write_json(given.json, {**figures, "machine": facts})
    return exit_code(kept)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--scenes", nargs="+", choices=[*SCENES], default=[*SCENES])
    options.add_argument("--runs", type=Path)
    options.add_argument("--engine", choices=["native", "vllm"], default="native")
    given = options.parse_args()
    if given.runs is not None and (given.engine == "vllm" or (given.runs.is_dir() and any(given.runs.iterdir()))):
        options.error("--runs: an empty folder, for runs of the native engine")
    if given.engine == "vllm":
        return on_a_gpu(given)
    seeds, steps, first, last = (1, 8, 2, 7) if given.quick else (given.seeds, STEPS, FIRST, LAST)
    facts = machine_facts()
    print(machine_line(facts), flush=True)
    by_scene: dict[str, list[dict[str, dict[str, float]]]] = {scene: [] for scene in given.scenes}
    for seed in range(seeds):
        for scene in given.scenes:
            with tempfile.TemporaryDirectory(prefix="freewheel-bench-") as folder:
                by_scene[scene].append(one_seed(scene, seed, given.runs or Path(folder), steps, first, last))
    figures: dict[str, Any] = {scene: summarised(found) for scene, found in by_scene.items()}
    for scene, modes in figures.items():
        head = (scene, "wall, s", "speedup", "efficiency", "trainer waits", "lag", "final reward", "at equal wall")
        table = [
            (
                mode,
                f"{one['wall_s']:.1f}",
                f"{one['speedup_vs_sync']:.2f}",
                f"{one['efficiency']:.2f}",
                f"{one['trainer_wait_share']:.1%}",
                f"{one['avg_sample_age']:.1f}",
                f"{one['final_reward']:.3f}",
                f"{one['reward_at_equal_wall']:.3f}",
            )
            for mode, one in modes.items()
        ]
        print("\n" + markdown_table(head, table))
    kept = promises(figures)
    print("\n" + promise_table(kept))
    write_json(given.json, {**figures, "seeds": by_scene, "machine": facts})
    return exit_code(kept, quick=given.quick)


if __name__ == "__main__":
    raise SystemExit(main())
