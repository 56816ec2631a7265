"""From a run directory to the run's `MessageQueue`, whatever state its journal is in. Called by `QueueActor`, and by
tests that run a whole pipeline in one process.

    journal.sqlite ─▶ Journal ─▶ restore(checkpoint or tickets in flight) ─▶ MessageQueue
         ├─ cannot be read ─▶ set aside, said; prompts are taken up from the checkpoint
         └─ no room, or another writes it ─▶ said, and tried again (waits for: the disk, the other's end)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from freewheel.data.group import Ticket
from freewheel.observe.run_folder import JOURNAL
from freewheel.queue.journal import (
    CheckpointMark,
    Journal,
    JournalBusy,
    JournalDamaged,
    JournalError,
    JournalFormat,
    JournalWriter,
    passing,
    set_aside,
)
from freewheel.queue.message_queue import MessageQueue
from freewheel.queue.restore import Restored, restore
from freewheel.runtime.config import TrainConfig

log = logging.getLogger("freewheel.queue")

BUSY_S = 60.0
"""For another process that writes it: a killed run whose last process is slow to go. Longer, and it is a run."""
TRY_AGAIN_S = 1.0
SAY_AGAIN_S = 60.0
"""While there is no room for what is to be written before a run can go on."""


@dataclass(frozen=True)
class OpenedQueue:
    queue: MessageQueue
    journal: JournalWriter | None
    notes: list[str] = field(default_factory=list)
    """For the log: what was found."""

    async def close(self) -> None:
        await self.queue.close()
        if self.journal is not None:
            await self.journal.close()


async def open_queue(
    config: TrainConfig,
    run_dir: Path,
    *,
    total_prompts: int | None,
    checkpoint: CheckpointMark | None,
    in_flight: Mapping[str, Sequence[Ticket]] | None = None,
) -> OpenedQueue:
    """`checkpoint`: where a run begins or goes on; None: in the place of a queue that died, and whose trainer and
    rollouters live on. Raises a `JournalError`."""
    bounds = config.bounds
    if not config.journal.enabled:
        assert checkpoint is not None, "what a queue held died with it: there is no journal"
        return OpenedQueue(
            MessageQueue(
                bounds=bounds,
                total_prompts=total_prompts,
                frontier=checkpoint.frontier,
                version=checkpoint.version,
                step=checkpoint.step,
            ),
            None,
        )
    work = partial(restore, total=total_prompts, checkpoint=checkpoint, in_flight=in_flight)
    notes: list[str] = []
    path = run_dir / JOURNAL
    try:
        writer, restored = await _restored(path, work)
    except JournalFormat:  # nothing is wrong with it: the freewheel that wrote it goes on with it
        raise
    except JournalDamaged as error:
        if checkpoint is None:
            raise
        aside = await asyncio.to_thread(set_aside, path)
        notes = [
            f"The journal cannot be read and is kept as {aside.name} ({error}): groups that were queued are generated "
            f"again, and training goes on from the checkpoint of step {checkpoint.step}"
        ]
        writer, restored = await _restored(path, work)
    queue = MessageQueue(
        bounds=bounds,
        total_prompts=total_prompts,
        journal=writer,
        restored=restored,
        keep_groups=config.journal.keep_groups,
    )
    return OpenedQueue(queue, writer, [*notes, *restored.notes])


def reaches_the_start(run_dir: Path) -> bool:
    """Whether the journal has every step of the run: then it needs no checkpoint to go on from."""
    try:
        with closing(Journal(run_dir / JOURNAL, readonly=True)) as journal:
            return journal.base().step == 0
    except (JournalError, OSError):
        return False


async def _restored(path: Path, work: Callable[[Journal], Restored]) -> tuple[JournalWriter, Restored]:
    """As soon as it can be written."""
    clock = asyncio.get_running_loop().time
    began, said = clock(), -SAY_AGAIN_S
    while True:
        try:
            return await _read(path, work)
        except Exception as error:
            busy = isinstance(error, JournalBusy)
            if not (busy or passing(error)) or (busy and clock() - began > BUSY_S):
                raise
            if clock() - said >= SAY_AGAIN_S:
                log.warning("%s; the run goes on when that has passed", error)
                said = clock()
        await asyncio.sleep(TRY_AGAIN_S)


async def _read(path: Path, work: Callable[[Journal], Restored]) -> tuple[JournalWriter, Restored]:
    """Damage may be found by opening it, or by reading it to its end."""
    writer = JournalWriter(journal=await asyncio.to_thread(Journal, path))
    try:
        return writer, await writer.read(work)
    except BaseException:
        await writer.close()
        raise
