"""Progress for a person: a bar on a terminal, a line every ten seconds in a log, nothing when asked for silence."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

from freewheel.cli.console import say
from freewheel.judge.scoring import Progress

LOG_EVERY_S = 10.0
"""Often enough to see that it lives, seldom enough for a log that is kept."""
RATE_WINDOW_S = 10.0
"""The rate is of this last stretch: a resumed run's start and a cache's burst are over by then."""


class Reporter(Protocol):
    def show(self, progress: Progress) -> None: ...
    def say(self, text: str) -> None: ...


class Rate:
    """Rows and bytes per second over the last `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, int]] = []

    def add(self, progress: Progress) -> tuple[float, float | None]:
        """(rows per second, seconds to the end where they can be told)."""
        samples = self._samples
        samples.append((progress.elapsed_s, progress.decided, progress.bytes_done))
        while samples[0][0] < progress.elapsed_s - RATE_WINDOW_S:
            samples.pop(0)
        began_s, rows, size = samples[0]
        took_s = progress.elapsed_s - began_s
        if took_s <= 0:
            return 0.0, None
        bytes_per_s = (progress.bytes_done - size) / took_s
        left_s = None
        if progress.bytes_total is not None and bytes_per_s > 0:
            left_s = (progress.bytes_total - progress.bytes_done) / bytes_per_s
        return (progress.decided - rows) / took_s, left_s


def words(progress: Progress, rows_per_s: float, left_s: float | None) -> str:
    tally, calls = progress.tally, progress.calls
    parts = [f"{progress.decided:,} rows", f"{rows_per_s:,.0f}/s"]
    if left_s is not None:
        parts.append(f"ETA {duration(left_s)}")
    parts += [f"{calls.in_flight}/{calls.limit} in flight", f"{calls.throttled:,} 429s"]
    parts.append(f"{tally.failed + tally.malformed:,} failed")
    if calls.cost:
        parts.append(f"cost {calls.cost:.4f}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class Silent:
    def show(self, progress: Progress) -> None:
        pass

    def say(self, text: str) -> None:
        say(text)


class LogLine:
    def __init__(self) -> None:
        self._rate = Rate()
        self._said_s = 0.0

    def show(self, progress: Progress) -> None:
        rate = self._rate.add(progress)
        if progress.elapsed_s - self._said_s >= LOG_EVERY_S:
            self._said_s = progress.elapsed_s
            say(words(progress, *rate))

    def say(self, text: str) -> None:
        say(text)


@contextlib.contextmanager
def make_reporter(*, quiet: bool, rows_on_stdout: bool) -> Iterator[Reporter]:
    if quiet:
        yield Silent()
    elif not sys.stderr.isatty() or (rows_on_stdout and sys.stdout.isatty()):
        yield LogLine()
    else:
        with _bar() as bar:
            yield bar


@contextlib.contextmanager
def _bar() -> Iterator[Reporter]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True)
    columns = (BarColumn(bar_width=24), TaskProgressColumn(), TextColumn("{task.fields[words]}", markup=False))
    with RichProgress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("", total=None, words="starting")
        rate = Rate()

        class Bar:
            def show(self, progress: Progress) -> None:
                text = words(progress, *rate.add(progress))
                shown.update(task, total=progress.bytes_total, completed=progress.bytes_done, words=text)

            def say(self, text: str) -> None:
                console.print(f"freewheel: {text}", markup=False, highlight=False, soft_wrap=True)

        yield Bar()
