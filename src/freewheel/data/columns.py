"""One column of a batch: build, compare, copy and join it, for tensors and numpy arrays alike.

Used by `DataProto` and by `freewheel.data.padded`. Nothing here knows a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase

from freewheel.errors import DataError, shown

Array = np.ndarray[Any, Any]
_ATOMS = (int, float, str, bool, type(None))
"""Values that need no copy. `plain_copy` tests for them first because `meta_info` holds long lists of numbers."""


def object_array(values: Iterable[Any]) -> Array:
    """Return a column with one entry per value, whatever the values are.

    `np.array([[1], [2]], dtype=object)` would have two dimensions, and its rows would not be lists any more.
    """
    rows = list(values)
    column = np.empty(len(rows), dtype=object)
    for index, value in enumerate(rows):
        column[index] = value
    return column


def as_column(key: str, values: Any) -> Array:
    """Return a numpy array unchanged, and a list or a tuple as an array of objects."""
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise DataError(f"non_tensor_batch[{key!r}] = {shown(values)}: give an array with one entry per row")
        return values
    if isinstance(values, list | tuple):
        return object_array(values)
    remedy = "put it into the tensors" if isinstance(values, torch.Tensor) else "give a numpy array or a list"
    raise DataError(f"non_tensor_batch[{key!r}] is a {type(values).__name__}: {remedy}, with one entry per row")


def check_tensor(key: object, value: object) -> None:
    if not isinstance(key, str):
        raise DataError(f"batch has the key {key!r}: keys must be text")
    if not isinstance(value, torch.Tensor):
        raise DataError(
            f"batch[{key!r}] is a {type(value).__name__}: a batch holds tensors only; flatten nested ones, "
            "and put other values into non_tensor_batch"
        )
    if value.is_nested or value.layout is not torch.strided:
        raise DataError(f"batch[{key!r}] has rows of different lengths or is sparse: pad it to a dense tensor")
    if value.dim() == 0:
        raise DataError(f"batch[{key!r}] = {shown(value)}: give a tensor with one entry per row")


def tensors_of(batch: TensorDictBase | None) -> dict[str, torch.Tensor]:
    return {} if batch is None else cast("dict[str, torch.Tensor]", dict(batch.items()))  # see `check_tensor`


def plain_copy(value: Any) -> Any:
    """Copy dicts, lists, tuples and sets at any depth. Tensors, arrays and other objects are shared: they may be large,
    or impossible to copy."""
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps what a subclass adds, such as a default
        for key, inner in value.items():
            copied[key] = plain_copy(inner)
        return copied
    if isinstance(value, list):
        entries = copy.copy(value)
        entries[:] = [inner if type(inner) in _ATOMS else plain_copy(inner) for inner in value]
        return entries
    if isinstance(value, tuple):
        inner_copies = (plain_copy(inner) for inner in value)
        return value._make(inner_copies) if hasattr(value, "_make") else tuple(inner_copies)
    return copy.copy(value) if isinstance(value, set) else value


def same(left: Any, right: Any) -> bool:
    """Compare content at any depth. NaN equals NaN; tensors and arrays must also agree in type and shape."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and _same_tensor(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and _same_array(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        kinds = isinstance(left, list) is isinstance(right, list)
        return kinds and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float | np.floating) and isinstance(right, float | np.floating) and left != left:
        return bool(right != right)
    try:
        return bool(left == right)
    except (TypeError, ValueError, RuntimeError):  # an object whose == gives neither a yes nor a no
        return False


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    right = right.to(left.device)
    return bool(((left == right) | ((left != left) & (right != right))).all())


def _same_array(left: Array, right: Array) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype == object:
        return all(map(same, left.flat, right.flat))
    return np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")


def take_rows(column: Array, rows: Array, repeated: Array) -> Array:
    """Return the rows of a column.

    `repeated` are the positions in `rows` that name a row again. Each gets its own copy of the row's dicts and lists;
    otherwise a note made in one would appear in all.
    """
    taken: Array = column[rows]
    if column.dtype == object:
        for position in repeated:
            if taken.ndim == 1:
                taken[position] = plain_copy(taken[position])
            else:
                taken[position].flat = object_array(map(plain_copy, taken[position].flat))
    return taken


def join_arrays(key: str, columns: Sequence[Array]) -> Array:
    """Concatenate columns. If their types differ, the result holds objects, so that no value is converted."""
    shapes = {column.shape[1:] for column in columns}
    if len(shapes) > 1:
        raise DataError(
            f"non_tensor_batch[{key!r}] has rows of the shapes {sorted(shapes)}: make them equal, "
            "or use object_array(rows), whose rows may differ"
        )
    alike = len({column.dtype for column in columns}) == 1 or all(column.dtype.kind == "U" for column in columns)
    return np.concatenate(columns if alike else [column.astype(object) for column in columns])


def join_tensors(key: str, columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate columns. Types are not promoted: token ids that became floats would be noticed much too late."""
    forms = {f"{str(column.dtype)[6:]}{list(column.shape[1:])} on {column.device}" for column in columns}
    if len(forms) > 1:
        raise DataError(
            f"batch[{key!r}] is {' and '.join(sorted(forms))} in different parts: pad to one length, "
            "convert to one dtype, or move to one device first"
        )
    return torch.cat(list(columns))
