"""The journal: scored groups and what happened to them, in one SQLite file that outlives every process of a run.

    MessageQueue ── write(events) ─▶ JournalWriter ── thread: one transaction of all that waits ─▶ Journal.append
                 ◀── future: durable ───────┘                                                          │
                                                    a row per scored group, until a checkpoint  groups ◀┤
                                                    what each step was made of                   steps ◀┤
                            the ordinals of steps whose groups are gone; the audit trail       history ◀┤
                                                                           failures, abandoned, meta ◀──┘
    restore, audit, `freewheel inspect` ◀── base, steps, stored, groups, failures

`Journal` is synchronous, for one thread, and one process may write the file. Rows of groups never change: a step's row
lists its groups, so a take or a commit writes a few bytes and not the groups. Each row has a checksum, and a row that
fails it counts as missing. Readers work next to a live writer, in pages, so that a slow one does not make the log grow.

    journal.sqlite         pages that deletion frees are used again
    journal.sqlite-wal     the log: commits go there, and a checkpoint copies them into the file
    journal.sqlite-shm     the index of the log
    journal.sqlite.lock    empty; locked by the process that writes
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import sqlite3
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

import freewheel
from freewheel.data.group import Ticket
from freewheel.queue.ledger import Frontier
from freewheel.utils.files import open_private
from freewheel.utils.sqlite import (
    Trouble,
    WriterThread,
    connect,
    diagnose,
    lock_database,
    rename_database,
    transaction,
)

log = logging.getLogger("freewheel.queue")
T = TypeVar("T")

NO_SEQUENCE = -1
"""The sequence of a ticket whose group was deleted: only its ordinal is kept."""
FORMAT = 1
"""Version of the tables and rows. A file of a later format is refused."""


# -- events: what is written ------------------------------------------------------------------------------------------


class Stored(msgspec.Struct, frozen=True):
    """A scored group."""

    ticket: Ticket
    min_version: int
    data: bytes | memoryview
    """The group as `PromptGroup.encode` made it."""
    wall_s: float


class Took(msgspec.Struct, frozen=True):
    """The groups of `step`. A later `Took` of the same step replaces them until the step is committed.

    Without groups, none of them missing: nobody will commit the step, and its groups are stored again.
    """

    step: int
    tickets: tuple[Ticket, ...]
    missing: int = 0
    """Groups that turned out stale and are being replaced."""


class Committed(msgspec.Struct, frozen=True):
    """`step` was trained. Again, with a later version: the run ends after it, and the version is complete."""

    step: int
    version: int
    """The version after it."""
    wall_s: float


class AttemptFailed(msgspec.Struct, frozen=True):
    """An attempt failed. If its group was stored, it is deleted."""

    ticket: Ticket
    kind: str | None
    """`ledger.Kind`; None if it costs no budget: a stale group, a ticket that nobody received ("lost"). A ticket lost
    with a dead replica has a kind, because its prompt may have killed the replica."""
    reason: str
    detail: str
    wall_s: float


class Abandoned(msgspec.Struct, frozen=True):
    """A prompt was given up without being trained."""

    ordinal: int
    attempt: int
    reason: str
    wall_s: float


class Reserved(msgspec.Struct, frozen=True):
    """Sequences below this may have been given out."""

    below: int


JournalEvent = Stored | Took | Committed | AttemptFailed | Abandoned | Reserved


# -- what is read -----------------------------------------------------------------------------------------------------


class CheckpointMark(msgspec.Struct, frozen=True):
    """The state that a checkpoint covers; all zeros before the first. The journal's base is one; its steps follow."""

    step: int = 0
    version: int = 0
    frontier: Frontier = Frontier()


class Step(msgspec.Struct, frozen=True):
    """A recorded step. Up to the base, tickets may have `NO_SEQUENCE`."""

    step: int
    version: int | None
    """The version after it; None: taken but not committed."""
    tickets: tuple[Ticket, ...]
    missing: int
    wall_s: float
    """When it was committed; 0 before that."""
    min_version: int | None = None
    """The version of its oldest group, once groups of it were deleted. Until then the groups hold it."""


# -- errors -----------------------------------------------------------------------------------------------------------


