"""Steps are exactly P groups, in order, each told of before the next; whatever fails beside them does not end a run
that could go on, and what must end it leaves the run as it was saved."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from freewheel.sync.weights import Weights
from freewheel.trainer.backend import NonFiniteLoss
from freewheel.trainer.trainer import FullyAsyncTrainer, TrainingFailed

from .scene import REWARD, WAIT_S, Build, P

# -- steps ------------------------------------------------------------------------------------------------------------


async def test_every_step_has_exactly_p_groups_and_every_prompt_is_trained_once(scene: Build) -> None:
    one = scene()
    assert await one.run() == "finished"
    assert one.ordinals == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert one.backend.versions == [0, 1, 2, 3]
    assert [row.step for row in one.trainer.drain_rows()] == [1, 2, 3, 4, 4]  # and the evaluation at the end
    assert one.trainer.drain_rows() == []
    counters = one.trainer.counters()
    assert (counters["global_steps"], counters["processed_samples"]) == (4, 4 * P * 2)
    assert (counters["current_param_version"], counters["param_sync_count"]) == (4, 4)


async def test_a_step_is_committed_before_its_weights_are_published_and_all_in_order(scene: Build) -> None:
    one = scene()
    await one.run()
    told = [event for event in one.events if event[0] in ("commit", "publish")]
    assert told == [
        *(("commit", 1), ("publish", 1, 1), ("commit", 2), ("publish", 2, 2)),
        *(("commit", 3), ("publish", 3, 3), ("commit", 4), ("publish", 4, 4)),
    ]


async def test_the_next_batch_is_asked_for_while_a_step_trains(scene: Build) -> None:
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


async def test_what_a_step_tells_others_does_not_hold_up_the_next(scene: Build) -> None:
    one = scene(schedule={"total_steps": 2})
    telling = asyncio.Event()
    submit = one.publisher.submit

    async def slow(version: int, weights: Weights) -> None:
        await telling.wait()
        await submit(version, weights)

    one.publisher.submit = slow  # type: ignore[method-assign]
    running = asyncio.create_task(one.run())
    await one.until(lambda: ("end", 2) in one.events)
    assert ("publish", 1, 1) not in one.events
    telling.set()
    await running
    assert one.at("publish", 1) < one.at("commit", 2)


async def test_finite_prompts_end_with_a_short_step(scene: Build) -> None:
    one = scene(total_prompts=7, schedule={"total_steps": 9})
    assert await one.run() == "finished"
    assert one.ordinals == [[0, 1, 2], [3, 4, 5], [6]]
    assert one.saver.saved[-1][0] == 3
    assert one.saver.saved[-1][2].low == 7


async def test_starvation_is_told_with_where_the_groups_are_and_waited_out(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    one = scene(schedule={"total_steps": 1, "batch_timeout_s": 0.01})
    running = asyncio.create_task(one.run(feed=False))
    await one.until(lambda: "No batch for step 1" in caplog.text)
    assert "async_training.batch_timeout = 0.01" in caplog.text
    assert "room for 6 more" in caplog.text
    one.feed()
    assert await running == "finished"


async def test_versions_count_syncs_and_the_last_one_may_be_of_fewer_steps(scene: Build) -> None:
    one = scene(bounds={"steps_per_version": 2}, schedule={"total_steps": 5})
    await one.run()
    assert [event for event in one.events if event[0] == "publish"] == [
        *(("publish", 1, 2), ("publish", 2, 4), ("publish", 3, 5)),
    ]
    assert one.backend.versions == [0, None, 1, None, 2], "in the middle of one the weights are of none"
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
    assert one.queue.ledger.abandoned == {}  # to be late is no fault of the prompt's


async def test_ages_and_the_share_of_stale_samples_are_in_the_row(scene: Build) -> None:
    one = scene(bounds={"threshold": 0, "max_lag_allowed": 5}, born_old=True, wall_clock=lambda: 7.0)
    await one.run()
    rows = [row.values for row in one.trainer.rows if row.kind == "step"]
    assert [row["max_sample_age"] for row in rows] == [0.0, 1.0, 2.0, 3.0]
    assert [row["stale_samples_ratio"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert rows[0]["avg_sample_age_s"] == 7.0
    assert rows[3]["global_steps"] == 4
    assert [row["current_param_version"] for row in rows] == [1, 2, 3, 4], "as it is after the step"
    assert rows[0]["actor/loss"] == 0.5


# -- errors -----------------------------------------------------------------------------------------------------------


async def test_a_step_that_fails_is_tried_again_with_the_same_groups(scene: Build) -> None:
    one = scene()
    left = [RuntimeError("out of memory"), RuntimeError("out of memory")]

    def fails_twice(step: int) -> None:
        if step == 2 and left:
            raise left.pop()

    one.backend.on_step = fails_twice
    assert await one.run() == "finished"
    assert one.ordinals == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert one.trainer.errors == 2
    assert [event for event in one.events if event[0] == "commit"] == [("commit", step) for step in (1, 2, 3, 4)]


async def test_a_step_that_always_fails_ends_the_run_and_is_not_committed(scene: Build) -> None:
    one = scene(schedule={"max_errors": 2})

    def fails(step: int) -> None:
        if step == 3:
            raise RuntimeError("out of memory")

    one.backend.on_step = fails
    with pytest.raises(TrainingFailed, match=r"step 3 failed 2 times \(trainer.max_errors\): RuntimeError: out of mem"):
        await one.run()
    assert ("commit", 3) not in one.events
    assert one.trainer.global_steps == 2


async def test_a_loss_that_stays_without_a_number_is_not_tried_again(scene: Build) -> None:
    one = scene()

    def fails(step: int) -> None:
        raise NonFiniteLoss("3 updates in a row; lower optimizer.lr")

    one.backend.on_step = fails
    with pytest.raises(NonFiniteLoss, match=r"lower optimizer\.lr"):
        await one.run()
    assert one.events.count(("begin", 1)) == 1


async def test_what_goes_wrong_after_a_step_ends_the_run(scene: Build) -> None:
    one = scene()

    async def gone(step: int, *, wait_s: float) -> int:
        raise ConnectionError("the queue died")

    one.queue.commit = gone  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="the queue died"):
        await one.run()


async def test_a_version_that_could_not_be_published_ends_the_run_while_it_waits_for_what_that_version_brings(
    scene: Build,
) -> None:
    one = scene(bounds={"threshold": 0})  # the next batch comes when engines have the version before it

    async def gone(version: int, weights: Weights) -> None:
        await one.until(lambda: ("take", 2) in one.events)
        raise ConnectionError("the synchronizer died")

    one.publisher.submit = gone  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="the synchronizer died"):
        await one.run()
    assert one.saver.saved[-1][0] == 1


async def test_a_step_that_failed_after_an_update_is_not_trained_on_twice(scene: Build) -> None:
    one = scene(schedule={"save_every": 1})

    def half(step: int) -> None:
        if step == 3:
            one.backend.updates_applied += 1
            raise RuntimeError("out of memory")

    one.backend.on_step = half
    with pytest.raises(
        TrainingFailed, match=r"step 3 failed after 1 of its updates .* twice: RuntimeError: out of mem"
    ):
        await one.run()
    assert one.events.count(("begin", 3)) == 1
    assert [saved[0] for saved in one.saver.saved] == [1, 2]


async def test_what_was_trained_is_saved_when_a_step_fails_for_good(scene: Build) -> None:
    one = scene(schedule={"max_errors": 1})

    def fails(step: int) -> None:
        if step == 3:
            raise NonFiniteLoss("3 updates in a row")

    one.backend.on_step = fails
    with pytest.raises(NonFiniteLoss):
        await one.run()
    ((step, version, frontier, weight),) = one.saver.saved
    assert (step, version, frontier.low, weight) == (2, 2, 2 * P, 2)


async def test_weights_in_the_middle_of_a_step_are_not_saved(scene: Build, caplog: pytest.LogCaptureFixture) -> None:
    one = scene()

    def half(step: int) -> None:
        if step == 3:
            one.backend.updates_applied += 1
            raise NonFiniteLoss("3 updates in a row")

    one.backend.on_step = half
    with pytest.raises(NonFiniteLoss):
        await one.run()
    assert one.saver.saved == []
    assert "Not saving: step 3 failed" in caplog.text


async def test_a_step_whose_weights_nobody_takes_is_saved_with_its_prompts(scene: Build) -> None:
    """Also the one that was trained while that came out."""
    one = scene()

    async def gone(version: int, weights: Weights) -> None:
        await one.until(lambda: ("end", 2) in one.events)
        raise ConnectionError("the synchronizer died")

    one.publisher.submit = gone  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="the synchronizer died"):
        await one.run()
    ((step, version, frontier, weight),) = one.saver.saved
    assert (step, version, frontier.trained, weight) == (2, 2, 2 * P, 2)


async def test_without_the_queue_nothing_is_saved_that_would_train_prompts_twice(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    one = scene()

    async def gone(step: int, *, wait_s: float) -> int:
        raise ConnectionError("the queue died")

    one.queue.commit = gone  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        await one.run()
    assert one.saver.saved == []
    assert "cannot be saved: ConnectionError: the queue died" in caplog.text


async def test_a_checkpoint_that_is_being_written_when_a_run_fails_is_written(scene: Build) -> None:
    one = scene(schedule={"save_every": 2, "max_errors": 1})
    writing, gate = threading.Event(), threading.Event()
    save = one.saver.save

    def slow(*args: Any) -> int:
        writing.set()
        gate.wait(WAIT_S)
        return save(*args)

    def fails(step: int) -> None:
        if step == 3:
            assert writing.wait(WAIT_S)
            raise RuntimeError("out of memory")

    one.saver.save = slow  # type: ignore[method-assign]
    one.backend.on_step = fails
    running = asyncio.create_task(one.run())
    await one.until(lambda: one.trainer.errors == 1)
    assert one.trainer.stats()["saving"] is True
    assert not running.done()
    gate.set()
    with pytest.raises(TrainingFailed):
        await running
    assert [saved[0] for saved in one.saver.saved] == [2]
    assert one.trainer.stats()["saved_step"] == 2


@pytest.mark.parametrize("total", [2, 9])
async def test_a_checkpoint_that_is_being_written_when_a_run_is_cancelled_is_written(scene: Build, total: int) -> None:
    """In mid-run, and at its end."""
    one = scene(schedule={"save_every": 2 if total == 9 else None, "total_steps": total})
    writing, gate = threading.Event(), threading.Event()
    save = one.saver.save

    def slow(*args: Any) -> int:
        writing.set()
        gate.wait(WAIT_S)
        return save(*args)

    one.saver.save = slow  # type: ignore[method-assign]
    running = asyncio.create_task(one.run())
    await one.until(writing.is_set)
    running.cancel()
    await asyncio.sleep(0.02)
    assert not running.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [saved[0] for saved in one.saver.saved] == [2]


# -- checkpoints ------------------------------------------------------------------------------------------------------


async def test_a_checkpoint_holds_the_step_its_weights_and_the_prompts_that_ended_by_then(scene: Build) -> None:
    one = scene(schedule={"total_steps": 5, "save_every": 2})
    await one.run()
    assert [step for step, *_ in one.saver.saved] == [2, 4, 5]
    for step, version, frontier, weight in one.saver.saved:
        assert step == version == weight
        assert (frontier.low, frontier.ended, frontier.trained) == (step * P, (), step * P)
    assert one.at("commit", 2) < one.at("save", 2)


async def test_a_step_that_is_saved_already_is_not_saved_twice_at_the_end(scene: Build) -> None:
    one = scene(schedule={"save_every": 2})
    await one.run()
    assert [saved[0] for saved in one.saver.saved] == [2, 4]
    assert one.trainer.stats()["saving"] is one.trainer.stats()["evaluating"] is False


async def test_a_full_disk_costs_a_checkpoint_and_says_so_and_the_run_goes_on(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    one = scene(schedule={"save_every": 1})
    one.saver.fails = {1, 2, 4}
    assert await one.run() == "finished"
    assert one.ordinals[-1] == [9, 10, 11]
    assert [saved[0] for saved in one.saver.saved] == [3]
    assert caplog.text.count("No space left on device") == 4  # each of them, and step 4 once more at the end
    assert one.trainer.stats()["saved_step"] == 3


async def test_saving_does_not_hold_up_training_until_the_next_one_is_due(scene: Build) -> None:
    one = scene(schedule={"save_every": 3, "total_steps": 6})
    gate = threading.Event()
    save = one.saver.save

    def slow(*args: Any) -> int:
        gate.wait(WAIT_S)
        return save(*args)

    one.saver.save = slow  # type: ignore[method-assign]
    running = asyncio.create_task(one.run())
    await one.until(lambda: ("end", 6) in one.events)
    assert one.saver.saved == []
    gate.set()
    assert await running == "finished"
    assert [saved[0] for saved in one.saver.saved] == [3, 6]


async def test_a_disk_slower_than_the_steps_slows_them_down_instead_of_filling_memory(scene: Build) -> None:
    one = scene(bounds={"threshold": 9}, schedule={"save_every": 1, "total_steps": 6})
    gate = threading.Event()
    save = one.saver.save

    def slow(*args: Any) -> int:
        gate.wait(WAIT_S)
        return save(*args)

    one.saver.save = slow  # type: ignore[method-assign]
    running = asyncio.create_task(one.run())
    await one.until(lambda: ("end", 3) in one.events)  # 1 is being written, 2 waits for it
    await asyncio.sleep(0.05)
    assert ("begin", 4) not in one.events
    gate.set()
    assert await running == "finished"
    assert [saved[0] for saved in one.saver.saved] == [1, 2, 3, 4, 5, 6]


# -- stopping ---------------------------------------------------------------------------------------------------------


async def test_stop_while_waiting_for_groups_ends_at_once(scene: Build) -> None:
    one = scene()
    running = asyncio.create_task(one.run(feed=False))
    await one.until(lambda: ("take", 1) in one.events)
    one.trainer.request_stop()
    assert await running == "stopped"
    assert one.saver.saved == []  # nothing has changed
    assert one.evaluated == []


async def test_stop_while_training_finishes_that_step_saves_and_gives_the_next_batch_back(scene: Build) -> None:
    one = scene(schedule={"total_steps": 9})
    gate = threading.Event()
    one.backend.on_step = lambda step: step < 2 or gate.wait(WAIT_S)
    running = asyncio.create_task(one.run())
    await one.until(lambda: ("begin", 2) in one.events and 3 in one.queue._steps.list_taken())
    one.trainer.request_stop()
    gate.set()
    assert await running == "stopped"
    assert one.ordinals == [[0, 1, 2], [3, 4, 5]]
    assert one.saver.saved[-1][0] == 2
    assert one.saver.saved[-1][2].low == 6
    assert ("give back", 3) in one.events
    assert one.queue._steps.list_taken() == []


async def test_stop_while_stale_groups_are_replaced_ends_at_once(scene: Build) -> None:
    one = scene(born_old=True, bounds={"max_lag_allowed": 0, "threshold": 0})
    one.publisher.holding = False
    running = asyncio.create_task(one.run())
    await one.until(lambda: one.trainer.dropped_stale_samples > 0)
    one.trainer.request_stop()
    assert await running == "stopped"


async def test_stop_during_the_last_evaluation_costs_only_that(scene: Build) -> None:
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


async def test_evaluation_runs_beside_training_and_one_that_is_not_done_is_not_doubled(
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


async def test_the_best_weights_are_those_of_the_step_that_was_measured(scene: Build) -> None:
    one = scene(schedule={"eval_every": 2, "eval_at_start": True, "total_steps": 5})
    await one.run()
    assert one.evaluated[0] == 0
    assert one.evaluated[-1] == 5
    assert [best for best in one.saver.best if best[0] == 5] == [(5, 0.5, 5)]
    assert all(step == weight for step, _, weight in one.saver.best)
    assert 0 not in {step for step, _, _ in one.saver.best}  # what a run starts from is there already


async def test_the_best_weights_are_of_the_newest_version_that_was_measured(scene: Build) -> None:
    """Engines go on while they are measured: the score is theirs, and not that of the weights it was begun with."""

    async def slow(step: int) -> dict[str, float]:
        if step == 2:
            await one.until(lambda: one.publisher.version == 4)
            return one.scored(0.9, oldest=2)
        return one.scored(0.1)

    one = scene(evaluate=slow, schedule={"eval_every": 2, "total_steps": 5})
    one.backend.on_step = lambda step: step < 5 or measured.wait(WAIT_S)
    measured = threading.Event()
    running = asyncio.create_task(one.run())
    await one.until(lambda: bool(one.saver.best))
    measured.set()
    await running
    assert one.saver.best == [(4, 0.9, 4), (5, 0.1, 5)]
    assert one.saver.measured == [(2, 4), (5, 5)]


async def test_a_score_whose_weights_are_not_at_hand_is_no_best_one(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a version the trainer's weights are not those that were measured."""
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


