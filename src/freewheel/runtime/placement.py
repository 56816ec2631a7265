"""Describes the machine and decides which part of a run gets which devices.

    Machine.here() ─▶ place(config, machine) ─▶ Placement: devices, replicas, GPU shares, problems

`place` is pure. `Machine.here` asks the operating system and nvidia-smi, and torch only if there is a GPU. A setting
that this machine cannot serve becomes a problem, so that a plan can be shown for another machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from freewheel.errors import ConfigError
from freewheel.rollout.engine_factories import Transport, find_engine
from freewheel.runtime.config import TrainConfig

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]

BFLOAT16_CAPABILITY = (8, 0)
"""NVIDIA's Ampere: the first generation with native bfloat16."""
SMI_TIMEOUT_S = 10.0
"""A stuck driver must not block the start."""
SMI_QUERY = "name,memory.total,compute_cap"
SHARED = 0.5
"""The part of a GPU that the trainer requests from Ray if generation shares it."""
MEMORY_SHARE, MEMORY_SHARE_BESIDE_TRAINER = 0.9, 0.4
"""A vLLM engine's share of GPU memory: vLLM's default, and a share that leaves training the larger part."""
MIB = 1 << 20
MOST_SLOTS = 256
"""Default limit of sequences at a time: more gain little on one device and cost KV cache."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that this process may use."""

    name: str
    memory_bytes: int
    bfloat16: bool = True


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware of this machine."""

    cpus: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()

    @classmethod
    def here(cls) -> Machine:
        return replace(cls.of_host(), gpus=_gpus())

    @classmethod
    def of_host(cls) -> Machine:
        """Describe the machine without its GPUs, from the operating system only."""
        return cls(cpus=_cpus(), memory_bytes=_memory_bytes())


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which part runs where."""

    device_trainer: Device
    device_rollout: Device
    replicas: int
    slots: int
    dtype: Dtype
    world_size: int
    """Number of training processes."""
    gpus_trainer: float
    """GPUs that each of them requests from Ray."""
    gpus_per_replica: float
    """GPUs that each rollouter requests from Ray."""
    shared_gpu: bool
    """Whether trainer and rollouters are on one GPU."""
    gpu_memory_share: float
    """An engine's share of GPU memory."""
    transport: Transport
    """How weights travel."""
    problems: tuple[ConfigError, ...]

    @property
    def engines_on_a_gpu(self) -> int:
        """Most engines on one GPU. 0: generation is on the CPU, or elsewhere."""
        if self.shared_gpu:
            return self.replicas
        return round(1 / min(1.0, self.gpus_per_replica)) if self.gpus_per_replica else 0


