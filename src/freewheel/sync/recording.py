"""What is written down of weight syncs: a row of each for `metrics.jsonl`, and spans for the trace.

    a sync ends ─▶ SyncRows.add ─▶ kept until `FullyAsyncMain` asks, about once a second

Used by `ParameterSynchronizer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from freewheel.observe import trace
from freewheel.sync.members import Member, Pending

ROWS_KEPT = 256
"""Syncs that nobody has asked about yet: more come to pass only where nobody ever asks."""


class SyncRows:
    """A row a sync; each is given out once."""

    def __init__(self) -> None:
        self._rows: deque[dict[str, Any]] = deque(maxlen=ROWS_KEPT)

    def add(
        self, pending: Pending, group: Mapping[str, Member], since_s: float, until_s: float, *, failed: bool
    ) -> None:
        self._rows.append(
            {
                "version": pending.version,
                "took_s": until_s - since_s,
                "bytes": pending.n_bytes,
                "engines": {name: asdict(member.last) for name, member in group.items()},
                "failed": failed,
            }
        )
        trace.span("sync", since_s, until_s, {"version": pending.version, "bytes": pending.n_bytes})

    def drain(self) -> list[dict[str, Any]]:
        """Those since the last call."""
        rows = list(self._rows)
        self._rows.clear()
        return rows
