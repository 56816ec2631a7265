"""`QueueClient`: the message queue as the rollouters, the trainer and the synchronizer use it.

    Rollouter ─────────── admit, put, fail, abandon ──────────┐
    FullyAsyncTrainer ─── begin, take, commit, … ─────────────┼─▶ MessageQueue, or remote_queue ─▶ its actor
    ParameterSynchronizer  confirm_published, fence, … ───────┘

Every method is idempotent: a caller whose queue died repeats the call to the successor. A method with `wait_s` returns
within that time. If it could not finish, its result says "not yet" (an empty admission, False, None, a starved batch)
and the caller asks again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from freewheel.data.group import EncodedGroups, Ticket, tickets_from_bytes, tickets_to_bytes
from freewheel.queue.ledger import Failure, Frontier


@dataclass(frozen=True)
class Admission:
    """The result of `admit`."""

    tickets: list[Ticket]
    closed: bool = False
    """The run is over: no more tickets will be issued."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_admission, (tickets_to_bytes(self.tickets), self.closed)


def _unpickle_admission(tickets: bytes, closed: bool) -> Admission:
    return Admission(tickets_from_bytes(tickets), closed)


@dataclass(frozen=True)
class Taken:
    """The result of `take`: a batch, `starved` (nothing yet, ask again) or `finished` (nothing will come)."""

    state: Literal["batch", "starved", "finished"]
    groups: EncodedGroups | None = None
    waiting_for: str = ""
    """Where the missing groups of a starved trainer are, in words."""
    recorded_until: int = 0
    """The last committed step. Steps up to it are replayed from the journal exactly as they were trained."""


class QueueClient(Protocol):
    """All calls that components make to the queue."""

    # -- rollouters ---------------------------------------------------------------------------------------------------

    async def admit(self, replica: str, *, want: int, load: int, wait_s: float, holding: Collection[int]) -> Admission:
        """Request up to `want` tickets for `replica`, which has `load` groups in generation.

        `holding` are the sequences of all tickets the replica has. Tickets that were issued to it but are missing there
        were lost on the way; their prompts are issued again.
        """

    async def put(self, groups: EncodedGroups, *, wait_s: float) -> bool:
        """Store finished groups. True: they are durable, or no longer wanted. False: not yet."""

    async def fail(self, ticket: Ticket, failure: Failure) -> None:
        """Report a failed attempt. The prompt is issued again, or abandoned when its budget is spent."""

    async def abandon(self, ticket: Ticket, reason: str) -> None:
        """Report that a filter rejected the group. The prompt has ended, and another takes its place."""

    async def release_replica(self, replica: str) -> int:
        """Report that a rollouter died. Its groups are issued again; returns how many."""

    async def fence(self, replica: str, *, fenced: bool) -> None:
        """Stop issuing tickets to a replica whose weights lag, or resume."""

    # -- trainer ------------------------------------------------------------------------------------------------------

    async def begin(self, step: int) -> None:
        """Report that a trainer starts after `step` steps. Groups that an earlier trainer took and did not commit are
        ready again."""

    async def take(self, step: int, *, wait_s: float) -> Taken:
        """Return the groups of `step`: exactly one batch, fewer only in the last step of a run. Every call returns the
        same groups; those of a committed step come from the journal."""

    async def replace_stale(self, step: int, sequences: Collection[int], *, wait_s: float) -> Taken:
        """Return groups of `step` that became too old to the stream, and take others in their place."""

    async def commit(self, step: int, *, wait_s: float) -> int | None:
        """Report that `step` was trained. Returns the weight version after it, None while it is not durable."""

    async def give_back(self, step: int) -> None:
        """Report that `step` will not be trained on by the trainer that took it. Its groups are ready again."""

    async def read_frontier(self, step: int, *, wait_s: float) -> Frontier | None:
        """Return the prompts that had ended when `step` was committed; None while the journal has not answered."""

    async def confirm_checkpoint(self, step: int) -> None:
        """Report that no resume will go back before `step`: the journal may drop earlier groups. May have no effect;
        the next checkpoint makes up for it."""

    async def complete_version(self, *, wait_s: float) -> int | None:
        """Complete the current weight version at the end of a run. Returns it, None while that is not durable."""

    # -- synchronizer -------------------------------------------------------------------------------------------------

    async def confirm_published(self, version: int) -> None:
        """Report that every engine in use holds `version`."""

    async def wait_settled(self, *, wait_s: float) -> bool:
        """Wait until nothing is in progress and nothing more is admitted under the current weights."""
