"""All scenarios by name. Each starts a run, disturbs it, brings it to its end and returns a `Result`.

Used by the tests of this folder and by `scripts/chaos.py`. A function gets a folder of its own, a seed, and how many
processes to strike where that is not in its nature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import on_processes, on_surroundings
from .account import Result

Scene = Callable[[Path, int, int], Result]


@dataclass(frozen=True)
class Scenario:
    run: Scene
    kills: int
    """About how many processes it kills."""
    comparable: bool = True
    """Whether its reward is comparable to an undisturbed run's: not if the scenario changes what is trained on."""


SOAK = "roles"
SOAK_KILLS = 12
SCENARIOS: dict[str, Scenario] = {
    "tree": Scenario(on_processes.tree, 5),
    "pairs": Scenario(on_processes.pairs, 8),
    "during_save": Scenario(on_processes.during_save, 3),
    "during_sync": Scenario(on_processes.during_sync, 3),
    "during_compaction": Scenario(on_processes.during_compaction, 4),
    "at_start": Scenario(on_processes.at_start, 2),
    "at_end": Scenario(on_processes.at_end, 3),
    "stopped": Scenario(on_processes.stopped, 4),
    "driver": Scenario(on_processes.driver, 2),
    "ray_itself": Scenario(on_processes.ray_itself, 1),
    "truncated_journal": Scenario(on_surroundings.truncated_journal, 2),
    "garbled_journal": Scenario(on_surroundings.garbled_journal, 1),
    "corrupt_checkpoint": Scenario(on_surroundings.corrupt_checkpoint, 1),
    "full_disk": Scenario(on_surroundings.full_disk, 2),
    "ctrl_c": Scenario(on_processes.ctrl_c, 2),
    "reward_workers": Scenario(on_surroundings.reward_workers, 3),
    "judge_outage": Scenario(on_surroundings.judge_outage, 2),
    "clock_jump": Scenario(on_surroundings.clock_jump, 2),
    "replicas": Scenario(on_processes.replicas, 2),
    "sync_mode": Scenario(on_processes.sync_mode, 4),
    "one_step_off": Scenario(on_processes.one_step_off, 4),
    "slow_versions": Scenario(on_processes.slow_versions, 4),
    "dropping": Scenario(on_processes.dropping, 4, comparable=False),
    "used_up": Scenario(on_processes.used_up, 4),
}
"""All but `roles`, which fills the rest, and `undisturbed`, which rewards are compared with."""