class JournalError(Exception):
    """The journal cannot be used."""


class JournalFull(JournalError):
    """There is no room to write. The same write can succeed later. Names the path and the MB free."""


class JournalDamaged(JournalError):
    """The file cannot be read: it is not a journal, or was cut off or overwritten."""


class JournalFormat(JournalDamaged):
    """A later freewheel wrote the file in a format that this one does not know."""


class JournalBusy(JournalError):
    """Another process writes the file."""


class JournalClosed(JournalError):
    """A write did not happen: the journal is closed, or was closed while there was no room."""


def is_temporary(error: Exception) -> bool:
    """Whether the same call may succeed later: no room, or another process locks the file."""
    if isinstance(error, sqlite3.Error):
        return diagnose(error) is Trouble.LOCKED
    return isinstance(error, JournalFull)


def set_aside(path: Path) -> Path:
    """Rename a journal that cannot be read, with its log, to make way for a new one. Returns the new path."""
    targets = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    target = next(one for one in targets if not one.exists())
    rename_database(path, target)
    return target


# -- the file ---------------------------------------------------------------------------------------------------------

PAGE_BYTES = 65536
"""SQLite's largest. A group of 80 KB costs 144 us of CPU, compaction included; 181 with 16 KiB and 299 with 4 KiB. One
of 10 KB costs 48 us, and 53 with 4 KiB."""
SYNCHRONOUS = "NORMAL"
"""A commit reaches the operating system and is synced at the next checkpoint. docs/durability.md explains why."""
CHECKPOINT_BYTES = 16 << 20
"""Length of the log at which it is copied into the file. That commit took 69 ms at worst on a busy disk, 165 ms with
64 MiB, and 57 ms with 4 MiB, which is due four times as often."""
LOG_LIMIT_BYTES = 64 << 20
"""After a checkpoint the log is cut back to this, if a large transaction or a reader made it longer."""
CACHE_KIB = 4 * 1024
"""Pages in memory. A larger transaction spills into the log early; 16 MiB cost a tenth more CPU."""
BUSY_TIMEOUT_S = 5.0
"""Readers never block the writer. A backup tool that locks the file may, for a moment."""
LOCK_WAIT_S = 5.0
"""For a previous writer that was killed: it is gone within milliseconds, or it is another run."""
LITTLE_ROOM_BYTES = 32 << 20
"""With less free, an input/output error counts as a full disk: the log and its index need more."""
_WRITE_ERRORS = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_TRUNCATE)
"""How SQLite reports a quota, a limit on file sizes or a full tmpfs. It says FULL for ENOSPC only."""
PAGE_GROUPS, PAGE_ROWS = 32, 512
"""Rows read at once, with and without a group's data. A replay of any length then needs only a few MB."""
DROPPED_AT_ONCE = 512
"""About how many groups one transaction of a compaction deletes, to keep the log short."""
DETAIL_CHARS = 1000
"""Failures are kept, and the error of a reward service can be a page of HTML."""
_LAST_STEP = 2**63 - 1
"""SQLite's largest integer."""

_SCHEMA = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE steps (step INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL)",
    # A separate table, because rows that shrink in place leave their pages half empty for good.
    "CREATE TABLE history (step INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL)",
    "CREATE TABLE failures (sequence INTEGER PRIMARY KEY, ordinal INTEGER NOT NULL, crc INTEGER NOT NULL,"
    " body BLOB NOT NULL)",
    "CREATE INDEX failures_by_ordinal ON failures (ordinal)",
    "CREATE TABLE abandoned (ordinal INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL)",
    # The data comes last, so the columns before it are read without it.
    "CREATE TABLE groups (sequence INTEGER PRIMARY KEY, ordinal INTEGER NOT NULL, attempt INTEGER NOT NULL,"
    " min_version INTEGER NOT NULL, wall_s REAL NOT NULL, crc INTEGER NOT NULL, data BLOB NOT NULL)",
)
"""The journal's schema. Bodies are msgpack of the structs below, `data` is an `EncodedGroup`."""
_CHECKED_TABLES = ("meta", "steps", "history", "failures", "abandoned")
"""Small tables whose pages are checked on opening. A group hidden by damage is generated again, at worst."""
_GROUP_COLUMNS = "sequence, ordinal, attempt, min_version, wall_s, crc, data"
_HEAD = struct.Struct("<qqqqd")


