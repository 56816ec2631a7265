"""Weights by broadcast, between real processes: whole versions or none, the sender's death included.

The group is gloo's here; NCCL's differs in nothing that this protocol sees."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from freewheel.sync.broadcast import (
    GroupBroken,
    TorchGroup,
    receive,
    send,
)
from freewheel.sync.weights import bucket_sizes, in_buckets, sum_of_buckets, views

from .staged import Staged

WAIT_S = 100.0
SPAWN = multiprocessing.get_context("spawn")


def weights_of(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(40, 8, generator=made),
        "norm": torch.randn(8, generator=made).bfloat16(),
        "mask": torch.randint(0, 2, (5,), generator=made).bool(),
        "head": torch.randn(8, 40, generator=made),
    }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Dies:
    """A group whose process ends at its n-th broadcast, as if killed."""

    def __init__(self, group: TorchGroup, left: int) -> None:
        self.device = group.device
        self.agreed = group.agreed
        self._group, self._left = group, left

    def broadcast(self, tensor: torch.Tensor) -> None:
        if not self._left:
            os._exit(9)
        self._left -= 1
        self._group.broadcast(tensor)


def sending(port: int, size: int, pipe: Connection) -> None:
    """A trainer: does what it is told by pipe, `(version, bucket_bytes, dies_at, spoils)`."""
    torch.set_num_threads(1)
    group = TorchGroup("gloo", address="127.0.0.1", port=port, rank=0, size=size, timeout_s=WAIT_S)
    for version, bucket_bytes, dies_at, spoils in iter(pipe.recv, None):
        tensors = weights_of(version)
        entries = in_buckets(tensors, bucket_bytes)
        buffers = [torch.empty(one, dtype=torch.uint8) for one in bucket_sizes(entries)]
        for name, target in views(entries, buffers).items():
            target.copy_(tensors[name])
        checksum = sum_of_buckets(entries, buffers)
        if spoils:
            buffers[-1][0] ^= 1
        to: Any = group if dies_at is None else Dies(group, dies_at)
        try:
            send(to, version, checksum, entries, buffers)
            pipe.send(None)
        except Exception as error:  # noqa: BLE001  # it is the test's
            pipe.send(type(error).__name__)


def receiving(port: int, rank: int, size: int, pipe: Connection) -> None:
    """An engine: has a version that it is told to have, and receives when it is told to."""
    torch.set_num_threads(1)
    group = TorchGroup("gloo", address="127.0.0.1", port=port, rank=rank, size=size, timeout_s=WAIT_S)
    staged = Staged(device=group.device, version=0)
    for told in iter(pipe.recv, None):
        if isinstance(told, int):
            staged = Staged(device=group.device, version=told)
            continue
        try:
            receive(group, staged)
            error = None
        except Exception as raised:  # noqa: BLE001  # it is the test's
            error = type(raised).__name__
        sound = (
            all(torch.equal(staged.tensors[name], one) for name, one in weights_of(staged.version).items())
            if (staged.tensors)
            else None
        )
        pipe.send((error, staged.version, sound))


class World:
    """A sender and receivers, each a process."""

    def __init__(self, receivers: int) -> None:
        port, size = free_port(), 1 + receivers
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = SPAWN.Pipe()
            if rank == 0:
                process = SPAWN.Process(target=sending, args=(port, size, theirs), daemon=True)
            else:
                process = SPAWN.Process(target=receiving, args=(port, rank, size, theirs), daemon=True)
            process.start()
            theirs.close()  # its end is the process's end
            self.pipes.append(ours)
            self.processes.append(process)

    def at(self, *versions: int) -> World:
        """Receivers hold these, and nothing that can be looked at."""
        for pipe, version in zip(self.pipes[1:], versions, strict=True):
            pipe.send(version)
        return self

    def broadcast(
        self, version: int, *, bucket_bytes: int = 1 << 20, dies_at: int | None = None, spoils: bool = False
    ) -> tuple[Any, list[Any]]:
        """What the sender met with ("died" where it ended), and what each receiver has then."""
        self.pipes[0].send((version, bucket_bytes, dies_at, spoils))
        for pipe in self.pipes[1:]:
            pipe.send("go")
        return self._answer(0), [self._answer(rank) for rank in range(1, len(self.pipes))]

    def _answer(self, rank: int) -> Any:
        try:
            if not self.pipes[rank].poll(WAIT_S):
                raise queue.Empty(f"rank {rank} gave no answer")
            return self.pipes[rank].recv()
        except EOFError:
            return "died"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One for all who leave it alive."""
    one = World(2)
    yield one
    one.close()


def test_every_receiver_has_every_version_bit_for_bit_whatever_the_bucket_size(world: World) -> None:
    world.at(0, 0)
    for version, bucket_bytes in [(1, 1 << 20), (2, 1), (5, 1300)]:
        assert world.broadcast(version, bucket_bytes=bucket_bytes) == (None, [(None, version, True)] * 2)


def test_a_version_that_one_receiver_refuses_is_used_by_none_and_the_next_one_arrives(world: World) -> None:
    for held, refused in (((3, 3), 3), ((3, 3), 2), ((0, 7), 5)):
        answers = [("VersionRefused", one, None) for one in held]
        assert world.at(*held).broadcast(refused) == ("VersionRefused", answers)
    assert world.broadcast(8) == (None, [(None, 8, True)] * 2)


def test_a_version_that_does_not_arrive_as_it_was_sent_is_used_by_nobody(world: World) -> None:
    world.at(0, 0)
    assert world.broadcast(1) == (None, [(None, 1, True)] * 2)
    assert world.broadcast(2, spoils=True) == ("VersionSpoiled", [("VersionSpoiled", 1, True)] * 2)
    assert world.broadcast(3) == (None, [(None, 3, True)] * 2)


BETWEEN_BUCKETS = 3
"""Broadcasts: two of the header, and one bucket."""


def test_a_sender_that_dies_between_two_buckets_leaves_the_version_before() -> None:
    one = World(1)
    try:
        assert one.broadcast(1) == (None, [(None, 1, True)])
        assert one.broadcast(2, bucket_bytes=1300, dies_at=BETWEEN_BUCKETS) == ("died", [("GroupBroken", 1, True)])
    finally:
        one.close()


def test_a_group_that_nobody_joins_is_given_up() -> None:
    with pytest.raises(GroupBroken, match="no group of 2"):
        TorchGroup("gloo", address="127.0.0.1", port=free_port(), rank=1, size=2, timeout_s=0.2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nccls_group_has_the_same_calls() -> None:
    """One GPU makes a group of one."""
    group = TorchGroup("nccl", address="127.0.0.1", port=free_port(), rank=0, size=1, timeout_s=WAIT_S)
    tensors = {name: tensor.to(group.device) for name, tensor in weights_of(1).items()}
    entries = in_buckets(tensors, 1300)
    buffers = [torch.empty(one, dtype=torch.uint8, device=group.device) for one in bucket_sizes(entries)]
    for name, target in views(entries, buffers).items():
        target.copy_(tensors[name])
    send(group, 1, sum_of_buckets(entries, buffers), entries, buffers)
    assert group.agreed(True) and not group.agreed(False)
    assert all(torch.equal(found, tensors[name]) for name, found in views(entries, buffers).items())
    group.close()
