"""One version of the weights in transit: a flat buffer with a table of contents, cheap to put into Ray's object store.

    trainer: pack(state_dict) ─▶ Weights ─▶ object store ─▶ rollouter: weights.tensors() ─▶ the engine's own copy
                                    │ checksum                                                 │ content_sum
                                    └────────────── compared by ParameterSynchronizer ─────────┘

The reader's tensors are read-only views of the shared buffer; the engine makes the only copy. `freewheel.sync.device`
does the same on a GPU that trainer and engine share.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

SUM_BITS = 64
_LINEAR, _SQUARE = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4E
"""Odd and even, so that x → LINEAR·x + SQUARE·x² is a bijection on 64-bit values."""
CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Elements that are widened at a time: a core's cache; on a GPU 64 MB, with some hundred launches for 3 GB."""


class WeightsGone(Exception):
    """The trainer that held these weights has died. Its successor has them again."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a buffer."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    bucket: int = 0
    """Which buffer, if there are several."""

    @property
    def n_bytes(self) -> int:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize * math.prod(self.shape)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return this tensor in its buffer of bytes."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return buffer[self.start : self.start + self.n_bytes].view(dtype).view(self.shape)


class AnyWeights:
    """All parameters of one version, wherever they are. Subclasses read them."""

    entries: dict[str, Entry]
    checksum: int
    """`content_sum` of these tensors."""

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return views, valid while the weights live. Do not write to them."""
        raise NotImplementedError("weights that are broadcast go to an engine's workers: use another transport")

    def on_host(self) -> Weights:
        """Return the same weights in this process's memory. Runs in threads."""
        return pack(self.tensors(), checksum=self.checksum)


Packer = Callable[[Mapping[str, "torch.Tensor"]], AnyWeights]
"""Copies a backend's tensors, so that training does not change the copy."""


@dataclass(frozen=True)
class Weights(AnyWeights):
    """All parameters of one version, in host memory."""

    entries: dict[str, Entry]
    buffer: np.ndarray[Any, np.dtype[np.uint8]]
    checksum: int

    def whole(self) -> torch.Tensor:
        """Return the buffer as a tensor of bytes."""
        import warnings

        import torch

        with warnings.catch_warnings():  # the object store's pages are read-only, and we only read
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.buffer)

    def tensors(self) -> dict[str, torch.Tensor]:
        return views(self.entries, [self.whole()])

    def on_host(self) -> Weights:
        return self


def pack(tensors: Mapping[str, torch.Tensor], *, checksum: int | None = None) -> Weights:
    """Copy tensors from any device into one CPU buffer. `checksum`: theirs, if it is known."""
    import torch

    entries = in_buckets(tensors, sys.maxsize)
    weights = Weights(entries, np.empty(sum(bucket_sizes(entries)), np.uint8), 0)
    with torch.no_grad():
        for name, target in weights.tensors().items():
            target.copy_(tensors[name])
    if checksum is None:
        checksum = sum_of_buckets(entries, [weights.whole()])
    return Weights(entries, weights.buffer, checksum)


def content_sum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a checksum over all elements' bit patterns x, each mixed to LINEAR·x + SQUARE·x², modulo 2**64.

    Equal for equal contents however they are ordered, fused, split among ranks or padded with zeros, so an engine with
    its own layout has the checksum of what it was sent. A change of one element always shows; changes of two show
    unless they are swapped. Shapes and loaders check names and places. Computed on the tensors' device.
    """
    import torch

    with torch.no_grad():
        sums = [_power_sums(tensor.detach().reshape(-1)) for tensor in tensors if tensor.numel()]
        if not sums:
            return 0
        linear, square = torch.stack([one.to(sums[0].device) for one in sums]).sum(0).tolist()
    mixed: int = _LINEAR * linear + _SQUARE * square
    return mixed % (1 << SUM_BITS)


def _power_sums(flat: torch.Tensor) -> torch.Tensor:
    """Return [Σ x, Σ x²] modulo 2**64 of the bit patterns as signed integers, int64. Elements of up to 16 bits are
    squared in int32, which halves the memory traffic."""
    import torch

    patterns = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64)
    wide = torch.int32 if flat.element_size() <= 2 else torch.int64
    at_once = CHUNK.get(flat.device.type, CHUNK["cuda"])
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    whole = flat.view(patterns)
    for start in range(0, len(whole), at_once):
        part = whole[start : start + at_once]
        squares = part.to(wide, copy=True)
        squares.mul_(squares)
        total += torch.stack((part.sum(dtype=torch.int64), squares.sum(dtype=torch.int64)))
    return total


BUCKET_BYTES = 1 << 30
"""Bytes per bucket, unless a single tensor is larger: few messages for a model of some GB, and it fits on most GPUs."""


def in_buckets(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> dict[str, Entry]:
    """Lay out tensors in buckets, in their order and aligned to their elements: there are no gaps in a bucket of one
    type."""
    entries: dict[str, Entry] = {}
    bucket, end = 0, 0
    for name, tensor in tensors.items():
        size, width = tensor.numel() * tensor.element_size(), tensor.element_size()
        start = -(-end // width) * width
        if end and start + size > bucket_bytes:
            bucket, start = bucket + 1, 0
        entries[name] = Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start, bucket)
        end = start + size
    return entries


def by_bucket(entries: Mapping[str, Entry]) -> list[dict[str, Entry]]:
    """Return the table of contents of each bucket."""
    found: list[dict[str, Entry]] = [{} for _ in range(1 + max((one.bucket for one in entries.values()), default=-1))]
    for name, entry in entries.items():
        found[entry.bucket][name] = entry
    return found


def bucket_sizes(entries: Mapping[str, Entry]) -> list[int]:
    """Return the bytes of each bucket."""
    return [max(entry.start + entry.n_bytes for entry in part.values()) for part in by_bucket(entries)]


def views(entries: Mapping[str, Entry], buffers: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors in their buffers of bytes."""
    return {name: entry.view(buffers[entry.bucket]) for name, entry in entries.items()}


def sum_of_buckets(entries: Mapping[str, Entry], buffers: Sequence[torch.Tensor]) -> int:
    """Return `content_sum` of all tensors; a bucket of one type is read in one go."""
    import torch

    parts: list[torch.Tensor] = []
    for part, buffer in zip(by_bucket(entries), buffers, strict=True):
        kinds = {entry.dtype for entry in part.values()}
        if len(kinds) == 1:
            parts.append(buffer.view(getattr(torch, kinds.pop())))
        else:
            parts.extend(entry.view(buffer) for entry in part.values())
    return content_sum(parts)
