"""A receiver of broadcast weights in a test's process."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from freewheel.sync.broadcast import Header
from freewheel.sync.weights import Entry, sum_of_buckets, views


class Staged:
    """A `Receiver` with room for a second model: a version is complete before any of it is used."""

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
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def bucket(self, entries: Mapping[str, Entry], buffer: torch.Tensor) -> None:
        self._arrived.append(buffer)

    def whole(self, header: Header) -> bool:
        return sum_of_buckets(header.entries, self._arrived) == header.checksum

    def take(self, header: Header) -> None:
        self.tensors = views(header.entries, self._arrived)
        self.version = header.version
        self._arrived = []
