"""The queue with a journal: nothing is ready, taken or trained before it is on the disk; every call may come twice."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freewheel.data.group import Ticket
from freewheel.queue.client import Taken
from freewheel.queue.journal import CheckpointMark, Journal, JournalDamaged, JournalFull, JournalWriter
from freewheel.queue.ledger import Frontier, data_failure, infra_failure
from freewheel.queue.message_queue import SEQUENCES_RESERVED, MessageQueue
from freewheel.queue.restore import restore
from freewheel.queue.staleness import Bounds

from .journals import ManualWriter, MemoryJournal, block

pytestmark = pytest.mark.timeout(60)

LONG_S = 3600.0
NOW_S = 0.0
BOUNDS = Bounds(groups_per_step=2, threshold=1, window=3, max_alive=1000, max_lag_allowed=10)


class Desk:
    """A queue on a journal whose disk works at `disk()`, and its successors."""

    def __init__(self, bounds: Bounds = BOUNDS, prompts: int | None = None) -> None:
        self.bounds = bounds
        self.prompts = prompts
        self.journal = MemoryJournal()
        self.restart(CheckpointMark())

    def restart(
        self, checkpoint: CheckpointMark | None = None, *, published: int | None = 0, **in_flight: list[Ticket]
    ) -> MessageQueue:
        """`published`: what the synchronizer says then; None: nothing yet."""
        journal: Any = self.journal
        restored = restore(journal, total=self.prompts, checkpoint=checkpoint, in_flight=in_flight)
        self.writer: Any = ManualWriter(self.journal)
        self.queue = MessageQueue(
            bounds=self.bounds, total_prompts=self.prompts, journal=self.writer, restored=restored, retry_delay_s=0.0
        )
        if published is not None:
            self.queue.policy.publish(published)
        return self.queue

    async def disk(self, jobs: int = 1000) -> None:
        await asyncio.sleep(0)
        self.writer.work(jobs)
        for _ in range(3):
            await asyncio.sleep(0)

    async def done(self, call: Any) -> Any:
        """The answer of a call while the disk works."""
        task = asyncio.ensure_future(call)
        for _ in range(10):
            await self.disk()
        assert task.done()
        return task.result()

    async def admitted(self, want: int, replica: str = "a") -> list[Ticket]:
        return (await self.done(self.queue.admit(replica, want=want, load=0, wait_s=LONG_S))).tickets

    async def train(self, step: int, *, version: int = 0) -> None:
        tickets = await self.admitted(self.bounds.groups_per_step)
        await self.done(self.queue.put(block(tickets, version), wait_s=LONG_S))
        assert content(await self.done(self.queue.take(step, wait_s=LONG_S)))
        await self.queue.confirm_published(await self.done(self.queue.commit(step, wait_s=LONG_S)))


def locked() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY  # type: ignore[attr-defined]
    return error


def content(taken: Taken) -> list[int]:
    assert taken.state == "batch" and taken.groups is not None
    return [one.ticket.ordinal for one in taken.groups]


# -- before it is on the disk -----------------------------------------------------------------------------------------


async def test_no_ticket_is_given_out_before_its_sequence_is_reserved() -> None:
    desk = Desk()
    assert not (await desk.queue.admit("a", want=2, load=0, wait_s=NOW_S)).tickets
    waiting = asyncio.ensure_future(desk.queue.admit("a", want=2, load=0, wait_s=LONG_S))
    await desk.disk()
    assert [one.sequence for one in (await waiting).tickets] == [0, 1]
    assert desk.journal.reserved() == SEQUENCES_RESERVED


async def test_sequences_are_reserved_ahead_so_that_nobody_waits() -> None:
    desk = Desk(replace(BOUNDS, groups_per_step=400))
    await desk.admitted(SEQUENCES_RESERVED // 2 + 1)
    assert not desk.writer.jobs
    rest = await desk.queue.admit("a", want=100, load=0, wait_s=NOW_S)  # the disk does not work now
    assert len(rest.tickets) == 100
    assert len(desk.writer.jobs) == 1
    await desk.disk()
    assert desk.journal.reserved() == 2 * SEQUENCES_RESERVED


async def test_a_group_is_ready_only_when_the_journal_has_it() -> None:
    desk = Desk()
    tickets = await desk.admitted(2)
    assert await desk.queue.put(block(tickets), wait_s=NOW_S) is False
    assert desk.queue.policy.ready == 0
    assert (await desk.queue.take(1, wait_s=NOW_S)).state == "starved"
    await desk.disk()
    assert desk.queue.policy.ready == 2
    assert await desk.queue.put(block(tickets), wait_s=NOW_S) is True


async def test_a_second_put_of_what_is_being_written_waits_for_the_same_write() -> None:
    desk = Desk()
    tickets = await desk.admitted(2)
    first = asyncio.ensure_future(desk.queue.put(block(tickets), wait_s=LONG_S))
    second = asyncio.ensure_future(desk.queue.put(block(tickets[:1]), wait_s=LONG_S))
    await asyncio.sleep(0)
    assert len(desk.writer.jobs) == 1
    await desk.disk()
    assert await first is await second is True
    assert (desk.queue.total_produced, desk.queue.dropped["late"]) == (2, 0)


@pytest.mark.parametrize("end", ["fail", "abandon", "replica_lost"])
async def test_a_group_that_is_being_written_is_put_and_cannot_fail_any_more(end: str) -> None:
    desk = Desk()
    tickets = await desk.admitted(2)
    await desk.queue.put(block(tickets), wait_s=NOW_S)
    if end == "fail":
        await desk.queue.fail(tickets[0], infra_failure("timeout", ""))
    elif end == "abandon":
        await desk.queue.abandon(tickets[0], "zero_variance")
    else:
        assert await desk.queue.release_replica("a") == 0
    await desk.disk()
    assert content(await desk.done(desk.queue.take(1, wait_s=LONG_S))) == [0, 1]


async def test_a_step_is_given_out_only_when_the_journal_has_it() -> None:
    desk = Desk()
    await desk.done(desk.queue.put(block(await desk.admitted(2)), wait_s=LONG_S))
    taken = await desk.queue.take(1, wait_s=NOW_S)
    assert taken.state == "starved"
    first = asyncio.ensure_future(desk.queue.take(1, wait_s=LONG_S))
    second = asyncio.ensure_future(desk.queue.take(1, wait_s=LONG_S))
    await desk.disk()
    assert content(await first) == content(await second) == [0, 1]
    assert [one.step for one in desk.journal.steps(after=0)] == [1]


async def test_a_step_is_trained_only_when_the_journal_has_it() -> None:
    desk = Desk()
    await desk.done(desk.queue.put(block(await desk.admitted(2)), wait_s=LONG_S))
    await desk.done(desk.queue.take(1, wait_s=LONG_S))
    assert await desk.queue.commit(1, wait_s=NOW_S) is None
    assert (desk.queue.step, desk.queue.ledger.trained) == (0, 0)
    assert await desk.queue.commit(1, wait_s=NOW_S) is None  # asked again, it is not said again
    assert len(desk.writer.jobs) == 1
    await desk.disk()
    assert (desk.queue.step, desk.queue.ledger.trained) == (1, 2)
    assert await desk.queue.commit(1, wait_s=NOW_S) == 1


async def test_a_version_that_is_cut_short_is_one_only_when_the_journal_has_it() -> None:
    desk = Desk(replace(BOUNDS, steps_per_version=2))
    await desk.train(1)
    assert await desk.queue.complete_version(wait_s=NOW_S) is None
    assert await desk.done(desk.queue.complete_version(wait_s=LONG_S)) == 1
    assert await desk.queue.complete_version(wait_s=NOW_S) == 1
    assert desk.restart().policy.version == 1
    assert await desk.queue.commit(1, wait_s=NOW_S) == 1


async def test_whoever_sees_that_it_is_written_sees_what_came_of_it() -> None:
    """An answer may be asked for in the very moment in which the disk is done."""
    desk = Desk(replace(BOUNDS, steps_per_version=2))
    await desk.train(1)
    await desk.done(desk.queue.put(block(await desk.admitted(2)), wait_s=LONG_S))
    await desk.done(desk.queue.take(2, wait_s=LONG_S))
    assert await desk.queue.commit(2, wait_s=NOW_S) is None
    desk.writer.work()
    assert await desk.queue.commit(2, wait_s=LONG_S) == 1
    await desk.train(3)
    assert await desk.queue.complete_version(wait_s=NOW_S) is None
    desk.writer.work()
    assert await desk.queue.complete_version(wait_s=LONG_S) == 2


async def test_while_the_disk_is_full_the_queue_says_so_and_nothing_is_lost() -> None:
    desk = Desk()
    tickets = await desk.admitted(2)
    desk.writer.paused = "journal.sqlite cannot be written: no room (3 MB free)"
    assert await desk.queue.put(block(tickets), wait_s=NOW_S) is False
    starved = await desk.queue.take(1, wait_s=NOW_S)
    assert "3 MB free" in starved.waiting_for
    assert (await desk.queue.stats())["paused"] == desk.writer.paused
    desk.writer.paused = ""
    await desk.disk()
    assert content(await desk.done(desk.queue.take(1, wait_s=LONG_S))) == [0, 1]


# -- recorded steps ---------------------------------------------------------------------------------------------------


async def test_a_trainer_that_begins_again_gets_the_recorded_steps_and_then_what_its_predecessor_took() -> None:
    desk = Desk()
    for step in (1, 2):
        await desk.train(step, version=step - 1)
    await desk.done(desk.queue.put(block(await desk.admitted(4), 2), wait_s=LONG_S))
    for step in (3, 4):
        await desk.done(desk.queue.take(step, wait_s=LONG_S))
    await desk.queue.begin(1)
    assert desk.queue.policy.ready == 4
    recorded = await desk.done(desk.queue.take(2, wait_s=LONG_S))
    assert (content(recorded), recorded.recorded_until) == ([2, 3], 2)
    assert [one.min_version for one in recorded.groups] == [1, 1]
    assert await desk.queue.commit(2, wait_s=NOW_S) == 2
    fresh = await desk.done(desk.queue.take(3, wait_s=LONG_S))
    assert (content(fresh), fresh.recorded_until) == ([4, 5], 2)


async def test_the_version_of_a_recorded_step_is_what_it_was() -> None:
    desk = Desk(replace(BOUNDS, steps_per_version=2))
    for step in (1, 2, 3):
        await desk.train(step)
    for queue in (desk.queue, desk.restart()):
        assert [await queue.commit(step, wait_s=NOW_S) for step in (1, 2, 3)] == [0, 1, 1]


async def test_a_trainer_that_begins_while_a_commit_is_being_written_gets_that_step_as_recorded() -> None:
    desk = Desk()
    await desk.done(desk.queue.put(block(await desk.admitted(2)), wait_s=LONG_S))
    await desk.done(desk.queue.take(1, wait_s=LONG_S))
    assert await desk.queue.commit(1, wait_s=NOW_S) is None
    await desk.queue.begin(0)
    taken = await desk.done(desk.queue.take(1, wait_s=LONG_S))
    assert (content(taken), taken.recorded_until) == ([0, 1], 1)
    assert desk.queue.ledger.trained == 2


async def test_a_recorded_step_is_not_changed_by_what_is_stale_or_given_back() -> None:
    desk = Desk()
    await desk.train(1)
    await desk.queue.give_back(1)
    taken = await desk.done(desk.queue.replace_stale(1, [0], wait_s=LONG_S))
    assert content(taken) == [0, 1]


async def test_a_recorded_step_whose_groups_are_gone_is_said_to_be() -> None:
    desk = Desk()
    await desk.train(1)
    desk.journal.rows["groups"].clear()
    with pytest.raises(JournalDamaged, match="resume=RUN"):
        await desk.done(desk.queue.take(1, wait_s=LONG_S))


async def test_a_journal_that_does_not_answer_in_time_starves_a_trainer_and_no_more() -> None:
    desk = Desk()
    await desk.train(1)
    assert (await desk.queue.take(1, wait_s=0.01)).state == "starved"


async def test_without_a_journal_a_committed_step_cannot_be_taken_again() -> None:
    queue = MessageQueue(bounds=BOUNDS, step=1, version=1)
    with pytest.raises(AssertionError, match="step 1 was committed"):
        await queue.take(1, wait_s=NOW_S)


async def test_a_later_step_is_not_composed_before_an_earlier_one() -> None:
    desk = Desk(replace(BOUNDS, threshold=3))
    await desk.done(desk.queue.put(block(await desk.admitted(6)), wait_s=LONG_S))
    early = asyncio.ensure_future(desk.queue.take(2, wait_s=LONG_S))
    await desk.disk()
    assert not early.done()
    assert content(await desk.done(desk.queue.take(1, wait_s=LONG_S))) == [0, 1]
    assert (await desk.queue.take(3, wait_s=NOW_S)).state == "starved"
    early.cancel()


# -- checkpoints ------------------------------------------------------------------------------------------------------


async def test_the_frontier_of_an_earlier_step_leaves_out_what_was_trained_later() -> None:
    desk = Desk()
    tickets = await desk.admitted(4)
    await desk.queue.abandon(tickets[0], "zero_variance")
    tickets += await desk.admitted(1)
    await desk.done(desk.queue.put(block(tickets[1:]), wait_s=LONG_S))
    for step in (1, 2):
        await desk.done(desk.queue.take(step, wait_s=LONG_S))
        await desk.done(desk.queue.commit(step, wait_s=LONG_S))
    ended = {"zero_variance": 1}
    assert await desk.done(desk.queue.read_frontier(1, wait_s=LONG_S)) == Frontier(low=3, trained=2, abandoned=ended)
    assert await desk.done(desk.queue.read_frontier(2, wait_s=LONG_S)) == Frontier(low=5, trained=4, abandoned=ended)


async def test_a_frontier_is_told_only_when_all_that_it_counts_is_on_the_disk() -> None:
    desk = Desk()
    (ticket,) = await desk.admitted(1)
    await desk.queue.abandon(ticket, "zero_variance")
    asked = asyncio.ensure_future(desk.queue.read_frontier(0, wait_s=LONG_S))
    await asyncio.sleep(0)
    assert not list(desk.journal.abandoned()) and not asked.done()
    assert await desk.done(asked) == Frontier(low=1, abandoned={"zero_variance": 1})
    assert list(desk.journal.abandoned())


async def test_a_prompt_that_ends_while_a_frontier_is_asked_for_is_in_it_only_if_it_is_on_the_disk() -> None:
    desk = Desk()
    first, second = await desk.admitted(2)
    await desk.queue.abandon(first, "zero_variance")
    asked = asyncio.ensure_future(desk.queue.read_frontier(0, wait_s=LONG_S))
    for _ in range(3):
        await asyncio.sleep(0)
    desk.writer.work()
    await desk.queue.abandon(second, "zero_variance")  # the look is done, and its answer on the way
    frontier = await asked
    assert frontier is not None
    on_disk = [one.ordinal for one in desk.journal.abandoned()]
    assert [*range(frontier.low), *frontier.ended] == on_disk == [0]


async def test_a_frontier_that_the_disk_keeps_waiting_is_asked_for_again_and_looked_for_once() -> None:
    desk = Desk()
    await desk.train(1)
    for _ in range(3):
        assert await desk.queue.read_frontier(1, wait_s=NOW_S) is None
    assert len(desk.writer.jobs) == 1
    await desk.disk()
    assert await desk.queue.read_frontier(1, wait_s=NOW_S) == Frontier(low=2, trained=2)


async def test_a_checkpoint_that_the_disk_keeps_waiting_holds_nobody_up_and_is_told_once() -> None:
    desk = Desk()
    for step in (1, 2):
        await desk.train(step, version=step - 1)
    for step in (1, 2):
        await desk.queue.confirm_checkpoint(step, wait_s=NOW_S)
    assert len(desk.writer.jobs) == 1
    await desk.disk()
    assert desk.journal.base().step == 1
    await desk.done(desk.queue.confirm_checkpoint(2))
    assert desk.journal.base() == CheckpointMark(2, 2, Frontier(low=4, trained=4))


async def test_a_checkpoint_lets_the_journal_drop_what_it_covers() -> None:
    desk = Desk()
    for step in (1, 2, 3):
        await desk.train(step, version=step - 1)
    await desk.done(desk.queue.confirm_checkpoint(2))
    assert (desk.journal.base().step, desk.journal.base().frontier) == (2, Frontier(low=4, trained=4))
    assert sorted(desk.journal.rows["groups"]) == [4, 5]
    assert (await desk.queue.stats())["recorded_steps"] == 1
    transactions = len(desk.journal.before)
    await desk.done(desk.queue.confirm_checkpoint(2))  # said again
    assert len(desk.journal.before) == transactions
    assert desk.restart().step == 3


@pytest.mark.parametrize("error", [JournalFull("no room"), locked()], ids=["full", "locked"])
async def test_a_journal_that_cannot_be_made_smaller_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    desk = Desk()
    await desk.train(1)

    def full(**_: Any) -> None:
        raise error

    monkeypatch.setattr(desk.journal, "compact", full)
    for _ in range(2):
        await desk.done(desk.queue.confirm_checkpoint(1))
    assert caplog.text.count("compaction after step") == 1, "it is said once"
    assert (await desk.queue.stats())["recorded_steps"] == 1


# -- a successor, and calls that come twice ---------------------------------------------------------------------------


async def test_a_put_whose_answer_was_lost_is_answered_by_the_successor() -> None:
    desk = Desk()
    tickets = await desk.admitted(2)
    await desk.queue.put(block(tickets[:1]), wait_s=NOW_S)
    await desk.disk()  # the first is written, the second is not
    await desk.queue.put(block(tickets[1:]), wait_s=NOW_S)
    queue = desk.restart(a=tickets)
    assert (queue.policy.ready, queue.policy.open) == (1, 1)
    assert await desk.done(queue.put(block(tickets), wait_s=LONG_S)) is True
    assert content(await desk.done(queue.take(1, wait_s=LONG_S))) == [0, 1]


async def test_a_ticket_whose_answer_was_lost_is_issued_again() -> None:
    desk = Desk(prompts=2)
    first = await desk.admitted(1)
    lost = await desk.admitted(1)
    desk.restart(a=first)
    again = await desk.admitted(2)
    assert [one.ordinal for one in again] == [one.ordinal for one in lost]
    assert again[0].sequence >= SEQUENCES_RESERVED  # never one that somebody may hold
    assert await desk.done(desk.queue.put(block(lost), wait_s=LONG_S)) is True
    assert desk.queue.dropped == {"late": 1}


async def test_a_failure_that_the_successor_hears_again_counts_once() -> None:
    desk = Desk(prompts=1)
    (ticket,) = await desk.admitted(1)
    await desk.queue.fail(ticket, data_failure("reward", "raised"))
    await desk.disk()
    queue = desk.restart()
    await queue.fail(ticket, data_failure("reward", "raised"))
    assert queue.ledger.failures == {"reward": 1}
    (again,) = await desk.admitted(1)
    assert (again.ordinal, again.attempt) == (0, 1)
    await queue.fail(again, data_failure("reward", "raised"))
    assert queue.ledger.abandoned == {"reward": 1}


async def test_a_failure_that_was_not_written_is_heard_by_the_successor() -> None:
    desk = Desk(prompts=1)
    (ticket,) = await desk.admitted(1)
    await desk.queue.fail(ticket, data_failure("reward", "raised"))
    queue = desk.restart(a=[ticket])
    await queue.fail(ticket, data_failure("reward", "raised"))
    assert queue.ledger.failures == {"reward": 1}


async def test_a_commit_whose_answer_was_lost_is_answered_by_the_successor() -> None:
    desk = Desk()
    await desk.done(desk.queue.put(block(await desk.admitted(2)), wait_s=LONG_S))
    await desk.done(desk.queue.take(1, wait_s=LONG_S))
    for _ in range(2):  # not written, then written
        await desk.queue.commit(1, wait_s=NOW_S)
        queue = desk.restart()
        assert await desk.done(queue.commit(1, wait_s=LONG_S)) == 1
    assert queue.ledger.trained == 2


async def test_stale_groups_that_the_successor_is_told_of_again_are_replaced_once() -> None:
    desk = Desk(replace(BOUNDS, threshold=2))
    await desk.done(desk.queue.put(block(await desk.admitted(5)), wait_s=LONG_S))
    await desk.done(desk.queue.take(1, wait_s=LONG_S))
    await desk.queue.replace_stale(1, [0], wait_s=NOW_S)
    unwritten = desk.restart()
    assert content(await desk.done(unwritten.replace_stale(1, [0], wait_s=LONG_S))) == [1, 2]
    written = desk.restart()
    assert content(await desk.done(written.replace_stale(1, [0], wait_s=LONG_S))) == [1, 2]
    assert written.ledger.failures == {"stale": 1}
    assert [(one.ordinal, one.attempt) for one in await desk.admitted(1)] == [(0, 1)]


async def test_a_step_that_lacked_groups_as_the_queue_died_is_filled_by_the_successor() -> None:
    desk = Desk()
    await desk.done(desk.queue.put(block(await desk.admitted(2)), wait_s=LONG_S))
    await desk.done(desk.queue.take(1, wait_s=LONG_S))
    await desk.queue.replace_stale(1, [0], wait_s=NOW_S)
    await desk.disk()
    queue = desk.restart()
    assert (await queue.take(1, wait_s=NOW_S)).state == "starved"
    await desk.done(queue.put(block(await desk.admitted(1)), wait_s=LONG_S))
    assert content(await desk.done(queue.take(1, wait_s=LONG_S))) == [1, 0]


async def test_the_successor_waits_for_the_published_version_before_it_gives_room() -> None:
    desk = Desk(replace(BOUNDS, threshold=0))
    await desk.train(1)
    queue = desk.restart(published=None)
    assert queue.policy.room == 0
    await queue.confirm_published(1)
    await queue.confirm_published(1)
    assert queue.policy.room == 2


async def test_what_went_into_a_checkpoint_that_engines_do_not_hold_yet_keeps_its_slots() -> None:
    desk = Desk()
    tickets = await desk.admitted(4)
    await desk.done(desk.queue.put(block(tickets), wait_s=LONG_S))
    for step in (1, 2):
        await desk.done(desk.queue.take(step, wait_s=LONG_S))
        await desk.done(desk.queue.commit(step, wait_s=LONG_S))
    await desk.done(desk.queue.confirm_checkpoint(2))
    queue = desk.restart(published=None)
    assert queue.policy.room == 0
    await queue.confirm_published(0)
    assert queue.policy.room == 0
    await queue.confirm_published(1)
    assert queue.policy.room == 2


async def test_counts_go_on_where_they_were() -> None:
    desk = Desk()
    await desk.train(1)
    await desk.done(desk.queue.put(block(await desk.admitted(1)), wait_s=LONG_S))
    before, after = await desk.queue.stats(), await desk.restart().stats()
    same = ("queue_size", "total_produced", "total_consumed", "memory_bytes", "step", "version")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert after["last_commit_s"] == before["last_commit_s"] > 0


# -- the journal itself -----------------------------------------------------------------------------------------------


async def test_a_run_on_a_real_journal_survives_its_queue(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    trained: list[int] = []
    in_flight: list[Ticket] = []
    for life in range(3):
        writer = JournalWriter(journal=Journal(path))
        held = {"a": in_flight}
        restored = await writer.read(lambda journal: restore(journal, total=20, checkpoint=None, in_flight=held))  # noqa: B023
        queue = MessageQueue(bounds=BOUNDS, total_prompts=20, journal=writer, restored=restored)
        await queue.confirm_published(2 * life)
        for step in (2 * life + 1, 2 * life + 2):
            tickets = in_flight + (await queue.admit("a", want=3 - len(in_flight), load=0, wait_s=5.0)).tickets
            assert await queue.put(block(tickets[:2]), wait_s=5.0)
            trained += content(await queue.take(step, wait_s=5.0))
            version = await queue.commit(step, wait_s=5.0)
            assert version == step
            await queue.confirm_published(version)
            in_flight = tickets[2:]
        await queue.confirm_checkpoint(2 * life + 1)
        assert content(await queue.take(2 * life + 2, wait_s=5.0)) == trained[-2:]
        await writer.close()
    assert len(set(trained)) == len(trained) == 12
