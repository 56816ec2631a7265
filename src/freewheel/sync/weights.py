"""A set of weights on its way: one flat buffer with a table of contents, cheap to put into Ray's object store.

    trainer: pack(state_dict) ─▶ Weights ─▶ object store ─▶ rollouter: weights.tensors() ─▶ engine.update_weights

The reader's tensors are views of the shared buffer: read-only, and never copied before the engine's own copy.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

ALIGN_BYTES = 64


@dataclass(frozen=True)
class Entry:
    """One tensor of the buffer."""

    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Weights:
    """All parameters of one version."""

    entries: dict[str, Entry]
    buffer: np.ndarray[Any, np.dtype[np.uint8]]
    checksum: int
    """What `checksum` gives for these tensors."""

    @property
    def n_bytes(self) -> int:
        return int(self.buffer.nbytes)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the buffer. Do not write to them."""
        import warnings

        import torch

        with warnings.catch_warnings():  # the object store's pages are read-only, and so is our use of them
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            whole = torch.from_numpy(self.buffer)
        found = {}
        for name, entry in self.entries.items():
            dtype: torch.dtype = getattr(torch, entry.dtype)
            size = dtype.itemsize * int(np.prod(entry.shape, dtype=np.int64))
            found[name] = whole[entry.start : entry.start + size].view(dtype).view(entry.shape)
        return found


def pack(tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Copies tensors, from wherever they are, into one CPU buffer."""
    import torch

    entries: dict[str, Entry] = {}
    end = 0
    for name, tensor in tensors.items():
        entries[name] = Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end)
        end += -(-tensor.numel() * tensor.element_size() // ALIGN_BYTES) * ALIGN_BYTES
    buffer = np.zeros(end, np.uint8)
    weights = Weights(entries, buffer, 0)
    with torch.no_grad():
        for name, target in weights.tensors().items():
            target.copy_(tensors[name])
    return Weights(entries, buffer, checksum(weights.tensors().items()))


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """CRC-32 over names and bytes in the order of names: equal for equal weights, wherever they are held."""
    import torch

    value = 0
    for name, tensor in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, value)
    return value
