"""Shared by the judge's tests: short names for verdicts, waiting with a deadline, and filling and reading a store."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from freewheel.judge import Failed, Scored, Verdict
from freewheel.judge.cache import CachedReply, Store

WAIT_S = 30.0
"""Longer than anything here takes on a busy machine, shorter than pytest's own limit."""
SLACK_S = 3.0
"""Time that a busy test machine may add to a deadline."""
MIB = 2**20
NOW = 1_800_000_000.0
"""Start of the manual clock."""


def texts(count: int, mark: str = "answer") -> list[str]:
    return [f"{mark} number {index}" for index in range(count)]


def reasons(verdicts: list[Verdict]) -> set[str]:
    """The reasons of the failed verdicts and the statuses of the others."""
    return {verdict.reason if isinstance(verdict, Failed) else verdict.status for verdict in verdicts}


def failed(verdict: Verdict) -> Failed:
    assert isinstance(verdict, Failed), verdict
    return verdict


def scored(verdict: Verdict) -> Scored:
    assert isinstance(verdict, Scored), verdict
    return verdict


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


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
