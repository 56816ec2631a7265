"""Shows the planner's result as tables, JSON and one self-contained SVG. Pure.

rows ─▶ samples/s by number of trainers ─────────────┐
scaling ─▶ samples/s by accelerators, log-log ───────┴▶ two panels; measured points filled, extrapolated ones hollow
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import msgspec

from freewheel.plan.planner import Row, best

BAR = 16
"""Columns of the longest bar."""
EXPLAINED = {
    "measured": "measured: every part was measured in the run with these settings, and simulation puts them together",
    "extrapolated": "extrapolated: speeds follow from data sheets or other settings than the run's, and assumed shares "
    "(docs/plan.md names each)",
}


def table(rows: Sequence[Row], *, price: float | None = None, marks: bool = True) -> str:
    """Return the splits, one line each, with the best one marked."""
    winner = best(rows)
    top = winner.samples_per_s
    head = ["", "train", "generate", "samples/s", "", "tokens/s", "trainer waits", "engines wait", "lag", "most"]
    head += ["hours/1M", *(["cost/1M"] if price is not None else []), "basis"]
    cells = [head]
    for row in rows:
        found = row.outcome
        line = [
            "*" if marks and row is winner else "",
            f"{row.trainers:,}",
            f"{row.generators:,}",
            _number(row.samples_per_s),
            "█" * max(1, round(BAR * row.samples_per_s / top)),
            _number(found.tokens_per_s),
            f"{found.trainer_waits:.0%}",
            f"{found.generation_waits:.0%}",
            f"{found.lag_mean:.1f}",
            f"{found.lag_max}",
            _number(row.hours_per_million),
        ]
        cells.append([*line, *([_number(row.cost(price))] if price is not None else []), row.basis])
    return _aligned(cells, left=(0, 4, len(head) - 1))


def scaling_table(rows: Sequence[Row]) -> str:
    """Return the best split of each number of accelerators, and its share of linear scaling."""
    first = rows[0]
    cells = [
        ["accelerators", "train", "generate", "groups/step", "samples/s", "of linear", "lag", "basis", "held up by"]
    ]
    for row in rows:
        linear = row.samples_per_s / row.accelerators / (first.samples_per_s / first.accelerators)
        cells.append(
            [
                f"{row.accelerators:,}",
                f"{row.trainers:,}",
                f"{row.generators:,}",
                f"{row.groups_per_step:,}",
                _number(row.samples_per_s),
                f"{linear:.0%}",
                f"{row.outcome.lag_mean:.1f}",
                row.basis,
                row.verdict.partition(":")[0],
            ]
        )
    return _aligned(cells, left=(7, 8))


def summary(rows: Sequence[Row]) -> str:
    """Describe the best split."""
    row = best(rows)
    return (
        f"Best: {row.trainers:,} to train and {row.generators:,} to generate "
        f"({row.replicas:,} replica{'s' * (row.replicas != 1)}): "
        f"{_number(row.samples_per_s)} samples/s, a step each {_seconds(row.outcome.step_s)}, "
        f"lag {row.outcome.lag_mean:.1f} versions (at most {row.outcome.lag_max}).\n"
        f"{row.verdict[0].upper()}{row.verdict[1:]}."
    )


def explained(rows: Sequence[Row]) -> str:
    """Explain the words in `basis` that occur."""
    return "\n".join(EXPLAINED[basis] for basis in EXPLAINED if any(row.basis == basis for row in rows))


def as_json(row: Row, price: float | None = None) -> dict[str, Any]:
    """Return a row with derived values."""
    plain: dict[str, Any] = msgspec.to_builtins(row)
    derived = {"samples_per_s": row.samples_per_s, "tokens_per_s": row.outcome.tokens_per_s}
    derived |= {"step_s": row.outcome.step_s, "hours_per_million": row.hours_per_million}
    return plain | derived | ({"cost_per_million": row.cost(price)} if price is not None else {})


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _aligned(cells: Sequence[Sequence[str]], *, left: Sequence[int]) -> str:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


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


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A picture of rows: `x` of each, and its samples per second. Measured points are filled, others hollow."""

    title: str
    x_label: str
    label: str
    rows: Sequence[Row]
    x: str
    """The attribute of a row on the x axis."""
    is_scaling: bool = False
    """Both axes are logarithmic, and a line shows linear scaling from the first row."""

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(float(getattr(row, self.x)), row.samples_per_s) for row in self.rows]

    def draw(self) -> list[str]:
        points, linear = self.points, []
        if self.is_scaling:
            (first, rate), (last, _) = points[0], points[-1]
            linear = [(first, rate), (last, rate / first * last)]
        x_axis = Axis([x for x, _ in points], LEFT, WIDTH - RIGHT, is_log=self.is_scaling)
        y_axis = Axis([y for _, y in [*points, *linear]], HEIGHT - BOTTOM, TOP, is_log=self.is_scaling)
        parts = [_text(LEFT, 16, self.title, weight="600", size=13)]
        for value in y_axis.ticks:
            at = y_axis.place(value)
            parts.append(_path([(LEFT, at), (WIDTH - RIGHT, at)], "grid"))
            parts.append(_text(LEFT - 6, at + 4, f"{value:,g}", anchor="end"))
        for value in x_axis.ticks:
            parts.append(_text(x_axis.place(value), HEIGHT - BOTTOM + 16, f"{value:,g}", anchor="middle"))
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, self.x_label, anchor="middle"))
        parts.append(_text(WIDTH - RIGHT, 16, "● measured  ○ extrapolated", anchor="end", kind="faint"))
        is_measured = all(row.basis == "measured" for row in self.rows)
        curves = [("linear", linear, "faint", "4 3")] if linear else []
        curves.append((self.label, points, "accent", "" if is_measured else "5 3"))
        legend = float(LEFT)
        for label, curve, colour, dashes in curves:
            parts.append(_path([(legend, 36), (legend + 16, 36)], colour, dashes))
            parts.append(_text(legend + 22, 40, label))
            legend += 40 + 6.2 * len(label)
            parts.append(_path([(x_axis.place(x), y_axis.place(y)) for x, y in curve], colour, dashes))
        for row, (x, y) in zip(self.rows, points, strict=True):
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


