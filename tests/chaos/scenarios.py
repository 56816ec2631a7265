"""All scenarios by name. Each starts a run, disturbs it, brings it to its end and returns a `Result`.

    @scenario(kills=5)                          `SCENARIOS["tree"].run(folder, seed)`
    def tree(run, draw): …                      `draw`: seeded; the same seed strikes the same way

Processes die or are stopped: one, two or all, at any and at bad moments. The surroundings fail: judge, disk, files,
clock. Used by the tests of this folder and by `scripts/chaos.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from freewheel.judge.testing import JudgeProfile, MockJudge

from .account import Result
from .harness import HERE, JOURNAL, Disturbed, Finished, Stuck
from .plan import LONGEST_DELAY_S, PAIRS, ROLES, SOAK_STEPS, Strike, deal

SILENT_S = 3.0
"""`recovery.silent_s` for stopped processes: the default of a minute is long for a test."""
END_STEPS = 42
"""Not a multiple of the steps between two checkpoints, so the last steps are replayed after a kill."""
DISK_BYTES = 48 << 20
"""Size of the small disk: several checkpoints of the embedded model, 2 MB each, and a journal."""
BLOCK_BYTES = 64 << 10
FULL_S = 4.0
"""How long the disk stays full, twice: the journal retries every second."""
OUTAGE_AFTER_S, OUTAGE_S = 1.5, 6.0
"""From the first request on: within the run, and longer than a client retries a request."""
JUMP_S = 7200.0
"""Two hours: more than any timeout."""
SOAK, SOAK_KILLS = "roles", 12
ALONE = "undisturbed"
"""The scenario that rewards are compared with."""
SINGLE_ROLES = [(role,) for role in ROLES]

Disturb = Callable[[Disturbed, random.Random], None]
Prepare = Callable[[Disturbed], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    name: str
    disturb: Disturb
    kills: int
    """About how many processes it kills."""
    comparable: bool
    """Whether its reward is comparable to an undisturbed run's: not if the scenario changes what is trained on."""
    prepare: Prepare | None
    prompts: int | None
    settings: dict[str, Any] = field(default_factory=dict)

    def run(self, folder: Path, seed: int, kills: int | None = None) -> Result:
        """Start a run, disturb it, and bring it to its end. A run may finish before its last strike. A run that is
        stuck has a problem in its result, and is resumed so that the result covers a whole run."""
        folder.mkdir(parents=True, exist_ok=True)
        made = Disturbed(folder, scenario=self.name, seed=seed, prompts=self.prompts, settings=self.settings)
        made.wanted_kills = self.kills if kills is None else kills
        with self.prepare(made) if self.prepare else contextlib.nullcontext(), made as run:
            try:
                run.start()
                with contextlib.suppress(Finished):
                    self.disturb(run, random.Random(seed))
                run.to_the_end()
            except Stuck as error:
                run.problems.append(str(error))
                try:
                    run.strike_tree(during="stuck")
                    run.start().to_the_end()
                except Stuck as again:
                    run.problems.append(f"and when it was resumed: {again}")
            return run.result()


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *, kills: int, comparable: bool = True, prepare: Prepare | None = None, prompts: int | None = None, **settings: Any
) -> Callable[[Disturb], Disturb]:
    """`settings`: changes to the run, with two underscores for the dot of a key."""

    def register(disturb: Disturb, name: str = "") -> Disturb:
        SCENARIOS[name or disturb.__name__] = Scenario(
            name=name or disturb.__name__,
            disturb=disturb,
            kills=kills,
            comparable=comparable,
            prepare=prepare,
            prompts=prompts,
            settings={key.replace("__", "."): value for key, value in settings.items()},
        )
        return disturb

    return register


def carry_out(run: Disturbed, strikes: Sequence[Strike]) -> None:
    for strike in strikes:
        run.wait_step(strike.after_step)
        time.sleep(strike.delay_s)
        run.strike(*strike.roles)


@scenario(kills=0)
def undisturbed(run: Disturbed, draw: random.Random) -> None:
    pass


# -- processes --------------------------------------------------------------------------------------------------------


