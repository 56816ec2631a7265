"""Shows the planner's result as tables, JSON and one self-contained SVG. Pure.

rows ─▶ samples/s by number of trainers ─────────────┐
scaling ─▶ samples/s by accelerators, log-log ───────┴▶ two panels; measured points filled, extrapolated ones hollow
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import msgspec

from freewheel.plan.planner import SimulatedSplit, best

BAR = 16
"""Columns of the longest bar."""
EXPLAINED = {
    "measured": "measured: every part was measured in the run with these settings, and simulation puts them together",
    "extrapolated": "extrapolated: computed from data sheets, or from a run with other settings, and assumed shares "
    "(docs/plan.md names each)",
}


def table(rows: Sequence[SimulatedSplit], *, price: float | None = None) -> str:
    """Return the splits, one line each, with the best one marked."""
    winner = best(rows)
    columns: dict[str, Cell] = {
        "": lambda row: "*" if row is winner else "",
        "train": lambda row: f"{row.trainers:,}",
        "generate": lambda row: f"{row.generators:,}",
        "samples/s": lambda row: _number(row.samples_per_s),
        " ": lambda row: "█" * max(1, round(BAR * row.samples_per_s / winner.samples_per_s)),
        "tokens/s": lambda row: _number(row.outcome.tokens_per_s),
        "trainer waits": lambda row: f"{row.outcome.trainer_waits:.0%}",
        "engines wait": lambda row: f"{1 - row.outcome.engine_busy:.0%}",
        "lag": lambda row: f"{row.outcome.lag_mean:.1f}",
        "most": lambda row: f"{row.outcome.lag_max}",
        "hours/1M": lambda row: _number(row.hours_per_million),
    }
    if price is not None:
        columns["cost/1M"] = lambda row: _number(row.hours_per_million * price)
    return _align(rows, {**columns, "basis": lambda row: row.basis})


def scaling_table(rows: Sequence[SimulatedSplit]) -> str:
    """Return the best split of each number of accelerators, and its share of linear scaling."""
    first = rows[0].samples_per_s / rows[0].accelerators
    columns: dict[str, Cell] = {
        "accelerators": lambda row: f"{row.accelerators:,}",
        "train": lambda row: f"{row.trainers:,}",
        "generate": lambda row: f"{row.generators:,}",
        "groups/step": lambda row: f"{row.groups_per_step:,}",
        "samples/s": lambda row: _number(row.samples_per_s),
        "of linear": lambda row: f"{row.samples_per_s / row.accelerators / first:.0%}",
        "lag": lambda row: f"{row.outcome.lag_mean:.1f}",
        "basis": lambda row: row.basis,
        "bottleneck": lambda row: row.verdict.partition(":")[0],
    }
    return _align(rows, columns)


def summary(rows: Sequence[SimulatedSplit]) -> str:
    """Describe the best split."""
    row = best(rows)
    return (
        f"Best: {row.trainers:,} to train and {row.generators:,} to generate "
        f"({row.replicas:,} replica{'s' * (row.replicas != 1)}): "
        f"{_number(row.samples_per_s)} samples/s, one step per {_seconds(row.outcome.step_s)}, "
        f"lag {row.outcome.lag_mean:.1f} versions (at most {row.outcome.lag_max}).\n"
        f"{row.verdict[0].upper()}{row.verdict[1:]}."
    )


def explain(rows: Sequence[SimulatedSplit]) -> str:
    """Explain the words in `basis` that occur."""
    return "\n".join(EXPLAINED[basis] for basis in EXPLAINED if any(row.basis == basis for row in rows))


def as_json(row: SimulatedSplit, price: float | None = None) -> dict[str, Any]:
    """Return a row with derived values."""
    plain: dict[str, Any] = msgspec.to_builtins(row)
    derived = {"samples_per_s": row.samples_per_s, "tokens_per_s": row.outcome.tokens_per_s}
    derived |= {"step_s": row.outcome.step_s, "hours_per_million": row.hours_per_million}
    return plain | derived | ({"cost_per_million": row.hours_per_million * price} if price is not None else {})


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"


Cell = Callable[[SimulatedSplit], str]
LEFT_ALIGNED = ("", " ", "basis", "bottleneck")


def _align(rows: Sequence[SimulatedSplit], columns: Mapping[str, Cell]) -> str:
    cells = []
    for head, cell in columns.items():
        column = [head.strip(), *map(cell, rows)]
        width, place = max(map(len, column)), str.ljust if head in LEFT_ALIGNED else str.rjust
        cells.append([place(text, width) for text in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*cells, strict=True))


WIDTH, HEIGHT, GAP = 460, 300, 24
"""Size of a panel, and the gap between two."""
LEFT, RIGHT, TOP, BOTTOM = 64, 28, 56, 44
"""Margins for a panel's numbers and labels."""
STYLE = """<style>
  text { font-family: system-ui, sans-serif; fill: #1f2328; } .paper { fill: #ffffff; }
  .accent { stroke: #1f6feb; } .faint { stroke: #8c959f; } .grid { stroke: #e4e7eb; }
  text.faint { fill: #59636e; stroke: none; }
  .hollow { fill: #ffffff; } circle.full { fill: #1f6feb; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .paper { fill: #161b22; } .accent { stroke: #58a6ff; } .grid { stroke: #30363d; }
    text.faint { fill: #9198a1; } .hollow { fill: #161b22; } circle.full { fill: #58a6ff; }
  }
</style>"""
MARKS = 4
"""Approximate number of grid lines of an axis."""


