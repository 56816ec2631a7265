"""The queue as its callers see it: who waits for what, and what becomes of every group."""

from __future__ import annotations

import asyncio

import pytest

from freewheel.data.group import Ticket
from freewheel.queue.client import Starved, Taken
from freewheel.queue.ledger import BUDGETS, Kind, data_failure, infra_failure
from freewheel.queue.message_queue import MessageQueue

from .journals import EVERY_TICKET, LONG_S, NOW_S, Scene, attempts, group, ordinals, started

pytestmark = pytest.mark.timeout(60)


# -- admission --------------------------------------------------------------------------------------------------------


async def test_admission_waits_for_room_and_a_published_version_makes_it() -> None:
    one = Scene(threshold=0)
    tickets = await one.admit(5)
    assert [ticket.ordinal for ticket in tickets] == [0, 1]
    answer = await one.queue.admit("a", want=1, load=0, wait_s=0.01, holding=EVERY_TICKET)
    assert answer.tickets == [] and not answer.closed
    waiting = await one.waiting_admit(want=5, load=2)
    await one.put(*tickets)
    await one.take(1)
    assert await one.commit(1) == 1
    assert not waiting.done()
    await one.queue.confirm_published(1)
    assert [ticket.ordinal for ticket in (await waiting).tickets] == [2, 3]


async def test_a_failed_attempt_makes_room_at_once_and_its_prompt_comes_first() -> None:
    one = Scene(threshold=0)
    tickets = await one.admit(2)
    waiting = await one.waiting_admit("b")
    await one.queue.fail(tickets[1], infra_failure("engine", "died"))
    assert (await waiting).tickets == [Ticket(ordinal=1, sequence=2, attempt=1)]


@pytest.mark.parametrize(
    ("calls", "given"),
    [([(4, 12), (16, 0)], [0, 4]), ([(4, 0), (4, 0)], [2, 2]), ([(1, 0), (4, 0)], [1, 3])],
    ids=["the idle one", "equal shares", "no more than wanted"],
)
async def test_room_goes_to_the_replica_with_the_least_load_for_its_size(
    calls: list[tuple[int, int]], given: list[int]
) -> None:
    one = Scene(groups_per_step=4, threshold=0)
    held = await one.admit(4, "z")
    waiting = [await one.waiting_admit(f"r{i}", want, load) for i, (want, load) in enumerate(calls)]
    for ticket in held:
        await one.queue.abandon(ticket, "zero_variance")
    await one.queue.close()
    assert [len((await call).tickets) for call in waiting] == given


async def test_a_fenced_replica_gets_nothing_until_it_is_back() -> None:
    one = Scene()
    await one.queue.fence("a", fenced=True)
    waiting = await one.waiting_admit()
    assert len(await one.admit(1, "b")) == 1
    await one.queue.fence("a", fenced=False)
    assert len((await waiting).tickets) == 1


async def test_tickets_of_a_lost_answer_are_issued_again_at_no_cost() -> None:
    one = Scene()
    held, lost, stored = await one.admit(3)
    await one.put(stored)
    again = await one.admit(4, holding=[held.sequence])
    assert attempts(again) == [(lost.ordinal, 1), (3, 0)]
    assert one.queue.policy.alive == 4
    await one.put(held, lost)
    assert (one.queue.policy.ready, one.queue.dropped) == (2, {"lost": 1, "late": 1})
    for _ in range(20):
        await one.admit(1, holding=[])
    assert not one.queue.ledger.abandoned, "no budget is spent"


@pytest.mark.parametrize("served", [False, True])
async def test_a_replica_that_asks_again_gets_the_tickets_of_its_earlier_call(served: bool) -> None:
    """A call that timed out at the caller may still wait here. `served`: room comes just before the second call."""
    one = Scene(threshold=0)
    others = await one.admit(2, "b")
    earlier = await one.waiting_admit(holding=[])
    if served:
        await one.queue.abandon(others[0], "zero_variance")
    later = asyncio.ensure_future(one.queue.admit("a", want=1, load=0, wait_s=LONG_S, holding=[]))
    if not served:
        await asyncio.sleep(0)
        await one.queue.abandon(others[0], "zero_variance")
    assert [ticket.ordinal for ticket in (await later).tickets] == [2]
    assert "lost" not in one.queue.dropped
    await one.queue.close()
    assert not (await earlier).tickets


