"""TRL's real reward calls: AsyncGRPO's scoring loop and `GRPOTrainer._calculate_rewards`, with the SDK or with ours.

The loop is TRL's own `_AsyncRolloutLoop`, in this process and without the vLLM server that would feed it: its queue is
filled with groups that are already generated.
"""

from __future__ import annotations

import asyncio
import math
import queue
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sdk
import trl
from datasets import Dataset
from job import MODEL, Item, Job, Outcome, clock, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from freewheel.integrations.trl import JudgeReward


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, with the chat template of Qwen 2.5 that TRL ships."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    marks = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, **marks)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja").read_text()
    return tokenizer


def reward_of(job: Job) -> Any:
    if job.options["reward"] == "freewheel":
        return JudgeReward({"api_endpoint": job.url, "model_name": MODEL, "api_key": "EMPTY"})
    return sdk.SdkReward(job.base_url, forgiving=job.options["reward"] == "sdk_forgiving")


async def score_loop(job: Job, outcome: Outcome) -> None:
    """AsyncGRPO: groups wait in the worker's queue, and its loop takes one after the other."""
    from accelerate.state import PartialState
    from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TrainingSequence, _AsyncRolloutLoop

    PartialState()  # as the worker's process does at its start
    tokenizer, size = make_tokenizer(), job.options["group"]
    buffer: queue.Queue[Any] = queue.Queue()
    loop = _AsyncRolloutLoop(
        model_name="none",
        dataset=Dataset.from_list([{"prompt": ""}]),
        reward_funcs=[reward_of(job)],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        rollout_buffer=buffer,
        model_version_value=SimpleNamespace(value=0),
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=SimpleNamespace(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        num_generations=size,
    )

    def group_of(number: int, items: list[Item]) -> RolloutGroup:
        ids = [tokenizer.encode(item.response) for item in items]
        rows = [[TrainingSequence(row, [1] * len(row), [0.0] * len(row), str(number))] for row in ids]
        return RolloutGroup(
            prompts=[item.prompt for item in items],
            reward_kwargs={},
            completions=[item.response for item in items],
            completions_ids=ids,
            completions_sequences=rows,
            tool_call_counts=[0] * len(items),
            tool_failure_counts=[0] * len(items),
            model_version=0,
            group_id=number,
            env_rewards=[None] * len(items),
            rollout_rewards=[None] * len(items),
            queued_at=time.monotonic(),
        )

    groups = [group_of(at, job.items[at : at + size]) for at in range(0, len(job.items), size)]

    async def feed() -> None:
        for group in [*groups, None]:
            await loop._groups_to_score.put(group)

    feeding = asyncio.ensure_future(feed())
    with clock(outcome):
        await loop._score_loop(asyncio.Event())
    feeding.cancel()
    samples = [buffer.get_nowait() for _ in range(buffer.qsize())]
    for place, sample in enumerate(samples):
        outcome.scores[place] = _known(sample.metrics["reward"])


def calculate_rewards(job: Job, outcome: Outcome) -> None:
    """GRPOTrainer: the whole batch in one call, from the trainer's thread to its event loop."""
    tokenizer = make_tokenizer()
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward_of(job),
        train_dataset=Dataset.from_list([{"prompt": item.prompt} for item in job.items]),
        args=GRPOConfig(output_dir="trl", use_cpu=True, bf16=False, report_to="none", save_strategy="no"),
    )
    prompts = [item.prompt for item in job.items]
    completions = [item.response for item in job.items]
    ids = [tokenizer.encode(text) for text in completions]
    with clock(outcome):
        rewards = trainer._calculate_rewards([{"prompt": prompt} for prompt in prompts], prompts, completions, ids)
        outcome.scores = [_known(score) for score in rewards[:, 0].tolist()]


def _known(score: float) -> float | None:
    return None if math.isnan(score) else score


def work(job: Job, outcome: Outcome) -> None:
    if job.options["call"] == "score_loop":
        asyncio.run(score_loop(job, outcome))
    else:
        calculate_rewards(job, outcome)


if __name__ == "__main__":
    run(work, ["trl", "transformers", "torch"])
