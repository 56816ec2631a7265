"""`FullyAsyncTrainer`: whole steps in order, staleness at consumption, retries, checkpoints, evaluations, replay."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from freewheel.queue.journal import Journal, JournalWriter
from freewheel.sync.device import DevicePacker
from freewheel.sync.weights import Weights
from freewheel.trainer import trainer as trainer_module
from freewheel.trainer.backend import NonFiniteLoss
from freewheel.trainer.trainer import FullyAsyncTrainer, TrainingFailed

from .scene import REWARD, WAIT_S, Build, P, Scene

NO_MEMORY = RuntimeError("out of memory")


@pytest.fixture
async def scene() -> AsyncIterator[Build]:
    made: list[Scene] = []

    def build(**settings: Any) -> Scene:
        made.append(Scene(**settings))
        return made[-1]

    yield build
    for one in made:
        await one.queue.close()
        one.trainer.close()
        if one.feeding is not None:
            one.feeding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await one.feeding
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# -- steps ------------------------------------------------------------------------------------------------------------


async def test_every_step_trains_exactly_p_new_groups_and_is_committed_before_it_is_published(scene: Build) -> None:
    one = scene()
    assert await one.run() == "finished"
    assert one.ordinals == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert one.backend.versions == [0, 1, 2, 3]
    assert [row.step for row in one.trainer.drain_rows()] == [1, 2, 3, 4, 4]  # and the evaluation at the end
    assert one.trainer.drain_rows() == []
    counters = one.trainer.counters()
    assert (counters["global_steps"], counters["processed_samples"]) == (4, 4 * P * 2)
    assert (counters["current_param_version"], counters["param_sync_count"]) == (4, 4)
    assert [event for event in one.events if event[0] in ("commit", "publish")] == [
        event for step in (1, 2, 3, 4) for event in (("commit", step), ("publish", step, step))
    ]


async def test_the_next_batch_is_requested_while_a_step_trains(scene: Build) -> None:
    one = scene(schedule={"total_steps": 2})
    gate = threading.Event()
    one.backend.on_step = lambda step: gate.wait(WAIT_S)
    running = asyncio.create_task(one.run())
    await one.until(lambda: ("begin", 1) in one.events and ("take", 2) in one.events)
    assert ("end", 1) not in one.events
    await one.until(lambda: one.queue.policy.ready == 0 and one.queue.policy.open == 0)
    gate.set()
    await running
    assert ("take", 3) not in one.events


async def test_a_slow_publisher_does_not_delay_the_next_step(scene: Build) -> None:
    one = scene(schedule={"total_steps": 2})
    gate, submit = asyncio.Event(), one.publisher.submit

    async def slow(version: int, weights: Weights) -> None:
        await gate.wait()
        await submit(version, weights)

    one.publisher.submit = slow  # type: ignore[method-assign]
    running = asyncio.create_task(one.run())
    await one.until(lambda: ("end", 2) in one.events)
    assert ("publish", 1, 1) not in one.events
    gate.set()
    await running
    assert one.at("publish", 1) < one.at("commit", 2)


async def test_finite_prompts_end_with_a_short_step(scene: Build) -> None:
    one = scene(total_prompts=7, schedule={"total_steps": 9})
    assert await one.run() == "finished"
    assert one.ordinals == [[0, 1, 2], [3, 4, 5], [6]]
    assert one.saver.saved[-1][0] == 3
    assert one.saver.saved[-1][2].low == 7


async def test_a_starving_trainer_logs_where_the_groups_are_and_waits(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    one = scene(schedule={"total_steps": 1, "batch_timeout_s": 0.01})
    running = asyncio.create_task(one.run(feed=False))
    await one.until(lambda: "No batch for step 1" in caplog.text)
    assert "async_training.batch_timeout = 0.01" in caplog.text
    assert "room for 6 more" in caplog.text
    one.feed()
    assert await running == "finished"


async def test_a_version_has_several_steps_and_the_last_one_may_have_fewer(scene: Build) -> None:
    one = scene(bounds={"steps_per_version": 2}, schedule={"total_steps": 5})
    await one.run()
    assert one.published() == [(1, 2), (2, 4), (3, 5)]
    assert one.backend.versions == [0, None, 1, None, 2], "in the middle of a version, weights belong to none"
    assert one.trainer.current_param_version == one.queue.policy.version == 3
    assert one.saver.saved[-1][:2] == (5, 3)


# -- staleness --------------------------------------------------------------------------------------------------------


async def test_groups_that_are_too_old_at_consumption_are_replaced_and_come_back_fresh(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    one = scene(born_old=True, bounds={"max_lag_allowed": 1})
    assert await one.run() == "finished"
    for version, groups in zip(one.backend.versions, one.backend.trained, strict=True):
        assert version is not None and version - min(group.min_version for group in groups) <= 1
    assert [len(groups) for groups in one.backend.trained] == [P] * 4
    trained = [ordinal for ordinals in one.ordinals for ordinal in ordinals]
    assert sorted(trained) == sorted(set(trained))
    assert one.trainer.dropped_stale_samples > 0
    assert (await one.queue.stats())["failed_attempts"]["stale"] * 2 == one.trainer.dropped_stale_samples
    assert "max_staleness_allowed = 1 versions: issued again" in caplog.text
    assert one.queue.ledger.abandoned == {}, "a prompt is not to blame for being late"


async def test_a_row_holds_sample_ages_and_the_share_of_stale_samples(scene: Build) -> None:
    one = scene(bounds={"threshold": 0, "max_lag_allowed": 5}, born_old=True, wall_clock=lambda: 7.0)
    await one.run()
    rows = [row.values for row in one.trainer.rows if row.kind == "step"]
    assert [row["max_sample_age"] for row in rows] == [0.0, 1.0, 2.0, 3.0]
    assert [row["stale_samples_ratio"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert [row["current_param_version"] for row in rows] == [1, 2, 3, 4], "counters are from after the step"
    assert (rows[0]["avg_sample_age_s"], rows[0]["actor/loss"], rows[3]["global_steps"]) == (7.0, 0.5, 4)


# -- errors -----------------------------------------------------------------------------------------------------------


async def test_a_failed_step_is_retried_with_the_same_groups(scene: Build) -> None:
    one = scene()
    one.fail_at(2, NO_MEMORY, times=2)
    assert await one.run() == "finished"
    assert one.ordinals == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert one.trainer.errors == 2
    assert [event for event in one.events if event[0] == "commit"] == [("commit", step) for step in (1, 2, 3, 4)]


NOT_FINITE = NonFiniteLoss("3 updates in a row; lower optimizer.lr")


@pytest.mark.parametrize(
    ("error", "updates", "attempts", "message", "saved"),
    [
        (NO_MEMORY, 0, 2, r"step 3 failed 2 times \(trainer.max_errors\): RuntimeError: out of mem", [2]),
        (NOT_FINITE, 0, 1, r"lower optimizer\.lr", [2]),
        (NO_MEMORY, 1, 1, r"step 3 failed after 1 of its updates .* twice: RuntimeError: out of mem", []),
        (NOT_FINITE, 1, 1, r"lower optimizer\.lr", []),
    ],
    ids=["always", "not finite", "after an update", "not finite after an update"],
)
async def test_a_step_that_keeps_failing_ends_the_run_and_the_last_whole_step_is_saved(
    scene: Build,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    updates: int,
    attempts: int,
    message: str,
    saved: list[int],
) -> None:
    one = scene(schedule={"max_errors": 2})
    one.fail_at(3, error, updates=updates)
    with pytest.raises(NonFiniteLoss if error is NOT_FINITE else TrainingFailed, match=message):
        await one.run()
    assert one.events.count(("begin", 3)) == attempts
    assert ("commit", 3) not in one.events and one.trainer.global_steps == 2
    assert one.saved_steps == saved, "weights in the middle of a step belong to no checkpoint"
    assert ("Not saving: step 3 failed" in caplog.text) is (not saved)
    for step, version, frontier, weight in one.saver.saved:
        assert (step, version, frontier.low, weight) == (2, 2, 2 * P, 2)


async def test_an_error_of_the_queue_ends_the_run_and_nothing_is_saved_that_would_train_prompts_twice(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    one = scene()

    async def gone(step: int, *, wait_s: float) -> int:
        raise ConnectionError("the queue died")

    one.queue.commit = gone  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="the queue died"):
        await one.run()
    assert one.saver.saved == []
    assert "cannot be saved: ConnectionError: the queue died" in caplog.text


@pytest.mark.parametrize(
    ("threshold", "awaited", "saved"),
    [(0, ("take", 2), 1), (1, ("end", 2), 2)],
    ids=["the next batch needs that version", "the next step is trained already"],
)
async def test_an_error_while_publishing_ends_the_run_and_the_last_step_is_saved(
    scene: Build, threshold: int, awaited: Any, saved: int
) -> None:
    one = scene(bounds={"threshold": threshold})

    async def gone(version: int, weights: Weights) -> None:
        await one.until(lambda: awaited in one.events)
        raise ConnectionError("the synchronizer died")

    one.publisher.submit = gone  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="the synchronizer died"):
        await one.run()
    ((step, version, frontier, weight),) = one.saver.saved
    assert (step, version, frontier.trained, weight) == (saved, saved, saved * P, saved)


@pytest.mark.parametrize("end", ["error", "cancelled", "cancelled at its end"])
async def test_a_checkpoint_in_progress_is_finished_whatever_ends_the_run(scene: Build, end: str) -> None:
    one = scene(schedule={"total_steps": 2 if end == "cancelled at its end" else 9, "save_every": 2, "max_errors": 1})
    started, gate = one.hold_saves()

    def fail(step: int) -> None:
        if step == 3:
            assert started.wait(WAIT_S)
            raise NO_MEMORY

    if end == "error":
        one.backend.on_step = fail
    running = asyncio.create_task(one.run())
    await one.until(started.is_set)
    if end == "error":
        await one.until(lambda: one.trainer.errors == 1)
    else:
        running.cancel()
    done, _ = await asyncio.wait([running], timeout=0.02)
    assert not done and one.trainer.stats()["saving"] is True
    gate.set()
    with pytest.raises(TrainingFailed if end == "error" else asyncio.CancelledError):
        await running
    assert one.saved_steps == [one.trainer.stats()["saved_step"]] == [2]


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "steps_per_version", "fails", "saved", "confirmed"),
    [
        ({"total_steps": 5, "save_every": 2}, 1, (), [(2, 2), (4, 4), (5, 5)], [0, 2, 4]),
        ({"total_steps": 4, "save_every": 2}, 1, (), [(2, 2), (4, 4)], [0, 2]),
        ({"total_steps": 4, "save_every": 1}, 1, (1, 2, 4), [(3, 3)], [0]),
        ({"total_steps": 4, "save_every": 2}, 1, (2, 4), [], []),
        ({"total_steps": 10, "save_every": 2}, 3, (), [(3, 1), (6, 2), (9, 3), (10, 4)], [0, 3, 6, 9]),
    ],
    ids=["and at the end", "once at the end", "a full disk", "a full disk always", "at the end of a version"],
)
async def test_a_checkpoint_is_written_when_it_is_due_and_the_queue_learns_how_far_back_a_resume_may_go(
    scene: Build, caplog: pytest.LogCaptureFixture, schedule, steps_per_version, fails, saved, confirmed
) -> None:
    one = scene(bounds={"steps_per_version": steps_per_version}, schedule=schedule)
    one.saver.fails = set(fails)
    assert await one.run() == "finished"
    assert one.trainer.global_steps == schedule["total_steps"]
    assert [(step, version) for step, version, *_ in one.saver.saved] == saved
    for step, _, frontier, weight in one.saver.saved:
        assert weight == step
        assert (frontier.low, frontier.ended, frontier.trained) == (step * P, (), step * P)
        assert one.at("commit", step) < one.at("save", step)
    assert [event[1] for event in one.events if event[0] == "checkpointed"] == confirmed
    assert ("No space left on device" in caplog.text) is bool(fails)
    stats = one.trainer.stats()
    assert stats["saving"] is stats["evaluating"] is False
    assert stats["saved_step"] == (saved[-1][0] if saved else 0)


@pytest.mark.parametrize(
    ("every", "reached", "saved"),
    [(3, 6, [3, 6]), (1, 3, [1, 2, 3, 4, 5, 6])],
    ids=["training continues until the next checkpoint", "a slow disk slows the steps down instead of filling memory"],
)
async def test_training_does_not_wait_for_a_checkpoint_until_the_next_one_is_due(
    scene: Build, every: int, reached: int, saved: list[int]
) -> None:
    one = scene(bounds={"threshold": 9}, schedule={"save_every": every, "total_steps": 6})
    _, gate = one.hold_saves()
    running = asyncio.create_task(one.run())
    await one.until(lambda: ("end", reached) in one.events)
    assert one.saver.saved == []
    done, _ = await asyncio.wait([running], timeout=0.05)
    assert not done and ("begin", reached + 1) not in one.events
    gate.set()
    assert await running == "finished"
    assert one.saved_steps == saved


@pytest.mark.parametrize("hangs", [False, True], ids=["raises", "hangs"])
async def test_a_queue_that_cannot_compact_its_journal_delays_no_checkpoint(
    scene: Build, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "CONFIRM_S", 0.01)
    one = scene(schedule={"total_steps": 6, "save_every": 2})

    async def compact(step: int) -> None:
        if hangs:
            await asyncio.Event().wait()
        raise ConnectionError("the queue is silent")

    one.queue.confirm_checkpoint = compact  # type: ignore[assignment]
    assert await one.run() == "finished"
    assert one.saved_steps == [2, 4, 6]


@pytest.mark.parametrize("method", ["commit", "read_frontier"])
async def test_a_step_is_neither_published_nor_saved_before_the_journal_has_it(
    scene: Build, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    one = scene(schedule={"total_steps": 2})
    request, asked = getattr(one.queue, method), []

    async def full(step: int, *, wait_s: float) -> Any:
        asked.append(step)
        if len(asked) < 3:
            assert one.saver.saved == []
            assert method == "read_frontier" or not one.published()
            return None
        return await request(step, wait_s=wait_s)

    setattr(one.queue, method, full)
    assert await one.run() == "finished"
    assert asked == {"commit": [1, 1, 1, 2], "read_frontier": [2, 2, 2]}[method]
    assert one.saved_steps == [2]
    assert caplog.text.count("The journal cannot be written yet") == 2


# -- replay of recorded steps -----------------------------------------------------------------------------------------


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[JournalWriter]:
    writer = JournalWriter(journal=Journal(tmp_path / "journal.sqlite"))
    yield writer
    await writer.close()


async def die_after(one: Scene, step: int) -> None:
    """Run a trainer that dies after it has reported `step` and saved nothing. Its feeder ends with it."""
    one.fail_at(step + 1, RuntimeError("killed"))
    one.saver.fails = set(range(99))
    with pytest.raises(TrainingFailed):
        await one.run()
    assert one.feeding is not None
    one.feeding.cancel()
    await asyncio.gather(one.feeding, return_exceptions=True)


async def test_a_successor_replays_the_recorded_steps_and_then_continues(scene: Build, journal: JournalWriter) -> None:
    first = scene(journal=journal, schedule={"total_steps": 5, "max_errors": 1})
    await die_after(first, 3)
    second = scene(after=first, schedule={"total_steps": 5, "eval_every": 1, "eval_at_start": True})
    assert await second.run() == "finished"
    assert second.ordinals[:3] == first.ordinals
    assert second.backend.versions == [0, 1, 2, 3, 4]
    trained = [ordinal for ordinals in second.ordinals for ordinal in ordinals]
    assert sorted(trained) == list(range(15))
    assert second.trainer.stats()["recorded_until"] == 3
    assert second.published() == [(3, 3), (4, 4), (5, 5)], "engines receive the last recorded version, and none before"
    assert min(second.evaluated) >= 3


VERSIONS = {"steps_per_version": 2, "threshold": 2}


async def test_a_successor_in_the_middle_of_a_version_publishes_the_version_before(
    scene: Build, journal: JournalWriter
) -> None:
    first = scene(journal=journal, bounds=VERSIONS, schedule={"total_steps": 7, "max_errors": 1})
    first.publisher.holding = True  # nothing is published
    await die_after(first, 2)
    second = scene(after=first, bounds=VERSIONS, schedule={"total_steps": 7, "max_errors": 1})
    await die_after(second, 3)
    assert second.trainer.current_param_version == 2, "its end completed a version, which is recorded"
    third = scene(after=second, bounds=VERSIONS, schedule={"total_steps": 7})
    assert await third.run() == "finished"
    assert third.published() == [(2, 3), (3, 5), (4, 7)]
    assert third.backend.versions == [0, None, 1, 2, None, 3, None], "as recorded, including the short version"
    assert third.trainer.current_param_version == third.queue.policy.version == 4


async def test_a_successor_that_stops_during_the_replay_leaves_the_records_as_they_were(
    scene: Build, journal: JournalWriter
) -> None:
    first = scene(journal=journal, bounds=VERSIONS, schedule={"total_steps": 9, "max_errors": 1})
    await die_after(first, 4)
    second = scene(after=first, bounds=VERSIONS, schedule={"total_steps": 9})
    second.backend.on_step = lambda step: second.trainer.request_stop() if step == 3 else None
    assert await second.run(feed=False) == "stopped"
    assert (second.trainer.global_steps, second.trainer.current_param_version) == (3, 1)
    assert second.saver.saved == [], "a version that continues has no checkpoint in its middle"
    assert second.queue.step == 4 and second.queue.policy.version == 2
    third = scene(after=first, bounds=VERSIONS, schedule={"total_steps": 9})
    assert await third.run() == "finished"
    assert third.ordinals[:4] == first.ordinals


async def test_recorded_steps_are_replayed_as_they_were_even_if_the_run_is_shorter_and_the_bound_tighter_now(
    scene: Build, journal: JournalWriter
) -> None:
    bounds = {"threshold": 0, "max_lag_allowed": 5}
    first = scene(journal=journal, bounds=bounds, born_old=True, schedule={"total_steps": 9, "max_errors": 1})
    await die_after(first, 4)
    second = scene(after=first, bounds={**bounds, "max_lag_allowed": 1}, schedule={"total_steps": 2})
    assert await second.run(feed=False) == "finished"
    assert second.ordinals == first.ordinals
    assert second.trainer.dropped_stale_samples == 0
    assert second.saved_steps[-1] == 4


@pytest.mark.parametrize(("total", "steps"), [(4, [3, 4]), (2, [])])
async def test_a_resumed_trainer_provides_its_weights_and_takes_only_the_remaining_steps(
    scene: Build, total: int, steps: list[int]
) -> None:
    one = scene(step=2, version=2, schedule={"eval_at_start": True, "total_steps": total})
    one.publisher.version = 2
    assert await one.run(feed=bool(steps)) == "finished"
    assert one.publisher.primed == (2, 2)
    assert [row.step for row in one.trainer.rows if row.kind == "step"] == steps
    assert one.backend.versions == [step - 1 for step in steps]
    assert one.saved_steps == steps[-1:]
    assert 0 not in one.evaluated


# -- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting_for", ["the start", "groups", "replacements"])
async def test_a_stop_before_any_step_ends_the_run_at_once(scene: Build, waiting_for: str) -> None:
    one = (
        scene(born_old=True, bounds={"max_lag_allowed": 0, "threshold": 0})
        if waiting_for == "replacements"
        else scene()
    )
    if waiting_for == "the start":
        one.trainer.request_stop()
    running = asyncio.create_task(one.run(feed=waiting_for != "groups"))
    if waiting_for == "groups":
        await one.until(lambda: ("take", 1) in one.events)
    elif waiting_for == "replacements":
        await one.until(lambda: one.trainer.dropped_stale_samples > 0)
    one.trainer.request_stop()
    assert await asyncio.wait_for(running, WAIT_S) == "stopped"
    if waiting_for != "replacements":
        assert one.backend.trained == one.saver.saved == one.evaluated == []


async def test_a_stop_while_training_finishes_the_step_saves_it_and_returns_the_next_batch(scene: Build) -> None:
    one = scene(schedule={"total_steps": 9})
    gate = threading.Event()
    one.backend.on_step = lambda step: step < 2 or gate.wait(WAIT_S)
    running = asyncio.create_task(one.run())
    await one.until(lambda: ("begin", 2) in one.events and ("taken", 3) in one.events)
    one.trainer.request_stop()
    gate.set()
    assert await running == "stopped"
    assert one.ordinals == [[0, 1, 2], [3, 4, 5]]
    assert one.saver.saved[-1][0] == 2
    assert one.saver.saved[-1][2].low == 6
    assert ("give back", 3) in one.events


async def test_a_stop_during_the_last_evaluation_only_cancels_that(scene: Build) -> None:
    begun = asyncio.Event()

    async def endless(step: int) -> dict[str, float]:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    one = scene(evaluate=endless)
    running = asyncio.create_task(one.run())
    await asyncio.wait_for(begun.wait(), WAIT_S)
    assert one.trainer.stats()["evaluating"] is True
    one.trainer.request_stop()
    assert await running == "finished"
    assert one.saver.saved[-1][0] == 4
    assert one.trainer.stats()["evaluating"] is False


# -- evaluation -------------------------------------------------------------------------------------------------------


async def test_an_evaluation_runs_next_to_training_and_no_second_one_starts_meanwhile(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()
    begun: list[int] = []

    async def slow(step: int) -> dict[str, float]:
        begun.append(step)
        await gate.wait()
        return one.scored(step / 10)

    one = scene(evaluate=slow, schedule={"eval_every": 1, "total_steps": 5})
    running = asyncio.create_task(one.run())
    await one.until(lambda: ("end", 5) in one.events)
    assert begun == [1]
    gate.set()
    assert await running == "finished"
    assert begun == [1, 5]
    assert "Skipping the evaluation at step 2" in caplog.text
    assert [(row.step, row.values[REWARD]) for row in one.trainer.rows if row.kind == "eval"] == [(1, 0.1), (5, 0.5)]


@pytest.mark.parametrize(
    ("score", "keep_best", "rows", "best"),
    [
        (0.7, True, [0, 2, 4], [2, 4]),  # the weights at the start exist already
        (0.7, False, [0, 2, 4], []),
        (float("nan"), True, [0, 2, 4], []),
        (None, True, [], []),
        (ConnectionError("a rollouter died"), True, [], []),
        ("not published", True, [0], []),
    ],
    ids=["a score", "best is not kept", "no number", "no prompts", "an error", "weights that have not arrived"],
)
async def test_an_evaluation_records_its_score_and_never_ends_the_run(
    scene: Build, caplog: pytest.LogCaptureFixture, score, keep_best, rows, best
) -> None:
    asked: list[int] = []

    async def evaluate(step: int) -> dict[str, float] | None:
        asked.append(step)
        if isinstance(score, Exception):
            raise score
        return None if score is None else one.scored(score)

    schedule = {"eval_at_start": True, "eval_every": 2}
    one = scene(bounds={"threshold": 4}, evaluate=evaluate, keep_best=keep_best, schedule=schedule)
    one.publisher.holding = score == "not published"
    assert await one.run() == "finished"
    if one.publisher.holding:
        assert "No evaluation at step 4: version 4 has not reached the engines" in caplog.text
    assert asked == [0] if one.publisher.holding else [0, 2, 4], "the last step is evaluated once"
    assert [row.step for row in one.trainer.rows if row.kind == "eval"] == rows
    assert [(step, weight) for step, _, weight in one.saver.best] == [(step, step) for step in best]
    assert ("a rollouter died" in caplog.text) is isinstance(score, Exception)
    assert one.saved_steps == [4]


async def test_a_score_whose_weights_are_gone_is_not_the_best(scene: Build, caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of a version, the trainer's weights are not those that the engines have."""
    caplog.set_level(logging.INFO, "freewheel.trainer")
    one = scene(bounds={"steps_per_version": 2}, schedule={"eval_every": 3, "save_every": 3, "total_steps": 4})
    one.backend.on_step = lambda step: step < 4 or measured.wait(WAIT_S)
    measured = threading.Event()
    running = asyncio.create_task(one.run())
    await one.until(lambda: "cannot be the best" in caplog.text)
    measured.set()
    await running
    assert one.evaluated == [3, 4]
    assert "The score at step 3 cannot be the best: the weights of version 1 are gone" in caplog.text
    assert one.saver.best == [(4, 0.4, 4)]


