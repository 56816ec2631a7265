"""`Rollouts`: what is read of a `DataProto`, and the tensor that goes back, for masks and lengths of every kind."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from freewheel.data import DataProto
from freewheel.judge import ConfigError
from freewheel.rewards.batch import Rollouts

from .conftest import Characters, Proto, Row, batch_of, objects

TOKENIZER = Characters()


def test_a_sample_has_all_that_its_row_tells() -> None:
    data = batch_of(Row("yes", uid="u1", truth="42", source="s", extra={"question": "Q?", "index": 3}), Row("no", "u2"))
    first, second = Rollouts(data, "data_source").samples(TOKENIZER)
    assert (first.response, first.length, first.group, first.data_source) == ("yes", 3, "u1", "s")
    assert (first.ground_truth, first.question, first.extra_info) == ("42", "Q?", {"question": "Q?", "index": 3})
    assert (second.question, second.extra_info) == ("Why?", {})


@pytest.mark.parametrize("question", [None, 7, ["chat"]])
def test_a_question_that_is_no_text_is_decoded_from_the_prompt(question: Any) -> None:
    [sample] = Rollouts(batch_of(Row("a", extra={"question": question})), "data_source").samples(TOKENIZER)
    assert sample.question == "Why?"


@given(st.lists(st.text("abc", max_size=7), max_size=6), st.integers(7, 9))
def test_every_reward_lies_on_its_last_valid_token(texts: list[str], width: int) -> None:
    rollouts = Rollouts(batch_of(*texts, width=width), "data_source")
    assert [sample.response for sample in rollouts.samples(TOKENIZER)] == texts
    rewards = np.arange(1.0, len(texts) + 1)
    tensor = rollouts.tensor(rewards)
    assert tensor.shape == (len(texts), width) and tensor.dtype == torch.float32
    wanted = torch.zeros(len(texts), width)
    for row, text in enumerate(texts):
        wanted[row, max(len(text), 1) - 1] = row + 1
    assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_an_attention_mask_of_any_type_counts(dtype: torch.dtype) -> None:
    data = batch_of("abc", "a")
    data.batch["attention_mask"] = data.batch["attention_mask"].to(dtype)
    rollouts = Rollouts(data, "data_source")
    samples = rollouts.samples(TOKENIZER)
    assert [sample.length for sample in samples] == [3, 1]
    assert [sample.response for sample in samples] == ["abc", "a"]
    assert rollouts.tensor(np.array([1.0, 2.0])).sum() == 3.0


def test_uids_of_any_hashable_kind_are_groups() -> None:
    for uids in (["a", "b"], [1, 2], np.array(["a", "b"]), np.array([1, 2]), [("a", 1), ("a", 2)]):
        column = objects(uids) if isinstance(uids, list) else uids
        first, second = Rollouts(batch_of("x", "y", uid=column), "data_source").samples(TOKENIZER)
        assert first.group != second.group


def test_without_uids_equal_prompts_are_a_group_and_other_prompts_are_not() -> None:
    data = batch_of("x", "y", "z", uid=None)
    data.batch["prompts"][2, -1] = ord("!")
    first, second, third = Rollouts(data, "data_source").samples(TOKENIZER)
    assert first.group == second.group != third.group


def test_it_is_a_snapshot_that_changes_to_the_batch_do_not_reach() -> None:
    data = batch_of(Row("yes", extra={"question": "Q?"}), "no")
    kept = copy.deepcopy(data)
    rollouts = Rollouts(data, "data_source")
    for tensor in data.batch.values():
        tensor.fill_(65)
    data.batch.clear()
    data.non_tensor_batch["uid"][:] = "other"
    data.non_tensor_batch["extra_info"][0].clear()
    data.non_tensor_batch["reward_model"][0]["ground_truth"] = "other"
    assert rollouts.samples(TOKENIZER) == Rollouts(kept, "data_source").samples(TOKENIZER)


def test_tensors_that_require_a_gradient_or_are_not_contiguous_are_taken() -> None:
    data = batch_of("abc", "a")
    data.batch["attention_mask"] = data.batch["attention_mask"].t().contiguous().t()
    data.batch["responses"] = data.batch["responses"].t().contiguous().t()
    assert [sample.response for sample in Rollouts(data, "data_source").samples(TOKENIZER)] == ["abc", "a"]


@pytest.mark.parametrize("kind", ["dict", "TensorDict", "DataProto", "locked TensorDict"])
def test_every_kind_of_container_is_read_alike(kind: str) -> None:
    made = batch_of("yes", "no")
    data: Any = made
    if "TensorDict" in kind:
        tensors = TensorDict(made.batch, batch_size=[2])
        data = Proto(tensors.lock_() if kind.startswith("locked") else tensors, made.non_tensor_batch)
    elif kind == "DataProto":
        data = DataProto.from_dict(made.batch, made.non_tensor_batch, made.meta_info)
    assert [sample.response for sample in Rollouts(data, "data_source").samples(TOKENIZER)] == ["yes", "no"]


def test_slices_and_rows_of_our_data_proto_are_taken() -> None:
    made = batch_of("one", "two", "three")
    data = DataProto.from_dict(made.batch, made.non_tensor_batch, made.meta_info)
    assert [one.response for one in Rollouts(data[1:], "data_source").samples(TOKENIZER)] == ["two", "three"]
    assert Rollouts(data[:0], "data_source").samples(TOKENIZER) == []


@pytest.mark.parametrize("key", ["prompts", "responses", "attention_mask", "data_source", "reward_model"])
def test_what_is_missing_is_named_when_the_batch_is_handed_in(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Rollouts(batch_of("x", **{key: None}), "data_source")


def test_what_may_be_missing_is_not_missed() -> None:
    data = batch_of("x", extra_info=None, uid=None, input_ids=None, position_ids=None, response_mask=None)
    assert len(Rollouts(data, "data_source").samples(TOKENIZER)) == 1


@pytest.mark.parametrize("column", ["data_source", "reward_model", "extra_info", "uid"])
def test_a_column_of_another_length_is_named(column: str) -> None:
    data = batch_of("a", "b")
    data.non_tensor_batch[column] = data.non_tensor_batch[column][:1]
    with pytest.raises(ConfigError, match=rf"{column}.*= 1: the batch has 2 rows"):
        Rollouts(data, "data_source")


def test_extra_info_that_is_no_mapping_is_named() -> None:
    with pytest.raises(ConfigError, match=r"extra_info\[0\] = 'text': give a mapping"):
        Rollouts(batch_of(Row("a", extra="text")), "data_source")  # type: ignore[arg-type]


def test_uids_may_be_lists_and_arrays() -> None:
    data = batch_of("a", "b", "c", uid=objects([[1, 2], [1, 2], [3]]))
    groups = [sample.group for sample in Rollouts(data, "data_source").samples(TOKENIZER)]
    assert groups[0] == groups[1] != groups[2]


@pytest.mark.parametrize("width", [4, 60])
def test_a_mask_of_another_width_is_refused(width: int) -> None:
    data = batch_of("a")
    data.batch["attention_mask"] = torch.ones(1, width, dtype=torch.int64)
    with pytest.raises(ConfigError, match=rf"attention_mask.*= {width}: prompts and responses have 30 tokens together"):
        Rollouts(data, "data_source")


def test_a_uid_that_is_none_is_no_uid() -> None:
    def groups(*uids: str | None) -> list[Any]:
        data = batch_of(*"abc"[: len(uids)], uid=objects(uids))
        return [sample.group for sample in Rollouts(data, "data_source").samples(TOKENIZER)]

    one, other, third = groups("u", None, None)
    assert len({one, other, third}) == 3
    assert len(set(groups(None, None))) == 1, "equal prompts are a group where no row has a uid"


@pytest.mark.parametrize("given", [{"style": "rule"}, None, "42"])
def test_a_row_without_a_ground_truth_is_named_by_its_number(given: Any) -> None:
    column = objects([{"ground_truth": "a"}, given])
    with pytest.raises(ConfigError, match=r"reward_model\[1\].*ground_truth"):
        Rollouts(batch_of("yes", "no", reward_model=column), "data_source")


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompts"):
        Rollouts(Proto(None, batch_of("a").non_tensor_batch), "data_source")
