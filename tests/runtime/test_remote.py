"""Calls reach whoever has a name now, also after the death of the called actor. Without Ray."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from freewheel.queue.client import QueueClient
from freewheel.queue.message_queue import MessageQueue
from freewheel.runtime import remote
from freewheel.runtime.remote import ActorDirectory, NoAnswer, RemotePublisher, call, is_death, remote_queue, unwrap
from freewheel.sync.device import DevicePacker
from freewheel.sync.weights import AnyWeights, pack

from .standins import WAIT_S, Handle, Mortal, until

pytestmark = pytest.mark.timeout(60)


class Actor(Mortal):
    """Answers with its name, after raising `errors` one after the other."""

    def __init__(self, name: str = "", *errors: Exception) -> None:
        super().__init__()
        self.name = name
        self.errors = list(errors)
        self.calls = 0

    async def answer(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return (self.name, *args, *kwargs.items())

    async def hang(self) -> None:
        self.calls += 1
        await asyncio.sleep(WAIT_S)

    async def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        return method, args, kwargs


def directory(**actors: Actor) -> ActorDirectory:
    made = ActorDirectory()
    made.update({name: Handle(actor) for name, actor in actors.items()})
    return made


def death_of_a_third_actor() -> Exception:
    return RayTaskError("answer", "Traceback …", ActorDiedError()).as_instanceof_cause()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.001)


async def test_a_call_reaches_the_actor_of_that_name_and_waits_for_one_that_is_dead_or_missing() -> None:
    assert await directory(queue=Actor("first")).call("queue", "answer", 1, more=2) == ("first", 1, ("more", 2))
    first = Actor("first")
    first.die()
    for actors in (directory(queue=first), ActorDirectory()):
        calling = asyncio.ensure_future(actors.call("queue", "answer"))
        await asyncio.sleep(0.01)
        actors.update({"sync": Handle(Actor("another"))})
        await asyncio.sleep(0.01)
        assert not calling.done()
        actors.update({"queue": Handle(Actor("second"))})
        assert await calling == ("second",)


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "is silent"])
async def test_a_call_in_progress_is_repeated_to_the_successor(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Actor("first"), Actor("second")
    monkeypatch.setattr(second, "hang", second.answer)
    actors = directory(queue=first)
    calling = asyncio.ensure_future(actors.call("queue", "hang", deadline_s=WAIT_S if dies else 0.01))
    await until(lambda: first.calls >= (1 if dies else 2))
    if dies:
        first.die()
    actors.update({"queue": Handle(second)})
    assert await calling == ("second",)


async def test_an_actor_is_called_again_if_it_cannot_be_reached_and_not_if_it_raises() -> None:
    away = ActorUnavailableError("the network", b"0" * 16)
    actor = Actor("back", away, away)
    assert await directory(queue=actor).call("queue", "answer") == ("back",)
    assert actor.calls == 3
    for error in (death_of_a_third_actor(), ValueError("no such step"), TimeoutError("a tool took too long")):
        actor = Actor("", error)
        with pytest.raises(type(error)):
            await directory(queue=actor).call("queue", "answer")
        assert actor.calls == 1
    with pytest.raises(NoAnswer, match=r"hang gave no answer within 0\.01 s"):
        await call(Handle(actor), "hang", deadline_s=0.01)


async def test_without_a_successor_the_last_error_is_raised_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RECOVERY_S", 0.02)
    dead = Actor()
    dead.die()
    actors = directory(queue=dead, sync=Actor())
    with pytest.raises(ActorDiedError):
        await actors.call("queue", "answer", deadline_s=0.01)
    with pytest.raises(NoAnswer, match="hang gave no answer"):
        await actors.call("sync", "hang", deadline_s=0.01)
    with pytest.raises(NoAnswer, match=r"trainer was not there for answer within 0\.03 s"):
        await actors.call("trainer", "answer", deadline_s=0.01)


async def test_the_queues_client_sends_every_method_with_the_callers_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = []
    actors = directory(queue=Actor())
    inner = actors.call

    async def note_deadline(*args: Any, deadline_s: float) -> Any:
        deadlines.append(deadline_s)
        return await inner(*args, deadline_s=deadline_s)

    monkeypatch.setattr(actors, "call", note_deadline)
    queue: Any = remote_queue(actors)
    assert await queue.take(3, wait_s=2.0) == ("take", (3,), {"wait_s": 2.0})
    assert await actors.ask("queue", "begin", 3, deadline_s=5.0) == ("begin", (3,), {})
    assert deadlines == [remote.CALL_S + 2.0, 5.0]
    for name in [name for name in vars(QueueClient) if not name.startswith("_")]:
        wanted = inspect.signature(getattr(MessageQueue, name)).parameters
        given: dict[str, Any] = {key: key for key, one in wanted.items() if key != "self" and one.default is one.empty}
        given |= {"wait_s": 1.5} if "wait_s" in given else {}
        method, args, kwargs = await getattr(queue, name)(**given)
        sent = inspect.signature(getattr(MessageQueue, method)).bind(None, *args, **kwargs).arguments
        assert (method, {**sent, "self": "self"}) == (name, {**given, "self": "self"})


def test_only_the_called_actors_own_death_counts_and_errors_are_unwrapped() -> None:
    assert is_death(ActorDiedError())
    assert not is_death(death_of_a_third_actor())
    assert not is_death(NoAnswer("it did not answer"))
    error = ValueError("no finite loss")
    assert unwrap(RayTaskError("run", "Traceback …", error).as_instanceof_cause()) is error
    assert unwrap(error) is error


# -- the publisher ----------------------------------------------------------------------------------------------------


class FakeSynchronizer:
    """Answers each version with the versions in use."""

    def __init__(self, answers: list[list[int] | None]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, int, int | None]] = []

    async def ask(self, _: str, method: str, version: int, __: Any, checksum: int | None, *___: Any) -> Any:
        self.calls.append((method, version, checksum))
        return self.answers.pop(0)


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Replaces `ray.put`, and returns the threads that called it."""
    threads: list[threading.Thread] = []

    def fake(weights: AnyWeights) -> str:
        threads.append(threading.current_thread())
        return "reference"

    monkeypatch.setattr(remote.ray, "put", fake)
    return threads


