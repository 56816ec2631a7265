"""From groups to micro-batches of similar length under a token budget, deterministically.

    [PromptGroup] ─ by ordinal ─▶ mini-batches of whole groups ─▶ rows, longest first ─▶ [MicroBatch]
                    responses without a reward are left out

On a CPU rows are padded on the right. Under causal attention no token sees the padding after it, so no mask is needed
and the fastest kernels apply. If it is cheaper (`share`), a row holds a prompt once and several of its responses, which
do not see each other:

    prompt  response 0  response 2  response 5  padding        position ids of each response continue from the prompt

On a GPU with flash attention, `packed_batches` puts trees of a prompt and its responses into one row without padding;
`decoder.tree_attention` computes the attention.

Logits are needed only at the policy's own tokens: `positions` locates the hidden states that predict them, and all
inputs of the loss are flat arrays in the same order. Called by `TorchBackend`. With several ranks, `share_out` first
selects each rank's samples.
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
from freewheel.trainer.losses import LossInputs, token_weights
from freewheel.trainer.options import AlgorithmConfig

PAD_ID = 0
"""Any id works: nothing attends to it and nothing is predicted from it."""
MAX_SHARED_TOKENS = 2048
"""Longest padded row with shared prompts: the size of its mask grows with the square."""
PIECES = 4
"""Minimum number of pieces in a rank's share: larger groups are cut. Fewer would leave shares unequal, more would
separate responses from their shared prompt."""
MULTIPLE = 128
"""The length of a packed row is rounded up to a multiple of this, the tile size of matrix products."""


@dataclass(frozen=True, kw_only=True)
class TrainingSample:
    """One response with a reward, and its prompt."""

    key: tuple[int, int]
    """The group's ordinal and the index of the response."""
    prompt: Array
    tokens: Array
    """The response's tokens."""
    made: Array
    """Indices in `tokens` of the policy's own tokens, which are trained on. Tool replies are not among them."""
    behaviour: Array
    """The engine's log-probability of each of these tokens."""
    versions: Array
    """The weight version that produced each of these tokens."""
    reward: float = 0.0
    advantage: float = 0.0
    """The advantage of all its tokens. With a critic, advantages per token replace it."""
    weight: float = 0.0
    """How much each of its tokens counts in the loss."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B rows of L tokens with S responses and T trained tokens, flat in the order of the responses."""

    keys: tuple[tuple[int, int], ...]
    """[S]."""
    inputs: Mapping[str, Any]
    """The decoder's arguments: `input_ids` [B, L]; with shared prompts also `position_ids` [B, L] and `attention_mask`
    [B, 1, L, L]; for a packed row also `position_ids` and the arguments of `decoder.tree_attention`."""
    positions: Tensor
    """[T] int64: index in the flattened [B·L] hidden states of the state that predicts each token."""
    targets: Tensor
    """[T] int64: the token ids."""
    sequence: Tensor
    """[T] int64: which of the S responses the token belongs to."""
    behaviour: Tensor
    """[T] float32: the engine's log-probability of each token."""
    versions: Tensor
    """[T] int32: the weight version that made each token."""
    weights: Tensor
    """[T] float32: how much each token counts in the loss."""
    advantages: Tensor
    """[T] float32: the advantage of each token."""
    lengths: tuple[int, ...]
    """[S]: trained tokens."""
    rewards: tuple[float, ...]
    """[S]: the reward of each response."""

    @property
    def n_sequences(self) -> int:
        return len(self.keys)

    def to(self, device: torch.device) -> MicroBatch:
        """Move to a device. On a GPU this only starts the copies: later work there waits for them, this thread not."""
        if device.type == "cpu":
            return self

        def move(values: Mapping[str, Any]) -> dict[str, Any]:
            tensors = {name: one for name, one in values.items() if isinstance(one, Tensor)}
            pinned = {name: one.pin_memory() if one.device.type == "cpu" else one for name, one in tensors.items()}
            return {name: one.to(device, non_blocking=True) for name, one in pinned.items()}

        return replace(self, inputs={**self.inputs, **move(self.inputs)}, **move(vars(self)))

    def loss_inputs(
        self, logprobs: Tensor, entropy: Tensor, settings: AlgorithmConfig, **others: Tensor | None
    ) -> LossInputs:
        """`others`: `proximal` and `reference`, if the settings need them."""
        return LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            behaviour=self.behaviour,
            advantages=self.advantages,
            weights=self.weights,
            response=self.sequence,
            n_responses=self.n_sequences,
            tokens=self.targets,
            settings=settings,
            **others,
        )


def mini_batches(
    groups: Sequence[PromptGroup], advantages: Sequence[Array], config: AlgorithmConfig
) -> list[list[TrainingSample]]:
    """Return the samples of each optimizer step. Groups are dealt by ordinal, whatever their order of arrival."""
    order = sorted(range(len(groups)), key=lambda i: groups[i].ordinal)
    found: list[list[TrainingSample]] = []
    for start in range(config.mini_batches):
        samples = [one for i in order[start :: config.mini_batches] for one in _samples(groups[i], advantages[i])]
        if samples:
            lengths = np.array([len(sample.made) for sample in samples])
            weights = token_weights(lengths, config.aggregation, config.aggregation_tokens)
            found.append([replace(one, weight=float(weight)) for one, weight in zip(samples, weights, strict=True)])
    return found


