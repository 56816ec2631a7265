"""The timeline of a run: what each component did and waited for, and what happened to each group.

    RecordedTrace ─ window(from, to) ─▶ lanes of bars that fit on a screen, and a row of bars for each group

Spans closer together than a pixel become one bar with a count. Groups are sent one by one, as many as fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from freewheel.inspect.trace import US, Args, Phase, RecordedTrace

PIXELS = 1200
"""Assumed width of a lane."""
MOST_GROUPS = 80
"""Rows of groups at a time: about three screens."""


class Bar(msgspec.Struct, gc=False, omit_defaults=True):
    """A stretch of time, in seconds since the trace starts."""

    name: str
    start_s: float
    end_s: float
    count: int = 1
    """Number of bars that were too close together to tell apart."""
    about: Args | None = None


def window(trace: RecordedTrace, from_s: float | None = None, to_s: float | None = None) -> dict[str, Any]:
    """Return what happened between two times since the start; without them, everything."""
    extent = trace.extent_us
    if extent is None:
        return {"recorded": False, "folder_exists": trace.exists}
    begin, end = extent[0] / US, extent[1] / US
    start = 0.0 if from_s is None else max(0.0, from_s)
    stop = end - begin if to_s is None else min(end - begin, to_s)
    stop = max(stop, start + 1e-3)
    groups, total = _groups(trace, begin, start, stop)
    return {
        "recorded": True,
        "begin": begin,
        "length_s": end - begin,
        "whole_from_s": max(0.0, trace.complete_from_us / US - begin),
        "from_s": start,
        "to_s": stop,
        "lanes": _lanes(trace, begin, start, stop),
        "groups": groups,
        "groups_in_window": total,
    }


def _lanes(trace: RecordedTrace, begin: float, start: float, stop: float) -> list[dict[str, Any]]:
    """Return the lanes, the trainer's first; within a component, work before waiting."""
    lanes = []
    for (part, name), spans in trace.spans.items():
        within = np.array(spans) / US - begin
        within = within[(within[:, 1] >= start) & (within[:, 0] <= stop)]
        within = within[np.argsort(within[:, 0], kind="stable")]
        busy_s = float(np.diff(np.clip(within, start, stop)).sum())
        bars = merge(name, within, (stop - start) / PIXELS)
        lanes.append({"part": part, "name": name, "busy_s": busy_s, "bars": bars})
    return sorted(
        lanes,
        key=lambda lane: (lane["part"] != "trainer", lane["part"], lane["name"].startswith("wait_"), lane["name"]),
    )


def _groups(trace: RecordedTrace, begin: float, start: float, stop: float) -> tuple[list[dict[str, Any]], int]:
    """Return the groups in the window as bars, and how many there are. If there are too many, return some from all
    over the window."""
    found = []
    for ordinal, phases in trace.phases.items():
        first = min(phase.start_us for phase in phases) / US - begin
        last = max(phase.end_us for phase in phases) / US - begin
        if last > start + (stop - start) / PIXELS and first <= stop:  # one that ended before would be an empty bar
            found.append((first, ordinal, phases))
    found.sort(key=lambda one: one[:2])
    every = -(-len(found) // MOST_GROUPS) or 1
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
    """Yield a group's phases in time order, with the wait between stored and taken (`ready`)."""
    ordered = sorted(phases, key=lambda phase: phase.start_us)
    stored_us = max((phase.end_us for phase in ordered if phase.name == "store"), default=None)
    taken_us = min((phase.start_us for phase in ordered if phase.name == "train"), default=None)
    for phase in ordered:
        yield _bar(phase.name, phase.start_us, phase.end_us, begin, phase.args)
    if stored_us is not None and taken_us is not None and taken_us > stored_us:
        yield _bar("ready", stored_us, taken_us, begin)


def _bar(name: str, start_us: float, end_us: float, begin: float, about: Args | None = None) -> Bar:
    return Bar(name, round(start_us / US - begin, 6), round(end_us / US - begin, 6), 1, about)
