"""Compiling changes only the speed, and a failure to compile is no failure of the run."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from freewheel.trainer import policy as policy_module
from freewheel.trainer.batching import MicroBatch, micro_batches, mini_batches
from freewheel.trainer.decoder import decoder_layers
from freewheel.trainer.options import AlgorithmConfig, OptimizerConfig
from freewheel.trainer.policy import Policy
from freewheel.trainer.torch_backend import TorchBackend

from .groups import random_group, tiny_qwen

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo asks every tensor for it

CPU = torch.device("cpu")
GROUPS = [random_group(ordinal) for ordinal in range(3)]


def batch_of() -> MicroBatch:
    (samples,) = mini_batches(GROUPS, [np.zeros(len(group)) for group in GROUPS], AlgorithmConfig())
    return micro_batches(samples, 10_000)[0]


def traced(model: Any) -> None:
    """Trace without a C++ compiler."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, backend="aot_eager")


def broken(model: Any) -> None:
    def backend(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    for layer in decoder_layers(model):
        layer.compile(backend=backend)


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    policy.logprobs(batch_of())[0].sum().backward()
    found = {name: p.grad for name, p in policy.trainable().items() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_compiled_decoder_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch, checkpointed) -> None:
    monkeypatch.setattr(policy_module, "compile_layers", traced)
    policy = Policy(tiny_qwen(), device=CPU, activation_checkpointing=checkpointed)
    wanted = gradients(policy)
    assert policy.compile(packed=False)
    assert all(p.grad is None for p in policy.trainable().values())
    for name, found in gradients(policy).items():
        torch.testing.assert_close(found, wanted[name], atol=1e-4, rtol=1e-4)


def test_a_failing_compiler_is_logged_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(policy_module, "compile_layers", broken)
    plain, backend = (
        TorchBackend(tiny_qwen(), micro_batch_tokens=1000, optimizer=OptimizerConfig(lr=1e-3), compile=compile)
        for compile in (False, True)
    )
    assert "continuing without compiling" in caplog.text and "no compiler here" in caplog.text
    for one in (plain, backend):
        one.step(GROUPS, version=0, step=0, total_steps=1)
    for name, tensor in plain.weights().items():
        assert torch.equal(backend.weights()[name], tensor)


def test_a_compiled_decoder_with_wrong_results_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def off(model: Any) -> None:
        for layer in decoder_layers(model):
            layer._compiled_call_impl = lambda hidden, **_: hidden

    monkeypatch.setattr(policy_module, "compile_layers", off)
    policy, batch = Policy(tiny_qwen(), device=CPU), batch_of()
    wanted = policy.logprobs(batch)[0]
    with caplog.at_level(logging.WARNING):
        assert not policy.compile(packed=False)
    assert "log-probabilities are off" in caplog.text
    assert torch.equal(policy.logprobs(batch)[0], wanted)


def test_the_reference_of_a_compiled_policy_is_compiled_and_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "compile_layers", traced)
    policy, batch = Policy(tiny_qwen(), device=CPU), batch_of()
    assert policy.compile(packed=False)
    reference = policy.frozen_copy()
    assert all(layer._compiled_call_impl is not None for layer in decoder_layers(reference.plain))
    with torch.no_grad():
        before = reference.logprobs(batch)[0]
        torch.testing.assert_close(before, policy.logprobs(batch)[0])
        for parameter in policy.trainable().values():
            parameter.add_(0.1)
        assert torch.equal(reference.logprobs(batch)[0], before)
