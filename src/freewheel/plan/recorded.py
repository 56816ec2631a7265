"""`Recorded`: what a run directory says of a run, in numbers. Read beside a live run or on a dead one; never written.

    RUN/metrics.jsonl ─┬─ step: train_s, response lengths, wall time ─┐
                       ├─ event: whether a GPU was shared             │
                       └─ statistics: engine time, tokens, slots      ├─▶ Recorded ─▶ `freewheel.plan.measured`
    RUN/trace/*.jsonl ─── lengths, scores, packing, loading, storing ─┘

What is not recorded is None, or empty, and said in `notes`. Imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from freewheel.errors import ConfigError
from freewheel.observe.recorder import read_metrics
from freewheel.observe.trace import read_trace
from freewheel.rollout.outbox import PUT_LINGER_S
from freewheel.runtime.bottleneck import HELD_BACK, held_back, settled

LEAST_STEPS = 3
"""Of fewer nothing can be told: the first waits for everything to start."""
MICROSECOND = 1e-6
LEAST_APART = 4
"""Tokens by which two responses must differ to tell the time of a step."""
SHORTEST = 0.1
"""Of such times, the share that is passed over: the shortest are of responses that began at different steps."""
MOST_WARMING = 0.5
"""Of a run's tokens, what may be passed over as its beginning."""
BUSY_AND_TOKENS = ("engine_busy_s", "generated_tokens")
ELAPSED, TRAIN, WAIT = "timing/elapsed_s", "timing/train_s", "timing/wait_batch_s"
LENGTH = "rollout/response_length_mean"
STEP_NUMBERS = ("step", ELAPSED, TRAIN, WAIT, LENGTH, "avg_sample_age", "max_sample_age")
"""Of a step's row: one that lacks any of them, such as another version's, is passed over."""
LARGEST = 1e18
"""No number of a run is above it: one that is was not written by a run."""
LEAST_GROUPS = 20
"""Of fewer the shortest says nothing."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One run."""

    steps: int
    """That are looked at."""
    step_s: float
    """From the end of a step to the end of the next, on average."""
    train_s: tuple[float, ...]
    """By step."""
    step_tokens: tuple[float, ...]
    """By step: tokens of the responses that were trained on."""
    trainer_waits: float
    lag_mean: float
    lag_max: int
    replicas: int
    slots: int
    """Of each replica."""
    busy_per_token_s: float
    """Time of an engine that decodes, for each token that it made."""
    decode_s: float | None = None
    """Of one decoding step while no prompt is read: by how much later a longer response of a group ends."""
    lengths: tuple[float, ...] = ()
    """Tokens of single responses."""
    latencies_s: tuple[float, ...] = ()
    """Of single scores."""
    scored_per_s: float | None = None
    """Where responses waited for the judge's limit, or for a permit, most of the time: those that got their score."""
    pack_s: float = 0.0
    load_s: float = 0.0
    """For which an engine stands still to take a version."""
    sync_s: float = 0.0
    """Of a version, from the first transfer to the last confirmation."""
    put_s: float = 0.0
    shared_gpu: bool | None = None
    """Training and generation had one GPU between them. None: the run did not say."""
    notes: tuple[str, ...] = ()


