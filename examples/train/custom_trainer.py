"""The three hooks in one run: a rollouter with a tool, a trainer with extra metrics, and a monitor.

    cd examples/train
    freewheel train --config-path . --config-name custom_trainer

    prompt ─▶ turn 1: `6+9=` ─▶ the calculator: `15` (seen by the model, not trained on) ─▶ turn 2: `;15+2=17#17`

`custom_trainer.yaml` names the classes below. They are imported by the processes that need them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from freewheel.data import DataProto
from freewheel.data.group import NO_VERSION, Response
from freewheel.data.tasks.word_problems import WordProblems, model_path
from freewheel.rollout.engine import GenerationRequest, PromptRefused, SamplingParams, generate_all
from freewheel.rollout.generation import sample_seed
from freewheel.rollout.rollouter import Rollouter
from freewheel.trainer.trainer import FullyAsyncTrainer

log = logging.getLogger("freewheel.examples")  # a child of `freewheel`, so it reaches the run's log

SUM = re.compile(r"(\d+)([+-])(\d+)=\Z")
HALFWAY = 4
"""One training prompt in this many already contains its steps; only the last result is missing."""


class Halfway(WordProblems):
    """Word problems, some of which already contain their steps in training."""

    def load(self, split: str, path: Any = None, *, limit: int | None = None) -> list[Any]:
        rows = [dict(row) for row in super().load(split, path, limit=limit)]
        for row in rows[::HALFWAY] if split == "train" else ():
            steps, equals, _ = row["extra_info"]["answer"].rpartition("=")
            row["prompt"] = f"{row['prompt']} {steps}{equals}"
        return rows


@dataclass
class Conversation:
    """One response that grows turn by turn."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    finish: str = "stop"

    def add_turn(self, turn: Response) -> None:
        """Append tokens of the policy, which are trained on."""
        self.tokens += turn.tokens.tolist()
        self.logprobs += turn.logprobs.tolist()
        self.versions += turn.versions.tolist()
        self.mask += [1] * len(turn.tokens)
        self.finish = turn.finish

    def add_observation(self, tokens: Sequence[int]) -> None:
        """Append tokens of the tool: masked, with no version."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [NO_VERSION] * len(tokens)
        self.mask += [0] * len(tokens)


class ToolRollouter(Rollouter):
    """Generates in two turns: a response that ends with a sum and `=` gets the result from a calculator."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model_path())
        (self._equals,) = self._tokenizer("=", add_special_tokens=False)["input_ids"]

    async def _custom_generation_logic(self, batch: DataProto) -> DataProto:
        ordinal = int(batch.non_tensor_batch["uid"][0])
        first = batch.batch[0]
        prompt = first["prompts"][first["attention_mask"].bool()].numpy().astype(np.int32)
        conversations = [Conversation() for _ in range(self.sampling.n)]
        turns = await self._ask(f"{ordinal}/call", prompt, range(self.sampling.n), ordinal, also_stop=(self._equals,))
        for conversation, turn in zip(conversations, turns, strict=True):
            conversation.add_turn(turn)
        await asyncio.gather(
            *(self._second(conversation, prompt, ordinal, index) for index, conversation in enumerate(conversations))
        )
        return as_batch(conversations)

    async def _second(self, conversation: Conversation, prompt: np.ndarray, ordinal: int, index: int) -> None:
        left = self.sampling.max_new_tokens - len(conversation.tokens)
        reply = calculator(self._decode(np.array(conversation.tokens)))
        if conversation.tokens[-1] != self._equals or reply is None or left <= 0:
            return
        observation = self._tokenizer(reply, add_special_tokens=False)["input_ids"]
        context = np.concatenate([prompt, np.array([*conversation.tokens, *observation], np.int32)])
        try:
            # Not the first turn's seed: a draw depends on (seed, token index), and both turns start at index 0.
            (turn,) = await self._ask(f"{ordinal}/{index}", context, [self.sampling.n + index], ordinal, most=left)
        except PromptRefused:  # no room for another turn in the engine
            conversation.finish = "length"
        else:
            conversation.add_observation(observation)
            conversation.add_turn(turn)

    async def _ask(
        self,
        name: str,
        prompt: np.ndarray,
        seeds: Sequence[int],
        ordinal: int,
        *,
        also_stop: tuple[int, ...] = (),
        most: int | None = None,
    ) -> list[Response]:
        """Return one response per seed. An exception of the engine fails the attempt, which is then retried."""
        samples = tuple(
            SamplingParams(
                max_new_tokens=most or self.sampling.max_new_tokens,
                seed=sample_seed(self.sampling.seed, ordinal, seed),
                temperature=self.sampling.temperature,
                stop_token_ids=(*self.sampling.stop_token_ids, *also_stop),
            )
            for seed in seeds
        )
        timeout_s = self.generation_timeout_s
        request = GenerationRequest(id=name, prompt=prompt, samples=samples, timeout_s=timeout_s)
        return await generate_all(self.engine, request)


def calculator(text: str) -> str | None:
    """The tool: `6+9=` gives `15`. None if there is nothing to compute."""
    found = SUM.search(text.replace(" ", ""))
    if found is None:
        return None
    a, sign, b = found.groups()
    result = int(a) + int(b) if sign == "+" else int(a) - int(b)
    return str(result) if result >= 0 else None


def as_batch(conversations: Sequence[Conversation]) -> DataProto:
    """Pad on the right. `response_mask` is 0 for the tool's tokens."""
    width = max(len(conversation.tokens) for conversation in conversations)

    def padded(name: str, fill: float, dtype: torch.dtype) -> torch.Tensor:
        rows = [
            [*getattr(conversation, name), *[fill] * (width - len(conversation.tokens))]
            for conversation in conversations
        ]
        return torch.tensor(rows, dtype=dtype)

    return DataProto.from_dict(
        {
            "responses": padded("tokens", 0, torch.int64),
            "response_mask": padded("mask", 0, torch.int64),
            "rollout_log_probs": padded("logprobs", 0.0, torch.float32),
            "versions": padded("versions", NO_VERSION, torch.int64),
        },
        {"finish": [conversation.finish for conversation in conversations]},
    )


class MeasuringTrainer(FullyAsyncTrainer):
    """Also reports how often the tool is used."""

    def _compute_custom_metrics(self, batch: DataProto) -> dict[str, float]:
        mask = batch.batch["response_mask"]
        seen = batch.batch["attention_mask"][:, -mask.shape[1] :]
        tool_tokens = ((seen == 1) & (mask == 0)).sum(dim=1)
        return {
            "tool/used_ratio": (tool_tokens > 0).float().mean().item(),
            "tool/tokens_mean": tool_tokens.float().mean().item(),
        }


def monitor(trainer_stats: Mapping[str, Any], rollouter_stats: Mapping[str, Any]) -> None:
    """Called in the coordinator with each `Component Statistics`."""
    generated, trained = rollouter_stats.get("total_generated_samples", 0), trainer_stats.get("processed_samples", 0)
    log.info("Monitor: %d responses generated, %d trained on, %d in between", generated, trained, generated - trained)
