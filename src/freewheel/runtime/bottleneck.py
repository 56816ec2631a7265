"""What limits a run, in one sentence with a number: the verdict. Pure, without a clock.

    capacities (groups per second, each part alone) ─┬─ streaming: the least of them
                                                     └─ in turns: one over the sum of their times
    busy shares of a run ─▶ without the bottleneck: up to the next part

    who waited for whom (spans) ┐
    what was scored per second  ├─ verdict ─▶ judge-bound: 62% of trainer time waits for verdicts; raising its rate
    the judge's limit           ┘             limit to 90/s would lift throughput 1.9x, where generation is the limit

Each part is charged with the time that others waited for it. The largest charge names the bottleneck:

    sync         the trainer's `pack`, or rollouters' `load_weights` within the trainer's `wait_batch`: the larger one
    save         the trainer's `save`, as far as it did nothing else meanwhile
    judge        the trainer's `wait_batch`, as far as rollouters were in `wait_reward` or requests waited for the
                 judge's limit (`reward` without a judge)
    generation   the rest of the trainer's `wait_batch`, without `load_weights`
    training     rollouters' `wait_room`

A remedy gains at most what was charged, and at most until the next part is busy all the time. If each side waits for
the other, a faster side would only wait longer; then the remedy is to let them overlap. What was not measured is not
claimed. `Setting`, `Scoring` and `Verdict` serve the terminal, the log, the page and the planner; the planner's
simulation adds what this leaves out (varying lengths, a full window, overlapping latencies).

`Watching` gives the verdict on a live run from what its components report about once a second. Steps take from a
fraction of a second to minutes, so it looks at the last `OVER_S` seconds, or at the whole of a younger run. Replayed
steps wait for nobody and are left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from freewheel.judge.stats import is_up
from freewheel.observe.spans import shares

LEAST_SHARE = 0.01
"""A part with a smaller busy share has hardly worked, so its capacity is unknown."""


def streaming(capacities: Mapping[str, float]) -> tuple[str, float]:
    """Return the part that limits a pipeline in which all parts work at once, and its rate."""
    return min(capacities.items(), key=lambda item: item[1])


def in_turns(capacities: Mapping[str, float]) -> float:
    """Return the rate of parts that work one at a time."""
    return 1.0 / sum(1.0 / capacity for capacity in capacities.values())


@dataclass(frozen=True)
class Lift:
    """The gain of a change."""

    factor: float
    """Throughput after it over throughput before; never below 1."""
    then: str
    """The next bottleneck; empty if no measured part is one."""


def without(busy: Mapping[str, float], part: str = "") -> Lift:
    """The largest gain of a faster `part` if all parts work at once: until the next part is busy all the time. Without
    a part: the largest gain of letting parts that work in turns overlap."""
    others = {name: share for name, share in busy.items() if name != part and share >= LEAST_SHARE}
    if not others:
        return Lift(math.inf, "")
    then, share = max(others.items(), key=lambda item: item[1])
    return Lift(max(1.0, 1.0 / share), then)


def estimate_lift(share: float, by: float, bound: Lift) -> Lift:
    """The gain of removing the fraction `by` of something that takes `share` of the time of all parts, at most
    `bound`."""
    factor = 1.0 / max(1.0 - share * by, LEAST_SHARE)
    return bound if factor >= bound.factor or not math.isfinite(bound.factor) else Lift(factor, "")


WaitTimes = Mapping[str, Mapping[str, float]]
"""Share of the time by component and span."""
Bound = Literal[
    "generation", "judge", "reward", "training", "sync", "save", "balanced", "unmeasured", "paused", "failing"
]

Tried = Callable[[Bound, float], float]
"""Simulates a side that is faster by a factor. Returns the factor of throughput."""

_WAITING = 0.10
"""A part that waits less than this is busy: the rest is hand-over between components, which no remedy removes."""
HELD_BACK = 0.5
"""Requests that wait for a limit less often wait in bursts: a higher limit would hardly help."""
_ALL, _HALF = 1.0, 0.5
"""Fraction of a charge that a remedy removes: all with a faster part, half with every second sync or checkpoint."""
_FULL = 0.75
"""Engines with a smaller share of used slots have too little work, so more engines would not help. Above it, empty
slots are the tail of a batch."""
_WORTH = 1.05
"""A remedy with a smaller gain is not worth a change."""
_ROUGH = 1.15
"""Larger factors are shown with one decimal."""
_FAILING = 0.9
"""With this share of responses without a score, a run is not slow but broken."""
UNMEASURED = "not known yet: waiting times have not been measured"
"""The verdict before both sides have been measured."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What is known about the scoring of responses."""

    is_judge: bool = False
    """An LLM judge scores, and not a function alone."""
    per_s: float | None = None
    """Scored responses per second; with a judge, requests sent to it."""
    latency_s: float | None = None
    held_back: float | None = None
    """Share of the time in which responses waited for a permit, or for the judge's limit. None: unknown."""
    in_use: float | None = None
    """Average used share of the judge's limit. None: the limit is unknown."""
    slots_in_use: float | None = None
    """Average used share of the engines' slots. A slow judge leaves them empty."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of a run that a remedy depends on."""

    mode: str = "fully_async"
    replicas: int = 1
    threshold: int | None = None
    """Versions that generation may run ahead; None if unknown."""
    sync_every_steps: int = 1
    save_every_steps: int | None = None

    @property
    def in_turns(self) -> bool:
        """Whether generation and training wait for each other by design."""
        return self.mode != "fully_async" or self.threshold == 0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What limits a run. `str` returns the sentence."""

    bound: Bound
    share: float = 0.0
    """Share of the time lost to it."""
    lift: float | None = None
    """Throughput with the remedy over throughput now; None if unknown."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence


