"""What a `Journal` is told, and what it tells: facts about one run, each a small struct.

MessageQueue ── Event ──▶ JournalWriter ──▶ Journal ── CheckpointMark, Step, Stored, Failed ──▶ restore, inspect

`JournalFile`: the journal's SQLite file: made private, locked for one writer, opened, checked; its errors named.

Journal ─▶ JournalFile ─▶ journal.sqlite          the file: pages that deletion frees are used again
                       ├▶ journal.sqlite-wal      the log: commits go there, a checkpoint copies them into the file
                       ├▶ journal.sqlite-shm      the log's index
                       └▶ journal.sqlite.lock     empty; locked by the one who writes

`Journal`: scored groups and what became of them, in one SQLite file that outlives every process of a run.

    MessageQueue ─ JournalWriter ─ append ─▶ groups     a row per scored group, until a checkpoint covers its step
                                         ├─▶ steps      what each step was made of; once its groups are gone,
                                         ├─▶ history    its ordinals: the audit trail, it stays
                                         ├─▶ failures, abandoned
                                         └─▶ meta       format, base, sequences that were given out
    restore ◀── base, steps, stored, groups, failures ───┘      `freewheel inspect` reads beside a live writer

Synchronous, one thread, one writer. Rows of groups are never changed: which step a group belongs to is said by that
step's row, so a take and a commit write bytes, not groups. Every row has a checksum, and one that fails it counts as
missing. Reads go by pages, each its own short look at the file: a slow reader keeps no log from being used again.

`JournalWriter`: a `Journal` for an event loop. One thread owns the file; the loop never waits for a disk.

    MessageQueue ── write(events) ─▶ buffer ─▶ thread ── one transaction of all that is there ─▶ Journal
                 ◀─ future: durable ──────────────┘  no room: rolled back, kept, tried again every second
                 ── read(work) ────▶ after all that was written before it; ahead of what there is no room for, where
                                     it makes room

Order of calls is order on disk. A transaction takes what came in while the one before was written, so many small puts
cost as much as one large one, and a lonely one does not wait for company.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import sqlite3
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

import msgspec

import freewheel
from freewheel.data.group import Ticket
from freewheel.queue.ledger import Frontier
from freewheel.utils.files import open_private
from freewheel.utils.sqlite import Trouble, diagnose

__all__ = [
    "NO_SEQUENCE",
    "Abandoned",
    "CheckpointMark",
    "Committed",
    "Event",
    "Failed",
    "GivenBack",
    "Journal",
    "JournalBusy",
    "JournalDamaged",
    "JournalError",
    "JournalFormat",
    "JournalFull",
    "Reserved",
    "Step",
    "Stored",
    "Took",
    "VersionCompleted",
    "set_aside",
]

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


PAGE_BYTES = 65536
"""SQLite's largest: a group of 80 KB costs 144 us of CPU, compaction included; 181 with 16 KiB and 299 with 4 KiB. One
of 10 KB costs 48 us, with 4 KiB 53."""
SYNCHRONOUS = "NORMAL"
"""A commit reaches the operating system and is synced at the next checkpoint: docs/durability.md has the argument."""
CHECKPOINT_BYTES = 16 << 20
"""Of log before it is copied into the file. The commit that does it took 69 ms at worst on a busy disk, and 165 ms with
64 MiB; 4 MiB made it 57 ms, four times as often."""
LOG_LIMIT_BYTES = 64 << 20
"""The log is cut back to this once it begins anew, where a large transaction or a reader made it longer."""
CACHE_KIB = 4 * 1024
"""Of pages in memory. A transaction that is larger spills into the log early; 16 MiB cost a tenth more CPU."""
BUSY_TIMEOUT_S = 5.0
"""Readers never block the writer; a backup tool that locks the file may, for a moment."""
LOCK_WAIT_S, LOCK_POLL_S = 5.0, 0.05
"""For the writer before, whose process was killed: it is gone in milliseconds, or somebody else's."""
LITTLE_ROOM_BYTES = 32 << 20
"""Below it an input/output error is put down to the disk being full: a log and its index need more than this."""
WRITE_ERRORS = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_TRUNCATE)
"""What SQLite makes of a quota, a limit on file sizes or a full tmpfs; it says FULL for ENOSPC alone."""
COMPANIONS = ("-wal", "-shm")


