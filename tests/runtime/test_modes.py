"""The three modes are one pipeline: with equal settings their results are equal, bit for bit, whatever the timing.
Streaming keeps every sample within its staleness bound."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freewheel.data.tasks.word_problems import TASK
from freewheel.rollout.reward_stage import FatalRewardFailure

from .pipeline import Finished, run_pipeline, small_config

MODES = {"sync": 0, "one_step_off": 1}
"""A mode, and the threshold with which `fully_async` is the same."""


def as_fully_async(threshold: int, **sections: Any) -> Any:
    """Return the settings with which `fully_async` is one of the other modes."""
    given = {"staleness_threshold": threshold, "selection_window": 1, "in_flight_updates": False}
    return small_config(mode="fully_async", async_training=given, **sections)


def slowly(response: str, row: dict[str, Any], *, finish: str) -> Any:
    """The task's own score, with a delay."""
    time.sleep(random.choice([0.0, 0.0, 0.005, 0.03]))
    return TASK.score(response, row, finish=finish)


async def slowly_async(response: str, row: dict[str, Any], *, finish: str) -> Any:
    await asyncio.sleep(random.choice([0.0, 0.01, 0.1]))
    return TASK.score(response, row, finish=finish)


def assert_same(found: Finished, wanted: Finished) -> None:
    assert found.ordinals == wanted.ordinals
    assert found.versions == wanted.versions
    assert found.same_groups_as(wanted)
    assert found.metrics == wanted.metrics
    assert found.same_weights_as(wanted)


@pytest.fixture(scope="module", params=list(MODES))
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """A run of each mode."""
    yield asyncio.run(run_pipeline(small_config(mode=mode), run_dir=tmp_path_factory.mktemp(mode)))


def test_a_mode_takes_every_prompt_in_order_and_changes_weights_between_batches(reference: Finished, mode: str) -> None:
    assert reference.ordinals == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert max(reference.lags) == MODES[mode]
    for groups in reference.trained:
        assert len({version for group in groups for version in group.versions.tolist()}) == 1


@pytest.mark.parametrize(
    ("sections", "replicas", "reward"),
    [
        pytest.param({"rollout": {"slots": 3}}, 1, slowly_async, id="fewer slots than a group, slow async rewards"),
        pytest.param({"rollout": {"slots": 5}}, 2, slowly, id="two small replicas, slow rewards"),
    ],
)
async def test_fully_async_with_a_modes_settings_is_that_mode_whatever_the_timing(
    reference: Finished, mode: str, tmp_path: Path, sections: dict[str, Any], replicas: int, reward: Any
) -> None:
    found = await run_pipeline(
        as_fully_async(MODES[mode], **sections), run_dir=tmp_path, replicas=replicas, reward=reward
    )
    assert_same(found, reference)


async def test_filtered_groups_are_replaced_the_same_way_whatever_the_timing(mode: str, tmp_path: Path) -> None:
    dropping = {
        "algorithm": {"zero_variance": "drop"},
        "optimizer": {"lr": 3e-4},  # a fast learner soon agrees with itself, and most groups are dropped
        "trainer": {"total_steps": 3},
    }
    wanted = await run_pipeline(small_config(mode=mode, **dropping), run_dir=tmp_path / "mode")
    found = await run_pipeline(
        as_fully_async(MODES[mode], rollout={"slots": 6}, **dropping),
        run_dir=tmp_path / "fully_async",
        replicas=2,
        reward=slowly,
    )
    assert wanted.queue["abandoned"]["zero_variance"] > 0
    assert [len(step) for step in wanted.ordinals] == [4, 4, 4]
    assert max(wanted.lags) <= MODES[mode]
    for group in (group for step in wanted.trained for group in step):
        assert len(set(group.rewards.tolist())) > 1
    assert_same(found, wanted)


@pytest.mark.parametrize(
    "settings", [{"seed": 1}, {"async_training": {"staleness_threshold": 2, "selection_window": 1}}]
)
async def test_another_seed_or_threshold_gives_another_run(
    reference: Finished, mode: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    if "seed" in settings:
        settings = settings | {"mode": mode}
    other = await run_pipeline(small_config(**settings), run_dir=tmp_path)
    assert not other.same_groups_as(reference) and not other.same_weights_as(reference)


@pytest.mark.parametrize(
    "settings",
    [
        {"staleness_threshold": 1, "max_staleness_allowed": 2},
        {"staleness_threshold": 2, "max_staleness_allowed": 2, "sync_every_steps": 2},
        {"staleness_threshold": 0, "max_staleness_allowed": 1, "min_batch_count": 1},
    ],
    ids=["a window", "versions of two steps", "no threshold, but a window"],
)
async def test_streaming_trains_every_prompt_once_within_the_staleness_bound(
    settings: dict[str, int], tmp_path: Path
) -> None:
    config = small_config(trainer={"total_steps": 10}, async_training=settings)
    found = await run_pipeline(config, run_dir=tmp_path, replicas=2, reward=slowly)
    assert sorted(ordinal for step in found.ordinals for ordinal in step) == list(range(40))
    assert [len(step) for step in found.ordinals] == [4] * 10
    assert max(found.lags) <= config.bounds.max_lag <= settings["max_staleness_allowed"]
    assert found.queue["dropped_samples"] == 0
    for row in found.metrics:
        assert row["max_sample_age"] <= config.bounds.max_lag


def broken(response: str, row: dict[str, Any]) -> float:
    raise ZeroDivisionError("a bug in the reward function")


async def test_a_failed_reward_ends_the_run_with_on_failure_raise(tmp_path: Path) -> None:
    with pytest.raises(FatalRewardFailure, match="a bug in the reward function"):
        await run_pipeline(small_config(reward={"on_failure": "raise"}), run_dir=tmp_path, reward=broken)
