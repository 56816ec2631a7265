"""verl's real reward loop over a real batch: its configuration, its `RewardLoopWorker`, verl's manager or ours.

The worker runs in this process and not as a Ray actor: its code is the same, and verl's limits hold per process. That
favours verl, which starts eight such processes by default; the option `workers` does so here.

Rewards are taken from the workers' results. verl's managers then collate the keys of the first row's extra info for all
rows, so a batch in which `rate_limited` caught an error for some rows may end there with a KeyError.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from hydra import compose, initialize_config_module
from job import MODEL, Item, Job, Outcome, clock, run
from omegaconf import DictConfig
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl import DataProto
    from verl.experimental.reward_loop import RewardLoopManager, migrate_legacy_reward_impl
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

FUNCTIONS = Path(__file__).with_name("verl_functions.py")
OBJECT_STORE_BYTES = 100_000_000
OURS = (
    "reward.reward_manager.source=importlib",
    "reward.reward_manager.module.path=pkg://freewheel.integrations.verl",
    "reward.reward_manager.name=FreewheelRewardManager",
)


def make_tokenizer(folder: str) -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<pad>", "<eos>"])}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def overrides(job: Job) -> list[str]:
    """The user's arguments for `verl.trainer.main_ppo`."""
    function = job.options.get("function", "nothing")
    common = [
        f"reward.custom_reward_function.path={FUNCTIONS}",
        f"reward.custom_reward_function.name={function}",
        f"reward.num_workers={job.options.get('workers', 1)}",
        f"actor_rollout_ref.rollout.n={job.options.get('group', 1)}",
    ]
    if job.options["manager"] != "freewheel":
        limit = job.options.get("max_concurrent")
        limits = [f"+reward.max_concurrent={limit}"] if limit else []
        return [*common, f"reward.reward_manager.name={job.options['manager']}", *limits]
    settings = {"api_endpoint": job.url, "api_key": "EMPTY", "model_name": MODEL, "enable": False, "judge_gate": "off"}
    return [
        *common,
        *OURS,
        *(f"+reward.reward_kwargs.length_penalty_config.{key}={value}" for key, value in settings.items()),
    ]


def config_of(job: Job, tokenizer_folder: str) -> DictConfig:
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        model = f"actor_rollout_ref.model.path={tokenizer_folder}"
        return migrate_legacy_reward_impl(compose("ppo_trainer", overrides=[model, *overrides(job)]))


def batch_of(items: list[Item], tokenizer: PreTrainedTokenizerFast) -> DataProto:
    """The batch that verl's trainer holds after generation."""
    prompts, prompt_mask = _padded([tokenizer.encode(item.prompt) for item in items], left=True)
    responses, response_mask = _padded([tokenizer.encode(item.response) for item in items], left=False)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
    }
    return DataProto(
        batch=TensorDict(tensors, batch_size=len(items)),
        non_tensor_batch={
            "uid": np.array([str(item.number) for item in items], dtype=object),
            "data_source": np.array(["peers"] * len(items), dtype=object),
            "reward_model": _objects([{"ground_truth": "", "style": "model"} for _ in items]),
            "extra_info": _objects([{"question": item.prompt, "split": "train"} for item in items]),
            "raw_prompt": _objects([[{"role": "user", "content": item.prompt}] for item in items]),
        },
    )


def _padded(rows: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        at = slice(width - len(row), width) if left else slice(0, len(row))
        ids[number, at], mask[number, at] = torch.tensor(row), 1
    return ids, mask


def _objects(values: list[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


async def in_process(config: DictConfig, batch: DataProto, outcome: Outcome) -> None:
    worker = RewardLoopWorker(config)
    with clock(outcome):
        results = await worker.compute_score_batch(batch)
        outcome.scores = [float(result["reward_score"]) for result in results]


def in_actors(config: DictConfig, batch: DataProto, outcome: Outcome) -> None:
    """verl's own `RewardLoopManager` and its actors, which get the batch in chunks as in `compute_rm_score`."""
    workers = config.reward.num_workers
    ray.init(address="local", num_cpus=workers, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)
    try:
        actors = RewardLoopManager(config).reward_loop_workers
        ray.get([actor.compute_score_batch.remote(batch[:0]) for actor in actors])  # imports, before the clock
        with clock(outcome):
            calls = zip(actors, batch.chunk(workers), strict=True)
            chunks = ray.get([actor.compute_score_batch.remote(chunk) for actor, chunk in calls])
            outcome.scores = [float(result["reward_score"]) for results in chunks for result in results]
    finally:
        ray.shutdown()


def work(job: Job, outcome: Outcome) -> None:
    os.environ["JUDGE_URL"] = job.url
    os.environ["JUDGE_TIME_SCALE"] = str(job.time_scale)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(folder)
        config, batch = config_of(job, folder), batch_of(job.items, tokenizer)
        if "workers" in job.options:
            in_actors(config, batch, outcome)
        else:
            asyncio.run(in_process(config, batch, outcome))


if __name__ == "__main__":
    run(work, ["verl", "aiohttp", "ray", "torch"])
