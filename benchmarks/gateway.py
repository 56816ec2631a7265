"""Do eight processes behind the gateway stay at the judge's knee, and what does the gateway cost?

The test judge has lognormal latency with mean 2 s and sigma 0.5, saturates at 60 in flight, and answers 429 above 80
with `Retry-After: 1`; all times are scaled by 1:10. Judge, gateway and each client run in separate processes.

Per seed, one after the other, with the same contents and an empty cache directory each:
  single    one process with its own `Judge`
  gateway   8 processes, 60 requests in flight each, that know only the gateway's base URL
  direct    8 processes, 60 in flight each, straight to the judge: a limit per process; a 429 is tried again

The clock runs from the word "go" to the last answer; processes are started before it. Throughput is answers over that.

The overhead compares the same request to the same judge (without latency), straight and through the gateway in turns,
one at a time. `overhead_at_knee_ms` does so with 60 in flight at a judge of 0.2 s, half of the workers through the
gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import psutil

from common import (
    at_least,
    at_most,
    exit_code,
    machine_facts,
    machine_line,
    markdown_table,
    median,
    parser,
    promise_table,
    running_judge,
    scratch_dir,
    write_json,
)
from freewheel.judge import JudgeConfig, JudgeRequest, Scored
from freewheel.judge.request import PromptBuilder
from freewheel.judge.rubric import load_rubric
from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge

MODEL = "mock-judge"
CLIENTS, IN_FLIGHT = 8, 60
REQUESTS = 2400
"""Eight seconds at the knee, so that the limiter's slow start is a small part."""
SEEDS = 3
PAIRS = 400
ROUNDS = 3
"""Rounds of the overhead measurement. Their median counts, because another program may disturb one of them."""
KNEE_REQUESTS = 900
"""Three seconds at a judge of 0.2 s."""
QUICK_REQUESTS, QUICK_PAIRS, QUICK_KNEE = 480, 50, 120
WARM_UP = 50
WAIT_S = 120.0
"""Longer than any run takes."""

PROFILE = JudgeProfile(
    latency="lognormal", latency_s=2.0, sigma=0.5, knee=60, reject_above=80, retry_after_s=1.0, time_scale=0.1
)
STEADY = JudgeProfile(latency="fixed", latency_s=0.2)


class Run(msgspec.Struct, kw_only=True):
    """One scene and the judge's counts of it."""

    scene: str
    seed: int
    wall_s: float
    answered: int
    failed: int
    sent: int
    rejected: int
    max_in_flight: int
    gateway_cpu_us: float = 0.0
    """CPU of the gateway's process per answer."""

    @property
    def per_s(self) -> float:
        return self.answered / self.wall_s


def requests_of(seed: int, count: int) -> list[JudgeRequest]:
    return [
        JudgeRequest(
            prompt=f"Seed {seed}, problem {n}: {n % 89 + 2} boxes hold {n % 97 + 3} pencils each. How many are there?",
            response=f"There are {(n % 89 + 2) * (n % 97 + 3)}. Each box holds {n % 97 + 3}, so one multiplies. " * 4,
        )
        for n in range(count)
    ]


def bodies_of(requests: list[JudgeRequest]) -> list[bytes]:
    """The bodies that a `Judge` would send, so that the judge takes equally long for every client."""
    prompts = PromptBuilder(load_rubric("integer"), b"0" * 32)
    return [
        msgspec.json.encode(
            {
                "model": MODEL,
                "messages": [
                    {"role": "system", "content": prompts.system},
                    {"role": "user", "content": prompts.user(request)},
                ],
                "temperature": 0.0,
            }
        )
        for request in requests
    ]


# -- a client, in its own process --------------------------------------------------------------------------------------


