"""Logs of what happens to many rows alike: said once, and again only as it grows. The manager and the table use it."""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger("freewheel.integrations.verl")

SAID_AT = (1, 10, 100, 1_000, 10_000, 100_000)
"""The counts at which a failure of one kind is logged: once in full, then only as it grows."""


class Sayings:
    """What one process has said so far."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._failures: Counter[str] = Counter()

    def once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning(message)

    def failed(self, kind: str, told: object) -> None:
        """One more row failed so. The first time an exception is told with its traceback."""
        self._failures[kind] += 1
        count = self._failures[kind]
        if count in SAID_AT:
            trace = told if isinstance(told, Exception) and count == 1 else None
            log.error(
                "%s: %d rows failed so far; each gets its group's mean and judge_status=failed: %s",
                kind,
                count,
                told,
                exc_info=trace,
            )
