"""Measures how long an accelerator waits for a judge: a training loop with judge rewards against the same loop without.

    python benchmarks/gpu_wait.py [--json FILE] [--quick] [--rounds N] [--work-s S] [--responses N] [--latency-s S]

    without   the training work alone
    async     `submit(batch k)`, then work on batch k-1: the judge has the whole step          use_async_io=True
    sync      `manager(batch)`, then work: one step waits for its judge, many calls at a time   use_async_io=False
    naive     one call after the other, then work (one step is measured for all)

Responses have 2,048 tokens. Plain Python decodes them in the trainer's process, slower than a real tokenizer.
The work is a policy-gradient update repeated a fixed number of times: matmuls on two threads, or on CUDA if there is a
GPU. The modes take turns in one run, a few steps at a time; waiting is the time within `submit` and `result`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
import psutil
import torch

from common import (
    at_most,
    exit_code,
    machine_facts,
    machine_line,
    markdown_table,
    parser,
    promise_table,
    scratch_dir,
    write_json,
)
from freewheel.data import DataProto
from freewheel.judge.testing import JudgeProfile, MockJudge
from freewheel.rewards import LengthPenaltyRewardManager

PROMPT_TOKENS, RESPONSE_TOKENS, VOCABULARY = 32, 2048, 4096
TRAINED_TOKENS = 64
"""The update uses the first tokens of a response, which bounds its memory; decoding and judge use all of them."""
CPU_WIDTH, CUDA_WIDTH = 512, 8192
GROUP = 4
STEPS = 3
"""Steps of a mode at a time. The first one does not count: caches are cold after the previous mode's turn, and the
judge had that turn's time for its batch."""


class Words:
    """The part of a tokenizer that rewards need."""

    def decode(self, tokens: torch.Tensor, skip_special_tokens: bool = True) -> str:
        return " ".join(f"w{token}" for token in tokens.tolist())


