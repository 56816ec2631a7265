"""Changes to a Hugging Face decoder before it trains: attention over packed rows, a bfloat16 copy, compiled layers.

Used by `Policy` and `Critic`. In a packed row (`batching.packed_batches`), sequences follow one another and responses
share their prompt:

    tokens    prompt  response 0  response 1 │ prompt + response │ …          one row, no padding between sequences
    keys      prompt  prompt response 0  prompt response 1  …                 per piece: the tokens it sees, in order

A piece is a run of tokens that see each other causally, and also see everything before them in `keys`. Flash attention
processes pieces of all lengths at once. So a prompt is computed once for all of its responses; only its keys are
repeated.

A `Computation` lets parameters in float32 learn and a copy of the model in bfloat16 compute:

    master (float32) ── cast, once after each update ──▶ copy (bfloat16) ── forward, backward ──▶ its gradients
           ▲                                                                                          │
           └──────────── AdamW ◀── gradients in float32, added up over micro-batches ◀────────────────┘

Autocast has the same effect, but casts every weight in every micro-batch and every activation before every product.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from freewheel.trainer.head import add_up

Precision = Literal["auto", "float32", "bfloat16"]

TREE = "freewheel_tree"
"""The name under which transformers finds `tree_attention`."""
CAPABLE = "sdpa"
"""Models with this attention need nothing that `tree_attention` does not do."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Options of some models that `tree_attention` does not implement."""
MAX_VARIANTS = 32
"""Compiled variants of one layer: with and without gradients, for policy, reference and critic, and one more if the
first lengths were special. Beyond this limit torch would silently stop compiling."""


def compute_dtype(wanted: Precision, device: torch.device) -> torch.dtype:
    if wanted == "auto":
        on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if on_gpu else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def enable_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass. transformers requires `training` of these layers, but dropout in
    other layers must stay off."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


# -- compiled layers --------------------------------------------------------------------------------------------------


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: nn.Module) -> None:
    """Compile the layers on their next call. All are alike, so all use the first one's code, for rows of any length."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def undo_compile(model: nn.Module) -> None:
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None


# -- a copy that computes ---------------------------------------------------------------------------------------------


class Computation:
    """Computes in `dtype` what `master` would: as it is, under autocast, or with a copy.

    Gradients arrive at the master's parameters.
    """

    def __init__(self, master: Any, device: torch.device, dtype: torch.dtype, *, copied: bool) -> None:
        self.model = master
        """The model that computes."""
        self.autocasts = dtype is not torch.float32
        self._device, self._dtype = device, dtype
        self._masters: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._seen: list[int] = []
        if not copied or dtype is torch.float32:
            return
        self.autocasts = False
        self.model = cast_parameters(copy.deepcopy(master), dtype)
        copies = dict(self.model.named_parameters())
        for name, parameter in master.named_parameters():
            self._masters.append(parameter)
            self._copies.append(copies[name])
            if copies[name].requires_grad:
                copies[name].register_post_accumulate_grad_hook(partial(_hand_over, parameter))

    @contextmanager
    def running(self) -> Iterator[Any]:
        """Yield the model that computes, with current weights, in the precision of the computation."""
        self._refresh()
        with torch.autocast(self._device.type, self._dtype) if self.autocasts else nullcontext():
            yield self.model

    def frozen_copy(self) -> Computation:
        """Return a computation with a separate model, whose parameters never change."""
        self._refresh()
        kept = copy.copy(self)
        kept.model = copy.deepcopy(self.model).requires_grad_(False)
        kept._masters, kept._copies, kept._seen = [], [], []
        return kept

    @torch.no_grad()
    def _refresh(self) -> None:
        """Copy the master's parameters if they have changed since the last call."""
        versions = [parameter._version for parameter in self._masters]
        if versions != self._seen:
            torch._foreach_copy_(self._copies, self._masters)
            self._seen = versions


def _hand_over(master: nn.Parameter, copied: Tensor) -> None:
    """Add a copy's gradient to its master's, and free it."""
    given, first = copied.grad, master.grad is None
    if first:
        master.grad = torch.empty_like(master)
    assert given is not None and master.grad is not None
    add_up(master.grad, given, first=first)
    copied.grad = None


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """Cast in place. Buffers stay: in bfloat16, the frequencies of rotary positions would be off by whole turns."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


# -- attention over packed rows ---------------------------------------------------------------------------------------


def use_tree_attention(model: Any) -> bool:
    """Make the model use `tree_attention` if its kind of attention allows it. Returns whether it does.

    The caller must then check that the model computes the right thing: see `Policy.can_pack`.
    """
    from transformers import AttentionInterface

    config = model.config.get_text_config()
    if config._attn_implementation == TREE:
        return True
    # A window would only show in rows longer than any probe.
    narrowed = any(getattr(config, name, None) is not None for name in ("sliding_window", "attention_chunk_size"))
    if config._attn_implementation != CAPABLE or narrowed:
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
    """Attention with transformers' signature: [1, heads, N, width]. Other rows than packed ones use sdpa.

    `cu_seq_lens_q`: [P + 1] int32, where the P pieces end, from 0 to N. `cu_seq_lens_k`: where the keys of each piece
    end. `key_rows`: [K] int64, the token of the row that each key belongs to. None: the row as it is. They
    come from `MicroBatch.inputs`, through the decoder.
    """
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return plain
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__} needs attention with {name}, which packed rows do not support")
    query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
    if key_rows is not None:  # in float32, so that the gradients of a shared prompt add up in float32
        key, value = (one.float().index_select(0, key_rows).to(one.dtype) for one in (key, value))
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        found = torch.ops.aten._flash_attention_forward(
            query, key, value, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, 0.0, True, False, scale=scaling
        )[0]
    else:
        found = attend_by_pieces(query, key, value, cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist(), scaling)
    return found[None], None


def attend_by_pieces(
    query: Tensor, key: Tensor, value: Tensor, query_ends: list[int], key_ends: list[int], scale: float | None
) -> Tensor:
    """Compute the attention one piece at a time, without flash attention. [N, heads, width]."""
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
