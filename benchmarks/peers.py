"""The same judging through the tools that people use today, and through freewheel.

`--judge`: 1,024 different requests to a test judge (lognormal, 2 s on average, saturating at 60 in flight, 429 above
80, `Retry-After: 1`), all times scaled by 1:5: verl's reward loop, TRL's AsyncGRPO, inspect_ai, a script around the
OpenAI SDK, and `freewheel.judge.Judge`.

`--rewards`: 64 and 1,024 rewards, four of each text, from a test judge (0.1 s) that answers 429 above 8 in flight:
verl's reward managers and ours inside verl, a reward function around the SDK and ours inside TRL.

Each peer runs in a fresh process in a separate environment (`make env-verl env-trl env-peers`), against its own test
judge, also in a separate process; nothing is cached beforehand. The peers' own code does the work:
`benchmarks/peers/with_*.py` call it, and `peers/verl_functions.py` and `peers/sdk.py` are what their users write. Where
time is scaled, the constant pauses in a peer's code are scaled too; ours are not. The clock starts after imports and
set-up, and in `--judge` after the start of our engine; in `--rewards` the integrations start it, so it counts. CPU is
the client's, with its child processes.

A reward is *wrong* if it is a number that the judge did not give to this text, and *missing* if there is none: None, or
a batch that an exception ended.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from common import (
    Promise,
    at_most,
    exit_code,
    machine_facts,
    machine_line,
    markdown_table,
    parser,
    promise_table,
    scratch_dir,
    write_json,
)
from freewheel.judge.testing import Counts, JudgeProfile, MockJudge, expected_score

ROOT = Path(__file__).resolve().parents[1]
WORKERS = Path(__file__).with_name("peers")

REQUESTS, QUICK_REQUESTS = 1024, 64
SAMPLES, QUICK_SAMPLES = (64, 1024), (64,)
COPIES = 4
"""Of each text in `--rewards`: 75% are duplicates."""
GROUP = 8
"""TRL's default of `num_generations`, which its worker scores at a time."""
KNEE, REJECT_ABOVE, NARROW = 60, 80, 8
LIMIT_S = 180.0
"""Time limit for one peer. A slower one counts as not finished."""
PREPARE_S = 60.0
"""Added to that limit: torch and other libraries are imported from a cold disk."""
BUSY = 0.25
"""Load per core above which other programs distort the figures."""
SLOWER_AT_MOST = 1.10
"""Our time over that of the fastest peer without errors. A peer may be given the judge's limit; ours finds it."""

JUDGE = JudgeProfile(
    seed=1,
    latency="lognormal",
    latency_s=2.0,
    sigma=0.5,
    knee=KNEE,
    reject_above=REJECT_ABOVE,
    retry_after_s=1.0,
    time_scale=0.2,
)
"""1:5 and not more: at 1:10 the SDK's CPU would be the limit, and at the judge's own speed it is not."""
NARROW_JUDGE = JudgeProfile(seed=1, latency="lognormal", latency_s=0.1, reject_above=NARROW, retry_after_s=1.0)

_ITEM = re.compile(r"Item (\d+):")


class Peer(NamedTuple):
    """A tool and its settings."""

    name: str
    environment: str
    worker: str
    options: dict[str, Any]
    ours: bool = False


def _verl(name: str, manager: str, **options: Any) -> Peer:
    return Peer(name, "verl", "with_verl.py", {"manager": manager, **options})


def _trl(name: str, call: str, reward: str, **options: Any) -> Peer:
    return Peer(name, "trl", "with_trl.py", {"call": call, "reward": reward, **options})


DOCUMENTED, RETRIED = {"function": "judge_as_documented"}, {"function": "judge_with_retries"}

FOR_JUDGE = (
    _verl("verl naive", "naive", **DOCUMENTED),
    _verl("verl naive, 3 tries", "naive", **RETRIED),
    _verl("verl rate_limited, 10", "rate_limited", max_concurrent=10, **DOCUMENTED),
    _verl(f"verl rate_limited, {KNEE}", "rate_limited", max_concurrent=KNEE, **DOCUMENTED),
    _trl("TRL AsyncGRPO, SDK", "score_loop", "sdk", group=GROUP),
    Peer("inspect_ai, adaptive", "peers", "with_inspect.py", {}),
    Peer(f"inspect_ai, {KNEE}", "peers", "with_inspect.py", {"max_connections": KNEE}),
    Peer(f"gather, Semaphore({KNEE}), SDK", "peers", "with_sdk.py", {"semaphore": KNEE}),
    Peer("gather, Semaphore(200), SDK", "peers", "with_sdk.py", {"semaphore": 200}),
    Peer("freewheel", "peers", "with_freewheel.py", {}, ours=True),
)
"""A number in a name is a limit that the user set; 10 is the one in verl's own example."""

