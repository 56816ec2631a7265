"""Numbers as text: a sparkline for a cell, a chart for the end of a run. Pure; in plain ASCII on request."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence

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