class _StepBody(msgspec.Struct, array_like=True):
    """A step on disk. Differences between neighbours are small numbers, which msgpack writes as one byte."""

    version: int | None
    wall_s: float
    missing: int
    ordinals: list[int]
    attempts: dict[int, int]
    """Position → attempt, if it is not the first."""
    sequences: list[int] | None
    """None: deleted together with the groups' data."""
    min_version: int | None = None

    @classmethod
    def of(cls, step: Step, *, sequences: bool = True) -> _StepBody:
        return cls(
            version=step.version,
            wall_s=step.wall_s,
            missing=step.missing,
            ordinals=_differences(ticket.ordinal for ticket in step.tickets),
            attempts={place: ticket.attempt for place, ticket in enumerate(step.tickets) if ticket.attempt},
            sequences=_differences(ticket.sequence for ticket in step.tickets) if sequences else None,
            min_version=step.min_version,
        )

    def step(self, number: int) -> Step:
        ordinals = list(itertools.accumulate(self.ordinals))
        sequences = itertools.repeat(NO_SEQUENCE) if self.sequences is None else itertools.accumulate(self.sequences)
        tickets = (
            Ticket(ordinal, sequence, self.attempts.get(place, 0))
            for place, (ordinal, sequence) in enumerate(zip(ordinals, sequences, strict=False))
        )
        return Step(number, self.version, tuple(tickets), self.missing, self.wall_s, self.min_version)


