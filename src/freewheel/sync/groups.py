"""A group of processes with one sender: what a broadcast of weights needs of NCCL or gloo, and nothing else.

    rank 0: the trainer ──┬── broadcast(bytes) ──▶ rank 1 …: an engine's workers
                          └◀─ agreed(yes?) ──────▶ all of them, or none

The two differ in the kind of group alone. It belongs to no default group of torch.distributed, of which an engine and a
sharded trainer have their own. A member that dies ends every call of the others with an error; after one a group is of
no use any more.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Kind = Literal["gloo", "nccl"]
SENDER = 0


class GroupBroken(RuntimeError):
    """A member died, or did not come in time. The group is of no use any more."""


class Group(Protocol):
    """One of its members."""

    @property
    def device(self) -> torch.device:
        """Where tensors that are sent must be."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """The sender's content to all. Returns when it is there."""

    def agreed(self, yes: bool) -> bool:
        """Whether every member said yes."""

    def close(self) -> None: ...


@contextmanager
def _waits_with_a_limit() -> Iterator[None]:
    """NCCL's `wait` gives up in time and raises. As it is, a watchdog would end the whole process instead: the
    trainer's, for an engine that died."""
    name = "TORCH_NCCL_BLOCKING_WAIT"  # read when a group is made
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class TorchGroup:
    """By torch's own means, outside of any default group."""

    def __init__(
        self,
        kind: Kind,
        *,
        address: str,
        port: int,
        rank: int,
        size: int,
        timeout_s: float,
        listening: socket.socket | None = None,
    ) -> None:
        """Returns when all are there; `address`, `port`: where the sender listens from now on, or does already
        (`listening`). Raises `GroupBroken`."""
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        within = timedelta(seconds=timeout_s)
        self.device = torch.device("cpu" if kind == "gloo" else f"cuda:{torch.cuda.current_device()}")
        try:
            opened = None if listening is None else listening.detach()
            store = TCPStore(address, port, size, rank == SENDER, within, master_listen_fd=opened)
            made: Any
            if kind == "gloo":
                made = dist.ProcessGroupGloo(store, rank, size, within)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = within
                with _waits_with_a_limit():
                    made = dist.ProcessGroupNCCL(store, rank, size, options)
        except RuntimeError as error:
            raise GroupBroken(f"no group of {size} at {address}:{port} within {timeout_s:g} s: {error}") from error
        self._store, self._group = store, made

    def broadcast(self, tensor: torch.Tensor) -> None:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        self._wait(self._group.broadcast, tensor, options)

    def agreed(self, yes: bool) -> bool:
        import torch
        import torch.distributed as dist

        said = torch.tensor([int(yes)], dtype=torch.int32, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._wait(self._group.allreduce, said, options)
        return bool(said.item())

    def _wait(self, collective: Any, tensor: torch.Tensor, options: Any) -> None:
        import torch

        try:
            collective([tensor], options).wait()
            if tensor.is_cuda:  # NCCL's wait only puts the stream behind it
                torch.cuda.current_stream(tensor.device).synchronize()
        except RuntimeError as error:
            raise GroupBroken(f"the group broke: {error}") from error

    def close(self) -> None:
        abort = getattr(self._group, "abort", None)  # NCCL's: what waits for somebody who is gone waits no longer
        if abort is not None and self.device.type == "cuda":
            abort()
