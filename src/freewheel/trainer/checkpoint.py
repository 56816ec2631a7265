"""`CheckpointStore`: checkpoints that are there whole or not at all, whatever happens while they are written.

    save ─▶ .tmp-…/ files, fsync, checksums, state.json last ─ rename ─▶ checkpoints/step_000040/ ─▶ older ones pruned
    latest ◀─ the newest one whose files all have their checksums; a damaged one is passed over, with a warning

    RUN/checkpoints/step_000040/   state.json, NAME/*.safetensors and what `hf` wrote
    RUN/best/                      a HF folder of the best weights so far, with best.json
    RUN/final/                     one of the weights at the end, with final.json; gone when a later step is saved
    RUN/run.lock                   held by the process that writes here

One writer (`RunLock`), any number of readers. Tensors are safetensors and the rest is JSON: nothing is unpickled.
Opened without torch; tensors need it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from freewheel.observe.run_folder import BEST, CHECKPOINTS, FINAL, LOCK, REPLACED, STEP, saved_steps
from freewheel.trainer.checkpoint_files import (
    CheckpointDamaged,
    described,
    files,
    is_about_space,
    is_alive,
    looks_whole,
    misfit,
    put_in_place,
    read_state,
    size,
    sync_folder,
    write_state,
    write_tensors,
)
from freewheel.utils.files import FOLDER_MODE, open_private, private_folder

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("freewheel.trainer")

STATE = "state.json"
BEST_STATE = "best.json"
FINAL_STATE = "final.json"
HF_CONFIG = "config.json"
WHOLE = "whole.safetensors"
"""Tensors that one process wrote. In a folder of their own: engines take every such file beside a model's for its
weights."""
RESERVED = ("format", "step", "saved_at", "files", "checksum")
"""Keys of `state.json` that are the store's own."""

FALLBACKS = 2
"""Checkpoints that a resume has at its choice, where so many are kept."""
MB = 1e6

_LEFTOVER = re.compile(r"\.tmp-(?P<host>.+)-(?P<pid>\d+)-.+")

WriteHf = Callable[[Path], None]


class CheckpointFailed(Exception):
    """A checkpoint could not be written; those before it are as they were."""


