"""Weights arrive bit for bit, in any type and shape, and the checksum shows when they did not."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel.sync import weights as module
from freewheel.sync.weights import bucket_sizes, by_bucket, content_sum, in_buckets, pack, sum_of_buckets, views

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64]


def numbers(seed: int, count: int, kind: torch.dtype) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    if kind is torch.bool:
        return torch.randint(0, 2, (count,), generator=made).to(kind)
    return (torch.randn(count, generator=made) * 90).to(kind)


models = st.lists(
    st.tuples(st.lists(st.integers(0, 6), max_size=3), st.sampled_from(KINDS)), min_size=1, max_size=12
).map(
    lambda tensors: (
        {
            f"w{index}": numbers(index, torch.Size(shape).numel(), kind).reshape(shape)
            for index, (shape, kind) in enumerate(tensors)
        }
        | {"head": torch.ones(1)}
    )  # a model is never empty
)


# -- layout -----------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(models, st.integers(1, 400))
def test_buckets_have_all_tensors_in_order_and_they_read_as_they_were_written(
    tensors: dict[str, Tensor], bucket_bytes: int
) -> None:
    entries = in_buckets(tensors, bucket_bytes)
    assert list(entries) == list(tensors)
    parts, sizes = by_bucket(entries), bucket_sizes(entries)
    assert sum(map(len, parts)) == len(tensors) and all(parts)
    for part, size in zip(parts, sizes, strict=True):
        end = 0
        for name, entry in part.items():
            width = tensors[name].element_size()
            assert entry.start % width == 0 and end <= entry.start < end + width, "no gap but for the alignment"
            end = entry.start + entry.n_bytes
        assert end == size
        assert size <= bucket_bytes or sum(entry.n_bytes > 0 for entry in part.values()) == 1
    buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for name, target in views(entries, buffers).items():
        target.copy_(tensors[name])
    found = views(entries, buffers)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    packed = pack(tensors)
    for name, tensor in packed.tensors().items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
    sums = packed.checksum, sum_of_buckets(entries, buffers), content_sum(reversed(found.values()))
    assert sums == (content_sum(tensors.values()),) * 3


def test_a_bucket_is_filled_to_its_last_byte() -> None:
    tensors = {name: torch.zeros(2) for name in "abc"}
    assert bucket_sizes(in_buckets(tensors, 16)) == [16, 8]


def test_a_packed_copy_does_not_follow_its_source_and_reads_views_in_their_order() -> None:
    source = torch.arange(6.0).reshape(2, 3)
    expected = source.T.clone()
    packed = pack({"w": source.T})
    source += 1
    assert torch.equal(packed.tensors()["w"], expected)


@pytest.mark.filterwarnings("error")
def test_a_read_only_buffer_is_read_without_a_warning() -> None:
    """The object store's buffers are read-only."""
    packed = pickle.loads(pickle.dumps(pack({"w": torch.ones(2)})))
    packed.buffer.setflags(write=False)
    assert packed.tensors()["w"].tolist() == [1.0, 1.0]


# -- the checksum -----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 300),
    cuts=st.lists(st.integers(0, 300), max_size=4),
    padding=st.integers(0, 70),
    seed=st.integers(0, 9),
)
def test_a_checksum_does_not_depend_on_splitting_fusing_order_or_padding(
    kind: torch.dtype, count: int, cuts: list[int], padding: int, seed: int
) -> None:
    whole = numbers(seed, count, kind)
    expected = content_sum([whole])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = list(whole.tensor_split(sorted(cut for cut in cuts if cut <= count)))
    fused = torch.cat([whole[order], torch.zeros(padding, dtype=kind)])
    assert content_sum(parts) == content_sum(reversed(parts)) == content_sum([fused]) == expected
    square = torch.cat([whole, torch.zeros(-count % 7, dtype=kind)]).view(-1, 7)
    assert content_sum([square.T]) == expected
    assert 0 <= expected < 2**64


@settings(max_examples=60)
@given(
    kind=st.sampled_from([kind for kind in KINDS if kind is not torch.bool]),
    count=st.integers(1, 100),
    place=st.integers(0, 99),
    bit=st.integers(0, 63),
)
def test_a_flipped_bit_changes_the_checksum(kind: torch.dtype, count: int, place: int, bit: int) -> None:
    sent = numbers(3, count, kind)
    arrived = sent.clone()
    data = arrived.view(torch.uint8).numpy()
    index = (place % count) * sent.element_size() + bit // 8 % sent.element_size()
    data[index] ^= 1 << bit % 8
    assert content_sum([arrived]) != content_sum([sent])


@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=9), st.data())
def test_a_change_of_two_elements_changes_the_checksum_unless_they_are_swapped(
    values: list[int], data: st.DataObject
) -> None:
    """A plain sum of bit patterns would miss it."""
    a, b = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    step = data.draw(st.integers(1, 2**14))
    sent = torch.tensor(values, dtype=torch.int32)
    arrived = sent.clone()
    arrived[a] += step
    arrived[b] -= step
    same = sorted(arrived.tolist()) == sorted(values)
    assert (content_sum([arrived]) == content_sum([sent])) == same


def test_a_checksum_depends_on_bit_patterns_alone() -> None:
    assert content_sum([torch.tensor([-0.0])]) != content_sum([torch.tensor([0.0])]) == 0
    assert content_sum([torch.tensor([torch.nan])]) != 0
    some = numbers(1, 50, torch.bfloat16)
    assert content_sum([some]) == content_sum([some.view(torch.int16)]) != content_sum([some.half()])


@pytest.mark.parametrize(
    ("patterns", "kind"), [([1, -2, 2**31 - 1, -(2**31)], torch.int32), ([2**62 + 12345, -(2**63)], torch.int64)]
)
def test_a_checksum_follows_its_formula(
    monkeypatch: pytest.MonkeyPatch, patterns: list[int], kind: torch.dtype
) -> None:
    """Other processes, machines and releases of torch compute it too, in pieces of their own size."""
    expected = sum(module._LINEAR * x + module._SQUARE * x * x for x in patterns) % 2**64
    assert content_sum([torch.tensor(patterns, dtype=kind)]) == expected
    monkeypatch.setitem(module.CHUNK, "cpu", 3)
    assert content_sum([torch.tensor(patterns, dtype=kind)]) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_and_a_cpu_agree() -> None:
    tensors = [numbers(seed, 100_003, kind) for seed, kind in enumerate(KINDS)]
    assert content_sum(tensor.cuda() for tensor in tensors) == content_sum(tensors)