async def test_an_evaluation_holds_no_more_than_a_few_versions(scene: Build) -> None:
    held: list[int] = []

    async def slow(step: int) -> dict[str, float]:
        if step == 1:
            await one.until(lambda: one.publisher.version == 12)
            held.extend(one.trainer._evaluation._kept)
        return one.scored(0.5)

    one = scene(evaluate=slow, schedule={"eval_every": 1, "total_steps": 12})
    await one.run()
    assert held == list(range(5, 13))
    assert one.trainer._evaluation._kept == {}


async def test_an_evaluation_waits_for_the_version_of_its_own_step(scene: Build) -> None:
    """Also where the next step is done before it begins."""
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


async def test_no_evaluation_where_its_weights_have_not_arrived(scene: Build, caplog: pytest.LogCaptureFixture) -> None:
    one = scene(bounds={"threshold": 3}, schedule={"total_steps": 2})
    one.publisher.holding = True
    assert await one.run() == "finished"
    assert one.evaluated == []
    assert "No evaluation at step 2: version 2 has not reached the engines" in caplog.text


async def test_an_evaluation_that_fails_does_not_end_the_run(scene: Build, caplog: pytest.LogCaptureFixture) -> None:
    async def fails(step: int) -> dict[str, float]:
        raise ConnectionError("a rollouter died")

    one = scene(evaluate=fails, schedule={"eval_every": 2})
    assert await one.run() == "finished"
    assert "a rollouter died" in caplog.text
    assert one.saver.saved[-1][0] == 4


