"""What may be recorded: anything that a component or a user's hook hands over, made plain.

Recorder, alerts and sinks all see the same plain values. Numbers of numpy and torch are taken by what they can do
(`item`, `tolist`), so that neither needs to be imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

DEEPEST = 8
"""Levels of nesting that are kept. Statistics have three; a structure that contains itself must end somewhere."""


def plain(value: Any, *, levels: int = DEEPEST) -> Any:
    """`value` out of dictionaries with text keys, lists, numbers, text, booleans and None. Never raises: what is
    nothing of the sort is written as its text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if not levels:
        return _text(value)
    if isinstance(value, Mapping):
        return {str(name): plain(inner, levels=levels - 1) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner, levels=levels - 1) for inner in value]
    for method in ("item", "tolist"):  # an array or tensor of one number, then of several
        try:
            return plain(getattr(value, method)(), levels=levels - 1)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            continue
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001  # a user's class may raise anything from __str__
        return f"<{type(value).__name__}>"


def numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in plain values by their path (`queue/queue_size`). Booleans, text and lists are none."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, as_float(value)


def as_float(value: int | float) -> float:
    """Python's whole numbers have no bound, and floats do."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def without_nonfinite(value: Any, path: str = "") -> tuple[Any, list[str]]:
    """Plain `value` with NaN and infinities as None, which JSON has, and the paths at which they were."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, [path]
    if isinstance(value, dict):
        inner = {name: without_nonfinite(one, f"{path}/{name}" if path else name) for name, one in value.items()}
        return {name: one for name, (one, _) in inner.items()}, [at for _, found in inner.values() for at in found]
    if isinstance(value, list):
        items = [without_nonfinite(one, path) for one in value]
        return [one for one, _ in items], sorted({at for _, found in items for at in found})
    return value, []
