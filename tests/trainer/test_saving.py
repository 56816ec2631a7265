"""A checkpoint is an ordinary Hugging Face folder with everything that a resumed trainer needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from freewheel.data.tasks.word_problems import model_path
from freewheel.queue.ledger import Frontier
from freewheel.sync.weights import Weights, pack
from freewheel.trainer.checkpoint import CheckpointFailed, CheckpointStore, Resumed, RunSaver
from freewheel.trainer.options import OptimizerConfig
from freewheel.trainer.torch_backend import TorchBackend

from .groups import random_group

FRONTIER = Frontier(low=7, ended=(9, 12), trained=8, abandoned={"zero_variance": 2})


@pytest.fixture
def backend() -> TorchBackend:
    return fresh_backend()


def fresh_backend() -> TorchBackend:
    return TorchBackend(
        AutoModelForCausalLM.from_pretrained(model_path()), optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=16384
    )


@pytest.fixture
def saver(tmp_path: Path) -> RunSaver:
    model = AutoModelForCausalLM.from_pretrained(model_path())
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    store = CheckpointStore(tmp_path, keep_last=2)
    return RunSaver(store=store, model=model, tokenizer=tokenizer, config={"seed": 3})


def train(backend: TorchBackend, step: int) -> None:
    backend.step([random_group(ordinal, seed=step) for ordinal in range(2)], version=step, step=step, total_steps=9)


def packed(backend: TorchBackend) -> Weights:
    return pack(backend.weights())


def test_a_checkpoint_opens_as_an_ordinary_model_with_its_tokenizer(
    saver: RunSaver, backend: TorchBackend, tmp_path: Path
) -> None:
    train(backend, 0)
    saver.save(1, 1, FRONTIER, backend.state(), packed(backend))
    folder = tmp_path / "checkpoints" / "step_000001"
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in backend.weights().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    before = AutoModelForCausalLM.from_pretrained(model_path())
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)
    text = "Tom has 6 apples"
    assert AutoTokenizer.from_pretrained(folder)(text) == AutoTokenizer.from_pretrained(model_path())(text)
    assert model.generation_config.eos_token_id == before.generation_config.eos_token_id


def test_no_other_tensors_lie_next_to_a_models_weights(saver: RunSaver, backend: TorchBackend, tmp_path: Path) -> None:
    """vLLM takes every such file in a folder for weights of its model, and a run resumes from this one."""
    saver.save(3, 1, FRONTIER, backend.state(), packed(backend))
    (folder,) = tmp_path.glob("checkpoints/step_*")
    assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]


def test_a_resumed_trainer_continues_bit_for_bit(saver: RunSaver, backend: TorchBackend, tmp_path: Path) -> None:
    train(backend, 0)
    saver.save(1, 1, FRONTIER, backend.state(), packed(backend))
    train(backend, 1)
    store = CheckpointStore(tmp_path, keep_last=2)
    path = store.latest()
    assert path is not None
    found = store.load(path)
    again = fresh_backend()
    again.load_files(found.tensor_files(), found.state["backend"])
    train(again, 1)
    for name, tensor in backend.weights().items():
        assert torch.equal(again.weights()[name], tensor)


def test_a_checkpoint_records_where_to_resume(saver: RunSaver, backend: TorchBackend, tmp_path: Path) -> None:
    saver.save(4, 2, FRONTIER, backend.state(), packed(backend))
    store = CheckpointStore(tmp_path, keep_last=2)
    path = store.latest()
    assert path is not None
    state = store.load(path).state
    resumed = Resumed.of(path, state)
    assert (resumed.step, resumed.version, resumed.frontier) == (4, 2, FRONTIER)
    assert resumed.path == str(path)
    assert state["config"] == {"seed": 3}


def test_a_saved_state_does_not_change_while_training_continues(
    saver: RunSaver, backend: TorchBackend, tmp_path: Path
) -> None:
    state, weights = backend.state(), packed(backend)
    train(backend, 0)
    saver.save(1, 1, FRONTIER, state, weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "step_000001")
    before = AutoModelForCausalLM.from_pretrained(model_path())
    assert torch.equal(model.lm_head.weight, before.lm_head.weight)


def test_the_best_weights_are_kept_and_worse_ones_are_not(
    saver: RunSaver, backend: TorchBackend, tmp_path: Path
) -> None:
    assert saver.save_best(1, 0.5, packed(backend), versions=(1, 1))
    train(backend, 0)
    better = packed(backend)
    assert saver.save_best(2, 0.6, better, versions=(1, 2))
    train(backend, 1)
    assert not saver.save_best(3, 0.55, packed(backend), versions=(3, 3))
    assert not saver.save_best(4, float("nan"), packed(backend), versions=(4, 4))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    assert torch.equal(model.lm_head.weight, better.tensors()["model.embed_tokens.weight"])
    told = json.loads((tmp_path / "best" / "best.json").read_text())
    assert (told["step"], told["version_min"], told["version_max"]) == (2, 1, 2)


def test_a_folder_records_the_type_of_its_weights(saver: RunSaver, backend: TorchBackend, tmp_path: Path) -> None:
    half = pack({name: tensor.bfloat16() for name, tensor in backend.weights().items()})
    saver.write_hf(tmp_path / "half", half)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype is torch.bfloat16
    saver.write_hf(tmp_path / "whole", packed(backend))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto").dtype is torch.float32


def test_a_tokenizer_that_cannot_be_written_fails_the_checkpoint_and_leaves_nothing(
    saver: RunSaver, backend: TorchBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver._tokenizer, "save_pretrained", full)
    with pytest.raises(CheckpointFailed, match="No space left on device"):
        saver.save(1, 1, FRONTIER, backend.state(), packed(backend))
    assert CheckpointStore(tmp_path, keep_last=2).latest() is None
    assert list((tmp_path / "checkpoints").iterdir()) == []