class JournalError(Exception):
    """Anything that keeps the journal from being used."""


class JournalFull(JournalError):
    """There is no room to write; what was to be written can be written later. Says the path and the MB free."""


class JournalDamaged(JournalError):
    """The file cannot be read: not a journal, cut off, or overwritten."""


class JournalFormat(JournalDamaged):
    """Written by a later freewheel, in a way that this one does not know."""


class JournalBusy(JournalError):
    """Another process writes it."""


class JournalFile:
    """A connection. SQLite's errors go through `errors`: no room and damage have names, all else stays what it is."""

    def __init__(self, path: Path, *, readonly: bool) -> None:
        """Makes the file where there is none, unless `readonly`: then nothing is made beside one that nobody writes."""
        self.path = path
        self._lock: int | None = None
        self._still: tuple[int, ...] | None = None
        """How the file was that is read as one that nobody writes."""
        if readonly and not path.exists():
            raise FileNotFoundError(f"{path}: there is no journal")
        try:
            with self.errors():
                mode = "rw"
                if readonly:
                    self._still = self._unwritten()
                    mode = "ro" if self._still is None else "ro&immutable=1"
                else:
                    self._lock = _locked(path)
                    self._make()
                # Not tied to a thread: whoever restores from it hands it to its writer's thread afterwards.
                self.db = sqlite3.connect(
                    f"file:{quote(str(path))}?mode={mode}",
                    uri=True,
                    timeout=BUSY_TIMEOUT_S,
                    isolation_level=None,
                    check_same_thread=False,
                )
        except BaseException:
            self._unlock()
            raise
        try:
            self.db.text_factory = bytes  # text where none should be is for a checksum to find, not for a decoder
            with self.errors():
                self._set_up()
        except BaseException:
            self.close()
            raise

    @property
    def _log(self) -> Path:
        return self.path.with_name(self.path.name + "-wal")

    def _unwritten(self) -> tuple[int, ...] | None:
        """How the file is, where there is no log: nobody writes it and all is in it, so that SQLite need not make a log
        and an index to read it, which it cannot in a folder of somebody else's."""
        about = _mark(self.path)  # before the log is looked for: who begins to write in between changes it
        return None if self._log.exists() else about

    def _check_still(self) -> None:
        if self._still is not None and _mark(self.path) != self._still:
            raise JournalBusy(f"{self.path} began to be written while it was read: look again")

    def _make(self) -> None:
        log = self._log
        if not self.path.exists() and log.exists() and log.stat().st_size:  # it would be replayed into the new file
            raise JournalDamaged(f"{self.path} is gone, and {log.name} is left of it")
        os.close(open_private(self.path, os.O_RDWR))  # SQLite gives its log the same mode

    def _set_up(self) -> None:
        for setting in (
            f"page_size = {PAGE_BYTES}",
            f"cache_size = -{CACHE_KIB}",
            f"synchronous = {SYNCHRONOUS}",
            f"wal_autocheckpoint = {CHECKPOINT_BYTES // PAGE_BYTES}",
            f"journal_size_limit = {LOG_LIMIT_BYTES}",
            "cell_size_check = ON",
            "secure_delete = OFF",  # some builds of SQLite overwrite what is deleted: as much to write as it was
            "temp_store = MEMORY",
        ):
            self.db.execute(f"PRAGMA {setting}").fetchall()

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # a last checkpoint that does not fit: the log stays, and holds it
            self.db.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def pages(self, query: str, after: int) -> Iterator[Any]:
        """Rows of a query by its first column, a page at a time: nothing is held open in between."""
        while True:
            with self.errors():
                page = self.db.execute(query, (after,)).fetchall()
            for row in page:
                if row[0] <= after:
                    raise JournalDamaged(f"{self.path} is damaged: {row[0]} comes after {after}")
                after = row[0]
                yield row
            if not page:
                return

    def row(self, query: str, key: int | str) -> Any:
        with self.errors():
            return self.db.execute(query, (key,)).fetchone()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self.errors():
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield self.db
                self.db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    if self.db.in_transaction:
                        self.db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._check_still()  # what was read at two moments looks like damage
            if isinstance(error, sqlite3.Error | OSError):
                self._raise(error)
            raise
        self._check_still()

    def _raise(self, error: sqlite3.Error | OSError) -> NoReturn:
        trouble = diagnose(error)
        free = _free_bytes(self.path)
        code = getattr(error, "sqlite_errorcode", None)
        io_for_room = code is not None and trouble in (Trouble.IO, Trouble.CANNOT_OPEN) and free < LITTLE_ROOM_BYTES
        if trouble is Trouble.FULL or code in WRITE_ERRORS or io_for_room:
            raise JournalFull(f"{self.path} cannot be written: no room ({free / 1e6:.0f} MB free; {error})") from error
        if trouble is Trouble.CORRUPT:
            raise JournalDamaged(f"{self.path} is damaged: {error}") from error
        raise error


