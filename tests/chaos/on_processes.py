"""Scenarios in which processes of a run die or are stopped: one, two or all, at any and at bad moments."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from .account import Result
from .acting import carry_out, disturbed
from .harness import Disturbed, Stuck
from .plan import PAIRS, ROLES, deal

LONGEST_DELAY_S = 0.6
"""Longest delay between a step and a strike: a few steps' time, so that strikes hit any moment of a step."""
SILENT_S = 3.0
"""`recovery.silent_s` for stopped processes: the default of a minute is long for a test."""
SOAK_STEPS, SOAK_GAP = 60, 4
"""Steps of a run with room for about a dozen strikes."""
END_STEPS = 42
"""Not a multiple of the steps between two checkpoints, so the last steps are replayed after a kill."""


# -- left alone -------------------------------------------------------------------------------------------------------


def undisturbed(folder: Path, seed: int, kills: int) -> Result:
    return disturbed(folder, "undisturbed", seed, lambda run: None)


# -- processes --------------------------------------------------------------------------------------------------------


def roles(folder: Path, seed: int, kills: int) -> Result:
    """kill -9 of any role at any moment, repeatedly, also while the run recovers."""
    targets = [(role,) for role in ROLES]
    strikes = deal(
        seed=seed, targets=targets, kills=kills, first_step=2, gap_steps=SOAK_GAP, last_step=SOAK_STEPS - 2,
        longest_delay_s=LONGEST_DELAY_S,
    )  # fmt: skip
    return disturbed(folder, "roles", seed, lambda run: carry_out(run, strikes), trainer__total_steps=SOAK_STEPS)


def pairs(folder: Path, seed: int, kills: int) -> Result:
    """Kill two roles at once."""
    strikes = deal(
        seed=seed, targets=PAIRS, kills=2 * len(PAIRS), first_step=3, gap_steps=SOAK_GAP, last_step=SOAK_STEPS - 2,
        longest_delay_s=LONGEST_DELAY_S,
    )  # fmt: skip
    return disturbed(folder, "pairs", seed, lambda run: carry_out(run, strikes), trainer__total_steps=SOAK_STEPS)


def sync_mode(folder: Path, seed: int, kills: int) -> Result:
    """Generation and training wait for each other, so a dead component is always waited for."""
    return _each_role(folder, "sync mode", seed, mode="sync")


def one_step_off(folder: Path, seed: int, kills: int) -> Result:
    return _each_role(folder, "one step off", seed, mode="one_step_off")


def slow_versions(folder: Path, seed: int, kills: int) -> Result:
    """Three steps per version: trainers die within one, where there is no checkpoint. It learns later, because its
    samples are older."""
    more = {"async_training__sync_every_steps": 3, "trainer__total_steps": SOAK_STEPS}
    return _each_role(folder, "three steps a version", seed, **more)


def dropping(folder: Path, seed: int, kills: int) -> Result:
    """Groups whose rewards are all equal are dropped, once and for that reason."""
    return _each_role(folder, "dropped groups", seed, algorithm__zero_variance="drop", trainer__total_steps=24)


def used_up(folder: Path, seed: int, kills: int) -> Result:
    """Prompts run out within a step, and every role is killed before."""
    return _each_role(folder, "prompts used up", seed, data__limit=250, data__epochs=3, prompts=750)


def _each_role(folder: Path, scenario: str, seed: int, **settings: Any) -> Result:
    """Kill each role once, a few steps apart, during evaluations."""
    targets = [(role,) for role in ROLES]
    strikes = deal(
        seed=seed, targets=targets, kills=len(ROLES), first_step=3, gap_steps=SOAK_GAP, last_step=20,
        longest_delay_s=LONGEST_DELAY_S,
    )  # fmt: skip
    evaluated = {"eval__prompts": 16, "eval__every_steps": 5}
    return disturbed(folder, scenario, seed, lambda run: carry_out(run, strikes), **evaluated, **settings)


def replicas(folder: Path, seed: int, kills: int) -> Result:
    """Kill one of two rollouters; the other continues."""

    def during(run: Disturbed) -> None:
        for step in (4, 12):
            run.wait_step(step)
            run.strike("rollouter")

    return disturbed(folder, "one of two rollouters", seed, during, rollout__replicas=2)


def stopped(folder: Path, seed: int, kills: int) -> Result:
    """SIGSTOP: the process lives but does nothing, and counts as dead after `recovery.silent_s`."""

    def during(run: Disturbed) -> None:
        order = random.Random(seed).sample(ROLES, k=len(ROLES))
        for step, role in zip(range(3, SOAK_STEPS, 6), order, strict=False):
            run.wait_step(step)
            run.strike(role, number=signal.SIGSTOP)
            run.wait_step(run.step + 3)

    return disturbed(folder, "stopped", seed, during, recovery__silent_s=SILENT_S, trainer__total_steps=SOAK_STEPS)


def tree(folder: Path, seed: int, kills: int) -> Result:
    """The machine goes down and the run is resumed, five times."""
    draw = random.Random(seed)

    def during(run: Disturbed) -> None:
        for _ in range(5):
            run.wait_step(run.step + draw.randint(1, 4))
            time.sleep(draw.uniform(0, LONGEST_DELAY_S))
            run.strike_tree()
            run.start()

    return disturbed(folder, "tree, then resume", seed, during)