NOTHING_KNOWN = Verdict(bound="unmeasured", sentence=UNMEASURED)


def find_stop(*, paused: str, endpoints: Collection[Mapping[str, Any]]) -> Verdict | None:
    """Return why the whole run is blocked; None if it is not. `paused`: the queue's reason; `endpoints`: the judge's,
    as `EndpointStats` has them."""
    if paused:
        return Verdict(bound="paused", share=1.0, sentence=f"paused until there is room: {paused}")
    if endpoints and not any(is_up(**one) for one in endpoints):
        urls = ", ".join(str(one.get("url")) for one in endpoints)
        sentence = f"judge-bound: the judge does not answer ({urls}); nothing is scored until it does"
        return Verdict(bound="judge", share=1.0, sentence=sentence)
    return None


def failing(failed: Mapping[str, int], ended: float) -> Verdict | None:
    """Return the verdict on a run in which nearly no response gets a score. `failed`: by kind; `ended`: all ended."""
    count = sum(failed.values())
    if not count or count < _FAILING * ended:
        return None
    kinds = ", ".join(f"{kind} {some:,}" for kind, some in failed.items())
    sentence = f"rewards failed: {count:,} of {ended:,.0f} responses got no score ({kinds}); fix that first"
    return Verdict(bound="failing", share=count / ended, sentence=sentence)


def verdict(
    waits: WaitTimes, setting: Setting, scoring: Scoring | None = None, *, tried: Tried | None = None
) -> Verdict:
    """Return the verdict on shares over an interval. Shares of several rollouters (`rollouter-0`, …) are averaged.
    `tried` simulates a faster side; without it, the gain is the most that the waiting allows."""
    scoring = scoring or Scoring()
    trainer = dict(waits.get("trainer", {}))
    rollouter = _rollouter(waits)
    if not trainer or not rollouter:
        return NOTHING_KNOWN
    charges = _charges(trainer, rollouter, scoring)
    bound, share = max(charges.items(), key=lambda item: item[1])
    if max(share, *read_waits(waits)) < _WAITING:
        if not trainer.get("train"):  # the run has just started
            return NOTHING_KNOWN
        sentence = (
            f"balanced: generation and training each wait less than {_WAITING:.0%} of the time; only more of both helps"
        )
        return Verdict(bound="balanced", share=share, sentence=sentence)
    busy = _busy(trainer, rollouter)
    if bound not in ("judge", "reward") and scoring.in_use is not None:
        busy["the judge"] = scoring.in_use
    if bound in ("sync", "save"):
        loads = share > trainer.get("pack", 0.0)
        held_up = "generation" if bound == "sync" and loads else "training"
        why, remedy, lift = _overhead(bound, share, without(busy, held_up), setting)
    else:
        why, remedy, lift = _work(bound, share, busy, setting, scoring, tried)
    known = math.isfinite(lift.factor)
    if not known:
        remedy = "no remedy is known, because no other part has worked yet"
    elif lift.factor < _WORTH:
        remedy = f"there is little to gain, because {lift.then} is busy {1 / lift.factor:.0%} of the time"
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


