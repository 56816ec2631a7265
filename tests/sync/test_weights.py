"""Weights arrive as they left, byte for byte, in whatever type and shape; and a checksum tells when they did not."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.sync.weights import ALIGN_BYTES, checksum, pack

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
    kinds=st.lists(st.sampled_from(KINDS), min_size=6, max_size=6),
)
def test_every_shape_and_type_comes_back_bit_for_bit(shapes: list[list[int]], kinds: list[torch.dtype]) -> None:
    made = torch.Generator().manual_seed(0)
    given_ = {"head": torch.ones(1)} | {
        f"layer.{index}": torch.randint(-9, 9, shape, generator=made).to(kind)
        for index, (shape, kind) in enumerate(zip(shapes, kinds, strict=False))
    }
    packed = pack(given_)
    found = packed.tensors()
    assert list(found) == list(given_)
    for name, tensor in given_.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert packed.checksum == checksum(given_.items()) == checksum(reversed(found.items()))
    assert all(entry.start % ALIGN_BYTES == 0 for entry in packed.entries.values())


def test_a_packed_copy_does_not_follow_its_source() -> None:
    source = torch.zeros(3)
    packed = pack({"w": source})
    source += 1
    assert packed.tensors()["w"].tolist() == [0.0, 0.0, 0.0]


def test_views_that_are_not_contiguous_are_packed_as_they_read() -> None:
    square = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(pack({"w": square.T}).tensors()["w"], square.T)


@pytest.mark.filterwarnings("error")
def test_a_buffer_that_cannot_be_written_is_read_without_complaint() -> None:
    """As the object store gives it."""
    packed = pickle.loads(pickle.dumps(pack({"w": torch.ones(2)})))
    packed.buffer.setflags(write=False)
    assert packed.tensors()["w"].tolist() == [1.0, 1.0]
    assert packed.n_bytes == ALIGN_BYTES


def test_a_checksum_notices_a_value_a_name_and_an_exchange() -> None:
    base = {"a": torch.zeros(2), "b": torch.ones(2)}
    others = [
        {"a": torch.tensor([0.0, 1e-30]), "b": torch.ones(2)},
        {"a": torch.zeros(2), "c": torch.ones(2)},
        {"a": torch.ones(2), "b": torch.zeros(2)},
        {"a": torch.zeros(2)},
    ]
    assert len({checksum(one.items()) for one in [base, *others]}) == len(others) + 1


def test_numpy_is_all_that_travels() -> None:
    assert isinstance(pack({"w": torch.ones(1)}).buffer, np.ndarray)
