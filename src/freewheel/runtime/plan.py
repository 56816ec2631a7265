"""`Plan`: what a config means on a machine, in numbers, before anything starts.

    TrainConfig ┐
    Machine     ├─ resolve ─▶ Plan ─▶ FullyAsyncMain and its actors (devices, replicas, slots, tokens)
    ModelSize   ┘                └──▶ `freewheel train --dry-run` (freewheel.runtime.plan_text)

Pure: what it does not know (the model's size, the number of prompts) it leaves out. What stands against a run on this
machine is in `problems`; `check` raises the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freewheel.errors import ConfigError
from freewheel.queue.staleness import Bounds
from freewheel.rewards.config import as_config
from freewheel.rollout.engines import GpuShare, Transport, find_engine
from freewheel.rollout.models import NUMBER_BYTES
from freewheel.runtime.config import AsyncTrainingConfig, TrainConfig, held_out_file, step_in_memory
from freewheel.runtime.model_size import ModelSize, replica_memory, trainer_memory
from freewheel.runtime.placement import Device, Dtype, Machine, Placement, place
from freewheel.trainer.options import describe

if TYPE_CHECKING:
    from rich.text import Text

    from freewheel.utils.findings import Finding

SET_BY_MODE = ("staleness_threshold", "selection_window", "in_flight_updates")
"""Keys of `async_training` that `mode` decides in the two synchronous modes."""


@dataclass(frozen=True, kw_only=True)
class Actor:
    """One process of the run, or several alike."""

    name: str
    count: int
    device: Device
    gpus: float
    """Of a GPU, each."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run's numbers. Actors get it as it is."""

    config: TrainConfig
    machine: Machine
    device_trainer: Device
    device_rollout: Device
    replicas: int
    slots: int
    """Sequences at a time, a replica."""
    dtype: Dtype
    threads_trainer: int
    """On a CPU."""
    threads_rollout: int
    """Of each replica on a CPU."""
    world_size: int
    """Training processes."""
    compile: bool
    """Whether the decoder's layers are compiled for training."""
    gpus_trainer: float
    """Of each training process."""
    gpus_per_replica: float
    engines_on_a_gpu: int
    """At most."""
    shared_gpu: bool
    """Training and generation are on one GPU."""
    gpu_memory_share: float
    """Of a GPU's memory, for one engine."""
    transport: Transport
    """The way of the weights."""
    max_prompt_tokens: int
    """The longest that is allowed and that the model has positions for."""
    max_new_tokens: int
    bounds: Bounds
    actors: tuple[Actor, ...]
    rows: int | None
    """Prompts in an epoch, before the length filter."""
    sync_bytes: int | None
    """What a weight version moves to each replica."""
    memory_trainer: dict[str, int] = field(default_factory=dict)
    """Bytes by part; empty where the model's size is not known."""
    memory_replica: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[ConfigError, ...] = ()

    @property
    def samples_per_step(self) -> int:
        return self.config.trainer.groups_per_step * self.config.rollout.n

    @property
    def tokens_per_sample(self) -> int:
        """At most."""
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def total_prompts(self) -> int:
        """Groups that the run trains on, as far as is known before prompts are filtered."""
        wanted = self.config.trainer.total_steps * self.config.trainer.groups_per_step
        if self.rows is None or self.config.data.epochs is None:
            return wanted
        return min(wanted, self.rows * self.config.data.epochs)

    @property
    def total_steps(self) -> int:
        """The last may be short."""
        return math.ceil(self.total_prompts / self.config.trainer.groups_per_step)

    def check(self) -> None:
        """Raises what stands against the run on this machine."""
        if self.problems:
            raise self.problems[0]

    def text(self) -> str:
        """For a log or a pipe."""
        return self.render().plain

    def render(self, concerns: Sequence[Finding] = ()) -> Text:
        """For a terminal, or `.plain`. `concerns`: what else is not as it should be for this run here."""
        from freewheel.runtime.plan_text import render

        return render(self, concerns)


