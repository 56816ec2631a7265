"""The other views, each from what its files say: judge, weights, ledger, comparison. Plain values for JSON.

`judge` and `weights` are called within `RunView.reading`; `compare` holds one run after the other; `ledger` and
`prompt` read the journal, and hold none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from freewheel.dashboard.web.columns import mean_over_time, rates
from freewheel.dashboard.web.pages import headline, series
from freewheel.dashboard.web.rows import JudgeNumbers, Rewards, Statistics
from freewheel.dashboard.web.runs import RunView
from freewheel.dashboard.web.settings import Settings, flat
from freewheel.dashboard.web.thinning import curve
from freewheel.errors import ConfigError
from freewheel.judge.breaker import Breaker, State
from freewheel.judge.stats import EndpointStats

MOST_DIFFERENCES = 60
"""Settings in which compared runs differ that are told."""
OWN_SETTINGS = ("run_dir",)
"""Settings in which any two runs differ."""
ON_ITS_WAY = 1
"""Versions that an engine may lag in any mode: the newest is being brought to it."""


def judge(view: RunView) -> dict[str, Any]:
    """What scoring did and what it costs."""
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
        "rewards": _rewards(rewards) if rewards is not None else None,
        "judge": _judge(rewards.judge, live=view.state == "live") if rewards and rewards.judge else None,
        "curves": {name: found for name, found in curves.items() if found["x"]},
        "every_s": view.settings.number("observe.statistics_every_s"),
    }


def _rewards(rewards: Rewards) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(rewards)
    del found["judge"]
    return found


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
        "faults": numbers.faults or {},
    }


def _state(end: EndpointStats, *, live: bool) -> str:
    """Why nothing but a try is sent to an endpoint; empty while it is up."""
    if end.halted or end.up:
        return end.halted
    if not live:
        return "unreachable at the end"
    tried = end.breaker == State.PROBING.value
    return f"unreachable, {'tried just now' if tried else f'next try within {Breaker.LONGEST_PAUSE_S:g} s'}"


def _down(states: Sequence[str], waiting: int, *, live: bool) -> str:
    """Where no endpoint is up: why, and how many requests wait for that."""
    if not states or not all(states):
        return ""
    gives, wait = ("gives", "wait") if live else ("gave", "waited")
    return f"The judge {gives} no verdicts: {'; '.join(dict.fromkeys(states))}. {waiting:,} requests {wait}"


def weights(view: RunView) -> dict[str, Any]:
    """Weight versions on their way to the engines, the newest first."""
    recorded, last = view.recorded, view.recorded.last_statistics
    return {
        "recorded": bool(recorded.syncs_seen),
        "seen": recorded.syncs_seen,
        "syncs": msgspec.to_builtins(list(reversed(recorded.syncs))),
        "sync": msgspec.to_builtins(last.sync) if last is not None else None,
        "engines": _engines(last, _allowed(view.settings)) if last is not None else [],
        "version": recorded.pulses.last("version"),
        "published_version": recorded.pulses.last("published_version"),
    }


def _allowed(settings: Settings) -> int | None:
    """Versions that an engine may be behind the trainer: as far as samples may, one that is on its way included. None
    where the settings do not say."""
    threshold = settings.staleness_threshold
    return None if threshold is None else max(ON_ITS_WAY, threshold)


def _engines(last: Statistics, allowed: int | None) -> list[dict[str, Any]]:
    """Each with its version, held against the trainer's of the same moment."""
    now = last.queue.version
    return [
        {
            "name": name,
            "version": version,
            "fenced": name in last.sync.fenced,
            "behind": _behind(now - version, allowed),
        }
        for name, version in last.sync.versions.items()
    ]


def _behind(lag: float, allowed: int | None) -> int | None:
    """Versions, where they are too many; None where that cannot be said."""
    if allowed is None or math.isnan(lag):
        return None
    return int(lag) if lag > allowed else 0


def ledger(folder: Path) -> dict[str, Any]:
    """As `freewheel inspect RUN` has it; the words of its error where it has none."""
    from freewheel.inspect.run import find_run, inspect

    try:
        return {"report": msgspec.to_builtins(inspect(find_run(str(folder)))), "error": ""}
    except ConfigError as error:
        return {"report": None, "error": str(error)}


def prompt(folder: Path, ordinal: int) -> dict[str, Any]:
    """As `freewheel inspect RUN --group N` has it."""
    from freewheel.inspect.prompt import follow
    from freewheel.inspect.run import find_run
    from freewheel.queue.journal import JournalError

    try:
        return {"life": msgspec.to_builtins(follow(find_run(str(folder)), ordinal)), "error": ""}
    except (ConfigError, JournalError) as error:
        return {"life": None, "error": str(error).replace("--group", "prompt")}


def compare(views: Sequence[RunView], metric: str, kind: str) -> dict[str, Any]:
    """One metric of several runs, how each did, and which settings they do not share."""
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
                    "tokens_per_s": mean_over_time(recorded.pulses["tokens_per_s"], recorded.pulses["elapsed_s"]),
                }
            )
            names |= dict.fromkeys(f"{one} {name}" for one in ("eval", "step") for name in recorded.metric_names(one))
            settings.append(flat(view.settings.values))
    return {"metric": metric, "kind": kind, "runs": rows, "metrics": list(names), "differing": differing(settings)}


def differing(settings: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Keys whose values are not the same in all."""
    keys = dict.fromkeys(key for one in settings for key in one if key not in OWN_SETTINGS)
    found = [{"key": key, "values": [one.get(key, "") for one in settings]} for key in keys]
    return [one for one in found if len(set(one["values"])) > 1][:MOST_DIFFERENCES]


def _best(values: Any) -> float | None:
    known = values[values == values]
    return float(known.max()) if known.size else None
