"""Numbers as text: a sparkline for a cell, a chart for the end of a run. Pure; in plain ASCII on request.

The terminal view of a run: a live panel on a terminal, one plain line now and then everywhere else.

    FullyAsyncMain ── update(RunSnapshot) ──▶ LiveView (rich, redraws in place) or PlainView (lines without controls)
                   ├─ say(text)    above the panel, kept
                   └─ finish(snapshot, summary)

Showing a run never ends it: a terminal that was closed, or a pipe whose reader left, makes the view silent.
`with view() as shown:` restores the terminal however the run ends; so does the end of the interpreter.
"""

from __future__ import annotations

import atexit
import io
import itertools
import logging
import math
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freewheel.observe.snapshot import RunSnapshot

__all__ = [
    "LiveView",
    "PlainView",
    "View",
    "curve",
    "says_warnings",
    "view",
]

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"
WIDTH, HEIGHT = 60, 11
"""Fits into 80 columns; an odd height has a row for the middle."""
LABEL = 6
"""Columns of the numbers on the left, their space included."""

HUGE = 1e5
"""From here on two decimals do not fit there."""
LARGEST = sys.float_info.max

Points = Sequence[tuple[int, float]]


def sparkline(values: Iterable[float], *, width: int = 20, unicode: bool = True) -> str:
    """The last `width` values, low to high. Values between 0 and 1, as accuracies are, are shown on that scale: 0.90 to
    0.91 is no climb. NaN is a gap."""
    shown = list(values)[-width:]
    low, high = _range(shown)
    blocks = BLOCKS if unicode else ASCII_BLOCKS
    return "".join(_block(value, low, high, blocks) for value in shown)


def _block(value: float, low: float, high: float, blocks: str) -> str:
    if not math.isfinite(value):
        return " "
    return blocks[min(int(_share(value, low, high) * len(blocks)), len(blocks) - 1)]


def curve(points: Points, *, width: int = WIDTH, height: int = HEIGHT, unicode: bool = True) -> str:
    """A chart of `(step, value)`: marks where something was measured, dots between them. Empty without points."""
    known = sorted((step, value) for step, value in points if math.isfinite(value))
    if not known:
        return ""
    low, high = _range([value for _, value in known])
    first, last = known[0][0], known[-1][0]
    mark, dot, corner, side, floor = "●·└┤─" if unicode else "o.+|-"
    rows = [[" "] * width for _ in range(height)]

    def row(share: float) -> int:
        return math.floor((1 - share) * (height - 1) + 0.5)

    def column(step: int) -> int:
        return math.floor((step - first) / max(last - first, 1) * (width - 1) + 0.5)

    shown = [(column(step), _share(value, low, high)) for step, value in known]
    for (left, share), (right, next_share) in itertools.pairwise(shown):
        for at in range(left, right):
            rows[row(share + (next_share - share) * (at - left) / (right - left))][at] = dot
    for at, share in shown:
        rows[row(share)][at] = mark

    middle = (height - 1) // 2
    below = middle / (height - 1)
    labels = {0: _label(high), height - 1: _label(low), middle: _label(high * (1 - below) + low * below)}
    lines = []
    for number, cells in enumerate(rows):
        lines.append(f"{labels.get(number, ''):>{LABEL - 1}} {side}{''.join(cells)}".rstrip())
    lines.append(" " * LABEL + corner + floor * width)
    ends = f"{last}" if first != last else ""
    lines.append(" " * (LABEL + 1) + f"{first}{ends:>{max(0, width - len(str(first)))}}".rstrip())
    return "\n".join(lines)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest of the scale, never the same."""
    finite = [value for value in values if math.isfinite(value)]
    if all(0 <= value <= 1 for value in finite):
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if high > low:
        return low, high
    around = max(1.0, abs(low) / 2)  # beside a huge number one is nothing
    return low - min(around, LARGEST + low), high + min(around, LARGEST - high)


def _share(value: float, low: float, high: float) -> float:
    """Where between them; halved first, for the difference of two huge numbers may be none."""
    return min(1.0, max(0.0, (value / 2 - low / 2) / (high / 2 - low / 2)))


def _label(value: float) -> str:
    return f"{value:.2f}" if abs(value) < HUGE else f"{value:.0e}"


LINE_EVERY_S = 10.0
"""A plain line at least this often: a log of hours stays short, and nobody wonders whether the run is alive."""
LINES_A_RUN = 10
"""And one each time another tenth of the steps is done."""
DRAW_EVERY_S = 0.1
"""Faster than this nobody reads, and each drawing takes a few milliseconds from the run."""
EVENTS_SHOWN = 3
NAME_COLUMNS = 10
GAP_COLUMNS = 2
BAR_COLUMNS, LEAST_BAR_COLUMNS = 30, 8
"""Of the bar; where there is no room for the least, the numbers say it alone."""
LEAST_CURVE_COLUMNS = 10
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Escape sequences and control characters, newline and tab excepted: a message may come from a judge or a model."""


