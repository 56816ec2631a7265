"""What a `MessageQueue` answers: facts that travel to other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from freewheel.data.group import Block, Ticket, tickets_from_bytes, tickets_to_bytes


@dataclass(frozen=True)
class Admission:
    """An answer to `admit`."""

    tickets: list[Ticket]
    closed: bool = False
    """No ticket will come any more."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _admission, (tickets_to_bytes(self.tickets), self.closed)


def _admission(tickets: bytes, closed: bool) -> Admission:
    return Admission(tickets_from_bytes(tickets), closed)


@dataclass(frozen=True)
class Taken:
    """An answer to `take`: a batch, `starved` (nothing yet: ask again), or `finished` (nothing will come)."""

    state: Literal["batch", "starved", "finished"]
    block: Block | None = None
    waiting_for: str = ""
    """Where the groups are that a starved trainer waits for."""
    recorded_until: int = 0
    """Steps up to this one are committed: those that a trainer takes again come as they were."""
