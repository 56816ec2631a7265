"""Stopped, killed and resumed runs, in one process: the same weights as an undisturbed run, and every prompt once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from freewheel.queue.ledger import Frontier
from freewheel.runtime.config import TrainConfig
from freewheel.trainer.checkpoint import CheckpointStore

from .pipeline import Fate, Finished, Killed, journal_of, run_pipeline, small_config

STEPS = 6
EVERY = 2


def latest(run_dir: Path) -> Path:
    found = CheckpointStore(run_dir, keep_last=2).latest()
    assert found is not None
    return found


def trained(*runs: Finished) -> list[int]:
    return sorted(ordinal for run in runs for step in run.ordinals for ordinal in step)


async def test_a_stopped_and_resumed_sync_run_has_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    config = small_config(mode="sync", trainer={"total_steps": STEPS, "save_every_steps": EVERY})
    whole = await run_pipeline(config, run_dir=tmp_path / "whole")
    first = await run_pipeline(config, run_dir=tmp_path / "parts", stop_after=3)
    assert first.ending == "stopped"
    assert len(first.trained) < STEPS
    second = await run_pipeline(config, run_dir=tmp_path / "parts", resume=latest(tmp_path / "parts"))
    assert second.ending == "finished"
    assert first.ordinals + second.ordinals == whole.ordinals
    assert second.versions == whole.versions[len(first.versions) :]
    assert second.same_weights_as(whole)
    assert first.metrics == whole.metrics[: len(first.metrics)]


@pytest.mark.parametrize("drop", ["keep", "drop"])
async def test_a_stopped_and_resumed_streaming_run_ends_every_prompt_once(tmp_path: Path, drop: str) -> None:
    config = small_config(
        trainer={"total_steps": STEPS, "save_every_steps": EVERY},
        async_training={"staleness_threshold": 2},
        algorithm={"zero_variance": drop},
        optimizer={"lr": 3e-4},
    )
    first = await run_pipeline(config, run_dir=tmp_path, replicas=2, stop_after=2)
    assert first.ending == "stopped"
    second = await run_pipeline(config, run_dir=tmp_path, replicas=2, resume=latest(tmp_path))
    both = trained(first, second)
    assert len(both) == len(set(both)) == STEPS * 4
    if drop == "keep":
        assert both == list(range(STEPS * 4))
    ends = second.frontier
    assert ends.trained == len(both)
    assert ends.trained + sum(ends.abandoned.values()) == ends.low + len(ends.ended)
    assert max(second.lags) <= config.bounds.max_lag


async def test_a_damaged_first_checkpoint_costs_only_time(tmp_path: Path) -> None:
    """As long as there is only one checkpoint, the journal has everything since the start."""
    config = small_config(mode="sync", trainer={"total_steps": 4, "save_every_steps": None}, journal={"keep_groups": 0})
    first = await run_pipeline(config, run_dir=tmp_path)
    (only,) = (tmp_path / "checkpoints").iterdir()
    (only / "training/whole.safetensors").write_bytes(b"")
    assert CheckpointStore(tmp_path, keep_last=2).latest() is None
    again = await run_pipeline(config, run_dir=tmp_path)
    assert again.ordinals == first.ordinals
    assert again.rollouters[0]["total_generated_samples"] == 0, "nothing is generated that is there"
    assert again.same_weights_as(first)


async def test_a_run_stopped_within_a_version_continues_from_before_it(tmp_path: Path) -> None:
    """The last checkpoint is damaged; the version that the end of the run completed early is in the journal."""
    config = small_config(
        trainer={"total_steps": 9, "save_every_steps": 2},
        async_training={"sync_every_steps": 2, "staleness_threshold": 2},
    )
    first = await run_pipeline(config, run_dir=tmp_path, stop_after=5)
    assert first.ending == "stopped"
    stopped_at, version = len(first.ordinals), first.sync["published_version"]
    earlier = next(path for path in (tmp_path / "checkpoints").iterdir() if path != latest(tmp_path))
    again = await run_pipeline(config, run_dir=tmp_path, resume=earlier)
    begun = int(earlier.name.removeprefix("step_"))
    replayed = stopped_at - begun
    assert again.ordinals[:replayed] == first.ordinals[begun:]
    assert again.versions[:replayed] == first.versions[begun:]
    assert again.versions[replayed] == version
    assert trained(again) == sorted(set(range(36)) - {one for step in first.ordinals[:begun] for one in step})


async def test_finite_prompts_are_used_once_across_a_resume(tmp_path: Path) -> None:
    config = small_config(
        data={"limit": 11, "epochs": 2}, trainer={"total_steps": 50, "save_every_steps": None}, rollout={"slots": 8}
    )
    first = await run_pipeline(config, run_dir=tmp_path, stop_after=2)
    second = await run_pipeline(config, run_dir=tmp_path, resume=latest(tmp_path))
    assert trained(first, second) == list(range(22))
    assert [len(step) for step in second.ordinals][-1] == 2
    assert second.frontier == Frontier(low=22, trained=22)


KILLED_STEPS, GROUPS = 8, 4
KILLS = 5
OFTEN = 40
"""Most awaits between two deaths: a fourth of those of a whole run."""


def config_of(mode: str, **settings: Any) -> TrainConfig:
    return small_config(
        mode=mode,
        trainer={"total_steps": KILLED_STEPS, "groups_per_step": GROUPS, "save_every_steps": 3},
        journal={"keep_groups": 0},
        async_training={"sync_retry_delay": 0.01, **settings},
    )


async def live(config: TrainConfig, run_dir: Path, *, seed: int, deaths: int, replicas: Sequence[int]) -> Finished:
    """Run from start to end through deaths of everything. `replicas`: the number of rollouters in each life."""
    draw = random.Random(seed)
    record = Finished(ending="finished")
    for count in itertools.cycle(replicas):
        fate = Fate(draw.randint(2, OFTEN) if record.deaths < deaths else None)
        newest = CheckpointStore(run_dir, keep_last=2).latest()
        try:
            return await run_pipeline(config, run_dir=run_dir, replicas=count, resume=newest, fate=fate, record=record)
        except Killed:
            record.deaths += 1
    raise AssertionError


def assert_each_prompt_once(found: Finished, run_dir: Path) -> None:
    steps = journal_of(run_dir)
    assert sorted(steps) == list(range(1, KILLED_STEPS + 1))
    assert sorted(ordinal for ordinals in steps.values() for ordinal in ordinals) == list(range(KILLED_STEPS * GROUPS))
    for step, ordinals in steps.items():
        assert found.attempts[step][-1] == ordinals, f"the weights have other prompts in step {step} than the journal"


async def test_a_sync_run_has_the_same_weights_after_five_deaths(tmp_path: Path) -> None:
    config = config_of("sync")
    undisturbed = await live(config, tmp_path / "alone", seed=0, deaths=0, replicas=[1])
    found = await live(config, tmp_path / "killed", seed=0, deaths=KILLS, replicas=[1, 2])
    assert found.deaths == KILLS
    assert (set(found.lags), found.sync["published_version"]) == ({0}, KILLED_STEPS)
    assert_each_prompt_once(found, tmp_path / "killed")
    for step, times in undisturbed.attempts.items():
        assert found.attempts[step][-1] == times[-1]
    assert found.same_weights_as(undisturbed)


async def test_versions_of_several_steps_are_the_same_after_every_death(tmp_path: Path) -> None:
    """A prompt may move to another step of its version: unfinished groups are issued again after stored ones."""
    found = await live(config_of("sync", sync_every_steps=3), tmp_path, seed=8, deaths=KILLS, replicas=[1])
    assert_each_prompt_once(found, tmp_path)
    assert set(found.lags) == {0}
    of_version = [[1, 2, 3], [4, 5, 6], [7, 8]]
    ordinals = [sorted(one for step in steps for one in found.attempts[step][-1]) for steps in of_version]
    assert ordinals == [list(range(12)), list(range(12, 24)), list(range(24, 32))]


@pytest.mark.parametrize(
    "settings",
    [
        {"staleness_threshold": 1, "max_staleness_allowed": 2, "sync_every_steps": 2},
        {"staleness_threshold": 2, "max_staleness_allowed": 3},
    ],
    ids=["versions of two steps", "versions of one step"],
)
async def test_a_streaming_run_with_many_deaths_trains_every_prompt_once(
    tmp_path: Path, settings: dict[str, int]
) -> None:
    found = await live(config_of("fully_async", **settings), tmp_path, seed=4, deaths=KILLS, replicas=[1, 3, 2])
    assert found.deaths == KILLS
    assert_each_prompt_once(found, tmp_path)
    assert max(found.lags) <= settings["max_staleness_allowed"]
