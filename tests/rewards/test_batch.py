"""`Rollouts`: what it reads of a `DataProto`, and the tensor it returns, for masks and lengths of every kind."""

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
from freewheel.rewards.scoring import Sample

from .conftest import Characters, Proto, Row, batch_of, objects


def samples_of(data: Any) -> list[Sample]:
    return Rollouts(data, "data_source").samples(Characters())


def groups_of(uids: Any) -> list[Any]:
    return [sample.group for sample in samples_of(batch_of(*"abc"[: len(uids)], uid=uids))]


def test_a_sample_has_all_that_its_row_says() -> None:
    data = batch_of(Row("yes", uid="u1", truth="42", source="s", extra={"question": "Q?", "index": 3}), Row("no", "u2"))
    first, second = samples_of(data)
    assert (first.response, first.length, first.group, first.data_source) == ("yes", 3, "u1", "s")
    assert (first.ground_truth, first.question, first.extra_info) == ("42", "Q?", {"question": "Q?", "index": 3})
    assert (second.question, second.extra_info) == ("Why?", {})


@pytest.mark.parametrize("question", [None, 7, ["chat"]])
def test_a_question_that_is_not_text_is_decoded_from_the_prompt(question: Any) -> None:
    assert samples_of(batch_of(Row("a", extra={"question": question})))[0].question == "Why?"


@given(st.lists(st.text("abc", max_size=7), max_size=6), st.integers(7, 9))
def test_every_reward_is_on_its_last_valid_token(texts: list[str], width: int) -> None:
    rollouts = Rollouts(batch_of(*texts, width=width), "data_source")
    assert [sample.response for sample in rollouts.samples(Characters())] == texts
    tensor = rollouts.tensor(np.arange(1.0, len(texts) + 1))
    assert tensor.shape == (len(texts), width) and tensor.dtype == torch.float32
    wanted = torch.zeros(len(texts), width)
    for row, text in enumerate(texts):
        wanted[row, max(len(text), 1) - 1] = row + 1
    assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_an_attention_mask_of_any_type_and_layout_counts(dtype: torch.dtype) -> None:
    data = batch_of("abc", "a")
    data.batch["attention_mask"] = data.batch["attention_mask"].to(dtype).t().contiguous().t()
    data.batch["responses"] = data.batch["responses"].t().contiguous().t()
    assert [(sample.response, sample.length) for sample in samples_of(data)] == [("abc", 3), ("a", 1)]


def test_uids_of_any_kind_are_groups_and_without_uids_equal_prompts_are() -> None:
    for uids in (["a", "b"], [1, 2], np.array(["a", "b"]), np.array([1, 2]), [("a", 1), ("a", 2)], [[1, 2], [3]]):
        first, second = groups_of(objects(uids) if isinstance(uids, list) else uids)
        assert first != second
    assert len(set(groups_of(objects([[1, 2], [1, 2]])))) == 1
    assert len(set(groups_of(objects(["u", None, None])))) == 3, "among uids, a row without one is alone"
    assert len(set(groups_of(objects([None, None])))) == 1
    data = batch_of("x", "y", "z", uid=None)
    data.batch["prompts"][2, -1] = ord("!")
    first, second, third = (sample.group for sample in samples_of(data))
    assert first == second != third


def test_a_snapshot_does_not_change_with_the_batch() -> None:
    data = batch_of(Row("yes", extra={"question": "Q?"}), "no")
    kept = copy.deepcopy(data)
    rollouts = Rollouts(data, "data_source")
    for tensor in data.batch.values():
        tensor.fill_(65)
    data.batch.clear()
    data.non_tensor_batch["uid"][:] = "other"
    data.non_tensor_batch["extra_info"][0].clear()
    data.non_tensor_batch["reward_model"][0]["ground_truth"] = "other"
    assert rollouts.samples(Characters()) == samples_of(kept)


def test_every_kind_of_container_is_read_alike() -> None:
    made = batch_of("one", "two", "three")
    ours = DataProto.from_dict(made.batch, made.non_tensor_batch, made.meta_info)
    locked = Proto(TensorDict(made.batch, batch_size=[3]).lock_(), made.non_tensor_batch)
    for data in (ours, locked):
        assert samples_of(data) == samples_of(made)
    assert samples_of(ours[1:]) == samples_of(made)[1:] and samples_of(ours[:0]) == []


def test_optional_columns_may_be_missing() -> None:
    data = batch_of("x", extra_info=None, uid=None, input_ids=None, position_ids=None, response_mask=None)
    assert len(samples_of(data)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({key: None}, key) for key in ("prompts", "responses", "attention_mask", "data_source", "reward_model")),
        *(
            ({column: objects(["a"])}, rf"{column}.*= 1: the batch has 2 rows")
            for column in ("data_source", "reward_model", "extra_info", "uid")
        ),
        ({"extra_info": objects(["text", None])}, r"extra_info\[0\] = 'text': give a mapping"),
        *(
            ({"attention_mask": torch.ones(2, width)}, rf"attention_mask.*= {width}: prompts and responses have 30")
            for width in (4, 60)
        ),
        *(
            ({"reward_model": objects([{"ground_truth": "a"}, given])}, r"reward_model\[1\].*ground_truth")
            for given in ({"style": "rule"}, None, "42")
        ),
    ],
)
def test_a_batch_that_cannot_be_scored_is_refused_at_once_by_its_column(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rollouts(batch_of("yes", "no", **change), "data_source")


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompts"):
        Rollouts(Proto(None, batch_of("a").non_tensor_batch), "data_source")
