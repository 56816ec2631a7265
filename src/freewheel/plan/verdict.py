"""What holds a run up, in one sentence with a number: the verdict. Pure.

    who waited for whom (spans) ┐
    what was scored a second    ├─ verdict ─▶ judge-bound: 62% of trainer time waits for verdicts; raising its rate
    the judge's limit           ┘             limit to 90/s would lift throughput 1.9x, where generation is the limit

Each part is charged with the time for which others stood still because of it, and the largest charge names it:

    sync         the trainer's `pack`, or rollouters' `load_weights` as far as its `wait_batch` goes, whichever is more
    save         the trainer's `save`, as far as it did nothing else meanwhile
    judge        the trainer's `wait_batch`, as far as rollouters' `wait_reward` goes, or requests wait for the judge's
                 limit (`reward` where there is no judge)
    generation   the trainer's `wait_batch`, less what the judge is charged with and less `load_weights`
    training     rollouters' `wait_room`

What a remedy would give is `freewheel.plan.model`'s to say: it ends where the next part is busy all the time. What was
not measured is not claimed. Shown by the terminal, the log, the end of a run, the page and the planner alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from freewheel.judge.stats import is_up
from freewheel.plan.model import Lift, lessened, overlapped, without

Waits = Mapping[str, Mapping[str, float]]
"""Component → span → its share of the time."""
Bound = Literal["generation", "judge", "reward", "training", "sync", "save", "balanced", "unmeasured", "paused"]

WAITING = 0.10
"""A part that waits less than a tenth of the time is busy: what is left is hand-over, which nothing would remove."""
HELD_BACK = 0.5
"""Requests that wait for a limit for less of the time wait in bursts: a higher one would hardly help."""
HALF = 0.5
"""What the remedies for weights and checkpoints take away: every second of them."""
WORTH = 1.05
"""A remedy that gives less is not worth a change."""
ROUGH = 1.15
"""From here on one decimal of a factor is enough."""
UNMEASURED = "not known yet: who waits for whom has not been measured"
"""Said of a run before both sides have been."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What is known of the scoring of responses."""

    is_judge: bool = False
    """An LLM judge scores, and not a function alone."""
    per_s: float | None = None
    """Responses that got their score; of a judge: requests that were sent to it."""
    latency_s: float | None = None
    held_back: float | None = None
    """Share of the time in which responses waited for a permit, or for the judge's limit. None: nobody says."""
    in_use: float | None = None
    """Share of the judge's limit, on average. None: nobody knows where that is."""
    slots_in_use: float | None = None
    """Share of the engines' slots, on average: a judge that is waited for leaves them empty."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What of a run's settings a remedy depends on."""

    mode: str = "fully_async"
    replicas: int = 1
    threshold: int | None = 0
    """Versions that generation may run ahead; None where that is not known."""
    sync_every_steps: int = 1
    save_every_steps: int | None = None

    @property
    def in_turns(self) -> bool:
        """Generation and training wait for each other by design."""
        return self.mode != "fully_async"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`str` of it is the sentence."""

    bound: Bound
    share: float = 0.0
    """Of the time, lost to it."""
    lift: float | None = None
    """Throughput with the remedy over throughput now; None where that is not known."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence


NOTHING_KNOWN = Verdict(bound="unmeasured", sentence=UNMEASURED)


def stopped(*, paused: str, endpoints: Collection[Mapping[str, Any]]) -> Verdict | None:
    """Where nothing goes on whatever waited for whom before: why. `paused`: the queue's word; `endpoints`: the judge's,
    as `EndpointStats` has them."""
    if paused:
        return Verdict(bound="paused", share=1.0, sentence=f"paused until there is room: {paused}")
    if endpoints and not any(is_up(**one) for one in endpoints):
        urls = ", ".join(str(one.get("url")) for one in endpoints)
        said = f"judge-bound: the judge does not answer ({urls}); nothing is scored until it does"
        return Verdict(bound="judge", share=1.0, sentence=said)
    return None


def verdict(waits: Waits, setting: Setting, scoring: Scoring | None = None) -> Verdict:
    """Of the shares over an interval; those of several rollouters (`rollouter`, `rollouter-0`, …) are averaged."""
    scoring = scoring or Scoring()
    trainer = dict(waits.get("trainer", {}))
    rollouter = _mean(shares for name, shares in waits.items() if name.partition("-")[0] == "rollouter")
    if not trainer or not rollouter:
        return NOTHING_KNOWN
    charges = _charges(trainer, rollouter, scoring)
    bound, share = max(charges.items(), key=lambda item: item[1])
    if share < WAITING:
        said = (
            f"balanced: generation and training each wait less than {WAITING:.0%} of the time; only more of both helps"
        )
        return Verdict(bound="balanced", share=share, sentence=said)
    busy = {
        "training": trainer.get("train", 0.0) + trainer.get("pack", 0.0),
        "generation": rollouter.get("generate", 0.0),
    }
    if bound not in ("judge", "reward") and scoring.in_use is not None:
        busy["the judge"] = scoring.in_use
    if bound in ("sync", "save"):
        loads = share > trainer.get("pack", 0.0)
        held_up = "generation" if bound == "sync" and loads else "training"
        why, remedy, lift = _overhead(bound, share, without(busy, held_up), setting)
    else:
        why, remedy, lift = _work(bound, busy, setting, scoring)
    known = math.isfinite(lift.factor)
    if not known:
        remedy = "what would lift throughput is not known: no other part has been seen at work"
    elif lift.factor < WORTH:
        remedy = f"there is little to gain, as {lift.then} is busy {1 / lift.factor:.0%} of the time"
    return Verdict(
        bound=bound,
        share=share,
        lift=lift.factor if known else None,
        sentence=f"{bound}-bound: {share:.0%} {why}; {remedy}",
    )


