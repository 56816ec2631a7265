"""The runs that the page can show, each read from its folder.

    freewheel dashboard RUN FOLDER ─▶ Runs ─ find ─▶ RunView ─▶ `views`
                                                     ├─ WatchedSettings: config.yaml as plain values
                                                     ├─ RecordedMetrics, RecordedTrace, Samples, warnings of log.jsonl
                                                     └─ LastStep, where metrics have gaps

A request names a run by its id, which is looked up: no path comes from a browser. One thread at a time reads a view. A
full disk costs rows of metrics and not the run, so journal and checkpoints may know more than the curves;
`describe_gaps` says so.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from freewheel.dashboard.web.samples import Samples
from freewheel.errors import ConfigError
from freewheel.inspect.metrics import Columns, RecordedMetrics
from freewheel.inspect.run import LastStep, live_holder
from freewheel.inspect.trace import RecordedTrace
from freewheel.observe.lines import Tail, decode_line, open_regular
from freewheel.observe.run_folder import CHECKPOINTS, CONFIG, FINAL, JOURNAL, LOG, METRICS
from freewheel.runtime.config import THRESHOLDS

MOST_BYTES = 1 << 20
"""A longer file is not one of our configurations."""


class WatchedSettings:
    """`config.yaml` of a run, read again when it changes. Empty if it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / CONFIG
        self._read: tuple[int, int] | None = None
        self.values: dict[str, Any] = {}
        self.changes = 0
        """How often it was read."""

    def look(self) -> None:
        fd = open_regular(self._path)
        if fd is None:
            return
        try:
            about = os.fstat(fd)
            if (about.st_ino, about.st_mtime_ns) == self._read:
                return
            self._read = (about.st_ino, about.st_mtime_ns)
            self.changes += 1
            self.values = _parse_settings(os.pread(fd, MOST_BYTES, 0))
        finally:
            os.close(fd)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting by its full name, such as `trainer.total_steps`."""
        found: Any = self.values
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    @property
    def staleness_threshold(self) -> int | None:
        """Return the threshold that holds in the run's mode; None if neither the mode nor the key sets it."""
        told = self.number("async_training.staleness_threshold")
        return THRESHOLDS.get(self.text("mode"), None if told is None else int(told))

    def text(self, key: str) -> str:
        found = self.get(key)
        return found if isinstance(found, str) else ""

    def number(self, key: str) -> float | None:
        found = self.get(key)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        return found if is_number and abs(found) <= sys.float_info.max else None  # neither NaN nor infinite


def _parse_settings(data: bytes) -> dict[str, Any]:
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(data, Loader=_LOADER)):
            return {}  # our files have no aliases, and a few lines of them can expand beyond all memory
        loader = _LOADER(data)
        try:
            found = loader.get_single_data()
        finally:
            loader.dispose()
        if not isinstance(found, dict):
            return {}
        flat(found)  # raises if it is nested too deeply or has a number that is too long to print
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return each setting by its full name, as text, for comparing runs."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + str(name)] = "null" if value is None else str(value)
    return found


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Builds plain values only. The C loader is ten times as fast."""


def describe_gaps(recorded: RecordedMetrics, step: int, unread: str = "") -> list[str]:
    """Describe what is missing in the metrics of a run that reached `step`; empty if nothing is. `unread`: why its
    journal could not be read."""
    found = [f"{JOURNAL} cannot be read ({unread}): the run may have gone further than shown"] if unread else []
    by = "Its checkpoints show" if unread else "Its journal and checkpoints (see the ledger) show"
    known = f"{by} that it reached step {step:,}" if step else "How far it got is unknown"
    if not recorded.exists:
        return [f"{METRICS} is missing or cannot be opened, so there are no curves. {known}", *found]
    if recorded.bad_lines:
        found.append(f"{recorded.bad_lines:,} line{'s' * (recorded.bad_lines > 1)} of {METRICS} could not be read")
    told, last = recorded.steps.rows, int(recorded.steps.last("step") or 0)
    if told < step:
        why = "the disk was full, the run or its trainer was killed, or lines are gone"
        rows = f"{METRICS} has rows of {told:,} of {step:,} steps: {why}"
        found.append(rows if last == step else f"{rows}. {known}")
    return found


BEGUN_MARKS = (METRICS, JOURNAL, CHECKPOINTS)
"""A run's folder with one of these is past its start."""
RUN_MARKS = (CONFIG, *BEGUN_MARKS)
"""A folder with one of these is a run's folder."""
MOST_WARNINGS = 50
STILL_S = 5.0
"""Seconds between two tests of a free lock, because a test holds the lock for a moment."""
MOST_RUNS = 200
"""Newest runs of a folder that are shown."""
LEVELS = (b'"WARNING"', b'"ERROR"', b'"CRITICAL"')

RunState = Literal["live", "finished", "ended", "removed", "waiting"]


class Warned(msgspec.Struct, gc=False):
    """A line of `log.jsonl`."""

    time: float
    level: str
    message: str
    role: str = ""
    step: int | None = None


