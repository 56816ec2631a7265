"""Which page of keys and values belongs to whom. Pure: no tensors; `cache.SlotCache` asks it.

    row r:  page r │ extra page │ extra page …          a page holds `page_tokens` positions of one row
    pages:  [0 … rows) first pages, always there │ [rows … high) extra pages, given out lowest first

A row pays for the length that it has, not for the one that it may reach.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from freewheel.data.group import Array

NO_PAGE = -1


@dataclass(frozen=True)
class Level:
    """The rows that have an n-th page, and that page: in the order of rows, each row once."""

    rows: Array
    pages: Array


class PageTable:
    """Every extra page belongs to one row at most."""

    def __init__(self, *, rows: int, pages_per_row: int) -> None:
        self.rows = rows
        self.total = rows * pages_per_row
        self._table = np.full((rows, pages_per_row), NO_PAGE, np.int64)
        self._table[:, 0] = np.arange(rows)
        self._free = list(range(rows, self.total))
        self._extra: dict[int, int] = {}

    @property
    def high(self) -> int:
        """One more than the highest page in use."""
        return max(self._extra, default=self.rows - 1) + 1

    def pages(self, rows: Array, levels: Array | int) -> Array:
        """Of each row, its page of that level; NO_PAGE where it has none there."""
        found: Array = self._table[rows, levels]
        return found

    def grow(self, rows: Array, levels: Array) -> list[int]:
        """Sees to it that each row has its first `levels` pages; gives those that it did not have before."""
        given = []
        longer = np.flatnonzero(levels > 1)
        for row, wanted in zip(rows[longer].tolist(), levels[longer].tolist(), strict=True):
            for level in np.flatnonzero(self._table[row, :wanted] == NO_PAGE).tolist():
                page = heapq.heappop(self._free)
                self._table[row, level] = page
                self._extra[page] = row
                given.append(page)
        return given

    def release(self, rows: Array) -> list[int]:
        """Takes the extra pages of these rows back; gives them."""
        held = self._table[rows, 1:]
        freed: list[int] = held[held != NO_PAGE].tolist()
        self._table[rows, 1:] = NO_PAGE
        for page in freed:
            del self._extra[page]
            heapq.heappush(self._free, page)
        return freed

    def owners(self) -> Array:
        """The row of each page from `rows` to `high`; row 0 for one that is free."""
        return np.array([self._extra.get(page, 0) for page in range(self.rows, self.high)], np.int64)

    def levels(self) -> list[Level]:
        """From the second page on, as far as any row has pages."""
        found = []
        for level in range(1, self._table.shape[1]):
            pages = self._table[:, level]
            rows = np.flatnonzero(pages != NO_PAGE)
            if not len(rows):
                break
            found.append(Level(rows, pages[rows]))
        return found
