"""What a checkpoint of a run is made of, and how it is opened again.

    step_000040/  model.safetensors, config.json, tokenizer …   a HF folder: engines and users open it as any other
                  training/whole.safetensors                    parameters as trained, and the optimizer's state
                  training/shard_….safetensors                  the same by several processes, a part from each
                  state.json                                    step, version, prompts that have ended, checksums

Called by `FullyAsyncTrainer` in threads; `CheckpointStore` does the writing and keeps it safe.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from freewheel.queue.ledger import Frontier
from freewheel.sync.weights import AnyWeights
from freewheel.trainer.backend import BackendState
from freewheel.trainer.checkpoint import CheckpointStore
from freewheel.utils.files import private_folder

TRAINING = "training"
"""The folder with what a resumed trainer needs."""


class RunSaver:
    """Writes checkpoints and the best weights of a run."""

    def __init__(self, *, store: CheckpointStore, model: Any, tokenizer: Any, config: dict[str, Any]) -> None:
        """`model`: whose configuration the folders get; its weights are not read."""
        self._store = store
        self._model = model
        self._tokenizer = tokenizer
        self._config = config

    def save(self, step: int, version: int, frontier: Frontier, state: BackendState, weights: AnyWeights) -> int:
        """Gives the step of the oldest checkpoint that a resume may fall back to."""
        self._store.save(
            step,
            tensors={TRAINING: state.tensors} if state.write is None else {},
            state={
                "version": version,
                "frontier": msgspec.to_builtins(frontier),
                "backend": dict(state.values),
                "config": self._config,
            },
            hf=lambda folder: self._write_rest(folder, state, weights),
        )
        return self._store.oldest()

    def _write_rest(self, folder: Path, state: BackendState, weights: AnyWeights) -> None:
        self.write_hf(folder, weights)
        if state.write is not None:
            state.write(private_folder(folder / TRAINING))

    def save_best(self, step: int, score: float, weights: AnyWeights, *, versions: tuple[int, int]) -> bool:
        measured = {"version_min": versions[0], "version_max": versions[1]}
        return self._store.save_best(step, score, lambda folder: self.write_hf(folder, weights), measured=measured)

    def write_hf(self, folder: Path, weights: AnyWeights) -> None:
        """An ordinary HF folder, which `AutoModelForCausalLM.from_pretrained` opens, in the type of the weights."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in weights.on_host().tensors().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self._model.config)
        config.dtype = next((one.dtype for one in tensors.values() if one.is_floating_point()), config.dtype)
        config.save_pretrained(folder)
        if self._model.generation_config is not None:
            self._model.generation_config.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)


class Resumed(msgspec.Struct, frozen=True):
    """Where a checkpoint goes on from."""

    path: str
    """Also the HF folder that engines start from."""
    step: int
    version: int
    frontier: Frontier

    @classmethod
    def of(cls, path: Path, state: Mapping[str, Any]) -> Resumed:
        frontier = msgspec.convert(state["frontier"], Frontier)
        return cls(path=str(path), step=state["step"], version=state["version"], frontier=frontier)
