"""A row of each weight sync, given out once: what it took, of whom, in how many attempts, and whether it went well."""

from __future__ import annotations

from freewheel.sync.members import Member, Pending
from freewheel.sync.recording import ROWS_KEPT, SyncRows


def test_rows_are_given_out_once_and_the_newest_are_kept() -> None:
    rows, group = SyncRows(), {"r0": Member(None, 0)}  # type: ignore[arg-type]
    for version in range(ROWS_KEPT + 5):
        rows.add(Pending(version=version, weights=None, checksum=None, n_bytes=7), group, 1.0, 1.5, failed=False)
    found = rows.drain()
    assert [row["version"] for row in found] == list(range(5, ROWS_KEPT + 5))
    assert found[0] == {
        "version": 5,
        "took_s": 0.5,
        "bytes": 7,
        "engines": {"r0": {"took_s": 0.0, "attempts": 0, "error": ""}},
        "failed": False,
    }
    assert rows.drain() == []
