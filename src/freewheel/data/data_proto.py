"""`DataProto`: a batch of samples, the form in which hooks and reward managers receive data.

    batch             TensorDict      prompts, responses, input_ids, …   ┐ one row per sample,
    non_tensor_batch  numpy arrays    data_source, extra_info, uid, …    ┘ under one index
    meta_info         dict            values for the batch as a whole

The fields are those of verl's `DataProto`. To join, split or move columns, use torch and dict operations on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from freewheel.errors import DataError, format_value

if TYPE_CHECKING:
    from freewheel.rewards.batch import RewardBatch

TOKEN_COUNTS = "global_token_num"
"""The only key of `meta_info` that lists one value per row of the batch."""

Array = np.ndarray[Any, Any]


@dataclass
class DataProtoItem:
    """One row: its tensors without the batch dimension, its values, and a copy of the batch's `meta_info`."""

    batch: TensorDictBase | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """A batch whose columns all have the same number of rows.

    Each `DataProto` owns its containers: the keys of `batch` and `non_tensor_batch`, and `meta_info` down to nested
    dicts and lists. Tensors and arrays are shared with the caller.
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
        if self.batch is not None:
            if len(self.batch.batch_size) != 1:
                size = list(self.batch.batch_size)
                raise DataError(f"batch.batch_size = {size}: give one dimension, TensorDict(…, batch_size=[rows])")
            for key, value in self.batch.items():
                _check_tensor(key, value)
        for key in self.non_tensor_batch:
            if not isinstance(key, str):
                raise DataError(f"non_tensor_batch has the key {key!r}: keys must be text")
        _check_rows("non_tensor_batch", self.non_tensor_batch, len(self))

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
            batch = TensorDict(dict(tensors), batch_size=[first])
        return cls(batch, non_tensors, meta_info)

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
        if isinstance(index, torch.Tensor):
            index = index.detach().cpu().numpy()
        if not isinstance(index, slice):
            index = np.asarray(index)
            index = index if index.size else index.astype(np.int64)
        rows = np.arange(len(self))[index]
        if rows.ndim > 1:  # True, None or a nested list
            raise IndexError(
                f"a DataProto has no index {format_value(index)}: give an integer, a slice, or a list of rows"
            )
        return self._pick(rows) if rows.ndim else self._item(int(rows))

    def __repr__(self) -> str:
        columns = tensors_of(self.batch).items()
        tensors = [f"{key} {str(value.dtype)[6:]}{list(value.shape[1:])}" for key, value in columns]
        names = ", ".join([*tensors, *self.non_tensor_batch])
        return f"<{type(self).__name__} of {len(self)} rows: {names or 'no columns'}; meta_info: {[*self.meta_info]}>"

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _item(self, row: int) -> DataProtoItem:
        return DataProtoItem(
            None if self.batch is None else self.batch[row],
            {key: column[row] for key, column in self.non_tensor_batch.items()},
            plain_copy(self.meta_info),
        )

    def _pick(self, rows: Array) -> Self:
        batch = None
        if self.batch is not None:
            places = torch.from_numpy(rows.copy())  # torch cannot wrap a reversed view
            tensors = {key: tensor[places.to(tensor.device)] for key, tensor in tensors_of(self.batch).items()}
            batch = TensorDict(tensors, batch_size=[len(rows)], device=self.batch.device)
        return type(self)(batch, {key: column[rows] for key, column in self.non_tensor_batch.items()}, self.meta_info)


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


def _as_column(key: str, values: Any) -> Array:
    """Return a numpy array unchanged, and a list or a tuple as an array of objects."""
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise DataError(f"non_tensor_batch[{key!r}] = {format_value(values)}: give an array with one entry per row")
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
        raise DataError(f"batch[{key!r}] = {format_value(value)}: give a tensor with one entry per row")


def _check_rows(kind: str, columns: Mapping[str, Any], expected: int) -> None:
    for key, column in columns.items():
        if len(column) != expected:
            raise DataError(
                f"{kind}[{key!r}] has {len(column)} rows where the batch has {expected}: give every column one entry "
                "per row, and put values for the whole batch into meta_info"
            )


if TYPE_CHECKING:
    _fits_reward_managers: type[RewardBatch] = DataProto  # mypy checks here that reward managers accept it
