"""What the engine itself costs: CPU per request against a bare HTTP client and the SDK, and next to a busy trainer.

    python benchmarks/judge_overhead.py [--json FILE] [--requests N] [--in-flight N] [--quick]

Each client runs in a separate process against a judge without latency; its CPU includes all its child processes.
`bare` is aiohttp + uvloop + orjson with the same bodies and nothing else: no cache, no retries, no limiter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from common import machine_facts, markdown_table, write_json
from freewheel.judge import Judge, JudgeConfig, JudgeRequest
from freewheel.judge.request import PromptBuilder
from freewheel.judge.rubric import load_rubric
from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge

MODEL = "judge"
WARM_UP = 512
OFFERED_PER_S = 270
"""The rate in DESIGN's placement measurement: what one judge of 0.2 s with its knee at 60 can serve."""


def requests(count: int, tag: str) -> list[JudgeRequest]:
    filler = "The train covers 60 km in the first hour and 45 km in the second, so the average is 52.5 km/h. " * 4
    return [
        JudgeRequest(f"{tag} {i}: {filler}", f"A train goes 60 km, then 45 km. Mean speed? ({i})") for i in range(count)
    ]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def engine_cpu(url: str, count: int, in_flight: int) -> float:
    """Seconds of CPU for `count` requests through a Judge in its default configuration, at a fixed concurrency."""
    with (
        tempfile.TemporaryDirectory() as cache,
        Judge(JudgeConfig(endpoint=url, model=MODEL, concurrency=f"fixed:{in_flight}", cache_dir=cache)) as judge,
    ):
        judge.submit(requests(WARM_UP, "warm")).result()
        processes = [psutil.Process(), *psutil.Process().children()]
        work = requests(count, "work")
        before = sum(map(cpu_s, processes))
        verdicts = judge.submit(work).result()
        after = sum(map(cpu_s, processes))
    assert all(verdict.status == "scored" for verdict in verdicts)
    return after - before


def bodies(count: int, tag: str) -> list[dict[str, Any]]:
    prompts = PromptBuilder(load_rubric("integer"), b"0" * 32)
    return [
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": prompts.system}, {"role": "user", "content": prompts.user(r)}],
            "temperature": 0.0,
        }
        for r in requests(count, tag)
    ]


async def in_parallel(
    work: list[dict[str, Any]], in_flight: int, ask: Callable[[Any], Coroutine[Any, Any, None]]
) -> None:
    left = iter(work)

    async def worker() -> None:
        for body in left:
            await ask(body)

    await asyncio.gather(*(worker() for _ in range(in_flight)))


async def measured(count: int, in_flight: int, ask: Callable[[Any], Coroutine[Any, Any, None]]) -> float:
    await in_parallel(bodies(WARM_UP, "warm"), in_flight, ask)
    work = bodies(count, "work")
    before = time.process_time()
    await in_parallel(work, in_flight, ask)
    return time.process_time() - before


async def bare_cpu(url: str, count: int, in_flight: int) -> float:
    import aiohttp
    import orjson

    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def ask(body: dict[str, Any]) -> None:
            async with session.post(url, data=orjson.dumps(body)) as response:
                int(orjson.loads(await response.read())["choices"][0]["message"]["content"])

        return await measured(count, in_flight, ask)


async def sdk_cpu(url: str, count: int, in_flight: int) -> float:
    import openai

    async with openai.AsyncOpenAI(base_url=url.removesuffix("/chat/completions"), api_key="none") as client:

        async def ask(body: dict[str, Any]) -> None:
            completion = await client.chat.completions.create(**body)
            int(completion.choices[0].message.content or "")

        return await measured(count, in_flight, ask)


def run_one(side: str, url: str, count: int, in_flight: int) -> float:
    """Microseconds of CPU per request of one side, in this process."""
    if side == "engine":
        return engine_cpu(url, count, in_flight) / count * 1e6
    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    side_cpu = {"bare": bare_cpu, "openai": sdk_cpu}[side]
    return asyncio.run(side_cpu(url, count, in_flight)) / count * 1e6


def side_us(side: str, url: str, count: int, in_flight: int) -> float:
    command = [
        sys.executable,
        __file__,
        "--side",
        side,
        "--url",
        url,
        "--requests",
        str(count),
        "--in-flight",
        str(in_flight),
    ]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def busy(seconds: float, between: Callable[[], None]) -> float:
    """Run Python code for `seconds` and `between` every 0.1 s; return the share of that time in which this thread ran.

    It reads the thread's CPU clock instead of counting work, because the speed of a virtual core varies by more than
    the effect to be measured.
    """
    due = 0.0
    began, ran = time.perf_counter(), time.thread_time()
    while (now := time.perf_counter()) < began + seconds:
        if now >= due:
            due = now + 0.1
            between()
        sum(range(500))
    return (time.thread_time() - ran) / (time.perf_counter() - began)


