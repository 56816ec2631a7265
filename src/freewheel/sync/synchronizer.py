"""`ParameterSynchronizer`: brings each new version to every engine and publishes it when all engines in use hold it.

    trainer ── submit(v) ─▶ pending ─▶ (drain: wait until settled) ─▶ load on all replicas ─▶ confirm_published(v)
                 │ newest wins           │ waits for: the queue          │ retries, deadline      │ slots are released
                 ▼ never waits           ▼ (sync and one_step_off)       ▼ lagging: fenced, retried, rejoined

A failed sync leaves the old version serving. When a replica dies, the supervisor starts a successor, which calls
`join`. The caller owns the transport: `weights` reaches `Replica.load_weights` unchanged (an object-store reference
under Ray), and `submit` returns the versions that may still be read.

A replica's weights are compared with the trainer's at its first sync, after it failed, and every `verify_every` syncs.

Weights die with the trainer that holds them (`WeightsGone`). Then nothing changes and nobody is fenced. The next
trainer submits the same version again, which goes to every engine, including those that have it. After a restart of
the queue, `announce` tells the new one what is published. After a restart of the synchronizer, `versions` says what the
engines hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from freewheel.observe import trace
from freewheel.sync.weights import WeightsGone

log = logging.getLogger("freewheel.sync")

SyncState = Literal["idle", "draining", "loading", "closed"]
SETTLE_WAIT_S = 5.0
"""Repeat a wait for the queue this often, to notice a queue that died."""
BETWEEN_ROUNDS_S = 1.0
"""Least time between two rounds while a successor is awaited, however short the retry delay is. Otherwise an engine
that fails at once would be called in a tight loop for as long as a process takes to start."""
MOST_UNANSWERED = 2
"""Versions handed to an engine before it has answered for any. The trainer must keep each of them in memory."""
UNKNOWN_VERSION = -1
"""Version of a replica whose weights are not known."""
ROWS_KEPT = 256
"""Sync rows kept for a caller of `drain_rows`."""


class SyncFailed(RuntimeError):
    """No engine took a version in any attempt."""


class ReplicaGone(Exception):
    """Raised by `Replica.load_weights` when the replica's process has died. Retrying is pointless."""


class Replica(Protocol):
    """An engine's end of the transport."""

    async def load_weights(self, version: int, weights: Any, *, verify: bool) -> int | None:
        """Returns `content_sum` of the weights that the engine then holds if `verify`. None: not asked, or the engine
        cannot tell."""


class VersionQueue(Protocol):
    """The synchronizer's part of the message queue's client."""

    async def confirm_published(self, version: int) -> None: ...

    async def wait_settled(self, *, wait_s: float) -> bool: ...

    async def fence(self, replica: str, *, fenced: bool) -> None: ...


@dataclass(frozen=True)
class _Pending:
    """A version on its way to the engines."""

    version: int
    weights: Any
    checksum: int | None
    n_bytes: int | None


@dataclass
class _Attempts:
    """The result of one sync for one engine. A row of `metrics.jsonl` has these fields."""

    took_s: float = 0.0
    attempts: int = 0
    error: str = ""
    """The error of the last attempt that failed, even if a later one succeeded."""


@dataclass
class Member:
    """One replica: the version it holds, whether it gets work, and when it was last compared. Pure."""

    replica: Replica
    version: int
    fenced: bool = False
    gone: bool = False
    """The process died, and its successor has not joined."""
    unverified_syncs: int | None = None
    """Syncs since the last comparison. None: never compared, or failed since."""
    reading: set[int] = field(default_factory=set)
    """Versions handed to it without an answer. An abandoned call may still read them, one after the other."""
    last: _Attempts = field(default_factory=_Attempts)
    inherited: bool = False
    """An earlier synchronizer may have handed it versions that this one does not know about."""

    def must_verify(self, every: int) -> bool:
        """Whether to compare at the next sync: the first one, one after a failure, and every `every`-th. 0: never."""
        return every > 0 and (self.unverified_syncs is None or self.unverified_syncs + 1 >= every)

    @property
    def is_busy(self) -> bool:
        return len(self.reading) >= MOST_UNANSWERED

    def answered(self, version: int) -> None:
        """It answered, with success or with an error. Versions are taken in order, so it no longer reads earlier
        ones."""
        self.reading = {one for one in self.reading if one > version}
        self.inherited = False

    def took(self, version: int, *, compared: bool) -> None:
        self.version = version
        if compared:
            self.unverified_syncs = 0
        elif self.unverified_syncs is not None:
            self.unverified_syncs += 1

    def failed(self, why: str) -> None:
        self.unverified_syncs = None
        self.last.error = why

    def died(self, why: str) -> None:
        self.gone = True
        self.reading.clear()
        self.last.error = why
        self.inherited = False


