"""Pages over arbitrary growing and leaving."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freewheel.rollout.native.cache import NO_PAGE, PageTable

ROWS, PER_ROW = 5, 4
Move = st.tuples(st.sampled_from(["grow", "release"]), st.integers(0, ROWS - 1), st.integers(1, PER_ROW))


def page_of(table: PageTable, row: int, level: int) -> int:
    return int(table.pages(np.array([row]), level)[0])


@given(moves=st.lists(Move, max_size=80))
def test_no_page_belongs_to_two_rows_and_levels_tell_all_of_them(moves: list[tuple[str, int, int]]) -> None:
    table = PageTable(rows=ROWS, pages_per_row=PER_ROW)
    sizes = [1] * ROWS
    for kind, row, levels in moves:
        if kind == "grow":
            assert len(table.grow(np.array([row]), np.array([levels]))) == max(0, levels - sizes[row])
            sizes[row] = max(sizes[row], levels)
        else:
            assert len(table.release(np.array([row]))) == sizes[row] - 1
            sizes[row] = 1
        held = {(r, level): page_of(table, r, level) for r in range(ROWS) for level in range(sizes[r])}
        assert len(set(held.values())) == len(held) and max(held.values()) == table.high - 1
        assert all(page_of(table, r, level) == NO_PAGE for r in range(ROWS) for level in range(sizes[r], PER_ROW))
        told = {
            (r, number): page
            for number, level in enumerate(table.levels(), start=1)
            for r, page in zip(level.rows.tolist(), level.pages.tolist(), strict=True)
        }
        assert told == {key: page for key, page in held.items() if key[1] > 0}
        owners = table.owners()
        assert len(owners) == table.high - ROWS
        assert all(owners[page - ROWS] == r for (r, _), page in told.items())


def test_low_pages_are_given_out_first() -> None:
    table = PageTable(rows=2, pages_per_row=3)
    assert table.grow(np.array([1, 0]), np.array([3, 2])) == [2, 3, 4]
    table.release(np.array([1]))
    assert table.high == 5 and table.grow(np.array([0]), np.array([3])) == [2]
