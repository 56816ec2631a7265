"""The terminal view of a run: a live panel on a terminal, plain lines everywhere else.

    FullyAsyncMain ── update(RunSnapshot) ──▶ LiveView (rich, redraws in place) or PlainView (lines without controls)
                   ├─ say(text)    above the panel, kept
                   └─ finish(snapshot, summary)

Showing a run never ends it: if the terminal closes or the reader of a pipe leaves, the view stops writing. `with view()
as shown:` restores the terminal however the run ends. `sparkline` and `curve` draw numbers as text, in plain ASCII on
request.
"""

from __future__ import annotations

import atexit
import io
import itertools
import logging
import math
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freewheel.observe.snapshot import RunSnapshot

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"
WIDTH, HEIGHT = 60, 11
"""Fits into 80 columns. An odd height has a middle row."""
LABEL = 6
"""Columns of the numbers on the left, with their space."""

HUGE = 1e5
"""From this value on two decimals do not fit."""
LARGEST = 1e300
"""Larger values are drawn as this one, so that differences never overflow."""

Points = Sequence[tuple[int, float]]


def sparkline(values: Iterable[float], *, width: int = 20, unicode: bool = True) -> str:
    """Draw the last `width` values, low to high. Values between 0 and 1, such as accuracies, use that scale, so that
    0.90 to 0.91 is not a climb. NaN is a gap."""
    shown = list(values)[-width:]
    low, high = _range(shown)
    blocks = BLOCKS if unicode else ASCII_BLOCKS
    return "".join(_block(value, low, high, blocks) for value in shown)


def _block(value: float, low: float, high: float, blocks: str) -> str:
    if not math.isfinite(value):
        return " "
    return blocks[min(int(_share(value, low, high) * len(blocks)), len(blocks) - 1)]


def curve(points: Points, *, width: int = WIDTH, height: int = HEIGHT, unicode: bool = True) -> str:
    """Draw `(step, value)` pairs: marks at measured points, dots between them. Empty without points."""
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
    """Return the lowest and highest value of the scale, never equal."""
    finite = [value for value in values if math.isfinite(value)]
    if all(0 <= value <= 1 for value in finite):
        return 0.0, 1.0
    low, high = _clip(min(finite)), _clip(max(finite))
    around = max(1.0, abs(low) / 2) if low == high else 0.0  # adding 1 to a huge number changes nothing
    return low - around, high + around


def _clip(value: float) -> float:
    return min(LARGEST, max(-LARGEST, value))


def _share(value: float, low: float, high: float) -> float:
    """Return the position between them."""
    return min(1.0, max(0.0, (_clip(value) - low) / (high - low)))


def _label(value: float) -> str:
    return f"{value:.2f}" if abs(value) < HUGE else f"{value:.0e}"


