"""Brings weights into vLLM: the information about a version that its workers get.

    Weights ───────▶ a private file in /dev/shm ──▶ infos: its path and layout ────────┐
    DeviceWeights ─▶ nothing moves ───────────────▶ infos: CUDA handles and layout ────┼▶ vLLM's update_weights, one by
    SentWeights ───▶ the trainer is asked to send ▶ info: where its group meets ───────┘  one ─▶ its workers

Runs in the rollouter's process, around `AsyncLLM` or a client of `vllm serve`. `ship` prepares before the engine
pauses. The worker's side (`freewheel.rollout.vllm.worker`) registers with vLLM when `WORKER_EXTENSION` is imported,
which vLLM does in each of its processes. Only plain values (JSON, msgpack) go there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from freewheel.sync.broadcast import SentWeights
from freewheel.sync.device import DeviceWeights
from freewheel.sync.weights import BUCKET_BYTES, SUM_BITS, AnyWeights, Entry, Weights, by_bucket
from freewheel.utils.files import open_private

WORKER_EXTENSION = "freewheel.rollout.vllm.worker.WorkerExtension"
"""The value of vLLM's `worker_extension_cls`."""
ROLLOUTER = "FREEWHEEL_ROLLOUTER"
"""Variable with the rollouter's process number: vLLM's workers end when that process does."""
BACKENDS = {"object_store": "freewheel_shm", "ipc": "freewheel_ipc", "nccl": "freewheel_nccl"}
"""Names of the receiving backends, for vLLM's `weight_transfer_config`."""
SHARED_MEMORY = Path("/dev/shm")
FILE = "freewheel-weights-"
"""Followed by the number of the process that wrote it."""
SPARE_BYTES = 1 << 26
"""Shared memory left to other programs."""

Info = dict[str, Any]
"""`update_info` of one bucket."""


@contextlib.contextmanager
def ship(weights: AnyWeights, *, replica: int = 0, workers: int = 1) -> Iterator[list[Info]]:
    """Yield what vLLM's workers need to know, one item per bucket, valid until the context ends. May copy: run it in a
    thread, before the pause. `workers`: number of workers of this replica. Raises `WeightsGone`, also if the body fails
    because the trainer died."""
    if isinstance(weights, SentWeights):
        with weights.sending(f"rollouter-{replica}", workers) as info:
            yield [info]
        return
    if isinstance(weights, DeviceWeights):
        with weights.owner.watched():
            yield _number(_by_handles(weights))
        return
    assert isinstance(weights, Weights), f"vLLM cannot be sent {type(weights).__name__}"
    with _in_file(weights) as path:
        yield _number(_contents(part) | {"path": path} for part in _parts(weights.entries))


def _number(infos: Iterable[Info]) -> list[Info]:
    """Mark the first and last bucket, at which the receiver starts and ends."""
    found = list(infos)
    return [info | {"part": part, "parts": len(found)} for part, info in enumerate(found)]


def _by_handles(weights: DeviceWeights) -> list[Info]:
    owner = {"pid": weights.owner.pid, "started": weights.owner.started}
    parts = zip(by_bucket(weights.entries), weights.handles(), strict=True)
    return [_contents(part) | {"handle": handle, "owner": owner} for part, handle in parts]


def _contents(part: Mapping[str, Entry]) -> Info:
    return {
        "names": list(part),
        "dtype_names": [entry.dtype for entry in part.values()],
        "shapes": [list(entry.shape) for entry in part.values()],
        "starts": [entry.start for entry in part.values()],
    }


def _parts(entries: Mapping[str, Entry]) -> list[dict[str, Entry]]:
    """Split into parts, so that a worker that copies needs no memory for a second model."""
    found: list[dict[str, Entry]] = []
    left = 0
    for name, entry in entries.items():
        if not found or left < entry.n_bytes:
            found.append({})
            left = BUCKET_BYTES
        found[-1][name] = entry
        left -= entry.n_bytes
    return found


@contextlib.contextmanager
def _in_file(weights: Weights) -> Iterator[str]:
    """Yield a copy of the buffer that other processes of this user can map."""
    _remove_old_files()
    path = _choose_folder(weights.n_bytes) / f"{FILE}{os.getpid()}-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        descriptor = open_private(path, os.O_WRONLY)
        stack.callback(os.close, descriptor)
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # until it is closed
        left = weights.buffer.data.cast("B")
        while left:
            left = left[os.write(descriptor, left) :]
        yield str(path)


def _remove_old_files() -> None:
    """Remove files of killed rollouters, each as large as a model."""
    for folder in {SHARED_MEMORY, Path(tempfile.gettempdir())}:
        for path in folder.glob(f"{FILE}*"):
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == os.getuid() and not _in_use(path):
                    path.unlink()


def _in_use(path: Path) -> bool:
    pid = path.name.removeprefix(FILE).partition("-")[0]
    if not pid.isdecimal() or Path(f"/proc/{pid}").exists():
        return True
    # A process of another container may share the memory and have no number here: it holds the lock.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _choose_folder(n_bytes: int) -> Path:
    """Return shared memory, or a disk if it is too small (64 MB in many containers)."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(SHARED_MEMORY).free >= n_bytes + SPARE_BYTES:
            return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def whole_sum(parts: Iterable[int | None]) -> int | None:
    """Add the results of `freewheel_content_sum`; None if weights cannot be compared."""
    found = list(parts)
    if any(part is None for part in found):
        return None
    return sum(int(part) for part in found if part is not None) % (1 << SUM_BITS)