@scenario(kills=5)
def tree(run: Disturbed, draw: random.Random) -> None:
    """The machine goes down and the run is resumed, five times."""
    for _ in range(5):
        run.wait_step(run.step + draw.randint(1, 4))
        time.sleep(draw.uniform(0, LONGEST_DELAY_S))
        run.strike_tree()
        run.start()


@scenario(kills=SOAK_KILLS, trainer__total_steps=SOAK_STEPS)
def roles(run: Disturbed, draw: random.Random) -> None:
    """kill -9 of any role at any moment, repeatedly, also while the run recovers."""
    carry_out(run, deal(seed=run.seed, targets=SINGLE_ROLES, kills=run.wanted_kills))


@scenario(kills=2 * len(PAIRS), trainer__total_steps=SOAK_STEPS)
def pairs(run: Disturbed, draw: random.Random) -> None:
    """Kill two roles at once."""
    carry_out(run, deal(seed=run.seed, targets=PAIRS, kills=2 * len(PAIRS)))


def each_role(run: Disturbed, draw: random.Random) -> None:
    """Kill each role once, a few steps apart, during evaluations."""
    carry_out(run, deal(seed=run.seed, targets=SINGLE_ROLES, kills=len(ROLES), last_step=20))


for _name, _settings in {
    "sync_mode": {"mode": "sync"},
    "one_step_off": {"mode": "one_step_off"},
    # Trainers die within a version, where there is no checkpoint. It learns later, because its samples are older.
    "slow_versions": {"async_training__sync_every_steps": 3, "trainer__total_steps": SOAK_STEPS},
    # Groups whose rewards are all equal are dropped, once and for that reason.
    "dropping": {"algorithm__zero_variance": "drop", "trainer__total_steps": 24, "comparable": False},
    # Prompts run out within a step.
    "used_up": {"data__limit": 250, "data__epochs": 3, "prompts": 750},
}.items():
    _evaluated: dict[str, Any] = {"eval__prompts": 16, "eval__every_steps": 5, **_settings}
    scenario(kills=len(ROLES), **_evaluated)(each_role, _name)  # type: ignore[call-arg]


@scenario(kills=2, rollout__replicas=2)
def replicas(run: Disturbed, draw: random.Random) -> None:
    """Kill one of two rollouters; the other continues."""
    for step in (4, 12):
        run.wait_step(step)
        run.strike("rollouter")


@scenario(kills=len(ROLES), recovery__silent_s=SILENT_S, trainer__total_steps=SOAK_STEPS)
def stopped(run: Disturbed, draw: random.Random) -> None:
    """SIGSTOP: the process lives but does nothing, and counts as dead after `recovery.silent_s`."""
    for step, role in zip(range(3, SOAK_STEPS, 6), draw.sample(ROLES, k=len(ROLES)), strict=False):
        run.wait_step(step)
        run.strike(role, number=signal.SIGSTOP)
        run.wait_step(run.step + 3)


@scenario(kills=2)
def driver(run: Disturbed, draw: random.Random) -> None:
    """Kill only the coordinator: its Ray must not keep the run locked. Resume once after a wait and once
    immediately."""
    for waits in (True, False):
        run.wait_step(run.step + draw.randint(2, 5))
        run.strike_driver()
        if waits:
            run.wait_gone()
        run.start()


@scenario(kills=1)
def ray_itself(run: Disturbed, draw: random.Random) -> None:
    """Kill the raylet, which all components need. The run ends by itself, leaves no process, and can be resumed."""
    run.wait_step(6)
    (raylet,) = run.family.below(run.program.pid, "raylet/raylet")
    run.strike_pid("raylet", raylet)
    run.finish(expect=range(1, 256))
    run.start()


@scenario(kills=2)
def ctrl_c(run: Disturbed, draw: random.Random) -> None:
    """Ctrl-C during a recovery: the run ends without a traceback, leaves no process, and can be resumed."""
    for role in ("trainer", "queue"):
        run.wait_step(run.step + 3)
        run.strike(role, during="before Ctrl-C")
        time.sleep(draw.uniform(0.2, 3.0))
        run.interrupt()
        run.finish(expect=(130,))
        run.start()


