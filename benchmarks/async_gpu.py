"""The scenes of `async_vs_sync.py --engine vllm`: training and generation share one GPU.

    plain   256 tokens a response
    tail    one response in twenty is six times as long as the others
    judge   a score takes a second; every mode scores responses as they finish, sync included

CUDA events on both sides tell when the GPU was busy: around every step of vLLM's model runner and around every step of
the trainer. The rest of the time it was idle. Several engines share the GPU, because a step of a small model is so
short that the Python of one vLLM, on one core, cannot keep it busy. Configurations name the classes here.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_scenes import _uniform
from common import Promise, at_least, at_most, markdown_table
from freewheel.rollout.engine import SamplingParams
from freewheel.rollout.generation import Sampling
from freewheel.rollout.rollouter import Rollouter
from freewheel.trainer.trainer import FullyAsyncTrainer

PLAIN_TOKENS, TAIL_SHORT_TOKENS, TAIL_LONG_TOKENS = 256, 160, 960
TAIL_SHARE = 0.05
JUDGE_S = 1.0
FOLDER = "FREEWHEEL_BENCH_DIR"
"""Environment variable with the folder that intervals are written to."""

Interval = tuple[float, float]
"""Start and end by the wall clock."""


def idle_share(busy: list[Interval], since: float, until: float) -> float:
    """Share of a time span that no interval covers."""
    covered, end = 0.0, since
    for start, stop in sorted(busy):
        start, stop = max(start, end), min(stop, until)
        if stop > start:
            covered += stop - start
            end = stop
    return 1 - covered / (until - since)


class DeviceTimes:
    """Intervals between pairs of CUDA events."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.synchronize()
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record()
        self._base.synchronize()
        self._base_s = time.time()
        self._pairs: list[tuple[Any, Any]] = []

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, start: Any) -> None:
        self._pairs.append((start, self.mark()))

    def intervals(self) -> list[Interval]:
        self._torch.cuda.synchronize()
        return [
            (self._base_s + self._base.elapsed_time(start) / 1e3, self._base_s + self._base.elapsed_time(end) / 1e3)
            for start, end in self._pairs
        ]


def write(name: str, intervals: list[Interval], **more: Any) -> None:
    path = Path(os.environ[FOLDER]) / f"{name}.json"
    path.write_text(json.dumps({"busy": intervals, **more}))


# -- in vLLM's worker -------------------------------------------------------------------------------------------------


def trace_steps(worker: Any) -> None:
    """Record when each step of the worker runs. `collective_rpc` sends this function to the worker."""
    times = DeviceTimes()
    runner = worker.model_runner
    execute, sample = runner.execute_model, runner.sample_tokens
    begun: list[Any] = []

    def executing(*args: Any, **kwargs: Any) -> Any:
        start = times.mark()
        found = execute(*args, **kwargs)
        if found is None:  # sampling is a separate call
            begun.append(start)
        else:
            times.add(start)
        return found

    def sampling(*args: Any, **kwargs: Any) -> Any:
        found = sample(*args, **kwargs)
        if begun:
            times.add(begun.pop())
        return found

    runner.execute_model, runner.sample_tokens = executing, sampling
    worker.freewheel_times = times


def traced_steps(worker: Any) -> list[Interval]:
    return list(worker.freewheel_times.intervals())


# -- in the rollouter -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Lengths(Sampling):
    """Gives every response the length that the scene asks for: a model with random weights would never stop."""

    tail: bool = False

    def params(self, ordinal: int) -> tuple[SamplingParams, ...]:
        return tuple(
            replace(params, stop_token_ids=(), max_new_tokens=self._tokens(ordinal, index))
            for index, params in enumerate(super().params(ordinal))
        )

    def _tokens(self, ordinal: int, index: int) -> int:
        if not self.tail:
            return PLAIN_TOKENS
        return TAIL_LONG_TOKENS if _uniform("tail", ordinal, index) < TAIL_SHARE else TAIL_SHORT_TOKENS