def set_aside(path: Path) -> Path:
    """Moves a journal that cannot be read, and its log, out of the way of a new one. Gives where it is now."""
    target = next(
        one for number in itertools.count(1) if not (one := path.with_name(f"{path.name}.damaged-{number}")).exists()
    )
    for suffix in ("", *COMPANIONS):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(target.with_name(target.name + suffix))
    return target


def _locked(path: Path) -> int:
    """An open file that is locked for this writer, and by the death of its process no longer."""
    lock = open_private(path.with_name(path.name + ".lock"), os.O_RDWR)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise JournalBusy(f"{path} is written by another process: end that run first") from None
        time.sleep(LOCK_POLL_S)


def _mark(path: Path) -> tuple[int, ...] | None:
    """Another one after each checkpoint, which alone writes into the file."""
    try:
        about = path.stat()
    except OSError:
        return None
    return (about.st_ino, about.st_size, about.st_mtime_ns)


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:
        return 0


log = logging.getLogger("freewheel.queue")

FORMAT = 1
"""Of the tables and their rows. A file of a later one is refused."""
PAGE_GROUPS, PAGE_ROWS = 32, 512
"""Rows that are read at once, with and without a group's data: replay then needs a few MB, however much there is."""
DROPPED_AT_ONCE = 512
"""Groups in one transaction, about, where thousands are dropped: it keeps the log short."""
LAST = 2**63 - 1
"""No step comes after it: SQLite's largest number."""
DETAIL_CHARS = 1000
"""Of an error's text: failures stay, and a traceback of a reward service can be a page of HTML."""


class _StepBody(msgspec.Struct, array_like=True):
    """A step as it lies on disk. Differences of neighbours are small numbers, which msgpack writes as one byte."""

    version: int | None
    wall_s: float
    missing: int
    ordinals: list[int]
    attempts: dict[int, int]
    """Position → attempt, where it was not the first."""
    sequences: list[int] | None
    """None: dropped with the groups' data."""
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


# -- the file ---------------------------------------------------------------------------------------------------------

SCHEMA = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE steps (step INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL)",
    # A table of its own, as rows that shrink where they are leave their pages half empty for ever.
    "CREATE TABLE history (step INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL)",
    "CREATE TABLE failures (sequence INTEGER PRIMARY KEY, ordinal INTEGER NOT NULL, crc INTEGER NOT NULL,"
    " body BLOB NOT NULL)",
    "CREATE INDEX failures_by_ordinal ON failures (ordinal)",
    "CREATE TABLE abandoned (ordinal INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL)",
    # The data comes last: the columns before it are read without it.
    "CREATE TABLE groups (sequence INTEGER PRIMARY KEY, ordinal INTEGER NOT NULL, attempt INTEGER NOT NULL,"
    " min_version INTEGER NOT NULL, wall_s REAL NOT NULL, crc INTEGER NOT NULL, data BLOB NOT NULL)",
)
CHECKED_AT_OPENING = ("meta", "steps", "history", "failures", "abandoned")
"""Tables whose pages are looked through for damage: small. A group that damage hides is issued again, at worst."""
GROUP_COLUMNS = "sequence, ordinal, attempt, min_version, wall_s, crc, data"
_HEAD = struct.Struct("<qqqqd")
T = TypeVar("T")


