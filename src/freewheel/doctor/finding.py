"""What a check found, and how checks are made: one after the other, none for longer than its limit.

    Check.look() ── in a thread, `limit_s` at most ─▶ Finding, Finding, …

A check that is late or that raises is a finding too: whoever looks must not hang or break with what it looks at.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

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


def examine(checks: Iterable[Check], *, begun: Callable[[str], None] = lambda what: None) -> list[Finding]:
    """Everything that they found, in their order. `begun`: told of each check before it is made."""
    found: list[Finding] = []
    for check in checks:
        begun(check.what)
        found += _made(check)
    return found


def _made(check: Check) -> Sequence[Finding]:
    try:
        return within(check.limit_s, lambda: list(check.look()))
    except TimeoutError as error:
        return [problem(check.what, f"{error}: what it asks is stuck")]
    except Exception as error:  # noqa: BLE001  # whatever a broken installation or system call comes up with
        return [problem(check.what, f"it could not be looked at: {type(error).__name__}: {error}")]


def size(n_bytes: float) -> str:
    """`64 MiB`, `139.8 GiB`: as precise as a person needs it."""
    return f"{n_bytes / MIB:.0f} MiB" if n_bytes < GIB else f"{n_bytes / GIB:.1f} GiB"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def shell_words(words: Iterable[str], most: int) -> tuple[str, int]:
    """The first `most` as arguments of a command, and how many are left out."""
    listed = list(words)
    return " ".join(map(shlex.quote, listed[:most])), max(0, len(listed) - most)
