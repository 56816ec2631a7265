"""Replies that were paid for once: an LRU in memory, in front of a file that all processes of a user share.

    engine -- get --> MemoryCache -- miss --> Store.get_many (the disk) -- miss --> the judge
    engine <-- reply that parsed: MemoryCache.put and Store.put, neither of which waits

What is kept is the reply as it came; it is parsed anew each time, so that a better parser needs no new call. Only
replies that parsed are put, never a failure. Keys are SHA-256 digests of all that decides a reply.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from pathlib import Path

from freewheel.judge.store import CachedReply, CacheUnusableError, Store, StoreStats

__all__ = ["CACHE_FILE", "CacheUnusableError", "CachedReply", "MemoryCache", "Store", "StoreStats", "cache_dir"]

CACHE_FILE = "judge.sqlite3"
"""The name of the file within `cache_dir`."""
ENTRY_OVERHEAD_BYTES = 400
"""What an entry costs beside its text: the digest, the reply, two tuples and the dict's slot, as tracemalloc counts."""


def cache_dir(configured: str | None = None) -> Path:
    """Where the cache lies: as configured, else $FREEWHEEL_CACHE_DIR, $XDG_CACHE_HOME/freewheel, ~/.cache/freewheel."""
    explicit = configured or os.environ.get("FREEWHEEL_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a path that is not absolute is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "freewheel"


class MemoryCache:
    """The replies used last, within `max_entries` and `max_bytes`. For one thread: the event loop's."""

    __slots__ = ("_bytes", "_entries", "max_bytes", "max_entries")

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[CachedReply, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> CachedReply | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, reply: CachedReply) -> None:
        """Keeps `reply`, and lets go of the ones used longest ago. One over the bound by itself is not kept."""
        # The size is kept beside the reply, as a str grows when something asks it for its UTF-8.
        size = sys.getsizeof(reply.text) + ENTRY_OVERHEAD_BYTES
        entries = self._entries
        old = entries.pop(key, None)
        if old is not None:
            self._bytes -= old[1]
        if size > self.max_bytes or self.max_entries <= 0:
            return
        entries[key] = (reply, size)
        self._bytes += size
        while self._bytes > self.max_bytes or len(entries) > self.max_entries:
            self._bytes -= entries.popitem(last=False)[1][1]

    def clear(self) -> None:
        self._entries.clear()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)
