"""vLLM's workers, and nobody else, can read a version from what they receive; and no file of it is left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freewheel.rollout.vllm import transfer
from freewheel.rollout.vllm.transfer import ship, whole_sum
from freewheel.sync import device
from freewheel.sync.device import DevicePacker, Owner
from freewheel.sync.weights import Entry, WeightsGone, pack

TENSORS = {
    "embed": torch.arange(12.0).reshape(4, 3),
    "norm": torch.ones(5, dtype=torch.bfloat16),
    "scale": torch.tensor(2.5),
    "head": torch.arange(6.0).reshape(3, 2),
}


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(transfer, "SHARED_MEMORY", folder)
    return folder


def read(infos: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As a worker does."""
    found = {}
    for info in json.loads(json.dumps(infos)):  # what goes to a server by HTTP
        buffer = torch.from_numpy(np.fromfile(info["path"], np.uint8))
        contents = zip(info["names"], info["dtype_names"], info["shapes"], info["starts"], strict=True)
        for name, dtype, shape, start in contents:
            found[name] = Entry(dtype, tuple(shape), start).view(buffer)
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_a_version_is_read_as_it_was_sent_by_this_user_alone_and_its_file_is_removed(memory: Path, fails: bool) -> None:
    weights = pack(TENSORS)
    weights.buffer.setflags(write=False)  # as the object store gives it
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext(), ship(weights) as infos:
        (file,) = memory.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        found = read(infos)
        assert list(found) == list(TENSORS)
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
        if fails:
            raise RuntimeError("the engine failed")
    assert list(memory.iterdir()) == []


KILLED = """
import os, pathlib, signal, sys, tempfile
import numpy as np
from freewheel.rollout.vllm import transfer
from freewheel.sync.weights import Weights
transfer.SHARED_MEMORY, tempfile.tempdir = pathlib.Path(sys.argv[1]), sys.argv[2]
with transfer.ship(Weights({}, np.ones(9, np.uint8), 0)):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_a_killed_rollouter_are_removed(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", KILLED, str(memory), str(tmp_path)])
    dead.wait()
    (left,) = memory.iterdir()
    on_disk = tmp_path / f"freewheel-weights-{dead.pid}-02"
    on_disk.write_bytes(b"of another update")
    with ship(pack(TENSORS)):
        assert not left.exists() and not on_disk.exists()


def test_files_that_may_be_in_use_or_are_not_a_version_stay(memory: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    living = memory / f"freewheel-weights-{os.getppid()}-01"
    elsewhere = memory / f"freewheel-weights-{dead.pid}-02"  # a process of another container: it has no number here
    others = memory / "freewheel-weights-of-mine"
    for file in (living, elsewhere, others):
        file.write_bytes(b"a version")
    with elsewhere.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with ship(pack(TENSORS)), ship(pack(TENSORS)) as infos:
            assert len(list(memory.iterdir())) == 5
            assert read(infos).keys() == TENSORS.keys()
    assert sorted(memory.iterdir()) == sorted([living, elsewhere, others])
    with ship(pack(TENSORS)):
        assert not elsewhere.exists()


def test_a_large_version_comes_in_numbered_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 30)
    with ship(pack(TENSORS)) as infos:
        assert [info["names"] for info in infos] == [["embed"], ["norm", "scale"], ["head"]]
        assert [(info["part"], info["parts"]) for info in infos] == [(0, 3), (1, 3), (2, 3)]
        assert read(infos).keys() == TENSORS.keys()


def test_a_disk_is_used_if_shared_memory_is_small(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SPARE_BYTES", 1 << 62)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ship(pack(TENSORS)) as infos:
        assert Path(infos[0]["path"]).parent == tmp_path
        assert read(infos)["scale"].item() == 2.5


def test_weights_on_a_gpu_travel_as_handles_and_nothing_is_written(memory: Path) -> None:
    packer = DevicePacker(bucket_bytes=30, share=lambda buffer: {"handle": buffer.data_ptr(), "bytes": buffer.numel()})
    weights = packer(TENSORS)
    with ship(weights) as infos:
        assert json.loads(json.dumps(infos)) == infos
        assert [info["handle"]["bytes"] for info in infos] == [48, 16, 24]
        assert Owner(**infos[0]["owner"]).alive
        assert {name for info in infos for name in info["names"]} == TENSORS.keys()
        assert not list(memory.iterdir())


def test_weights_are_gone_if_their_trainer_dies_before_or_while_they_are_read() -> None:
    packer = DevicePacker(bucket_bytes=1 << 20, share=lambda buffer: {})
    weights = packer(TENSORS)
    trainer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    weights.owner = Owner(trainer.pid, device._read_start_time(trainer.pid))
    with pytest.raises(WeightsGone), ship(weights):
        trainer.kill()
        trainer.communicate()
        raise RuntimeError("CUDA error: invalid resource handle")
    with pytest.raises(WeightsGone), ship(weights):
        pytest.fail("it was entered")


def test_the_workers_sums_add_up_unless_one_is_missing() -> None:
    assert whole_sum([2**63, 2**63 + 5]) == 5
    assert whole_sum([3, None]) is None
    assert whole_sum([0]) == 0
