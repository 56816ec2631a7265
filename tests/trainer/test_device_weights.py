"""Weights that stay on a GPU: checkpoints and the best are written from them, and their memory is soon free again.

The device is the CPU here; slots of memory are counted in the same way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from freewheel.data.tasks.word_problems import model_path
from freewheel.queue.ledger import Frontier
from freewheel.sync.device import DevicePacker, DeviceWeights
from freewheel.trainer.backend import BackendState
from freewheel.trainer.checkpoint import CheckpointStore, RunSaver
from freewheel.trainer.options import OptimizerConfig
from freewheel.trainer.torch_backend import TorchBackend

from .groups import random_group
from .scene import Scene

IN_USE = 3
"""Slots that a run without engines needs at most: what is packed, what waits to be sent, what is being written."""


@pytest.fixture
def packer() -> DevicePacker:
    return DevicePacker(bucket_bytes=1 << 20, share=lambda buffer: {})


async def test_a_run_trains_and_saves_from_few_slots(packer: DevicePacker) -> None:
    one = Scene(schedule={"total_steps": 12, "save_every": 2}, packer=packer)
    assert await one.run() == "finished"
    assert [saved[0] for saved in one.saver.saved] == [2, 4, 6, 8, 10, 12]
    assert len(packer._slots) <= IN_USE


async def test_a_long_evaluation_keeps_versions_on_the_host(packer: DevicePacker) -> None:
    """The weights are still available, although the device has reused their memory."""
    gate = asyncio.Event()

    async def evaluate(step: int) -> dict[str, float] | None:
        if step == 1:
            await one.until(lambda: one.trainer.global_steps >= 7)
            gate.set()
            return {"eval/reward": 1.0, "eval/version_min": 1, "eval/version_max": 4}
        return one.scored(0.0)

    one = Scene(schedule={"total_steps": 8, "eval_every": 1}, packer=packer, evaluate=evaluate)
    await one.run()
    assert gate.is_set()
    assert one.saver.best[0] == (4, 1.0, 4), "step 4 made version 4, and its weights say so"
    assert len(packer._slots) <= IN_USE


def trained() -> TorchBackend:
    model = AutoModelForCausalLM.from_pretrained(model_path())
    backend = TorchBackend(model, optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=16384)
    backend.step([random_group(ordinal, seed=0) for ordinal in range(2)], version=0, step=0, total_steps=9)
    return backend


def test_a_checkpoint_is_written_from_them(packer: DevicePacker, tmp_path: Path) -> None:
    backend = trained()
    weights = packer(backend.weights())
    assert isinstance(weights, DeviceWeights)
    saver = RunSaver(
        store=CheckpointStore(tmp_path, keep_last=2),
        model=AutoModelForCausalLM.from_pretrained(model_path()),
        tokenizer=AutoTokenizer.from_pretrained(model_path()),
        config={},
    )
    state = BackendState(values={}, write=lambda folder: "")
    saver.save(1, 1, Frontier(low=0, ended=(), trained=0, abandoned={}), state, weights)
    found = load_file(tmp_path / "checkpoints" / "step_000001" / "model.safetensors")
    expected: dict[str, Any] = dict(backend.weights())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
