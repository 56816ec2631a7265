"""Checkpoints of a run: a checkpoint is complete or absent, whatever happens while it is written.

    save ─▶ .tmp-…/ files, fsync, checksums, state.json last ─ rename ─▶ checkpoints/step_000040/ ─▶ old ones removed
    latest ◀─ the newest checkpoint whose files all match their checksums; a damaged one is skipped with a warning

    RUN/checkpoints/step_000040/
        model.safetensors, config.json, tokenizer …   a Hugging Face folder: engines and users open it like any other
        training/whole.safetensors                    trained parameters and the optimizer's state
        training/shard_….safetensors                  the same, written by several processes, one file each
        state.json                                    step, version, prompts that have ended, checksums of all files
    RUN/best/                                         a Hugging Face folder of the best weights so far, with best.json
    RUN/final/                                        the weights at the end, with final.json; removed when a later
                                                      step is saved
    RUN/run.lock                                      held by the process that writes here

One process writes (`RunLock`), any number read. Tensors are safetensors and the rest is JSON: nothing is unpickled.
Importing this module does not import torch. `FullyAsyncTrainer` calls `RunSaver` in threads; the commands use the rest.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import json
import logging
import math
import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from freewheel.observe.run_folder import BEST, CHECKPOINTS, FINAL, LOCK, REPLACED, STEP, saved_steps
from freewheel.queue.ledger import Frontier
from freewheel.sync.weights import AnyWeights
from freewheel.trainer.backend import BackendState
from freewheel.utils.files import FILE_MODE, FOLDER_MODE, open_private, private_folder, sync_file, sync_folder

log = logging.getLogger("freewheel.trainer")

STATE = "state.json"
BEST_STATE = "best.json"
FINAL_STATE = "final.json"
HF_CONFIG = "config.json"
TRAINING = "training"
"""The folder inside a checkpoint that holds the tensors for a resumed trainer. It is separate from the model's files
because engines load every safetensors file next to a model as weights."""
FORMAT = 1
"""Format of `state.json`. A later format is refused rather than misread."""
FALLBACKS = 2
"""Checkpoints that a resume can choose from, if at least that many are kept."""
READ_BYTES = 1 << 22
"""Bytes read at a time for a checksum. CRC-32 runs at 2 GB/s, SHA-256 at 0.8, and forged checkpoints are not a threat
here."""
MB = 1e6

SCRATCH = ".tmp-"
"""Prefix of folders that are being written. A kill leaves one behind, and the next save removes it."""

Fill = Callable[[Path], None]
"""Writes files into a new folder."""


class CheckpointFailed(Exception):
    """A checkpoint could not be written. The earlier ones are unchanged."""


class CheckpointDamaged(ValueError):
    """A checkpoint's files differ from those that were written. The message names the file."""


class RunLocked(RuntimeError):
    """Another process writes to this run directory."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files all match their checksums."""

    path: Path
    state: Mapping[str, Any]
    """The state that `save` received, with `step` and the checksums of the files."""

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def tensor_files(self) -> list[Path]:
        """Return the files with the tensors of a resumed trainer: one for each process that wrote."""
        return sorted((self.path / TRAINING).glob("*.safetensors"))


