"""The policy gives a Hugging Face model's own log-probabilities, and its weights under that model's names.

Packed rows, a copy in bfloat16 and compiled layers change only the speed, and none of them ends a run.
"""

from __future__ import annotations

import logging
import sys
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.trainer import head as head_module
from freewheel.trainer import policy as policy_module
from freewheel.trainer.batching import MicroBatch, micro_batches, packed_batches
from freewheel.trainer.decoder import decoder_layers
from freewheel.trainer.options import AlgorithmConfig, LoraConfig, OptimizerConfig
from freewheel.trainer.policy import ALWAYS_SHARE, Critic, Policy
from freewheel.trainer.torch_backend import Optimizer, TorchBackend

from .groups import batch_of, random_group, samples_of, tiny_gemma2, tiny_gpt2, tiny_llama, tiny_qwen

CPU = torch.device("cpu")
MODELS = {"qwen2": tiny_qwen, "llama": tiny_llama, "gpt2": tiny_gpt2, "gemma2": tiny_gemma2}


# dynamo asks every tensor for its gradient
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def make_policy(model: Any = None, **options: Any) -> Policy:
    return Policy(tiny_qwen() if model is None else model, device=CPU, **options)


GROUPS = [random_group(ordinal, holes=True) for ordinal in range(3)]
BATCH = batch_of(GROUPS)
LONG = [random_group(ordinal, n=5, lengths=(3, 40), holes=True) for ordinal in range(4)]
LONG_BATCH = batch_of(LONG)


@torch.no_grad()
def logprobs(policy: Policy, batch: MicroBatch = LONG_BATCH) -> Tensor:
    return policy.logprobs(batch)[0]


def by_the_model(model: Any, temperature: float = 1.0) -> dict[tuple[int, int], Tensor]:
    """Return the log-probabilities of each response's own tokens, one response at a time."""
    found = {}
    for group in GROUPS:
        for index in range(len(group)):
            one = group.response(index)
            ids = torch.tensor(np.concatenate([group.prompt, one.tokens]))[None].long()
            with torch.no_grad():
                log_p = (model.eval()(input_ids=ids).logits[0] / temperature).log_softmax(-1)
            places = len(group.prompt) + np.flatnonzero(one.mask)
            found[group.ordinal, index] = log_p[places - 1, ids[0, places]]
    return found


def assert_same(
    batch: MicroBatch, logp: Tensor, wanted: dict[tuple[int, int], Tensor], tolerance: float = 1e-5
) -> None:
    for place, key in enumerate(batch.keys):
        torch.testing.assert_close(logp[batch.sequence == place], wanted[key], atol=tolerance, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_the_models_own_at_the_sampling_temperature(name, temperature) -> None:
    policy, wanted = make_policy(MODELS[name](), temperature=temperature), by_the_model(MODELS[name](), temperature)
    assert_same(BATCH, logprobs(policy, BATCH), wanted)
    shared = batch_of(GROUPS, ALWAYS_SHARE)
    assert len(shared.inputs["input_ids"]) == len(GROUPS)
    assert policy.can_share() is (name != "gemma2"), "its sliding window hides prompts"
    if policy.can_share():
        assert_same(shared, logprobs(policy, shared), wanted)


def test_a_cap_that_changes_logits_by_a_few_percent_is_not_left_out() -> None:
    policy, plain = make_policy(mildly_capped()), mildly_capped()
    assert_same(BATCH, logprobs(policy, BATCH), by_the_model(plain))


def mildly_capped() -> Any:
    model = tiny_gemma2()
    model.config.final_logit_softcapping = 20.0
    return model


@pytest.mark.parametrize(("window", "shares"), [(4, False), (1000, False), (4096, True)])
def test_a_model_shares_prompts_unless_a_window_would_hide_them(window: int, shares: bool) -> None:
    """A window of 1,000 tokens would show only in longer rows than the probe's."""
    policy = make_policy(tiny_qwen(use_sliding_window=True, sliding_window=window, max_window_layers=0))
    assert policy.can_share() is shares
    assert not policy.can_pack()


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


def assert_same_gradients(policy: Policy, wanted: dict[str, Tensor]) -> None:
    _, found = learn(policy, [LONG_BATCH])
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_logits_in_parts_and_activation_checkpointing_give_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, lora: LoraConfig | None
) -> None:
    _, wanted = learn(changed(make_policy(lora=lora)), [LONG_BATCH])
    assert all(bool(gradient.any()) and ("lora_" in name) is (lora is not None) for name, gradient in wanted.items())
    saving, calls = changed(make_policy(lora=lora, activation_checkpointing=True)), []
    decoder_layers(saving.model)[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_same_gradients(saving, wanted)
    assert len(calls) == 2, "the backward pass computes activations again"
    monkeypatch.setattr(head_module, "LOGITS_AT_A_TIME", 100)
    assert_same_gradients(changed(make_policy(lora=lora)), wanted)


def test_dropout_is_off() -> None:
    policy = make_policy(tiny_gpt2(), activation_checkpointing=True)  # gpt2's layers drop a tenth by default
    assert torch.equal(policy.logprobs(BATCH)[0], policy.logprobs(BATCH)[0])


def test_entropy_has_a_gradient_only_on_request() -> None:
    policy = make_policy()
    logp, entropy = policy.logprobs(BATCH)
    assert logp.requires_grad and not entropy.requires_grad
    assert policy.logprobs(BATCH, entropy_grad=True)[1].requires_grad
    assert bool((entropy > 0).all() and (entropy <= np.log(23) + 1e-5).all())


def changed(policy: Policy) -> Policy:
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(torch.full_like(parameter, 0.02).cumsum(-1))
    return policy


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
@pytest.mark.parametrize("name", MODELS)
def test_the_weights_load_into_a_plain_model_with_the_same_results(name, lora) -> None:
    policy, plain = changed(make_policy(MODELS[name](), lora=lora)), MODELS[name]()
    before = {name: one.clone() for name, one in plain.state_dict().items()}
    weights = policy.weights()
    assert list(weights) == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(weights, strict=False)
    assert any(not torch.equal(one, before[name]) for name, one in weights.items())
    assert_same(BATCH, logprobs(policy, BATCH), by_the_model(plain), tolerance=1e-4 if lora else 1e-5)


def test_adapters_without_peft_are_an_error_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"model\.lora = .*pip install peft"):
        make_policy(lora=LoraConfig())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
