"""`RunPlan`: what a config means on a machine, in numbers, before anything starts.

    TrainConfig ┐
    Machine     ├─ resolve ─▶ RunPlan ─▶ FullyAsyncMain and its actors (devices, replicas, slots, tokens)
    ModelSize   ┘                   └── render ─▶ `freewheel train --dry-run`

Pure. It leaves out what it does not know (the model's size, the number of prompts). `problems` has the reasons why the
run cannot start on this machine; `check` raises the first of them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from freewheel.errors import ConfigError
from freewheel.queue.staleness import Bounds
from freewheel.rewards.config import as_config
from freewheel.rollout.engine_factories import NUMBER_BYTES, GpuShare, find_engine
from freewheel.runtime.config import AsyncTrainingConfig, TrainConfig, held_out_file
from freewheel.runtime.model_size import ModelSize, replica_memory, trainer_memory
from freewheel.runtime.placement import Device, Machine, Placement, place
from freewheel.trainer.options import describe
from freewheel.utils.findings import Finding, State, count_of, size

if TYPE_CHECKING:
    from rich.text import Text

SET_BY_MODE = ("staleness_threshold", "selection_window", "in_flight_updates")
"""Keys of `async_training` that `mode` decides in the two synchronous modes."""
_OTHER_ACTORS = ("MessageQueue", "ParameterSynchronizer")
"""Actors besides trainer and rollouters, one of each."""

_LABEL = 24
"""Columns of the labels; the longest name of an actor fits."""
_WIDTH = 110
_PROBLEMS = "Against this run here"
_COLOURS = {State.PROBLEM: "red", State.WARNING: "yellow"}
_WAYS = {"object_store": "through host memory", "ipc": "within the GPU", "nccl": "from GPU to GPU"}


@dataclass(frozen=True, kw_only=True)
class RunPlan(Placement):
    """A run's numbers: which part runs where (`Placement`), and what it does there. Actors receive the whole plan."""

    config: TrainConfig
    machine: Machine
    compile: bool
    """Whether the decoder's layers are compiled for training."""
    max_prompt_tokens: int
    """The longest prompt that is allowed and that the model has positions for."""
    max_new_tokens: int
    rows: int | None
    """Prompts in an epoch, before the length filter. None: unknown."""
    sync_bytes: int | None
    """Bytes that a weight version moves to each replica. None: unknown."""
    memory_trainer: dict[str, int] = field(default_factory=dict)
    """Bytes of a training process by part; empty if the model's size is unknown."""
    memory_replica: dict[str, int] = field(default_factory=dict)
    """The same for a rollouter."""
    notes: tuple[str, ...] = ()

    @property
    def bounds(self) -> Bounds:
        return self.config.bounds

    @property
    def actor_count(self) -> int:
        return self.world_size + self.replicas + len(_OTHER_ACTORS)

    @property
    def busy_threads(self) -> int:
        """Threads that compute on CPUs."""
        training = self.world_size * self.config.trainer.threads * (self.device_trainer == "cpu")
        return training + self.replicas * self.config.rollout.threads * (self.device_rollout == "cpu")

    @property
    def cpu_bytes(self) -> int:
        """Estimated memory of all processes on CPUs; 0 if the model's size is unknown."""
        training = self.world_size * sum(self.memory_trainer.values()) * (self.device_trainer == "cpu")
        return training + self.replicas * sum(self.memory_replica.values()) * (self.device_rollout == "cpu")

    @property
    def gpu_bytes(self) -> int:
        """Estimated memory of the fullest GPU; 0 if there is none or the model's size is unknown."""
        training = sum(self.memory_trainer.values()) * (self.device_trainer == "cuda")
        engines = sum(self.memory_replica.values()) * self.engines_on_a_gpu
        return training + engines if self.shared_gpu else max(training, engines)

    @property
    def samples_per_step(self) -> int:
        return self.config.trainer.groups_per_step * self.config.rollout.n

    @property
    def tokens_per_sample(self) -> int:
        """Most tokens of a prompt and its response."""
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
        """Steps of the run; the last may be short."""
        return math.ceil(self.total_prompts / self.config.trainer.groups_per_step)

    def check(self) -> None:
        """Raise the first reason why the run cannot start on this machine."""
        if self.problems:
            raise self.problems[0]


