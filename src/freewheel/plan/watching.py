"""`Watching`: the verdict on a run that goes on, from what its components say about once a second. Pure.

    spans of trainer and rollouters, numbers of scoring ── note(now) ──▶ the last `OVER_S` seconds ──▶ verdict

A step takes from a fraction of a second to minutes, so that the shares of one second say little: those of a stretch of
time are told, of the whole run while it is younger. Steps that a journal has are trained again, after a resume, without
waiting for anybody, while generation is held back: what was spent until then is left out. Called by `RunAccount`; no
clock of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from freewheel.observe.spans import shares
from freewheel.plan.verdict import Scoring, Setting, Verdict, Waits, failing, verdict

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
