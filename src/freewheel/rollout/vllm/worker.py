"""The side of vLLM's workers: how they take over new weights, and the checksum of the weights that they hold.

    vLLM's update_weights(info) ─▶ a backend of ours ─▶ bucket ─▶ the model's own load_weights
        freewheel_shm    a file of the rollouter's, mapped
        freewheel_ipc    the trainer's GPU memory, mapped
        freewheel_nccl   a broadcast by the trainer

    held_sum: comparable with the trainer's, whatever vLLM has done to the layout
        a layer's parameters: fused, a rank's part, padded with zeros ─▶ content_sum ─┐
        a layer that was packed for a CPU's kernels: its sum from before ─────────────┴▶ this worker's part of the sum

vLLM imports this module in each of its worker processes, because it is its `worker_extension_cls`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from freewheel.rollout.vllm.transfer import BACKENDS, ROLLOUTER
from freewheel.sync.broadcast import GROUP_S, GroupKind, Header, TorchGroup, receive
from freewheel.sync.device import MAPPINGS, Owner
from freewheel.sync.weights import SUM_BITS, Entry, content_sum
from freewheel.utils.processes import end_with

# mypy: disable-error-code="import-not-found"

PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Ways of storing parameters that leave them as a checkpoint has them, on a GPU."""
COMPUTED_IN = (torch.float32, torch.bfloat16, torch.float16)
PACKED_SUM = "freewheel_packed_sum"
"""On a layer whose parameters vLLM packed for its kernels: the sum of what was packed."""


def held_sum(model: nn.Module, loaded: set[str] | None) -> int | None:
    """Return this worker's part of the sum over the parameters that a checkpoint fills. None if they cannot be
    compared: the model is quantized, or keeps some of them in another type than it was sent.

    `loaded`: the parameters that weights were loaded into. None means all except the scales of attention.
    """
    held = list(_held(model, loaded))
    if not comparable(model) or len({one.dtype for one in held if one.is_floating_point()}) > 1:
        return None
    packed = sum(getattr(module, PACKED_SUM, 0) for module in model.modules())
    return (packed + content_sum(held)) % (1 << SUM_BITS)


def comparable(model: nn.Module) -> bool:
    """Whether the model keeps the elements that it was sent."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return all(method is None or "Unquantized" in type(method).__name__ for method in methods)


def remember_packed(methods: Sequence[Any]) -> None:
    """Take the sum of a layer's parameters before vLLM packs them for a CPU's kernels and drops them."""
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


# -- how a model takes weights ----------------------------------------------------------------------------------------


def loads_in_place(model: nn.Module) -> bool:
    """Whether `load_weights` can fill the parameters as they are: dense, unquantized, nothing packed or derived."""
    if current_platform.is_cpu():
        return False  # its kernels have packed copies
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in PLAIN:
            return False
        if "MLA" in type(module).__name__:  # it derives matrices from its parameters
            return False
    return True


def _pack_tied_heads(model: nn.Module) -> None:
    """Pack heads that share the embedding's parameter again: they are not loaded, so their copy is an older version."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


