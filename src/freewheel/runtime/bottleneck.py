"""The steady state of a run in closed form: what each part could do, what they do together, what a change would give.

    capacities (groups a second, each part alone) ─┬─ streaming: the least of them
                                                   └─ in turns: one over the sum of their times
    busy shares of a run ─▶ capacity = rate / share ─▶ without what holds it up: up to the next part

The verdict on a live run and the planner's first guess are both made of these few functions; `simulation` knows what
they leave out (lengths that differ, a window that is full, latencies that overlap). Pure.

What holds a run up, in one sentence with a number: the verdict. Pure.

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

The gain of a remedy ends where the next part is busy all the time, and takes
away no more than was charged. Where each side waits for the other, a faster one would only wait longer: then the remedy
is what lets them overlap. What was not measured is not claimed. Shown by the terminal, the log, the end of a run, the
page and the planner alike.

`Watching`: the verdict on a run that goes on, from what its components say about once a second. Pure.

    spans of trainer and rollouters, numbers of scoring ── note(now) ──▶ the last `OVER_S` seconds ──▶ verdict

A step takes from a fraction of a second to minutes, so that the shares of one second say little: those of a stretch of
time are told, of the whole run while it is younger. Steps that a journal has are trained again, after a resume, without
waiting for anybody, while generation is held back: what was spent until then is left out. Called by `RunAccount`; no
clock of its own.
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
"""A part that was busy for less of the time was not seen at work: what it could do is not known from that."""


def streaming(capacities: Mapping[str, float]) -> tuple[str, float]:
    """The part that bounds a pipeline in which all work at once, and the rate that it allows."""
    return min(capacities.items(), key=lambda item: item[1])


def in_turns(capacities: Mapping[str, float]) -> float:
    """The rate of parts that wait for each other, one at work at a time."""
    return 1.0 / sum(1.0 / capacity for capacity in capacities.values())


def capacities(rate: float, busy: Mapping[str, float]) -> dict[str, float]:
    """What each part could do alone, from the rate that was measured and the share of the time that it was busy for.
    Parts that were hardly busy are left out."""
    return {part: rate / share for part, share in busy.items() if share >= LEAST_SHARE}


@dataclass(frozen=True)
class Lift:
    """What a change would give."""

    factor: float
    """Throughput after it over throughput before; never below 1."""
    then: str
    """What bounds it from there on; empty where nothing that was measured does."""


def without(busy: Mapping[str, float], part: str) -> Lift:
    """The most that a faster `part` gives where all parts work at once: until the next busiest is busy all the time."""
    others = {name: share for name, share in busy.items() if name != part and share >= LEAST_SHARE}
    if not others:
        return Lift(math.inf, "")
    then, share = max(others.items(), key=lambda item: item[1])
    return Lift(max(1.0, 1.0 / share), then)


def overlapped(busy: Mapping[str, float]) -> Lift:
    """The most that overlapping gives parts which work in turns: until the busiest is busy all the time."""
    return without(busy, "")


def lessened(share: float, by: float, bound: Lift) -> Lift:
    """What it gives to do away with a part `by` of something that takes `share` of everybody's time, and no more than
    `bound` allows."""
    factor = 1.0 / max(1.0 - share * by, LEAST_SHARE)
    return bound if factor >= bound.factor or not math.isfinite(bound.factor) else Lift(factor, "")


Waits = Mapping[str, Mapping[str, float]]
"""Component → span → its share of the time."""
Bound = Literal[
    "generation", "judge", "reward", "training", "sync", "save", "balanced", "unmeasured", "paused", "failing"
]

Tried = Callable[[Bound, float], float]
"""What throughput rises by with so many times a side's speed, found by simulation."""

