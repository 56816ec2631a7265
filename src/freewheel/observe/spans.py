"""Measures how a component spends its time.

The trainer (`train`, `wait_batch`, `pack`, `save`) and the rollouter (`generate`, `wait_room`, …) open a span around
each activity. FullyAsyncMain takes snapshots, and `shares` of two snapshots is what the interval was spent on.
Snapshots are plain dictionaries, so they travel between processes. `on_close` is called for each span that closes; it
feeds the trace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ELAPSED = "elapsed"
"""The entry of a snapshot with the total time. No span may have this name."""

OnClose = Callable[[str, float, float, Mapping[str, Any]], None]
"""(name, since, until, arguments), by the clock of the spans. It must not raise and must be fast."""


@dataclass(slots=True)
class _Name:
    """The state of one name."""

    closed_s: float = 0.0
    open: int = 0
    since: float = 0.0


class Spans:
    """Counts the time during which at least one span of a name is open. A hundred tasks that wait for one second have
    waited one second, so no share exceeds 1. Safe for tasks and threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, on_close: OnClose | None = None) -> None:
        """`on_close` receives the time from the first span of a name that opens to the last that closes."""
        self._clock = clock
        self._on_close = on_close
        self._started = clock()
        self._names: dict[str, _Name] = {}
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, name: str, **args: Any) -> Iterator[None]:
        """Open a span. `args` go to `on_close`; the last span that closes decides."""
        with self._lock:
            known = self._names.setdefault(name, _Name())
            if not known.open:
                known.since = self._clock()
            known.open += 1
        try:
            yield
        finally:
            with self._lock:
                known.open -= 1
                is_last, since, until = not known.open, known.since, self._clock()
                if is_last:
                    known.closed_s += until - since
            if is_last and self._on_close is not None:
                self._on_close(name, since, until, args)

    def snapshot(self) -> dict[str, float]:
        """Return seconds by name since the start, including open spans, and the total time as `elapsed`."""
        with self._lock:
            now = self._clock()
            seconds = {
                name: known.closed_s + (now - known.since if known.open else 0.0) for name, known in self._names.items()
            }
            return {**seconds, ELAPSED: now - self._started}


def shares(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return each name's share of the time between two snapshots.

    A component that restarted in between counts from 0; then only `after` is used.
    """
    if after.get(ELAPSED, 0.0) < before.get(ELAPSED, 0.0):
        before = {}
    elapsed = after.get(ELAPSED, 0.0) - before.get(ELAPSED, 0.0)
    if elapsed <= 0:
        return {}
    return {name: (spent - before.get(name, 0.0)) / elapsed for name, spent in after.items() if name != ELAPSED}
