"""The queue as its callers see it: who waits for what, who is woken, and that every prompt is trained exactly once."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections import Counter
from typing import Any

import pytest

from freewheel.data.group import EncodedGroups, Ticket
from freewheel.queue.client import Taken
from freewheel.queue.ledger import BUDGETS, Kind, data_failure, infra_failure
from freewheel.queue.message_queue import MessageQueue
from freewheel.queue.staleness import Bounds

from .journals import block, group

pytestmark = pytest.mark.timeout(60)

LONG_S = 3600.0
"""A wait that a test ends itself: where the queue forgets to wake somebody, the test's own limit comes first."""
NOW_S = 0.0


def queue_of(
    per_step: int = 2,
    threshold: int = 1,
    *,
    window: int | None = None,
    per_version: int = 1,
    min_batches: int = 1,
    max_lag_allowed: int = 10,
    total_groups: int | None = None,
    prompts: int | None = None,
    retry_delay_s: float = 0.0,
) -> MessageQueue:
    bounds = Bounds(
        groups_per_step=per_step,
        steps_per_version=per_version,
        threshold=threshold,
        window=window or per_step + 1,
        max_alive=1000,
        min_batches=min_batches,
        max_lag_allowed=max_lag_allowed,
        total_groups=total_groups,
    )
    return MessageQueue(bounds=bounds, total_prompts=prompts, retry_delay_s=retry_delay_s)


async def admitted(queue: MessageQueue, want: int, replica: str = "a") -> list[Ticket]:
    return (await queue.admit(replica, want=want, load=0, wait_s=NOW_S)).tickets


async def ordinals(queue: MessageQueue, step: int) -> list[int]:
    return content(await queue.take(step, wait_s=NOW_S))


def content(taken: Taken) -> list[int]:
    assert taken.state == "batch" and taken.groups is not None
    return [one.ordinal for one in taken.groups.decode()]