WAITING = 0.10
"""A part that waits less than a tenth of the time is busy: what is left is hand-over, which nothing would remove."""
HELD_BACK = 0.5
"""Requests that wait for a limit for less of the time wait in bursts: a higher one would hardly help."""
ALL, HALF = 1.0, 0.5
"""Of its charge, what a faster part takes away; what the remedies for weights and checkpoints do: every second one."""
FULL = 0.75
"""Engines with fewer of their slots in use have too little in hand: with others beside them each would have less. What
is empty above it is the tail of a batch."""
WORTH = 1.05
"""A remedy that gives less is not worth a change."""
ROUGH = 1.15
"""From here on one decimal of a factor is enough."""
FAILING = 0.9
"""Of responses, the share without a score from which on a run is not slow but broken."""
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
    threshold: int | None = None
    """Versions that generation may run ahead; None where that is not known."""
    sync_every_steps: int = 1
    save_every_steps: int | None = None

    @property
    def in_turns(self) -> bool:
        """Generation and training wait for each other by design: `Bounds.in_turns`, or in lockstep one step apart."""
        return self.mode != "fully_async" or self.threshold == 0


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


def failing(failed: Mapping[str, int], settled: float) -> Verdict | None:
    """Where nearly no response gets a score nothing is told of who waits. `failed`: by kind; `settled`: of how many."""
    count = sum(failed.values())
    if not count or count < FAILING * settled:
        return None
    kinds = ", ".join(f"{kind} {some:,}" for kind, some in failed.items())
    said = f"rewards failed: {count:,} of {settled:,.0f} responses got no score ({kinds}); nothing else matters before"
    return Verdict(bound="failing", share=count / settled, sentence=f"{said} that is mended")


def verdict(waits: Waits, setting: Setting, scoring: Scoring | None = None, *, tried: Tried | None = None) -> Verdict:
    """Of the shares over an interval; those of several rollouters (`rollouter`, `rollouter-0`, …) are averaged. Without
    `tried` a faster side is promised as the most that its waiting allows."""
    scoring = scoring or Scoring()
    trainer = dict(waits.get("trainer", {}))
    rollouter = _rollouter(waits)
    if not trainer or not rollouter:
        return NOTHING_KNOWN
    charges = _charges(trainer, rollouter, scoring)
    bound, share = max(charges.items(), key=lambda item: item[1])
    if max(share, *waited(waits)) < WAITING:
        if not trainer.get("train"):  # it has only just begun
            return NOTHING_KNOWN
        said = (
            f"balanced: generation and training each wait less than {WAITING:.0%} of the time; only more of both helps"
        )
        return Verdict(bound="balanced", share=share, sentence=said)
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


def waited(waits: Waits) -> tuple[float, float]:
    """Shares of the time: the trainer's for batches, the rollouters' for room. What the sides wait for each other, by
    the one measure that is told and judged by."""
    return waits.get("trainer", {}).get("wait_batch", 0.0), _rollouter(waits).get("wait_room", 0.0)


