"""A call reaches whoever has a name now: also across the death of the one that was called. Without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from freewheel.runtime import remote as module
from freewheel.runtime.remote import ActorDirectory, NoAnswer, call, is_death, remote_queue, unwrap

from .standins import WAIT_S, Handle, Mortal, until

pytestmark = pytest.mark.timeout(60)


class Peer(Mortal):
    """Says its name; `raises` first, one after the other, where it has any."""

    def __init__(self, name: str = "", *raises: Exception) -> None:
        super().__init__()
        self.name = name
        self.raises = list(raises)
        self.asked = 0

    async def say(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.asked += 1
        if self.raises:
            raise self.raises.pop(0)
        return (self.name, *args, *kwargs.items())

    async def hangs(self) -> None:
        self.asked += 1
        await asyncio.sleep(WAIT_S)

    async def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        return method, args, kwargs


def knowing(**known: Peer) -> ActorDirectory:
    peers = ActorDirectory()
    peers.update({name: Handle(peer) for name, peer in known.items()})
    return peers


def nested_death() -> Exception:
    """What is raised by a call whose callee met with the death of a third."""
    return RayTaskError("say", "Traceback …", ActorDiedError()).as_instanceof_cause()


async def test_a_time_out_of_the_peers_own_is_not_its_silence() -> None:
    peer = Peer("", TimeoutError("a tool took too long"))
    with pytest.raises(TimeoutError, match="a tool took too long"):
        await call(Handle(peer), "say")
    with pytest.raises(NoAnswer, match=r"hangs gave no answer within 0\.01 s"):
        await call(Handle(peer), "hangs", deadline_s=0.01)


async def test_an_answer_is_that_of_the_one_who_has_the_name() -> None:
    assert await knowing(queue=Peer("first")).call("queue", "say", 1, more=2) == ("first", 1, ("more", 2))


async def test_a_call_to_a_dead_peer_goes_to_its_successor() -> None:
    first, second = Peer("first"), Peer("second")
    peers = knowing(queue=first)
    first.die()
    asked = asyncio.ensure_future(peers.call("queue", "say"))
    await asyncio.sleep(0.01)
    assert not asked.done()
    peers.update({"sync": Handle(Peer("another"))})  # not the one that is waited for
    await asyncio.sleep(0.01)
    assert not asked.done()
    peers.update({"queue": Handle(second)})
    assert await asked == ("second",)


async def test_a_peer_that_dies_while_it_is_asked_is_dead() -> None:
    first = Peer("first")
    peers = knowing(queue=first)
    asked = asyncio.ensure_future(peers.call("queue", "hangs"))
    await until(lambda: first.asked)
    first.die()

    class Second(Peer):
        async def hangs(self) -> None:
            return

    peers.update({"queue": Handle(Second())})
    assert await asked is None


async def test_one_that_is_not_met_yet_is_waited_for() -> None:
    peers = ActorDirectory()
    asked = asyncio.ensure_future(peers.call("queue", "say"))
    await asyncio.sleep(0.01)
    assert not asked.done()
    peers.update({"queue": Handle(Peer("at last"))})
    assert await asked == ("at last",)


async def test_one_that_is_never_met_is_silent_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECOVERY_S", 0.02)
    with pytest.raises(NoAnswer, match=r"queue was not there for say within 0\.03 s"):
        await ActorDirectory().call("queue", "say", deadline_s=0.01)


async def test_the_death_of_a_third_that_a_peer_met_with_is_raised_and_nobody_is_asked_again() -> None:
    peer = Peer("", nested_death())
    with pytest.raises(ActorDiedError):
        await knowing(queue=peer).call("queue", "say")
    assert peer.asked == 1


async def test_what_a_peer_raises_is_raised_and_nobody_is_asked_again() -> None:
    peer = Peer("", ValueError("no such step"))
    with pytest.raises(ValueError, match="no such step"):
        await knowing(queue=peer).call("queue", "say")
    assert peer.asked == 1


async def test_a_silent_peer_is_asked_again_and_its_successor_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    first = Peer("first")
    peers = knowing(queue=first)

    async def hangs() -> str:
        return "second"

    asked = asyncio.ensure_future(peers.call("queue", "hangs", deadline_s=0.01))
    await until(lambda: first.asked >= 2)
    second = Peer("second")
    monkeypatch.setattr(second, "hangs", hangs)
    peers.update({"queue": Handle(second)})
    assert await asked == "second"


async def test_a_peer_that_was_out_of_reach_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    away = ActorUnavailableError("the network", b"0" * 16)
    peer = Peer("back", away, away)
    assert await knowing(queue=peer).call("queue", "say") == ("back",)
    assert peer.asked == 3


async def test_where_no_successor_comes_in_time_the_last_try_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECOVERY_S", 0.05)
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    dead = Peer()
    dead.die()
    peers = knowing(queue=dead, sync=Peer())
    with pytest.raises(ActorDiedError):
        await peers.call("queue", "say", deadline_s=0.01)
    with pytest.raises(NoAnswer, match="hangs gave no answer"):
        await peers.call("sync", "hangs", deadline_s=0.01)


async def test_a_queue_is_called_through_its_name_with_the_callers_patience() -> None:
    queue = remote_queue(knowing(queue=Peer()))
    assert await queue.take(3, wait_s=2.0) == ("take", (3,), {"wait_s": 2.0})


def test_only_the_death_of_the_called_one_itself_is_its_death() -> None:
    assert is_death(ActorDiedError())
    assert not is_death(nested_death())
    assert not is_death(NoAnswer("it did not answer"))


def test_an_error_comes_out_of_rays_wrapping() -> None:
    error = ValueError("no finite loss")
    assert unwrap(RayTaskError("run", "Traceback …", error).as_instanceof_cause()) is error
    assert unwrap(error) is error
