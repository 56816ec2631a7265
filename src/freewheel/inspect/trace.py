"""Reads the trace of a run: spans of components and phases of groups, and follows growing files.

    trace/*.jsonl ─ Folder ─▶ RecordedTrace ─┬─▶ spans by component and name    the page's timeline, the planner
                                             └─▶ phases by group

If the trace does not fit into memory, the older half is dropped, up to the same time in all files; it is complete from
`complete_from_us` on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from freewheel.observe.lines import Folder, Identity, decode_line
from freewheel.observe.run_folder import TRACE
from freewheel.observe.trace import MAIN

US = 1e6
"""Trace times are in microseconds."""
MOST_KEPT = 1_000_000
"""Spans and phases in memory: about 400 MB, and about 270 MB of trace."""

Span = tuple[float, float]
"""Start and end, in microseconds of the wall clock."""


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that are shown."""

    step: int | None = None
    version: int | None = None
    lag: int | None = None
    tokens: int | None = None
    responses: int | None = None
    index: int | None = None
    attempt: int | None = None
    status: str | None = None


class _Event(msgspec.Struct, gc=False):
    ph: str
    name: str
    ts: float
    pid: str | int = ""
    tid: str | int = ""
    id: int | None = None
    dur: float = 0.0
    args: Args | None = None


class Phase(NamedTuple):
    """A phase of a group. Both times are in microseconds of the wall clock."""

    component: str
    name: str
    start_us: float
    end_us: float
    args: Args | None


class _File:
    """The content of one trace file. Phases of groups are pairs of events, spans are single ones."""

    def __init__(self) -> None:
        self.spans: dict[tuple[str, str], list[Span]] = {}
        self.phases: dict[int, list[Phase]] = {}
        self._open: dict[tuple[Any, ...], _Event] = {}
        self.first_us = np.inf
        """Start of everything it had, including dropped events."""
        self.last_us = 0.0
        self.kept = 0
        """Number of spans and phases."""

    def add(self, lines: Iterable[bytes], kept_from_us: float) -> None:
        for line in lines:
            event = decode_line(_EVENTS, line)
            if event is None or event.ph not in ("X", "b", "e"):
                continue
            end_us = event.ts + event.dur
            self.last_us = max(self.last_us, end_us)
            key = (event.pid, event.id, event.name)
            begun: _Event | None = event
            if event.ph == "e":
                begun = self._open.pop(key, None)
            elif event.ph == "b":
                begun = None
                if event.id is not None:
                    self._open[key] = event
            if begun is None:
                continue
            self.first_us = min(self.first_us, begun.ts)
            if end_us < kept_from_us:
                continue
            self.kept += 1
            if event.ph == "X":
                name = event.name if event.tid in ("", MAIN) else f"{event.name} {event.tid}"
                self.spans.setdefault((str(event.pid), name), []).append((event.ts, end_us))
            elif event.id is not None:
                phase = Phase(str(event.pid), event.name, begun.ts, end_us, begun.args or event.args)
                self.phases.setdefault(event.id, []).append(phase)

    def ends_us(self) -> Iterator[float]:
        yield from (end_us for spans in self.spans.values() for _, end_us in spans)
        yield from (phase.end_us for phases in self.phases.values() for phase in phases)

    def keep_from(self, time_us: float) -> None:
        """Drop what ended before."""
        self.spans = _drop_empty(
            {key: [one for one in spans if one[1] >= time_us] for key, spans in self.spans.items()}
        )
        self.phases = _drop_empty(
            {key: [one for one in of if one.end_us >= time_us] for key, of in self.phases.items()}
        )
        self._open = {key: event for key, event in self._open.items() if event.ts >= time_us}
        self.kept = sum(map(len, self.spans.values())) + sum(map(len, self.phases.values()))


class RecordedTrace:
    """The whole trace of a run. Call `look` before reading."""

    def __init__(self, folder: Path) -> None:
        self._folder = Folder(folder / TRACE)
        self._files: dict[Identity, _File] = {}
        self.complete_from_us = 0.0

    def look(self) -> None:
        for identity, blocks in self._folder.look(forget=lambda identity: self._files.pop(identity, None)):
            file = self._files.setdefault(identity, _File())
            for block in blocks:
                file.add(block.lines, self.complete_from_us)
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        files = self._files.values()
        if sum(file.kept for file in files) > MOST_KEPT:
            ends_us = np.fromiter((end_us for file in files for end_us in file.ends_us()), np.float64)
            self.complete_from_us = float(np.median(ends_us))
            for file in files:
                file.keep_from(self.complete_from_us)

    @property
    def exists(self) -> bool:
        return self._folder.exists

    @property
    def extent_us(self) -> Span | None:
        """Return the first and the last time, or None if nothing is recorded."""
        files = [file for file in self._files.values() if np.isfinite(file.first_us)]
        return (min(file.first_us for file in files), max(file.last_us for file in files)) if files else None

    @property
    def spans(self) -> dict[tuple[str, str], list[Span]]:
        """Return the spans by component and name. A name ends with its track if that is not the main one."""
        return _join(file.spans for file in self._files.values())

    @property
    def phases(self) -> dict[int, list[Phase]]:
        """Return the phases by group, file by file."""
        return _join(file.phases for file in self._files.values())


def _drop_empty(lists: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    return {key: values for key, values in lists.items() if values}


def _join(parts: Iterable[dict[Any, list[Any]]]) -> dict[Any, list[Any]]:
    joined: dict[Any, list[Any]] = {}
    for part in parts:
        for key, values in part.items():
            joined.setdefault(key, []).extend(values)
    return joined


_EVENTS = msgspec.json.Decoder(_Event)