def main_thread_share(url: str, seconds: float, rounds: int, placement: str) -> tuple[float, float]:
    """Return (CPU share of a busy main thread next to the engine over its share alone, verdicts/s meanwhile)."""
    shares, rates = [], []
    with (
        tempfile.TemporaryDirectory() as cache,
        Judge(JudgeConfig(endpoint=url, model=MODEL, cache_dir=cache, placement=placement)) as judge,
    ):
        judge.submit(requests(WARM_UP, "warm")).result()
        for turn in range(rounds):
            handles: list[Any] = []

            def offer(turn: int = turn, handles: list[Any] = handles) -> None:
                handles.append(judge.submit(requests(OFFERED_PER_S // 10, f"turn {turn} {len(handles)}")))

            def prepare_only(turn: int = turn) -> None:
                requests(OFFERED_PER_S // 10, f"alone {turn}")

            alone = busy(seconds, prepare_only)
            during = busy(seconds, offer)
            rates.append(sum(handle.progress().scored for handle in handles) / seconds)
            for handle in handles:
                handle.result()
            shares.append(during / ((alone + busy(seconds, prepare_only)) / 2))
    return statistics.median(shares), statistics.median(rates)


def memory_growth_mb(mock: RunningJudge, count: int, in_flight: int) -> tuple[float, float]:
    """(MB of caller and engine after half of `count`, MB added by the end)."""
    step = 2000
    with (
        tempfile.TemporaryDirectory() as cache,
        Judge(JudgeConfig(endpoint=mock.url, model=MODEL, concurrency=f"fixed:{in_flight}", cache_dir=cache)) as judge,
    ):
        judge.submit(requests(1, "warm")).result()
        engine = [
            child for child in psutil.Process().children() if "freewheel.judge.transport" in " ".join(child.cmdline())
        ]
        processes = [psutil.Process(), *engine]
        early = 0.0
        for number in range(count // step):
            verdicts = judge.submit(requests(step, f"memory {number}")).result()
            assert all(verdict.status == "scored" for verdict in verdicts)
            if (number + 1) * step >= count // 2 and not early:
                early = sum(process.memory_info().rss for process in processes) / 2**20
        late = sum(process.memory_info().rss for process in processes) / 2**20
    return early, late - early


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--in-flight", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-requests", type=int, default=200_000)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--side", choices=("engine", "bare", "openai"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(run_one(args.side, args.url, args.requests, args.in_flight))
        return
    scale = 10 if args.quick else 1
    count = args.requests // scale
    with MockJudge(JudgeProfile(latency_s=0.0)).in_process() as mock:
        figures: dict[str, list[float]] = {"engine": [], "bare": [], "openai": []}
        for _ in range(args.rounds):
            for side, taken in figures.items():
                taken.append(side_us(side, mock.url, count // 5 if side == "openai" else count, args.in_flight))
        engine_us, bare_us, openai_us = (statistics.median(figures[side]) for side in ("engine", "bare", "openai"))
        share, rate = main_thread_share(mock.url, 2 / scale, 4 * args.rounds, "process")
        thread_share, thread_rate = main_thread_share(mock.url, 2 / scale, args.rounds, "thread")
        early, growth = memory_growth_mb(mock, args.memory_requests // scale, args.in_flight)
    result = {
        "engine_us": engine_us,
        "bare_us": bare_us,
        "openai_us": openai_us,
        "ratio_to_bare": engine_us / bare_us,
        "ratio_to_openai": openai_us / engine_us,
        "main_thread_share": share,
        "judged_per_s_beside": rate,
        "thread_main_thread_share": thread_share,
        "thread_judged_per_s_beside": thread_rate,
        "memory_mb": early,
        "memory_growth_mb": growth,
        "requests": count,
        "in_flight": args.in_flight,
        "machine": machine_facts(),
    }
    rows = [
        ["CPU per request, engine (all processes)", f"{engine_us:.0f} µs"],
        ["CPU per request, bare aiohttp + uvloop + orjson", f"{bare_us:.0f} µs"],
        ["CPU per request, openai SDK", f"{openai_us:.0f} µs"],
        ["engine / bare", f"{engine_us / bare_us:.2f}"],
        ["openai / engine", f"{openai_us / engine_us:.1f}"],
        [f"busy main thread keeps, {OFFERED_PER_S} req/s offered, process", f"{share:.1%} (judged {rate:.0f}/s)"],
        ["the same, thread placement", f"{thread_share:.1%} (judged {thread_rate:.0f}/s)"],
        [
            f"memory after {args.memory_requests // scale // 2} requests, and growth by twice as many",
            f"{early:.0f} MB, {growth:+.1f} MB",
        ],
    ]
    print(markdown_table(["what", "figure"], rows))
    if args.json:
        write_json(args.json, json.loads(json.dumps(result)))


if __name__ == "__main__":
    main()
