"""`DataProto`: a batch of samples, the form in which hooks and reward managers receive data.

    batch             TensorDict      prompts, responses, input_ids, …   ┐ one row per sample,
    non_tensor_batch  numpy arrays    data_source, extra_info, uid, …    ┘ under one index
    meta_info         dict            values for the batch as a whole

The API is the part of verl's `DataProto` that people use. docs/rewards.md lists the differences and their reasons.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from freewheel.data.columns import (
    Array,
    as_column,
    check_tensor,
    join_arrays,
    join_tensors,
    object_array,
    plain_copy,
    same,
    take_rows,
    tensors_of,
)
from freewheel.errors import DataError, shown

if TYPE_CHECKING:
    from freewheel.rewards.batch import RewardBatch

TOKEN_COUNTS = "global_token_num"
"""The only key of `meta_info` that lists one value per row of the batch."""

Keys = Iterable[str] | str | None
Rows = Sequence[int] | Sequence[bool] | Array | torch.Tensor
Missing = Literal["error", "drop"] | Mapping[str, Any]
Value = TypeVar("Value")

_Slice = slice
"""The builtin, under a name that the method `slice` does not hide."""


@dataclass
class DataProtoItem:
    """One row: its tensors without the batch dimension, its values, and a copy of the batch's `meta_info`."""

    batch: TensorDictBase | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """A batch whose columns all have the same number of rows.

    Each `DataProto` owns its containers: the keys of `batch` and `non_tensor_batch`, and `meta_info` down to nested
    dicts and lists. Tensors and arrays are shared; slices, `chunk`, `split`, `select`, `rename` and `union` copy none.
    Only `pop` and `reorder` change the object they are called on; every other method returns a new `DataProto`.
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
        self.non_tensor_batch = {key: as_column(key, values) for key, values in (non_tensor_batch or {}).items()}
        self.meta_info = dict(meta_info or {})
        self.check_consistency()

    @property
    def meta_info(self) -> dict[str, Any]:
        """Values for the batch as a whole. An assigned dict is copied."""
        return self._meta_info

    @meta_info.setter
    def meta_info(self, value: Mapping[str, Any]) -> None:
        self._meta_info: dict[str, Any] = plain_copy(dict(value))

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
                check_tensor(key, tensor)
            first = len(next(iter(tensors.values())))
            _check_rows("tensors", tensors, first)
            batch = _table(tensors, first)
        return cls(batch, non_tensors, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Build a batch from one dict: tensors go into `batch`, arrays and lists into `non_tensor_batch`."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        return cls.from_dict(tensors, {key: value for key, value in data.items() if key not in tensors}, meta_info)

    def check_consistency(self) -> None:
        """Raise `DataError` unless all columns have the same number of rows. The constructor calls this."""
        if self.batch is not None:
            if len(self.batch.batch_size) != 1:
                size = list(self.batch.batch_size)
                raise DataError(f"batch.batch_size = {size}: give one dimension, TensorDict(…, batch_size=[rows])")
            for key, value in self.batch.items():
                check_tensor(key, value)
        for key, column in self.non_tensor_batch.items():
            if not isinstance(key, str):
                raise DataError(f"non_tensor_batch has the key {key!r}: keys must be text")
            as_column(key, column)
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
        indices or of truth values."""
        if isinstance(index, _Slice):
            return self._slice(index)
        if isinstance(index, list | range | np.ndarray | torch.Tensor) and getattr(index, "ndim", 1) > 0:
            return self.select_idxs(index)
        truth = isinstance(index, bool) or str(getattr(index, "dtype", "")).endswith("bool")
        if truth or not hasattr(index, "__index__"):  # True would be taken for row 1
            raise TypeError(f"a DataProto has no index {shown(index)}: give an integer, a slice, or a list of rows")
        return self._item(operator.index(index))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return `data[start:end:step]`, with the bounds of a list."""
        return self._slice(_Slice(start, end, step))

    def select_idxs(self, idxs: Rows) -> Self:
        """Return the rows with these indices (negative ones count from the end), or those where a mask is true."""
        return self._take(_row_numbers(idxs, len(self)))

    def reorder(self, indices: Rows) -> None:
        """Reorder the rows in place, as `list.sort` does. `data[indices]` returns a copy instead."""
        rows = _row_numbers(indices, len(self))
        if not np.array_equal(np.sort(rows), np.arange(len(self))):
            raise DataError(
                f"indices = {shown(indices)}: name each of {len(self)} rows once; data[indices] may leave some out"
            )
        ordered = self._take(rows)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Return each row `repeat_times` times: a a b b with `interleave`, else a b a b.

        The copies of a row share no dict or list: a note in the `extra_info` of one does not appear in the others.
        """
        if repeat_times < 0:
            raise DataError(f"repeat_times = {repeat_times}: give 0 or more")
        rows = np.arange(len(self))
        return self._take(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

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
        return [self._slice(_Slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, bool] | None = None,
    ) -> Iterator[Self]:
        """Return mini batches of the rows as they are now, over `epochs` passes.

        A seed shuffles the rows, differently in each pass. `dataloader_kwargs` may override this (`shuffle`), and may
        leave out a shorter last mini batch (`drop_last`).
        """
        options = {"shuffle": seed is not None, "drop_last": False, **(dataloader_kwargs or {})}
        if unknown := options.keys() - {"shuffle", "drop_last"}:
            raise DataError(f"dataloader_kwargs has {sorted(unknown)}: only shuffle and drop_last are known")
        if mini_batch_size < 1 or epochs < 0:
            raise DataError(f"mini_batch_size = {mini_batch_size}, epochs = {epochs}: give at least 1 and 0")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return self.select()._mini_batches(mini_batch_size, epochs, generator, **options)

    # -- columns ------------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return only these keys; None means all. With `deepcopy`, tensors and arrays are copied too."""
        tensors = _choose("batch", tensors_of(self.batch), batch_keys)
        arrays = _choose("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys)
        meta_info = _choose("meta_info", self.meta_info, meta_info_keys)
        if deepcopy:
            tensors = {key: tensor.clone() for key, tensor in tensors.items()}
            everything = np.arange(len(self))
            arrays = {key: take_rows(column, everything, everything) for key, column in arrays.items()}
        return self._like(tensors, arrays, len(self), meta_info)

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

    def rename(self, old_keys: Sequence[str] | str, new_keys: Sequence[str] | str) -> Self:
        """Return the batch with columns under other names, tensors or not."""
        old, new = _as_list(old_keys), _as_list(new_keys)
        if len(old) != len(new):
            raise DataError(f"old_keys = {old}, new_keys = {new}: give as many new names as old ones")
        tensors = tensors_of(self.batch)
        if unknown := [key for key in old if key not in tensors and key not in self.non_tensor_batch]:
            raise DataError(f"old_keys has {unknown}: the columns are {[*tensors, *self.non_tensor_batch]}")
        names = dict(zip(old, new, strict=True))
        return self._like(_rename(tensors, names), _rename(self.non_tensor_batch, names), len(self), self.meta_info)

    # -- joining ------------------------------------------------------------------------------------------------------

    def union(self, other: DataProto, *, meta_info: Mapping[str, Any] | None = None) -> Self:
        """Return the columns of both. If both have a key, its values must be equal (NaN equals NaN), in `meta_info`
        too unless the argument `meta_info` gives the value."""
        if not _is_bare(self) and not _is_bare(other) and len(self) != len(other):
            raise DataError(f"union of {len(self)} and {len(other)} rows: both sides must have the same rows")
        tensors = _unite("batch", tensors_of(self.batch), tensors_of(other.batch))
        arrays = _unite("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch)
        merged = _merge_meta([self, other], dict(meta_info or {}), "union")
        lead = other if self.batch is None else self
        return type(self)(lead._like(tensors, {}, max(len(self), len(other)), {}).batch, arrays, merged)

    @classmethod
    def concat(
        cls,
        data: Iterable[DataProto],
        *,
        missing: Missing = "error",
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return the rows of all parts, in order.

        - Columns: all parts with rows must have the same keys. `missing={key: value}` fills a key that a part lacks
          with that value; `missing="drop"` leaves out keys that not all parts have.
        - Tensors must agree in dtype, device and shape of a row. Arrays of different types become object columns.
        - `meta_info`: a key that is equal in all parts that have it is kept, and `global_token_num` is joined if each
          list has an entry per row of its part. Anything else is an error unless the argument `meta_info` gives the
          value.
        """
        parts = list(data)
        if not parts:
            raise DataError("concat of no parts: give at least one DataProto")
        if isinstance(missing, str) and missing not in ("error", "drop"):
            raise DataError(f"missing = {missing!r}: 'error', 'drop', or a value for each key that some parts lack")
        # Parts without rows need not have the same columns: nothing is lost with them.
        bearing = [(place, part) for place, part in enumerate(parts) if len(part)]
        if not bearing:
            has_columns = [bool(part.non_tensor_batch or tensors_of(part.batch)) for part in parts]
            place = has_columns.index(True) if any(has_columns) else 0
            bearing = [(place, parts[place])]
        tensors = _concat("batch", [(p, len(d), tensors_of(d.batch)) for p, d in bearing], missing, join_tensors)
        arrays = _concat(
            "non_tensor_batch", [(p, len(d), d.non_tensor_batch) for p, d in bearing], missing, join_arrays
        )
        batch = None
        if tensors or all(part.batch is not None for _, part in bearing):
            devices = {part.batch.device for _, part in bearing if part.batch is not None}
            rows = sum(len(part) for _, part in bearing)
            batch = _table(tensors, rows, devices.pop() if len(devices) == 1 else None)
        known = dict(meta_info or {})
        if TOKEN_COUNTS not in known:
            known = _join_token_counts(parts) | known
        return cls(batch, arrays, _merge_meta(parts, known, "concat"))

    def to(self, device: torch.device | str | int) -> Self:
        """Return a copy with the tensors on `device`."""
        return type(self)(
            self.batch if self.batch is None else self.batch.to(device), self.non_tensor_batch, self.meta_info
        )

    # -- transport and comparison -------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        """Pickle for transport between processes. A slice is sent without the rest of its batch."""
        tensors = device = None
        if self.batch is not None:
            tensors = {key: _compact(tensor) for key, tensor in tensors_of(self.batch).items()}
            device = self.batch.device
        return _unpickle, (type(self), tensors, len(self), device, self.non_tensor_batch, self.meta_info)

    def __eq__(self, other: object) -> bool:
        """Compare columns and `meta_info`; NaN equals NaN."""
        if not isinstance(other, DataProto):
            return NotImplemented
        return (
            len(self) == len(other)
            and same(tensors_of(self.batch), tensors_of(other.batch))
            and same(self.non_tensor_batch, other.non_tensor_batch)
            and same(self.meta_info, other.meta_info)
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

    def _slice(self, bounds: _Slice) -> Self:
        rows = range(len(self))[bounds]
        if rows.step < 0:  # tensors have no view in reverse
            return self._take(np.array(rows, dtype=np.int64))
        tensors = {key: tensor[bounds] for key, tensor in tensors_of(self.batch).items()}
        arrays = {key: column[bounds] for key, column in self.non_tensor_batch.items()}
        return self._like(tensors, arrays, len(rows), self.meta_info)

    def _take(self, rows: Array) -> Self:
        repeated = np.ones(len(rows), dtype=bool)
        repeated[np.unique(rows, return_index=True)[1]] = False
        places = torch.from_numpy(rows)
        tensors = {key: tensor[places.to(tensor.device)] for key, tensor in tensors_of(self.batch).items()}
        again = np.flatnonzero(repeated)
        arrays = {key: take_rows(column, rows, again) for key, column in self.non_tensor_batch.items()}
        return self._like(tensors, arrays, len(rows), self.meta_info)

    def _mini_batches(
        self, size: int, epochs: int, generator: torch.Generator | None, *, shuffle: bool, drop_last: bool
    ) -> Iterator[Self]:
        last = len(self) - size if drop_last else len(self) - 1
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=generator).numpy() if shuffle else None
            for start in range(0, last + 1, size):
                bounds = _Slice(start, start + size)
                yield self._slice(bounds) if order is None else self._take(order[bounds])


def _table(tensors: Mapping[str, torch.Tensor], rows: int, device: torch.device | None = None) -> TensorDict:
    return TensorDict(dict(tensors), batch_size=[rows], device=device)


def _is_bare(data: DataProto) -> bool:
    """Return whether `data` has nothing with rows: only `meta_info`."""
    return data.batch is None and not data.non_tensor_batch


def _unpickle(
    cls: type[DataProto],
    tensors: Mapping[str, torch.Tensor] | None,
    rows: int,
    device: torch.device | None,
    non_tensor_batch: Mapping[str, Any],
    meta_info: Mapping[str, Any],
) -> DataProto:
    return cls(None if tensors is None else _table(tensors, rows, device), non_tensor_batch, meta_info)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in memory of its own size. A slice would be sent with everything it was cut from."""
    own = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == own else tensor.clone(memory_format=torch.contiguous_format)


# -- rows and keys as callers name them -------------------------------------------------------------------------------


def _row_numbers(rows: Rows, count: int) -> Array:
    """Return indices from 0 to `count` for a list, array or tensor of indices or of truth values."""
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


def _check_rows(kind: str, columns: Mapping[str, Any], expected: int) -> None:
    for key, column in columns.items():
        if len(column) != expected:
            raise DataError(
                f"{kind}[{key!r}] has {len(column)} rows where the batch has {expected}: give every column one entry "
                "per row, and put values for the whole batch into meta_info"
            )


def _as_list(keys: Keys) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys or ())


def _choose(kind: str, columns: Mapping[str, Value], keys: Keys) -> dict[str, Value]:
    """Return the columns with these keys, all for None. An unknown key is an error: it is usually a typing error, and
    the missing column would be noticed much later."""
    if keys is None:
        return dict(columns)
    names = _as_list(keys)
    if unknown := [key for key in names if key not in columns]:
        raise DataError(f"{kind} has no {shown(unknown)}: it has {[*columns]}")
    return {key: columns[key] for key in names}


def _rename(columns: Mapping[str, Value], names: Mapping[str, str]) -> dict[str, Value]:
    result: dict[str, Value] = {}
    for key, column in columns.items():
        name = names.get(key, key)
        if name in result:
            raise DataError(f"new_keys has {name!r}: there is such a column already; pop it, or choose another name")
        result[name] = column
    return result


# -- the rules of `union` and `concat` --------------------------------------------------------------------------------


def _unite(kind: str, left: Mapping[str, Value], right: Mapping[str, Value]) -> dict[str, Value]:
    for key in left.keys() & right.keys():
        if not same(left[key], right[key]):
            raise DataError(
                f"{kind}[{key!r}] differs: {shown(left[key])} and {shown(right[key])}; "
                f"pop it from the wrong side, or rename it"
            )
    return {**left, **{key: right[key] for key in right if key not in left}}


def _concat(
    kind: str,
    parts: Sequence[tuple[int, int, Mapping[str, Value]]],
    missing: Missing,
    join: Callable[[str, Sequence[Value]], Value],
) -> dict[str, Value]:
    """Join the columns of parts, each given as (place, rows, columns), in the order in which keys are met first."""
    joined: dict[str, Value] = {}
    for key in dict.fromkeys(key for _, _, columns in parts for key in columns):
        lacking = [place for place, _, columns in parts if key not in columns]
        if lacking and missing == "drop":
            continue
        if lacking and (isinstance(missing, str) or key not in missing):
            raise DataError(
                f"{kind}[{key!r}] is missing in part {lacking[0]}: "
                f"fill it with concat(parts, missing={{{key!r}: value}}), or leave out keys that not all parts have "
                "with missing='drop'"
            )
        like = next(columns[key] for _, _, columns in parts if key in columns)
        joined[key] = join(
            key,
            [
                columns[key] if key in columns else _fill(key, like, rows, missing[key])  # type: ignore[index]
                for _, rows, columns in parts
            ],
        )
    return joined


def _fill(key: str, like: Any, rows: int, value: Any) -> Any:
    """Return a column of `value`, a tensor or an array as `like` is."""
    if not isinstance(like, torch.Tensor):
        return object_array(plain_copy(value) for _ in range(rows))
    whole = not isinstance(value, float) or value.is_integer()
    if not isinstance(value, bool | int | float) or not (whole or like.is_floating_point()):
        raise DataError(f"missing[{key!r}] = {shown(value)}: give a number that {like.dtype} can hold")
    return torch.full((rows, *like.shape[1:]), value, dtype=like.dtype, device=like.device)


def _merge_meta(parts: Iterable[DataProto], known: Mapping[str, Any], operation: str) -> dict[str, Any]:
    """Merge the `meta_info` of all parts, which must not contradict each other. Keys in `known` have that value."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.meta_info.items():
            if key in known:
                continue
            if key in merged and not same(merged[key], value):
                raise DataError(
                    f"meta_info[{key!r}] is {shown(merged[key])} in one part and {shown(value)} in another: "
                    f"choose one with {operation}(..., meta_info={{{key!r}: value}})"
                )
            merged.setdefault(key, value)
    return merged | dict(known)


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


if TYPE_CHECKING:
    _fits_reward_managers: type[RewardBatch] = DataProto  # mypy checks here that reward managers accept it
