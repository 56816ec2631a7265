"""What a `DataProto` holds, how its rows are reached, and that no two share what only one of them means to change."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from freewheel.data import DataError, DataProto, DataProtoItem, RewardBatch, object_array

from .conftest import batches, sample_batch, small_batch, values_of

relaxed = settings(deadline=None, max_examples=40)

# -- construction -----------------------------------------------------------------------------------------------------


def test_a_batch_has_the_columns_and_shapes_of_the_spec():
    data = sample_batch(2, prompt_tokens=1024, response_tokens=2048)
    assert data.batch is not None and len(data) == 2
    assert {key: list(value.shape[1:]) for key, value in data.batch.items()} == {
        "prompts": [1024],
        "responses": [2048],
        "input_ids": [3072],
        "attention_mask": [3072],
        "position_ids": [3072],
        "response_mask": [2048],
    }
    assert data.batch["response_mask"].dtype == torch.int64
    assert [item.non_tensor_batch["extra_info"]["index"] for item in data] == [0, 1]
    assert data.meta_info["global_token_num"] == data.batch["attention_mask"].sum(dim=1).tolist()


def test_a_single_dict_is_sorted_into_tensors_and_other_columns():
    data = DataProto.from_single_dict({"x": torch.zeros(2), "n": np.arange(2), "o": ["a", "b"]}, {"k": 1})
    assert data.batch is not None
    assert ([*data.batch.keys()], [*data.non_tensor_batch], data.meta_info) == (["x"], ["n", "o"], {"k": 1})


def test_lists_of_lists_stay_one_entry_per_row():
    for rows in ([[1], [2]], [[1, 2], [3]], [(1, 2), (3, 4)], [np.zeros(2), np.ones(2)], [[], []]):
        column = DataProto.from_dict(non_tensors={"o": rows}).non_tensor_batch["o"]
        assert column.shape == (2,) and column.dtype == object
        assert type(column[0]) is type(rows[0])


def test_construction_leaves_the_callers_dicts_alone():
    non_tensors = {"o": ["a", "b"]}
    batch = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    data = DataProto(batch, non_tensors)
    assert data.batch is not None
    data.batch["y"] = torch.zeros(2)
    data.non_tensor_batch["z"] = object_array([1, 2])
    assert non_tensors == {"o": ["a", "b"]} and [*batch.keys()] == ["x"]


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
        (lambda: DataProto(TensorDict({"x": "text"}, [2])), ["'x'", "non_tensor_batch"]),
        (
            lambda: DataProto.from_dict(
                {"x": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)}
            ),
            ["'x'", "pad"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make: Callable[[], DataProto], names: list[str]):
    with pytest.raises(DataError) as error:
        make()
    assert all(name in str(error.value) for name in names), str(error.value)


def test_a_column_that_was_set_to_a_wrong_length_is_found_at_the_next_step():
    data = small_batch([1, 2])
    data.non_tensor_batch["o"] = object_array(["only one"])
    with pytest.raises(DataError, match="'o'"):
        data.check_consistency()
    with pytest.raises(DataError, match="'o'"):
        data.select()


# -- nothing is shared that one side may change -----------------------------------------------------------------------

ONE_TO_MANY: dict[str, Callable[[DataProto], list[DataProto]]] = {
    "constructor": lambda data: [DataProto(data.batch, data.non_tensor_batch, data.meta_info)],
    "slice": lambda data: [data[1:], data[::-1], data.slice(0, 1)],
    "rows": lambda data: [data[[0, 1]], data.select_idxs([True, False, True, False])],
    "item": lambda data: [data[0], *data],
    "select": lambda data: [data.select(), data.select(["x"], [])],
    "pop": lambda data: [copy.copy(data).pop(meta_info_keys=["nested"])],
    "rename": lambda data: [data.rename("x", "y")],
    "chunk": lambda data: data.chunk(3),
    "split": lambda data: data.split(3),
    "repeat": lambda data: [data.repeat(2), data.repeat(1, interleave=False)],
    "concat": lambda data: [DataProto.concat([data]), DataProto.concat([data, data])],
    "union": lambda data: [data.union(data), data.union(DataProto()), DataProto().union(data)],
    "to": lambda data: [data.to("cpu")],
    "iterator": lambda data: [*data.make_iterator(2), *data.make_iterator(3, seed=1)],
    "copy": lambda data: [copy.copy(data)],
}


@pytest.mark.parametrize("derive", ONE_TO_MANY.values(), ids=ONE_TO_MANY.keys())
def test_meta_info_is_never_shared(derive: Callable[[DataProto], list[DataProto]]):
    data = small_batch([1, 2, 3, 4], nested={"list": [1, {"deep": [2]}], "pair": ([3],)})
    before = copy.deepcopy(data.meta_info)
    derived = derive(data)
    for one in derived:
        one.meta_info["new"] = 1
        one.meta_info["nested"]["list"][1]["deep"].append("changed")
        one.meta_info["nested"]["pair"][0].append("changed")
    assert data.meta_info == before
    for one in derived:  # nor with each other
        assert one.meta_info["nested"]["list"][1]["deep"] == [2, "changed"]


def test_meta_info_that_is_assigned_is_copied():
    meta = {"list": [1]}
    data = small_batch([1])
    data.meta_info = meta
    data.meta_info["list"].append(2)
    assert meta == {"list": [1]}


def test_tensors_and_objects_in_meta_info_are_shared_and_containers_keep_their_kind():
    point = namedtuple("point", "x")
    weights, thing = torch.zeros(3), object()
    meta = {"w": weights, "o": thing, "d": defaultdict(list, a=[1]), "od": OrderedDict(b=1), "p": point([1]), "s": {1}}
    copied = DataProto(meta_info=meta).meta_info
    assert copied["w"] is weights and copied["o"] is thing
    assert copied["d"]["missing"] == [] and "missing" not in meta["d"]
    assert isinstance(copied["od"], OrderedDict) and copied["p"].x == [1]
    assert copied["p"].x is not meta["p"].x and copied["s"] is not meta["s"]


def test_keys_that_are_added_to_a_part_do_not_appear_in_the_whole():
    data = small_batch([1, 2])
    for part in (data.select(), data[:], data.rename("x", "y"), data.to("cpu"), data.union(DataProto())):
        part.batch["new"] = torch.zeros(2)
        part.non_tensor_batch["new"] = np.zeros(2)
    assert data.batch is not None
    assert [*data.batch.keys()] == ["x"] and [*data.non_tensor_batch] == ["n", "o"]


def test_copies_of_a_row_can_be_noted_in_separately():
    data = DataProto.from_dict(non_tensors={"extra_info": [{"notes": []}], "pair": np.array([[{}, {}]], dtype=object)})
    for repeated in (data.repeat(3), data.repeat(3, interleave=False), data[[0, 0, 0]]):
        for row, item in enumerate(repeated):
            item.non_tensor_batch["extra_info"]["notes"].append(row)
            item.non_tensor_batch["pair"][1]["row"] = row
        assert [info["notes"][-1] for info in repeated.non_tensor_batch["extra_info"]] == [0, 1, 2]
        assert [pair[1]["row"] for pair in repeated.non_tensor_batch["pair"]] == [0, 1, 2]


def test_a_deep_selection_shares_no_memory():
    data = small_batch([1, 2])
    deep = data.select(deepcopy=True)
    assert deep.batch is not None
    deep.batch["x"][0] = 9
    deep.non_tensor_batch["n"][0] = 9
    deep.non_tensor_batch["o"][0].append(9)
    assert values_of(data) == [1, 2]


# -- rows -------------------------------------------------------------------------------------------------------------

bounds = st.none() | st.integers(-12, 12)


@given(rows=st.integers(0, 7), start=bounds, stop=bounds, step=bounds.filter(lambda step: step != 0))
@relaxed
def test_slices_are_those_of_a_list(rows: int, start: int | None, stop: int | None, step: int | None):
    values = list(range(rows))
    assert values_of(small_batch(values)[start:stop:step]) == values[start:stop:step]
    assert values_of(small_batch(values).slice(start, stop, step)) == values[start:stop:step]


@given(data=st.data(), rows=st.integers(1, 7))
@relaxed
def test_indices_and_masks_are_those_of_numpy(data: st.DataObject, rows: int):
    values = np.arange(rows) * 10
    batch = small_batch(values.tolist())
    picked = data.draw(st.lists(st.integers(-rows, rows - 1), max_size=9))
    mask = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    for form in (list, np.array, torch.tensor):
        assert values_of(batch[form(picked)]) == values[np.array(picked, dtype=int)].tolist()
        assert values_of(batch[form(mask)]) == values[np.array(mask)].tolist()
    assert values_of(batch[range(rows)]) == values.tolist()
    assert values_of(batch[torch.tensor(picked, dtype=torch.int32)]) == values[np.array(picked, dtype=int)].tolist()


def test_one_row_is_an_item_for_every_kind_of_integer():
    data = small_batch([1, 2, 3])
    for index in (-1, 2, np.int64(2), np.array(2), torch.tensor(2)):
        item = data[index]
        assert isinstance(item, DataProtoItem) and item.batch is not None
        assert (item.batch["x"].item(), item.non_tensor_batch) == (3, {"n": 3, "o": [3]})


def test_wrong_indices_are_refused():
    data = small_batch([1, 2, 3])
    for outside in (3, -4, [0, 3], [-4], [True, False], torch.tensor([True] * 4)):
        with pytest.raises(IndexError):
            data[outside]
    for kind in (True, "x", 1.0, None, (0, 1), [0.5], [[0]], torch.tensor(True), torch.zeros(2), np.bool_(True)):
        with pytest.raises(TypeError):
            data[kind]


def test_iteration_ends_and_gives_each_row_once():
    assert [item.non_tensor_batch["n"] for item in small_batch([5, 6, 7])] == [5, 6, 7]
    assert list(DataProto()) == []


@given(data=batches(), chunks=st.integers(1, 9))
@relaxed
def test_chunks_are_as_many_as_asked_for_almost_equal_and_together_the_whole(data: DataProto, chunks: int):
    parts = data.chunk(chunks)
    sizes = [len(part) for part in parts]
    assert len(parts) == chunks and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert DataProto.concat(parts) == data


@given(data=batches(min_rows=1), size=st.integers(1, 9))
@relaxed
def test_splits_have_the_size_but_the_last_and_are_together_the_whole(data: DataProto, size: int):
    parts = data.split(size)
    assert all(len(part) == size for part in parts[:-1]) and 0 < len(parts[-1]) <= size
    assert DataProto.concat(parts) == data


@given(data=batches(), cuts=st.lists(st.integers(0, 7), max_size=4))
@relaxed
def test_splits_of_given_sizes_are_together_the_whole(data: DataProto, cuts: list[int]):
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    sizes = [end - start for start, end in pairwise(edges)]
    parts = data.split(sizes)
    assert [len(part) for part in parts] == sizes and DataProto.concat(parts) == data


def test_no_rows_split_into_nothing_and_wrong_sizes_are_refused():
    data = small_batch([1, 2, 3])
    assert data[:0].split(2) == []
    for wrong in (0, -1, [1, 1], [4, -1]):
        with pytest.raises(DataError, match="split_size"):
            data.split(wrong)
    with pytest.raises(DataError, match="chunks"):
        data.chunk(0)


@given(data=batches(), times=st.integers(0, 3), interleave=st.booleans())
@relaxed
def test_repeats_are_those_of_a_list(data: DataProto, times: int, interleave: bool):
    rows = list(range(len(data)))
    order = [row for row in rows for _ in range(times)] if interleave else rows * times
    assert data.repeat(times, interleave=interleave) == data[order]
    small = small_batch(rows)
    assert values_of(small.repeat(times, interleave)) == order
    with pytest.raises(DataError, match="repeat_times"):
        data.repeat(-1)


def test_reordering_is_in_place_and_needs_every_row_once():
    data = small_batch([1, 2, 3])
    assert data.reorder(torch.tensor([2, 0, -2])) is None
    assert values_of(data) == [3, 1, 2]
    for wrong in ([0, 1], [0, 1, 1], [True, True, False]):
        with pytest.raises(DataError, match="each of 3 rows once"):
            data.reorder(wrong)
    assert values_of(data) == [3, 1, 2]


def test_mini_batches_cover_all_rows_in_order_without_a_seed():
    sizes_and_values = [values_of(part) for part in small_batch([1, 2, 3, 4, 5]).make_iterator(2, epochs=2)]
    assert sizes_and_values == [[1, 2], [3, 4], [5]] * 2


def test_mini_batches_with_a_seed_are_shuffled_alike_each_time_and_anew_for_each_epoch():
    data = small_batch(list(range(20)))

    def passes(seed: int) -> list[list[int]]:
        flat = [value for part in data.make_iterator(3, 2, seed) for value in values_of(part)]
        return [flat[:20], flat[20:]]

    first, second = passes(1)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != list(range(20))
    assert passes(1) == [first, second] and passes(2) != [first, second]


def test_mini_batch_options_are_checked_at_once_and_obeyed():
    data = small_batch([1, 2, 3, 4, 5])
    kept = data.make_iterator(2, 1, 7, {"shuffle": False, "drop_last": True})
    data.pop(["x"])  # what was asked for is what was there then
    assert [values_of(part) for part in kept] == [[1, 2], [3, 4]]
    assert list(data.make_iterator(9, dataloader_kwargs={"drop_last": True})) == []
    assert list(data[:0].make_iterator(2, 3, 1)) == []
    for wrong in ({"mini_batch_size": 0}, {"mini_batch_size": 1, "dataloader_kwargs": {"num_workers": 2}}):
        with pytest.raises(DataError):
            data.make_iterator(**wrong)


# -- columns ----------------------------------------------------------------------------------------------------------


def test_select_keeps_rows_and_refuses_keys_that_are_not_there():
    data = small_batch([1, 2], a=1, b=2)
    chosen = data.select("x", ["o"], ["b"])
    assert chosen.batch is not None
    assert ([*chosen.batch.keys()], [*chosen.non_tensor_batch], chosen.meta_info) == (["x"], ["o"], {"b": 2})
    assert len(data.select([], [])) == 2
    for wrong in ({"batch_keys": ["y"]}, {"non_tensor_batch_keys": ["y"]}, {"meta_info_keys": ["y"]}):
        with pytest.raises(DataError, match="'y'"):
            data.select(**wrong)


def test_pop_moves_keys_out_and_takes_nothing_if_one_is_missing():
    data = small_batch([1, 2], a=[1], b=2)
    whole = data.select()
    with pytest.raises(DataError, match="'missing'"):
        data.pop(["x"], ["missing"])
    assert data == whole
    popped = data.pop(["x"], ["o"], ["a"])
    assert data.batch is not None and list(data.batch.keys()) == []
    assert ([*data.non_tensor_batch], data.meta_info, len(data), len(popped)) == (["n"], {"b": 2}, 2, 2)
    assert data.union(popped) == whole


def test_rename_takes_both_kinds_of_columns_and_can_swap():
    data = DataProto.from_dict({"a": torch.zeros(1), "b": torch.ones(1)}, {"o": ["v"]})
    renamed = data.rename(["a", "b", "o"], ["b", "a", "p"])
    assert renamed.batch is not None
    assert renamed.batch["b"].item() == 0 and renamed.non_tensor_batch["p"].tolist() == ["v"]
    for old, new in (("a", "b"), ("missing", "c"), (["a", "b"], "c")):
        with pytest.raises(DataError):
            data.rename(old, new)


# -- transport and reward managers ------------------------------------------------------------------------------------


@given(data=batches())
@relaxed
def test_a_pickle_in_memory_brings_everything_over(data: DataProto):
    assert pickle.loads(pickle.dumps(data)) == data


def test_a_pickled_slice_does_not_carry_the_whole():
    data = DataProto.from_dict({"x": torch.zeros(1000, 1000)})
    assert len(pickle.dumps(data[:1])) < 10_000
    item = pickle.loads(pickle.dumps(sample_batch(2)[1]))
    assert item.non_tensor_batch["uid"] == "uid-1"


def test_reward_managers_take_ours_and_anything_of_that_shape():
    assert isinstance(sample_batch(), RewardBatch)
    assert not isinstance({"batch": {}}, RewardBatch)


def test_verls_own_is_taken_and_becomes_ours():
    verl = pytest.importorskip("verl")
    theirs = verl.DataProto.from_dict(
        {"x": torch.zeros(2)}, {"o": np.array(["a", "b"], dtype=object)}, meta_info={"k": 1}
    )
    assert isinstance(theirs, RewardBatch)
    ours = DataProto(theirs.batch, theirs.non_tensor_batch, theirs.meta_info)
    assert ours == DataProto.from_dict({"x": torch.zeros(2)}, {"o": ["a", "b"]}, {"k": 1})


def test_equality_sees_types_shapes_values_and_meta_info():
    data = small_batch([1, 2], k=[float("nan")])
    assert data == data.select(deepcopy=True)
    assert data != data[:1] and data != data.select(meta_info_keys=[]) and data != "text"
    assert DataProto.from_dict({"x": torch.zeros(1)}) != DataProto.from_dict({"x": torch.zeros(1).long()})
    assert DataProto.from_dict({"x": torch.zeros(1)}) != DataProto.from_dict({"x": torch.zeros(1, 1)})
    assert "2 rows: x int64[], n, o" in repr(data)
