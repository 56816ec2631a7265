"""Who gets which slot. Pure: no tensors, no clock; the engine's thread is its only caller.

    add(request, n) ─▶ waiting ──admit()──▶ slot ──release(slot)──▶ free again
                          └──────── drop(request) ────────▶ gone

Requests are served in the order in which they came, sample by sample: a request's samples may enter at different times,
but none enters before all samples of the requests ahead of it have.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Placement(Generic[Key]):
    """A sample gets a slot."""

    request: Key
    index: int
    """Which of the request's samples."""
    slot: int


@dataclass
class _Waiting(Generic[Key]):
    request: Key
    samples: int
    entered: int = 0


class Scheduler(Generic[Key]):
    """Every slot holds one sample at most; every sample gets a slot once, unless its request is dropped before."""

    def __init__(self, *, slots: int, refill: int = 1) -> None:
        """`refill`: how many slots must be free before samples enter beside others that run."""
        assert slots > 0
        self.slots = slots
        self._refill = refill
        self._free = list(range(slots))  # a heap: low slots first keeps the ones in use together
        self._waiting: deque[_Waiting[Key]] = deque()
        self._held: dict[int, tuple[Key, int]] = {}
        self._slots_of: dict[Key, set[int]] = {}
        self._samples_waiting = 0

    @property
    def running(self) -> int:
        """Samples that hold a slot."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """Samples that wait for one."""
        return self._samples_waiting

    def add(self, request: Key, samples: int) -> None:
        assert samples > 0 and request not in self._slots_of
        self._waiting.append(_Waiting(request, samples))
        self._slots_of[request] = set()
        self._samples_waiting += samples

    def admit(self) -> list[Placement[Key]]:
        """Fills the free slots, as far as samples wait; but not for a few of them, as entering costs what it costs."""
        placed: list[Placement[Key]] = []
        if self._held and len(self._free) < min(self._refill, self._samples_waiting):
            return placed
        while self._free and self._waiting:
            head = self._waiting[0]
            slot = heapq.heappop(self._free)
            placed.append(Placement(head.request, head.entered, slot))
            self._held[slot] = (head.request, head.entered)
            self._slots_of[head.request].add(slot)
            self._samples_waiting -= 1
            head.entered += 1
            if head.entered == head.samples:
                self._waiting.popleft()
        return placed

    def upcoming(self) -> Iterator[Key]:
        """Requests with samples that wait, in order."""
        return (entry.request for entry in self._waiting)

    def holds(self, slot: int) -> bool:
        return slot in self._held

    def slots_of(self, request: Key) -> list[int]:
        """The slots that a request's samples hold."""
        return sorted(self._slots_of.get(request, ()))

    def holder(self, slot: int) -> tuple[Key, int]:
        """(request, index of the sample) of a slot in use."""
        return self._held[slot]

    def release(self, slot: int) -> None:
        """The slot's sample has ended."""
        request, _ = self._held.pop(slot)
        held = self._slots_of[request]
        held.remove(slot)
        heapq.heappush(self._free, slot)
        waits_still = bool(self._waiting) and self._waiting[0].request == request  # only the first may have entered
        if not held and not waits_still:
            del self._slots_of[request]

    def drop(self, request: Key) -> list[int]:
        """Forgets a request; gives the slots that it held. Unknown ones hold none."""
        freed = sorted(self._slots_of.pop(request, ()))
        for slot in freed:
            del self._held[slot]
            heapq.heappush(self._free, slot)
        for entry in self._waiting:
            if entry.request == request:
                self._samples_waiting -= entry.samples - entry.entered
                self._waiting.remove(entry)
                break
        return freed

    def started(self) -> list[Key]:
        """Requests of which at least one sample holds a slot."""
        return [request for request, held in self._slots_of.items() if held]

    def known(self) -> list[Key]:
        """All requests that have not ended."""
        return list(self._slots_of)