def _samples(group: PromptGroup, advantages: Array) -> list[TrainingSample]:
    samples = []
    for index in np.flatnonzero(group.scored):
        part = slice(group.offsets[index], group.offsets[index + 1])
        made = np.flatnonzero(group.mask[part])
        if len(made):
            samples.append(
                TrainingSample(
                    key=(group.ordinal, int(index)),
                    prompt=group.prompt,
                    tokens=group.tokens[part],
                    made=made,
                    behaviour=group.logprobs[part][made],
                    versions=group.versions[part][made],
                    reward=float(group.rewards[index]),
                    advantage=float(advantages[index]),
                )
            )
    return samples


def row_length(row: Sequence[TrainingSample]) -> int:
    return len(row[0].prompt) + sum(len(sample.tokens) for sample in row)


def _by_group(samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
    return [list(group) for _, group in groupby(samples, key=lambda sample: sample.key[0])]


def _deal(costs: Sequence[int], n_parts: int) -> list[list[int]]:
    """Deal indices into parts with about equal costs: the largest first, each to the emptiest part."""
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    filled = [0] * n_parts
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        emptiest = filled.index(min(filled))
        parts[emptiest].append(index)
        filled[emptiest] += costs[index]
    return parts


def share_out(samples: Sequence[TrainingSample], n_ranks: int) -> list[list[TrainingSample]]:
    """Return each rank's samples in the given order, with about equally many tokens. The same on every rank.

    Responses that share a prompt stay together, unless that would make the shares unequal.
    """
    largest = sum(row_length([sample]) for sample in samples) // (PIECES * n_ranks)
    pieces: list[list[TrainingSample]] = []
    costs: list[int] = []
    for group in _by_group(samples):
        for number, sample in enumerate(group):
            cost = row_length([sample])
            if not number or costs[-1] + cost > largest:
                pieces.append([])
                costs.append(0)
            pieces[-1].append(sample)
            costs[-1] += cost
    dealt = [[sample for piece in part for sample in pieces[piece]] for part in _deal(costs, n_ranks)]
    return [sorted(share, key=lambda sample: sample.key) for share in dealt]


def _lay_out(
    row: Sequence[TrainingSample], input_ids: Array, position_ids: Array, start: int
) -> tuple[Array, list[Array], list[Array]]:
    """Write a prompt and its responses one after the other into flat arrays, from `start` on.

    Returns the places of the prompt, the places of each response, and the places that predict each response's own
    tokens. Position ids of each response continue from the prompt.
    """
    n_prompt = len(row[0].prompt)
    prompt = np.arange(start, start + n_prompt)
    input_ids[prompt] = row[0].prompt
    position_ids[prompt] = np.arange(n_prompt)
    responses: list[Array] = []
    positions: list[Array] = []
    end = start + n_prompt
    for sample in row:
        places = np.arange(end, end + len(sample.tokens))
        input_ids[places] = sample.tokens
        position_ids[places] = np.arange(n_prompt, n_prompt + len(places))
        positions.append(np.where(sample.made == 0, start + n_prompt - 1, end + sample.made - 1))
        responses.append(places)
        end += len(places)
    return prompt, responses, positions


def _flatten(samples: Sequence[TrainingSample], inputs: Mapping[str, Any], positions: Array) -> MicroBatch:
    """Return the micro-batch of these samples. `positions`: see `MicroBatch`."""
    lengths = [len(sample.made) for sample in samples]

    def repeat(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths))

    return MicroBatch(
        keys=tuple(sample.key for sample in samples),
        inputs=inputs,
        positions=torch.from_numpy(positions),
        targets=torch.from_numpy(np.concatenate([sample.tokens[sample.made] for sample in samples]).astype(np.int64)),
        sequence=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        behaviour=torch.from_numpy(np.concatenate([sample.behaviour for sample in samples]).astype(np.float32)),
        versions=torch.from_numpy(np.concatenate([sample.versions for sample in samples]).astype(np.int32)),
        weights=repeat([sample.weight for sample in samples]),
        advantages=repeat([sample.advantage for sample in samples]),
        lengths=tuple(lengths),
        rewards=tuple(sample.reward for sample in samples),
    )


# -- padded rows ------------------------------------------------------------------------------------------------------


