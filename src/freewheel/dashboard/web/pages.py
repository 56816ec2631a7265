"""What the page shows first, and what changes on it: a run's `RunView` in, plain values for JSON out. Pure.

    overview ─▶ everything of the first view, with a cursor      changes(cursor) ─▶ what came since, or None: begin anew

Each function is called within `RunView.reading`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from freewheel.dashboard.web.closing import closing
from freewheel.dashboard.web.columns import Columns, Numbers, mean_over_time, means, plain, rates
from freewheel.dashboard.web.learning import FEWEST_STEPS, Learning, learning
from freewheel.dashboard.web.missing import missing
from freewheel.dashboard.web.recorded import Recorded
from freewheel.dashboard.web.runs import RunView
from freewheel.dashboard.web.thinning import MOST_POINTS, curve, thin

MOST_CHANGES = 2000
"""Rows of a kind that are told one by one; who missed more fetches the whole, which is thinned."""
RATE_STEPS = 50
"""Steps by which the time to the end is judged."""
STATE_WORDS = {
    "live": "running",
    "finished": "finished",
    "ended": "not running",
    "removed": "its folder is gone",
    "waiting": "starting",
}


def headline(view: RunView) -> dict[str, Any]:
    """A run in a list."""
    recorded, settings = view.recorded, view.settings
    state = view.state
    return {
        "id": view.id,
        "name": view.folder.name,
        "folder": str(view.folder),
        "state": state,
        "state_words": STATE_WORDS[state],
        "mode": settings.text("mode"),
        "task": settings.text("data.task"),
        "model": settings.text("model.path"),
        "step": view.step,
        "total_steps": settings.number("trainer.total_steps"),
        "began": recorded.first_time,
        "last_row": recorded.last_time,
    }


def overview(view: RunView) -> dict[str, Any]:
    recorded, settings = view.recorded, view.settings
    return {
        **headline(view),
        "cursor": cursor(view),
        "now": now(view),
        "steps": _curves(recorded.steps, "step"),
        "evals": _curves(recorded.evals, "step"),
        "pulses": _pulses(recorded),
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
    """How far somebody has been told."""
    return ".".join(map(str, (_generation(view), *view.recorded.marks)))


def _generation(view: RunView) -> int:
    """Moves when what was told no longer holds, other settings included."""
    return view.recorded.generation + view.settings.changes


def changes(view: RunView, told: str) -> dict[str, Any] | None:
    """What came after a cursor. None: what was told no longer holds, or is too far back."""
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
    """The run at this moment, in numbers and in words."""
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
    gone = missing(recorded, step, view.unread) if state in ("live", "finished", "ended") else []
    if gone and not 0 < step < FEWEST_STEPS and found.trend == "unknown":
        found = Learning("unknown", "Whether it learns cannot be said: the rows that would tell are not there")
    newest = pulse is not None and (statistics is None or pulse.time >= statistics.time)
    source = recorded.pulses if newest else recorded.statistics
    of_now = _last if state == "live" else mean_over_time
    tokens_per_s, at_s = recorded.pulses["tokens_per_s"], recorded.pulses["elapsed_s"]
    samples_per_s = of_now(recorded.pulses["samples_per_s"], at_s)
    if pulse is None:
        at_s = recorded.statistics["elapsed_s"]
        tokens_per_s = rates(recorded.statistics["generated_tokens"], at_s)
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
        "version": source.last("version"),
        "published_version": source.last("published_version"),
        "queue_size": source.last("queue_size"),
        "in_progress": source.last("in_progress"),
        "tokens_per_s": of_now(tokens_per_s, at_s),
        "samples_per_s": samples_per_s,
        "verdict": _verdict(view),
        "doing": queue.waiting_for if queue is not None else "",
        "paused": queue.paused if queue is not None else "",
        "learning": found._asdict(),
        "waits": _waits(recorded),
        "last_row": recorded.last_time,
        "warnings": msgspec.to_builtins(list(view.warnings)[-8:]),
        "missing": gone,
    }


def _verdict(view: RunView) -> str:
    """Of a run that goes on what holds it up lately, of one that is over what held it up."""
    if view.state != "live":
        return closing(view.recorded, view.settings)
    pulse = view.recorded.last_pulse
    return pulse.verdict if pulse is not None else ""


def ages(view: RunView) -> dict[str, Any]:
    """How old the samples of the last steps were when they were trained on: groups by lag in versions."""
    found = view.recorded.ages
    longest = max((len(counts) for _, counts in found), default=0)
    total = [0] * longest
    for _, counts in found:
        for lag, count in enumerate(counts):
            total[lag] += count
    return {"counts": total, "from_step": found[0][0] if found else None, "to_step": found[-1][0] if found else None}


def series(view: RunView, name: str, kind: str, low: float | None, high: float | None) -> dict[str, Any] | None:
    """One metric, whole or between two steps, and thinned to what a screen can show."""
    columns = view.metric(name, kind)
    if columns is None:
        return None
    steps = columns["step"]
    first = 0 if low is None else int(np.searchsorted(steps, low))
    last = len(steps) if high is None else int(np.searchsorted(steps, high, side="right"))
    part = slice(max(0, first - 1), last + 1)  # and a neighbour on either side, so that the line goes on to the edge
    kept = thin(columns[name][part])
    return {
        "name": name,
        "x": plain(steps[part][kept]),
        "t": plain(columns["elapsed_s"][part][kept]),
        "y": plain(columns[name][part][kept]),
    }


def _metrics(recorded: Recorded) -> dict[str, list[str]]:
    return {kind: recorded.metric_names(kind) for kind in ("step", "eval")}


def _curves(columns: Columns, x: str) -> dict[str, Any]:
    names = [name for name in columns.names if name not in (x, "elapsed_s")]
    return {name: found for name in names if (found := curve(columns[x], columns[name]))["x"]}


def _pulses(recorded: Recorded) -> dict[str, Any]:
    """Over the time since the start; where there are no pulses, what the statistics have of them."""
    if recorded.pulses.rows:
        return _curves(recorded.pulses, "elapsed_s")
    statistics = recorded.statistics
    found = {name: curve(statistics["elapsed_s"], statistics[name]) for name in ("queue_size", "in_progress")}
    found["tokens_per_s"] = curve(
        statistics["elapsed_s"], rates(statistics["generated_tokens"], statistics["elapsed_s"]), MOST_POINTS
    )
    return {name: one for name, one in found.items() if one["x"]}


def _waits(recorded: Recorded) -> dict[str, dict[str, float]]:
    """Shares of the last pulses, by part."""
    parts = dict.fromkeys(part for waits in recorded.waits for part in waits)
    found = {part: means([waits.get(part, {}) for waits in recorded.waits]) for part in parts}
    return {part: {name: round(share, 4) for name, share in spans.items()} for part, spans in found.items()}


def _elapsed_s(recorded: Recorded) -> float | None:
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


def _last(values: Numbers, at_s: Numbers) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else None
