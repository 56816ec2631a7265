"""The padded batch that a hook or a reward manager receives, and what it may return."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from freewheel.data import DataProto
from freewheel.data.group import NO_VERSION, Prompt, PromptGroup, Response, Ticket
from freewheel.data.padded import from_data_proto, prompt_to_data_proto, to_data_proto
from freewheel.errors import DataError

from .responses import response

PAD = 0
TICKET = Ticket(7, 70)


def prompt(tokens: list[int], **row: Any) -> Prompt:
    return Prompt(tokens=np.array(tokens, np.int32), row={"data_source": "openai/gsm8k"} | row)


def groups() -> list[PromptGroup]:
    first = prompt([5, 6, 7], reward_model={"ground_truth": "1", "style": "rule"}, index=11, level=3)
    second = prompt([8], reward_model={"ground_truth": "2", "style": "rule"}, index=12)
    holed = response([21, 22, 23, 24], mask=[1, 0, 0, 1], value=0.5)
    return [
        PromptGroup.of(Ticket(4, 40), first, [response([11, 12]), holed], 0.0),
        PromptGroup.of(Ticket(9, 41), second, [response([31], value=math.nan)], 0.0),
    ]


def column(data: DataProto, key: str) -> list[Any]:
    assert data.batch is not None
    values: list[Any] = data.batch[key].tolist()
    return values


PADDED = {
    "prompts": [[5, 6, 7], [5, 6, 7], [0, 0, 8]],  # on the left
    "responses": [[11, 12, 0, 0], [21, 22, 23, 24], [31, 0, 0, 0]],  # on the right
    "input_ids": [[5, 6, 7, 11, 12, 0, 0], [5, 6, 7, 21, 22, 23, 24], [0, 0, 8, 31, 0, 0, 0]],
    "attention_mask": [[1, 1, 1, 1, 1, 0, 0], [1] * 7, [0, 0, 1, 1, 0, 0, 0]],  # a hole is attended to
    "position_ids": [[0, 1, 2, 3, 4, 4, 4], [0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1, 1]],
    "response_mask": [[1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 0, 0]],  # and not trained on
    "rollout_log_probs": [[-1.0, -2.0, 0.0, 0.0], [-1.0, 0.0, 0.0, -4.0], [-1.0, 0.0, 0.0, 0.0]],
    "versions": [[3, 3, NO_VERSION, NO_VERSION], [3, NO_VERSION, NO_VERSION, 3], [3] + [NO_VERSION] * 3],
    "token_level_scores": [[0, 1.0, 0, 0], [0, 0, 0, 0.5], [0, 0, 0, 0]],  # on the last token; the third failed
    "reward_mask": [1, 1, 0],
}
FLOATS = ("rollout_log_probs", "token_level_scores")


def test_groups_become_padded_tensors_and_columns():
    data = to_data_proto(groups(), pad_token_id=PAD)
    assert {key: column(data, key) for key in PADDED} == PADDED
    assert data.batch is not None and set(data.batch.keys()) == set(PADDED)
    assert all(data.batch[key].dtype == (torch.float32 if key in FLOATS else torch.int64) for key in PADDED)
    assert data.meta_info == {"global_token_num": [5, 7, 2]}
    columns = {key: data.non_tensor_batch[key].tolist() for key in ("uid", "index", "level", "reward_status")}
    assert columns == {
        "uid": ["4", "4", "9"],
        "index": [11, 11, 12],
        "level": [3, 3, None],
        "reward_status": ["scored", "scored", "failed"],
    }
    with pytest.raises(DataError, match="at least one response"):
        to_data_proto([], pad_token_id=PAD)


def test_changes_that_a_hook_makes_to_a_row_stay_in_that_row():
    made = groups()
    data = to_data_proto(made, pad_token_id=PAD).non_tensor_batch
    data["reward_model"][0]["ground_truth"] = "changed"
    data["extra_info"][0]["seen"] = True
    assert [one["ground_truth"] for one in data["reward_model"]] == ["changed", "1", "2"]
    assert made[0].row["reward_model"]["ground_truth"] == "1"
    assert data["extra_info"][1:].tolist() == [{}, {}]


def test_a_prompt_is_repeated_for_a_generation_hook():
    data = prompt_to_data_proto(prompt([5, 6], index=1), 2, 30)
    tokens = {"input_ids": [5, 6], "prompts": [5, 6], "attention_mask": [1, 1], "position_ids": [0, 1]}
    assert {key: column(data, key) for key in tokens} == {key: [row] * 2 for key, row in tokens.items()}
    assert data.non_tensor_batch["uid"].tolist() == ["30"] * 2 and data.non_tensor_batch["index"].tolist() == [1] * 2
    data.non_tensor_batch["extra_info"][0]["seen"] = True
    assert data.non_tensor_batch["extra_info"][1] == {} and data.meta_info == {"global_token_num": [2, 2]}


def test_a_padded_group_converts_back_to_the_same_responses():
    first = groups()[0]
    found = from_data_proto(to_data_proto([first], pad_token_id=PAD), TICKET, prompt([5, 6, 7]), 99)
    wanted = [replace(first.response(index), verdict=None, reward=math.nan, raw_reward=math.nan) for index in range(2)]
    assert list(map(repr, found)) == list(map(repr, wanted))


def hook_result(**changes: Any) -> DataProto:
    tensors: dict[str, Any] = {
        "responses": torch.tensor([[11, 12, 0], [21, 22, 23]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1]]),
        "rollout_log_probs": torch.tensor([[-1.0, -2.0, -9.0], [-1.0, math.nan, -3.0]]),
    } | changes
    return DataProto.from_dict({key: value for key, value in tensors.items() if value is not None})


def read(data: DataProto, **options: Any) -> list[Response]:
    return from_data_proto(data, TICKET, prompt([5]), 8, **options)


def test_without_versions_all_tokens_get_the_current_one():
    first, second = read(hook_result())
    assert first.versions.tolist() == [8, 8] and second.versions.tolist() == [8, NO_VERSION, 8]
    assert second.mask.tolist() == [1, 0, 1] and second.logprobs.tolist() == [-1.0, 0.0, -3.0]


def test_an_attention_mask_replaces_a_missing_response_mask():
    attention = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])  # one token of the prompt before
    data = hook_result(
        response_mask=None,
        attention_mask=attention,
        rollout_log_probs=-torch.ones(2, 3),
        prompts=torch.tensor([[5]] * 2),
    )
    assert [one.tokens.tolist() for one in read(data)] == [[11, 12], [21, 22, 23]]
    gap = hook_result(attention_mask=torch.tensor([[1, 0, 1], [1, 1, 1]]))
    with pytest.raises(DataError, match="not padded on the right in row 0"):
        read(gap)


def test_how_a_response_ended_is_given_or_follows_from_its_tokens():
    assert [one.finish for one in read(hook_result())] == ["stop", "length"]  # the second fills its row
    assert [one.finish for one in read(hook_result(), stop_token_ids=[23])] == ["length", "stop"]
    told = hook_result()
    told.non_tensor_batch["finish"] = np.array(["length", "stop"], dtype=object)
    assert [one.finish for one in read(told)] == ["length", "stop"]
    told.non_tensor_batch["finish"][0] = "eos"
    with pytest.raises(DataError, match="finish = 'eos': use 'stop' or 'length'"):
        read(told)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"responses": None}, "ordinal 7: .* has no responses: add it to batch; it has .*response_mask"),
        ({"rollout_log_probs": None}, "has no rollout_log_probs"),
        ({"response_mask": None}, "neither response_mask nor attention_mask"),
        ({"rollout_log_probs": -torch.ones(2, 2)}, r"rollout_log_probs of the shape \[2, 2\] for responses \[2, 3\]"),
        ({"rollout_log_probs": torch.full((2, 3), math.nan)}, "row 0: rollout_log_probs holds nan"),
        ({"rollout_log_probs": torch.ones(2, 3)}, r"rollout_log_probs holds 1\.0: .*at most 0"),
        ({"response_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "no token in row 1"),
        ({"prompts": torch.tensor([[5], [6]])}, "changed the prompts that it received"),
        (
            {"response_mask": torch.zeros(2, 3, dtype=torch.int64), "attention_mask": torch.ones(2, 3)},
            "response_mask is 0 throughout",
        ),
    ],
)
def test_a_hooks_result_that_cannot_be_used_is_refused_by_name(changes: dict[str, Any], said: str):
    with pytest.raises(DataError, match=said):
        read(hook_result(**({"rollout_log_probs": -torch.ones(2, 3)} | changes)))