class Client:
    """Ordinary judge code: a pool of connections, a semaphore, and retries after 429s."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.failed = 0

    async def ask(self, body: bytes) -> None:
        while True:
            async with self._session.post(self._url, data=body) as reply:
                content = await reply.read()
                if reply.status == 429:
                    wait_s = float(reply.headers.get("Retry-After", "1"))
                elif reply.status == 200:
                    int(json.loads(content)["choices"][0]["message"]["content"])
                    return
                else:
                    self.failed += 1
                    return
            await asyncio.sleep(wait_s)


async def run_client(url: str, seed: int, count: int, part: int) -> dict[str, int]:
    bodies = bodies_of(requests_of(seed, count)[part::CLIENTS])
    left = iter(bodies)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"}) as session:
        client = Client(session, url)

        async def worker() -> None:
            for body in left:
                await client.ask(body)

        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return {"answered": len(bodies) - client.failed, "failed": client.failed}


def run_clients(url: str, seed: int, count: int) -> tuple[float, int, int]:
    """Return (seconds from "go" to the last answer, answered, failed)."""
    command = [sys.executable, __file__, "--client-of", url, "--seed", str(seed), "--count", str(count)]
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(
                subprocess.Popen([*command, "--part", str(part)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            for part in range(CLIENTS)
        ]
        for client in clients:
            assert client.stdout is not None and client.stdout.readline() == b"ready\n"
        began = time.perf_counter()
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(b"go\n")
            client.stdin.flush()
        told = [json.loads(client.communicate(timeout=WAIT_S)[0]) for client in clients]
        wall_s = time.perf_counter() - began
    return wall_s, sum(t["answered"] for t in told), sum(t["failed"] for t in told)


# -- scenes -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running_gateway(endpoint: str, cache_dir: str, *flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """`freewheel serve` as users start it. Yields the address of its chat completions and its process."""
    command = [sys.executable, "-m", "freewheel", "serve", "--endpoint", endpoint, "--model", MODEL]
    command += ["--cache-dir", cache_dir, "--port", "0", "--json", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()) as gateway:
        assert gateway.stdout is not None
        try:
            ready = json.loads(gateway.stdout.readline())
            yield f"{ready['endpoint']}/chat/completions", psutil.Process(gateway.pid)
        finally:
            gateway.terminate()
            gateway.wait(WAIT_S)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "FREEWHEEL_GATEWAY_TOKEN"}


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def run_scene(scene: str, mock: RunningJudge, seed: int, count: int) -> Run:
    mock.reset(msgspec.structs.replace(PROFILE, seed=seed))
    cpu_us = 0.0
    with scratch_dir() as cache_dir:
        if scene == "single":
            with running_judge(JudgeConfig(endpoint=mock.url, model=MODEL, cache_dir=cache_dir)) as (judge, _):
                work = requests_of(seed, count)
                began = time.perf_counter()
                verdicts = judge.submit(work).result()
                wall_s = time.perf_counter() - began
            answered = sum(isinstance(verdict, Scored) for verdict in verdicts)
            failed = count - answered
        elif scene == "direct":
            wall_s, answered, failed = run_clients(mock.url, seed, count)
        else:
            with running_gateway(mock.url, cache_dir) as (url, process):
                before = cpu_s(process)
                wall_s, answered, failed = run_clients(url, seed, count)
                cpu_us = (cpu_s(process) - before) / count * 1e6
    counts = mock.counts()
    return Run(
        scene=scene,
        seed=seed,
        wall_s=wall_s,
        answered=answered,
        failed=failed,
        sent=counts.received,
        rejected=counts.rejected,
        max_in_flight=counts.max_in_flight,
        gateway_cpu_us=cpu_us,
    )


# -- overhead ---------------------------------------------------------------------------------------------------------


async def timed(session: aiohttp.ClientSession, url: str, body: bytes) -> float:
    began = time.perf_counter()
    async with session.post(url, data=body) as reply:
        await reply.read()
        assert reply.status == 200
    return (time.perf_counter() - began) * 1e3


async def pairs_ms(direct: str, through: str, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of equal requests, straight and through the gateway in turns, one at a time."""
    bodies = bodies_of(requests_of(0, 2 * (count + WARM_UP)))
    taken: tuple[list[float], list[float]] = ([], [])
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:
        for number, body in enumerate(bodies):
            taken[number % 2].append(await timed(session, (direct, through)[number % 2], body))
    return taken[0][WARM_UP:], taken[1][WARM_UP:]


async def crowd_ms(direct: str, through: str, count: int) -> tuple[list[float], list[float]]:
    """The same with `IN_FLIGHT` at a time, every second worker through the gateway."""
    left = iter(bodies_of(requests_of(1, count)))
    taken: tuple[list[float], list[float]] = ([], [])
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"}) as session:

        async def worker(number: int) -> None:
            await asyncio.sleep(number / IN_FLIGHT * STEADY.latency_s)  # spread out, as they are in a running system
            for body in left:
                taken[number % 2].append(await timed(session, (direct, through)[number % 2], body))

        await asyncio.gather(*(worker(number) for number in range(IN_FLIGHT)))
    return taken[0][IN_FLIGHT:], taken[1][IN_FLIGHT:]


