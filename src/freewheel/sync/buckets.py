"""Where each tensor lies when a set of weights is cut into buffers of limited size. Pure.

    names, types, shapes ─▶ in_buckets ─▶ [bucket 0: embedding][bucket 1: layer 0, layer 1, …][bucket 2: …]

A receiver takes a bucket at a time, and needs room for one. Nothing lies between two tensors of a bucket, so that their
sizes alone say where each begins; wider types come first, which keeps every tensor at a multiple of its own width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from freewheel.sync.weights import Entry, content_sum, dtype_name

if TYPE_CHECKING:
    import torch

BUCKET_BYTES = 1 << 30
"""Of a bucket, unless a single tensor is larger: few messages for a model of some GB, and few GPUs lack so much."""


def in_buckets(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> dict[str, Entry]:
    """In the order in which they lie; of a type's tensors that is the order given."""
    entries: dict[str, Entry] = {}
    bucket, end = 0, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        size = tensor.numel() * tensor.element_size()
        if end and end + size > bucket_bytes:
            bucket, end = bucket + 1, 0
        entries[name] = Entry(dtype_name(tensor), tuple(tensor.shape), end, bucket)
        end += size
    return entries


def by_bucket(entries: Mapping[str, Entry]) -> list[dict[str, Entry]]:
    """The table of contents of each bucket."""
    found: list[dict[str, Entry]] = [{} for _ in range(1 + max((one.bucket for one in entries.values()), default=-1))]
    for name, entry in entries.items():
        found[entry.bucket][name] = entry
    return found


def bucket_sizes(entries: Mapping[str, Entry]) -> list[int]:
    """Bytes of each bucket."""
    return [sum(entry.n_bytes for entry in part.values()) for part in by_bucket(entries)]


def views(entries: Mapping[str, Entry], buffers: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in their buffers of bytes."""
    return {name: entry.view(buffers[entry.bucket]) for name, entry in entries.items()}


def sum_of_buckets(entries: Mapping[str, Entry], buffers: Sequence[torch.Tensor]) -> int:
    """`content_sum` of all tensors; a bucket of one type is read in one go."""
    import torch

    parts: list[torch.Tensor] = []
    for part, buffer in zip(by_bucket(entries), buffers, strict=True):
        kinds = {entry.dtype for entry in part.values()}
        if len(kinds) == 1:
            parts.append(buffer.view(getattr(torch, kinds.pop())))
        else:
            parts.extend(entry.view(buffer) for entry in part.values())
    return content_sum(parts)
