"""Accelerators and models, in the numbers that speed follows from; and a `Scene` made of them.

    Accelerator ┐
    Shape       ├─ Cluster.scene(split) ─▶ Scene: decoding by memory bandwidth or the host, training by arithmetic,
    Workload    ┘                                 weights by the link

What freewheel was measured with is one H200 and models of 0.5B and 1.5B (docs/benchmarks.md, docs/plan.md); `MFU`,
`HOST_PER_SEQUENCE_S` come from there. Everything else follows from data sheets and the shares named below, and is told
as extrapolated.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from freewheel.errors import ConfigError
from freewheel.plan.scene import MESSAGE_S, Generation, HandOver, Lognormal, Scene, Scores, Training, Weights
from freewheel.queue.staleness import Bounds
from freewheel.runtime.config import AsyncTrainingConfig

BYTES = 2
"""Of a weight or a cached number that computes: bfloat16."""
TRAINED_BYTES = 18
"""Of a parameter in training: float32 weight, gradient and two moments, and a bfloat16 copy."""
TRAINING_MEMORY = 0.7
"""Of an accelerator, what those may take: the rest is for activations."""
ENGINE_MEMORY = 0.9
"""`rollout.gpu_memory_share`, where generation has an accelerator to itself."""
LEAST_CACHE = 0.3
"""Of that, what must be left for keys and values; a model that leaves less is spread over more accelerators."""
MFU = 0.48
"""Of the peak, what a training step reaches: measured with a 1.5B model on an H200."""
FLOPS_PER_PARAMETER = 6
"""Of a token: two for the forward pass, four for the backward one."""
HOST_PER_SEQUENCE_S = 46e-6
"""Of a decoding step, what a sequence costs the host: 20,700 tokens/s of a 0.5B model with 256 sequences on an H200 are
12.4 ms a step, of which the accelerator needs 0.6."""
BANDWIDTH_SHARE = 0.7
"""Of the memory's bandwidth, what decoding reaches: a usual share, not measured here."""
LINK_SHARE = 0.7
"""Of a link's, what a broadcast reaches: the same."""
SCALING = 0.97
"""Of the speed, what is left with each doubling of the accelerators that train: assumed, for lack of a measurement."""
TENSOR_PARALLEL = 0.9
"""Of the speed, what is left with each doubling of the accelerators that share a replica's matrices: assumed."""
NODE = 8
"""Accelerators of a machine, between which the fast link is."""
RESOLUTION = 64
"""Parts of a mean length that ends are told apart by: a step of a large model has a hundredth of an end."""
MOST_SLOTS = 256
"""`rollout.slots: auto` gives no more."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device, by its data sheet."""

    name: str
    flops: float
    """bfloat16, dense, a second."""
    memory_bytes: float
    bandwidth: float
    """Of its memory, bytes a second."""
    node_link: float
    """To others of its machine, bytes a second one way."""
    network: float = 50e9
    """To other machines: 400 Gb/s each, as reference designs have it."""
    source: str


ACCELERATORS = {
    one.name: one
    for one in (
        Accelerator(
            name="h200",
            flops=989e12,
            memory_bytes=141e9,
            bandwidth=4.8e12,
            node_link=450e9,
            source="NVIDIA H200 Tensor Core GPU data sheet, SXM",
        ),
        Accelerator(
            name="h100",
            flops=989e12,
            memory_bytes=80e9,
            bandwidth=3.35e12,
            node_link=450e9,
            source="NVIDIA H100 Tensor Core GPU data sheet, SXM",
        ),
        Accelerator(
            name="a100",
            flops=312e12,
            memory_bytes=80e9,
            bandwidth=2.04e12,
            node_link=300e9,
            network=25e9,
            source="NVIDIA A100 80GB Tensor Core GPU data sheet, SXM; 200 Gb/s network",
        ),
        Accelerator(
            name="b200",
            flops=2250e12,
            memory_bytes=180e9,
            bandwidth=7.7e12,
            node_link=900e9,
            source="NVIDIA HGX B200 data sheet, a GPU's part",
        ),
        Accelerator(
            name="mi300x",
            flops=1307e12,
            memory_bytes=192e9,
            bandwidth=5.3e12,
            node_link=448e9,
            source="AMD Instinct MI300X data sheet",
        ),
        Accelerator(
            name="l40s",
            flops=362e12,
            memory_bytes=48e9,
            bandwidth=0.864e12,
            node_link=32e9,
            network=25e9,
            source="NVIDIA L40S data sheet; PCIe 4.0, 200 Gb/s network",
        ),
    )
}
"""By the name that `--accelerator` takes."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What speed depends on, of a model."""

    name: str
    parameters: float
    layers: int
    kv_width: int
    """Key heads times their size."""

    @property
    def weight_bytes(self) -> float:
        return self.parameters * BYTES

    @property
    def cache_bytes(self) -> float:
        """Of a token's keys and values."""
        return 2.0 * self.layers * self.kv_width * BYTES


