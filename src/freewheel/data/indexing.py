"""Which rows, which keys: what a caller names, checked and made uniform before a column is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from freewheel.data.columns import Array
from freewheel.errors import DataError, shown

Keys = Iterable[str] | str | None
Rows = Sequence[int] | Sequence[bool] | Array | torch.Tensor
Value = TypeVar("Value")


def row_numbers(rows: Rows, count: int) -> Array:
    """Indices from 0 to `count` for a list, array or tensor of indices or of truth values."""
    numbers = rows.detach().cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "biu"):
        raise TypeError(f"rows = {shown(rows)}: give one list of integers, or one of truth values")
    if numbers.dtype == bool:
        if len(numbers) != count:
            raise IndexError(f"a mask of {len(numbers)} entries for {count} rows: give one for each row")
        return np.flatnonzero(numbers)
    numbers = numbers.astype(np.int64)
    outside = numbers[(numbers < -count) | (numbers >= count)]
    if outside.size:
        raise IndexError(f"row {outside[0]} of {count}")
    return np.where(numbers < 0, numbers + count, numbers)


def check_rows(kind: str, rows: Mapping[str, int], expected: int) -> None:
    for key, count in rows.items():
        if count != expected:
            raise DataError(
                f"{kind}[{key!r}] has {count} rows where the batch has {expected}: give every column one entry per "
                "row, and keep what holds for the whole batch in meta_info"
            )


def listed(keys: Keys) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys or ())


def chosen(kind: str, columns: Mapping[str, Value], keys: Keys) -> dict[str, Value]:
    """The columns with these keys, all for None. A key that is not there is an error: it is a typing error more often
    than not, and the column would be missed much later."""
    if keys is None:
        return dict(columns)
    names = listed(keys)
    if unknown := [key for key in names if key not in columns]:
        raise DataError(f"{kind} has no {shown(unknown)}: it has {[*columns]}")
    return {key: columns[key] for key in names}


def renamed(columns: Mapping[str, Value], names: Mapping[str, str]) -> dict[str, Value]:
    result: dict[str, Value] = {}
    for key, column in columns.items():
        name = names.get(key, key)
        if name in result:
            raise DataError(f"new_keys has {name!r}: there is such a column already; pop it, or choose another name")
        result[name] = column
    return result
