"""The log of a run: `fully_async_training.log` in the run directory, one file for all of its processes.

    2026-11-15 22:30:01,123 INFO [trainer] Step 12: reward 0.534

Every process calls `attach_log` with its component's name. A record is one write to a file opened for appending, which
the system does not mix with another process's; tracebacks and other long messages stay in one piece. Whoever logs to
`freewheel` or below it (`logging.getLogger("freewheel.queue")`) writes here.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freewheel.observe.names import COMPONENTS, METRICS
from freewheel.observe.private import open_private
from freewheel.observe.values import plain

FILE = "fully_async_training.log"
LOGGER = "freewheel"
STATISTICS = "Component Statistics"
"""What users grep for; each line of statistics starts with it."""


def attach_log(run_dir: str | os.PathLike[str], component: str, level: int | str = logging.INFO) -> Path:
    """Sends this process's log to the run's file, and gives its path. Called again it changes component, level or file;
    a process writes to one run's log at a time."""
    path = Path(run_dir).absolute() / FILE
    logger = logging.getLogger(LOGGER)
    handler = _attached()
    if handler is None or handler.path != path:
        opened = AppendHandler(
            path, component
        )  # first, so that a run directory that cannot be written leaves the old one attached
        detach_log()
        handler = opened
        logger.addHandler(handler)
    handler.speak_for(component)
    logger.setLevel(level)
    return path


def detach_log() -> None:
    """Ends what `attach_log` began. Without effect where nothing is attached."""
    handler = _attached()
    if handler is not None:
        logging.getLogger(LOGGER).removeHandler(handler)
        handler.close()


def _attached() -> AppendHandler | None:
    return next((one for one in logging.getLogger(LOGGER).handlers if isinstance(one, AppendHandler)), None)


class AppendHandler(logging.Handler):
    """One write a record. A disk that is full loses lines and never raises; the first line after says how many. Who
    closes it while it is attached (a library's `logging.config.dictConfig` closes all handlers) does not end it."""

    def __init__(self, path: Path, component: str) -> None:
        super().__init__()
        self.path = path
        self.lost_lines = 0
        self._torn = False
        self.speak_for(component)
        self._fd = open_private(path, os.O_WRONLY | os.O_APPEND)

    def speak_for(self, component: str) -> None:
        self.component = component
        shown = component.replace("%", "%%")
        self.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{shown}] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001  # a message with the wrong arguments is its author's error, not training's
            text = f"{record.levelname} [{self.component}] a message that cannot be formatted: {record.msg!r}"
        lost = (
            f"WARNING [{self.component}] {self.lost_lines} lines before this one were lost\n" if self.lost_lines else ""
        )
        self._append((lost + text + "\n").encode(errors="backslashreplace"))

    def _append(self, data: bytes) -> None:
        data = b"\n" + data if self._torn else data
        try:
            if self._fd < 0:
                self._fd = open_private(self.path, os.O_WRONLY | os.O_APPEND)
            written = os.write(self._fd, data)
        except OSError:
            self.lost_lines += 1
            return
        self._torn = written < len(data)
        self.lost_lines = self.lost_lines + 1 if self._torn else 0

    def close(self) -> None:
        self.acquire()
        try:
            fd, self._fd = self._fd, -1
        finally:
            self.release()
        if fd >= 0:
            os.close(fd)
        super().close()


def component_statistics(stats: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The counters of all components as log lines, each of which starts with `Component Statistics`.

    The first has the metrics of trainer, rollouter, queue and sync, whichever of them gave any; the others have what
    else the components said, a line for each.
    """
    known = {name: [metric.name for metric in METRICS if metric.component == name] for name in COMPONENTS}
    whole = [f"{name}: {_said(stats.get(name), known[name]) or 'no answer'}" for name in COMPONENTS]
    lines = [f"{STATISTICS} | " + " | ".join(whole)]
    for name, values in stats.items():
        rest = [key for key in values if key not in known.get(name, ())]
        if said := _said(values, rest):
            lines.append(f"{STATISTICS} of {name}: {said}")
    return lines


def _said(values: Mapping[str, Any] | None, names: list[str]) -> str:
    return " ".join(f"{name}={_short(plain(values[name]))}" for name in names if values and name in values)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + " ".join(f"{name}={_short(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + " ".join(_short(inner) for inner in value) + "]"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if len(text.split()) != 1 else text