LINE_EVERY_S = 10.0
"""Longest time between two plain lines: a log of hours stays short, and shows that the run is alive."""
LINES_A_RUN = 10
"""A line each time another tenth of the steps is done."""
DRAW_EVERY_S = 0.1
"""Nobody can read faster, and each drawing costs the run a few milliseconds."""
EVENTS_SHOWN = 3
NAME_COLUMNS = 10
GAP_COLUMNS = 2
BAR_COLUMNS, LEAST_BAR_COLUMNS = 30, 8
"""Width of the bar. Without room for the least, only numbers are shown."""
LEAST_CURVE_COLUMNS = 10
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Escape sequences and control characters, except newline and tab: a message may come from a judge or a model."""


class TerminalView:
    """Shows a run. A view can be closed twice. If it cannot write, it stops writing and does not raise."""

    def __init__(self, file: IO[str]) -> None:
        encoding: str | None = getattr(file, "encoding", None)  # a file without one, such as StringIO, has no limit
        self._unicode = encoding is None or encoding.lower().replace("-", "").startswith("utf")
        if not self._unicode and isinstance(file, io.TextIOWrapper):  # a run's name may use any script
            file.reconfigure(errors="replace")
        self.silent = False
        self.page = ""
        """The address of the run's page; empty if there is none."""

    def update(self, snapshot: RunSnapshot) -> None:
        """Show the run as it is now. Cheap; may be called often."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Show something that happened, permanently."""
        raise NotImplementedError

    def finish(self, snapshot: RunSnapshot, summary: str) -> None:
        """Show the last picture and the summary."""
        raise NotImplementedError

    def close(self) -> None:
        """Restore the terminal."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _quietly(self, show: Callable[[], object]) -> None:
        if self.silent:
            return
        try:
            show()
        except (OSError, ValueError):  # the reader left, the terminal is gone, or the file is closed
            self.silent = True


class PlainView(TerminalView):
    """Lines for files, pipes and CI: one for the first snapshot, each evaluation and each tenth of the steps, and at
    least one every `every_s` seconds."""

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


class LiveView(TerminalView):
    """The panel, redrawn in place."""

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
        self._quietly(lambda: self._console.print(Text(wrap_words(clean(text), self._console.width)), soft_wrap=True))

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
            silent, self.silent = self.silent, False  # restore the cursor even of a terminal that failed
            self._quietly(live.stop)
            self.silent = self.silent or silent

    def _draw(self, snapshot: RunSnapshot) -> None:
        picture = panel(snapshot, width=self._console.width, unicode=self._unicode, page=self.page)
        if self._live is None:
            # Draw only when there is something new: a redrawing thread would continue after the run has died.
            self._live = Live(picture, console=self._console, auto_refresh=False)
            atexit.register(self.close)
            self._live.start(refresh=True)
        else:
            self._live.update(picture, refresh=True)
        self._drawn_at = self._clock()


def view(console: Console | None = None, plain: bool = False) -> TerminalView:
    """Return the live view if `console` (stdout) is a terminal and `plain` is False, else the plain one."""
    console = console or Console()
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainView(console.file)
    return LiveView(console)


@contextmanager
def says_warnings(shown: TerminalView, level: int = logging.WARNING) -> Iterator[None]:
    """Show warnings and errors of `freewheel` in the view, not only in the log file."""
    handler = _Saying(shown, level)
    logger = logging.getLogger("freewheel")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Saying(logging.Handler):
    def __init__(self, shown: TerminalView, level: int) -> None:
        super().__init__(level)
        self._view = shown

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # its arguments do not fit the message: an error of the author, not of the run
            text = str(record.msg)
        self._view.say(f"{record.levelname} {text}")


def panel(snapshot: RunSnapshot, *, width: int, unicode: bool = True, page: str = "") -> RenderableType:
    """Return the panel: a progress bar and rows of facts. `page` is left out if it does not fit on a line; it was
    printed before."""
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
    """Return a bar as wide as there is room next to the numbers."""
    words = Text(f"{snapshot.step}/{snapshot.total_steps}   {_times(snapshot)}")
    length = min(BAR_COLUMNS, width - len(words) - GAP_COLUMNS)
    if length < LEAST_BAR_COLUMNS:
        return words
    bar = Table.grid(padding=(0, GAP_COLUMNS))
    bar.add_row(ProgressBar(total=max(snapshot.total_steps, 1), completed=snapshot.step, width=length), words)
    return bar


def _ending(text: str, width: int, cut: str) -> str:
    """Return the end of a text that is too long for a line, because names of runs differ at the end."""
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
        yield "age", ", ".join(how.format(snapshot.freshness[name]) for name, how in AGES if name in snapshot.freshness)
    for component, spans in snapshot.waits.items():
        largest_first = sorted(spans.items(), key=lambda item: -item[1])
        yield component, "  ".join(f"{name} {share:.0%}" for name, share in largest_first)
    if snapshot.verdict:
        yield "verdict", snapshot.verdict
    if speed := _speed(snapshot):
        yield "speed", speed


def plain_line(snapshot: RunSnapshot) -> str:
    """Return a snapshot in one line."""
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
    if "in_progress" in queue:
        said.append(f"{queue['in_progress']:g} in progress")
    if queue.get("dropped_samples"):
        said.append(f"{queue['dropped_samples']:g} dropped")
    return ", ".join(said)


AGES = (
    ("avg_sample_age", "mean {:.1f} versions"),
    ("max_sample_age", "most {:.1f}"),
    ("avg_sample_age_s", "mean {:.1f} s"),
    ("stale_samples_ratio", "{:.0%} over the threshold"),
)
"""Names of the ages that are shown, and how."""


def _speed(snapshot: RunSnapshot) -> str:
    both = ((snapshot.tokens_per_s, "tokens/s"), (snapshot.samples_per_s, "samples/s"))
    return ", ".join(f"{rate:,.0f} {unit}" for rate, unit in both if rate is not None)


def _times(snapshot: RunSnapshot) -> str:
    left = f", {duration(snapshot.eta_s)} left" if snapshot.eta_s is not None else ""
    return duration(snapshot.elapsed_s) + left


def duration(seconds: float) -> str:
    """Format as `8 s`, `1 min 05 s` or `2 h 03 min`."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def clean(text: str) -> str:
    """Remove everything that moves the cursor, rings a bell or changes colours."""
    return CONTROL.sub("", text)


def wrap_words(text: str, width: int) -> str:
    """Wrap between words only, so that a long address stays whole and can be copied."""
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) if len(line) > width else line
        for line in text.split("\n")
    )