def resolve(config: TrainConfig, machine: Machine, *, model: ModelSize | None = None, rows: int | None = None) -> Plan:
    """Every `auto` resolved. `model` and `rows` make memory and epochs known."""
    placed = place(config, machine)
    max_new_tokens = _max_new_tokens(config)
    max_prompt_tokens = config.data.max_prompt_tokens
    problems, notes = [*placed.problems, *held_out_file(config), *step_in_memory(config, machine.memory_bytes)], []
    memory_trainer: dict[str, int] = {}
    memory_replica: dict[str, int] = {}
    if model is not None:
        if model.positions is not None:
            problems += _too_long(config, model.positions, max_new_tokens)
            max_prompt_tokens = max(1, min(max_prompt_tokens, model.positions - max_new_tokens))
        tokens = max_prompt_tokens + max_new_tokens
        memory_trainer = trainer_memory(
            config, model, dtype=placed.dtype, longest_tokens=tokens, processes=placed.world_size
        )
        memory_replica = _replica_memory(config, machine, placed, model, tokens)
        notes += _memory_notes(machine, placed, sum(memory_trainer.values()), sum(memory_replica.values()))
    notes += [describe(config.algorithm), *_notes(config, machine, placed)]
    plan = Plan(
        config=config,
        machine=machine,
        device_trainer=placed.device_trainer,
        device_rollout=placed.device_rollout,
        replicas=placed.replicas,
        slots=placed.slots,
        dtype=placed.dtype,
        threads_trainer=config.trainer.threads,
        threads_rollout=config.rollout.threads,
        world_size=placed.world_size,
        compile=placed.device_trainer == "cuda" if config.trainer.compile == "auto" else config.trainer.compile,
        gpus_trainer=placed.gpus_trainer,
        gpus_per_replica=placed.gpus_per_replica,
        engines_on_a_gpu=placed.engines_on_a_gpu,
        shared_gpu=placed.shared_gpu,
        gpu_memory_share=placed.gpu_memory_share,
        transport=placed.transport,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        bounds=config.bounds,
        actors=_actors(config, placed),
        rows=rows,
        sync_bytes=None if model is None else model.parameters * NUMBER_BYTES[placed.dtype],
        memory_trainer=memory_trainer,
        memory_replica=memory_replica,
        notes=tuple(notes),
        problems=tuple(problems),
    )
    return plan


def _replica_memory(
    config: TrainConfig, machine: Machine, placed: Placement, model: ModelSize, tokens: int
) -> dict[str, int]:
    """Of one GPU, or of the host."""
    needed = replica_memory(model, dtype=placed.dtype, slots=placed.slots, longest_tokens=tokens)
    gpu_bytes = min((one.memory_bytes for one in machine.gpus), default=0)
    gpu = None
    if placed.device_rollout == "cuda" and gpu_bytes:
        gpu = GpuShare(gpu_bytes=gpu_bytes, share=placed.gpu_memory_share, engines=placed.engines_on_a_gpu)
    return find_engine(config.rollout.engine).estimate_memory(config.rollout, needed, gpu)


def _max_new_tokens(config: TrainConfig) -> int:
    if config.rollout.max_new_tokens != "auto":
        return config.rollout.max_new_tokens
    from freewheel.data.tasks import get_task

    return get_task(config.data.task).max_new_tokens


def _actors(config: TrainConfig, placed: Placement) -> tuple[Actor, ...]:
    def threads(device: Device, count: int) -> str:
        return f", {count} thread{'s' * (count != 1)}" if device == "cpu" else ""

    trainer, rollout = placed.device_trainer, placed.device_rollout
    engine = find_engine(config.rollout.engine)
    return (
        Actor(
            name="FullyAsyncTrainer",
            count=placed.world_size,
            device=trainer,
            gpus=placed.gpus_trainer,
            detail=placed.dtype + ", FSDP2" * (placed.world_size > 1) + threads(trainer, config.trainer.threads),
        ),
        Actor(
            name="Rollouter",
            count=placed.replicas,
            device=rollout,
            gpus=placed.gpus_per_replica,
            detail=engine.describe(config.rollout, placed.slots) + threads(rollout, config.rollout.threads),
        ),
        Actor(name="MessageQueue", count=1, device="cpu", gpus=0.0),
        Actor(name="ParameterSynchronizer", count=1, device="cpu", gpus=0.0),
    )


