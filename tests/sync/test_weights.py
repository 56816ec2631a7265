"""Weights arrive as they left, byte for byte, in whatever type and shape; and a sum of contents tells when they did
not, whatever the one who holds them has done to their layout."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel.sync import weights as module
from freewheel.sync.weights import ALIGN_BYTES, content_sum, pack

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64]


def numbers(seed: int, count: int, kind: torch.dtype) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    if kind is torch.bool:
        return torch.randint(0, 2, (count,), generator=made).to(kind)
    return (torch.randn(count, generator=made) * 90).to(kind)


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
    assert packed.checksum == content_sum(given_.values()) == content_sum(reversed(found.values()))
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


def test_numpy_is_all_that_travels() -> None:
    assert isinstance(pack({"w": torch.ones(1)}).buffer, np.ndarray)


# -- the sum of contents ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 300),
    cuts=st.lists(st.integers(0, 300), max_size=4),
    padding=st.integers(0, 70),
    seed=st.integers(0, 9),
)
def test_a_sum_does_not_see_how_contents_are_split_fused_ordered_or_padded(
    kind: torch.dtype, count: int, cuts: list[int], padding: int, seed: int
) -> None:
    whole = numbers(seed, count, kind)
    expected = content_sum([whole])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    at = sorted(cut for cut in cuts if cut <= count)
    parts = list(whole.tensor_split(at))
    fused = torch.cat([whole[order], torch.zeros(padding, dtype=kind)])
    assert content_sum(parts) == content_sum(reversed(parts)) == content_sum([fused]) == expected
    square = torch.cat([whole, torch.zeros(-count % 7, dtype=kind)]).view(-1, 7)
    assert content_sum([square.T]) == expected
    assert 0 <= expected < 2**64


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([kind for kind in KINDS if kind is not torch.bool]),
    count=st.integers(1, 100),
    place=st.integers(0, 99),
    bit=st.integers(0, 63),
)
def test_a_flipped_bit_changes_the_sum(kind: torch.dtype, count: int, place: int, bit: int) -> None:
    sent = numbers(3, count, kind)
    arrived = sent.clone()
    data = arrived.view(torch.uint8).numpy()
    index = (place % count) * sent.element_size() + bit // 8 % sent.element_size()
    data[index] ^= 1 << bit % 8
    assert content_sum([arrived]) != content_sum([sent])


@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=9), st.data())
def test_what_moves_from_one_element_to_another_changes_the_sum_unless_they_change_places(
    values: list[int], data: st.DataObject
) -> None:
    """A plain sum of bit patterns would not notice."""
    a, b = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    step = data.draw(st.integers(1, 2**14))
    sent = torch.tensor(values, dtype=torch.int32)
    arrived = sent.clone()
    arrived[a] += step
    arrived[b] -= step
    same = sorted(arrived.tolist()) == sorted(values)
    assert (content_sum([arrived]) == content_sum([sent])) == same


def test_minus_zero_and_not_a_number_are_contents_too() -> None:
    assert content_sum([torch.tensor([-0.0])]) != content_sum([torch.tensor([0.0])]) == 0
    assert content_sum([torch.tensor([torch.nan])]) != 0


def test_types_of_one_width_differ_by_their_bits_alone() -> None:
    some = numbers(1, 50, torch.bfloat16)
    assert content_sum([some]) == content_sum([some.view(torch.int16)])
    assert content_sum([some]) != content_sum([some.half()])


def test_a_sum_in_pieces_is_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [numbers(seed, 1000, kind) for seed, kind in enumerate(KINDS)]
    expected = content_sum(tensors)
    monkeypatch.setitem(module.CHUNK, "cpu", 7)
    assert content_sum(tensors) == expected


def test_a_sum_is_what_its_formula_says() -> None:
    """Other processes, machines and releases of torch compute it too."""
    patterns = [1, -2, 2**31 - 1, -(2**31)]
    expected = sum(module._LINEAR * x + module._SQUARE * x * x for x in patterns) % 2**64
    assert content_sum([torch.tensor(patterns, dtype=torch.int32)]) == expected
    huge = [2**62 + 12345, -(2**63)]
    expected = sum(module._LINEAR * x + module._SQUARE * x * x for x in huge) % 2**64
    assert content_sum([torch.tensor(huge)]) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_and_a_cpu_agree() -> None:
    tensors = [numbers(seed, 100_003, kind) for seed, kind in enumerate(KINDS)]
    assert content_sum(tensor.cuda() for tensor in tensors) == content_sum(tensors)
