"""Reads a run directory and audits it, without writing: the logic behind `freewheel inspect`.

    RUN/checkpoints/*/state.json ─┐ (read first: a step is in the journal before it is in a checkpoint)
    RUN/journal.sqlite ───────────┼─▶ audit ─▶ Report
    RUN/config.yaml, run.lock ────┘

Works on a live run, on a dead one, and on a run from somebody else: nothing that it names is imported, and nothing is
unpickled. Needs neither torch nor ray.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from freewheel.errors import ConfigError
from freewheel.observe.run_folder import CHECKPOINTS, CONFIG, JOURNAL, LOCK, saved_steps
from freewheel.queue.audit import Audit, audit
from freewheel.queue.journal import CheckpointMark, Journal, JournalBusy, JournalDamaged, JournalError, JournalFormat
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import load
from freewheel.trainer.checkpoint import STATE, CheckpointDamaged, read_state, visible_damage

ASIDE = f"{JOURNAL}.damaged-*"
HOLDER_BYTES = 1024
"""Most bytes of a lock file, which names the process that holds it."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as its folder describes it. Its tensors are not read."""

    path: str
    step: int
    version: int | None
    """None: it cannot be read."""
    damaged: str = ""
    """Why it is damaged."""


class JournalFacts(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    groups: int
    """Scored groups that wait for training."""
    first_step: int | None
    last_step: int | None
    base: int
    """The step that a resume can go back to."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    run: str
    live: str
    """The process that writes to it now; empty if there is none."""
    steps: int
    version: int
    states: dict[str, int]
    abandoned: dict[str, int]
    failures: dict[str, int]
    journal: JournalFacts | None
    checkpoints: list[Saved]
    lost: int
    repeated: int
    stale_trained: int
    violations: list[str]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A run directory."""

    folder: Path
    config: TrainConfig | None
    notes: tuple[str, ...]

    @property
    def journal_path(self) -> Path:
        return self.folder / JOURNAL


def find_run(name: str) -> RunFolder:
    """Open a run directory. Raises `ConfigError` if there is no run."""
    folder, notes = Path(name).expanduser(), []
    if not folder.is_dir():
        raise ConfigError("RUN", name, "there is no such folder: give the one that was printed at the start of the run")
    if not any((folder / one).exists() for one in (CONFIG, JOURNAL, CHECKPOINTS)):
        remedy = f"it has no {CONFIG}, no {JOURNAL} and no {CHECKPOINTS}: it is not a run's folder"
        raise ConfigError("RUN", name, remedy)
    config = None
    try:
        config = load(folder / CONFIG)
    except ConfigError as error:
        notes.append(f"lags are not checked, because the settings cannot be read: {error}")
    return RunFolder(folder=folder, config=config, notes=tuple(notes))


def inspect(run: RunFolder) -> Report:
    """Audit the whole run."""
    holder, notes, violations = live_holder(run.folder), [*run.notes], []
    if holder:
        notes.append(f"the run is live ({holder}): unfinished prompts are open or taken, which is normal")
    saved, marks = read_checkpoints(run.folder)
    bounds = run.config.bounds if run.config else None
    settings: dict[str, Any] = {
        "checkpoints": marks,
        "max_lag": bounds.max_lag_allowed if bounds else None,
        "capacity": bounds.capacity if bounds else None,
    }
    facts: JournalFacts | None = None
    try:
        with open_journal(run) as journal:
            found = audit(journal, **settings)
        facts = _facts(run, found) if journal is not None else None
    except JournalDamaged as error:
        violations.append(f"the journal cannot be read ({error}): a resume moves it aside and uses the checkpoint")
        found = audit(None, **settings)
    if facts is None and not violations:
        _without_journal(run, begun=bool(saved) or not holder, notes=notes, violations=violations)
    notes += [f"{path.name}: a damaged journal that was set aside" for path in sorted(run.folder.glob(ASIDE))]
    notes += [f"{one.path}: damaged, so a resume skips it: {one.damaged}" for one in saved if one.damaged]
    return Report(
        run=str(run.folder),
        live=holder,
        steps=found.step,
        version=found.version,
        states=found.states,
        abandoned=found.abandoned,
        failures=found.failures,
        journal=facts,
        checkpoints=saved,
        lost=found.lost,
        repeated=found.repeated,
        stale_trained=found.stale_trained,
        violations=violations + found.violations,
        notes=notes + found.notes,
    )


def _without_journal(run: RunFolder, *, begun: bool, notes: list[str], violations: list[str]) -> None:
    """`begun`: the run is past its start, which creates the journal."""
    known = "this report uses the checkpoints alone"
    if run.config is None:
        notes.append(f"there is no {JOURNAL}: {known}")
    elif not run.config.journal.enabled:
        notes.append(f"there is no {JOURNAL} (journal.enabled=false): {known}")
    elif begun:
        violations.append(
            f"{JOURNAL} is missing, and the run keeps one (journal.enabled=true): it was removed, or the run ended "
            f"while it was starting; {known}"
        )
    else:
        notes.append(f"there is no {JOURNAL} yet: the run is starting")


@contextmanager
def open_journal(run: RunFolder) -> Iterator[Journal | None]:
    """Yield the journal, or None if there is none. Raises `ConfigError` if this program cannot read it."""
    if not run.journal_path.exists():
        yield None
        return
    try:
        journal = Journal(run.journal_path, readonly=True)
    except JournalFormat as error:
        raise ConfigError("RUN", str(run.folder), str(error)) from error
    except JournalDamaged:
        raise
    except (JournalError, sqlite3.Error, OSError) as error:
        raise ConfigError(
            "RUN", str(run.folder), f"{JOURNAL} cannot be opened ({error}): check its permissions"
        ) from error
    try:
        yield journal
    except JournalBusy as error:  # another process started to write it
        raise ConfigError("RUN", str(run.folder), str(error)) from error
    finally:
        journal.close()


class LastStep:
    """The last step of a finished run, looked up again when one of its files changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: list[tuple[int, int]] = []
        self._step = 0
        self.unread = ""
        """Why an existing journal could not be read: the run may have come further."""

    def look(self) -> int:
        """Return the last step; 0 if neither journal nor checkpoints know."""
        journal_path = self._folder / JOURNAL
        seen = [_mark(self._folder / name) for name in (JOURNAL, f"{JOURNAL}-wal", CHECKPOINTS)]
        if seen != self._seen or self.unread:  # a file that becomes readable looks unchanged
            self._seen, self.unread, committed = seen, "", 0
            try:
                if journal_path.is_file():
                    with closing(Journal(journal_path, readonly=True, checked=False)) as journal:
                        committed = journal.last_step()
            except (JournalError, sqlite3.Error, OSError) as error:
                self.unread = str(error) or type(error).__name__
            self._step = max([committed, *saved_steps(self._folder)])
        return self._step


def _mark(path: Path) -> tuple[int, int]:
    try:
        about = path.stat()
    except OSError:
        return (0, 0)
    return (about.st_mtime_ns, about.st_size)


def _facts(run: RunFolder, found: Audit) -> JournalFacts:
    first, last = found.recorded or (None, None)
    files = (run.journal_path, run.journal_path.with_name(f"{JOURNAL}-wal"))
    return JournalFacts(
        bytes=sum(file.stat().st_size for file in files if file.exists()),
        groups=found.stored_groups,
        first_step=first,
        last_step=last,
        base=found.base or 0,
    )


def live_holder(folder: Path) -> str:
    """Return who holds the run's lock; empty if nobody does.

    The lock is tested only if its file names a process, because a killed process leaves its name. Testing holds the
    lock for the duration of a system call.
    """
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        holder = os.read(file, HOLDER_BYTES).decode(errors="replace").strip()
        if not holder:
            return ""
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        return escape_controls(holder)
    finally:
        os.close(file)


def read_checkpoints(folder: Path) -> tuple[list[Saved], list[CheckpointMark]]:
    """Return all checkpoints for the report, in the order of steps, and marks of those that look whole. A checkpoint
    that was replaced by a whole one is left out."""
    saved, marks = [], []
    for step, paths in saved_steps(folder).items():
        for path in paths:
            try:
                mark = msgspec.convert(read_state(path, STATE), CheckpointMark)
            except (CheckpointDamaged, msgspec.ValidationError) as error:
                if path.exists():  # else it was pruned meanwhile
                    saved.append(Saved(path=str(path), step=step, version=None, damaged=str(error)))
                continue
            damaged = visible_damage(path)
            saved.append(Saved(path=str(path), step=mark.step, version=mark.version, damaged=damaged))
            if not damaged:
                marks.append(mark)
                break
    return saved, marks


def escape_controls(text: str) -> str:
    """Return text of a model, a judge or a file without control characters, which could rewrite a terminal."""
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)