def _panel(
    title: str, x_name: str, label: str, rows: Sequence[SimulatedSplit], *, by: str, is_scaling: bool = False
) -> list[str]:
    """Draw samples per second by the attribute `by`. Measured points are filled, others hollow. `is_scaling`: both axes
    are logarithmic, and a line shows linear scaling from the first row."""
    points = [(float(getattr(row, by)), row.samples_per_s) for row in rows]
    curves = [(label, points, "accent", "" if all(row.basis == "measured" for row in rows) else "5 3")]
    if is_scaling:
        (first, rate), (last, _) = points[0], points[-1]
        curves.insert(0, ("linear", [(first, rate), (last, rate / first * last)], "faint", "4 3"))
    x_axis = Axis([x for x, _ in points], LEFT, WIDTH - RIGHT, is_log=is_scaling)
    y_axis = Axis([y for _, curve, _, _ in curves for _, y in curve], HEIGHT - BOTTOM, TOP, is_log=is_scaling)
    parts = [_text(LEFT, 16, title, 'font-weight="600" font-size="13"')]
    for value in y_axis.ticks:
        at = y_axis.place(value)
        parts.append(_path([(LEFT, at), (WIDTH - RIGHT, at)], "grid"))
        parts.append(_text(LEFT - 6, at + 4, f"{value:,g}", 'text-anchor="end"'))
    for value in x_axis.ticks:
        parts.append(_text(x_axis.place(value), HEIGHT - BOTTOM + 16, f"{value:,g}", 'text-anchor="middle"'))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_name, 'text-anchor="middle"'))
    parts.append(_text(WIDTH - RIGHT, 16, "● measured  ○ extrapolated", 'class="faint" text-anchor="end"'))
    legend = float(LEFT)
    for name, curve, colour, dashes in curves:
        parts.append(_path([(legend, 36), (legend + 16, 36)], colour, dashes))
        parts.append(_text(legend + 22, 40, name))
        legend += 40 + 6.2 * len(name)
        parts.append(_path([(x_axis.place(x), y_axis.place(y)) for x, y in curve], colour, dashes))
    for row, (x, y) in zip(rows, points, strict=True):
        filled = "full" if row.basis == "measured" else "hollow"
        place = f'cx="{x_axis.place(x):.1f}" cy="{y_axis.place(y):.1f}"'
        parts.append(f'<circle class="accent {filled}" {place} r="3.5" stroke-width="1.5"/>')
    return parts


class Axis:
    """Places values between two coordinates."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, is_log: bool) -> None:
        self._start, self._end, self._is_log = start, end, is_log
        if is_log:
            low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) - 1e-9)
            high = max(high, low + 1)
            self._low, self._high = float(low), float(high)
            self.ticks = [10.0**power for power in range(low, high + 1)]
        else:
            fifth = _nice(max(values)) / 5
            self._low, self._high = 0.0, math.ceil(max(values) / fifth - 1e-9) * fifth
            step = _nice(self._high / MARKS)
            self.ticks = [place * step for place in range(math.floor(self._high / step + 1e-9) + 1)]

    def place(self, value: float) -> float:
        at = math.log10(value) if self._is_log else value
        return self._start + (self._end - self._start) * (at - self._low) / (self._high - self._low)


def _nice(value: float) -> float:
    """Return the largest of 1, 2, 2.5 or 5 times a power of ten that is not above `value`."""
    power = math.pow(10, math.floor(math.log10(value)))
    return max(one * power for one in (1, 2, 2.5, 5) if one * power <= value * (1 + 1e-9))


def draw(splits: Sequence[SimulatedSplit], scaled: Sequence[SimulatedSplit] = (), *, title: str) -> str:
    """Draw the splits. `scaled`: the best split of each number of accelerators; without it there is one panel."""
    winner = best(splits)
    said = f"Of {winner.accelerators:,} accelerators, {winner.trainers:,} that train and {winner.generators:,} that "
    said += f"generate give the most: {winner.samples_per_s:,.0f} samples per second."
    label = f"best: {winner.trainers:,} train, {winner.generators:,} generate"
    heading = f"Samples/s by split of {winner.accelerators:,}"
    panels = [_panel(heading, "accelerators that train", label, splits, by="trainers")]
    if len(scaled) > 1:
        said += f" {scaled[-1].accelerators:,} give {scaled[-1].samples_per_s:,.0f}."
        label = "simulated, best split"
        panels.append(_panel("Samples/s by size", "accelerators", label, scaled, by="accelerators", is_scaling=True))
    width = len(panels) * (WIDTH + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        'font-size="11" role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title>',
        f'<desc id="d">{escape(said)}</desc>',
        STYLE,
        f'<rect class="paper" width="{width}" height="{HEIGHT}"/>',
    ]
    for place, panel in enumerate(panels):
        parts += [f'<g transform="translate({place * (WIDTH + GAP)} 0)">', *panel, "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, said: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(said)}</text>'


def _path(points: Sequence[tuple[float, float]], colour: str, dashes: str = "") -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{places}" fill="none" class="{colour}" stroke-width="1.5"{dashed}/>'