def draw(splits: Sequence[Row], scaled: Sequence[Row] = (), *, title: str) -> str:
    """Draw the splits. `scaled`: the best split of each number of accelerators; without it there is one panel."""
    winner = best(splits)
    said = f"Of {winner.accelerators:,} accelerators, {winner.trainers:,} that train and {winner.generators:,} that "
    said += f"generate give the most: {winner.samples_per_s:,.0f} samples a second."
    panels = [
        Panel(
            title=f"Samples/s by split of {winner.accelerators:,}",
            x_label="accelerators that train",
            label=f"best: {winner.trainers:,} train, {winner.generators:,} generate",
            rows=splits,
            x="trainers",
        )
    ]
    if len(scaled) > 1:
        said += f" {scaled[-1].accelerators:,} give {scaled[-1].samples_per_s:,.0f}."
        of_sizes = Panel(
            title="Samples/s by size",
            x_label="accelerators",
            label="simulated, best split",
            rows=scaled,
            x="accelerators",
            is_scaling=True,
        )
        panels.append(of_sizes)
    width = len(panels) * (WIDTH + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        'role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title>',
        f'<desc id="d">{escape(said)}</desc>',
        STYLE,
        f'<rect class="paper" width="{width}" height="{HEIGHT}"/>',
    ]
    for place, panel in enumerate(panels):
        parts += [f'<g transform="translate({place * (WIDTH + GAP)} 0)">', *panel.draw(), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _text(
    x: float, y: float, said: str, *, anchor: str = "start", weight: str = "400", size: int = 11, kind: str = ""
) -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return (
        f'<text{of_kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}">'
        f"{escape(said)}</text>"
    )


def _path(points: Sequence[tuple[float, float]], colour: str, dashes: str = "") -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{places}" fill="none" class="{colour}" stroke-width="1.5"{dashed}/>'
