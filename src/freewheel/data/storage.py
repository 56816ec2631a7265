"""A `DataProto` on disk: a directory with the tensors as safetensors and the rest as JSON. Never pickle.

    path/tensors-<id>.safetensors   written first, under a new name
    path/dataproto.json             names it, and replaces the former one by a rename: the moment of the save

A reader sees the former save or the new one, whole. A writer that is killed leaves the former save as it was, and at
most files that the next save removes. Two writers of one path are not provided for. `DataProto` calls this.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError

from freewheel.data.columns import Array
from freewheel.data.encoding import Encoder, decode
from freewheel.errors import DataError

FORMAT = "freewheel.DataProto"
VERSION = 1
"""Raised when a file of today could not be read by the code of yesterday."""
MANIFEST = "dataproto.json"
TENSORS = re.compile(r"tensors-[0-9a-f]{32}\.safetensors")


class Saved(NamedTuple):
    rows: int
    tensors: dict[str, torch.Tensor] | None
    non_tensor_batch: dict[str, Array]
    meta_info: dict[str, Any]


def save(path: str | Path, saved: Saved) -> None:
    encoder = Encoder()
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "rows": saved.rows,
        "batch": None
        if saved.tensors is None
        else {key: encoder.store(f"batch/{key}", tensor, f"batch[{key!r}]") for key, tensor in saved.tensors.items()},
        "non_tensor_batch": {
            key: encoder.encode(column, f"non_tensor_batch[{key!r}]") for key, column in saved.non_tensor_batch.items()
        },
        "meta_info": encoder.encode(saved.meta_info, "meta_info"),
    }
    directory = Path(path)
    if directory.exists() and not (directory.is_dir() and all(map(_is_ours, directory.iterdir()))):
        raise DataError(f"path = {str(path)!r} exists and is not a saved DataProto: choose another, or remove it")

    directory.mkdir(parents=True, exist_ok=True)
    tensors = directory / f"tensors-{uuid.uuid4().hex}.safetensors"
    new = directory / f"{MANIFEST}.new"
    try:
        safetensors.torch.save_file(encoder.tensors, tensors)
        _flush(tensors)
        new.write_text(json.dumps(manifest | {"tensors": tensors.name}, allow_nan=False), encoding="utf-8")
        _flush(new)
        new.replace(directory / MANIFEST)
    except BaseException:  # a full disk, say: what was begun would fill it further
        tensors.unlink(missing_ok=True)
        new.unlink(missing_ok=True)
        raise
    _flush(directory)
    for old in directory.glob("tensors-*.safetensors"):
        if old != tensors:
            old.unlink()


def load(path: str | Path) -> Saved:
    directory = Path(path)
    if not directory.exists():
        raise FileNotFoundError(f"path = {str(path)!r}: there is no such directory")
    if not (directory / MANIFEST).is_file():
        raise DataError(
            f"path = {str(path)!r} has no {MANIFEST}: it is not a saved DataProto, or its save was cut short"
        )
    manifest = _manifest(directory / MANIFEST)
    while True:
        try:
            return _read(directory, manifest)
        except FileNotFoundError as error:
            former, manifest = manifest, _manifest(directory / MANIFEST)
            if manifest == former:  # else a save came between, and took the former tensors away
                raise DataError(f"{str(path)!r} is damaged, {former['tensors']} is gone: save it anew") from error
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{str(path)!r} is damaged ({type(error).__name__}: {error}): save it anew") from error


def _read(directory: Path, manifest: dict[str, Any]) -> Saved:
    if not TENSORS.fullmatch(manifest["tensors"]):
        raise ValueError(f"{manifest['tensors']!r} is not a file name of ours")
    tensors = safetensors.torch.load_file(directory / manifest["tensors"])
    rows, names = int(manifest["rows"]), manifest["batch"]
    batch = None if names is None else {key: tensors[name] for key, name in names.items()}
    if any(len(tensor) != rows for tensor in (batch or {}).values()):
        raise ValueError(f"a tensor does not have {rows} rows")
    return Saved(
        rows,
        batch,
        {key: decode(column, tensors) for key, column in manifest["non_tensor_batch"].items()},
        decode(manifest["meta_info"], tensors),
    )


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{str(path)!r} is cut short or not JSON ({error}): save it anew") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{str(path)!r} is not a saved DataProto: its format is not {FORMAT!r}")
    if manifest.get("version") != VERSION:
        raise DataError(
            f"{str(path)!r} has the version {manifest.get('version')!r}; this freewheel reads {VERSION}: "
            "load it with the freewheel that saved it"
        )
    return manifest


def _is_ours(path: Path) -> bool:
    return path.name in (MANIFEST, f"{MANIFEST}.new") or bool(TENSORS.fullmatch(path.name))


def _flush(path: Path) -> None:
    """To the disk itself: a rename may not be there before what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
