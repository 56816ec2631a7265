"""The journal's writer: order, one transaction for many writes, a full disk, a broken file, and a close that ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from freewheel.data.group import Ticket
from freewheel.queue import journal as journal_module
from freewheel.queue.journal import (
    Journal,
    JournalClosed,
    JournalDamaged,
    JournalEvent,
    JournalFull,
    JournalWriter,
    Reserved,
    Stored,
    Took,
)

pytestmark = pytest.mark.timeout(60)

FULL = JournalFull("/run/journal.sqlite cannot be written: no room (0 MB free)")


def group(sequence: int, size: int = 100) -> Stored:
    return Stored(Ticket(sequence, sequence), 0, bytes([sequence % 251]) * size, 1.0)


class Scripted:
    """A journal whose appends wait for `go`, and fail while `error` is set."""

    path = Path("/run/journal.sqlite")

    def __init__(self) -> None:
        self.appended: list[list[JournalEvent]] = []
        self.error: Exception | None = None
        self.attempts = threading.Semaphore(0)
        self.go = threading.Event()
        self.closed = threading.Event()

    def append(self, events: Sequence[JournalEvent]) -> None:
        self.attempts.release()
        self.go.wait()
        if self.error is not None:
            raise self.error
        self.appended.append(list(events))

    def close(self) -> None:
        self.closed.set()

    async def until_tried(self, times: int = 1) -> None:
        for _ in range(times):
            assert await asyncio.to_thread(self.attempts.acquire, timeout=20.0), "the writer did not try to append"

    @property
    def events(self) -> list[JournalEvent]:
        return [event for batch in self.appended for event in batch]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.01)


@pytest.fixture
def journal() -> Scripted:
    return Scripted()


@pytest.fixture
async def writer(journal: Scripted) -> AsyncIterator[JournalWriter]:
    """Its disk waits until the test sets `journal.go`."""
    one = JournalWriter(journal=journal)
    yield one
    journal.go.set()
    await one.close()


# -- writing ----------------------------------------------------------------------------------------------------------


async def test_a_resolved_write_is_in_the_file_and_a_read_sees_all_earlier_writes(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    writer = JournalWriter(journal=Journal(path))
    await writer.write(group(0), group(9))
    with contextlib.closing(Journal(path, readonly=True)) as reader:
        assert list(reader.stored()) == [group(0), group(9)]
    for step in range(1, 4):
        writer.write(group(step), Took(step, (Ticket(step, step),)))
    with pytest.raises(ZeroDivisionError):  # only its caller sees the error
        await writer.read(lambda journal: 1 // 0)
    assert await writer.read(lambda journal: [step.step for step in journal.steps(after=0)]) == [1, 2, 3]
    writes = [writer.write(group(one)) for one in range(10, 60)]
    await writer.close()
    assert all(write.done() and write.exception() is None for write in writes), "a close writes the buffer"
    with contextlib.closing(Journal(path)) as journal:
        assert [one.ticket.sequence for one in journal.stored()] == [0, 9, *range(10, 60)]


async def test_a_transaction_takes_waiting_writes_up_to_its_size_in_order_and_a_read_goes_alone(
    journal: Scripted, writer: JournalWriter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal_module, "TRANSACTION_BYTES", 40)
    writer.write(group(0, 90))  # larger than a transaction
    await journal.until_tried()
    for sequence, size in ((1, 10), (2, 10), (3, 30)):
        writer.write(group(sequence, size))
    reads = [asyncio.ensure_future(writer.read(lambda _: len(journal.appended), makes_room=flag)) for flag in (0, 1)]
    await asyncio.sleep(0)  # both reads are in the buffer
    writes = [writer.write(group(4, 5)), *(writer.write(Reserved(one)) for one in range(200))]
    journal.go.set()
    await asyncio.gather(*writes)
    batches = [[one.ticket.sequence for one in batch if isinstance(one, Stored)] for batch in journal.appended]
    assert batches == [[0], [1, 2], [3], [4]]
    assert journal.events[-200:] == [Reserved(one) for one in range(200)]
    assert [await one for one in reads] == [3, 3], "a read that makes room waits too, while there is room"


async def test_on_durable_runs_before_the_future_is_resolved_and_also_if_nobody_waits(
    journal: Scripted, writer: JournalWriter, caplog: pytest.LogCaptureFixture
):
    order: list[str] = []
    writer.write(Reserved(1), on_durable=lambda: order.append("unawaited")).cancel()
    write = writer.write(Reserved(2), on_durable=lambda: order.append("durable"))
    write.add_done_callback(lambda _: order.append("resolved"))
    journal.go.set()
    await write
    await asyncio.sleep(0)
    assert order == ["unawaited", "durable", "resolved"] and journal.events == [Reserved(1), Reserved(2)]
    with pytest.raises(ZeroDivisionError):
        await writer.write(Reserved(3), on_durable=lambda: 1 // 0)
    assert "ZeroDivisionError" in caplog.text, "also if nobody waits"


# -- no room ----------------------------------------------------------------------------------------------------------


async def test_without_room_the_writer_pauses_logs_why_once_and_continues_in_order(
    journal: Scripted, writer: JournalWriter, caplog: pytest.LogCaptureFixture
):
    journal.error = FULL
    journal.go.set()
    first = writer.write(Reserved(1))
    await journal.until_tried(3)
    reading = asyncio.ensure_future(writer.read(lambda _: "after the write"))
    second = writer.write(Reserved(2))
    assert await writer.read(lambda _: "smaller", makes_room=True) == "smaller", "a compaction does not wait"
    assert writer.paused == str(FULL)
    assert not first.done() and not reading.done()
    journal.error = None
    await asyncio.gather(first, second)
    assert journal.events == [Reserved(1), Reserved(2)] and await reading == "after the write"
    assert writer.paused == ""
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 1
    assert "can be written again" in caplog.text


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_a_close_without_room_ends_and_fails_the_unwritten_events(
    journal: Scripted, writer: JournalWriter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal_module, "RETRY_S", 3600.0)
    journal.error = FULL
    journal.go.set()
    writes = [writer.write(Reserved(one)) for one in range(3)]
    await journal.until_tried()
    for _ in range(2):
        await writer.close()
    for call in (*writes, writer.write(Reserved(4)), writer.read(lambda journal: None)):
        with pytest.raises(JournalClosed, match="closed"):
            await call
    assert journal.closed.is_set()


async def test_a_close_ends_although_the_disk_does_not_answer(
    journal: Scripted, writer: JournalWriter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal_module, "CLOSE_S", 0.05)
    writes = [writer.write(Reserved(one)) for one in range(2)]
    await journal.until_tried()
    await writer.close()
    for write in writes:
        with pytest.raises(JournalClosed, match="did not answer"):
            await write
    journal.go.set()  # the disk answers at last: no future is resolved twice
    assert await asyncio.to_thread(journal.closed.wait, 20.0)


async def test_after_damage_nothing_more_is_written_and_every_caller_gets_the_error(
    journal: Scripted, writer: JournalWriter, caplog: pytest.LogCaptureFixture
):
    durable: list[int] = []
    journal.error = JournalDamaged("/run/journal.sqlite is damaged")
    journal.go.set()
    with pytest.raises(JournalDamaged):
        await writer.write(Reserved(1), on_durable=lambda: durable.append(1))
    journal.error = None
    with pytest.raises(JournalDamaged):
        await writer.write(Reserved(2))
    assert journal.appended == [] and not durable, "a later event must not be there without an earlier one"
    assert "cannot be written any more" in caplog.text
