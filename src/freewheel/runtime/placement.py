"""Describes the machine and decides which part of a run gets which devices.

    Machine.here() ─▶ place(config, machine) ─▶ Placement: devices, replicas, GPU shares, problems

`place` is pure. `Machine.here` asks the operating system and nvidia-smi, and torch only if there is a GPU. A setting
that this machine cannot serve becomes a problem, so that a plan can be shown for another machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from freewheel.errors import ConfigError
from freewheel.rollout.engines import Transport, find_engine
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
"""A vLLM engine's share of GPU memory: vLLM's default, and what leaves training the larger part."""
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
        return cls(cpus=_cpus(), memory_bytes=_memory_bytes(), gpus=_gpus())

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
    problems: list[ConfigError] = []
    elsewhere = config.ray.address is not None
    gpus_here = len(machine.gpus)
    trainer = _device(config.trainer.device, config.trainer.n_gpus_per_node, gpus_here)
    rollout = _device(config.rollout.device, config.rollout.n_gpus_per_node, gpus_here)
    if config.rollout.urls is not None:
        rollout = "cpu"  # generation is elsewhere
    wanted_trainer = _wanted_by_trainer(config, trainer)
    wanted_rollout = _wanted_by_rollout(config, rollout, gpus_here - wanted_trainer)
    if not elsewhere:
        problems += _missing(config, trainer, rollout, gpus_here, wanted_trainer, wanted_rollout)
    shared = trainer == rollout == "cuda" and wanted_rollout == 0
    count, share = _replicas(config, rollout, wanted_rollout, shared)
    problems += _does_not_fit(config, wanted_trainer, wanted_rollout, shared)
    groups = config.trainer.groups_per_step * config.rollout.n
    slots, memory = config.rollout.slots, config.rollout.gpu_memory_share
    transport, against = _transport(config, trainer, rollout, shared)
    placed = Placement(
        device_trainer=trainer,
        device_rollout=rollout,
        replicas=count,
        slots=slots if slots != "auto" else min(MOST_SLOTS, -(-groups // count)),
        dtype=_dtype(config, machine, trainer, trainer if config.rollout.urls is not None else rollout),
        world_size=_world_size(config, trainer, wanted_trainer),
        gpus_trainer=0.0 if trainer == "cpu" else SHARED if shared else 1.0,
        gpus_per_replica=share,
        shared_gpu=shared,
        gpu_memory_share=_memory_share(count, share, shared) if memory == "auto" else memory,
        transport=transport,
        problems=(*problems, *against),
    )
    return replace(placed, problems=(*placed.problems, *_over_committed(placed)))


def _memory_share(replicas: int, gpus_each: float, shared: bool) -> float:
    """Engines that share a GPU divide the share of a single one."""
    return MEMORY_SHARE_BESIDE_TRAINER / replicas if shared else MEMORY_SHARE * min(1.0, gpus_each or 1.0)


def _over_committed(placed: Placement) -> list[ConfigError]:
    """Report engines that together exceed a GPU."""
    engines, share = placed.engines_on_a_gpu, placed.gpu_memory_share
    if engines * share <= 1:
        return []
    remedy = (
        f"{engines} engines are on a GPU: give {100 // engines / 100} at most, less what training takes there, or auto"
    )
    return [ConfigError("rollout.gpu_memory_share", share, remedy)]


def _world_size(config: TrainConfig, trainer: Device, gpus: int) -> int:
    if trainer == "cuda":
        return gpus
    return 1 if config.trainer.world_size == "auto" else config.trainer.world_size


def _replicas(config: TrainConfig, rollout: Device, gpus: int, shared: bool) -> tuple[int, float]:
    """Return the number of rollouters, and the GPUs of each."""
    r = config.rollout
    if r.urls is not None:
        return len(r.urls), 0.0
    each = r.tensor_parallel_size * r.pipeline_parallel_size
    count = r.replicas if r.replicas != "auto" else max(1, gpus // each if rollout == "cuda" else 1)
    if rollout == "cpu":
        return count, 0.0
    if shared:
        return count, (1 - SHARED) / count
    return count, float(each) if each > 1 else 1 / -(-count // max(1, gpus))


def _does_not_fit(config: TrainConfig, by_trainer: int, by_rollout: int, shared: bool) -> list[ConfigError]:
    """Report numbers of engines and GPUs that do not match."""
    r, found = config.rollout, []
    each = r.tensor_parallel_size * r.pipeline_parallel_size
    per_node = r.n_gpus_per_node if r.n_gpus_per_node != "auto" else by_rollout
    if each > 1 and (shared or each > per_node or by_rollout % each):
        key = "tensor_parallel_size" if r.tensor_parallel_size > 1 else "pipeline_parallel_size"
        remedy = (
            f"a replica then takes {each} GPUs of one machine, and {per_node} are for generation there: give GPUs of "
            "its own (rollout.n_gpus_per_node), a multiple of that number"
        )
        found.append(ConfigError(f"rollout.{key}", getattr(r, key), remedy))
    if shared and by_trainer > 1:
        remedy = "training takes every GPU, and several cannot be shared: give rollout.n_gpus_per_node"
        found.append(ConfigError("rollout.n_gpus_per_node", r.n_gpus_per_node, remedy))
    return found


def _transport(
    config: TrainConfig, trainer: Device, rollout: Device, shared: bool
) -> tuple[Transport, list[ConfigError]]:
    wanted = config.async_training.weight_transport
    is_supported = "nccl" in find_engine(config.rollout.engine).transports
    by_nccl = is_supported and trainer == rollout == "cuda" and not shared
    if wanted == "auto":
        return ("ipc" if shared else "nccl" if by_nccl else "object_store"), []
    key = "async_training.weight_transport"
    if wanted == "ipc" and not shared:
        return "object_store", [ConfigError(key, wanted, "training and generation share no GPU here: give auto")]
    if wanted == "nccl" and not by_nccl:
        remedy = (
            "it sends weights from a training GPU to a vLLM engine on another GPU, which this run has not: give auto"
        )
        return "object_store", [ConfigError(key, wanted, remedy)]
    return wanted, []


def _device(wanted: str, gpus: int | str, gpus_here: int) -> Device:
    if wanted == "auto":
        asked = isinstance(gpus, int) and gpus > 0
        return "cuda" if asked or (gpus == "auto" and gpus_here) else "cpu"
    return "cuda" if wanted == "cuda" else "cpu"


def _wanted_by_trainer(config: TrainConfig, device: Device) -> int:
    if device == "cpu":
        return 0
    t = config.trainer
    if t.n_gpus_per_node != "auto":
        return t.nnodes * t.n_gpus_per_node
    return t.nnodes if t.world_size == "auto" else t.world_size


def _wanted_by_rollout(config: TrainConfig, device: Device, left: int) -> int:
    """Return the GPUs that generation requests; 0 on a GPU means sharing the trainer's."""
    if device == "cpu":
        return 0
    per_node = config.rollout.n_gpus_per_node
    if per_node != "auto":
        return config.rollout.nnodes * per_node
    if isinstance(config.rollout.replicas, int):
        each = config.rollout.tensor_parallel_size * config.rollout.pipeline_parallel_size
        return max(0, min(left, config.rollout.replicas * each))
    return max(0, left)


