"""The data of each view of the page: a `RunView` in, plain values for JSON out.

    overview ─▶ everything of the first view, with a cursor      changes(cursor) ─▶ what is new, or None: reload
    judge, weights, ledger, prompt, compare ─▶ the other views

`overview`, `changes`, `judge` and `weights` are called within `RunView.reading`; `compare` locks one run after the
other; `ledger` and `prompt` read the journal and lock nothing. Pure apart from that.

`thin` selects the points of a curve that a screen can show. `learning` decides whether a run learns, and claims no more
than the curves support.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from freewheel.dashboard.web.runs import RunView, describe_gaps, flat
from freewheel.errors import ConfigError
from freewheel.inspect.metrics import (
    Columns,
    FloatArray,
    JudgeNumbers,
    RecordedMetrics,
    Statistics,
    mean_over_time,
    means,
    plain,
    rates,
)
from freewheel.inspect.prompt import follow
from freewheel.inspect.run import find_run, inspect
from freewheel.judge.endpoint import Breaker
from freewheel.judge.stats import BreakerState, EndpointStats
from freewheel.queue.journal import JournalError

Places = np.ndarray[Any, np.dtype[np.intp]]

MOST_POINTS = 1500
"""Points per curve: about the columns of a wide screen."""


def thin(values: FloatArray, most: int = MOST_POINTS) -> Places:
    """Return positions of the points to keep, ascending: at most `most`, all finite, including the first, last, lowest
    and highest. Each bucket of neighbours keeps its lowest and highest point, so a spike of one step stays visible."""
    assert most >= 4
    finite = np.flatnonzero(np.isfinite(values))
    count = len(finite)
    if count <= most:
        return finite
    buckets = (most - 2) // 2
    width = -(-count // buckets)
    padded = np.full(buckets * width, values[finite[-1]])
    padded[:count] = values if count == len(values) else values[finite]
    grid = padded.reshape(buckets, width)
    starts = np.arange(buckets) * width
    kept = np.concatenate([[0], starts + grid.argmin(axis=1), starts + grid.argmax(axis=1), [count - 1]])
    found: Places = finite[np.unique(np.minimum(kept, count - 1))]
    return found


def curve(x: FloatArray, y: FloatArray, most: int = MOST_POINTS) -> dict[str, list[float | None]]:
    """Return a curve as it is sent."""
    kept = thin(y, most)
    return {"x": plain(x[kept]), "y": plain(y[kept])}


Trend = Literal["up", "flat", "down", "unknown"]

SURE = 2.0
"""Standard errors by which two means must differ before one counts as higher: correct 19 times out of 20."""
FEWEST_STEPS = 10
"""Steps before a curve of training rewards counts as a trend."""
END_SHARE = 0.1
"""Share of a curve that is averaged at either end."""


class Learning(NamedTuple):
    trend: Trend
    words: str


def learning(
    *, steps: FloatArray, rewards: FloatArray, eval_steps: FloatArray, held_out: FloatArray, errors: FloatArray
) -> Learning:
    """Judge by held-out rewards if there are two, else by training rewards."""
    known = np.flatnonzero(np.isfinite(held_out))
    if len(known) >= 2:
        return _compare(
            "Held-out reward",
            (float(held_out[known[0]]), _or_zero(errors[known[0]]), int(eval_steps[known[0]])),
            (float(held_out[known[-1]]), _or_zero(errors[known[-1]]), int(eval_steps[known[-1]])),
        )
    known = np.flatnonzero(np.isfinite(rewards))
    if len(known) < FEWEST_STEPS:
        return Learning("unknown", "Too early to say whether it learns")
    width = max(FEWEST_STEPS // 2, round(len(known) * END_SHARE))
    first, last = known[:width], known[-width:]
    return _compare(
        "Training reward",
        (*_mean(rewards[first]), int(steps[known[0]])),
        (*_mean(rewards[last]), int(steps[known[-1]])),
    )


def _compare(what: str, first: tuple[float, float, int], last: tuple[float, float, int]) -> Learning:
    (was, was_error, was_at), (now, now_error, now_at) = first, last
    told = f"{was:.3f} at step {was_at:,} → {now:.3f} at step {now_at:,}"
    if now == was or abs(now - was) <= SURE * math.hypot(was_error, now_error):
        return Learning("flat", f"No clear change yet: {what.lower()} {told}")
    if now > was:
        return Learning("up", f"It learns: {what.lower()} {told}")
    return Learning("down", f"It gets worse: {what.lower()} {told}")


def _mean(values: FloatArray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def _or_zero(value: float) -> float:
    return float(value) if math.isfinite(value) else 0.0


MOST_CHANGES = 2000
"""Rows of a kind that are sent one by one. A client that missed more fetches everything, thinned."""
RATE_STEPS = 50
"""Steps from which the remaining time is estimated."""
STATE_WORDS = {
    "live": "running",
    "finished": "finished",
    "ended": "not running",
    "removed": "its folder is gone",
    "waiting": "starting",
}


def label(view: RunView) -> dict[str, Any]:
    """Return a run as an entry of a list, without its metrics."""
    settings, state = view.settings, view.state
    return {
        "id": view.id,
        "name": view.folder.name,
        "folder": str(view.folder),
        "state": state,
        "state_words": STATE_WORDS[state],
        "mode": settings.text("mode"),
        "task": settings.text("data.task"),
        "model": settings.text("model.path"),
        "total_steps": settings.number("trainer.total_steps"),
    }


def headline(view: RunView) -> dict[str, Any]:
    """Return a run as an entry of a list."""
    recorded = view.recorded
    return {**label(view), "step": view.step, "began": recorded.first_time, "last_row": recorded.last_time}


def overview(view: RunView) -> dict[str, Any]:
    recorded, settings = view.recorded, view.settings
    return {
        **headline(view),
        "cursor": cursor(view),
        "now": now(view),
        "steps": _curves(recorded.steps, "step"),
        "evals": _curves(recorded.evals, "step"),
        "pulses": _curves(recorded.pulses, "elapsed_s"),
        "ages": ages(view),
        "events": msgspec.to_builtins(list(recorded.events)),
        "metrics": _metrics(recorded),
        "bounds": {
            "staleness_threshold": settings.staleness_threshold,
            "max_staleness_allowed": settings.number("async_training.max_staleness_allowed"),
            "max_queue_size": settings.number("async_training.max_queue_size"),
        },
        "has_judge": settings.get("reward.judge") is not None,
    }


def cursor(view: RunView) -> str:
    """Return how much a client has received."""
    return ".".join(map(str, (_generation(view), *view.recorded.marks)))


def _generation(view: RunView) -> int:
    """Return a number that increases when earlier data no longer holds, also because of other settings."""
    return view.recorded.generation + view.settings.changes


def changes(view: RunView, told: str) -> dict[str, Any] | None:
    """Return what is new since a cursor. None: earlier data no longer holds, or the cursor is too old."""
    recorded = view.recorded
    try:
        generation, steps, evals, pulses, statistics, syncs, events = map(int, told.split("."))
    except ValueError:
        return None
    marks = recorded.marks
    missed = [new - old for new, old in zip(marks, (steps, evals, pulses, statistics, syncs, events), strict=True)]
    if generation != _generation(view) or min(missed) < 0 or max(missed) > MOST_CHANGES:
        return None
    return {
        "cursor": cursor(view),
        "state": view.state,
        "now": now(view),
        "ages": ages(view),
        "steps": recorded.steps.since(steps),
        "evals": recorded.evals.since(evals),
        "pulses": recorded.pulses.since(pulses),
        "metrics": _metrics(recorded),
        "statistics": missed[3],
        "syncs": missed[4],
        "events": msgspec.to_builtins(list(recorded.events)[-missed[5] :] if missed[5] else []),
    }


def now(view: RunView) -> dict[str, Any]:
    """Describe the run at this moment, in numbers and words."""
    recorded = view.recorded
    pulse, statistics = recorded.last_pulse, recorded.last_statistics
    queue = statistics.queue if statistics is not None else None
    found = learning(
        steps=recorded.steps["step"],
        rewards=recorded.steps["rollout/reward_mean"],
        eval_steps=recorded.evals["step"],
        held_out=recorded.evals["eval/reward"],
        errors=recorded.evals["eval/reward_se"],
    )
    state, step = view.state, view.step
    gone = describe_gaps(recorded, step, view.unread) if state in ("live", "finished", "ended") else []
    if gone and not 0 < step < FEWEST_STEPS and found.trend == "unknown":
        found = Learning("unknown", "Whether it learns is unknown: the rows that show it are missing")
    pulses = recorded.pulses
    return {
        "state": state,
        "state_words": STATE_WORDS[state],
        "step": step,
        "total_steps": view.settings.number("trainer.total_steps"),
        "elapsed_s": _elapsed_s(recorded),
        "eta_s": _eta_s(view),
        "reward": recorded.steps.last("rollout/reward_mean"),
        "held_out": recorded.evals.last("eval/reward"),
        "held_out_se": recorded.evals.last("eval/reward_se"),
        "held_out_step": recorded.evals.last("step"),
        "recorded_step": int(recorded.steps.last("step") or 0),
        "version": pulses.last("version"),
        "published_version": pulses.last("published_version"),
        "queue_size": pulses.last("queue_size"),
        "in_progress": pulses.last("in_progress"),
        "tokens_per_s": _speed(recorded, "tokens_per_s", live=state == "live"),
        "samples_per_s": _speed(recorded, "samples_per_s", live=state == "live"),
        "verdict": pulse.verdict if pulse is not None else "",
        "doing": queue.waiting_for if queue is not None else "",
        "paused": queue.paused if queue is not None else "",
        "learning": found._asdict(),
        "waits": _waits(recorded),
        "last_row": recorded.last_time,
        "warnings": msgspec.to_builtins(list(view.warnings)[-8:]),
        "missing": gone,
    }


def ages(view: RunView) -> dict[str, Any]:
    """Return the ages of the last steps' samples: groups by lag in versions."""
    found = view.recorded.ages
    longest = max((len(counts) for _, counts in found), default=0)
    total = [0] * longest
    for _, counts in found:
        for lag, count in enumerate(counts):
            total[lag] += count
    return {"counts": total, "from_step": found[0][0] if found else None, "to_step": found[-1][0] if found else None}


