"""Exact processor sharing in virtual time: what a batching inference server does to its latencies past its knee.

With n requests in service each goes on at the rate r = min(1, knee / n). Let virtual time V grow at the rate r; then a
request that joins at V0 and needs s seconds of service ends when V = V0 + s, whoever joins or leaves meanwhile.
A heap of those virtual ends is all the state there is, and join, leave and finish cost O(log n).
"""

from __future__ import annotations

from heapq import heappop, heappush


class ProcessorSharing:
    """Who is in service and when each ends. Time is whatever the caller says it is; it must not run backwards."""

    def __init__(self, knee: float | None) -> None:
        self._knee = knee
        self._virtual = 0.0
        self._now = 0.0
        self._ends: list[tuple[float, int]] = []
        self._active: set[int] = set()
        self._finished: list[int] = []
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._active)

    def join(self, now: float, service_s: float) -> int:
        """Start a request that needs `service_s` when alone; the ticket comes back from `finished` when it is done."""
        self._advance(now)
        ticket = self._tickets
        self._tickets += 1
        self._active.add(ticket)
        heappush(self._ends, (self._virtual + service_s, ticket))
        return ticket

    def leave(self, now: float, ticket: int) -> None:
        """Take out a request that nobody waits for any more; the others get its share from now on."""
        self._advance(now)
        self._active.discard(ticket)  # its entry in the heap is skipped when it comes up

    def finished(self, now: float) -> list[int]:
        """The tickets that ended since the last call, in the order in which they ended."""
        self._advance(now)
        done, self._finished = self._finished, []
        return done

    def next_finish(self) -> float | None:
        """When the next request ends if nobody joins or leaves before; None if none is in service."""
        if self._finished:
            return self._now
        self._skip_the_gone()
        if not self._ends:
            return None
        return self._now + (self._ends[0][0] - self._virtual) / self._rate()

    def _rate(self) -> float:
        return 1.0 if self._knee is None else min(1.0, self._knee / len(self._active))

    def _skip_the_gone(self) -> None:
        while self._ends and self._ends[0][1] not in self._active:
            heappop(self._ends)

    def _advance(self, now: float) -> None:
        """Move to `now` end by end, since each end changes the rate; a late caller loses no exactness."""
        while True:
            self._skip_the_gone()
            if not self._ends:
                break
            end, ticket = self._ends[0]
            rate = self._rate()
            ends_at = self._now + (end - self._virtual) / rate
            if ends_at > now:
                self._virtual += (now - self._now) * rate
                break
            heappop(self._ends)
            self._active.discard(ticket)
            self._finished.append(ticket)
            self._virtual, self._now = end, max(self._now, ends_at)
        if not self._ends:
            self._virtual = 0.0  # a fresh origin whenever it is idle keeps the floats small
        self._now = max(self._now, now)
