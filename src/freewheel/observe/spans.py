"""Measures what a component spends its time on.

The trainer (`train`, `wait_batch`, `pack`, `save`) and the rollouter (`generate`, `wait_room`, …) open a span around
each activity. FullyAsyncMain takes snapshots, and `shares` of two snapshots is what the interval was spent on.
Snapshots are plain dictionaries, so they travel between processes. `on_close` is called for each span that closes; it
feeds the trace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

ELAPSED = "elapsed"
"""The entry of a snapshot with the total time. No span may have this name."""

OnClose = Callable[[str, float, float, Mapping[str, Any]], None]
"""(name, since, until, arguments), by the clock of the spans. It must not raise and must be fast."""


class _Name:
    """The state of one name."""

    __slots__ = ("closed_s", "open", "since")

    def __init__(self) -> None:
        self.closed_s = 0.0
        self.open = 0
        self.since = 0.0


class _Span:
    """One use of a name. Each `with` has its own, so interleaved tasks cannot close each other's spans."""

    __slots__ = ("_args", "_name", "_spans")

    def __init__(self, spans: Spans, name: str, args: Mapping[str, Any]) -> None:
        self._spans = spans
        self._name = name
        self._args = args

    def __enter__(self) -> None:
        self._spans._enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spans._leave(self._name, self._args)


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

    def __call__(self, name: str, **args: Any) -> _Span:
        """`args` go to `on_close`; the last span that closes decides."""
        if name == ELAPSED:
            raise ValueError(f"a span cannot be named {ELAPSED!r}: snapshots keep the whole time there")
        return _Span(self, name, args)

    def _enter(self, name: str) -> None:
        with self._lock:
            known = self._names.setdefault(name, _Name())
            if not known.open:
                known.since = self._clock()
            known.open += 1

    def _leave(self, name: str, args: Mapping[str, Any]) -> None:
        with self._lock:
            known = self._names[name]
            known.open -= 1
            if known.open:
                return
            since, until = known.since, self._clock()
            known.closed_s += until - since
        if self._on_close is not None:
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