@pytest.mark.parametrize("served", [False, True])
async def test_a_cancelled_call_takes_no_tickets(served: bool) -> None:
    """`served`: tickets were issued to it, and it has not read them."""
    one = Scene(threshold=0)
    tickets = await one.admit(2)
    waiting = await one.waiting_admit("gone", want=2)
    if served:
        await one.queue.fail(tickets[0], infra_failure("engine", "died"))
        assert one.queue.policy.room == 0
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not served:
        await one.queue.fail(tickets[0], infra_failure("engine", "died"))
    assert [ticket.ordinal for ticket in await one.admit(2, "b")] == [0]
    assert await one.queue.release_replica("gone") == 0


async def test_a_failed_prompt_waits_for_its_next_attempt_only_if_an_engine_failed() -> None:
    one = Scene(threshold=0, prompts=2, retry_delay_s=0.05)
    first, second = await one.admit(2)
    await one.queue.fail(first, infra_failure("engine", "no memory"))
    assert not await one.admit(1, "b"), "its next attempt is not due, and no other prompt is left"
    assert not one.queue.policy.exhausted and not one.queue.finished
    again = (await one.queue.admit("b", want=1, load=0, wait_s=LONG_S, holding=[])).tickets
    assert attempts(again) == [(first.ordinal, 1)]
    await one.queue.fail(second, data_failure("prompt", "too long"))
    (other,) = await one.admit(1, "b")
    assert other.ordinal == second.ordinal
    await one.queue.fail(other, infra_failure("timeout", "slow"))
    await one.queue.close()
    assert not one.queue._delayed, "a closed queue has no attempt to wait for"


async def test_each_attempt_after_a_failed_engine_waits_twice_as_long_up_to_a_bound() -> None:
    one = Scene(threshold=0, prompts=1, retry_delay_s=10.0)
    failure = infra_failure("engine", "no memory")
    waits = []
    for _ in range(3):
        (ticket,) = await one.admit(1)
        await one.queue.fail(ticket, failure)
        timer = one.queue._delayed[ticket.ordinal]
        waits.append(timer.when() - asyncio.get_running_loop().time())
        timer.cancel()
        one.queue._retry_or_abandon(ticket, failure)
    assert waits == pytest.approx([10, 20, 30], abs=5)


# -- replicas that die ------------------------------------------------------------------------------------------------


async def test_the_groups_of_a_dead_replica_are_issued_again_except_those_it_put() -> None:
    one = Scene()
    tickets = await one.admit(3)
    other = await one.admit(1, "b")
    await one.put(tickets[0])
    assert await one.queue.release_replica("a") == 2
    again = await one.admit(5, "b")
    assert attempts(again) == [(1, 1), (2, 1)]
    await one.put(*other, *again)
    assert sorted(await one.take(1) + await one.take(2)) == [0, 1, 2, 3]
    assert await one.queue.release_replica("a") == 0


async def test_a_call_of_a_dead_replica_takes_no_tickets_and_its_successor_gets_work() -> None:
    one = Scene(threshold=0)
    await one.admit(2)
    left_behind = await one.waiting_admit(want=2, load=2, holding=[0, 1])
    assert await one.queue.release_replica("a") == 2
    assert attempts(await one.admit(2, holding=[])) == [(0, 1), (1, 1)]
    await one.queue.close()
    assert not (await left_behind).tickets


async def test_a_prompt_that_kills_every_replica_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    one = Scene(groups_per_step=1, threshold=0, prompts=1)
    for _ in range(BUDGETS[Kind.INFRA]):
        assert len(await one.admit(1)) == 1
        await one.queue.release_replica("a")
    assert await one.queue.take(1, wait_s=NOW_S) is None
    assert "Prompt 0 is abandoned (lost)" in caplog.text


# -- put --------------------------------------------------------------------------------------------------------------


