"""User code inside a disturbed run: a trainer that records what it trained on, and reward functions.

    WitnessTrainer ── one line a step, appended ──▶ $FREEWHEEL_CHAOS_WITNESS ──▶ freewheel's account is compared with it

The file is written by the process that trains and by nobody else: neither queue nor journal nor coordinator can make it
say what they would like to be true. Imported by the processes of a run by this file's name, so it imports nothing of
the tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from freewheel.data.tasks.word_problems import TASK
from freewheel.trainer.trainer import FullyAsyncTrainer

FILE = "FREEWHEEL_CHAOS_WITNESS"
"""Environment variable with the path of the witness's file."""
SCORE_S = 0.05
"""Scoring takes a moment, so that a kill always hits some response in scoring."""


class WitnessTrainer(FullyAsyncTrainer):
    """Writes a line after each update: the step, its prompts, its largest lag, and its mean reward."""

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
            "process": os.getpid(),
            "wall_s": time.time(),
        }
        file = os.open(os.environ[FILE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")  # one write: a kill leaves it whole or not there
        finally:
            os.close(file)
        return {}


async def slow_score(response: str, row: Mapping[str, Any], *, finish: str) -> Any:
    await asyncio.sleep(SCORE_S)
    return TASK.score(response, row, finish=finish)  # type: ignore[arg-type]


def score_in_process(response: str, row: Mapping[str, Any], *, finish: str) -> Any:
    """A score for `reward.executor=process`."""
    return TASK.score(response, row, finish=finish)  # type: ignore[arg-type]