async def test_without_held_out_prompts_there_is_no_evaluation(scene: Build) -> None:
    async def nothing(step: int) -> None:
        return None

    one = scene(evaluate=nothing, schedule={"eval_every": 1})
    assert await one.run() == "finished"
    assert [row for row in one.trainer.rows if row.kind == "eval"] == []
    assert one.saver.best == []


# -- hooks and life ---------------------------------------------------------------------------------------------------


class Custom(FullyAsyncTrainer):
    def _compute_custom_metrics(self, batch: Any) -> dict[str, float]:
        if self.global_steps == 1:
            raise KeyError("tools_kwargs")
        return {"mine/rows": float(len(batch)), "mine/score": float(batch.batch["token_level_scores"].sum())}


async def test_custom_metrics_are_in_the_rows_and_a_hook_that_raises_costs_only_them(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    one = scene(kind=Custom, schedule={"total_steps": 3})
    assert await one.run() == "finished"
    rows = [row.values for row in one.trainer.rows if row.kind == "step"]
    assert [row.get("mine/rows") for row in rows] == [2.0 * P, None, 2.0 * P]
    assert rows[0]["mine/score"] == float(P)
    assert "_compute_custom_metrics failed" in caplog.text


async def test_a_resumed_trainer_counts_on_and_takes_only_the_steps_that_are_left(scene: Build) -> None:
    one = scene(step=2, version=2, schedule={"eval_at_start": True, "total_steps": 4})
    one.publisher.version = 2
    assert await one.run() == "finished"
    assert [row.step for row in one.trainer.rows if row.kind == "step"] == [3, 4]
    assert one.backend.versions == [2, 3]
    assert 0 not in one.evaluated


async def test_a_run_that_had_all_its_steps_only_ends(scene: Build) -> None:
    one = scene(step=4, version=4)
    one.publisher.version = 4
    await one.queue.close()
    assert await one.run(feed=False) == "finished"
    assert one.backend.trained == []
    assert one.saver.saved == []


async def test_stats_tell_where_the_time_went(scene: Build, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "freewheel.trainer")
    one = scene(schedule={"save_every": 2})
    await one.run()
    spans = one.trainer.stats()["spans"]
    assert {"train", "wait_batch", "save", "pack"} <= spans.keys()
    assert "Saved the checkpoint of step 2" in caplog.text
    one.trainer.close()
    for thread in threading.enumerate():
        if thread.name.startswith(("train_", "save_")):
            thread.join(WAIT_S)
            assert not thread.is_alive()