class ParameterSynchronizer:
    """Publishes a version only after every engine in use confirmed it."""

    def __init__(
        self,
        *,
        replicas: Mapping[str, Replica],
        queue: VersionQueue,
        timeout_s: float,
        max_retries: int,
        retry_delay_s: float,
        verify_every: int,
        version: int = 0,
        versions: Mapping[str, int] | None = None,
        drain: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`version`: the published one. `versions`: what each replica holds, if this synchronizer replaces one that
        died. A replica behind the published version gets no work until it is up to date. `verify_every` 0: never
        compare."""
        held = {name: version if versions is None else versions.get(name, UNKNOWN_VERSION) for name in replicas}
        self.group = {
            name: Member(replica, held[name], fenced=held[name] < version, inherited=versions is not None)
            for name, replica in replicas.items()
        }
        self.state: SyncState = "idle"
        self.version = version
        """The newest published version."""
        self.param_sync_count = 0
        self.sync_failures = 0
        self._last_s = self._total_s = self._longest_s = 0.0
        self._rows: deque[dict[str, Any]] = deque(maxlen=ROWS_KEPT)
        self._queue = queue
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._retry_delay_s = retry_delay_s
        self._verify_every = verify_every
        self._drain = drain
        self._clock = clock
        self._pending: _Pending | None = None
        self._now: _Pending | None = None
        """The version being loaded."""
        self._newest: _Pending | None = None
        """The version published last, for replicas that join. None: unknown, or its weights are gone."""
        self._files_version = version if versions is None else None
        """The version in the files that replicas start from, if known."""
        self._changed = asyncio.Condition()
        self._calls: set[asyncio.Future[int | None]] = set()
        """Calls to engines, including abandoned ones: the event loop keeps only weak references to tasks."""
        self._loading = asyncio.Lock()
        """A replica that joins waits for a running sync, so it gets the new version and not the one before."""

    # -- the trainer's side -------------------------------------------------------------------------------------------

    async def submit(
        self, version: int, weights: Any, checksum: int | None = None, n_bytes: int | None = None
    ) -> list[int] | None:
        """Bring weights to all engines, even to engines that hold this version from a trainer that died. Returns
        `in_use()` at once. Replaces a submitted version that is still waiting."""
        await self._set_pending(_Pending(version, weights, checksum, n_bytes))
        return self.in_use()

    async def prime(
        self, version: int, weights: Any, checksum: int | None = None, n_bytes: int | None = None
    ) -> list[int] | None:
        """Register the weights a trainer starts with; returns `in_use()`.

        Engines that started from the same files hold them; only replicas that join later need them. A restarted trainer
        may be behind the published version (it submits that version when it gets there) or ahead of it.
        """
        given = _Pending(version, weights, checksum, n_bytes)
        if version == self.version:
            self._newest = given
        someone_waits = any(member.fenced for member in self.group.values())
        if version > self.version or (version == self.version and someone_waits):
            await self._set_pending(given)
        return self.in_use()

    def in_use(self) -> list[int] | None:
        """Versions whose weights may still be read: the newest published one (for replicas that join), those loading or
        waiting, and those an engine has not answered for. None: an earlier synchronizer may have handed out others, so
        keep everything."""
        if any(member.inherited for member in self.group.values()):
            return None
        held = {one.version for one in (self._newest, self._now, self._pending) if one is not None}
        return sorted(held.union(*(member.reading for member in self.group.values())))

    async def _set_pending(self, pending: _Pending) -> None:
        async with self._changed:
            self._pending = pending
            self._changed.notify_all()

    async def announce(self) -> None:
        """Tell a restarted queue which version is published and which replicas are fenced."""
        async with self._loading:
            for name, member in self.group.items():
                await self._queue.fence(name, fenced=member.fenced)
            await self._queue.confirm_published(self.version)

    async def wait_published(self, version: int, *, wait_s: float) -> bool:
        return await self._wait(lambda: self.version >= version, wait_s)

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until cancelled. Raises `SyncFailed` when no engine can be reached."""
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._pending is not None)
                    pending, self._pending = self._pending, None
                    self._now = pending
                assert pending is not None
                if pending.version >= self.version:  # an older one comes from a trainer that died
                    await self._sync(pending)
                self._now = None
        finally:
            self.state = "closed"

    async def _sync(self, pending: _Pending) -> None:
        if self._drain and pending.version > self.version:  # a published version changes nothing for running responses
            self.state, since = "draining", self._clock()
            while self._anybody_works and not await self._queue.wait_settled(wait_s=SETTLE_WAIT_S):
                pass
            trace.span("drain", since, self._clock(), {"version": pending.version})
        self.state = "loading"
        since, loaded = self._clock(), 0
        for member in self.group.values():
            member.last = _Attempts()
        try:
            loaded = await self._load_until_taken(pending)
        finally:
            self._record(pending, since, loaded)
        async with self._changed:
            self.version = pending.version if loaded else self.version
            self.state = "idle"
            self._changed.notify_all()
        if loaded:
            log.info(
                "Parameter sync: version %d on %d of %d engines in %.3f s",
                *(pending.version, loaded, len(self.group), self._last_s),
                extra={"version": pending.version},
            )

    @property
    def _anybody_works(self) -> bool:
        """If all replicas are fenced or gone, nothing is in progress and the free slots wait for exactly this
        version."""
        return any(not (member.fenced or member.gone) for member in self.group.values())

    def _record(self, pending: _Pending, since: float, loaded: int) -> None:
        until = self._clock()
        about = {"version": pending.version, "bytes": pending.n_bytes}
        engines = {name: asdict(member.last) for name, member in self.group.items()}
        self._rows.append({**about, "took_s": until - since, "engines": engines, "failed": not loaded})
        trace.span("sync", since, until, about)
        if loaded:
            self.param_sync_count += 1
            self._last_s = until - since
            self._total_s += self._last_s
            self._longest_s = max(self._longest_s, self._last_s)

    async def _load_until_taken(self, pending: _Pending) -> int:
        """Return the number of engines that took the version. 0: given up in favour of a later one."""
        while True:
            try:
                loaded = await self._load_and_publish(pending)
            except WeightsGone as error:
                log.warning(
                    "Parameter sync: version %d is gone with its trainer (%s); version %d serves until it is resent",
                    *(pending.version, error, self.version),
                    extra={"version": pending.version},
                )
                return 0
            if loaded or self._pending is not None:
                return loaded
            gone = self._list_gone()
            if not gone:
                raise self._failed(pending.version)
            await self._wait_for_join(gone)

    def _list_gone(self) -> set[str]:
        return {name for name, member in self.group.items() if member.gone}

    async def _wait_for_join(self, gone: set[str]) -> None:
        """Wait until the supervisor has replaced an engine or another version is submitted. Return earlier to retry
        engines that are alive."""
        pause_s = None if len(gone) == len(self.group) else max(self._retry_delay_s, BETWEEN_ROUNDS_S)
        await self._wait(lambda: self._list_gone() != gone or self._pending is not None, pause_s)

    async def _wait(self, holds: Callable[[], bool], wait_s: float | None) -> bool:
        """Wait until `holds()` after a change, for at most `wait_s`. Returns whether it does."""
        async with self._changed:
            try:
                async with asyncio.timeout(wait_s):
                    return await self._changed.wait_for(holds)
            except TimeoutError:
                return False

    async def _load_and_publish(self, pending: _Pending) -> int:
        """Bring the version to all replicas once. If any replica then has it, the version is published: here and
        nowhere else. Returns how many have it. Raises `WeightsGone`."""
        async with self._loading:
            # A fenced replica used up its attempts. It gets one per version, and does not delay the others for long.
            attempts = {name: 1 if member.fenced else self._max_retries + 1 for name, member in self.group.items()}
            calls = [self._load(name, pending, attempts[name]) for name in self.group]
            found = await asyncio.gather(*calls, return_exceptions=True)
            for one in found:
                if isinstance(one, BaseException):
                    raise one
            loaded = found.count(True)
            if loaded:
                self._newest = pending
                await self._queue.confirm_published(pending.version)
        return loaded

    def _failed(self, version: int) -> SyncFailed:
        return SyncFailed(
            f"no engine took version {version} in {self._max_retries + 1} attempts of at most {self._timeout_s:g} s "
            f"each; version {self.version} is still serving. See the errors above; a slow transfer needs a longer "
            "async_training.sync_timeout"
        )

    # -- one replica --------------------------------------------------------------------------------------------------

    async def _load(self, name: str, pending: _Pending, attempts: int) -> bool:
        """Bring one replica up to date. Fences it after the last attempt, until it takes a later version."""
        member, since = self.group[name], self._clock()
        try:
            return await self._try_to_load(name, member, pending, attempts)
        finally:
            until = self._clock()
            member.last.took_s += until - since
            about = {"version": pending.version, "attempts": member.last.attempts}
            trace.span("load", since, until, about, track=name)

    async def _try_to_load(self, name: str, member: Member, pending: _Pending, attempts: int) -> bool:
        about = {"version": pending.version}
        if member.version > pending.version and not member.gone:  # it took a later one before the trainer died
            await self._set_fenced(name, False)
            return True
        for attempt in range(attempts if not member.gone else 0):
            if attempt:
                await asyncio.sleep(self._retry_delay_s)
            verify = pending.checksum is not None and member.must_verify(self._verify_every)
            if member.is_busy and pending.version not in member.reading:
                log.warning("Parameter sync: %s has not answered for %s", name, sorted(member.reading), extra=about)
                break
            member.last.attempts += 1
            try:
                held = await self._call(member, pending, verify=verify)
            except ReplicaGone as error:
                self.sync_failures += 1
                member.died(str(error))
                log.warning("Parameter sync: %s is gone: %s", name, error, extra=about)
                break
            except WeightsGone as error:
                self.sync_failures += 1
                member.failed(str(error))
                raise
            except Exception as error:  # noqa: BLE001  # a transport may raise anything; the replica did not load
                limit = f"no answer within async_training.sync_timeout = {self._timeout_s:g} s"
                problem = f"{type(error).__name__}: {str(error) or limit}"
            else:
                if not verify or held in (None, pending.checksum):
                    member.took(pending.version, compared=verify)
                    await self._set_fenced(name, False)
                    return True
                problem = "it holds other weights"
            self.sync_failures += 1
            member.failed(problem)
            log.warning(
                "Parameter sync: %s did not take version %d (attempt %d of %d): %s",
                *(name, pending.version, attempt + 1, attempts, problem),
                extra=about,
            )
        await self._set_fenced(name, True)
        return False

    async def _call(self, member: Member, pending: _Pending, *, verify: bool) -> int | None:
        """Raises TimeoutError after the deadline. The abandoned call continues: its engine may read until it ends."""
        call = asyncio.ensure_future(member.replica.load_weights(pending.version, pending.weights, verify=verify))
        member.reading.add(pending.version)
        self._calls.add(call)

        def ended(call: asyncio.Future[int | None]) -> None:
            self._calls.discard(call)
            member.answered(pending.version)
            if not call.cancelled():
                call.exception()  # retrieved, so asyncio does not warn about an abandoned call

        call.add_done_callback(ended)
        done, _ = await asyncio.wait([call], timeout=self._timeout_s)
        if not done:
            raise TimeoutError
        return call.result()

    async def _set_fenced(self, name: str, fenced: bool) -> None:
        member = self.group[name]
        if member.fenced != fenced:
            member.fenced = fenced
            await self._queue.fence(name, fenced=fenced)
            if fenced:
                log.error("Parameter sync: %s is fenced off at version %d", name, member.version)
            else:
                log.info("Parameter sync: %s is back with version %d", name, member.version)

    async def join(self, name: str, replica: Replica) -> None:
        """Register a restarted replica. It gets the newest version before it gets work."""
        async with self._loading:
            self.group[name] = Member(replica, version=UNKNOWN_VERSION, fenced=True)
            await self._queue.fence(name, fenced=True)
            if self._newest is not None:
                await self._bring_up(name, self._newest)
            elif self.version == self._files_version:  # nothing was published since: the files are up to date
                self.group[name].version = self.version
                await self._set_fenced(name, False)
        async with self._changed:
            self._changed.notify_all()

    async def _bring_up(self, name: str, newest: _Pending) -> None:
        try:
            loaded = await self._load(name, newest, self._max_retries + 1)
        except WeightsGone as error:
            self._newest = None
            log.warning("Parameter sync: %s waits for the next version: the last is gone (%s)", name, error)
            return
        if loaded or self.group[name].gone:  # if it died again, its next successor joins
            return
        if all(member.fenced for member in self.group.values()):  # nobody works, so no further version will come
            raise self._failed(newest.version)

    # -- reports ------------------------------------------------------------------------------------------------------

    def drain_rows(self) -> list[dict[str, Any]]:
        """One row per sync since the last call, for `metrics.jsonl`."""
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def stats(self) -> dict[str, Any]:
        return {
            "param_sync_count": self.param_sync_count,
            "sync_failures": self.sync_failures,
            "published_version": self.version,
            "state": self.state,
            "last_sync_s": self._last_s,
            "mean_sync_s": self._total_s / self.param_sync_count if self.param_sync_count else 0.0,
            "longest_sync_s": self._longest_s,
            "fenced": sorted(name for name, member in self.group.items() if member.fenced),
            "versions": {name: member.version for name, member in self.group.items()},
        }
