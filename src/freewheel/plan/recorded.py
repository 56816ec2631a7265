"""`Recorded`: what a run directory says of a run, in numbers. Read beside a live run or on a dead one; never written.

    RUN/metrics.jsonl ─┬─ step: train_s, response lengths, wall time ─┐
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

from freewheel.judge.errors import ConfigError
from freewheel.observe.recorder import read_metrics
from freewheel.observe.trace_files import read_trace
from freewheel.rollout.outbox import PUT_LINGER_S

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
    pack_s: float = 0.0
    load_s: float = 0.0
    """For which an engine stands still to take a version."""
    sync_s: float = 0.0
    """Of a version, from the first transfer to the last confirmation."""
    put_s: float = 0.0
    notes: tuple[str, ...] = ()


def read(run_dir: Path, *, n: int, groups_per_step: int, window: tuple[int, int] | None = None) -> Recorded:
    """`window`: steps between whose ends is looked; None: all but those that fill the pipeline."""
    everything = read_metrics(run_dir)
    rows = {row["step"]: row for row in everything if row["kind"] == "step" and "timing/elapsed_s" in row}
    statistics = [row for row in everything if row["kind"] == "statistics"]
    if len(rows) < LEAST_STEPS or not statistics:
        remedy = f"{len(rows)} steps are recorded there: at least {LEAST_STEPS}, and one `statistics` row, are needed"
        raise ConfigError("RUN", str(run_dir), remedy)
    first, last = window or (_filled(sorted(rows)), max(rows))
    within = [row for step, row in sorted(rows.items()) if first < step <= last]
    traced = Traced.of(read_trace(run_dir))
    rollouter: Mapping[str, Any] = statistics[-1].get("rollouter", {})
    replicas = max(1, len(traced.rollouters) or len(_rollouters(everything)))
    notes = []
    lengths = traced.lengths
    if not lengths:
        notes.append("single lengths are not recorded (observe.trace_every): every response has the mean length")
        lengths = (fmean(row["rollout/response_length_mean"] for row in within),)
    latencies = traced.latencies_s
    if not latencies:
        notes.append("single scores are not recorded (observe.trace_every): each takes the mean time")
        latencies = (float(rollouter.get("rewards", {}).get("mean_latency_s", 0.0)),)
    busy_per_token_s = _busy_per_token(statistics)
    if not busy_per_token_s:
        raise ConfigError("RUN", str(run_dir), "its engines have not said how long they were busy: let it run longer")
    samples = n * groups_per_step
    return Recorded(
        steps=len(within),
        step_s=(within[-1]["timing/elapsed_s"] - rows[first]["timing/elapsed_s"]) / len(within),
        train_s=tuple(row["timing/train_s"] for row in within),
        step_tokens=tuple(samples * row["rollout/response_length_mean"] for row in within),
        trainer_waits=sum(row["timing/wait_batch_s"] for row in within)
        / (within[-1]["timing/elapsed_s"] - rows[first]["timing/elapsed_s"]),
        lag_mean=fmean(row["avg_sample_age"] for row in within),
        lag_max=int(max(row["max_sample_age"] for row in within)),
        replicas=replicas,
        slots=max(1, int(rollouter.get("slots", replicas)) // replicas),
        busy_per_token_s=busy_per_token_s,
        decode_s=traced.decode_s,
        lengths=tuple(lengths),
        latencies_s=tuple(latencies),
        pack_s=_mean(traced.spans.get("pack", ())),
        load_s=_mean(traced.spans.get("load_weights", ())),
        sync_s=float(statistics[-1].get("sync", {}).get("mean_sync_s", 0.0)),
        put_s=_unshared(traced.stores_s),
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


def _rollouters(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    return {
        name for row in rows if row["kind"] == "pulse" for name in row.get("waits", {}) if name.startswith("rollouter")
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _unshared(stores_s: Sequence[float]) -> float:
    """What of a store is the queue's: groups that share a message wait for each other first."""
    return max(0.0, median(stores_s) - PUT_LINGER_S) if stores_s else 0.0


def _busy_per_token(statistics: Sequence[Mapping[str, Any]]) -> float:
    """Without what came before the first statistics, where that leaves most of the run: engines warm up. 0: unknown."""
    said = [[float(row.get("rollouter", {}).get(name, 0.0)) for name in BUSY_AND_TOKENS] for row in statistics]
    (busy_before, before), (busy_s, tokens) = said[0], said[-1]
    if before < tokens * MOST_WARMING:
        busy_s, tokens = busy_s - busy_before, tokens - before
    return busy_s / tokens if tokens > 0 else 0.0
