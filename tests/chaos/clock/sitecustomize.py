"""A wall clock that jumps, for every Python process of a run that has this folder on its PYTHONPATH.

`$FREEWHEEL_CHAOS_CLOCK` names a file with the seconds that the clock is off by now; whoever changes it makes the clocks
of all those processes jump. The monotonic clock stays as it is, as it does when NTP or a person sets the time.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

LOOK_EVERY_S = 0.05

_file = Path(os.environ.get("FREEWHEEL_CHAOS_CLOCK", ""))
_time, _time_ns, _monotonic = time.time, time.time_ns, time.monotonic
_looked_at, _off_s = float("-inf"), 0.0


def _off() -> float:
    global _looked_at, _off_s
    now = _monotonic()
    if now - _looked_at > LOOK_EVERY_S:
        _looked_at = now
        try:
            _off_s = float(_file.read_text() or 0)
        except (OSError, ValueError):  # being written, or not there yet: as before
            return _off_s
    return _off_s


def _jumping() -> float:
    return _time() + _off()


def _jumping_ns() -> int:
    return _time_ns() + int(_off() * 1e9)


if _file.name:
    time.time = _jumping
    time.time_ns = _jumping_ns