class PlainRollouter(Rollouter):
    """Records when the engine's steps ran on the GPU."""

    tail = False

    def __init__(self, *, sampling: Sampling, **kwargs: Any) -> None:
        super().__init__(sampling=Lengths(**vars(sampling), tail=self.tail), **kwargs)

    async def run(self) -> None:
        await self._llm.collective_rpc(trace_steps)
        try:
            await super().run()
        finally:
            (intervals,) = await self._llm.collective_rpc(traced_steps)
            write(self.name, intervals, spans=self.spans.snapshot())

    @property
    def _llm(self) -> Any:
        """vLLM itself, because the engine has no method for traces."""
        return self.engine._llm._llm  # type: ignore[attr-defined]


class TailRollouter(PlainRollouter):
    tail = True


async def judged(response: str, row: Mapping[str, Any]) -> float:
    """Return scores that differ, so that there is something to learn from, after a second."""
    await asyncio.sleep(JUDGE_S)
    return _uniform("score", response)


async def scored(response: str, row: Mapping[str, Any]) -> float:
    return _uniform("score", response)


# -- in the trainer ---------------------------------------------------------------------------------------------------


class TracedTrainer(FullyAsyncTrainer):
    """Records when its steps ran on the GPU."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        times, backend = DeviceTimes(), self.backend
        step = backend.step

        def traced(*args: Any, **given: Any) -> dict[str, float]:
            start = times.mark()
            try:
                return step(*args, **given)
            finally:
                times.add(start)

        backend.step = traced  # type: ignore[method-assign]
        self._times = times

    def close(self) -> None:
        write("trainer", self._times.intervals())
        super().close()


# -- the comparison ---------------------------------------------------------------------------------------------------

MODES = ("sync", "one_step_off", "fully_async")
SHAPE = "0.5B"
GROUPS, GROUP = 32, 8
REPLICAS = 4
STEPS, FIRST, LAST = 14, 4, 13
"""The first steps fill the pipeline and compile; the last step empties it."""
SCENES = {
    "plain": ["rollout.rollouter_class=async_gpu:PlainRollouter", f"rollout.max_new_tokens={PLAIN_TOKENS}"],
    "tail": ["rollout.rollouter_class=async_gpu:TailRollouter", f"rollout.max_new_tokens={TAIL_LONG_TOKENS}"],
    "judge": [
        "rollout.rollouter_class=async_gpu:PlainRollouter",
        f"rollout.max_new_tokens={PLAIN_TOKENS}",
        "reward.function=async_gpu:judged",
    ],
}


def settings(scene: str, mode: str, model: Path, run_dir: Path) -> list[str]:
    return [
        f"model.path={model}",
        "data.max_prompt_tokens=64",
        "rollout.engine=vllm",
        f"rollout.n={GROUP}",
        f"rollout.replicas={REPLICAS}",
        f"rollout.slots={GROUPS * GROUP // REPLICAS}",
        "reward.function=async_gpu:scored",
        "reward.concurrency=8192",
        f"trainer.groups_per_step={GROUPS}",
        f"trainer.total_steps={STEPS}",
        "trainer.micro_batch_tokens=32768",
        "trainer.trainer_class=async_gpu:TracedTrainer",
        "trainer.save_every_steps=null",
        "eval.prompts=0",
        "optimizer.lr=1e-6",
        *SCENES[scene],
        f"mode={mode}",
        f"run_dir={run_dir}",
    ]


def one_run(scene: str, mode: str, model: Path, folder: Path) -> dict[str, float]:
    from freewheel.observe.recorder import read_metrics
    from freewheel.runtime.config_files import compose
    from freewheel.runtime.main import FullyAsyncMain
    from freewheel.runtime.placement import Machine
    from freewheel.runtime.run_plan import resolve

    config = compose(settings(scene, mode, model, folder / f"{scene}-{mode}"))
    result = FullyAsyncMain(config=config, plan=resolve(config, Machine.here())).run()
    if result.outcome != "finished":
        raise SystemExit("\n".join(result.summary))
    rows = {row["step"]: row for row in read_metrics(result.run_dir) if row["kind"] == "step"}
    *engines, trainer = (
        json.loads((folder / f"{name}.json").read_text())
        for name in (*(f"rollouter-{place}" for place in range(REPLICAS)), "trainer")
    )
    ends = [stop for _, stop in trainer["busy"]]
    since, until = ends[FIRST - 1], ends[LAST - 1]
    within = [rows[step] for step in range(FIRST + 1, LAST + 1)]
    tokens = sum(GROUPS * GROUP * row["rollout/response_length_mean"] for row in within)

    def spent(name: str) -> float:
        """Seconds of one step of one engine."""
        return float(sum(engine["spans"].get(name, 0.0) for engine in engines) / len(engines) / STEPS)

    train_s = sorted(row["timing/train_s"] for row in within)[len(within) // 2]
    return {
        "wall_s": until - since,
        "tokens_per_s": tokens / (until - since),
        "idle_share": idle_share([one for part in (*engines, trainer) for one in part["busy"]], since, until),
        "generate_s": spent("generate"),
        "judge_s": spent("wait_reward"),
        "train_s": train_s,
        "lag": sum(row["avg_sample_age"] for row in within) / len(within),
    }


def compare(scenes: list[str], folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Run every mode in every scene, one after the other."""
    import shutil
    import sys

    import ray

    from freewheel.data.tasks.word_problems import model_path
    from shapes import write_model

    model = write_model(folder / "model", SHAPE)
    for file in model_path().glob("*token*"):
        shutil.copy(file, model)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), FOLDER: str(folder), "OMP_NUM_THREADS": "1"}
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the trace is a function that is sent to vLLM's worker
    ray.init(include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    found: dict[str, dict[str, dict[str, float]]] = {}
    try:
        for scene in scenes:
            for mode in MODES:
                one = one_run(scene, mode, model, folder)
                found.setdefault(scene, {})[mode] = one
                print(f"  {scene} {mode}: " + ", ".join(f"{k} {v:.3f}" for k, v in one.items()), flush=True)
    finally:
        ray.shutdown()
    for modes in found.values():
        for one in modes.values():
            one["speedup_vs_sync"] = one["tokens_per_s"] / modes["sync"]["tokens_per_s"]
    return found


def promises(figures: dict[str, dict[str, dict[str, float]]]) -> list[Promise]:
    """For the judge scene: the speedup if the judge's time were hidden completely, from sync's own spans."""
    found = []
    for scene, modes in figures.items():
        sync, ours = modes["sync"], modes["fully_async"]
        if scene == "judge":
            without = sync["generate_s"] + sync["train_s"]
            hidden = (without + sync["judge_s"]) / without
            found.append(at_least("judge: speedup over the most possible", ours["speedup_vs_sync"] / hidden, 0.9))
        if scene == "plain":
            found.append(at_least("plain.fully_async.speedup_vs_sync", ours["speedup_vs_sync"], 0.97))
        found.append(at_most(f"{scene}.fully_async.idle_share", ours["idle_share"], 0.05))
    return found


def tables(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    head = ("tokens trained/s", "speedup", "GPU idle", "generate, s", "judge, s", "train, s", "lag")
    parts = []
    for scene, modes in figures.items():
        rows = [
            (
                mode,
                f"{one['tokens_per_s']:,.0f}",
                f"{one['speedup_vs_sync']:.2f}",
                f"{one['idle_share']:.1%}",
                f"{one['generate_s']:.2f}",
                f"{one['judge_s']:.2f}",
                f"{one['train_s']:.2f}",
                f"{one['lag']:.1f}",
            )
            for mode, one in modes.items()
        ]
        parts.append(markdown_table((scene, *head), rows))
    return "\n\n".join(parts)