SHAPES = {
    one.name: one
    for one in (
        Shape(name="0.5b", parameters=0.494e9, layers=24, kv_width=128),
        Shape(name="1.5b", parameters=1.54e9, layers=28, kv_width=256),
        Shape(name="3b", parameters=3.09e9, layers=36, kv_width=256),
        Shape(name="7b", parameters=7.62e9, layers=28, kv_width=512),
        Shape(name="14b", parameters=14.8e9, layers=48, kv_width=1024),
        Shape(name="32b", parameters=32.8e9, layers=64, kv_width=1024),
        Shape(name="72b", parameters=72.7e9, layers=80, kv_width=1024),
    )
}
"""The dense models of Qwen2.5, by their configuration files: others of a size differ little in speed."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained on what."""

    n: int = 8
    groups_per_step: int
    prompt_tokens: float = 256.0
    response_tokens: float = 1024.0
    """On average, those that are cut off at `max_new_tokens` included."""
    spread: float = 0.6
    """σ of the lengths' logarithm."""
    max_new_tokens: float = 4096.0
    scores: Scores = field(default_factory=Scores)

    def __post_init__(self) -> None:
        if self.response_tokens > self.max_new_tokens:
            remedy = f"a response has {self.max_new_tokens:,.0f} at most (--max-new-tokens): give less, or raise that"
            raise ConfigError("--response-tokens", self.response_tokens, remedy)

    @property
    def longest(self) -> float:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A model on accelerators of one kind: any split of them becomes a scene."""

    accelerator: Accelerator
    shape: Shape
    workload: Workload

    def __post_init__(self) -> None:
        if self._cached_tokens < self.workload.longest:
            remedy = (
                f"a replica ({self.per_replica} x {self.accelerator.name}) has cache for {self._cached_tokens:,} tokens"
                f", and a prompt has {self.workload.prompt_tokens:,.0f}: give fewer"
            )
            raise ConfigError("--max-new-tokens", self.workload.max_new_tokens, remedy)

    @property
    def per_replica(self) -> int:
        """Accelerators that a replica's weights need, and a cache beside them: a power of two."""
        room = self.accelerator.memory_bytes * ENGINE_MEMORY * (1 - LEAST_CACHE)
        return _power_of_two(self.shape.weight_bytes / room)

    @property
    def least_trainers(self) -> int:
        room = self.accelerator.memory_bytes * TRAINING_MEMORY
        return max(1, math.ceil(self.shape.parameters * TRAINED_BYTES / room))

    @property
    def slots(self) -> int:
        """Sequences that a replica has cache for, 256 at most."""
        return min(MOST_SLOTS, int(self._cached_tokens / self.workload.longest))

    @property
    def _cached_tokens(self) -> int:
        """Whose keys and values a replica has room for."""
        room = self.accelerator.memory_bytes * ENGINE_MEMORY * self.per_replica - self.shape.weight_bytes
        return int(room / self.shape.cache_bytes)

    def is_measured(self, bounds: Bounds, *, trainers: int, generators: int) -> bool:
        """No run was, whatever the numbers in here come from."""
        return False

    def scene(self, bounds: Bounds, *, trainers: int, generators: int) -> Scene:
        replicas = generators // self.per_replica
        if replicas < 1 or trainers < self.least_trainers:
            remedy = (
                f"{self.shape.name} needs at least {self.least_trainers} to train and {self.per_replica} to generate"
            )
            raise ConfigError("split", f"{trainers} + {generators}", remedy)
        work = self.workload
        at_work = training_at_once(trainers, bounds, work.n)
        return Scene(
            bounds=bounds,
            n=work.n,
            lengths=Lognormal.of_mean(work.response_tokens, work.spread, work.max_new_tokens),
            generation=self._generation(replicas),
            scores=work.scores,
            training=Training(per_token_s=self._token_s(at_work), prompt_tokens=work.prompt_tokens / work.n),
            weights=Weights(pause_s=self._pause_s(replicas, trainers + generators)),
            hand_over=HandOver(
                admit_s=MESSAGE_S,
                put_s=MESSAGE_S,
                take_s=MESSAGE_S,
                commit_s=MESSAGE_S,
                interval_s=AsyncTrainingConfig().batch_generation_interval,
            ),
        )

    def _generation(self, replicas: int) -> Generation:
        shared = self.per_replica * TENSOR_PARALLEL ** math.log2(self.per_replica)
        bandwidth = self.accelerator.bandwidth * BANDWIDTH_SHARE * shared
        work = self.workload
        context = work.prompt_tokens + work.response_tokens / 2
        fixed_s = self.shape.weight_bytes / bandwidth
        each_s = context * self.shape.cache_bytes / bandwidth
        # The host prepares a step while the accelerator computes one: the slower of the two counts.
        host_s = (HOST_PER_SEQUENCE_S * self.slots - fixed_s) / self.slots
        prefill_s = work.prompt_tokens * 2 * self.shape.parameters / (self.accelerator.flops * MFU * shared)
        return Generation(
            replicas=replicas,
            slots=self.slots,
            step_s=fixed_s,
            resolution=max(1, round(work.response_tokens / RESOLUTION)),
            per_sequence_s=max(each_s, host_s),
            prefill_s=prefill_s,
        )

    def _token_s(self, trainers: int) -> float:
        flops = self.accelerator.flops * MFU * trainers * math.pow(SCALING, math.log2(trainers))
        return FLOPS_PER_PARAMETER * self.shape.parameters / flops

    def _pause_s(self, replicas: int, accelerators: int) -> float:
        """One accelerator sends to every replica, each in a group of its own: they share its link."""
        link = self.accelerator.node_link if accelerators <= NODE else self.accelerator.network
        return replicas * self.shape.weight_bytes / (link * LINK_SHARE)


def training_at_once(trainers: int, bounds: Bounds, n: int) -> int:
    """Of so many those that have something to do in a step: a sequence is trained on by one of them."""
    return min(trainers, bounds.groups_per_step * n)


def accelerator(name: str) -> Accelerator:
    found = ACCELERATORS.get(name.lower())
    if found is None:
        raise ConfigError("--accelerator", name, f"give one of {', '.join(ACCELERATORS)}")
    return found


def shape(name: str) -> Shape:
    found = SHAPES.get(name.lower())
    if found is None:
        near = _nearest(name)
        meant = f"did you mean {near}? " if near else ""
        raise ConfigError("--model", name, f"{meant}Give one of {', '.join(SHAPES)}: the nearest in size will do")
    return found


def _nearest(name: str) -> str:
    """In size, by the last number in a name; empty where there is none."""
    numbers = [float(one) for one in re.findall(r"\d+(?:\.\d+)?", name)]
    if not numbers or not numbers[-1]:
        return ""
    return min(SHAPES, key=lambda one: abs(math.log(float(one.removesuffix("b")) / numbers[-1])))


def _power_of_two(least: float) -> int:
    return 1 << max(0, math.ceil(math.log2(max(least, 1e-9))))
