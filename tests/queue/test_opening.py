"""A run that starts while its journal has no room, or another process writes it, waits and says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from freewheel.queue.journal import CheckpointMark, Journal, JournalBusy, JournalFull
from freewheel.queue.staleness import Bounds
from freewheel.runtime import building
from freewheel.runtime.building import open_queue

pytestmark = pytest.mark.timeout(60)

CONFIG: Any = SimpleNamespace(
    bounds=Bounds(groups_per_step=2, threshold=1, window=3, max_alive=1000, max_lag_allowed=10),
    journal=SimpleNamespace(enabled=True, keep_groups=0),
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_RETRY_S", 0.001)


def troubled(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int) -> list[Path]:
    """Opening it fails so often."""
    tries: list[Path] = []

    def opened(path: Path) -> Journal:
        tries.append(path)
        if len(tries) <= times:
            raise error
        return Journal(path)

    monkeypatch.setattr(building, "Journal", opened)
    return tries


@pytest.mark.parametrize("error", [JournalFull("no room"), JournalBusy("another writes it")], ids=["full", "busy"])
@pytest.mark.parametrize("checkpoint", [None, CheckpointMark()], ids=["restart", "start"])
async def test_a_journal_that_cannot_be_written_now_is_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    checkpoint: CheckpointMark | None,
) -> None:
    tries = troubled(monkeypatch, error, 5)
    opened = await open_queue(CONFIG, tmp_path, total_prompts=4, checkpoint=checkpoint)
    assert len(tries) == 6
    assert caplog.text.count(str(error)) == 1, "once, and then every minute"
    await opened.close()


async def test_room_that_is_missing_as_the_journal_is_read_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore, tries = building.restore, []

    def full_twice(*args: Any, **given: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise JournalFull("no room")
        return restore(*args, **given)

    monkeypatch.setattr(building, "restore", full_twice)
    opened = await open_queue(CONFIG, tmp_path, total_prompts=4, checkpoint=CheckpointMark())
    assert len(tries) == 3
    await opened.close()


async def test_one_that_another_run_writes_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_BUSY_S", 0.01)
    troubled(monkeypatch, JournalBusy("another writes it"), 10**9)
    with pytest.raises(JournalBusy):
        await open_queue(CONFIG, tmp_path, total_prompts=4, checkpoint=CheckpointMark())