async def test_groups_are_given_out_as_they_were_put_and_a_second_put_is_late() -> None:
    one = Scene()
    tickets = await one.fill(2)
    size = one.queue.memory_bytes
    assert size == sum(len(group(ticket).encode()) for ticket in tickets)
    await one.put(*tickets)
    stats = await one.queue.stats()
    assert (stats["total_produced"], stats["queue_size"], stats["memory_bytes"]) == (2, 2, size)
    assert stats["dropped_by_reason"] == {"late": 2}
    taken = await one.queue.take(1, wait_s=NOW_S)
    assert isinstance(taken, Taken)
    assert [(each.ticket, each.min_version) for each in taken.groups] == [(ticket, 0) for ticket in tickets]
    assert [each.encode() for each in taken.groups.decode()] == [group(ticket).encode() for ticket in tickets]


async def test_a_queue_that_holds_very_much_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("freewheel.queue.message_queue.MEMORY_WARNING_BYTES", 1)
    one = Scene()
    for _ in range(2):
        await one.fill(1)
    assert caplog.text.count("async_training.max_queue_size") == 1


# -- take and commit --------------------------------------------------------------------------------------------------


async def test_every_call_for_a_step_gets_the_same_batch_of_exactly_one_step() -> None:
    one = Scene(threshold=2)
    tickets = await one.admit(5)
    calls = [await started(one.queue.take(1, wait_s=LONG_S)) for _ in range(2)]
    await one.put(tickets[0])
    await asyncio.sleep(0)
    assert not any(call.done() for call in calls)
    starved = await one.queue.take(1, wait_s=0.01)
    where = "1 groups ready, 4 in generation or scoring, room for 1 more; trainer at version 0, engines at 0"
    assert starved == Starved(where)
    await one.put(*tickets[1:])
    assert [ordinals(await call) for call in calls] == [[0, 1], [0, 1]]
    assert await one.take(2) == await one.take(2) == [2, 3]
    assert isinstance(await one.queue.take(3, wait_s=NOW_S), Starved)


async def test_a_repeated_commit_counts_once_and_frees_the_groups() -> None:
    one = Scene()
    await one.fill(4)
    await one.take(1)
    await one.take(2)
    assert await one.commit(1) == await one.commit(1) == 1
    stats = await one.queue.stats()
    assert (stats["total_consumed"], one.queue.ledger.trained, stats["step"], stats["version"]) == (2, 2, 1, 1)
    await one.commit(2)
    assert one.queue.memory_bytes == 0
    with pytest.raises(AssertionError, match="step 1 was committed"):
        await one.queue.take(1, wait_s=NOW_S)
    with pytest.raises(AssertionError, match="step 4 comes too early"):
        await one.queue.commit(4, wait_s=NOW_S)


async def test_a_step_given_back_is_taken_again_and_holds_up_no_other_even_if_it_lacks_groups() -> None:
    one = Scene()
    await one.fill(4)
    for _ in range(2):
        assert await one.take(1) == [0, 1] and await one.take(2) == [2, 3]
        for step in (2, 1, 1):
            await one.queue.give_back(step)
    await one.take(1)
    assert await one.replace(1, 0) and not await one.replace(1, 1, 2)
    await one.queue.give_back(1)
    await one.fill(4)
    assert len(await one.take(1)) == 2


# -- filters and staleness --------------------------------------------------------------------------------------------


async def test_a_prompt_that_a_filter_rejects_has_ended_and_another_takes_its_place() -> None:
    one = Scene(threshold=0, prompts=3)
    tickets = await one.admit(2)
    await one.queue.abandon(tickets[0], "zero_variance")
    refill = await one.admit(2)
    assert [ticket.ordinal for ticket in refill] == [2]
    await one.put(tickets[1], *refill)
    assert await one.take(1) == [1, 2]
    await one.commit(1)
    assert await one.queue.take(2, wait_s=NOW_S) is None
    assert (await one.queue.stats())["abandoned"] == {"zero_variance": 1}


async def test_stale_groups_are_replaced_once_and_their_prompts_repeated() -> None:
    one = Scene(min_batches=2)
    await one.fill(4)
    assert await one.take(1) == [0, 1]
    size = one.queue.memory_bytes
    for _ in range(2):
        assert await one.replace(1, 0) == [1, 2], "without waiting for further batches"
    assert one.queue.memory_bytes < size
    assert await one.replace(1, 1) == [2, 3]
    assert attempts(await one.admit(2)) == [(0, 1), (1, 1)]
    assert (await one.queue.stats())["dropped_by_reason"] == {"stale": 2}