@scenario(kills=3, reward__function="user_code:score", reward__executor="process", reward__workers=2)
def reward_workers(run: Disturbed, draw: random.Random) -> None:
    """Kill child processes that score."""
    for step in (3, 8, 13):
        run.wait_step(step)
        children = run.wait("a reward worker", lambda: run.children_of("rollouter", "reward_workers"), nap_s=0.05)
        run.strike_pid("reward worker", draw.choice(children))


# -- moments ----------------------------------------------------------------------------------------------------------


@scenario(kills=3, trainer__save_every_steps=3)
def during_save(run: Disturbed, draw: random.Random) -> None:
    """Kill the trainer twice, then everything, while a checkpoint is half written."""

    def half_written() -> None:
        run.wait("a save that has begun", run.saving, nap_s=0.0005)
        time.sleep(draw.uniform(0, 0.01))

    for again in range(3):
        if again < 2:
            run.strike("trainer", during="save", at=half_written)
        else:
            run.strike_tree(during="save", at=half_written)
        if not run.saving():  # what a save that was struck has written is there until somebody saves again
            run.kills[-1] = replace(run.kills[-1], during="just after a save")
        if again < 2:
            run.wait_step(run.step + 2)
    run.start()


@scenario(kills=2, trainer__save_every_steps=8)
def at_start(run: Disturbed, draw: random.Random) -> None:
    """Kill a role while all are starting, and everything before the first checkpoint. The first kill may end the run,
    which then reports it and can be resumed."""
    run.strike(draw.choice(ROLES), during="start")
    with contextlib.suppress(Stuck):
        run.wait_step(1)
    if not run.running:
        run.finish(expect=(1,))
        run.start()
    run.wait_step(2)
    run.strike_tree(during="before a checkpoint")
    run.start()


@scenario(kills=3, trainer__total_steps=END_STEPS)
def at_end(run: Disturbed, draw: random.Random) -> None:
    """Kill the trainer twice, and another role, right after the last step, before it is committed, published, saved and
    exported."""
    for times, role in enumerate(("trainer", "trainer", draw.choice(("queue", "sync", "rollouter"))), start=1):

        def last_step_over(times: int = times) -> None:
            run.wait("the last step", lambda: run.times_trained(END_STEPS) >= times)
            time.sleep(draw.uniform(0, 0.03))

        run.strike(role, during="the end", at=last_step_over)


@scenario(kills=3)
def during_sync(run: Disturbed, draw: random.Random) -> None:
    """Kill each of the three roles that take part while weights go to the engines at the end of a step."""

    def step_over() -> None:
        run.wait_step(run.step + 1)
        time.sleep(draw.uniform(0, 0.1))

    for role in ("sync", "rollouter", "trainer"):
        run.wait_step(run.step + 3)
        run.strike(role, during="sync", at=step_over)


@scenario(kills=4, trainer__save_every_steps=3)
def during_compaction(run: Disturbed, draw: random.Random) -> None:
    """Kill the queue three times, at three offsets, and then everything, just after a checkpoint, when the journal
    drops what it covers."""

    def checkpointed() -> None:
        before = run.checkpoints()
        run.wait("a checkpoint", lambda: run.checkpoints() - before, nap_s=0.0005)
        time.sleep(draw.uniform(0, 0.03))

    run.wait("two checkpoints", lambda: len(run.checkpoints()) >= 2)  # the oldest that is kept is what it goes by
    for _ in range(3):
        run.strike("queue", during="compaction", at=checkpointed)
    run.strike_tree(during="compaction", at=checkpointed)
    run.start()


# -- surroundings -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def with_judge(run: Disturbed) -> Iterator[None]:
    profile = JudgeProfile(seed=run.seed, latency_s=0.05, outages=((OUTAGE_AFTER_S, OUTAGE_S),), outage_kind="503")
    with MockJudge(profile).in_process() as run.judge:
        endpoint = f"api_endpoint: '{run.judge.url}', model_name: mock, enable: false, reward_coefficient: 0.01"
        run.settings["reward.judge"] = f"{{{endpoint}}}"
        run.env["OPENAI_API_KEY"] = "sk-of-a-mock"
        yield


