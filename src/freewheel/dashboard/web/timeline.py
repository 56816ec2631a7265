"""The timeline of a run: what each component did and waited for, and what became of each group.

    trace/*.jsonl ─ Folder ─▶ bars (component, name, from, to) ─ window(from, to) ─▶ lanes that fit on a screen

Spans closer together than a pixel become one bar with a count. Groups are sent one by one, as many as fit. If the trace
does not fit into memory, the older half is dropped, up to the same time in all files, and `window` says from when on it
is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from freewheel.observe.lines import Folder, Identity, decoded
from freewheel.observe.run_folder import TRACE
from freewheel.observe.trace import MAIN

US = 1e6
"""Trace times are in microseconds."""
PIXELS = 1200
"""Assumed width of a lane."""
MOST_KEPT = 1_000_000
"""Spans and phases in memory: about 400 MB, and about 270 MB of trace."""
MOST_GROUPS = 80
"""Rows of groups at a time: about three screens."""
PHASES = ("generate", "response", "score", "store", "ready", "train")
"""Phases of a group in order. `ready` (stored, not yet taken) lies between two others."""


class _Args(msgspec.Struct, gc=False):
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
    cat: str = ""
    id: int | None = None
    dur: float = 0.0
    args: _Args | None = None


class Bar(msgspec.Struct, gc=False, omit_defaults=True):
    """A stretch of time, in seconds since the trace starts."""

    name: str
    start_s: float
    end_s: float
    count: int = 1
    """Number of bars that were too close together to tell apart."""
    about: _Args | None = None


Span = tuple[float, float]
Phase = tuple[str, str, float, float, _Args | None]


class _File:
    """The content of one trace file. Phases of groups are pairs, spans are single events."""

    def __init__(self) -> None:
        self.spans: dict[tuple[str, str], list[Span]] = {}
        self.phases: dict[int, list[Phase]] = {}
        self._open: dict[tuple[Any, ...], _Event] = {}
        self.first_us = np.inf
        """Start of everything it had, including dropped events."""
        self.last_us = 0.0
        self.kept = 0
        """Number of spans and phases."""

    def take(self, lines: Iterable[bytes], kept_from_us: float) -> None:
        for line in lines:
            event = decoded(_EVENTS, line)
            if event is None or event.ph not in ("X", "b", "e"):
                continue
            end_us = event.ts + event.dur
            self.last_us = max(self.last_us, end_us)
            began = event if event.ph == "X" else self._began(event)
            if began is None:
                continue
            self.first_us = min(self.first_us, began.ts)
            if end_us < kept_from_us:
                continue
            self.kept += 1
            if event.ph == "X":
                name = event.name if event.tid in ("", MAIN) else f"{event.name} {event.tid}"
                self.spans.setdefault((str(event.pid), name), []).append((event.ts, end_us))
            else:
                assert event.id is not None
                phase = (str(event.pid), event.name, began.ts, end_us, began.args or event.args)
                self.phases.setdefault(event.id, []).append(phase)

    def _began(self, event: _Event) -> _Event | None:
        """Return the start of a pair for its end; a start waits for its end."""
        key = (event.pid, event.id, event.name)
        if event.ph == "e":
            return self._open.pop(key, None)
        if event.id is not None:
            self._open[key] = event
        return None

    def ends_us(self) -> Iterator[float]:
        yield from (end_us for bars in self.spans.values() for _, end_us in bars)
        yield from (phase[3] for phases in self.phases.values() for phase in phases)

    def keep_from(self, time_us: float) -> None:
        """Drop what ended before."""
        spans = {lane: [bar for bar in bars if bar[1] >= time_us] for lane, bars in self.spans.items()}
        phases = {group: [one for one in life if one[3] >= time_us] for group, life in self.phases.items()}
        self.spans = {lane: bars for lane, bars in spans.items() if bars}
        self.phases = {group: life for group, life in phases.items() if life}
        self._open = {key: event for key, event in self._open.items() if event.ts >= time_us}
        self.kept = sum(map(len, self.spans.values())) + sum(map(len, self.phases.values()))


class Timeline:
    """The whole trace of a run, kept up with its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = Folder(folder / TRACE)
        self._files: dict[Identity, _File] = {}
        self._generations: dict[Identity, int] = {}
        self._kept_from_us = 0.0

    def look(self) -> None:
        tails, gone = self._folder.look()
        for identity in gone:
            self._files.pop(identity, None)
        for identity, tail in tails:
            blocks = tail.look()
            if self._generations.get(identity) != tail.generation:
                self._generations[identity] = tail.generation
                self._files[identity] = _File()
            file = self._files.setdefault(identity, _File())
            for block in blocks:
                file.take(block.lines, self._kept_from_us)
                self._forget_old()

    def _forget_old(self) -> None:
        files = self._files.values()
        if sum(file.kept for file in files) > MOST_KEPT:
            ends_us = np.fromiter((end_us for file in files for end_us in file.ends_us()), np.float64)
            self._kept_from_us = float(np.median(ends_us))
            for file in files:
                file.keep_from(self._kept_from_us)

    @property
    def extent(self) -> tuple[float, float] | None:
        """Return first and last wall-clock second."""
        files = [file for file in self._files.values() if np.isfinite(file.first_us)]
        if not files:
            return None
        return min(file.first_us for file in files) / US, max(file.last_us for file in files) / US

    def window(self, from_s: float | None = None, to_s: float | None = None) -> dict[str, Any]:
        """Return what happened between two times since the start; without them, everything."""
        extent = self.extent
        if extent is None:
            return {"recorded": False, "folder_exists": self._folder.exists}
        begin, end = extent
        start = 0.0 if from_s is None else max(0.0, from_s)
        stop = end - begin if to_s is None else min(end - begin, to_s)
        stop = max(stop, start + 1e-3)
        lanes = [
            {"part": part, "name": name, "busy_s": busy_s, "bars": bars}
            for (part, name), (busy_s, bars) in sorted(self._lanes(begin, start, stop).items(), key=_lane_order)
        ]
        groups, total = self._groups(begin, start, stop)
        return {
            "recorded": True,
            "begin": begin,
            "length_s": end - begin,
            "whole_from_s": max(0.0, self._kept_from_us / US - begin),
            "from_s": start,
            "to_s": stop,
            "lanes": lanes,
            "groups": groups,
            "groups_in_window": total,
        }

    def _lanes(self, begin: float, start: float, stop: float) -> dict[tuple[str, str], tuple[float, list[Bar]]]:
        collected: dict[tuple[str, str], list[Span]] = {}
        for file in self._files.values():
            for lane, bars in file.spans.items():
                collected.setdefault(lane, []).extend(bars)
        lanes = {}
        for lane, bars in collected.items():
            within = np.array(bars) / US - begin
            within = within[(within[:, 1] >= start) & (within[:, 0] <= stop)]
            within = within[np.argsort(within[:, 0], kind="stable")]
            clipped = np.clip(within, start, stop)
            lanes[lane] = float((clipped[:, 1] - clipped[:, 0]).sum()), merge(lane[1], within, (stop - start) / PIXELS)
        return lanes

    def _groups(self, begin: float, start: float, stop: float) -> tuple[list[dict[str, Any]], int]:
        by_group: dict[int, list[Phase]] = {}
        for file in self._files.values():
            for ordinal, phases in file.phases.items():
                by_group.setdefault(ordinal, []).extend(phases)
        found = []
        for ordinal, phases in by_group.items():
            first, last = min(one[2] for one in phases) / US - begin, max(one[3] for one in phases) / US - begin
            if last > start + (stop - start) / PIXELS and first <= stop:  # one that ended before would be an empty bar
                found.append((first, ordinal, phases))
        found.sort(key=lambda one: one[:2])
        every = -(-len(found) // MOST_GROUPS) or 1  # if there are too many, pick some from all over the window
        shown = [{"ordinal": ordinal, "bars": list(_life(phases, begin))} for _, ordinal, phases in found[::every]]
        return shown, len(found)


def merge(name: str, bars: np.ndarray[Any, Any], closest_s: float) -> list[Bar]:
    """Merge neighbouring bars (from, to), ascending, that are less than `closest_s` apart."""
    if not len(bars):
        return []
    starts, ends = bars[:, 0], np.maximum.accumulate(bars[:, 1])
    apart = np.flatnonzero(starts[1:] - ends[:-1] > closest_s) + 1
    first = np.concatenate([[0], apart])
    last = np.concatenate([apart, [len(bars)]])
    return [
        Bar(name, round(float(starts[a]), 6), round(float(ends[b - 1]), 6), int(b - a))
        for a, b in zip(first, last, strict=True)
    ]


def _life(phases: list[Phase], begin: float) -> Iterator[Bar]:
    """Yield a group's phases in time order, with the wait between stored and taken."""
    ordered = sorted(phases, key=lambda one: one[2])
    stored = max((one[3] for one in ordered if one[1] == "store"), default=None)
    taken = min((one[2] for one in ordered if one[1] == "train"), default=None)
    for _, name, start, end, about in ordered:
        yield Bar(name, round(start / US - begin, 6), round(end / US - begin, 6), 1, about)
    if stored is not None and taken is not None and taken > stored:
        yield Bar("ready", round(stored / US - begin, 6), round(taken / US - begin, 6))


def _lane_order(lane: tuple[tuple[str, str], Any]) -> tuple[bool, str, bool, str]:
    """Sort key: the trainer first, then the others; within a component, work before waiting."""
    (part, name), _ = lane
    return part != "trainer", part, name.startswith("wait_"), name


_EVENTS = msgspec.json.Decoder(_Event)