def overheads(pairs: int, crowd: int) -> dict[str, float]:
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        with (
            scratch_dir() as cache_dir,
            MockJudge(JudgeProfile()).in_process() as mock,
            running_gateway(mock.url, cache_dir, "--concurrency", f"fixed:{IN_FLIGHT}") as (url, _),
        ):
            straight, through = asyncio.run(pairs_ms(mock.url, url, pairs))
            mock.reset(STEADY)
            straight_crowd, through_crowd = asyncio.run(crowd_ms(mock.url, url, crowd))
        rounds.append(
            {
                "overhead_p50_ms": median(through) - median(straight),
                "direct_p50_ms": median(straight),
                "through_p50_ms": median(through),
                "overhead_at_knee_ms": median(through_crowd) - median(straight_crowd),
                "direct_at_knee_p50_ms": median(straight_crowd),
                "through_at_knee_p50_ms": median(through_crowd),
            }
        )
    return {name: median([one[name] for one in rounds]) for name in rounds[0]}


# -- the whole --------------------------------------------------------------------------------------------------------


def scene_table(runs: dict[str, list[Run]]) -> str:
    names = {"single": "one process", "gateway": "8 x 60, gateway", "direct": "8 x 60, direct"}
    rows = [
        (
            names[scene],
            f"{median([run.wall_s for run in each]):.2f}",
            f"{median([run.per_s for run in each]):.0f}",
            f"{median([run.sent for run in each]):.0f}",
            f"{median([run.rejected for run in each]):.0f}",
            f"{median([run.max_in_flight for run in each]):.0f}",
            sum(run.failed for run in each),
        )
        for scene, each in runs.items()
    ]
    return markdown_table(("scene", "s (1:10)", "answers/s", "calls", "429s", "max in flight", "failed"), rows)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=SEEDS, help=f"repetitions, interleaved (default {SEEDS})")
    options.add_argument("--client-of", help=argparse.SUPPRESS)
    for name in ("--seed", "--count", "--part"):
        options.add_argument(name, type=int, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.client_of:
        print(json.dumps(asyncio.run(run_client(asked.client_of, asked.seed, asked.count, asked.part))))
        return 0
    count, pairs, crowd = (QUICK_REQUESTS, QUICK_PAIRS, QUICK_KNEE) if asked.quick else (REQUESTS, PAIRS, KNEE_REQUESTS)
    seeds = 1 if asked.quick else asked.seeds

    facts = machine_facts()
    began = time.perf_counter()
    runs: dict[str, list[Run]] = {"single": [], "gateway": [], "direct": []}
    with MockJudge(PROFILE).in_process() as mock:
        for seed in range(1, seeds + 1):
            for scene, done in runs.items():
                done.append(run_scene(scene, mock, seed, count))
            print(f"seed {seed} of {seeds}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    fields: dict[str, Any] = {
        "ratio_to_single": median(
            [through.per_s / one.per_s for through, one in zip(runs["gateway"], runs["single"], strict=True)]
        ),
        "rejected_share": median([run.rejected / run.sent for run in runs["gateway"]]),
        "failed": sum(run.failed for run in runs["gateway"]),
        **overheads(pairs, crowd),
        "gateway_cpu_us": median([run.gateway_cpu_us for run in runs["gateway"]]),
        "direct_rejected_share": median([run.rejected / run.sent for run in runs["direct"]]),
        "direct_ratio_to_single": median(
            [crowd.per_s / one.per_s for crowd, one in zip(runs["direct"], runs["single"], strict=True)]
        ),
    }
    promises = [
        at_least("ratio_to_single", fields["ratio_to_single"], 0.9),
        at_most("overhead_p50_ms", fields["overhead_p50_ms"], 2),
        at_most("rejected_share", fields["rejected_share"], 0.02),
        at_most("failed", fields["failed"], 0),
    ]
    print(f"{count} requests, judge of 2 s on average, saturating at 60, 429 beyond 80 (Retry-After 1 s), time 1:10")
    print(f"medians of {seeds} seeds; {machine_line(facts)}\n")
    print(scene_table(runs))
    print(
        f"\none at a time: {fields['direct_p50_ms']:.2f} ms straight, {fields['through_p50_ms']:.2f} ms through; "
        f"60 at a time: {fields['direct_at_knee_p50_ms']:.1f} ms, {fields['through_at_knee_p50_ms']:.1f} ms; "
        f"the gateway's CPU: {fields['gateway_cpu_us']:.0f} µs an answer\n"
    )
    print("A quick run is too short for these promises:" if asked.quick else "What was promised:")
    print(promise_table(promises))
    write_json(
        asked.json,
        {
            **fields,
            "promises_kept": all(promise.kept for promise in promises),
            "requests": count,
            "clients": CLIENTS,
            "in_flight": IN_FLIGHT,
            "seeds": seeds,
            "profile": PROFILE,
            "runs": runs,
            "wall_s": time.perf_counter() - began,
            "machine": facts,
        },
    )
    return exit_code(promises, quick=asked.quick)


if __name__ == "__main__":
    sys.exit(main())
