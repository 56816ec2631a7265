"""The trainer holds what engines may still read, and nothing else; and its loop does not stand still for a copy."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from freewheel.runtime import remote
from freewheel.runtime.remote import RemotePublisher
from freewheel.sync.device import DevicePacker
from freewheel.sync.weights import AnyWeights, pack


class FakePeers:
    """A synchronizer that says of each version which others are in use."""

    def __init__(self, answers: list[list[int] | None]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, int, int | None]] = []

    async def call(self, name: str, method: str, *args: Any, **kwargs: Any) -> list[int] | None:
        version, _, checksum, *_ = args
        self.calls.append((method, version, checksum))
        return self.answers.pop(0)


@pytest.fixture(autouse=True)
def put(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Ray's, by thread."""
    threads: list[threading.Thread] = []

    def fake(weights: AnyWeights) -> str:
        threads.append(threading.current_thread())
        return "reference"

    monkeypatch.setattr(remote.ray, "put", fake)
    return threads


def publisher_of(*answers: list[int] | None) -> tuple[RemotePublisher, FakePeers]:
    peers = FakePeers(list(answers))
    return RemotePublisher(peers), peers  # type: ignore[arg-type]


def packed(packer: DevicePacker, version: int) -> AnyWeights:
    return packer({"w": torch.full((3,), float(version))})


async def test_memory_of_what_is_not_in_use_any_more_is_used_again() -> None:
    packer = DevicePacker(bucket_bytes=100, share=lambda buffer: {})
    publisher, peers = publisher_of([0], [0, 1], [0, 1, 2], [2, 3], [4], [5])
    await publisher.prime(0, packed(packer, 0))
    slots = []
    for version in range(1, 6):
        weights = packed(packer, version)
        await publisher.submit(version, weights)
        checksum = weights.checksum
        del weights
        slots.append(packer.slots)
    assert slots == [2, 3, 4, 4, 4]
    assert peers.calls[0][:2] == ("prime", 0) and peers.calls[-1] == ("submit", 5, checksum)
    assert [version for version, _ in publisher._held] == [5]


async def test_a_successor_that_knows_nothing_makes_nobody_let_go() -> None:
    packer = DevicePacker(bucket_bytes=100, share=lambda buffer: {})
    publisher, peers = publisher_of([1], [1, 2], None, None, [3, 4])
    await publisher.submit(1, packed(packer, 1))
    await publisher.submit(2, packed(packer, 2))
    await publisher.publish_again()
    assert peers.calls[-1] == peers.calls[-2]
    await publisher.submit(3, packed(packer, 3))
    assert [version for version, _ in publisher._held] == [1, 2, 3], "an engine may read what the one before began"
    await publisher.submit(4, packed(packer, 4))
    assert [version for version, _ in publisher._held] == [3, 4]


async def test_weights_on_the_host_are_rays_to_hold(put: list[threading.Thread]) -> None:
    publisher, _ = publisher_of([1])
    await publisher.submit(1, pack({"w": torch.ones(1)}))
    assert publisher._held == []
    assert put and put[0] is not threading.main_thread()


async def test_the_loop_answers_while_weights_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, _ = publisher_of([1])
    copying, done = threading.Event(), threading.Event()

    def slow(weights: AnyWeights) -> str:
        copying.set()
        assert done.wait(30)
        return "reference"

    monkeypatch.setattr(remote.ray, "put", slow)
    sending = asyncio.create_task(publisher.submit(1, pack({"w": torch.ones(1)})))
    await asyncio.to_thread(copying.wait, 30)
    assert not sending.done()
    done.set()
    await asyncio.wait_for(sending, 30)
