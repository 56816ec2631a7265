"""The three hooks in one run: a rollouter with a tool, a trainer with metrics of its own, and a monitor.

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

log = logging.getLogger("freewheel.examples")  # below `freewheel`, so that it is in the run's log

SUM = re.compile(r"(\d+)([+-])(\d+)=\Z")
HALFWAY = 4
"""One prompt in so many has its steps, and only the last result is missing."""


class Halfway(WordProblems):
    """Word problems, of which some that are trained on come with their steps."""

    def load(self, split: str, path: Any = None, *, limit: int | None = None) -> list[Any]:
        rows = [dict(row) for row in super().load(split, path, limit=limit)]
        for row in rows[::HALFWAY] if split == "train" else ():
            steps, equals, _ = row["extra_info"]["answer"].rpartition("=")
            row["prompt"] = f"{row['prompt']} {steps}{equals}"
        return rows


@dataclass
class Talk:
    """One response that grows turn by turn."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    finish: str = "stop"

    def says(self, turn: Response) -> None:
        """What the policy made: trained on."""
        self.tokens += turn.tokens.tolist()
        self.logprobs += turn.logprobs.tolist()
        self.versions += turn.versions.tolist()
        self.mask += [1] * len(turn.tokens)
        self.finish = turn.finish

    def hears(self, tokens: Sequence[int]) -> None:
        """What the tool made: seen, masked, of no version."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [NO_VERSION] * len(tokens)
        self.mask += [0] * len(tokens)


class ToolRollouter(Rollouter):
    """Generates in two turns: whoever writes a sum up to `=` gets its result from a calculator."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model_path())
        (self._equals,) = self._tokenizer("=", add_special_tokens=False)["input_ids"]

    async def _custom_generation_logic(self, batch: DataProto) -> DataProto:
        ordinal = int(batch.non_tensor_batch["uid"][0])
        first = batch.batch[0]
        prompt = first["prompts"][first["attention_mask"].bool()].numpy().astype(np.int32)
        talks = [Talk() for _ in range(self.sampling.n)]
        turns = await self._ask(f"{ordinal}/call", prompt, range(self.sampling.n), ordinal, also_stop=(self._equals,))
        for talk, turn in zip(talks, turns, strict=True):
            talk.says(turn)
        await asyncio.gather(*(self._second(talk, prompt, ordinal, index) for index, talk in enumerate(talks)))
        return as_batch(talks)

    async def _second(self, talk: Talk, prompt: np.ndarray, ordinal: int, index: int) -> None:
        left = self.sampling.max_new_tokens - len(talk.tokens)
        reply = calculator(self._decode(np.array(talk.tokens)))
        if talk.tokens[-1] != self._equals or reply is None or left <= 0:
            return
        heard = self._tokenizer(reply, add_special_tokens=False)["input_ids"]
        context = np.concatenate([prompt, np.array([*talk.tokens, *heard], np.int32)])
        try:
            # Another seed than the first turn's: a draw follows from (seed, token index), and both begin at index 0.
            (turn,) = await self._ask(f"{ordinal}/{index}", context, [self.sampling.n + index], ordinal, most=left)
        except PromptRefused:  # no room for another turn in the engine
            talk.finish = "length"
        else:
            talk.hears(heard)
            talk.says(turn)

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
        """As many responses as there are seeds. What the engine raises is the attempt's failure, and tried again."""
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
    """The tool: `6+9=` gives `15`. None where there is nothing to work out."""
    asked = SUM.search(text.replace(" ", ""))
    if asked is None:
        return None
    a, sign, b = asked.groups()
    result = int(a) + int(b) if sign == "+" else int(a) - int(b)
    return str(result) if result >= 0 else None


def as_batch(talks: Sequence[Talk]) -> DataProto:
    """Padded on the right. `response_mask` has a hole where the tool spoke."""
    width = max(len(talk.tokens) for talk in talks)

    def padded(name: str, fill: float, dtype: torch.dtype) -> torch.Tensor:
        rows = [[*getattr(talk, name), *[fill] * (width - len(talk.tokens))] for talk in talks]
        return torch.tensor(rows, dtype=dtype)

    return DataProto.from_dict(
        {
            "responses": padded("tokens", 0, torch.int64),
            "response_mask": padded("mask", 0, torch.int64),
            "rollout_log_probs": padded("logprobs", 0.0, torch.float32),
            "versions": padded("versions", NO_VERSION, torch.int64),
        },
        {"finish": [talk.finish for talk in talks]},
    )


class MeasuringTrainer(FullyAsyncTrainer):
    """Reports how often the tool is used, beside the metrics that every run has."""

    def _compute_custom_metrics(self, batch: DataProto) -> dict[str, float]:
        mask = batch.batch["response_mask"]
        seen = batch.batch["attention_mask"][:, -mask.shape[1] :]
        heard = ((seen == 1) & (mask == 0)).sum(dim=1)
        return {"tool/used_ratio": (heard > 0).float().mean().item(), "tool/tokens_mean": heard.float().mean().item()}


def monitor(trainer_stats: Mapping[str, Any], rollouter_stats: Mapping[str, Any]) -> None:
    """Called in the coordinator with each `Component Statistics`."""
    made, used = rollouter_stats.get("total_generated_samples", 0), trainer_stats.get("processed_samples", 0)
    log.info("Monitor: %d responses generated, %d trained on, %d on their way", made, used, made - used)