FOR_REWARDS = (
    _verl("verl naive", "naive", **DOCUMENTED),
    _verl("verl naive, 3 tries", "naive", **RETRIED),
    _verl("verl rate_limited, 10", "rate_limited", max_concurrent=10, **DOCUMENTED),
    _verl(f"verl rate_limited, {NARROW}", "rate_limited", max_concurrent=NARROW, **DOCUMENTED),
    _verl("verl with freewheel", "freewheel", group=COPIES)._replace(ours=True),
    _trl("TRL GRPO, SDK", "calculate_rewards", "sdk"),
    _trl("TRL GRPO, SDK, None on error", "calculate_rewards", "sdk_forgiving"),
    _trl("TRL GRPO with freewheel", "calculate_rewards", "freewheel")._replace(ours=True),
)

IN_ACTORS = (
    _verl(f"verl rate_limited, {NARROW}, in 8 actors", "rate_limited", max_concurrent=NARROW, workers=8, **DOCUMENTED),
    _verl("verl with freewheel, in 8 actors", "freewheel", group=COPIES, workers=8)._replace(ours=True),
)
"""verl's default number of reward workers, each a Ray actor. They start slowly, so only with `--ray`."""


class Run(msgspec.Struct, kw_only=True):
    """One peer and the judge's counts of it."""

    peer: str
    ours: bool
    requests: int
    contents: int
    finished: bool
    """False: it ran into the time limit, or an exception ended the batch."""
    error: str
    wall_s: float
    per_s: float
    """Right scores per second."""
    sent: int
    """Calls that reached the judge."""
    rejected: int
    """Those answered with 429."""
    max_in_flight: int
    right: int
    wrong: int
    missing: int
    cpu_s: float
    versions: dict[str, str]


def make_items(contents: int, copies: int = 1) -> list[dict[str, Any]]:
    """Word problems with an answer each. The copies of one are neighbours, like the responses to one prompt."""
    rng = random.Random(7)
    items = []
    for number in range(contents):
        boxes, each = rng.randint(2, 99), rng.randint(2, 99)
        prompt = f"Item {number}: {boxes} boxes hold {each} pencils each. How many pencils are there?"
        response = f"Each box holds {each}, so {boxes} * {each} = {boxes * each}. The answer is {boxes * each}."
        items += [{"number": number, "prompt": prompt, "response": response}] * copies
    return items


def grade(items: Sequence[dict[str, Any]], scores: Sequence[float | None], counts: Counts) -> tuple[int, int]:
    """Count wrong and missing scores. The judge's score depends on the text sent, which the judge remembers."""
    given: dict[int, set[int]] = {}
    for count in counts.contents.values():
        if count.answered and (found := _ITEM.search(count.text)):
            given.setdefault(int(found.group(1)), set()).add(expected_score(count.text))
    missing = sum(score is None for score in scores)
    wrong = sum(
        score is not None and score not in given.get(item["number"], ())
        for item, score in zip(items, scores, strict=True)
    )
    return wrong, missing


def run_peer(peer: Peer, profile: JudgeProfile, items: list[dict[str, Any]]) -> Run:
    with MockJudge(profile).in_process() as mock, scratch_dir() as folder:
        job = {
            "peer": peer.name,
            "base_url": mock.base_url,
            "url": mock.url,
            "items": items,
            "time_scale": profile.time_scale,
            "options": peer.options,
        }
        outcome = call_worker(peer, job, folder)
        counts = mock.counts()
    wrong, missing = grade(items, outcome["scores"], counts)
    right = len(items) - wrong - missing
    return Run(
        peer=peer.name,
        ours=peer.ours,
        requests=len(items),
        contents=len({item["number"] for item in items}),
        finished=not outcome["error"],
        error=outcome["error"],
        wall_s=outcome["wall_s"],
        per_s=right / outcome["wall_s"] if outcome["wall_s"] else 0.0,
        sent=counts.received,
        rejected=counts.rejected,
        max_in_flight=counts.max_in_flight,
        right=right,
        wrong=wrong,
        missing=missing,
        cpu_s=outcome["cpu_s"],
        versions=outcome["versions"],
    )


