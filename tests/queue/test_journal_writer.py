"""The journal's writer: order, group commit, a full disk, a broken file, and a close that always ends."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from freewheel.data.group import Ticket
from freewheel.queue import journal as journal_writer
from freewheel.queue.journal import (
    Committed,
    Event,
    Journal,
    JournalClosed,
    JournalDamaged,
    JournalFull,
    JournalWriter,
    Reserved,
    Stored,
    Took,
    is_temporary,
)

pytestmark = pytest.mark.timeout(60)


def group(sequence: int, size: int = 100) -> Stored:
    return Stored(Ticket(sequence, sequence), 0, bytes([sequence % 251]) * size, 1.0)


class Scripted:
    """A journal whose appends fail as they are told, and can be held up."""

    path = Path("/run/journal.sqlite")

    def __init__(self) -> None:
        self.appended: list[list[Event]] = []
        self.error: Exception | None = None
        self.tried = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()
        self.closed = False

    def append(self, events: Sequence[Event]) -> None:
        self.tried.release()
        self.go.wait()
        if self.error is not None:
            raise self.error
        self.appended.append(list(events))

    def close(self) -> None:
        self.closed = True


def writer_of(journal: Any) -> JournalWriter:
    return JournalWriter(journal=journal)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.01)


async def tried(journal: Scripted, times: int = 1) -> None:
    for _ in range(times):
        await asyncio.to_thread(journal.tried.acquire)


# -- decisions --------------------------------------------------------------------------------------------------------


async def job(*events: Event, work: Any = None) -> journal_writer._Job:
    return journal_writer._Job(asyncio.get_running_loop().create_future(), events=events, work=work)


async def test_a_transaction_takes_all_writes_up_to_its_size_and_one_at_least(monkeypatch: pytest.MonkeyPatch):
    small, large, none = await job(group(1, 10), group(2, 10)), await job(group(3, 90)), await job(Reserved(5))
    monkeypatch.setattr(journal_writer, "TRANSACTION_BYTES", 40)
    assert journal_writer._choose_batch([small, none, small]) == [small, none, small]
    assert journal_writer._choose_batch([small, none, large]) == [small, none]
    assert journal_writer._choose_batch([large, small]) == [large]
    assert journal_writer._choose_batch([]) == []


async def test_a_read_comes_after_what_was_written_before_and_alone():
    write, read = await job(group(1)), await job(work=lambda journal: None)
    assert journal_writer._choose_batch([write, read, write]) == [write]
    assert journal_writer._choose_batch([read, read, write]) == [read]


def test_no_room_and_a_lock_pass_and_damage_does_not():
    locked = sqlite3.OperationalError("database is locked")
    locked.sqlite_errorcode = sqlite3.SQLITE_BUSY
    assert is_temporary(JournalFull("no room")) and is_temporary(locked)
    for lasting in (JournalDamaged("garbled"), AssertionError(), OSError(5, "EIO")):
        assert not is_temporary(lasting)


# -- writing ----------------------------------------------------------------------------------------------------------


async def test_a_resolved_write_is_in_the_file(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    writer = writer_of(Journal(path))
    await writer.write(group(0), group(1))
    reader = Journal(path, readonly=True)
    assert list(reader.stored()) == [group(0), group(1)]
    reader.close()
    await writer.close()


async def test_the_order_of_calls_is_the_order_on_disk_and_what_gathers_goes_together():
    journal = Scripted()
    journal.go.clear()
    writer = writer_of(journal)
    events = [Reserved(one) for one in range(200)]
    writes = [writer.write(events[0])]
    await tried(journal)  # the first is being written
    writes += [writer.write(one) for one in events[1:]]
    journal.go.set()
    await asyncio.gather(*writes)
    assert [one for batch in journal.appended for one in batch] == events
    assert [len(batch) for batch in journal.appended] == [1, 199]
    await writer.close()


async def test_a_read_sees_all_that_was_written_before_it(tmp_path: Path):
    writer = writer_of(Journal(tmp_path / "journal.sqlite"))
    for step in range(1, 4):
        writer.write(group(step), Took(step, (Ticket(step, step),)), Committed(step, step, 0.0))
    assert await writer.read(lambda journal: [step.step for step in journal.steps(after=0)]) == [1, 2, 3]
    await writer.close()


async def test_a_read_that_fails_tells_its_caller_alone(tmp_path: Path):
    writer = writer_of(Journal(tmp_path / "journal.sqlite"))
    with pytest.raises(ZeroDivisionError):
        await writer.read(lambda journal: 1 // 0)
    await writer.write(group(0))
    assert await writer.read(lambda journal: len(list(journal.stored()))) == 1
    await writer.close()


async def test_a_write_that_nobody_waits_for_any_more_is_written_all_the_same():
    journal = Scripted()
    journal.go.clear()
    writer = writer_of(journal)
    write = writer.write(Reserved(1))
    write.cancel()
    journal.go.set()
    await writer.flush()
    assert [one for batch in journal.appended for one in batch] == [Reserved(1)]
    await writer.close()


# -- no room ----------------------------------------------------------------------------------------------------------


async def test_without_room_it_pauses_says_why_once_and_goes_on_in_order(caplog: pytest.LogCaptureFixture):
    journal = Scripted()
    journal.error = JournalFull("/run/journal.sqlite cannot be written: no room (0 MB free)")
    writer = writer_of(journal)
    first = writer.write(Reserved(1))
    await tried(journal, 3)
    second = writer.write(Reserved(2))
    assert writer.paused == str(journal.error)
    assert not first.done()
    journal.error = None
    await asyncio.gather(first, second)
    assert [one for batch in journal.appended for one in batch] == [Reserved(1), Reserved(2)]
    assert writer.paused == ""
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 1
    assert "can be written again" in caplog.text
    await writer.close()


async def test_on_a_disk_that_was_full_everything_is_written_in_the_end(small_disk: Path):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(18 * 2**20))
    writer = writer_of(Journal(small_disk / "journal.sqlite"))
    writes = [writer.write(group(one, 80_000)) for one in range(120)]
    while not writer.paused:
        assert not writes[-1].done(), "it was to be full"
        await asyncio.sleep(0.001)
    assert "journal.sqlite" in writer.paused and "MB free" in writer.paused
    ballast.unlink()
    await asyncio.gather(*writes)
    assert writer.paused == ""
    assert await writer.read(lambda journal: list(journal.stored())) == [group(one, 80_000) for one in range(120)]
    await writer.close()


async def test_a_close_without_room_ends_and_says_what_was_not_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal_writer, "RETRY_S", 3600.0)
    journal = Scripted()
    journal.error = JournalFull("no room (0 MB free)")
    writer = writer_of(journal)
    writes = [writer.write(Reserved(one)) for one in range(3)]
    await tried(journal)
    await writer.close()
    for write in writes:
        with pytest.raises(JournalClosed, match="0 MB free"):
            await write
    assert journal.closed


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_a_close_writes_what_is_buffered(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    writer = writer_of(Journal(path))
    writes = [writer.write(group(one)) for one in range(50)]
    await writer.close()
    assert all(write.done() and write.exception() is None for write in writes)
    journal = Journal(path)
    assert [one.ticket.sequence for one in journal.stored()] == list(range(50))
    journal.close()


async def test_what_makes_room_goes_ahead_of_what_there_is_no_room_for():
    journal = Scripted()
    journal.error = JournalFull("no room")
    writer = writer_of(journal)
    first = writer.write(Reserved(1))
    await tried(journal, 2)
    looking = asyncio.ensure_future(writer.read(lambda _: "after the write"))
    second = writer.write(Reserved(2))
    assert await writer.read(lambda _: "smaller", makes_room=True) == "smaller"
    assert not first.done() and not looking.done()
    journal.error = None
    await asyncio.gather(first, second)
    assert [one for transaction in journal.appended for one in transaction] == [Reserved(1), Reserved(2)]
    assert await looking == "after the write"
    await writer.close()


async def test_what_makes_room_keeps_its_place_while_there_is_room():
    journal = Scripted()
    writer = writer_of(journal)
    journal.go.clear()
    written = writer.write(Reserved(1))
    seen = asyncio.ensure_future(writer.read(lambda _: list(journal.appended), makes_room=True))
    await tried(journal)
    journal.go.set()
    await written
    assert await seen == [[Reserved(1)]]
    await writer.close()


async def test_after_the_close_a_write_and_a_read_are_refused_and_a_second_close_is_nothing():
    writer = writer_of(Scripted())
    await writer.close()
    await writer.close()
    with pytest.raises(JournalClosed, match="closed"):
        await writer.write(Reserved(1))
    with pytest.raises(JournalClosed, match="closed"):
        await writer.read(lambda journal: None)


async def test_a_disk_that_does_not_answer_keeps_no_close_from_ending(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal_writer, "CLOSE_S", 0.05)
    journal = Scripted()
    journal.go.clear()
    writer = writer_of(journal)
    writes = [writer.write(Reserved(one)) for one in range(2)]
    await tried(journal)
    await writer.close()
    for write in writes:
        with pytest.raises(JournalClosed, match="did not answer"):
            await write
    journal.go.set()  # it does, at last: nobody is told twice
    while not journal.closed:
        await asyncio.sleep(0.001)


async def test_after_damage_nothing_more_is_written_and_all_are_told(caplog: pytest.LogCaptureFixture):
    journal = Scripted()
    journal.error = JournalDamaged("/run/journal.sqlite is damaged")
    writer = writer_of(journal)
    with pytest.raises(JournalDamaged):
        await writer.write(Reserved(1))
    journal.error = None
    with pytest.raises(JournalDamaged):
        await writer.write(Reserved(2))
    assert journal.appended == [], "a later event without an earlier one would be another history"
    assert "cannot be written any more" in caplog.text
    await writer.close()


async def test_a_journal_damaged_under_a_live_writer_is_said(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    writer = writer_of(Journal(path))
    await writer.write(*(group(one, 80_000) for one in range(600)))  # more than the log holds: pages are in the file
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(65536)
        file.write(b"\xa5" * (size - 65536))
    with pytest.raises(JournalDamaged):
        await writer.read(
            lambda journal: [list(journal.steps(after=0)), list(journal.stored()), list(journal.failures())]
        )
    await writer.close()
