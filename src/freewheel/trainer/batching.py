"""From groups to micro-batches of similar length under a token budget, deterministically.

    [PromptGroup] ─ sorted by ordinal ─▶ mini-batches of whole groups ─▶ rows, longest first ─▶ [MicroBatch]
                    responses without a reward are left out

A row is padded on the right: under causal attention no token sees the padding behind it, so no mask is needed and the
fastest kernels apply. Where `share` says that it pays, a row holds a prompt once and several of its responses, which
do not see each other:

    prompt  response 0  response 2  response 5  padding           position ids go on from the prompt's end for each

On a GPU nothing is padded, see `packing`.

Logits are wanted at the tokens that the policy made, and nowhere else: `positions` says which hidden states predict
them, and everything that the loss needs lies flat beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freewheel.data.group import Array, PromptGroup
from freewheel.trainer.losses import token_weights
from freewheel.trainer.options import AlgorithmConfig
from freewheel.trainer.tree import Tree

PAD_ID = 0
"""Any id will do: nothing attends to it, and nothing is predicted from it."""
MAX_SHARED_TOKENS = 2048
"""Longest row with a mask of its own: the mask grows with the square."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response with a reward, and its prompt."""

    key: tuple[int, int]
    """Its group's ordinal, and which of the responses it is."""
    prompt: Array
    tokens: Array
    """The response's."""
    made: Array
    """Where in `tokens` the policy's own are. Holes are not among them."""
    behaviour: Array
    """A log-probability for each of those, and likewise:"""
    versions: Array
    reward: float
    advantage: float
    """PPO's are by token, and replace it."""
    weight: float
    """What each of its tokens counts in the loss."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B rows of L tokens with S responses, and T tokens to learn from, flat in the order of responses."""

    keys: tuple[tuple[int, int], ...]
    """[S]."""
    inputs: Mapping[str, Tensor]
    """What the decoder is called with: `input_ids` [B, L]; with shared prompts also `position_ids` [B, L] and
    `attention_mask` [B, 1, L, L]."""
    positions: Tensor
    """[T] int64: index into the flattened [B·L] hidden states of the one that predicts each token."""
    targets: Tensor
    """[T] int64."""
    sequence: Tensor
    """[T] int64: which of the S responses."""
    behaviour: Tensor
    """[T] float32."""
    versions: Tensor
    """[T] int32."""
    weights: Tensor
    """[T] float32."""
    advantages: Tensor
    """[T] float32."""
    lengths: tuple[int, ...]
    """[S]: trained tokens."""
    rewards: tuple[float, ...]
    """[S]."""
    tree: Tree | None = None
    """Who sees whom, where the one row is packed; `inputs` then has `position_ids`, and no mask."""

    @property
    def n_sequences(self) -> int:
        return len(self.keys)

    @property
    def n_row_tokens(self) -> int:
        """B·L: what the decoder computes, padding and all."""
        return self.inputs["input_ids"].numel()

    def decoder_inputs(self) -> dict[str, Any]:
        """`inputs`, and who sees whom in a packed row."""
        return {**self.inputs, **({} if self.tree is None else self.tree.options())}

    def to(self, device: torch.device) -> MicroBatch:
        """On a GPU the copies are only begun: what is computed there next waits for them, this thread does not."""
        if device.type == "cpu":
            return self

        def moved(tensor: Tensor) -> Tensor:
            pinned = device.type == "cuda" and tensor.device.type == "cpu"
            return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)

        found: dict[str, Any] = {name: moved(one) for name, one in vars(self).items() if isinstance(one, Tensor)}
        if self.tree is not None:
            found["tree"] = self.tree.to(moved)
        return replace(self, inputs={name: moved(one) for name, one in self.inputs.items()}, **found)


def mini_batches(
    groups: Sequence[PromptGroup], advantages: Sequence[Array], config: AlgorithmConfig
) -> list[list[Sample]]:
    """Samples of each optimizer step. Groups are dealt out by ordinal: the order of arrival changes nothing."""
    order = sorted(range(len(groups)), key=lambda i: groups[i].ordinal)
    dealt = [order[start :: config.mini_batches] for start in range(config.mini_batches)]
    made = [[sample for i in part for sample in _samples(groups[i], advantages[i])] for part in dealt]
    return [_weighed(samples, config) for samples in made if samples]


