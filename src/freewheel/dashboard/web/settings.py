"""What a run was told to do: its `config.yaml` as plain values. What cannot be read is empty."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from freewheel.dashboard.web.tail import open_regular
from freewheel.observe.run_folder import CONFIG
from freewheel.runtime.config import THRESHOLDS

MOST_BYTES = 1 << 20
"""A longer one is no configuration of ours."""


class Settings:
    """The file, read again when it changed."""

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
            self.values = _parsed(os.pread(fd, MOST_BYTES, 0))
        finally:
            os.close(fd)

    def get(self, key: str, default: Any = None) -> Any:
        """By its full name, such as `trainer.total_steps`."""
        found: Any = self.values
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    @property
    def staleness_threshold(self) -> int | None:
        """What holds, in the run's mode; None where neither that nor the key says."""
        told = self.number("async_training.staleness_threshold")
        return THRESHOLDS.get(self.text("mode"), None if told is None else int(told))

    def text(self, key: str) -> str:
        found = self.get(key)
        return found if isinstance(found, str) else ""

    def number(self, key: str) -> float | None:
        found = self.get(key)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        return found if is_number and abs(found) <= sys.float_info.max else None  # NaN is not, nor what no float holds


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(data, Loader=_LOADER)):
            return {}  # our files have none, and a few lines of them can stand for more than fits in memory
        loader = _LOADER(data)
        try:
            found = loader.get_single_data()
        finally:
            loader.dispose()
        if not isinstance(found, dict):
            return {}
        flat(found)  # as it is told: raises where it is nested too deeply, or has a number too long to be written
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Each setting by its full name, as text: what two runs are compared by."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + str(name)] = "null" if value is None else str(value)
    return found


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Makes plain values only; the one in C is ten times as fast."""