def driver(folder: Path, seed: int, kills: int) -> Result:
    """Kill only the coordinator: its Ray must not keep the run locked. Resume once after a wait and once
    immediately."""
    draw = random.Random(seed)

    def during(run: Disturbed) -> None:
        for waits in (True, False):
            run.wait_step(run.step + draw.randint(2, 5))
            run.strike_driver()
            if waits:
                run.wait_gone()
            run.start()

    return disturbed(folder, "driver, then resume", seed, during)


def ray_itself(folder: Path, seed: int, kills: int) -> Result:
    """Kill the raylet, which all components need. The run ends by itself, leaves no process, and can be resumed."""

    def during(run: Disturbed) -> None:
        run.wait_step(6)
        (raylet,) = run.family.below(run.program.pid, "raylet/raylet")
        run.strike_pid("raylet", raylet)
        run.finish(expect=range(1, 256))
        run.start()

    return disturbed(folder, "Ray itself, then resume", seed, during)


def ctrl_c(folder: Path, seed: int, kills: int) -> Result:
    """Ctrl-C during a recovery: the run ends without a traceback, leaves no process, and can be resumed."""
    draw = random.Random(seed)

    def during(run: Disturbed) -> None:
        for role in ("trainer", "queue"):
            run.wait_step(run.step + 3)
            run.strike(role, during="before Ctrl-C")
            time.sleep(draw.uniform(0.2, 3.0))
            run.interrupt()
            run.finish(expect=(130,))
            run.start()

    return disturbed(folder, "Ctrl-C in a recovery", seed, during)


# -- moments ----------------------------------------------------------------------------------------------------------


def during_save(folder: Path, seed: int, kills: int) -> Result:
    """Kill the trainer twice, then everything, while a checkpoint is half written."""
    draw = random.Random(seed)

    def during(run: Disturbed) -> None:
        def half_written() -> None:
            run.wait("a save that has begun", run.saving, nap_s=0.0005)
            time.sleep(draw.uniform(0, 0.01))

        def tell_if_late() -> None:
            if not run.saving():  # what a save that was struck has written is there until somebody saves again
                run.kills[-1] = replace(run.kills[-1], during="just after a save")

        for _ in range(2):
            run.strike("trainer", during="save", at=half_written)
            tell_if_late()
            run.wait_step(run.step + 2)
        run.strike_tree(during="save", at=half_written)
        tell_if_late()
        run.start()

    return disturbed(folder, "during save", seed, during, trainer__save_every_steps=3)


def at_start(folder: Path, seed: int, kills: int) -> Result:
    """Kill a role while all are starting, and everything before the first checkpoint. The first kill may end the run,
    which then reports it and can be resumed."""
    draw = random.Random(seed)

    def during(run: Disturbed) -> None:
        run.strike(draw.choice(ROLES), during="start")
        with contextlib.suppress(Stuck):
            run.wait_step(1)
        if not run.running:
            run.finish(expect=(1,))
            run.start()
        run.wait_step(2)
        run.strike_tree(during="before a checkpoint")
        run.start()

    return disturbed(folder, "at the start", seed, during, trainer__save_every_steps=8)


def at_end(folder: Path, seed: int, kills: int) -> Result:
    """Kill the trainer twice, and another role, right after the last step, before it is committed, published, saved and
    exported."""
    draw = random.Random(seed)

    def during(run: Disturbed) -> None:
        for times, role in enumerate(("trainer", "trainer", draw.choice(("queue", "sync", "rollouter"))), start=1):

            def last_step_over(times: int = times) -> None:
                run.wait("the last step", lambda: run.times_trained(END_STEPS) >= times)
                time.sleep(draw.uniform(0, 0.03))

            run.strike(role, during="the end", at=last_step_over)

    return disturbed(folder, "at the end", seed, during, trainer__total_steps=END_STEPS)


def during_sync(folder: Path, seed: int, kills: int) -> Result:
    """Kill each of the three roles that take part while weights go to the engines at the end of a step."""
    draw = random.Random(seed)

    def during(run: Disturbed) -> None:
        def step_over() -> None:
            run.wait_step(run.step + 1)
            time.sleep(draw.uniform(0, 0.1))

        for role in ("sync", "rollouter", "trainer"):
            run.wait_step(run.step + 3)
            run.strike(role, during="sync", at=step_over)

    return disturbed(folder, "during sync", seed, during)


def during_compaction(folder: Path, seed: int, kills: int) -> Result:
    """Kill the queue three times, at three offsets, and then everything, just after a checkpoint, when the journal
    drops what it covers."""
    draw = random.Random(seed)

    def during(run: Disturbed) -> None:
        def checkpointed() -> None:
            before = run.checkpoints()
            run.wait("a checkpoint", lambda: run.checkpoints() - before, nap_s=0.0005)
            time.sleep(draw.uniform(0, 0.03))

        run.wait("two checkpoints", lambda: len(run.checkpoints()) >= 2)  # the oldest that is kept is what it goes by
        for _ in range(3):
            run.strike("queue", during="compaction", at=checkpointed)
        run.strike_tree(during="compaction", at=checkpointed)
        run.start()

    return disturbed(folder, "during compaction", seed, during, trainer__save_every_steps=3)
