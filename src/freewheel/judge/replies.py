"""What the judge said before: memory first, then the shared file; and what the limiters learnt.

Replies are kept as they came and read anew (`exchange.py`), so a rubric that reads better needs no new call. Only
replies that could be read are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from freewheel.judge.cache import CACHE_FILE, CachedReply, MemoryCache, Store, cache_dir
from freewheel.judge.config import JudgeConfig
from freewheel.judge.limiter import LimiterMemory
from freewheel.judge.outcome import Reply

MEMORY_CACHE_ENTRIES = 1 << 16
"""Bounds the memory cache's own overhead; `memory_cache_bytes` bounds the replies."""


class Replies:
    """The cache as the engine sees it. With `cache` off it is memory alone, and the engine's keys name the batch."""

    def __init__(self, config: JudgeConfig) -> None:
        self._model = config.model
        # Only the file knows how old a reply is.
        in_memory = config.cache_ttl_s is None or not config.cache
        self._memory = MemoryCache(MEMORY_CACHE_ENTRIES, config.memory_cache_bytes if in_memory else 0)
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
        """On the calling thread: in a batch a miss costs about a microsecond a key."""
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
            return None  # written by another version: start cold

    def _limiter_name(self, url: str) -> str:
        return f"limiter {url} {self._model}"
