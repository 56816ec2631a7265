"""What the journal costs: groups/s through the queue with and without it, replay, and other `synchronous` settings.

    python benchmarks/journal.py [--json FILE] [--quick]

    4 producers ── admit, put ──▶ MessageQueue ── take, commit, published ──▶ 1 consumer      one process, one loop
       1,000 groups/s of 80 KB,        │ journal: on, off, on, off …
       open loop                       └─▶ journal.sqlite; every 10 steps a checkpoint covers all but the last 10 steps

Puts start at Poisson moments, whether or not earlier ones have ended, and latencies count from those moments. A group
counts when its step is committed. For the replay a separate process streams all groups of a journal, half of them in
recorded steps and half ready, and measures its own memory; once from the page cache and once from the disk.
The last table appends blocks directly to a `Journal`, as fast as possible.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np

from common import (
    at_least,
    exit_code,
    machine_facts,
    machine_line,
    markdown_table,
    median,
    parser,
    promise_table,
    scratch_dir,
    write_json,
)
from freewheel.data.group import EncodedGroup, EncodedGroups, Ticket
from freewheel.queue import journal as journal_file
from freewheel.queue.journal import Committed, Journal, JournalEvent, JournalWriter, Stored, Took
from freewheel.queue.ledger import Frontier
from freewheel.queue.message_queue import MessageQueue
from freewheel.queue.staleness import Bounds

PROMISED_RATIO = 0.9
PROMISED_REPLAY_PER_S = 10_000

GROUP_BYTES = 80_000
OFFERED_PER_S = 1_000
PRODUCERS = 4
BLOCK_GROUPS = 8
"""Groups in one put: as many as a rollouter has ready at once."""
GROUPS_PER_STEP = 64
THRESHOLD = 15
"""A thousand groups alive, 80 MB: one second of the offered load."""
CHECKPOINT_STEPS = 10
KEEP_GROUPS = 256
PATIENCE_S = 5.0
"""Longest wait inside a call."""
DATA = [np.random.default_rng(seed).bytes(GROUP_BYTES) for seed in range(64)]


# -- the queue with and without a journal -----------------------------------------------------------------------------


class Scene:
    """One run of producers and a consumer."""

    def __init__(self, journal: JournalWriter | None) -> None:
        bounds = Bounds(
            groups_per_step=GROUPS_PER_STEP,
            threshold=THRESHOLD,
            window=4 * GROUPS_PER_STEP + 1,
            max_alive=10**6,
            max_lag_allowed=THRESHOLD + 4,
        )
        self.queue = MessageQueue(bounds=bounds, journal=journal)
        self.latencies_s: list[float] = []
        self.steps = 0

    async def produce(self, name: str, moments: list[float]) -> None:
        """Send blocks at their moments. Tickets are requested earlier, as generation does."""
        ahead: asyncio.Queue[list[Ticket]] = asyncio.Queue(maxsize=2)
        held: set[int] = set()

        async def ask() -> None:
            for _ in moments:
                tickets: list[Ticket] = []
                while len(tickets) < BLOCK_GROUPS:
                    want = BLOCK_GROUPS - len(tickets)
                    given = await self.queue.admit(name, want=want, load=0, wait_s=PATIENCE_S, holding=held)
                    held.update(ticket.sequence for ticket in given.tickets)
                    tickets += given.tickets
                await ahead.put(tickets)

        async def put_at(moment_s: float) -> None:
            await asyncio.sleep(moment_s - time.perf_counter())
            tickets = await ahead.get()
            groups = EncodedGroups(
                EncodedGroup(one, self.queue.policy.published, DATA[one.sequence % len(DATA)]) for one in tickets
            )
            while not await self.queue.put(groups, wait_s=PATIENCE_S):
                pass
            held.difference_update(one.sequence for one in tickets)
            self.latencies_s.append(time.perf_counter() - moment_s)

        await asyncio.gather(ask(), *map(put_at, moments))

    async def consume(self, until_s: float) -> None:
        step = 1
        while time.perf_counter() < until_s:
            taken = await self.queue.take(step, wait_s=0.2)
            if taken.groups is None:
                continue
            while (version := await self.queue.commit(step, wait_s=PATIENCE_S)) is None:
                pass
            self.steps = step
            await self.queue.confirm_published(version)
            if step % CHECKPOINT_STEPS == 0 and step > CHECKPOINT_STEPS:
                await self.queue.confirm_checkpoint(step - CHECKPOINT_STEPS)
            step += 1

    async def run(self, seconds: float, seed: int) -> dict[str, float]:
        start_s = time.perf_counter() + 0.1
        until_s = start_s + seconds
        rng = random.Random(seed)
        moments: list[list[float]] = [[] for _ in range(PRODUCERS)]
        moment = start_s
        while (moment := moment + rng.expovariate(OFFERED_PER_S / BLOCK_GROUPS)) < until_s:
            rng.choice(moments).append(moment)
        cpu_s = time.process_time()
        consuming = asyncio.create_task(self.consume(until_s))
        producing = [asyncio.create_task(self.produce(f"producer-{n}", mine)) for n, mine in enumerate(moments)]
        await consuming
        cpu_s = time.process_time() - cpu_s
        for one in producing:
            one.cancel()
        await asyncio.gather(*producing, return_exceptions=True)
        p50, p99, worst = np.percentile(np.array(self.latencies_s) * 1e3, [50, 99, 100]).tolist()
        return {
            "groups_per_s": self.steps * GROUPS_PER_STEP / seconds,
            "offered_groups_per_s": sum(map(len, moments)) * BLOCK_GROUPS / (until_s - start_s),
            "put_p50_ms": p50,
            "put_p99_ms": p99,
            "put_max_ms": worst,
            "cpu_us_per_group": cpu_s / (self.steps * GROUPS_PER_STEP) * 1e6,
        }


def pipeline(folder: str, *, journalled: bool, seconds: float, seed: int) -> dict[str, float]:
    path = Path(folder, f"pipeline-{seed}.sqlite")

    async def play() -> dict[str, float]:
        writer = JournalWriter(journal=Journal(path)) if journalled else None
        figures = await Scene(writer).run(seconds, seed)
        if writer is not None:
            figures |= {"file_mb": size_mb(path), "log_mb": size_mb(log_of(path))}
            await writer.close()
        return figures

    try:
        return asyncio.run(play())
    finally:
        path.unlink(missing_ok=True)


def size_mb(path: Path) -> float:
    return path.stat().st_size / 1e6


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


# -- replay -----------------------------------------------------------------------------------------------------------


def stored(sequence: int) -> Stored:
    return Stored(Ticket(sequence, sequence), 0, DATA[sequence % len(DATA)], 0.0)


def fill(path: Path, groups: int) -> None:
    journal = Journal(path)
    for step in range(1, groups // GROUPS_PER_STEP // 2 + 1):
        mine = [stored(one) for one in range((step - 1) * GROUPS_PER_STEP, step * GROUPS_PER_STEP)]
        journal.append([*mine, Took(step, tuple(one.ticket for one in mine)), Committed(step, step, 0.0)])
    for first in range(step * GROUPS_PER_STEP, groups, GROUPS_PER_STEP):
        journal.append([stored(one) for one in range(first, min(groups, first + GROUPS_PER_STEP))])
    journal.close()


def memory_mb(what: str) -> float:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(what))
    return int(line.split()[1]) / 1024


def replay_here(path: Path) -> dict[str, float]:
    """Read every group of a journal in order; return the speed and the extra memory."""
    before_mb = memory_mb("VmRSS")
    started_at, cpu_s = time.perf_counter(), time.process_time()
    journal = Journal(path, readonly=True)
    recorded = sum(len(journal.groups(step.step) or ()) for step in journal.steps(after=0))
    recorded_s = time.perf_counter() - started_at
    ready = sum(len(one.data) == GROUP_BYTES for one in journal.stored())
    seconds = time.perf_counter() - started_at
    journal.close()
    return {
        "groups": recorded + ready,
        "groups_per_s": (recorded + ready) / seconds,
        "recorded_per_s": recorded / recorded_s,
        "ready_per_s": ready / (seconds - recorded_s),
        "cpu_us_per_group": (time.process_time() - cpu_s) / (recorded + ready) * 1e6,
        "peak_growth_mb": memory_mb("VmHWM") - before_mb,
    }


def replay(path: Path, *, cold: bool = False) -> dict[str, float]:
    """`replay_here` in a separate process."""
    if cold:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, __file__, "--replay-only", str(path)]
    output = subprocess.run(command, check=True, capture_output=True).stdout
    return msgspec.json.decode(output, type=dict[str, float])


# -- synchronous ------------------------------------------------------------------------------------------------------


def appending(path: Path, synchronous: str, groups: int) -> dict[str, Any]:
    """Append as fast as possible, in blocks as a put sends them, with takes, commits and compaction."""
    kept, journal_file.SYNCHRONOUS = journal_file.SYNCHRONOUS, synchronous
    try:
        journal = Journal(path)
    finally:
        journal_file.SYNCHRONOUS = kept
    waits_ms = []
    largest_log = 0
    started_at = time.perf_counter()
    for first in range(0, groups, BLOCK_GROUPS):
        events: list[JournalEvent] = [stored(one) for one in range(first, first + BLOCK_GROUPS)]
        step, rest = divmod(first + BLOCK_GROUPS, GROUPS_PER_STEP)
        if rest == 0:
            tickets = (Ticket(one, one) for one in range((step - 1) * GROUPS_PER_STEP, step * GROUPS_PER_STEP))
            events += [Took(step, tuple(tickets)), Committed(step, step, 0.0)]
        before_s = time.perf_counter()
        journal.append(events)
        waits_ms.append((time.perf_counter() - before_s) * 1e3)
        if rest == 0 and step % CHECKPOINT_STEPS == 0 and step > CHECKPOINT_STEPS:
            covered = step - CHECKPOINT_STEPS
            journal.compact(step=covered, frontier=Frontier(low=covered * GROUPS_PER_STEP), keep_groups=KEEP_GROUPS)
        largest_log = max(largest_log, log_of(path).stat().st_size)
    seconds = time.perf_counter() - started_at
    file_bytes = path.stat().st_size
    journal.close()
    path.unlink()
    p50, p99, worst = np.percentile(waits_ms, [50, 99, 100]).tolist()
    return {
        "synchronous": synchronous,
        "groups_per_s": groups / seconds,
        "append_p50_ms": p50,
        "append_p99_ms": p99,
        "append_max_ms": worst,
        "file_mb": file_bytes / 1e6,
        "largest_log_mb": largest_log / 1e6,
    }


# -- all of it --------------------------------------------------------------------------------------------------------


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--replay-only", type=Path, metavar="JOURNAL", help="stream this journal and print what it took"
    )
    chosen = options.parse_args()
    if chosen.replay_only:
        print(msgspec.json.encode(replay_here(chosen.replay_only)).decode())
        return 0
    rounds, seconds, groups, appended = (1, 2.0, 1024, 1024) if chosen.quick else (3, 10.0, 12_800, 12_800)
    facts = machine_facts()
    on: list[dict[str, float]] = []
    off: list[dict[str, float]] = []
    with scratch_dir() as folder:
        for seed in range(rounds):
            on.append(pipeline(folder, journalled=True, seconds=seconds, seed=seed))
            off.append(pipeline(folder, journalled=False, seconds=seconds, seed=seed))
        small, whole = Path(folder, "small.sqlite"), Path(folder, "whole.sqlite")
        fill(small, groups // 4)
        fill(whole, groups)
        file_bytes = whole.stat().st_size
        replays = {"quarter": replay(small), "whole": replay(whole), "cold": replay(whole, cold=True)}
        small.unlink()
        whole.unlink()
        table = [appending(Path(folder, f"{one}.sqlite"), one, appended) for one in ("OFF", "NORMAL", "FULL")]
    rate = {name: median([one["groups_per_s"] for one in those]) for name, those in (("on", on), ("off", off))}
    figures = {
        "ratio_on_off": rate["on"] / rate["off"],
        "replay_groups_per_s": replays["whole"]["groups_per_s"],
        "replay_peak_growth_mb": replays["whole"]["peak_growth_mb"],
        "replay_peak_growth_quarter_mb": replays["quarter"]["peak_growth_mb"],
        "replay_cold_groups_per_s": replays["cold"]["groups_per_s"],
        "groups_per_s_on": rate["on"],
        "groups_per_s_off": rate["off"],
        "rounds_on": on,
        "rounds_off": off,
        "replays": replays,
        "bytes_per_group_on_disk": file_bytes / groups,
        "synchronous": table,
        "group_bytes": GROUP_BYTES,
        "block_groups": BLOCK_GROUPS,
        "groups_per_step": GROUPS_PER_STEP,
        "machine": facts,
    }
    print(machine_line(facts), end="\n\n")
    report(figures)
    promises = [
        at_least("ratio_on_off", figures["ratio_on_off"], PROMISED_RATIO),
        at_least("replay_groups_per_s", figures["replay_groups_per_s"], PROMISED_REPLAY_PER_S),
    ]
    print(promise_table(promises))
    write_json(chosen.json, figures)
    return exit_code(promises, quick=chosen.quick)


def report(figures: dict[str, Any]) -> None:
    names = {
        "offered_groups_per_s": "offered, groups/s",
        "groups_per_s": "committed, groups/s",
        "put_p50_ms": "put, p50, ms",
        "put_p99_ms": "put, p99, ms",
        "put_max_ms": "slowest put, ms",
        "cpu_us_per_group": "CPU of the process, us a group",
        "file_mb": "file, MB",
        "log_mb": "its log, MB",
    }
    rows = [
        (words, *(f"{median([one.get(key, 0.0) for one in figures[f'rounds_{side}']]):,.1f}" for side in ("on", "off")))
        for key, words in names.items()
    ]
    print(markdown_table((f"{GROUP_BYTES // 1000} KB groups", "journal on", "off"), rows), end="\n\n")
    keys = ("groups", "groups_per_s", "recorded_per_s", "ready_per_s", "cpu_us_per_group", "peak_growth_mb")
    rows = [
        (words, *(f"{one[key]:,.0f}" for key in keys))
        for words, one in (
            ("a quarter of it", figures["replays"]["quarter"]),
            ("all of it", figures["replays"]["whole"]),
            ("all, from the disk", figures["replays"]["cold"]),
        )
    ]
    head = ("replay", "groups", "groups/s", "recorded steps", "ready groups", "CPU, us a group", "memory on top, MB")
    print(markdown_table(head, rows), end="\n\n")
    keys = ("groups_per_s", "append_p50_ms", "append_p99_ms", "append_max_ms", "file_mb", "largest_log_mb")
    rows = [(one["synchronous"], *(f"{one[key]:,.1f}" for key in keys)) for one in figures["synchronous"]]
    head = ("synchronous", "groups/s", "append of 8, p50, ms", "p99", "slowest", "file, MB", "largest log, MB")
    print(markdown_table(head, rows), end="\n\n")


if __name__ == "__main__":
    sys.exit(main())