class CheckpointStore:
    """After `save` returns, its checkpoint survives a power cut. A kill during `save` leaves the previous one intact.

    The caller must not save two checkpoints at the same time.
    """

    def __init__(self, run_dir: Path | str, *, keep_last: int) -> None:
        assert keep_last >= 1
        self.run_dir = Path(run_dir)
        self.folder = self.run_dir / CHECKPOINTS
        self._keep_last = keep_last

    # -- writing ------------------------------------------------------------------------------------------------------

    def save(self, step: int, *, state: Mapping[str, Any], fill: Fill) -> Path:
        """Write a checkpoint and return its folder. Every failure is a `CheckpointFailed`."""
        target = self.folder / f"{STEP}{step:06d}"
        self._write(target, fill, STATE, {**state, "step": step}, f"the checkpoint of step {step}")
        self._prune(step)
        shutil.rmtree(self.run_dir / FINAL, ignore_errors=True)  # a resumed run is no longer at its end
        return target

    def save_best(self, step: int, score: float, fill: Fill, **measured: int) -> bool:
        """Export the weights to `best/` if `score` beats the score kept there. Returns whether it did.

        `measured`: what else to record about the score. Raises `CheckpointFailed`.
        """
        if math.isnan(score) or score <= self._best_score():
            return False
        state = {"step": step, "score": score, **measured}
        self._write(self.run_dir / BEST, fill, BEST_STATE, state, f"the best weights (step {step})")
        return True

    def export(self, target: Path, step: int, fill: Fill) -> None:
        """Write weights to a folder of the run (`final/`) and replace what is there. Raises `CheckpointFailed`."""
        self._write(target, fill, FINAL_STATE, {"step": step}, f"the export of step {step}")

    def _write(self, target: Path, fill: Fill, state_name: str, state: Mapping[str, Any], subject: str) -> None:
        scratch = target.parent / f"{SCRATCH}{os.getpid()}-{target.name}"
        try:
            private_folder(target.parent)
            sync_folder(self.run_dir)
            # First remove what a killed save left behind, because it takes room. This is the only writer.
            for left in (*self.folder.glob(f"{SCRATCH}*"), *self.run_dir.glob(f"{SCRATCH}*")):
                shutil.rmtree(left, ignore_errors=True)
            scratch.mkdir(FOLDER_MODE)
            fill(scratch)
            write_state(scratch, state_name, state)
            sync_folder(scratch)
            _replace_folder(scratch, target)
        except Exception as error:
            shutil.rmtree(scratch, ignore_errors=True)
            why = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
            message = f"{target}: {subject} was not written: {type(error).__name__}: {why}"
            if _is_about_space(error):
                with contextlib.suppress(OSError):
                    free = shutil.disk_usage(self.run_dir).free
                    message += f". Only {free / MB:.0f} MB are free there: make room"
            raise CheckpointFailed(message) from error

    def _prune(self, step: int) -> None:
        """Keep the newest `keep_last` checkpoints that look whole, and damaged ones among them for inspection.

        A checkpoint of a later step belongs to a path that a resume from an earlier checkpoint has left. It is removed,
        so that the next resume does not continue from it.
        """
        whole = 0
        for saved, path in self._list_saved():
            if whole >= self._keep_last or saved > step:
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix != REPLACED and not visible_damage(path):
                whole += 1

    # -- reading ------------------------------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint. Damaged ones are skipped with a warning."""
        for _, path in self._list_saved():
            try:
                return self.load(path).path
            except CheckpointDamaged as error:
                log.warning("Skipping a damaged checkpoint: %s", error)
        return None

    def load(self, path: Path | str) -> Checkpoint:
        """Read a checkpoint's state and check every byte of its files. Raises `CheckpointDamaged`."""
        path = Path(path)
        state = read_state(path, STATE)
        if damage := _find_damage(path, state["files"], _measure):
            raise CheckpointDamaged(f"{path}: {damage}")
        return Checkpoint(path=path, state=state)

    def oldest(self) -> int:
        """Return the earliest step that a resume may fall back to.

        That is the start of the run until two checkpoints (or as many as are kept) exist: if the only checkpoint is
        damaged, the run must be able to start again.
        """
        whole = [step for step, path in self._list_saved() if path.suffix != REPLACED and not visible_damage(path)]
        return min(whole) if len(whole) >= min(self._keep_last, FALLBACKS) else 0

    def _best_score(self) -> float:
        for path in (self.run_dir / BEST, self.run_dir / f"{BEST}{REPLACED}"):
            with contextlib.suppress(CheckpointDamaged):
                return float(read_state(path, BEST_STATE)["score"])
        return -math.inf

    def newest(self) -> Path | None:
        """Return a Hugging Face folder with the newest weights: the final ones, or a later checkpoint's.

        Does not check the files' contents.
        """
        found: list[tuple[float, bool, Path]] = [
            (step, path.suffix != REPLACED, path) for step, path in self._list_saved()
        ]
        for path in (self.run_dir / FINAL, self.run_dir / f"{FINAL}{REPLACED}"):
            step: float = math.inf  # a folder that a user put there has no step
            with contextlib.suppress(CheckpointDamaged):
                step = read_state(path, FINAL_STATE)["step"]
            found.append((step, path.suffix != REPLACED, path))
        present = [one for one in found if (one[2] / HF_CONFIG).is_file()]
        return max(present, key=lambda one: (one[0], one[1], one[2].parent == self.run_dir))[2] if present else None

    def _list_saved(self) -> list[tuple[int, Path]]:
        """Return (step, folder) of all checkpoints, the newest first."""
        return [(step, path) for step, paths in reversed(saved_steps(self.run_dir).items()) for path in paths]


