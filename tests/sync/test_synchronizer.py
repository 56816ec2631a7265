"""A version is published only when every engine in use holds it; one that will not come is left behind and fetched
later; and nothing that an engine does keeps the others waiting for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from freewheel.sync.synchronizer import ParameterSynchronizer, ReplicaGone, SyncFailed
from freewheel.sync.weights import WeightsGone

WAIT_S = 30.0
"""Longer than anything here takes on a busy machine."""
CHECKSUM = 11


class FakeQueue:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.settled_after = 0
        """Questions that are answered with no."""
        self.asked = 0

    async def confirm_published(self, version: int) -> None:
        self.events.append(("published", version))

    async def wait_settled(self, *, wait_s: float) -> bool:
        self.asked += 1
        await asyncio.sleep(0)
        return self.asked > self.settled_after

    async def fence(self, replica: str, *, fenced: bool) -> None:
        self.events.append(("fenced" if fenced else "back", replica))

    @property
    def versions(self) -> list[int]:
        return [what for kind, what in self.events if kind == "published"]


class FakeReplica:
    """Does what `script` says, an entry a call: an exception, a checksum, an event to wait for; None: all is well."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.calls: list[int] = []
        self.verified: list[bool] = []
        """Whether it was asked for a sum, by call."""
        self.version = 0

    async def load_weights(self, version: int, weights: Any, *, verify: bool) -> int | None:
        self.calls.append(version)
        self.verified.append(verify)
        assert weights == f"weights {version}"
        now = self.script.pop(0) if self.script else None
        if isinstance(now, Exception):
            raise now
        if isinstance(now, asyncio.Event):
            await now.wait()
        if isinstance(now, int):
            return now
        self.version = version
        return CHECKSUM if verify else None


