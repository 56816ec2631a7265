"""What `ParameterSynchronizer` knows of each engine: the version it holds, whether it may work, when it was compared.

    join ─▶ never compared ─▶ compared (due) ─▶ 1, 2, … syncs on trust ─▶ compared …      a failure: never compared
    handed a version ─▶ may be reading it, waited for or not ─▶ it answered for that one or a later one ─▶ not any more

Pure: no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

MOST_UNANSWERED = 2
"""Versions that an engine is handed before it has answered for any: each is held for it until then."""
NOTHING = -1
"""The version of a replica that holds none that is known."""


class Replica(Protocol):
    """An engine's end of the transport."""

    async def load_weights(self, version: int, weights: Any, *, verify: bool) -> int | None:
        """Gives `content_sum` of what the engine holds then, where `verify`. None: it was not asked, or cannot say."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A version that is to reach the engines."""

    version: int
    weights: Any
    checksum: int | None
    n_bytes: int | None = None
    """What it weighs, where that is known."""


@dataclass
class Attempts:
    """How one engine fared in one sync."""

    took_s: float = 0.0
    attempts: int = 0
    error: str = ""
    """Of the last attempt that failed, also where a later one came through."""


@dataclass
class Member:
    """One replica of the communication group."""

    replica: Replica
    version: int
    fenced: bool = False
    gone: bool = False
    """It died, and its successor has not joined."""
    trusted: int | None = None
    """Syncs since what it holds was compared with what it was sent; None: never in this life, or it failed since."""
    reading: set[int] = field(default_factory=set)
    """Versions that it was handed and has not answered for: a call that nobody waits for any more may be at work on
    one, and takes those behind it afterwards."""
    last: Attempts = field(default_factory=Attempts)
    """How it fared in the sync that is under way, or was last."""
    inherited: bool = False
    """A synchronizer that died may have handed it more, which it has not answered for."""

    def due(self, every: int) -> bool:
        """Whether the next sync is compared: the first, one after a failure, and every `every`; 0: never."""
        return every > 0 and (self.trusted is None or self.trusted + 1 >= every)

    @property
    def busy(self) -> bool:
        return len(self.reading) >= MOST_UNANSWERED

    def handed(self, version: int) -> None:
        self.reading.add(version)

    def answered(self, version: int) -> None:
        """Whatever it said. It takes one version after the other: what it was handed before is behind it."""
        self.reading = {one for one in self.reading if one > version}
        self.inherited = False

    def took(self, version: int, *, compared: bool) -> None:
        self.version = version
        if compared:
            self.trusted = 0
        elif self.trusted is not None:
            self.trusted += 1

    def failed(self, why: str = "") -> None:
        """It did not take what it was handed, as far as is known."""
        self.trusted = None
        self.last.error = why

    def died(self, why: str = "") -> None:
        self.gone = True
        self.reading.clear()
        self.last.error = why
        self.inherited = False


@dataclass
class Times:
    """How long syncs took."""

    count: int = 0
    total_s: float = 0.0
    last_s: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.last_s = seconds
        self.longest_s = max(self.longest_s, seconds)