def _differences(numbers: Iterable[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(itertools.chain((0,), numbers))]


class Journal:
    """After `append` returns, a kill of the process does not lose the events. Rows are whole and in order."""

    def __init__(self, path: Path, *, readonly: bool = False, checked: bool = True) -> None:
        """Create the file if there is none, unless `readonly`. Raises the `JournalError` that fits.

        `checked`: look for damage in all of the file, which takes a while for a long one.
        """
        self.path = path
        self._log_path = path.with_name(path.name + "-wal")
        self._lock: int | None = None
        self._unwritten: tuple[int, ...] | None = None
        """The state of the file, if it is read as one that nobody writes."""
        self._connection: sqlite3.Connection | None = None
        if readonly and not path.exists():
            raise FileNotFoundError(f"{path}: there is no journal")
        try:
            with self._errors():
                self._open(readonly)
                self._check(readonly, checked)
        except BaseException:
            self.close()
            raise

    def _open(self, readonly: bool) -> None:
        mode = "rw"
        if readonly:
            # Without a log, nobody writes the file and all data is in it. SQLite then need not create a log and an
            # index to read it, which it could not do in somebody else's folder. Get the state before the look for a
            # log: a writer that starts in between changes it.
            state = _state(self.path)
            self._unwritten = None if self._log_path.exists() else state
            mode = "ro" if self._unwritten is None else "ro&immutable=1"
        else:
            try:
                self._lock = lock_database(self.path, LOCK_WAIT_S)
            except TimeoutError:
                raise JournalBusy(f"{self.path} is written by another process: end that run first") from None
            if not self.path.exists() and self._log_path.exists() and self._log_path.stat().st_size:
                # The log would be replayed into the new file.
                raise JournalDamaged(f"{self.path} is gone, and only its log {self._log_path.name} is left")
            os.close(open_private(self.path, os.O_RDWR))
        settings = (
            f"page_size = {PAGE_BYTES}",
            f"cache_size = -{CACHE_KIB}",
            f"synchronous = {SYNCHRONOUS}",
            f"wal_autocheckpoint = {CHECKPOINT_BYTES // PAGE_BYTES}",
            f"journal_size_limit = {LOG_LIMIT_BYTES}",
            "cell_size_check = ON",
            "secure_delete = OFF",  # some builds of SQLite overwrite what is deleted, which doubles the writes
            "temp_store = MEMORY",
        )
        self._connection = connect(self.path, timeout_s=BUSY_TIMEOUT_S, mode=mode, settings=settings)
        self._connection.text_factory = bytes  # damaged text should meet a checksum, not a decoder

    def _check(self, readonly: bool, checked: bool) -> None:
        tables, ours = self._db.execute("SELECT count(*), sum(name = 'meta') FROM sqlite_master").fetchone()
        if not tables and not readonly:
            self._db.execute("PRAGMA journal_mode = WAL").fetchall()
            with transaction(self._db) as db:
                for statement in _SCHEMA:
                    db.execute(statement)
                self._set("format", FORMAT)
                self._set("freewheel", freewheel.__version__)
                self._set("base", CheckpointMark())
        elif not ours:
            raise JournalDamaged(f"{self.path} is not a journal")
        found = self._meta("format", int, 0)
        if found != FORMAT:
            raise JournalFormat(
                f"{self.path} has format {found}, written by freewheel {self._meta('freewheel', str, '?')}; freewheel "
                f"{freewheel.__version__} reads format {FORMAT}: resume with the freewheel that wrote it"
            )
        for table in _CHECKED_TABLES if checked else ():
            (verdict,) = self._db.execute(f"PRAGMA quick_check({table})").fetchone()
            if verdict != b"ok":
                raise JournalDamaged(f"{self.path} is damaged, table {table}: {verdict.decode()}")

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._connection is not None
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):  # a last checkpoint without room: the log stays and holds the data
                self._connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- writing ------------------------------------------------------------------------------------------------------

    def append(self, events: Sequence[JournalEvent]) -> None:
        """Write all of `events` in order, in one transaction. An event that is written again changes nothing."""
        with self._transaction() as db:
            for kind, run in itertools.groupby(events, type):
                if kind is Stored:
                    rows = (_group_row(one) for one in run if isinstance(one, Stored))
                    db.executemany("INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
                else:
                    for event in run:
                        self._apply(event)

    def _apply(self, event: JournalEvent) -> None:
        match event:
            case Took(step, tickets, missing):
                known = self._step(step)
                if known is None or known.version is None:
                    if tickets or missing:
                        self._write_step("steps", Step(step, None, tickets, missing, 0.0))
                    else:
                        self._db.execute("DELETE FROM steps WHERE step = ?", (step,))
            case Committed(step, version, wall_s):
                known = self._step(step)
                assert known is not None, f"step {step} is committed, but nobody took it"
                if known.version is None or (version > known.version and step > self.base().step):
                    self._write_step("steps", msgspec.structs.replace(known, version=version, wall_s=wall_s))
            case AttemptFailed(ticket, _, _, detail):
                shown = msgspec.structs.replace(event, detail=detail[:DETAIL_CHARS])
                row = (ticket.sequence, ticket.ordinal, *_seal(ticket.sequence, shown))
                self._db.execute("INSERT OR IGNORE INTO failures VALUES (?, ?, ?, ?)", row)
                self._delete([ticket])
            case Abandoned(ordinal):
                values = (ordinal, *_seal(ordinal, event))
                self._db.execute("INSERT OR IGNORE INTO abandoned VALUES (?, ?, ?)", values)
            case Reserved(below):
                self._set("reserved", max(below, self.reserved()))

    def compact(self, *, step: int, frontier: Frontier, keep_groups: int) -> None:
        """Delete the groups of steps up to `step`, because no resume goes back beyond it.

        The last steps stay whole until they have `keep_groups` groups. `frontier` is the ledger at `step`. The pages
        are used again; the rows of the steps stay, without sequences.
        """
        with self._transaction():
            if step <= self.base().step:
                return
            last = self._step(step)
            assert last is not None and last.version is not None, f"step {step} is not committed"
            self._set("base", CheckpointMark(step, last.version, frontier))
        kept, covered = 0, [*self._steps("steps", 0, step)]
        while covered and kept < keep_groups:
            kept += len(covered.pop().tickets)
        while covered:  # from the oldest on; if this is interrupted, the next compaction continues
            part = covered[: max(1, DROPPED_AT_ONCE // max(1, len(covered[0].tickets)))]
            del covered[: len(part)]
            with self._transaction():
                self._move_to_history(part)

    def rewind(self, *, after: int) -> None:
        """Forget the recorded steps after `after`. Their groups that still exist are stored again."""
        with self._transaction() as db:
            assert after >= self.base().step, f"step {after} is before the base: its groups are gone"
            db.execute("DELETE FROM steps WHERE step > ?", (after,))

    def reset(self, *, step: int, version: int, frontier: Frontier) -> None:
        """Start from a checkpoint that lies after the journal's end: its tail was lost, or it is empty.

        Stored groups of ordinals that have not ended stay, and so do the rows of committed steps.
        """
        ended = set(frontier.ended)
        with self._transaction() as db:
            self._move_to_history([one for one in self._steps("steps", 0, step) if one.version is not None])
            db.execute("DELETE FROM steps")
            db.execute("DELETE FROM history WHERE step > ?", (step,))
            rows = db.execute("SELECT sequence, ordinal FROM groups").fetchall()
            self._delete(Ticket(ordinal, one) for one, ordinal in rows if ordinal < frontier.low or ordinal in ended)
            self._set("base", CheckpointMark(step, version, frontier))

    # -- reading ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Everything read inside is of one moment, whatever a writer does. Keep it short: a live writer's log grows."""
        with self._errors():
            self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def base(self) -> CheckpointMark:
        return self._meta("base", CheckpointMark, None)

    def reserved(self) -> int:
        """Sequences below this may have been given out."""
        return self._meta("reserved", int, 0)

    def steps(self, *, after: int) -> Iterator[Step]:
        """Steps after `after`, in order. A damaged one is left out, which leaves a gap in the numbers."""
        yield from self._steps("history", after)
        yield from self._steps("steps", after)

    def last_step(self) -> int:
        """The last committed step, or the checkpoint's if none was committed since."""
        base = self.base().step
        with self._errors():
            rows = self._db.execute("SELECT step, crc, body FROM steps WHERE step > ? ORDER BY step DESC", (base,))
            bodies = ((row[0], self._unseal(*row, kind=_StepBody)) for row in rows)
            return next((step for step, body in bodies if body and body.version is not None), base)

    def stored(self) -> Iterator[Stored]:
        """Groups that belong to no step, by sequence."""
        taken = {ticket.sequence for step in self._steps("steps", 0) for ticket in step.tickets}
        query = f"SELECT {_GROUP_COLUMNS} FROM groups WHERE sequence > ? ORDER BY sequence LIMIT {PAGE_GROUPS}"
        for row in self._pages(query, -1):
            if row[0] not in taken and (group := self._group(row)) is not None:
                yield group

    def groups(self, step: int) -> list[Stored] | None:
        """The groups of `step`, in its order. None if one is missing, or if there is no such step."""
        known = self._step(step)
        found: list[Stored] = []
        for ticket in known.tickets if known else ():
            row = self._row(f"SELECT {_GROUP_COLUMNS} FROM groups WHERE sequence = ?", ticket.sequence)
            if row is None or (group := self._group(row)) is None:
                return None
            found.append(group)
        return found if known else None

    def min_versions(self, step: Step) -> list[int] | None:
        """The version of each group of `step`, in its order. None if one is missing."""
        query = "SELECT min_version FROM groups WHERE sequence = ?"
        rows = [self._row(query, ticket.sequence) for ticket in step.tickets]
        return None if None in rows else [version for (version,) in rows]

    def group(self, ordinal: int) -> Stored | None:
        """The latest group of a prompt, if its data still exists."""
        query = f"SELECT {_GROUP_COLUMNS} FROM groups WHERE ordinal = ? ORDER BY sequence DESC LIMIT 1"
        row = self._row(query, ordinal)
        return None if row is None else self._group(row)

    def failures(self, ordinal: int | None = None) -> Iterator[AttemptFailed]:
        """Failures by sequence, of one prompt or of all."""
        which = "" if ordinal is None else f"AND ordinal = {int(ordinal)}"
        query = (
            f"SELECT sequence, crc, body FROM failures WHERE sequence > ? {which} ORDER BY sequence LIMIT {PAGE_ROWS}"
        )
        return (one for row in self._pages(query, -1) if (one := self._unseal(*row, kind=AttemptFailed)) is not None)

    def abandoned(self, *, after: int = -1) -> Iterator[Abandoned]:
        """Abandoned prompts with an ordinal above `after`, in order."""
        query = f"SELECT ordinal, crc, body FROM abandoned WHERE ordinal > ? ORDER BY ordinal LIMIT {PAGE_ROWS}"
        return (one for row in self._pages(query, after) if (one := self._unseal(*row, kind=Abandoned)) is not None)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _steps(self, table: str, after: int, until: int = _LAST_STEP) -> Iterator[Step]:
        query = (
            f"SELECT step, crc, body FROM {table} WHERE step > ? AND step <= {until} ORDER BY step LIMIT {PAGE_ROWS}"
        )
        for row in self._pages(query, after):
            if (body := self._unseal(*row, kind=_StepBody)) is not None:
                yield body.step(row[0])

    def _step(self, number: int) -> Step | None:
        found = [*self._steps("steps", number - 1, number), *self._steps("history", number - 1, number)]
        return found[0] if found else None

    def _write_step(self, table: str, step: Step) -> None:
        body = _seal(step.step, _StepBody.of(step, sequences=table == "steps"))
        self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)", (step.step, *body))

    def _move_to_history(self, steps: Sequence[Step]) -> None:
        """Move steps in order, so that pages are filled, and delete their groups."""
        for step in steps:
            if step.min_version is None:  # for the audit
                oldest = min(self.min_versions(step) or [], default=None)
                step = msgspec.structs.replace(step, min_version=oldest)
            self._write_step("history", step)
            self._db.execute("DELETE FROM steps WHERE step = ?", (step.step,))
            self._delete(step.tickets)

    def _delete(self, tickets: Iterable[Ticket]) -> None:
        self._db.executemany("DELETE FROM groups WHERE sequence = ?", ((one.sequence,) for one in tickets))

    def _group(self, row: tuple[Any, ...]) -> Stored | None:
        """The group of a row. None if it is damaged, which is logged."""
        sequence, ordinal, attempt, min_version, wall_s, crc, data = row
        try:
            is_whole = zlib.crc32(data, zlib.crc32(_HEAD.pack(sequence, ordinal, attempt, min_version, wall_s))) == crc
        except (struct.error, TypeError):
            is_whole = False
        if not is_whole:
            log.warning("%s: the group of sequence %s is damaged and counts as missing", self.path, sequence)
            return None
        return Stored(Ticket(ordinal, sequence, attempt), min_version, data, wall_s)

    def _meta(self, name: str, kind: type[T], default: T | None) -> T:
        row = self._row("SELECT crc, body FROM meta WHERE name = ?", name)
        value = default if row is None else self._unseal(name, *row, kind=kind)
        if value is None:
            raise JournalDamaged(f"{self.path} is damaged: {name} cannot be read")
        return value

    def _set(self, name: str, value: object) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (name, *_seal(name, value)))

    def _unseal(self, key: object, crc: object, body: object, *, kind: type[T]) -> T | None:
        """The value of a row. None if it is damaged, which is logged."""
        if isinstance(body, bytes) and crc == _crc(key, body):
            return msgspec.msgpack.decode(body, type=kind)
        log.warning("%s: the row of %s %s is damaged and counts as missing", self.path, kind.__name__, key)
        return None

    def _pages(self, query: str, after: int) -> Iterator[Any]:
        """Rows of a query by its first column, one page at a time. Nothing stays open in between."""
        while True:
            with self._errors():
                page = self._db.execute(query, (after,)).fetchall()
            for row in page:
                if row[0] <= after:
                    raise JournalDamaged(f"{self.path} is damaged: {row[0]} comes after {after}")
                after = row[0]
                yield row
            if not page:
                return

    def _row(self, query: str, key: int | str) -> Any:
        with self._errors():
            return self._db.execute(query, (key,)).fetchone()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._errors(), transaction(self._db) as db:
            yield db

    # -- errors -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise a `JournalError` for lack of room, damage and a writer that appeared. Other errors stay as they are."""
        try:
            yield
        except Exception as error:
            self._check_unwritten()  # data read at two moments looks like damage
            if isinstance(error, sqlite3.Error | OSError):
                self._raise(error)
            raise
        self._check_unwritten()

    def _check_unwritten(self) -> None:
        if self._unwritten is not None and _state(self.path) != self._unwritten:
            raise JournalBusy(f"{self.path} was opened for writing while it was read: look again")

    def _raise(self, error: sqlite3.Error | OSError) -> NoReturn:
        trouble = diagnose(error)
        try:
            free = shutil.disk_usage(self.path.parent).free
        except OSError:
            free = 0
        code = getattr(error, "sqlite_errorcode", None)
        lacks_room = code is not None and trouble in (Trouble.IO, Trouble.CANNOT_OPEN) and free < LITTLE_ROOM_BYTES
        if trouble is Trouble.FULL or code in _WRITE_ERRORS or lacks_room:
            raise JournalFull(f"{self.path} cannot be written: no room ({free / 1e6:.0f} MB free; {error})") from error
        if trouble is Trouble.CORRUPT:
            raise JournalDamaged(f"{self.path} is damaged: {error}") from error
        raise error


def _state(path: Path) -> tuple[int, ...] | None:
    """Changes with each checkpoint, and only a checkpoint writes into the file."""
    try:
        about = path.stat()
    except OSError:
        return None
    return (about.st_ino, about.st_size, about.st_mtime_ns)


def _group_row(one: Stored) -> tuple[Any, ...]:
    ticket = one.ticket
    wall_s = one.wall_s + 0.0  # SQLite has no -0.0, and the checksum covers bytes
    head = (ticket.sequence, ticket.ordinal, ticket.attempt, one.min_version, wall_s)
    return (*head, zlib.crc32(one.data, zlib.crc32(_HEAD.pack(*head))), one.data)


def _seal(key: object, value: object) -> tuple[int, bytes]:
    body = msgspec.msgpack.encode(value)
    return _crc(key, body), body


def _crc(key: object, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(str(key).encode()))


# -- the writer -------------------------------------------------------------------------------------------------------

TRANSACTION_BYTES = 32 << 20
"""Group data in one transaction. After a pause there is a lot to write; if space is freed in small amounts, the run
continues in small steps."""
RETRY_S = 1.0
"""Pause between two attempts while there is no room. A person or a clean-up job makes it."""
CLOSE_S = 30.0
"""Time to write the buffer at the close. A disk that needs longer no longer answers."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """Events to write, or work on the journal, and the future that its caller awaits."""

    future: asyncio.Future[Any]
    events: tuple[JournalEvent, ...] = ()
    on_durable: Callable[[], None] | None = None
    work: Callable[[Journal], Any] | None = None
    makes_room: bool = False
    """Does not depend on earlier writes."""


class JournalWriter:
    """Writes a `Journal` from an event loop, which never waits for a disk. One thread owns the file.

    When a future is resolved, a kill of this process no longer loses its rows. The order of calls is the order on disk.
    A transaction takes whatever arrived while the previous one was written, so many small puts cost as much as one
    large put, and a single one does not wait for others. Without room, the thread keeps what it could not write and
    tries again every second. After any other error nothing is written any more, because a later event must not be in
    the file without an earlier one.
    """

    def __init__(self, *, journal: Journal) -> None:
        """Takes `journal` over: the thread uses and closes it."""
        self.paused = ""
        """Why nothing can be written now; "" while it can."""
        self._journal = journal
        self._jobs: deque[_Job] = deque()
        self._broken: Exception | None = None
        self._thread = WriterThread(
            "freewheel-journal", pending=lambda: self._jobs, write=self._write, finish=journal.close
        )
        self._thread.start()

    # -- the loop's side ----------------------------------------------------------------------------------------------

    def write(self, *events: JournalEvent, on_durable: Callable[[], None] | None = None) -> asyncio.Future[None]:
        """Write events, and call `on_durable` on the loop when all are durable.

        The future is resolved after that call, or raises its error or the error of the write. It need not be awaited.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._add(_Job(future, events, on_durable))
        return future

    async def read(self, work: Callable[[Journal], T], *, makes_room: bool = False) -> T:
        """Return what `work` returns. It runs in the thread after all earlier writes.

        It must return data and no iterator, because the journal changes afterwards. With `makes_room`, it does not wait
        for writes for which there is no room.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._add(_Job(future, work=work, makes_room=makes_room))
        return await future

    async def close(self) -> None:
        """Write the buffer if that is possible now, and close the journal. Futures of unwritten events raise."""
        self._thread.close()
        if not await asyncio.to_thread(self._thread.join, CLOSE_S):
            self._fail(JournalClosed(f"{self._journal.path} did not answer within {CLOSE_S:g} s of the close"))
        await asyncio.sleep(0)  # lets the futures that the thread resolved last take effect

    def _add(self, job: _Job) -> None:
        with self._thread.changed:
            if not self._thread.closing and self._broken is None:
                self._jobs.append(job)
                self._thread.schedule(0.0)
                return
        job.future.set_exception(self._broken or JournalClosed(f"{self._journal.path} is closed"))

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _write(self) -> float:
        """Do the next jobs, which stay in the buffer until they are done. Returns the pause before the next attempt."""
        with self._thread.changed:
            first = next((job for job in self._jobs if job.makes_room), None) if self.paused else None
            jobs = [first] if first is not None else _choose_batch(self._jobs)
        work = jobs[0].work
        result, error = None, None
        try:
            if work is not None:
                result = work(self._journal)
            else:
                self._journal.append([event for job in jobs for event in job.events])
        except Exception as problem:  # noqa: BLE001  whoever waits must receive it, whatever it is
            if work is None:
                return self._fail_write(problem)
            error = problem
        if work is None and self.paused:
            self.paused = ""
            log.warning("%s can be written again", self._journal.path)
        with self._thread.changed:
            if self._jobs:  # else the close gave up on them
                for job in jobs:
                    self._jobs.remove(job)
            self._thread.schedule(0.0)
        _resolve(jobs, result, error)
        return 0.0

    def _fail_write(self, error: Exception) -> float:
        """Keep the events if the error is temporary. Returns the pause before the next attempt."""
        if not is_temporary(error):
            log.error("The journal cannot be written any more: %s", error)
            self._fail(error)
            return 0.0
        if not self.paused:
            log.error("%s; nothing is lost, and the run continues when there is room", error)
        self.paused = str(error)
        if self._thread.closing:
            self._fail(JournalClosed(f"closed before it could be written: {error}"))
        return RETRY_S

    def _fail(self, error: Exception) -> None:
        """Write nothing more, and raise `error` for everyone who waits."""
        with self._thread.changed:
            self._broken = self._broken or error
            jobs = list(self._jobs)
            self._jobs.clear()
        _resolve(jobs, None, error)


def _choose_batch(jobs: Iterable[_Job]) -> list[_Job]:
    """The first jobs that fit one transaction: writes up to `TRANSACTION_BYTES` but at least one, or one read alone."""
    chosen: list[_Job] = []
    size = 0
    for job in jobs:
        size += sum(len(event.data) for event in job.events if isinstance(event, Stored))
        if chosen and (job.work is not None or chosen[0].work is not None or size > TRANSACTION_BYTES):
            break
        chosen.append(job)
    return chosen


def _resolve(jobs: list[_Job], result: Any, error: Exception | None) -> None:
    """Resolve the futures on their loop, with one wake-up for all."""

    def resolve() -> None:
        for job in jobs:
            _resolve_job(job, result, error)

    if jobs:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            jobs[0].future.get_loop().call_soon_threadsafe(resolve)


def _resolve_job(job: _Job, result: Any, error: Exception | None) -> None:
    if error is None and job.on_durable is not None:
        try:
            job.on_durable()
        except Exception as failure:
            log.exception("The queue failed after a write to the journal")
            error = failure
    if job.future.done():  # the caller that waited was cancelled
        return
    if error is None:
        job.future.set_result(result)
    else:
        job.future.set_exception(error)


def _retrieve(future: asyncio.Future[None]) -> None:
    """Retrieve the exception so asyncio does not warn; it is already logged."""
    if not future.cancelled():
        future.exception()
