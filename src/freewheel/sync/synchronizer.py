"""`ParameterSynchronizer`: brings each new version to every engine, and says so only when all in use hold it.

    trainer ── submit(v) ─▶ pending ─▶ (drain: wait until settled) ─▶ load on all replicas ─▶ confirm_published(v)
                 │ newest wins           │ waits for: the queue          │ retries, deadline      │ slots are released
                 ▼ never waits           ▼ (sync and one_step_off)       ▼ lagging: fenced, tried again, rejoined

A failed sync leaves the old version serving. Of a replica that died only its successor is waited for, which whoever
watches the processes starts and lets `join`. Transport is the caller's: `weights` is handed to `Replica.load_weights`
as it came (an object-store reference under Ray), and who submits is told which versions may still be read.

What an engine holds is compared with what was sent at its first sync, after it failed, and every `verify_every` syncs:
an engine that takes a version without an error has it, but for what no error is raised for.

Weights die with the trainer that holds them (`WeightsGone`). Then nothing is changed and nobody fenced: its successor
submits the same version again, which is brought to every engine, those included that had it. A queue's successor is
told what holds by `announce`; a synchronizer's own starts with the `versions` that engines are at.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from freewheel.observe import trace
from freewheel.queue.client import QueueClient
from freewheel.sync.members import NOTHING, Attempts, Member, Pending, Replica, Times
from freewheel.sync.recording import SyncRows
from freewheel.sync.weights import WeightsGone

__all__ = ["ParameterSynchronizer", "Replica", "ReplicaGone", "SyncFailed", "WeightsGone"]

log = logging.getLogger("freewheel.sync")

State = Literal["idle", "draining", "loading", "closed"]
SETTLE_WAIT_S = 5.0
"""A wait for the queue is asked for anew this often, so that a queue that went away is noticed."""
BETWEEN_ROUNDS_S = 1.0
"""Least time between two rounds over engines that fail while another one's successor is awaited, however short the
retry delay is: one that fails at once would be asked without a pause for as long as a process takes to start."""


class SyncFailed(RuntimeError):
    """No engine took a version, however often it was tried."""


class ReplicaGone(Exception):
    """Raised by `Replica.load_weights`: its process has died, and trying again is of no use."""


class ParameterSynchronizer:
    """A version is published only after every engine in use confirmed it."""

    def __init__(
        self,
        *,
        replicas: Mapping[str, Replica],
        queue: QueueClient,
        timeout_s: float,
        max_retries: int,
        retry_delay_s: float,
        verify_every: int,
        version: int = 0,
        versions: Mapping[str, int] | None = None,
        drain: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`version`: what is published. `versions`: what each replica holds, where this one takes over from another
        that died; who holds less than is published gets no work before it has been brought up to date. `verify_every`:
        0 compares nothing."""
        held = {name: version if versions is None else versions.get(name, NOTHING) for name in replicas}
        self.group = {
            name: Member(replica, held[name], fenced=held[name] < version, inherited=versions is not None)
            for name, replica in replicas.items()
        }
        self.state: State = "idle"
        self.version = version
        """The newest that is published."""
        self.param_sync_count = 0
        self.sync_failures = 0
        self.times = Times()
        self.rows = SyncRows()
        self._queue = queue
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._retry_delay_s = retry_delay_s
        self._verify_every = verify_every
        self._drain = drain
        self._clock = clock
        self._pending: Pending | None = None
        self._now: Pending | None = None
        """What is being brought to the engines."""
        self._newest: Pending | None = None
        """What was published last, for who joins. None: nobody has handed it over, or it is gone."""
        self._begins_at = version if versions is None else None
        """The version of the files that replicas are started from, as far as that is known."""
        self._joined = 0
        """How often a replica has joined."""
        self._changed = asyncio.Condition()
        self._asked: set[asyncio.Future[int | None]] = set()
        """Calls to engines, those that nobody waits for included."""
        self._loading = asyncio.Lock()
        """Who joins gets the newest version, and not the one before a sync that is under way."""

    # -- the trainer's side -------------------------------------------------------------------------------------------

    async def submit(
        self, version: int, weights: Any, checksum: int | None = None, n_bytes: int | None = None
    ) -> list[int] | None:
        """Weights to bring to all engines, also where they hold that version already: by a trainer that died. Returns
        at once, with `in_use`; one that is still waiting is superseded."""
        await self._await_turn(Pending(version=version, weights=weights, checksum=checksum, n_bytes=n_bytes))
        return self.in_use()

    async def prime(
        self, version: int, weights: Any, checksum: int | None = None, n_bytes: int | None = None
    ) -> list[int] | None:
        """The weights that a trainer begins with; gives `in_use`. Engines that started from the same files hold them,
        and only who joins later needs them; a trainer in the place of another may be behind (it will submit what is
        published when it is there), or ahead of what its predecessor still brought to the engines."""
        given = Pending(version=version, weights=weights, checksum=checksum, n_bytes=n_bytes)
        if version == self.version:
            self._newest = given
        waiting = any(member.fenced for member in self.group.values())
        if version > self.version or (version == self.version and waiting):
            await self._await_turn(given)
        return self.in_use()

    def in_use(self) -> list[int] | None:
        """Versions whose weights may be read from now on: the newest published, for who joins; what is on its way or
        waits; what an engine was handed and has not answered for. Whoever holds others may let go of them. None: what
        engines were handed before this one took over is not known, and nothing may be let go of."""
        if any(member.inherited for member in self.group.values()):
            return None
        held = {one.version for one in (self._newest, self._now, self._pending) if one is not None}
        return sorted(held.union(*(member.reading for member in self.group.values())))

    async def _await_turn(self, pending: Pending) -> None:
        async with self._changed:
            self._pending = pending
            self._changed.notify_all()

    async def announce(self) -> None:
        """For a queue that was started anew: what is published, and who is fenced off."""
        async with self._loading:
            for name, member in self.group.items():
                await self._queue.fence(name, fenced=member.fenced)
            await self._queue.confirm_published(self.version)

    async def wait_published(self, version: int, *, wait_s: float) -> bool:
        async with self._changed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(lambda: self.version >= version)
            except TimeoutError:
                return False
        return True

    # -- the work -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled. Raises `SyncFailed` when no engine can be reached any more."""
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._pending is not None)
                    pending, self._pending = self._pending, None
                    self._now = pending
                assert pending is not None
                if pending.version >= self.version:  # else it is of a trainer that died, and has been overtaken
                    await self._bring(pending)
                self._now = None
        finally:
            self.state = "closed"

    async def _bring(self, pending: Pending) -> None:
        if self._drain and pending.version > self.version:  # what is published already changes nothing
            self.state, since = "draining", self._clock()
            while self._anybody_works and not await self._queue.wait_settled(wait_s=SETTLE_WAIT_S):
                pass
            trace.span("drain", since, self._clock(), {"version": pending.version})
        self.state = "loading"
        loaded = await self._timed(pending)
        async with self._changed:
            self.version = pending.version if loaded else self.version
            self.state = "idle"
            self._changed.notify_all()
        if loaded:
            log.info(
                "Parameter sync: version %d on %d of %d engines in %.3f s",
                pending.version,
                loaded,
                len(self.group),
                self.times.last_s,
                extra={"version": pending.version},
            )

    @property
    def _anybody_works(self) -> bool:
        """Where all are fenced off or gone nothing is in progress: what there is room for waits for this version."""
        return any(not (member.fenced or member.gone) for member in self.group.values())

    async def _timed(self, pending: Pending) -> int:
        """`_loaded`, with a row of how it went."""
        since, loaded = self._clock(), 0
        for member in self.group.values():
            member.last = Attempts()
        try:
            loaded = await self._loaded(pending)
            return loaded
        finally:
            until = self._clock()
            self.rows.add(pending, self.group, since, until, failed=not loaded)
            if loaded:
                self.times.add(until - since)
                self.param_sync_count += 1

    async def _loaded(self, pending: Pending) -> int:
        """How many engines took it; 0: it was given up, and what comes next is to be brought instead."""
        joined = self._joined
        while True:
            try:
                loaded = await self._load_all(pending)
            except WeightsGone as error:
                log.warning(
                    "Parameter sync: version %d is gone with its trainer (%s); version %d serves until it comes again",
                    pending.version,
                    error,
                    self.version,
                    extra={"version": pending.version},
                )
                return 0
            if any(loaded) or self._pending is not None:
                return sum(loaded)
            if not any(member.gone for member in self.group.values()):
                raise self._failed(pending.version)
            joined = await self._next_join(joined)

    async def _next_join(self, joined: int) -> int:
        """Waits for: `join`, by the one who watches over the processes, or another version. One that lives, and failed,
        is tried again in the meantime."""
        alive = not all(member.gone for member in self.group.values())
        try:
            async with asyncio.timeout(max(self._retry_delay_s, BETWEEN_ROUNDS_S) if alive else None):
                async with self._changed:
                    await self._changed.wait_for(lambda: self._joined != joined or self._pending is not None)
        except TimeoutError:
            pass
        return self._joined

    async def _load_all(self, pending: Pending) -> list[bool]:
        """One round over all replicas; the version is published where any of them has it then. `WeightsGone`: not all
        of them could be asked."""
        async with self._loading:
            # One that was fenced off has had its chances: it gets one, and does not hold up the others for long.
            chances = {name: 1 if member.fenced else self._max_retries + 1 for name, member in self.group.items()}
            asked = [self._load(name, pending, chances[name]) for name in self.group]
            found = await asyncio.gather(*asked, return_exceptions=True)
            for one in found:
                if isinstance(one, BaseException):
                    raise one
            loaded = [one is True for one in found]
            if any(loaded):
                self._newest = pending
                await self._queue.confirm_published(pending.version)
        return loaded

    def _failed(self, version: int) -> SyncFailed:
        return SyncFailed(
            f"no engine took version {version} in {self._max_retries + 1} attempts of at most {self._timeout_s:g} s "
            f"each; version {self.version} is still serving. See the errors above; a slow transfer needs a longer "
            "async_training.sync_timeout"
        )

    async def _load(self, name: str, pending: Pending, chances: int) -> bool:
        """Brings one replica up to date; one that will not come is fenced off until a later version reaches it."""
        member, since = self.group[name], self._clock()
        try:
            return await self._taken(name, member, pending, chances)
        finally:
            until = self._clock()
            member.last.took_s += until - since
            told = {"version": pending.version, "attempts": member.last.attempts}
            trace.span("load", since, until, told, track=name)

    async def _taken(self, name: str, member: Member, pending: Pending, chances: int) -> bool:
        about = {"version": pending.version}
        if member.version > pending.version and not member.gone:  # it took a later one, before its trainer died
            await self._rejoin(name, member)
            return True
        for attempt in range(chances if not member.gone else 0):
            if attempt:
                await asyncio.sleep(self._retry_delay_s)
            compares = pending.checksum is not None and member.due(self._verify_every)
            if member.busy and pending.version not in member.reading:
                log.warning("Parameter sync: %s has not answered for %s", name, sorted(member.reading), extra=about)
                break
            member.last.attempts += 1
            try:
                found = await self._answer(member, pending, verify=compares)
            except ReplicaGone as error:
                self.sync_failures += 1
                member.died(str(error))
                log.warning("Parameter sync: %s is gone: %s", name, error, extra=about)
                break
            except WeightsGone as error:
                self.sync_failures += 1
                member.failed(str(error))
                raise
            except Exception as error:  # noqa: BLE001  # a transport may raise anything; it did not load
                self.sync_failures += 1
                limit = f"no answer within async_training.sync_timeout = {self._timeout_s:g} s"
                member.failed(f"{type(error).__name__}: {str(error) or limit}")
                log.warning(
                    "Parameter sync: %s did not take version %d (attempt %d of %d): %s",
                    *(name, pending.version, attempt + 1, chances, member.last.error),
                    extra=about,
                )
                continue
            if compares and found is not None and found != pending.checksum:
                self.sync_failures += 1
                member.failed("it holds other weights")
                log.warning(
                    "Parameter sync: %s holds other weights than version %d's", name, pending.version, extra=about
                )
                continue
            member.took(pending.version, compared=compares)
            await self._rejoin(name, member)
            return True
        if not member.fenced:
            member.fenced = True
            await self._queue.fence(name, fenced=True)
            log.error("Parameter sync: %s is fenced off at version %d", name, member.version, extra=about)
        return False

    async def _answer(self, member: Member, pending: Pending, *, verify: bool) -> int | None:
        """Within the time that it has. A call that is given up goes on: until it ends, its engine may be reading."""
        asked = asyncio.ensure_future(member.replica.load_weights(pending.version, pending.weights, verify=verify))
        member.handed(pending.version)
        self._asked.add(asked)

        def ended(call: asyncio.Future[int | None]) -> None:
            self._asked.discard(call)
            member.answered(pending.version)
            if not call.cancelled():
                call.exception()  # who has given it up does not look

        asked.add_done_callback(ended)
        done, _ = await asyncio.wait([asked], timeout=self._timeout_s)
        if not done:
            raise TimeoutError
        return asked.result()

    async def _rejoin(self, name: str, member: Member) -> None:
        if member.fenced:
            member.fenced = False
            await self._queue.fence(name, fenced=False)
            log.info("Parameter sync: %s is back with version %d", name, member.version)

    async def join(self, name: str, replica: Replica) -> None:
        """A replica that was started anew: it gets the newest version before it gets any work."""
        async with self._loading:
            self.group[name] = Member(replica, version=NOTHING, fenced=True)
            await self._queue.fence(name, fenced=True)
            if self._newest is not None:
                await self._bring_up(name, self._newest)
            elif self.version == self._begins_at:  # no version was published since it was started from the same files
                self.group[name] = Member(replica, self.version)
                await self._queue.fence(name, fenced=False)
        async with self._changed:
            self._joined += 1
            self._changed.notify_all()

    async def _bring_up(self, name: str, newest: Pending) -> None:
        try:
            loaded = await self._load(name, newest, self._max_retries + 1)
        except WeightsGone as error:
            self._newest = None
            log.warning("Parameter sync: %s waits for the next version: the last is gone (%s)", name, error)
            return
        if loaded or self.group[name].gone:  # it died again: its next successor joins
            return
        if all(member.fenced for member in self.group.values()):  # no version will come any more
            raise self._failed(newest.version)

    def stats(self) -> dict[str, Any]:
        return {
            "param_sync_count": self.param_sync_count,
            "sync_failures": self.sync_failures,
            "published_version": self.version,
            "state": self.state,
            "last_sync_s": self.times.last_s,
            "mean_sync_s": self.times.total_s / self.times.count if self.times.count else 0.0,
            "longest_sync_s": self.times.longest_s,
            "fenced": sorted(name for name, member in self.group.items() if member.fenced),
            "versions": {name: member.version for name, member in self.group.items()},
        }