def read(run_dir: Path, *, n: int, groups_per_step: int, window: tuple[int, int] | None = None) -> Recorded:
    """`window`: steps between whose ends is looked; None: all but those that fill the pipeline."""
    everything = read_metrics(run_dir)
    rows, statistics = _steps(everything), _statistics(everything)
    if len(rows) < LEAST_STEPS or not statistics:
        remedy = (
            f"{len(rows)} steps are recorded there since it last began: at least {LEAST_STEPS}, and one `statistics` "
            "row with the engines' numbers, are needed"
        )
        raise ConfigError("RUN", str(run_dir), remedy)
    first, last = window or (_filled(sorted(rows)), max(rows))
    within = [row for step, row in sorted(rows.items()) if first < step <= last]
    if first not in rows or not within:
        raise ConfigError("window", (first, last), f"{run_dir} has not recorded these steps since it last began")
    step_s = (within[-1][ELAPSED] - rows[first][ELAPSED]) / (within[-1]["step"] - first)
    train_s, lengths_mean = tuple(row[TRAIN] for row in within), [row[LENGTH] for row in within]
    if not (step_s > 0 and sum(train_s) > 0 and min(lengths_mean) > 0):
        raise ConfigError("RUN", str(run_dir), "its steps took no time, or have responses without a token: no run does")
    traced = Traced.of(read_trace(run_dir))
    rollouter = _part(statistics[-1], "rollouter")
    replicas = max(1, len(traced.rollouters) or len(_rollouters(everything)))
    notes = []
    lengths = traced.lengths
    if not lengths:
        notes.append("single lengths are not recorded (observe.trace_every): every response has the mean length")
        lengths = (fmean(lengths_mean),)
    scored_per_s = _scored_per_s(statistics, replicas)
    latencies = traced.latencies_s if scored_per_s is None else _asked_alone(rollouter) or traced.latencies_s
    if not latencies:
        notes.append("single scores are not recorded (observe.trace_every): each takes the mean time")
        latencies = (_number(_part(rollouter, "rewards").get("mean_latency_s")) or 0.0,)
    busy_s, tokens = _grown([_counted(row) for row in statistics])
    if busy_s <= 0 or tokens <= 0:
        raise ConfigError("RUN", str(run_dir), "its engines have not said how long they were busy: let it run longer")
    samples = n * groups_per_step
    return Recorded(
        steps=len(within),
        step_s=step_s,
        train_s=train_s,
        step_tokens=tuple(samples * length for length in lengths_mean),
        trainer_waits=fmean(row[WAIT] for row in within) / step_s,
        lag_mean=fmean(row["avg_sample_age"] for row in within),
        lag_max=int(max(row["max_sample_age"] for row in within)),
        replicas=replicas,
        slots=max(1, int(_number(rollouter.get("slots")) or replicas) // replicas),
        busy_per_token_s=busy_s / tokens,
        decode_s=traced.decode_s,
        lengths=tuple(lengths),
        latencies_s=tuple(latencies),
        scored_per_s=scored_per_s,
        pack_s=_mean(traced.spans.get("pack", ())),
        load_s=_mean(traced.spans.get("load_weights", ())),
        sync_s=_number(_part(statistics[-1], "sync").get("mean_sync_s")) or 0.0,
        put_s=_unshared(traced.stores_s),
        shared_gpu=_shared_gpu(everything),
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What of a trace matters here."""

    lengths: tuple[float, ...]
    latencies_s: tuple[float, ...]
    stores_s: tuple[float, ...]
    decode_s: float | None
    spans: Mapping[str, Sequence[float]]
    """Seconds by name, of trainer and rollouters."""
    rollouters: frozenset[str]

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Traced:
        phases: dict[str, list[float]] = {"response": [], "score": [], "store": []}
        spans: dict[str, list[float]] = {}
        rollouters = set()
        ends: dict[tuple[str, int], list[tuple[float, float]]] = {}
        begun: Mapping[str, Any] = {}
        for event in events:
            kind, name = event["ph"], event["name"]
            if event["pid"].startswith("rollouter"):
                rollouters.add(event["pid"])
            if kind == "X":
                spans.setdefault(name, []).append(event["dur"] * MICROSECOND)
            elif kind == "b" and name in phases:
                begun = event
            elif kind == "e" and name in phases and (begun.get("id"), begun.get("name")) == (event["id"], name):
                if name != "response":
                    phases[name].append((event["ts"] - begun["ts"]) * MICROSECOND)
                elif (tokens := begun.get("args", {}).get("tokens")) is not None:
                    phases[name].append(float(tokens))
                    ended = (float(tokens), event["ts"] * MICROSECOND)
                    ends.setdefault((event["pid"], event["id"]), []).append(ended)
        return cls(
            lengths=tuple(phases["response"]),
            latencies_s=tuple(phases["score"]),
            stores_s=tuple(phases["store"]),
            decode_s=decode_step(ends.values()),
            spans=spans,
            rollouters=frozenset(rollouters),
        )


def decode_step(groups: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """The time of a step, from (tokens, end) of each group's responses: they begin together, so that one with more
    tokens ends so many steps later. Prompts that are read meanwhile make it longer, and what entered earlier shorter:
    the shortest but a few count. None where no two lengths of a group differ enough."""
    found = []
    for ends in groups:
        ordered = sorted(ends)
        (fewest, first), (most, last) = ordered[0], ordered[-1]
        if most - fewest >= LEAST_APART and last > first:
            found.append((last - first) / (most - fewest))
    return sorted(found)[int(len(found) * SHORTEST)] if len(found) >= LEAST_GROUPS else None


def _filled(steps: Sequence[int]) -> int:
    """A fifth of the steps fills the pipeline, at least one."""
    return steps[max(0, len(steps) // 5 - 1)]


def _number(value: object) -> float | None:
    """None: it is no number of a run."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST
    return float(value) if is_number else None  # type: ignore[arg-type]


def _part(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = row.get(name)
    return found if isinstance(found, Mapping) else {}


def _steps(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Whole rows by step, since the trainer's clock last began: it does with a resumed run, and with a trainer that
    takes another's place."""
    found: dict[int, dict[str, float]] = {}
    before = 0.0
    for row in rows:
        numbers = {name: number for name in STEP_NUMBERS if (number := _number(row.get(name))) is not None}
        if row.get("kind") != "step" or len(numbers) < len(STEP_NUMBERS):
            continue
        if numbers[ELAPSED] <= before:
            found = {}
        before = numbers[ELAPSED]
        found[int(numbers["step"])] = numbers
    return found


def _statistics(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows with the engines' counters, since these last began."""
    found: list[Mapping[str, Any]] = []
    for row in rows:
        engines = _part(row, "rollouter")
        if row.get("kind") != "statistics" or any(_number(engines.get(name)) is None for name in BUSY_AND_TOKENS):
            continue
        if found and any(now < before for now, before in zip(_counted(row), _counted(found[-1]), strict=True)):
            found = []
        found.append(row)
    return found


def _counted(row: Mapping[str, Any]) -> tuple[float, float]:
    busy_s, tokens = (_number(_part(row, "rollouter").get(name)) or 0.0 for name in BUSY_AND_TOKENS)
    return busy_s, tokens


def _rollouters(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    return {
        name
        for row in rows
        if row.get("kind") == "pulse"
        for name in _part(row, "waits")
        if name.startswith("rollouter")
    }


def _shared_gpu(rows: Iterable[Mapping[str, Any]]) -> bool | None:
    """As it was said when the run last began."""
    said = [row["shared_gpu"] for row in rows if row.get("kind") == "event" and isinstance(row.get("shared_gpu"), bool)]
    return said[-1] if said else None


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _unshared(stores_s: Sequence[float]) -> float:
    """What of a store is the queue's: groups that share a message wait for each other first."""
    return max(0.0, median(stores_s) - PUT_LINGER_S) if stores_s else 0.0


def _grown(said: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds, and what was counted in them. Without what came before the first look, where that leaves most of the
    run: engines warm up."""
    (spent_before_s, before), (spent_s, count) = said[0], said[-1]
    return (spent_s - spent_before_s, count - before) if before < count * MOST_WARMING else (spent_s, count)


def _scored_per_s(statistics: Sequence[Mapping[str, Any]], replicas: int) -> float | None:
    """What limits let through, while anything was being scored; None where little waited for them."""
    rewards = [_part(_part(row, "rollouter"), "rewards") for row in statistics]
    if fmean(held_back(one, is_judge=True) is True for one in rewards) < HELD_BACK:
        return None
    busy_s, scored = _grown([(_number(one.get("busy_s")) or 0.0, settled(one)) for one in rewards])
    return scored / (busy_s / replicas) if busy_s > 0 and scored > 0 else None


def _asked_alone(rollouter: Mapping[str, Any]) -> tuple[float, ...]:
    """What the judge itself takes, without the wait for its limit; empty where it has not said."""
    endpoints = _part(_part(rollouter, "rewards"), "judge").get("endpoints") or ()
    return tuple(median_s for one in endpoints if (median_s := _number(one.get("latency_p50_s"))))
