"""Metrics that are worth a warning: thresholds by name, said once when crossed and once when back. Pure.

The recorder hands each row to `Alerts.check` and logs what comes back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from freewheel.observe.values import numbers

KEY = "observe.alerts"


class Threshold(Protocol):
    """A number over `above` or under `below` is out of bounds; None has no bound there."""

    @property
    def above(self) -> float | None: ...

    @property
    def below(self) -> float | None: ...


@dataclass(frozen=True)
class Limits:
    """A `Threshold`, for those who have none of their own."""

    above: float | None = None
    below: float | None = None


@dataclass(frozen=True)
class Notice:
    """Something to log."""

    level: int
    """`logging.WARNING` when a threshold is crossed, `logging.INFO` when the metric is back."""
    name: str
    """The metric, with its component where it has one."""
    text: str


class Alerts:
    """Says a thing once: a metric that stays out of bounds is silent until it is back, or out on the other side.

    A threshold for `queue_size` watches every metric of this name (`queue/queue_size` among them), each with a state
    of its own; one for `queue/queue_size` watches that one only.
    """

    def __init__(self, thresholds: Mapping[str, Threshold]) -> None:
        self._thresholds = dict(thresholds)
        self._unseen = set(self._thresholds)
        self._wrong: dict[tuple[str, str], str] = {}
        self._active: dict[tuple[str, str], str] = {}

    def check(self, values: Mapping[str, Any]) -> list[Notice]:
        """What is to be said about a row of plain values. A metric that is not in it stays as it was."""
        found = []
        for path, value in numbers(values):
            for name in dict.fromkeys((path, path.rpartition("/")[2])):
                if name in self._thresholds:
                    self._unseen.discard(name)
                    found += self._look(name, path, value)
        return found

    def _look(self, name: str, path: str, value: float) -> list[Notice]:
        threshold, key = self._thresholds[name], f"{KEY}.{name}"
        wrong = _wrong(threshold, value)
        before = self._wrong.get((name, path))
        if wrong == before:
            return []
        if wrong is None:
            del self._wrong[name, path], self._active[name, path]
            return [Notice(logging.INFO, path, f"{path} = {value:g} is back within {key} ({_bounds(threshold)})")]
        self._wrong[name, path] = wrong
        text = f"{path} = {value:g} is {wrong} ({key}: {_bounds(threshold)})"
        self._active[name, path] = text
        return [Notice(logging.WARNING, path, text)]

    @property
    def active(self) -> list[str]:
        """What was said last of each metric that is out of bounds now."""
        return list(self._active.values())

    @property
    def unseen(self) -> list[str]:
        """Names of thresholds that no metric has had so far: misspelt, most likely."""
        return sorted(self._unseen)


def _wrong(threshold: Threshold, value: float) -> str | None:
    if math.isnan(value):
        return "not a number"
    if threshold.above is not None and value > threshold.above:
        return "too high"
    if threshold.below is not None and value < threshold.below:
        return "too low"
    return None


def _bounds(threshold: Threshold) -> str:
    said = [f"{side} {bound:g}" for side in ("above", "below") if (bound := getattr(threshold, side)) is not None]
    return ", ".join(said)
