"""verl's real configuration, reward loop and rows, as small as they go: no GPU, no network, a tokenizer of bytes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

with warnings.catch_warnings():  # verl's own, while it is imported; ours are errors
    warnings.simplefilter("ignore")
    from verl import DataProto
    from verl.experimental.reward_loop import RewardLoopManager, migrate_legacy_reward_impl

PROMPT_WIDTH = 64
RESPONSE_WIDTH = 128
FUNCTIONS = Path(__file__).with_name("scoring_functions.py")
LENGTHS = (20, 20, 30, 40)
WITH_PENALTY = [1.7, 1.7, 1.7, 0.7]
"""Rewards of right answers of these lengths, with 0.1 * 7 from the judge. The median is 25: 20 and 30 are within 30%
of it, and 40 lies beyond 50%."""

OURS = (
    "reward.reward_manager.source=importlib",
    "reward.reward_manager.module.path=pkg://freewheel.integrations.verl",
    "reward.reward_manager.name=FreewheelRewardManager",
)


@dataclass(frozen=True)
class Answer:
    """One response of a rollout."""

    text: str
    uid: str
    truth: str = "4"
    split: str | None = "train"
    source: str = "openai/gsm8k"
    info: dict[str, Any] = field(default_factory=dict)


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """One token a byte: a response's length is the length of its text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<pad>", "<eos>"])}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def verl_config(tokenizer_path: Path | str, *overrides: str, n: int = 4, workers: int = 1) -> DictConfig:
    """What `python -m verl.trainer.main_ppo <overrides>` would get."""
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={tokenizer_path}",
                f"actor_rollout_ref.rollout.n={n}",
                f"reward.num_workers={workers}",
                *overrides,
            ],
        )
    return migrate_legacy_reward_impl(config)


def ours(url: str, **settings: Any) -> list[str]:
    """The overrides that turn freewheel on, with a judge at `url`."""
    settings = {"api_endpoint": url, "api_key": "EMPTY", "model_name": "judge", **settings}
    return [*OURS, *(f"+reward.reward_kwargs.length_penalty_config.{key}={value}" for key, value in settings.items())]


def rollouts(tokenizer: PreTrainedTokenizerFast, answers: Sequence[Answer]) -> DataProto:
    """The batch that verl's trainer would hold after generation."""
    count = len(answers)
    prompts = torch.zeros(count, PROMPT_WIDTH, dtype=torch.int64)
    responses = torch.zeros(count, RESPONSE_WIDTH, dtype=torch.int64)
    mask = torch.zeros(count, PROMPT_WIDTH + RESPONSE_WIDTH, dtype=torch.int64)
    question = tokenizer.encode("What is 2+2?")
    for row, answer in enumerate(answers):
        ids = tokenizer.encode(answer.text)
        prompts[row, -len(question) :] = torch.tensor(question)
        responses[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        mask[row, PROMPT_WIDTH - len(question) : PROMPT_WIDTH + len(ids)] = 1
    input_ids = torch.cat([prompts, responses], dim=1)
    infos = [{**({"split": a.split} if a.split else {}), "index": 0, **a.info} for a in answers]
    return DataProto(
        batch=TensorDict(
            {
                "prompts": prompts,
                "responses": responses,
                "input_ids": input_ids,
                "attention_mask": mask,
                "position_ids": mask.cumsum(dim=1),
            },
            batch_size=count,
        ),
        non_tensor_batch={
            "uid": np.array([answer.uid for answer in answers], dtype=object),
            "data_source": np.array([answer.source for answer in answers], dtype=object),
            "reward_model": np.array([{"ground_truth": a.truth, "style": "rule"} for a in answers], dtype=object),
            "extra_info": np.array(infos, dtype=object),
            "raw_prompt": _objects([[{"role": "user", "content": "What is 2+2?"}] for _ in answers]),
        },
    )


def _objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@contextmanager
def reward_loop(config: DictConfig) -> Iterator[RewardLoopManager]:
    """verl's real reward loop with its real actors, which end with the context."""
    loop = RewardLoopManager(config)
    try:
        yield loop
    finally:
        for worker in loop.reward_loop_workers:
            ray.kill(worker)
        until(lambda: not any(name.startswith("reward_loop_worker") for name in actor_names()))


def scores(result: DataProto) -> list[float]:
    """Each row's reward, as verl's trainer sums it up."""
    return [round(score, 5) for score in result.batch["rm_scores"].sum(dim=-1).tolist()]


def columns(result: DataProto) -> dict[str, list[Any]]:
    """What verl collated of the rows' extra info."""
    return {key: result.non_tensor_batch[key].tolist() for key in result.meta_info["reward_extra_keys"]}


def text_of(length: int, end: str = " #### 4") -> str:
    """A right answer of so many tokens."""
    return "x" * (length - len(end)) + end


def actor_names() -> list[str]:
    return [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]


def until(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