async def test_an_evaluation_waits_for_the_version_of_its_own_step(scene: Build) -> None:
    asked: list[int] = []
    one = scene(bounds={"threshold": 3}, schedule={"eval_every": 2, "total_steps": 3})
    submit = one.publisher.submit

    async def slow(version: int, weights: Weights) -> None:
        if version == 2:
            await one.until(lambda: one.trainer.current_param_version == 3)
        await submit(version, weights)

    async def wait(version: int, *, wait_s: float) -> bool:
        asked.append(version)
        return True

    one.publisher.submit = slow  # type: ignore[method-assign]
    one.publisher.wait_published = wait  # type: ignore[method-assign]
    await one.run()
    assert asked == [2, 3]
    assert one.saver.best == [(2, 0.2, 2), (3, 0.3, 3)]


async def test_a_long_evaluation_keeps_the_newest_weights_it_measured_on_the_host_and_few_on_the_device(
    scene: Build,
) -> None:
    """Engines switch versions during an evaluation. On the device, at most three versions are in use: one is packed,
    one waits to be sent, one is being written."""
    packer = DevicePacker(bucket_bytes=1 << 20, share=lambda buffer: {})
    held: list[int] = []

    async def evaluate(step: int) -> dict[str, float]:
        if step == 1:
            await one.until(lambda: one.publisher.version == 12)
            held.extend(one.trainer._evaluation._kept)
            return {REWARD: 1.0, "eval/version_min": 1, "eval/version_max": 9}
        return one.scored(0.0)

    one = scene(schedule={"total_steps": 12, "eval_every": 1, "save_every": 2}, packer=packer, evaluate=evaluate)
    assert await one.run() == "finished"
    assert one.saved_steps == [2, 4, 6, 8, 10, 12]
    assert one.saver.best[0] == (9, 1.0, 9), "step 9 made version 9, and its weights are those of step 9"
    assert one.saver.measured[0] == (1, 9)
    assert held == list(range(5, 13)) and one.trainer._evaluation._kept == {}
    assert len(packer._slots) <= 3


