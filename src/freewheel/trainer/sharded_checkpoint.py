"""Training state in shards: each rank writes its own, and any number of ranks reads them again.

    rank r: DTensors ─▶ torch.distributed.checkpoint: who writes what ─▶ training/shard_00001_of_00002.safetensors
    k ranks, or one: files ─▶ what each holds of which tensor ─▶ only the rows that this rank needs

The plan of who writes and who reads what is torch's (DCP). What lies on the disk is ours: safetensors, where torch's
own table of contents is a pickle; each file says in its header which part of which tensor it holds. What one process
wrote (`whole.safetensors`) is read the same way. Called by backends.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.futures import Future

from freewheel.data.errors import DataError

PARTS = "freewheel.parts"
"""In a file's header: tensor name → [shape of the whole, where this part begins]. Absent: every tensor is whole."""


class ShardsNotWritten(OSError):
    """One rank or several could not write their part; the message says which and why. All ranks raise it."""


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: ProcessGroup) -> None:
    """Called by every rank of `group` with the same names. `tensors`: DTensors on the host, and small ones that every
    rank has. Raises `ShardsNotWritten` on all ranks."""
    try:
        save(dict(tensors), storage_writer=_Writer(folder), process_group=group)
    except CheckpointException as error:
        rank, (why, _) = min(error.failures.items(), key=lambda failure: failure[0])
        text = f"rank {rank}: {type(why).__name__}: {why}"
        raise ShardsNotWritten(getattr(why, "errno", None) or errno.EIO, text) from error


def read_shards(
    files: Sequence[Path], *, mesh: DeviceMesh | None = None, group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """On the host: whole, or with `mesh` this rank's rows of each. Raises `DataError`, on all ranks of `group` where
    one of them does: it may be the only one that does not see the files."""
    found: dict[str, Tensor] = {}
    why = ""
    try:
        found = _read(files, mesh)
    except DataError as error:
        why = str(error)
    told = [why]
    if group is not None:
        told = [""] * group.size()
        dist.all_gather_object(told, why, group=group)
    for rank, one in enumerate(told):
        if one:
            raise DataError(f"rank {rank}: {one}" if len(told) > 1 else one)
    return found


def _read(files: Sequence[Path], mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Each rank reads for itself: nothing of it needs the others."""
    wanted = {name: _wanted(one, mesh) for name, one in _Reader(files).described().items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # to read alone is no mistake
            load(wanted, storage_reader=_Reader(files), no_dist=True)
    except CheckpointException as error:
        ((why, _),) = error.failures.values()
        raise DataError(f"{files[0].parent} cannot be read: {type(why).__name__}: {why}") from error
    return wanted


def _wanted(described: TensorStorageMetadata, mesh: DeviceMesh | None) -> Tensor:
    shape, dtype = described.size, described.properties.dtype
    if mesh is None or not shape:
        return torch.empty(shape, dtype=dtype)
    made: Tensor = empty_dtensor(*shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
    return made


def on_host(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A copy that training does not change. `mesh`: of the ranks' CPUs."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    return moved(tensor, mesh, torch.device("cpu"))


def moved(tensor: DTensor, mesh: DeviceMesh, device: torch.device) -> DTensor:
    """The same shards, copied to another kind of memory."""
    local = tensor.to_local().detach().to(device, copy=True)
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


class _Writer(StorageWriter):
    """One file a rank, in a folder that all of them see."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = [f"shard_{number:05d}_of_{len(plans):05d}.safetensors" for number in range(1, len(plans) + 1)]
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        parts: dict[str, tuple[list[int], list[int]]] = {}
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
            found = planner.resolve_data(item)
            assert isinstance(found, Tensor)
            tensors[item.index.fqn] = found.detach().contiguous()
            parts[item.index.fqn] = (list(item.tensor_data.size), list(item.tensor_data.chunk.offsets))
        if tensors:
            path = self._folder / plan.storage_data
            save_file(tensors, path, metadata={PARTS: json.dumps(parts)})
            _sync(path)
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                WriteResult(
                    index=item.index, size_in_bytes=tensors[item.index.fqn].nbytes, storage_data=plan.storage_data
                )
                for item in plan.items
            ]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing to write: the files say what they hold. That they are all here is another matter."""
        for rank, written in enumerate(results):
            for name in {result.storage_data for result in written}:
                if not (self._folder / name).is_file():
                    raise FileNotFoundError(
                        errno.ENOENT,
                        f"what rank {rank} wrote is not to be seen from rank 0: run_dir must be on a file system that "
                        "all machines of the training share",
                    )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Reader(StorageReader):
    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._where: dict[MetadataIndex, Path] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(state_dict_metadata=dict(self.described()))

    def described(self) -> dict[str, TensorStorageMetadata]:
        found: dict[str, TensorStorageMetadata] = {}
        for file in self._files:
            for name, whole, offsets, sizes, dtype in _contents(file):
                described = found.setdefault(
                    name,
                    TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=torch.Size(whole), chunks=[]),
                )
                chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                described.chunks.append(chunk)
                self._where[MetadataIndex(name, offsets)] = file
        _check_whole(found, self._files)
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[Path, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._where[item.storage_index], []).append(item)
        for file, items in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_part(opened, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _contents(file: Path) -> list[tuple[str, list[int], list[int], list[int], torch.dtype]]:
    """Of each tensor in it: name, shape of the whole, where this part begins, its shape, and type."""
    try:
        with safe_open(file, framework="pt") as opened:
            parts = json.loads((opened.metadata() or {}).get(PARTS, "{}"))
            found = []
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                part = opened.get_slice(name)
                sizes = list(part.get_shape())
                whole, offsets = parts.get(name, (sizes, [0] * len(sizes)))
                found.append((name, list(whole), list(offsets), sizes, _DTYPES[part.get_dtype()]))
            return found
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def _check_whole(found: Mapping[str, TensorStorageMetadata], files: Sequence[Path]) -> None:
    """A shard that is missing must not leave rows of a tensor as they happen to lie in memory."""
    if not found:
        raise DataError(f"no training state is in {[str(file) for file in files]}")
    for name, described in found.items():
        have = sum(chunk.sizes.numel() for chunk in described.chunks)
        if have != described.size.numel():
            folder = files[0].parent
            raise DataError(
                f"{folder}: {have} of {described.size.numel()} numbers of {name} are there: a shard is missing"
            )


def _part(opened: Any, item: ReadItem) -> Tensor:
    name = item.storage_index.fqn
    if not item.lengths:  # a number by itself has no slices
        whole: Tensor = opened.get_tensor(name)
        return whole
    places = tuple(
        slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True)
    )
    part: Tensor = opened.get_slice(name)[places]
    return part


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
"""What training state is made of, by safetensors' names."""


def _sync(path: Path) -> None:
    """By whoever wrote it: another machine cannot."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
