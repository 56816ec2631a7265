"""A checkpoint is whole or absent: after kills, full disks, damage, and with two runs in one folder."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from freewheel.data.tasks.word_problems import model_path
from freewheel.queue.ledger import Frontier
from freewheel.sync.device import DevicePacker
from freewheel.sync.weights import Packer, pack
from freewheel.trainer import checkpoint as module
from freewheel.trainer.checkpoint import (
    STATE,
    TRAINING,
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointStore,
    Resumed,
    RunLock,
    RunLocked,
    RunSaver,
    visible_damage,
)
from freewheel.trainer.options import OptimizerConfig
from freewheel.trainer.sharded_checkpoint import read_rows, write_rows
from freewheel.trainer.torch_backend import TorchBackend
from freewheel.utils.files import private_folder

from .groups import random_group


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 8), float(step)), "adam.exp_avg": torch.arange(4.0) + step}


def write_hf(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a b c")


def write_all(step: int) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        write_hf(folder)
        write_rows(private_folder(folder / TRAINING), tensors(step))

    return fill


def save(store: CheckpointStore, step: int, **more: Any) -> Path:
    return store.save(step, state={"version": step, **more}, fill=write_all(step))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, keep_last=2)


def steps(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# -- what comes back --------------------------------------------------------------------------------------------------


def test_a_checkpoint_loads_what_was_saved_and_records_every_file(store: CheckpointStore):
    assert store.latest() is None and store.newest() is None
    state = {"frontier": {"low": 3, "ended": [5, 7]}, "rng": 2**63, "config": {"seed": 0}}
    path = store.save(40, state=state, fill=write_all(40))
    assert path == store.run_dir / "checkpoints" / "step_000040" == store.latest()
    loaded = store.load(path)
    assert loaded.step == 40 and state.items() <= loaded.state.items()
    assert set(loaded.state["files"]) == {"training/whole.safetensors", "config.json", "tokenizer/vocab.txt"}
    assert loaded.state["files"]["config.json"] == {"bytes": 2, "crc32": 0xA3A6BF43}
    found = read_rows(loaded.tensor_files())
    assert found.keys() == tensors(40).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(40).items())


# -- which are kept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "kept"),
    [
        ([1, 2, 3, 1000000], ["step_000003", "step_1000000"]),
        ([1, 1], ["step_000001"]),
        ([20, 40, 30], ["step_000020", "step_000030"]),  # 30 by a run that resumed from 20
    ],
    ids=["the newest", "the same step again", "none of a path that a resume has left"],
)
def test_the_last_checkpoints_are_kept(store: CheckpointStore, saved: list[int], kept: list[str]):
    for number, step in enumerate(saved):
        save(store, step, note=number)
    assert steps(store) == kept
    latest = store.latest()
    assert latest == store.folder / kept[-1] and store.load(latest).state["note"] == len(saved) - 1


def test_a_damaged_checkpoint_does_not_count_as_kept(store: CheckpointStore):
    save(store, 1)
    (save(store, 2) / "training/whole.safetensors").unlink()
    save(store, 3)
    assert store.load(store.folder / "step_000001").step == 1
    save(store, 4)
    assert steps(store) == ["step_000003", "step_000004"]


def test_a_resume_may_go_back_to_the_oldest_whole_checkpoint(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep_last=3)
    found = []
    for step in (10, 20, 30, 40):
        save(store, step)
        found.append(store.oldest())
    assert found == [0, 10, 10, 20], "if the only checkpoint were damaged, the run would start again"
    only = CheckpointStore(tmp_path / "one", keep_last=1)
    save(only, 10)
    assert only.oldest() == 10


def test_only_the_owner_can_read_a_checkpoint_whatever_the_umask(tmp_path: Path):
    before = os.umask(0o000)
    try:
        store = CheckpointStore(tmp_path, keep_last=2)
        save(store, 1)
        store.save_best(1, 0.5, write_hf)
        with RunLock(tmp_path / "run"):
            pass
    finally:
        os.umask(before)
    modes = {file: file.stat().st_mode & 0o777 for file in tmp_path.rglob("*")}
    assert len(modes) > 10
    assert all(mode == (0o700 if file.is_dir() else 0o600) for file, mode in modes.items()), modes


# -- damage -----------------------------------------------------------------------------------------------------------


HARMS: dict[str, Callable[[Path], Any]] = {
    "its checksum does not match": flip,
    "cut off: 1 of": lambda path: os.truncate(path, 1),
    "too long": lambda path: os.truncate(path, 10_000),
    "No such file or directory": Path.unlink,
}


@pytest.mark.parametrize("name", ["training/whole.safetensors", "config.json", "tokenizer/vocab.txt"])
@pytest.mark.parametrize(("said", "harm"), HARMS.items())
def test_a_checkpoint_with_a_damaged_file_is_skipped_for_the_previous_one(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, name: str, said: str, harm: Callable[[Path], Any]
):
    save(store, 1)
    path = save(store, 2)
    harm(path / name)
    assert store.latest() == store.folder / "step_000001"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"{path}: {name}: " in caplog.text and said in caplog.text
    with pytest.raises(CheckpointDamaged):
        store.load(path)
    shown = visible_damage(path)
    assert said in shown or (harm is flip and not shown), "the bytes are not read, only their number"
    assert store.oldest() == (0 if shown else 1)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"checksum": 1}', "null", "{", None])
def test_a_checkpoint_with_a_malformed_or_missing_state_is_skipped_for_the_previous_one(
    store: CheckpointStore, text: str | None
):
    save(store, 1)
    state = save(store, 2) / STATE
    state.unlink() if text is None else state.write_text(text)
    assert store.latest() == store.folder / "step_000001"
    assert visible_damage(state.parent).startswith(f"{state}: ") and store.oldest() == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 99}, "format 99"),
        ({"files": {"../../secret": {"bytes": 1, "crc32": 0}}}, "leads out of the checkpoint"),
    ],
)
def test_a_later_format_and_files_outside_the_checkpoint_are_refused(store: CheckpointStore, changes, said):
    path = save(store, 1) / STATE
    state = json.loads(path.read_text()) | changes
    del state["checksum"]
    path.write_text(json.dumps({**state, "checksum": module._checksum(state)}))
    with pytest.raises(CheckpointDamaged, match=said):
        store.load(path.parent)


# -- trouble while writing --------------------------------------------------------------------------------------------


def half(folder: Path) -> None:
    write_hf(folder)
    (folder / "more.json").write_text("{}")
    raise RuntimeError("killed")


def no_room(folder: Path) -> None:
    (folder / "half").write_bytes(b"x" * 1000)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("state", "fill", "said"),
    [
        ({}, no_room, r"step_000002.*No space left.*Only \d+ MB are free there"),
        ({}, half, "RuntimeError: killed"),
        ({"rng": object()}, write_hf, "JSON serializable"),
    ],
    ids=["a full disk", "files that cannot be written", "a state that is not JSON"],
)
def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(store: CheckpointStore, state, fill, said):
    save(store, 1)
    with pytest.raises(CheckpointFailed, match=said):
        store.save(2, state=state, fill=fill)
    assert steps(store) == ["step_000001"]
    assert store.latest() == store.folder / "step_000001"


def test_leftovers_of_a_killed_save_are_removed_by_the_next_save_and_not_by_readers(store: CheckpointStore):
    left = [store.folder / ".tmp-123-step_000009", store.run_dir / ".tmp-123-best"]
    for folder in left:
        folder.mkdir(parents=True)
        (folder / "state.json").write_bytes(b"half")
    assert CheckpointStore(store.run_dir, keep_last=2).latest() is None
    assert all(folder.exists() for folder in left)
    save(store, 1)
    assert not any(folder.exists() for folder in left)


class Killed(BaseException):
    """No code handles it."""


CHANGES = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "chmod")
"""Functions of `os` that pathlib and shutil use."""


def killable(real: Any, left: Iterator[int]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if next(left) <= 0:
            raise Killed
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("again", [False, True], ids=["the next step", "the same step again"])
def test_a_kill_before_any_change_to_the_disk_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch, again: bool):
    """Kill each call in turn that creates, moves, removes or syncs something."""
    newest, seen_newer = 2 if again else 3, False
    for last in range(1, 200):
        run = tmp_path / str(last)
        store = CheckpointStore(run, keep_last=2)
        for step in (1, 2):
            save(store, step)
        left = itertools.count(last, -1)
        with monkeypatch.context() as patch:
            for name in CHANGES:
                patch.setattr(os, name, killable(getattr(os, name), left))
            try:
                save(store, newest, note="newer")
                ended = True
            except Killed:
                ended = False
        found = CheckpointStore(run, keep_last=2)
        latest = found.latest()
        assert latest is not None
        loaded = found.load(latest)
        newer = loaded.state.get("note") == "newer"
        assert loaded.step == (newest if newer else 2)
        assert (read_rows(loaded.tensor_files())["w"] == loaded.step).all()
        assert newer or not seen_newer, "what is in place stays in place, however late the kill is"
        seen_newer = newer
        oldest = found.oldest()
        if again and not (found.folder / "step_000002").exists():
            assert oldest == 0, "while a checkpoint is replaced, only one counts"
        else:
            assert oldest == 1 or (oldest == 2 and newer and not again), (
                "the earlier one goes after the newer is in place"
            )
            assert found.load(found.folder / f"step_{oldest:06d}").step == oldest
        save(found, 4)
        assert found.load(found.latest() or "").step == 4
        if ended:
            break
    assert ended and newer and last > 10
    assert oldest == newest - 1, "the save that was not killed has removed what is no longer kept"


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_before_an_old_one_goes(
    store: CheckpointStore, monkeypatch
):
    """A power cut keeps what was synced, and any later rename."""
    fsync, replace, rmtree = os.fsync, Path.replace, module.shutil.rmtree
    synced: set[tuple[int, int]] = set()
    removed: list[str] = []

    def state(about: os.stat_result) -> tuple[int, int]:
        return about.st_ino, about.st_mtime_ns

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(state(os.fstat(descriptor)))

    def watched_replace(scratch: Path, target: Path) -> Path:
        unsynced = [path for path in (scratch, *scratch.rglob("*")) if state(path.stat()) not in synced]
        assert not unsynced
        return replace(scratch, target)

    def watched_rmtree(old: Path, **options: Any) -> None:
        if old.exists():
            assert state(old.parent.stat()) in synced
            removed.append(old.name)
        rmtree(old, **options)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    monkeypatch.setattr(module.shutil, "rmtree", watched_rmtree)
    for step in (1, 1, 2, 3):
        save(store, step)
    assert removed == [f"step_000001{module.REPLACED}", "step_000001"]


KILLED_AT_RANDOM = """
    import itertools, os, random, signal, sys, time
    import torch
    from freewheel.trainer.checkpoint import CheckpointStore
    from freewheel.trainer.sharded_checkpoint import read_rows, write_rows

    torch.set_num_threads(1)
    run_dir, rounds = sys.argv[1], int(sys.argv[2])
    draw = random.Random(0)
    store = CheckpointStore(run_dir, keep_last=2)

    def save(step):
        tensors = {f"w{n}": torch.full((20_000,), float(step)) for n in range(8)}

        def fill(folder):
            (folder / "training").mkdir()
            write_rows(folder / "training", tensors)

        store.save(step, state={"version": step}, fill=fill)

    save(0)
    for _ in range(rounds):
        before, saved = store.load(store.latest()).step, draw.choice([0, 1])
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            for step in itertools.count(before + 1):
                save(step)
                os.write(writer, b".")
                save(step)  # the same step again
        os.close(writer)
        os.read(reader, saved)  # wait for the child's first save, or do not wait
        time.sleep(draw.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        store = CheckpointStore(run_dir, keep_last=2)
        found = store.load(store.latest())
        assert found.step >= before + saved, (found.step, before, saved)
        for tensor in read_rows(found.tensor_files()).values():
            assert (tensor == found.step).all()
"""


def test_a_kill_at_any_instant_leaves_a_loadable_store(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED_AT_RANDOM), str(tmp_path), "25"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# -- the best, and the end --------------------------------------------------------------------------------------------


def test_the_best_weights_are_kept_with_their_score_until_better_ones_are_written(store: CheckpointStore):
    best = store.run_dir / "best"

    def kept() -> tuple[int, float]:
        weights = read_rows([best / "training/whole.safetensors"])["w"]
        return json.loads((best / "best.json").read_text())["step"], float(weights[0, 0])

    for step, score, wanted in ((10, 0.5, 10), (20, 0.5, 10), (30, float("nan"), 10), (40, 0.9, 40)):
        assert store.save_best(step, score, write_all(step)) is (wanted == step)
        assert kept() == (wanted, wanted)
    with pytest.raises(CheckpointFailed, match="best"):
        store.save_best(50, 1.0, no_room)
    for step in range(50, 55):
        save(store, step)
    assert kept() == (40, 40), "neither a failure nor pruning removes it"
    assert sorted(path.name for path in store.run_dir.iterdir()) == ["best", "checkpoints"]


def test_the_newest_weights_are_those_of_the_last_step(store: CheckpointStore):
    final = store.run_dir / "final"
    for step in (2, 10):
        assert save(store, step) == store.newest()
    store.export(final, 9, write_hf)
    assert store.newest() == store.folder / "step_000010"
    store.export(final, 10, write_hf)
    with pytest.raises(CheckpointFailed, match="the export of step 12"):
        store.export(final, 12, half)
    assert store.newest() == final and json.loads((final / "final.json").read_text())["step"] == 10
    save(store, 11)
    assert store.newest() == store.folder / "step_000011" and not final.exists(), "a run that continues has no end"


# -- a run's checkpoints ----------------------------------------------------------------------------------------------

FRONTIER = Frontier(low=7, ended=(9, 12), trained=8, abandoned={"zero_variance": 2})
EMBEDDED = AutoModelForCausalLM.from_pretrained(model_path())


def make_backend() -> TorchBackend:
    model = AutoModelForCausalLM.from_pretrained(model_path())
    return TorchBackend(model, optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=16384)


@pytest.fixture
def saver(store: CheckpointStore) -> RunSaver:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    return RunSaver(store=store, model=EMBEDDED, tokenizer=tokenizer, config={"seed": 3})


def train(backend: TorchBackend, step: int) -> None:
    backend.step([random_group(ordinal, seed=step) for ordinal in range(2)], version=step, step=step, total_steps=9)


def is_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("packer", [pack, DevicePacker(bucket_bytes=1 << 20, share=lambda buffer: {})])
def test_a_checkpoint_is_an_ordinary_model_and_continues_bit_for_bit(
    store: CheckpointStore, saver: RunSaver, packer: Packer
) -> None:
    backend = make_backend()
    train(backend, 0)
    at_1 = {name: tensor.clone() for name, tensor in backend.weights().items()}
    state, weights = backend.state(), packer(backend.weights())
    train(backend, 1)  # which must not change what is saved
    assert saver.save(4, 2, FRONTIER, state, weights) == 0
    assert saver.save_best(4, 0.5, weights, versions=(1, 2))
    path = store.folder / "step_000004"
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"], "vLLM loads every such file"
    model = AutoModelForCausalLM.from_pretrained(path)
    assert is_equal({name: model.state_dict()[name] for name in at_1}, at_1)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert not torch.equal(model.lm_head.weight, EMBEDDED.lm_head.weight)
    assert model.generation_config.eos_token_id == EMBEDDED.generation_config.eos_token_id
    text = "Tom has 6 apples"
    assert AutoTokenizer.from_pretrained(path)(text) == AutoTokenizer.from_pretrained(model_path())(text)

    best = store.run_dir / "best"
    told = json.loads((best / "best.json").read_text())
    assert (told["step"], told["version_min"], told["version_max"]) == (4, 1, 2)
    assert (best / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()

    found = store.load(path)
    assert Resumed.of(path, found.state) == Resumed(path=str(path), step=4, version=2, frontier=FRONTIER)
    assert found.state["config"] == {"seed": 3}
    resumed = make_backend()
    resumed.load_files(found.tensor_files(), found.state["backend"])
    train(resumed, 1)
    assert is_equal(resumed.weights(), backend.weights())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_records_the_type_of_its_weights(tmp_path: Path, saver: RunSaver, dtype: torch.dtype) -> None:
    saver.write_hf(tmp_path / "model", pack({name: one.to(dtype) for name, one in EMBEDDED.named_parameters()}))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").dtype is dtype


# -- the lock ---------------------------------------------------------------------------------------------------------


def test_a_lock_names_its_process_and_ends_with_it(tmp_path: Path):
    code = "import sys, time; from freewheel.trainer.checkpoint import RunLock; RunLock(sys.argv[1]).__enter__()"
    code += "; print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(RunLocked, match=rf"{tmp_path} is in use by process {holder.pid} on"), RunLock(tmp_path):
            pass
        holder.kill()
    for _ in range(2):
        with RunLock(tmp_path), pytest.raises(RunLocked, match=f"process {os.getpid()} "), RunLock(tmp_path):
            pass