def series(view: RunView, name: str, kind: str, low: float | None, high: float | None) -> dict[str, Any] | None:
    """Return one metric, whole or between two steps, thinned to what a screen can show."""
    columns = view.metric(name, kind)
    if columns is None:
        return None
    steps = columns["step"]
    first = 0 if low is None else int(np.searchsorted(steps, low))
    last = len(steps) if high is None else int(np.searchsorted(steps, high, side="right"))
    part = slice(max(0, first - 1), last + 1)  # plus one neighbour on either side, so that the line reaches the edge
    kept = thin(columns[name][part])
    return {
        "name": name,
        "x": plain(steps[part][kept]),
        "t": plain(columns["elapsed_s"][part][kept]),
        "y": plain(columns[name][part][kept]),
    }


def _metrics(recorded: RecordedMetrics) -> dict[str, list[str]]:
    return {kind: recorded.metric_names(kind) for kind in ("step", "eval")}


def _curves(columns: Columns, x: str) -> dict[str, Any]:
    names = [name for name in columns.names if name not in (x, "elapsed_s")]
    return {name: found for name in names if (found := curve(columns[x], columns[name]))["x"]}


def _waits(recorded: RecordedMetrics) -> dict[str, dict[str, float]]:
    """Return wait shares of the last pulses, by component."""
    parts = dict.fromkeys(part for waits in recorded.waits for part in waits)
    found = {part: means([waits.get(part, {}) for waits in recorded.waits]) for part in parts}
    return {part: {name: round(share, 4) for name, share in spans.items()} for part, spans in found.items()}


