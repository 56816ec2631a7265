"""From samples to packed micro-batches: one row each, without padding between sequences, prompts computed once.

    [Sample] ─ by group ─▶ trees of a prompt and its responses ─▶ as few micro-batches as hold them, equally full
                           split where one is over the budget     one row each

For GPUs with flash attention; elsewhere `batching.micro_batches` pads. Pure: what goes where follows from lengths and
keys. Called by `TorchBackend`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from freewheel.data.group import Array
from freewheel.trainer.batching import PAD_ID, MicroBatch, Sample, flat, row_length
from freewheel.trainer.tree import Tree

MULTIPLE = 128
"""A row is filled up to one of these: tiles of matrix products are of that size."""


def packed_batches(samples: Sequence[Sample], budget_tokens: int, *, share: bool) -> list[MicroBatch]:
    """Micro-batches of at most `budget_tokens`, as equal as the trees allow: the largest one sets the memory.

    A sample that is longer by itself has one of its own. `share`: whether responses share their group's prompt.
    """
    trees = [[sample] for sample in samples]
    if share:
        by_group = groupby(samples, key=lambda sample: sample.key[0])
        trees = [tree for _, group in by_group for tree in _split(list(group), budget_tokens)]
    return [_packed(part) for part in _dealt(trees, budget_tokens)]


def _split(samples: list[Sample], budget_tokens: int) -> list[list[Sample]]:
    """One group's samples as few trees as the budget allows."""
    for n_trees in range(1, len(samples)):
        trees = [samples[start::n_trees] for start in range(n_trees)]
        if max(map(row_length, trees)) <= budget_tokens:
            return trees
    return [[sample] for sample in samples]


def _dealt(trees: Sequence[list[Sample]], budget_tokens: int) -> list[list[list[Sample]]]:
    """Longest first, each to the part with the least so far; one more part until each fits or holds one tree."""
    order = sorted(trees, key=lambda tree: (-row_length(tree), tree[0].key))
    total = sum(map(row_length, order))
    for n_parts in range(max(1, math.ceil(total / budget_tokens)), len(order) + 1):
        parts: list[list[list[Sample]]] = [[] for _ in range(n_parts)]
        filled = [0] * n_parts
        for tree in order:
            least = filled.index(min(filled))
            parts[least].append(tree)
            filled[least] += row_length(tree)
        if all(size <= budget_tokens or len(part) == 1 for size, part in zip(filled, parts, strict=True)):
            return [part for part in parts if part]
    return [[tree] for tree in order]


def _packed(trees: Sequence[Sequence[Sample]]) -> MicroBatch:
    n_tokens = sum(map(row_length, trees))
    n_row = math.ceil(n_tokens / MULTIPLE) * MULTIPLE
    input_ids, position_ids = np.full(n_row, PAD_ID, np.int64), np.zeros(n_row, np.int64)
    positions: list[Array] = []
    pieces: list[tuple[int, Array]] = []
    at = 0
    for tree in trees:
        n_prompt, begin = len(tree[0].prompt), at
        prompt = np.arange(begin, begin + n_prompt)
        input_ids[prompt] = tree[0].prompt
        position_ids[prompt] = np.arange(n_prompt)
        at += n_prompt
        shared = len(tree) > 1
        if shared:
            pieces.append((n_prompt, prompt))
        for sample in tree:
            rows = np.arange(at, at + len(sample.tokens))
            input_ids[rows] = sample.tokens
            position_ids[rows] = np.arange(n_prompt, n_prompt + len(rows))
            positions.append(np.where(sample.made == 0, begin + n_prompt - 1, at + sample.made - 1))
            seen = np.concatenate([prompt, rows])
            pieces.append((len(rows) if shared else len(seen), seen))
            at += len(rows)
    if at < n_row:
        pieces.append((n_row - at, np.arange(at, n_row)))
    inputs = {"input_ids": torch.from_numpy(input_ids)[None], "position_ids": torch.from_numpy(position_ids)[None]}
    return flat([sample for tree in trees for sample in tree], inputs, np.concatenate(positions), tree=_tree(pieces))


def _tree(pieces: Sequence[tuple[int, Array]]) -> Tree:
    """Of (tokens, rows of the tokens that they see) each."""
    queries, keys = [n for n, _ in pieces], [len(seen) for _, seen in pieces]
    rows = None if queries == keys else torch.from_numpy(np.concatenate([seen for _, seen in pieces]))
    return Tree(
        query_ends=torch.from_numpy(np.cumsum([0, *queries], dtype=np.int32)),
        key_ends=torch.from_numpy(np.cumsum([0, *keys], dtype=np.int32)),
        key_rows=rows,
        longest_query=max(queries),
        longest_key=max(keys),
    )
