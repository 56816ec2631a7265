"""Names of the files in a run's folder, for its writers and readers.

    RUN/  config.yaml  run.lock                                                   its settings, and whether it is live
          metrics.jsonl  log.jsonl  fully_async_training.log  trace/  samples/    what it reports
          journal.sqlite  checkpoints/step_000040/  best/  final/                 what it resumes from, and its weights

Imports nothing heavy, so that the dashboard starts without torch.
"""

from __future__ import annotations

import re
from pathlib import Path

CONFIG = "config.yaml"
LOCK = "run.lock"
METRICS = "metrics.jsonl"
LOG = "log.jsonl"
TEXT_LOG = "fully_async_training.log"
TRACE = "trace"
SAMPLES = "samples"
JOURNAL = "journal.sqlite"
CHECKPOINTS = "checkpoints"
STEP = "step_"
"""A checkpoint's name starts with this, followed by its step."""
BEST = "best"
FINAL = "final"
REPLACED = ".replaced"
"""Suffix of a folder of weights while its successor takes its place."""

_STEP = re.compile(rf"{STEP}(\d+)({re.escape(REPLACED)})?")


def saved_steps(run_dir: Path) -> dict[int, list[Path]]:
    """Return the checkpoints by step, oldest step first, whole or not. If a process is killed while it replaces one, a
    step has two of them, or only the `.replaced` one, which comes after its successor."""
    found: dict[int, list[Path]] = {}
    for path in sorted((run_dir / CHECKPOINTS).glob(f"{STEP}*")):
        if named := _STEP.fullmatch(path.name):
            found.setdefault(int(named[1]), []).append(path)
    return dict(sorted(found.items()))
