"""`Columns`: rows of numbers that only grow, a column by its name. What is not known is NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from freewheel.observe.pulse import LATER_S

Numbers = np.ndarray[Any, np.dtype[np.float64]]

FIRST_ROWS = 1024
SIGNIFICANT = 7
"""Digits that are sent: more than a screen has pixels for."""
SHORTEST_S = 1e-3
"""That a measurement counts for at least: a clock may stand still, or be set back."""


class Columns:
    """Appending costs a copy of what is appended, and now and then one of everything. A column lies in one piece."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.rows = 0
        self._at = {name: index for index, name in enumerate(self.names)}
        self._data: Numbers = np.empty((len(self.names), FIRST_ROWS))

    def extend(self, rows: Sequence[Sequence[float | None]] | Numbers) -> None:
        if not len(rows):
            return
        block = np.asarray(rows, np.float64)  # None becomes NaN
        until = self.rows + len(block)
        if until > self._data.shape[1]:
            grown = np.empty((len(self.names), max(until, 2 * self._data.shape[1])))
            grown[:, : self.rows] = self._data[:, : self.rows]
            self._data = grown
        self._data[:, self.rows : until] = block.T
        self.rows = until

    def cut(self, rows: int) -> None:
        """Keeps the first so many."""
        self.rows = min(self.rows, rows)

    def __getitem__(self, name: str) -> Numbers:
        return self._data[self._at[name], : self.rows]

    def last(self, name: str) -> float | None:
        """The last that is known."""
        known = np.flatnonzero(np.isfinite(self[name]))
        return float(self[name][known[-1]]) if known.size else None

    def since(self, row: int) -> dict[str, list[float | None]]:
        """By column, what came from that row on; columns in which nothing is known are left out."""
        found = {}
        for name in self.names:
            values = self[name][row:]
            if np.isfinite(values).any():
                found[name] = plain(values)
        return found


def plain(values: Numbers) -> list[float | None]:
    """As JSON has it: short, and None for what is not a number."""
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | None:
    if value != value or value in (float("inf"), float("-inf")):
        return None
    if value.is_integer():
        return int(value) if abs(value) < 2**53 else value
    return float(f"{value:.{SIGNIFICANT}g}")


def rates(counter: Numbers, time_s: Numbers) -> Numbers:
    """How fast a counter grew from one row to the next, a second; NaN in the first. One that fell was begun anew."""
    grown = np.diff(counter, prepend=np.nan)
    grown = np.where(grown < 0, counter, grown)
    passed = np.diff(time_s, prepend=np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Numbers = np.where(passed > 0, grown / passed, np.nan)
    return found


def mean_over_time(values: Numbers, time_s: Numbers) -> float | None:
    """Of what was measured now and then since time 0: each value counts for the time since the row before it, and for
    no longer than pulses of a run that goes on lie apart. None where nothing is known."""
    known = np.isfinite(values)
    if not known.any():
        return None
    passed = np.clip(np.diff(time_s, prepend=0.0), SHORTEST_S, LATER_S)
    return float(np.average(values[known], weights=passed[known]))


def means(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over all; one that is missing counts as 0."""
    names = dict.fromkeys(name for one in shares for name in one)
    return {name: sum(one.get(name, 0.0) for one in shares) / len(shares) for name in names}
