"""What lies in a run's folder, by name: one place for those who write it and for those who read it.

    RUN/  config.yaml  run.lock                                                   what it was given, and that it lives
          metrics.jsonl  log.jsonl  fully_async_training.log  trace/  samples/    what it says of itself
          journal.sqlite  checkpoints/step_000040/  best/  final/                 what it goes on from, and its weights

Nothing heavy is imported: a page that is opened waits for no torch.
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
"""How a checkpoint's name begins; its step follows."""
BEST = "best"
FINAL = "final"
REPLACED = ".replaced"
"""How the name of a folder of weights ends while its successor is put in its place."""

_STEP = re.compile(rf"{STEP}(\d+)({re.escape(REPLACED)})?")


def saved_steps(run_dir: Path) -> dict[int, list[Path]]:
    """The checkpoints by their steps, whole or not, the oldest step first. A kill while one is replaced leaves two of a
    step, or the `.replaced` one alone, which comes after its successor."""
    found: dict[int, list[Path]] = {}
    for path in sorted((run_dir / CHECKPOINTS).glob(f"{STEP}*")):
        if named := _STEP.fullmatch(path.name):
            found.setdefault(int(named[1]), []).append(path)
    return dict(sorted(found.items()))