# -- hooks and life ---------------------------------------------------------------------------------------------------


class Custom(FullyAsyncTrainer):
    def _compute_custom_metrics(self, batch: Any) -> dict[str, float]:
        if self.global_steps == 1:
            raise KeyError("tools_kwargs")
        return {"mine/rows": float(len(batch)), "mine/score": float(batch.batch["token_level_scores"].sum())}


async def test_custom_metrics_are_in_the_rows_and_a_failing_hook_loses_only_those(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    one = scene(kind=Custom, schedule={"total_steps": 3})
    assert await one.run() == "finished"
    rows = [row.values for row in one.trainer.rows if row.kind == "step"]
    assert [row.get("mine/rows") for row in rows] == [2.0 * P, None, 2.0 * P]
    assert rows[0]["mine/score"] == float(P)
    assert "_compute_custom_metrics failed" in caplog.text


async def test_stats_contain_the_time_of_each_activity(scene: Build, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "freewheel.trainer")
    before = set(threading.enumerate())
    one = scene(schedule={"save_every": 2})
    await one.run()
    spans = one.trainer.stats()["spans"]
    assert {"train", "wait_batch", "save", "pack"} <= spans.keys()
    assert "Saved the checkpoint of step 2" in caplog.text
    one.trainer.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive()
