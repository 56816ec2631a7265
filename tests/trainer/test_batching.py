"""Every trained token is in exactly one micro-batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.data.group import PromptGroup
from freewheel.trainer.batching import MicroBatch, micro_batches, mini_batches
from freewheel.trainer.options import AlgorithmConfig

from .groups import make_group, make_response, random_group

NAN = float("nan")


def batches_of(
    groups: list[PromptGroup], budget: int = 10_000, share: float | None = None, **settings: object
) -> list[MicroBatch]:
    advantages = [np.arange(len(group)) + 10.0 * group.ordinal for group in groups]
    config = AlgorithmConfig(**settings)  # type: ignore[arg-type]
    return [batch for rows in mini_batches(groups, advantages, config) for batch in micro_batches(rows, budget, share)]


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 9), st.sets(st.integers(0, 4)), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    budget=st.integers(1, 80),
    share=st.sampled_from([None, 1.0, 48.0, 1e9]),
    mini=st.integers(1, 3),
)
@settings(deadline=None)
def test_every_token_of_a_scored_response_is_in_exactly_one_micro_batch(shapes, budget, share, mini) -> None:
    groups = [
        random_group(ordinal, n=n, seed=seed, failed=tuple(failed), holes=holes)
        for ordinal, (n, seed, failed, holes) in enumerate(shapes)
    ]
    wanted: Counter[tuple[int, int, int, float]] = Counter()
    for group in groups:
        for index in np.flatnonzero(group.scored):
            one = group.response(index)
            for token, logp in zip(one.tokens[one.mask != 0], one.logprobs[one.mask != 0], strict=True):
                wanted[group.ordinal, int(index), int(token), float(logp)] += 1
    found: Counter[tuple[int, int, int, float]] = Counter()
    for batch in batches_of(groups, budget, share, mini_batches=mini):
        n_rows, longest = batch.inputs["input_ids"].shape
        assert n_rows * longest <= budget or n_rows == 1
        if n_rows * longest > budget:
            assert batch.n_sequences == 1
        for place, token, logp in zip(batch.sequence, batch.targets, batch.behaviour, strict=True):
            found[(*batch.keys[place], int(token), float(logp))] += 1
    assert found == wanted


@pytest.mark.parametrize("share", [None, 1e9])
def test_each_token_is_predicted_from_the_one_before_it(share) -> None:
    first = make_response([11, 12, 13], value=1.0)
    holed = make_response([14, 15, 16, 17], value=0.0, mask=[0, 1, 0, 1])
    group = make_group(0, [first, holed], prompt=[1, 2])
    (batch,) = batches_of([group], share=share)
    assert len(batch.inputs["input_ids"]) == (2 if share is None else 1)
    before = batch.inputs["input_ids"].flatten()[batch.positions]
    pairs = sorted(zip(before.tolist(), batch.targets.tolist(), strict=True))
    assert pairs == [(2, 11), (11, 12), (12, 13), (14, 15), (16, 17)]


def test_a_shared_row_lets_responses_see_the_prompt_and_themselves_only() -> None:
    group = make_group(0, [make_response([11, 12], value=1.0), make_response([13], value=0.0)], prompt=[1, 2])
    (batch,) = batches_of([group], share=1e9)
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 11, 12, 13]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 2]]
    assert batch.inputs["attention_mask"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_no_query_of_a_padded_shared_row_is_left_without_a_key() -> None:
    groups = [random_group(ordinal, n=3, lengths=(2, 2 + 5 * (ordinal + 1))) for ordinal in range(3)]
    (batch,) = batches_of(groups, share=1e9)
    assert bool(batch.inputs["attention_mask"].any(-1).all())


def test_prompts_are_shared_only_where_that_is_cheaper() -> None:
    long_prompt = make_group(0, [make_response([5, 6], value=1.0)] * 4, prompt=[1] * 50)
    long_responses = make_group(1, [make_response([5] * 50, value=1.0)] * 4, prompt=[1])
    rows = {batch.keys[0][0]: len(batch.inputs["input_ids"]) for batch in batches_of([long_prompt], share=60.0)}
    rows |= {batch.keys[0][0]: len(batch.inputs["input_ids"]) for batch in batches_of([long_responses], share=60.0)}
    assert rows == {0: 1, 1: 4}


def test_similar_lengths_are_batched_together_longest_first() -> None:
    lengths = [3, 17, 4, 16, 3, 18]
    groups = [make_group(i, [make_response([5] * n, value=1.0)], prompt=[1, 2]) for i, n in enumerate(lengths)]
    found = [batch.inputs["input_ids"].shape for batch in batches_of(groups, budget=60)]
    assert [tuple(shape) for shape in found] == [(3, 20), (3, 6)]


def test_the_order_of_arrival_is_irrelevant() -> None:
    groups = [random_group(ordinal) for ordinal in range(5)]
    forwards, backwards = batches_of(groups, 40, mini_batches=2), batches_of(groups[::-1], 40, mini_batches=2)
    assert len(forwards) == len(backwards)
    for one, other in zip(forwards, backwards, strict=True):
        assert one.keys == other.keys
        assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
        assert torch.equal(one.advantages, other.advantages)


def test_each_token_carries_its_responses_advantage_and_version() -> None:
    group = make_group(3, [make_response([5, 6], value=1.0, version=7), make_response([8], value=2.0, version=9)])
    (batch,) = batches_of([group])
    assert batch.keys == ((3, 0), (3, 1))
    assert batch.advantages.tolist() == [30, 30, 31]
    assert batch.versions.tolist() == [7, 7, 9]
    assert batch.rewards == (1.0, 2.0)


def test_weights_are_those_of_the_whole_mini_batch_whatever_the_budget() -> None:
    groups = [random_group(ordinal, holes=True, failed=(1,)) for ordinal in range(4)]
    for aggregation in ("token_mean", "sequence_mean"):
        small, large = (batches_of(groups, budget, aggregation=aggregation) for budget in (1, 10_000))
        assert sum(float(batch.weights.sum()) for batch in small) == pytest.approx(1)
        assert sum(float(batch.weights.sum()) for batch in large) == pytest.approx(1)


def test_mini_batches_hold_whole_groups() -> None:
    groups = [random_group(ordinal) for ordinal in range(5)]
    parts = mini_batches(groups, [group.rewards for group in groups], AlgorithmConfig(mini_batches=2))
    assert [{sample.key[0] for sample in part} for part in parts] == [{0, 2, 4}, {1, 3}]


def test_more_mini_batches_than_groups_leave_none_empty() -> None:
    groups = [random_group(0), make_group(1, [make_response([5], value=NAN)])]
    parts = mini_batches(groups, [group.rewards for group in groups], AlgorithmConfig(mini_batches=4))
    assert len(parts) == 1