def has_checkpoint(run_dir: Path) -> bool:
    """Return whether a run has a checkpoint to resume from. Does not read its files through."""
    return any(not visible_damage(path) for paths in saved_steps(run_dir).values() for path in paths)


# -- a run's checkpoints ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunSaver:
    """Writes checkpoints and the best weights of a run."""

    store: CheckpointStore
    model: Any
    """Its configuration is copied to each folder. Its weights are not read."""
    tokenizer: Any
    config: dict[str, Any]

    def save(self, step: int, version: int, frontier: Frontier, state: BackendState, weights: AnyWeights) -> int:
        """Write a checkpoint and return the step of the oldest one that a resume may fall back to."""

        def fill(folder: Path) -> None:
            self.write_hf(folder, weights)
            state.write(private_folder(folder / TRAINING))

        values = {
            "version": version,
            "frontier": msgspec.to_builtins(frontier),
            "backend": dict(state.values),
            "config": self.config,
        }
        self.store.save(step, state=values, fill=fill)
        return self.store.oldest()

    def save_best(self, step: int, score: float, weights: AnyWeights, *, versions: tuple[int, int]) -> bool:
        """`versions`: the oldest and the newest version behind the score."""
        oldest, newest = versions
        fill = partial(self.write_hf, weights=weights)
        return self.store.save_best(step, score, fill, version_min=oldest, version_max=newest)

    def write_hf(self, folder: Path, weights: AnyWeights) -> None:
        """Write a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` opens, in the weights' type."""
        from safetensors.torch import save_file
        from transformers.dynamic_module_utils import custom_object_save

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in weights.on_host().tensors().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self.model.config)
        config.dtype = next((one.dtype for one in tensors.values() if one.is_floating_point()), config.dtype)
        if self.model._auto_class is not None:  # a model with its own code
            custom_object_save(self.model, folder, config=config)
        config.save_pretrained(folder)
        if self.model.generation_config is not None:
            self.model.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


class Resumed(msgspec.Struct, frozen=True):
    """Where a resumed run starts."""

    path: str
    """The checkpoint, which is also the Hugging Face folder that engines load."""
    step: int
    version: int
    frontier: Frontier

    @classmethod
    def of(cls, path: Path, state: Mapping[str, Any]) -> Resumed:
        frontier = msgspec.convert(state["frontier"], Frontier)
        return cls(path=str(path), step=state["step"], version=state["version"], frontier=frontier)


class RunLock:
    """Keeps two runs out of one directory. The kernel releases it when the process ends, however that happens."""

    def __init__(self, run_dir: Path | str) -> None:
        self._path = Path(run_dir) / LOCK

    def __enter__(self) -> Self:
        """Raises `RunLocked` with the name of the process that holds the lock."""
        private_folder(self._path.parent)
        file = open_private(self._path, os.O_RDWR)  # no file object: collecting it would release the lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(file, 1024).decode(errors="replace").strip() or "another process"
            os.close(file)
            if not isinstance(error, BlockingIOError):
                raise
            raise RunLocked(
                f"{self._path.parent} is in use by {holder}: wait for it, end it, or give another run_dir"
            ) from None
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._file = file
        return self

    def __exit__(self, *exc: object) -> None:
        os.ftruncate(self._file, 0)
        os.close(self._file)


