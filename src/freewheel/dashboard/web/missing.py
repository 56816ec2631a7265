"""What a run's metrics do not tell, said as such; and how far it came by what outlives them.

    metrics.jsonl that is gone, torn or has gaps ─ missing ─▶ words       journal, checkpoints ─ Reached ─▶ a step

A disk that is full costs rows and not the run: its journal and its checkpoints then know more than its curves.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from freewheel.dashboard.web.recorded import Recorded
from freewheel.observe.run_folder import CHECKPOINTS, JOURNAL, METRICS, saved_steps


class Reached:
    """The last step of a run that is over, looked up again when one of its files changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: list[tuple[int, int]] = []
        self._step = 0
        self.unread = ""
        """Why the journal, which is there, could not say: then the run may have come further."""

    def look(self) -> int:
        """0 where neither journal nor checkpoint says."""
        seen = [_mark(self._folder / name) for name in (JOURNAL, f"{JOURNAL}-wal", CHECKPOINTS)]
        if seen != self._seen or self.unread:  # that it may be read now changes no file
            self._seen = seen
            committed, self.unread = _committed(self._folder / JOURNAL)
            self._step = max([committed, *saved_steps(self._folder)])
        return self._step


def _mark(path: Path) -> tuple[int, int]:
    try:
        about = path.stat()
    except OSError:
        return (0, 0)
    return (about.st_mtime_ns, about.st_size)


def _committed(path: Path) -> tuple[int, str]:
    """The last step that the journal has, and why it could not be read."""
    from freewheel.queue.journal import Journal, JournalError

    if not path.is_file():
        return 0, ""
    try:
        with closing(Journal(path, readonly=True, checked=False)) as journal:
            return journal.last_step(), ""
    except (JournalError, sqlite3.Error, OSError) as error:
        return 0, str(error) or type(error).__name__


def missing(recorded: Recorded, step: int, unread: str = "") -> list[str]:
    """Of a run that came to `step`; empty where nothing is. `unread`: why its journal could not be read."""
    found = [f"{JOURNAL} cannot be read ({unread}): the run may have come further than is shown"] if unread else []
    known = _known(step, by="its checkpoints" if unread else "its journal and its checkpoints, which the ledger shows")
    if not recorded.exists:
        return [f"{METRICS} is missing or cannot be opened: there are no curves. {known}", *found]
    if recorded.bad_lines:
        found.append(f"{recorded.bad_lines:,} line{'s' * (recorded.bad_lines > 1)} of {METRICS} could not be read")
    told, last = recorded.steps.rows, int(recorded.steps.last("step") or 0)
    if told < step:
        why = "the disk was full, the run or its trainer was killed, or lines are gone"
        rows = f"{METRICS} has rows of {told:,} of {step:,} steps: {why}"
        found.append(rows if last == step else f"{rows}. {known}")
    return found


def _known(step: int, *, by: str) -> str:
    if not step:
        return "How far it came is not known"
    return f"That it came to step {step:,} is known by {by}"