class Scene:
    def __init__(self, replicas: dict[str, FakeReplica], **settings: Any) -> None:
        self.queue = FakeQueue()
        usual = {"timeout_s": WAIT_S, "max_retries": 2, "retry_delay_s": 0.0, "verify_every": 10}
        self.sync = ParameterSynchronizer(replicas=replicas, queue=self.queue, **{**usual, **settings})
        self.running = asyncio.create_task(self.sync.run())

    async def submit(self, version: int) -> list[int] | None:
        return await self.sync.submit(version, f"weights {version}", CHECKSUM)

    async def publish(self, *versions: int) -> None:
        for version in versions:
            await self.submit(version)
            await self.published(version)

    async def published(self, version: int) -> None:
        """Waits for it, and for no run that has failed."""
        waiting = asyncio.ensure_future(self.sync.wait_published(version, wait_s=WAIT_S))
        await asyncio.wait([waiting, self.running], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            self.running.result()
        assert await waiting

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await asyncio.sleep(0.002)


@pytest.fixture
async def scene() -> AsyncIterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def build(*replicas: FakeReplica, **settings: Any) -> Scene:
        made.append(Scene({f"r{index}": one for index, one in enumerate(replicas)}, **settings))
        return made[-1]

    yield build
    for one in made:
        one.running.cancel()
        await asyncio.gather(one.running, return_exceptions=True)
        assert one.sync.state == "closed"


Build = Callable[..., Scene]


async def test_a_version_is_published_after_every_engine_confirmed_it_and_not_before(scene: Build) -> None:
    slow = asyncio.Event()
    quick, late = FakeReplica(), FakeReplica(slow)
    one = scene(quick, late)
    await one.submit(1)
    await one.until(lambda: quick.version == 1 and late.calls == [1])
    assert one.queue.events == []
    assert one.sync.version == 0
    assert not await one.sync.wait_published(1, wait_s=0.01)
    slow.set()
    await one.published(1)
    assert one.queue.events == [("published", 1)]
    stats = one.sync.stats()
    assert stats["versions"] == {"r0": 1, "r1": 1}
    assert (stats["param_sync_count"], stats["sync_failures"], stats["fenced"]) == (1, 0, [])
    assert stats["state"] == "idle"


async def test_a_failed_sync_is_tried_again_and_counted(scene: Build) -> None:
    flaky = FakeReplica(ConnectionError("reset"), ConnectionError("reset"))
    one = scene(flaky)
    await one.publish(1)
    assert flaky.calls == [1, 1, 1]
    assert one.sync.sync_failures == 2
    assert one.sync.param_sync_count == 1
    assert one.queue.events == [("published", 1)]


async def test_an_engine_that_does_not_answer_is_given_up_after_the_deadline(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    one = scene(FakeReplica(asyncio.Event()), timeout_s=0.02)
    await one.publish(1)
    assert one.sync.sync_failures == 1
    assert "async_training.sync_timeout = 0.02" in caplog.text


async def test_without_a_checksum_nothing_is_compared(scene: Build) -> None:
    replica = FakeReplica(12)
    one = scene(replica)
    await one.sync.submit(1, "weights 1")
    await one.published(1)
    assert one.sync.sync_failures == 0
    assert replica.verified == [False]


@pytest.mark.parametrize(
    ("script", "every", "verified", "failures"),
    [
        ([None] * 8, 3, [True, False, False, True, False, False, True, False], 0),
        ([None, 12, 12, 12, None], 3, [True, False, False, True, True], 1),
        ([12, None], 10, [True, True], 1),
        ([12, OSError("reset"), 12], 0, [False, False, False], 1),
        ([None, None, OSError("reset"), None, None], 10, [True, False, False, True, False], 1),
    ],
    ids=["every third", "wrong later", "wrong at first", "never", "again after a failure"],
)
async def test_an_engine_is_compared_at_its_first_sync_after_a_failure_and_at_intervals(
    scene: Build, script: list[Any], every: int, verified: list[bool], failures: int
) -> None:
    replica = FakeReplica(*script)
    one = scene(replica, verify_every=every)
    await one.publish(*range(1, len(verified) - failures + 1))
    assert replica.verified == verified
    assert one.sync.sync_failures == failures


async def test_the_successor_of_an_engine_is_compared(scene: Build) -> None:
    successor = FakeReplica()
    one = scene(FakeReplica(), FakeReplica(None, ReplicaGone("killed")))
    await one.publish(1, 2)
    await one.sync.join("r1", successor)
    await one.publish(3)
    assert successor.verified == [True, False]


async def test_an_engine_that_cannot_say_what_it_holds_is_believed(scene: Build) -> None:
    class Mute(FakeReplica):
        async def load_weights(self, version: int, weights: Any, *, verify: bool) -> int | None:
            await super().load_weights(version, weights, verify=verify)
            return None

    mute = Mute()
    one = scene(mute)
    await one.publish(1)
    assert mute.calls == [1]


# -- what may still be read -------------------------------------------------------------------------------------------


async def test_who_submits_is_told_what_may_still_be_read(scene: Build) -> None:
    slow = asyncio.Event()
    replica = FakeReplica(None, slow)
    one = scene(replica)
    assert await one.sync.prime(0, "weights 0", CHECKSUM) == [0]
    await one.publish(1)
    await one.submit(2)
    await one.until(lambda: replica.calls == [1, 2])
    assert await one.submit(3) == [1, 2, 3], "published, loading, waiting"
    assert await one.submit(4) == [1, 2, 4], "one that was superseded is read by nobody"
    slow.set()
    await one.published(4)
    assert one.sync.in_use() == [4]


async def test_a_call_that_was_given_up_may_still_read_until_its_engine_answers(scene: Build) -> None:
    never = asyncio.Event()
    well, late = FakeReplica(), FakeReplica(None, never, OSError("busy"))
    one = scene(well, late, timeout_s=0.05, max_retries=0)
    for version in (1, 2, 3):
        await one.submit(version)
        await one.published(version)
        if version == 2:
            assert one.sync.stats()["fenced"] == ["r1"]
            assert one.sync.in_use() == [2]
            await one.submit(2)  # again, which it refuses: it has answered
            await one.until(lambda: len(late.calls) == 3)
            await one.until(lambda: one.sync.state == "idle")
    assert one.sync.in_use() == [3]


async def test_a_successor_does_not_know_what_is_read_until_every_engine_has_answered_it(scene: Build) -> None:
    reads = asyncio.Event()
    well, reading = FakeReplica(), FakeReplica(reads)
    one = scene(well, reading, version=4, versions={"r0": 4, "r1": 4})
    assert await one.sync.prime(4, "weights 4", CHECKSUM) is None
    assert await one.submit(5) is None
    await one.until(lambda: well.version == 5 and reading.calls == [5])
    assert one.sync.in_use() is None, "one of them may be at what its predecessor handed it"
    reads.set()
    await one.published(5)
    assert one.sync.in_use() == [5]


async def test_of_an_engine_that_died_with_a_synchronizer_nothing_is_asked(scene: Build) -> None:
    one = scene(FakeReplica(), FakeReplica(ReplicaGone("it died")), version=4, versions={"r0": 4, "r1": 4})
    await one.publish(5)
    assert one.sync.in_use() == [5]


async def test_what_an_engine_that_hangs_was_handed_stays_in_use_and_it_is_handed_no_more(scene: Build) -> None:
    woken = asyncio.Event()
    well, hangs = FakeReplica(), FakeReplica(None, woken, woken)
    one = scene(well, hangs, timeout_s=0.05, max_retries=0)
    await one.publish(1, 2, 3, 4, 5)
    assert hangs.calls == [1, 2, 3]
    assert one.sync.in_use() == [2, 3, 5], "it takes the third when it is done with the second"
    woken.set()
    await one.until(lambda: one.sync.in_use() == [5])
    await one.publish(6)
    assert one.sync.stats()["fenced"] == [] and hangs.calls == [1, 2, 3, 6]


async def test_an_engine_that_hung_and_died_reads_nothing_any_more(scene: Build) -> None:
    well, hangs = FakeReplica(), FakeReplica(None, asyncio.Event())
    one = scene(well, hangs, timeout_s=0.05, max_retries=0)
    await one.publish(1, 2, 3)
    await one.sync.join("r1", FakeReplica())
    assert one.sync.in_use() == [3]


async def test_a_lagging_engine_is_fenced_off_and_returns_with_a_later_version(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "freewheel.sync")
    well, ill = FakeReplica(), FakeReplica(*[OSError("no route")] * 3)
    one = scene(well, ill)
    await one.publish(1)
    for line in ("version 1 on 1 of 2 engines", "r1 is fenced off at version 0"):
        assert f"Parameter sync: {line}" in caplog.text
    assert "OSError: no route" in caplog.text
    assert one.queue.events == [("fenced", "r1"), ("published", 1)]
    assert one.sync.stats()["fenced"] == ["r1"]
    assert one.sync.stats()["versions"] == {"r0": 1, "r1": 0}
    await one.publish(2)
    assert one.queue.events == [("fenced", "r1"), ("published", 1), ("back", "r1"), ("published", 2)]
    assert one.sync.stats()["fenced"] == []
    assert one.sync.sync_failures == 3


async def test_a_fenced_engine_gets_one_chance_a_version_and_is_fenced_once(scene: Build) -> None:
    well, ill = FakeReplica(), FakeReplica(*[OSError("no route")] * 5)
    one = scene(well, ill)
    await one.publish(1, 2, 3, 4)
    assert ill.calls == [1, 1, 1, 2, 3, 4]
    assert [event for event in one.queue.events if event[0] != "published"] == [("fenced", "r1"), ("back", "r1")]
    assert one.queue.events.index(("back", "r1")) < one.queue.events.index(("published", 4))


async def test_where_no_engine_takes_a_version_the_run_ends_and_says_which_one_serves(scene: Build) -> None:
    one = scene(FakeReplica(None, *[OSError("no route")] * 3), FakeReplica(None, *[OSError("no route")] * 3))
    await one.publish(1)
    await one.submit(2)
    with pytest.raises(SyncFailed, match=r"version 2 in 3 attempts.*version 1 is still serving.*sync_timeout"):
        await asyncio.wait_for(asyncio.shield(one.running), WAIT_S)
    assert one.queue.versions == [1]
    assert one.sync.version == 1


async def test_the_newest_of_what_waits_wins(scene: Build) -> None:
    slow = asyncio.Event()
    replica = FakeReplica(slow)
    one = scene(replica)
    await one.submit(1)
    await one.until(lambda: replica.calls == [1])
    for version in (2, 3, 4):
        await one.submit(version)  # returns at once, whatever is under way
    slow.set()
    await one.published(4)
    assert replica.calls == [1, 4]
    assert one.queue.versions == [1, 4]
    assert one.sync.param_sync_count == 2


async def test_under_drain_weights_wait_until_all_is_settled(scene: Build) -> None:
    replica = FakeReplica()
    one = scene(replica, drain=True)
    one.queue.settled_after = 3
    await one.publish(1)
    assert one.queue.asked == 4
    free = scene(FakeReplica())
    await free.publish(1)
    assert free.queue.asked == 0


async def test_times_are_those_of_the_transfer(scene: Build) -> None:
    now = [0.0]

    class Slow(FakeReplica):
        async def load_weights(self, version: int, weights: Any, *, verify: bool) -> int | None:
            now[0] += version
            return await super().load_weights(version, weights, verify=verify)

    one = scene(Slow(), clock=lambda: now[0])
    await one.publish(1, 3)
    stats = one.sync.stats()
    assert (stats["last_sync_s"], stats["mean_sync_s"], stats["longest_sync_s"]) == (3.0, 2.0, 3.0)


# -- replicas that die ------------------------------------------------------------------------------------------------


async def test_a_dead_engine_is_not_tried_again_and_its_successor_gets_the_newest_version_first(scene: Build) -> None:
    well, dead, successor = FakeReplica(), FakeReplica(None, ReplicaGone("killed")), FakeReplica()
    one = scene(well, dead)
    await one.publish(1, 2, 3)
    assert dead.calls == [1, 2]
    await one.sync.join("r1", successor)
    assert successor.calls == [3]
    assert one.queue.events[-2:] == [("fenced", "r1"), ("back", "r1")]
    assert one.sync.stats()["versions"] == {"r0": 3, "r1": 3}


async def test_when_the_only_engine_died_a_sync_waits_for_its_successor(scene: Build) -> None:
    """However short the retries are: a process takes seconds to start."""
    dead, successor = FakeReplica(None, ReplicaGone("killed")), FakeReplica()
    one = scene(dead, max_retries=0)
    await one.publish(1)
    await one.submit(2)
    await one.until(lambda: dead.calls == [1, 2])
    await asyncio.sleep(0.02)
    assert not one.running.done()
    await one.sync.join("r0", successor)
    await one.published(2)
    assert successor.calls == [1, 2]  # what serves comes first; then what is new
    assert one.sync.stats()["fenced"] == []


async def test_while_a_successor_is_awaited_an_engine_that_fails_at_once_is_not_asked_without_a_pause(
    scene: Build,
) -> None:
    gone, fails = FakeReplica(ReplicaGone("killed")), FakeReplica(*[OSError("no route")] * 999)
    successor = FakeReplica()
    one = scene(gone, fails, max_retries=0)
    await one.submit(1)
    await one.until(lambda: len(fails.calls) >= 1)
    await asyncio.sleep(0.05)
    assert len(fails.calls) == 1
    joined_at = len(fails.calls)
    await one.sync.join("r0", successor)
    await one.published(1)  # at once, and not when the pause is over
    assert successor.calls[-1] == 1
    assert len(fails.calls) == joined_at + 1


async def test_an_engine_that_lives_is_tried_again_before_the_successor_of_another_has_joined(
    scene: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freewheel.sync.synchronizer.BETWEEN_ROUNDS_S", 0.01)
    gone, flaky = FakeReplica(ReplicaGone("killed")), FakeReplica(OSError("no route"), OSError("no route"))
    one = scene(gone, flaky, max_retries=0)
    await one.publish(1)
    assert flaky.calls == [1, 1, 1]


async def test_a_replica_that_joins_during_a_sync_gets_what_that_sync_brings(scene: Build) -> None:
    slow = asyncio.Event()
    well, dead, successor = FakeReplica(None, slow), FakeReplica(None, ReplicaGone("killed")), FakeReplica()
    one = scene(well, dead)
    await one.publish(1)
    await one.submit(2)
    await one.until(lambda: well.calls == [1, 2])
    joining = asyncio.create_task(one.sync.join("r1", successor))
    await asyncio.sleep(0.01)
    assert successor.calls == []
    slow.set()
    await asyncio.wait_for(joining, WAIT_S)
    assert successor.calls == [2]
    assert one.sync.stats()["versions"] == {"r0": 2, "r1": 2}


async def test_a_replica_that_joins_before_anything_was_published_is_as_it_should_be(scene: Build) -> None:
    one = scene(FakeReplica(), version=5)
    successor = FakeReplica()
    await one.sync.join("r0", successor)
    assert successor.calls == []
    assert one.sync.stats()["versions"] == {"r0": 5}
    assert one.queue.events[-1] == ("back", "r0")
    await one.publish(6)


async def test_a_successor_that_takes_no_weights_ends_the_run_only_where_it_is_the_last(scene: Build) -> None:
    refuses = [OSError("no route")] * 3
    one = scene(FakeReplica(), FakeReplica())
    await one.publish(1)
    await one.sync.join("r1", FakeReplica(*refuses))
    assert one.sync.stats()["fenced"] == ["r1"]
    with pytest.raises(SyncFailed):
        await one.sync.join("r0", FakeReplica(*refuses))


# -- trainers, queues and synchronizers that die ----------------------------------------------------------------------


async def test_weights_that_died_with_their_trainer_change_nothing_and_its_successor_brings_them(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """However few retries there are, and though one engine had them."""
    quick, late = FakeReplica(), FakeReplica(None, WeightsGone("owner died"))
    one = scene(quick, late, max_retries=0)
    await one.publish(1)
    await one.submit(2)
    await one.until(lambda: "version 2 is gone with its trainer" in caplog.text)
    await one.until(lambda: one.sync.state == "idle")
    assert not one.running.done()
    assert one.queue.events == [("published", 1)], "nobody is fenced off for it, and nothing is published"
    assert one.sync.stats()["versions"] == {"r0": 2, "r1": 1}
    await one.publish(2)
    assert (quick.calls, late.calls) == ([1, 2, 2], [1, 2, 2])


async def test_a_version_that_is_published_is_brought_again_without_waiting_for_anything(scene: Build) -> None:
    replica = FakeReplica()
    one = scene(replica, drain=True)
    await one.publish(1)
    asked = one.queue.asked
    one.queue.settled_after = 10**9
    await one.submit(1)
    await one.until(lambda: replica.calls == [1, 1] and one.sync.state == "idle")
    assert one.queue.asked == asked, "it changes nothing for responses that are being generated"
    assert one.queue.versions == [1, 1]


async def test_a_version_that_comes_again_brings_back_who_is_fenced_off(scene: Build) -> None:
    well, ill = FakeReplica(), FakeReplica(*[OSError("no route")] * 3)
    one = scene(well, ill)
    await one.publish(1)
    assert one.sync.stats()["fenced"] == ["r1"]
    await one.submit(1)
    await one.until(lambda: one.sync.stats()["fenced"] == [])
    assert one.queue.events[-2:] == [("back", "r1"), ("published", 1)]


async def test_what_a_dead_trainer_sent_and_its_successor_has_overtaken_is_left(scene: Build) -> None:
    replica = FakeReplica()
    one = scene(replica, version=5)
    await one.submit(4)
    await one.publish(6)
    await one.submit(3)
    await one.submit(6)
    await one.until(lambda: len(replica.calls) == 2)
    assert replica.calls == [6, 6]


async def test_a_trainer_that_begins_behind_what_is_published_changes_nothing(scene: Build) -> None:
    replica, successor = FakeReplica(), FakeReplica()
    one = scene(replica)
    await one.publish(1)
    await one.sync.prime(0, "weights 0", CHECKSUM)
    await one.sync.join("r0", successor)
    assert successor.calls == [1], "who joins gets what is published, and not what a trainer goes on from"


async def test_a_trainer_that_begins_ahead_of_what_is_published_brings_it(scene: Build) -> None:
    """Its predecessor had saved it and died before engines had it."""
    replica = FakeReplica()
    one = scene(replica, version=3)
    await one.sync.prime(4, "weights 4", CHECKSUM)
    await one.published(4)
    assert replica.calls == [4]


async def test_what_a_trainer_begins_with_is_brought_only_to_who_waits_for_it(scene: Build) -> None:
    replica = FakeReplica()
    one = scene(replica, version=3)
    await one.sync.prime(3, "weights 3", CHECKSUM)
    await asyncio.sleep(0.01)
    assert replica.calls == []
    successor = FakeReplica()
    await one.sync.join("r0", successor)
    assert successor.calls == [3]


async def test_under_drain_a_version_that_everybody_waits_for_is_not_kept_until_they_have_worked(scene: Build) -> None:
    one = scene(FakeReplica(), drain=True)
    one.queue.settled_after = 10**9  # there is room, which only a replica with the next version may fill
    await one.sync.prime(0, "weights 0", CHECKSUM)
    successor = FakeReplica(WeightsGone("owner died"))
    await one.sync.join("r0", successor)
    await one.publish(1)
    assert successor.version == 1


async def test_a_successor_that_dies_while_it_joins_is_waited_for_again(scene: Build) -> None:
    one = scene(FakeReplica())
    await one.submit(1)
    assert await one.sync.wait_published(1, wait_s=WAIT_S)
    await one.sync.join("r0", FakeReplica(ReplicaGone("died while it joined")))
    successor = FakeReplica()
    await one.sync.join("r0", successor)
    assert successor.version == 1 and not one.sync.group["r0"].fenced


async def test_who_joins_after_the_trainers_death_waits_for_its_successor(scene: Build) -> None:
    replica, joins = FakeReplica(), FakeReplica(WeightsGone("owner died"))
    one = scene(replica)
    await one.publish(1)
    await one.sync.join("r0", joins)
    assert one.sync.stats()["fenced"] == ["r0"]
    later = FakeReplica()
    await one.sync.join("r0", later)
    assert later.calls == [], "the files that it was started from are of version 0"
    assert one.sync.stats()["fenced"] == ["r0"] and not one.running.done()
    await one.sync.prime(1, "weights 1", CHECKSUM)
    await one.until(lambda: one.sync.stats()["fenced"] == [])
    assert later.calls == [1]


async def test_where_no_engine_takes_a_version_the_next_one_is_tried_before_the_run_ends(scene: Build) -> None:
    slow = asyncio.Event()
    replica = FakeReplica(slow, *[OSError("no route")] * 2, None)
    one = scene(replica, timeout_s=0.2, max_retries=2)
    await one.submit(1)
    await one.until(lambda: replica.calls == [1])
    await one.publish(2)
    assert replica.calls == [1, 1, 1, 2]


async def test_a_new_queue_is_told_what_is_published_and_who_is_fenced_off(scene: Build) -> None:
    one = scene(FakeReplica(), FakeReplica(*[OSError("no route")] * 3))
    await one.publish(1)
    one.queue.events.clear()
    await one.sync.announce()
    assert one.queue.events == [("back", "r0"), ("fenced", "r1"), ("published", 1)]


async def test_a_synchronizer_in_the_place_of_another_knows_what_each_engine_holds(scene: Build) -> None:
    ahead, behind, unknown = FakeReplica(), FakeReplica(), FakeReplica()
    one = scene(ahead, behind, unknown, version=4, versions={"r0": 5, "r1": 3})
    await one.sync.announce()
    assert one.queue.events == [("back", "r0"), ("fenced", "r1"), ("fenced", "r2"), ("published", 4)]
    await one.sync.prime(4, "weights 4", CHECKSUM)
    await one.until(lambda: one.sync.stats()["fenced"] == [])
    assert (ahead.calls, behind.calls, unknown.calls) == ([], [4], [4]), "nobody is turned back"
    await one.publish(5)
    assert one.sync.stats()["versions"] == {"r0": 5, "r1": 5, "r2": 5}


async def test_a_replica_that_joins_a_synchronizers_successor_waits_for_weights(scene: Build) -> None:
    one = scene(FakeReplica(), version=4, versions={"r0": 4})
    joins = FakeReplica()
    await one.sync.join("r0", joins)
    assert one.sync.stats()["fenced"] == ["r0"], "of which version the files are that it began with, nobody knows"
    await one.submit(4)
    await one.until(lambda: one.sync.stats()["fenced"] == [])
    assert joins.calls == [4]


# -- what is recorded of it ------------------------------------------------------------------------------------------


async def test_a_sync_has_a_row_with_each_engine_and_its_attempts(scene: Build) -> None:
    one = scene(FakeReplica(), FakeReplica(ConnectionError("reset"), 99))
    await one.sync.submit(1, "weights 1", 11, 4096)
    await one.published(1)
    (row,) = one.sync.drain_rows()
    assert (row["version"], row["bytes"], row["failed"]) == (1, 4096, False)
    assert (
        row["took_s"] == one.sync.stats()["last_sync_s"] >= max(engine["took_s"] for engine in row["engines"].values())
    )
    assert [(name, engine["attempts"], engine["error"]) for name, engine in row["engines"].items()] == [
        ("r0", 1, ""),
        ("r1", 3, "it holds other weights"),
    ]
    await one.publish(2)
    (row,) = one.sync.drain_rows()
    assert row["engines"]["r1"] | {"took_s": 0} == {"took_s": 0, "attempts": 1, "error": ""}, "each sync is told anew"
    assert row["bytes"] is None


@pytest.mark.parametrize(
    ("script", "others", "failed", "attempts", "error"),
    [
        ([ReplicaGone("killed")], 1, False, 1, "killed"),
        ([WeightsGone("with its trainer")], 0, True, 1, "with its trainer"),
        ([ConnectionError("reset")] * 3, 0, True, 3, "ConnectionError: reset"),
    ],
    ids=["an engine died", "the trainer died", "the run ends"],
)
async def test_every_end_of_a_sync_has_a_row(
    scene: Build, script: list[Exception], others: int, failed: bool, attempts: int, error: str
) -> None:
    one = scene(FakeReplica(*script), *(FakeReplica() for _ in range(others)))
    await one.submit(1)
    await one.until(lambda: bool(one.sync._rows))
    (row,) = one.sync.drain_rows()
    engine = row["engines"]["r0"]
    assert (row["version"], row["failed"], engine["attempts"], engine["error"]) == (1, failed, attempts, error)


async def test_rows_are_returned_once_and_only_the_newest_are_kept(
    scene: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freewheel.sync.synchronizer.ROWS_KEPT", 3)
    one = scene(FakeReplica())
    for version in range(1, 6):
        await one.submit(version)
        await one.published(version)
    assert [row["version"] for row in one.sync.drain_rows()] == [3, 4, 5]
    assert one.sync.drain_rows() == []


# -- one replica ------------------------------------------------------------------------------------------------------
