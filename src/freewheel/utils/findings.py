"""Checks of the machine and their findings. Checks run one after the other, each with a time limit.

    Check.look() ── in a thread, `limit_s` at most ─▶ Finding, Finding, …
    run_in_child(code) ─▶ python -P -c code ─▶ the JSON object on its last line, or the reason why there is none

A check that is late or raises becomes a finding too. Packages are imported in a child process, because an import may
take seconds, hang in a driver or end the process.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from freewheel.utils.processes import within

LIMIT_S = 10.0
"""Limit of a check that only asks the operating system: a dead network disk never answers."""
GIB = 1 << 30
MIB = 1 << 20


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """A run may work, but slower or with less room; or leftovers may disturb others."""
    PROBLEM = "problem"
    """A run would fail."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    what: str
    state: State
    detail: str
    """What was found, as a sentence."""
    remedy: str = ""
    """A command or a setting, ready to type. Empty if there is nothing to do or `detail` contains the remedy."""


def ok(what: str, detail: str) -> Finding:
    return Finding(what=what, state=State.OK, detail=detail)


def warning(what: str, detail: str, remedy: str = "") -> Finding:
    return Finding(what=what, state=State.WARNING, detail=detail, remedy=remedy)


def problem(what: str, detail: str, remedy: str = "") -> Finding:
    return Finding(what=what, state=State.PROBLEM, detail=detail, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of the machine. `look` returns its findings."""

    what: str
    look: Callable[[], Iterable[Finding]]
    limit_s: float = LIMIT_S


def run_checks(checks: Iterable[Check], *, begun: Callable[[str], None] = lambda what: None) -> list[Finding]:
    """Run the checks and return their findings in order. `begun` receives the name of each check before it runs."""
    found: list[Finding] = []
    for check in checks:
        begun(check.what)
        found += _run_check(check)
    return found


def _run_check(check: Check) -> Sequence[Finding]:
    try:
        return within(check.limit_s, lambda: list(check.look()))
    except TimeoutError as error:
        return [problem(check.what, f"{error}: the call hangs")]
    except Exception as error:  # noqa: BLE001  # a broken installation or system call may raise anything
        return [problem(check.what, f"the check failed: {type(error).__name__}: {error}")]


def size(n_bytes: float) -> str:
    """Format bytes for people: `64 MiB`, `139.8 GiB`."""
    return f"{n_bytes / MIB:.0f} MiB" if n_bytes < GIB else f"{n_bytes / GIB:.1f} GiB"


def count_of(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def shell_words(words: Iterable[str], most: int) -> tuple[str, int]:
    """Return the first `most` words quoted for a shell, and how many were left out."""
    listed = list(words)
    return " ".join(map(shlex.quote, listed[:most])), max(0, len(listed) - most)


LAST_CHARS = 300
"""How much of an error's last line is shown."""


@dataclass(frozen=True)
class ChildAnswer:
    """The answer of a child process: either `values`, or `why` there are none."""

    values: dict[str, Any] = field(default_factory=dict)
    why: str = ""


def run_in_child(code: str, *, limit_s: float) -> ChildAnswer:
    """Run `code`, whose last line of output is a JSON object. The working directory is not importable there."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, errors="replace")
    except subprocess.TimeoutExpired:
        return ChildAnswer(why=f"no answer within {limit_s:g} s")
    except OSError as error:
        return ChildAnswer(why=f"Python could not be started: {error.strerror}")
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        try:
            found = json.loads(lines[-1])
        except ValueError:
            found = None
        if isinstance(found, dict):
            return ChildAnswer(values=found)
    return ChildAnswer(why=_last_words(done))


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name if -done.returncode in list(signal.Signals) else "a signal"
        return f"it was killed by {name}"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip()[:LAST_CHARS] if lines else f"it ended with exit code {done.returncode} and no message"