class Journal:
    """What `append` returned for is there after a kill of the process; rows are whole, and in the order of appends."""

    def __init__(self, path: Path, *, readonly: bool = False, checked: bool = True) -> None:
        """Makes the file where there is none. Raises a `JournalError`, whichever fits. `checked`: all of it is looked
        through for damage, which takes a while in a long one."""
        self.path = path
        self._file = JournalFile(path, readonly=readonly)
        try:
            with self._file.errors():
                self._open(readonly, checked)
        except BaseException:
            self._file.close()
            raise

    def _open(self, readonly: bool, checked: bool) -> None:
        db = self._file.db
        tables, ours = db.execute("SELECT count(*), sum(name = 'meta') FROM sqlite_master").fetchone()
        if not tables and not readonly:
            self._fill()
        elif not ours:
            raise JournalDamaged(f"{self.path} is not a journal")
        found = self._meta("format", int, 0)
        if found != FORMAT:
            raise JournalFormat(
                f"{self.path} has format {found}, written by freewheel {self._meta('freewheel', str, '?')}; freewheel "
                f"{freewheel.__version__} reads format {FORMAT}: resume with the freewheel that wrote it"
            )
        for table in CHECKED_AT_OPENING if checked else ():
            (verdict,) = db.execute(f"PRAGMA quick_check({table})").fetchone()
            if verdict != b"ok":
                raise JournalDamaged(f"{self.path} is damaged, table {table}: {verdict.decode()}")

    def _fill(self) -> None:
        self._file.db.execute("PRAGMA journal_mode = WAL").fetchall()
        with self._file.transaction() as db:
            for statement in SCHEMA:
                db.execute(statement)
            self._set("format", FORMAT)
            self._set("freewheel", freewheel.__version__)
            self._set("base", CheckpointMark())

    def close(self) -> None:
        self._file.close()

    # -- writing ------------------------------------------------------------------------------------------------------

    def append(self, events: Sequence[Event]) -> None:
        """All of `events` in one transaction, in order. Each may be said twice: the second time changes nothing."""
        with self._file.transaction():
            for kind, run in itertools.groupby(events, type):
                if kind is Stored:
                    rows = (_group_row(one) for one in run if isinstance(one, Stored))
                    self._file.db.executemany("INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
                else:
                    for event in run:
                        self._apply(event)

    def _apply(self, event: Event) -> None:
        match event:
            case Took(step, tickets, missing):
                known = self._step(step)
                if known is None or known.version is None:
                    self._write_step("steps", Step(step, None, tickets, missing, 0.0))
            case Committed(step, version, wall_s):
                known = self._step(step)
                assert known is not None, f"step {step} is committed, and nobody took it"
                if known.version is None:
                    self._write_step("steps", msgspec.structs.replace(known, version=version, wall_s=wall_s))
            case VersionCompleted(step, version):
                if known := next(self._steps("steps", step - 1, step), None):
                    self._write_step("steps", msgspec.structs.replace(known, version=version))
            case Failed(ticket, _, _, detail):
                shown = msgspec.structs.replace(event, detail=detail[:DETAIL_CHARS])
                row = (ticket.sequence, ticket.ordinal, *_sealed(ticket.sequence, shown))
                self._file.db.execute("INSERT OR IGNORE INTO failures VALUES (?, ?, ?, ?)", row)
                self._file.db.execute("DELETE FROM groups WHERE sequence = ?", (ticket.sequence,))
            case Abandoned(ordinal):
                end = (ordinal, *_sealed(ordinal, event))
                self._file.db.execute("INSERT OR IGNORE INTO abandoned VALUES (?, ?, ?)", end)
            case GivenBack(step):
                if (known := self._step(step)) is not None and known.version is None:
                    self._file.db.execute("DELETE FROM steps WHERE step = ?", (step,))
            case Reserved(below):
                self._set("reserved", max(below, self._meta("reserved", int, 0)))
            case _:
                raise AssertionError(f"not an event: {event!r}")

    def compact(self, *, step: int, frontier: Frontier, keep_groups: int) -> None:
        """No resume goes back beyond `step`, whose ledger is `frontier`: drops the data of groups in steps up to it,
        but for the last `keep_groups`. Their pages are used again; the rows of the steps stay, without sequences."""
        with self._file.transaction():
            if step <= self.base().step:
                return
            last = self._step(step)
            assert last is not None and last.version is not None, f"step {step} is not committed"
            self._set("base", CheckpointMark(step, last.version, frontier))
        kept, covered = 0, [*self._steps("steps", 0, step)]
        while covered and kept < keep_groups:
            newest = covered.pop()
            spare = min(keep_groups - kept, len(newest.tickets))
            kept += spare
            self._thin(newest, newest.tickets[: len(newest.tickets) - spare])
        while covered:  # from the oldest on; if it ends in between, the next compaction goes on
            part = list(itertools.islice(covered, max(1, DROPPED_AT_ONCE // max(1, len(covered[0].tickets)))))
            del covered[: len(part)]
            self._drop(part, [ticket for one in part for ticket in one.tickets])

    def _drop(self, trained: Sequence[Step], tickets: Sequence[Ticket]) -> None:
        with self._file.transaction():
            self._to_history(trained)
            self._delete(tickets)

    def _thin(self, step: Step, tickets: Sequence[Ticket]) -> None:
        """Drops a part of a step's groups."""
        with self._file.transaction():
            if tickets:
                self._write_step("steps", self._aged(step))
            self._delete(tickets)

    def rewind(self, *, after: int) -> None:
        """Forgets the recorded steps after `after`: their groups that are there are stored again."""
        with self._file.transaction():
            assert after >= self.base().step, f"step {after} is before the base: its groups are gone"
            self._file.db.execute("DELETE FROM steps WHERE step > ?", (after,))

    def reset(self, *, step: int, version: int, frontier: Frontier) -> None:
        """The journal ends before a checkpoint (its tail was lost, or it is empty): begins from that one. Stored groups
        of ordinals that have not ended stay; so do the rows of committed steps."""
        ended = set(frontier.ended)
        with self._file.transaction():
            self._to_history([one for one in self._steps("steps", 0, step) if one.version is not None])
            self._file.db.execute("DELETE FROM steps")
            self._file.db.execute("DELETE FROM history WHERE step > ?", (step,))
            rows = self._file.db.execute("SELECT sequence, ordinal FROM groups").fetchall()
            self._delete(Ticket(ordinal, one) for one, ordinal in rows if ordinal < frontier.low or ordinal in ended)
            self._set("base", CheckpointMark(step, version, frontier))

    # -- reading ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """All that is read inside is of one moment, whatever a writer does beside it. Be short: while it lasts, the log
        of a live writer grows."""
        with self._file.errors():
            self._file.db.execute("BEGIN")
        try:
            yield
        finally:
            self._file.db.execute("ROLLBACK")

    def base(self) -> CheckpointMark:
        return self._meta("base", CheckpointMark, None)

    def reserved(self) -> int:
        """Sequences below it may have been given out."""
        return self._meta("reserved", int, 0)

    def steps(self, *, after: int) -> Iterator[Step]:
        """Those after `after`, in order. One that is damaged is left out: a gap in the numbers."""
        yield from self._steps("history", after)
        yield from self._steps("steps", after)

    def last_step(self) -> int:
        """The last that was committed; that of the checkpoint where none was since."""
        base = self.base().step
        query = "SELECT step, crc, body FROM steps WHERE step > ? ORDER BY step DESC"
        with self._file.errors():
            for row in self._file.db.execute(query, (base,)):
                body = self._unsealed(*row, kind=_StepBody)
                if body is not None and body.version is not None:
                    return int(row[0])
        return base

    def stored(self) -> Iterator[Stored]:
        """Groups of no step, by sequence."""
        mine = {ticket.sequence for step in self._steps("steps", 0) for ticket in step.tickets}
        query = f"SELECT {GROUP_COLUMNS} FROM groups WHERE sequence > ? ORDER BY sequence LIMIT {PAGE_GROUPS}"
        for row in self._file.pages(query, -1):
            if row[0] not in mine and (group := self._group(row)) is not None:
                yield group

    def groups(self, step: int) -> list[Stored] | None:
        """The groups of `step`, in its order. None: not all are there, or there is no such step."""
        known = self._step(step)
        found: list[Stored] = []
        for ticket in known.tickets if known else ():
            row = self._file.row(f"SELECT {GROUP_COLUMNS} FROM groups WHERE sequence = ?", ticket.sequence)
            if row is None or (group := self._group(row)) is None:
                return None
            found.append(group)
        return found if known else None

    def group(self, ordinal: int) -> Stored | None:
        """The latest group of a prompt, where its data is still there."""
        row = self._file.row(
            f"SELECT {GROUP_COLUMNS} FROM groups WHERE ordinal = ? ORDER BY sequence DESC LIMIT 1", ordinal
        )
        return None if row is None else self._group(row)

    def failures(self, ordinal: int | None = None) -> Iterator[Failed]:
        """By sequence; of one prompt, or of all."""
        mine = "" if ordinal is None else f"AND ordinal = {int(ordinal)}"
        query = (
            f"SELECT sequence, crc, body FROM failures WHERE sequence > ? {mine} ORDER BY sequence LIMIT {PAGE_ROWS}"
        )
        return (one for row in self._file.pages(query, -1) if (one := self._unsealed(*row, kind=Failed)) is not None)

    def abandoned(self, *, after: int = -1) -> Iterator[Abandoned]:
        """By ordinal, those above `after`."""
        query = f"SELECT ordinal, crc, body FROM abandoned WHERE ordinal > ? ORDER BY ordinal LIMIT {PAGE_ROWS}"
        rows = self._file.pages(query, after)
        return (one for row in rows if (one := self._unsealed(*row, kind=Abandoned)) is not None)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _steps(self, table: str, after: int, until: int = LAST) -> Iterator[Step]:
        query = (
            f"SELECT step, crc, body FROM {table} WHERE step > ? AND step <= {until} ORDER BY step LIMIT {PAGE_ROWS}"
        )
        for row in self._file.pages(query, after):
            if (body := self._unsealed(*row, kind=_StepBody)) is not None:
                yield body.step(row[0])

    def _step(self, number: int) -> Step | None:
        return next(
            iter([*self._steps("steps", number - 1, number), *self._steps("history", number - 1, number)]), None
        )

    def _write_step(self, table: str, step: Step) -> None:
        body = _sealed(step.step, _StepBody.of(step, sequences=table == "steps"))
        self._file.db.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)", (step.step, *body))

    def _to_history(self, steps: Sequence[Step]) -> None:
        """In order, so that pages are filled."""
        for step in steps:
            self._write_step("history", self._aged(step))
            self._file.db.execute("DELETE FROM steps WHERE step = ?", (step.step,))

    def _aged(self, step: Step) -> Step:
        """With the version of its oldest group, for the audit: the group itself is about to be dropped."""
        if step.min_version is not None:
            return step
        rows = [
            self._file.row("SELECT min_version FROM groups WHERE sequence = ?", one.sequence) for one in step.tickets
        ]
        oldest = None if None in rows else min((version for (version,) in rows), default=None)
        return msgspec.structs.replace(step, min_version=oldest)

    def _delete(self, tickets: Iterable[Ticket]) -> None:
        self._file.db.executemany("DELETE FROM groups WHERE sequence = ?", ((one.sequence,) for one in tickets))

    def _group(self, row: tuple[Any, ...]) -> Stored | None:
        """None: damaged, and said so."""
        sequence, ordinal, attempt, min_version, wall_s, crc, data = row
        try:
            whole = zlib.crc32(data, zlib.crc32(_HEAD.pack(sequence, ordinal, attempt, min_version, wall_s))) == crc
        except (struct.error, TypeError):
            whole = False
        if not whole:
            log.warning("%s: the group of sequence %s is damaged and counts as missing", self.path, sequence)
            return None
        return Stored(Ticket(ordinal, sequence, attempt), min_version, data, wall_s)

    def _meta(self, name: str, kind: type[T], default: T | None) -> T:
        row = self._file.row("SELECT crc, body FROM meta WHERE name = ?", name)
        value = default if row is None else self._unsealed(name, *row, kind=kind)
        if value is None:
            raise JournalDamaged(f"{self.path} is damaged: {name} cannot be read")
        return value

    def _set(self, name: str, value: object) -> None:
        self._file.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (name, *_sealed(name, value)))

    def _unsealed(self, key: object, crc: object, body: object, *, kind: type[T]) -> T | None:
        """None: damaged, and said so."""
        if isinstance(body, bytes) and crc == _crc(key, body):
            return msgspec.msgpack.decode(body, type=kind)
        log.warning("%s: the row of %s %s is damaged and counts as missing", self.path, kind.__name__, key)
        return None


def _group_row(one: Stored) -> tuple[Any, ...]:
    ticket = one.ticket
    wall_s = one.wall_s + 0.0  # SQLite has no -0.0, and the checksum is over bytes
    head = (ticket.sequence, ticket.ordinal, ticket.attempt, one.min_version, wall_s)
    return (*head, zlib.crc32(one.data, zlib.crc32(_HEAD.pack(*head))), one.data)


def _sealed(key: object, value: object) -> tuple[int, bytes]:
    body = msgspec.msgpack.encode(value)
    return _crc(key, body), body


def _crc(key: object, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(str(key).encode()))


TRANSACTION_BYTES = 32 << 20
"""Of groups in one transaction. After a pause a lot has gathered: where room comes back bit by bit, so does the run."""
RETRY_S = 1.0
"""Between two tries to write while there is no room: a person makes it, or a clean-up job."""
CLOSE_S = 30.0
"""For what is buffered at the close. A disk that needs longer does not answer any more."""


class JournalClosed(JournalError):
    """What was to be written was not: the journal is closed, or closing while there is no room."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Something for the thread: events to write, or work on the journal."""

    future: asyncio.Future[Any]
    events: tuple[Event, ...] = ()
    work: Callable[[Journal], Any] | None = None
    makes_room: bool = False
    """Needs nothing that was written before it."""

    @property
    def data_bytes(self) -> int:
        return sum(len(event.data) for event in self.events if isinstance(event, Stored))


def together(jobs: Iterable[Job], limit_bytes: int = TRANSACTION_BYTES) -> list[Job]:
    """The first jobs that make one transaction: writes up to `limit_bytes`, one at least; or one read, alone."""
    chosen: list[Job] = []
    size = 0
    for job in jobs:
        size += job.data_bytes
        if chosen and (job.work is not None or size > limit_bytes):
            break
        chosen.append(job)
        if job.work is not None:
            break
    return chosen


def passing(error: Exception) -> bool:
    """Whether the same may well work later: no room, or another process that locks the file."""
    if isinstance(error, sqlite3.Error):
        return diagnose(error) is Trouble.LOCKED
    return isinstance(error, JournalFull)


class JournalWriter:
    """A future that is resolved stands for rows that a kill of this process does not lose.

    After an error that does not pass, nothing is written any more: a later event must not be there without an earlier.
    """

    def __init__(self, *, journal: Journal) -> None:
        """Takes `journal` over: it is used and closed by the thread."""
        self.paused = ""
        """Why nothing can be written now, in words; "" while it can."""
        self._journal = journal
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="freewheel-journal", daemon=True)
        self._thread.start()

    # -- the loop's side ----------------------------------------------------------------------------------------------

    def write(self, *events: Event) -> asyncio.Future[None]:
        """Resolved when they are durable, all or none of them. Need not be awaited."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_seen)
        self._add(Job(future, events=events))
        return future

    async def read(self, work: Callable[[Journal], T], *, makes_room: bool = False) -> T:
        """What `work` gives, done in the thread after all that was written before. Gives data, no iterator: the journal
        goes on meanwhile. `makes_room`: while nothing can be written, it does not wait for that."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._add(Job(future, work=work, makes_room=makes_room))
        return await future

    async def flush(self) -> None:
        """Returns when all that was written before is durable."""
        await self.write()

    async def close(self) -> None:
        """Writes what is buffered, if that can be done now, and closes the journal. What is not written is told so."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            self._fail(JournalClosed(f"{self._journal.path} did not answer within {CLOSE_S:g} s of the close"))
        await asyncio.sleep(0)  # futures that the thread resolved last are so when this returns

    def _add(self, job: Job) -> None:
        with self._changed:
            if not self._closing and self._broken is None:
                self._jobs.append(job)
                self._changed.notify()
                return
        job.future.set_exception(self._broken or JournalClosed(f"{self._journal.path} is closed"))

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while jobs := self._next():
                self._do(jobs)
        finally:
            self._journal.close()

    def _next(self) -> list[Job]:
        """What to do now; they stay in the buffer until they are done. Nothing: closed, and all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            first = next((job for job in self._jobs if job.makes_room), None) if self.paused else None
            return together(self._jobs) if first is None else [first]

    def _do(self, jobs: list[Job]) -> None:
        work = jobs[0].work
        result = None
        try:
            if work is not None:
                result = work(self._journal)
            else:
                self._journal.append([event for job in jobs for event in job.events])
        except Exception as error:  # noqa: BLE001  whatever it is, whoever waits must hear of it
            if work is not None:
                self._done(jobs, error=error)
            elif passing(error):
                self._pause(error)
            else:
                log.error("The journal cannot be written any more: %s", error)
                self._fail(error)
            return
        if work is None and self.paused:
            self.paused = ""
            log.warning("%s can be written again", self._journal.path)
        self._done(jobs, result=result)

    def _pause(self, error: Exception) -> None:
        if not self.paused:
            log.error("%s; nothing is lost, and the run goes on when there is room", error)
        self.paused = str(error)
        with self._changed:
            self._changed.wait_for(lambda: self._closing, RETRY_S)
            closing = self._closing
        if closing:
            self._fail(JournalClosed(f"closed before it could be written: {error}"))

    def _done(self, jobs: list[Job], *, result: Any = None, error: Exception | None = None) -> None:
        with self._changed:
            if self._jobs:  # else given up at the close meanwhile
                for job in jobs:
                    self._jobs.remove(job)
        _resolve(jobs, result, error)

    def _fail(self, error: Exception) -> None:
        """Nothing more is written."""
        with self._changed:
            self._broken = self._broken or error
            jobs = list(self._jobs)
            self._jobs.clear()
        _resolve(jobs, None, error)


def _resolve(jobs: list[Job], result: Any, error: Exception | None) -> None:
    """On the loop of whoever waits; one wake-up for all."""

    def tell() -> None:
        for job in jobs:
            if job.future.done():
                continue
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)

    if jobs:
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits
            jobs[0].future.get_loop().call_soon_threadsafe(tell)


def _seen(future: asyncio.Future[None]) -> None:
    """An error is told to those who wait and is in the log: that nobody waited is no news."""
    if not future.cancelled():
        future.exception()
