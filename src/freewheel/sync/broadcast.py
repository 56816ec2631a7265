"""Weights from one sender to all members of a group: a header, then bucket after bucket, whole or not at all.

    sender                                       receivers
    header: version, what lies where, sum ─────▶ a late one, or one that does not fit: no
       ◀──────────────── agreed? ──────────────▶
    bucket 0, bucket 1, … ─────────────────────▶ into memory of the receiver's own, or straight into an engine
       ◀──────────────── agreed? ──────────────▶ all there, and their sum is right ─▶ taken

Nobody takes a version that not all have whole, unless its `Sink` takes buckets as they come: an engine without room for
a second model holds a mixture when the sender dies between two of them, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from freewheel.sync.buckets import bucket_sizes, by_bucket, sum_of_buckets, views
from freewheel.sync.groups import Group
from freewheel.sync.weights import Entry

if TYPE_CHECKING:
    import torch


class VersionRefused(RuntimeError):
    """A member of the group does not want this version: it has a later one, or cannot hold it. Nothing was sent."""


class VersionSpoiled(RuntimeError):
    """What arrived somewhere is not what was sent. Nobody took it."""


class Header(msgspec.Struct, frozen=True):
    """What comes before the buckets."""

    version: int
    checksum: int
    entries: dict[str, tuple[str, tuple[int, ...], int, int]]
    """Name → type, shape, start, bucket."""

    @classmethod
    def of(cls, version: int, checksum: int, entries: Mapping[str, Entry]) -> Header:
        told = {name: (one.dtype, one.shape, one.start, one.bucket) for name, one in entries.items()}
        return cls(version, checksum, told)

    def contents(self) -> dict[str, Entry]:
        return {name: Entry(*told) for name, told in self.entries.items()}


def send(
    group: Group, version: int, checksum: int, entries: Mapping[str, Entry], buffers: Sequence[torch.Tensor]
) -> None:
    """To all members, who `receive` meanwhile; returns when they have it. In a thread: takes as long as the slowest."""
    import torch

    header = msgspec.json.encode(Header.of(version, checksum, entries))
    group.broadcast(torch.tensor([len(header)], device=group.device))
    group.broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8).to(group.device))
    if not group.agreed(True):
        raise VersionRefused(f"version {version} is not wanted: a receiver has a later one, or no room for it")
    for buffer in buffers:
        group.broadcast(buffer)
    if not group.agreed(True):
        raise VersionSpoiled(f"version {version} did not arrive as it was sent, and nobody took it")


class Sink(Protocol):
    """Where a version goes."""

    def wants(self, header: Header) -> bool: ...

    def buffer(self, size: int) -> torch.Tensor:
        """For the next bucket."""

    def bucket(self, entries: Mapping[str, Entry], buffer: torch.Tensor) -> None:
        """It has arrived."""

    def whole(self, header: Header) -> bool:
        """All have. False: something is wrong with them."""

    def take(self, header: Header) -> None:
        """Everybody has it."""


def receive(group: Group, sink: Sink) -> int:
    """The next version that the sender sends; gives its number. Raises `VersionRefused`, `VersionSpoiled`, and what the
    group raises where the sender died: then nothing was taken."""
    import torch

    size = torch.zeros(1, dtype=torch.int64, device=group.device)
    group.broadcast(size)
    told = torch.empty(int(size.item()), dtype=torch.uint8, device=group.device)
    group.broadcast(told)
    header = msgspec.json.decode(told.cpu().numpy().tobytes(), type=Header)
    if not group.agreed(sink.wants(header)):
        raise VersionRefused(f"version {header.version} is not wanted by all")
    entries = header.contents()
    for part, n_bytes in zip(by_bucket(entries), bucket_sizes(entries), strict=True):
        buffer = sink.buffer(n_bytes)
        group.broadcast(buffer)
        sink.bucket(part, buffer)
    if not group.agreed(sink.whole(header)):
        raise VersionSpoiled(f"version {header.version} did not arrive as it was sent")
    sink.take(header)
    return header.version


class Staged:
    """A `Sink` with room for a second model: a version is all there before anything of it is used."""

    def __init__(self, *, device: torch.device, version: int) -> None:
        self.version = version
        self.tensors: dict[str, torch.Tensor] = {}
        """Of `version`."""
        self._device = device
        self._arrived: list[torch.Tensor] = []

    def wants(self, header: Header) -> bool:
        self._arrived = []
        return header.version > self.version

    def buffer(self, size: int) -> torch.Tensor:
        import torch

        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def bucket(self, entries: Mapping[str, Entry], buffer: torch.Tensor) -> None:
        self._arrived.append(buffer)

    def whole(self, header: Header) -> bool:
        return sum_of_buckets(header.contents(), self._arrived) == header.checksum

    def take(self, header: Header) -> None:
        self.tensors = views(header.contents(), self._arrived)
        self.version = header.version
        self._arrived = []