async def started(awaitable: Any) -> asyncio.Task[Any]:
    """The call, under way and waiting."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def one_step(queue: MessageQueue, step: int, want: int = 2) -> None:
    await queue.put(block(await admitted(queue, want), queue.policy.published), wait_s=NOW_S)
    assert (await queue.take(step, wait_s=NOW_S)).state == "batch"
    await queue.confirm_published(await queue.commit(step, wait_s=NOW_S))


# -- admission --------------------------------------------------------------------------------------------------------


async def test_admission_waits_for_room_and_a_published_version_wakes_it() -> None:
    queue = queue_of(per_step=2, threshold=0)
    tickets = await admitted(queue, 5)
    assert [one.ordinal for one in tickets] == [0, 1]
    waiting = await started(queue.admit("a", want=5, load=2, wait_s=LONG_S))
    await queue.put(block(tickets), wait_s=NOW_S)
    await queue.take(1, wait_s=NOW_S)
    assert await queue.commit(1, wait_s=NOW_S) == 1
    assert not waiting.done()
    await queue.confirm_published(1)
    assert [one.ordinal for one in (await waiting).tickets] == [2, 3]


async def test_a_failed_attempt_makes_room_at_once_and_its_prompt_comes_first() -> None:
    queue = queue_of(threshold=0)
    tickets = await admitted(queue, 2)
    waiting = await started(queue.admit("b", want=1, load=0, wait_s=LONG_S))
    await queue.fail(tickets[1], infra_failure("engine", "died"))
    assert (await waiting).tickets == [Ticket(ordinal=1, sequence=2, attempt=1)]


async def test_room_goes_to_the_replica_that_has_least_to_do_for_its_size() -> None:
    queue = queue_of(per_step=4, threshold=0)
    held = await admitted(queue, 4, "z")
    busy = await started(queue.admit("busy", want=4, load=12, wait_s=LONG_S))
    idle = await started(queue.admit("idle", want=16, load=0, wait_s=LONG_S))
    for ticket in held:
        await queue.abandon(ticket, "zero_variance")
    assert len((await idle).tickets) == 4
    busy.cancel()


async def test_equal_replicas_share_room_evenly() -> None:
    queue = queue_of(per_step=4, threshold=0)
    held = await admitted(queue, 4, "z")
    asking = [await started(queue.admit(name, want=4, load=0, wait_s=LONG_S)) for name in "ab"]
    for ticket in held:
        await queue.abandon(ticket, "zero_variance")
    assert [len((await one).tickets) for one in asking] == [2, 2]


async def test_a_fenced_replica_gets_nothing_until_it_is_back() -> None:
    queue = queue_of()
    await queue.fence("a", fenced=True)
    waiting = await started(queue.admit("a", want=1, load=0, wait_s=LONG_S))
    assert len(await admitted(queue, 1, "b")) == 1
    await queue.fence("a", fenced=False)
    assert len((await waiting).tickets) == 1


async def test_tickets_of_an_answer_that_was_lost_are_issued_again_at_no_cost() -> None:
    queue = queue_of(threshold=1)
    held, lost = await admitted(queue, 2)
    await admitted(queue, 1, replica="b")
    again = await queue.admit("a", want=4, load=1, wait_s=NOW_S, holding=[held.sequence])
    assert [(one.ordinal, one.attempt) for one in again.tickets] == [(lost.ordinal, 1), (3, 0)]
    assert queue.policy.alive == 4
    assert await queue.put(block([held, lost]), wait_s=NOW_S)
    assert (queue.policy.ready, queue.dropped) == (1, {"lost": 1, "late": 1})
    for _ in range(20):  # whatever is lost, no budget is spent
        await queue.admit("a", want=1, load=0, wait_s=NOW_S, holding=[])
    assert not queue.ledger.abandoned


async def test_what_is_being_put_is_nobodys_loss() -> None:
    queue = queue_of(threshold=1)
    (ticket,) = await admitted(queue, 1)
    await queue.put(block([ticket]), wait_s=NOW_S)
    await queue.admit("a", want=1, load=0, wait_s=NOW_S, holding=[])
    assert (queue.policy.ready, queue.dropped) == (1, {})


@pytest.mark.parametrize("served", [False, True])
async def test_who_asks_again_gets_what_its_earlier_call_was_given_and_has_not_answered(served: bool) -> None:
    """A call that timed out at the caller may still wait here."""
    queue = queue_of(threshold=0)
    others = await admitted(queue, 2, replica="b")
    earlier = await started(queue.admit("a", want=1, load=0, wait_s=LONG_S, holding=[]))
    if served:
        await queue.abandon(others[0], "zero_variance")  # room, in the same moment in which the second call comes
    later = asyncio.ensure_future(queue.admit("a", want=1, load=0, wait_s=LONG_S, holding=[]))
    if not served:
        await asyncio.sleep(0)
        await queue.abandon(others[0], "zero_variance")
    assert [one.ordinal for one in (await later).tickets] == [2]
    assert "lost" not in queue.dropped
    await queue.close()
    assert not (await earlier).tickets


async def test_a_replica_that_died_leaves_no_ticket_to_its_successor() -> None:
    queue = queue_of(threshold=0)
    others = await admitted(queue, 2, replica="b")
    earlier = await started(queue.admit("a", want=1, load=0, wait_s=LONG_S, holding=[]))
    await queue.abandon(others[0], "zero_variance")
    assert await queue.release_replica("a") == 1
    again = await queue.admit("a", want=1, load=0, wait_s=NOW_S, holding=[])
    assert [(one.ordinal, one.attempt) for one in again.tickets] == [(2, 1)]
    assert not (await earlier).tickets


async def test_admission_without_room_answers_with_nothing_in_time() -> None:
    queue = queue_of(threshold=0)
    await admitted(queue, 2)
    answer = await queue.admit("a", want=1, load=0, wait_s=0.01)
    assert answer.tickets == [] and not answer.closed


async def test_a_caller_that_is_cancelled_while_it_waits_is_given_nothing() -> None:
    queue = queue_of(threshold=0)
    tickets = await admitted(queue, 2)
    waiting = await started(queue.admit("gone", want=2, load=0, wait_s=LONG_S))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await queue.fail(tickets[0], infra_failure("engine", "died"))
    assert queue.policy.room == 1
    assert len(await admitted(queue, 2, "b")) == 1


async def test_tickets_of_a_caller_that_is_cancelled_at_that_moment_are_issued_again() -> None:
    queue = queue_of(threshold=0)
    tickets = await admitted(queue, 2)
    waiting = await started(queue.admit("gone", want=2, load=0, wait_s=LONG_S))
    await queue.fail(tickets[0], infra_failure("engine", "died"))
    assert queue.policy.room == 0  # granted, and not yet read
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [one.ordinal for one in await admitted(queue, 2, "b")] == [0]
    assert await queue.release_replica("gone") == 0


async def test_two_calls_of_one_replica_are_two_however_alike() -> None:
    queue = queue_of(threshold=0)
    tickets = await admitted(queue, 2)
    long_one = await started(queue.admit("a", want=1, load=0, wait_s=LONG_S))
    short_one = await queue.admit("a", want=1, load=0, wait_s=0.01)
    assert short_one.tickets == []
    await queue.fail(tickets[0], infra_failure("engine", "died"))
    assert len((await long_one).tickets) == 1


# -- replicas that die ------------------------------------------------------------------------------------------------


async def test_what_a_lost_replica_worked_on_is_issued_again_and_what_it_put_is_kept() -> None:
    queue = queue_of(per_step=2, threshold=1)
    tickets = await admitted(queue, 3, "a")
    other = await admitted(queue, 1, "b")
    await queue.put(block(tickets[:1]), wait_s=NOW_S)
    assert await queue.release_replica("a") == 2
    again = await admitted(queue, 5, "b")
    assert [(one.ordinal, one.attempt) for one in again] == [(1, 1), (2, 1)]
    await queue.put(block([*other, *again]), wait_s=NOW_S)
    assert sorted(await ordinals(queue, 1) + await ordinals(queue, 2)) == [0, 1, 2, 3]
    assert await queue.release_replica("a") == 0


async def test_a_call_that_a_dead_replica_left_behind_swallows_no_ticket() -> None:
    queue = queue_of(per_step=2, threshold=0)
    await admitted(queue, 2, "a")
    left_behind = await started(queue.admit("a", want=2, load=2, wait_s=LONG_S))
    assert await queue.release_replica("a") == 2
    assert len(await admitted(queue, 2, "b")) == 2
    assert not left_behind.done()
    left_behind.cancel()


async def test_a_replica_that_comes_back_under_its_name_gets_work() -> None:
    queue = queue_of(per_step=2, threshold=0)
    await admitted(queue, 2, "a")
    await queue.release_replica("a")
    assert [one.attempt for one in await admitted(queue, 2, "a")] == [1, 1]


async def test_a_prompt_that_kills_every_replica_is_abandoned_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    queue = queue_of(per_step=1, threshold=0, prompts=1)
    for _ in range(BUDGETS[Kind.INFRA]):
        assert len(await admitted(queue, 1)) == 1
        await queue.release_replica("a")
    assert (await queue.take(1, wait_s=NOW_S)).state == "finished"
    assert "Prompt 0 is abandoned (lost)" in caplog.text


# -- put --------------------------------------------------------------------------------------------------------------


async def test_a_group_that_is_put_twice_counts_once() -> None:
    queue = queue_of()
    tickets = await admitted(queue, 2)
    await queue.put(block(tickets), wait_s=NOW_S)
    size = queue.memory_bytes
    await queue.put(block(tickets), wait_s=NOW_S)
    stats = await queue.stats()
    assert (stats["total_produced"], stats["queue_size"]) == (2, 2)
    assert stats["dropped_by_reason"] == {"late": 2}
    assert queue.memory_bytes == size


async def test_a_group_that_comes_after_it_was_given_up_is_dropped() -> None:
    queue = queue_of(per_step=1)
    [ticket] = await admitted(queue, 1)
    await queue.release_replica("a")
    await queue.put(block([ticket]), wait_s=NOW_S)
    assert (await queue.stats())["queue_size"] == 0
    [again] = await admitted(queue, 1)
    assert again.ordinal == ticket.ordinal
    await queue.put(block([again]), wait_s=NOW_S)
    await queue.put(block([ticket]), wait_s=NOW_S)
    assert await ordinals(queue, 1) == [ticket.ordinal]


@pytest.mark.parametrize("taken", [False, True])
async def test_a_failure_that_is_reported_after_the_group_was_put_changes_nothing(taken: bool) -> None:
    queue = queue_of()
    tickets = await admitted(queue, 2)
    await queue.put(block(tickets), wait_s=NOW_S)
    if taken:
        await queue.take(1, wait_s=NOW_S)
    await queue.fail(tickets[0], infra_failure("timeout", "the answer was lost"))
    await queue.abandon(tickets[1], "zero_variance")
    assert await ordinals(queue, 1) == [0, 1]
    await queue.commit(1, wait_s=NOW_S)
    assert queue.ledger.trained == 2


async def test_tickets_survive_the_way_to_another_process() -> None:
    admission = await queue_of().admit("a", want=3, load=0, wait_s=NOW_S)
    assert pickle.loads(pickle.dumps(admission)) == admission


async def test_the_groups_arrive_as_they_were_put() -> None:
    queue = queue_of()
    tickets = await admitted(queue, 2)
    await queue.put(block(tickets, version=0), wait_s=NOW_S)
    taken = await queue.take(1, wait_s=NOW_S)
    assert taken.groups is not None
    assert [one.ticket for one in taken.groups] == tickets
    assert [one.min_version for one in taken.groups] == [0, 0]
    assert [one.encode() for one in taken.groups.decode()] == [group(ticket).encode() for ticket in tickets]


# -- take and commit --------------------------------------------------------------------------------------------------


async def test_a_batch_has_exactly_as_many_groups_as_a_step_however_many_are_ready() -> None:
    queue = queue_of(per_step=2, threshold=2)
    tickets = await admitted(queue, 5)
    waiting = await started(queue.take(1, wait_s=LONG_S))
    await queue.put(block(tickets[:1]), wait_s=NOW_S)
    await asyncio.sleep(0)
    assert not waiting.done()
    await queue.put(block(tickets[1:]), wait_s=NOW_S)
    assert content(await waiting) == [0, 1]
    assert await ordinals(queue, 2) == [2, 3]
    assert (await queue.take(3, wait_s=NOW_S)).state == "starved"


async def test_a_batch_that_is_asked_for_again_is_the_same() -> None:
    queue = queue_of(threshold=2)
    await queue.put(block(await admitted(queue, 6)), wait_s=NOW_S)
    assert await ordinals(queue, 1) == await ordinals(queue, 1) == [0, 1]
    assert await ordinals(queue, 2) == [2, 3]


async def test_two_calls_that_wait_for_one_batch_get_the_same() -> None:
    queue = queue_of(per_step=2, threshold=1)
    tickets = await admitted(queue, 4)
    first = await started(queue.take(1, wait_s=LONG_S))
    second = await started(queue.take(1, wait_s=LONG_S))
    await queue.put(block(tickets), wait_s=NOW_S)
    assert content(await first) == content(await second) == [0, 1]
    assert queue.policy.ready == 2


async def test_a_step_that_was_committed_cannot_be_taken_again() -> None:
    queue = queue_of()
    await one_step(queue, 1)
    with pytest.raises(AssertionError, match="step 1 was committed"):
        await queue.take(1, wait_s=NOW_S)


async def test_a_starved_trainer_is_told_where_the_groups_are() -> None:
    queue = queue_of(per_step=2, threshold=1)
    tickets = await admitted(queue, 3)
    await queue.put(block(tickets[:1]), wait_s=NOW_S)
    answer = await queue.take(1, wait_s=0.01)
    assert answer.state == "starved"
    assert answer.waiting_for == (
        "1 groups ready, 2 in generation or scoring, room for 1 more; trainer at version 0, engines at 0"
    )


async def test_a_commit_that_is_repeated_counts_once() -> None:
    queue = queue_of()
    await queue.put(block(await admitted(queue, 4)), wait_s=NOW_S)
    await queue.take(1, wait_s=NOW_S)
    await queue.take(2, wait_s=NOW_S)
    assert await queue.commit(1, wait_s=NOW_S) == await queue.commit(1, wait_s=NOW_S) == 1
    stats = await queue.stats()
    assert (stats["total_consumed"], queue.ledger.trained, stats["step"], stats["version"]) == (2, 2, 1, 1)


async def test_what_a_trainer_gives_back_is_taken_again_in_order() -> None:
    queue = queue_of(threshold=1)
    await queue.put(block(await admitted(queue, 4)), wait_s=NOW_S)
    await queue.take(1, wait_s=NOW_S)
    await queue.take(2, wait_s=NOW_S)
    await queue.give_back(2)
    await queue.give_back(1)
    await queue.give_back(1)
    assert await ordinals(queue, 1) == [0, 1]
    assert await ordinals(queue, 2) == [2, 3]


async def test_a_batch_that_is_given_back_while_it_lacks_groups_holds_up_no_other() -> None:
    queue = queue_of(threshold=1)
    await queue.put(block(await admitted(queue, 4)), wait_s=NOW_S)
    await queue.take(1, wait_s=NOW_S)
    assert (await queue.replace_stale(1, [0], wait_s=NOW_S)).state == "batch"
    assert (await queue.replace_stale(1, [1, 2], wait_s=NOW_S)).state == "starved"
    await queue.give_back(1)
    await queue.put(block(await admitted(queue, 4)), wait_s=NOW_S)
    assert len(await ordinals(queue, 1)) == 2


async def test_memory_is_counted_until_a_group_is_trained_or_dropped() -> None:
    queue = queue_of(threshold=1)
    tickets = await admitted(queue, 4)
    await queue.put(block(tickets[:3]), wait_s=NOW_S)
    assert queue.memory_bytes == sum(len(group(ticket).encode()) for ticket in tickets[:3])
    await queue.take(1, wait_s=NOW_S)
    await queue.replace_stale(1, [tickets[0].sequence], wait_s=NOW_S)
    assert queue.memory_bytes == sum(len(group(ticket).encode()) for ticket in tickets[1:3])
    await queue.commit(1, wait_s=NOW_S)
    assert queue.memory_bytes == 0


# -- filters and staleness --------------------------------------------------------------------------------------------


async def test_a_group_that_a_filter_turns_down_ends_and_another_takes_its_place() -> None:
    queue = queue_of(per_step=2, threshold=0, prompts=3)
    tickets = await admitted(queue, 2)
    await queue.abandon(tickets[0], "zero_variance")
    refill = await admitted(queue, 2)
    assert [one.ordinal for one in refill] == [2]
    await queue.put(block([tickets[1], *refill]), wait_s=NOW_S)
    assert await ordinals(queue, 1) == [1, 2]
    await queue.commit(1, wait_s=NOW_S)
    assert (await queue.take(2, wait_s=NOW_S)).state == "finished"
    assert (await queue.stats())["abandoned"] == {"zero_variance": 1}


async def test_stale_groups_of_a_batch_are_replaced_and_their_prompts_repeated() -> None:
    queue = queue_of(per_step=2, threshold=1)
    await queue.put(block(await admitted(queue, 3)), wait_s=NOW_S)
    assert await ordinals(queue, 1) == [0, 1]
    assert content(await queue.replace_stale(1, [0], wait_s=NOW_S)) == [1, 2]
    assert content(await queue.replace_stale(1, [0], wait_s=NOW_S)) == [1, 2]  # asked again
    assert [(one.ordinal, one.attempt) for one in await admitted(queue, 1)] == [(0, 1)]
    assert (await queue.stats())["dropped_by_reason"] == {"stale": 1}


async def test_a_replacement_waits_for_no_further_batches() -> None:
    queue = queue_of(per_step=2, threshold=1, min_batches=2)
    await queue.put(block(await admitted(queue, 4)), wait_s=NOW_S)
    assert await ordinals(queue, 1) == [0, 1]
    assert content(await queue.replace_stale(1, [0], wait_s=NOW_S)) == [1, 2]
    assert content(await queue.replace_stale(1, [1], wait_s=NOW_S)) == [2, 3]


async def test_a_step_that_lacks_groups_is_neither_trained_short_nor_overtaken() -> None:
    queue = queue_of(per_step=2, threshold=1, prompts=4)
    tickets = await admitted(queue, 4)
    await queue.put(block(tickets[:2]), wait_s=NOW_S)
    await queue.take(1, wait_s=NOW_S)
    assert (await queue.replace_stale(1, [0, 1], wait_s=NOW_S)).state == "starved"
    again = await admitted(queue, 2)
    assert (await queue.take(1, wait_s=NOW_S)).state == "starved"
    with pytest.raises(AssertionError, match="step 1 lacks groups"):
        await queue.commit(1, wait_s=NOW_S)
    next_step = await started(queue.take(2, wait_s=LONG_S))
    this_step = await started(queue.take(1, wait_s=LONG_S))
    await queue.put(block(tickets[2:]), wait_s=NOW_S)
    assert content(await this_step) == [2, 3]
    await queue.put(block(again), wait_s=NOW_S)
    assert sorted(content(await next_step)) == [0, 1]


async def test_the_last_short_step_of_a_run_can_replace_what_is_stale() -> None:
    queue = queue_of(per_step=4, threshold=0, prompts=2)
    await queue.put(block(await admitted(queue, 2)), wait_s=NOW_S)
    assert await ordinals(queue, 1) == [0, 1]
    assert (await queue.replace_stale(1, [0], wait_s=NOW_S)).state == "starved"
    await queue.put(block(await admitted(queue, 1)), wait_s=NOW_S)
    assert await ordinals(queue, 1) == [1, 0]
    await queue.commit(1, wait_s=NOW_S)
    assert queue.finished


async def test_a_last_step_goes_without_a_stale_group_whose_prompt_was_abandoned_since() -> None:
    queue = queue_of(per_step=4, threshold=0, prompts=2)
    await queue.put(block(await admitted(queue, 2)), wait_s=NOW_S)
    await queue.take(1, wait_s=NOW_S)
    waiting = await started(queue.replace_stale(1, [0], wait_s=LONG_S))
    for _ in range(BUDGETS[Kind.DATA]):
        [ticket] = await admitted(queue, 1)
        await queue.fail(ticket, data_failure("reward", "raises"))
    assert content(await waiting) == [1]
    await queue.commit(1, wait_s=NOW_S)
    assert queue.finished


async def test_a_last_step_that_loses_all_its_groups_ends_the_run() -> None:
    queue = queue_of(per_step=1, threshold=0, prompts=1)
    await queue.put(block(await admitted(queue, 1)), wait_s=NOW_S)
    await queue.take(1, wait_s=NOW_S)
    waiting = await started(queue.replace_stale(1, [0], wait_s=LONG_S))
    for _ in range(BUDGETS[Kind.DATA]):
        [ticket] = await admitted(queue, 1)
        await queue.fail(ticket, data_failure("reward", "raises"))
    assert (await waiting).state == "finished"


# -- versions and the end ---------------------------------------------------------------------------------------------


async def test_weights_wait_under_drain_until_all_that_may_begin_has_ended() -> None:
    queue = queue_of(per_step=2, threshold=0)
    waiting = await started(queue.wait_settled(wait_s=LONG_S))
    tickets = await admitted(queue, 2)
    await queue.put(block(tickets[:1]), wait_s=NOW_S)
    await asyncio.sleep(0)
    assert not waiting.done()
    await queue.put(block(tickets[1:]), wait_s=NOW_S)
    assert await waiting is True
    await queue.confirm_published(0)
    assert await queue.wait_settled(wait_s=NOW_S)


async def test_settled_says_no_when_its_time_is_up() -> None:
    assert await queue_of().wait_settled(wait_s=0.01) is False


async def test_a_version_takes_as_many_steps_as_it_is_set_to() -> None:
    queue = queue_of(per_step=1, threshold=1, per_version=2)
    versions = []
    for step in range(1, 4):
        await queue.put(block(await admitted(queue, 1)), wait_s=NOW_S)
        await queue.take(step, wait_s=NOW_S)
        versions.append(await queue.commit(step, wait_s=NOW_S))
    assert versions == [0, 1, 1]
    assert await queue.complete_version(wait_s=NOW_S) == 2


async def test_close_wakes_everybody_who_waits() -> None:
    queue = queue_of(per_step=2, threshold=0)
    await admitted(queue, 2)
    admit = await started(queue.admit("a", want=1, load=2, wait_s=LONG_S))
    take = await started(queue.take(1, wait_s=LONG_S))
    settled = await started(queue.wait_settled(wait_s=LONG_S))
    await queue.close()
    assert (await admit).closed
    assert (await take).state == "finished"
    assert await settled


async def test_a_trainer_that_waits_for_replacements_is_woken_by_close() -> None:
    queue = queue_of(per_step=1, threshold=0)
    await queue.put(block(await admitted(queue, 1)), wait_s=NOW_S)
    await queue.take(1, wait_s=NOW_S)
    waiting = await started(queue.replace_stale(1, [0], wait_s=LONG_S))
    await queue.close()
    assert (await waiting).state == "finished"


async def test_the_last_commit_tells_everybody_that_the_run_has_ended() -> None:
    queue = queue_of(per_step=2, total_groups=3)
    await queue.put(block(await admitted(queue, 9)), wait_s=NOW_S)
    rollouter = await started(queue.admit("a", want=1, load=0, wait_s=LONG_S))
    assert len(await ordinals(queue, 1)) == 2
    await queue.commit(1, wait_s=NOW_S)
    assert len(await ordinals(queue, 2)) == 1
    trainer = await started(queue.take(3, wait_s=LONG_S))
    await queue.commit(2, wait_s=NOW_S)
    assert (await rollouter).closed
    assert (await trainer).state == "finished"


async def test_a_queue_that_is_resumed_goes_on_where_the_frontier_is() -> None:
    queue = queue_of(per_step=1, threshold=3, total_groups=5)
    tickets = await admitted(queue, 3)
    await queue.put(block([tickets[1]]), wait_s=NOW_S)
    await queue.take(1, wait_s=NOW_S)
    await queue.commit(1, wait_s=NOW_S)
    frontier = await queue.read_frontier(queue.step, wait_s=NOW_S)
    resumed = MessageQueue(bounds=queue.policy.bounds, frontier=frontier, version=1, step=1)
    assert [one.ordinal for one in await admitted(resumed, 9)] == [0, 2, 3, 4]
    assert (await resumed.stats())["published_version"] == 1


async def test_a_queue_that_holds_very_much_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("freewheel.queue.message_queue.MEMORY_WARNING_BYTES", 1)
    queue = queue_of()
    for ticket in await admitted(queue, 2):
        await queue.put(block([ticket]), wait_s=NOW_S)
    assert caplog.text.count("async_training.max_queue_size") == 1


# -- all at once ------------------------------------------------------------------------------------------------------


class Hammer:
    """Rollouters and a trainer with prefetch, each of which fails now and then, on one queue."""

    def __init__(self, seed: int, queue: MessageQueue) -> None:
        self.rng = random.Random(seed)
        self.queue = queue
        self.trained: Counter[int] = Counter()
        self.lag = 0

    async def pause(self) -> None:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)

    async def rollouter(self, name: str) -> None:
        rng, queue = self.rng, self.queue
        while True:
            asking = asyncio.ensure_future(queue.admit(name, want=rng.randrange(1, 5), load=0, wait_s=LONG_S))
            if rng.random() < 0.1:
                await self.pause()
                asking.cancel()
                await asyncio.wait([asking])
                if asking.cancelled():
                    continue
            admission = await asking
            if admission.closed:
                return
            version = queue.policy.published
            for ticket in rng.sample(admission.tickets, len(admission.tickets)):
                await self.pause()
                fate = rng.random()
                if fate < 0.05:
                    await queue.fail(ticket, infra_failure("engine", "died"))
                elif fate < 0.08:
                    await queue.abandon(ticket, "zero_variance")
                elif fate < 0.12:
                    await queue.release_replica(name)
                else:
                    old = rng.random() < 0.05
                    await queue.put(block([ticket], version - 20 if old else version), wait_s=NOW_S)
                    if rng.random() < 0.1:
                        await queue.put(block([ticket], version), wait_s=NOW_S)
                    if rng.random() < 0.1:
                        await queue.fail(ticket, infra_failure("timeout", "late"))

    async def trainer(self) -> None:
        rng, queue, step = self.rng, self.queue, 1
        ahead: asyncio.Task[Taken] = asyncio.ensure_future(queue.take(1, wait_s=LONG_S))
        while (taken := await ahead).state == "batch":
            if rng.random() < 0.1:  # it restarts
                await queue.give_back(step)
                taken = await queue.take(step, wait_s=LONG_S)
            assert taken.groups is not None
            old = self.stale(taken.groups)
            while old:
                taken = await queue.replace_stale(step, old, wait_s=LONG_S)
                if taken.groups is None:
                    return
                old = self.stale(taken.groups)
            assert taken.groups is not None
            ahead = asyncio.ensure_future(queue.take(step + 1, wait_s=LONG_S))
            await self.pause()
            self.lag = max(self.lag, queue.policy.lag(min(one.min_version for one in taken.groups)))
            self.trained.update(one.ticket.ordinal for one in taken.groups)
            version = await queue.commit(step, wait_s=NOW_S)
            await queue.commit(step, wait_s=NOW_S)
            await self.pause()
            await queue.confirm_published(version)
            step += 1

    def stale(self, groups: EncodedGroups) -> list[int]:
        policy = self.queue.policy
        stale = policy.bounds.find_stale([one.min_version for one in groups], policy.version)
        return [groups[index].ticket.sequence for index in stale]


@pytest.mark.parametrize("seed", range(8))
async def test_every_prompt_is_trained_once_or_abandoned_whatever_fails(seed: int) -> None:
    queue = queue_of(per_step=4, threshold=seed % 3, window=6, prompts=200, max_lag_allowed=seed % 3 + 2)
    hammer = Hammer(seed, queue)
    rollouters = [asyncio.ensure_future(hammer.rollouter(f"r{one}")) for one in range(5)]
    await asyncio.wait_for(asyncio.gather(hammer.trainer(), *rollouters), LONG_S)
    assert set(hammer.trained.values()) == {1}
    assert len(hammer.trained) + sum(queue.ledger.abandoned.values()) == 200
    frontier = await queue.read_frontier(queue.step, wait_s=NOW_S)
    assert frontier is not None
    assert (frontier.low, frontier.ended) == (200, ())
    assert hammer.lag <= queue.policy.bounds.max_lag_allowed
    assert (queue.memory_bytes, queue.policy.open, queue.policy.ready) == (0, 0, 0)
    assert not queue._tickets and not queue._owners and not queue._stored and not queue._steps and not queue._requests


# -- what an engine failed on -----------------------------------------------------------------------------------------


async def test_a_prompt_that_an_engine_failed_on_rests_before_it_is_attempted_again() -> None:
    queue = queue_of(threshold=0, prompts=2, retry_delay_s=0.05)
    first, second = await admitted(queue, 2)
    await queue.fail(first, infra_failure("engine", "no memory"))
    assert not (await queue.admit("b", want=1, load=0, wait_s=0.0)).tickets  # it rests, and no other prompt is left
    assert not queue.policy.exhausted and not queue.finished
    (again,) = (await queue.admit("b", want=1, load=0, wait_s=LONG_S)).tickets
    assert (again.ordinal, again.attempt) == (first.ordinal, 1)
    await queue.fail(second, data_failure("prompt", "too long"))  # of its own fault: at once
    (other,) = (await queue.admit("b", want=1, load=0, wait_s=0.0)).tickets
    assert other.ordinal == second.ordinal


async def test_a_queue_that_is_closed_wakes_nobody_for_what_rests() -> None:
    queue = queue_of(threshold=0, retry_delay_s=0.01)
    (ticket,) = await admitted(queue, 1)
    await queue.fail(ticket, infra_failure("timeout", "slow"))
    await queue.close()
    await asyncio.sleep(0.05)
    assert not queue.ledger.failures