async def test_a_step_that_lacks_groups_is_neither_trained_short_nor_overtaken() -> None:
    one = Scene(prompts=4)
    tickets = await one.admit(4)
    await one.put(*tickets[:2])
    await one.take(1)
    assert not await one.replace(1, 0, 1)
    again = await one.admit(2)
    assert not await one.take(1)
    with pytest.raises(AssertionError, match="step 1 lacks groups"):
        await one.queue.commit(1, wait_s=NOW_S)
    next_step = await started(one.queue.take(2, wait_s=LONG_S))
    this_step = await started(one.queue.take(1, wait_s=LONG_S))
    await one.put(*tickets[2:])
    assert ordinals(await this_step) == [2, 3]
    await one.put(*again)
    assert sorted(ordinals(await next_step)) == [0, 1]


@pytest.mark.parametrize(
    ("prompts", "is_abandoned", "left"),
    [(2, False, [1, 0]), (2, True, [1]), (1, True, [])],
    ids=["replaced", "abandoned", "the only one abandoned"],
)
async def test_the_last_step_of_a_run_replaces_stale_groups_unless_their_prompts_are_abandoned(
    prompts: int, is_abandoned: bool, left: list[int]
) -> None:
    one = Scene(groups_per_step=4, threshold=0, prompts=prompts)
    await one.fill(prompts)
    assert len(await one.take(1)) == prompts
    waiting = await started(one.queue.replace_stale(1, [0], wait_s=LONG_S))
    if is_abandoned:
        for _ in range(BUDGETS[Kind.DATA]):
            [ticket] = await one.admit(1)
            await one.queue.fail(ticket, data_failure("reward", "raises"))
    else:
        await one.fill(1)
    taken = await waiting
    assert (isinstance(taken, Taken), ordinals(taken)) == (bool(left), left)
    if left:
        await one.commit(1)
    assert one.queue.finished


# -- versions and the end ---------------------------------------------------------------------------------------------


async def test_a_queue_is_settled_when_everything_that_may_start_has_ended() -> None:
    one = Scene(threshold=0)
    assert await one.queue.wait_settled(wait_s=0.01) is False
    waiting = await started(one.queue.wait_settled(wait_s=LONG_S))
    tickets = await one.admit(2)
    await one.put(tickets[0])
    await asyncio.sleep(0)
    assert not waiting.done()
    await one.put(tickets[1])
    assert await waiting is True


async def test_close_wakes_everybody_who_waits() -> None:
    one = Scene(groups_per_step=1, threshold=0)
    await one.fill(1)
    await one.take(1)
    replacing = await started(one.queue.replace_stale(1, [0], wait_s=LONG_S))
    assert len(await one.admit(1, "b")) == 1
    taking = await started(one.queue.take(2, wait_s=LONG_S))
    settling = await started(one.queue.wait_settled(wait_s=LONG_S))
    calls = [await one.waiting_admit(), replacing, taking, settling]
    await one.queue.close()
    admission, *taken, settled = [await call for call in calls]
    assert admission.closed and taken == [None, None] and settled


async def test_everybody_learns_from_the_last_commit_that_the_run_has_ended() -> None:
    one = Scene(total_groups=3)
    await one.fill(9)
    rollouter = await one.waiting_admit()
    assert len(await one.take(1)) == 2
    await one.commit(1)
    assert len(await one.take(2)) == 1
    trainer = await started(one.queue.take(3, wait_s=LONG_S))
    await one.commit(2)
    assert (await rollouter).closed
    assert await trainer is None


async def test_a_queue_without_a_journal_resumes_at_a_frontier() -> None:
    one = Scene(groups_per_step=1, threshold=3, total_groups=5)
    tickets = await one.admit(3)
    await one.put(tickets[1])
    await one.take(1)
    await one.commit(1)
    frontier = await one.queue.read_frontier(1, wait_s=NOW_S)
    bounds = one.queue.policy.bounds
    one.queue = MessageQueue(bounds=bounds, frontier=frontier, version=1, step=1)
    assert [ticket.ordinal for ticket in await one.admit(9)] == [0, 2, 3, 4]
    assert (await one.queue.stats())["published_version"] == 1
