"""The tensors of a resumed trainer in files: each rank writes its rows, and any number of ranks reads what it needs.

    one process:     tensors  ─▶ training/whole.safetensors
    rank r of several: DTensors ─▶ its rows of each ─▶ training/shard_00001_of_00002.safetensors
    k ranks, or one: files ─▶ index of the rows in each file ─▶ this rank's rows

Each file's header says which rows it holds. Nothing here communicates with other ranks: a separate thread writes during
training, where a collective would collide with training's. Called by backends.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from freewheel.errors import DataError
from freewheel.utils.files import sync_file

WHOLE = "whole.safetensors"
"""The file of a single process."""
PARTS = "freewheel.parts"
"""Key in a file's header: tensor name → [shape of the whole, start of this part]. Absent: every tensor is whole."""


def own_rows(count: int, rank: int, size: int) -> range:
    """Return a rank's rows of a tensor with `count` rows, as `Shard(0)` distributes them."""
    each = -(-count // size)
    return range(min(rank * each, count), min((rank + 1) * each, count))


def write_rows(folder: Path, tensors: Mapping[str, Tensor], *, rank: int = 0, size: int = 1) -> str:
    """Write this rank's rows to a file and return its name; empty if it has none.

    `tensors`: DTensors on the host, and small tensors that every rank has, which rank 0 writes.
    """
    own: dict[str, Tensor] = {}
    parts: dict[str, tuple[list[int], list[int]]] = {}
    for name, tensor in tensors.items():
        start = [0] * tensor.ndim
        if isinstance(tensor, DTensor):
            start[0] = own_rows(tensor.shape[0], rank, size).start
            local = tensor.to_local()
            has_rows = local.numel() > 0
        else:
            local, has_rows = tensor, rank == 0
        if has_rows:
            own[name], parts[name] = local.contiguous(), (list(tensor.shape), start)
    if not own:
        return ""
    path = folder / (WHOLE if size == 1 else f"shard_{rank + 1:05d}_of_{size:05d}.safetensors")
    save_file(own, path, metadata={PARTS: json.dumps(parts)})
    sync_file(path)  # by the writer, because another machine cannot
    return path.name


def copy_to_host(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return a copy that training does not change. `mesh`: the ranks' CPUs, needed for a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    assert mesh is not None
    return copy_shards(tensor, mesh, torch.device("cpu"))


def copy_shards(tensor: DTensor, mesh: DeviceMesh, device: torch.device) -> DTensor:
    """Return the same shards, copied to another kind of memory."""
    return _shard(tensor.to_local().detach().to(device, copy=True), tensor.shape, mesh)


def _shard(local: Tensor, shape: Sequence[int], mesh: DeviceMesh) -> DTensor:
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor in a file."""

    file: Any
    shape: list[int]
    """Shape of the whole tensor."""
    rows: range
    """A scalar has one row."""


def read_rows(files: Sequence[Path], *, mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    """Return tensors on the host: whole, or with `mesh` this rank's rows of each. Raises `DataError`."""
    found: dict[str, list[_Piece]] = {}
    with contextlib.ExitStack() as stack:
        for path in files:
            with _readable(path):
                file = stack.enter_context(safe_open(path, framework="pt"))
                for name, piece in _find_pieces(file):
                    found.setdefault(name, []).append(piece)
        if not found:
            raise DataError(f"no training state is in {[str(path) for path in files]}")
        for name, pieces in found.items():
            have, wanted = sum(len(piece.rows) for piece in pieces), (pieces[0].shape or [1])[0]
            if have != wanted:  # they must not be left as uninitialised memory
                folder = files[0].parent
                raise DataError(f"{folder}: {name}: only {have} of {wanted} rows exist: a shard is missing")
        with _readable(files[0].parent):
            return {name: _read(name, pieces, mesh) for name, pieces in found.items()}


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, IndexError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _find_pieces(file: Any) -> Iterator[tuple[str, _Piece]]:
    parts = json.loads((file.metadata() or {}).get(PARTS, "{}"))
    for name in file.keys():  # noqa: SIM118  # not a mapping
        sizes = list(file.get_slice(name).get_shape())
        shape, starts = parts.get(name, (sizes, [0] * len(sizes)))
        yield name, _Piece(file, shape, range(starts[0], starts[0] + sizes[0]) if sizes else range(1))


def _read(name: str, pieces: list[_Piece], mesh: DeviceMesh | None) -> Tensor:
    """Join the wanted rows from all files that have some of them."""
    shape = pieces[0].shape
    if not shape:
        number: Tensor = pieces[0].file.get_tensor(name)
        return number
    wanted = range(shape[0]) if mesh is None else own_rows(shape[0], mesh.get_local_rank(), mesh.size())
    parts = []
    for piece in sorted(pieces, key=lambda piece: piece.rows.start):
        first, last = max(piece.rows.start, wanted.start), min(piece.rows.stop, wanted.stop)
        if first < last or not wanted:
            start = piece.rows.start
            parts.append(piece.file.get_slice(name)[max(0, first - start) : max(0, last - start)])
    rows = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
    return rows if mesh is None else _shard(rows, shape, mesh)
