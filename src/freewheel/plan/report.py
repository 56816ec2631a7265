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
ACCENT, FAINT, GRID = "accent", "faint", "grid"
"""CSS classes; the style below defines their colours for light and dark pages."""
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

Point = tuple[float, float, bool]
"""x, y, and whether it is measured."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    label: str
    points: Sequence[Point]
    colour: str = ACCENT
    dashes: str = ""
    has_marks: bool = True


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    x_label: str
    curves: Sequence[Curve]
    is_log: bool = False
    """Both axes are logarithmic."""


def draw(splits: Sequence[Row], scaled: Sequence[Row] = (), *, title: str) -> str:
    """Draw the splits. `scaled`: the best split of each number of accelerators; without it there is one panel."""
    panels = [_splits(splits)] + ([_scaled(scaled)] if len(scaled) > 1 else [])
    width = len(panels) * (WIDTH + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        'role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title>',
        f'<desc id="d">{escape(_described(splits, scaled))}</desc>',
        STYLE,
        f'<rect class="paper" width="{width}" height="{HEIGHT}"/>',
    ]
    for place, panel in enumerate(panels):
        parts.append(f'<g transform="translate({place * (WIDTH + GAP)} 0)">')
        parts += _Drawing(panel).lines()
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _described(splits: Sequence[Row], scaled: Sequence[Row]) -> str:
    """Describe the pictures in words."""
    winner = best(splits)
    said = f"Of {winner.accelerators:,} accelerators, {winner.trainers:,} that train and {winner.generators:,} that "
    said += f"generate give the most: {winner.samples_per_s:,.0f} samples a second."
    if len(scaled) > 1:
        said += f" {scaled[-1].accelerators:,} give {scaled[-1].samples_per_s:,.0f}."
    return said


def _splits(rows: Sequence[Row]) -> Panel:
    winner = best(rows)
    label = f"best: {winner.trainers:,} train, {winner.generators:,} generate"
    points = [(float(row.trainers), row.samples_per_s, row.basis == "measured") for row in rows]
    title = f"Samples/s by split of {winner.accelerators:,}"
    return Panel(title=title, x_label="accelerators that train", curves=[Curve(label=label, points=points)])


def _scaled(rows: Sequence[Row]) -> Panel:
    first = rows[0]
    each = first.samples_per_s / first.accelerators
    linear = [(float(row.accelerators), each * row.accelerators, False) for row in (first, rows[-1])]
    found = [(float(row.accelerators), row.samples_per_s, row.basis == "measured") for row in rows]
    curves = [
        Curve(label="linear", points=linear, colour=FAINT, dashes="4 3", has_marks=False),
        Curve(label="simulated, best split", points=found),
    ]
    return Panel(title="Samples/s by size", x_label="accelerators", curves=curves, is_log=True)


class _Drawing:
    """One panel, in its own coordinates."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        xs = [point[0] for curve in panel.curves for point in curve.points]
        ys = [point[1] for curve in panel.curves for point in curve.points]
        if panel.is_log:
            self._x_range, self._y_range = _decades(xs), _decades(ys)
        else:
            self._x_range, self._y_range = (0.0, _nice(max(xs), up=True)), (0.0, _nice(max(ys), up=True))

    def lines(self) -> list[str]:
        panel = self._panel
        parts = [_text(LEFT, 16, panel.title, weight="600", size=13)]
        parts += [*self._grid(), *self._legend()]
        for curve in panel.curves:
            parts += self._curve(curve)
        return parts

    def _x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * self._share(value, self._x_range)

    def _y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * self._share(value, self._y_range)

    def _share(self, value: float, span: tuple[float, float]) -> float:
        low, high = span
        if self._panel.is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def _ticks(self, span: tuple[float, float]) -> list[float]:
        low, high = span
        if self._panel.is_log:
            return [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
        step = _nice(high / MARKS)
        return [place * step for place in range(math.floor(high / step + 1e-9) + 1)]

    def _grid(self) -> list[str]:
        parts = []
        for value in self._ticks(self._y_range):
            at = self._y(value)
            parts.append(_line(LEFT, at, WIDTH - RIGHT, at, GRID))
            parts.append(_text(LEFT - 6, at + 4, f"{value:,g}", anchor="end"))
        for value in self._ticks(self._x_range):
            parts.append(_text(self._x(value), HEIGHT - BOTTOM + 16, f"{value:,g}", anchor="middle"))
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, self._panel.x_label, anchor="middle"))
        return parts

    def _legend(self) -> list[str]:
        parts = []
        at = 36.0
        x = float(LEFT)
        for curve in self._panel.curves:
            parts.append(_line(x, at, x + 16, at, curve.colour, curve.dashes))
            parts.append(_text(x + 22, at + 4, curve.label))
            x += 40 + 6.2 * len(curve.label)
        parts.append(_text(WIDTH - RIGHT, 16, "● measured  ○ extrapolated", anchor="end", kind=FAINT))
        return parts

    def _curve(self, curve: Curve) -> list[str]:
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y, _ in curve.points)
        known = all(measured for *_, measured in curve.points)
        dashes = curve.dashes or ("" if known else "5 3")
        parts = [f'<polyline points="{path}" fill="none" {_stroked(curve.colour, dashes)}/>']
        if curve.has_marks:
            for x, y, measured in curve.points:
                place = f'cx="{self._x(x):.1f}" cy="{self._y(y):.1f}"'
                filled = "full" if measured else "hollow"
                parts.append(f'<circle class="{curve.colour} {filled}" {place} r="3.5" stroke-width="1.5"/>')
        return parts


def _text(
    x: float, y: float, said: str, *, anchor: str = "start", weight: str = "400", size: int = 11, kind: str = ""
) -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return (
        f'<text{of_kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}">'
        f"{escape(said)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {_stroked(colour, dashes)}/>'


def _stroked(colour: str, dashes: str) -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'class="{colour}" stroke-width="1.5"{dashed}'


def _nice(value: float, *, up: bool = False) -> float:
    """Return the largest of 1, 2, 2.5 or 5 times a power of ten that is not above `value`. With `up`: the next multiple
    of a fifth of that which is not below `value`."""
    power = math.pow(10, math.floor(math.log10(value)))
    step = max(one * power for one in (1, 2, 2.5, 5) if one * power <= value * (1 + 1e-9))
    return step if not up else math.ceil(value / (step / 5) - 1e-9) * step / 5


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the enclosing whole powers of ten."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) - 1e-9)
    return 10.0**low, 10.0 ** max(high, low + 1)
