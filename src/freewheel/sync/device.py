"""Weights that stay on the GPU, in buffers that other processes on the same GPU open in place.

    trainer                                             rollouter ─▶ engine, on the same GPU
    backend.weights() ─▶ DevicePacker ─▶ DeviceWeights ─ pickled: handles, no data ─▶ .tensors(): the trainer's memory
                           │ a slot of the ring
                           └◀─ reused when nobody in the trainer holds those weights

The synchronizer says which versions may still be read (`ParameterSynchronizer.in_use`); the trainer holds those, and a
running checkpoint holds its own. So no buffer is overwritten while it is read, and nothing is copied to the host unless
it is needed there (`on_host`).

CUDA handles refer to whole allocations and are made once per slot, because opening one takes milliseconds; readers keep
them open. Handles and weights die with the process that made them (`WeightsGone`).
"""

from __future__ import annotations

import base64
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freewheel.sync.weights import (
    AnyWeights,
    Entry,
    Weights,
    WeightsGone,
    bucket_sizes,
    in_buckets,
    pack,
    sum_of_buckets,
    views,
)
from freewheel.utils.processes import wait_for_end

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

Handle = dict[str, Any]
"""A buffer as another process opens it: plain values that fit into JSON."""
ShareTensor = Callable[["torch.Tensor"], Handle]


@dataclass(frozen=True)
class Owner:
    """A process, safe against reuse of its number."""

    pid: int
    started: str

    @classmethod
    def here(cls) -> Owner:
        return cls(os.getpid(), _read_start_time(os.getpid()))

    @property
    def alive(self) -> bool:
        return _read_start_time(self.pid) == self.started

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise `WeightsGone` if the body fails because the owner has died."""
        if not self.alive:
            raise self._gone()
        try:
            yield
        except Exception as error:
            if not self.alive:
                raise self._gone() from error
            raise

    def _gone(self) -> WeightsGone:
        return WeightsGone(f"the trainer's process {self.pid} has ended, and its GPU memory with it")


def _read_start_time(pid: int) -> str:
    """Return when a process started, in kernel ticks; empty if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


@dataclass(eq=False)
class DeviceWeights(AnyWeights):
    """All parameters of one version on a GPU, in the process that made them or one that received them."""

    entries: dict[str, Entry]
    checksum: int
    owner: Owner
    handles: Callable[[], list[Handle]]
    """Returns one per bucket. Made when another process first needs them."""
    buffers: Sequence[torch.Tensor] | None = None
    """One per bucket, in the owner's process."""
    travels_as: Callable[[DeviceWeights], Any] | None = None
    """Returns what is pickled instead of these weights."""

    def __reduce__(self) -> Any:
        if self.travels_as is not None:
            return _itself, (self.travels_as(self),)
        return _receive_weights, (self.entries, self.checksum, self.owner, self.handles())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return views of the buffers, valid while these weights are held. Raises `WeightsGone`."""
        if self.buffers is not None:
            return views(self.entries, self.buffers)
        with self.owner.watched():
            return views(self.entries, [MAPPINGS.open(handle, self.owner) for handle in self.handles()])

    def on_host(self) -> Weights:
        held = self.tensors()
        with separate_stream(next(iter(held.values())).device):  # a copy of seconds must not delay the next step
            return pack(held, checksum=self.checksum)


def _receive_weights(entries: dict[str, Entry], checksum: int, owner: Owner, handles: list[Handle]) -> DeviceWeights:
    return DeviceWeights(entries, checksum, owner, lambda: handles)


def _itself(arrived: Any) -> Any:
    return arrived


@contextmanager
def separate_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, use another stream, so that neither this nor the training thread waits for the other."""
    import torch

    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield


@dataclass
class _Slot:
    """Buffers for one version."""

    buffers: list[torch.Tensor]
    share: ShareTensor
    taken: bool = True

    @cached_property
    def handles(self) -> list[Handle]:
        return [self.share(buffer) for buffer in self.buffers]


