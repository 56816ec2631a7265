"""Several ranks learn what one process learns, up to rounding, and any number of ranks reads what some have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freewheel.errors import DataError
from freewheel.trainer.checkpoint import TRAINING, Checkpoint
from freewheel.trainer.sharded_checkpoint import WHOLE, own_rows, read_rows

from .groups import CUSTOM, make_group, make_response, random_group
from .processes import (
    Arrays,
    Learnt,
    arrays,
    learn,
    learn_and_write,
    learn_from,
    learn_poisoned,
    loaded_from,
    make_backend,
    processes,
    refused,
    seen_by_rank_0_only,
    whole_state,
    write_during_steps,
)
from .test_torch_backend import poisoned

pytestmark = pytest.mark.timeout(300)

GROUPS = [random_group(ordinal, holes=True, lengths=(2, 14), failed=(1,) * (ordinal == 2)) for ordinal in range(5)]
STEPS = [GROUPS, GROUPS[:3], GROUPS[1:]]
FIRM = {"optimizer": {"eps": 1e-3}}
"""With AdamW's default ε, a gradient of 1e-8 makes as large an update as one of 1, and rounding decides its sign."""


def same(found: Learnt, wanted: Learnt) -> None:
    """The first gradients agree up to rounding. Later ones belong to weights that rounding has moved."""
    assert len(found.gradients) == len(wanted.gradients) > 0
    for update, (mine, its) in enumerate(zip(found.gradients, wanted.gradients, strict=True)):
        assert mine.keys() == its.keys()
        for name, gradient in its.items():
            within = (5e-4 if update else 1e-6) * max(1.0, np.abs(gradient).max())
            np.testing.assert_allclose(mine[name], gradient, atol=within, err_msg=f"{name} of update {update}")
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        np.testing.assert_allclose(found.weights[name], weight, atol=2e-4, err_msg=name)
    assert found.updates == wanted.updates
    for mine, its in zip(found.metrics, wanted.metrics, strict=True):
        assert mine == pytest.approx(its, rel=1e-3, abs=1e-5)


def bitwise(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(array, other[name]) for name, array in one.items())


ALGORITHMS: list[dict[str, Any]] = [
    {},
    {"name": "ppo"},
    {"name": "ppo", "normalise": "none", "mini_batches": 2, "updates_per_batch": 2, "value_clip": 0.2},
    {"ratio": "sequence", "kl_coef": 0.1, "entropy_coef": 0.01, "aggregation": "sequence_mean"},
    {"proximal": "recomputed", "importance": "sequence_truncate", "updates_per_batch": 2, "mini_batches": 2},
    CUSTOM,
]


@pytest.mark.parametrize(
    "options",
    [
        *({"algorithm": algorithm} for algorithm in ALGORITHMS),
        {"model": "llama"},
        {"model": "gpt2", "activation_checkpointing": True},
        {"activation_checkpointing": True, "algorithm": {"name": "ppo"}},
        {"lora": {"rank": 2}, "algorithm": {"kl_coef": 0.1}},
        {"share_prompts": False, "micro_batch_tokens": 16},
        {"crowded": True, "micro_batch_tokens": 24, "algorithm": {"name": "ppo"}},
    ],
    ids=str,
)
def test_two_ranks_learn_what_one_process_learns(options: dict[str, Any]) -> None:
    lead, other = processes(2).run(learn, STEPS, **FIRM, **options)
    same(lead, learn(None, STEPS, **FIRM, **options))
    assert lead.metrics == other.metrics and lead.updates == other.updates
    assert not other.weights, "what is published is rank 0's alone"


