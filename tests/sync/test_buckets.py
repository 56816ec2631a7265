"""Where a tensor lies in its bucket follows from the sizes of those before it, and every bucket keeps its limit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.sync.weights import bucket_sizes, by_bucket, content_sum, in_buckets, sum_of_buckets, views

KINDS = [torch.float32, torch.bfloat16, torch.int64, torch.bool]

tensors_ = st.lists(
    st.tuples(st.lists(st.integers(0, 6), max_size=3), st.sampled_from(KINDS)), min_size=1, max_size=12
).map(
    lambda kinds: {
        f"w{index}": torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(index)).to(kind)
        for index, (shape, kind) in enumerate(kinds)
    }
)


@settings(max_examples=80, deadline=None)
@given(tensors_, st.integers(1, 400))
def test_a_bucket_is_full_of_aligned_tensors_one_after_the_other(
    tensors: dict[str, torch.Tensor], bucket_bytes: int
) -> None:
    entries = in_buckets(tensors, bucket_bytes)
    assert entries.keys() == tensors.keys()
    parts = by_bucket(entries)
    assert sum(map(len, parts)) == len(tensors) and all(parts)
    for part, size in zip(parts, bucket_sizes(entries), strict=True):
        end = 0
        for name, entry in part.items():
            assert entry.start == end, "nothing lies in between"
            assert entry.start % tensors[name].element_size() == 0
            end += entry.n_bytes
        assert end == size
        assert size <= bucket_bytes or sum(entry.n_bytes > 0 for entry in part.values()) == 1


@settings(max_examples=40, deadline=None)
@given(tensors_, st.integers(1, 400))
def test_what_is_written_into_buckets_reads_as_it_was_and_has_its_sum(
    tensors: dict[str, torch.Tensor], bucket_bytes: int
) -> None:
    entries = in_buckets(tensors, bucket_bytes)
    buffers = [torch.empty(size, dtype=torch.uint8) for size in bucket_sizes(entries)]
    for name, target in views(entries, buffers).items():
        target.copy_(tensors[name])
    found = views(entries, buffers)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert sum_of_buckets(entries, buffers) == content_sum(tensors.values())


def test_layers_stay_together() -> None:
    """vLLM puts a layer together when all of it has arrived."""
    tensors = {f"layer.{index}.{part}": torch.zeros(4) for index in range(3) for part in "qkv"}
    assert list(in_buckets(tensors, 1 << 20)) == list(tensors)
