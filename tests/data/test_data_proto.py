"""`DataProto`: rows are indexed as in numpy, containers are never shared, and columns that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from freewheel.data import DataError, DataProto, DataProtoItem, RewardBatch, object_array

relaxed = settings(deadline=None, max_examples=40)


def small_batch(values: list[int], **meta_info: Any) -> DataProto:
    """One tensor `x`, one number column `n` and one object column `o`, which all hold the same values."""
    return DataProto.from_dict(
        {"x": torch.tensor(values, dtype=torch.int64)},
        {"n": np.array(values, dtype=np.int64), "o": [[value] for value in values]},
        meta_info,
    )


def values_of(data: DataProto) -> list[int]:
    """Return the values of a `small_batch`, after a check that its three columns still match."""
    assert data.batch is not None
    values: list[int] = data.batch["x"].tolist()
    assert data.non_tensor_batch["n"].tolist() == values
    assert data.non_tensor_batch["o"].tolist() == [[value] for value in values]
    return values


def test_lists_of_lists_stay_one_entry_per_row():
    for rows in ([[1], [2]], [[1, 2], [3]], [(1, 2), (3, 4)], [np.zeros(2), np.ones(2)], [[], []]):
        column = DataProto.from_dict(non_tensors={"o": rows}).non_tensor_batch["o"]
        assert column.shape == (2,) and column.dtype == object
        assert type(column[0]) is type(rows[0])


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: DataProto.from_dict({"x": torch.zeros(2), "y": torch.zeros(3)}), ["'y'", "3", "2"]),
        (lambda: DataProto.from_dict({"x": torch.zeros(2)}, {"o": ["a"]}), ["'o'", "1", "2"]),
        (lambda: DataProto.from_dict(non_tensors={"n": np.zeros(2), "o": ["a"]}), ["'o'", "1", "2"]),
        (lambda: DataProto.from_dict({"x": torch.tensor(1)}), ["'x'", "per row"]),
        (lambda: DataProto.from_dict({"x": [1, 2]}), ["'x'", "list", "non_tensor_batch"]),
        (lambda: DataProto.from_dict({1: torch.zeros(2)}), ["key 1", "text"]),
        (lambda: DataProto.from_dict(non_tensors={1: ["a"]}), ["key 1", "text"]),
        (lambda: DataProto.from_dict(non_tensors={"o": "abc"}), ["'o'", "str", "list"]),
        (lambda: DataProto.from_dict(non_tensors={"o": torch.zeros(2)}), ["'o'", "tensors"]),
        (lambda: DataProto.from_dict(non_tensors={"o": np.array(1)}), ["'o'", "per row"]),
        (lambda: DataProto(batch={"x": torch.zeros(2)}), ["dict", "from_dict"]),
        (lambda: DataProto(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2, 3])), ["[2, 3]", "batch_size"]),
        (lambda: DataProto(TensorDict({"x": TensorDict({}, [2])}, [2])), ["'x'", "flatten"]),
        (
            lambda: DataProto.from_dict(
                {"x": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)}
            ),
            ["'x'", "pad"],
        ),
    ],
)
def test_an_invalid_column_is_refused_by_name(make: Callable[[], DataProto], names: list[str]):
    with pytest.raises(DataError) as error:
        make()
    assert all(name in str(error.value) for name in names), str(error.value)


def test_keys_and_meta_info_are_never_shared():
    data = small_batch([1, 2, 3, 4], nested={"list": [1, {"deep": [2]}], "pair": ([3],)})
    derived = [DataProto(data.batch, data.non_tensor_batch, data.meta_info), data[1:], data[::-1], data[[0, 1]], *data]
    for one in derived:
        one.meta_info["nested"]["list"][1]["deep"].append("changed")
        one.meta_info["nested"]["pair"][0].append("changed")
        one.non_tensor_batch["new"] = object_array([])
        if isinstance(one, DataProto):
            one.batch["new"] = torch.zeros(len(one))
    assert data.meta_info == {"nested": {"list": [1, {"deep": [2]}], "pair": ([3],)}}
    assert ([*data.batch.keys()], [*data.non_tensor_batch]) == (["x"], ["n", "o"])
    assert all(one.meta_info["nested"]["list"][1]["deep"] == [2, "changed"] for one in derived), "nor with each other"
    weights = torch.zeros(3)
    assert DataProto(meta_info={"w": weights}).meta_info["w"] is weights, "tensors are too large to copy"


bounds = st.none() | st.integers(-12, 12)


@given(data=st.data(), rows=st.integers(0, 7))
@relaxed
def test_slices_indices_and_masks_are_those_of_numpy(data: st.DataObject, rows: int):
    values = np.arange(rows) * 10
    batch = small_batch(values.tolist())
    part = slice(data.draw(bounds), data.draw(bounds), data.draw(bounds.filter(lambda step: step != 0)))
    assert values_of(batch[part]) == values[part].tolist()
    picked = data.draw(st.lists(st.integers(-rows, rows - 1), max_size=9)) if rows else []
    mask = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    for form in (list, np.array, torch.tensor):
        assert values_of(batch[form(picked)]) == values[np.array(picked, dtype=int)].tolist()
        assert values_of(batch[form(mask)]) == values[np.array(mask, dtype=bool)].tolist()


def test_one_row_is_an_item_for_every_kind_of_integer():
    data = small_batch([1, 2, 3], k=1)
    for index in (-1, 2, np.int64(2), np.array(2), torch.tensor(2)):
        item = data[index]
        assert isinstance(item, DataProtoItem) and item.batch is not None
        assert (item.batch["x"].item(), item.non_tensor_batch, item.meta_info) == (3, {"n": 3, "o": [3]}, {"k": 1})
    assert [item.non_tensor_batch["n"] for item in data] == [1, 2, 3]
    assert list(DataProto()) == []
    assert repr(data) == "<DataProto of 3 rows: x int64[], n, o; meta_info: ['k']>"


@pytest.mark.parametrize(
    "index",
    [
        *(3, -4, [0, 3], [-4], [True, False], torch.tensor([True] * 4)),  # out of range
        *(True, "x", 1.0, None, [0.5], [[0]], torch.tensor(True), torch.zeros(2), np.bool_(True)),
    ],
    ids=str,
)
def test_a_wrong_index_is_refused(index: Any):
    with pytest.raises(IndexError):
        small_batch([1, 2, 3])[index]


def test_reward_managers_take_ours_and_verls():
    assert isinstance(small_batch([1]), RewardBatch)
    assert not isinstance({"batch": {}}, RewardBatch)
    verl = pytest.importorskip("verl")
    theirs = verl.DataProto.from_dict(
        {"x": torch.zeros(2)}, {"o": np.array(["a", "b"], dtype=object)}, meta_info={"k": 1}
    )
    assert isinstance(theirs, RewardBatch)
    ours = DataProto(theirs.batch, theirs.non_tensor_batch, theirs.meta_info)
    assert ours.batch is not None and ours.batch["x"].tolist() == [0, 0]
    assert (ours.non_tensor_batch["o"].tolist(), ours.meta_info) == (["a", "b"], {"k": 1})
