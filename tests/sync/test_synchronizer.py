"""A version is published only when every engine in use holds it. An engine that fails is fenced and retried, and no
engine keeps the others waiting for ever."""

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
REFUSES = [OSError("no route")] * 3
"""As many failures as attempts."""


class FakeQueue:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.settled_after = 0
        """Calls of `wait_settled` that return False."""
        self.asked = 0

    async def confirm_published(self, version: int) -> None:
        self.events.append(("published", version))

    async def wait_settled(self, *, wait_s: float) -> bool:
        self.asked += 1
        await asyncio.sleep(0)
        return self.asked > self.settled_after

    async def fence(self, replica: str, *, fenced: bool) -> None:
        self.events.append(("fenced" if fenced else "back", replica))


class FakeReplica:
    """Follows `script`, an entry per call: an exception, a checksum, an event to wait for; None: load and confirm."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.calls: list[int] = []
        self.verified: list[bool] = []
        """Whether a checksum was requested, by call."""
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

    async def prime(self, version: int) -> list[int] | None:
        return await self.sync.prime(version, f"weights {version}", CHECKSUM)

    async def publish(self, *versions: int) -> None:
        for version in versions:
            await self.submit(version)
            await self.published(version)

    async def published(self, version: int) -> None:
        """Wait until the version is published. Raises the error of a run that failed."""
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

    @property
    def fenced(self) -> list[str]:
        return self.sync.stats()["fenced"]

    @property
    def versions(self) -> list[int]:
        return list(self.sync.stats()["versions"].values())


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


# -- publishing -------------------------------------------------------------------------------------------------------


async def test_a_version_is_published_after_every_engine_confirmed_it(scene: Build) -> None:
    slow = asyncio.Event()
    quick, late = FakeReplica(), FakeReplica(slow)
    one = scene(quick, late)
    await one.submit(1)
    await one.until(lambda: quick.version == 1 and late.calls == [1])
    assert one.queue.events == [] and one.sync.version == 0
    assert not await one.sync.wait_published(1, wait_s=0.01)
    slow.set()
    await one.published(1)
    assert one.queue.events == [("published", 1)]
    stats = one.sync.stats()
    assert (stats["param_sync_count"], stats["sync_failures"], stats["state"]) == (1, 0, "idle")
    assert (one.versions, one.fenced) == ([1, 1], [])


@pytest.mark.parametrize(
    ("script", "failures", "timeout_s", "logged"),
    [
        ([ConnectionError("reset")] * 2, 2, WAIT_S, "ConnectionError: reset"),
        ([asyncio.Event()], 1, 0.02, "async_training.sync_timeout = 0.02"),
        ([12], 1, WAIT_S, "it holds other weights"),
    ],
    ids=["error", "no answer", "wrong checksum"],
)
async def test_an_engine_that_fails_is_tried_again(
    scene: Build,
    caplog: pytest.LogCaptureFixture,
    script: list[Any],
    failures: int,
    timeout_s: float,
    logged: str,
) -> None:
    one = scene(FakeReplica(*script), timeout_s=timeout_s)
    await one.publish(1)
    assert (one.sync.sync_failures, one.sync.param_sync_count) == (failures, 1)
    assert logged in caplog.text


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


async def test_nothing_is_compared_without_a_checksum_and_an_engine_need_not_have_one(scene: Build) -> None:
    class Mute(FakeReplica):
        async def load_weights(self, version: int, weights: Any, *, verify: bool) -> int | None:
            await super().load_weights(version, weights, verify=verify)
            return None

    replica, mute = FakeReplica(12), Mute()
    one = scene(replica, mute)
    await one.sync.submit(1, "weights 1")
    await one.published(1)
    await one.publish(2)
    assert (replica.verified, mute.verified, one.sync.sync_failures) == ([False, True], [False, True], 0)


async def test_with_drain_weights_wait_until_the_queue_is_settled(scene: Build) -> None:
    one = scene(FakeReplica(), drain=True)
    one.queue.settled_after = 3
    await one.publish(1)
    assert one.queue.asked == 4
    one.queue.settled_after = 10**9
    await one.publish(1)
    await one.until(lambda: one.sync.param_sync_count == 2 and one.sync.state == "idle")
    assert one.queue.asked == 4, "a published version changes nothing for responses in generation"
    free = scene(FakeReplica())
    await free.publish(1)
    assert free.queue.asked == 0


async def test_with_drain_a_version_that_every_engine_waits_for_is_loaded_at_once(scene: Build) -> None:
    one = scene(FakeReplica(), drain=True)
    one.queue.settled_after = 10**9  # there is room, which only a replica with the next version may fill
    await one.prime(0)
    successor = FakeReplica(WeightsGone("owner died"))
    await one.sync.join("r0", successor)
    await one.publish(1)
    assert successor.version == 1


# -- weights in use ---------------------------------------------------------------------------------------------------


async def test_the_newest_waiting_version_wins_and_the_trainer_learns_which_may_still_be_read(scene: Build) -> None:
    slow = asyncio.Event()
    replica = FakeReplica(None, slow)
    one = scene(replica)
    assert await one.prime(0) == [0]
    await one.publish(1)
    await one.submit(2)
    await one.until(lambda: replica.calls == [1, 2])
    assert await one.submit(3) == [1, 2, 3], "published, loading, waiting"
    assert await one.submit(4) == [1, 2, 4], "nobody reads a version that was replaced"
    slow.set()
    await one.published(4)
    assert replica.calls == [1, 2, 4] and one.sync.param_sync_count == 3
    assert one.queue.events == [("published", 1), ("published", 2), ("published", 4)]
    assert one.sync.in_use() == [4]


async def test_a_hanging_engine_keeps_its_versions_in_use_and_gets_no_more_until_it_answers(scene: Build) -> None:
    woken = asyncio.Event()
    well, hangs = FakeReplica(), FakeReplica(None, woken, woken)
    one = scene(well, hangs, timeout_s=0.05, max_retries=0)
    await one.publish(1, 2, 3, 4, 5)
    assert hangs.calls == [1, 2, 3]
    assert one.sync.in_use() == [2, 3, 5] and one.fenced == ["r1"]
    woken.set()
    await one.until(lambda: one.sync.in_use() == [5])
    await one.publish(6)
    assert one.fenced == [] and hangs.calls == [1, 2, 3, 6]


async def test_a_later_answer_or_death_of_an_engine_ends_its_use_of_earlier_versions(scene: Build) -> None:
    """An engine takes versions in order: it no longer reads what it was handed before."""
    late = FakeReplica(None, asyncio.Event(), OSError("busy"), asyncio.Event(), asyncio.Event())
    one = scene(FakeReplica(), late, timeout_s=0.05, max_retries=0)
    await one.publish(1, 2)
    assert one.sync.in_use() == [2]
    await one.publish(3)
    assert late.calls == [1, 2, 3]
    assert one.sync.in_use() == [3]
    await one.publish(4, 5, 6)
    assert one.sync.in_use() == [4, 5, 6]
    await one.sync.join("r1", FakeReplica())
    assert one.sync.in_use() == [6]


async def test_a_restarted_synchronizer_keeps_everything_in_use_until_every_engine_answered_or_died(
    scene: Build,
) -> None:
    reads = asyncio.Event()
    well, reading, dead = FakeReplica(), FakeReplica(reads), FakeReplica(ReplicaGone("it died"))
    one = scene(well, reading, dead, version=4, versions={"r0": 4, "r1": 4, "r2": 4})
    assert await one.prime(4) is None
    assert await one.submit(5) is None
    await one.until(lambda: well.version == 5 and reading.calls == [5])
    assert one.sync.in_use() is None
    reads.set()
    await one.published(5)
    assert one.sync.in_use() == [5]


# -- engines that lag or die ------------------------------------------------------------------------------------------


async def test_an_engine_that_lags_is_fenced_gets_one_attempt_per_version_and_returns(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "freewheel.sync")
    lagging = FakeReplica(*[OSError("no route")] * 4)
    one = scene(FakeReplica(), lagging)
    await one.publish(1)
    for line in ("version 1 on 1 of 2 engines", "r1 is fenced off at version 0"):
        assert f"Parameter sync: {line}" in caplog.text
    assert (one.versions, one.fenced) == ([1, 0], ["r1"])
    await one.publish(2, 2, 3)
    assert lagging.calls == [1, 1, 1, 2, 2, 3]
    fenced = [("fenced", "r1"), ("published", 1), ("published", 2)]
    assert one.queue.events == [*fenced, ("back", "r1"), ("published", 2), ("published", 3)]
    assert one.fenced == [] and one.sync.sync_failures == 4
    assert "r1 is back with version 2" in caplog.text


async def test_a_run_ends_when_no_engine_takes_a_version_and_none_is_newer(scene: Build) -> None:
    one = scene(FakeReplica(None, *REFUSES), FakeReplica(None, *REFUSES))
    await one.publish(1)
    await one.submit(2)
    with pytest.raises(SyncFailed, match=r"version 2 in 3 attempts.*version 1 is still serving.*sync_timeout"):
        await asyncio.wait_for(asyncio.shield(one.running), WAIT_S)
    assert one.queue.events[0] == ("published", 1) and one.sync.version == 1
    slow = asyncio.Event()
    replica = FakeReplica(slow, *REFUSES[:2])
    other = scene(replica, timeout_s=0.2)
    await other.submit(1)
    await other.until(lambda: replica.calls == [1])
    await other.publish(2)
    assert replica.calls == [1, 1, 1, 2], "a newer version is tried first"


async def test_a_dead_engine_is_not_retried_and_its_successor_gets_the_newest_version_first(scene: Build) -> None:
    dead, successor = FakeReplica(None, ReplicaGone("killed")), FakeReplica()
    one = scene(FakeReplica(), dead)
    await one.publish(1, 2, 3)
    assert dead.calls == [1, 2]
    await one.sync.join("r1", successor)
    assert one.queue.events[-2:] == [("fenced", "r1"), ("back", "r1")]
    assert one.versions == [3, 3]
    await one.publish(4)
    assert (successor.calls, successor.verified) == ([3, 4], [True, False])


async def test_when_the_only_engine_died_a_sync_waits_for_its_successor(scene: Build) -> None:
    """However short the retries are: a process takes seconds to start."""
    dead, successor = FakeReplica(None, ReplicaGone("killed")), FakeReplica()
    one = scene(dead, max_retries=0)
    await one.publish(1)
    await one.submit(2)
    await one.until(lambda: dead.calls == [1, 2])
    await one.sync.join("r0", FakeReplica(ReplicaGone("died while it joined")))
    assert not one.running.done()
    await one.sync.join("r0", successor)
    await one.published(2)
    assert successor.calls == [1, 2], "the published version first"
    assert one.fenced == []


@pytest.mark.parametrize(("pause_s", "calls"), [(3600.0, [1, 1]), (0.01, [1, 1, 1])])
async def test_an_engine_that_is_alive_is_retried_with_a_pause_until_another_has_a_successor(
    scene: Build, monkeypatch: pytest.MonkeyPatch, pause_s: float, calls: list[int]
) -> None:
    monkeypatch.setattr("freewheel.sync.synchronizer.BETWEEN_ROUNDS_S", pause_s)
    fails, successor = FakeReplica(*REFUSES[:2]), FakeReplica()
    one = scene(FakeReplica(ReplicaGone("killed")), fails, max_retries=0)
    await one.submit(1)
    await one.until(lambda: len(fails.calls) >= len(calls) - 1)
    if pause_s > 1:
        await one.sync.join("r0", successor)  # ends the pause
    await one.published(1)
    assert fails.calls == calls


async def test_a_replica_that_joins_during_a_sync_gets_its_version(scene: Build) -> None:
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
    assert successor.calls == [2] and one.versions == [2, 2]


async def test_a_replica_that_joins_before_the_first_sync_has_its_files_version(scene: Build) -> None:
    one = scene(FakeReplica(), version=5)
    successor = FakeReplica()
    await one.sync.join("r0", successor)
    assert (successor.calls, one.versions) == ([], [5])
    assert one.queue.events[-1] == ("back", "r0")
    await one.publish(6)


async def test_a_successor_that_takes_no_weights_ends_the_run_only_if_no_engine_works(scene: Build) -> None:
    one = scene(FakeReplica(), FakeReplica())
    await one.publish(1)
    await one.sync.join("r1", FakeReplica(*REFUSES))
    assert one.fenced == ["r1"]
    with pytest.raises(SyncFailed):
        await one.sync.join("r0", FakeReplica(*REFUSES))


# -- trainers, queues and synchronizers that die ----------------------------------------------------------------------


async def test_weights_that_died_with_their_trainer_change_nothing_until_its_successor_sends_them(
    scene: Build, caplog: pytest.LogCaptureFixture
) -> None:
    quick, late = FakeReplica(), FakeReplica(None, WeightsGone("owner died"))
    one = scene(quick, late, max_retries=0)
    await one.publish(1)
    await one.submit(2)
    await one.until(lambda: "version 2 is gone with its trainer" in caplog.text)
    await one.until(lambda: one.sync.state == "idle")
    assert not one.running.done()
    assert one.queue.events == [("published", 1)] and one.versions == [2, 1]
    await one.publish(2)
    assert (quick.calls, late.calls) == ([1, 2, 2], [1, 2, 2])


async def test_an_older_version_than_the_published_one_is_ignored(scene: Build) -> None:
    replica = FakeReplica()
    one = scene(replica, version=5)
    await one.submit(4)
    await one.publish(6)
    await one.submit(3)
    await one.submit(6)
    await one.until(lambda: len(replica.calls) == 2)
    assert replica.calls == [6, 6]


async def test_the_weights_a_trainer_starts_with_reach_only_engines_that_need_them(scene: Build) -> None:
    replica, successor = FakeReplica(), FakeReplica()
    one = scene(replica, version=3)
    await one.prime(2)
    await one.prime(3)
    await asyncio.sleep(0.01)
    assert replica.calls == []
    await one.sync.join("r0", successor)
    await one.prime(2)
    assert successor.calls == [3]
    await one.prime(4)  # the trainer's predecessor had saved it and died before the engines had it
    await one.published(4)
    assert successor.calls == [3, 4]


async def test_a_replica_that_joins_after_the_trainer_died_waits_for_its_successor(scene: Build) -> None:
    one = scene(FakeReplica())
    await one.publish(1)
    later = FakeReplica()
    for joins in (FakeReplica(WeightsGone("owner died")), later):
        await one.sync.join("r0", joins)
        assert one.fenced == ["r0"]
    assert later.calls == [] and not one.running.done(), "its files are of version 0"
    await one.prime(1)
    await one.until(lambda: one.fenced == [])
    assert later.calls == [1]


async def test_a_restarted_queue_learns_what_is_published_and_fenced(scene: Build) -> None:
    one = scene(FakeReplica(), FakeReplica(*REFUSES))
    await one.publish(1)
    one.queue.events.clear()
    await one.sync.announce()
    assert one.queue.events == [("back", "r0"), ("fenced", "r1"), ("published", 1)]


async def test_a_restarted_synchronizer_knows_what_each_engine_holds(scene: Build) -> None:
    ahead, behind, unknown = FakeReplica(), FakeReplica(), FakeReplica()
    one = scene(ahead, behind, unknown, version=4, versions={"r0": 5, "r1": 3})
    await one.sync.announce()
    assert one.queue.events == [("back", "r0"), ("fenced", "r1"), ("fenced", "r2"), ("published", 4)]
    joins = FakeReplica()
    await one.sync.join("r2", joins)
    assert one.fenced == ["r1", "r2"] and not joins.calls, "nobody knows the version of the files it started from"
    await one.prime(4)
    await one.until(lambda: one.fenced == [])
    assert (ahead.calls, behind.calls, joins.calls) == ([], [4], [4]), "no engine goes back"
    await one.publish(5)
    assert one.versions == [5, 5, 5]


# -- reports ----------------------------------------------------------------------------------------------------------


async def test_a_sync_has_a_row_with_the_attempts_of_each_engine(scene: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freewheel.sync.synchronizer.ROWS_KEPT", 3)
    now = [0.0]

    class Slow(FakeReplica):
        async def load_weights(self, version: int, weights: Any, *, verify: bool) -> int | None:
            now[0] += version
            return await super().load_weights(version, weights, verify=verify)

    one = scene(Slow(), FakeReplica(ConnectionError("reset"), 99), clock=lambda: now[0])
    await one.sync.submit(1, "weights 1", CHECKSUM, 4096)
    await one.published(1)
    (row,) = one.sync.drain_rows()
    assert (row["version"], row["bytes"], row["failed"], row["took_s"]) == (1, 4096, False, 1.0)
    assert row["engines"] == {
        "r0": {"took_s": 1.0, "attempts": 1, "error": ""},
        "r1": {"took_s": 1.0, "attempts": 3, "error": "it holds other weights"},
    }
    await one.publish(2, 3, 4, 6)
    rows = one.sync.drain_rows()
    assert [row["version"] for row in rows] == [3, 4, 6], "only the newest are kept"
    assert rows[0]["bytes"] is None and rows[0]["engines"]["r1"]["attempts"] == 1
    assert one.sync.drain_rows() == []
    stats = one.sync.stats()
    assert (stats["last_sync_s"], stats["mean_sync_s"], stats["longest_sync_s"]) == (6.0, 3.2, 6.0)


@pytest.mark.parametrize(
    ("script", "others", "failed", "attempts", "error"),
    [
        ([ReplicaGone("killed")], 1, False, 1, "killed"),
        ([WeightsGone("with its trainer")], 0, True, 1, "with its trainer"),
        (REFUSES, 0, True, 3, "OSError: no route"),
    ],
    ids=["an engine died", "the trainer died", "the run ends"],
)
async def test_a_sync_has_a_row_however_it_ends(
    scene: Build, script: list[Exception], others: int, failed: bool, attempts: int, error: str
) -> None:
    one = scene(FakeReplica(*script), *(FakeReplica() for _ in range(others)))
    await one.submit(1)
    rows: list[dict[str, Any]] = []
    await one.until(lambda: rows.extend(one.sync.drain_rows()) or bool(rows))
    engine = rows[0]["engines"]["r0"]
    assert (rows[0]["version"], rows[0]["failed"], engine["attempts"], engine["error"]) == (1, failed, attempts, error)
