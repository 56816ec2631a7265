"""The log of a run: one file for all processes, as text and as JSON.

    fully_async_training.log   2026-11-15 22:30:01,123 INFO [trainer] Step 12: reward 0.534
    log.jsonl                  {"time":1795300201.123,"level":"INFO","run":"r","role":"trainer","message":"Step 12: …"}

Every process calls `attach_log` with its component's name. A record is a single write to a file opened for appending,
so records of two processes never mix, and tracebacks stay in one piece. Loggers named `freewheel` or below write here.
The subject of a record is passed as `extra={"ordinal": 7}`; `ABOUT` lists the names that go to `log.jsonl`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
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
    handlers = _list_attached()
    if not handlers or handlers[0].path.parent != folder:
        # Open first: if the run directory cannot be written, the old files stay attached.
        with contextlib.ExitStack() as opened:
            handlers = [opened.enter_context(contextlib.closing(LogFile(folder / name))) for name in (TEXT_LOG, LOG)]
            opened.pop_all()
        detach_log()
        for handler in handlers:
            logger.addHandler(handler)
    text, objects = handlers
    shown = component.replace("%", "%%")
    text.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{shown}] %(message)s"))
    objects.setFormatter(JsonFormatter(folder.name, component))
    logger.setLevel(level)
    return folder / TEXT_LOG


def detach_log() -> None:
    """Undo `attach_log`. Does nothing if no log is attached."""
    for handler in _list_attached():
        logging.getLogger(LOGGER).removeHandler(handler)
        handler.close()


def _list_attached() -> list[LogFile]:
    return [one for one in logging.getLogger(LOGGER).handlers if isinstance(one, LogFile)]


class LogFile(logging.Handler):
    """Writes one record per call. A full disk loses lines and never raises; the next line says how many. It survives
    being closed while attached, because `logging.config.dictConfig` of a library closes all handlers."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.lost_lines = 0
        self._torn = False
        self._fd = open_private(path, os.O_WRONLY | os.O_APPEND)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001  # a message with the wrong arguments is its author's error, not training's
            text = self._message(record.levelname, f"a message that cannot be formatted: {record.msg!r}")
        if self.lost_lines:
            text = self._message("WARNING", f"{self.lost_lines} lines before this one were lost") + "\n" + text
        self._append((text + "\n").encode(errors="backslashreplace"))

    def _message(self, level: str, message: str) -> str:
        """Return a line of the handler itself."""
        return self.format(logging.makeLogRecord({"levelname": level, "msg": message}))

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
        with self.lock or contextlib.nullcontext():
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        super().close()


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object."""

    def __init__(self, run: str, component: str) -> None:
        super().__init__()
        self._run = run
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "run": self._run,
            "role": self._component,
            "message": super().format(record),
            **{name: plain(getattr(record, name)) for name in ABOUT if hasattr(record, name)},
        }
        return json.dumps(line, ensure_ascii=False).encode(errors="replace").decode()  # JSON has no lone surrogates


def component_statistics(stats: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the counters of all components as log lines, each starting with `Component Statistics`.

    The first line has the metrics of trainer, rollouter, queue and sync, as far as they are known. The other lines have
    the remaining counters, one line per component.
    """
    known = {name: [metric.name for metric in METRICS if metric.component == name] for name in COMPONENTS}
    whole = [f"{name}: {_format(stats.get(name), known[name]) or 'no answer'}" for name in COMPONENTS]
    lines = [f"{STATISTICS} | " + " | ".join(whole)]
    for name, values in stats.items():
        if rest := _format(values, [key for key in values if key not in known.get(name, ())]):
            lines.append(f"{STATISTICS} of {name}: {rest}")
    return lines


def _format(values: Mapping[str, Any] | None, names: list[str]) -> str:
    return " ".join(f"{name}={_format_value(plain(values[name]))}" for name in names if values and name in values)


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + " ".join(f"{name}={_format_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + " ".join(_format_value(inner) for inner in value) + "]"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if len(text.split()) != 1 else text
