"""Code of a user that a configuration names: classes, reward functions and a monitor.

The processes of a run import it by this file's name, so it imports nothing of the tests.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freewheel.data.tasks.word_problems import TASK
from freewheel.rollout.rollouter import Rollouter
from freewheel.trainer.trainer import FullyAsyncTrainer

MONITORED = "FREEWHEEL_TEST_MONITORED"
"""Environment variable with the file that `monitor` appends to."""
WITNESS = "FREEWHEEL_CHAOS_WITNESS"
"""Environment variable with the file that `WitnessTrainer` appends to."""
SCORE_S = 0.05


class TellingTrainer(FullyAsyncTrainer):
    """Reports the prompts of each step in its metrics."""

    def _compute_custom_metrics(self, batch: Any) -> dict[str, Any]:
        return {"ordinals": sorted({int(uid) for uid in batch.non_tensor_batch["uid"]})}


class WitnessTrainer(FullyAsyncTrainer):
    """Appends a line to the witness's file after each update: the step, its prompts, its largest lag, its mean reward.

    Only the process that trains writes the file, so queue, journal and coordinator cannot change what it says.
    """

    def _compute_custom_metrics(self, batch: Any) -> dict[str, float]:
        made = batch.batch["response_mask"].bool()
        oldest = int(batch.batch["versions"][made].min())
        scored = batch.batch["reward_mask"].bool()
        values = batch.batch["token_level_scores"].sum(dim=1)[scored]
        line = {
            "step": self.global_steps + 1,
            "ordinals": sorted({int(uid) for uid in batch.non_tensor_batch["uid"]}),
            "lag": self.current_param_version - oldest,
            "reward": float(values.mean()) if len(values) else None,
        }
        file = os.open(os.environ[WITNESS], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")  # one write: a kill leaves it whole or not there
        finally:
            os.close(file)
        return {}


class MarkingRollouter(Rollouter):
    """Marks its statistics."""

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "marks": 1}


def score(response: str, row: Mapping[str, Any], *, finish: str) -> Any:
    return TASK.score(response, row, finish=finish)  # type: ignore[arg-type]


async def slow_score(response: str, row: Mapping[str, Any], *, finish: str) -> Any:
    """Scores slowly: steps can be interrupted, and a kill always hits some response in scoring."""
    await asyncio.sleep(SCORE_S)
    return score(response, row, finish=finish)


async def even(response: str, row: Mapping[str, Any]) -> float:
    """A reward that a model with random weights gets now and then, as slow as `slow_score`."""
    await asyncio.sleep(SCORE_S)
    return float(len(response) % 2 == 0)


def monitor(trainer_stats: Mapping[str, Any], rollouter_stats: Mapping[str, Any]) -> None:
    """Statistics are empty if the component did not answer in time."""
    with Path(os.environ[MONITORED]).open("a") as file:
        file.write(json.dumps([trainer_stats.get("global_steps"), rollouter_stats.get("marks")]) + "\n")