class RunView:
    """One run. Inside `reading` it shows the state of its files at that moment."""

    def __init__(self, run_id: str, folder: Path, *, clock: Callable[[], float]) -> None:
        self.id = run_id
        self.folder = folder
        self.settings = WatchedSettings(folder)
        self.recorded = RecordedMetrics(folder)
        self.trace = RecordedTrace(folder)
        self.samples = Samples(folder)
        self.warnings: deque[Warned] = deque(maxlen=MOST_WARNINGS)
        self._log = Tail(folder / LOG)
        self._reached = LastStep(folder)
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_at = -STILL_S
        self._holder = ""
        self._was_there = folder.is_dir()
        """Tells a removed folder from one that does not exist yet."""

    @contextmanager
    def reading(self) -> Iterator[RunView]:
        """Lock the view for this thread and update metrics, settings and warnings."""
        with self._lock:
            self.settings.look()
            self.recorded.look()
            self._look_at_log()
            yield self

    def _look_at_log(self) -> None:
        generation = self._log.generation
        blocks = self._log.look()
        if self._log.generation != generation:
            self.warnings.clear()
        for block in blocks:
            for line in block.lines:
                said = decode_line(_WARNED, line) if any(level in line for level in LEVELS) else None
                if said is not None and said.level in ("WARNING", "ERROR", "CRITICAL"):
                    self.warnings.append(said)

    @property
    def state(self) -> RunState:
        if not self.folder.is_dir():
            return "removed" if self._was_there else "waiting"
        self._was_there = True
        if self._is_held():
            return "live"
        if (self.folder / FINAL).is_dir():
            return "finished"
        return "ended" if any((self.folder / mark).exists() for mark in BEGUN_MARKS) else "waiting"

    @property
    def step(self) -> int:
        """Return the last known step; for a finished run also from its journal and checkpoints."""
        told = int(self.recorded.steps.last("step") or 0)
        return max(told, self._reached.look()) if self.state in ("finished", "ended") else told

    @property
    def unread(self) -> str:
        """Return why the journal of a finished run could not be read for its last step."""
        return self._reached.unread if self.state in ("finished", "ended") else ""

    def _is_held(self) -> bool:
        """Return whether a process writes to the run."""
        now = self._clock()
        if self._holder or now - self._asked_at >= STILL_S:
            self._asked_at = now
            self._holder = live_holder(self.folder)
        return bool(self._holder)

    def metric(self, name: str, kind: str) -> Columns | None:
        """Return a metric by name, with steps and times; None if it does not exist."""
        columns = self.recorded.evals if kind == "eval" else self.recorded.steps
        known = name in columns.names or name in self.recorded.metric_names(kind)
        return self.recorded.read_metrics(name, kind=kind) if known else None


class Runs:
    """All runs that may be shown. A run that appears in a named folder is found on the next request."""

    def __init__(self, names: Sequence[str], *, clock: Callable[[], float], must_exist: bool = True) -> None:
        self._named = [Path(name).expanduser().absolute() for name in names]
        self._clock = clock
        self._views: dict[str, RunView] = {}
        self._lock = threading.Lock()
        self._must_exist = must_exist
        for given, path in zip(names, self._named, strict=True):
            if must_exist and not path.is_dir():
                raise ConfigError("RUN", given, "there is no such folder: give one that is a run or contains runs")
        if must_exist and not self.all():
            said = ", ".join(names)
            raise ConfigError("RUN", said, f"it contains no run: a run's folder has a {CONFIG} or a {METRICS}")

    def all(self) -> list[RunView]:
        """Return the runs in the order of their names on the command line; within a folder, the latest start first."""
        with self._lock:
            found = list(self._folders())
            for folder in found:
                if not any(view.folder == folder for view in self._views.values()):
                    run_id = _free_id(folder.name or "run", self._views.__contains__)
                    self._views[run_id] = RunView(run_id, folder, clock=self._clock)
            known = {view.folder: view for view in self._views.values()}
            gone = [view for folder, view in known.items() if folder not in found]
            return [*(known[folder] for folder in found), *gone]

    def _folders(self) -> Iterator[Path]:
        seen = set()
        for path in self._named:
            inside = [path] if is_run(path) or not self._must_exist else _runs_in(path)
            for folder in inside:
                if folder not in seen:
                    seen.add(folder)
                    yield folder

    def find(self, run_id: str) -> RunView | None:
        return self._views.get(run_id) or next((view for view in self.all() if view.id == run_id), None)


def is_run(folder: Path) -> bool:
    try:
        return any((folder / mark).exists() for mark in RUN_MARKS)
    except PermissionError:  # it belongs to another user
        return False


def _runs_in(folder: Path) -> list[Path]:
    try:
        inside = [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted((path for path in inside if is_run(path)), key=_began, reverse=True)[:MOST_RUNS]


def _began(folder: Path) -> tuple[int, str]:
    """Return when a run was started or resumed, which rewrites its settings; ties are broken by name."""
    for mark in RUN_MARKS:
        with suppress(OSError):
            return (folder / mark).stat().st_mtime_ns, folder.name
    return 0, folder.name


def _free_id(name: str, taken: Callable[[str], bool]) -> str:
    """Return a free id of letters, digits, dots, dashes and underscores."""
    plain = "".join(one if one.isascii() and (one.isalnum() or one in "._-") else "_" for one in name).strip(".")
    plain = plain or "run"
    found, count = plain, 1
    while taken(found):
        count += 1
        found = f"{plain}-{count}"
    return found


_WARNED = msgspec.json.Decoder(Warned)
