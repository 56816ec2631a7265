"""Checks of the machine and their findings. Checks run one after the other, each with a time limit.

    Check.look() ── in a thread, `limit_s` at most ─▶ Finding, Finding, …

A check that is late or raises becomes a finding too.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

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