@scenario(kills=2, prepare=with_judge)
def judge_outage(run: Disturbed, draw: random.Random) -> None:
    """A judge answers 503 for some seconds. Meanwhile its client process dies, and then the rollouter."""
    run.wait("a 503", lambda: run.judge.counts().by_status.get(503), nap_s=0.05)
    for child in run.children_of("rollouter", "freewheel.judge")[:1]:
        run.strike_pid("judge engine", child)
    time.sleep(OUTAGE_S / 3)
    run.strike("rollouter", during="judge outage")


@contextlib.contextmanager
def on_small_disk(run: Disturbed) -> Iterator[None]:
    """The run directory is in a file system of `DISK_BYTES`. Needs permission to mount."""
    disk = run.run_dir.parent / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "freewheel-chaos", str(disk)], check=True)
    run.run_dir = disk / "run"
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


@scenario(kills=2, prepare=on_small_disk)
def full_disk(run: Disturbed, draw: random.Random) -> None:
    """The disk is full for some seconds. The queue dies during that time, and the trainer when there is room again."""
    run.wait_step(6)
    ballast = run.run_dir.parent / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"\0" * BLOCK_BYTES):
            pass
    time.sleep(FULL_S)
    held_at = run.step
    run.strike("queue", during="full disk")
    time.sleep(FULL_S)
    if run.step > held_at:
        run.problems.append(f"steps {held_at} to {run.step} were trained while nothing could be written down")
    ballast.unlink()
    run.wait_step(held_at + 3)
    run.strike("trainer", during="after a full disk")


@scenario(kills=1)
def corrupt_checkpoint(run: Disturbed, draw: random.Random) -> None:
    """The newest checkpoint has a wrong byte: the run uses the one before it, and the journal has the rest."""
    run.wait("three checkpoints", lambda: "step_000012" in run.checkpoints())
    run.wait_step(14)
    run.strike_tree(during="before a checkpoint is damaged")
    newest = run.run_dir / "checkpoints" / max(run.checkpoints())
    flip_bytes(newest / "model.safetensors", draw, count=1)
    run.start()


@scenario(kills=2)
def truncated_journal(run: Disturbed, draw: random.Random) -> None:
    """The journal's newest bytes never reached the disk."""
    for _ in range(2):
        run.wait_step(run.step + draw.randint(4, 7))
        run.strike_tree(during="before the journal is cut")
        tail = run.run_dir / f"{JOURNAL}-wal"
        if tail.exists():
            os.truncate(tail, int(tail.stat().st_size * draw.random()))
        run.start()


@scenario(kills=1)
def garbled_journal(run: Disturbed, draw: random.Random) -> None:
    """The journal cannot be read: the run continues from its newest checkpoint."""
    run.wait("two checkpoints", lambda: "step_000008" in run.checkpoints())
    run.wait_step(10)
    run.strike_tree(during="before the journal is garbled")
    flip_bytes(run.run_dir / JOURNAL, draw, count=2000)
    run.start()


def flip_bytes(path: Path, draw: random.Random, *, count: int) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for at in (draw.randrange(size) for _ in range(count)):
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 0xFF]))


@contextlib.contextmanager
def with_clock(run: Disturbed) -> Iterator[None]:
    clock = run.run_dir.with_name("clock")
    clock.write_text("0")
    run.env |= {"FREEWHEEL_CHAOS_CLOCK": str(clock), "PYTHONPATH": str(HERE / "clock")}
    yield


@scenario(kills=2, prepare=with_clock)
def clock_jump(run: Disturbed, draw: random.Random) -> None:
    """The wall clock jumps two hours ahead and then far back, with a kill after each jump."""
    for step, off_s, role in ((5, JUMP_S, "trainer"), (12, -JUMP_S, "queue")):
        run.wait_step(step)
        Path(run.env["FREEWHEEL_CHAOS_CLOCK"]).write_text(str(off_s))
        run.wait_step(run.step + 1)
        run.strike(role, during="a clock that jumped")
        run.wait_step(run.step + 2)
