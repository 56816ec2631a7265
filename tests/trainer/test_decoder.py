"""Packed rows, a copy in bfloat16 and compiled layers change only the speed, and none of them ends a run."""

from __future__ import annotations

import logging
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.trainer import policy as policy_module
from freewheel.trainer.batching import MicroBatch, micro_batches, packed_batches
from freewheel.trainer.decoder import decoder_layers
from freewheel.trainer.options import AlgorithmConfig, LoraConfig, OptimizerConfig
from freewheel.trainer.policy import Critic, Policy
from freewheel.trainer.torch_backend import Optimizer, TorchBackend

from .groups import batch_of, random_group, samples_of, tiny_gemma2, tiny_gpt2, tiny_llama, tiny_qwen

# dynamo asks every tensor for its gradient
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

CPU = torch.device("cpu")
GROUPS = [random_group(ordinal, n=5, lengths=(3, 40), holes=True) for ordinal in range(4)]
BATCH = batch_of(GROUPS)


def make_policy(model: Any = None, **options: Any) -> Policy:
    return Policy(model or tiny_qwen(), device=CPU, **options)


def logprobs(policy: Policy) -> Tensor:
    with torch.no_grad():
        return policy.logprobs(BATCH)[0]


def learn(policy: Policy, batches: list[MicroBatch]) -> tuple[dict[tuple[int, int], Tensor], dict[str, Tensor]]:
    """Return the log-probabilities of each response, and the gradients of their sum and of the entropies'."""
    logps = {}
    for batch in batches:
        logp, entropy = policy.logprobs(batch, entropy_grad=True)
        (logp.sum() + entropy.sum()).backward()
        logps |= {key: logp.detach()[batch.sequence == place] for place, key in enumerate(batch.keys)}
    gradients = {name: p.grad for name, p in policy.trainable().items() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    return logps, gradients


def change(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1)


# -- packed rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [tiny_qwen, tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("share", [True, False])
def test_a_packed_row_gives_the_log_probabilities_and_gradients_of_each_sequence_alone(model, share) -> None:
    policy, samples = make_policy(model()), samples_of(GROUPS)
    wanted, slopes = learn(policy, micro_batches(samples, 1))
    assert policy.can_pack()
    found, packed_slopes = learn(policy, packed_batches(samples, 300, share=share))
    assert found.keys() == wanted.keys()
    for key, logp in wanted.items():
        torch.testing.assert_close(found[key], logp, atol=1e-4, rtol=0)
    for name, slope in slopes.items():
        torch.testing.assert_close(packed_slopes[name], slope, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("refused_by", ["the model", "the kernel"])
def test_packed_rows_that_are_refused_cost_only_speed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused_by: str
) -> None:
    policy = make_policy(tiny_gemma2() if refused_by == "the model" else tiny_qwen())
    before = logprobs(policy)

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("head_size should be a multiple of 8")

    with monkeypatch.context() as patched:
        if refused_by == "the kernel":
            patched.setattr(policy, "logprobs", refuse)
        assert not policy.can_pack()
    assert ("does not support packed rows" in caplog.text) is (refused_by == "the kernel")
    assert torch.equal(logprobs(policy), before)


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
    def pack(backend: TorchBackend, *, compile: bool) -> bool:
        if backend._critic is not None:
            backend._critic.set_up_rows(packed=True, compiled=compile)
        return backend.policy.can_pack()

    def step() -> tuple[TorchBackend, dict[str, float]]:
        optimizer = OptimizerConfig(lr=1e-2, eps=1e-3)
        backend = TorchBackend(
            tiny_qwen(), algorithm=AlgorithmConfig(**algorithm), optimizer=optimizer, micro_batch_tokens=400
        )
        return backend, backend.step(GROUPS, version=0, step=0, total_steps=1)

    padded, wanted = step()
    monkeypatch.setattr(TorchBackend, "_set_up_rows", pack)
    packed, found = step()
    assert packed._packed and not padded._packed
    assert found == pytest.approx(wanted, rel=2e-3, abs=1e-5)
    for name, tensor in padded.weights().items():
        torch.testing.assert_close(packed.weights()[name], tensor, atol=2e-4, rtol=0)


# -- a copy that computes ---------------------------------------------------------------------------------------------

COPY: dict[str, Any] = {"dtype": "bfloat16", "computing_copy": True}


def test_gradients_of_a_copy_arrive_at_the_float32_weights_and_add_up_in_float32() -> None:
    exact, copied, several = make_policy(), make_policy(**COPY), make_policy(**COPY)
    _, wanted = learn(exact, [BATCH])
    _, found = learn(copied, [BATCH])
    batches = micro_batches(samples_of(GROUPS), 100)
    _, total = learn(several, batches)
    alone = [learn(copied, [batch])[1] for batch in batches]
    assert len(batches) > 3
    for name, slope in wanted.items():
        assert found[name].dtype == torch.float32
        assert float((found[name] - slope).norm()) < 0.1 * max(1e-3, float(slope.norm())), name
        assert torch.equal(total[name], reduce(torch.add, [one[name] for one in alone])), name


@pytest.mark.parametrize("gradient", [1.0, float("nan")])
def test_a_copy_follows_an_optimizer_step_that_is_applied_and_an_assignment(gradient: float) -> None:
    policy = make_policy(**COPY)
    first = logprobs(policy)
    for parameter in policy.trainable().values():
        parameter.grad = torch.full_like(parameter, gradient)
    _, applied = Optimizer(policy.trainable(), OptimizerConfig()).step(0.1, torch.tensor(0.0))
    second = logprobs(policy)
    assert applied is (gradient == 1.0) is not torch.equal(second, first)
    change(policy)
    assert not torch.equal(logprobs(policy), second)


def test_the_published_weights_are_those_that_compute() -> None:
    policy, plain = make_policy(**COPY), tiny_qwen().to(torch.bfloat16)
    plain.load_state_dict(policy.weights(), strict=False)
    for name, tensor in policy.computation.model.named_parameters():
        assert torch.equal(tensor, plain.get_parameter(name))


@pytest.mark.parametrize("options", [COPY, {"dtype": "bfloat16", "lora": LoraConfig(rank=2)}], ids=["copy", "adapters"])
def test_rotary_frequencies_are_not_rounded(options) -> None:
    exact = tiny_qwen().model.rotary_emb.inv_freq
    assert torch.equal(make_policy(**options).computation.model.model.rotary_emb.inv_freq, exact)


def test_a_critic_learns_through_its_copy() -> None:
    critic = Critic(
        tiny_qwen().base_model, device=CPU, dtype=torch.bfloat16, activation_checkpointing=False, computing_copy=True
    )
    torch.nn.init.ones_(critic.head.weight)
    critic(BATCH).sum().backward()
    assert all(parameter.grad is not None for parameter in critic.parameters())
    assert {parameter.dtype for parameter in critic.parameters()} == {torch.float32}


# -- compiled layers --------------------------------------------------------------------------------------------------


def trace(model: Any) -> None:
    """Compile without a C++ compiler."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, backend="aot_eager")


def fail(model: Any) -> None:
    def backend(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    for layer in decoder_layers(model):
        layer.compile(backend=backend)


def compute_wrongly(model: Any) -> None:
    for layer in decoder_layers(model):
        layer._compiled_call_impl = lambda hidden, **_: hidden


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_compiled_decoder_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch, checkpointed) -> None:
    monkeypatch.setattr(policy_module, "compile_layers", trace)
    policy = make_policy(activation_checkpointing=checkpointed)
    _, wanted = learn(policy, [BATCH])
    assert policy.compile(packed=False)
    assert all(p.grad is None for p in policy.trainable().values())
    for name, found in learn(policy, [BATCH])[1].items():
        torch.testing.assert_close(found, wanted[name], atol=1e-4, rtol=1e-4)
    reference = policy.frozen_copy()
    assert all(layer._compiled_call_impl is not None for layer in decoder_layers(reference.plain))


@pytest.mark.parametrize(("compiler", "said"), [(fail, "no compiler here"), (compute_wrongly, "probabilities are off")])
def test_a_compiler_that_fails_or_computes_wrongly_is_logged_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler, said
) -> None:
    monkeypatch.setattr(policy_module, "compile_layers", compiler)
    policy = make_policy()
    before = logprobs(policy)
    with caplog.at_level(logging.WARNING):
        assert not policy.compile(packed=False)
    assert "continuing without compiling" in caplog.text and said in caplog.text
    assert torch.equal(logprobs(policy), before)


# -- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, COPY, {"dtype": "bfloat16"}, {"lora": LoraConfig(rank=2)}],
    ids=["float32", "copy", "autocast", "lora"],
)
def test_a_reference_starts_as_the_policy_and_does_not_change(options) -> None:
    policy = make_policy(**options)
    before = logprobs(policy)
    reference = policy.frozen_copy()
    if options is COPY:
        assert {parameter.dtype for parameter in reference.plain.parameters()} == {torch.bfloat16}
    assert torch.equal(logprobs(reference), before)
    change(policy)
    assert torch.equal(logprobs(reference), before)
    assert not torch.equal(logprobs(policy), before)
