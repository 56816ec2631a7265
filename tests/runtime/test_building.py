"""Components are built from a configuration: classes, models, evaluation, and the queue with its journal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from freewheel.data.group import Ticket
from freewheel.data.tasks.word_problems import TASK, model_path
from freewheel.errors import ConfigError
from freewheel.observe.run_folder import JOURNAL
from freewheel.queue.journal import (
    CheckpointMark,
    Committed,
    Journal,
    JournalDamaged,
    JournalEvent,
    JournalFormat,
    Stored,
    Took,
)
from freewheel.queue.ledger import Frontier
from freewheel.rollout.engine_factories import count_parameters, load_causal_lm, load_model_config
from freewheel.rollout.evaluation import EvalResult
from freewheel.runtime.building import (
    OpenedQueue,
    RolloutSide,
    TrainSide,
    evaluation_metrics,
    load_tokenizer,
    open_queue,
    pad_token_id,
    stop_token_ids,
)
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.model_size import find_folder, model_folder
from freewheel.sync.weights import pack

from .pipeline import plan_of, small_config


def test_parameters_are_counted_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_path() / "config.json").read_text())
    shape, _ = load_model_config(str(tmp_path), trust_remote_code=False)
    model = load_causal_lm(str(model_path()), "float32", trust_remote_code=False)
    assert count_parameters(str(tmp_path), shape, trust_remote_code=False) == sum(
        one.numel() for one in model.parameters()
    )


def test_a_models_folder_and_tokens_come_from_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(small_config())
    task: Any = SimpleNamespace(name="mine", stop=(";",))
    semicolon = tokenizer(";", add_special_tokens=False)["input_ids"]
    found = stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=[5, 6]), task)
    assert set(found) == {tokenizer.eos_token_id, 5, 6, *semicolon}
    assert stop_token_ids(tokenizer, None, TASK) == (tokenizer.eos_token_id,)
    for pad, eos, expected in ((None, 3, 3), (0, 3, 0), (None, None, 0)):
        assert pad_token_id(SimpleNamespace(pad_token_id=pad, eos_token_id=eos)) == expected
    assert model_folder(small_config()) == str(model_path())
    assert model_folder(small_config(model={"path": "org/name"})) == "org/name"
    monkeypatch.setenv("HOME", str(model_path().parent))
    at_home = small_config(model={"path": f"~/{model_path().name}", "tokenizer": f"~/{model_path().name}"})
    assert str(find_folder(at_home)) == model_folder(at_home) == str(model_path())
    assert load_tokenizer(at_home).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ConfigError, match="2 tokens here, not one"):
        stop_token_ids(tokenizer, None, SimpleNamespace(name="mine", stop=("1+",)))  # type: ignore[arg-type]


def test_a_model_that_cannot_be_loaded_is_reported_by_its_key(tmp_path: Path) -> None:
    config = small_config(model={"path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"model\.path = .*: it cannot be loaded \(.*\): give a HF folder"):
        load_tokenizer(config)
    with pytest.raises(ConfigError, match=r"model\.path = .*: it cannot be loaded \(.*\): give a HF folder"):
        load_causal_lm(str(tmp_path), "auto", trust_remote_code=False)
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"model\.safetensors in it is cut short or damaged"):
        load_causal_lm(str(tmp_path), "auto", trust_remote_code=False)


def test_an_evaluation_reports_the_parts_of_its_reward_by_name() -> None:
    def share(scores: list[float], prompts: list[float]) -> EvalResult:
        values = np.array([scores]).T
        parts = tuple(({"correct": one, "prompts": other},) for one, other in zip(scores, prompts, strict=True))
        ones = np.ones(values.shape, np.int64)
        return EvalResult(scores=values, truncated=ones > 1, lengths=ones, versions=(3,), named_parts=parts)

    found = evaluation_metrics([share([1.0, 0.0], [9.0, 9.0]), None, share([0.0, 0.0], [9.0, 9.0])])
    assert found is not None
    assert (found["eval/correct"], found["eval/correct_se"]) == (0.25, pytest.approx(0.25))
    assert (found["eval/reward"], found["eval/reward_se"]) == (found["eval/correct"], found["eval/correct_se"])
    assert evaluation_metrics([None, None]) is None
    assert found["eval/prompts"] == 4, "a part may not take the place of what every evaluation reports"


# -- both sides of a run ----------------------------------------------------------------------------------------------


def train_side(config: TrainConfig, run_dir: Path, **changes: Any) -> TrainSide:
    plan = dataclasses.replace(plan_of(config), **changes)
    return TrainSide(config=config, plan=plan, run_dir=str(run_dir), resume=None)


@contextlib.asynccontextmanager
async def rollout_side(config: TrainConfig, **changes: Any) -> AsyncIterator[RolloutSide]:
    plan = dataclasses.replace(plan_of(config), **changes)
    side = RolloutSide(config=config, plan=plan, name="one", model_path=model_folder(config), version=0)
    try:
        yield side
    finally:
        await side.engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("said", "lora"), [("auto", None), ("same", None), ("same", {"rank": 2})])
async def test_trainer_and_engine_hold_the_same_bytes_and_the_plan_knows_how_many(
    tmp_path: Path, dtype: str, said: str, lora: Any
) -> None:
    """Also where `auto` means one thing on the trainer's device and another for the run."""
    config = small_config(model={"dtype": "auto" if said == "auto" else dtype, "lora": lora})
    side = train_side(config, tmp_path, dtype=dtype)
    weights = pack(side.backend.weights())
    if said == "same":
        held = sum(one.numel() * one.element_size() for one in side.backend.policy.model.parameters())
        # Adapters are estimated by the attention's matrices, and are a large part of so small a model.
        assert held == pytest.approx(side.plan.memory_trainer["weights"], rel=0.1)
    assert {entry.dtype for entry in weights.entries.values()} == {dtype}
    async with rollout_side(config, dtype=dtype) as side:
        assert await side.engine.update_weights(1, weights, verify=True) == weights.checksum