# -- files ------------------------------------------------------------------------------------------------------------


def write_state(folder: Path, name: str, values: Mapping[str, Any]) -> None:
    """Bring all other files of the folder to the disk, then write a JSON file with `values` and their checksums."""
    table = {}
    for path in _files(folder):
        path.chmod(FILE_MODE)  # other libraries write with the umask's permissions
        sync_file(path)
        table[str(path.relative_to(folder))] = _measure(path)
    state = {**values, "format": FORMAT, "saved_at": time.time(), "files": table}
    state["checksum"] = _checksum(state)
    path = folder / name
    path.write_text(json.dumps(state, indent=1))
    path.chmod(FILE_MODE)
    sync_file(path)
    for inner in {file.parent for file in _files(folder)} - {folder}:
        inner.chmod(FOLDER_MODE)
        sync_folder(inner)


def read_state(folder: Path, name: str) -> dict[str, Any]:
    """Read a file that `write_state` wrote. Raises `CheckpointDamaged`."""
    try:
        state = json.loads((folder / name).read_text())
        checksum = state.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointDamaged(f"{folder / name}: {type(error).__name__}: {error}") from error
    if _checksum(state) != checksum:
        raise CheckpointDamaged(f"{folder / name}: its checksum does not match")
    if state.get("format") != FORMAT:
        raise CheckpointDamaged(
            f"{folder / name}: it has format {state.get('format')}, and this freewheel reads format {FORMAT}"
        )
    return dict(state)


def visible_damage(folder: Path) -> str:
    """Describe damage of a checkpoint that shows without reading files through, which takes a minute for a large model.

    Returns an empty string if there is none.
    """
    try:
        files = read_state(folder, STATE)["files"]
    except CheckpointDamaged as error:
        return str(error)
    return _find_damage(folder, files, lambda path: {"bytes": path.stat().st_size})


def _find_damage(
    folder: Path, files: Mapping[str, Mapping[str, int]], measure: Callable[[Path], Mapping[str, int]]
) -> str:
    """Describe how a file differs from the one that was written; empty if none does."""
    for name, written in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{name} leads out of the checkpoint"
        try:
            found = measure(folder / name)
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if found["bytes"] < written["bytes"]:
            return f"{name}: cut off: {found['bytes']:,} of {written['bytes']:,} bytes"
        if found["bytes"] > written["bytes"]:
            return f"{name}: too long: {found['bytes']:,} bytes, and {written['bytes']:,} were written"
        if found.get("crc32", written["crc32"]) != written["crc32"]:
            return f"{name}: its checksum does not match"
    return ""


def _checksum(state: Mapping[str, Any]) -> int:
    """Return the checksum of the values as JSON returns them: JSON changes some keys and turns tuples into lists."""
    return zlib.crc32(json.dumps(json.loads(json.dumps(state)), sort_keys=True).encode())


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _measure(path: Path) -> dict[str, int]:
    """Return a file's size and checksum."""
    length = value = 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            length += len(data)
            value = zlib.crc32(data, value)
    return {"bytes": length, "crc32": value}


def _replace_folder(scratch: Path, target: Path) -> None:
    """Move `scratch` to `target`. An existing target keeps a name that readers know until the new one is in place."""
    replaced = target.with_name(f"{target.name}{REPLACED}")
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.replace(replaced)
    scratch.replace(target)
    sync_folder(target.parent)  # before the old one is removed: after a power cut one of the two must exist
    shutil.rmtree(replaced, ignore_errors=True)


def _is_about_space(error: Exception) -> bool:
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # safetensors reports the kernel's error as text
    return getattr(error, "errno", None) in codes or any(f"(os error {code})" in str(error) for code in codes)
