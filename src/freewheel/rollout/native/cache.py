"""The paged KV cache and the attention over it.

    prefill [rows, bucket] ─▶ PromptKV ──place──▶ SlotCache [pages, kv heads, page tokens, head dim] per layer
    decode  [slots, 1]     ─▶ each row writes at its own position and attends to its own pages

The model receives both as its cache; `attend` is its attention. It makes one product per (page, head), all of one
shape, and adds a row's pages in order. So a row's numbers do not depend on other rows' pages, bit for bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from freewheel.data.group import Array

ATTENTION = "freewheel_pages"
"""The name under which transformers knows `attend`."""
PAGE_TOKENS = 64
"""Positions per page. Smaller pages waste less on a row's last page and cost more operations per step."""
SHORT_TILE = 16
"""A cache shorter than a page has pages of a multiple of this."""


class PromptRead(Exception):
    """Raised when every layer's keys and values exist, so that the rest of the forward pass is not computed."""


class PromptKV(Cache):
    """Keeps the keys and values of one prefill: per layer [rows, kv heads, bucket, head dim]."""

    def __init__(self, *, layers: int | None) -> None:
        super().__init__(layers=[])
        self.kept: list[tuple[Tensor, Tensor]] = []
        self._last = layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert layer_idx == len(self.kept)
        self.kept.append((key_states, value_states))
        if len(self.kept) == self._last:
            raise PromptRead
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@dataclass(frozen=True)
class Pages:
    """What attention needs to know about the extra pages. It travels through the model's keyword arguments."""

    owners: Tensor
    """The row of each extra page."""
    levels: list[tuple[Tensor, Tensor]]
    """(rows, pages) of the second pages, the third pages, and so on."""


