"""Weights by broadcast between real processes: whole versions or none, and a failure costs one attempt.

The groups are gloo's; NCCL's differ in nothing that this protocol sees. An engine's workers are one process here."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.sync import broadcast
from freewheel.sync.broadcast import (
    GroupBroken,
    Header,
    SentWeights,
    TorchGroup,
    WeightServer,
    packer_for,
    receive,
    send,
)
from freewheel.sync.device import DevicePacker
from freewheel.sync.weights import Entry, WeightsGone, bucket_sizes, in_buckets, pack, sum_of_buckets, views

WAIT_S = 100.0
SPAWN = multiprocessing.get_context("spawn")


def weights_of(version: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(40, 8, generator=made),
        "norm": torch.randn(8, generator=made).bfloat16(),
        "mask": torch.randint(0, 2, (5,), generator=made).bool(),
        "head": torch.randn(8, 40, generator=made),
    }


def in_buffers(version: int, bucket_bytes: int, device: str = "cpu") -> tuple[dict[str, Entry], list[Tensor]]:
    tensors = weights_of(version)
    entries = in_buckets(tensors, bucket_bytes)
    buffers = [torch.empty(one, dtype=torch.uint8, device=device) for one in bucket_sizes(entries)]
    for name, target in views(entries, buffers).items():
        target.copy_(tensors[name])
    return entries, buffers


class Staged:
    """A `Receiver` with room for a second model: a version is complete before any of it is used."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.tensors: dict[str, Tensor] = {}
        """Those of `version`."""
        self._arrived: list[Tensor] = []

    def wants(self, header: Header) -> bool:
        self._arrived = []
        return header.version > self.version

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def bucket(self, entries: Mapping[str, Entry], buffer: Tensor) -> None:
        self._arrived.append(buffer)

    def whole(self, header: Header) -> bool:
        return sum_of_buckets(header.entries, self._arrived) == header.checksum

    def take(self, header: Header) -> None:
        self.tensors = views(header.entries, self._arrived)
        self.version = header.version


def equals(found: Mapping[str, Tensor], version: int) -> bool:
    return all(torch.equal(found[name], one) for name, one in weights_of(version).items())


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Process:
    """A process that answers what it receives from a pipe."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()  # the pipe ends with the process

    def answer(self) -> Any:
        assert self.pipe.poll(WAIT_S), "no answer"
        try:
            return self.pipe.recv()
        except EOFError:
            return "died"

    def ask(self, question: Any) -> Any:
        self.pipe.send(question)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.join()


# -- a group ----------------------------------------------------------------------------------------------------------


class Dies:
    """A group whose process ends at its n-th broadcast, as if killed."""

    def __init__(self, group: TorchGroup, left: int) -> None:
        self.device = group.device
        self.agree = group.agree
        self._group, self._left = group, left

    def broadcast(self, tensor: Tensor) -> None:
        if not self._left:
            os._exit(9)
        self._left -= 1
        self._group.broadcast(tensor)


def run_sender(pipe: Connection, port: int, size: int) -> None:
    torch.set_num_threads(1)
    group = TorchGroup("gloo", address="127.0.0.1", port=port, rank=0, size=size, timeout_s=WAIT_S)
    for version, bucket_bytes, dies_at, spoils in iter(pipe.recv, None):
        entries, buffers = in_buffers(version, bucket_bytes)
        checksum = sum_of_buckets(entries, buffers)
        if spoils:
            buffers[-1][0] ^= 1
        to: Any = group if dies_at is None else Dies(group, dies_at)
        try:
            send(to, version, checksum, entries, buffers)
            pipe.send(None)
        except Exception as error:  # noqa: BLE001  # the test expects it
            pipe.send(type(error).__name__)


def run_receiver(pipe: Connection, port: int, size: int, rank: int) -> None:
    """Receives a version, or holds the one it is sent."""
    torch.set_num_threads(1)
    group = TorchGroup("gloo", address="127.0.0.1", port=port, rank=rank, size=size, timeout_s=WAIT_S)
    staged = Staged()
    for question in iter(pipe.recv, None):
        if isinstance(question, int):
            staged = Staged(question)
            continue
        error = None
        try:
            receive(group, staged)
        except Exception as raised:  # noqa: BLE001  # the test expects it
            error = type(raised).__name__
        pipe.send((error, staged.version, equals(staged.tensors, staged.version) if staged.tensors else None))


class World:
    """A sender and receivers, each a process."""

    def __init__(self, receivers: int) -> None:
        port, size = free_port(), 1 + receivers
        self.sender = Process(run_sender, port, size)
        self.receivers = [Process(run_receiver, port, size, rank) for rank in range(1, size)]

    def hold(self, *versions: int) -> World:
        for receiver, version in zip(self.receivers, versions, strict=True):
            receiver.pipe.send(version)
        return self

    def broadcast(
        self, version: int, *, bucket_bytes: int = 1 << 20, dies_at: int | None = None, spoils: bool = False
    ) -> tuple[Any, list[Any]]:
        """Return the sender's error, and the error, version and intactness of each receiver."""
        self.sender.pipe.send((version, bucket_bytes, dies_at, spoils))
        for receiver in self.receivers:
            receiver.pipe.send("receive")
        return self.sender.answer(), [receiver.answer() for receiver in self.receivers]

    def close(self) -> None:
        for process in (self.sender, *self.receivers):
            process.close()