def _busy(trainer: Mapping[str, float], rollouter: Mapping[str, float]) -> dict[str, float]:
    """What is neither work nor waiting, such as a checkpoint or a hand-over, stays whoever is faster: it counts as
    work."""
    rests = sum(rollouter.get(name, 0.0) for name in ("wait_room", "wait_reward", "load_weights"))
    return {
        "training": max(trainer.get("train", 0.0) + trainer.get("pack", 0.0), 1 - trainer.get("wait_batch", 0.0)),
        "generation": max(rollouter.get("generate", 0.0), 1 - rests),
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


def _work(
    bound: Bound, share: float, busy: Mapping[str, float], setting: Setting, scoring: Scoring, tried: Tried | None
) -> tuple[str, str, Lift]:
    """The same of a part that others wait for."""
    why = {
        "generation": "of trainer time waits for responses",
        "training": "of generation time is held back so that samples stay fresh",
    }.get(bound, f"of trainer time waits for {'verdicts' if scoring.is_judge else 'scores'}")
    scores = bound in ("judge", "reward")
    lacks_room = not scores and max(busy.values()) <= 1 - WAITING
    if scoring.slots_in_use is not None and bound != "training":  # what engines have in hand may not fill them
        busy = {**busy, "generation": min(busy["generation"], scoring.slots_in_use)}
        lacks_room |= not scores and busy["generation"] < FULL
    if setting.in_turns:
        return why, *_overlapping(overlapped(busy), setting)
    at_once = lessened(share, ALL, overlapped(busy))
    if lacks_room:
        return why, *_overlapping(at_once, setting)
    lift = lessened(share, ALL, without(busy, bound))
    if not math.isfinite(lift.factor):
        return why, "", lift
    if scores:
        return why, f"{_faster_scores(lift, setting, scoring)} lift throughput {_gain(lift)}", lift
    return why, *_faster(bound, lift, at_once, setting, tried)


def _faster(bound: Bound, lift: Lift, at_once: Lift, setting: Setting, tried: Tried | None) -> tuple[str, Lift]:
    """Of a side that the other waits for: the speed with which it no longer does. `at_once`: what more room gives."""
    faster = f"{_times(lift)} the {bound} speed"
    if bound == "generation":
        wanted = math.ceil(setting.replicas * lift.factor)
        faster = f"{faster} ({wanted} replicas instead of {setting.replicas})"
    if tried is None:
        return f"{faster} would lift throughput up to {_gain(lift)}", lift
    found = tried(bound, lift.factor)
    if found < WORTH:  # it would wait for room
        return _overlapping(at_once, setting)
    if found < lift.factor:
        lift = Lift(found, lift.then if found >= lift.factor / WORTH else "")  # what else holds it up is not known
    return f"{faster} would lift throughput {_gain(lift)}", lift


def _overlapping(lift: Lift, setting: Setting) -> tuple[str, Lift]:
    """Of sides that wait for each other: what lets them work at once."""
    remedy = "mode=fully_async would"
    if setting.mode == "fully_async":  # how much more is enough is not known
        higher = f"async_training.staleness_threshold {_above(setting)}"
        groups = ", which gives" if setting.in_turns else " or more groups a step, which give"  # a larger turn is one
        remedy = f"{higher}{groups} generation room, could"
    return f"{remedy} lift throughput up to {_gain(lift)}", lift


def _above(setting: Setting) -> str:
    return "raised" if setting.threshold is None else f"above {setting.threshold}"


def _faster_scores(lift: Lift, setting: Setting, scoring: Scoring) -> str:
    """More at a time helps where something is held back; else only less time for each, or more that hides it."""
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
    """The factor, and what bounds it."""
    return _times(lift) + (f", where {lift.then} is the limit" if lift.then else "")


def _times(lift: Lift) -> str:
    return f"{lift.factor:.1f}x" if lift.factor >= ROUGH else f"{lift.factor:.2f}x"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}/s" if per_s >= 10 else f"{per_s:.1f}/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _rollouter(waits: Waits) -> dict[str, float]:
    """All of them as one."""
    found = [shares for name, shares in waits.items() if name.partition("-")[0] == "rollouter"]
    names = dict.fromkeys(name for shares in found for name in shares)
    return {name: sum(shares.get(name, 0.0) for shares in found) / len(found) for name in names}


OVER_S = 60.0
"""What a verdict looks back on: some steps of most runs, and short enough to follow a judge that changed."""
IN_USE = 0.85
"""A limit of which this share is in use holds requests back; the limiter itself grows from the same share on."""
SETTLED = ("scored", "skipped")
"""Counters of responses that have come to their end; failures are counted by reason beside them."""


@dataclass(frozen=True)
class Look:
    """What was seen at a moment."""

    at: float
    spans: Mapping[str, Mapping[str, float]]
    """By component."""
    scored: float
    """By then: requests that were sent to the judge; without one, responses that have come to their end."""
    held_back: bool | None
    in_use: float | None
    slots_in_use: float | None


