"""The five components as plain classes in one process, joined by direct calls: no Ray, no actors.

    python examples/train/without_ray.py [--steps N] [--run-dir DIR]

Every component takes the others through a few methods that it needs. What Ray adds is processes around them, and
`FullyAsyncMain`, which watches those.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from freewheel.queue.message_queue import MessageQueue
from freewheel.runtime.building import RolloutSide, TrainSide, model_folder, synchronizer
from freewheel.runtime.config_files import to_config
from freewheel.runtime.placement import Machine
from freewheel.runtime.plan import resolve


async def train(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A whole run; gives the metrics of each step."""
    config = to_config(settings)
    plan = resolve(config, Machine.here())
    made = RolloutSide(config=config, plan=plan, name="rollouter", model_path=model_folder(config), version=0)
    trained = TrainSide(config=config, plan=plan, run_dir=settings["run_dir"], resume=None)
    queue = MessageQueue(bounds=config.bounds, total_prompts=made.prompts.total)
    rollouter = made.rollouter(queue)
    sync = synchronizer(config, {"rollouter": rollouter}, queue)
    trainer = trained.trainer(queue, sync, no_evaluation)
    beside = [asyncio.create_task(rollouter.run()), asyncio.create_task(sync.run())]
    try:
        await trainer.run()
    finally:
        await queue.close()  # everybody who waits for it is told
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await rollouter.close()
        trainer.close()
    return [row.values for row in trainer.drain_rows()]


async def no_evaluation(step: int) -> None:
    """There are no held-out prompts here."""


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--run-dir", type=Path, default=Path("runs/without_ray"))
    given = options.parse_args()
    settings = {"trainer": {"total_steps": given.steps}, "run_dir": str(given.run_dir), "eval": {"prompts": 0}}
    for row in asyncio.run(train(settings)):
        print(f"step {row['global_steps']}: reward {row['rollout/reward_mean']:.3f}, age {row['avg_sample_age']:.1f}")


if __name__ == "__main__":
    main()
