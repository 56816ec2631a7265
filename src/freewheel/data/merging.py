"""How several batches become one: the rules of `DataProto.concat` and `DataProto.union`, in one place.

Nothing is guessed: what does not fit together is a `DataError` that names the key, both values and the way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDict

from freewheel.data.columns import Array, join_arrays, join_tensors, object_array, plain_copy, same, tensors_of
from freewheel.errors import DataError, shown

if TYPE_CHECKING:
    from freewheel.data.data_proto import DataProto

TOKEN_COUNTS = "global_token_num"
"""The one key of `meta_info` that lists a value per row of the batch."""

Missing = Literal["error", "drop"] | Mapping[str, Any]


def concat_columns(parts: Sequence[DataProto], missing: Missing) -> tuple[TensorDict | None, dict[str, Array]]:
    """The columns of all parts. Those without rows need not have the same ones: nothing is lost with them."""
    places = [place for place, part in enumerate(parts) if len(part)]
    places = places or [place for place, part in enumerate(parts) if _has_columns(part)][:1] or [0]
    bearing = [parts[place] for place in places]
    rows = [len(part) for part in bearing]
    tensors = [{} if part.batch is None else tensors_of(part.batch) for part in bearing]
    arrays = [part.non_tensor_batch for part in bearing]

    joined: dict[str, torch.Tensor] = {}
    for key in _kept_keys("batch", tensors, places, missing):
        like = next(columns[key] for columns in tensors if key in columns)
        joined[key] = join_tensors(
            key,
            [
                columns[key] if key in columns else _filled_tensor(key, like, count, missing)
                for columns, count in zip(tensors, rows, strict=True)
            ],
        )
    batch = None
    if joined or all(part.batch is not None for part in bearing):
        devices = {part.batch.device for part in bearing if part.batch is not None}
        batch = TensorDict(joined, batch_size=[sum(rows)], device=devices.pop() if len(devices) == 1 else None)
    return batch, {
        key: join_arrays(
            key,
            [
                columns[key] if key in columns else _filled_array(key, count, missing)
                for columns, count in zip(arrays, rows, strict=True)
            ],
        )
        for key in _kept_keys("non_tensor_batch", arrays, places, missing)
    }


def concat_meta(parts: Sequence[DataProto], chosen: Mapping[str, Any]) -> dict[str, Any]:
    meta = {} if TOKEN_COUNTS in chosen else _token_counts(parts)
    settled = {*meta, *chosen}
    return merge_meta((part.meta_info for part in parts), settled, "concat") | meta | dict(chosen)


def merge_meta(metas: Iterable[Mapping[str, Any]], settled: Iterable[str], operation: str) -> dict[str, Any]:
    """What any of them says, as long as none contradicts; the keys in `settled` are left out."""
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key in settled:
                continue
            if key in merged and not same(merged[key], value):
                raise DataError(
                    f"meta_info[{key!r}] is {shown(merged[key])} in one part and {shown(value)} in another: "
                    f"say which one holds, {operation}(..., meta_info={{{key!r}: value}})"
                )
            merged.setdefault(key, value)
    return merged


def union_columns(kind: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    for key in left.keys() & right.keys():
        if not same(left[key], right[key]):
            raise DataError(
                f"{kind}[{key!r}] differs: {shown(left[key])} and {shown(right[key])}; "
                f"pop it from the side that is not meant, or rename it"
            )
    return {**left, **{key: value for key, value in right.items() if key not in left}}


def _token_counts(parts: Sequence[DataProto]) -> dict[str, list[int]]:
    """The lists of the parts in a row, where each has an entry per row of its part. Those of a chunk do not: they still
    are the whole batch's, and the general rule applies to them."""
    lists = [part.meta_info.get(TOKEN_COUNTS) for part in parts if len(part)]
    lengths = [len(part) for part in parts if len(part)]
    if not lists or not all(
        isinstance(counts, list) and len(counts) == length for counts, length in zip(lists, lengths, strict=True)
    ):
        return {}
    return {TOKEN_COUNTS: [count for counts in lists for count in counts or ()]}


def _has_columns(part: DataProto) -> bool:
    return bool(part.non_tensor_batch) or (part.batch is not None and bool(list(part.batch.keys())))


def _kept_keys(kind: str, parts: Sequence[Mapping[str, Any]], places: Sequence[int], missing: Missing) -> list[str]:
    """The keys of the result, in the order in which they are met first. `places` are the parts' indices."""
    if isinstance(missing, str) and missing not in ("error", "drop"):
        raise DataError(f"missing = {missing!r}: 'error', 'drop', or a value for each key that some parts lack")
    kept = []
    for key in dict.fromkeys(key for columns in parts for key in columns):
        lacking = [place for place, columns in zip(places, parts, strict=True) if key not in columns]
        if lacking and missing == "drop":
            continue
        if lacking and (isinstance(missing, str) or key not in missing):
            raise DataError(
                f"{kind}[{key!r}] is missing in part {lacking[0]}: "
                f"fill it with concat(parts, missing={{{key!r}: value}}), or leave out what "
                "not all parts have with missing='drop'"
            )
        kept.append(key)
    return kept


def _filled_tensor(key: str, like: torch.Tensor, rows: int, missing: Missing) -> torch.Tensor:
    assert not isinstance(missing, str)
    value = missing[key]
    whole = not isinstance(value, float) or value.is_integer()
    if not isinstance(value, bool | int | float) or not (whole or like.is_floating_point()):
        raise DataError(f"missing[{key!r}] = {shown(value)}: give a number that {like.dtype} can hold")
    return torch.full((rows, *like.shape[1:]), value, dtype=like.dtype, device=like.device)


def _filled_array(key: str, rows: int, missing: Missing) -> Array:
    assert not isinstance(missing, str)
    return object_array(plain_copy(missing[key]) for _ in range(rows))
