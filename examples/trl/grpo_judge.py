"""GRPO with TRL, rewarded by a rule, an LLM judge and a length penalty.

    python examples/trl/grpo_judge.py
    python examples/trl/grpo_judge.py --model Qwen/Qwen2.5-0.5B-Instruct --endpoint http://HOST:PORT/v1 --judge NAME

The first form needs no network, GPU or key: a model of some thousand weights is asked for sums, and learns to please a
test judge on this machine. The second trains on GSM8K with your judge, whose key is taken from OPENAI_API_KEY (EMPTY
for a server that needs none).

What is to be copied is `reward`.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from freewheel.integrations.trl import JudgeReward
from freewheel.judge.testing import JudgeProfile, MockJudge

WORDS = [*"0123456789", "+", "=", "####", "please"]
LIKES_PLEASE = JudgeProfile(scores={"please": "9", "####": "4", "": "1"})
"""The first key that occurs in what the judge reads decides."""
PRINTED = (
    "reward",
    "freewheel/rule_score",
    "freewheel/judge_score",
    "freewheel/judge_failed",
    "freewheel/judge_cached",
)


def reward(endpoint: str, judge: str, key: str | None = None) -> JudgeReward:
    """Rule score + 0.1 × the judge's 1 to 10 − a penalty for lengths far from the group's median."""
    config = {
        "api_endpoint": endpoint,
        "model_name": judge,
        "api_key": key,  # None: from OPENAI_API_KEY
        "reward_coefficient": 0.1,
        "judge_gate": "off",  # wrong answers are judged too
    }
    return JudgeReward(config, rule="openai/gsm8k", ground_truth="answer")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Sequence([decoders.Replace("####", " #### "), decoders.Replace("please", " please ")])
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    set_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def sums() -> Dataset:
    pairs = [(a, b) for a in range(5) for b in range(5)]
    return Dataset.from_list([{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a, b in pairs])


def gsm8k() -> Dataset:
    ask = "\nEnd with a line '#### <number>'."
    rows = load_dataset("openai/gsm8k", "main", split="train")
    return rows.map(lambda row: {"prompt": [{"role": "user", "content": row["question"] + ask}]})


@contextlib.contextmanager
def judge_at(endpoint: str | None, judge: str) -> Iterator[JudgeReward]:
    if endpoint is not None:
        yield reward(endpoint, judge)
        return
    with MockJudge(LIKES_PLEASE).in_process() as mock:
        yield reward(mock.url, judge, key="EMPTY")


def train(args: argparse.Namespace, reward: JudgeReward, output_dir: str) -> list[dict[str, Any]]:
    """What the trainer logged, step by step."""
    small = args.model is None
    tokenizer = tiny_tokenizer() if small else None
    trainer = GRPOTrainer(
        model=args.model or tiny_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=sums() if small else gsm8k(),
        args=GRPOConfig(
            output_dir=output_dir,
            max_steps=args.steps,
            num_generations=8,
            per_device_train_batch_size=32 if small else 8,
            max_completion_length=6 if small else args.max_tokens,
            learning_rate=1e-2 if small else 1e-6,
            use_cpu=small,
            bf16=torch.cuda.is_available() and not small,
            logging_steps=min(args.steps, 5),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.remove_callback(PrinterCallback)  # the table at the end says it shorter
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a causal language model's name or folder; default: one made on the spot")
    parser.add_argument("--endpoint", help="an OpenAI-compatible chat-completions URL; default: a test judge here")
    parser.add_argument("--judge", default="mock-judge", help="the judge's model name at the endpoint")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=512, help="longest completion of --model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as output_dir, judge_at(args.endpoint, args.judge) as reward:
        history = train(args, reward, output_dir)
        reward.close()
    print(f"{'step':>5}" + "".join(f"{name.rpartition('/')[2]:>14}" for name in PRINTED))
    for entry in history:
        print(f"{entry['step']:>5}" + "".join(f"{entry.get(name, float('nan')):>14.3f}" for name in PRINTED))


if __name__ == "__main__":
    main()