class DevicePacker:
    """Packs into the first free slot, or makes another. Called in the training thread, which continues when the copy is
    done: some milliseconds for 3 GB on an H200, checksum included."""

    def __init__(
        self,
        *,
        bucket_bytes: int,
        share: ShareTensor | None = None,
        travels_as: Callable[[DeviceWeights], Any] | None = None,
    ) -> None:
        """`travels_as`: returns what is pickled instead of the weights."""
        self._bucket_bytes = bucket_bytes
        self._share = share or make_handle
        self._travels_as = travels_as
        self._slots: list[_Slot] = []

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> DeviceWeights:
        import torch

        entries = in_buckets(tensors, self._bucket_bytes)
        device = next(iter(tensors.values())).device
        slot = self._free(bucket_sizes(entries), device)
        with torch.no_grad():
            for name, target in views(entries, slot.buffers).items():
                target.copy_(tensors[name])
            checksum = sum_of_buckets(entries, slot.buffers)
        if device.type == "cuda":  # readers are in other processes and do not know our streams
            torch.cuda.current_stream(device).synchronize()
        weights = DeviceWeights(entries, checksum, Owner.here(), lambda: slot.handles, slot.buffers, self._travels_as)
        weakref.finalize(weights, setattr, slot, "taken", False).atexit = False
        return weights

    def _free(self, sizes: list[int], device: torch.device) -> _Slot:
        import torch

        for slot in self._slots:
            if not slot.taken and [buffer.numel() for buffer in slot.buffers] == sizes:
                slot.taken = True
                return slot
        made = _Slot([torch.empty(size, dtype=torch.uint8, device=device) for size in sizes], self._share)
        self._slots.append(made)
        return made


# -- CUDA's handles ---------------------------------------------------------------------------------------------------


def gpu_uuid(device: torch.device | int) -> str:
    """Return an id that is the same in every process, however they number their GPUs."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


_FIRST_FIELD = 7
"""Of the arguments of torch's `rebuild_cuda_tensor`: from here on they name the memory. Earlier ones are known."""


def make_handle(buffer: torch.Tensor) -> Handle:
    """Return a handle to a CUDA buffer. Make it once: each counts as another reader for torch."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
    fields = [base64.b64encode(one).decode() if isinstance(one, bytes) else one for one in arguments[_FIRST_FIELD:]]
    place = {"gpu": gpu_uuid(buffer.device), "bytes": buffer.numel(), "offset": buffer.storage_offset()}
    return {**place, "fields": fields}


def open_handle(handle: Handle) -> torch.Tensor:
    """Open the buffer of another process."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    here = [index for index in range(torch.cuda.device_count()) if gpu_uuid(index) == handle["gpu"]]
    if not here:
        raise ValueError(
            f"these weights are on GPU {handle['gpu']}, which this process does not see: use another transport"
        )
    fields = [base64.b64decode(one) if isinstance(one, str) else one for one in handle["fields"]]
    size, start = handle["bytes"], handle["offset"]
    buffer: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor, (size,), (1,), start, torch.storage.TypedStorage, torch.uint8, here[0], *fields
    )
    return buffer


class Mappings:
    """Open buffers of one other process. They are closed when it dies, because its successor on the GPU needs the
    memory."""

    def __init__(self, open_one: Callable[[Handle], torch.Tensor]) -> None:
        self._open_one = open_one
        self._lock = threading.Lock()
        self._owner: Owner | None = None
        self._open: dict[str, torch.Tensor] = {}

    def open(self, handle: Handle, owner: Owner) -> torch.Tensor:
        with self._lock:
            if owner != self._owner:
                self._open.clear()
                self._owner = owner
                threading.Thread(target=self._watch, args=(owner,), name="freewheel-owner", daemon=True).start()
            key = str(handle)
            if key not in self._open:
                self._open[key] = self._open_one(handle)
            return self._open[key]

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def _watch(self, owner: Owner) -> None:
        if owner.alive:  # otherwise the number may belong to another process now
            wait_for_end(owner.pid)
        with self._lock:
            if self._owner == owner:
                self._open.clear()
                self._owner = None


MAPPINGS = Mappings(open_handle)
"""The mappings of this process."""