def test_weights_train_in_float32_compute_in_one_type_and_are_stored_in_that_of_the_models_files(
    lora: LoraConfig | None, given: torch.dtype, computed: Any
) -> None:
    policy = changed(make_policy(tiny_qwen().to(given), dtype=computed, lora=lora))
    assert {one.dtype for one in policy.trainable().values()} == {torch.float32}
    frozen = {one.dtype for one in policy.model.parameters() if not one.requires_grad}
    assert frozen == ({getattr(torch, computed)} if lora else set())
    published, stored = policy.weights(), policy.weights(stored=True)
    assert published.keys() == stored.keys()
    assert {one.dtype for one in published.values()} == {getattr(torch, computed)}
    assert {one.dtype for one in stored.values()} == {given}
    assert all(torch.equal(stored[name].bfloat16(), one.bfloat16()) for name, one in published.items())


def test_bfloat16_changes_log_probabilities_by_its_rounding_only() -> None:
    logp, exact = (make_policy(dtype=dtype).logprobs(BATCH)[0] for dtype in ("bfloat16", "auto"))
    assert logp.dtype == exact.dtype == torch.float32
    assert 0 < (logp - exact).abs().max() < 0.3, "on a CPU, auto is float32"


# -- packed rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [tiny_qwen, tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("share", [True, False])
def test_a_packed_row_gives_the_log_probabilities_and_gradients_of_each_sequence_alone(model, share) -> None:
    policy, samples = make_policy(model()), samples_of(LONG)
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
        return backend, backend.step(LONG, version=0, step=0, total_steps=1)

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
    _, wanted = learn(exact, [LONG_BATCH])
    _, found = learn(copied, [LONG_BATCH])
    batches = micro_batches(samples_of(LONG), 100)
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
    changed(policy)
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
    critic(LONG_BATCH).sum().backward()
    assert all(parameter.grad is not None for parameter in critic.parameters())
    assert {parameter.dtype for parameter in critic.parameters()} == {torch.float32}


# -- compiled layers --------------------------------------------------------------------------------------------------


def trace(model: Any) -> None:
    """Compile without a C++ compiler."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, backend="eager")


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
    _, wanted = learn(policy, [LONG_BATCH])
    assert policy.compile(packed=False)
    assert all(p.grad is None for p in policy.trainable().values())
    assert_same_gradients(policy, wanted)
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
    changed(policy)
    assert torch.equal(logprobs(reference), before)
    assert not torch.equal(logprobs(policy), before)
