"""`DataProto`: a batch of samples, the form in which hooks and reward managers receive data.

    batch             TensorDict      prompts, responses, input_ids, …   ┐ one row per sample,
    non_tensor_batch  numpy arrays    data_source, extra_info, uid, …    ┘ under one index
    meta_info         dict            values for the batch as a whole

The API is the part of verl's `DataProto` that hooks use. docs/rewards.md lists the differences and their reasons.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from freewheel.errors import DataError, shown

if TYPE_CHECKING:
    from freewheel.rewards.batch import RewardBatch

TOKEN_COUNTS = "global_token_num"
"""The only key of `meta_info` that lists one value per row of the batch."""

Array = np.ndarray[Any, Any]
Keys = Iterable[str] | str | None
Value = TypeVar("Value")


@dataclass
class DataProtoItem:
    """One row: its tensors without the batch dimension, its values, and a copy of the batch's `meta_info`."""

    batch: TensorDictBase | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """A batch whose columns all have the same number of rows.

    Each `DataProto` owns its containers: the keys of `batch` and `non_tensor_batch`, and `meta_info` down to nested
    dicts and lists. Tensors and arrays are shared; slices, `chunk`, `split`, `select` and `union` copy none. Only `pop`
    changes the object it is called on; every other method returns a new `DataProto`.
    """

    def __init__(
        self,
        batch: TensorDictBase | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        if batch is not None and not isinstance(batch, TensorDictBase):
            raise DataError(f"batch is a {type(batch).__name__}: give a TensorDict, or use DataProto.from_dict")
        self.batch = None if batch is None else batch.copy()
        self.non_tensor_batch = {key: _as_column(key, values) for key, values in (non_tensor_batch or {}).items()}
        self.meta_info: dict[str, Any] = plain_copy(dict(meta_info or {}))
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Build a batch from columns by name. A list becomes an object column with one entry per row, even if its
        entries are lists."""
        batch = None
        if tensors:
            for key, tensor in tensors.items():
                _check_tensor(key, tensor)
            first = len(next(iter(tensors.values())))
            _check_rows("tensors", tensors, first)
            batch = _table(tensors, first)
        return cls(batch, non_tensors, meta_info)

    def check_consistency(self) -> None:
        """Raise `DataError` unless all columns have the same number of rows. The constructor calls this."""
        if self.batch is not None:
            if len(self.batch.batch_size) != 1:
                size = list(self.batch.batch_size)
                raise DataError(f"batch.batch_size = {size}: give one dimension, TensorDict(…, batch_size=[rows])")
            for key, value in self.batch.items():
                _check_tensor(key, value)
        for key, column in self.non_tensor_batch.items():
            if not isinstance(key, str):
                raise DataError(f"non_tensor_batch has the key {key!r}: keys must be text")
            _as_column(key, column)
        _check_rows("non_tensor_batch", self.non_tensor_batch, len(self))

    # -- rows ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(row) for row in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """Return a `DataProtoItem` for an integer. Return a `DataProto` for a slice, or for a list, array or tensor of
        indices (negative ones count from the end) or of truth values."""
        if isinstance(index, slice):
            rows = range(len(self))[index]
            return self._pick(index if rows.step > 0 else np.array(rows, np.int64))  # tensors have no reversed view
        if isinstance(index, list | range | np.ndarray | torch.Tensor) and getattr(index, "ndim", 1) > 0:
            return self._pick(_row_numbers(index, len(self)))
        truth = isinstance(index, bool) or str(getattr(index, "dtype", "")).endswith("bool")
        if truth or not hasattr(index, "__index__"):  # True would be taken for row 1
            raise TypeError(f"a DataProto has no index {shown(index)}: give an integer, a slice, or a list of rows")
        return self._item(operator.index(index))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Return each row `repeat_times` times: a a b b with `interleave`, else a b a b.

        The copies of a row share no dict or list: a note in the `extra_info` of one does not appear in the others.
        """
        if repeat_times < 0:
            raise DataError(f"repeat_times = {repeat_times}: give 0 or more")
        rows = np.arange(len(self))
        repeated = self._pick(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))
        for key, column in repeated.non_tensor_batch.items():
            if column.dtype == object and column.ndim == 1:
                repeated.non_tensor_batch[key] = object_array(map(plain_copy, column))
        return repeated

    def chunk(self, chunks: int) -> list[Self]:
        """Return exactly `chunks` parts whose sizes differ by at most one, larger parts first. Parts are empty if there
        are fewer rows than parts."""
        if chunks < 1:
            raise DataError(f"chunks = {chunks}: give 1 or more")
        size, larger = divmod(len(self), chunks)
        return self.split([size + (part < larger) for part in range(chunks)])

    def split(self, split_size: int | Sequence[int]) -> list[Self]:
        """Return parts of `split_size` rows, the last one shorter; no rows give no part. Or return parts of the given
        sizes."""
        if not isinstance(split_size, int):
            sizes = list(split_size)
            if any(size < 0 for size in sizes) or sum(sizes) != len(self):
                raise DataError(f"split_size = {shown(sizes)}: sizes must add up to {len(self)} rows, none below 0")
        elif split_size < 1:
            raise DataError(f"split_size = {split_size}: give 1 or more")
        else:
            sizes = [min(split_size, len(self) - start) for start in range(0, len(self), split_size)]
        ends = np.cumsum(sizes).tolist()
        return [self._pick(slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    # -- columns ------------------------------------------------------------------------------------------------------

    def select(self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None) -> Self:
        """Return only these keys; None means all."""
        return self._like(
            _choose("batch", tensors_of(self.batch), batch_keys),
            _choose("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys),
            len(self),
            _choose("meta_info", self.meta_info, meta_info_keys),
        )

    def pop(self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None) -> Self:
        """Move these keys from this `DataProto` into a new one; None means none."""
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        for key in tensors_of(popped.batch):
            assert self.batch is not None
            del self.batch[key]
        for key in popped.non_tensor_batch:
            del self.non_tensor_batch[key]
        for key in popped.meta_info:
            del self.meta_info[key]
        return popped

    def union(self, other: DataProto) -> Self:
        """Return the columns and `meta_info` of both. If both have a key, its values must be equal (NaN equals NaN)."""
        has_rows = [one for one in (self, other) if one.batch is not None or one.non_tensor_batch]
        if len({len(one) for one in has_rows}) > 1:
            raise DataError(f"union of {len(self)} and {len(other)} rows: both sides must have the same rows")
        lead = other if self.batch is None else self
        tensors = _unite("batch", tensors_of(self.batch), tensors_of(other.batch))
        arrays = _unite("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch)
        table = lead._like(tensors, {}, max(len(self), len(other)), {}).batch
        return type(self)(table, arrays, _unite("meta_info", self.meta_info, other.meta_info))

    @classmethod
    def concat(cls, data: Iterable[DataProto]) -> Self:
        """Return the rows of all parts, in order.

        - Columns: all parts must have the same keys. Tensors must agree in dtype, device and shape of a row. Arrays of
          different types become object columns.
        - `meta_info`: a key must be equal in all parts that have it. `global_token_num` is joined if each list has an
          entry per row of its part.
        """
        parts = list(data)
        if not parts:
            raise DataError("concat of no parts: give at least one DataProto")
        tensors = _join("batch", [tensors_of(part.batch) for part in parts], _join_tensors)
        arrays = _join("non_tensor_batch", [part.non_tensor_batch for part in parts], _join_arrays)
        counts = _join_token_counts(parts)
        meta_info: dict[str, Any] = {}
        for part in parts:
            meta_info = _unite("meta_info", meta_info, part.meta_info | counts)
        return cls(parts[0]._like(tensors, {}, sum(map(len, parts)), {}).batch, arrays, meta_info)

    def to(self, device: torch.device | str | int) -> Self:
        """Return a copy with the tensors on `device`."""
        batch = None if self.batch is None else self.batch.to(device)
        return type(self)(batch, self.non_tensor_batch, self.meta_info)

    def __eq__(self, other: object) -> bool:
        """Compare columns and `meta_info`; NaN equals NaN."""
        if not isinstance(other, DataProto):
            return NotImplemented
        return (
            len(self) == len(other)
            and _same(tensors_of(self.batch), tensors_of(other.batch))
            and _same(self.non_tensor_batch, other.non_tensor_batch)
            and _same(self.meta_info, other.meta_info)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        columns = tensors_of(self.batch).items()
        tensors = [f"{key} {str(value.dtype)[6:]}{list(value.shape[1:])}" for key, value in columns]
        names = ", ".join([*tensors, *self.non_tensor_batch])
        return f"<{type(self).__name__} of {len(self)} rows: {names or 'no columns'}; meta_info: {[*self.meta_info]}>"

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _like(
        self, tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, Any], rows: int, meta_info: Mapping[str, Any]
    ) -> Self:
        has_batch = bool(tensors) or self.batch is not None
        device = None if self.batch is None else self.batch.device
        return type(self)(_table(tensors, rows, device) if has_batch else None, arrays, meta_info)

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return DataProtoItem(
            None if self.batch is None else self.batch[row],
            {key: column[row] for key, column in self.non_tensor_batch.items()},
            plain_copy(self.meta_info),
        )

    def _pick(self, rows: slice | Array) -> Self:
        """Return views for a slice, copies for row numbers."""
        places: Any = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        tensors = {
            key: tensor[places if isinstance(rows, slice) else places.to(tensor.device)]
            for key, tensor in tensors_of(self.batch).items()
        }
        arrays = {key: column[rows] for key, column in self.non_tensor_batch.items()}
        count = len(range(len(self))[rows]) if isinstance(rows, slice) else len(rows)
        return self._like(tensors, arrays, count, self.meta_info)


def object_array(values: Iterable[Any]) -> Array:
    """Return a column with one entry per value, whatever the values are.

    `np.array([[1], [2]], dtype=object)` would have two dimensions, and its rows would no longer be lists.
    """
    rows = list(values)
    column = np.empty(len(rows), dtype=object)
    for index, value in enumerate(rows):
        column[index] = value
    return column


def tensors_of(batch: TensorDictBase | None) -> dict[str, torch.Tensor]:
    return {} if batch is None else cast("dict[str, torch.Tensor]", dict(batch.items()))  # see `_check_tensor`


def plain_copy(value: Any) -> Any:
    """Copy dicts, lists and tuples at any depth. Tensors, arrays and other objects are shared: they may be large, or
    impossible to copy."""
    if isinstance(value, dict):
        return {key: plain_copy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain_copy(inner) for inner in value]
    return tuple(map(plain_copy, value)) if type(value) is tuple else value


def _table(tensors: Mapping[str, torch.Tensor], rows: int, device: torch.device | None = None) -> TensorDict:
    return TensorDict(dict(tensors), batch_size=[rows], device=device)


def _as_column(key: str, values: Any) -> Array:
    """Return a numpy array unchanged, and a list or a tuple as an array of objects."""
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise DataError(f"non_tensor_batch[{key!r}] = {shown(values)}: give an array with one entry per row")
        return values
    if isinstance(values, list | tuple):
        return object_array(values)
    remedy = "put it into the tensors" if isinstance(values, torch.Tensor) else "give a numpy array or a list"
    raise DataError(f"non_tensor_batch[{key!r}] is a {type(values).__name__}: {remedy}, with one entry per row")


def _check_tensor(key: object, value: object) -> None:
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


def _check_rows(kind: str, columns: Mapping[str, Any], expected: int) -> None:
    for key, column in columns.items():
        if len(column) != expected:
            raise DataError(
                f"{kind}[{key!r}] has {len(column)} rows where the batch has {expected}: give every column one entry "
                "per row, and put values for the whole batch into meta_info"
            )


def _row_numbers(rows: Any, count: int) -> Array:
    """Return indices from 0 to `count` for a list, array or tensor of indices or of truth values."""
    numbers = rows.detach().cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "biu"):
        raise TypeError(f"rows = {shown(rows)}: give one list of integers, or one of truth values")
    chosen: Array = np.arange(count)[numbers if numbers.size else numbers.astype(np.int64)]
    return chosen


def _choose(kind: str, columns: Mapping[str, Value], keys: Keys) -> dict[str, Value]:
    """Return the columns with these keys, all for None. An unknown key is an error: it is usually a typing error, and
    the missing column would be noticed much later."""
    if keys is None:
        return dict(columns)
    names = [keys] if isinstance(keys, str) else list(keys)
    if unknown := [key for key in names if key not in columns]:
        raise DataError(f"{kind} has no {shown(unknown)}: it has {[*columns]}")
    return {key: columns[key] for key in names}


def _unite(kind: str, left: Mapping[str, Value], right: Mapping[str, Value]) -> dict[str, Value]:
    for key in left.keys() & right.keys():
        if not _same(left[key], right[key]):
            raise DataError(
                f"{kind}[{key!r}] differs: {shown(left[key])} and {shown(right[key])}; pop it from the wrong side"
            )
    return {**right, **left}


def _join(
    kind: str, parts: Sequence[Mapping[str, Value]], join: Callable[[str, Sequence[Value]], Value]
) -> dict[str, Value]:
    for place, columns in enumerate(parts):
        if columns.keys() != parts[0].keys():
            raise DataError(
                f"{kind} of part {place} has the keys {[*columns]}, of part 0 {[*parts[0]]}: pop the keys that not all "
                "parts have, or add them"
            )
    return {key: join(key, [columns[key] for columns in parts]) for key in parts[0]}


def _join_tensors(key: str, columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate columns. Types are not promoted: token ids that became floats would be noticed much too late."""
    forms = {f"{str(column.dtype)[6:]}{list(column.shape[1:])} on {column.device}" for column in columns}
    if len(forms) > 1:
        raise DataError(
            f"batch[{key!r}] is {' and '.join(sorted(forms))} in different parts: pad to one length, "
            "convert to one dtype, or move to one device first"
        )
    return torch.cat(list(columns))


def _join_arrays(key: str, columns: Sequence[Array]) -> Array:
    """Concatenate columns. If their types differ, the result holds objects, so that no value is converted."""
    shapes = {column.shape[1:] for column in columns}
    if len(shapes) > 1:
        raise DataError(
            f"non_tensor_batch[{key!r}] has rows of the shapes {sorted(shapes)}: make them equal, "
            "or use object_array(rows), whose rows may differ"
        )
    alike = len({column.dtype for column in columns}) == 1 or all(column.dtype.kind == "U" for column in columns)
    return np.concatenate(columns if alike else [column.astype(object) for column in columns])


def _join_token_counts(parts: Sequence[DataProto]) -> dict[str, list[int]]:
    """Join the lists of the parts if each has an entry per row of its part. A chunk still has the list of the whole
    batch; then the general rule applies."""
    lists = [part.meta_info.get(TOKEN_COUNTS) for part in parts if len(part)]
    lengths = [len(part) for part in parts if len(part)]
    if not lists or not all(
        isinstance(counts, list) and len(counts) == length for counts, length in zip(lists, lengths, strict=True)
    ):
        return {}
    return {TOKEN_COUNTS: [count for counts in lists for count in counts or ()]}


def _same(left: Any, right: Any) -> bool:
    """Compare content at any depth. NaN equals NaN; tensors and arrays must also agree in type and shape."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        right = right.to(left.device)
        return bool(((left == right) | ((left != left) & (right != right))).all())
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.dtype == object:
            return all(map(_same, left.flat, right.flat))
        return np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(_same, left, right))
    if type(left) is not type(right) and not (np.isscalar(left) and np.isscalar(right)):
        return False  # a tensor and a number, for example, whose == gives neither yes nor no
    try:
        return bool(left == right or (left != left and right != right))
    except (TypeError, ValueError, RuntimeError):  # an object of the user whose == raises
        return False


if TYPE_CHECKING:
    _fits_reward_managers: type[RewardBatch] = DataProto  # mypy checks here that reward managers accept it
