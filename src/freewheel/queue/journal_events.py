"""What a `Journal` is told, and what it tells: facts about one run, each a small struct.

MessageQueue ── Event ──▶ JournalWriter ──▶ Journal ── CheckpointMark, Step, Stored, Failed ──▶ restore, inspect
"""

from __future__ import annotations

import msgspec

from freewheel.data.group import Ticket
from freewheel.queue.ledger import Frontier

NO_SEQUENCE = -1
"""The sequence of a ticket whose group is gone: only its ordinal is kept."""


# -- what is written --------------------------------------------------------------------------------------------------


class Stored(msgspec.Struct, frozen=True):
    """A scored group."""

    ticket: Ticket
    min_version: int
    data: bytes
    """As `PromptGroup.encode` made it."""
    wall_s: float


class Took(msgspec.Struct, frozen=True):
    """What `step` is made of. Said again, before it is committed, it replaces what was said."""

    step: int
    tickets: tuple[Ticket, ...]
    missing: int = 0
    """Groups that are being replaced, because they turned out stale."""


class Committed(msgspec.Struct, frozen=True):
    """`step` was trained."""

    step: int
    version: int
    """After it."""
    wall_s: float


class VersionCompleted(msgspec.Struct, frozen=True):
    """The run ended between two versions, after `step`: what was trained since the last one became `version`."""

    step: int
    version: int


class Failed(msgspec.Struct, frozen=True):
    """An attempt came to nothing. If its group was stored, it is deleted."""

    ticket: Ticket
    kind: str | None
    """`failures.Kind`; None for what costs no budget: a stale group, a ticket that nobody received ("lost"). What is
    lost with a replica that died has a kind: it may have been the prompt that killed it."""
    reason: str
    detail: str
    wall_s: float


class Abandoned(msgspec.Struct, frozen=True):
    """A prompt ended without being trained."""

    ordinal: int
    attempt: int
    reason: str
    wall_s: float


class GivenBack(msgspec.Struct, frozen=True):
    """Nobody will commit what `step` took: its groups are stored again. Of a committed step it changes nothing."""

    step: int


class Reserved(msgspec.Struct, frozen=True):
    """Sequences below this may have been given out."""

    below: int


Event = Stored | Took | Committed | VersionCompleted | Failed | Abandoned | GivenBack | Reserved


# -- what is read -----------------------------------------------------------------------------------------------------


class CheckpointMark(msgspec.Struct, frozen=True):
    """What a checkpoint says of its moment; all zeros before the first. The journal's base is one: the recorded steps
    begin after it."""

    step: int = 0
    version: int = 0
    frontier: Frontier = Frontier()


class Step(msgspec.Struct, frozen=True):
    """A step's row. Of steps up to the base, tickets may have `NO_SEQUENCE`."""

    step: int
    version: int | None
    """After it; None: taken, not committed."""
    tickets: tuple[Ticket, ...]
    missing: int
    wall_s: float
    """When it was committed; 0 before that."""
    min_version: int | None = None
    """Of its oldest group, once data of its groups was dropped; before that they say it themselves."""