def _too_long(config: TrainConfig, positions: int, max_new_tokens: int) -> list[ConfigError]:
    """Whether each prompt fits is known once it is rendered; responses must have room in any case."""
    if max_new_tokens < positions:
        return []
    remedy = f"that is {max_new_tokens} tokens, and the model has {positions} positions, prompt included: give fewer"
    return [ConfigError("rollout.max_new_tokens", config.rollout.max_new_tokens, remedy)]


def _memory_notes(machine: Machine, placed: Placement, trainer: int, replica: int) -> list[str]:
    """Estimates err, so a lack of memory is told and not refused."""
    gpu = min((one.memory_bytes for one in machine.gpus), default=0)
    on_cpu = trainer * (placed.device_trainer == "cpu") + replica * placed.replicas * (placed.device_rollout == "cpu")
    engines = replica * placed.engines_on_a_gpu
    on_gpu = trainer + engines if placed.shared_gpu else max(trainer * (placed.device_trainer == "cuda"), engines)
    remedy = "lower trainer.micro_batch_tokens, rollout.slots or data.max_prompt_tokens, or turn on "
    remedy += "model.gradient_checkpointing or model.lora"
    found = []
    if gpu and on_gpu > gpu:
        found.append(f"A GPU has {gpu / 2**30:.1f} GiB, and {on_gpu / 2**30:.1f} are estimated: {remedy}.")
    if machine.memory_bytes and on_cpu > machine.memory_bytes:
        have = machine.memory_bytes / 2**30
        found.append(f"This machine has {have:.1f} GiB of memory, and {on_cpu / 2**30:.1f} are estimated: {remedy}.")
    return found


def _notes(config: TrainConfig, machine: Machine, placed: Placement) -> list[str]:
    found = [f"Learning rate {config.lr:g}, {config.optimizer.schedule}."]
    a, r, bounds = config.async_training, config.rollout, config.bounds
    if note := find_engine(r.engine).start_note(r):
        found.append(f"{note}.")
    if config.reward.judge is not None and (lacks := as_config(config.reward.judge).lacks_key):
        found.append(f"{lacks}.")
    if config.mode != "fully_async":
        usual = AsyncTrainingConfig()
        unused = [key for key in SET_BY_MODE if getattr(a, key) != getattr(usual, key)]
        if unused:
            found.append(f"mode={config.mode} decides async_training.{', '.join(unused)}: what you gave is not used.")
    if bounds.capacity < (bounds.threshold + 1) * bounds.groups_per_version:
        found.append(
            f"async_training.max_queue_size = {a.max_queue_size} holds generation back before staleness_threshold does."
        )
    if r.top_p < 1 or r.top_k:
        found.append(
            "rollout.top_p and top_k cut the distribution that is sampled from, and the loss is computed without them: "
            "ratios are then off where tokens were cut."
        )
    if config.ray.address is not None and "auto" in (config.trainer.device, r.device) and not machine.gpus:
        found.append("device=auto looks at this machine, which has no GPU: give cuda where the cluster has them.")
    if placed.shared_gpu:
        found.append(
            "Training and generation share one GPU: neither is faster for it, but each fills the other's gaps."
        )
    busy = config.trainer.threads * placed.world_size * (placed.device_trainer == "cpu")
    busy += r.threads * placed.replicas * (placed.device_rollout == "cpu")
    if busy > machine.cpus:
        found.append(
            f"{busy} threads compute on {machine.cpus} CPU{'s' * (machine.cpus != 1)}: lower rollout.replicas, "
            "rollout.threads or trainer.threads."
        )
    return found
