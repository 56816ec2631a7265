"""What the workers of `benchmarks/peers.py` share. Each runs in its peer's own environment, with one job.

    stdin: the job as JSON ─▶ prepare (imports, tokenizer, client) ─▶ clock ─▶ the batch ─▶ clock ─▶ stdout: one line

The output of libraries goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

MODEL = "mock-judge"
ASK = "Rate the answer from 1 to 10. Reply with the integer alone."


@dataclass(frozen=True)
class Item:
    """A question and the answer to judge. Items with equal numbers are equal."""

    number: int
    prompt: str
    response: str


@dataclass(frozen=True)
class Job:
    """One peer's work."""

    peer: str
    base_url: str
    url: str
    items: list[Item]
    time_scale: float
    """Wall seconds per second of the judge. A peer's constant pauses are scaled by it too; otherwise they would count
    for more than the judge's time."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """The result of a peer's job. `scores` is in the order of the items; None: no score."""

    scores: list[float | None]
    wall_s: float = 0.0
    cpu_s: float = 0.0
    error: str = ""
    """The exception that ended the batch, if any."""
    versions: dict[str, str] = field(default_factory=dict)


def read_job() -> Job:
    told = json.load(sys.stdin)
    told["items"] = [Item(**item) for item in told["items"]]
    return Job(**told)


def judge_message(prompt: str, response: str) -> str:
    """The message to the judge where the user writes the prompt."""
    return f"{prompt}\n\nAnswer:\n{response}\n\n{ASK}"


def cpu_s() -> float:
    """CPU seconds of this process and its current children: a client's engine process is part of the client."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def clock(outcome: Outcome) -> Iterator[None]:
    """Time the batch. An exception ends it and is recorded, because it would have ended the user's step."""
    cpu_before_s, began = cpu_s(), time.perf_counter()
    try:
        yield
    except Exception as error:  # noqa: BLE001  # any exception of a peer is its result
        outcome.error = f"{type(error).__name__}: {error}"[:300]
    finally:
        outcome.wall_s = time.perf_counter() - began
        outcome.cpu_s = cpu_s() - cpu_before_s


def versions(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def run(
    work: Callable[[Job, Outcome], Awaitable[None]] | Callable[[Job, Outcome], None], packages: Sequence[str]
) -> None:
    """A worker's main function. Libraries print to stdout as well, so only the outcome's line goes there."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = read_job()
    outcome = Outcome(scores=[None] * len(job.items), versions=versions(*packages))
    if asyncio.iscoroutinefunction(work):
        asyncio.run(work(job, outcome))
    else:
        work(job, outcome)
    stdout.write(json.dumps(asdict(outcome)) + "\n")
    stdout.flush()
