"""The queue with a journal: nothing is ready, taken or trained before it is on disk, and every call may come twice."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from freewheel.queue.client import Starved
from freewheel.queue.journal import CheckpointMark, JournalDamaged, JournalFull
from freewheel.queue.ledger import Frontier, data_failure, infra_failure
from freewheel.queue.message_queue import SEQUENCES_RESERVED

from .journals import EVERY_TICKET, LONG_S, NOW_S, Scene, attempts, block, ordinals

pytestmark = pytest.mark.timeout(60)

Build = Callable[..., Scene]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    made: list[Scene] = []

    def build_one(**settings: Any) -> Scene:
        made.append(Scene(tmp_path / "journal.sqlite", window=3, **settings))
        return made[-1]

    yield build_one
    for one in made:
        one.journal.close()


# -- before it is on disk ---------------------------------------------------------------------------------------------


async def test_sequences_are_reserved_on_disk_before_and_ahead_of_their_use(build: Build) -> None:
    one = build(groups_per_step=400)
    assert not (await one.queue.admit("a", want=2, load=0, wait_s=NOW_S, holding=EVERY_TICKET)).tickets
    assert [ticket.sequence for ticket in await one.admit(2)] == [0, 1]
    assert one.journal.reserved() == SEQUENCES_RESERVED
    await one.admit(SEQUENCES_RESERVED // 2 - 1)
    assert not one.writer.jobs
    assert len((await one.queue.admit("a", want=100, load=0, wait_s=NOW_S, holding=EVERY_TICKET)).tickets) == 100, (
        "nobody waits for the disk"
    )
    assert len(one.writer.jobs) == 1
    await one.disk()
    assert one.journal.reserved() == 2 * SEQUENCES_RESERVED


async def test_a_group_is_ready_only_when_the_journal_has_it(build: Build) -> None:
    one = build()
    tickets = await one.admit(2)
    one.writer.paused = "journal.sqlite cannot be written: no room (3 MB free)"
    assert await one.queue.put(block(tickets), wait_s=NOW_S) is False
    starved = await one.queue.take(1, wait_s=NOW_S)
    assert isinstance(starved, Starved) and "3 MB free" in starved.waiting_for
    assert (await one.queue.stats())["paused"] == one.writer.paused
    again = asyncio.ensure_future(one.queue.put(block(tickets[:1]), wait_s=LONG_S))
    await asyncio.sleep(0)
    assert one.queue.policy.ready == 0 and len(one.writer.jobs) == 1, "a second put waits for the same write"
    await one.disk()
    assert one.queue.policy.ready == 2 and await again
    assert await one.queue.put(block(tickets), wait_s=NOW_S) is True
    assert (one.queue.total_produced, one.queue.dropped) == (2, {"late": 2})


@pytest.mark.parametrize("state", ["being written", "stored", "taken"])
async def test_a_group_that_was_put_cannot_fail_any_more(build: Build, state: str) -> None:
    one = build()
    tickets = await one.admit(2)
    await one.queue.put(block(tickets), wait_s=NOW_S)
    if state != "being written":
        await one.disk()
    if state == "taken":
        await one.take(1)
    await one.queue.fail(tickets[0], infra_failure("timeout", "the answer was lost"))
    await one.queue.abandon(tickets[1], "zero_variance")
    assert await one.queue.release_replica("a") == 0
    await one.disk()
    assert await one.take(1) == [0, 1]
    await one.commit(1)
    assert one.queue.ledger.trained == 2


async def test_a_step_is_given_out_and_trained_only_when_the_journal_has_it(build: Build) -> None:
    one = build()
    await one.fill(2)
    assert isinstance(await one.queue.take(1, wait_s=NOW_S), Starved)
    calls = [asyncio.ensure_future(one.queue.take(1, wait_s=LONG_S)) for _ in range(2)]
    await one.disk()
    assert [ordinals(await call) for call in calls] == [[0, 1], [0, 1]]
    assert [step.step for step in one.journal.steps(after=0)] == [1]
    for _ in range(2):
        assert await one.queue.commit(1, wait_s=NOW_S) is None
        assert (one.queue.step, one.queue.ledger.trained, len(one.writer.jobs)) == (0, 0, 1)
    await one.disk()
    assert (one.queue.step, one.queue.ledger.trained) == (1, 2)
    assert await one.queue.commit(1, wait_s=NOW_S) == 1


async def test_a_step_that_changes_while_it_is_written_is_given_out_as_it_is_on_disk(build: Build) -> None:
    one = build(threshold=2)
    await one.fill(3)
    taking = asyncio.ensure_future(one.queue.take(1, wait_s=LONG_S))
    await asyncio.sleep(0)
    assert isinstance(await one.queue.replace_stale(1, [0], wait_s=NOW_S), Starved)
    one.writer.work(1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not taking.done(), "only the step's first groups are on disk"
    await one.disk()
    assert ordinals(await taking) == [1, 2]


async def test_a_version_that_ends_early_is_complete_only_when_the_journal_has_it(build: Build) -> None:
    one = build(steps_per_version=2)
    await one.train(1)
    assert await one.queue.complete_version(wait_s=NOW_S) is None
    assert await one.done(one.queue.complete_version(wait_s=LONG_S)) == 1
    assert await one.queue.complete_version(wait_s=NOW_S) == 1
    assert one.restart().policy.version == 1
    assert await one.queue.commit(1, wait_s=NOW_S) == 1


async def test_a_caller_that_sees_a_write_done_also_sees_its_effects(build: Build) -> None:
    """The call may arrive just as the write ends."""
    one = build(steps_per_version=2)
    await one.train(1)
    await one.fill(2)
    await one.take(2)
    assert await one.queue.commit(2, wait_s=NOW_S) is None
    one.writer.work()
    assert await one.queue.commit(2, wait_s=LONG_S) == 1
    await one.train(3)
    assert await one.queue.complete_version(wait_s=NOW_S) is None
    one.writer.work()
    assert await one.queue.complete_version(wait_s=LONG_S) == 2


# -- recorded steps ---------------------------------------------------------------------------------------------------


async def test_a_restarted_trainer_gets_the_recorded_steps_and_then_the_groups_of_its_predecessor(build: Build) -> None:
    one = build()
    await one.train(1, 2)
    await one.fill(4, 2)
    for step in (3, 4):
        await one.take(step)
    await one.queue.begin(1)
    assert one.queue.policy.ready == 4
    recorded = await one.done(one.queue.take(2, wait_s=LONG_S))
    assert (ordinals(recorded), recorded.recorded_until) == ([2, 3], 2)
    assert [group.min_version for group in recorded.groups] == [1, 1]
    assert await one.queue.commit(2, wait_s=NOW_S) == 2
    fresh = await one.done(one.queue.take(3, wait_s=LONG_S))
    assert (ordinals(fresh), fresh.recorded_until) == ([4, 5], 2)


async def test_a_recorded_step_keeps_its_version_and_its_groups(build: Build) -> None:
    one = build(steps_per_version=2)
    await one.train(1, 2, 3)
    for _ in range(2):
        assert [await one.queue.commit(step, wait_s=NOW_S) for step in (1, 2, 3)] == [0, 1, 1]
        await one.queue.give_back(1)
        assert await one.replace(1, 0) == [0, 1]
        one.restart()


async def test_a_trainer_that_starts_while_a_commit_is_being_written_gets_that_step_as_recorded(build: Build) -> None:
    one = build()
    await one.fill(2)
    await one.take(1)
    assert await one.queue.commit(1, wait_s=NOW_S) is None
    assert isinstance(await one.queue.replace_stale(1, [0], wait_s=NOW_S), Starved)
    await one.queue.begin(0)
    taken = await one.done(one.queue.take(1, wait_s=LONG_S))
    assert (ordinals(taken), taken.recorded_until) == ([0, 1], 1)
    assert one.queue.ledger.trained == 2


async def test_a_trainer_waits_for_a_slow_journal_and_gets_an_error_if_recorded_groups_are_gone(build: Build) -> None:
    one = build()
    await one.train(1)
    for _ in range(2):
        assert isinstance(await one.queue.take(1, wait_s=0.01), Starved)
    assert len(one.writer.jobs) == 1
    one.journal._db.execute("DELETE FROM groups")
    with pytest.raises(JournalDamaged, match="resume=RUN"):
        await one.take(1)


# -- checkpoints ------------------------------------------------------------------------------------------------------


async def test_a_frontier_has_what_was_trained_until_its_step_and_what_was_abandoned(build: Build) -> None:
    one = build()
    (ticket,) = await one.admit(1)
    await one.queue.abandon(ticket, "zero_variance")
    await one.train(1, 2)
    for step, frontier in ((1, {"low": 3, "trained": 2}), (2, {"low": 5, "trained": 4})):
        for _ in range(2):
            assert await one.queue.read_frontier(step, wait_s=NOW_S) is None
        assert len(one.writer.jobs) == 1, "a repeated call waits for the same read"
        await one.disk()
        found = await one.queue.read_frontier(step, wait_s=NOW_S)
        assert found == Frontier(**frontier, abandoned={"zero_variance": 1})


async def test_a_frontier_counts_an_abandoned_prompt_only_if_it_is_on_disk(build: Build) -> None:
    one = build()
    first, second = await one.admit(2)
    await one.queue.abandon(first, "zero_variance")
    asked = asyncio.ensure_future(one.queue.read_frontier(0, wait_s=LONG_S))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not list(one.journal.abandoned()) and not asked.done()
    one.writer.work()
    await one.queue.abandon(second, "zero_variance")  # the journal was read, and the answer is on its way
    frontier = await asked
    assert frontier is not None
    on_disk = [gone.ordinal for gone in one.journal.abandoned()]
    assert [*range(frontier.low), *frontier.ended] == on_disk == [0]


async def test_a_checkpoint_lets_the_journal_drop_the_groups_it_covers(build: Build) -> None:
    one = build()
    await one.train(1, 2, 3)
    for step in (1, 2):
        await one.queue.confirm_checkpoint(step, wait_s=NOW_S)  # a slow disk holds up nobody
    await one.disk()
    assert one.journal.base() == CheckpointMark(2, 2, Frontier(low=4, trained=4))
    assert [one.journal.group(ordinal) is not None for ordinal in range(6)] == [False] * 4 + [True] * 2
    assert (await one.queue.stats())["recorded_steps"] == 1
    assert await one.queue.commit(2, wait_s=NOW_S) == 2
    with pytest.raises(AssertionError, match="step 1 is older than every checkpoint"):
        await one.queue.commit(1, wait_s=NOW_S)
    await one.queue.confirm_checkpoint(2)
    assert not one.writer.jobs, "a repeated call changes nothing"
    assert one.restart().step == 3


def locked() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error


@pytest.mark.parametrize("error", [JournalFull("no room"), locked()], ids=["full", "locked"])
async def test_a_failed_compaction_is_logged_once_and_changes_nothing(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    one = build()
    await one.train(1)

    def fail(**_: Any) -> None:
        raise error

    with monkeypatch.context() as full:
        full.setattr(one.journal, "compact", fail)
        for _ in range(2):
            await one.done(one.queue.confirm_checkpoint(1))
    assert caplog.text.count("Journal compaction after step 1 failed") == 1
    assert (await one.queue.stats())["recorded_steps"] == 1
    await one.done(one.queue.confirm_checkpoint(1))
    assert (await one.queue.stats())["recorded_steps"] == 0


# -- a successor, and calls that come twice ---------------------------------------------------------------------------


@pytest.mark.parametrize("written", [False, True])
async def test_a_failure_that_is_reported_again_to_the_successor_counts_once(build: Build, written: bool) -> None:
    one = build(prompts=1)
    (ticket,) = await one.admit(1)
    await one.queue.fail(ticket, data_failure("reward", "raised"))
    if written:
        await one.disk()
    queue = one.restart(a=[ticket])
    await queue.fail(ticket, data_failure("reward", "raised"))
    assert queue.ledger.failures == {"reward": 1}
    (again,) = await one.admit(1)
    assert (again.ordinal, again.attempt) == (0, 1)
    await queue.fail(again, data_failure("reward", "raised"))
    assert queue.ledger.abandoned == {"reward": 1}


@pytest.mark.parametrize("state", ["not written", "stored", "taken", "trained"])
async def test_a_group_that_is_put_again_to_the_successor_counts_once(build: Build, state: str) -> None:
    """Its rollouter had no answer when the queue died, and still has the ticket."""
    one = build()
    tickets = await one.admit(2)
    await one.queue.put(block(tickets), wait_s=NOW_S)
    if state != "not written":
        await one.disk()
    if state in ("taken", "trained"):
        await one.take(1)
    if state == "trained":
        await one.commit(1)
    queue = one.restart(a=tickets)
    for _ in range(2):
        await one.put(*tickets)
    assert queue.dropped == {"late": 2 if state == "not written" else 4}
    if state != "trained":
        assert await one.take(1) == [0, 1]
    await one.commit(1)
    assert (queue.total_produced, queue.ledger.trained, queue.policy.ready) == (2, 2, 0)


async def test_the_successor_replaces_stale_groups_once(build: Build) -> None:
    one = build(threshold=2)
    await one.fill(5)
    await one.take(1)
    await one.queue.replace_stale(1, [0], wait_s=NOW_S)  # is not written
    for _ in range(2):
        one.restart()
        assert await one.replace(1, 0) == [1, 2]
        assert one.queue.ledger.failures == {"stale": 1}
    assert attempts(await one.admit(1)) == [(0, 1)]


async def test_the_successor_fills_a_step_that_lacked_groups(build: Build) -> None:
    one = build()
    await one.fill(2)
    await one.take(1)
    await one.queue.replace_stale(1, [0], wait_s=NOW_S)
    await one.disk()
    assert isinstance(await one.restart().take(1, wait_s=NOW_S), Starved)
    await one.fill(1)
    assert await one.take(1) == [1, 0]


async def test_the_successor_admits_only_what_the_published_version_allows(build: Build) -> None:
    one = build(threshold=2)
    await one.fill(4)
    for step in (1, 2):
        await one.take(step)
        await one.commit(step)
    await one.done(one.queue.confirm_checkpoint(2))
    queue = one.restart(published=None)
    rooms = [queue.policy.room]
    for version in (0, 1, 1, 2):
        await queue.confirm_published(version)
        rooms.append(queue.policy.room)
    assert rooms == [0, 2, 4, 4, 6], "none before it is known"


async def test_the_successor_continues_the_counts(build: Build) -> None:
    one = build()
    await one.train(1)
    await one.fill(1)
    before, after = await one.queue.stats(), await one.restart().stats()
    same = ("queue_size", "total_produced", "total_consumed", "memory_bytes", "step", "version", "last_commit_s")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert after["last_commit_s"] > 0