def resolve(
    config: TrainConfig, machine: Machine, *, model: ModelSize | None = None, rows: int | None = None
) -> RunPlan:
    """Resolve every `auto`. `model` and `rows` make memory and epochs known."""
    placed = place(config, machine)
    max_new_tokens = _max_new_tokens(config)
    max_prompt_tokens = config.data.max_prompt_tokens
    problems = [*placed.problems, *held_out_file(config)]
    memory_trainer: dict[str, int] = {}
    memory_replica: dict[str, int] = {}
    if model is not None:
        if model.positions is not None:
            if max_new_tokens >= model.positions:  # whether a prompt fits is known once it is rendered
                remedy = (
                    f"that is {max_new_tokens} tokens, and the model has {model.positions} positions, prompt included: "
                )
                problems.append(
                    ConfigError("rollout.max_new_tokens", config.rollout.max_new_tokens, remedy + "give fewer")
                )
            max_prompt_tokens = max(1, min(max_prompt_tokens, model.positions - max_new_tokens))
        tokens = max_prompt_tokens + max_new_tokens
        memory_trainer = trainer_memory(
            config, model, dtype=placed.dtype, longest_tokens=tokens, processes=placed.world_size
        )
        memory_replica = _replica_memory(config, machine, placed, model, tokens)
    plan = RunPlan(
        **{**vars(placed), "problems": tuple(problems)},
        config=config,
        machine=machine,
        compile=placed.device_trainer == "cuda" if config.trainer.compile == "auto" else config.trainer.compile,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        rows=rows,
        sync_bytes=None if model is None else model.parameters * NUMBER_BYTES[placed.dtype],
        memory_trainer=memory_trainer,
        memory_replica=memory_replica,
    )
    return replace(plan, notes=tuple(_notes(plan)))


def _replica_memory(
    config: TrainConfig, machine: Machine, placed: Placement, model: ModelSize, tokens: int
) -> dict[str, int]:
    """Return the bytes of a rollouter by part, on its GPU or on the host."""
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


def _notes(plan: RunPlan) -> Iterator[str]:
    config, machine = plan.config, plan.machine
    a, r, bounds = config.async_training, config.rollout, config.bounds
    gpu = min((one.memory_bytes for one in machine.gpus), default=0)
    less = "lower trainer.micro_batch_tokens, rollout.slots or data.max_prompt_tokens, or turn on "
    less += "model.gradient_checkpointing or model.lora"
    for where, there, needed in (
        ("A GPU", gpu, plan.gpu_bytes),
        ("This machine", machine.memory_bytes, plan.cpu_bytes),
    ):
        if there and needed > there:  # estimates may be wrong, so the run is not refused
            yield f"{where} has {size(there)} of memory, and the run is estimated to need {size(needed)}: {less}."
    yield describe(config.algorithm)
    yield f"Learning rate {config.lr:g}, {config.optimizer.schedule}."
    if note := find_engine(r.engine).start_note(r):
        yield f"{note}."
    if config.reward.judge is not None and (lacks := as_config(config.reward.judge).lacks_key):
        yield f"{lacks}."
    usual = AsyncTrainingConfig()
    unused = [key for key in SET_BY_MODE if getattr(a, key) != getattr(usual, key)]
    if unused and config.mode != "fully_async":
        yield f"mode={config.mode} decides async_training.{', '.join(unused)}: your values have no effect."
    if bounds.capacity < (bounds.threshold + 1) * bounds.groups_per_version:
        held_back = "holds generation back before staleness_threshold does"
        yield f"async_training.max_queue_size = {a.max_queue_size} {held_back}."
    if r.top_p < 1 or r.top_k:
        yield (
            "rollout.top_p and top_k cut the distribution that is sampled from, but the loss is computed without them: "
            "ratios are wrong where tokens were cut."
        )
    if config.ray.address is not None and "auto" in (config.trainer.device, r.device) and not machine.gpus:
        yield "device=auto looks at this machine, which has no GPU: give cuda where the cluster has them."
    if plan.busy_threads > machine.cpus:
        cpus = count_of(machine.cpus, "CPU")
        less = "lower rollout.replicas, rollout.threads or trainer.threads"
        yield f"{plan.busy_threads} threads compute on {cpus}: {less}."


# -- the plan in words ------------------------------------------------------------------------------------------------

_Rows = list[tuple[str, str]]


def render(plan: RunPlan, concerns: Sequence[Finding] = ()) -> Text:
    """Return the plan for a terminal, or `.plain`. `concerns`: findings of `freewheel doctor` about this run."""
    from rich.text import Text

    text, shown = Text(), ""
    for title, style, rows in _sections(plan, concerns):
        if not rows:
            continue
        if title != shown:
            text.append(f"{title}\n", style="bold")
            shown = title
        for label, row in rows:
            indent = " " * (2 + (_LABEL if label else 0))
            lines = textwrap.wrap(row, _WIDTH - len(indent)) or [""]
            text.append(f"  {label:<{_LABEL}}" if label else "  ", style="dim")
            text.append(f"\n{indent}".join(lines) + "\n", style=style)
    text.rstrip()
    return text


def _sections(plan: RunPlan, concerns: Sequence[Finding]) -> Iterator[tuple[str, str, _Rows]]:
    """Title, colour and rows. One title may have rows of two colours."""
    yield "Run", "", _run(plan)
    yield "Actors", "", _actors(plan)
    yield "Batch", "", _batch(plan)
    yield "Staleness", "", _staleness(plan)
    yield "Memory (estimate)", "", _memory(plan)
    yield "Notes", "", [("", note) for note in plan.notes]
    yield _PROBLEMS, "red", [("", str(problem)) for problem in plan.problems]
    for state, style in _COLOURS.items():
        yield _PROBLEMS, style, [("", _concern(one)) for one in concerns if one.state is state]


