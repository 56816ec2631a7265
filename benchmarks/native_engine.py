"""Tokens per second of the native engine against transformers' `generate`: same model, same requests, one thread.

    python benchmarks/native_engine.py [--json FILE] [--repeats N] [--quick]

Model: a Qwen2 with the embedded model's size (hidden 64, 2 layers, 61 tokens), float32, random weights. Requests are
groups of 8 samples at temperature 1, like those of a GRPO step; `single` has one sample a prompt.
Scenes: `uniform` (20 tokens each) and `tail` (lognormal lengths, median 16, at most 128), each at a batch of 64 and 256
and with eight batches of samples. `generate` runs one batch after the other, each to its longest sample; the engine has
as many slots as the batch has rows. Only requested tokens count; there is no stop token.

The engine also returns log-probabilities and versions; `generate` does not.
Sides take turns; a ratio is the median over the turns, of wall time (`ratio`) and of CPU time (`cpu_ratio`).
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from common import (
    Promise,
    at_least,
    exit_code,
    machine_facts,
    machine_line,
    markdown_table,
    median,
    parser,
    promise_table,
    write_json,
)
from freewheel.rollout.engine import GenerationRequest, SamplingParams
from freewheel.rollout.native.engine import NativeEngine

VOCABULARY = 61
PROMPT_TOKENS = (24, 32)
"""Shortest and longest prompt of the embedded task."""
GROUP = 8
BATCHES = 8
"""Batches of samples per run: enough to show the effect of refilling slots."""
BATCH_SIZES = (64, 256)
UNIFORM_TOKENS = 20
TAIL_MEDIAN, TAIL_SIGMA, TAIL_MOST = 16, 0.8, 128
UNIFORM_BOUND, TAIL_BOUND = 1.3, 2.0
REPEATS, QUICK_REPEATS = 7, 1
PAD = 0


class Sample(NamedTuple):
    prompt: np.ndarray[Any, np.dtype[np.int32]]
    tokens: int


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=256,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    return Qwen2ForCausalLM(config).eval()


def samples_of(scene: str, batch: int, seed: int) -> list[list[Sample]]:
    """Groups of samples with one prompt each."""
    rng = np.random.default_rng(seed)
    size = 1 if scene == "single" else GROUP
    groups = []
    for _ in range(BATCHES * batch // size):
        prompt = rng.integers(0, VOCABULARY, rng.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1)).astype(np.int32)
        if scene == "tail":
            drawn = np.exp(rng.normal(np.log(TAIL_MEDIAN), TAIL_SIGMA, size))
            lengths = np.clip(np.rint(drawn), 1, TAIL_MOST).astype(int)
        else:
            lengths = np.full(size, UNIFORM_TOKENS)
        groups.append([Sample(prompt, int(tokens)) for tokens in lengths])
    return groups


def run_generate(model: Qwen2ForCausalLM, groups: list[list[Sample]], batch: int) -> int:
    """Run batch after batch, left-padded, each to its longest sample. Returns the number of requested tokens."""
    samples = [sample for group in groups for sample in group]
    for start in range(0, len(samples), batch):
        part = samples[start : start + batch]
        longest = max(len(sample.prompt) for sample in part)
        ids = torch.full((len(part), longest), PAD)
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(part):
            ids[row, longest - len(sample.prompt) :] = torch.from_numpy(sample.prompt)
            mask[row, longest - len(sample.prompt) :] = 1
        tokens = max(sample.tokens for sample in part)
        settings = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=PAD
        )
        made = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        assert made.shape[1] == longest + tokens
    return sum(sample.tokens for sample in samples)


async def run_engine(engine: NativeEngine, groups: list[list[Sample]]) -> int:
    async def run(number: int, group: list[Sample]) -> int:
        request = GenerationRequest(
            id=str(number),
            prompt=group[0].prompt,
            samples=tuple(
                SamplingParams(max_new_tokens=sample.tokens, seed=number * GROUP + index)
                for index, sample in enumerate(group)
            ),
            timeout_s=30.0,
        )
        return sum([len(response.tokens) async for _, response in engine.generate(request)])

    return sum(await asyncio.gather(*(run(number, group) for number, group in enumerate(groups))))


async def measure(scene: str, batch: int, repeats: int) -> dict[str, Any]:
    model = tiny_model()
    most = TAIL_MOST if scene == "tail" else UNIFORM_TOKENS
    engine = NativeEngine(copy.deepcopy(model), slots=batch, max_prompt_tokens=PROMPT_TOKENS[1], max_new_tokens=most)
    rates: dict[str, list[float]] = {"generate": [], "engine": []}
    cpu_rates: dict[str, list[float]] = {"generate": [], "engine": []}
    for turn in range(-1, repeats):  # the first turn warms up
        groups = samples_of(scene, batch, seed=turn + 1)
        for side in rates:
            wall, cpu = time.perf_counter(), time.process_time()
            if side == "engine":
                tokens = await run_engine(engine, groups)
            else:
                tokens = run_generate(model, groups, batch)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            assert tokens == sum(sample.tokens for group in groups for sample in group)
            if turn >= 0:
                rates[side].append(tokens / wall)
                cpu_rates[side].append(tokens / cpu)
    await engine.close()
    return {
        "generate_tokens_per_s": median(rates["generate"]),
        "engine_tokens_per_s": median(rates["engine"]),
        "ratio": median([e / g for e, g in zip(rates["engine"], rates["generate"], strict=True)]),
        "cpu_ratio": median([e / g for e, g in zip(cpu_rates["engine"], cpu_rates["generate"], strict=True)]),
        "engine_tokens_per_cpu_s": median(cpu_rates["engine"]),
    }


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=REPEATS, help="turns of each side")
    args = options.parse_args()
    torch.set_num_threads(1)
    facts = machine_facts()
    print(machine_line(facts))
    repeats = QUICK_REPEATS if args.quick else args.repeats
    figures: dict[str, Any] = {"machine": facts}
    rows, promises = [], list[Promise]()
    for scene, bound in (("uniform", UNIFORM_BOUND), ("tail", TAIL_BOUND), ("single", None)):
        for batch in BATCH_SIZES:
            found = asyncio.run(measure(scene, batch, repeats))
            figures.setdefault(scene, {})[str(batch)] = found
            rows.append(
                (
                    f"{scene}, batch {batch}",
                    f"{found['generate_tokens_per_s']:,.0f}",
                    f"{found['engine_tokens_per_s']:,.0f}",
                    f"{found['ratio']:.2f}",
                    f"{found['cpu_ratio']:.2f}",
                )
            )
            if bound is not None:
                promises.append(at_least(f"{scene}.{batch}.ratio", found["ratio"], bound))
    print(markdown_table(("scene", "generate tokens/s", "engine tokens/s", "ratio", "CPU ratio"), rows))
    print("\n" + promise_table(promises))
    write_json(args.json, figures)
    return exit_code(promises, quick=args.quick)


if __name__ == "__main__":
    raise SystemExit(main())
