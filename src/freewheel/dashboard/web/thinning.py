"""`thin`: which points of a curve to send, so that it looks as if all had been sent.

A curve of 100,000 points on a screen of 1,500 columns is a line for each column from the lowest to the highest value in
it. So each bucket of neighbours keeps its lowest and its highest point, in their order, and a spike of a single step
stays where it was. Pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from freewheel.dashboard.web.columns import Numbers, plain

Places = np.ndarray[Any, np.dtype[np.intp]]

MOST_POINTS = 1500
"""Of a curve: about as many as a wide screen has columns for it."""


def thin(values: Numbers, most: int = MOST_POINTS) -> Places:
    """Places of the points to keep, ascending: at most `most`, all of them finite; the first, the last, the lowest and
    the highest are among them."""
    assert most >= 4
    finite = np.flatnonzero(np.isfinite(values))
    count = len(finite)
    if count <= most:
        return finite
    buckets = (most - 2) // 2
    width = -(-count // buckets)
    padded = np.full(buckets * width, values[finite[-1]])
    padded[:count] = values if count == len(values) else values[finite]
    grid = padded.reshape(buckets, width)
    starts = np.arange(buckets) * width
    kept = np.concatenate([[0], starts + grid.argmin(axis=1), starts + grid.argmax(axis=1), [count - 1]])
    found: Places = finite[np.unique(np.minimum(kept, count - 1))]
    return found


def curve(x: Numbers, y: Numbers, most: int = MOST_POINTS) -> dict[str, list[float | None]]:
    """A curve as it is sent."""
    kept = thin(y, most)
    return {"x": plain(x[kept]), "y": plain(y[kept])}
