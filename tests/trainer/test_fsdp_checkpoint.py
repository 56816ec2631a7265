"""Training state in shards: written by some ranks, read by any number bit for bit, and never in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freewheel.errors import DataError
from freewheel.trainer.checkpoint import TRAINING, Checkpoint
from freewheel.trainer.sharded_checkpoint import WHOLE, own_rows, read_rows

from .processes import (
    Arrays,
    arrays,
    learn,
    learn_and_write,
    learn_from,
    loaded_from,
    make_backend,
    processes,
    refused,
    seen_by_rank_0_only,
    whole_state,
    write_during_steps,
)
from .test_fsdp import GROUPS, bitwise, same

pytestmark = pytest.mark.timeout(300)

PPO: dict[str, Any] = {"algorithm": {"name": "ppo"}, "optimizer": {"eps": 1e-3}}
"""A critic's head has one bias, so one of two ranks holds nothing of it."""


def saved_by(world: int, folder: Path, **options: Any) -> Arrays:
    """Return the complete state after two steps."""
    lead, *_ = processes(world).run(learn_and_write, [GROUPS, GROUPS], str(folder), **options)
    whole: Arrays = lead
    return whole


def test_every_rank_writes_a_safetensors_file(tmp_path: Path) -> None:
    whole = saved_by(2, tmp_path, **PPO)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["shard_00001_of_00002.safetensors", "shard_00002_of_00002.safetensors"]
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 0.7 * sum(sizes)
    assert bitwise(arrays(read_rows(files)), whole)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_number_of_ranks_loads_what_two_ranks_saved(tmp_path: Path, world: int) -> None:
    whole = saved_by(2, tmp_path, **PPO)
    files = sorted(tmp_path.iterdir())
    if world == 1:
        backend = make_backend(None, **PPO)
        backend.load_files(files, {"nonfinite": 1})
        found = whole_state(backend)
    else:
        found, *_ = processes(world).run(loaded_from, list(map(str, files)), **PPO)
    assert bitwise(found, whole)


@pytest.mark.parametrize("options", [PPO, {"lora": {"rank": 2}}], ids=str)
def test_two_ranks_load_what_one_process_saved(tmp_path: Path, options: dict[str, Any]) -> None:
    backend = make_backend(None, **options)
    learn(None, [GROUPS, GROUPS], backend=backend)
    (tmp_path / TRAINING).mkdir()
    assert backend.state().write(tmp_path / TRAINING) == WHOLE
    files = Checkpoint(path=tmp_path, state={"step": 2}).tensor_files()
    found, _ = processes(2).run(loaded_from, list(map(str, files)), **options)
    assert bitwise(found, whole_state(backend))


def test_training_continues_the_same_with_another_number_of_ranks(tmp_path: Path) -> None:
    saved_by(2, tmp_path, **PPO)
    files = list(map(str, sorted(tmp_path.iterdir())))
    lead, *_ = processes(3).run(learn_from, files, [GROUPS[:3], GROUPS], **PPO)
    backend = make_backend(None, **PPO)
    backend.load_files(sorted(tmp_path.iterdir()), {"nonfinite": 0})
    same(lead, learn(None, [GROUPS[:3], GROUPS], start=2, backend=backend))


def test_a_state_is_written_as_it_was_copied_while_training_continues(tmp_path: Path) -> None:
    lead, _ = processes(2).run(write_during_steps, GROUPS, str(tmp_path))
    before, after = lead
    assert not bitwise(before, after)
    assert bitwise(arrays(read_rows(sorted(tmp_path.iterdir()))), before)


@given(count=st.integers(0, 50), size=st.integers(1, 12))
def test_rows_are_distributed_as_torch_does(count: int, size: int) -> None:
    found = [list(own_rows(count, rank, size)) for rank in range(size)]
    chunks = [part.tolist() for part in torch.arange(count).chunk(size)] if count else []
    assert found == chunks + [[]] * (size - len(chunks))


def test_a_shard_that_is_missing_or_cut_off_is_refused(tmp_path: Path) -> None:
    saved_by(2, tmp_path)
    first, second = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match="a shard is missing"):
        read_rows([first])
    for error in processes(2).run(refused, [str(second)]):
        assert "a shard is missing" in error
    second.write_bytes(second.read_bytes()[:-8])
    with pytest.raises(DataError, match="cannot be read"):
        read_rows([first, second])
    with pytest.raises(DataError, match="no training state"):
        read_rows([])


def test_all_ranks_report_a_rank_that_cannot_see_the_files(tmp_path: Path) -> None:
    saved_by(2, tmp_path)
    files = list(map(str, sorted(tmp_path.iterdir())))
    first, second = processes(2).run(seen_by_rank_0_only, files)
    assert first == second and first.startswith("rank 1: ")


def test_a_state_of_another_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    saved_by(2, tmp_path, model="llama")
    for error in processes(2).run(refused, list(map(str, sorted(tmp_path.iterdir())))):
        assert "resume with the model and the settings" in error
