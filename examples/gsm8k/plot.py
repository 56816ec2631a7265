"""Plots what a run learnt: correctness and format on held-out questions, and the training reward.

    RUN/metrics.jsonl ─┬─ eval rows: mean and standard error of each part ─▶ panels with bands ─┐
                       └─ step rows: the same parts in training            ─▶ thin lines       ─┴▶ one SVG

    python plot.py RUN gsm8k.svg        # also prints each rise in standard errors

Time counts from the start of the run, start-up included. Needs only freewheel.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from freewheel.observe.recorder import read_metrics

WIDTH, HEIGHT, GAP = 300, 250, 20
"""Size of a panel, and the gap between two."""
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 34, 40
"""Margins for a panel's labels."""
ERRORS = 2
"""Half the height of a band, in standard errors: 95% of such bands hold the true mean."""
SMOOTHED = 5
"""Each point of a training curve is the mean of this many steps."""
ACCENT, FAINT, INK, GRID = "var(--accent)", "var(--faint)", "var(--ink)", "var(--grid)"
STYLE = """<style>
svg { --accent: #1f6feb; --faint: #9aa4b2; --ink: #24292f; --grid: #e4e7eb } .paper { fill: #fff }
@media (prefers-color-scheme: dark) {
  svg { --accent: #6ea8fe; --faint: #7d8590; --ink: #e6edf3; --grid: #30363d } .paper { fill: #0d1117 }
}
</style>"""
STARTED = re.compile(r"Started in ([\d.]+) s")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A mean at a time, in minutes since the start. `error` is 0 if there is none."""

    minutes: float
    mean: float
    error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Curve:
    label: str
    points: Sequence[Point]
    colour: str = FAINT
    width: float = 1.2
    dashes: str = ""
    has_marks: bool = False
    """Draw a mark at each point, and a band if there are errors: for the panel's main curve."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    curves: Sequence[Curve] = field(default_factory=list)
    is_share: bool = True
    """Write numbers as percentages."""


@dataclass(frozen=True, kw_only=True)
class Rise:
    """From the first evaluation to the last."""

    name: str
    first: Point
    last: Point

    @property
    def errors(self) -> float:
        """The rise in standard errors of the difference. Both samples have the same questions but are treated as
        independent, which makes this number smaller."""
        spread = math.hypot(self.first.error, self.last.error)
        return (self.last.mean - self.first.mean) / spread if spread else math.nan

    def __str__(self) -> str:
        first, last = (f"{100 * one.mean:.1f}% ± {100 * one.error:.1f}" for one in (self.first, self.last))
        return f"{self.name:12} {first:>14} → {last:>14}   {self.errors:+.1f} standard errors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument(
        "svg", type=Path, nargs="?", help="the file to draw into; without it only the numbers are printed"
    )
    given = parser.parse_args()
    rows = read_metrics(given.run)
    if not any(row["kind"] == "eval" for row in rows):
        raise SystemExit(f"{given.run}: it has no evaluation yet")
    for rise in rises(rows):
        print(rise)
    steps = [row for row in rows if row["kind"] == "step"]
    last = max(minutes(rows, row) for row in rows if row["kind"] in ("eval", "step"))
    print(f"{len(steps)} steps; the last row is from minute {last:.1f}, start-up included")
    if given.svg is not None:
        given.svg.parent.mkdir(parents=True, exist_ok=True)
        given.svg.write_text(draw(panels(rows)))


# -- from rows to curves ----------------------------------------------------------------------------------------------


