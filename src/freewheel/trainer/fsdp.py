"""Learning over several processes, each of which holds a shard of every layer: torch's FSDP2.

    rank 0: MeetingHost ─▶ Meeting: host, port ─▶ (passed to the other ranks by whoever starts them)
    every rank: join(meeting) ─▶ World: meshes of devices, a group for small objects

    [PromptGroup] ─▶ token weights, over all samples ─▶ this rank's share of the samples ─▶ equally many micro-batches
      per layer: gather parameters ─▶ forward, backward ─▶ add up gradients over ranks, a shard to each
      ─▶ clip by the norm over all shards ─▶ AdamW on this rank's shards ─▶ metrics over all ranks

`TorchBackend` does the learning, and `FsdpBackend` adds what several ranks need. A gradient is the sum over ranks, as
it is the sum over micro-batches in one process: the same up to the order of additions. Every rank calls the same
methods with the same arguments; `Leader` ensures this. Every wait is bounded: a collective that some rank does not join
raises after `COLLECTIVE_S`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from freewheel.data.group import PromptGroup
from freewheel.errors import DataError
from freewheel.trainer.batching import MicroBatch, TrainingSample, share_out
from freewheel.trainer.decoder import decoder_layers
from freewheel.trainer.losses import Tally
from freewheel.trainer.options import OptimizerConfig
from freewheel.trainer.policy import Policy, probe_batch
from freewheel.trainer.sharded_checkpoint import copy_shards, read_rows
from freewheel.trainer.torch_backend import Optimizer, Part, TorchBackend

T = TypeVar("T")

COLLECTIVE_S = 600.0
"""Longest wait for another rank in a collective: enough to load a large model from a slow disk, or to compile a first
step. The runtime notices a dead rank sooner."""
LOCAL_HOST, LOCAL_INTERFACE = "127.0.0.1", "lo"
"""Used if all ranks are on one machine, so that nobody else can join them."""
ROOM_FOR_WHOLE = 0.25
"""Share of a GPU's memory for the whole model's gradients and gathered parameters. If they fit, parameters are gathered
and gradients reduced once per update. A larger model does both for every micro-batch."""
GRADIENT_BYTES = 4


# -- the group of processes --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks meet."""

    host: str
    port: int
    size: int


class MeetingHost:
    """Rank 0's side of a meeting. It occupies the port before other ranks learn of it."""

    def __init__(self, host: str, size: int) -> None:
        self._listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listening.bind((host, 0))
        self.meeting = Meeting(host=host, port=self._listening.getsockname()[1], size=size)

    def detach(self) -> int:
        """Return the descriptor of the port, once."""
        return self._listening.detach()