async def test_a_full_thread_pool_delays_neither_a_version_nor_the_end(tmp_path: Path) -> None:
    config = small_config()
    weights = pack(train_side(config, tmp_path).backend.weights())
    loop, gate = asyncio.get_running_loop(), threading.Event()
    pool = ThreadPoolExecutor(1)
    loop.set_default_executor(pool)
    taken = loop.run_in_executor(None, gate.wait, 60)
    try:
        async with asyncio.timeout(30), rollout_side(config) as side:
            assert await side.engine.update_weights(1, weights, verify=True) == weights.checksum
        assert not taken.done()
    finally:
        gate.set()
        await taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all", "lora"])
def test_an_export_has_the_dtype_of_the_models_files(tmp_path: Path, dtype: torch.dtype, lora: Any) -> None:
    given = tmp_path / "given"
    AutoModelForCausalLM.from_pretrained(model_path(), dtype=dtype).save_pretrained(given)
    AutoTokenizer.from_pretrained(model_path()).save_pretrained(given)
    side = train_side(small_config(model={"path": str(given), "lora": lora}), tmp_path)
    side.export(str(tmp_path / "final"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto").dtype is dtype
    assert {one.dtype for one in side.backend.policy.trainable().values()} == {torch.float32}


P = 4
BEGINNING = CheckpointMark()
STEP_1 = CheckpointMark(1, 1, Frontier(low=P, trained=P))


async def opened(folder: Path, checkpoint: CheckpointMark | None, **given: Any) -> OpenedQueue:
    in_flight = given.pop("in_flight", None)
    return await open_queue(small_config(**given), folder, total_prompts=64, checkpoint=checkpoint, in_flight=in_flight)


def write_one_step(folder: Path) -> Path:
    """Prompts 0 to 3 are trained on, 4 and 5 are queued."""
    tickets = tuple(Ticket(ordinal, ordinal, 0) for ordinal in range(P + 2))
    path = folder / JOURNAL
    stored: list[JournalEvent] = [Stored(ticket, 0, b"a group", 0.0) for ticket in tickets]
    with closing(Journal(path)) as journal:
        journal.append([*stored, Took(1, tickets[:P], 0), Committed(1, 1, 0.0)])
    return path


def overwrite(path: Path) -> None:
    path.write_bytes(b"no journal at all" * 100)


def damage_inside(path: Path) -> None:
    """It opens; reading it to its end shows it."""
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET body = x'c0' WHERE name = 'base'")
    db.close()


@pytest.mark.parametrize(
    ("steps", "checkpoint", "journal", "expected"),
    [(0, BEGINNING, True, (0, 0, 0)), (1, BEGINNING, True, (1, 2, P + 2)), (1, STEP_1, False, (1, 0, P))],
    ids=["a new run", "a resumed run", "without a journal"],
)
async def test_a_queue_starts_from_what_its_journal_and_the_checkpoint_have(
    tmp_path: Path, steps: int, checkpoint: CheckpointMark, journal: bool, expected: tuple[int, int, int]
) -> None:
    if steps and journal:
        write_one_step(tmp_path)
    found = await opened(tmp_path, checkpoint, journal={"enabled": journal})
    await found.queue.confirm_published(steps)
    assert any("trained again with the same groups" in note for note in found.notes) == bool(expected[1])
    ordinal = (await found.queue.admit("rollouter-0", want=2, load=0, wait_s=1.0, holding=[])).tickets[0].ordinal
    assert (found.queue.step, (await found.queue.stats())["queue_size"], ordinal) == expected
    await found.close()
    files = list(tmp_path.iterdir())
    assert bool(files) == journal
    assert all(file.stat().st_mode & 0o077 == 0 for file in files), "prompts and responses are nobody else's"


async def test_a_restarted_queue_knows_the_tickets_of_live_rollouters(tmp_path: Path) -> None:
    write_one_step(tmp_path)
    mine = Ticket(6, 6, 0)
    found = await opened(tmp_path, None, in_flight={"rollouter-0": [mine]})
    stats = await found.queue.stats()
    assert (found.queue.step, stats["queue_size"]) == (1, 2)
    await found.queue.confirm_published(1)
    (next_one, *_) = (await found.queue.admit("rollouter-1", want=1, load=0, wait_s=1.0, holding=[])).tickets
    assert next_one.ordinal == 7
    assert await found.queue.release_replica("rollouter-0") == 1
    await found.close()


@pytest.mark.parametrize("damage", [overwrite, damage_inside])
async def test_a_damaged_journal_is_set_aside_and_the_run_continues_from_the_checkpoint(
    tmp_path: Path, damage: Any
) -> None:
    path = write_one_step(tmp_path)
    damage(path)
    content = path.read_bytes()
    with pytest.raises(JournalDamaged):  # a live trainer builds on what was in it
        await opened(tmp_path, None)
    assert path.exists() and not list(tmp_path.glob("*.damaged-*"))
    found = await opened(tmp_path, STEP_1)
    assert (tmp_path / f"{JOURNAL}.damaged-1").read_bytes() == content
    assert f"kept as {JOURNAL}.damaged-1" in found.notes[0] and "from the checkpoint of step 1" in found.notes[0]
    assert (found.queue.step, (await found.queue.stats())["queue_size"]) == (1, 0)
    (next_one, *_) = (await found.queue.admit("rollouter-0", want=1, load=0, wait_s=1.0, holding=[])).tickets
    assert next_one.ordinal == P
    await found.close()


@pytest.mark.parametrize("checkpoint", [None, STEP_1])
async def test_a_journal_of_a_later_version_is_refused_and_left_alone(
    tmp_path: Path, checkpoint: CheckpointMark | None
) -> None:
    path = write_one_step(tmp_path)
    with closing(Journal(path)) as journal:
        journal._set("format", 1_000)
    with pytest.raises(JournalFormat, match="resume with the freewheel that wrote it"):
        await opened(tmp_path, checkpoint)
    assert path.exists() and not list(tmp_path.glob("*.damaged-*"))