def _missing(
    config: TrainConfig, trainer: Device, rollout: Device, here: int, by_trainer: int, by_rollout: int
) -> list[ConfigError]:
    """Report requested GPUs and machines that do not exist."""
    found = []
    for name, section, device in (("trainer", config.trainer, trainer), ("rollout", config.rollout, rollout)):
        if section.nnodes > 1:
            remedy = "several machines need a Ray cluster: start one and give ray.address=auto, or give 1"
            found.append(ConfigError(f"{name}.nnodes", section.nnodes, remedy))
        if device == "cuda" and here == 0:
            key, value = (
                ("device", "cuda") if section.device == "cuda" else ("n_gpus_per_node", section.n_gpus_per_node)
            )
            remedy = "no GPU is visible here (nvidia-smi, CUDA_VISIBLE_DEVICES, and torch built with CUDA): give "
            found.append(
                ConfigError(f"{name}.{key}", value, remedy + ("auto or cpu" if key == "device" else "auto or 0"))
            )
    if here and by_trainer + by_rollout > here:
        # Sharing is chosen by leaving out the number of rollout GPUs, never by asking for more than there are.
        name = "trainer" if by_trainer > here else "rollout"
        section = config.trainer if name == "trainer" else config.rollout
        remedy = (
            f"trainer and rollouts ask for {by_trainer} + {by_rollout} GPUs, and {here} are here: give fewer, or auto"
        )
        found.append(ConfigError(f"{name}.n_gpus_per_node", section.n_gpus_per_node, remedy))
    return found


def _dtype(config: TrainConfig, machine: Machine, trainer: Device, rollout: Device) -> Dtype:
    if config.model.dtype != "auto":
        return config.model.dtype
    everywhere = trainer == rollout == "cuda" and all(gpu.bfloat16 for gpu in machine.gpus)
    return "bfloat16" if everywhere else "float32"


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