def read_waits(waits: WaitTimes) -> tuple[float, float]:
    """Return the shares of the time that the trainer waits for batches and the rollouters wait for room."""
    return waits.get("trainer", {}).get("wait_batch", 0.0), _rollouter(waits).get("wait_room", 0.0)


def _busy(trainer: Mapping[str, float], rollouter: Mapping[str, float]) -> dict[str, float]:
    """Return busy shares. Anything that is not waiting counts as work: checkpoints and hand-over stay."""
    rests = sum(rollouter.get(name, 0.0) for name in ("wait_room", "wait_reward", "load_weights"))
    return {
        "training": max(trainer.get("train", 0.0) + trainer.get("pack", 0.0), 1 - trainer.get("wait_batch", 0.0)),
        "generation": max(rollouter.get("generate", 0.0), 1 - rests),
    }


def _overhead(bound: Bound, share: float, bounded_by: Lift, setting: Setting) -> tuple[str, str, Lift]:
    """Return why syncs or checkpoints are charged, the remedy and its gain."""
    lift = estimate_lift(share, _HALF, bounded_by)
    if bound == "sync":
        why = "of the time goes into bringing weights to the engines"
        remedy = f"async_training.sync_every_steps = {2 * setting.sync_every_steps}"
    else:
        why = "of trainer time goes into checkpoints"
        every = setting.save_every_steps
        remedy = "half as many" if every is None else f"trainer.save_every_steps = {2 * every}"
    return why, f"{remedy} would lift throughput {_gain(lift)}", lift


def _work(
    bound: Bound, share: float, busy: Mapping[str, float], setting: Setting, scoring: Scoring, tried: Tried | None
) -> tuple[str, str, Lift]:
    """Return why a part that others wait for is charged, the remedy and its gain."""
    why = {
        "generation": "of trainer time waits for responses",
        "training": "of generation time is held back so that samples stay fresh",
    }.get(bound, f"of trainer time waits for {'verdicts' if scoring.is_judge else 'scores'}")
    scores = bound in ("judge", "reward")
    lacks_room = not scores and max(busy.values()) <= 1 - _WAITING
    if scoring.slots_in_use is not None and bound != "training":  # engines may have too little work to fill their slots
        busy = {**busy, "generation": min(busy["generation"], scoring.slots_in_use)}
        lacks_room |= not scores and busy["generation"] < _FULL
    if setting.in_turns:
        return why, *_overlapping(without(busy), setting)
    at_once = estimate_lift(share, _ALL, without(busy))
    if lacks_room:
        return why, *_overlapping(at_once, setting)
    lift = estimate_lift(share, _ALL, without(busy, bound))
    if not math.isfinite(lift.factor):
        return why, "", lift
    if scores:
        return why, f"{_faster_scores(lift, setting, scoring)} lift throughput {_gain(lift)}", lift
    return why, *_faster(bound, lift, at_once, setting, tried)


def _faster(bound: Bound, lift: Lift, at_once: Lift, setting: Setting, tried: Tried | None) -> tuple[str, Lift]:
    """Return the remedy for a side that the other waits for. `at_once`: the gain of more room."""
    faster = f"{_times(lift)} the {bound} speed"
    if bound == "generation":
        wanted = math.ceil(setting.replicas * lift.factor)
        faster = f"{faster} ({wanted} replicas instead of {setting.replicas})"
    if tried is None:
        return f"{faster} would lift throughput up to {_gain(lift)}", lift
    found = tried(bound, lift.factor)
    if found < _WORTH:  # a faster side would wait for room
        return _overlapping(at_once, setting)
    if found < lift.factor:
        lift = Lift(found, lift.then if found >= lift.factor / _WORTH else "")  # the next bottleneck is unknown
    return f"{faster} would lift throughput {_gain(lift)}", lift