class Watching:
    """Keeps as much of the past as a verdict needs."""

    def __init__(
        self, setting: Setting, *, is_judge: bool, replayed: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """`setting`: its `replicas` are counted here. `replayed`: spans until recorded steps were trained again, where
        that is known from elsewhere."""
        self.replays = False
        """Whether, by the last look, recorded steps were being trained again until then."""
        self._setting = setting
        self._is_judge = is_judge
        self._replayed = dict(replayed or {})
        self._replaying = False
        self._past: deque[Look] = deque()
        self._spans: dict[str, Mapping[str, float]] = {}
        self._rewards: Mapping[str, Any] = {}

    def note(self, now: float, components: Mapping[str, Mapping[str, Any]], rewards: Mapping[str, Any]) -> None:
        """`components`: what each said, `spans` among it. `rewards`: the numbers of scoring, of all replicas."""
        self._spans = {**self._spans, **{name: said["spans"] for name, said in components.items() if said.get("spans")}}
        self._rewards = rewards or self._rewards
        self._note_replay(components.get("trainer") or {})
        look = Look(
            at=now,
            spans=self._spans,
            scored=_judge(self._rewards).get("sent", 0) if self._is_judge else settled(self._rewards),
            held_back=held_back(self._rewards, is_judge=self._is_judge),
            in_use=in_use(self._rewards),
            slots_in_use=slots_in_use(components.values()),
        )
        self._past.append(look)
        while len(self._past) > 2 and self._past[1].at <= now - OVER_S:
            self._past.popleft()

    def _note_replay(self, trainer: Mapping[str, Any]) -> None:
        """The look after it is still of it: the last of these steps ended at some time before."""
        if "recorded_until" not in trainer:
            self.replays = False
            return
        goes_on = trainer["global_steps"] < trainer["recorded_until"]
        self.replays, self._replaying = goes_on or self._replaying, goes_on
        if self.replays:
            self._replayed = self._spans
            self._past.clear()

    @property
    def waits(self) -> Waits:
        """Component → span → its share of the stretch that is looked back on."""
        return self._since(self._past[0].spans) if len(self._past) > 1 else self.whole

    @property
    def whole(self) -> Waits:
        """The same of the whole run, as far as it counts."""
        return self._since(self._replayed)

    def _since(self, before: Mapping[str, Mapping[str, float]]) -> Waits:
        found = {name: shares(before.get(name, {}), spans) for name, spans in self._spans.items()}
        return {name: one for name, one in found.items() if one}

    def verdict(self) -> Verdict:
        """On what is looked back on."""
        return self.verdict_on(self.waits)

    def verdict_on(self, waits: Waits) -> Verdict:
        """On other shares of the same run, such as those of all of it."""
        failed = failing(self._rewards.get("failed") or {}, settled(self._rewards))
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


def settled(rewards: Mapping[str, Any]) -> float:
    """Responses that have come to their end, scored or not."""
    return float(sum(rewards.get(name, 0) for name in SETTLED) + sum((rewards.get("failed") or {}).values()))


def held_back(rewards: Mapping[str, Any], *, is_judge: bool) -> bool | None:
    """Whether responses wait for a permit, or requests for the judge's limit; None where nobody says."""
    if rewards.get("waiting"):
        return True
    in_flight, limit = _limited(rewards)
    if limit:
        return bool(_judge(rewards).get("queued")) or in_flight >= IN_USE * limit
    return None if is_judge or "waiting" not in rewards else False


def in_use(rewards: Mapping[str, Any]) -> float | None:
    """Share of the judge's limit; None before it has refused anything: until then the limit grows with what is sent."""
    in_flight, limit = _limited(rewards)
    return in_flight / limit if limit and _judge(rewards).get("throttled") else None


def _judge(rewards: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = rewards.get("judge") or {}
    return found


def _limited(rewards: Mapping[str, Any]) -> tuple[int, int]:
    """Requests in flight, and how many may be."""
    endpoints: Sequence[Mapping[str, Any]] = _judge(rewards).get("endpoints") or ()
    return sum(one.get("in_flight", 0) for one in endpoints), sum(one.get("limit", 0) for one in endpoints)


def slots_in_use(components: Iterable[Mapping[str, Any]]) -> float | None:
    """Of all engines that say it, now."""
    found = [(one["running"], one["slots"]) for one in components if one.get("slots") and "running" in one]
    return sum(running for running, _ in found) / sum(slots for _, slots in found) if found else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return fmean(known) if known else None
