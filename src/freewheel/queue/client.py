"""`QueueClient`: the message queue as the rollouters, the trainer and the synchronizer use it.

    Rollouter ─────────── admit, put, fail, abandon ──────────┐
    FullyAsyncTrainer ─── begin, take, commit, … ─────────────┼─▶ QueueClient ── call ─▶ the actor of the MessageQueue
    ParameterSynchronizer  confirm_published, fence, … ───────┘

Every method is idempotent: a caller whose queue died repeats the call to the successor. A method with `wait_s` returns
within that time. If it could not finish, its result says "not yet" (an empty admission, False, None, `Starved`)
and the caller asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from freewheel.data.group import EncodedGroups, Ticket
from freewheel.queue.ledger import Failure, Frontier

T = TypeVar("T")
Answer = Coroutine[Any, Any, T]


@dataclass(frozen=True)
class Admission:
    """The result of `admit`."""

    tickets: list[Ticket]
    closed: bool = False
    """The run is over: no more tickets will be issued."""


@dataclass(frozen=True)
class Taken:
    """The groups of a step."""

    groups: EncodedGroups
    recorded_until: int
    """The last committed step. Steps up to it are replayed from the journal exactly as they were trained."""


@dataclass(frozen=True)
class Starved:
    """The groups of a step are not complete yet: ask again."""

    waiting_for: str
    """Where the missing groups are, in words."""


class QueueClient:
    """All calls that components make to the queue. Where the queue is in the same process, it is its own client."""

    def __init__(self, call: Callable[..., Answer[Any]]) -> None:
        """`call`: sends a method's name and arguments to the queue."""
        self._call = call

    # -- rollouters ---------------------------------------------------------------------------------------------------

    def admit(
        self, replica: str, *, want: int, load: int, wait_s: float, holding: Collection[int]
    ) -> Answer[Admission]:
        """Request up to `want` tickets for `replica`, which has `load` groups in generation.

        `holding` are the sequences of all tickets the replica has. Tickets that were issued to it but are missing there
        were lost on the way; their prompts are issued again.
        """
        return self._call("admit", replica, want=want, load=load, wait_s=wait_s, holding=holding)

    def put(self, groups: EncodedGroups, *, wait_s: float) -> Answer[bool]:
        """Store finished groups. True: they are durable, or no longer wanted. False: not yet."""
        return self._call("put", groups, wait_s=wait_s)

    def fail(self, ticket: Ticket, failure: Failure) -> Answer[None]:
        """Report a failed attempt. The prompt is issued again, or abandoned when its budget is spent."""
        return self._call("fail", ticket, failure)

    def abandon(self, ticket: Ticket, reason: str) -> Answer[None]:
        """Report that a filter rejected the group. The prompt has ended, and another takes its place."""
        return self._call("abandon", ticket, reason)

    def release_replica(self, replica: str) -> Answer[int]:
        """Report that a rollouter died. Its groups are issued again; returns how many."""
        return self._call("release_replica", replica)

    def fence(self, replica: str, *, fenced: bool) -> Answer[None]:
        """Stop issuing tickets to a replica whose weights lag, or resume."""
        return self._call("fence", replica, fenced=fenced)

    # -- trainer ------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Answer[None]:
        """Report that a trainer starts after `step` steps. Groups that an earlier trainer took and did not commit are
        ready again."""
        return self._call("begin", step)

    def take(self, step: int, *, wait_s: float) -> Answer[Taken | Starved | None]:
        """Return the groups of `step`: exactly one batch, fewer only in the last step of a run. Every call returns the
        same groups; those of a committed step come from the journal. None: the run has no more."""
        return self._call("take", step, wait_s=wait_s)

    def replace_stale(self, step: int, sequences: Collection[int], *, wait_s: float) -> Answer[Taken | Starved | None]:
        """Return groups of `step` that became too old to the stream, and take others in their place."""
        return self._call("replace_stale", step, sequences, wait_s=wait_s)

    def commit(self, step: int, *, wait_s: float) -> Answer[int | None]:
        """Report that `step` was trained. Returns the weight version after it, None while it is not durable."""
        return self._call("commit", step, wait_s=wait_s)

    def give_back(self, step: int) -> Answer[None]:
        """Report that `step` will not be trained on by the trainer that took it. Its groups are ready again."""
        return self._call("give_back", step)

    def read_frontier(self, step: int, *, wait_s: float) -> Answer[Frontier | None]:
        """Return the prompts that had ended when `step` was committed; None while the journal has not answered."""
        return self._call("read_frontier", step, wait_s=wait_s)

    def confirm_checkpoint(self, step: int) -> Answer[None]:
        """Report that no resume will go back before `step`: the journal may drop earlier groups. May have no effect;
        the next checkpoint makes up for it."""
        return self._call("confirm_checkpoint", step)

    def complete_version(self, *, wait_s: float) -> Answer[int | None]:
        """Complete the current weight version at the end of a run. Returns it, None while that is not durable."""
        return self._call("complete_version", wait_s=wait_s)

    # -- synchronizer -------------------------------------------------------------------------------------------------

    def confirm_published(self, version: int) -> Answer[None]:
        """Report that every engine in use holds `version`."""
        return self._call("confirm_published", version)

    def wait_settled(self, *, wait_s: float) -> Answer[bool]:
        """Wait until nothing is in progress and nothing more is admitted under the current weights."""
        return self._call("wait_settled", wait_s=wait_s)
