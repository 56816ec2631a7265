"""A run that starts while its journal has no room, or while another process writes it, waits and logs why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from freewheel.queue.journal import CheckpointMark, JournalBusy, JournalFull
from freewheel.queue.staleness import Bounds
from freewheel.runtime import building
from freewheel.runtime.building import open_queue

pytestmark = pytest.mark.timeout(60)

CONFIG: Any = SimpleNamespace(
    bounds=Bounds(groups_per_step=2, threshold=1, window=3, max_alive=1000, max_lag_allowed=10),
    journal=SimpleNamespace(enabled=True, keep_groups=0),
)
FULL, BUSY = JournalFull("no room"), JournalBusy("another writes it")


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Make a step of the opening fail several times. Returns its attempts."""
    monkeypatch.setattr(building, "_RETRY_S", 0.001)

    def patch(name: str, error: Exception, times: int) -> list[int]:
        attempts: list[int] = []
        original = getattr(building, name)

        def failing(*args: Any, **options: Any) -> Any:
            attempts.append(1)
            if len(attempts) <= times:
                raise error
            return original(*args, **options)

        monkeypatch.setattr(building, name, failing)
        return attempts

    return patch


@pytest.mark.parametrize(("name", "error"), [("Journal", FULL), ("Journal", BUSY), ("restore", FULL)])
@pytest.mark.parametrize("checkpoint", [None, CheckpointMark()], ids=["restart", "start"])
async def test_a_queue_waits_for_a_journal_that_cannot_be_written_now(
    tmp_path: Path,
    fail: Callable[..., list[int]],
    caplog: pytest.LogCaptureFixture,
    name: str,
    error: Exception,
    checkpoint: CheckpointMark | None,
) -> None:
    attempts = fail(name, error, 5)
    opened = await open_queue(CONFIG, tmp_path, total_prompts=4, checkpoint=checkpoint)
    assert len(attempts) == 6
    assert caplog.text.count(str(error)) == 1, "once, and then every minute"
    await opened.close()


async def test_a_queue_does_not_wait_forever_for_another_run(
    tmp_path: Path, fail: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_BUSY_S", 0.01)
    fail("Journal", BUSY, 10**9)
    with pytest.raises(JournalBusy):
        await open_queue(CONFIG, tmp_path, total_prompts=4, checkpoint=CheckpointMark())
