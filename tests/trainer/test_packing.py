"""Packed rows hold every token once, and each token sees only its prompt and its own response."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel.data.group import PromptGroup
from freewheel.trainer.batching import (
    MULTIPLE,
    MicroBatch,
    Sample,
    micro_batches,
    mini_batches,
    packed_batches,
    row_length,
)
from freewheel.trainer.options import AlgorithmConfig, OptimizerConfig
from freewheel.trainer.policy import Policy
from freewheel.trainer.torch_backend import TorchBackend

from .groups import make_group, make_response, random_group, tiny_gemma2, tiny_gpt2, tiny_llama, tiny_qwen

CPU = torch.device("cpu")
GROUPS = [random_group(ordinal, n=5, lengths=(3, 40), holes=True) for ordinal in range(4)]


def samples_of(groups: list[PromptGroup]) -> list[Sample]:
    return [
        sample
        for part in mini_batches(groups, [np.zeros(len(group)) for group in groups], AlgorithmConfig())
        for sample in part
    ]


def seen_by(batch: MicroBatch) -> list[list[int]]:
    """Return the tokens that each token of the row sees."""
    query_ends, key_ends, key_rows = (batch.inputs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "key_rows"))
    n = batch.inputs["input_ids"].numel()
    rows = torch.arange(n) if key_rows is None else key_rows
    found: list[list[int]] = []
    for piece in range(len(query_ends) - 1):
        keys = rows[key_ends[piece] : key_ends[piece + 1]].tolist()
        queries = int(query_ends[piece + 1] - query_ends[piece])
        found += [keys[: len(keys) - queries + place + 1] for place in range(queries)]
    assert len(found) == n
    return found


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 9), st.sets(st.integers(0, 4)), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    budget=st.integers(1, 120),
    share=st.booleans(),
)
@settings(deadline=None)
def test_every_token_is_predicted_once_from_its_prompt_and_what_came_before(shapes, budget, share) -> None:
    groups = [
        random_group(ordinal, n=n, seed=seed, failed=tuple(failed), holes=holes)
        for ordinal, (n, seed, failed, holes) in enumerate(shapes)
    ]
    wanted: Counter[tuple[tuple[int, int], tuple[int, ...], int]] = Counter()
    for group in groups:
        for index in np.flatnonzero(group.scored):
            one = group.response(index)
            for place in np.flatnonzero(one.mask):
                before = (*group.prompt.tolist(), *one.tokens[:place].tolist())
                wanted[(group.ordinal, int(index)), before, int(one.tokens[place])] += 1
    found: Counter[tuple[tuple[int, int], tuple[int, ...], int]] = Counter()
    samples = samples_of(groups)
    for batch in packed_batches(samples, budget, share=share):
        ids, places = batch.inputs["input_ids"][0], batch.inputs["position_ids"][0]
        seen = seen_by(batch)
        for position, target, sequence in zip(batch.positions, batch.targets, batch.sequence, strict=True):
            keys = seen[int(position)]
            assert places[keys].tolist() == list(range(len(keys)))
            found[batch.keys[sequence], tuple(ids[keys].tolist()), int(target)] += 1
        assert (
            batch.inputs["input_ids"].numel() <= max(budget, max(row_length([one]) for one in samples)) + MULTIPLE - 1
        )
    assert found == wanted


def test_micro_batches_are_as_equal_as_possible() -> None:
    groups = [make_group(i, [make_response([5] * 100, value=1.0)] * 2, prompt=[1] * 56) for i in range(5)]
    sizes = [batch.inputs["input_ids"].numel() for batch in packed_batches(samples_of(groups), 768, share=True)]
    assert sizes == [768, 512]


def test_a_group_larger_than_the_budget_is_split() -> None:
    group = make_group(0, [make_response([5] * 100, value=1.0)] * 8, prompt=[1] * 28)
    batches = packed_batches(samples_of([group]), 384, share=True)
    assert [batch.n_sequences for batch in batches] == [3, 3, 2]
    assert max(batch.inputs["input_ids"].numel() for batch in batches) <= 384


def test_the_order_of_arrival_is_irrelevant() -> None:
    forwards, backwards = (packed_batches(samples_of(groups), 150, share=True) for groups in (GROUPS, GROUPS[::-1]))
    assert [batch.keys for batch in forwards] == [batch.keys for batch in backwards]


def learned(policy: Policy, batches: list[MicroBatch]) -> tuple[dict[tuple[int, int], Tensor], dict[str, Tensor]]:
    logps = {}
    for batch in batches:
        logp, entropy = policy.logprobs(batch, entropy_grad=True)
        (logp.sum() + entropy.sum()).backward()
        logps |= {key: logp.detach()[batch.sequence == place] for place, key in enumerate(batch.keys)}
    gradients = {name: p.grad for name, p in policy.trainable().items() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    return logps, gradients


@pytest.mark.parametrize("model", [tiny_qwen, tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("share", [True, False])
def test_a_packed_row_gives_the_log_probabilities_and_gradients_of_each_sequence_alone(model, share) -> None:
    policy, samples = Policy(model(), device=CPU), samples_of(GROUPS)
    wanted, slopes = learned(policy, micro_batches(samples, 1))
    assert policy.can_pack()
    found, packed_slopes = learned(policy, packed_batches(samples, 300, share=share))
    assert found.keys() == wanted.keys()
    for key, logp in wanted.items():
        torch.testing.assert_close(found[key], logp, atol=1e-4, rtol=0)
    for name, slope in slopes.items():
        torch.testing.assert_close(packed_slopes[name], slope, atol=2e-3, rtol=1e-3)


def test_a_model_that_does_not_support_packed_rows_is_unchanged() -> None:
    policy, samples = Policy(tiny_gemma2(), device=CPU), samples_of(GROUPS)
    before = policy.logprobs(micro_batches(samples, 10_000)[0])[0]
    assert not policy.can_pack()
    assert torch.equal(policy.logprobs(micro_batches(samples, 10_000)[0])[0], before)


def test_a_kernel_that_rejects_a_models_heads_only_costs_speed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy, samples = Policy(tiny_qwen(), device=CPU), samples_of(GROUPS)
    before = policy.logprobs(micro_batches(samples, 10_000)[0])[0]

    def refuses(*args: object, **kwargs: object) -> None:
        raise RuntimeError("head_size should be a multiple of 8")

    with monkeypatch.context() as patched:
        patched.setattr(policy, "logprobs", refuses)
        assert not policy.can_pack()
    assert "does not support packed rows" in caplog.text
    assert torch.equal(policy.logprobs(micro_batches(samples, 10_000)[0])[0], before)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"name": "ppo"},
        {"kl_coef": 0.1, "entropy_coef": 0.01, "proximal": "recomputed", "updates_per_batch": 2, "mini_batches": 2},
    ],
    ids=str,
)
def test_a_step_over_packed_rows_is_the_step_over_padded_ones(monkeypatch: pytest.MonkeyPatch, algorithm) -> None:
    def packing(backend: TorchBackend, *, compile: bool) -> bool:
        if backend._critic is not None:
            backend._critic.set_up_rows(packed=True, compiled=compile)
        return backend.policy.can_pack()

    def stepped(budget: int) -> tuple[TorchBackend, dict[str, float]]:
        backend = TorchBackend(
            tiny_qwen(),
            algorithm=AlgorithmConfig(**algorithm),
            optimizer=OptimizerConfig(lr=1e-2, eps=1e-3),
            micro_batch_tokens=budget,
        )
        return backend, backend.step(GROUPS, version=0, step=0, total_steps=1)

    padded, wanted = stepped(400)
    monkeypatch.setattr(TorchBackend, "_set_up_rows", packing)
    packed, found = stepped(400)
    assert packed._packed
    assert found == pytest.approx(wanted, rel=2e-3, abs=1e-5)
    for name, tensor in padded.weights().items():
        torch.testing.assert_close(packed.weights()[name], tensor, atol=2e-4, rtol=0)