def _elapsed_s(recorded: RecordedMetrics) -> float | None:
    if recorded.first_time is None or recorded.last_time is None:
        return None
    return round(recorded.last_time - recorded.first_time, 3)


def _eta_s(view: RunView) -> float | None:
    steps, total = view.recorded.steps, view.settings.number("trainer.total_steps")
    if total is None or steps.rows < 2 or view.state != "live":
        return None
    recent = steps["step"][-RATE_STEPS:], steps["elapsed_s"][-RATE_STEPS:]
    done, took_s = recent[0][-1] - recent[0][0], recent[1][-1] - recent[1][0]
    return float((total - recent[0][-1]) * took_s / done) if done > 0 else None


def _speed(recorded: RecordedMetrics, name: str, *, live: bool) -> float | None:
    """Return the latest speed of a live run, and the mean speed of one that ended."""
    pulses = recorded.pulses
    return pulses.last(name) if live else mean_over_time(pulses[name], pulses["elapsed_s"])


MOST_DIFFERENCES = 60
"""Most differing settings that are shown."""
OWN_SETTINGS = ("run_dir",)
"""Settings in which any two runs differ."""
ON_ITS_WAY = 1
"""Versions that an engine may lag in any mode, because the newest is on its way."""


def judge(view: RunView) -> dict[str, Any]:
    """Return what scoring did and what it costs."""
    statistics, last = view.recorded.statistics, view.recorded.last_statistics
    rewards = last.rollouter.rewards if last is not None else None
    elapsed = statistics["elapsed_s"]
    counters = {
        "scored_per_s": "scored",
        "sent_per_s": "sent",
        "throttled_per_s": "throttled",
        "failed_per_s": "failed",
        "faults_per_s": "faults",
        "cost_per_s": "cost",
    }
    curves = {name: curve(elapsed, statistics[name]) for name in ("limit", "in_flight", "queued", "scoring", "waiting")}
    curves |= {name: curve(elapsed, rates(statistics[counter], elapsed)) for name, counter in counters.items()}
    return {
        "asked_for": view.settings.get("reward.judge") is not None,
        "rewards": msgspec.to_builtins(msgspec.structs.replace(rewards, judge=None)) if rewards is not None else None,
        "judge": _judge(rewards.judge, live=view.state == "live") if rewards and rewards.judge else None,
        "curves": {name: found for name, found in curves.items() if found["x"]},
        "every_s": view.settings.number("observe.statistics_every_s"),
    }


