"""torch.compile of a decoder's layers: all are alike, so one is compiled and the others take what was made of it.

The length of a row is left open, so that micro-batches of all lengths run what was compiled once.
"""

from __future__ import annotations

from torch import nn

MOST_VARIANTS = 32
"""Compiled forms of one layer: with gradients and without, of the policy, the reference and the critic, and one more
where the first lengths seen were special. Beyond it torch would go on without compiling."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: nn.Module) -> None:
    """From the next call on."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def leave_uncompiled(model: nn.Module) -> None:
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None
