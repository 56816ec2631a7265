"""The log of a run: one file for all processes, as text and as JSON.

    fully_async_training.log   2026-11-15 22:30:01,123 INFO [trainer] Step 12: reward 0.534
    log.jsonl                  {"time":1795300201.123,"level":"INFO","run":"r","role":"trainer","message":"Step 12: …"}

Every process calls `attach_log` with its component's name. A record is a single write to a file opened for appending,
so records of two processes never mix, and tracebacks stay in one piece. Loggers named `freewheel` or below write here.
The subject of a record is passed as `extra={"ordinal": 7}`; `ABOUT` lists the names that go to `log.jsonl`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freewheel.observe.metrics import COMPONENTS, METRICS, plain
from freewheel.observe.run_folder import LOG, TEXT_LOG
from freewheel.utils.files import open_private

LOGGER = "freewheel"
STATISTICS = "Component Statistics"
"""Each line of statistics starts with this text, which users grep for."""
ABOUT = ("ordinal", "version", "step")
"""What a record may refer to: a prompt, a weight version, a training step."""


def attach_log(run_dir: str | os.PathLike[str], component: str, level: int | str = logging.INFO) -> Path:
    """Send this process's log to the run's files, and return the path of the text file. Calling it again changes
    component, level or files; a process writes to one run's log at a time."""
    folder = Path(run_dir).absolute()
    logger = logging.getLogger(LOGGER)
    handlers = _attached()
    if not handlers or handlers[0].path.parent != folder:
        # Open first: if the run directory cannot be written, the old files stay attached.
        opened = _opened(folder, component)
        detach_log()
        handlers = opened
        for handler in handlers:
            logger.addHandler(handler)
    for handler in handlers:
        handler.speak_for(component)
    logger.setLevel(level)
    return folder / TEXT_LOG


def detach_log() -> None:
    """Undo `attach_log`. Does nothing if no log is attached."""
    for handler in _attached():
        logging.getLogger(LOGGER).removeHandler(handler)
        handler.close()


def _opened(folder: Path, component: str) -> list[LogFile]:
    text = AppendHandler(folder / TEXT_LOG, component)
    try:
        return [text, JsonHandler(folder / LOG, component)]
    except OSError:
        text.close()
        raise


def _attached() -> list[LogFile]:
    return [one for one in logging.getLogger(LOGGER).handlers if isinstance(one, LogFile)]


class LogFile(logging.Handler):
    """Writes one record per call. A full disk loses lines and never raises; the next line says how many. It survives
    being closed while attached, because `logging.config.dictConfig` of a library closes all handlers."""

    def __init__(self, path: Path, component: str) -> None:
        super().__init__()
        self.path = path
        self.lost_lines = 0
        self._torn = False
        self.speak_for(component)
        self._fd = open_private(path, os.O_WRONLY | os.O_APPEND)

    def speak_for(self, component: str) -> None:
        self.component = component

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001  # a message with the wrong arguments is its author's error, not training's
            text = self._said(record.levelname, f"a message that cannot be formatted: {record.msg!r}")
        lost = f"{self.lost_lines} lines before this one were lost"
        before = self._said("WARNING", lost) + "\n" if self.lost_lines else ""
        self._append((before + text + "\n").encode(errors="backslashreplace"))

    def _said(self, level: str, message: str) -> str:
        """Return a line of the handler itself."""
        raise NotImplementedError

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


class AppendHandler(LogFile):
    """Writes text."""

    def speak_for(self, component: str) -> None:
        super().speak_for(component)
        shown = component.replace("%", "%%")
        self.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{shown}] %(message)s"))

    def _said(self, level: str, message: str) -> str:
        return f"{level} [{self.component}] {message}"


class JsonHandler(LogFile):
    """Writes one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        about = {name: plain(getattr(record, name)) for name in ABOUT if hasattr(record, name)}
        return self._line(record.created, record.levelname, super().format(record), about)

    def _said(self, level: str, message: str) -> str:
        return self._line(time.time(), level, message, {})

    def _line(self, wall_s: float, level: str, message: str, about: Mapping[str, Any]) -> str:
        line = {"time": round(wall_s, 3), "level": level, "run": self.path.parent.name, "role": self.component}
        text = json.dumps({**line, "message": message, **about}, ensure_ascii=False)
        return text.encode(errors="replace").decode()  # JSON has no lone surrogates


def component_statistics(stats: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the counters of all components as log lines, each starting with `Component Statistics`.

    The first line has the metrics of trainer, rollouter, queue and sync, as far as they are known. The other lines have
    the remaining counters, one line per component.
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
