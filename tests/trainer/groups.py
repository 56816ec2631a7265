"""Groups and models to learn from, small enough for a second."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from freewheel.data.group import Prompt, PromptGroup, Response, Ticket
from freewheel.trainer.advantages import AdvantageInputs
from freewheel.trainer.batching import MicroBatch, TrainingSample, micro_batches, mini_batches
from freewheel.trainer.losses import LossInputs, LossOutputs
from freewheel.trainer.options import AlgorithmConfig

from ..data.responses import response

torch.set_num_threads(1)  # with two, two busy cores take up to ten times as long

VOCABULARY = 23


make_response = partial(response, logprobs=-3.0, version=0)


def make_group(ordinal: int, responses: Sequence[Response], prompt: Sequence[int] = (1, 2, 3)) -> PromptGroup:
    row = {"data_source": "test"}
    return PromptGroup.of(
        Ticket(ordinal, ordinal), Prompt(tokens=np.array(prompt, np.int32), row=row), responses, created_s=0.0
    )


def valued(ordinal: int, *values: float) -> PromptGroup:
    """A group whose responses have one token each and these rewards."""
    return make_group(ordinal, [make_response([1], value=value) for value in values])


def random_group(
    ordinal: int,
    *,
    n: int = 4,
    seed: int = 0,
    lengths: tuple[int, int] = (2, 9),
    failed: Sequence[int] = (),
    holes: bool = False,
) -> PromptGroup:
    rng = np.random.default_rng([seed, ordinal])
    responses = []
    for index in range(n):
        length = int(rng.integers(*lengths))
        mask = np.ones(length, np.uint8)
        if holes and length > 2:
            mask[rng.integers(1, length - 1)] = 0
        responses.append(
            make_response(
                rng.integers(1, VOCABULARY, length).tolist(),
                value=float("nan") if index in failed else float(rng.normal()),
                logprobs=rng.uniform(-4, -2, length).tolist(),
                mask=mask.tolist(),
                finish="length" if index == 0 else "stop",
            )
        )
    return make_group(ordinal, responses, prompt=rng.integers(1, VOCABULARY, int(rng.integers(2, 7))).tolist())


def samples_of(
    groups: Sequence[PromptGroup], advantages: Sequence[Any] | None = None, **settings: Any
) -> list[TrainingSample]:
    """Return the samples of all mini-batches."""
    if advantages is None:
        advantages = [np.zeros(len(group)) for group in groups]
    parts = mini_batches(groups, advantages, AlgorithmConfig(**settings))
    return [sample for part in parts for sample in part]


def batch_of(groups: Sequence[PromptGroup], share: float | None = None) -> MicroBatch:
    (batch,) = micro_batches(samples_of(groups), 10_000, share)
    return batch


def cispo(inputs: LossInputs) -> LossOutputs:
    """A custom loss."""
    ratio = (inputs.logprobs.detach() - inputs.behaviour).exp()
    metrics = {"mine/truncated_ratio": ((ratio > 1.2).sum(), torch.ones_like(ratio).sum())}
    return LossOutputs(loss=-ratio.clamp(max=1.2) * inputs.advantages * inputs.logprobs, metrics=metrics)


def above_median(inputs: AdvantageInputs) -> list[np.ndarray]:
    """A custom advantage estimator."""
    return [np.zeros(len(r)) if np.isnan(r).all() else r - np.nanmedian(r) for r in inputs.rewards]


CUSTOM = {"loss": f"{__name__}:cispo", "advantage": f"{__name__}:above_median"}


def without(group: PromptGroup, indices: Sequence[int]) -> PromptGroup:
    kept = [group.response(i) for i in range(len(group)) if i not in indices]
    return make_group(group.ordinal, kept, prompt=group.prompt.tolist())


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def make_model(family: str, seed: int, **changes: Any) -> Any:
    """Return a small model with random weights. `family`: the prefix of its classes in transformers."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(config)


def tiny_qwen(seed: int = 0, **changes: Any) -> Any:
    return make_model("Qwen2", seed, num_key_value_heads=1, tie_word_embeddings=True, **changes)


def tiny_llama(seed: int = 0) -> Any:
    return make_model("Llama", seed)


def tiny_gpt2(seed: int = 0) -> Any:
    return make_model("GPT2", seed)


def tiny_gemma2(seed: int = 0) -> Any:
    """Its logits are capped after the head, and every other layer has a sliding window."""
    window = {"sliding_window": 4, "final_logit_softcapping": 2.0, "initializer_range": 0.5}
    return make_model("Gemma2", seed, num_key_value_heads=1, head_dim=8, **window)
