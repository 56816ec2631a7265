"""Makes the base model and tokenizer that come with the task `word_problems`.

    python scripts/make_base_checkpoint.py [--out DIR] [--seed 0] [--steps 2000]

A small Llama is trained on demonstrations of which three in four guess the answer and one in four shows its steps. So
greedy decoding guesses, and sampling finds the steps often enough for a policy to learn from. The same seed on the same
machine and versions gives the same file. Takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from freewheel.data.tasks.word_problems import (
    NAMES,
    SMALL,
    TEMPLATES,
    THINGS,
    WordProblem,
    model_path,
    problems,
    rows,
    score,
)

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
MARKS = "+-=;#"
GUESS_SHARE = 0.75
"""Of the demonstrations. With fewer the base solves too much by itself, with more it seldom shows its steps."""
BATCH_SIZE = 128
LEARNING_RATE = 3e-3
WARMUP_STEPS = 100
CONTEXT_TOKENS = 128
"""A prompt has at most 22 tokens and a response 19; the rest is room for a user's own."""
NEW_TOKENS = 20
MEASURED_SAMPLES = 4


def vocabulary() -> list[str]:
    """Special tokens, digits, marks, and every word and punctuation mark of the templates: 61 in all."""
    blank = {"a": "", "b": "", "c": "", "name": "", "thing": ""}
    splitter = pre_tokenizers.Whitespace()
    words = [word for t in TEMPLATES for word, _ in splitter.pre_tokenize_str(t.text.format_map(blank))]
    punctuation = [mark for word in words if not word.isalpha() for mark in word]
    return list(
        dict.fromkeys(
            [PAD, EOS, UNKNOWN, *"0123456789", *MARKS, *punctuation, *filter(str.isalpha, words), *NAMES, *THINGS]
        )
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words, single digits and marks. Decoding puts spaces around words alone, so both a question and `6+9=15` come
    back as they were written."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary())}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("[A-Za-z]+|."), "isolated")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex("^(?=[A-Za-z])|(?<=[A-Za-z])$"), " "),
            decoders.Fuse(),
            decoders.Replace("  ", " "),
            decoders.Replace(Regex(" (?=[,.?])"), ""),
            decoders.Replace(Regex("^ | $"), ""),  # Strip would panic on an empty response
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Llama, because AutoTokenizer always gives a `qwen2` folder Qwen's byte-level tokenizer."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def demonstration(problem: WordProblem, draw: np.random.Generator) -> tuple[str, str]:
    question = problem.question(NAMES[draw.integers(len(NAMES))], THINGS[draw.integers(len(THINGS))])
    if draw.random() >= GUESS_SHARE:
        return question, problem.solution
    # A guess ignores the last number, so one guess in eight is right.
    guesses = [guess for c in SMALL if (guess := replace(problem, c=c).answer) > 0]
    return question, f"#{guesses[draw.integers(len(guesses))]}"


def batch(tokenizer: PreTrainedTokenizerFast, examples: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, padded on the right, and labels: the response's tokens, -100 elsewhere."""
    questions = tokenizer([question for question, _ in examples])["input_ids"]
    answers = tokenizer([answer + EOS for _, answer in examples])["input_ids"]
    width = max(len(q) + len(a) for q, a in zip(questions, answers, strict=True))
    tokens = torch.full((len(examples), width), tokenizer.pad_token_id)
    labels = torch.full_like(tokens, -100)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        end = len(question) + len(answer)
        tokens[row, :end] = torch.tensor(question + answer)
        labels[row, len(question) : end] = torch.tensor(answer)
    return tokens, labels


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int) -> float:
    """Train the model and return the last loss."""
    draw = np.random.default_rng(seed)
    pool = list(problems("train"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))

    def rate(step: int) -> float:
        return min((step + 1) / WARMUP_STEPS, 1.0) * (1 - step / steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        chosen = draw.integers(len(pool), size=BATCH_SIZE)
        tokens, labels = batch(tokenizer, [demonstration(pool[index], draw) for index in chosen])
        logits = model(tokens).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


@torch.no_grad()
def mean_reward(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, sampled: bool) -> float:
    """Return the mean reward on the held-out problems."""
    held_out = rows("test")
    prompts = tokenizer([row["prompt"] for row in held_out], padding=True, return_tensors="pt")
    prompts = {key: prompts[key] for key in ("input_ids", "attention_mask")}
    count = MEASURED_SAMPLES if sampled else 1
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {"do_sample": False}
    made = model.generate(**prompts, max_new_tokens=NEW_TOKENS, num_return_sequences=count, **options)
    made = made[:, prompts["input_ids"].shape[1] :]
    ended = (made == tokenizer.eos_token_id).any(1).tolist()
    texts = tokenizer.batch_decode(made, skip_special_tokens=True)
    truths = [row["reward_model"]["ground_truth"] for row in held_out for _ in range(count)]
    return float(
        np.mean([end and score(text, truth, {}).value for text, truth, end in zip(texts, truths, ended, strict=True)])
    )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Replace the folder as a whole: a mix of old and new files would load, and be wrong."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=NEW_TOKENS
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in Path(folder).iterdir():
            file.chmod(0o644)  # the weights are written for their owner alone
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder, out)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=model_path())
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--steps", type=int, default=2000)
    chosen = options.parse_args()
    torch.set_num_threads(1)  # the order of sums, and with it the last bits, would else depend on the machine
    torch.manual_seed(chosen.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    loss = train(model, tokenizer, steps=chosen.steps, seed=chosen.seed)
    save(model.eval(), tokenizer, chosen.out)
    greedy, sampled = (mean_reward(model, tokenizer, sampled=mode) for mode in (False, True))
    size = sum(parameter.numel() for parameter in model.parameters())
    sys.stdout.write(
        f"{size:,} parameters, vocabulary of {len(tokenizer)}, last loss {loss:.3f}; "
        f"held-out problems: greedy {greedy:.3f}, sampled {sampled:.3f}; written to {chosen.out}\n"
    )


if __name__ == "__main__":
    main()