def _overlapping(lift: Lift, setting: Setting) -> tuple[str, Lift]:
    """Return the remedy for sides that wait for each other: let them work at once."""
    remedy = "mode=fully_async would"
    if setting.mode == "fully_async":  # how much is enough is unknown
        higher = f"async_training.staleness_threshold {_above(setting)}"
        # In turns, more groups per step would only make a turn longer.
        groups = ", which gives" if setting.in_turns else " or more groups per step, which give"
        remedy = f"{higher}{groups} generation room, could"
    return f"{remedy} lift throughput up to {_gain(lift)}", lift


def _above(setting: Setting) -> str:
    return "raised" if setting.threshold is None else f"above {setting.threshold}"


def _faster_scores(lift: Lift, setting: Setting, scoring: Scoring) -> str:
    """A higher limit helps if it holds responses back; otherwise only a shorter latency, or more work to hide it."""
    if scoring.held_back is not None and scoring.held_back < HELD_BACK:
        took = "" if scoring.latency_s is None else f" of {_seconds(scoring.latency_s)}"
        whose = "judge" if scoring.is_judge else "function"
        hiding = f"async_training.staleness_threshold {_above(setting)}, which hides its latency{took}"
        return f"{hiding}, or a faster {whose} could"
    if scoring.per_s is None:
        return f"a faster {'judge' if scoring.is_judge else 'function'} (its rate was not measured) could"
    rate = _rate(scoring.per_s * lift.factor)
    raised = f"its rate limit to {rate}" if scoring.is_judge else f"reward.concurrency or reward.workers for {rate}"
    return f"raising {raised} {'could' if scoring.held_back is None else 'would'}"


def _gain(lift: Lift) -> str:
    """Show the factor and the next bottleneck."""
    return _times(lift) + (f", where {lift.then} is the limit" if lift.then else "")


def _times(lift: Lift) -> str:
    return f"{lift.factor:.1f}x" if lift.factor >= _ROUGH else f"{lift.factor:.2f}x"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}/s" if per_s >= 10 else f"{per_s:.1f}/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _rollouter(waits: WaitTimes) -> dict[str, float]:
    """Return the average shares of all rollouters."""
    found = [shares for name, shares in waits.items() if name.partition("-")[0] == "rollouter"]
    names = dict.fromkeys(name for shares in found for name in shares)
    return {name: sum(shares.get(name, 0.0) for shares in found) / len(found) for name in names}


OVER_S = 60.0
"""How far a verdict looks back: several steps of most runs, and short enough to follow a judge that changed."""
_IN_USE = 0.85
"""A limit with this share in use holds requests back. The limiter itself grows from the same share."""
_SETTLED = ("scored", "skipped")
"""Counters of responses that have ended; failures are counted by reason."""


@dataclass(frozen=True)
class _Look:
    """What was seen at one moment."""

    at: float
    spans: Mapping[str, Mapping[str, float]]
    """Seconds by component and span."""
    scored: float
    """Requests sent to the judge so far; without a judge, responses that have ended."""
    held_back: bool | None
    in_use: float | None
    slots_in_use: float | None


