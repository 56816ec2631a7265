"""The cache of judge replies: an LRU in memory, in front of a file that all processes of a user share.

    engine ── find ──▶ MemoryCache ── miss ──▶ Store.get_many (the disk) ── miss ──▶ the judge
    engine ◀── a reply that could be parsed: MemoryCache.put and Store.put, neither of which waits

Replies are kept unparsed and parsed on every use, so a better parser needs no new call. Failures are never kept. Keys
are SHA-256 digests of everything that decides a reply. `ReplyCache` is the engine's view of it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from freewheel.judge.config import JudgeConfig
from freewheel.judge.limiter import LimiterMemory
from freewheel.judge.outcome import Reply
from freewheel.judge.store import CachedReply, Store

CACHE_FILE = "judge.sqlite3"
"""The file name in `cache_dir`."""


def cache_dir(configured: str | None = None) -> Path:
    """The cache's folder: as configured, $FREEWHEEL_CACHE_DIR, $XDG_CACHE_HOME/freewheel or ~/.cache/freewheel."""
    explicit = configured or os.environ.get("FREEWHEEL_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a path that is not absolute.
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "freewheel"


class MemoryCache:
    """The most recently used replies, within `max_bytes`. For one thread only: the event loop's."""

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, CachedReply] = OrderedDict()

    def get(self, key: bytes) -> CachedReply | None:
        reply = self._entries.get(key)
        if reply is not None:
            self._entries.move_to_end(key)
        return reply

    def put(self, key: bytes, reply: CachedReply) -> None:
        """Keep `reply` and drop the least recently used ones. A reply larger than the bound is not kept."""
        old = self._entries.pop(key, None)
        if old is not None:
            self.bytes -= old.memory_bytes
        if reply.memory_bytes > self._max_bytes:
            return
        self._entries[key] = reply
        self.bytes += reply.memory_bytes
        while self.bytes > self._max_bytes:
            self.bytes -= self._entries.popitem(last=False)[1].memory_bytes


class ReplyCache:
    """The engine's cache of replies and of the limiters' learned values. With `cache` off it is in memory only, and the
    engine's keys contain the batch."""

    def __init__(self, config: JudgeConfig) -> None:
        self._model = config.model
        # Only the file knows the age of a reply.
        in_memory = config.cache_ttl_s is None or not config.cache
        self._memory = MemoryCache(config.memory_cache_bytes if in_memory else 0)
        self._store: Store | None = None
        self._noted: dict[str, bytes] = {}
        self.directory: Path | None = None
        if config.cache:
            self.directory = cache_dir(config.cache_dir)
            path = self.directory / CACHE_FILE
            self._store = Store(path, max_bytes=config.cache_max_bytes, ttl_s=config.cache_ttl_s)

    def open(self) -> None:
        if self._store is not None:
            self._store.open()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def in_memory(self, key: bytes) -> CachedReply | None:
        return self._memory.get(key)

    def on_disk(self, keys: Sequence[bytes]) -> dict[bytes, CachedReply]:
        """Read the file on the calling thread: in a batch, a miss costs only about a microsecond per key."""
        if self._store is None or not keys:
            return {}
        found = self._store.get_many(keys)
        for key, cached in found.items():
            self._memory.put(key, cached)
        return found

    def keep(self, key: bytes, reply: Reply) -> None:
        cached = CachedReply(reply.text, reply.usage.prompt_tokens, reply.usage.completion_tokens)
        self._memory.put(key, cached)
        if self._store is not None:
            self._store.put(key, cached)

    def remember(self, url: str, memory: LimiterMemory) -> None:
        noted = msgspec.json.encode(memory)
        if self._store is not None and self._noted.get(url) != noted:
            self._noted[url] = noted
            self._store.remember(self._limiter_name(url), noted)

    def recall(self, url: str) -> LimiterMemory | None:
        stored = self._store.recall(self._limiter_name(url)) if self._store is not None else None
        if stored is None:
            return None
        try:
            return msgspec.json.decode(stored, type=LimiterMemory)
        except msgspec.DecodeError:
            return None  # written by another version: start without it

    def _limiter_name(self, url: str) -> str:
        return f"limiter {url} {self._model}"