@dataclass(frozen=True, kw_only=True)
class World:
    """This process as a member of the group that trains together."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """The training devices."""
    host_mesh: DeviceMesh
    """The same processes' host memory."""
    objects: dist.ProcessGroup
    """The group for small objects that are not on a device."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.objects)
        return found


def join(meeting: Meeting, *, rank: int, device: str | torch.device, host: MeetingHost | None = None) -> World:
    """Join the group. Returns when all ranks have joined. `host`: on rank 0."""
    device = torch.device(device)
    if str(device) == "cuda":  # Ray shows each process only its own GPU
        device = torch.device("cuda", 0)
    if meeting.host == LOCAL_HOST:  # otherwise gloo takes the interface of the host name, which may not work
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOCAL_INTERFACE)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=COLLECTIVE_S)
    listening: dict[str, Any] = {"is_master": True, "master_listen_fd": host.detach()} if host is not None else {}
    store = TCPStore(meeting.host, meeting.port, timeout=limit, wait_for_workers=False, **listening)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=meeting.size, timeout=limit)
    mesh = init_device_mesh(device.type, (meeting.size,))
    return World(
        rank=rank,
        size=meeting.size,
        device=device,
        mesh=mesh,
        host_mesh=mesh if device.type == "cpu" else init_device_mesh("cpu", (meeting.size,)),
        objects=dist.new_group(backend="gloo", timeout=limit),
    )


# -- shards ------------------------------------------------------------------------------------------------------------


class Sharded:
    """A module whose parameters are sharded over the ranks: one group per layer, and one for the rest."""

    def __init__(self, root: nn.Module, world: World, dtype: torch.dtype, *, exact: Sequence[nn.Module] = ()) -> None:
        """`root`: called as a whole for each pass. `dtype`: the precision of the computation. Shards keep theirs, and
        gradients are added up in float32. `exact`: modules inside that compute in float32 anyway."""
        whole = MixedPrecisionPolicy()
        layered = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        layered = whole if dtype is torch.float32 else layered
        for module in exact:
            fully_shard(module, mesh=world.mesh, mp_policy=whole)
        for layer in decoder_layers(root):
            _compile_within(layer)
            fully_shard(layer, mesh=world.mesh, mp_policy=layered)
        root.register_forward_hook(_own_memory)
        # The root's inputs are not activations: do not cast them.
        fully_shard(root, mesh=world.mesh, mp_policy=replace(layered, cast_forward_inputs=False))
        self.root = cast(Any, root)
        self._parts: list[Any] = [module for module in root.modules() if isinstance(module, FSDPModule)]
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)  # token weights contain the mean already, so ranks add up
            part.set_force_sum_reduction_for_comms(enable=True)
        self._whole = all(world.gather(_has_room(root, world.device, dtype)))
        if self._whole:
            self.root.set_reshard_after_forward(False)

    def next_backward(self, *, last: bool) -> None:
        """`last`: the last micro-batch of an update."""
        self.root.set_is_last_backward(last)
        if self._whole:
            self.root.set_requires_gradient_sync(last)
            self.root.set_reshard_after_backward(last)

    def rest(self) -> None:
        """Free gathered parameters. Needed before parameters are read or changed: gathered ones would be stale."""
        for part in self._parts:
            part.reshard()


def _compile_within(layer: Any) -> None:
    """Compile only the computation of a layer: FSDP gathers and frees its shards around it."""
    if layer._compiled_call_impl is not None:
        layer._compiled_call_impl = None
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _own_memory(_: nn.Module, __: Any, found: Any) -> Any:
    """Copy the outputs: FSDP waits for their gradients, which a view of another tensor may lose."""
    if isinstance(found, tuple):
        return tuple(one.clone() for one in found)
    return found.clone()


def _has_room(root: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda":
        return True
    whole = sum(p.numel() * (GRADIENT_BYTES * p.requires_grad + dtype.itemsize) for p in root.parameters())
    return whole <= ROOM_FOR_WHOLE * torch.cuda.mem_get_info(device)[1]


class _Pass(nn.Module):
    """A policy's forward pass as one module, including the head: parameters outside the layers are gathered for all of
    it."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = policy

    def forward(self, batch: MicroBatch, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        return Policy.logprobs(self._policy, batch, entropy_grad=entropy_grad)


class ShardedPolicy(Policy):
    """A policy whose parameters are sharded over the ranks. Rank 0 receives the published weights."""

    def __init__(self, policy: Policy, world: World) -> None:
        self.__dict__.update(policy.__dict__)
        self._world = world
        self.computation.autocasts = False  # FSDP gathers in the precision of the computation
        self.sharded = Sharded(_Pass(self), world, self.dtype)

    def logprobs(self, batch: MicroBatch, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor]
        if not self._without_adapters:
            found = self.sharded.root(batch, entropy_grad)
            return found
        # peft switches the adapters' gradients off and on, which must happen on shards. This pass has no gradients.
        self.sharded.rest()
        with self.model.disable_adapter():
            found = self.sharded.root(batch, entropy_grad)
            self.sharded.rest()
        return found

    def trainable(self) -> dict[str, nn.Parameter]:
        self.sharded.rest()
        return super().trainable()

    def weights(self, stored: bool = False) -> dict[str, Tensor]:
        """Gather one tensor at a time. Ranks other than 0 drop them."""
        self.sharded.rest()
        found: dict[str, Tensor] = {}
        for name, tensor in self._cast_weights(stored):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self._world.rank == 0:
                found[name] = whole
        return found


class ShardedOptimizer(Optimizer):
    """AdamW on this rank's shards. The norm is that of the whole gradient."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, world: World) -> None:
        super().__init__(parameters, config)
        self._world = world

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        local = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
        squares = torch.nn.utils.get_total_norm(local).square()
        dist.all_reduce(squares, group=self._world.mesh.get_group())
        return squares.sqrt()


class FsdpBackend(TorchBackend):
    """See `Backend`. Every rank calls its methods with the same arguments, and rank 0 gets complete results."""

    policy: ShardedPolicy
    _copies = False

    def __init__(self, model: Any, *, world: World, **settings: Any) -> None:
        """`settings`: those of `TorchBackend` except the device. The whole model must fit on it until it is sharded."""
        self._world, self._host_mesh = world, world.host_mesh
        self._rank, self._size = world.rank, world.size
        super().__init__(model, device=world.device, **settings)

    def _shard(self) -> None:
        probe = probe_batch(self.policy.vocabulary, packed=self._packed, share=False)
        self._empty = replace(probe, keys=()).to(self._device)
        """A micro-batch with nothing to learn from, for ranks that have fewer micro-batches than others."""
        self.policy = ShardedPolicy(self.policy, self._world)
        self._sharded = [self.policy.sharded]
        if self._reference is not None and self.policy.lora is None:
            self._reference = ShardedPolicy(self._reference, self._world)
            self._sharded.append(self._reference.sharded)
        elif self._reference is not None:
            with torch.no_grad():  # parameters gathered for the first time take over whether shards require gradients
                self.policy.logprobs(self._empty)
            self._reference = self.policy.frozen_copy()
        if self._critic is not None:
            self._sharded.append(Sharded(self._critic, self._world, self.policy.dtype, exact=[self._critic.head]))

    def _make_optimizer(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        return ShardedOptimizer(parameters, self._config, self._world)

    def describe(self) -> str:
        return f"{super().describe()}; in {self._world.size} processes (FSDP2)"

    # -- a step -------------------------------------------------------------------------------------------------------

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        """Return this rank's micro-batches, equally many on every rank: each pass contains collectives."""
        own = super()._micro_batches(share_out(samples, self._world.size)[self._world.rank])
        rounds = max(self._gather(len(own)))
        return [*own, *[self._empty] * (rounds - len(own))]

    def _prepare(self, groups: Sequence[PromptGroup]) -> list[list[Part]]:
        minis = super()._prepare(groups)
        self._rest()
        return minis

    def _policy_part(self, part: Part, *, version: int | None) -> tuple[Tensor, Tally]:
        if part.batch.n_sequences:
            return super()._policy_part(part, version=version)
        logp, entropy = self.policy.logprobs(part.batch, entropy_grad=self._algorithm.entropy_coef > 0)
        return 0.0 * (logp.sum() + entropy.sum()), Tally()

    def _critic_part(self, part: Part) -> tuple[Tensor, Tally]:
        if part.batch.n_sequences:
            return super()._critic_part(part)
        assert self._critic is not None
        return 0.0 * self._critic(part.batch).sum(), Tally()

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        for sharded in self._sharded:
            sharded.next_backward(last=last)
        super()._backward(loss, last=last)

    def _over_ranks(self, loss: Tensor, tally: Tally) -> tuple[Tensor, Tally]:
        """Return the same on every rank: sums of sums, and the largest maxima."""
        self._rest()
        ranks = self._gather((float(loss), tally.to(torch.device("cpu"))))
        found = Tally()
        for _, one in ranks:
            found.merge(one)
        total = torch.tensor(sum(one for one, _ in ranks), device=loss.device)
        return total, found.to(loss.device)

    def _gather(self, value: T) -> list[T]:
        return self._world.gather(value)

    def _rest(self) -> None:
        for sharded in self._sharded:
            sharded.rest()

    # -- saved state -------------------------------------------------------------------------------------------------

    def _named_state(self) -> dict[str, Tensor]:
        """Return this rank's shards."""
        self._rest()
        return super()._named_state()

    def load_files(self, files: Sequence[Path], values: Mapping[str, Any]) -> None:
        """If one rank raises `DataError`, all do: it may be the only one that does not see the files."""
        tensors: dict[str, Tensor] = {}
        why = ""
        try:
            tensors = read_rows(files, mesh=self._host_mesh)
        except DataError as error:
            why = str(error)
        for rank, problem in enumerate(self._gather(why)):
            if problem:
                raise DataError(f"rank {rank}: {problem}")
        self._rest()
        own = {
            name: copy_shards(one, self._world.mesh, self._world.device) if isinstance(one, DTensor) else one
            for name, one in tensors.items()
        }
        self._load(own, values)
