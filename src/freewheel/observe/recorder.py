"""`Recorder`: the one writer of `metrics.jsonl`, and the one place from which sinks and alerts hear of a number.

    record(kind, step, values) ─▶ plain values ─┬─▶ metrics.jsonl   one JSON object a line, handed to the system at once
                                                ├─▶ alerts ─▶ log
                                                └─▶ each sink       one that raises is switched off

Called by FullyAsyncMain only. Nothing here raises into training once the run has started: a full disk costs rows, which
are counted, and when there is room again recording goes on.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from freewheel.observe.alerts import Alerts
from freewheel.observe.lines import read_lines
from freewheel.observe.run_folder import METRICS
from freewheel.observe.sinks import Sink
from freewheel.observe.values import plain, without_nonfinite
from freewheel.utils.files import WholeLines

log = logging.getLogger("freewheel.observe")

Kind = Literal["step", "eval", "statistics", "event", "pulse", "sync"]
RESERVED = ("kind", "step", "time", "nonfinite")
"""Names that every row has for itself; a value of such a name gets an underscore behind it."""
WATCHED = ("step", "eval", "statistics")
"""Kinds that alerts look at. What a pulse says of a moment, statistics say in full."""
FILE_ONLY = ("pulse", "sync")
"""Kinds for those who show a run: sinks have the same numbers under the names that they are documented by."""


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
        self.path = Path(run_dir) / METRICS
        self._sinks = list(sinks)
        self._alerts = alerts or Alerts({})
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._file = WholeLines(self.path, unit="rows", clock=clock)
        self._file.open()

    @property
    def lost_rows(self) -> int:
        return self._file.lost

    def record(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        found: dict[str, Any] = plain(values)
        with self._lock:
            self._file.append(self._row(kind, step, found))
            if kind in WATCHED:
                for notice in self._alerts.check(found):
                    log.log(notice.level, "Alert: %s", notice.text)
            for sink in [] if kind in FILE_ONLY else list(self._sinks):
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
            if self._closed:
                return
            self._closed = True
            if self._alerts.unseen:
                log.warning(
                    "No metric was ever named %s: see observe.alerts, and docs/metrics.md for the names there are",
                    ", ".join(self._alerts.unseen),
                )
            self._file.close()

    def _row(self, kind: Kind, step: int, values: dict[str, Any]) -> bytes:
        finite, nonfinite = without_nonfinite(values)
        row: dict[str, Any] = {"kind": kind, "step": int(step), "time": round(self._clock(), 3)}
        row |= {name + "_" if name in RESERVED else name: value for name, value in finite.items()}
        if nonfinite:
            row["nonfinite"] = nonfinite
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"

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
    """The rows of a run, all or of one kind, while it runs or after. A line that is no row is passed over."""
    return list(_rows(Path(run_dir) / METRICS, kind))


def _rows(path: Path, kind: Kind | None) -> Iterator[dict[str, Any]]:
    for row in read_lines(path):
        if isinstance(row, dict) and isinstance(row.get("step"), int) and kind in (None, row.get("kind")):
            yield row


def _name(sink: Sink) -> str:
    return getattr(sink, "name", type(sink).__name__)
