"""Attention over a packed row: sequences one after the other, and responses that share their prompt.

    tokens    prompt  response 0  response 1 │ prompt + response │ …          one row, nothing padded in between
    keys      prompt  prompt response 0  prompt response 1  …                 of each piece: what it may see, in order

A piece is a run of tokens that see each other causally, and before that all of what comes before them in `keys`. Flash
attention takes pieces of all lengths at once, and queries that are the last ones of their keys. So a prompt is computed
once for all of its responses; its keys alone are laid out once for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

TREE = "freewheel_tree"
"""The name under which transformers knows `tree_attention`."""
CAPABLE = "sdpa"
"""Models that compute attention by this name ask nothing of it that `tree_attention` does not do."""
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Of the options that some models give: what it does not do."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Who sees whom in a packed row of N tokens."""

    query_ends: Tensor
    """[P + 1] int32: where the pieces end, from 0 to N."""
    key_ends: Tensor
    """[P + 1] int32: where the keys of each end, in the order of `key_rows`."""
    key_rows: Tensor | None
    """[K] int64: which token of the row each key is of. None: the row as it is."""
    longest_query: int
    longest_key: int

    def to(self, move: Any) -> Tree:
        """`move`: what becomes of each tensor."""
        rows = None if self.key_rows is None else move(self.key_rows)
        return Tree(
            query_ends=move(self.query_ends),
            key_ends=move(self.key_ends),
            key_rows=rows,
            longest_query=self.longest_query,
            longest_key=self.longest_key,
        )

    def options(self) -> dict[str, Any]:
        """What the decoder is called with, and hands on to `tree_attention`; named as transformers names them."""
        return {
            "cu_seq_lens_q": self.query_ends,
            "cu_seq_lens_k": self.key_ends,
            "max_length_q": self.longest_query,
            "max_length_k": self.longest_key,
            "key_rows": self.key_rows,
        }


def use_tree_attention(model: Any) -> bool:
    """Has the model compute attention with `tree_attention`, where it is of a kind that can; else it stays as it is.

    Whether it then sees what it should is for its caller to try: see `Policy.can_pack`.
    """
    from transformers import AttentionInterface

    config = model.config.get_text_config()
    if config._attn_implementation == TREE:
        return True
    narrowed = any(getattr(config, name, None) is not None for name in ("sliding_window", "attention_chunk_size"))
    if config._attn_implementation != CAPABLE or narrowed:  # which would show in rows longer than any probe
        return False
    AttentionInterface.register(TREE, tree_attention)
    config._attn_implementation = TREE
    return True


def leave_tree_attention(model: Any) -> None:
    config = model.config.get_text_config()
    if config._attn_implementation == TREE:
        config._attn_implementation = CAPABLE


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    key_rows: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it: [1, heads, N, width]. Rows that are not packed get the attention that the model had."""
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return plain
    for name in UNKNOWN:
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__} wants attention with {name}, which packed rows do not have")
    query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
    if key_rows is not None:  # in float32, so that the gradients of a shared prompt add up in it
        key, value = (one.float().index_select(0, key_rows).to(one.dtype) for one in (key, value))
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        found = torch.ops.aten._flash_attention_forward(
            query, key, value, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, 0.0, True, False, scale=scaling
        )[0]
    else:
        found = by_pieces(query, key, value, cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist(), scaling)
    return found[None], None


def by_pieces(
    query: Tensor, key: Tensor, value: Tensor, query_ends: list[int], key_ends: list[int], scale: float | None
) -> Tensor:
    """The same one piece after the other, where there is no flash attention. [N, heads, width]."""
    found = []
    for piece in range(len(query_ends) - 1):
        q = query[query_ends[piece] : query_ends[piece + 1]].transpose(0, 1)
        k, v = (one[key_ends[piece] : key_ends[piece + 1]].transpose(0, 1) for one in (key, value))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
        out = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=len(q) != len(k)
        )
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)
