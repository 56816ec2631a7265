"""What the workers of `benchmarks/peers.py` share. Each runs in its peer's own environment, with one job.

    stdin: the job as JSON ─▶ prepare (imports, tokenizer, client) ─▶ clock ─▶ the batch ─▶ clock ─▶ stdout: one line

What libraries print goes to stderr.
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
    """A question and the answer that is to be judged. Items of equal number are equal."""

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
    """Wall seconds per second of the judge. What a peer waits for by a constant of its own is scaled by it too, or its
    pauses would count more than the judge's."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a peer made of its job. `scores` is in the order of the items; None: it gave none."""

    scores: list[float | None]
    wall_s: float = 0.0
    cpu_s: float = 0.0
    error: str = ""
    """What ended the batch, if something did."""
    versions: dict[str, str] = field(default_factory=dict)


def read_job() -> Job:
    told = json.load(sys.stdin)
    told["items"] = [Item(**item) for item in told["items"]]
    return Job(**told)


def judge_message(prompt: str, response: str) -> str:
    """What a judge is sent where its user writes the prompt."""
    return f"{prompt}\n\nAnswer:\n{response}\n\n{ASK}"


def cpu_s() -> float:
    """CPU seconds of this process and of the children it has now: an engine of its own is part of a client."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def clock(outcome: Outcome) -> Iterator[None]:
    """Times the batch. An exception ends it and is noted: that is what would have ended the user's step."""
    cpu_before_s, began = cpu_s(), time.perf_counter()
    try:
        yield
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is its result
        outcome.error = f"{type(error).__name__}: {error}"[:300]
    finally:
        outcome.wall_s = time.perf_counter() - began
        outcome.cpu_s = cpu_s() - cpu_before_s


def versions(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def run(
    work: Callable[[Job, Outcome], Awaitable[None]] | Callable[[Job, Outcome], None], packages: Sequence[str]
) -> None:
    """A worker's main. Libraries print to stdout as well, so that becomes stderr for all but the outcome's line."""
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