# -- backends ---------------------------------------------------------------------------------------------------------


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: nothing is agreed on before the first update."""


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One of the buckets of a version, its table of contents, and where it is."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    starts: list[int]
    part: int
    parts: int
    path: str = ""
    """The file that holds the bucket."""
    handle: dict[str, Any] | None = None
    """A handle to another process's GPU memory that holds the bucket."""
    owner: dict[str, Any] | None = None
    """The process that owns this memory."""

    def views(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        contents = zip(self.names, self.dtype_names, self.shapes, self.starts, strict=True)
        return [(name, Entry(dtype, tuple(shape), start).view(buffer)) for name, dtype, shape, start in contents]


class Receiving(WeightTransferEngine):  # type: ignore[misc]
    """Takes over a version bucket by bucket. A subclass knows where the buckets are."""

    init_info_cls = InitInfo
    update_info_cls = Update

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.loaded: set[str] | None = set()
        """Parameters that weights were loaded into. None if the model does not report them."""
        self._reloading = False
        """Whether vLLM reloads layer by layer."""

    def buffer_of(self, update: Any) -> Tensor:
        raise NotImplementedError

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Any, load_weights: Callable[..., None] | None = None) -> None:
        """`load_weights` is vLLM 0.24's and not used: it only knows vLLM's own names."""
        if not update_info.part:
            self._begin()
        with self._sound():
            self._load(update_info.views(self.buffer_of(update_info)))
            if update_info.part + 1 == update_info.parts:
                self._end_reload()

    def _begin(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._end_reload()  # of a version that was given up after some buckets
        if not loads_in_place(self.model):
            self._reloading = True
            initialize_layerwise_reload(self.model)

    def _load(self, weights: list[tuple[str, Tensor]]) -> None:
        with torch.no_grad(), _any_part():
            names = self.model.load_weights(weights)
        self.loaded = None if names is None or self.loaded is None else self.loaded | set(names)

    @contextlib.contextmanager
    def _sound(self) -> Iterator[None]:
        """End the reload after a failure too, so that the next version finds whole layers."""
        try:
            yield
        except BaseException:
            self._end_reload()
            raise

    def _end_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self._reloading:
            return
        self._reloading = False
        kinds = (parameter.dtype for parameter in self.model.parameters())
        config = SimpleNamespace(dtype=next(kind for kind in kinds if kind in COMPUTED_IN))  # it reads nothing else
        finalize_layerwise_reload(self.model, config)
        if current_platform.is_cpu():
            _pack_tied_heads(self.model)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("freewheel's trainer hands its weights to freewheel's rollouter")


def _any_part() -> contextlib.AbstractContextManager[Any]:
    """Let vLLM load a part of a checkpoint without its check that nothing is missing."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return contextlib.nullcontext()
    check: contextlib.AbstractContextManager[Any] = disable_mtp_completeness_check()
    return check


class FileReceiving(Receiving):
    """`freewheel_shm`: the worker maps a file of the rollouter's."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._mapped: tuple[str, Tensor] | None = None

    def buffer_of(self, update: Update) -> Tensor:
        if self._mapped is None or self._mapped[0] != update.path:
            self._mapped = None
            size = Path(update.path).stat().st_size
            self._mapped = (update.path, torch.from_file(update.path, size=size, dtype=torch.uint8))
        return self._mapped[1]

    def _end_reload(self) -> None:
        super()._end_reload()
        self._mapped = None

    def shutdown(self) -> None:
        self._mapped = None


class HandleReceiving(Receiving, IPCWeightTransferEngine):  # type: ignore[misc]
    """`freewheel_ipc`: views of the trainer's GPU memory, which the trainer does not change while they are read. Unlike
    vLLM's own, nothing is copied on the way, and memory that was opened stays open for the next version."""

    parse_update_info = WeightTransferEngine.parse_update_info  # vLLM's own takes pickles

    def buffer_of(self, update: Update) -> Tensor:
        assert update.handle is not None and update.owner is not None
        owner = Owner(**update.owner)
        with owner.watched():
            return MAPPINGS.open(update.handle, owner)

    def shutdown(self) -> None:
        MAPPINGS.close()


@dataclass
class GroupUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A version that the trainer broadcasts. `port` 0 means to the existing group."""

    key: int
    kind: GroupKind
    address: str
    port: int
    size: int


class GroupReceiving(Receiving):
    """`freewheel_nccl`: buckets as the trainer broadcasts them. Each is loaded into the model before the next arrives:
    there is no memory for a second one."""

    update_info_cls = GroupUpdate

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._group: TorchGroup | None = None
        self._key = 0
        """The number of the version that is expected."""

    def receive_weights(self, update_info: GroupUpdate, load_weights: Callable[..., None] | None = None) -> None:
        self._key = update_info.key
        try:
            with self._sound():
                receive(self._join_group(update_info), self)
        except BaseException:
            self.shutdown()  # the group's members no longer agree on the next broadcast
            raise

    def _join_group(self, update: GroupUpdate) -> TorchGroup:
        if update.port:
            self.shutdown()
            self._group = TorchGroup(
                update.kind,
                address=update.address,
                port=update.port,
                rank=1 + self.parallel_config.rank,
                size=update.size,
                timeout_s=GROUP_S,
            )
        assert self._group is not None, "the trainer sends to a group that this worker is not in"
        return self._group

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    # -- as a `Receiver` ----------------------------------------------------------------------------------------------

    def wants(self, header: Header) -> bool:
        if header.version != self._key:
            return False
        self._begin()
        return True

    def buffer(self, size: int) -> Tensor:
        assert self._group is not None
        return torch.empty(size, dtype=torch.uint8, device=self._group.device)

    def bucket(self, entries: Mapping[str, Entry], buffer: Tensor) -> None:
        self._load([(name, entry.view(buffer)) for name, entry in entries.items()])

    def whole(self, header: Header) -> bool:
        self._end_reload()
        return True

    def take(self, header: Header) -> None:
        pass


# -- what the worker holds --------------------------------------------------------------------------------------------


class WorkerExtension:
    """Methods that vLLM adds to its workers, for `collective_rpc`."""

    def freewheel_dtype(self) -> str:
        """Return the type that the model computes in, as `model.dtype` names it."""
        return str(self.model_config.dtype).removeprefix("torch.")  # type: ignore[attr-defined]

    def freewheel_content_sum(self) -> int | None:
        """Return this worker's part of the checksum. Parameters that several workers hold are counted by the first."""
        loaded = getattr(self.weight_transfer_engine, "loaded", None)  # type: ignore[attr-defined]
        return held_sum(self.model_runner.get_model(), loaded or None)  # type: ignore[attr-defined]


def _register() -> None:
    known = WeightTransferEngineFactory._registry
    kinds = {"object_store": FileReceiving, "ipc": HandleReceiving, "nccl": GroupReceiving}
    for transport, kind in kinds.items():
        if BACKENDS[transport] not in known:
            WeightTransferEngineFactory.register_engine(BACKENDS[transport], kind)
            if current_platform.is_cpu() and kind is FileReceiving:  # once
                remember_packed(PLAIN)


def _end_with_rollouter() -> None:
    """End with a killed rollouter, whose successor needs the GPU's memory. The engine core ends with its workers: on
    one GPU they are the same process. Under `vllm serve` there is no rollouter."""
    rollouter = os.environ.get(ROLLOUTER)
    if rollouter is not None and int(rollouter) != os.getpid():
        end_with(int(rollouter))


_register()
_end_with_rollouter()