class Watching:
    """Keeps the recent past of a run, for its verdict."""

    def __init__(self, setting: Setting, *, is_judge: bool) -> None:
        """`setting.replicas` is ignored: replicas are counted here."""
        self.replays = False
        """Whether steps were still being replayed at the last look."""
        self._setting = setting
        self._is_judge = is_judge
        self._replayed: Mapping[str, Mapping[str, float]] = {}
        self._replaying = False
        self._past: deque[_Look] = deque()
        self._spans: dict[str, Mapping[str, float]] = {}
        self._rewards: Mapping[str, Any] = {}

    def note(self, now: float, components: Mapping[str, Mapping[str, Any]], rewards: Mapping[str, Any]) -> None:
        """Take in statistics by component, with `spans`. `rewards`: the statistics of scoring, of all replicas."""
        self._spans = {**self._spans, **{name: one["spans"] for name, one in components.items() if one.get("spans")}}
        self._rewards = rewards or self._rewards
        self._note_replay(components.get("trainer") or {})
        look = _Look(
            at=now,
            spans=self._spans,
            scored=_judge(self._rewards).get("sent", 0) if self._is_judge else count_ended(self._rewards),
            held_back=held_back(self._rewards, is_judge=self._is_judge),
            in_use=in_use(self._rewards),
            slots_in_use=slots_in_use(components.values()),
        )
        self._past.append(look)
        while len(self._past) > 2 and self._past[1].at <= now - OVER_S:
            self._past.popleft()

    def _note_replay(self, trainer: Mapping[str, Any]) -> None:
        """The first look after the replay still counts as one: the last replayed step ended before it."""
        if "recorded_until" not in trainer:
            self.replays = False
            return
        goes_on = trainer["global_steps"] < trainer["recorded_until"]
        self.replays, self._replaying = goes_on or self._replaying, goes_on
        if self.replays:
            self._replayed = self._spans
            self._past.clear()

    @property
    def waits(self) -> WaitTimes:
        """Shares of the recent past, by component and span."""
        return self._since(self._past[0].spans) if len(self._past) > 1 else self.whole

    @property
    def whole(self) -> WaitTimes:
        """Shares of the whole run, without replayed steps."""
        return self._since(self._replayed)

    def _since(self, before: Mapping[str, Mapping[str, float]]) -> WaitTimes:
        found = {name: shares(before.get(name, {}), spans) for name, spans in self._spans.items()}
        return {name: one for name, one in found.items() if one}

    def verdict(self) -> Verdict:
        """Return the verdict on the recent past."""
        return self.verdict_on(self.waits)

    def verdict_on(self, waits: WaitTimes) -> Verdict:
        """Return the verdict on other shares of the same run, such as `whole`."""
        failed = failing(self._rewards.get("failed") or {}, count_ended(self._rewards))
        if failed is not None:
            return failed
        replicas = sum(name.partition("-")[0] == "rollouter" for name in waits)
        return verdict(waits, replace(self._setting, replicas=max(1, replicas)), self._scoring())

    def _scoring(self) -> Scoring:
        latency_s = self._rewards.get("mean_latency_s")
        return Scoring(
            is_judge=self._is_judge,
            per_s=self._per_s(),
            latency_s=float(latency_s) if latency_s else None,
            held_back=_mean(look.held_back for look in self._past),
            in_use=_mean(look.in_use for look in self._past),
            slots_in_use=_mean(look.slots_in_use for look in self._past),
        )

    def _per_s(self) -> float | None:
        if len(self._past) < 2:
            return None
        first, last = self._past[0], self._past[-1]
        more, elapsed_s = last.scored - first.scored, last.at - first.at
        return more / elapsed_s if more > 0 and elapsed_s > 0 else None


def count_ended(rewards: Mapping[str, Any]) -> float:
    """Return how many responses have ended, scored or not."""
    return float(sum(rewards.get(name, 0) for name in _SETTLED) + sum((rewards.get("failed") or {}).values()))


def held_back(rewards: Mapping[str, Any], *, is_judge: bool) -> bool | None:
    """Whether responses wait for a permit, or requests for the judge's limit; None if unknown."""
    if rewards.get("waiting"):
        return True
    in_flight, limit = _sum_limits(rewards)
    if limit:
        return bool(_judge(rewards).get("queued")) or in_flight >= _IN_USE * limit
    return None if is_judge or "waiting" not in rewards else False


def in_use(rewards: Mapping[str, Any]) -> float | None:
    """Return the used share of the judge's limit. None before the judge first throttled: until then the limit grows."""
    in_flight, limit = _sum_limits(rewards)
    return in_flight / limit if limit and _judge(rewards).get("throttled") else None


def _judge(rewards: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = rewards.get("judge") or {}
    return found


def _sum_limits(rewards: Mapping[str, Any]) -> tuple[int, int]:
    """Return the requests in flight and their limit."""
    endpoints: Sequence[Mapping[str, Any]] = _judge(rewards).get("endpoints") or ()
    return sum(one.get("in_flight", 0) for one in endpoints), sum(one.get("limit", 0) for one in endpoints)


def slots_in_use(components: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the used share of all engines' slots; None if no engine reports it."""
    found = [(one["running"], one["slots"]) for one in components if one.get("slots") and "running" in one]
    return sum(running for running, _ in found) / sum(slots for _, slots in found) if found else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return fmean(known) if known else None