def test_every_receiver_uses_every_complete_version_and_no_other() -> None:
    world = World(2)
    try:
        for version, bucket_bytes in [(1, 1 << 20), (2, 1), (5, 1300)]:
            assert world.broadcast(version, bucket_bytes=bucket_bytes) == (None, [(None, version, True)] * 2)
        assert world.broadcast(6, spoils=True) == ("VersionSpoiled", [("VersionSpoiled", 5, True)] * 2)
        for held, refused in (((3, 3), 3), ((3, 3), 2), ((0, 7), 5)):
            answers = [("VersionRefused", one, None) for one in held]
            assert world.hold(*held).broadcast(refused) == ("VersionRefused", answers)
        assert world.broadcast(8) == (None, [(None, 8, True)] * 2)
        header_and_a_bucket = 3  # broadcasts
        answer = world.broadcast(9, bucket_bytes=1300, dies_at=header_and_a_bucket)
        assert answer == ("died", [("GroupBroken", 8, True)] * 2)
    finally:
        world.close()


def test_a_group_that_nobody_joins_is_given_up() -> None:
    with pytest.raises(GroupBroken, match="no group of 2"):
        TorchGroup("gloo", address="127.0.0.1", port=free_port(), rank=1, size=2, timeout_s=0.2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_group_of_nccl_has_the_same_calls() -> None:
    """One GPU makes a group of one."""
    group = TorchGroup("nccl", address="127.0.0.1", port=free_port(), rank=0, size=1, timeout_s=WAIT_S)
    entries, buffers = in_buffers(1, 1300, "cuda")
    send(group, 1, sum_of_buckets(entries, buffers), entries, buffers)
    assert group.agree(True) and not group.agree(False)
    assert equals({name: one.cpu() for name, one in views(entries, buffers).items()}, 1)
    group.close()


# -- weights on request -----------------------------------------------------------------------------------------------


def run_engine(pipe: Connection, name: str) -> None:
    """Receives pickled weights. Answers with their version if they are intact, and whether it joined a new group.
    `fails`: an error before or after it receives a version, which ends its group."""
    torch.set_num_threads(1)
    group: Any = None
    for sent, version, fails in iter(pipe.recv, None):
        try:
            staged = Staged()
            with pickle.loads(sent).sending(name, 1) as meeting:
                if meeting["port"]:
                    place = {"address": meeting["address"], "port": meeting["port"], "size": meeting["size"]}
                    group = TorchGroup(meeting["kind"], **place, rank=1, timeout_s=WAIT_S)
                if fails != "before":
                    receive(group, staged)
                if fails:
                    group = None
                    raise ValueError("the engine refused it")
            pipe.send((version if equals(staged.tensors, version) else None, bool(meeting["port"])))
        except Exception as error:  # noqa: BLE001  # the test expects it
            pipe.send(type(error).__name__)


@pytest.fixture
def engines() -> Iterator[Callable[[str], Process]]:
    made: list[Process] = []

    def build(name: str) -> Process:
        made.append(Process(run_engine, name))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.fixture
def server() -> Iterator[WeightServer]:
    one = WeightServer(host="127.0.0.1")
    yield one
    one.close()


@pytest.fixture
def packer(server: WeightServer) -> DevicePacker:
    return DevicePacker(bucket_bytes=1300, travels_as=server.offer)


def test_each_engine_receives_every_version_in_its_own_group_and_a_failure_costs_one_attempt(
    packer: DevicePacker, server: WeightServer, engines: Callable[[str], Process]
) -> None:
    one, other = engines("one"), engines("other")
    held = [packer(weights_of(version)) for version in range(4)]

    def ask(engine: Process, version: int, *, fails: str = "") -> Any:
        return engine.ask((pickle.dumps(held[version]), version, fails))

    assert ask(one, 1) == (1, True) and ask(other, 2) == (2, True)
    assert ask(one, 2) == (2, False), "the group exists"
    assert ask(one, 3, fails="before") == "ValueError"
    assert ask(other, 3) == (3, False), "another engine's failure changes nothing"
    assert ask(one, 3) == (3, True), "the group was out of step, so another was created"
    assert ask(one, 2, fails="after") == "ValueError"
    assert ask(one, 3) == (3, True), "also if the trainer had sent everything"
    one.close()
    assert ask(engines("one"), 3) == (3, True), "the successor has another group"
    assert len(server._groups) == 2


def run_dying_trainer(pipe: Connection) -> None:
    """Offers a version, and ends when it should send it."""
    torch.set_num_threads(1)
    packer = DevicePacker(bucket_bytes=100, travels_as=WeightServer(host="127.0.0.1").offer)
    held = packer(weights_of(1))
    broadcast.send = lambda *given: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    pipe.send(pickle.dumps(held))
    pipe.recv()


def test_weights_are_gone_with_a_trainer_that_dies_while_it_sends(engines: Callable[[str], Process]) -> None:
    sent = Process(run_dying_trainer).answer()
    assert engines("one").ask((sent, 1, "")) == "WeightsGone"


def test_weights_that_are_not_held_or_whose_trainer_ended_are_gone(packer: DevicePacker, server: WeightServer) -> None:
    dropped = pickle.loads(pickle.dumps(packer(weights_of(1))))
    assert isinstance(dropped, SentWeights)
    held = packer(weights_of(1))
    sent = pickle.loads(pickle.dumps(held))
    assert sent.checksum == pack(weights_of(1)).checksum and sent.n_bytes == held.n_bytes
    with pytest.raises(WeightsGone, match="not held"), dropped.sending("one", 1):
        pytest.fail("it was entered")
    server.close()
    with pytest.raises(WeightsGone, match="does not answer"), sent.sending("one", 1):
        pytest.fail("it was entered")


WRONG_TOKEN = {"token": "0" * 32, "receiver": "x", "process": "p", "size": 2, "key": 1, "new_group": False}


@pytest.mark.parametrize("line", [b"{}\n", b"nonsense\n", b"[1]\n", b"", json.dumps(WRONG_TOKEN).encode() + b"\n"])
def test_a_stranger_receives_nothing(packer: DevicePacker, server: WeightServer, line: bytes) -> None:
    held = packer(weights_of(1))
    pickle.dumps(held)
    with socket.create_connection((server.address.host, server.address.port), timeout=WAIT_S) as one:
        one.sendall(line)
        one.shutdown(socket.SHUT_WR)
        assert one.recv(100) == b""


def test_the_transport_decides_how_weights_are_copied_and_pickled() -> None:
    assert packer_for("object_store") is pack
    for transport, kind in (("ipc", "DeviceWeights"), ("nccl", "SentWeights")):
        packer = packer_for(transport)
        assert isinstance(packer, DevicePacker)
        weights = packer(weights_of(1))
        sent = weights.travels_as(weights) if weights.travels_as else weights
        assert type(sent).__name__ == kind