class RunLocked(RuntimeError):
    """Another process writes to this run directory."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One that was found whole."""

    path: Path
    state: Mapping[str, Any]
    """What `save` was given, with `step`."""

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """Those that were saved under this name, on the CPU, whole, by however many processes they were written."""
        files = self.tensor_files(stem)
        if len(files) == 1:
            from safetensors.torch import load_file

            return load_file(files[0])
        from freewheel.trainer.sharded_checkpoint import read_shards

        return read_shards(files)

    def tensor_files(self, stem: str) -> list[Path]:
        """Where they lie: a file for each process that wrote."""
        return sorted((self.path / stem).glob("*.safetensors"))


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best weights of a run."""

    path: Path
    step: int
    """That made them."""
    score: float
    versions: tuple[int, int] | None
    """The first and the last that were measured; these weights are of the last. None where nobody said."""


class CheckpointStore:
    """After `save` returned, its checkpoint survives a power cut; while it runs, a kill leaves the one before it.

    Saving one at a time is the caller's part.
    """

    def __init__(self, run_dir: Path | str, *, keep_last: int) -> None:
        assert keep_last >= 1
        self.run_dir = Path(run_dir)
        self.folder = self.run_dir / CHECKPOINTS
        self._keep_last = keep_last
        self._clean(only_dead=True)

    # -- writing ------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        hf: WriteHf | None = None,
    ) -> Path:
        """Writes a checkpoint and gives its folder. `tensors`: folder → tensors by name. `hf` writes into the same
        folder what else belongs there. Raises `CheckpointFailed`, whatever went wrong."""
        clash = sorted(set(state) & set(RESERVED))
        assert not clash, f"state has {clash}, which the store writes itself"

        def fill(folder: Path) -> None:
            for stem, named in tensors.items():
                write_tensors(private_folder(folder / stem) / WHOLE, named)
            if hf is not None:
                hf(folder)
            write_state(folder, STATE, {**state, "step": step})

        target = self.folder / f"{STEP}{step:06d}"
        self._write(target, fill, f"the checkpoint of step {step}", size(tensors))
        self._prune(step)
        shutil.rmtree(self.run_dir / FINAL, ignore_errors=True)  # of a run that is resumed: it is the end no longer
        return target

    def save_best(self, step: int, score: float, hf: WriteHf, *, measured: Mapping[str, int] | None = None) -> bool:
        """Exports the weights to `best/` if `score` is above that of what is there. `measured`: `version_min` and
        `version_max` behind the score. Raises `CheckpointFailed`."""
        before = self.best()
        if math.isnan(score) or (before is not None and score <= before.score):
            return False

        def fill(folder: Path) -> None:
            hf(folder)
            write_state(folder, BEST_STATE, {"step": step, "score": score, **(measured or {})})

        self._write(self.run_dir / BEST, fill, f"the best weights (step {step})", 0)
        return True

    def export(self, target: Path, step: int, hf: WriteHf) -> None:
        """Weights to a folder of the run (`final/`), in the place of what is there. Raises `CheckpointFailed`."""

        def fill(folder: Path) -> None:
            hf(folder)
            write_state(folder, FINAL_STATE, {"step": step})

        self._write(target, fill, f"the export of step {step}", 0)

    def _write(self, target: Path, fill: Callable[[Path], None], what: str, tensor_bytes: int) -> None:
        beside = target.parent / f".tmp-{socket.gethostname()}-{os.getpid()}-{target.name}"
        try:
            private_folder(target.parent)
            sync_folder(self.run_dir)
            self._clean(only_dead=False)  # before it is needed: what a killed save left takes room
            beside.mkdir(FOLDER_MODE)
            fill(beside)
            sync_folder(beside)
            put_in_place(beside, target)
        except Exception as error:  # noqa: BLE001  # a tokenizer that cannot be saved is no better than a full disk
            shutil.rmtree(beside, ignore_errors=True)
            self._refuse(target, what, error, max(tensor_bytes, self._size_before()))

    def _refuse(self, target: Path, what: str, error: Exception, needed: int) -> NoReturn:
        why = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        message = f"{target}: {what} was not written: {type(error).__name__}: {why}"
        if is_about_space(error):
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self.run_dir).free
                message += f". It needs about {needed / MB:.0f} MB, and {free / MB:.0f} MB are free there: make room"
        raise CheckpointFailed(message) from error

    def _size_before(self) -> int:
        """Of the newest checkpoint: the next one is about as large."""
        with contextlib.suppress(OSError, IndexError):
            return sum(file.stat().st_size for file in files(self._saved()[0][1]))
        return 0

    def _clean(self, *, only_dead: bool) -> None:
        """Removes what a killed save left. `only_dead`: of processes of this machine that are gone, since a reader
        must not disturb a writer; whoever saves is the only writer, and removes all."""
        for parent in (self.folder, self.run_dir):
            for path in parent.glob(".tmp-*") if parent.is_dir() else ():
                named = _LEFTOVER.fullmatch(path.name)
                if named is None or (only_dead and is_alive(named["host"], int(named["pid"]))):
                    continue
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self, step: int) -> None:
        """Keeps the newest `keep_last` that look whole, and what is damaged among them: somebody may want to see it.

        Checkpoints of later steps than the one that was just saved are of a path that was left, by resuming from an
        earlier one: the next resume must not take them for this one's future."""
        whole = 0
        for saved, path in self._saved():
            if whole >= self._keep_last or saved > step:
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix != REPLACED and looks_whole(path, STATE):
                whole += 1

    # -- reading ------------------------------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole. Those that are not are passed over, with a warning."""
        for _, path in self._saved():
            try:
                return self.load(path).path
            except CheckpointDamaged as error:
                log.warning("Passing over a damaged checkpoint: %s", error)
        return None

    def load(self, path: Path | str) -> Checkpoint:
        """Reads a checkpoint's state and checks every byte of its files. Raises `CheckpointDamaged`."""
        path = Path(path)
        state = read_state(path, STATE)
        for name, told in state["files"].items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointDamaged(f"{path / STATE}: {name} leads out of it")
            try:
                found = described(path / name)
            except OSError as error:
                raise CheckpointDamaged(f"{path / name}: {error.strerror or error}") from error
            if wrong := misfit(told, found):
                raise CheckpointDamaged(f"{path / name}: {wrong}")
        return Checkpoint(path=path, state={key: state[key] for key in state if key not in RESERVED or key == "step"})

    def oldest(self) -> int:
        """The step that a resume falls back to at worst. The start of the run is one, until there are two others (or as
        many as are kept): a first checkpoint that is damaged must not be the end of it."""
        whole = [step for step, path in self._saved() if path.suffix != REPLACED and looks_whole(path, STATE)]
        return min(whole) if len(whole) >= min(self._keep_last, FALLBACKS) else 0

    def best(self) -> Best | None:
        """The best weights so far, with the score that they were kept for."""
        for path in (self.run_dir / BEST, self.run_dir / f"{BEST}{REPLACED}"):
            with contextlib.suppress(CheckpointDamaged):
                told = read_state(path, BEST_STATE)
                versions = (told["version_min"], told["version_max"]) if "version_max" in told else None
                return Best(path=path, step=int(told["step"]), score=float(told["score"]), versions=versions)
        return None

    def newest(self) -> Path | None:
        """A HF folder with the newest weights: the final ones, or those of a checkpoint that is further. They are not
        read through."""
        found: list[tuple[float, bool, Path]] = [(step, path.suffix != REPLACED, path) for step, path in self._saved()]
        for path in (self.run_dir / FINAL, self.run_dir / f"{FINAL}{REPLACED}"):
            step: float = math.inf  # of one that somebody put there
            with contextlib.suppress(CheckpointDamaged):
                step = read_state(path, FINAL_STATE)["step"]
            found.append((step, path.suffix != REPLACED, path))
        there = [one for one in found if (one[2] / HF_CONFIG).is_file()]
        return max(there, key=lambda one: (one[0], one[1], one[2].parent == self.run_dir))[2] if there else None

    def _saved(self) -> list[tuple[int, Path]]:
        """Newest first, each with its step."""
        return [(step, path) for step, paths in reversed(saved_steps(self.run_dir).items()) for path in paths]


class RunLock:
    """Keeps two runs out of one directory. The kernel lets go of it when its process ends, however that happens."""

    def __init__(self, run_dir: Path | str) -> None:
        self._path = Path(run_dir) / LOCK
        self._file: int | None = None

    def acquire(self) -> None:
        """Raises `RunLocked`, which names the process that holds it."""
        private_folder(self._path.parent)
        file = open_private(self._path, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 1024).decode(errors="replace").strip() or "another process"
            os.close(file)
            raise RunLocked(
                f"{self._path.parent} is in use by {holder}: wait for it, end it, or give another run_dir"
            ) from None
        except BaseException:
            os.close(file)
            raise
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def any_whole(run_dir: Path) -> bool:
    """Whether a run has a checkpoint that it can go on from, as far as shows without reading it through."""
    return any(looks_whole(path, STATE) for paths in saved_steps(run_dir).values() for path in paths)