def call_worker(peer: Peer, job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the outcome that the peer's worker reports. One that takes too long is ended with all its processes."""
    command = [str(ROOT / ".venvs" / peer.environment / "bin/python"), str(WORKERS / peer.worker)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(folder),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(json.dumps(job), timeout=LIMIT_S + PREPARE_S)
    except subprocess.TimeoutExpired:
        late = f"did not finish within {LIMIT_S:g} s"
        return {"scores": [None] * len(job["items"]), "wall_s": LIMIT_S, "cpu_s": 0.0, "versions": {}, "error": late}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode or not out.strip():
        raise RuntimeError(f"{peer.name}: the worker failed with {process.returncode}:\n{err[-4000:]}")
    outcome: dict[str, Any] = json.loads(out.splitlines()[-1])
    return outcome


def environment(folder: str) -> dict[str, str]:
    """One thread for arithmetic, no network but loopback, and every cache in an empty folder."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "OPENAI_API_KEY": "EMPTY",
        "CUDA_VISIBLE_DEVICES": "",
        "FREEWHEEL_CACHE_DIR": folder,
        "XDG_CACHE_HOME": folder,
        "VERL_LOGGING_LEVEL": "CRITICAL",  # else it writes a line for each failed reward
    }


def runs_of(peers: Sequence[Peer], profile: JudgeProfile, items: list[dict[str, Any]]) -> list[Run]:
    runs = []
    for peer in peers:
        began = time.perf_counter()
        runs.append(run_peer(peer, profile, items))
        print(f"{peer.name}, {len(items)}: {time.perf_counter() - began:.0f} s with set-up", file=sys.stderr)
    return runs


def runs_table(runs: Sequence[Run]) -> str:
    cells = []
    for run in runs:
        seconds = f"{run.wall_s:.2f}" if run.finished else f"ended at {run.wall_s:.2f}"
        per_s = f"{run.per_s:.0f}" if run.finished and run.right else ""
        cpu_ms = f"{1000 * run.cpu_s / run.sent:.1f}" if run.sent else ""
        cells.append(
            (run.peer, run.requests, seconds, per_s, run.sent, run.rejected, run.max_in_flight, run.wrong, run.missing,
             f"{run.cpu_s:.1f}", cpu_ms)
        )  # fmt: skip
    head = ("", "scores", "s", "right/s", "calls", "429s", "max in flight", "wrong", "missing", "CPU s", "ms a call")
    return markdown_table(head, cells)


def judge_promises(runs: Sequence[Run]) -> list[Promise]:
    (ours,) = (run for run in runs if run.ours)
    right_s = [run.wall_s for run in runs if not run.ours and run.right == run.requests]
    promises = [at_most("judge: wrong", ours.wrong, 0), at_most("judge: missing", ours.missing, 0)]
    if right_s:
        ratio = ours.wall_s / min(right_s)
        promises.append(at_most("judge: seconds over the fastest right peer's", ratio, SLOWER_AT_MOST))
    return promises


def rewards_promises(runs: Sequence[Run]) -> list[Promise]:
    kept = []
    for run in runs:
        if run.ours:
            scene = f"rewards: {run.peer}, {run.requests}: "
            kept += [
                at_most(scene + "wrong", run.wrong, 0),
                at_most(scene + "missing", run.missing, 0),
                at_most(scene + "calls let in", run.sent - run.rejected, run.contents),
            ]
    return kept


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--judge", action="store_true", help="only the 1,024 requests to a judge")
    options.add_argument("--rewards", action="store_true", help="only the rewards inside verl and TRL")
    options.add_argument("--only", metavar="TEXT", default="", help="only peers whose name holds it, and ours")
    options.add_argument("--ray", action="store_true", help="rewards also through verl's eight Ray actors (slow)")
    asked = options.parse_args()
    both = asked.judge == asked.rewards
    missing = [name for name in ("verl", "trl", "peers") if not (ROOT / ".venvs" / name / "bin/python").exists()]
    if missing:
        print(f"environments are missing: make {' '.join(f'env-{name}' for name in missing)}", file=sys.stderr)
        return 2

    facts = machine_facts()
    began = time.perf_counter()
    print(f"{machine_line(facts)}\n")
    figures: dict[str, Any] = {}
    promises: list[Promise] = []
    if asked.judge or both:
        count = QUICK_REQUESTS if asked.quick else REQUESTS
        runs = runs_of([peer for peer in FOR_JUDGE if asked.only in peer.name or peer.ours], JUDGE, make_items(count))
        print(f"{count} requests, judge of 2 s on average, saturating at {KNEE}, 429 beyond {REJECT_ABOVE}, time 1:5\n")
        print(runs_table(runs) + "\n")
        figures["judge"] = {"profile": JUDGE, "runs": runs}
        promises += judge_promises(runs)
    if asked.rewards or both:
        runs = []
        for count in QUICK_SAMPLES if asked.quick else SAMPLES:
            all_peers = FOR_REWARDS + (IN_ACTORS if asked.ray else ())
            peers = [peer for peer in all_peers if asked.only in peer.name or peer.ours]
            runs += runs_of(peers, NARROW_JUDGE, make_items(count // COPIES, COPIES))
        print(f"rewards, each text {COPIES} times, judge of 0.1 s, 429 beyond {NARROW} (Retry-After 1 s)\n")
        print(runs_table(runs) + "\n")
        figures["rewards"] = {"profile": NARROW_JUDGE, "runs": runs}
        promises += rewards_promises(runs)
    runs = [run for part in figures.values() for run in part["runs"]]
    versions = {name: version for run in runs for name, version in run.versions.items()}
    print(", ".join(f"{name} {version}" for name, version in sorted(versions.items())))
    if (facts["load_1min"] or 0.0) > BUSY * facts["cores"]:
        print("the machine was busy before the start: take these figures as provisional")
    for run in (run for run in runs if run.error):
        print(f"{run.peer}, {run.requests}: {run.error}")
    print("\nA quick run is too short for these promises:" if asked.quick else "\nWhat was promised:")
    print(promise_table(promises))
    write_json(
        asked.json,
        {
            **figures,
            "versions": versions,
            "promises_kept": all(promise.kept for promise in promises),
            "wall_s": time.perf_counter() - began,
            "machine": facts,
        },
    )
    return exit_code(promises, quick=asked.quick)


if __name__ == "__main__":
    sys.exit(main())
