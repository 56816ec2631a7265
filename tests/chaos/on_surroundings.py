"""Scenarios in which a run's surroundings fail, with a kill: its judge, its disk, its files, the clock."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from freewheel.judge.testing import JudgeProfile, MockJudge

from .account import Result
from .acting import disturbed
from .harness import HERE, JOURNAL, Disturbed

DISK_BYTES = 48 << 20
"""Size of the small disk: several checkpoints of the embedded model, 2 MB each, and a journal."""
BLOCK_BYTES = 64 << 10
FULL_S = 4.0
"""How long the disk stays full, twice: the journal retries every second."""
OUTAGE_AFTER_S, OUTAGE_S = 1.5, 6.0
"""From the first request on: within the run, and longer than a client retries a request."""
JUMP_S = 7200.0
"""Two hours: more than any timeout."""


# -- rewards ----------------------------------------------------------------------------------------------------------


def reward_workers(folder: Path, seed: int, kills: int) -> Result:
    """Kill child processes that score."""
    draw = random.Random(seed)

    def during(run: Disturbed) -> None:
        for step in (3, 8, 13):
            run.wait_step(step)
            children = run.wait("a reward worker", lambda: run.children_of("rollouter", "reward_workers"), nap_s=0.05)
            run.strike_pid("reward worker", draw.choice(children))

    return disturbed(
        folder, "reward workers", seed, during,
        reward__function="witness:score_in_process", reward__executor="process", reward__workers=2,
    )  # fmt: skip


def judge_outage(folder: Path, seed: int, kills: int) -> Result:
    """A judge answers 503 for some seconds. Meanwhile its client process dies, and then the rollouter."""
    outage = ((OUTAGE_AFTER_S, OUTAGE_S),)
    with MockJudge(JudgeProfile(seed=seed, latency_s=0.05, outages=outage, outage_kind="503")).in_process() as judge:

        def during(run: Disturbed) -> None:
            run.wait("a 503", lambda: judge.counts().by_status.get(503), nap_s=0.05)
            for child in run.children_of("rollouter", "freewheel.judge")[:1]:
                run.strike_pid("judge engine", child)
            time.sleep(OUTAGE_S / 3)
            run.strike("rollouter", during="judge outage")

        settings = f"{{api_endpoint: '{judge.url}', model_name: mock, enable: false, reward_coefficient: 0.01}}"
        key = {"OPENAI_API_KEY": "sk-of-a-mock"}
        return disturbed(folder, "judge outage", seed, during, reward__judge=settings, env=key)


# -- files ------------------------------------------------------------------------------------------------------------


def full_disk(folder: Path, seed: int, kills: int) -> Result:
    """The run directory is on a disk that is full for some seconds. The queue dies during that time, and the trainer
    when there is room again."""

    def during(run: Disturbed) -> None:
        run.wait_step(6)
        ballast = run.run_dir.parent / "ballast"
        fill(ballast)
        time.sleep(FULL_S)
        held_at = run.step
        run.strike("queue", during="full disk")
        time.sleep(FULL_S)
        if run.step > held_at:
            run.problems.append(f"steps {held_at} to {run.step} were trained while nothing could be written down")
        ballast.unlink()
        run.wait_step(held_at + 3)
        run.strike("trainer", during="after a full disk")

    with small_disk(folder / "disk") as disk:
        return disturbed(folder, "full disk", seed, during, run_dir=disk / "run")


def fill(ballast: Path) -> None:
    """Fill the disk to the last byte."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"\0" * BLOCK_BYTES):
            pass


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of `DISK_BYTES`. Needs permission to mount."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "freewheel-chaos", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


def corrupt_checkpoint(folder: Path, seed: int, kills: int) -> Result:
    """The newest checkpoint has a wrong byte: the run uses the one before it, and the journal has the rest."""

    def during(run: Disturbed) -> None:
        run.wait("three checkpoints", lambda: "step_000012" in run.checkpoints())
        run.wait_step(14)
        run.strike_tree(during="before a checkpoint is damaged")
        newest = run.run_dir / "checkpoints" / max(run.checkpoints())
        flip_bytes(newest / "model.safetensors", random.Random(seed), count=1)
        run.start()

    return disturbed(folder, "corrupt checkpoint", seed, during)


def truncated_journal(folder: Path, seed: int, kills: int) -> Result:
    """The journal's newest bytes never reached the disk."""
    draw = random.Random(seed)

    def during(run: Disturbed) -> None:
        for _ in range(2):
            run.wait_step(run.step + draw.randint(4, 7))
            run.strike_tree(during="before the journal is cut")
            tail = run.run_dir / f"{JOURNAL}-wal"
            if tail.exists():
                os.truncate(tail, int(tail.stat().st_size * draw.random()))
            run.start()

    return disturbed(folder, "truncated journal", seed, during)


def garbled_journal(folder: Path, seed: int, kills: int) -> Result:
    """The journal cannot be read: the run continues from its newest checkpoint."""

    def during(run: Disturbed) -> None:
        run.wait("two checkpoints", lambda: "step_000008" in run.checkpoints())
        run.wait_step(10)
        run.strike_tree(during="before the journal is garbled")
        flip_bytes(run.run_dir / JOURNAL, random.Random(seed), count=2000)
        run.start()

    return disturbed(folder, "garbled journal", seed, during)


def flip_bytes(path: Path, draw: random.Random, *, count: int) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for at in (draw.randrange(size) for _ in range(count)):
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 0xFF]))


# -- time -------------------------------------------------------------------------------------------------------------


def clock_jump(folder: Path, seed: int, kills: int) -> Result:
    """The wall clock jumps two hours ahead and then far back, with a kill after each jump."""
    folder.mkdir(parents=True, exist_ok=True)
    clock = folder / "clock"
    clock.write_text("0")

    def during(run: Disturbed) -> None:
        for step, off_s, role in ((5, JUMP_S, "trainer"), (12, -JUMP_S, "queue")):
            run.wait_step(step)
            clock.write_text(str(off_s))
            run.wait_step(run.step + 1)
            run.strike(role, during="a clock that jumped")
            run.wait_step(run.step + 2)

    env = {"FREEWHEEL_CHAOS_CLOCK": str(clock), "PYTHONPATH": str(HERE / "clock")}
    return disturbed(folder, "clock jump", seed, during, env=env)
