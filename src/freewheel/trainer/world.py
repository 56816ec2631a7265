"""The group of training processes, as torch.distributed sees it: where they meet, and what they tell each other.

    rank 0: meet(host) ─▶ Meeting: host, port ─▶ (to the others, by whoever starts them)
    every rank: join(meeting) ─▶ World: meshes of devices, a group for small things

Every wait in it ends: a collective that some rank does not join raises after `COLLECTIVE_S`. Used by `FsdpBackend`.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")

COLLECTIVE_S = 600.0
"""Longest wait for another rank in a collective: as long as a large model takes to load on a slow disk, or a first step
to compile. One that died is noticed sooner, by those who watch it."""
LOCAL_HOST, LOCAL_INTERFACE = "127.0.0.1", "lo"
"""Where all ranks are on one machine, nobody else can join them."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks find each other."""

    host: str
    port: int
    size: int


class Host:
    """Rank 0's end of a meeting: a port that is taken from the moment it is told to others."""

    def __init__(self, host: str, size: int) -> None:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.bind((host, 0))
        self.meeting = Meeting(host=host, port=listening.getsockname()[1], size=size)
        self._listening = listening

    def open(self) -> Any:
        """Once. The store lives as long as the process."""
        return TCPStore(
            self.meeting.host,
            self.meeting.port,
            is_master=True,
            timeout=timedelta(seconds=COLLECTIVE_S),
            wait_for_workers=False,
            master_listen_fd=self._listening.detach(),
        )


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among those that train together."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """Of the devices that are trained on."""
    host_mesh: DeviceMesh
    """Of the same processes' host memory."""
    objects: dist.ProcessGroup
    """For what is small, and not on a device."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """Every rank's, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.objects)
        return found


def join(meeting: Meeting, *, rank: int, device: str | torch.device, host: Host | None = None) -> World:
    """Returns when all ranks are there. `host`: on rank 0."""
    device = torch.device(device)
    if str(device) == "cuda":  # Ray shows a process its own GPU and no other
        device = torch.device("cuda", 0)
    if meeting.host == LOCAL_HOST:  # else gloo takes the interface of the machine's name, which may lead nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOCAL_INTERFACE)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=COLLECTIVE_S)
    store = host.open() if host is not None else TCPStore(meeting.host, meeting.port, timeout=limit)
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
