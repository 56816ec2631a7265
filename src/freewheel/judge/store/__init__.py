"""The persistent cache: one SQLite file, shared by all processes of a user. It may lose an entry; it never blocks.

`store` is what others use, `writer` brings data to the disk, `file` makes and mends the file, `tables` is its content.
"""

from freewheel.judge.store.store import CacheUnusableError, Store, StoreStats
from freewheel.judge.store.tables import CachedReply

__all__ = ["CacheUnusableError", "CachedReply", "Store", "StoreStats"]
