"""`Recorder`: the one writer of `metrics.jsonl`, and the one place from which sinks and alerts hear of a number.

    record(kind, step, values) ─▶ plain values ─┬─▶ metrics.jsonl   one JSON object a line, handed to the system at once
                                                ├─▶ alerts ─▶ log
                                                └─▶ each sink       one that raises is switched off

Called by FullyAsyncMain only. Nothing here raises into training once the run has started: a full disk costs rows, which
are counted, and when there is room again recording goes on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from freewheel.observe.alerts import Alerts
from freewheel.observe.private import open_private
from freewheel.observe.sinks import Sink
from freewheel.observe.values import plain, without_nonfinite

log = logging.getLogger("freewheel.observe")

Kind = Literal["step", "eval", "statistics", "event"]
FILE = "metrics.jsonl"
RESERVED = ("kind", "step", "time", "nonfinite")
"""Names that every row has for itself; a value of such a name gets an underscore behind it."""
WARN_EVERY_S = 60.0
"""A disk stays full for hours, and a log that says so at each step helps nobody."""
TAIL_BYTES = 1 << 16
"""How much is read at a time to find the last whole line of a file that is continued."""


class Recorder:
    """What `record` was given is in the file when it returns, or is counted in `lost_rows`."""

    def __init__(
        self,
        *,
        run_dir: str | os.PathLike[str],
        sinks: Iterable[Sink] = (),
        alerts: Alerts | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(run_dir) / FILE
        self.lost_rows = 0
        self._sinks = list(sinks)
        self._alerts = alerts or Alerts({})
        self._clock = clock
        self._lock = threading.Lock()
        self._warned_at: float | None = None
        self._lost_before_warning = 0
        self._fd: int | None = self._open()

    def record(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        found: dict[str, Any] = plain(values)
        with self._lock:
            self._write(self._row(kind, step, found))
            if kind != "event":
                for notice in self._alerts.check(found):
                    log.log(notice.level, "Alert: %s", notice.text)
            for sink in list(self._sinks):
                self._tell(sink, kind, step, found)

    @property
    def alerts(self) -> list[str]:
        """What is out of bounds now, in words."""
        return self._alerts.active

    def close(self) -> None:
        """Closes the file and all sinks. May be called twice."""
        with self._lock:
            sinks, self._sinks = self._sinks, []
            for sink in sinks:
                try:
                    sink.close()
                except Exception as error:  # noqa: BLE001  # other people's code, at the end of a run that went well
                    log.warning("%s did not close: %s: %s", _name(sink), type(error).__name__, error)
            if self._fd is None:
                return
            if self._alerts.unseen:
                log.warning(
                    "No metric was ever named %s: see observe.alerts, and docs/metrics.md for the names there are",
                    ", ".join(self._alerts.unseen),
                )
            if self.lost_rows:
                log.warning("%d rows of %s were lost in all", self.lost_rows, self.path)
            os.close(self._fd)
            self._fd = None

    # -- the file -----------------------------------------------------------------------------------------------------

    def _row(self, kind: Kind, step: int, values: dict[str, Any]) -> bytes:
        finite, nonfinite = without_nonfinite(values)
        row: dict[str, Any] = {"kind": kind, "step": int(step), "time": round(self._clock(), 3)}
        row |= {name + "_" if name in RESERVED else name: value for name, value in finite.items()}
        if nonfinite:
            row["nonfinite"] = nonfinite
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"

    def _open(self) -> int:
        fd = open_private(self.path, os.O_RDWR | os.O_APPEND)
        with contextlib.suppress(OSError):  # then one row may be glued to half of another, and readers pass it over
            _cut_torn_line(fd)
        return fd

    def _write(self, row: bytes) -> None:
        if self._fd is None:
            self.lost_rows += 1
            return
        try:
            _write_all(self._fd, row)
        except OSError as error:
            self._lose(error)
            return
        if self._warned_at is not None:
            log.warning("%s is written again; %d rows were lost", self.path, self.lost_rows - self._lost_before_warning)
            self._warned_at, self._lost_before_warning = None, self.lost_rows

    def _lose(self, error: OSError) -> None:
        """Counts the row. Opening the file anew takes back what was written of it, so that it has whole lines only, and
        helps where it was moved away or its mount has gone stale."""
        self.lost_rows += 1
        now = self._clock()
        if self._warned_at is None or not 0 <= now - self._warned_at < WARN_EVERY_S:
            self._warned_at = now
            log.warning(
                "%s cannot be written (%s): rows are lost until it can, %d so far. Training goes on",
                self.path,
                error.strerror,
                self.lost_rows,
            )
        try:
            reopened = self._open()
        except OSError:
            return
        assert self._fd is not None
        os.close(self._fd)
        self._fd = reopened

    # -- sinks --------------------------------------------------------------------------------------------------------

    def _tell(self, sink: Sink, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        try:
            sink.write(kind, step, values)
            return
        except Exception as error:  # noqa: BLE001  # other people's code; training goes on without it
            log.warning("%s is switched off: %s: %s. Training goes on", _name(sink), type(error).__name__, error)
        self._sinks.remove(sink)
        try:
            sink.close()
        except Exception as error:  # noqa: BLE001  # it is broken already, and that was said
            log.debug("%s did not close: %s", _name(sink), error)


def read_metrics(run_dir: str | os.PathLike[str], kind: Kind | None = None) -> list[dict[str, Any]]:
    """The rows of a run, all or of one kind, while it runs or after. A line that is not whole is passed over."""
    return list(_rows(Path(run_dir) / FILE, kind))


def _rows(path: Path, kind: Kind | None) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and (kind is None or row.get("kind") == kind):
                yield row


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _cut_torn_line(fd: int) -> None:
    """A process that was killed while it wrote left half a line, to which the next would be glued."""
    end = size = os.fstat(fd).st_size
    while end:
        start = max(0, end - TAIL_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)


def _name(sink: Sink) -> str:
    return getattr(sink, "name", type(sink).__name__)
