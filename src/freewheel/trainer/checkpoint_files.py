"""The files of a checkpoint: written so that they are there when their folder is, and described so that damage shows.

Tensors are safetensors and the rest is JSON: nothing is unpickled. `CheckpointStore` decides what is written when, and
what is kept. Opened without torch; tensors need it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freewheel.observe.run_folder import REPLACED
from freewheel.utils.files import FILE_MODE, FOLDER_MODE

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
"""Of `state.json`. A later one is refused rather than misread."""
READ_BYTES = 1 << 22
"""Read at a time for a checksum. CRC-32 runs at 2 GB/s, SHA-256 at 0.8, and nobody forges checkpoints here."""


class CheckpointDamaged(ValueError):
    """A checkpoint is not what was written. The message says where."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    held: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory: they are written twice, and read as two.
        plain[name] = own.clone() if storage in held else own
        held.add(storage)
    save_file(plain, path)


def size(tensors: Mapping[str, Mapping[str, Tensor]]) -> int:
    return sum(one.numel() * one.element_size() for named in tensors.values() for one in named.values())


def write_state(folder: Path, name: str, values: Mapping[str, Any]) -> None:
    """With a table of all other files of the folder, which lie on the disk when this is written."""
    table = {}
    for path in files(folder):
        path.chmod(FILE_MODE)  # other people's writers go by the umask
        _sync(path)
        table[str(path.relative_to(folder))] = described(path)
    told = {**values, "format": FORMAT, "saved_at": time.time(), "files": table}
    told["checksum"] = _checksum(told)
    path = folder / name
    path.write_text(json.dumps(told, indent=1))
    path.chmod(FILE_MODE)
    _sync(path)
    for inner in {file.parent for file in files(folder)} - {folder}:
        inner.chmod(FOLDER_MODE)
        sync_folder(inner)


def read_state(folder: Path, name: str) -> dict[str, Any]:
    try:
        told = json.loads((folder / name).read_text())
        checksum = told.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointDamaged(f"{folder / name}: {type(error).__name__}: {error}") from error
    if _checksum(told) != checksum:
        raise CheckpointDamaged(f"{folder / name}: its checksum does not fit")
    if told.get("format") != FORMAT:
        raise CheckpointDamaged(
            f"{folder / name}: it has format {told.get('format')}, and this freewheel reads {FORMAT}"
        )
    read: dict[str, Any] = told
    return read


def _checksum(told: Mapping[str, Any]) -> int:
    """Over the values as they come back from JSON, so that keys and tuples that JSON changes do no harm."""
    return zlib.crc32(json.dumps(json.loads(json.dumps(told)), sort_keys=True).encode())


def files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def described(path: Path) -> dict[str, int]:
    length = value = 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            length += len(data)
            value = zlib.crc32(data, value)
    return {"bytes": length, "crc32": value}


def misfit(told: Mapping[str, int], found: Mapping[str, int]) -> str:
    """What is wrong with a file that was `told` in the table and is `found` to be something else; empty where nothing
    is. Checksums are compared as far as `found` has one."""
    if found["bytes"] < told["bytes"]:
        return f"cut off: {found['bytes']:,} of {told['bytes']:,} bytes"
    if found["bytes"] > told["bytes"]:
        return f"too long: {found['bytes']:,} bytes, and {told['bytes']:,} were written"
    return "its checksum does not fit" if found.get("crc32", told["crc32"]) != told["crc32"] else ""


def visible_damage(folder: Path, name: str) -> str:
    """What shows without reading the files through, which takes a minute for a large model. Empty: nothing does."""
    try:
        for file, told in read_state(folder, name)["files"].items():
            if wrong := misfit(told, {"bytes": (folder / file).stat().st_size}):
                return f"{file}: {wrong}"
    except CheckpointDamaged as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def looks_whole(folder: Path, name: str) -> bool:
    return not visible_damage(folder, name)


def put_in_place(beside: Path, target: Path) -> None:
    """A folder that is there already steps aside under a name that readers know, until the other has its place."""
    aside = target.with_name(f"{target.name}{REPLACED}")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.replace(aside)
    beside.replace(target)
    sync_folder(target.parent)  # before the other goes: after a power cut one of the two is there
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


sync_folder = _sync
"""A name is safe on the disk only when its folder is."""


def is_about_space(error: Exception) -> bool:
    """safetensors gives the kernel's error as text."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(error, "errno", None) in codes or any(f"(os error {code})" in str(error) for code in codes)


def is_alive(host: str, pid: int) -> bool:
    if host != socket.gethostname():
        return True  # as far as one can tell from here
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