class SlotCache(Cache):
    """The keys and values of all rows. Each row always has its first page; more come and go with its length."""

    def __init__(self, *, like: PromptKV, rows: int, length: int) -> None:
        super().__init__(layers=[])
        self._length = length
        self._page = min(PAGE_TOKENS, -(-length // SHORT_TILE) * SHORT_TILE)
        self._table = PageTable(rows=rows, pages_per_row=-(-length // self._page))
        keys, _ = like.kept[0]
        self._device, self._heads = keys.device, keys.shape[1]
        self._keys = [self._empty(keys) for keys, _ in like.kept]
        self._values = [self._empty(values) for _, values in like.kept]
        self._hidden = torch.finfo(keys.dtype).min
        self._mask = torch.full((self._table.total, self._page), self._hidden, dtype=keys.dtype, device=self._device)
        positions = torch.arange(self._page, device=self._device)
        self._mask_rows = torch.zeros(self._page, self._page, dtype=keys.dtype, device=self._device)
        self._mask_rows.masked_fill_(positions.unsqueeze(0) > positions.unsqueeze(1), self._hidden)
        self._mask[:rows, 0] = 0  # an unused row sees its first position, and nothing reads the result
        # Row i writes position p into line `_starts[i, head] + p` of the pages, which is in its current page.
        self._head_starts = torch.arange(self._heads, device=self._device) * self._page
        self._starts = torch.empty(rows, self._heads, dtype=torch.int64, device=self._device)
        self._mask_starts = torch.empty(rows, dtype=torch.int64, device=self._device)
        self._turn_to(np.arange(rows), np.zeros(rows, np.int64))
        self._at = self._starts.view(-1)
        self._high = rows
        self._pages = Pages(torch.empty(0, dtype=torch.int64, device=self._device), [])

    def _empty(self, like: Tensor) -> Tensor:
        shape = (self._table.total, like.shape[1], self._page, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def enter(self, slots: Array, positions: Array) -> None:
        """Start rows at `positions`. Earlier positions become visible once `place` has filled them."""
        levels = positions // self._page
        self._table.grow(slots, levels + 1)
        for level in range(int(levels.max()) + 1):
            here = levels >= level
            pages = self._tensor(self._table.pages(slots[here], level))
            shown = np.minimum(positions[here] - level * self._page, self._page - 1)
            self._mask[pages] = self._mask_rows[self._tensor(shown)]
        self._turn_to(slots, levels)
        self._changed()

    def place(self, kept: Sequence[tuple[Tensor, Tensor]], rows: Array, slots: Array) -> None:
        """Copy a prefill's rows into slots that have entered; `rows[i]` goes to `slots[i]`."""
        bucket = kept[0][0].shape[2]
        for level, start in enumerate(range(0, min(bucket, self._length), self._page)):
            pages = self._table.pages(slots, level)
            source, target = self._tensor(rows[pages != NO_PAGE]), self._tensor(pages[pages != NO_PAGE])
            size = min(self._page, bucket - start)
            for held_keys, held_values, (keys, values) in zip(self._keys, self._values, kept, strict=True):
                held_keys[target, :, :size] = keys[source, :, start : start + size]
                held_values[target, :, :size] = values[source, :, start : start + size]

    def advance(self, slots: Array, positions: Array) -> None:
        """Set the next positions of all rows in use. Rows at the start of a page get one."""
        crossing = (positions % self._page == 0) & (positions > 0)
        if not crossing.any():
            return
        slots, levels = slots[crossing], positions[crossing] // self._page
        pages = self._tensor(self._table.grow(slots, levels + 1))
        self._mask[pages] = self._hidden
        self._turn_to(slots, levels)
        self._changed()

    def leave(self, slots: Array) -> None:
        """Release these rows. They stay at position 0 until they are used again."""
        if self._table.release(slots):
            self._turn_to(slots, np.zeros_like(slots))
            self._changed()

    def remove_non_finite(self) -> None:
        """Set NaN and infinity to 0. Leftovers of a page's earlier row are masked, but 0 x NaN would be NaN."""
        for held in (*self._keys, *self._values):
            torch.nan_to_num_(held, nan=0.0, posinf=0.0, neginf=0.0)

    def _turn_to(self, slots: Array, levels: Array) -> None:
        """Make these rows write into their page of this level from now on."""
        pages = self._table.pages(slots, levels)
        where = self._tensor(slots)
        before = levels * self._page
        lines = self._tensor(pages * self._heads * self._page - before)
        self._starts[where] = lines.unsqueeze(1) + self._head_starts
        self._mask_starts[where] = self._tensor(pages * self._page - before)

    def _changed(self) -> None:
        self._high = self._table.high
        levels = [(self._tensor(rows), self._tensor(pages)) for rows, pages in self._table.levels()]
        self._pages = Pages(self._tensor(self._table.owners()), levels)

    def _tensor(self, values: Array | Sequence[int]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self._device)

    # -- a step -------------------------------------------------------------------------------------------------------

    def open(self, positions: Tensor) -> tuple[Tensor, Pages]:
        """Prepare the next step, which writes row i at `positions[i]`. Return its mask and pages."""
        self._mask.view(-1).index_fill_(0, self._mask_starts + positions, 0.0)
        self._at = (self._starts + positions.unsqueeze(1)).view(-1)
        return self._mask[: self._high, None, None], self._pages

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._written(self._keys[layer_idx], key_states), self._written(self._values[layer_idx], value_states)

    def _written(self, held: Tensor, fresh: Tensor) -> Tensor:
        size = held.shape[-1]
        held.view(-1, size).index_copy_(0, self._at, fresh.reshape(-1, size))
        return held[: self._high]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    pages: Pages | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [rows, heads, queries, size] in, [rows, queries, heads, size] out.

    Prefill (no `pages`): causal. Padding follows the prompt, so no prompt token sees it, and the mask is not read.
    Decode: `key`, `value` and the mask are pages; the rows' first pages come first.
    """
    if softcap is not None or s_aux is not None or position_bias is not None:
        raise NotImplementedError("its attention has soft caps, sinks or position biases")
    rows, heads, _, size = query.shape
    kv_heads = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    if pages is None:
        gqa = kv_heads != heads
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2), None
    grouped = (query * (scale * math.log2(math.e))).reshape(rows, kv_heads, heads // kv_heads, size)
    out = _attend_to_pages(grouped, key, value, attention_mask, pages)
    return out.view(rows, 1, heads, value.shape[-1]), None


def _attend_to_pages(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, pages: Pages) -> Tensor:
    """Return softmax · value with sums taken page by page: Σ over pages of 2^(score − the row's maximum).

    It uses powers of two, because `exp` on a CPU takes 20 times as long where its result underflows, which is at every
    hidden position.
    """
    rows = len(query)
    extra = bool(pages.levels)
    if extra:
        query = torch.cat((query, query.index_select(0, pages.owners)))
    scores = torch.matmul(query, key.transpose(2, 3))
    scores += mask
    highest = scores.amax(dim=-1, keepdim=True)
    if extra:
        of_rows = highest[:rows]
        for of_level, at in pages.levels:
            larger = torch.maximum(of_rows.index_select(0, of_level), highest.index_select(0, at))
            of_rows.index_copy_(0, of_level, larger)
        highest = torch.cat((of_rows, of_rows.index_select(0, pages.owners)))
    weights = scores.sub_(highest).exp2_()
    sums = weights.sum(dim=-1, keepdim=True, dtype=torch.float32)
    out = torch.matmul(weights, value)
    if extra:
        all_sums, all_out = sums, out
        sums, out = sums[:rows], out[:rows]
        for of_level, at in pages.levels:  # in the order of a row's positions, because the order decides the last bit
            sums.index_add_(0, of_level, all_sums.index_select(0, at))
            out.index_add_(0, of_level, all_out.index_select(0, at))
    return (out / sums).to(value.dtype)


AttentionInterface.register(ATTENTION, attend)


NO_PAGE = -1


class PageTable:
    """Assigns every extra page to at most one row."""

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
        """Return each row's page of that level; NO_PAGE if it has none."""
        found: Array = self._table[rows, levels]
        return found

    def grow(self, rows: Array, levels: Array) -> list[int]:
        """Give each row its first `levels` pages. Return the new ones."""
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
        """Take back the extra pages of these rows, and return them."""
        held = self._table[rows, 1:]
        freed: list[int] = held[held != NO_PAGE].tolist()
        self._table[rows, 1:] = NO_PAGE
        for page in freed:
            del self._extra[page]
            heapq.heappush(self._free, page)
        return freed

    def owners(self) -> Array:
        """Return the row of each page from `rows` to `high`; row 0 for a free page."""
        return np.array([self._extra.get(page, 0) for page in range(self.rows, self.high)], np.int64)

    def levels(self) -> Iterator[tuple[Array, Array]]:
        """Yield, from the second page on, the rows that have an n-th page, and that page, in the order of rows."""
        for pages in self._table.T[1:]:
            rows = np.flatnonzero(pages != NO_PAGE)
            if len(rows):
                yield rows, pages[rows]
