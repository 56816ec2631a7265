"""Every trained token is in exactly one micro-batch, and sees its prompt and what came before it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freewheel.data.group import PromptGroup
from freewheel.trainer.batching import (
    MULTIPLE,
    PIECES,
    MicroBatch,
    TrainingSample,
    micro_batches,
    mini_batches,
    packed_batches,
    row_length,
    share_out,
)
from freewheel.trainer.options import AlgorithmConfig

from .groups import make_group, make_response, random_group, samples_of

NAN = float("nan")
ALWAYS = 1e9


def batches_of(samples: list[TrainingSample], budget: int, *, packed: bool, share: float | None) -> list[MicroBatch]:
    if packed:
        return packed_batches(samples, budget, share=share is not None)
    return micro_batches(samples, budget, share)


def samples_of_sizes(sizes: list[tuple[int, list[int]]]) -> list[TrainingSample]:
    """Of each group: the length of its prompt and those of its responses."""
    return samples_of(
        [
            make_group(ordinal, [make_response([5] * n, value=1.0) for n in lengths], prompt=[1] * n_prompt)
            for ordinal, (n_prompt, lengths) in enumerate(sizes)
        ]
    )


def seen_by(batch: MicroBatch) -> list[list[int]]:
    """Return the places in the flattened rows that each place sees."""
    shape = batch.inputs["input_ids"].shape
    places = torch.arange(shape.numel()).reshape(shape)
    if "attention_mask" in batch.inputs:
        return [
            row[mask].tolist()
            for row, masks in zip(places, batch.inputs["attention_mask"], strict=True)
            for mask in masks[0]
        ]
    if "cu_seq_lens_q" not in batch.inputs:  # plain causal rows
        return [row[: end + 1].tolist() for row in places for end in range(len(row))]
    query_ends, key_ends, key_rows = (batch.inputs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "key_rows"))
    rows = places[0] if key_rows is None else key_rows
    found: list[list[int]] = []
    for piece in range(len(query_ends) - 1):
        keys = rows[key_ends[piece] : key_ends[piece + 1]].tolist()
        queries = int(query_ends[piece + 1] - query_ends[piece])
        found += [keys[: len(keys) - queries + place + 1] for place in range(queries)]
    return found


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 9), st.sets(st.integers(0, 4)), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    budget=st.integers(1, 120),
    share=st.sampled_from([None, 1.0, 48.0, ALWAYS]),
    packed=st.booleans(),
    mini=st.integers(1, 3),
)
def test_every_token_of_a_scored_response_is_predicted_once_from_its_prompt_and_what_came_before(
    shapes, budget, share, packed, mini
) -> None:
    groups = [
        random_group(ordinal, n=n, seed=seed, failed=tuple(failed), holes=holes)
        for ordinal, (n, seed, failed, holes) in enumerate(shapes)
    ]
    wanted: Counter[Any] = Counter()
    for group in groups:
        for index in np.flatnonzero(group.scored):
            one = group.response(index)
            for place in np.flatnonzero(one.mask):
                before = (*group.prompt.tolist(), *one.tokens[:place].tolist())
                wanted[(group.ordinal, int(index)), before, int(one.tokens[place]), float(one.logprobs[place])] += 1
    found: Counter[Any] = Counter()
    samples = samples_of(groups, mini_batches=mini)
    for batch in batches_of(samples, budget, packed=packed, share=share):
        n_tokens = batch.inputs["input_ids"].numel()
        ids, seen = batch.inputs["input_ids"].flatten(), seen_by(batch)
        assert len(seen) == n_tokens and all(seen), "every place sees at least itself"
        assert n_tokens <= max(budget, max(row_length([one]) for one in samples)) + (MULTIPLE - 1) * packed
        if "position_ids" in batch.inputs:
            ordered = batch.inputs["position_ids"].flatten()
            assert all(ordered[seen[place]].tolist() == list(range(len(seen[place]))) for place in batch.positions)
        given = zip(batch.positions, batch.targets, batch.sequence, batch.behaviour, strict=True)
        for position, target, sequence, logp in given:
            found[batch.keys[sequence], tuple(ids[seen[position]].tolist()), int(target), float(logp)] += 1
    assert found == wanted


def test_prompts_are_shared_only_where_that_is_cheaper() -> None:
    for size, rows in (((50, [2] * 4), 1), ((1, [50] * 4), 4)):
        (batch,) = micro_batches(samples_of_sizes([size]), 10_000, 60.0)
        assert len(batch.inputs["input_ids"]) == rows


def test_similar_lengths_are_batched_together_longest_first() -> None:
    samples = samples_of_sizes([(2, [n]) for n in (3, 17, 4, 16, 3, 18)])
    found = [batch.inputs["input_ids"].shape for batch in micro_batches(samples, 60)]
    assert [tuple(shape) for shape in found] == [(3, 20), (3, 6)]


@pytest.mark.parametrize(
    ("groups", "budget", "wanted"),
    [([(56, [100] * 2)] * 5, 768, [768, 512]), ([(228, [100] * 8)], 640, [640, 640])],
    ids=["whole groups", "a group that does not fit"],
)
def test_packed_rows_are_as_equal_as_possible_and_split_a_group_that_does_not_fit(groups, budget, wanted) -> None:
    samples = samples_of_sizes(groups)
    batches = packed_batches(samples, budget, share=True)
    assert [batch.inputs["input_ids"].numel() for batch in batches] == wanted
    assert sum(batch.n_sequences for batch in batches) == len(samples)


@pytest.mark.parametrize("packed", [False, True])
def test_the_order_of_arrival_is_irrelevant(packed: bool) -> None:
    groups = [random_group(ordinal) for ordinal in range(5)]
    found = []
    for some in (groups, groups[::-1]):
        samples = samples_of(some, [10.0 * group.ordinal + np.arange(len(group)) for group in some], mini_batches=2)
        found.append(batches_of(samples, 40, packed=packed, share=1.0))
    for one, other in zip(*found, strict=True):
        assert one.keys == other.keys
        assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
        assert torch.equal(one.advantages, other.advantages)


def test_each_token_carries_its_responses_advantage_and_version() -> None:
    group = make_group(3, [make_response([5, 6], value=1.0, version=7), make_response([8], value=2.0, version=9)])
    (batch,) = micro_batches(samples_of([group], [np.array([30.0, 31.0])]), 100)
    assert batch.keys == ((3, 0), (3, 1))
    assert batch.advantages.tolist() == [30, 30, 31]
    assert batch.versions.tolist() == [7, 7, 9]
    assert batch.rewards == (1.0, 2.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("budget", [1, 10_000])
def test_weights_are_those_of_the_whole_mini_batch_whatever_the_budget(aggregation: str, budget: int) -> None:
    samples = samples_of([random_group(n, holes=True, failed=(1,)) for n in range(4)], aggregation=aggregation)
    assert sum(float(batch.weights.sum()) for batch in micro_batches(samples, budget)) == pytest.approx(1)


def test_mini_batches_hold_whole_groups_and_none_is_empty() -> None:
    def deal(groups: list[PromptGroup], count: int) -> list[set[int]]:
        parts = mini_batches(groups, [group.rewards for group in groups], AlgorithmConfig(mini_batches=count))
        return [{sample.key[0] for sample in part} for part in parts]

    assert deal([random_group(ordinal) for ordinal in range(5)], 2) == [{0, 2, 4}, {1, 3}]
    assert deal([random_group(0), make_group(1, [make_response([5], value=NAN)])], 4) == [{0}]


def cost(samples: list[TrainingSample]) -> int:
    return sum(row_length([sample]) for sample in samples)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(1, 200), min_size=1, max_size=8)), max_size=12),
    n_ranks=st.integers(1, 9),
)
def test_every_sample_has_one_rank_and_shares_are_even_to_within_a_piece(sizes, n_ranks) -> None:
    samples = samples_of_sizes(sizes)
    shares = share_out(samples, n_ranks)
    assert len(shares) == n_ranks
    assert sorted(sample.key for share in shares for sample in share) == [sample.key for sample in samples]
    assert all(share == sorted(share, key=lambda sample: sample.key) for share in shares)
    costs = [cost(share) for share in shares]
    longest = max([cost([sample]) for sample in samples], default=0)
    assert max(costs) - min(costs) <= max(longest, cost(samples) // (PIECES * n_ranks))


@pytest.mark.parametrize("n_ranks", [2, 8])
def test_ranks_get_whole_groups_if_there_are_enough_of_them(n_ranks: int) -> None:
    shares = share_out(samples_of_sizes([(100, [10] * 8)] * 32), n_ranks)
    assert sum(len({sample.key[0] for sample in share}) for share in shares) == 32
