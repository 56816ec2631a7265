"""Private SQLite files: what their errors mean."""

from __future__ import annotations

import errno
import sqlite3
from enum import StrEnum


class Trouble(StrEnum):
    """What kind of failure an error of the file is. What is done about each is `Store`'s matter."""

    LOCKED = "locked by another process"
    FULL = "the disk is full"
    READ_ONLY = "it cannot be written"
    CORRUPT = "it is damaged"
    IO = "an input/output error"
    CANNOT_OPEN = "it cannot be opened"
    OTHER = "an unexpected error"


_BY_SQLITE_CODE = {
    sqlite3.SQLITE_BUSY: Trouble.LOCKED,
    sqlite3.SQLITE_LOCKED: Trouble.LOCKED,
    sqlite3.SQLITE_PROTOCOL: Trouble.LOCKED,
    sqlite3.SQLITE_FULL: Trouble.FULL,
    sqlite3.SQLITE_READONLY: Trouble.READ_ONLY,
    sqlite3.SQLITE_PERM: Trouble.READ_ONLY,
    sqlite3.SQLITE_CORRUPT: Trouble.CORRUPT,
    sqlite3.SQLITE_NOTADB: Trouble.CORRUPT,
    sqlite3.SQLITE_IOERR: Trouble.IO,
    sqlite3.SQLITE_CANTOPEN: Trouble.CANNOT_OPEN,
}
_BY_ERRNO = {
    errno.ENOSPC: Trouble.FULL,
    errno.EDQUOT: Trouble.FULL,
    errno.EROFS: Trouble.READ_ONLY,
    errno.EACCES: Trouble.READ_ONLY,
    errno.EPERM: Trouble.READ_ONLY,
    errno.EIO: Trouble.IO,
    errno.ETIMEDOUT: Trouble.LOCKED,
}
_PRIMARY_CODE_MASK = 0xFF
"""SQLite's extended error codes keep the primary code in their low byte."""


def diagnose(error: sqlite3.Error | OSError) -> Trouble:
    if isinstance(error, OSError):
        return _BY_ERRNO.get(error.errno or 0, Trouble.CANNOT_OPEN)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    if code == sqlite3.SQLITE_IOERR_SHORT_READ:
        return Trouble.CORRUPT  # the file ends within a page that it says it has
    if code == sqlite3.SQLITE_ERROR and str(error).startswith(("no such table", "no such column", "malformed")):
        return Trouble.CORRUPT  # the version is ours, the tables are not
    return _BY_SQLITE_CODE.get(code & _PRIMARY_CODE_MASK, Trouble.OTHER)
