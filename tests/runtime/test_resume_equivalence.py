"""A run that is killed, whole or in part, at any await between its parts, and goes on, is the run that was not: the
same prompts, each once; in `sync` mode the same weights, bit for bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from freewheel.runtime.config import TrainConfig

from .mortal import Record, journal_of, live
from .pipeline import small_config

STEPS, GROUPS = 8, 4
KILLS = 5
OFTEN = 40
"""Awaits between two deaths, at most: a fourth of those of a whole run."""


def config_of(mode: str, **settings: Any) -> TrainConfig:
    return small_config(
        mode=mode,
        trainer={"total_steps": STEPS, "groups_per_step": GROUPS, "save_every_steps": 3},
        journal={"keep_groups": 0},
        async_training={"sync_retry_delay": 0.01, **settings},
    )


def deaths(seed: int, count: int = KILLS) -> Iterator[int]:
    draw = random.Random(seed)
    return (draw.randint(2, OFTEN) for _ in range(count))


def assert_each_prompt_once(found: Record, run_dir: Path) -> None:
    steps = journal_of(run_dir)
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert sorted(ordinal for ordinals in steps.values() for ordinal in ordinals) == list(range(STEPS * GROUPS))
    for step, ordinals in steps.items():
        assert found.trained[step][-1] == ordinals, f"the weights have other prompts in step {step} than the journal"


def assert_same(found: Record, wanted: Record) -> None:
    assert {step: times[-1] for step, times in found.trained.items()} == {
        step: times[-1] for step, times in wanted.trained.items()
    }
    for name, tensor in wanted.weights.items():
        assert torch.equal(found.weights[name], tensor), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return asyncio.run(live(config_of("sync"), tmp_path_factory.mktemp("undisturbed")))


@pytest.mark.parametrize("seed", [0, 1])
async def test_a_sync_run_that_was_killed_five_times_has_the_weights_of_one_that_was_not(
    undisturbed: Record, tmp_path: Path, seed: int
) -> None:
    found = await live(config_of("sync"), tmp_path, kills=deaths(seed))
    assert found.deaths == KILLS
    assert_each_prompt_once(found, tmp_path)
    assert_same(found, undisturbed)


async def test_a_trainer_that_dies_is_followed_by_one_that_goes_the_same_way(
    undisturbed: Record, tmp_path: Path
) -> None:
    found = await live(config_of("sync"), tmp_path, trainers=list(deaths(2)))
    assert found.deaths == KILLS
    assert_each_prompt_once(found, tmp_path)
    assert_same(found, undisturbed)


async def test_a_queue_that_dies_loses_nothing_that_it_had_or_that_is_in_flight(
    undisturbed: Record, tmp_path: Path
) -> None:
    found = await live(config_of("sync"), tmp_path, queues=list(deaths(3, 4)), replicas=[2])
    assert found.deaths == 4
    assert_each_prompt_once(found, tmp_path)
    assert_same(found, undisturbed)
    assert all(len(times) == 1 for times in found.trained.values()), "the trainer lived, and trained each step once"


async def test_versions_of_several_steps_are_the_same_after_every_death(tmp_path: Path) -> None:
    """Which of a version's steps a prompt is in may change, as what was in flight is issued behind what is stored."""
    config = config_of("sync", sync_every_steps=3)
    found = await live(config, tmp_path, kills=deaths(8, 3), trainers=list(deaths(9, 2)), queues=list(deaths(10, 2)))
    assert found.deaths >= 3
    assert_each_prompt_once(found, tmp_path)
    assert set(found.lags) == {0}
    by_version = [
        sorted(ordinal for step in steps for ordinal in found.trained[step][-1])
        for steps in ([1, 2, 3], [4, 5, 6], [7, 8])
    ]
    assert by_version == [list(range(12)), list(range(12, 24)), list(range(24, 32))]


@pytest.mark.parametrize("seed", [4, 5])
async def test_a_streaming_run_that_was_killed_goes_on_with_other_numbers_of_rollouters_and_the_same_prompts(
    tmp_path: Path, seed: int
) -> None:
    config = config_of("fully_async", staleness_threshold=1, max_staleness_allowed=2, sync_every_steps=2)
    found = await live(config, tmp_path, kills=deaths(seed), replicas=[1, 3, 2])
    assert found.deaths == KILLS
    assert_each_prompt_once(found, tmp_path)
    assert max(found.lags) <= config.async_training.max_staleness_allowed


async def test_a_streaming_run_whose_trainer_and_queue_die_over_and_over_trains_every_prompt_once(
    tmp_path: Path,
) -> None:
    config = config_of("fully_async", staleness_threshold=2, max_staleness_allowed=3)
    found = await live(config, tmp_path, trainers=list(deaths(6, 3)), queues=list(deaths(7, 4)), replicas=[2])
    assert found.deaths >= KILLS
    assert_each_prompt_once(found, tmp_path)
    assert max(found.lags) <= config.async_training.max_staleness_allowed
