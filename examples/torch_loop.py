"""A policy that learns from a rule and a judge, in plain PyTorch, while the judge works.

    python examples/torch_loop.py [--endpoint URL --model NAME]      # key: OPENAI_API_KEY

The task: answer a digit with that digit. The rule gives 1 for the right one; the judge's score comes on top. Batch k is
judged while batch k-1 is trained on, one step off-policy. A step this small ends before the judge does. Without an
endpoint it starts a test judge on this machine.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from freewheel.data import DataProto
from freewheel.judge.testing import JudgeProfile, MockJudge
from freewheel.rewards import LengthPenaltyRewardManager, exact_match

DIGITS, GROUP, PROMPTS = 10, 8, 16
JUDGE = JudgeProfile(latency_s=0.3, scores={f"<{digit}>": str(digit + 1) for digit in range(DIGITS)})
"""The test judge likes large digits; a real one would read the answers."""


class Digits:
    """A tokenizer of ten words."""

    def decode(self, tokens: torch.Tensor, skip_special_tokens: bool = True) -> str:
        return "".join(f"<{token}>" for token in tokens.tolist())


def rule(solution_str: str, ground_truth: str, **_: Any) -> float:
    return exact_match(solution_str, ground_truth, {}).value


def sample(policy: torch.nn.Module) -> DataProto:
    """One batch: PROMPTS questions, GROUP answers each."""
    questions = torch.randint(DIGITS, (PROMPTS,)).repeat_interleave(GROUP)
    with torch.no_grad():
        answers = torch.distributions.Categorical(logits=policy(questions)).sample()
    rows = len(questions)
    return DataProto.from_dict(
        {
            "prompts": questions[:, None],
            "responses": answers[:, None],
            "attention_mask": torch.ones(rows, 2, dtype=torch.long),
        },
        {
            "data_source": ["digits"] * rows,
            "reward_model": [{"ground_truth": f"<{question}>"} for question in questions.tolist()],
            "uid": np.arange(rows) // GROUP,
        },
    )


def train(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: DataProto, rewards: torch.Tensor) -> float:
    """One REINFORCE step with the group's mean as its baseline."""
    reward = rewards.sum(dim=1)
    by_group = reward.view(-1, GROUP)
    advantage = (by_group - by_group.mean(dim=1, keepdim=True)).flatten()
    questions, answers = batch.batch["prompts"][:, 0], batch.batch["responses"][:, 0]
    chosen = torch.distributions.Categorical(logits=policy(questions)).log_prob(answers)
    loss = -(advantage * chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return (questions == answers).float().mean().item()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--endpoint")
    options.add_argument("--model", default="judge")
    options.add_argument("--steps", type=int, default=20)
    args = options.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = torch.nn.Embedding(DIGITS, DIGITS)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.3)
    with ExitStack() as stack:
        judge: dict[str, Any] = {"api_endpoint": args.endpoint, "model_name": args.model}
        if args.endpoint is None:
            judge |= {"api_endpoint": stack.enter_context(MockJudge(JUDGE).in_process()).url, "api_key": "EMPTY"}
        manager = LengthPenaltyRewardManager(
            Digits(), num_examine=0, compute_score=rule, length_penalty_config={**judge, "use_async_io": True}
        )
        stack.callback(manager.shutdown_workers)
        manager.start_workers()
        batch = sample(policy)
        pending = (batch, manager.submit(batch))
        for step in range(args.steps):
            batch = sample(policy)
            next_pending = (batch, manager.submit(batch))  # judged while we train on the one before
            ready, handle = pending
            began = time.perf_counter()
            scored = handle.result()
            waited = time.perf_counter() - began
            right = train(policy, optimizer, ready, scored)
            pending = next_pending
            mean = scored.sum(dim=1).mean()
            print(f"step {step:2d}: {right:4.0%} right, mean reward {mean:5.2f}, waited {waited:.2f} s")


if __name__ == "__main__":
    main()
