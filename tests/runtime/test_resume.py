"""A run that was stopped, or killed between two checkpoints, goes on as if it had not been: no prompt is skipped, none
is trained twice on the way from the start to the last weights, and in `sync` mode the weights are equal to the bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from freewheel.queue.ledger import Frontier
from freewheel.trainer.checkpoint import CheckpointStore

from .pipeline import Finished, Pipeline, run_pipeline, small_config

STEPS = 6
EVERY = 2


def stop_after(step: int):  # type: ignore[no-untyped-def]
    async def stop(pipeline: Pipeline) -> None:
        while pipeline.trainer.global_steps < step:
            await asyncio.sleep(0.002)
        pipeline.trainer.request_stop()

    return stop


def latest(run_dir: Path) -> Path:
    found = CheckpointStore(run_dir, keep_last=2).latest()
    assert found is not None
    return found


def trained(*runs: Finished) -> list[int]:
    return sorted(ordinal for run in runs for step in run.ordinals for ordinal in step)


async def test_a_sync_run_that_was_stopped_and_resumed_has_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    config = small_config(mode="sync", trainer={"total_steps": STEPS, "save_every_steps": EVERY})
    whole = await run_pipeline(config, run_dir=tmp_path / "whole")
    first = await run_pipeline(config, run_dir=tmp_path / "parts", during=stop_after(3))
    assert first.ending == "stopped"
    assert len(first.trained) < STEPS
    second = await run_pipeline(config, run_dir=tmp_path / "parts", resume=latest(tmp_path / "parts"))
    assert second.ending == "finished"
    assert first.ordinals + second.ordinals == whole.ordinals
    assert second.versions == whole.versions[len(first.versions) :]
    assert second.same_weights_as(whole)
    assert first.metrics == whole.metrics[: len(first.metrics)]


@pytest.mark.parametrize("drop", ["keep", "drop"])
async def test_a_streaming_run_that_was_stopped_and_resumed_ends_every_prompt_once(tmp_path: Path, drop: str) -> None:
    config = small_config(
        trainer={"total_steps": STEPS, "save_every_steps": EVERY},
        async_training={"staleness_threshold": 2},
        algorithm={"zero_variance": drop},
        optimizer={"lr": 3e-4},
    )
    first = await run_pipeline(config, run_dir=tmp_path, replicas=2, during=stop_after(2))
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


async def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint_on_one_path(tmp_path: Path) -> None:
    """What was trained after the checkpoint is not in its weights: those prompts come again, and no other."""
    config = small_config(mode="sync", trainer={"total_steps": STEPS, "save_every_steps": EVERY})
    first = await run_pipeline(config, run_dir=tmp_path)
    (earlier,) = (path for path in (tmp_path / "checkpoints").iterdir() if path.name == "step_000004")
    second = await run_pipeline(config, run_dir=tmp_path, resume=earlier)
    kept = [ordinal for step in first.ordinals[:4] for ordinal in step]
    assert sorted(kept + trained(second)) == list(range(STEPS * 4))
    assert second.same_weights_as(first)


async def test_a_first_checkpoint_that_is_damaged_costs_time_and_nothing_else(tmp_path: Path) -> None:
    """The journal has everything since the start for as long as there is only one."""
    config = small_config(mode="sync", trainer={"total_steps": 4, "save_every_steps": None}, journal={"keep_groups": 0})
    first = await run_pipeline(config, run_dir=tmp_path)
    (only,) = (tmp_path / "checkpoints").iterdir()
    (only / "training/whole.safetensors").write_bytes(b"")
    assert CheckpointStore(tmp_path, keep_last=2).latest() is None
    again = await run_pipeline(config, run_dir=tmp_path)
    assert again.ordinals == first.ordinals
    assert again.rollouters[0]["total_generated_samples"] == 0, "nothing is generated that is there"
    assert again.same_weights_as(first)


async def test_a_run_that_was_stopped_in_the_middle_of_a_version_goes_on_from_before_it_as_it_was(
    tmp_path: Path,
) -> None:
    """The checkpoint of its end is damaged: the version that the end completed early is in the journal."""
    config = small_config(
        trainer={"total_steps": 9, "save_every_steps": 2},
        async_training={"sync_every_steps": 2, "staleness_threshold": 2},
    )
    first = await run_pipeline(config, run_dir=tmp_path, during=stop_after(5))
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


async def test_a_resumed_run_has_the_engines_at_the_checkpoints_version(tmp_path: Path) -> None:
    config = small_config(mode="sync", trainer={"total_steps": 3, "save_every_steps": 2})
    await run_pipeline(config, run_dir=tmp_path)
    second = await run_pipeline(config, run_dir=tmp_path, resume=tmp_path / "checkpoints" / "step_000002")
    assert second.versions == [2]
    assert set(second.lags) == {0}
    assert second.sync["published_version"] == 3


async def test_finite_prompts_are_used_up_once_over_both_parts(tmp_path: Path) -> None:
    config = small_config(
        data={"limit": 11, "epochs": 2}, trainer={"total_steps": 50, "save_every_steps": None}, rollout={"slots": 8}
    )
    first = await run_pipeline(config, run_dir=tmp_path, during=stop_after(2))
    second = await run_pipeline(config, run_dir=tmp_path, resume=latest(tmp_path))
    assert trained(first, second) == list(range(22))
    assert [len(step) for step in second.ordinals][-1] == 2
    assert second.frontier == Frontier(low=22, trained=22)
