"""What the benchmarks share: facts about the machine, medians, a Markdown table, the JSON file, an engine for one run.

Each benchmark is a separate script (`python benchmarks/NAME.py --json FILE`) and imports this file by name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from freewheel.judge import Judge, JudgeConfig
from freewheel.judge.testing import Counts, JudgeProfile
from freewheel.judge.testing.profile import Content, plan_for

PACKAGES = ("freewheel", "aiohttp", "uvloop", "msgspec")
"""Packages whose versions change the figures of the judge engine."""

START_PATIENCE_S = 60.0
"""An engine that is not ready by then never will be. Importing it takes seconds on a busy machine."""


def machine_facts() -> dict[str, Any]:
    """What a reader needs to compare a figure with another machine's, including the current load."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": versions,
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_line(facts: dict[str, Any]) -> str:
    return f"{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}, load {facts['load_1min']} at the start"


def median(values: Sequence[float]) -> float:
    """The median; 0 for an empty list, so that a scene that was left out still prints."""
    return statistics.median(values) if values else 0.0


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, padded so that it reads well as text. The first column holds words, the others figures."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [_table_line(row, widths) for row in cells]
    rule = ["-" * width if column == 0 else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join([lines[0], f"| {' | '.join(rule)} |", *lines[1:]])


def _table_line(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
    return f"| {' | '.join(padded)} |"


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    options.add_argument(
        "--quick", action="store_true", help="a small run that shows that it works; no figures to keep"
    )
    return options


def write_json(path: Path | str | None, figures: dict[str, Any]) -> None:
    if path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
        print(f"\nwritten to {path}")


class Promise(NamedTuple):
    """A figure and the bound that it must keep."""

    name: str
    value: float
    bound: str
    kept: bool


def at_least(name: str, value: float, bound: float) -> Promise:
    return Promise(name, value, f">= {bound:g}", value >= bound)


def at_most(name: str, value: float, bound: float) -> Promise:
    return Promise(name, value, f"<= {bound:g}", value <= bound)


def promise_table(promises: Sequence[Promise]) -> str:
    rows = [(f"`{p.name}`", f"{p.value:.4g}", p.bound, "yes" if p.kept else "NO") for p in promises]
    return markdown_table(("field", "measured", "promised", "kept"), rows)


def exit_code(promises: Sequence[Promise], *, quick: bool = False) -> int:
    """1 if a promise is broken. A quick run is too short to break one."""
    broken = [p.name for p in promises if not p.kept]
    if broken and not quick:
        print(f"broken: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken and not quick else 0


@contextlib.contextmanager
def running_judge(config: JudgeConfig) -> Iterator[tuple[Judge, float]]:
    """A judge whose engine is ready, and the seconds that took: interpreter, imports, cache file."""
    with Judge(config) as judge:
        started_at = time.perf_counter()
        judge.start()
        while not judge.stats().endpoints:  # stats() itself waits, and gives zeros if no engine answered
            if time.perf_counter() - started_at > START_PATIENCE_S:
                raise TimeoutError(f"the engine was not ready within {START_PATIENCE_S:g} s")
        yield judge, time.perf_counter() - started_at


@contextlib.contextmanager
def scratch_dir() -> Iterator[str]:
    """A directory for an empty cache, so that engine and limiter know nothing of earlier runs."""
    with tempfile.TemporaryDirectory(prefix="freewheel-bench-") as path:
        yield path


def service_s(profile: JudgeProfile, counts: Counts, calls_per_content: int = 1) -> float:
    """Wall seconds that an idle test judge needs for the contents in `counts`, one call after the other.

    The judge draws its latencies from (seed, content, attempt), so this needs no waiting.
    """
    contents = [Content.of(count.text) for count in counts.contents.values()]
    plans = [plan_for(profile, content, attempt) for content in contents for attempt in range(calls_per_content)]
    return sum(plan.service_s for plan in plans) * profile.time_scale
