"""What a check found, and how checks are made: one after the other, none for longer than its limit.

    Check.look() ── in a thread, `limit_s` at most ─▶ Finding, Finding, …

A check that is late or that raises is a finding too: whoever looks must not hang or break with what it looks at.

Asking a child what a package says of itself: an import may take seconds, hang in a driver, or end the process.

ask(code) ─▶ python -P -c code ─▶ the JSON object on its last line, or why there is none
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
"""For a check that does no more than ask the operating system: a network disk that is gone never answers."""
GIB = 1 << 30
MIB = 1 << 20


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """A run may work, slower or with less room than it might; or something is left that others may trip over."""
    PROBLEM = "problem"
    """A run would fail."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: State
    detail: str
    """What is so, in words."""
    remedy: str = ""
    """A command or a setting, as it is typed; empty where nothing is to be done, or where `detail` says it."""


def ok(what: str, detail: str) -> Finding:
    return Finding(what=what, state=State.OK, detail=detail)


def warning(what: str, detail: str, remedy: str = "") -> Finding:
    return Finding(what=what, state=State.WARNING, detail=detail, remedy=remedy)


def problem(what: str, detail: str, remedy: str = "") -> Finding:
    return Finding(what=what, state=State.PROBLEM, detail=detail, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One look at the machine."""

    what: str
    look: Callable[[], Iterable[Finding]]
    limit_s: float = LIMIT_S


def run_checks(checks: Iterable[Check], *, begun: Callable[[str], None] = lambda what: None) -> list[Finding]:
    """Everything that they found, in their order. `begun`: told of each check before it is made."""
    found: list[Finding] = []
    for check in checks:
        begun(check.what)
        found += _run_check(check)
    return found


def _run_check(check: Check) -> Sequence[Finding]:
    try:
        return within(check.limit_s, lambda: list(check.look()))
    except TimeoutError as error:
        return [problem(check.what, f"{error}: what it asks is stuck")]
    except Exception as error:  # noqa: BLE001  # whatever a broken installation or system call comes up with
        return [problem(check.what, f"it could not be looked at: {type(error).__name__}: {error}")]


def size(n_bytes: float) -> str:
    """`64 MiB`, `139.8 GiB`: as precise as a person needs it."""
    return f"{n_bytes / MIB:.0f} MiB" if n_bytes < GIB else f"{n_bytes / GIB:.1f} GiB"


def count_of(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def shell_words(words: Iterable[str], most: int) -> tuple[str, int]:
    """The first `most` as arguments of a command, and how many are left out."""
    listed = list(words)
    return " ".join(map(shlex.quote, listed[:most])), max(0, len(listed) - most)


LAST_CHARS = 300
"""Of an error's last line, which says what went wrong."""


@dataclass(frozen=True)
class ChildAnswer:
    """What a child said. Either `values`, or `why` there are none."""

    values: dict[str, Any] = field(default_factory=dict)
    why: str = ""


def run_in_child(code: str, *, limit_s: float) -> ChildAnswer:
    """`code` prints a JSON object last. It is not shown the working directory: what lies there is no package."""
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
        return f"it was ended by {name}"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip()[:LAST_CHARS] if lines else f"it ended with {done.returncode} and said nothing"
