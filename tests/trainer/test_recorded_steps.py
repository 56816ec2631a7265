"""A trainer in the place of another goes the way that is written down: the same groups under the same versions, and
engines hear of nothing that they had before. Checkpoints are of whole versions, and what they cover is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from freewheel.queue.journal import Journal, JournalWriter
from freewheel.trainer import background
from freewheel.trainer.trainer import TrainingFailed

from .scene import WAIT_S, Build, Scene


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[JournalWriter]:
    writer = JournalWriter(journal=Journal(tmp_path / "journal.sqlite"))
    yield writer
    await writer.close()


async def die_after(one: Scene, step: int) -> None:
    """A trainer that is gone when it has told of `step`; who feeds it ends with it."""

    def fails(now: int) -> None:
        if now == step + 1:
            raise RuntimeError("killed")

    one.backend.on_step = fails
    one.saver.fails = set(range(99))
    with pytest.raises(TrainingFailed):
        await one.run()
    assert one.feeding is not None
    one.feeding.cancel()
    await asyncio.gather(one.feeding, return_exceptions=True)


def published(one: Scene) -> list[tuple[int, int]]:
    return [(event[1], event[2]) for event in one.events if event[0] == "publish"]


async def test_a_successor_trains_what_was_trained_as_it_was_and_then_goes_on(
    scene: Build, journal: JournalWriter
) -> None:
    first = scene(journal=journal, schedule={"total_steps": 5, "max_errors": 1})
    await die_after(first, 3)
    second = scene(after=first, schedule={"total_steps": 5})
    assert await second.run() == "finished"
    assert second.ordinals[:3] == first.ordinals
    assert second.backend.versions == [0, 1, 2, 3, 4]
    trained = [ordinal for ordinals in second.ordinals for ordinal in ordinals]
    assert sorted(trained) == list(range(15))
    assert second.trainer.stats()["recorded_until"] == 3


async def test_engines_hear_of_the_last_recorded_version_and_of_none_before_it(
    scene: Build, journal: JournalWriter
) -> None:
    first = scene(journal=journal, schedule={"total_steps": 5, "max_errors": 1})
    await die_after(first, 3)
    second = scene(after=first, schedule={"total_steps": 5, "eval_every": 1, "eval_at_start": True})
    await second.run()
    assert published(second) == [(3, 3), (4, 4), (5, 5)], "what they hold is sent again: by whom they had it is gone"
    assert min(second.evaluated) >= 3


async def test_in_the_middle_of_a_version_engines_get_the_one_before_it(scene: Build, journal: JournalWriter) -> None:
    versions = {"steps_per_version": 2, "threshold": 2}
    first = scene(journal=journal, bounds=versions, schedule={"total_steps": 7, "max_errors": 1})
    first.publisher.holding = True  # it is told to stop in mid-version, and then to save: neither is done
    await die_after(first, 2)
    second = scene(after=first, bounds=versions, schedule={"total_steps": 7, "max_errors": 1})
    await die_after(second, 3)
    assert second.trainer.current_param_version == 2, "its end completed a version, which is written down"
    third = scene(after=second, bounds=versions, schedule={"total_steps": 7})
    assert await third.run() == "finished"
    assert published(third) == [(2, 3), (3, 5), (4, 7)]
    assert third.backend.versions == [0, None, 1, 2, None, 3, None], "as it was, the short version included"
    assert third.trainer.current_param_version == third.queue.policy.version == 4


async def test_a_successor_that_is_stopped_on_its_way_leaves_everything_written_down(
    scene: Build, journal: JournalWriter
) -> None:
    versions = {"steps_per_version": 2, "threshold": 2}
    first = scene(journal=journal, bounds=versions, schedule={"total_steps": 9, "max_errors": 1})
    await die_after(first, 4)
    second = scene(after=first, bounds=versions, schedule={"total_steps": 9})
    second.backend.on_step = lambda step: second.trainer.request_stop() if step == 3 else None
    assert await second.run(feed=False) == "stopped"
    assert (second.trainer.global_steps, second.trainer.current_param_version) == (3, 1)
    assert second.saver.saved == [], "in the middle of a version that goes on there is no checkpoint"
    assert second.queue.step == 4 and second.queue.policy.version == 2
    third = scene(after=first, bounds=versions, schedule={"total_steps": 9})
    assert await third.run() == "finished"
    assert third.ordinals[:4] == first.ordinals


async def test_what_was_recorded_is_trained_also_where_the_run_is_to_be_shorter_now(
    scene: Build, journal: JournalWriter
) -> None:
    first = scene(journal=journal, schedule={"total_steps": 9, "max_errors": 1})
    await die_after(first, 4)
    second = scene(after=first, schedule={"total_steps": 2})
    await second.run(feed=False)
    assert second.ordinals == first.ordinals
    assert second.saver.saved[-1][0] == 4


async def test_groups_that_were_recorded_are_not_too_old_whatever_is_allowed_now(
    scene: Build, journal: JournalWriter
) -> None:
    bounds = {"threshold": 0, "max_lag_allowed": 5}
    first = scene(journal=journal, bounds=bounds, born_old=True, schedule={"total_steps": 4, "max_errors": 1})
    await die_after(first, 3)
    second = scene(after=first, bounds={**bounds, "max_lag_allowed": 1}, schedule={"total_steps": 3})
    assert await second.run() == "finished"
    assert second.ordinals == first.ordinals
    assert second.trainer.dropped_stale_samples == 0


async def test_a_trainer_that_begins_hands_over_the_weights_that_it_begins_with(scene: Build) -> None:
    one = scene(step=2, version=2, schedule={"total_steps": 3})
    one.publisher.version = 2
    await one.run()
    assert one.publisher.primed == (2, 2)


# -- checkpoints ------------------------------------------------------------------------------------------------------


async def test_a_checkpoint_that_is_due_in_the_middle_of_a_version_is_made_at_its_end(scene: Build) -> None:
    one = scene(bounds={"steps_per_version": 3}, schedule={"total_steps": 10, "save_every": 2})
    await one.run()
    assert [(step, version) for step, version, *_ in one.saver.saved] == [(3, 1), (6, 2), (9, 3), (10, 4)]


async def test_the_queue_hears_how_far_back_a_resume_may_go(scene: Build) -> None:
    one = scene(schedule={"total_steps": 6, "save_every": 2})
    await one.run()
    told = [event[1] for event in one.events if event[0] == "checkpointed"]
    assert told == [0, 2, 4], "of those that are kept the oldest, when the newest is written"
    assert one.at("save", 4) < one.at("checkpointed", 2)


async def test_a_checkpoint_that_was_not_written_covers_nothing(scene: Build) -> None:
    one = scene(schedule={"total_steps": 4, "save_every": 2})
    one.saver.fails = {2, 4}
    await one.run()
    assert not [event for event in one.events if event[0] == "checkpointed"]


async def test_a_checkpoint_whose_frontier_the_disk_keeps_waiting_is_asked_for_again(scene: Build) -> None:
    one = scene(schedule={"total_steps": 2})
    frontier, asked = one.queue.read_frontier, []

    async def slow(step: int, *, wait_s: float) -> Any:
        asked.append(step)
        return None if len(asked) < 3 else await frontier(step, wait_s=wait_s)

    one.queue.read_frontier = slow  # type: ignore[method-assign]
    assert await one.run() == "finished"
    assert (asked, [saved[0] for saved in one.saver.saved]) == ([2, 2, 2], [2])


@pytest.mark.parametrize("hangs", [False, True], ids=["raises", "hangs"])
async def test_a_queue_that_does_not_make_its_journal_smaller_holds_no_checkpoint_up(
    scene: Build, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CONFIRM_S", 0.01)
    one = scene(schedule={"total_steps": 6, "save_every": 2})

    async def compact(step: int) -> None:
        if hangs:
            await asyncio.Event().wait()
        raise ConnectionError("the queue is silent")

    one.queue.confirm_checkpoint = compact  # type: ignore[assignment]
    assert await one.run() == "finished"
    assert [saved[0] for saved in one.saver.saved] == [2, 4, 6]


async def test_without_keep_best_scores_are_told_and_no_weights_are_kept(scene: Build) -> None:
    one = scene(keep_best=False, schedule={"eval_every": 2})
    await one.run()
    assert one.saver.best == []
    assert {row.step for row in one.trainer.rows if row.kind == "eval"} == {2, 4}


# -- waiting for the journal, and the end -----------------------------------------------------------------------------


async def test_a_step_is_not_published_before_it_is_on_the_disk(scene: Build, caplog: pytest.LogCaptureFixture) -> None:
    one = scene(schedule={"total_steps": 2})
    commit, asked = one.queue.commit, []

    async def full(step: int, *, wait_s: float) -> int | None:
        asked.append(step)
        if asked.count(1) < 3:
            assert not published(one)
            return None
        return await commit(step, wait_s=wait_s)

    one.queue.commit = full  # type: ignore[method-assign]
    assert await one.run() == "finished"
    assert asked == [1, 1, 1, 2]
    assert caplog.text.count("The journal cannot be written yet") == 2


async def test_a_stop_before_the_run_ends_it_as_it_begins(scene: Build) -> None:
    one = scene()
    one.trainer.request_stop()
    assert await asyncio.wait_for(one.run(), WAIT_S) == "stopped"
    assert one.backend.trained == []
