"""Asking a child what a package says of itself: an import may take seconds, hang in a driver, or end the process.

ask(code) ─▶ python -P -c code ─▶ the JSON object on its last line, or why there is none
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

LAST_CHARS = 300
"""Of an error's last line, which says what went wrong."""


@dataclass(frozen=True)
class Answer:
    """What a child said. Either `values`, or `why` there are none."""

    values: dict[str, Any] = field(default_factory=dict)
    why: str = ""


def ask(code: str, *, limit_s: float) -> Answer:
    """`code` prints a JSON object last. It is not shown the working directory: what lies there is no package."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, errors="replace")
    except subprocess.TimeoutExpired:
        return Answer(why=f"no answer within {limit_s:g} s")
    except OSError as error:
        return Answer(why=f"Python could not be started: {error.strerror}")
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        try:
            found = json.loads(lines[-1])
        except ValueError:
            found = None
        if isinstance(found, dict):
            return Answer(values=found)
    return Answer(why=_last_words(done))


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name if -done.returncode in list(signal.Signals) else "a signal"
        return f"it was ended by {name}"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip()[:LAST_CHARS] if lines else f"it ended with {done.returncode} and said nothing"
