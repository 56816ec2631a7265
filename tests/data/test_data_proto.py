"""`DataProto`: its rows behave like a list, its parts share nothing that one side may change, and a batch that does not
fit is refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from freewheel.data import DataError, DataProto, DataProtoItem, RewardBatch, object_array

relaxed = settings(deadline=None, max_examples=40)
NAN = float("nan")


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


def keys_of(data: DataProto) -> tuple[list[Any], list[str], list[str]]:
    return [] if data.batch is None else [*data.batch.keys()], [*data.non_tensor_batch], [*data.meta_info]


# -- construction -----------------------------------------------------------------------------------------------------


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


def test_a_column_that_was_set_to_a_wrong_length_is_found_at_the_next_step():
    data = small_batch([1, 2])
    data.non_tensor_batch["o"] = object_array(["only one"])
    for check in (data.check_consistency, data.select):
        with pytest.raises(DataError, match="'o'"):
            check()


# -- parts share nothing that one side may change ---------------------------------------------------------------------

DERIVED: dict[str, Callable[[DataProto], list[Any]]] = {
    "constructor": lambda data: [DataProto(data.batch, data.non_tensor_batch, data.meta_info)],
    "rows": lambda data: [data[1:], data[::-1], data[[0, 1]], data[0], *data],
    "select": lambda data: [data.select(), data.select(["x"], []), data.select().pop(["x"], None, ["nested"])],
    "parts": lambda data: [*data.chunk(3), *data.split(3)],
    "repeat": lambda data: [data.repeat(2), data.repeat(1, interleave=False)],
    "concat": lambda data: [DataProto.concat([data]), DataProto.concat([data, data])],
    "union": lambda data: [data.union(data), data.union(DataProto()), DataProto().union(data)],
    "to": lambda data: [data.to("cpu")],
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED.keys())
def test_keys_and_meta_info_are_never_shared(derive: Callable[[DataProto], list[Any]]):
    data = small_batch([1, 2, 3, 4], nested={"list": [1, {"deep": [2]}], "pair": ([3],)})
    before = copy.deepcopy(data.meta_info)
    derived = derive(data)
    for one in derived:
        one.meta_info["nested"]["list"][1]["deep"].append("changed")
        one.meta_info["nested"]["pair"][0].append("changed")
        one.non_tensor_batch["new"] = object_array([])
        if isinstance(one, DataProto) and one.batch is not None:
            one.batch["new"] = torch.zeros(len(one))
    assert data.meta_info == before and keys_of(data) == (["x"], ["n", "o"], ["nested"])
    for one in derived:  # nor with each other
        assert one.meta_info["nested"]["list"][1]["deep"] == [2, "changed"]


def test_tensors_and_objects_in_meta_info_are_shared():
    weights, thing = torch.zeros(3), object()
    copied = DataProto(meta_info={"w": weights, "o": thing}).meta_info
    assert copied["w"] is weights and copied["o"] is thing


def test_a_note_in_one_repeated_row_does_not_appear_in_the_others():
    data = DataProto.from_dict(non_tensors={"extra_info": [{"notes": []}]})
    for repeated in (data.repeat(3), data.repeat(3, interleave=False)):
        for row, item in enumerate(repeated):
            item.non_tensor_batch["extra_info"]["notes"].append(row)
        assert [info["notes"] for info in repeated.non_tensor_batch["extra_info"]] == [[0], [1], [2]]


# -- rows -------------------------------------------------------------------------------------------------------------

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


def test_wrong_indices_are_refused():
    data = small_batch([1, 2, 3])
    for outside in (3, -4, [0, 3], [-4], [True, False], torch.tensor([True] * 4)):
        with pytest.raises(IndexError):
            data[outside]
    for kind in (True, "x", 1.0, None, (0, 1), [0.5], [[0]], torch.tensor(True), torch.zeros(2), np.bool_(True)):
        with pytest.raises(TypeError):
            data[kind]


@given(rows=st.integers(0, 7), count=st.integers(1, 9), cuts=st.lists(st.integers(0, 7), max_size=4))
@relaxed
def test_parts_have_the_sizes_asked_for_and_join_to_the_whole(rows: int, count: int, cuts: list[int]):
    data = small_batch(list(range(rows)), global_token_num=list(range(rows)))
    chunks = data.chunk(count)
    sizes = [len(part) for part in chunks]
    assert len(chunks) == count and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    wanted = [end - start for start, end in pairwise(edges)]
    parts = data.split(wanted)
    assert [len(part) for part in parts] == wanted
    even = data.split(count)
    assert all(len(part) == count for part in even[:-1]) and all(0 < len(part) <= count for part in even[-1:])
    for whole in (chunks, parts, even if rows else [data]):
        assert DataProto.concat(whole) == data


@given(rows=st.integers(0, 5), times=st.integers(0, 3), interleave=st.booleans())
@relaxed
def test_repeats_are_those_of_a_list(rows: int, times: int, interleave: bool):
    values = list(range(rows))
    order = [row for row in values for _ in range(times)] if interleave else values * times
    assert values_of(small_batch(values).repeat(times, interleave)) == order


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda data: data.split(0), "split_size = 0"),
        (lambda data: data.split([1, 1]), "split_size"),
        (lambda data: data.split([4, -1]), "split_size"),
        (lambda data: data.chunk(0), "chunks = 0"),
        (lambda data: data.repeat(-1), "repeat_times = -1"),
        (lambda data: data.select(["y"]), "batch has no .*'y'"),
        (lambda data: data.select(None, ["y"]), "non_tensor_batch has no .*'y'"),
        (lambda data: data.pop(meta_info_keys=["y"]), "meta_info has no .*'y'"),
        (lambda data: DataProto.concat([]), "no parts"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(call: Callable[[DataProto], Any], key: str):
    with pytest.raises(DataError, match=key):
        call(small_batch([1, 2, 3]))


# -- columns ----------------------------------------------------------------------------------------------------------


def test_select_keeps_rows_and_pop_moves_keys_out_or_changes_nothing():
    data = small_batch([1, 2], a=[1], b=2)
    whole = data.select()
    assert keys_of(data.select("x", ["o"], ["b"])) == (["x"], ["o"], ["b"])
    assert len(data.select([], [])) == 2
    with pytest.raises(DataError, match="'missing'"):
        data.pop(["x"], ["missing"])
    assert data == whole
    popped = data.pop(["x"], ["o"], ["a"])
    assert (keys_of(data), keys_of(popped), len(data)) == (([], ["n"], ["b"]), (["x"], ["o"], ["a"]), 2)
    assert data.union(popped) == whole


def test_a_union_has_the_columns_of_both_and_changes_neither():
    left = DataProto.from_dict({"a": torch.tensor([NAN, 1])}, {"u": ["p", "q"]}, {"k": [NAN]})
    right = DataProto.from_dict({"a": torch.tensor([NAN, 1]), "b": torch.zeros(2)}, {"v": [1, 2]}, {"k": [NAN], "m": 1})
    before = left.select()
    both = left.union(right)
    assert [sorted(keys) for keys in keys_of(both)] == [["a", "b"], ["u", "v"], ["k", "m"]]
    assert left == before
    assert DataProto(meta_info={"k": 1}).union(left.select(None, None, [])).meta_info == {"k": 1}
    assert len(DataProto().union(left.select([]))) == 2


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (DataProto.from_dict({"x": torch.tensor([1, 3])}), ["batch['x']", "pop"]),
        (DataProto.from_dict({"x": torch.tensor([1.0, 2.0])}), ["batch['x']", "pop"]),
        (DataProto.from_dict(non_tensors={"o": object_array([[1], [3]])}), ["non_tensor_batch['o']", "pop"]),
        (DataProto(meta_info={"k": 2}), ["meta_info['k']", " 1 ", " 2;", "pop"]),
        (small_batch([1]), ["2 and 1 rows"]),
        (small_batch([]), ["2 and 0 rows"]),
    ],
)
def test_a_union_that_contradicts_is_refused_by_name(other: DataProto, names: list[str]):
    with pytest.raises(DataError) as error:
        small_batch([1, 2], k=1).union(other)
    assert all(name in str(error.value) for name in names), str(error.value)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (small_batch([3]).select([]), r"batch of part 1 has the keys \[\], of part 0 \['x'\]"),
        (small_batch([3]).select(None, ["n"]), r"non_tensor_batch of part 1 has the keys \['n'\]"),
        (DataProto.from_dict({"x": torch.zeros(1)}, {"n": np.array([1]), "o": [1]}), "'x'.*float32.*int64"),
        (DataProto.from_dict({"x": torch.zeros(1, 2).long()}, {"n": np.array([1]), "o": [1]}), "'x'.*int64"),
        (DataProto.from_dict({"x": torch.zeros(1).long()}, {"n": np.zeros((1, 2)), "o": [1]}), "'n'.*shapes"),
        (small_batch([3], temperature=0.7), r"'temperature'.*1\.0 and 0\.7"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(part: DataProto, said: str):
    with pytest.raises(DataError, match=said):
        DataProto.concat([small_batch([1, 2], temperature=1.0), part])


def test_arrays_of_different_types_keep_their_values():
    def joined(*columns: object) -> np.ndarray:
        return DataProto.concat(
            [DataProto.from_dict(non_tensors={"c": column}) for column in columns]
        ).non_tensor_batch["c"]

    assert joined(np.array([2**63 - 1]), np.array([0.5])).tolist() == [2**63 - 1, 0.5]
    assert joined(np.array([1]), ["a"]).tolist() == [1, "a"]
    assert joined(np.array(["a"]), np.array(["long"])).dtype == "<U4"
    assert joined(np.array([1]), np.array([2])).dtype == np.int64


def test_token_counts_are_joined_where_they_have_an_entry_per_row():
    one, two = small_batch([1], global_token_num=[7]), small_batch([1, 2], global_token_num=[8, 9], left=1)
    assert DataProto.concat([one, two, one[:0]]).meta_info == {"global_token_num": [7, 8, 9], "left": 1}
    assert DataProto.concat([one, one]).meta_info["global_token_num"] == [7, 7]
    whole = DataProto.concat([one, two])
    assert DataProto.concat([whole[:2], whole[2:]]).meta_info == whole.meta_info
    with pytest.raises(DataError, match="'global_token_num'"):
        DataProto.concat([small_batch([1], global_token_num=[1, 2]), small_batch([2], global_token_num=[3])])


# -- transport, equality and reward managers --------------------------------------------------------------------------


def test_a_pickle_brings_everything_over():
    data = small_batch([1, 2], k={"deep": [NAN]})
    assert pickle.loads(pickle.dumps(data)) == data


def test_reward_managers_take_ours_and_verls():
    assert isinstance(small_batch([1]), RewardBatch)
    assert not isinstance({"batch": {}}, RewardBatch)
    verl = pytest.importorskip("verl")
    theirs = verl.DataProto.from_dict(
        {"x": torch.zeros(2)}, {"o": np.array(["a", "b"], dtype=object)}, meta_info={"k": 1}
    )
    assert isinstance(theirs, RewardBatch)
    ours = DataProto(theirs.batch, theirs.non_tensor_batch, theirs.meta_info)
    assert ours == DataProto.from_dict({"x": torch.zeros(2)}, {"o": ["a", "b"]}, {"k": 1})


def test_equality_sees_types_shapes_values_and_meta_info():
    data = small_batch([1, 2], k=[NAN], pair=(1, 2))
    assert data == data.select()
    assert data != data[:1] and data != data.select(meta_info_keys=[]) and data != "text"
    assert data != small_batch([1, 2], k=[NAN], pair=[1, 2])
    assert DataProto.from_dict({"x": torch.zeros(1)}) != DataProto.from_dict({"x": torch.zeros(1).long()})
    assert DataProto.from_dict({"x": torch.zeros(1)}) != DataProto.from_dict({"x": torch.zeros(1, 1)})
    assert DataProto(meta_info={"k": torch.zeros(1)}) != DataProto(meta_info={"k": 0})
    assert "2 rows: x int64[], n, o" in repr(data)