def minutes(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> float:
    return (row["time"] - start_time(rows)) / 60


def start_time(rows: Sequence[dict[str, Any]]) -> float:
    """Return the start in seconds since 1970. A run logs how long its start took when it is done."""
    for row in rows:
        if row["kind"] == "event" and (found := STARTED.match(row["text"])):
            return min(rows[0]["time"], row["time"] - float(found[1]))
    return rows[0]["time"]


def held_out(rows: Sequence[dict[str, Any]], name: str) -> list[Point]:
    return [
        Point(minutes=minutes(rows, row), mean=row[f"eval/{name}"], error=row.get(f"eval/{name}_se") or 0.0)
        for row in rows
        if row["kind"] == "eval" and row.get(f"eval/{name}") is not None
    ]


def in_training(rows: Sequence[dict[str, Any]], name: str) -> list[Point]:
    """Return means of `SMOOTHED` steps: a single step has only a few hundred responses and is noisy."""
    found = [(minutes(rows, row), row[name]) for row in rows if row["kind"] == "step" and row.get(name) is not None]
    return [
        Point(minutes=found[end][0], mean=sum(value for _, value in part) / len(part))
        for end in range(len(found))
        for part in [found[max(0, end - SMOOTHED + 1) : end + 1]]
    ]


def rises(rows: Sequence[dict[str, Any]]) -> list[Rise]:
    names = ("correct", "format", "last_number")
    found = [(name, held_out(rows, name)) for name in names]
    return [Rise(name=name, first=points[0], last=points[-1]) for name, points in found if len(points) > 1]


def panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    def measured(name: str) -> Curve:
        label = "held out, greedy"
        return Curve(label=label, points=held_out(rows, name), colour=ACCENT, width=2, has_marks=True)

    def trained(name: str, label: str = "in training, sampled") -> Curve:
        return Curve(label=label, points=in_training(rows, name))

    lenient = Curve(label="last number, marked or not", points=held_out(rows, "last_number"), dashes="4 3")
    found = [
        Panel(title="Correct", curves=[lenient, trained("reward/correct"), measured("correct")]),
        Panel(title="In the requested form", curves=[trained("reward/format"), measured("format")]),
        Panel(
            title="Reward", curves=[trained("rollout/reward_mean", "in training"), measured("reward")], is_share=False
        ),
    ]
    return [
        Panel(title=panel.title, curves=[one for one in panel.curves if one.points], is_share=panel.is_share)
        for panel in found
        if any(one.points for one in panel.curves)
    ]


# -- from curves to SVG -----------------------------------------------------------------------------------------------


def draw(found: Sequence[Panel]) -> str:
    points = [point for panel in found for curve in panel.curves for point in curve.points]
    end = nice_step(max(point.minutes for point in points), up=True)
    width = len(found) * (WIDTH + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="11" role="img" aria-labelledby="t d">',
        '<title id="t">What a run learnt</title>',
        f'<desc id="d">Over the minutes of the run: {escape(", ".join(panel.title for panel in found))}.</desc>',
        STYLE,
        f'<rect class="paper" width="{width}" height="{HEIGHT}"/>',
    ]
    for place, panel in enumerate(found):
        parts.append(f'<g transform="translate({place * (WIDTH + GAP)} 0)">')
        parts += Drawing(panel=panel, end=end).lines()
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One panel, in its own coordinates."""

    panel: Panel
    end: float
    """End of the time axis, in minutes."""

    @property
    def top(self) -> float:
        """Upper end of the value axis, which starts at 0."""
        highest = max(point.mean + ERRORS * point.error for curve in self.panel.curves for point in curve.points)
        top = nice_step(max(highest, 1e-3), up=True)
        return min(top, 1.0) if self.panel.is_share else top

    def x(self, at: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * at / self.end:.1f}"

    def y(self, value: float) -> str:
        share = min(max(value / self.top, 0.0), 1.0)
        return f"{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share:.1f}"

    def lines(self) -> list[str]:
        parts = [text(LEFT, 16, self.panel.title, weight="600", size=13)]
        parts += [*self._grid(), *self._legend()]
        for curve in self.panel.curves:
            parts += self._curve(curve)
        return parts

    def _grid(self) -> Iterable[str]:
        for value in ticks(self.top):
            yield line(LEFT, self.y(value), WIDTH - RIGHT, self.y(value), GRID)
            shown = f"{100 * value:g}%" if self.panel.is_share else f"{value:g}"
            yield text(LEFT - 6, float(self.y(value)) + 4, shown, anchor="end")
        for at in ticks(self.end):
            yield text(float(self.x(at)), HEIGHT - BOTTOM + 16, f"{at:g}", anchor="middle")
        yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "minutes since the start", anchor="middle")

    def _legend(self) -> Iterable[str]:
        for place, curve in enumerate(reversed(self.panel.curves)):
            at = TOP + 6 + 14 * place
            yield line(LEFT + 8, at, LEFT + 24, at, curve.colour, curve.width, curve.dashes)
            yield text(LEFT + 30, at + 4, curve.label)

    def _curve(self, curve: Curve) -> Iterable[str]:
        points = curve.points
        if curve.has_marks and any(point.error for point in points):
            above = [(point.minutes, point.mean + ERRORS * point.error) for point in points]
            below = [(point.minutes, point.mean - ERRORS * point.error) for point in reversed(points)]
            corners = " ".join(f"{self.x(at)},{self.y(value)}" for at, value in above + below)
            yield f'<polygon points="{corners}" fill="{curve.colour}" fill-opacity="0.15"/>'
        path = " ".join(f"{self.x(point.minutes)},{self.y(point.mean)}" for point in points)
        stroke = stroked(curve.colour, curve.width, curve.dashes)
        yield f'<polyline points="{path}" fill="none" {stroke}/>'
        if curve.has_marks:
            for point in points:
                yield f'<circle cx="{self.x(point.minutes)}" cy="{self.y(point.mean)}" r="3" fill="{curve.colour}"/>'


def text(
    x: float, y: float, said: str, *, anchor: str = "start", weight: str = "400", size: int = 11, colour: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}" '
        f'fill="{colour}">{escape(said)}</text>'
    )


def line(
    x1: float, y1: float | str, x2: float, y2: float | str, colour: str, width: float = 1, dashes: str = ""
) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {stroked(colour, width, dashes)}/>'


def stroked(colour: str, width: float, dashes: str) -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'stroke="{colour}" stroke-width="{width}"{dashed}'


def nice_step(value: float, *, up: bool = False) -> float:
    """Return the largest 1, 2, 2.5 or 5 times a power of ten that is at most `value`. With `up`: the smallest multiple
    of a fifth of that number that is at least `value`."""
    power = 10 ** math.floor(math.log10(value))
    step = max(one * power for one in (1, 2, 2.5, 5) if one * power <= value * (1 + 1e-9))
    return step if not up else math.ceil(value / (step / 5) - 1e-9) * step / 5


def ticks(top: float) -> list[float]:
    step = nice_step(top / 4)
    return [round(place * step, 10) for place in range(math.floor(top / step + 1e-9) + 1)]


if __name__ == "__main__":
    main()
