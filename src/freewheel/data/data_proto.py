"""`DataProto`: a batch of samples, as it travels between rollouts, rewards, the queue and the trainer.

    batch             TensorDict      prompts, responses, input_ids, …   ┐ one row per sample,
    non_tensor_batch  numpy arrays    data_source, extra_info, uid, …    ┘ under one index
    meta_info         dict            what holds for the batch as a whole

The API is the part of verl's `DataProto` that people use; docs/data.md says where it differs, and why.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from freewheel.data import merging, storage
from freewheel.data.columns import Array, as_column, check_tensor, plain_copy, same, take_rows, tensors_of
from freewheel.data.indexing import Keys, Rows, check_rows, chosen, listed, renamed, row_numbers
from freewheel.errors import DataError, shown

if TYPE_CHECKING:
    from freewheel.rewards.protocol import RewardBatch

Slice = slice
"""The builtin, by a name that the method `slice` does not hide."""


@dataclass
class DataProtoItem:
    """One row: its tensors without the batch dimension, its values, and a copy of the batch's `meta_info`."""

    batch: TensorDictBase | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """A batch whose columns all have the same number of rows.

    Each one owns its containers: the keys of `batch` and `non_tensor_batch`, and `meta_info` down to nested dicts and
    lists. Tensors and arrays are shared; slices, `chunk`, `split`, `select`, `rename` and `union` copy none. Every
    method returns a new `DataProto`, but `pop` and `reorder`, which change the one that they are called on."""

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
        """What holds for the batch as a whole. What is assigned to it is copied."""
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
        """From columns by name. Lists become object columns with one entry per row, also if the entries are lists."""
        batch = None
        if tensors:
            for key, tensor in tensors.items():
                check_tensor(key, tensor)
            rows = {key: len(tensor) for key, tensor in tensors.items()}
            first = next(iter(rows.values()))
            check_rows("tensors", rows, first)
            batch = _table(tensors, first)
        return cls(batch, non_tensors, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """From one dict: its tensors go into `batch`, its arrays and lists into `non_tensor_batch`."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        return cls.from_dict(tensors, {key: value for key, value in data.items() if key not in tensors}, meta_info)

    def check_consistency(self) -> None:
        """Raises `DataError` unless all columns have the same number of rows. Every new `DataProto` was checked."""
        if self.batch is not None:
            if len(self.batch.batch_size) != 1:
                size = list(self.batch.batch_size)
                raise DataError(f"batch.batch_size = {size}: give one dimension, TensorDict(…, batch_size=[rows])")
            for key, value in self.batch.items():
                check_tensor(key, value)
        for key, column in self.non_tensor_batch.items():
            if not isinstance(key, str):
                raise DataError(f"non_tensor_batch has the key {key!r}: keys are text")
            as_column(key, column)
        check_rows("non_tensor_batch", {key: len(column) for key, column in self.non_tensor_batch.items()}, len(self))

    # -- rows ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(row) for row in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """A `DataProtoItem` for an integer; a `DataProto` for a slice, or for a list, array or tensor of indices or of
        truth values."""
        if isinstance(index, Slice):
            return self._slice(index)
        if isinstance(index, list | range | np.ndarray | torch.Tensor) and getattr(index, "ndim", 1) > 0:
            return self.select_idxs(index)
        truth = isinstance(index, bool) or str(getattr(index, "dtype", "")).endswith("bool")
        if truth or not hasattr(index, "__index__"):  # True would be taken for row 1
            raise TypeError(f"a DataProto has no index {shown(index)}: give an integer, a slice, or a list of rows")
        return self._item(operator.index(index))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """`data[start:end:step]`, bounds as those of a list."""
        return self._slice(Slice(start, end, step))

    def select_idxs(self, idxs: Rows) -> Self:
        """The rows with these indices (negative ones count from the end), or those where a mask is true."""
        return self._take(row_numbers(idxs, len(self)))

    def reorder(self, indices: Rows) -> None:
        """Brings the rows into another order, in place, as `list.sort` does; `data[indices]` is the copy."""
        rows = row_numbers(indices, len(self))
        if not np.array_equal(np.sort(rows), np.arange(len(self))):
            raise DataError(
                f"indices = {shown(indices)}: name each of {len(self)} rows once; data[indices] may leave out"
            )
        ordered = self._take(rows)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Each row `repeat_times` times: a a b b with `interleave`, else a b a b. Copies of a row share no dict or
        list: what is noted in one's `extra_info` is not seen in the others."""
        if repeat_times < 0:
            raise DataError(f"repeat_times = {repeat_times}: give 0 or more")
        rows = np.arange(len(self))
        return self._take(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def chunk(self, chunks: int) -> list[Self]:
        """Exactly `chunks` parts, whose sizes differ by one at most, larger ones first; empty ones if rows run out."""
        if chunks < 1:
            raise DataError(f"chunks = {chunks}: give 1 or more")
        size, larger = divmod(len(self), chunks)
        return self.split([size + (part < larger) for part in range(chunks)])

    def split(self, split_size: int | Sequence[int]) -> list[Self]:
        """Parts of `split_size` rows, the last one with the rest, none for no rows; or parts of the given sizes."""
        if not isinstance(split_size, int):
            sizes = list(split_size)
            if any(size < 0 for size in sizes) or sum(sizes) != len(self):
                raise DataError(f"split_size = {shown(sizes)}: sizes must add up to {len(self)} rows, none below 0")
        elif split_size < 1:
            raise DataError(f"split_size = {split_size}: give 1 or more")
        else:
            sizes = [min(split_size, len(self) - start) for start in range(0, len(self), split_size)]
        ends = np.cumsum(sizes).tolist()
        return [self._slice(Slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, bool] | None = None,
    ) -> Iterator[Self]:
        """Mini batches over `epochs` passes. Rows are shuffled, anew for each pass, if there is a seed;
        `dataloader_kwargs` may say otherwise (`shuffle`), and may leave out a shorter last one (`drop_last`)."""
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
        """Only these keys; None stands for all. With `deepcopy` tensors and arrays are copied too."""
        tensors = chosen("batch", self._tensors(), batch_keys)
        arrays = chosen("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys)
        meta_info = chosen("meta_info", self.meta_info, meta_info_keys)
        if deepcopy:
            tensors = {key: tensor.clone() for key, tensor in tensors.items()}
            everything = np.arange(len(self))
            arrays = {key: take_rows(column, everything, everything) for key, column in arrays.items()}
        return self._like(tensors, arrays, len(self), meta_info)

    def pop(self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None) -> Self:
        """Takes these keys out of this `DataProto` into a new one; None stands for none."""
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        if popped.batch is not None:
            for key in popped.batch.keys():  # noqa: SIM118
                assert self.batch is not None
                del self.batch[key]
        for key in popped.non_tensor_batch:
            del self.non_tensor_batch[key]
        for key in popped.meta_info:
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: Sequence[str] | str, new_keys: Sequence[str] | str) -> Self:
        """Columns under other names, tensors or not."""
        old, new = listed(old_keys), listed(new_keys)
        if len(old) != len(new):
            raise DataError(f"old_keys = {old}, new_keys = {new}: give as many new names as old ones")
        tensors = self._tensors()
        if unknown := [key for key in old if key not in tensors and key not in self.non_tensor_batch]:
            raise DataError(f"old_keys has {unknown}: the columns are {[*tensors, *self.non_tensor_batch]}")
        names = dict(zip(old, new, strict=True))
        return self._like(renamed(tensors, names), renamed(self.non_tensor_batch, names), len(self), self.meta_info)

    def union(self, other: DataProto, *, meta_info: Mapping[str, Any] | None = None) -> Self:
        """The columns of both. A key that both have must hold the same, NaN included, in `meta_info` too unless
        `meta_info` here says what holds."""
        if not _is_bare(self) and not _is_bare(other) and len(self) != len(other):
            raise DataError(f"union of {len(self)} and {len(other)} rows: both sides must have the same rows")
        tensors = merging.union_columns("batch", self._tensors(), other._tensors())
        arrays = merging.union_columns("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch)
        settled = dict(meta_info or {})
        merged = merging.merge_meta([self.meta_info, other.meta_info], settled, "union") | settled
        lead = other if self.batch is None else self
        return type(self)(lead._like(tensors, {}, max(len(self), len(other)), {}).batch, arrays, merged)

    @classmethod
    def concat(
        cls,
        data: Iterable[DataProto],
        *,
        missing: merging.Missing = "error",
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """The rows of all parts, in order.

        - Columns: all parts with rows must have the same keys. With `missing={key: value}` a key that a part lacks is
          filled with that value there; with `missing="drop"` keys that not all have are left out.
        - Tensors must agree in dtype, device and shape of a row. Arrays of different types become object columns.
        - `meta_info`: a key that is equal in all parts that have it is kept, and `global_token_num` is joined where
          each list has an entry per row of its part. Anything else is an error, unless `meta_info` here says what
          holds."""
        parts = list(data)
        if not parts:
            raise DataError("concat of no parts: give at least one DataProto")
        batch, non_tensor_batch = merging.concat_columns(parts, missing)
        return cls(batch, non_tensor_batch, merging.concat_meta(parts, dict(meta_info or {})))

    def to(self, device: torch.device | str | int) -> Self:
        """With the tensors on a device. This one stays where it is."""
        return type(self)(
            self.batch if self.batch is None else self.batch.to(device), self.non_tensor_batch, self.meta_info
        )

    # -- disk and transport -------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes a directory, or replaces the save in it at once or not at all: see `freewheel.data.storage`."""
        tensors = None if self.batch is None else self._tensors()
        storage.save(path, storage.Saved(len(self), tensors, self.non_tensor_batch, self.meta_info))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote, on the CPU."""
        rows, tensors, non_tensor_batch, meta_info = storage.load(path)
        return cls(_table(tensors, rows), non_tensor_batch, meta_info)

    def __reduce__(self) -> Any:
        """Between processes only; on disk there is no pickle of ours."""
        tensors = device = None
        if self.batch is not None:
            tensors, device = {key: _compact(tensor) for key, tensor in self._tensors().items()}, self.batch.device
        return _unpickled, (type(self), tensors, len(self), device, self.non_tensor_batch, self.meta_info)

    def __eq__(self, other: object) -> bool:
        """The same columns and the same `meta_info`; NaN equals NaN."""
        if not isinstance(other, DataProto):
            return NotImplemented
        return len(self) == len(other) and all(
            same(*pair)
            for pair in (
                (self._tensors(), other._tensors()),
                (self.non_tensor_batch, other.non_tensor_batch),
                (self.meta_info, other.meta_info),
            )
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        tensors = [f"{key} {str(value.dtype)[6:]}{list(value.shape[1:])}" for key, value in self._tensors().items()]
        names = ", ".join([*tensors, *self.non_tensor_batch])
        return f"<{type(self).__name__} of {len(self)} rows: {names or 'no columns'}; meta_info: {[*self.meta_info]}>"

    # -- within -------------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.batch is None else tensors_of(self.batch)

    def _like(
        self, tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, Any], rows: int, meta_info: Mapping[str, Any]
    ) -> Self:
        device = None if self.batch is None else self.batch.device
        batch = _table(tensors if tensors or self.batch is not None else None, rows, device)
        return type(self)(batch, arrays, meta_info)

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return DataProtoItem(
            None if self.batch is None else self.batch[row],
            {key: column[row] for key, column in self.non_tensor_batch.items()},
            plain_copy(self.meta_info),
        )

    def _slice(self, bounds: Slice) -> Self:
        rows = range(len(self))[bounds]
        if rows.step < 0:  # tensors have no view in reverse
            return self._take(np.array(rows, dtype=np.int64))
        tensors = {key: tensor[bounds] for key, tensor in self._tensors().items()}
        arrays = {key: column[bounds] for key, column in self.non_tensor_batch.items()}
        return self._like(tensors, arrays, len(rows), self.meta_info)

    def _take(self, rows: Array) -> Self:
        repeated = np.ones(len(rows), dtype=bool)
        repeated[np.unique(rows, return_index=True)[1]] = False
        places = torch.from_numpy(rows)
        tensors = {key: tensor[places.to(tensor.device)] for key, tensor in self._tensors().items()}
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
                bounds = Slice(start, start + size)
                yield self._slice(bounds) if order is None else self._take(order[bounds])


def _table(
    tensors: Mapping[str, torch.Tensor] | None, rows: int, device: torch.device | None = None
) -> TensorDict | None:
    return None if tensors is None else TensorDict(dict(tensors), batch_size=[rows], device=device)


def _is_bare(data: DataProto) -> bool:
    """Without anything that has rows: it carries `meta_info` only."""
    return data.batch is None and not data.non_tensor_batch


def _unpickled(
    cls: type[DataProto],
    tensors: Mapping[str, torch.Tensor] | None,
    rows: int,
    device: torch.device | None,
    non_tensor_batch: Mapping[str, Any],
    meta_info: Mapping[str, Any],
) -> DataProto:
    return cls(_table(tensors, rows, device), non_tensor_batch, meta_info)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in memory of its own size: a slice would be sent together with all that it was cut from."""
    own = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == own else tensor.clone(memory_format=torch.contiguous_format)


if TYPE_CHECKING:
    _takes_part: type[RewardBatch] = DataProto  # mypy checks here that reward managers take it
