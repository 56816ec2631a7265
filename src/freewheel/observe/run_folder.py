"""What lies in a run's folder, by name: one place for those who write it and for those who read it.

    RUN/  config.yaml  run.lock                                                   what it was given, and that it lives
          metrics.jsonl  log.jsonl  fully_async_training.log  trace/  samples/    what it says of itself
          journal.sqlite  checkpoints/step_000040/  best/  final/                 what it goes on from, and its weights

Nothing heavy is imported: a page that is opened waits for no torch.
"""

from __future__ import annotations

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


def saved_steps(run_dir: Path) -> dict[int, Path]:
    """The checkpoints by their steps, whole or not, the oldest first."""
    found = ((path.name.removeprefix(STEP), path) for path in (run_dir / CHECKPOINTS).glob(f"{STEP}*"))
    return dict(sorted((int(step), path) for step, path in found if step.isdecimal()))