def _judge(numbers: JudgeNumbers, *, live: bool) -> dict[str, Any]:
    saved = numbers.cache_hits + numbers.shared
    states = [_state(end, live=live) for end in numbers.endpoints]
    waiting = numbers.queued + numbers.in_flight
    return {
        **msgspec.to_builtins(numbers),
        "endpoints": [
            {**msgspec.to_builtins(end), "state": state} for end, state in zip(numbers.endpoints, states, strict=True)
        ],
        "down": _down(states, waiting, live=live),
        "waiting": waiting,
        "tokens": sum(end.prompt_tokens + end.completion_tokens for end in numbers.endpoints),
        "saved_share": saved / (saved + numbers.sent) if saved + numbers.sent else None,
    }


def _state(end: EndpointStats, *, live: bool) -> str:
    """Return why an endpoint only gets probes; empty if it is up."""
    if end.halted or end.up:
        return end.halted
    if not live:
        return "unreachable at the end"
    tried = end.breaker == BreakerState.PROBING.value
    return f"unreachable, {'tried just now' if tried else f'next try within {Breaker.LONGEST_PAUSE_S:g} s'}"


def _down(states: Sequence[str], waiting: int, *, live: bool) -> str:
    """If no endpoint is up, say why, and how many requests wait."""
    if not states or not all(states):
        return ""
    gives, wait = ("gives", "wait") if live else ("gave", "waited")
    return f"The judge {gives} no verdicts: {'; '.join(dict.fromkeys(states))}. {waiting:,} requests {wait}"