class Policy:
    """A model small enough to time and large enough to wait for: embedding, two wide layers, a head, AdamW."""

    def __init__(self, device: str) -> None:
        width = CUDA_WIDTH if device == "cuda" else CPU_WIDTH
        layers = [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.GELU()]
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, width), *layers, torch.nn.Linear(width, VOCABULARY)
        ).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.device = device

    def update(self, responses: torch.Tensor, rewards: torch.Tensor, times: int) -> None:
        advantages = rewards.sum(dim=1) - rewards.sum(dim=1).mean()
        responses = responses[:, :TRAINED_TOKENS]
        for _ in range(times):
            logits = self.model(responses[:, :-1]).float()
            chosen = torch.nn.functional.cross_entropy(logits.transpose(1, 2), responses[:, 1:], reduction="none")
            loss = (advantages[:, None] * chosen).mean()
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        self.settle()

    def settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def rollouts(count: int, device: str, generator: torch.Generator) -> DataProto:
    """Responses that the judge has not seen before."""
    responses = torch.randint(VOCABULARY, (count, RESPONSE_TOKENS), generator=generator)
    tensors = {
        "prompts": torch.randint(VOCABULARY, (count, PROMPT_TOKENS), generator=generator),
        "responses": responses,
        "attention_mask": torch.ones(count, PROMPT_TOKENS + RESPONSE_TOKENS, dtype=torch.long),
    }
    columns = {
        "data_source": np.array(["bench"] * count, dtype=object),
        "reward_model": np.array([{"ground_truth": ""}] * count, dtype=object),
        "uid": np.array([str(row // GROUP) for row in range(count)], dtype=object),
    }
    return DataProto.from_dict({name: tensor.to(device) for name, tensor in tensors.items()}, columns)


class Loop:
    """One mode of the training loop; `step` returns (seconds, seconds waited)."""

    def __init__(self, policy: Policy, make: Callable[[], DataProto], times: int, manager: Any = None) -> None:
        self.policy, self.make, self.times, self.manager = policy, make, times, manager
        self.pending: tuple[DataProto, Any] | None = None

    def without(self) -> tuple[float, float]:
        batch = self.make()
        began = time.perf_counter()
        self.policy.update(batch.batch["responses"], torch.ones_like(batch.batch["responses"]).float(), self.times)
        return time.perf_counter() - began, 0.0

    def sync(self) -> tuple[float, float]:
        batch = self.make()
        began = time.perf_counter()
        rewards = self.manager(batch)
        waited = time.perf_counter() - began
        self.policy.update(batch.batch["responses"], rewards, self.times)
        return time.perf_counter() - began, waited

    def asynchronous(self) -> tuple[float, float]:
        batch = self.make()
        if self.pending is None:
            self.pending = (batch, self.manager.submit(batch))
            batch = self.make()
        began = time.perf_counter()
        following = (batch, self.manager.submit(batch))
        ready, handle = self.pending
        rewards = handle.result()
        waited = time.perf_counter() - began
        self.pending = following
        self.policy.update(ready.batch["responses"], rewards, self.times)
        return time.perf_counter() - began, waited


def naive(loop: Loop, url: str) -> tuple[float, float]:
    """Make one call after the other, as a reward function without concurrency does."""
    manager = make_manager(url, use_async_io=False, max_concurrent_requests="fixed:1", batch_timeout_s=600.0)
    return Loop(loop.policy, loop.make, loop.times, manager).sync()


def make_manager(url: str, cache_dir: str | None = None, **settings: Any) -> LengthPenaltyRewardManager:
    judge = {"cache_dir": cache_dir} if cache_dir else {"cache": False}
    config = {"api_key": "none", "api_endpoint": url, "model_name": "judge", "judge": judge, **settings}
    return LengthPenaltyRewardManager(Words(), 0, compute_score=lambda **_: 1.0, length_penalty_config=config)


def calibrate(policy: Policy, make: Callable[[], DataProto], work_s: float) -> int:
    """Number of updates that take about `work_s`."""
    batch = make().batch["responses"]
    rewards = torch.ones_like(batch).float()
    policy.update(batch, rewards, 2)
    began = time.perf_counter()
    policy.update(batch, rewards, 4)
    return max(1, round(work_s / ((time.perf_counter() - began) / 4)))


def family_bytes() -> int:
    """Private memory of this process and of the engine's. The judge's does not count."""
    me = psutil.Process()
    engines = [child for child in me.children() if "freewheel.judge.transport" in " ".join(child.cmdline())]
    return sum(process.memory_full_info().uss for process in (me, *engines))


def measure(options: argparse.Namespace, url: str, cache_dir: str) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(2)
    policy, generator = Policy(device), torch.Generator().manual_seed(options.seed)

    def make() -> DataProto:
        return rollouts(options.responses, device, generator)

    times = calibrate(policy, make, options.work_s)
    plain = Loop(policy, make, times)
    bytes_without, bytes_with = [], []
    for _ in range(STEPS):
        plain.without()
        bytes_without.append(family_bytes())
    overlapped = Loop(policy, make, times, make_manager(url, cache_dir, use_async_io=True))
    sync = Loop(policy, make, times, make_manager(url, cache_dir, use_async_io=False))
    modes = {"without": plain.without, "async": overlapped.asynchronous, "sync": sync.sync}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
    for _ in range(options.rounds):
        for name, run in modes.items():
            for step in range(STEPS):
                seconds = run()
                taken[name] += [seconds] if step else []
                bytes_with += [family_bytes()] if name == "async" else []
    overlapped.manager.shutdown_workers()
    if not options.quick:
        taken["naive"] = [naive(plain, url)]
    # Medians, because the memory that torch caches varies by a fifth from step to step.
    memory = statistics.median(bytes_with) / statistics.median(bytes_without)
    return {"device": device_name(device), "updates_a_step": times, "modes": taken, "memory": memory}


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu, 2 threads"


def summary(found: dict[str, Any]) -> dict[str, float]:
    step_s = {name: statistics.median(step for step, _ in steps) for name, steps in found["modes"].items()}
    share = {name: sum(w for _, w in steps) / sum(s for s, _ in steps) for name, steps in found["modes"].items()}
    figures = {
        "wait_share_sync": share["sync"],
        "wait_share_async": share["async"],
        "step_ratio": step_s["async"] / step_s["without"],
        "memory_ratio": found["memory"],
    }
    if "naive" in step_s:
        figures |= {"wait_share_naive": share["naive"], "total_vs_naive": step_s["async"] / step_s["naive"]}
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--work-s", type=float, default=5.0, help="seconds of training work in a step")
    options.add_argument("--responses", type=int, default=100)
    options.add_argument("--latency-s", type=float, default=0.6, help="the judge's")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    if args.quick:
        args.rounds, args.work_s, args.responses, args.latency_s = 1, 1.0, 16, 0.1
    facts = machine_facts()
    with MockJudge(JudgeProfile(latency_s=args.latency_s)).in_process() as judge, scratch_dir() as cache_dir:
        found = measure(args, judge.url, cache_dir)
    figures = summary(found)
    print(f"{machine_line(facts)}; {found['device']}; {args.responses} responses a step, judge {args.latency_s:g} s\n")
    rows = [
        (name, f"{statistics.median(s for s, _ in steps):.2f}", f"{statistics.median(w for _, w in steps):.3f}")
        for name, steps in found["modes"].items()
    ]
    print(markdown_table(("mode", "step, s", "of which waiting, s"), rows), "\n")
    promises = [
        at_most("wait_share_async", figures["wait_share_async"], 0.02),
        at_most("step_ratio", figures["step_ratio"], 1.05),
        at_most("memory_ratio", figures["memory_ratio"], 1.2),
    ]
    if not args.quick:
        promises.append(at_most("total_vs_naive", figures["total_vs_naive"], 1 / 7))
    print(promise_table(promises))
    print(
        f"\nwait_share_sync {figures['wait_share_sync']:.3f}, wait_share_naive {figures.get('wait_share_naive', 0):.3f}"
    )
    write_json(args.json, {"machine": facts, "options": {**vars(args), "json": None}, **found, **figures})
    return exit_code(promises, quick=args.quick)


if __name__ == "__main__":
    sys.exit(main())
