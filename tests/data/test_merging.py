"""The rules by which batches become one: what differs is merged as stated, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freewheel.data import DataError, DataProto, object_array

from .conftest import sample_batch, small_batch, values_of

NAN = float("nan")

# -- concat -----------------------------------------------------------------------------------------------------------


def test_rows_come_in_the_order_of_the_parts():
    assert values_of(DataProto.concat([small_batch([1]), small_batch([2, 3]), small_batch([])])) == [1, 2, 3]
    assert values_of(DataProto.concat(small_batch([value]) for value in (4, 5))) == [4, 5]
    with pytest.raises(DataError, match="no parts"):
        DataProto.concat([])


@pytest.mark.parametrize("key", ["x", "o"])
def test_a_key_that_a_part_lacks_is_an_error_that_names_both_ways_out(key: str):
    lacking = small_batch([3])
    lacking.pop([key] if key == "x" else None, [key] if key == "o" else None)
    with pytest.raises(DataError) as error:
        DataProto.concat([small_batch([1]), small_batch([]), lacking])
    for said in (f"{key!r}", "part 2", "missing={", "missing='drop'"):
        assert said in str(error.value)


def test_keys_that_not_all_have_are_left_out_on_demand():
    lacking = small_batch([3]).select([], ["o"])
    joined = DataProto.concat([small_batch([1, 2]), lacking], missing="drop")
    assert len(joined) == 3 and joined.batch is not None
    assert [*joined.batch.keys()] == [] and [*joined.non_tensor_batch] == ["o"]


def test_keys_that_a_part_lacks_are_filled_with_what_the_caller_says():
    part = DataProto.from_dict({"x": torch.tensor([[1.5, 2]])}, {"tools_kwargs": [{"a": 1}], "n": np.array([1])})
    bare = DataProto.from_dict(non_tensors={"n": np.array([2, 3])})
    joined = DataProto.concat([part, bare], missing={"x": NAN, "tools_kwargs": {}})
    assert joined == DataProto.from_dict(
        {"x": torch.tensor([[1.5, 2], [NAN, NAN], [NAN, NAN]])},
        {"tools_kwargs": [{"a": 1}, {}, {}], "n": np.array([1, 2, 3])},
    )
    filled = joined.non_tensor_batch["tools_kwargs"]
    assert filled[1] is not filled[2]


@pytest.mark.parametrize("value", ["text", None, 0.5, NAN])
def test_a_tensor_is_not_filled_with_what_it_cannot_hold(value: object):
    with pytest.raises(DataError, match=r"missing\['x'\].*int64"):
        DataProto.concat([small_batch([1]), small_batch([2]).select([])], missing={"x": value})


def test_an_unknown_rule_for_missing_keys_is_refused():
    with pytest.raises(DataError, match="'ignore'"):
        DataProto.concat([small_batch([1])], missing="ignore")


def test_parts_without_rows_need_no_columns():
    odd = DataProto.from_dict({"other": torch.zeros(0, 7)})
    for parts in ([DataProto(), small_batch([1]), odd], [odd, small_batch([1], k=1), DataProto(meta_info={"k": 1})]):
        assert values_of(DataProto.concat(parts)) == [1]
    empty = DataProto.concat([DataProto(), small_batch([])])
    assert values_of(empty) == []
    assert len(DataProto.concat([DataProto(), DataProto()])) == 0
    assert len(DataProto.concat([small_batch([1]).select([], [])] * 3)) == 3


def test_tensors_of_different_types_or_widths_are_not_promoted():
    ids = DataProto.from_dict({"x": torch.zeros(1, 2, dtype=torch.int64)})
    for other in (torch.zeros(1, 2), torch.zeros(1, 3, dtype=torch.int64)):
        with pytest.raises(DataError, match=r"'x'.*int64"):
            DataProto.concat([ids, DataProto.from_dict({"x": other})])


def test_arrays_of_different_types_keep_their_values():
    def joined(*columns: object) -> np.ndarray:
        return DataProto.concat(
            [DataProto.from_dict(non_tensors={"c": column}) for column in columns]
        ).non_tensor_batch["c"]

    assert joined(np.array([1, 2]), np.array([0.5])).tolist() == [1, 2, 0.5]
    assert joined(np.array([2**63 - 1]), np.array([0.5])).tolist() == [2**63 - 1, 0.5]
    assert joined(np.array([1]), ["a"]).tolist() == [1, "a"]
    assert joined(np.array(["a"]), np.array(["long"])).dtype == "<U4"
    assert joined(np.array([1]), np.array([2])).dtype == np.int64
    assert joined([[1], [2]], [[3, 4]]).tolist() == [[1], [2], [3, 4]]
    with pytest.raises(DataError, match="object_array"):
        joined(np.zeros((1, 2)), np.zeros((1, 3)))


def test_equal_meta_info_is_kept_and_the_rest_is_added():
    same = {"t": torch.tensor([NAN, 1]), "a": np.array([NAN]), "n": {"v": [NAN, (1,)]}}
    other = {"t": torch.tensor([NAN, 1]), "a": np.array([NAN]), "n": {"v": [float("nan"), (1,)]}}
    joined = DataProto.concat([small_batch([1], **same, left=1), small_batch([2], **other, right=2)])
    assert [*joined.meta_info] == ["t", "a", "n", "left", "right"]


def test_conflicting_meta_info_names_both_values_and_the_caller_can_decide():
    parts = [small_batch([1], temperature=1.0), small_batch([2], temperature=0.7)]
    with pytest.raises(DataError) as error:
        DataProto.concat(parts)
    for said in ("'temperature'", "1.0", "0.7", "meta_info={'temperature': value}"):
        assert said in str(error.value)
    assert DataProto.concat(parts, meta_info={"temperature": [1.0, 0.7]}).meta_info == {"temperature": [1.0, 0.7]}


def test_token_counts_are_joined_where_they_have_an_entry_per_row():
    first, second = sample_batch(2, seed=1), sample_batch(3, seed=2)
    counts = first.meta_info["global_token_num"] + second.meta_info["global_token_num"]
    assert DataProto.concat([first, second, first[:0]]).meta_info["global_token_num"] == counts
    one = small_batch([1], global_token_num=[7])
    assert DataProto.concat([one, one]).meta_info["global_token_num"] == [7, 7]


def test_token_counts_of_chunks_stay_those_of_the_whole():
    data = sample_batch(5)
    for parts in (data.chunk(2), data.chunk(7), data.split(1), [data[:2], data[2:]]):
        assert DataProto.concat(parts).meta_info == data.meta_info


def test_token_counts_that_fit_neither_rule_are_an_error():
    parts = [small_batch([1], global_token_num=[1, 2]), small_batch([2], global_token_num=[3])]
    with pytest.raises(DataError, match="'global_token_num'"):
        DataProto.concat(parts)
    assert DataProto.concat(parts, meta_info={"global_token_num": [9]}).meta_info == {"global_token_num": [9]}


# -- union ------------------------------------------------------------------------------------------------------------


def test_a_union_has_the_columns_of_both_and_changes_neither():
    left = DataProto.from_dict({"a": torch.tensor([NAN, 1])}, {"u": ["p", "q"]}, {"k": [NAN]})
    right = DataProto.from_dict({"a": torch.tensor([NAN, 1]), "b": torch.zeros(2)}, {"v": [1, 2]}, {"k": [NAN], "m": 1})
    before = left.select(deepcopy=True)
    both = left.union(right)
    assert both.batch is not None
    assert (
        [*both.batch.keys()] == ["a", "b"]
        and [*both.non_tensor_batch] == ["u", "v"]
        and [*both.meta_info] == ["k", "m"]
    )
    assert left == before


def test_a_union_with_only_one_kind_of_columns_works():
    tensors = DataProto.from_dict({"x": torch.zeros(2)})
    values = DataProto.from_dict(non_tensors={"o": ["a", "b"]})
    assert tensors.union(values) == values.union(tensors)
    assert DataProto(meta_info={"k": 1}).union(tensors).meta_info == {"k": 1}
    assert len(DataProto().union(tensors.select([]))) == 2


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (DataProto.from_dict({"x": torch.tensor([1, 3])}), ["batch['x']", "pop"]),
        (DataProto.from_dict({"x": torch.tensor([1.0, 2.0])}), ["batch['x']", "pop"]),
        (DataProto.from_dict(non_tensors={"o": object_array([[1], [3]])}), ["non_tensor_batch['o']", "pop"]),
        (DataProto(meta_info={"k": 2}), ["meta_info['k']", " 1 ", " 2 ", "union(..., meta_info={'k'"]),
        (small_batch([1]), ["2 and 1 rows"]),
        (small_batch([]), ["2 and 0 rows"]),
    ],
)
def test_a_union_of_what_contradicts_is_refused_by_name(other: DataProto, names: list[str]):
    with pytest.raises(DataError) as error:
        small_batch([1, 2], k=1).union(other)
    assert all(name in str(error.value) for name in names), str(error.value)


def test_the_caller_can_decide_what_holds_for_a_union():
    assert small_batch([1], k=1).union(small_batch([1], k=2), meta_info={"k": 3}).meta_info == {"k": 3}