@pytest.mark.parametrize("algorithm", [{}, {"name": "ppo"}], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_without_samples_changes_nothing(algorithm: dict[str, Any], world: int) -> None:
    """Two responses with a reward over three ranks, and one over two."""
    scored = make_group(0, [make_response([5, 6, 7], value=1.0), make_response([8], value=float("nan"))])
    few = [scored] if world == 2 else [scored, make_group(1, [make_response([3, 4], value=0.5)])]
    options = {"algorithm": {**algorithm, "normalise": "none"}, **FIRM}
    lead, *others = processes(world).run(learn, [few, GROUPS, few], **options)
    same(lead, learn(None, [few, GROUPS, few], **options))
    assert all(other.metrics == lead.metrics for other in others)


POISONED = [poisoned(GROUPS[0]), *GROUPS[1:]]
"""One sample is bad, and one rank has it."""


def test_a_gradient_that_is_not_finite_on_one_rank_is_applied_on_none() -> None:
    for before, after, metrics in processes(2).run(learn_poisoned, GROUPS, POISONED):
        assert bitwise(before, after)
        assert metrics["actor/skipped_nonfinite"] == 1 and "actor/loss" not in metrics
        assert all(map(np.isfinite, metrics.values()))


def test_three_refused_updates_in_a_row_end_the_run_on_every_rank() -> None:
    lead, other = processes(2).run(learn, [POISONED] * 4)
    assert "3 updates in a row" in lead.error and lead.error == other.error
    assert lead.updates == other.updates == 0


def test_the_same_groups_give_the_same_weights_to_the_bit_in_any_order() -> None:
    first, *_ = processes(3).run(learn, [GROUPS, GROUPS])
    again, *_ = processes(3).run(learn, [GROUPS[::-1], GROUPS[::-1]])
    assert bitwise(first.weights, again.weights)


def test_in_bfloat16_gradients_are_those_of_float32_within_its_rounding() -> None:
    lead, _ = processes(2).run(learn, [GROUPS], dtype="bfloat16", algorithm={"name": "ppo"})
    wanted = learn(None, [GROUPS], algorithm={"name": "ppo"})
    for mine, its in zip(lead.gradients, wanted.gradients, strict=True):
        flat, exact = (np.concatenate([one[name].ravel() for name in its]) for one in (mine, its))
        assert np.linalg.norm(flat - exact) < 0.1 * np.linalg.norm(exact)
    assert all(weight.dtype == np.float32 for weight in lead.weights.values())


# -- training state in shards ------------------------------------------------------------------------------------------

PPO: dict[str, Any] = {"algorithm": {"name": "ppo"}, "optimizer": {"eps": 1e-3}}
"""A critic's head has one bias, so one of two ranks holds nothing of it."""


def saved_by(world: int, folder: Path, **options: Any) -> tuple[list[str], Arrays]:
    """Return the files and the complete state after two steps. `world`: 1 for one process without a group."""
    (folder / TRAINING).mkdir()
    if world == 1:
        backend = make_backend(None, **options)
        learn(None, [GROUPS, GROUPS], backend=backend)
        assert backend.state().write(folder / TRAINING) == WHOLE
        whole = whole_state(backend)
    else:
        whole, *_ = processes(world).run(learn_and_write, [GROUPS, GROUPS], str(folder / TRAINING), **options)
    files = Checkpoint(path=folder, state={}).tensor_files()
    sizes = [file.stat().st_size for file in files]
    assert len(files) == world and max(sizes) < 1.4 * sum(sizes) / world, "each rank writes its share"
    return list(map(str, files)), whole


@pytest.mark.parametrize(
    ("writers", "readers", "options"),
    [(2, 1, PPO), (2, 2, PPO), (2, 3, PPO), (1, 2, PPO), (1, 2, {"lora": {"rank": 2}})],
    ids=str,
)
def test_any_number_of_ranks_loads_what_any_number_saved(
    tmp_path: Path, writers: int, readers: int, options: dict[str, Any]
) -> None:
    files, whole = saved_by(writers, tmp_path, **options)
    if readers == 1:
        found = loaded_from(None, files, **options)
    else:
        found, *_ = processes(readers).run(loaded_from, files, **options)
    assert bitwise(found, whole)


def test_training_continues_the_same_with_another_number_of_ranks(tmp_path: Path) -> None:
    files, _ = saved_by(2, tmp_path, **PPO)
    lead, *_ = processes(3).run(learn_from, files, [GROUPS[:3], GROUPS], **PPO)
    same(lead, learn_from(None, files, [GROUPS[:3], GROUPS], **PPO))


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
    names, _ = saved_by(2, tmp_path)
    first, second = map(Path, names)
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
    files, _ = saved_by(2, tmp_path)
    first, second = processes(2).run(seen_by_rank_0_only, files)
    assert first == second and first.startswith("rank 1: ")


def test_a_state_of_another_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    files, _ = saved_by(2, tmp_path, model="llama")
    for error in processes(2).run(refused, files):
        assert "resume with the model and the settings" in error
