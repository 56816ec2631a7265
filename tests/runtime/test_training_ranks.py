"""A whole run with two training processes survives the death of either, leaves none behind, and resumes with one."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from freewheel.observe.recorder import read_metrics
from freewheel.runtime.account import RunResult
from freewheel.trainer.checkpoint import CheckpointStore

from .mortal import journal_of
from .test_whole_run import RAY_GOES_S, TELLING, main_of, wait_until
from .test_whole_run import cluster as cluster
from .test_whole_run import looks_often as looks_often
from .test_whole_run import user_modules as user_modules

pytestmark = pytest.mark.timeout(400)

STEPS = 24
TRAINER: dict[str, Any] = {"total_steps": STEPS, "save_every_steps": 3, "max_errors": 1, "trainer_class": TELLING}
STROKES = (("rank-1", signal.SIGKILL), ("trainer", signal.SIGKILL), ("rank-1", signal.SIGSTOP))


def told_of(folder: Path, role: str) -> list[int]:
    return [row["process"] for row in read_metrics(folder, "event") if row.get("role") == role]


def struck(folder: Path, **sections: Any) -> RunResult:
    """Send each signal to the newest process of its role, some steps after the last signal."""
    main = main_of(folder, reward={"function": "user_code:slow_score"}, recovery={"silent_s": 10.0}, **sections)
    found: list[RunResult] = []
    running = threading.Thread(target=lambda: found.append(main.run()))
    running.start()
    try:
        for times, (role, number) in enumerate(STROKES, start=1):
            steps = len(read_metrics(folder, "step")) + 2
            wait_until(lambda: len(read_metrics(folder, "step")) >= steps or bool(found))  # noqa: B023
            wait_until(lambda: len(told_of(folder, "rank-1")) >= times or bool(found))  # noqa: B023
            assert not found, "the run was over before it was struck"
            os.kill(told_of(folder, role)[-1], number)
    finally:
        running.join(300)
    (result,) = found
    return result


def check_that_nobody_is_left(folder: Path) -> None:
    started = [row["process"] for row in read_metrics(folder, "event") if "role" in row]
    wait_until(lambda: not any(map(is_alive, started)), RAY_GOES_S)


def is_alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def check_that_the_newest_checkpoint_lies_in_shards(folder: Path, world: int) -> None:
    store = CheckpointStore(folder, keep_last=2)
    latest = store.latest()
    assert latest is not None
    files = store.load(latest).tensor_files()
    assert [file.name for file in files] == [f"shard_{n:05d}_of_{world:05d}.safetensors" for n in range(1, world + 1)]
    assert (latest / "model.safetensors").is_file()
    modes = {oct(path.stat().st_mode & 0o777) for path in latest.rglob("*")}
    assert modes == {"0o600", "0o700"}, "others may not look into it"


def test_a_run_in_two_processes_survives_deaths_and_resumes_in_one(
    cluster: None, looks_often: None, tmp_path: Path
) -> None:
    """One test of one run, because a start takes longest."""
    result = struck(tmp_path, trainer={**TRAINER, "world_size": 2})
    assert (result.error, result.outcome, result.steps) == (None, "finished", STEPS)
    steps = journal_of(tmp_path)
    assert sorted(ordinal for ordinals in steps.values() for ordinal in ordinals) == list(range(4 * STEPS))
    log = (tmp_path / "fully_async_training.log").read_text()
    assert log.count("The training processes cannot continue, so the trainer ends: ") >= 2
    assert log.count("The trainer restarts from ") >= len(STROKES)
    assert "rank-1 was silent for 10 s" in log
    assert "the trainer ends: rank-1 died" in log and "rank 0 failed" not in log.lower(), "who died is named"
    assert "in 2 processes (FSDP2)" in log
    check_that_nobody_is_left(tmp_path)
    check_that_the_newest_checkpoint_lies_in_shards(tmp_path, 2)
    ranks = told_of(tmp_path, "rank-1")
    trainer = {**TRAINER, "world_size": 1, "total_steps": STEPS + 2}
    again = main_of(tmp_path, resume=True, trainer=trainer).run()
    assert (again.error, again.outcome, again.steps) == (None, "finished", STEPS + 2)
    assert told_of(tmp_path, "rank-1") == ranks, "one process has no ranks beside it"
    check_that_nobody_is_left(tmp_path)
