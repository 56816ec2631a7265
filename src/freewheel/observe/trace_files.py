"""Reading a trace: the files of all processes as one, which Perfetto and chrome://tracing open.

    RUN/trace/NAME-PID[.1].jsonl ─▶ events ─▶ merged: numbers for names, a track for what overlaps ─▶ trace.json

Beside a live run, or on a dead one. A line that is no event is passed over and counted; half of a pair is passed over.
Called by `freewheel trace`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from freewheel.observe.lines import files_of, read_lines
from freewheel.observe.run_folder import TRACE
from freewheel.observe.trace import GROUP, MAIN

Event = dict[str, Any]

FIRST = ("main", "trainer", "sync")
"""The order in which a viewer shows components; rollouters come behind."""
ASIDE = ("save", "load_weights")
"""Spans that go on beside others of their component. On one track a viewer takes them for each other's parts."""
EXPLAINS = "M"
"""The kind of an event that only names something."""


Refused = Callable[[Path], object]
"""Told of each line of a file that is no event."""


def _passed_over(path: Path) -> None:
    pass


class Writes(Protocol):
    """A file, compressed or not."""

    def write(self, data: bytes, /) -> int: ...


def read_trace(run_dir: str | os.PathLike[str], *, refused: Refused = _passed_over) -> Iterator[Event]:
    """All events as they were written, a file after the other; those of a pair follow each other."""
    for file in files_of(Path(run_dir) / TRACE):
        none = partial(refused, file.path)
        for event in read_lines(file.path, refused=none):
            if _is_event(event):
                yield event
            else:
                none()


def components(run_dir: str | os.PathLike[str]) -> list[str]:
    """Who has left a trace, in the order in which they are shown."""
    names = {file.name for file in files_of(Path(run_dir) / TRACE)}
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), len(name), name))


def merged(run_dir: str | os.PathLike[str], *, refused: Refused = _passed_over) -> Iterator[Event]:
    """One trace: names are numbered, and explained by events of their own; pairs are whole."""
    numbers = {name: number for number, name in enumerate(components(run_dir), start=1)}
    for name, number in numbers.items():
        yield _says("process_name", number, 0, {"name": name})
        yield _says("process_sort_index", number, 0, {"sort_index": number})
    tracks: dict[tuple[int, str], int] = {}
    for event in _whole(read_trace(run_dir, refused=refused)):
        process = numbers.get(event["pid"])
        if process is None:  # a file that came meanwhile
            continue
        track = (process, _track(event))
        if track not in tracks:
            tracks[track] = 1 + sum(of == process for of, _ in tracks)
            yield _says("thread_name", process, tracks[track], {"name": track[1]})
        yield {**event, "pid": process, "tid": tracks[track]}


def write_json(events: Iterable[Event], file: Writes) -> int:
    """As a viewer wants it; gives how many events there were. They need not fit into memory."""
    count = 0
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for event in events:
        file.write((b",\n" if count else b"\n") + msgspec.json.encode(event))
        count += 1
    file.write(b"\n]}\n")
    return count


def _whole(events: Iterable[Event]) -> Iterator[Event]:
    """Without halves of pairs, which a killed process or a full disk leaves."""
    begin: Event | None = None
    for event in events:
        if event["ph"] == "b":
            begin = event
        elif event["ph"] != "e":
            yield event
        elif begin is not None:
            if _same(begin, event):
                yield from _pair(begin, event)
            begin = None


def _same(begin: Event, end: Event) -> bool:
    return all(begin[name] == end[name] for name in ("id", "name", "pid")) and begin["ts"] <= end["ts"]


def _pair(begin: Event, end: Event) -> Iterator[Event]:
    """With an id that no other phase of the process has: a viewer takes what has one id for one thing after the other,
    and shows what has one name together."""
    args = begin.get("args", {})
    parts = (begin["id"], begin["name"], *([args["index"]] if "index" in args else []))
    own = {"id2": {"local": "/".join(map(str, parts))}}
    yield _without_id(begin) | own | {"args": {"ordinal": begin["id"], **args}}
    yield _without_id(end) | own


def _without_id(event: Event) -> Event:
    return {name: value for name, value in event.items() if name != "id"}


def _track(event: Event) -> str:
    own = event["tid"] == MAIN and event["name"] in ASIDE
    return str(event["name"] if own else event["tid"])


def _says(name: str, process: int, thread: int, args: Mapping[str, Any]) -> Event:
    return {"ph": EXPLAINS, "name": name, "pid": process, "tid": thread, "args": dict(args)}


_NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"dur": (int, float)},
    "b": {"id": int},
    "e": {"id": int},
    "i": {},
    "C": {"args": dict},
}
"""What an event of a kind must have beside the rest: a run directory may come from anybody."""
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
