"""What a vLLM worker holds, as a sum that is comparable with the trainer's whatever vLLM has done to the layout.

    a layer's parameters: fused, a rank's part, padded with zeros ─▶ content_sum ─┐
    a layer that was packed for a CPU's kernels: its sum from before ─────────────┴▶ this worker's part of the whole

Imported in vLLM's worker processes, by `freewheel.rollout.vllm.worker`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from freewheel.sync.weights import SUM_BITS, content_sum

PACKED_SUM = "freewheel_packed_sum"
"""On a layer whose parameters vLLM packed for its kernels: the sum of what was packed."""


def held_sum(model: nn.Module, loaded: set[str] | None) -> int | None:
    """Of what a checkpoint fills; None: it is quantized, or some of it is kept in another type than it was sent in,
    which leaves nothing to compare. `loaded`: the parameters that weights were loaded into; None: all, scales of
    attention left out."""
    held = list(_held(model, loaded))
    if not comparable(model) or len({one.dtype for one in held if one.is_floating_point()}) > 1:
        return None
    packed = sum(getattr(module, PACKED_SUM, 0) for module in model.modules())
    return (packed + content_sum(held)) % (1 << SUM_BITS)


def comparable(model: nn.Module) -> bool:
    """Whether what it holds has the elements that it was sent."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return all(method is None or "Unquantized" in type(method).__name__ for method in methods)


def remember_packed(methods: Sequence[Any]) -> None:
    """On a CPU vLLM packs a layer's parameters for its kernels and drops them; their sum is taken before."""
    for method in methods:

        def packing(self: Any, layer: Any, packs: Callable[..., None] = method.process_weights_after_loading) -> None:
            held = layer.named_parameters(recurse=False)
            before = content_sum(part for name, tensor in held for part in _own(layer, name, tensor))
            packs(self, layer)
            if not layer.weight.numel():
                setattr(layer, PACKED_SUM, before)

        method.process_weights_after_loading = packing


def _held(model: nn.Module, loaded: set[str] | None) -> Iterator[Tensor]:
    """This worker's parts of all tensors that were not packed, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if hasattr(module, PACKED_SUM):
            continue
        scales = "Attention" in type(module).__name__
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            full = f"{prefix}.{name}" if prefix else name
            known = full in loaded if loaded is not None else isinstance(tensor, nn.Parameter) and not scales
            if known and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield from _own(module, name, tensor)


def _own(module: nn.Module, name: str, tensor: Tensor) -> Iterable[Tensor]:
    """The part of a tensor that this worker counts, so that all workers' parts are the whole."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    rank, size = get_tensor_model_parallel_rank(), getattr(module, "tp_size", 1)
    is_head = isinstance(module, ParallelLMHead)
    if isinstance(module, VocabParallelEmbedding) and not is_head and not get_pp_group().is_first_rank:
        return []  # the last stage's copy, for a tied head
    replicated = size == 1 or (isinstance(module, RowParallelLinear) and name == "bias")
    if replicated:
        return [tensor] if rank == 0 else []
    if isinstance(module, QKVParallelLinear) and module.num_kv_head_replicas > 1 and rank % module.num_kv_head_replicas:
        return [tensor[: module.num_heads * module.head_size]]  # another rank has the same keys and values
    return [tensor]
