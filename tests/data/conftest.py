"""Batches to work on: one as the spec describes a sample, small ones, and ones that hypothesis makes up."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from freewheel.data import DataProto, object_array


def sample_batch(rows: int = 4, *, prompt_tokens: int = 3, response_tokens: int = 5, seed: int = 0) -> DataProto:
    """Rows of GSM8K as the spec lists them: prompts [P], responses [R], masks, and what belongs to each."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 1000, (rows, prompt_tokens), generator=generator)
    responses = torch.randint(1, 1000, (rows, response_tokens), generator=generator)
    lengths = torch.randint(1, response_tokens + 1, (rows, 1), generator=generator)
    response_mask = (torch.arange(response_tokens) < lengths).long()
    attention_mask = torch.cat([torch.ones_like(prompts), response_mask], dim=1)
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": attention_mask.cumsum(dim=1) - 1,
            "response_mask": response_mask,
        },
        {
            "data_source": ["openai/gsm8k"] * rows,
            "ability": ["math"] * rows,
            "reward_model": [{"ground_truth": str(row), "style": "rule"} for row in range(rows)],
            "extra_info": [
                {"answer": f"#### {row}", "index": row, "question": f"What is {row}?", "split": "train"}
                for row in range(rows)
            ],
            "uid": [f"uid-{row}" for row in range(rows)],
            "tools_kwargs": [{} for _ in range(rows)],
            "interaction_kwargs": [{} for _ in range(rows)],
            "index": np.arange(rows),
        },
        {"global_token_num": attention_mask.sum(dim=1).tolist()},
    )


def small_batch(values: list[int], **meta_info: Any) -> DataProto:
    """One tensor `x`, one number column `n` and one object column `o`, which all hold the same values."""
    return DataProto.from_dict(
        {"x": torch.tensor(values, dtype=torch.int64)},
        {"n": np.array(values, dtype=np.int64), "o": [[value] for value in values]},
        meta_info,
    )


def values_of(data: DataProto) -> list[int]:
    """The values of a `small_batch`, after a check that its three columns still go together."""
    assert data.batch is not None
    values: list[int] = data.batch["x"].tolist()
    assert data.non_tensor_batch["n"].tolist() == values
    assert data.non_tensor_batch["o"].tolist() == [[value] for value in values]
    return values


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
plain_values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.just("$float"), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0, max_rows: int = 7) -> DataProto:
    """Any number of rows; tensors of several types and widths, numbers, text and nested values; any `meta_info`."""
    rows = draw(st.integers(min_rows, max_rows))
    width = draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    real = torch.randn(rows, width, generator=generator)
    real[real > 1] = float("nan")
    tensors = {"real": real, "half": real.bfloat16(), "flag": real[:, :1] > 0, "ids": torch.arange(rows)}
    column = st.lists(plain_values, min_size=rows, max_size=rows)
    return DataProto.from_dict(
        draw(st.sampled_from([tensors, {}])),
        {
            "any": object_array(draw(column)),
            "number": np.array(draw(st.lists(st.floats(), min_size=rows, max_size=rows)), dtype=np.float64),
            "text": np.array([f"row {row}" for row in range(rows)], dtype="<U8"),
        },
        draw(st.dictionaries(st.text(max_size=3), plain_values, max_size=3)) | {"global_token_num": list(range(rows))},
    )
