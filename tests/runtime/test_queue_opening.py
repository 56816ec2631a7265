"""A run directory gives a queue, whatever state its journal is in; what cannot be read is kept, and said."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from freewheel.data.group import Ticket
from freewheel.observe.run_folder import JOURNAL
from freewheel.queue.journal import (
    CheckpointMark,
    Committed,
    Event,
    Journal,
    JournalDamaged,
    JournalFormat,
    Stored,
    Took,
)
from freewheel.queue.ledger import Frontier
from freewheel.runtime.building import OpenedQueue, open_queue

from .pipeline import small_config

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
    journal = Journal(path)
    stored: list[Event] = [Stored(ticket, 0, b"a group", 0.0) for ticket in tickets]
    journal.append([*stored, Took(1, tickets[:P], 0), Committed(1, 1, 0.0)])
    journal.close()
    return path


def overwrite(path: Path) -> None:
    path.write_bytes(b"no journal at all" * 100)


def damage_inside(path: Path) -> None:
    """It opens; reading it to its end shows it."""
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET body = x'c0' WHERE name = 'base'")
    db.close()


DAMAGE = pytest.mark.parametrize("damage", [overwrite, damage_inside])


async def test_a_run_begins_with_a_journal_of_its_own(tmp_path: Path) -> None:
    found = await opened(tmp_path, BEGINNING)
    assert (found.queue.step, found.notes) == (0, [])
    assert (await found.queue.admit("rollouter-0", want=2, load=0, wait_s=1.0)).tickets[0].ordinal == 0
    await found.close()
    assert (tmp_path / JOURNAL).stat().st_mode & 0o077 == 0  # prompts and responses are nobody else's


async def test_a_resumed_run_goes_on_with_what_the_journal_has(tmp_path: Path) -> None:
    write_one_step(tmp_path)
    found = await opened(tmp_path, BEGINNING)
    assert (found.queue.step, (await found.queue.stats())["queue_size"]) == (1, 2)
    assert any("trained again with the same groups" in note for note in found.notes)
    await found.close()


async def test_a_queue_in_a_dead_ones_place_knows_what_live_rollouters_have(tmp_path: Path) -> None:
    write_one_step(tmp_path)
    mine = Ticket(6, 6, 0)
    found = await opened(tmp_path, None, in_flight={"rollouter-0": [mine]})
    stats = await found.queue.stats()
    assert (found.queue.step, stats["queue_size"]) == (1, 2)
    await found.queue.confirm_published(1)
    (next_one, *_) = (await found.queue.admit("rollouter-1", want=1, load=0, wait_s=1.0)).tickets
    assert next_one.ordinal == 7
    assert await found.queue.release_replica("rollouter-0") == 1
    await found.close()


@DAMAGE
async def test_a_damaged_journal_is_set_aside_with_a_note_and_the_checkpoint_is_gone_on_from(
    tmp_path: Path, damage: Any
) -> None:
    path = write_one_step(tmp_path)
    damage(path)
    bytes_ = path.read_bytes()
    found = await opened(tmp_path, STEP_1)
    assert (tmp_path / f"{JOURNAL}.damaged-1").read_bytes() == bytes_
    assert f"kept as {JOURNAL}.damaged-1" in found.notes[0]
    assert "from the checkpoint of step 1" in found.notes[0]
    assert (found.queue.step, (await found.queue.stats())["queue_size"]) == (1, 0)
    (next_one, *_) = (await found.queue.admit("rollouter-0", want=1, load=0, wait_s=1.0)).tickets
    assert next_one.ordinal == P
    await found.close()


@DAMAGE
async def test_a_queue_cannot_take_a_dead_ones_place_with_a_damaged_journal(tmp_path: Path, damage: Any) -> None:
    """A live trainer builds on what was in it. It stays where it is: a resume sets it aside."""
    path = write_one_step(tmp_path)
    damage(path)
    with pytest.raises(JournalDamaged):
        await opened(tmp_path, None)
    assert path.exists() and not list(tmp_path.glob("*.damaged-*"))
    found = await opened(tmp_path, STEP_1)  # and nobody has it locked
    await found.close()


@pytest.mark.parametrize("checkpoint", [None, STEP_1])
async def test_a_journal_of_a_later_freewheel_is_refused_and_left_alone(
    tmp_path: Path, checkpoint: CheckpointMark | None
) -> None:
    path = write_one_step(tmp_path)
    journal = Journal(path)
    journal._set("format", 1_000)
    journal.close()
    with pytest.raises(JournalFormat, match="resume with the freewheel that wrote it"):
        await opened(tmp_path, checkpoint)
    assert path.exists() and not list(tmp_path.glob("*.damaged-*"))


async def test_with_the_journal_off_the_checkpoint_is_all_there_is(tmp_path: Path) -> None:
    found = await opened(tmp_path, STEP_1, journal={"enabled": False})
    assert (found.queue.step, found.journal) == (1, None)
    (next_one, *_) = (await found.queue.admit("rollouter-0", want=1, load=0, wait_s=1.0)).tickets
    assert next_one.ordinal == P
    await found.close()
    assert not list(tmp_path.iterdir())
