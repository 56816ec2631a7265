"""Accelerators and models as numbers that determine speed, and a `Scene` made of them.

    Accelerator ┐
    Shape       ├─ Cluster.scene(split) ─▶ Scene: decoding limited by memory bandwidth or the host,
    Workload    ┘                                 training by arithmetic, weights by the link

`MFU` and `HOST_PER_SEQUENCE_S` were measured on one H200 with models of 0.5B and 1.5B (docs/benchmarks.md). Everything
else follows from data sheets and the assumed shares below, and is reported as extrapolated.
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
"""Bytes of a weight or cached number: bfloat16."""
TRAINED_BYTES = 18
"""Bytes per parameter in training: float32 weight, gradient and two moments, and a bfloat16 copy."""
TRAINING_MEMORY = 0.7
"""Share of an accelerator's memory for them; the rest is for activations."""
ENGINE_MEMORY = 0.9
"""`rollout.gpu_memory_share` if generation has the accelerator to itself."""
LEAST_CACHE = 0.3
"""Share of that which must remain for keys and values. A larger model is spread over more accelerators."""
MFU = 0.48
"""Share of peak arithmetic that a training step reaches: measured with a 1.5B model on an H200."""
FLOPS_PER_PARAMETER = 6
"""Per token: two for the forward pass, four for the backward pass."""
HOST_PER_SEQUENCE_S = 46e-6
"""Host time of a decoding step per sequence. 20,700 tokens/s of a 0.5B model with 256 sequences on an H200 are 12.4 ms
per step, of which the accelerator needs 0.6 ms."""
BANDWIDTH_SHARE = 0.7
"""Share of memory bandwidth that decoding reaches: a usual value, not measured here."""
LINK_SHARE = 0.7
"""Share of a link that a broadcast reaches: a usual value, not measured here."""
SCALING = 0.97
"""Speed kept with each doubling of the trainers: assumed."""
TENSOR_PARALLEL = 0.9
"""Speed kept with each doubling of a replica's tensor parallelism: assumed."""
NODE = 8
"""Accelerators of a machine, which share the fast link."""
RESOLUTION = 64
"""Steps into which a mean length is divided; more would slow the simulation of large models."""
MOST_SLOTS = 256
"""Upper bound of `rollout.slots: auto`."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device, by its data sheet."""

    name: str
    flops: float
    """bfloat16, dense, per second."""
    memory_bytes: float
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    node_link: float
    """To others of its machine, bytes per second in one direction."""
    network: float = 50e9
    """To other machines: 400 Gb/s each, as in reference designs."""
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
    """The numbers of a model that determine speed."""

    name: str
    parameters: float
    layers: int
    kv_width: int
    """Number of key heads times their size."""

    @property
    def weight_bytes(self) -> float:
        return self.parameters * BYTES

    @property
    def cache_bytes(self) -> float:
        """Bytes of a token's keys and values."""
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
"""The dense Qwen2.5 models, from their configuration files. Other models of a size differ little in speed."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained."""

    n: int = 8
    groups_per_step: int
    prompt_tokens: float = 256.0
    response_tokens: float = 1024.0
    """Mean, including responses that are cut off at `max_new_tokens`."""
    spread: float = 0.6
    """σ of the logarithm of lengths."""
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
    """A model on accelerators of one kind. Any split of them becomes a scene."""

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
        """Accelerators for a replica's weights and cache: a power of two."""
        room = self.accelerator.memory_bytes * ENGINE_MEMORY * (1 - LEAST_CACHE)
        return _power_of_two(self.shape.weight_bytes / room)

    @property
    def least_trainers(self) -> int:
        room = self.accelerator.memory_bytes * TRAINING_MEMORY
        return max(1, math.ceil(self.shape.parameters * TRAINED_BYTES / room))

    @property
    def slots(self) -> int:
        """Sequences that fit into a replica's cache, at most 256."""
        return min(MOST_SLOTS, int(self._cached_tokens / self.workload.longest))

    @property
    def _cached_tokens(self) -> int:
        """Tokens whose keys and values fit into a replica."""
        room = self.accelerator.memory_bytes * ENGINE_MEMORY * self.per_replica - self.shape.weight_bytes
        return int(room / self.shape.cache_bytes)

    def is_measured(self, bounds: Bounds, *, trainers: int, generators: int) -> bool:
        """False: no such run was measured."""
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
        # The host prepares a step while the accelerator computes one, so the slower of the two counts.
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
        """One accelerator sends to every replica separately, so replicas share its link."""
        link = self.accelerator.node_link if accelerators <= NODE else self.accelerator.network
        return replicas * self.shape.weight_bytes / (link * LINK_SHARE)


def training_at_once(trainers: int, bounds: Bounds, n: int) -> int:
    """Return how many trainers have work in a step: a sequence is trained on by one of them."""
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
    """Return the model nearest in size to the last number in a name; empty if there is none."""
    numbers = [float(one) for one in re.findall(r"\d+(?:\.\d+)?", name)]
    if not numbers or not numbers[-1]:
        return ""
    return min(SHAPES, key=lambda one: abs(math.log(float(one.removesuffix("b")) / numbers[-1])))


def _power_of_two(least: float) -> int:
    return 1 << max(0, math.ceil(math.log2(max(least, 1e-9))))