def place(config: TrainConfig, machine: Machine) -> Placement:
    """Resolve every `auto` of placement. With `ray.address` the GPUs are the cluster's, and Ray counts them."""
    t, r = config.trainer, config.rollout
    gpus_here = len(machine.gpus)
    trainer = _device(t.device, t.n_gpus_per_node, gpus_here)
    rollout: Device = "cpu" if r.urls is not None else _device(r.device, r.n_gpus_per_node, gpus_here)
    by_trainer = _gpus_of_trainer(config) if trainer == "cuda" else 0
    by_rollout = _gpus_of_rollout(config, gpus_here - by_trainer) if rollout == "cuda" else 0
    shared = trainer == rollout == "cuda" and by_rollout == 0
    replicas, gpus_each = _replicas(config, rollout, by_rollout, shared)
    samples = t.groups_per_step * r.n
    share = MEMORY_SHARE_BESIDE_TRAINER / replicas if shared else MEMORY_SHARE * min(1.0, gpus_each or 1.0)
    by_nccl = trainer == rollout == "cuda" and not shared and "nccl" in find_engine(r.engine).transports
    transport = config.async_training.weight_transport
    if transport == "auto":
        transport = "ipc" if shared else "nccl" if by_nccl else "object_store"
    compute = {trainer} if r.urls is not None else {trainer, rollout}
    bfloat16 = compute == {"cuda"} and all(gpu.bfloat16 for gpu in machine.gpus)
    placed = Placement(
        device_trainer=trainer,
        device_rollout=rollout,
        replicas=replicas,
        slots=r.slots if r.slots != "auto" else min(MOST_SLOTS, -(-samples // replicas)),
        dtype=config.model.dtype if config.model.dtype != "auto" else "bfloat16" if bfloat16 else "float32",
        world_size=by_trainer if trainer == "cuda" else 1 if t.world_size == "auto" else t.world_size,
        gpus_trainer=0.0 if trainer == "cpu" else SHARED if shared else 1.0,
        gpus_per_replica=gpus_each,
        shared_gpu=shared,
        gpu_memory_share=share if r.gpu_memory_share == "auto" else r.gpu_memory_share,
        transport=transport,
        problems=(),
    )
    problems = [*_wrong_numbers(config, placed, by_trainer, by_rollout), *_no_transport(placed, by_nccl=by_nccl)]
    if config.ray.address is None:
        problems = [*_missing(config, placed, gpus_here, by_trainer, by_rollout), *problems]
    return replace(placed, problems=tuple(problems))


def _device(wanted: str, gpus: int | str, gpus_here: int) -> Device:
    if wanted == "auto":
        asked = isinstance(gpus, int) and gpus > 0
        return "cuda" if asked or (gpus == "auto" and gpus_here) else "cpu"
    return "cuda" if wanted == "cuda" else "cpu"


def _gpus_of_trainer(config: TrainConfig) -> int:
    t = config.trainer
    if t.n_gpus_per_node != "auto":
        return t.nnodes * t.n_gpus_per_node
    return t.nnodes if t.world_size == "auto" else t.world_size


def _gpus_of_rollout(config: TrainConfig, left: int) -> int:
    """Return the GPUs that generation requests; 0 means sharing the trainer's."""
    r = config.rollout
    if r.n_gpus_per_node != "auto":
        return r.nnodes * r.n_gpus_per_node
    if r.replicas != "auto":
        left = min(left, r.replicas * _gpus_of_replica(config))
    return max(0, left)


def _gpus_of_replica(config: TrainConfig) -> int:
    return config.rollout.tensor_parallel_size * config.rollout.pipeline_parallel_size


def _replicas(config: TrainConfig, rollout: Device, gpus: int, shared: bool) -> tuple[int, float]:
    """Return the number of rollouters, and the GPUs of each."""
    r, each = config.rollout, _gpus_of_replica(config)
    if r.urls is not None:
        return len(r.urls), 0.0
    count = r.replicas if r.replicas != "auto" else max(1, gpus // each)
    if rollout == "cpu":
        return count, 0.0
    if shared:
        return count, (1 - SHARED) / count
    return count, float(each) if each > 1 else 1 / -(-count // max(1, gpus))


def _missing(
    config: TrainConfig, placed: Placement, here: int, by_trainer: int, by_rollout: int
) -> Iterator[ConfigError]:
    """Report requested GPUs and machines that do not exist."""
    parts = (("trainer", config.trainer, placed.device_trainer), ("rollout", config.rollout, placed.device_rollout))
    for name, section, device in parts:
        if section.nnodes > 1:
            remedy = "several machines need a Ray cluster: start one and give ray.address=auto, or give 1"
            yield ConfigError(f"{name}.nnodes", section.nnodes, remedy)
        if device == "cuda" and here == 0:
            remedy = (
                "no GPU is visible here (nvidia-smi, CUDA_VISIBLE_DEVICES, and torch built with CUDA): give auto or "
            )
            if section.device == "cuda":
                yield ConfigError(f"{name}.device", "cuda", remedy + "cpu")
            else:
                yield ConfigError(f"{name}.n_gpus_per_node", section.n_gpus_per_node, remedy + "0")
    if here and by_trainer + by_rollout > here:
        # Sharing is chosen by leaving out the number of rollout GPUs, never by asking for more than there are.
        name, section, _ = parts[0] if by_trainer > here else parts[1]
        asked = f"trainer and rollouts ask for {by_trainer} + {by_rollout} GPUs, and {here} are here"
        yield ConfigError(f"{name}.n_gpus_per_node", section.n_gpus_per_node, f"{asked}: give fewer, or auto")


def _wrong_numbers(config: TrainConfig, placed: Placement, by_trainer: int, by_rollout: int) -> Iterator[ConfigError]:
    """Report numbers of engines and GPUs that do not match."""
    r, each = config.rollout, _gpus_of_replica(config)
    per_node = r.n_gpus_per_node if r.n_gpus_per_node != "auto" else by_rollout
    if each > 1 and (placed.shared_gpu or each > per_node or by_rollout % each):
        key = "tensor_parallel_size" if r.tensor_parallel_size > 1 else "pipeline_parallel_size"
        remedy = (
            f"a replica then takes {each} GPUs of one machine, and {per_node} are for generation there: give GPUs of "
            "its own (rollout.n_gpus_per_node), a multiple of that number"
        )
        yield ConfigError(f"rollout.{key}", getattr(r, key), remedy)
    if placed.shared_gpu and by_trainer > 1:
        remedy = "training takes every GPU, and several cannot be shared: give rollout.n_gpus_per_node"
        yield ConfigError("rollout.n_gpus_per_node", r.n_gpus_per_node, remedy)
    engines, share = placed.engines_on_a_gpu, placed.gpu_memory_share
    if engines * share > 1:
        most = f"give {100 // engines / 100} at most, less what training takes there, or auto"
        yield ConfigError("rollout.gpu_memory_share", share, f"{engines} engines are on a GPU: {most}")


def _no_transport(placed: Placement, *, by_nccl: bool) -> Iterator[ConfigError]:
    key = "async_training.weight_transport"
    if placed.transport == "ipc" and not placed.shared_gpu:
        yield ConfigError(key, "ipc", "training and generation share no GPU here: give auto")
    if placed.transport == "nccl" and not by_nccl:
        remedy = (
            "it sends weights from a training GPU to a vLLM engine on another GPU, and this run has none: give auto"
        )
        yield ConfigError(key, "nccl", remedy)


# -- what is here -----------------------------------------------------------------------------------------------------


def _cpus() -> int:
    """Return the cores that this process may use: a container often has fewer than its machine."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        allowed = os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def _memory_bytes() -> int:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _gpus() -> tuple[Gpu, ...]:
    found = _parse_smi(_ask_smi())
    return found if found and _torch_has_cuda() else ()


def _ask_smi() -> str:
    """Return nvidia-smi's table of the GPUs that CUDA_VISIBLE_DEVICES allows."""
    program, allowed = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or allowed in ("", "-1"):
        return ""
    command = [program, f"--query-gpu={SMI_QUERY}", "--format=csv,noheader,nounits"]
    if allowed is not None:
        command += ["-i", allowed]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _parse_smi(table: str) -> tuple[Gpu, ...]:
    rows = ([cell.strip() for cell in line.split(",")] for line in table.splitlines())
    return tuple(
        Gpu(
            name=name,
            memory_bytes=int(memory) * MIB if memory.isdigit() else 0,
            bfloat16=tuple(int(part) for part in capability.split(".") if part.isdigit()) >= BFLOAT16_CAPABILITY,
        )
        for name, memory, capability in (row for row in rows if len(row) == len(SMI_QUERY.split(",")))
    )


def _torch_has_cuda() -> bool:
    """A GPU counts only if torch was built for it."""
    try:
        import torch
    except ModuleNotFoundError:
        return True  # a plan is possible without torch, and a run reports that it is missing
    return torch.cuda.is_available()
