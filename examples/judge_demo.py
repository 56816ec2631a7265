"""1,024 samples through an LLM judge, six ways: what waiting for a judge costs, and what is left of it.

    python examples/judge_demo.py

It starts a test judge on this machine and scores generated word problems with it; no network and no key are needed.
The judge behaves like many real ones: an answer takes 2 s on average, throughput saturates at 60 requests in flight,
and beyond 80 it refuses with 429. Time runs ten times faster here than there.

To score your own samples, `score` is all that is to be copied, with your endpoint and model in the config.
"""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from freewheel.judge import Judge, JudgeConfig, JudgeRequest, Scored
from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge

SAMPLES = 1024
TIME_SCALE = 0.1

JUDGE = JudgeProfile(
    latency="lognormal", latency_s=2.0, sigma=0.5, knee=60, reject_above=80, time_scale=TIME_SCALE, seed=1
)
NAIVE_SLICE = 16
"""All of them one at a time would take half an hour at the judge's own pace, so these few stand for the rest..."""
EVEN_JUDGE = JudgeProfile(latency="fixed", latency_s=2.0, time_scale=TIME_SCALE)
"""...and each takes the mean time, because sixteen drawn ones could be off by an eighth."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    samples: int
    seconds: float
    calls: int
    refused: int
    scored: int
    failed: int


def score(config: JudgeConfig, samples: list[JudgeRequest]) -> tuple[float, int, int]:
    """Judges the samples and returns (seconds, scored, failed)."""
    with Judge(config) as judge:
        judge.start().stats()  # ready before the clock starts; without this the first submit starts it
        began = time.perf_counter()
        handle = judge.submit(samples)  # returns at once: a trainer would go on here
        verdicts = handle.result()  # waits
        seconds = time.perf_counter() - began
    scored = sum(isinstance(verdict, Scored) for verdict in verdicts)
    return seconds, scored, len(verdicts) - scored


def word_problems(count: int, seed: int = 0) -> list[JudgeRequest]:
    """Problems with generated answers, all different; one answer in five is wrong."""
    rng = random.Random(seed)
    names = ("Ada", "Ben", "Chiara", "Dmitri", "Emeka", "Fatima", "Goran", "Hana")
    things = ("apples", "marbles", "stamps", "pencils", "shells")
    samples = []
    for number in range(count):
        name, thing = rng.choice(names), rng.choice(things)
        boxes, each, given = rng.randint(2, 12), rng.randint(3, 40), rng.randint(1, 6)
        right = boxes * each - given
        said = right if rng.random() < 0.8 else right + rng.choice((-10, -1, 1, 10))
        samples.append(
            JudgeRequest(
                prompt=f"{name} has {boxes} boxes with {each} {thing} each and gives {given} away. How many are left?",
                response=f"{boxes} x {each} = {boxes * each}; {boxes * each} - {given} = {said}. The answer is {said}.",
                reference=str(right),
                id=f"sample-{number}",
            )
        )
    return samples


def distinct(count: int) -> list[JudgeRequest]:
    """`count` problems without a repetition: equal ones would share a call, and flatter the figures."""
    by_content = {(sample.prompt, sample.response): sample for sample in word_problems(2 * count)}
    return list(by_content.values())[:count]


def half_repeated(samples: list[JudgeRequest]) -> list[JudgeRequest]:
    """As many samples, but only half as many contents: what a policy that repeats itself produces."""
    doubled = samples[: len(samples) // 2] * 2
    random.Random(0).shuffle(doubled)
    return doubled


def measure(
    name: str, server: RunningJudge, samples: list[JudgeRequest], *, cache_dir: str, concurrency: str = "auto"
) -> Row:
    server.reset(EVEN_JUDGE if concurrency == "fixed:1" else JUDGE)  # counts start at 0
    config = JudgeConfig(endpoint=server.url, model="mock-judge", cache_dir=cache_dir, concurrency=concurrency)
    seconds, scored, failed = score(config, samples)
    seen = server.counts()
    return Row(name, len(samples), seconds, seen.received, seen.rejected, scored, failed)


def run_all(server: RunningJudge, console: Console) -> list[Row]:
    samples = distinct(SAMPLES)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="freewheel-demo-") as scratch, console.status("") as status:

        def add(name: str, cache: str, some: list[JudgeRequest], concurrency: str = "auto") -> None:
            status.update(f"{name} …")
            rows.append(measure(name, server, some, cache_dir=f"{scratch}/{cache}", concurrency=concurrency))

        add("one at a time", "naive", samples[:NAIVE_SLICE], "fixed:1")
        add("20 at a time", "20", samples, "fixed:20")
        add("60 at a time", "60", samples, "fixed:60")
        add("freewheel auto", "auto", samples)  # knows nothing about the judge; the cache is empty
        add("half repeated", "repeated", half_repeated(samples))
        add("run again", "auto", samples)  # a new process, and the cache file of the run before
    return rows


def show(rows: list[Row], console: Console) -> None:
    title = f"{SAMPLES} samples, a judge of 2 s that saturates at 60 and refuses beyond 80"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # fits into 80 columns
    table.add_column("", no_wrap=True)
    for column in ("s here", "at 1:1", "per s", "faster", "calls", "429s", "scored", "failed"):
        table.add_column(column, justify="right")
    naive = rows[0]
    naive_s = naive.seconds / naive.samples * SAMPLES / TIME_SCALE
    for row in rows:
        share = row.samples / SAMPLES
        # Without a call nothing waits for the judge, and this machine's own time is not scaled.
        real_s = row.seconds / share / (TIME_SCALE if row.calls else 1.0)
        table.add_row(
            row.name + ("*" if share < 1 else ""),
            f"{row.seconds / share:.2f}",
            f"{real_s / 60:.0f} min" if real_s >= 120 else f"{real_s:.1f} s" if real_s >= 1 else f"{real_s:.2f} s",
            f"{SAMPLES / real_s:,.1f}" if row.calls else f"{SAMPLES / real_s:,.0f}",
            f"{naive_s / real_s:,.0f}x",
            f"{row.calls / share:.0f}",
            str(row.refused),
            str(row.scored),
            str(row.failed),
        )
    console.print(table)
    console.print(f"* extrapolated from {naive.samples} calls. Time runs 1:10 here; the next two columns convert.")


def main() -> None:
    console = Console()
    with MockJudge(JUDGE).in_process() as server:
        rows = run_all(server, console)
    show(rows, console)
    console.print("\nYour own file:   freewheel score in.jsonl out.jsonl --endpoint URL --model NAME")
    console.print("How it works:    docs/")


if __name__ == "__main__":
    main()