def publisher_with(*answers: list[int] | None) -> tuple[RemotePublisher, FakeSynchronizer]:
    synchronizer = FakeSynchronizer(list(answers))
    return RemotePublisher(synchronizer), synchronizer  # type: ignore[arg-type]


def packed(packer: DevicePacker, version: int) -> AnyWeights:
    return packer({"w": torch.full((3,), float(version))})


async def test_memory_of_weights_that_are_no_longer_in_use_is_reused(put: list[threading.Thread]) -> None:
    packer = DevicePacker(bucket_bytes=100, share=lambda buffer: {})
    publisher, synchronizer = publisher_with([0], [0, 1], [0, 1, 2], [2, 3], [4], [5])
    await publisher.prime(0, packed(packer, 0))
    slots = []
    for version in range(1, 6):
        weights = packed(packer, version)
        await publisher.submit(version, weights)
        checksum = weights.checksum
        del weights
        slots.append(len(packer._slots))
    assert slots == [2, 3, 4, 4, 4]
    assert synchronizer.calls[0][:2] == ("prime", 0) and synchronizer.calls[-1] == ("submit", 5, checksum)
    assert [version for version, _ in publisher._held] == [5]


async def test_a_restarted_synchronizer_that_knows_no_versions_frees_none(put: list[threading.Thread]) -> None:
    packer = DevicePacker(bucket_bytes=100, share=lambda buffer: {})
    publisher, synchronizer = publisher_with([1], [1, 2], None, None, [3, 4])
    await publisher.submit(1, packed(packer, 1))
    await publisher.submit(2, packed(packer, 2))
    await publisher.publish_again()
    assert synchronizer.calls[-1] == synchronizer.calls[-2]
    await publisher.submit(3, packed(packer, 3))
    assert [version for version, _ in publisher._held] == [1, 2, 3], "an engine may still read the earlier ones"
    await publisher.submit(4, packed(packer, 4))
    assert [version for version, _ in publisher._held] == [3, 4]


async def test_weights_on_the_host_are_not_held_here_and_are_copied_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, put: list[threading.Thread]
) -> None:
    publisher, _ = publisher_with([1], [2])
    await publisher.submit(1, pack({"w": torch.ones(1)}))
    assert publisher._held == []
    assert put and put[0] is not threading.main_thread()
    copying, done = threading.Event(), threading.Event()

    def slow(weights: AnyWeights) -> str:
        copying.set()
        assert done.wait(30)
        return "reference"

    monkeypatch.setattr(remote.ray, "put", slow)
    sending = asyncio.create_task(publisher.submit(2, pack({"w": torch.ones(1)})))
    await asyncio.to_thread(copying.wait, 30)
    assert not sending.done()
    done.set()
    await asyncio.wait_for(sending, 30)
