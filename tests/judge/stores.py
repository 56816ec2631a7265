"""Shared by the cache's tests: keys, replies, a clock, and helpers that fill and read a store."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import pytest

from freewheel.judge.cache import CachedReply, Store

MIB = 2**20
NOW = 1_800_000_000.0
"""Start of the manual clock."""


def key(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def reply(name: object, size: int = 0) -> CachedReply:
    return CachedReply(f"score of {name}".ljust(size, "."), 10, 3)


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


OpenStore = Callable[..., Store]


def fill(store: Store, names: range, size: int = 0) -> None:
    for name in names:
        store.put(key(name), reply(name, size))
    assert store.flush()


def present(store: Store, names: range) -> set[int]:
    found = store.get_many([key(name) for name in names])
    return {name for name in names if key(name) in found}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
