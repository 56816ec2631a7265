"""Traces a run as Chrome trace events: what each component did when, and the life of every group.

    Spans ── on_close ──▶ span ─┐
    rollouter, rewards, trainer ── phase ─┼─▶ Tracer ─▶ Lines ─▶ RUN/trace/NAME-PID.jsonl ─▶ `freewheel trace RUN`
    main ── instant, counter ───┘

A process calls `attach_trace` with its component's name; without it, tracing does nothing. An event costs its caller
one tuple; the writing thread makes text of it. Times are those of `now`, and wall-clock time in the files.
docs/dashboard.md lists all events.

The second half of this module reads traces, during or after a run, for `freewheel trace`:

    RUN/trace/NAME-PID[.1].jsonl ─▶ events ─▶ merged: numbers for names, a track for overlapping spans ─▶ trace.json

Invalid lines are skipped and counted; incomplete pairs are skipped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from freewheel.observe.lines import Lines, as_line, files_of, read_lines
from freewheel.observe.run_folder import TRACE

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

SPAN, GROUP, COUNTER = "span", "group", "counter"
"""Categories: what a component does, a phase of a group, and numbers over time. docs/dashboard.md lists the events."""
EVENT = "event"
"""An event in words; its name is its text."""
MAIN = "main"
"""The track of consecutive spans."""

now = time.monotonic
"""The clock of the trace."""


class Tracer:
    """Traces one process. Never raises and never waits; `lines` counts what could not be written."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        component: str,
        *,
        every: int,
        most_bytes: int,
        clock: Callable[[], float] = now,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`every`: trace groups whose ordinal it divides; 0: none."""
        self.lines = Lines(Path(run_dir) / TRACE, component, most_bytes=most_bytes, render=self._render)
        self._component = component
        self._every = every
        self._clock = clock
        # Computed once: if the wall clock is set meanwhile, a span must not end before it began.
        self._offset_s = wall_clock() - clock()

    def span(self, name: str, since_s: float, until_s: float, args: Mapping[str, Any], track: str = MAIN) -> None:
        self.lines.add(("X", name, since_s, until_s, args, {"tid": track}))

    def phase(self, name: str, ordinal: int, since_s: float, args: Mapping[str, Any]) -> None:
        """Trace a phase of group `ordinal`, from `since_s` until now."""
        if self._every and not ordinal % self._every:
            self.lines.add(("b", name, since_s, self._clock(), args, {"id": ordinal}))

    def instant(self, text: str) -> None:
        self.lines.add(("i", text, self._clock(), None, None, {}))

    def counter(self, name: str, values: Mapping[str, float]) -> None:
        self.lines.add(("C", name, self._clock(), None, values, {}))

    def _render(self, item: tuple[Any, ...]) -> bytes:
        """Return an event as text, in the writing thread."""
        kind, name, at_s, until_s, args, more = item
        event = {"ph": kind, "name": name, "pid": self._component, "tid": MAIN, "ts": self._us(at_s), **more}
        if kind == "X":
            return as_line({**event, "cat": SPAN, "dur": self._us(until_s) - event["ts"], "args": args})
        if kind == "b":
            event |= {"cat": GROUP, "tid": "groups"}
            return as_line({**event, "args": args}) + as_line({**event, "ph": "e", "ts": self._us(until_s)})
        if kind == "i":
            return as_line({**event, "cat": EVENT, "s": "g"})
        return as_line({**event, "cat": COUNTER, "args": args})

    def _us(self, at_s: float) -> int:
        return int((at_s + self._offset_s) * 1e6)


# -- this process's tracer --------------------------------------------------------------------------------------------

_tracer: Tracer | None = None


def attach_trace(run_dir: str | os.PathLike[str], component: str, *, every: int, most_bytes: int) -> None:
    """Trace this process from now on, instead of what it traced before. `most_bytes` of 0: nothing."""
    global _tracer
    detach_trace()
    _tracer = Tracer(run_dir, component, every=every, most_bytes=most_bytes) if most_bytes > 0 else None


def detach_trace() -> None:
    """Write the rest and undo `attach_trace`. Does nothing if it was not called."""
    global _tracer
    ended, _tracer = _tracer, None
    if ended is not None:
        ended.lines.close()


def span(name: str, since_s: float, until_s: float, args: Mapping[str, Any], track: str = MAIN) -> None:
    if _tracer is not None:
        _tracer.span(name, since_s, until_s, args, track)


def phase(name: str, ordinal: int, since_s: float, **args: Any) -> None:
    """Trace a phase of group `ordinal`, from `since_s` until now."""
    if _tracer is not None:
        _tracer.phase(name, ordinal, since_s, args)


def instant(text: str) -> None:
    if _tracer is not None:
        _tracer.instant(text)


def counter(name: str, **values: float) -> None:
    if _tracer is not None:
        _tracer.counter(name, values)


TraceEvent = dict[str, Any]

FIRST = ("main", "trainer", "sync")
"""The order in which a viewer shows components; rollouters follow."""
OVERLAPPING = ("save", "load_weights")
"""Spans that run next to others of their component. On one track a viewer would nest them."""
METADATA = "M"
"""The kind of an event that only names something."""


Refused = Callable[[Path], object]
"""Called for each invalid line of a file."""


def read_trace(run_dir: str | os.PathLike[str], *, refused: Refused = lambda _: None) -> Iterator[TraceEvent]:
    """Yield all events as they were written, file by file. The two events of a pair follow each other."""
    for file in files_of(Path(run_dir) / TRACE):
        none = partial(refused, file.path)
        for event in read_lines(file.path, refused=none):
            if _is_event(event):
                yield event
            else:
                none()


def components(run_dir: str | os.PathLike[str]) -> list[str]:
    """Return the components that left a trace, in display order."""
    names = {file.name for file in files_of(Path(run_dir) / TRACE)}
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), len(name), name))


def merge_traces(run_dir: str | os.PathLike[str], *, refused: Refused = lambda _: None) -> Iterator[TraceEvent]:
    """Yield one trace: names are numbered and explained by events, and pairs are complete."""
    numbers = {name: number for number, name in enumerate(components(run_dir), start=1)}
    for name, number in numbers.items():
        yield _metadata("process_name", number, 0, {"name": name})
        yield _metadata("process_sort_index", number, 0, {"sort_index": number})
    tracks: dict[tuple[int, str], int] = {}
    for event in _complete(read_trace(run_dir, refused=refused)):
        process = numbers.get(event["pid"])
        if process is None:  # a file that appeared meanwhile
            continue
        overlaps = event["tid"] == MAIN and event["name"] in OVERLAPPING
        track = (process, str(event["name" if overlaps else "tid"]))
        if track not in tracks:
            tracks[track] = 1 + sum(of == process for of, _ in tracks)
            yield _metadata("thread_name", process, tracks[track], {"name": track[1]})
        yield {**event, "pid": process, "tid": tracks[track]}


def write_json(events: Iterable[TraceEvent], file: SupportsWrite[bytes]) -> int:
    """Write events in the viewer's format and return their number. They need not fit into memory."""
    count = 0
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for event in events:
        file.write((b",\n" if count else b"\n") + msgspec.json.encode(event))
        count += 1
    file.write(b"\n]}\n")
    return count


