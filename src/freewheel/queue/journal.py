"""`Journal`: scored groups and what became of them, in one SQLite file that outlives every process of a run.

    MessageQueue ─ JournalWriter ─ append ─▶ groups     a row per scored group, until a checkpoint covers its step
                                         ├─▶ steps      what each step was made of; once its groups are gone,
                                         ├─▶ history    its ordinals: the audit trail, it stays
                                         ├─▶ failures, abandoned
                                         └─▶ meta       format, base, sequences that were given out
    restore ◀── base, steps, stored, groups, failures ───┘      `freewheel inspect` reads beside a live writer

Synchronous, one thread, one writer. Rows of groups are never changed: which step a group belongs to is said by that
step's row, so a take and a commit write bytes, not groups. Every row has a checksum, and one that fails it counts as
missing. Reads go by pages, each its own short look at the file: a slow reader keeps no log from being used again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import freewheel
from freewheel.data.group import Ticket
from freewheel.queue.journal_events import (
    NO_SEQUENCE,
    Abandoned,
    CheckpointMark,
    Committed,
    Event,
    Failed,
    GivenBack,
    Reserved,
    Step,
    Stored,
    Took,
    VersionCompleted,
)
from freewheel.queue.journal_file import (
    JournalBusy,
    JournalDamaged,
    JournalError,
    JournalFile,
    JournalFormat,
    JournalFull,
    set_aside,
)
from freewheel.queue.ledger import Frontier

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