def micro_batches(samples: Sequence[Sample], budget_tokens: int, share: float | None = None) -> list[MicroBatch]:
    """Longest rows first, as many at a time as fit the budget with their padding; a longer row has one of its own.

    `share`: what a token costs outside attention, in pairs of tokens inside it (about 3 times the hidden size): prompts
    are shared where that makes a row cheaper. None: never.
    """
    rows = [[sample] for sample in samples]
    if share is not None:
        by_group = groupby(samples, key=lambda sample: sample.key[0])
        rows = [row for _, group in by_group for row in _shared(list(group), share, budget_tokens)]
    rows.sort(key=lambda row: (-row_length(row), row[0].key))
    batches: list[MicroBatch] = []
    while rows:
        fitting = max(1, budget_tokens // row_length(rows[0]))
        batches.append(_padded(rows[:fitting]))
        rows = rows[fitting:]
    return batches


def _samples(group: PromptGroup, advantages: Array) -> list[Sample]:
    samples = []
    for index in np.flatnonzero(group.scored):
        part = slice(group.offsets[index], group.offsets[index + 1])
        made = np.flatnonzero(group.mask[part])
        if len(made):
            samples.append(
                Sample(
                    key=(group.ordinal, int(index)),
                    prompt=group.prompt,
                    tokens=group.tokens[part],
                    made=made,
                    behaviour=group.logprobs[part][made],
                    versions=group.versions[part][made],
                    reward=float(group.rewards[index]),
                    advantage=float(advantages[index]),
                    weight=0.0,
                )
            )
    return samples


def _weighed(samples: list[Sample], config: AlgorithmConfig) -> list[Sample]:
    lengths = np.array([len(sample.made) for sample in samples])
    weights = token_weights(lengths, config.aggregation, config.aggregation_tokens)
    return [replace(sample, weight=float(weight)) for sample, weight in zip(samples, weights, strict=True)]


def row_length(row: Sequence[Sample]) -> int:
    return len(row[0].prompt) + sum(len(sample.tokens) for sample in row)


def _shared(samples: list[Sample], share: float, budget_tokens: int) -> list[list[Sample]]:
    """One group's samples as the cheapest number of equally filled rows."""
    n_prompt = len(samples[0].prompt)
    sizes = [len(sample.tokens) for sample in samples]
    best, least = len(samples), math.inf
    for n_rows in range(len(samples), 0, -1):
        lengths = [n_prompt + sum(sizes[start::n_rows]) for start in range(n_rows)]
        if n_rows < len(samples) and max(lengths) > min(MAX_SHARED_TOKENS, budget_tokens):
            break
        cost = sum(length * (share + length) for length in lengths)
        if cost < least:
            best, least = n_rows, cost
    return [samples[start::best] for start in range(best)]


def _padded(rows: Sequence[Sequence[Sample]]) -> MicroBatch:
    longest = max(map(row_length, rows))
    input_ids = np.full((len(rows), longest), PAD_ID, np.int64)
    position_ids = np.zeros_like(input_ids)
    segments = np.full_like(input_ids, -1)  # 0: the prompt, 1 …: a response, -1: padding
    positions: list[Array] = []
    for i, row in enumerate(rows):
        n_prompt = end = len(row[0].prompt)
        input_ids[i, :end] = row[0].prompt
        position_ids[i, :end] = np.arange(end)
        segments[i, :end] = 0
        for number, sample in enumerate(row, start=1):
            start, end = end, end + len(sample.tokens)
            input_ids[i, start:end] = sample.tokens
            position_ids[i, start:end] = np.arange(n_prompt, n_prompt + len(sample.tokens))
            segments[i, start:end] = number
            before = np.where(sample.made == 0, n_prompt - 1, start + sample.made - 1)
            positions.append(i * longest + before)
    inputs = {"input_ids": torch.from_numpy(input_ids)}
    if any(len(row) > 1 for row in rows):
        inputs |= {"position_ids": torch.from_numpy(position_ids), "attention_mask": _tree_mask(segments)}
    return flat([sample for row in rows for sample in row], inputs, np.concatenate(positions))


def _tree_mask(segments: Array) -> Tensor:
    """[B, 1, L, L] bool: a token sees the prompt and its own response, up to itself."""
    segment = torch.from_numpy(segments)
    seen = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
    return seen.tril()[:, None]


def flat(
    samples: Sequence[Sample], inputs: Mapping[str, Tensor], positions: Array, tree: Tree | None = None
) -> MicroBatch:
    """The micro-batch of these samples, whose tokens are predicted at `positions` of the flattened rows in `inputs`."""
    lengths = [len(sample.made) for sample in samples]

    def each(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths))

    return MicroBatch(
        keys=tuple(sample.key for sample in samples),
        inputs=inputs,
        positions=torch.from_numpy(positions),
        targets=torch.from_numpy(np.concatenate([sample.tokens[sample.made] for sample in samples]).astype(np.int64)),
        sequence=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        behaviour=torch.from_numpy(np.concatenate([sample.behaviour for sample in samples]).astype(np.float32)),
        versions=torch.from_numpy(np.concatenate([sample.versions for sample in samples]).astype(np.int32)),
        weights=each([sample.weight for sample in samples]),
        advantages=each([sample.advantage for sample in samples]),
        lengths=tuple(lengths),
        rewards=tuple(sample.reward for sample in samples),
        tree=tree,
    )
