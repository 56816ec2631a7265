"""What traces and samples cost: CPU time of a rollouter's process with recording and without, in turns.

    python benchmarks/recording.py [--json FILE] [--quick]

One process, no Ray: the embedded model, the native engine, the task's own score, and a queue whose groups are removed
as they arrive, 96 groups of 8 a step. Recording is switched on and off while the same rollouter continues. All CPU time
of the process counts: the engine, events, their conversion to text, and writing. `cost` is the median over pairs of
neighbouring stretches of CPU per group, with over without, minus 1. Settings are the defaults of `observe`. A trainer
records one event a group, a rollouter nineteen.

`event_us` is the cost of an event to the part that records it; `text_us` is the writing thread's.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from common import (
    at_most,
    exit_code,
    machine_facts,
    machine_line,
    markdown_table,
    median,
    parser,
    promise_table,
    write_json,
)
from freewheel.observe import trace
from freewheel.observe.lines import MOST_WAITING, files_of
from freewheel.observe.run_folder import TRACE
from freewheel.observe.trace import Tracer
from freewheel.queue.message_queue import MessageQueue
from freewheel.queue.staleness import Bounds
from freewheel.runtime.building import RolloutSide, end_recording, start_recording
from freewheel.runtime.config import ObserveConfig
from freewheel.runtime.config_files import compose
from freewheel.runtime.model_size import model_folder
from freewheel.runtime.placement import Machine
from freewheel.runtime.run_plan import resolve

PROMISED_COST = 0.03
"""For a rollouter with a tiny model. A real one's groups take a thousand times as long, so the share vanishes."""
GROUPS = 96
STEPS, PAIRS = 3, 40
"""Steps a stretch, about a second, and pairs of stretches. Short ones, so that noise affects both of a pair."""
EVENTS = MOST_WAITING // 2
REPEATS = 9


class Rolling:
    """A rollouter that generates without end, and whose groups are removed."""

    def __init__(self, side: RolloutSide) -> None:
        many = 10**6
        bounds = Bounds(
            groups_per_step=GROUPS, threshold=3, window=2 * GROUPS + 1, max_alive=many, max_lag_allowed=many
        )
        self._queue = MessageQueue(bounds=bounds)
        self._rollouter = side.rollouter(self._queue)
        self._step = 0

    async def __aenter__(self) -> Rolling:
        self._running = asyncio.create_task(self._rollouter.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._queue.close()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._rollouter.close()

    async def steps(self, count: int) -> float:
        """CPU seconds of this process with all its threads."""
        since = time.process_time()
        for _ in range(count):
            self._step += 1
            while (await self._queue.take(self._step, wait_s=10.0)).groups is None:
                pass
            version = await self._queue.commit(self._step, wait_s=10.0)
            assert version is not None
            await self._queue.confirm_published(version)
        return time.process_time() - since


async def measure(folder: Path, *, steps: int, pairs: int) -> dict[str, Any]:
    config = compose([f"trainer.groups_per_step={GROUPS}", "eval.prompts=0"])
    plan = resolve(config, Machine.here())
    side = RolloutSide(config=config, plan=plan, name="alone", model_path=model_folder(config), version=0)
    with_it, without = [], []
    async with Rolling(side) as rolling:
        await rolling.steps(steps)  # warm
        gc.collect()
        gc.freeze()  # as a rollouter's actor does
        for pair in range(pairs):
            for recorded in (True, False) if pair % 2 else (False, True):
                if recorded:
                    start_recording(ObserveConfig(), folder, "alone", samples=True)
                spent = await rolling.steps(steps)
                since = time.process_time()
                end_recording()  # includes what is still to be written
                spent += time.process_time() - since
                (with_it if recorded else without).append(spent / (steps * GROUPS))
    traced = sum(file.size for file in files_of(folder / TRACE)) / (pairs * steps * GROUPS)
    return {
        "cost": median([on / off for on, off in zip(with_it, without, strict=True)]) - 1,
        "with_us_per_group": median(with_it) * 1e6,
        "without_us_per_group": median(without) * 1e6,
        "trace_bytes_per_group": traced,
    }


def events(folder: Path) -> dict[str, float]:
    """Microseconds of one event at a time, in the best of some repeats."""
    told, text = [], []
    for repeat in range(REPEATS):
        tracer = Tracer(folder, f"events{repeat}", every=1, most_bytes=10**9)
        tracer.lines._awake = True  # its thread stays out of the way of this one
        since = time.process_time()
        for ordinal in range(EVENTS):
            tracer.phase("score", ordinal, trace.now(), {"index": 3, "status": "scored"})
        told.append(time.process_time() - since)
        since = time.process_time()
        tracer.lines.close()
        text.append(time.process_time() - since)
        assert not tracer.lines.lost
    return {"event_us": min(told) / EVENTS * 1e6, "text_us": min(text) / EVENTS * 1e6}


def main() -> int:
    options = parser(__doc__).parse_args()
    facts = machine_facts()
    print(machine_line(facts))
    steps, pairs = (2, 2) if options.quick else (STEPS, PAIRS)
    with tempfile.TemporaryDirectory(prefix="freewheel-bench-") as scratch:
        found = asyncio.run(measure(Path(scratch), steps=steps, pairs=pairs)) | events(Path(scratch) / "events")
    print(markdown_table(("figure", "value"), [(name, f"{value:.4g}") for name, value in found.items()]))
    promises = [at_most("cost", found["cost"], PROMISED_COST)]
    print(promise_table(promises))
    write_json(options.json, {"machine": facts, "figures": found, "steps": steps, "pairs": pairs})
    return exit_code(promises, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
