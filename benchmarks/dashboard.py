"""Measures how long it takes until a long run is on the screen, and how much data is sent.

    python benchmarks/dashboard.py --json FILE

Makes a run directory of 100,000 steps with rows of realistic size (steps, pulses, statistics, syncs). Then measures,
from a cold start: the time until the program prints its address, the first answer of the first view (for which it reads
all of `metrics.jsonl`), and each later view.
"""

from __future__ import annotations

import http.client
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import common

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/dashboard"))
import made_run  # the run that the tests look at

STEPS, QUICK_STEPS = 100_000, 2_000
OPENS_S = 2.0
"""The promise."""
VIEWS = ("", "/judge", "/weights", "/timeline", "/samples", "/series?name=mine%2Fof_a_hook")
ROUNDS = 3


def main() -> None:
    given = common.parser(__doc__).parse_args()
    steps = QUICK_STEPS if given.quick else STEPS
    facts = common.machine_facts()
    print(common.machine_line(facts), "\n")
    with tempfile.TemporaryDirectory() as folder:
        run = made_run.make_run(Path(folder) / "run", steps=steps)
        megabytes = (run / "metrics.jsonl").stat().st_size / 1e6
        rounds = [measure(run) for _ in range(ROUNDS)]
    found = {name: common.median([one[name] for one in rounds]) for name in rounds[0]}
    rows = [(name.replace("_s", ""), f"{found[name]:.3f} s") for name in found if name.endswith("_s")]
    print(f"{steps:,} steps, {megabytes:.0f} MB of metrics, median of {ROUNDS}:\n")
    print(common.markdown_table(("what", "takes"), rows))
    print(f"\nthe first view is {found['overview_kb']:.0f} kB; the server has {found['memory_mb']:.0f} MB")
    promises = [common.at_most("opens_s", found["start_s"] + found["overview_s"], OPENS_S)]
    print("\n" + common.promise_table(promises))
    common.write_json(given.json, {"machine": facts, "steps": steps, "metrics_mb": megabytes, **found})


def measure(run: Path) -> dict[str, float]:
    """Measure one program from its start."""
    began = time.perf_counter()
    program = subprocess.Popen(
        [sys.executable, "-m", "freewheel", "dashboard", str(run)], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    url = urlsplit(program.stdout.readline().split()[-1])
    found: dict[str, float] = {"start_s": time.perf_counter() - began}
    try:
        for view in VIEWS:
            took, size = ask(url, f"/api/runs/run{view}")
            name = view.strip("/").partition("?")[0] or "overview"
            found[f"{name}_s"] = took
            if not view:
                found["overview_kb"] = size / 1e3
        found["overview_again_s"] = ask(url, "/api/runs/run")[0]
        found["memory_mb"] = _memory_mb(program.pid)
    finally:
        program.terminate()
        program.communicate()
    return found


def ask(url: Any, path: str) -> tuple[float, int]:
    began = time.perf_counter()
    asking = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    asking.request("GET", path, headers={"Authorization": f"Bearer {url.query.partition('=')[2]}"})
    reply = asking.getresponse()
    body = reply.read()
    took = time.perf_counter() - began
    assert reply.status == 200, body[:200]
    json.loads(body)
    asking.close()
    return took, len(body)


def _memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1e3


if __name__ == "__main__":
    main()