def _concern(finding: Finding) -> str:
    return f"{finding.what}: {finding.detail}" + (f" → {finding.remedy}" if finding.remedy else "")


def _run(plan: RunPlan) -> _Rows:
    c, m = plan.config, plan.machine
    gpus = ", ".join(f"{gpu.name} ({size(gpu.memory_bytes)})" for gpu in m.gpus) or "no GPU"
    cluster = f"Ray cluster at {c.ray.address}; here: " if c.ray.address else ""
    return [
        ("mode", f"{c.mode}, {count_of(plan.total_steps, 'step')}, seed {c.seed}"),
        ("model", f"{c.model.path}, {plan.dtype}{', LoRA' if c.model.lora else ''}"),
        ("data", f"{c.data.task}{f' from {c.data.train}' if c.data.train else ''}"),
        ("machine", f"{cluster}{count_of(m.cpus, 'CPU')}, {size(m.memory_bytes)} memory, {gpus}"),
        ("run directory", c.run_dir or "a new folder under runs/"),
    ]


def _actors(plan: RunPlan) -> _Rows:
    config = plan.config
    training = plan.dtype + ", FSDP2" * (plan.world_size > 1)
    generating = find_engine(config.rollout.engine).describe(config.rollout, plan.slots)
    return [
        ("FullyAsyncMain", "this process"),
        _actor(
            "FullyAsyncTrainer",
            plan.world_size,
            plan.device_trainer,
            plan.gpus_trainer,
            config.trainer.threads,
            training,
        ),
        _actor(
            "Rollouter", plan.replicas, plan.device_rollout, plan.gpus_per_replica, config.rollout.threads, generating
        ),
        *((name, "cpu") for name in _OTHER_ACTORS),
    ]


def _actor(name: str, count: int, device: Device, gpus: float, threads: int, detail: str) -> tuple[str, str]:
    where = f"cuda, {gpus:g} GPU{'s' * (gpus > 1)}{' each' * (count > 1)}" if gpus else str(device)
    label = name if count == 1 else f"{name} × {count}"
    return label, f"{where}, {detail}" + (f", {count_of(threads, 'thread')}" if device == "cpu" else "")


def _batch(plan: RunPlan) -> _Rows:
    c, groups = plan.config, plan.config.trainer.groups_per_step
    most = plan.samples_per_step * plan.tokens_per_sample
    rows = [
        ("a step", f"{groups:,} groups × {c.rollout.n} responses = {plan.samples_per_step:,} samples"),
        (
            "",
            f"at most {plan.samples_per_step:,} × ({plan.max_prompt_tokens:,} prompt + {plan.max_new_tokens:,} new) "
            f"= {most:,} tokens, in micro-batches of {c.trainer.micro_batch_tokens:,}",
        ),
        ("the run", f"{count_of(plan.total_steps, 'step')}, {plan.total_prompts:,} prompts in all"),
    ]
    if plan.rows is not None:
        steps, used = plan.rows / groups, plan.total_prompts / plan.rows
        rows.append(
            ("an epoch", f"{plan.rows:,} prompts = {steps:,.1f} steps; the run goes over them {used:.2f} times")
        )
        if plan.total_steps < c.trainer.total_steps:
            rows.append(
                ("", f"data.epochs = {c.data.epochs} ends it before trainer.total_steps = {c.trainer.total_steps}")
            )
    updates = c.algorithm.updates_per_batch * c.algorithm.mini_batches
    rows.append(("updates", f"{count_of(updates, 'optimizer step')} per training step"))
    return [(label if label else " ", text) for label, text in rows]


def _staleness(plan: RunPlan) -> _Rows:
    b = plan.bounds
    every = "each step" if b.steps_per_version == 1 else f"every {b.steps_per_version} steps"
    how = "once nothing is in progress" if b.drain else "between two tokens of what is in flight"
    rows = [
        (
            "bound",
            f"a sample lags at most {count_of(b.max_lag, 'version')} when it is trained on "
            f"(threshold {b.threshold} + ⌈(window {b.window} − 1) / {b.groups_per_version} groups per version⌉)",
        ),
        ("generation", f"held back at {b.capacity:,} groups alive; the queue never has more"),
        ("checked again", f"what lags more than {count_of(b.max_lag_allowed, 'version')} is never trained on"),
        ("new weights", f"after {every}, {how}"),
    ]
    if plan.sync_bytes is not None:
        how = _WAYS[plan.transport]
        rows.append(
            ("weight sync", f"{size(plan.sync_bytes)} to {count_of(plan.replicas, 'replica')}, each version, {how}")
        )
    return rows


def _memory(plan: RunPlan) -> _Rows:
    if not plan.memory_trainer:
        return [("", "not known: the model's files are not here, or do not say its size")]
    return [("trainer", _parts(plan.memory_trainer)), ("a rollouter", _parts(plan.memory_replica))]


def _parts(parts: dict[str, int]) -> str:
    return f"{size(sum(parts.values()))}: " + ", ".join(f"{name} {size(n_bytes)}" for name, n_bytes in parts.items())
