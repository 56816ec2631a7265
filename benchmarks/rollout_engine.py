"""What a rollouter costs vLLM: tokens/s through `Rollouter` against the same vLLM called directly, on one GPU.

    python benchmarks/rollout_engine.py [--json FILE] [--shapes 0.5B 1.5B] [--sequences 256 1024] [--quick]

    bare:  prompts ─▶ AsyncLLM.generate, all at once                          ─▶ tokens, log-probabilities
    ours:  queue ─ tickets ─▶ Rollouter ─▶ VllmEngine ─▶ reward ─▶ group ─▶ queue ─▶ removed at once

Both sides use one engine in turns, so that compilation, memory and CUDA graphs are the same. Random prompts of 128
tokens, 8 responses to each, 256 tokens a response (no stop token), temperature 1, log-probabilities of the sampled
tokens on both sides. Sequences: how many the engine runs at a time; a turn generates three times as many, from an
empty engine to an empty engine. The reward is a constant, because its cost is the user's. Weights are random.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from common import (
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
from freewheel.data.group import Prompt
from freewheel.queue.message_queue import MessageQueue
from freewheel.queue.staleness import Bounds
from freewheel.rollout.generation import Sampling
from freewheel.rollout.reward_functions import load_reward
from freewheel.rollout.reward_stage import RewardStage
from freewheel.rollout.rollouter import Rollouter
from shapes import SHAPES, VOCABULARY, write_model

PROMISED = 0.95
PROMPT_TOKENS, NEW_TOKENS, GROUP = 128, 256, 8
TIMES = 3
"""Sequences of a turn, in multiples of those that run at a time."""
TURNS = 2


def constant(response: str, row: dict[str, Any]) -> float:
    return 0.0


def prompts(count: int) -> list[np.ndarray[Any, Any]]:
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, (count, PROMPT_TOKENS), np.int32)
    return list(drawn)


async def bare(engine: Any, asked: list[np.ndarray[Any, Any]]) -> float:
    """Tokens/s of vLLM with nothing around it."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    llm = engine._llm._llm  # vLLM itself

    async def one(number: int, tokens: list[int]) -> None:
        async for _ in llm.generate(TokensPrompt(prompt_token_ids=tokens), params, f"bare-{number}"):
            pass

    texts = [prompt.tolist() for prompt in asked for _ in range(GROUP)]
    since = time.perf_counter()
    await asyncio.gather(*(one(number, tokens) for number, tokens in enumerate(texts)))
    return len(texts) * NEW_TOKENS / (time.perf_counter() - since)


async def ours(engine: Any, asked: list[np.ndarray[Any, Any]], sequences: int) -> float:
    """Tokens/s of groups that reach the queue."""
    total = len(asked)
    bounds = Bounds(
        groups_per_step=1, threshold=10**6, window=10**6, max_alive=10**6, max_lag_allowed=10**6, total_groups=total
    )
    queue = MessageQueue(bounds=bounds, total_prompts=total)
    stage = RewardStage(
        score=load_reward(constant),
        judge=None,
        concurrency=8192,
        timeout_s=60.0,
        workers=1,
        executor="thread",
        retries=0,
        on_failure="mask",
    )
    rollouter = Rollouter(
        name="rollouter-0",
        engine=engine,
        prompt=lambda ordinal: Prompt(tokens=asked[ordinal], row={}),
        rewards=stage,
        queue=queue,
        sampling=Sampling(n=GROUP, max_new_tokens=NEW_TOKENS, seed=0),
        decode=lambda tokens: "",
        capacity=sequences // GROUP,
        generation_timeout_s=60.0,
        interval_s=0.1,
    )
    since = time.perf_counter()
    running = asyncio.create_task(rollouter.run())
    for step in range(1, total + 1):
        while (await queue.take(step, wait_s=10.0)).groups is None:
            pass
        await queue.commit(step, wait_s=10.0)
    took = time.perf_counter() - since
    await rollouter.stop()
    await asyncio.gather(running, return_exceptions=True)
    await stage.close()
    return total * GROUP * NEW_TOKENS / took


async def measure(shape: str, sequences: list[int], turns: int, folder: Path) -> dict[str, Any]:
    from freewheel.runtime.building import load_engine
    from freewheel.runtime.config_files import to_config
    from freewheel.runtime.placement import Machine
    from freewheel.runtime.run_plan import resolve

    config = to_config(
        {
            "model": {"path": str(folder)},
            "data": {"task": "gsm8k", "max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {
                "engine": "vllm",
                "n": GROUP,
                "max_new_tokens": NEW_TOKENS,
                "slots": max(sequences),
                "gpu_memory_share": 0.6,
            },
        }
    )
    since = time.perf_counter()
    plan = resolve(config, Machine.here())
    engine = load_engine(config=config, plan=plan, model_path=str(folder), longest_tokens=PROMPT_TOKENS).engine
    found: dict[str, Any] = {"start_s": time.perf_counter() - since}
    try:
        for count in sequences:
            asked = prompts(TIMES * count // GROUP)
            await bare(engine, asked[: count // GROUP])  # the first batch of a size is slower
            rates: dict[str, list[float]] = {"bare": [], "ours": []}
            for _ in range(turns):
                rates["bare"].append(await bare(engine, asked))
                rates["ours"].append(await ours(engine, asked, count))
                print(f"  {shape} {count}: bare {rates['bare'][-1]:,.0f}, ours {rates['ours'][-1]:,.0f}", flush=True)
            ratios = [mine / theirs for mine, theirs in zip(rates["ours"], rates["bare"], strict=True)]
            found[str(count)] = {**{side: median(all_) for side, all_ in rates.items()}, "ratio": median(ratios)}
    finally:
        await engine.close()
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    options.add_argument("--sequences", nargs="+", type=int, default=[256, 1024])
    given = options.parse_args()
    facts = machine_facts()
    print(machine_line(facts), flush=True)
    figures: dict[str, Any] = {}
    for shape in given.shapes:
        with tempfile.TemporaryDirectory(prefix="freewheel-bench-") as folder:
            write_model(Path(folder), shape)
            figures[shape] = asyncio.run(measure(shape, given.sequences, 1 if given.quick else TURNS, Path(folder)))
    rows = [
        (f"{shape}, {count} sequences", f"{one['bare']:,.0f}", f"{one['ours']:,.0f}", f"{one['ratio']:.3f}")
        for shape, by_count in figures.items()
        for count, one in by_count.items()
        if isinstance(one, dict)
    ]
    print("\n" + markdown_table(("tokens/s", "vLLM", "through Rollouter", "ratio"), rows))
    kept = [
        at_least(f"{shape}.{count}.ratio", one["ratio"], PROMISED)
        for shape, by_count in figures.items()
        for count, one in by_count.items()
        if isinstance(one, dict)
    ]
    print("\n" + promise_table(kept))
    write_json(given.json, {**figures, "machine": facts})
    return exit_code(kept, quick=given.quick)


if __name__ == "__main__":
    raise SystemExit(main())