class View(Protocol):
    def update(self, snapshot: RunSnapshot) -> None:
        """Shows the run as it is now. Cheap; may be called as often as one likes."""

    def say(self, text: str) -> None:
        """Shows something that happened and stays."""

    def finish(self, snapshot: RunSnapshot, summary: str) -> None:
        """The last picture, and how it went."""

    def close(self) -> None:
        """Leaves the terminal as it was. May be called twice."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def view(console: Console | None = None, plain: bool = False) -> LiveView | PlainView:
    """The live view where `console` (stdout) is a terminal and `plain` is False, else the plain one."""
    console = console or Console()
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainView(console.file)
    return LiveView(console)


@contextmanager
def says_warnings(shown: View, level: int = logging.WARNING) -> Iterator[None]:
    """Warnings and errors of `freewheel` in this process are said in the view too, not only in the log file."""
    handler = _Saying(shown, level)
    logger = logging.getLogger("freewheel")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Saying(logging.Handler):
    def __init__(self, shown: View, level: int) -> None:
        super().__init__(level)
        self._view = shown

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # its arguments do not fit: the author's error, not the run's
            text = str(record.msg)
        self._view.say(f"{record.levelname} {text}")


class _Showing:
    """What both views share: they can be closed, and they fall silent rather than raise."""

    def __init__(self, file: IO[str]) -> None:
        self._unicode = _speaks_unicode(file)
        if not self._unicode and isinstance(file, io.TextIOWrapper):  # the name of a run may be in any script
            file.reconfigure(errors="replace")
        self.silent = False
        self.page = ""
        """Where the run can be looked at in a browser; empty where it cannot."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _quietly(self, show: Callable[[], object]) -> None:
        if self.silent:
            return
        try:
            show()
        except (OSError, ValueError):  # the reader left, the terminal is gone, the file is closed
            self.silent = True


