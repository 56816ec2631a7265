"""The journal's writer: order, group commit, a full disk, a broken file, and a close that always ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

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
    """A journal whose appends can be made to fail or to wait."""

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


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.01)


async def tried(journal: Scripted, times: int = 1) -> None:
    for _ in range(times):
        assert await asyncio.to_thread(journal.tried.acquire, timeout=20.0), "the writer did not try to append"


def test_lack_of_room_and_a_lock_are_temporary_and_damage_is_not():
    locked = sqlite3.OperationalError("database is locked")
    locked.sqlite_errorcode = sqlite3.SQLITE_BUSY
    assert is_temporary(JournalFull("no room")) and is_temporary(locked)
    for lasting in (JournalDamaged("garbled"), AssertionError(), OSError(5, "EIO")):
        assert not is_temporary(lasting)


# -- writing ----------------------------------------------------------------------------------------------------------


async def test_a_resolved_write_is_in_the_file_and_a_read_sees_all_earlier_writes(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    writer = JournalWriter(journal=Journal(path))
    await writer.write(group(0), group(9))
    with contextlib.closing(Journal(path, readonly=True)) as reader:
        assert list(reader.stored()) == [group(0), group(9)]
    for step in range(1, 4):
        writer.write(group(step), Took(step, (Ticket(step, step),)), Committed(step, step, 0.0))
    with pytest.raises(ZeroDivisionError):  # only its caller sees the error
        await writer.read(lambda journal: 1 // 0)
    assert await writer.read(lambda journal: [step.step for step in journal.steps(after=0)]) == [1, 2, 3]
    writes = [writer.write(group(one)) for one in range(10, 60)]
    await writer.close()
    assert all(write.done() and write.exception() is None for write in writes), "a close writes the buffer"
    with contextlib.closing(Journal(path)) as journal:
        assert [one.ticket.sequence for one in journal.stored()] == [0, 9, *range(10, 60)]


async def test_a_transaction_takes_writes_up_to_its_size_and_a_read_goes_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal_writer, "TRANSACTION_BYTES", 40)
    journal = Scripted()
    journal.go.clear()
    writer = JournalWriter(journal=journal)
    writer.write(group(0, 90))  # larger than a transaction
    await tried(journal)
    for sequence, size in ((1, 10), (2, 10), (3, 30)):
        writer.write(group(sequence, size))
    seen = [asyncio.ensure_future(writer.read(lambda _: len(journal.appended), makes_room=flag)) for flag in (0, 1)]
    await asyncio.sleep(0)  # both reads are in the buffer
    last = writer.write(group(4, 5))
    journal.go.set()
    await last
    assert [[one.ticket.sequence for one in batch] for batch in journal.appended] == [[0], [1, 2], [3], [4]]
    assert [await one for one in seen] == [3, 3], "in their place, while there is room"
    await writer.close()


async def test_the_order_of_calls_is_the_order_on_disk_and_waiting_events_go_together():
    journal = Scripted()
    journal.go.clear()
    writer = JournalWriter(journal=journal)
    events = [Reserved(one) for one in range(200)]
    writes = [writer.write(events[0])]
    await tried(journal)  # the first is being written
    writes += [writer.write(one) for one in events[1:]]
    journal.go.set()
    await asyncio.gather(*writes)
    assert [one for batch in journal.appended for one in batch] == events
    assert [len(batch) for batch in journal.appended] == [1, 199]
    await writer.close()


async def test_a_write_that_nobody_awaits_any_more_is_still_written_and_followed_up():
    journal, durable = Scripted(), []
    journal.go.clear()
    writer = JournalWriter(journal=journal)
    write = writer.write(Reserved(1), on_durable=lambda: durable.append(1))
    write.cancel()
    journal.go.set()
    await writer.write()
    assert [one for batch in journal.appended for one in batch] == [Reserved(1)]
    assert durable == [1]
    await writer.close()


async def test_what_follows_a_write_runs_before_its_future_is_resolved_and_its_error_reaches_the_caller(
    caplog: pytest.LogCaptureFixture,
):
    journal, order = Scripted(), []
    writer = JournalWriter(journal=journal)
    write = writer.write(Reserved(1), on_durable=lambda: order.append("durable"))
    write.add_done_callback(lambda _: order.append("resolved"))
    await write
    await asyncio.sleep(0)
    assert order == ["durable", "resolved"]
    with pytest.raises(ZeroDivisionError):
        await writer.write(Reserved(2), on_durable=lambda: 1 // 0)
    assert "ZeroDivisionError" in caplog.text, "also where nobody waits"
    journal.error = JournalDamaged("gone")
    with pytest.raises(JournalDamaged):
        await writer.write(Reserved(3), on_durable=lambda: order.append("not durable"))
    assert order == ["durable", "resolved"]
    await writer.close()


# -- no room ----------------------------------------------------------------------------------------------------------


async def test_without_room_it_pauses_logs_why_once_and_continues_in_order(caplog: pytest.LogCaptureFixture):
    journal = Scripted()
    journal.error = JournalFull("/run/journal.sqlite cannot be written: no room (0 MB free)")
    writer = JournalWriter(journal=journal)
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


async def test_everything_is_written_once_a_full_disk_has_room(small_disk: Path):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(18 * 2**20))
    writer = JournalWriter(journal=Journal(small_disk / "journal.sqlite"))
    writes = [writer.write(group(one, 80_000)) for one in range(120)]
    while not writer.paused:
        assert not writes[-1].done(), "the disk should be full"
        await asyncio.sleep(0.001)
    assert "journal.sqlite" in writer.paused and "MB free" in writer.paused
    ballast.unlink()
    await asyncio.gather(*writes)
    assert writer.paused == ""
    assert await writer.read(lambda journal: list(journal.stored())) == [group(one, 80_000) for one in range(120)]
    await writer.close()


async def test_a_close_without_room_ends_and_fails_the_unwritten_events(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal_writer, "RETRY_S", 3600.0)
    journal = Scripted()
    journal.error = JournalFull("no room (0 MB free)")
    writer = JournalWriter(journal=journal)
    writes = [writer.write(Reserved(one)) for one in range(3)]
    await tried(journal)
    await writer.close()
    for write in writes:
        with pytest.raises(JournalClosed, match="0 MB free"):
            await write
    assert journal.closed


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_work_that_makes_room_goes_ahead_of_writes_without_room():
    journal = Scripted()
    journal.error = JournalFull("no room")
    writer = JournalWriter(journal=journal)
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


async def test_after_the_close_writes_and_reads_are_refused_and_a_second_close_does_nothing():
    writer = JournalWriter(journal=Scripted())
    await writer.close()
    await writer.close()
    with pytest.raises(JournalClosed, match="closed"):
        await writer.write(Reserved(1))
    with pytest.raises(JournalClosed, match="closed"):
        await writer.read(lambda journal: None)


async def test_a_close_ends_although_the_disk_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal_writer, "CLOSE_S", 0.05)
    journal = Scripted()
    journal.go.clear()
    writer = JournalWriter(journal=journal)
    writes = [writer.write(Reserved(one)) for one in range(2)]
    await tried(journal)
    await writer.close()
    for write in writes:
        with pytest.raises(JournalClosed, match="did not answer"):
            await write
    journal.go.set()  # it answers at last: no future is resolved twice
    while not journal.closed:
        await asyncio.sleep(0.001)


async def test_after_damage_nothing_more_is_written_and_every_caller_gets_the_error(caplog: pytest.LogCaptureFixture):
    journal = Scripted()
    journal.error = JournalDamaged("/run/journal.sqlite is damaged")
    writer = JournalWriter(journal=journal)
    with pytest.raises(JournalDamaged):
        await writer.write(Reserved(1))
    journal.error = None
    with pytest.raises(JournalDamaged):
        await writer.write(Reserved(2))
    assert journal.appended == [], "a later event must not be there without an earlier one"
    assert "cannot be written any more" in caplog.text
    await writer.close()


async def test_damage_under_a_live_writer_is_reported(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    writer = JournalWriter(journal=Journal(path))
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
