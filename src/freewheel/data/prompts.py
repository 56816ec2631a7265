"""`PromptStream`: which prompt an ordinal stands for. Admission asks it; a resumed run asks it again.

    ordinal ─▶ (epoch, place in the epoch) ─▶ the epoch's permutation ─▶ row ─▶ Prompt

A pure mapping: it has no position of its own, so nothing has to be skipped, saved or replayed when a run resumes.
Needs no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from freewheel.data.group import Array, Prompt
from freewheel.errors import ConfigError, DataError

KEPT_EPOCHS = 4
"""Permutations held at a time. Ordinals in flight span one epoch's end, or several where there are few rows."""
KEPT_PROMPTS = 4096
"""Rendered prompts held at a time: those in flight, for a re-issue soon after."""
SEED_BITS = 64


class PromptStream:
    """The same rows, seed and settings give the same prompt for an ordinal: on any machine, with any version of numpy,
    in whatever order they are asked for. Each epoch has every row exactly once."""

    def __init__(
        self,
        rows: Sequence[Any],
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
        render: Callable[[Any], Prompt] | None = None,
    ) -> None:
        """`render` makes a `Prompt` of a row; without it the rows are prompts already. `epochs=None`: without end."""
        if not len(rows):
            raise DataError("rows = []: a prompt stream needs at least one prompt")
        if epochs is not None and epochs < 1:
            raise ConfigError("data.epochs", epochs, "give 1 or more, or null for as many as the run needs")
        if not isinstance(seed, int) or not 0 <= seed < 1 << SEED_BITS:
            raise ConfigError("seed", seed, f"give a whole number from 0 to 2**{SEED_BITS} - 1")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._render = render
        self._orders: OrderedDict[int, Array] = OrderedDict()
        self._prompts: OrderedDict[int, Prompt] = OrderedDict()

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._rows)

    @property
    def total(self) -> int | None:
        """Ordinals in all; None where there is no end."""
        return None if self._epochs is None else self._epochs * len(self._rows)

    def place(self, ordinal: int) -> tuple[int, int]:
        """The epoch and the index of the row. An ordinal past the end is an IndexError."""
        if ordinal < 0 or (self.total is not None and ordinal >= self.total):
            raise IndexError(f"ordinal {ordinal} of a stream with {self.total} prompts")
        epoch, within = divmod(ordinal, len(self._rows))
        return epoch, int(self._order(epoch)[within]) if self._shuffle else within

    def prompt(self, ordinal: int) -> Prompt:
        _, index = self.place(ordinal)
        if self._render is None:
            prompt: Prompt = self._rows[index]
            return prompt
        if index not in self._prompts:
            self._prompts[index] = self._render(self._rows[index])
            if len(self._prompts) > KEPT_PROMPTS:
                self._prompts.popitem(last=False)
        return self._prompts[index]

    def _order(self, epoch: int) -> Array:
        if epoch not in self._orders:
            self._orders[epoch] = _permutation(len(self._rows), self._seed, epoch)
            if len(self._orders) > KEPT_EPOCHS:
                self._orders.popitem(last=False)
        return self._orders[epoch]


def _permutation(size: int, seed: int, epoch: int) -> Array:
    """Row numbers sorted by a hash of (seed, epoch, row).

    numpy's own shuffles may change between its versions, and a run that is resumed under another one would then skip
    some prompts and repeat others. The hash has no two equal values, so the order is fixed."""
    start = _mix(_mix(np.array([seed], np.uint64)) + np.uint64(epoch))
    return np.argsort(_mix(start + np.arange(size, dtype=np.uint64)), kind="stable")


def _mix(values: Array) -> Array:
    """splitmix64 (Steele, Lea, Flood 2014): a bijection on 64 bits in which every bit of the input moves half of the
    output's. Overflow is meant."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = values ^ (values >> np.uint64(31))
    return mixed
