"""Invented run directories, as a run writes them, for tests of the readers and for benchmarks.

`make_run(folder, steps=…)` writes metrics, traces, samples, a log and the settings of a run that learns; `Writer`
appends to one while it is read.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from freewheel.data.group import Prompt, PromptGroup, Response, Ticket
from freewheel.judge.verdict import Scored
from freewheel.observe.metrics import METRICS
from freewheel.observe.snapshot import OLD_AFTER
from freewheel.observe.snapshot import PULSE_MAX_S as LATER_S
from freewheel.observe.snapshot import PULSE_MIN_S as EVERY_S
from freewheel.queue.journal import Committed, Journal, Stored, Took
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.start import write_config

BEGAN_S = 1_790_000_000.0
STEP_S = 2.0
GROUPS = 8
RESPONSES = 4
DEEP = b"[" * 100_000 + b"]" * 100_000
"""Valid JSON, nested too deeply for any decoder."""
VERDICT = (
    "judge-bound: 62% of trainer time waits for verdicts; raising its rate limit to 90/s would lift throughput 1.9x"
)


def config_of(folder: Path, *, steps: int, **changes: Any) -> TrainConfig:
    base = TrainConfig()
    trainer = msgspec.structs.replace(base.trainer, total_steps=steps, groups_per_step=GROUPS)
    return msgspec.structs.replace(base, run_dir=str(folder), trainer=trainer, **changes)


def reward(step: int, steps: int, seed: int) -> float:
    noise = random.Random(seed * 1_000_003 + step).gauss(0, 0.03)
    return 0.9 - 0.6 * math.exp(-3 * step / max(1, steps)) + noise


def step_row(step: int, steps: int, seed: int = 0) -> dict[str, Any]:
    """A row with as many metrics as a real one."""
    draw = random.Random(seed * 7919 + step)
    row = {"kind": "step", "step": step, "time": BEGAN_S + 10 + STEP_S * step, "tokens": GROUPS * RESPONSES * 15}
    row |= {one.name: round(draw.random(), 6) for one in METRICS if one.component in ("freshness", "rollout", "actor")}
    row |= {"sample_age_counts": [1, 3, 2, 1, draw.choice([0, 1])], "mine/of_a_hook": step % 7}
    row |= {"avg_sample_age": 1.2 + draw.random(), "max_sample_age": draw.choice([2, 3, 3, 4])}
    return row | {"rollout/reward_mean": reward(step, steps, seed)}


def eval_row(step: int, steps: int, seed: int = 0) -> dict[str, Any]:
    row = {"kind": "eval", "step": step, "time": BEGAN_S + 10.5 + STEP_S * step, "eval/correct": 0.5}
    row |= {"eval/reward": reward(step, steps, seed + 50) - 0.02, "eval/reward_se": 0.02, "eval/prompts": 128}
    return row | {"eval/response_length_mean": 15.2, "eval/truncation_ratio": 0.01}


def pulse_row(at_s: float, step: int, seed: int = 0) -> dict[str, Any]:
    draw = random.Random(seed * 31 + int(at_s * 10))
    waiting = 0.55 + draw.random() * 0.15
    row = {"kind": "pulse", "step": step, "time": BEGAN_S + at_s, "verdict": VERDICT}
    row |= {"queue_size": draw.randrange(0, 24), "in_progress": 24 + draw.randrange(0, 8)}
    row |= {"version": step, "published_version": max(0, step - 1), "samples_per_s": 40 + draw.random() * 5}
    row["tokens_per_s"] = 2400 + 500 * math.sin(at_s / 30) + draw.random() * 200
    trainer = {"train": 0.95 - waiting, "wait_batch": waiting, "pack": 0.02, "save": 0.01}
    rollouter = {"generate": 0.6, "wait_reward": 0.3, "wait_room": 0.05, "load_weights": 0.03}
    return row | {"waits": {"trainer": trainer, "rollouter-0": rollouter}}


def closing_row(steps: int) -> dict[str, Any]:
    """Return the last pulse of a run that finished or was stopped."""
    return {**pulse_row(12 + STEP_S * steps, steps), "last": True}


def judge_numbers(at_s: float, failed: dict[str, int]) -> dict[str, Any]:
    """Return the judge's statistics, with one endpoint."""
    done = int(at_s * 40)
    both = {"sent": done, "throttled": done // 400, "in_flight": 58, "limit": int(64 + 10 * math.sin(at_s / 20))}
    both |= {"faults": {"overloaded": done // 500, "timeout": done // 900}, "cost": done * 4e-5}
    end = {"url": "http://127.0.0.1:9/v1/chat/completions", "model": "judge-large", "answered": done, **both}
    end |= {"breaker": "closed", "halted": "", "prompt_tokens": done * 300, "completion_tokens": done * 4}
    end |= {"latency_p50_s": 1.4, "latency_p90_s": 2.6, "latency_p99_s": 5.2}
    row = {"submitted": int(done * 1.3), "scored": done, "skipped": 0, "failed": failed, "shared": done // 30, **both}
    row |= {"cache_hits": done // 5 + done // 10, "retries": done // 90, "reasks": 3, "queued": 14, "restarts": 0}
    return row | {"endpoints": [end]}


def statistics_row(at_s: float, step: int, *, judge: bool = True) -> dict[str, Any]:
    done, published = int(at_s * 40), max(0, step - 1)
    failed = {"timeout": done // 900, "unparseable": done // 2000}
    rewards: dict[str, Any] = {"in_flight": 60, "waiting": 12, "scored": done, "skipped": done // 20, "failed": failed}
    rewards |= {"retried_groups": 3, "dropped_groups": 0, "mean_latency_s": 1.7, "busy_s": at_s}
    if judge:
        rewards["judge"] = judge_numbers(at_s, failed)
    rollouter = {"total_generated_samples": done, "generated_tokens": done * 15, "slots": 32, "rewards": rewards}
    queue = {"queue_size": 9, "in_progress": 27, "version": step, "published_version": published, "paused": ""}
    queue |= {"waiting_for": "9 groups ready", "memory_bytes": 80_000, "dropped_by_reason": {"stale": 2}}
    sync = {"sync_failures": 1, "last_sync_s": 0.08, "mean_sync_s": 0.09, "longest_sync_s": 0.4, "state": "idle"}
    sync |= {"fenced": [], "versions": {"rollouter-0": published}, "param_sync_count": step}
    row = {"kind": "statistics", "step": step, "time": BEGAN_S + at_s, "trainer": {"global_steps": step}}
    return row | {"rollouter": rollouter, "queue": queue, "sync": sync}


def sync_row(version: int) -> dict[str, Any]:
    again = version % 17 == 0
    took = 0.08 + 0.01 * (version % 5) + (1.1 if again else 0)
    error = "TimeoutError: no word within 1 s" if again else ""
    engines = {"rollouter-0": {"took_s": took, "attempts": 2 if again else 1, "error": error}}
    row = {"kind": "sync", "step": version, "time": BEGAN_S + 10.2 + STEP_S * version, "version": version}
    return row | {"took_s": took, "bytes": 545_000, "engines": engines, "failed": False}


def rows(steps: int, *, seed: int = 0, judge: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run so far, in the order of time."""
    yield {"kind": "event", "step": 0, "time": BEGAN_S, "text": "Run directory: made"}
    yield {"kind": "event", "step": 0, "time": BEGAN_S + 9.5, "text": "Started in 9.5 s"}
    yield eval_row(0, steps, seed)
    next_pulse_s = 0.0
    for step in range(1, steps + 1):
        at_s = 10 + STEP_S * step
        yield step_row(step, steps, seed)
        yield sync_row(step)
        if step % 5 == 0:
            yield eval_row(step, steps, seed)
            yield statistics_row(at_s, step, judge=judge)
        for pulse_s in (at_s, at_s + 1):
            if pulse_s >= next_pulse_s:  # as `freewheel.observe.snapshot` records them: fewer in an older run
                next_pulse_s = pulse_s + min(LATER_S, max(EVERY_S, pulse_s / OLD_AFTER))
                yield pulse_row(pulse_s, step, seed)


def line(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def trace_lines(steps: int, *, first: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the events of the trainer and of the rollouter."""
    us = lambda s: int((BEGAN_S + 10 + s) * 1e6)  # noqa: E731
    trainer, rollouter = [], []

    def span(into: list[dict[str, Any]], pid: str, name: str, start: float, end: float, **args: Any) -> None:
        into.append({"ph": "X", "cat": "span", "name": name, "pid": pid, "tid": "main", "ts": us(start),
                     "dur": us(end) - us(start), "args": args})  # fmt: skip

    def phase(into: list[dict[str, Any]], pid: str, ordinal: int, name: str, start: float, end: float, **args: Any):
        same = {"cat": "group", "id": ordinal, "name": name, "pid": pid, "tid": "groups"}
        into.append({"ph": "b", **same, "ts": us(start), "args": args})
        into.append({"ph": "e", **same, "ts": us(end)})

    for step in range(first + 1, first + steps + 1):
        at = STEP_S * step
        span(trainer, "trainer", "wait_batch", at, at + 1.1)
        span(trainer, "trainer", "train", at + 1.1, at + 1.8, step=step)
        span(trainer, "trainer", "pack", at + 1.8, at + 1.9, step=step)
        span(rollouter, "rollouter-0", "generate", at, at + 1.2)
        span(rollouter, "rollouter-0", "wait_reward", at + 1.2, at + 1.9)
        span(rollouter, "rollouter-0", "load_weights", at + 1.9, at + 1.95, version=step)
        for index in range(GROUPS):
            ordinal, start = (step - 1) * GROUPS + index, at + 0.1 * index
            made = {"attempt": 0, "responses": RESPONSES, "tokens": 60}
            phase(rollouter, "rollouter-0", ordinal, "generate", start, start + 0.5, **made)
            for response in range(RESPONSES):
                end = start + 0.3 + 0.05 * response
                phase(rollouter, "rollouter-0", ordinal, "response", start, end, index=response, tokens=15)
                phase(rollouter, "rollouter-0", ordinal, "score", end, end + 0.6, index=response, status="scored")
            phase(rollouter, "rollouter-0", ordinal, "store", start + 1.1, start + 1.15)
            phase(trainer, "trainer", ordinal, "train", at + 3.1, at + 3.8, step=step, version=step, lag=1)
    return trainer, rollouter


def sample_row(ordinal: int, *, failed: bool = False, text: str = "") -> dict[str, Any]:
    draw = random.Random(ordinal)
    a, b, c = draw.randrange(2, 9), draw.randrange(2, 9), draw.randrange(1, 9)
    version, responses = ordinal // GROUPS, []
    for index in range(RESPONSES):
        correct, bad = draw.random() < 0.6, failed and index == 0
        steps, answer = f"{a}+{b}={a + b};", f"{a + b}-{c}#{a + b - c + (not correct)}"
        response = {"segments": [[version, steps], [version + 1, answer]], "tokens": len(steps + answer)}
        response["finish"] = "length" if index == 2 and ordinal % 3 == 0 else "stop"
        response |= {"value": None if bad else float(correct), "raw": None if bad else float(correct)}
        response |= {"status": "failed", "reason": "timeout"} if bad else {"status": "scored", "reason": ""}
        responses.append({**response, "parts": {} if bad else {"format": 1.0, "correct": float(correct)}})
    prompt = f"Mia has {a} apples and buys {b} more. She gives {c} to a friend. How many apples does she have now?"
    row = {"time": BEGAN_S + 12 + ordinal, "ordinal": ordinal, "sequence": ordinal + 3, "attempt": 0}
    row |= {"replica": "rollouter-0", "prompt": text or prompt, "responses": responses}
    return row | {"row": {"data_source": "word_problems", "answer": str(a + b - c)}}


def write_lines(path: Path, rows: Sequence[Any] | Iterator[Any], mode: str = "wb") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        for row in rows:
            file.write(line(row))
    return path


def make_run(
    folder: Path,
    *,
    steps: int = 40,
    total: int | None = None,
    seed: int = 0,
    judge: bool = True,
    killed: bool = False,
    **changes: Any,
) -> Path:
    """Write a run that was stopped, or `killed`, with all of its files but the journal."""
    write_config(config_of(folder, steps=total or steps, seed=seed, **changes))
    write_lines(folder / "metrics.jsonl", rows(steps, seed=seed, judge=judge))
    if not killed:
        write_lines(folder / "metrics.jsonl", [closing_row(steps)], "ab")
    trainer, rollouter = trace_lines(min(steps, 40))
    write_lines(folder / "trace/trainer-11.jsonl", trainer)
    write_lines(folder / "trace/rollouter-0-12.jsonl", rollouter)
    write_lines(folder / "samples/rollouter-0-12.jsonl", [sample_row(one, failed=one % 5 == 0) for one in range(60)])
    said = {"time": BEGAN_S + 30, "level": "WARNING", "run": folder.name, "role": "rollouter-0"}
    said["message"] = "slow judge"
    write_lines(folder / "log.jsonl", [{**said, "level": "INFO", "message": "fine"}, said])
    return folder


def write_journal(folder: Path, *, steps: int = 2) -> None:
    """Write a journal with two prompts a step, of words that the embedded model knows."""
    said = np.array([7, 12, 13, 14, 8], np.int32)
    journal = Journal(folder / "journal.sqlite")
    for number in range(1, steps + 1):
        stored = []
        for ordinal in (2 * number - 2, 2 * number - 1):
            response = Response(
                tokens=said, logprobs=np.zeros(5, np.float32), versions=np.array([0, 0, 0, 1, 1], np.int32),
                mask=np.ones(5, np.uint8), finish="stop", verdict=Scored(0.5), reward=0.5, raw_reward=0.5,
            )  # fmt: skip
            prompt = Prompt(tokens=np.array([5, 9, 11], np.int32), row={"data_source": "made"})
            ticket = Ticket(ordinal, ordinal)
            group = PromptGroup.of(ticket, prompt, [response, response], created_s=BEGAN_S)
            stored.append(Stored(ticket, 0, group.encode(), BEGAN_S + 5))
        journal.append([*stored, Took(number, tuple(one.ticket for one in stored))])
        journal.append([Committed(number, number, BEGAN_S + 20)])
    journal.close()


class Writer:
    """Appends to a run, as the recorder does."""

    def __init__(self, folder: Path, *, steps: int) -> None:
        self.folder = folder
        self.step = steps

    def add(self, *new: dict[str, Any]) -> None:
        write_lines(self.folder / "metrics.jsonl", new, "ab")

    def go_on(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            self.add(step_row(self.step, 100), sync_row(self.step), pulse_row(10 + STEP_S * self.step, self.step))

    def tear(self, text: bytes) -> None:
        """Write bytes that are not a whole line."""
        with (self.folder / "metrics.jsonl").open("ab") as file:
            file.write(text)
