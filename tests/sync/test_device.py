"""Weights on a device: nothing is overwritten that somebody holds, nothing is held for ever, and what came from a
process that is gone is said to be gone. Without a GPU buffers lie on the CPU, and handles name files."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.sync import device
from freewheel.sync.device import DevicePacker, DeviceWeights, Handle, Mappings, Owner
from freewheel.sync.weights import WeightsGone, content_sum, pack


class Files:
    """Buffers that other processes open, without a GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = 0

    def share(self, buffer: Tensor) -> Handle:
        path = self.folder / str(self.made)
        self.made += 1
        path.write_bytes(buffer.numpy().tobytes())
        return {"path": str(path), "bytes": buffer.numel()}


def opened(handle: Handle) -> Tensor:
    return torch.from_numpy(np.fromfile(handle["path"], np.uint8))


def weights_of(value: float) -> dict[str, Tensor]:
    return {"a": torch.full((3, 2), value), "b": torch.full((5,), value, dtype=torch.bfloat16)}


@pytest.fixture
def packer(tmp_path: Path) -> DevicePacker:
    return DevicePacker(bucket_bytes=24, share=Files(tmp_path).share)


def test_a_copy_does_not_follow_its_source_and_has_its_sum(packer: DevicePacker) -> None:
    source = weights_of(1.0)
    packed = packer(source)
    source["a"] += 1
    assert packed.tensors()["a"].tolist() == [[1.0, 1.0]] * 3
    assert packed.checksum == content_sum(weights_of(1.0).values())
    assert packed.n_bytes == 34
    assert [entry.bucket for entry in packed.entries.values()] == [0, 1]


def test_what_somebody_holds_is_not_overwritten(packer: DevicePacker) -> None:
    held = [packer(weights_of(float(version))) for version in range(5)]
    assert len(packer._slots) == 5
    assert [weights.tensors()["b"][0].item() for weights in held] == [0, 1, 2, 3, 4]


def test_memory_that_nobody_holds_is_used_again(packer: DevicePacker) -> None:
    published = packer(weights_of(0.0))
    for version in range(1, 20):
        newest = packer(weights_of(float(version)))
        assert published.tensors()["a"][0, 0].item() == version - 1
        published = newest
    assert len(packer._slots) == 2


def test_a_model_of_another_shape_gets_memory_of_its_own(packer: DevicePacker) -> None:
    packer(weights_of(0.0))
    other = packer({"a": torch.ones(9)})
    assert other.tensors()["a"].tolist() == [1.0] * 9


def test_a_copy_on_the_host_outlives_the_device(packer: DevicePacker) -> None:
    on_host = packer(weights_of(1.0)).on_host()
    packer(weights_of(2.0))
    assert on_host.tensors()["a"][0, 0].item() == 1.0
    assert on_host.checksum == pack(weights_of(1.0)).checksum


def test_handles_are_made_once_a_slot(tmp_path: Path) -> None:
    files = Files(tmp_path)
    packer = DevicePacker(bucket_bytes=24, share=files.share)
    for version in range(5):
        pickle.dumps(packer(weights_of(float(version))))
    assert (len(packer._slots), files.made) == (1, 2)


def arrived(packed: DeviceWeights) -> DeviceWeights:
    sent = pickle.dumps(packed)
    assert len(sent) < 2000, "data does not travel"
    return pickle.loads(sent)


def test_another_process_opens_what_it_was_sent(packer: DevicePacker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "MAPPINGS", Mappings(opened))
    packed = packer(weights_of(3.0))
    found = arrived(packed)
    assert found.checksum == packed.checksum and found.entries == packed.entries
    assert found.tensors()["b"].tolist() == [3.0] * 5
    assert content_sum(found.tensors().values()) == packed.checksum


@contextmanager
def another_process() -> Iterator[Owner]:
    """Lives as long as the context."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner(process.pid, device._started(process.pid))
    assert owner.alive
    yield owner
    process.communicate(b"\n")


def test_memory_stays_open_until_its_owner_changes(tmp_path: Path) -> None:
    calls: list[Any] = []
    mappings = Mappings(lambda handle: calls.append(handle) or torch.zeros(1))  # type: ignore[func-returns-value]
    one = Owner.here()
    with another_process() as other:
        for handle, owner in [("a", one), ("b", one), ("a", one), ("a", other), ("a", other), ("a", one)]:
            mappings.open({"handle": handle}, owner)
    assert [call["handle"] for call in calls] == ["a", "b", "a", "a"]


def dead_owner() -> Owner:
    with another_process() as owner:
        pass
    return owner


def test_memory_of_an_owner_that_ends_is_given_back_before_another_sends_anything() -> None:
    mappings = Mappings(lambda handle: torch.zeros(1))
    with another_process() as owner:
        opened_one = weakref.ref(mappings.open({"handle": "a"}, owner))
        assert opened_one() is not None
    deadline = time.monotonic() + 30
    while opened_one() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert opened_one() is None


def test_weights_of_a_process_that_ended_are_gone(packer: DevicePacker) -> None:
    found = arrived(packer(weights_of(1.0)))
    found.owner = dead_owner()
    with pytest.raises(WeightsGone, match=str(found.owner.pid)):
        found.tensors()


def test_a_number_that_another_process_has_now_is_not_its_owner() -> None:
    assert Owner.here().alive
    assert not Owner(os.getpid(), "1").alive


def test_what_fails_while_the_owner_lives_is_an_error_of_its_own(
    packer: DevicePacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(handle: Handle) -> Tensor:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(device, "MAPPINGS", Mappings(broken))
    with pytest.raises(RuntimeError, match="invalid argument"):
        arrived(packer(weights_of(1.0))).tensors()


def test_an_error_that_the_owners_death_explains_is_that() -> None:
    owner = dead_owner()

    class Dying(Owner):
        looks = 0

        @property
        def alive(self) -> bool:
            Dying.looks += 1
            return Dying.looks == 1

    with pytest.raises(WeightsGone), Dying(owner.pid, owner.started).watched():
        raise RuntimeError("CUDA error: invalid resource handle")


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

READER = """
import pickle, sys, torch
from freewheel.sync.weights import content_sum
for line in iter(sys.stdin.readline, ""):
    weights = pickle.loads(bytes.fromhex(line))
    found = weights.tensors()
    print(content_sum(found.values()), found["a"].is_cuda, float(found["a"][0, 0]), flush=True)
"""


@GPU
def test_on_a_gpu_another_process_reads_the_trainers_memory_version_after_version() -> None:
    packer = DevicePacker(bucket_bytes=1 << 20)
    reader = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None and reader.stdout is not None
    try:
        held = None
        for version in range(4):
            new = packer({name: tensor.cuda() for name, tensor in weights_of(float(version)).items()})
            reader.stdin.write(pickle.dumps(new).hex() + "\n")
            reader.stdin.flush()
            assert reader.stdout.readline().split() == [str(new.checksum), "True", str(float(version))]
            held = new
        assert len(packer._slots) == 2 and held is not None
        assert held.on_host().checksum == held.checksum
    finally:
        reader.kill()
        reader.wait()
