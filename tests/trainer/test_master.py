"""A copy in bfloat16 computes, and parameters in float32 learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from freewheel.trainer.batching import MicroBatch, micro_batches, mini_batches
from freewheel.trainer.optim import Optimizer
from freewheel.trainer.options import AlgorithmConfig, LoraConfig, OptimizerConfig
from freewheel.trainer.policy import Policy
from freewheel.trainer.torch_backend import Critic

from .groups import random_group, tiny_qwen

CPU = torch.device("cpu")
GROUPS = [random_group(ordinal) for ordinal in range(3)]


def batches(budget: int = 10_000) -> list[MicroBatch]:
    (samples,) = mini_batches(GROUPS, [np.zeros(len(group)) for group in GROUPS], AlgorithmConfig())
    return micro_batches(samples, budget)


def make_policy(**options: Any) -> Policy:
    return Policy(tiny_qwen(), device=CPU, **{"dtype": "bfloat16", "computing_copy": True, **options})


def test_gradients_arrive_at_the_float32_weights_close_to_exact_ones() -> None:
    exact, copied = make_policy(dtype="float32"), make_policy()
    for policy in (exact, copied):
        policy.logprobs(batches()[0])[0].mean().backward()
    for name, parameter in exact.trainable().items():
        found = copied.trainable()[name].grad
        assert found is not None and found.dtype == torch.float32
        assert parameter.grad is not None
        off = (found - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-3)
        assert float(off) < 0.1, name


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    one, several = make_policy(), make_policy()
    alone = []
    for batch in batches(1):
        one.model.zero_grad(set_to_none=True)
        one.logprobs(batch)[0].sum().backward()
        alone.append({name: p.grad.clone() for name, p in one.trainable().items() if p.grad is not None})
        several.logprobs(batch)[0].sum().backward()
    assert len(alone) > 3
    for name, parameter in several.trainable().items():
        total = alone[0][name]
        for more in alone[1:]:
            total = total + more[name]
        assert torch.equal(parameter.grad, total)


@torch.no_grad()
def test_the_copy_follows_an_optimizer_step_and_an_assignment() -> None:
    policy, (batch,) = make_policy(), batches()
    first = policy.logprobs(batch)[0]
    assert torch.equal(policy.logprobs(batch)[0], first)
    for parameter in policy.trainable().values():
        parameter.grad = torch.ones_like(parameter)
    Optimizer(policy.trainable(), OptimizerConfig()).step(0.1, torch.tensor(0.0))
    second = policy.logprobs(batch)[0]
    assert not torch.equal(second, first)
    for parameter in policy.trainable().values():
        parameter.copy_(parameter + 0.1)
    assert not torch.equal(policy.logprobs(batch)[0], second)


def test_a_refused_update_leaves_the_copy_as_it_was() -> None:
    policy, (batch,) = make_policy(), batches()
    first = policy.logprobs(batch)[0].detach()
    for parameter in policy.trainable().values():
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert not Optimizer(policy.trainable(), OptimizerConfig()).step(0.1, torch.tensor(0.0))[1]
    assert torch.equal(policy.logprobs(batch)[0].detach(), first)


def test_the_published_weights_are_those_that_compute() -> None:
    policy, plain = make_policy(), tiny_qwen().to(torch.bfloat16)
    plain.load_state_dict(policy.weights(), strict=False)
    for name, tensor in policy.computation.model.named_parameters():
        assert torch.equal(tensor, plain.get_parameter(name))


def test_a_reference_is_in_bfloat16_and_does_not_change() -> None:
    policy, (batch,) = make_policy(), batches()
    reference = policy.frozen_copy()
    assert {parameter.dtype for parameter in reference.plain.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        before = reference.logprobs(batch)[0]
        assert torch.equal(policy.logprobs(batch)[0], before)
        for parameter in policy.trainable().values():
            parameter.add_(0.1)
        assert torch.equal(reference.logprobs(batch)[0], before)
        assert not torch.equal(policy.logprobs(batch)[0], before)


@pytest.mark.parametrize("options", [{}, {"lora": LoraConfig(rank=2)}], ids=["copy", "adapters"])
def test_rotary_frequencies_are_not_rounded(options) -> None:
    exact = tiny_qwen().model.rotary_emb.inv_freq
    assert torch.equal(make_policy(**options).computation.model.model.rotary_emb.inv_freq, exact)


def test_a_critic_learns_through_its_copy() -> None:
    critic = Critic(
        tiny_qwen().base_model,
        device=CPU,
        dtype=torch.bfloat16,
        activation_checkpointing=False,
        computing_copy=True,
    )
    torch.nn.init.ones_(critic.head.weight)
    critic(batches()[0]).sum().backward()
    assert all(parameter.grad is not None for parameter in critic.parameters())
    assert {parameter.dtype for parameter in critic.parameters()} == {torch.float32}
