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


class TellingTrainer(FullyAsyncTrainer):
    """Reports the prompts of each step in its metrics."""

    def _compute_custom_metrics(self, batch: Any) -> dict[str, Any]:
        return {"ordinals": sorted({int(uid) for uid in batch.non_tensor_batch["uid"]})}


class MarkingRollouter(Rollouter):
    """Marks its statistics."""

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "marks": 1}


async def slow_score(response: str, row: Mapping[str, Any], *, finish: str) -> Any:
    """Scores slowly, so that steps take long enough to be interrupted."""
    await asyncio.sleep(0.05)
    return TASK.score(response, row, finish=finish)  # type: ignore[arg-type]


async def even(response: str, row: Mapping[str, Any]) -> float:
    """A reward that a model with random weights gets now and then, as slow as `slow_score`."""
    await asyncio.sleep(0.05)
    return float(len(response) % 2 == 0)


def monitor(trainer_stats: Mapping[str, Any], rollouter_stats: Mapping[str, Any]) -> None:
    with Path(os.environ[MONITORED]).open("a") as file:
        file.write(json.dumps([dict(trainer_stats)["global_steps"], dict(rollouter_stats)["marks"]]) + "\n")
