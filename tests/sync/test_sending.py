"""An engine in another process asks the trainer for a version, and has it; what goes wrong once goes well again.

By gloo, with real processes; an engine's workers are one process here."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from freewheel.sync import broadcast
from freewheel.sync.broadcast import SentWeights, TorchGroup, WeightServer, packer_for, receive
from freewheel.sync.device import DevicePacker
from freewheel.sync.weights import WeightsGone, content_sum, pack

from .staged import Staged

WAIT_S = 100.0
SPAWN = multiprocessing.get_context("spawn")


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((30, 4), float(version)), "b": torch.arange(7) * version, "c": torch.ones(3).bfloat16()}


def engine(pipe: Connection, name: str) -> None:
    """Takes pickled weights from the pipe, and answers with what it has then. `fails`: in the middle of a version."""
    torch.set_num_threads(1)
    group: Any = None
    staged: Any = None
    for sent, fails in iter(pipe.recv, None):
        weights = pickle.loads(sent)
        try:
            with weights.sending(name, 1) as told:
                if told["port"]:
                    group = TorchGroup(
                        told["kind"], address=told["address"], port=told["port"], rank=1, size=2, timeout_s=WAIT_S
                    )
                    staged = staged or Staged(device=group.device, version=0)
                if fails:
                    group = None
                    raise ValueError("the engine refused it")
                receive(group, staged)
            pipe.send((content_sum(staged.tensors.values()), bool(told["port"])))
        except Exception as error:  # noqa: BLE001  # it is the test's
            pipe.send(type(error).__name__)


class Engine:
    def __init__(self, name: str) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=engine, args=(theirs, name), daemon=True)
        self.process.start()

    def take(self, weights: Any, *, fails: bool = False) -> Any:
        self.pipe.send((pickle.dumps(weights), fails))
        assert self.pipe.poll(WAIT_S)
        return self.pipe.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def engines() -> Iterator[Callable[[str], Engine]]:
    made: list[Engine] = []

    def build(name: str) -> Engine:
        made.append(Engine(name))
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
    return DevicePacker(bucket_bytes=100, travels_as=server.offer)


def test_each_engine_has_every_version_through_its_own_group_and_a_failure_costs_one_attempt(
    packer: DevicePacker, server: WeightServer, engines: Callable[[str], Engine]
) -> None:
    one, other = engines("one"), engines("other")
    first, second = packer(weights_of(1)), packer(weights_of(2))
    assert one.take(first) == (first.checksum, True)
    assert other.take(second) == (second.checksum, True)
    assert one.take(second) == (second.checksum, False), "they have met"
    third = packer(weights_of(3))
    assert one.take(third, fails=True) == "ValueError"
    assert other.take(third) == (third.checksum, False), "another engine's failure is not its own"
    assert one.take(third) == (third.checksum, True), "the group was out of step, so another was created"
    one.close()
    assert engines("one").take(third) == (third.checksum, True), "the successor has another group"
    assert len(server._groups) == 2


def trainer(pipe: Connection) -> None:
    """Offers a version; ends when it is asked for it, in the middle of sending."""
    torch.set_num_threads(1)
    packer = DevicePacker(bucket_bytes=100, travels_as=WeightServer(host="127.0.0.1").offer)
    held = packer(weights_of(1))
    broadcast.send = lambda *given: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    pipe.send(pickle.dumps(held))
    pipe.recv()


def test_a_trainer_that_dies_while_it_sends_takes_its_weights_with_it(engines: Callable[[str], Engine]) -> None:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=trainer, args=(there,), daemon=True)
    process.start()
    assert here.poll(WAIT_S)
    one = engines("one")
    one.pipe.send((here.recv(), False))
    assert one.pipe.poll(WAIT_S)
    assert one.pipe.recv() == "WeightsGone"


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