def _complete(events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    """Drop incomplete pairs, which a killed process or a full disk leaves."""
    begin: TraceEvent | None = None
    for event in events:
        if event["ph"] == "b":
            begin = event
        elif event["ph"] != "e":
            yield event
        elif begin is not None:
            is_pair = all(begin[name] == event[name] for name in ("id", "name", "pid"))
            if is_pair and begin["ts"] <= event["ts"]:
                yield from _pair(begin, event)
            begin = None


def _pair(begin: TraceEvent, end: TraceEvent) -> Iterator[TraceEvent]:
    """Yield a pair with an id that no other phase of the process has. A viewer treats equal ids as one object and
    groups equal names."""
    args, ordinal = begin.get("args", {}), begin["id"]
    parts = (ordinal, begin["name"], *([args["index"]] if "index" in args else []))
    unique = {"id2": {"local": "/".join(map(str, parts))}}
    for event, more in ((begin, {"args": {"ordinal": ordinal, **args}}), (end, {})):
        yield {name: value for name, value in event.items() if name != "id"} | unique | more


def _metadata(name: str, process: int, thread: int, args: Mapping[str, Any]) -> TraceEvent:
    return {"ph": METADATA, "name": name, "pid": process, "tid": thread, "args": dict(args)}


_NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"dur": (int, float)},
    "b": {"id": int},
    "e": {"id": int},
    "i": {},
    "C": {"args": dict},
}
"""Fields that an event of a kind must have. Checked because a run directory may come from a stranger."""
_ALWAYS: dict[str, type | tuple[type, ...]] = {"name": str, "pid": str, "tid": str, "ts": (int, float)}


def _is_event(event: object) -> bool:
    if not isinstance(event, dict) or not isinstance(event.get("ph"), str) or event["ph"] not in _NEEDED:
        return False
    if event["ph"] in ("b", "e") and event.get("cat") != GROUP:
        return False
    needed = {**_ALWAYS, **_NEEDED[event["ph"]]}
    return isinstance(event.get("args", {}), dict) and all(
        isinstance(event.get(name), kind) for name, kind in needed.items()
    )
