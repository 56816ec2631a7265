"""Weights on a device: held weights are not overwritten, unused memory is used again, and weights of a dead process are
gone. Without a GPU, buffers are on the CPU and handles name files."""

from __future__ import annotations

import pickle
import queue
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
from freewheel.utils.processes import wait_for_end


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


def test_a_copy_does_not_follow_its_source_and_has_its_checksum(packer: DevicePacker) -> None:
    source = weights_of(1.0)
    packed = packer(source)
    on_host = packed.on_host()
    source["a"] += 1
    for copy in (packed, on_host):
        assert copy.tensors()["a"].tolist() == [[1.0, 1.0]] * 3
        assert copy.checksum == content_sum(weights_of(1.0).values()) == pack(weights_of(1.0)).checksum
        assert copy.n_bytes == 34
    assert [entry.bucket for entry in packed.entries.values()] == [0, 1]
    del packed, copy
    assert packer({"a": torch.ones(9)}).tensors()["a"].tolist() == [1.0] * 9, "another model has its own memory"
    packer(weights_of(2.0))
    assert on_host.tensors()["a"][0, 0].item() == 1.0


def test_only_memory_that_nobody_holds_is_used_again_and_its_handles_are_made_once(tmp_path: Path) -> None:
    files = Files(tmp_path)
    packer = DevicePacker(bucket_bytes=24, share=files.share)
    published = packer(weights_of(0.0))
    for version in range(1, 20):
        newest = packer(weights_of(float(version)))
        pickle.dumps(newest)
        assert published.tensors()["a"][0, 0].item() == version - 1
        published = newest
    assert (len(packer._slots), files.made) == (2, 4)
    held = [packer(weights_of(float(version))) for version in range(5)]
    assert len(packer._slots) == 6
    assert [weights.tensors()["b"][0].item() for weights in held] == [0, 1, 2, 3, 4]


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
    """Yield a process that lives as long as the context."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner(process.pid, device._read_start_time(process.pid))
    assert owner.alive and not Owner(process.pid, "1").alive, "a number may be used again"
    yield owner
    process.communicate(b"\n")


@pytest.fixture
def dead_owner() -> Owner:
    with another_process() as owner:
        pass
    return owner


def test_memory_stays_open_until_its_owner_changes_or_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    watched: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(device, "wait_for_end", lambda pid: (watched.put(pid), wait_for_end(pid)))
    mappings = Mappings(lambda handle: calls.append(handle) or torch.zeros(1))  # type: ignore[func-returns-value]
    here = Owner.here()
    with another_process() as other:
        for handle, owner in [("a", here), ("b", here), ("a", here), ("a", other), ("a", other), ("a", here)]:
            mappings.open({"handle": handle}, owner)
        assert [call["handle"] for call in calls] == ["a", "b", "a", "a"]
        opened_one = weakref.ref(mappings.open({"handle": "c"}, other))
        for _ in range(2):  # once for each time that it became the owner
            while watched.get(timeout=30) != other.pid:
                pass
        assert opened_one() is not None
    deadline = time.monotonic() + 30
    while opened_one() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert opened_one() is None, "the owner's successor needs the memory"


def test_weights_of_a_dead_process_are_gone(packer: DevicePacker, dead_owner: Owner) -> None:
    found = arrived(packer(weights_of(1.0)))
    found.owner = dead_owner
    with pytest.raises(WeightsGone, match=str(dead_owner.pid)):
        found.tensors()


@pytest.mark.parametrize(("lives", "raised"), [(True, RuntimeError), (False, WeightsGone)])
def test_an_error_means_that_weights_are_gone_only_if_their_owner_died(
    dead_owner: Owner, lives: bool, raised: type[Exception]
) -> None:
    class Dying(Owner):
        """Alive at the first look."""

        looks = 0

        @property
        def alive(self) -> bool:
            Dying.looks += 1
            return lives or Dying.looks == 1

    with pytest.raises(raised), Dying(dead_owner.pid, dead_owner.started).watched():
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
def test_another_process_reads_the_trainers_gpu_memory_version_after_version() -> None:
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