def weights(view: RunView) -> dict[str, Any]:
    """Return the weight versions on their way to the engines, newest first."""
    recorded, last = view.recorded, view.recorded.last_statistics
    return {
        "recorded": bool(recorded.syncs_seen),
        "seen": recorded.syncs_seen,
        "syncs": msgspec.to_builtins(list(reversed(recorded.syncs))),
        "sync": msgspec.to_builtins(last.sync) if last is not None else None,
        "engines": _engines(last, view.settings.staleness_threshold) if last is not None else [],
        "version": recorded.pulses.last("version"),
        "published_version": recorded.pulses.last("published_version"),
    }


def _engines(last: Statistics, threshold: int | None) -> list[dict[str, Any]]:
    """Return each engine with its version, compared with the trainer's at the same moment. An engine is behind if it
    lags more versions than samples may; None if the settings do not tell the threshold."""
    found = []
    for name, version in last.sync.versions.items():
        lag, behind = last.queue.version - version, None
        if threshold is not None and not math.isnan(lag):
            behind = int(lag) if lag > max(ON_ITS_WAY, threshold) else 0
        found.append({"name": name, "version": version, "fenced": name in last.sync.fenced, "behind": behind})
    return found


def ledger(folder: Path) -> dict[str, Any]:
    """Return the report of `freewheel inspect RUN`, or its error message."""
    try:
        return {"report": msgspec.to_builtins(inspect(find_run(str(folder)))), "error": ""}
    except ConfigError as error:
        return {"report": None, "error": str(error)}


def prompt(folder: Path, ordinal: int) -> dict[str, Any]:
    """Return the result of `freewheel inspect RUN --group N`, or its error message."""
    try:
        return {"life": msgspec.to_builtins(follow(find_run(str(folder)), ordinal)), "error": ""}
    except (ConfigError, JournalError) as error:
        return {"life": None, "error": str(error).replace("--group", "prompt")}


def compare(views: Sequence[RunView], metric: str, kind: str) -> dict[str, Any]:
    """Return one metric of several runs, their results, and the settings that differ."""
    rows, names, settings = [], dict[str, None](), []
    for view in views:
        with view.reading():
            recorded = view.recorded
            rows.append(
                {
                    **headline(view),
                    "curve": series(view, metric, kind, None, None),
                    "reward": recorded.steps.last("rollout/reward_mean"),
                    "held_out": recorded.evals.last("eval/reward"),
                    "best_held_out": _best(recorded.evals["eval/reward"]),
                    "elapsed_s": recorded.steps.last("elapsed_s"),
                    "recorded_step": int(recorded.steps.last("step") or 0),
                    "tokens_per_s": _speed(recorded, "tokens_per_s", live=False),
                }
            )
            names |= dict.fromkeys(f"{one} {name}" for one in ("eval", "step") for name in recorded.metric_names(one))
            settings.append(flat(view.settings.values))
    return {"metric": metric, "kind": kind, "runs": rows, "metrics": list(names), "differing": differing(settings)}


def differing(settings: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the keys whose values differ."""
    keys = dict.fromkeys(key for one in settings for key in one if key not in OWN_SETTINGS)
    found = [{"key": key, "values": [one.get(key, "") for one in settings]} for key in keys]
    return [one for one in found if len(set(one["values"])) > 1][:MOST_DIFFERENCES]


def _best(values: Any) -> float | None:
    known = values[values == values]
    return float(known.max()) if known.size else None