class PlainView(_Showing):
    """Lines for files, pipes and CI: a line for the first snapshot, each evaluation, each tenth of the steps, and at
    least one each `every_s` seconds."""

    def __init__(
        self, file: IO[str], *, every_s: float = LINE_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(file)
        self._file = file
        self._every_s = every_s
        self._clock = clock
        self._shown_at = -math.inf
        self._part = -1
        self._evaluations = 0

    def update(self, snapshot: RunSnapshot) -> None:
        part = snapshot.step * LINES_A_RUN // max(snapshot.total_steps, 1)
        evaluated = len(snapshot.eval_curve) > self._evaluations
        if part > self._part or evaluated or self._clock() - self._shown_at >= self._every_s:
            self._part, self._evaluations = max(part, self._part), len(snapshot.eval_curve)
            self._shown_at = self._clock()
            self.say(plain_line(snapshot))

    def say(self, text: str) -> None:
        self._quietly(lambda: self._write(text))

    def finish(self, snapshot: RunSnapshot, summary: str) -> None:
        for text in (plain_line(snapshot), curve(snapshot.eval_curve, unicode=self._unicode), summary):
            if text:
                self.say(text)

    def close(self) -> None:
        self._quietly(self._file.flush)

    def _write(self, text: str) -> None:
        self._file.write(clean(text) + "\n")
        self._file.flush()


class LiveView(_Showing):
    """The panel, drawn in place."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console.file)
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._drawn_at = -math.inf

    def update(self, snapshot: RunSnapshot) -> None:
        if self._clock() - self._drawn_at >= DRAW_EVERY_S:
            self._quietly(lambda: self._draw(snapshot))

    def say(self, text: str) -> None:
        self._quietly(lambda: self._console.print(Text(wrapped(clean(text), self._console.width)), soft_wrap=True))

    def finish(self, snapshot: RunSnapshot, summary: str) -> None:
        self._quietly(lambda: self._draw(snapshot))
        self.close()
        width = max(LEAST_CURVE_COLUMNS, min(WIDTH, self._console.width - LABEL - 1))
        for text in (curve(snapshot.eval_curve, width=width, unicode=self._unicode), summary):
            if text:
                self.say(text)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self.close)
            silent, self.silent = self.silent, False  # even a terminal that failed once is given its cursor back
            self._quietly(live.stop)
            self.silent = self.silent or silent

    def _draw(self, snapshot: RunSnapshot) -> None:
        picture = panel(snapshot, width=self._console.width, unicode=self._unicode, page=self.page)
        if self._live is None:
            # Drawn when there is something new: a thread that redraws would go on after the run has died.
            self._live = Live(picture, console=self._console, auto_refresh=False)
            atexit.register(self.close)
            self._live.start(refresh=True)
        else:
            self._live.update(picture, refresh=True)
        self._drawn_at = self._clock()


def panel(snapshot: RunSnapshot, *, width: int, unicode: bool = True, page: str = "") -> RenderableType:
    """The picture: a bar, and a row for each thing one asks about. `page`: an address, which is left out where it does
    not fit on a line; it was said before."""
    table = Table.grid(padding=(0, GAP_COLUMNS))
    table.add_column(style="bold", min_width=NAME_COLUMNS, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("steps", _bar(snapshot, width - NAME_COLUMNS - GAP_COLUMNS))
    for name, text in _facts(snapshot, unicode=unicode):
        table.add_row(name, Text(text))
    for text in snapshot.alerts:
        table.add_row("alert", Text(clean(text), style="yellow"))
    for text in snapshot.events[-EVENTS_SHOWN:]:
        table.add_row("event", Text(clean(text), style="dim"))
    run_dir = _ending(clean(snapshot.run_dir), width, "…" if unicode else "~")
    title = Text.assemble(("freewheel", "bold"), f"  {snapshot.mode}  ", (run_dir, "dim"))
    address = [Text(page, style="cyan")] if page and len(page) <= width else []
    return Group(title, *address, table)


def _bar(snapshot: RunSnapshot, width: int) -> RenderableType:
    """As long as there is room for, beside the numbers."""
    words = Text(f"{snapshot.step}/{snapshot.total_steps}   {_times(snapshot)}")
    length = min(BAR_COLUMNS, width - len(words) - GAP_COLUMNS)
    if length < LEAST_BAR_COLUMNS:
        return words
    bar = Table.grid(padding=(0, GAP_COLUMNS))
    bar.add_row(ProgressBar(total=max(snapshot.total_steps, 1), completed=snapshot.step, width=length), words)
    return bar


def _ending(text: str, width: int, cut: str) -> str:
    """Of what is too long for a line, the end, in which names of runs differ."""
    return text if len(text) <= width else f"{cut}{text[1 - width :]}"


def _facts(snapshot: RunSnapshot, *, unicode: bool) -> Iterator[tuple[str, str]]:
    for name, now, points in (
        ("reward", snapshot.reward, snapshot.reward_curve),
        ("held out", snapshot.eval_curve[-1][1] if snapshot.eval_curve else None, snapshot.eval_curve),
    ):
        if now is not None:
            yield name, f"{now:.3f}  {sparkline([value for _, value in points], unicode=unicode)}".rstrip()
    yield "weights", f"version {snapshot.version}, engines at {snapshot.published_version}"
    if snapshot.queue:
        yield "queue", _queue(snapshot.queue)
    if snapshot.freshness:
        yield "age", _age(snapshot.freshness)
    for component, spans in snapshot.waits.items():
        yield component, "  ".join(f"{name} {share:.0%}" for name, share in _largest_first(spans))
    if snapshot.verdict:
        yield "verdict", snapshot.verdict
    if speed := _speed(snapshot):
        yield "speed", speed


def plain_line(snapshot: RunSnapshot) -> str:
    """A snapshot in one line."""
    said = [f"step {snapshot.step}/{snapshot.total_steps}"]
    if snapshot.reward is not None:
        said.append(f"reward {snapshot.reward:.3f}")
    if snapshot.eval_curve:
        step, value = snapshot.eval_curve[-1]
        said.append(f"held out {value:.3f} at step {step}")
    if "queue_size" in snapshot.queue:
        said.append(f"queue {snapshot.queue['queue_size']:g}")
    if "avg_sample_age" in snapshot.freshness:
        said.append(f"age {snapshot.freshness['avg_sample_age']:.1f} versions")
    if snapshot.verdict:
        said.append(snapshot.verdict)
    said += [text for text in (_speed(snapshot), _times(snapshot)) if text]
    said += [f"alert: {text}" for text in snapshot.alerts]
    return " | ".join(said).replace("\n", " ")


def _queue(queue: Mapping[str, float]) -> str:
    said = [f"{queue.get('queue_size', 0):g} groups ready"]
    said += [f"{queue[name]:g} {words}" for name, words in (("in_progress", "in progress"),) if name in queue]
    if queue.get("dropped_samples"):
        said.append(f"{queue['dropped_samples']:g} dropped")
    return ", ".join(said)


def _age(freshness: Mapping[str, float]) -> str:
    said = [
        f"{words} {freshness[name]:.1f}{unit}"
        for name, words, unit in (
            ("avg_sample_age", "mean", " versions"),
            ("max_sample_age", "most", ""),
            ("avg_sample_age_s", "mean", " s"),
        )
        if name in freshness
    ]
    if "stale_samples_ratio" in freshness:
        said.append(f"{freshness['stale_samples_ratio']:.0%} over the threshold")
    return ", ".join(said)


def _largest_first(spans: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(spans.items(), key=lambda item: -item[1])


def _speed(snapshot: RunSnapshot) -> str:
    both = ((snapshot.tokens_per_s, "tokens/s"), (snapshot.samples_per_s, "samples/s"))
    return ", ".join(f"{rate:,.0f} {unit}" for rate, unit in both if rate is not None)


def _times(snapshot: RunSnapshot) -> str:
    left = f", {duration(snapshot.eta_s)} left" if snapshot.eta_s is not None else ""
    return duration(snapshot.elapsed_s) + left


def duration(seconds: float) -> str:
    """`8 s`, `1 min 05 s`, `2 h 03 min`: as exact as one needs it."""
    if not math.isfinite(seconds):
        return "unknown"
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes_left:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{whole} s"


def clean(text: str) -> str:
    """Without what would move a cursor, ring a bell or colour what follows."""
    return CONTROL.sub("", text)


def wrapped(text: str, width: int) -> str:
    """Between words only: an address that is longer than a line stays whole, and can be copied."""
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) if len(line) > width else line
        for line in text.split("\n")
    )


def _speaks_unicode(file: IO[str]) -> bool:
    """What has no encoding never becomes bytes, such as `StringIO`."""
    encoding: str | None = getattr(file, "encoding", None)
    return encoding is None or encoding.lower().replace("-", "").startswith("utf")