def micro_batches(
    samples: Sequence[TrainingSample], budget_tokens: int, share: float | None = None
) -> list[MicroBatch]:
    """Batch the longest rows first, as many as fit the budget with their padding. A longer row gets its own batch.

    `share`: the cost of a token outside attention, in pairs of tokens inside it (about 3 times the hidden size).
    Prompts are shared where that makes a row cheaper. None: never.
    """
    rows = [[sample] for sample in samples]
    if share is not None:
        rows = [row for group in _by_group(samples) for row in _share_prompt(group, share, budget_tokens)]
    rows.sort(key=row_length, reverse=True)  # rows of one length stay in the order of their keys
    batches: list[MicroBatch] = []
    while rows:
        fitting = max(1, budget_tokens // row_length(rows[0]))
        batches.append(_pad(rows[:fitting]))
        rows = rows[fitting:]
    return batches


def _share_prompt(samples: list[TrainingSample], share: float, budget_tokens: int) -> list[list[TrainingSample]]:
    """Return one group's samples as the cheapest number of equally filled rows."""
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


def _pad(rows: Sequence[Sequence[TrainingSample]]) -> MicroBatch:
    longest = max(map(row_length, rows))
    shape = len(rows), longest
    input_ids, position_ids = np.full(shape, PAD_ID, np.int64), np.zeros(shape, np.int64)
    segments = np.full(shape, -1)  # 0: the prompt, 1 …: a response, -1: padding
    positions: list[Array] = []
    for i, row in enumerate(rows):
        prompt, responses, found = _lay_out(row, input_ids.reshape(-1), position_ids.reshape(-1), i * longest)
        for number, places in enumerate([prompt, *responses]):
            segments.reshape(-1)[places] = number
        positions += found
    inputs = {"input_ids": torch.from_numpy(input_ids)}
    if any(len(row) > 1 for row in rows):
        inputs |= {"position_ids": torch.from_numpy(position_ids), "attention_mask": _tree_mask(segments)}
    return _flatten([sample for row in rows for sample in row], inputs, np.concatenate(positions))


def _tree_mask(segments: Array) -> Tensor:
    """[B, 1, L, L] bool: a token sees the prompt, and its own response up to itself."""
    segment = torch.from_numpy(segments)
    seen = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
    return seen.tril()[:, None]


# -- packed rows ------------------------------------------------------------------------------------------------------


def packed_batches(samples: Sequence[TrainingSample], budget_tokens: int, *, share: bool) -> list[MicroBatch]:
    """Return micro-batches of at most `budget_tokens`, as equal as possible: the largest one sets the memory.

    A sample longer than the budget gets its own batch. `share`: whether responses share their group's prompt.
    """
    trees = [[sample] for sample in samples]
    if share:
        trees = [tree for group in _by_group(samples) for tree in _split(group, budget_tokens)]
    return [_pack(row) for row in _fill_rows(trees, budget_tokens)]


def _split(samples: list[TrainingSample], budget_tokens: int) -> list[list[TrainingSample]]:
    """Return one group's samples as the fewest trees that fit the budget."""
    for n_trees in range(1, len(samples)):
        trees = [samples[start::n_trees] for start in range(n_trees)]
        if max(map(row_length, trees)) <= budget_tokens:
            return trees
    return [[sample] for sample in samples]


def _fill_rows(trees: Sequence[list[TrainingSample]], budget_tokens: int) -> list[list[list[TrainingSample]]]:
    """Return the trees of each packed row: as few rows as fit the budget."""
    lengths = [row_length(tree) for tree in trees]
    for n_rows in range(max(1, math.ceil(sum(lengths) / budget_tokens)), len(trees)):
        rows = _deal(lengths, n_rows)
        if all(len(row) == 1 or sum(lengths[tree] for tree in row) <= budget_tokens for row in rows):
            return [[trees[tree] for tree in row] for row in rows if row]
    return [[tree] for tree in trees]


def _pack(trees: Sequence[Sequence[TrainingSample]]) -> MicroBatch:
    n_row = math.ceil(sum(map(row_length, trees)) / MULTIPLE) * MULTIPLE
    input_ids, position_ids = np.full(n_row, PAD_ID, np.int64), np.zeros(n_row, np.int64)
    positions: list[Array] = []
    queries: list[int] = []
    keys: list[Array] = []  # of each piece, the tokens of the row that it sees
    end = 0
    for tree in trees:
        prompt, responses, found = _lay_out(tree, input_ids, position_ids, end)
        positions += found
        shared = len(tree) > 1
        if shared:
            queries.append(len(prompt))
            keys.append(prompt)
        for response in responses:
            keys.append(np.concatenate([prompt, response]))
            queries.append(len(response) if shared else len(keys[-1]))
        end += row_length(tree)
    if end < n_row:
        queries.append(n_row - end)
        keys.append(np.arange(end, n_row))
    lengths = [len(seen) for seen in keys]
    inputs = {
        "input_ids": torch.from_numpy(input_ids)[None],
        "position_ids": torch.from_numpy(position_ids)[None],
        "cu_seq_lens_q": torch.from_numpy(np.cumsum([0, *queries], dtype=np.int32)),
        "cu_seq_lens_k": torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        "max_length_q": max(queries),
        "max_length_k": max(lengths),
        "key_rows": None if queries == lengths else torch.from_numpy(np.concatenate(keys)),
    }
    return _flatten([sample for tree in trees for sample in tree], inputs, np.concatenate(positions))
