"""What lies in the cache file: the tables, and the statements on them. No threads, no waiting, no recovery here."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from freewheel.judge.verdict import TOKENS_MAX

APPLICATION_ID = 0x46574A43
"""Says in the file's header that it is freewheel's judge cache ("FWJC"), and not some other SQLite file."""
SCHEMA_VERSION = 1
"""Raised whenever a table changes. A file of another version is set aside: replies can be asked for again."""
QUERY_SIZES = (1, 8, 64, 256)
"""The numbers of keys that a prepared query takes; a shorter chunk repeats its last key."""
ROW_OVERHEAD_BYTES = 100
"""What an entry takes in the file beside key and text: the key again in its index, numbers, the index of last use."""
STEP_ENTRIES = 512
"""Rows per transaction of eviction, expiry and clearing: a few milliseconds, between which others may write."""
STEP_PAGES = 512
"""Pages given back to the disk per transaction, for the same reason."""
BEFORE_FIRST_ID = -1
EXPORT_ENTRIES = 256
EXPORT_BYTES = 4 * 2**20
"""An export reads this much at a time, so that a slow consumer does not hold a snapshot and make the log grow."""
FUTURE_SLACK_S = 86_400.0
"""Times later than this from now were left by a clock that was wrong, and not by one that was set a little."""

# A rowid table with a unique index on the key. Measured (SQLite 3.40, 2 vCPU, 100,000 entries of 600 bytes, batches of
# 1,024, keys by IN of 256): put 15 us and get 4.5-5.2 us an entry, 75 MB; WITHOUT ROWID: put 50 us, get 5.8-6.3 us,
# 86 MB, since keys are random and each one then dirties a page that also holds six replies.
# `replies_used` (+1 us a put) answers eviction, expiry and stats alone, without a look at the replies.
SCHEMA = (
    """CREATE TABLE replies (
        id INTEGER PRIMARY KEY,
        key BLOB NOT NULL UNIQUE,
        created_at REAL NOT NULL,
        used_at REAL NOT NULL,
        size INTEGER NOT NULL,
        checksum INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        text BLOB NOT NULL
    )""",
    "CREATE INDEX replies_used ON replies (used_at, size, created_at)",
    "CREATE TABLE notes (name BLOB PRIMARY KEY NOT NULL, value BLOB NOT NULL) WITHOUT ROWID",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

INSERT_SIZES = (64, 8, 1)
"""The numbers of rows that a prepared insert takes. Python's sqlite3 lets go of the interpreter lock once a statement:
beside a busy event loop, each row would otherwise be a change of threads."""
_UPSERTS = {
    rows: "INSERT INTO replies (key, created_at, used_at, size, checksum, prompt_tokens, completion_tokens, text)"
    f" VALUES {','.join(['(?, ?, ?, ?, ?, ?, ?, ?)'] * rows)} ON CONFLICT (key) DO UPDATE SET"
    " created_at = excluded.created_at, used_at = excluded.used_at, size = excluded.size,"
    " checksum = excluded.checksum, prompt_tokens = excluded.prompt_tokens,"
    " completion_tokens = excluded.completion_tokens, text = excluded.text"
    for rows in INSERT_SIZES
}
_TOUCH = "UPDATE replies SET used_at = ?, created_at = min(created_at, ?) WHERE key = ?"
_NOTE = "INSERT INTO notes (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
_COLUMNS = "id, key, created_at, used_at, checksum, prompt_tokens, completion_tokens, text"
_QUERIES = {size: f"SELECT {_COLUMNS} FROM replies WHERE key IN ({','.join('?' * size)})" for size in QUERY_SIZES}


class CachedReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reply as it came, and what it cost when it was asked for."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Entry(NamedTuple):
    """A row of `replies`."""

    key: bytes
    reply: CachedReply
    created_at: float
    used_at: float


class Summary(NamedTuple):
    entries: int
    payload_bytes: int
    oldest_at: float | None
    newest_at: float | None
    expired: int


def pragma(conn: sqlite3.Connection, name: str) -> int:
    value: int = conn.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def used_bytes(conn: sqlite3.Connection) -> int:
    """The pages in use. SQLite keeps this count for all processes, so that no total of our own can go wrong."""
    return (pragma(conn, "page_count") - pragma(conn, "freelist_count")) * pragma(conn, "page_size")


def select(conn: sqlite3.Connection, keys: Sequence[bytes]) -> Iterator[Entry | None]:
    """The rows of those keys; None stands for a row whose content is damaged."""
    largest = QUERY_SIZES[-1]
    for start in range(0, len(keys), largest):
        chunk = keys[start : start + largest]
        size = next(size for size in QUERY_SIZES if size >= len(chunk))
        # The cursor is emptied at once: one that is left half-read would keep its snapshot.
        for row in conn.execute(_QUERIES[size], [*chunk, *[chunk[-1]] * (size - len(chunk))]).fetchall():
            yield _entry(row)


def write_replies(conn: sqlite3.Connection, replies: Iterable[tuple[bytes, CachedReply]], now: float) -> None:
    rows = []
    for key, reply in replies:
        try:
            text = utf8(reply.text)
            tokens = [min(max(int(count), 0), TOKENS_MAX) for count in (reply.prompt_tokens, reply.completion_tokens)]
            rows.append((key, now, now, len(key) + len(text), _checksum(key, text), *tokens, text))
        except (TypeError, ValueError, AttributeError, OverflowError):
            continue  # not of the declared types: refused, so that the others of its batch are kept
    rows.sort(key=_key)  # neighbours in the index are then written together
    start = 0
    for size in INSERT_SIZES:
        while len(rows) - start >= size:
            chunk = rows[start : start + size]
            conn.execute(_UPSERTS[size], [value for row in chunk for value in row])
            start += size


def touch(conn: sqlite3.Connection, keys: Iterable[bytes], now: float) -> None:
    """Notes that they were used now. A time of storing that lies in the future becomes now."""
    conn.executemany(_TOUCH, [(now, now, key) for key in keys])


def write_notes(conn: sqlite3.Connection, notes: Iterable[tuple[str, bytes]]) -> None:
    conn.executemany(_NOTE, [(utf8(name), value) for name, value in notes])


def read_note(conn: sqlite3.Connection, name: str) -> bytes | None:
    row = conn.execute("SELECT value FROM notes WHERE name = ?", (utf8(name),)).fetchone()
    return row[0] if row is not None and isinstance(row[0], bytes) else None


def evict_step(conn: sqlite3.Connection, target_bytes: int) -> bool:
    """Removes some of the entries used longest ago, not more than needed. False: nothing is left to remove."""
    excess = used_bytes(conn) - target_bytes
    victims = []
    for row_id, size in conn.execute("SELECT id, size FROM replies ORDER BY used_at LIMIT ?", (STEP_ENTRIES,)):
        if excess <= 0:
            break
        victims.append((row_id,))
        excess -= size + ROW_OVERHEAD_BYTES
    conn.executemany("DELETE FROM replies WHERE id = ?", victims)
    return bool(victims)


def expire_step(conn: sqlite3.Connection, cutoff: float) -> bool:
    """Removes some entries last used before `cutoff`. False: there are none left.

    By last use, which is indexed: an expired entry was last used before it expired, so it is gone from the file after
    twice its time at the latest.
    """
    removed = conn.execute(
        "DELETE FROM replies WHERE id IN (SELECT id FROM replies WHERE used_at < ? LIMIT ?)", (cutoff, STEP_ENTRIES)
    ).rowcount
    return removed == STEP_ENTRIES


def correct_future_step(conn: sqlite3.Connection, now: float) -> bool:
    """Sets some times that lie in the future to now, or else such entries would outlive all others. False: done."""
    corrected = conn.execute(
        "UPDATE replies SET used_at = ?, created_at = min(created_at, ?)"
        " WHERE id IN (SELECT id FROM replies WHERE used_at > ? LIMIT ?)",
        (now, now, now + FUTURE_SLACK_S, STEP_ENTRIES),
    ).rowcount
    return corrected == STEP_ENTRIES


def id_ranges(conn: sqlite3.Connection) -> Iterator[tuple[int, int]]:
    """All ids that there are now, as ranges (from, to] of one step each."""
    first, last = conn.execute("SELECT min(id), max(id) FROM replies").fetchone()
    if first is not None:
        for start in range(first - 1, last, STEP_ENTRIES):
            yield start, min(last, start + STEP_ENTRIES)


def summary(conn: sqlite3.Connection, cutoff: float) -> Summary:
    return Summary(
        *conn.execute(
            "SELECT count(*), coalesce(sum(size), 0), min(created_at), max(created_at),"
            " coalesce(sum(created_at < ?), 0) FROM replies INDEXED BY replies_used",
            (cutoff,),
        ).fetchone()
    )


def export_step(conn: sqlite3.Connection, after_id: int, cutoff: float) -> tuple[int | None, list[Entry]]:
    """The next entries in the order of storing, and the id to go on from; None at the end."""
    entries: list[Entry] = []
    last: int | None = None
    size = 0
    cursor = conn.execute(
        f"SELECT {_COLUMNS} FROM replies WHERE id > ? AND created_at >= ? ORDER BY id LIMIT ?",
        (after_id, cutoff, EXPORT_ENTRIES),
    )
    for row in cursor:
        last = row[0]
        entry = _entry(row)
        if entry is not None:
            entries.append(entry)
            size += len(row[-1])
        if size > EXPORT_BYTES:
            break
    cursor.close()
    return last, entries


def utf8(text: str) -> bytes:
    """As bytes, since SQLite's text ends at a NUL and refuses lone surrogates, and a judge may send both."""
    return text.encode("utf-8", "surrogatepass")


def _key(row: tuple[Any, ...]) -> bytes:
    key: bytes = row[0]
    return key


def _checksum(key: bytes, text: bytes) -> int:
    """SQLite checks its pages' structure, not what is in them."""
    return zlib.crc32(text, zlib.crc32(key))


def _entry(row: tuple[Any, ...]) -> Entry | None:
    _, key, created_at, used_at, checksum, prompt_tokens, completion_tokens, text = row
    try:
        if _checksum(key, text) != checksum:
            return None
        decoded = text.decode("utf-8", "surrogatepass")
        return Entry(
            key, CachedReply(decoded, int(prompt_tokens), int(completion_tokens)), created_at + 0.0, used_at + 0.0
        )
    except (TypeError, ValueError, AttributeError):  # a damaged row may hold any type
        return None
