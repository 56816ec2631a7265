"""Real training processes that meet over gloo, and the tasks that they run.

    processes(2).run(task, …) ─▶ each rank: task(world, …) ─▶ their results, in the order of ranks

Processes of each number serve all tests of a session: starting one takes longer than most tests. They find tasks by
name, and return arrays instead of tensors.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch._dynamo  # FSDP imports it in its first pass; here it is imported once for all processes
from torch import Tensor
from torch.distributed.tensor import DTensor

from freewheel.data.group import PromptGroup
from freewheel.errors import DataError
from freewheel.trainer import fsdp
from freewheel.trainer.backend import NonFiniteLoss
from freewheel.trainer.fsdp import FsdpBackend, Meeting, MeetingHost, World, join
from freewheel.trainer.options import AlgorithmConfig, LoraConfig, OptimizerConfig
from freewheel.trainer.torch_backend import TorchBackend

from .groups import tiny_gpt2, tiny_llama, tiny_qwen

ANSWER_S = 120.0
"""Longer than any task takes on a busy machine."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])  # torch and transformers are imported once
_here: dict[str, Any] = {}
"""What a rank keeps between its tasks."""


@cache
def processes(size: int) -> Processes:
    return Processes(size)


class Processes:
    """Ranks that have joined one group. After a failure they are killed, because they may wait for each other."""

    def __init__(self, size: int) -> None:
        self._ranks = [ProcessPoolExecutor(1, mp_context=_CONTEXT) for _ in range(size)]
        meeting = self._ranks[0].submit(_meet, size).result(ANSWER_S)
        calls = [one.submit(_join, meeting, rank) for rank, one in enumerate(self._ranks)]
        self._pids = [call.result(ANSWER_S) for call in calls]

    def run(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        calls = [one.submit(_run, task, args, kwargs) for one in self._ranks]
        done, late = wait(calls, ANSWER_S, FIRST_EXCEPTION)
        if late or any(call.exception() for call in done):
            processes.cache_clear()
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)
        assert not late or any(call.exception() for call in done), f"{len(late)} ranks gave no answer"
        return [call.result() for call in sorted(done, key=calls.index)]


def _meet(size: int) -> Meeting:
    _here["host"] = MeetingHost(fsdp.LOCAL_HOST, size)
    return _here["host"].meeting


def _join(meeting: Meeting, rank: int) -> int:
    torch.set_num_threads(1)
    _here["world"] = join(meeting, rank=rank, device="cpu", host=_here.get("host"))
    return os.getpid()


def _run(task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return task(_here["world"], *args, **kwargs)


# -- tasks ------------------------------------------------------------------------------------------------------------

MODELS = {"qwen": tiny_qwen, "llama": tiny_llama, "gpt2": tiny_gpt2}

Arrays = dict[str, Any]


@dataclass
class Learnt:
    """The result of some steps."""

    metrics: list[dict[str, float]]
    gradients: list[Arrays]
    """Of each update, as the optimizer received them."""
    weights: Arrays
    updates: int
    error: str = ""


def make_backend(
    world: World | None, *, model: str = "qwen", lr: float = 1e-2, crowded: bool = False, **options: Any
) -> TorchBackend:
    """`world`: None for one process. `crowded`: pretend that there is no memory for the whole model's gradients."""
    settings: dict[str, Any] = {
        "algorithm": AlgorithmConfig(**options.pop("algorithm", {})),
        "optimizer": OptimizerConfig(lr=lr, **options.pop("optimizer", {})),
        "micro_batch_tokens": 64,
        **options,
    }
    if isinstance(settings.get("lora"), dict):
        settings["lora"] = LoraConfig(**settings["lora"])
    made = MODELS[model]()
    if world is None:
        return TorchBackend(made, **settings)
    with pytest.MonkeyPatch.context() as patch:
        if crowded:
            patch.setattr(fsdp, "_has_room", lambda *_: False)
        return FsdpBackend(made, world=world, **settings)


def learn(
    world: World | None, groups: list[list[PromptGroup]], *, start: int = 0, backend: Any = None, **options: Any
) -> Learnt:
    """Take a step for each entry of `groups`."""
    backend = backend or make_backend(world, **options)
    gradients: list[Arrays] = []
    watch(backend, gradients)
    learnt = Learnt(metrics=[], gradients=gradients, weights={}, updates=0)
    try:
        for step, some in enumerate(groups, start=start):
            learnt.metrics.append(backend.step(some, version=step, step=step, total_steps=10))
    except NonFiniteLoss as error:
        learnt.error = str(error)
    learnt.weights = arrays(backend.weights())
    learnt.updates = backend.updates_applied
    return learnt


def watch(backend: Any, gradients: list[Arrays]) -> None:
    """Record the gradients that the optimizers receive."""
    for optimizer in backend._optimizers.values():

        def step(lr: float, loss: Tensor, optimizer: Any = optimizer, before: Any = optimizer.step) -> Any:
            gradients.append(arrays({name: p.grad for name, p in optimizer.parameters.items()}))
            return before(lr, loss)

        optimizer.step = step


def arrays(tensors: Any) -> Arrays:
    return {name: whole(one).float().numpy() for name, one in tensors.items()}


def whole(tensor: Tensor) -> Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def learn_poisoned(
    world: World, groups: list[PromptGroup], bad: list[PromptGroup]
) -> tuple[Arrays, Arrays, dict[str, float]]:
    """Return the state before and after a step on `bad`, and its metrics."""
    backend = make_backend(world)
    backend.step(groups, version=0, step=0, total_steps=10)
    before = whole_state(backend)
    metrics = backend.step(bad, version=1, step=1, total_steps=10)
    return before, whole_state(backend), metrics


def whole_state(backend: Any) -> Arrays:
    return arrays(backend._named_state())


def learn_and_write(world: World, groups: list[list[PromptGroup]], folder: str, **options: Any) -> Arrays:
    backend = make_backend(world, **options)
    learn(world, groups, backend=backend)
    backend.state().write(Path(folder))
    return whole_state(backend)


def loaded(world: World | None, files: list[str], **options: Any) -> TorchBackend:
    backend = make_backend(world, **options)
    backend.load_files([Path(file) for file in files], {"nonfinite": 1})
    return backend


def loaded_from(world: World | None, files: list[str], **options: Any) -> Arrays:
    return whole_state(loaded(world, files, **options))


def learn_from(world: World | None, files: list[str], groups: list[list[PromptGroup]], **options: Any) -> Learnt:
    return learn(world, groups, start=2, backend=loaded(world, files, **options))


def refused(world: World, files: list[str]) -> str:
    """Return why the files cannot be loaded, and check that the state is unchanged."""
    backend = make_backend(world)
    before = whole_state(backend)
    with pytest.raises(DataError) as caught:
        backend.load_files([Path(file) for file in files], {"nonfinite": 0})
    after = whole_state(backend)
    assert all(np.array_equal(array, after[name]) for name, array in before.items())
    return str(caught.value)


def seen_by_rank_0_only(world: World, files: list[str]) -> str:
    return refused(world, [f"{file}.elsewhere" for file in files] if world.rank else files)


def write_during_steps(world: World, groups: list[PromptGroup], folder: str) -> tuple[Arrays, Arrays]:
    """Return the copied state, and the state after three steps during the writing."""
    backend = make_backend(world)
    learn(world, [groups], backend=backend)
    state = backend.state()
    before = whole_state(backend)
    writing = threading.Thread(target=state.write, args=(Path(folder),))
    writing.start()
    learn(world, [groups] * 3, start=1, backend=backend)
    writing.join()
    return before, whole_state(backend)
