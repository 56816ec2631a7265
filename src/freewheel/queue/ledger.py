"""`Ledger`: every prompt of the stream ends exactly once, trained at a version or abandoned for a reason. Pure.

    issue ─▶ attempt: admitted ─▶ queued ─▶ taken ─▶ trained@v
      ▲                  └─ fail / stale / lost ─┐
      └── re-issue while its budget lasts ◀──────┴─▶ abandoned(reason)

The ledger lives in memory. A checkpoint keeps its `Frontier`. After a restart, `reopen` adds what the journal knows
beyond that: attempts that are still live, and failures that still count (`freewheel.queue.restore`).

A `Failure` says why an attempt failed. It is classified before it crosses a process, because the remedies differ:

- infra: something other than the prompt failed (an engine, a process, a time-out). Try again elsewhere. - data: this
prompt, or its scoring, is at fault. Another try is unlikely to help.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec


class Frontier(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a ledger that a checkpoint keeps. Ordinals below `low` and those in `ended` have ended."""

    low: int = 0
    ended: tuple[int, ...] = ()
    trained: int = 0
    abandoned: dict[str, int] = {}


@dataclass
class _Open:
    attempts: int = 0
    failed: dict[Kind, int] = field(default_factory=dict)
    live: bool = False


class Ledger:
    """No ordinal is skipped and none ends twice. Assertions check this, whatever callers do."""

    def __init__(self, *, total: int | None = None, frontier: Frontier | None = None) -> None:
        start = frontier or Frontier()
        self.total = total
        """Number of ordinals in the stream; None: endless."""
        self.trained = start.trained
        self.abandoned: Counter[str] = Counter(start.abandoned)
        self.failures: Counter[str] = Counter()
        """Failed attempts by reason, whether the prompt was abandoned or not."""
        self._low = start.low
        self._ended = set(start.ended)
        self._next = start.low
        self._open: dict[int, _Open] = {}
        self._again: list[int] = []

    # -- attempts -----------------------------------------------------------------------------------------------------

    def issue(self) -> tuple[int, int] | None:
        """Return (ordinal, earlier attempts) of the next prompt, repeated prompts first. None: none is left now."""
        if self._again:
            ordinal = heapq.heappop(self._again)
        else:
            if self.exhausted:
                return None
            ordinal = self._next
            self._next += 1
            self._open[ordinal] = _Open()
        entry = self._open[ordinal]
        assert not entry.live, f"ordinal {ordinal} is being attempted"
        entry.live = True
        entry.attempts += 1
        return ordinal, entry.attempts - 1

    @property
    def exhausted(self) -> bool:
        """Whether `issue` would return None."""
        while self._next in self._ended or self._next in self._open:
            self._next += 1
        return not self._again and self.total is not None and self._next >= self.total

    def fail(self, ordinal: int, failure: Failure) -> bool:
        """The attempt failed. Returns whether the prompt will be attempted again. If not, its budget is spent and it is
        abandoned."""
        self.failures[failure.reason] += 1
        entry = self._open[ordinal]
        entry.failed[failure.kind] = entry.failed.get(failure.kind, 0) + 1
        if entry.failed[failure.kind] >= BUDGETS[failure.kind]:
            self.abandon(ordinal, failure.reason)
            return False
        self._reissue(ordinal)
        return True

    def retry(self, ordinal: int, reason: str) -> None:
        """Repeat an attempt at no cost, because it failed through no fault of the prompt (stale, lost)."""
        self.failures[reason] += 1
        self._reissue(ordinal)

    def reopen(self, ordinal: int, *, attempts: int, failed: Mapping[Kind, int], live: bool) -> None:
        """Add a prompt from before a restart. `live`: an attempt at it continues or waits to be trained. If not, it is
        issued again. Earlier failures still count."""
        assert not self.has_ended(ordinal), f"ordinal {ordinal} has ended"
        assert ordinal not in self._open, f"ordinal {ordinal} is open"
        assert all(count < BUDGETS[kind] for kind, count in failed.items()), f"ordinal {ordinal} has no budget left"
        self._open[ordinal] = _Open(attempts, dict(failed), live)
        if not live:
            heapq.heappush(self._again, ordinal)

    def _reissue(self, ordinal: int) -> None:
        entry = self._open[ordinal]
        assert entry.live, f"ordinal {ordinal} is not being attempted"
        entry.live = False
        heapq.heappush(self._again, ordinal)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def train(self, ordinals: Iterable[int]) -> None:
        for ordinal in ordinals:
            self._end(ordinal)
            self.trained += 1

    def abandon(self, ordinal: int, reason: str) -> None:
        self._end(ordinal)
        self.abandoned[reason] += 1

    def _end(self, ordinal: int) -> None:
        entry = self._open.pop(ordinal, None)
        assert entry is not None and entry.live, f"ordinal {ordinal} has ended, or was not issued"
        self._ended.add(ordinal)
        while self._low in self._ended:
            self._ended.remove(self._low)
            self._low += 1
        self._next = max(self._next, self._low)  # skip ordinals that ended before a resume

    def has_ended(self, ordinal: int) -> bool:
        return ordinal < self._low or ordinal in self._ended

    def frontier(self) -> Frontier:
        return Frontier(
            low=self._low, ended=tuple(sorted(self._ended)), trained=self.trained, abandoned=dict(self.abandoned)
        )


class Kind(StrEnum):
    INFRA = "infra"
    DATA = "data"


BUDGETS = {Kind.INFRA: 5, Kind.DATA: 2}
"""Failures of one prompt before it is abandoned. A prompt that kills engines must end at some point. One that cannot be
rendered or scored fails the same way each time."""

Reason = Literal["engine", "timeout", "lost", "stale", "prompt", "reward", "hook"]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """One failed attempt."""

    kind: Kind
    reason: Reason
    detail: str = ""


def infra_failure(reason: Reason, error: object) -> Failure:
    return Failure(Kind.INFRA, reason, str(error))


def data_failure(reason: Reason, error: object) -> Failure:
    return Failure(Kind.DATA, reason, str(error))