def _charges(trainer: Mapping[str, float], rollouter: Mapping[str, float], scoring: Scoring) -> dict[Bound, float]:
    pack, starved = trainer.get("pack", 0.0), trainer.get("wait_batch", 0.0)
    scores = max(min(starved, rollouter.get("wait_reward", 0.0)), starved * (scoring.held_back or 0.0))
    scorer: Bound = "judge" if scoring.is_judge else "reward"
    loading = rollouter.get("load_weights", 0.0)
    idle = max(0.0, 1 - trainer.get("train", 0.0) - starved - pack)
    return {
        "sync": max(pack, min(loading, starved)),
        "save": min(trainer.get("save", 0.0), idle),
        scorer: scores,
        "generation": max(0.0, starved - scores - loading),
        "training": rollouter.get("wait_room", 0.0),
    }


def _overhead(bound: Bound, share: float, bounded_by: Lift, setting: Setting) -> tuple[str, str, Lift]:
    """Of what is no work of either side: why it is charged, what would help, and by how much."""
    lift = lessened(share, HALF, bounded_by)
    if bound == "sync":
        why = "of the time goes into bringing weights to the engines"
        remedy = f"async_training.sync_every_steps = {2 * setting.sync_every_steps}"
    else:
        why = "of trainer time goes into checkpoints"
        every = setting.save_every_steps
        remedy = "half as many" if every is None else f"trainer.save_every_steps = {2 * every}"
    return why, f"{remedy} would lift throughput {_gain(lift)}", lift


def _work(bound: Bound, busy: Mapping[str, float], setting: Setting, scoring: Scoring) -> tuple[str, str, Lift]:
    """The same of a part that others wait for."""
    why = {
        "generation": "of trainer time waits for responses",
        "training": "of generation time is held back so that samples stay fresh",
    }.get(bound, f"of trainer time waits for {'verdicts' if scoring.is_judge else 'scores'}")
    if setting.in_turns:
        lift = overlapped(busy)
        return why, f"mode=fully_async would lift throughput up to {_gain(lift)}", lift
    if bound in ("judge", "reward") and scoring.slots_in_use is not None:
        busy = {**busy, "generation": min(busy["generation"], scoring.slots_in_use)}
    lift = without(busy, bound)
    if not math.isfinite(lift.factor):
        return why, "", lift
    if bound == "generation":
        wanted = math.ceil(setting.replicas * lift.factor)
        remedy = f"{_times(lift)} the generation speed ({wanted} replicas instead of {setting.replicas}) would"
    elif bound == "training":
        remedy = f"{_times(lift)} the training speed would"
    else:
        remedy = _faster_scores(lift, setting, scoring)
    return why, f"{remedy} lift throughput {_gain(lift)}", lift


def _faster_scores(lift: Lift, setting: Setting, scoring: Scoring) -> str:
    """More at a time helps where something is held back; else only less time for each, or more that hides it."""
    if scoring.held_back is not None and scoring.held_back < HELD_BACK:
        took = "" if scoring.latency_s is None else f" of {_seconds(scoring.latency_s)}"
        whose = "judge" if scoring.is_judge else "function"
        above = "raised" if setting.threshold is None else f"above {setting.threshold}"
        hiding = f"async_training.staleness_threshold {above}, which hides its latency{took}"
        return f"{hiding}, or a faster {whose} could"
    if scoring.per_s is None:
        return f"a faster {'judge' if scoring.is_judge else 'function'} (its rate was not measured) could"
    rate = _rate(scoring.per_s * lift.factor)
    raised = f"its rate limit to {rate}" if scoring.is_judge else f"reward.concurrency or reward.workers for {rate}"
    return f"raising {raised} {'could' if scoring.held_back is None else 'would'}"


def _gain(lift: Lift) -> str:
    """The factor, and what bounds it."""
    return _times(lift) + (f", where {lift.then} is the limit" if lift.then else "")


def _times(lift: Lift) -> str:
    return f"{lift.factor:.1f}x" if lift.factor >= ROUGH else f"{lift.factor:.2f}x"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}/s" if per_s >= 10 else f"{per_s:.1f}/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _mean(components: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found = list(components)
    names = dict.fromkeys(name for shares in found for name in shares)
    return {name: sum(shares.get(name, 0.0) for shares in found) / len(found) for name in names}
