"""The policy gives a Hugging Face model's own log-probabilities, and its weights under that model's names."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.data.group import PromptGroup
from freewheel.errors import ConfigError
from freewheel.trainer import head as head_module
from freewheel.trainer.batching import MicroBatch
from freewheel.trainer.options import LoraConfig
from freewheel.trainer.policy import ALWAYS_SHARE, Policy

from .groups import batch_of, random_group, tiny_gemma2, tiny_gpt2, tiny_llama, tiny_qwen

CPU = torch.device("cpu")
MODELS = {"qwen2": tiny_qwen, "llama": tiny_llama, "gpt2": tiny_gpt2, "gemma2": tiny_gemma2}


def make_policy(model: Any = None, **options: Any) -> Policy:
    return Policy(tiny_qwen() if model is None else model, device=CPU, **options)


GROUPS = [random_group(ordinal, holes=True) for ordinal in range(3)]


def by_the_model(model: Any, groups: list[PromptGroup], temperature: float = 1.0) -> dict[tuple[int, int], Tensor]:
    """Return the log-probabilities of each response's own tokens, one response at a time."""
    found = {}
    for group in groups:
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


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_the_models_own(name) -> None:
    batch = batch_of(GROUPS)
    with torch.no_grad():
        logp, _ = make_policy(MODELS[name]()).logprobs(batch)
    assert_same(batch, logp, by_the_model(MODELS[name](), GROUPS))


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2"])
def test_log_probabilities_are_the_same_if_responses_share_a_prompt(name) -> None:
    batch = batch_of(GROUPS, ALWAYS_SHARE)
    assert len(batch.inputs["input_ids"]) == len(GROUPS)
    policy = make_policy(MODELS[name]())
    assert policy.can_share()
    with torch.no_grad():
        logp, _ = policy.logprobs(batch)
    assert_same(batch, logp, by_the_model(MODELS[name](), GROUPS))


def test_a_model_with_a_sliding_window_does_not_share_prompts() -> None:
    assert not make_policy(tiny_gemma2()).can_share()


def test_log_probabilities_are_those_of_the_sampling_temperature() -> None:
    batch = batch_of(GROUPS)
    with torch.no_grad():
        logp, _ = make_policy(temperature=0.7).logprobs(batch)
    assert_same(batch, logp, by_the_model(tiny_qwen(), GROUPS, temperature=0.7))


def gradients(policy: Policy, batch: MicroBatch) -> dict[str, Tensor]:
    logp, entropy = policy.logprobs(batch, entropy_grad=True)
    (logp.sum() + entropy.sum()).backward()
    return {name: p.grad.clone() for name, p in policy.trainable().items() if p.grad is not None}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4)


def test_logits_in_parts_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(GROUPS)
    whole = gradients(make_policy(), batch)
    monkeypatch.setattr(head_module, "LOGITS_AT_A_TIME", 100)
    assert_close(gradients(make_policy(), batch), whole)


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    batch = batch_of(GROUPS)
    assert_close(gradients(make_policy(activation_checkpointing=True), batch), gradients(make_policy(), batch))


def test_dropout_is_off() -> None:
    batch = batch_of(GROUPS)
    policy = make_policy(tiny_gpt2(), activation_checkpointing=True)  # gpt2's layers drop a tenth by default
    assert torch.equal(policy.logprobs(batch)[0], policy.logprobs(batch)[0])


def test_entropy_has_a_gradient_only_on_request() -> None:
    batch, policy = batch_of(GROUPS), make_policy()
    logp, entropy = policy.logprobs(batch)
    assert logp.requires_grad and not entropy.requires_grad
    assert policy.logprobs(batch, entropy_grad=True)[1].requires_grad
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
    batch = batch_of(GROUPS)
    with torch.no_grad():
        logp, _ = policy.logprobs(batch)
    assert_same(batch, logp, by_the_model(plain, GROUPS), tolerance=1e-4 if lora else 1e-5)


def test_adapters_with_activation_checkpointing_get_gradients() -> None:
    batch = batch_of(GROUPS)
    plain = gradients(changed(make_policy(lora=LoraConfig(rank=2))), batch)
    saving = gradients(changed(make_policy(lora=LoraConfig(rank=2), activation_checkpointing=True)), batch)
    assert_close(saving, plain)
    assert plain and all("lora_" in name and bool(gradient.any()) for name, gradient in plain.items())


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
    batch = batch_of(GROUPS)
    policy = make_policy(dtype="bfloat16")
    logp, _ = policy.logprobs(batch)
    assert logp.dtype == torch.float32
    assert make_policy(dtype="auto").dtype is torch.float32, "on a CPU"
    exact, _ = make_policy().logprobs(batch)
    assert not torch.equal(logp, exact)
    torch.testing.assert_close(logp, exact, atol=0.3, rtol=0)
