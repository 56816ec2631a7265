"""`RunAccount`: what is known about a run, from its components' answers: rows, statistics, snapshot, summary.

    statistics of all components, rows of trainer and synchronizer ─▶ look ─┬▶ metrics.jsonl
                                                                            ├▶ the view (`RunSnapshot`)
                                                                            └▶ `Component Statistics`
`FullyAsyncMain` asks the components and calls `look` once a second. No Ray in here.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from freewheel.judge.stats import is_up
from freewheel.observe import trace
from freewheel.observe.recorder import Recorder, read_metrics
from freewheel.observe.run_folder import JOURNAL, TEXT_LOG
from freewheel.observe.snapshot import Pulse, RunSnapshot
from freewheel.observe.spans import ELAPSED, shares
from freewheel.rewards.config import as_config
from freewheel.runtime.bottleneck import Bound, Setting, Verdict, WaitTimes, Watching, find_stop, read_waits
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.recovery import AbandonedPrompts, StallDetector

_EVENTS_KEPT = 20
"""Events kept for the view; the log has all."""
_RECENT_STEPS = 20
"""Steps from which the remaining time is estimated."""
_RATE_NEEDS_S = 2.0
"""Shortest time that gives a rate: steps are seen about once a second."""
_FRESHNESS = ("avg_sample_age", "max_sample_age", "avg_sample_age_s", "max_sample_age_s", "stale_samples_ratio")
_REWARD = "rollout/reward_mean"
_HELD_OUT = "eval/reward"
_FAILURE_CHARS = 200
"""How much of a failure's message fits into the last lines of a run."""

_ENDPOINTS = "endpoints"
"""A judge's endpoints among its statistics, as `EndpointStats` has them."""
_REPLICA_COUNTERS = (
    *("total_generated_samples", "generation_errors", "param_sync_requests", "dropped_zero_variance"),
    *("generated_tokens", "prompt_tokens", "engine_busy_s"),
)
"""Counters that a dead replica's work stays in; the restarted one counts from 0."""
_REWARD_STATES = ("in_flight", "waiting", "lost_threads", "mean_latency_s")
"""Statistics of rewards that describe the current moment. They are dropped with a dead replica."""
_JUDGE_STATES = ("in_flight", "limit", "queued", "loop_lag_s", _ENDPOINTS)
"""The same for its judge."""
_NOT_SUMMED = {
    "version": min,
    **dict.fromkeys(("mean_latency_s", "loop_lag_s", "latency_p50_s", "latency_p90_s", "latency_p99_s"), max),
}
"""Statistics that are merged over replicas as a minimum or a maximum, not as a sum."""


Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    outcome: Outcome
    run_dir: Path
    steps: int
    summary: list[str] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def exit_code(self) -> int:
        """130 is what shells use after Ctrl-C."""
        return {"finished": 0, "stopped": 130, "failed": 1}[self.outcome]


class View(Protocol):
    """Shows a run; `freewheel.dashboard.terminal` has one."""

    def update(self, snapshot: RunSnapshot) -> None: ...

    def say(self, text: str) -> None: ...

    def finish(self, snapshot: RunSnapshot, summary: str) -> None: ...


class RunAccount:
    """The account of one run."""

    def __init__(
        self, *, config: TrainConfig, run_dir: Path, recorder: Recorder, view: View | None, clock: Any = time.monotonic
    ) -> None:
        self.step = 0
        self.statistics: dict[str, dict[str, Any]] = {}
        """The last statistics by component: trainer, rollouter (all replicas together), queue, sync."""
        self.progress = StallDetector(clock())
        self.waits: WaitTimes = {}
        """Shares of the whole run by component and span, without replayed steps."""
        self._config = config
        self._run_dir = run_dir
        self._recorder = recorder
        self._view = view
        self._clock = clock
        self._began = clock()
        self._started: float | None = None
        self._spans: dict[str, Mapping[str, float]] = {}
        self._recent: dict[str, dict[str, float]] = {}
        self._tokens = (clock(), 0.0)
        self._tokens_per_s: float | None = None
        self._rewards: list[tuple[int, float]] = []
        self._held_out: list[tuple[int, float]] = []
        self._freshness: dict[str, float] = {}
        self._step_times: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)
        self._events: deque[str] = deque(maxlen=_EVENTS_KEPT)
        self._statistics_at = clock()
        self._saved_step = 0
        self._replicas: dict[str, Mapping[str, Any]] = {}
        self._last_queue: Mapping[str, Any] = {}
        self._last_sync: Mapping[str, Any] = {}
        self._died: list[Mapping[str, Any]] = []
        """Counters of replicas that were replaced."""
        self._pulse = Pulse()
        self._abandoned = AbandonedPrompts(groups_per_step=config.trainer.groups_per_step)
        judge = config.reward.judge
        setting = Setting(
            mode=config.mode,
            threshold=config.staleness_threshold,
            sync_every_steps=config.async_training.sync_every_steps,
            save_every_steps=config.trainer.save_every_steps,
        )
        self._watching = Watching(setting, is_judge=judge is not None and as_config(judge).judges)
        self._stopped_by: Bound | None = None
        self._over = False

    def begin(self, step: int) -> None:
        self.step = self._saved_step = step
        self.say(f"Run directory: {self._run_dir}")

    def skip_known_rows(self, journaled_step: int) -> None:
        """Ignore rows of replayed steps, up to `journaled_step`, that `metrics.jsonl` already has."""
        recorded = max((row["step"] for row in read_metrics(self._run_dir, "step")), default=0)
        self.step = max(self.step, min(journaled_step, recorded))

    def started(self) -> None:
        now = self._started = self._clock()
        self.progress = StallDetector(now)
        self.say(f"Started in {now - self._began:.1f} s")

    def note(self, text: str, **values: Any) -> None:
        """Record an event without showing it."""
        self._recorder.record("event", self.step, {"text": text, **values})

    def say(self, text: str) -> None:
        """Record an event and show it."""
        self._events.append(text)
        self.note(text)
        trace.instant(text)
        if self._view is not None:
            self._view.say(text)

    # -- a look -------------------------------------------------------------------------------------------------------

    def look(
        self, stats: Mapping[str, Mapping[str, Any]], rows: Sequence[Any], now: float, *, last: bool = False
    ) -> bool:
        """Take in the components' answers. Returns whether `statistics` are due, as they are at the last look."""
        self._over = last
        for row in rows:
            self._take_row(row, now)
        replicas = {name: found for name, found in stats.items() if name.startswith("rollouter")}
        trainer, queue, sync = (dict(stats.get(name, {})) for name in ("trainer", "queue", "sync"))
        self._note_replacements(replicas)
        rollouter = sum_replicas([*self._replicas.values(), *self._died])
        rollouter["dropped_stale_samples"] = trainer.get("dropped_stale_samples", 0)  # the trainer finds them
        self._saved_step = int(trainer.get("saved_step", self._saved_step))
        self.statistics = {"trainer": trainer, "rollouter": rollouter, "queue": queue, "sync": sync}
        self._watching.note(now, {"trainer": trainer, **replicas}, rollouter.get("rewards", {}))
        self._note_spans({"trainer": trainer, **replicas})
        self._last_queue = queue or self._last_queue  # keep the last answer of a component that missed a look
        self._last_sync = sync or self._last_sync
        self.statistics["run"] = {"verdict": self.verdict.sentence}
        self._report_halt()
        self._abandoned.note(queue)
        tokens = float(rollouter.get("generated_tokens", 0))
        before, count = self._tokens
        if now > before and tokens >= count:
            self._tokens_per_s = (tokens - count) / (now - before)
        self._tokens = (now, tokens)
        done = (self._last_queue.get("step"), self._last_queue.get("total_produced"))
        marks = (*done, tokens, str(_without(rollouter.get("rewards", {}), ("judge",))))
        self.progress.note(marks, trainer=trainer, paused=bool(queue.get("paused")), now=now)
        snapshot = self.snapshot(now)
        self._record_pulse(snapshot, now, last=last)
        if self._view is not None:
            self._view.update(snapshot)
        if not last and now - self._statistics_at < self._config.observe.statistics_every_s:
            return False
        self._statistics_at = now
        self._recorder.record("statistics", self.step, self.statistics)
        return True

    def record_syncs(self, syncs: Sequence[Mapping[str, Any]]) -> None:
        for one in syncs:
            self._recorder.record("sync", self.step, one)

    def _record_pulse(self, snapshot: RunSnapshot, now: float, *, last: bool) -> None:
        pulse = self._pulse.beat(now, snapshot, last=last)
        if pulse is None:
            return
        self._recorder.record("pulse", self.step, pulse)
        groups = {name: pulse[name] for name in ("queue_size", "in_progress") if pulse[name] is not None}
        if groups:
            trace.counter("groups", **groups)
        if snapshot.tokens_per_s is not None:
            trace.counter("tokens_per_s", tokens_per_s=snapshot.tokens_per_s)

    def _take_row(self, row: Any, now: float) -> None:
        if row.kind == "step" and row.step <= self.step:  # replayed by a restarted trainer
            return
        self._recorder.record(row.kind, row.step, row.values)
        if row.kind == "eval":
            if math.isfinite(row.values[_HELD_OUT]):  # not finite if no response got a score
                self._held_out.append((row.step, float(row.values[_HELD_OUT])))
            return
        self.step = row.step
        self._step_times.append((row.step, now))
        if _REWARD in row.values:
            self._rewards.append((row.step, float(row.values[_REWARD])))
        self._freshness = {name: row.values[name] for name in _FRESHNESS if name in row.values}

    def _note_spans(self, components: Mapping[str, Mapping[str, Any]]) -> None:
        for name, found in components.items():
            spans = found.get("spans")
            if not spans:
                continue
            self._recent[name] = shares(self._spans.get(name, {}), spans)
            self._spans[name] = spans
        self.waits = self._watching.whole

    def _note_replacements(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        for name, found in replicas.items():
            if not found:  # it is starting
                continue
            before = self._replicas.get(name)
            if before is not None and found["spans"][ELAPSED] < before["spans"][ELAPSED]:
                self._died.append(_counters(before))
            self._replicas[name] = found

    @property
    def hopeless(self) -> str:
        """Why no further step can be expected; empty while one can."""
        return self._abandoned.hopeless

    @property
    def verdict(self) -> Verdict:
        """What limits the run: recently while it runs, over the whole run at its end."""
        return self._halted or (self._watching.verdict_on(self.waits) if self._over else self._watching.verdict())

    @property
    def _halted(self) -> Verdict | None:
        """What blocks the whole run: a full disk, or a judge that does not answer."""
        judge = self.statistics.get("rollouter", {}).get("rewards", {}).get("judge") or {}
        return find_stop(paused=self._last_queue.get("paused", ""), endpoints=judge.get(_ENDPOINTS) or ())

    def _report_halt(self) -> None:
        """Report a block once, and its end once."""
        halted, before = self._halted, self._stopped_by
        self._stopped_by = halted.bound if halted is not None else None
        if self._stopped_by == before:
            return
        if halted is None:
            self.say("There is room again: the run continues" if before == "paused" else "The judge answers again")
        elif halted.bound == "paused":
            self.say(f"The run is paused and continues when there is room: {self._last_queue['paused']}")
        else:
            self.say(f"The run is blocked: {halted}")

    def snapshot(self, now: float) -> RunSnapshot:
        queue, sync = self._last_queue, self._last_sync
        rate = self._steps_per_s(now)
        left = self._config.trainer.total_steps - self.step
        return RunSnapshot(
            mode=self._config.mode,
            step=self.step,
            total_steps=self._config.trainer.total_steps,
            reward=self._rewards[-1][1] if self._rewards else None,
            reward_curve=self._rewards,
            eval_curve=self._held_out,
            version=int(queue.get("version", 0)),
            published_version=int(sync.get("published_version", 0)),
            queue={name: value for name, value in queue.items() if isinstance(value, int | float)},
            freshness=self._freshness,
            waits=self._recent,
            verdict="" if self.verdict.bound == "unmeasured" else self.verdict.sentence,
            tokens_per_s=self._tokens_per_s,
            samples_per_s=None
            if rate is None
            else rate * self._config.trainer.groups_per_step * self._config.rollout.n,
            elapsed_s=now - (self._started or now),
            eta_s=None if not rate or self._halted else left / rate,
            alerts=self._recorder.alerts,
            events=list(self._events),
            run_dir=str(self._run_dir),
        )

    def _steps_per_s(self, now: float) -> float | None:
        if not self._step_times or now - self._step_times[0][1] < _RATE_NEEDS_S:
            return None
        first, since = self._step_times[0]
        return (self.step - first) / (now - since)

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self, outcome: str, error: BaseException | None) -> list[str]:
        """Return the last lines for the user."""
        self._over = True
        now = self._clock()
        summary = [f"{outcome.capitalize()} at step {self.step} of {self._config.trainer.total_steps}"]
        if self._started is None:
            summary[0] = f"{outcome.capitalize()} before training began"
        else:
            took, start = now - self._started, self._started - self._began
            summary[0] += f" after {took:.1f} s of training ({start:.1f} s to start)"
        if error is not None:
            summary.append(f"{type(error).__name__}: {error}")
        if len(self._held_out) > 1:
            (first, was), (last, now_is) = self._held_out[0], self._held_out[-1]
            summary.append(f"Held-out reward {was:.3f} at step {first}, {now_is:.3f} at step {last}")
        if self.waits:
            summary.append(self._describe_waits())
        if unused := self._describe_unused():
            summary.append(unused)
        summary.append(f"Run directory: {self._run_dir}")
        begun = self._started is not None or (self._run_dir / JOURNAL).exists()
        if outcome == "stopped" or (outcome == "failed" and begun):
            saved = f"The checkpoint of step {self._saved_step} is there" if self._saved_step else "No checkpoint yet"
            summary.append(f"{saved}; continue with: freewheel train resume={self._run_dir}")
        if self._view is not None:
            self._view.finish(self.snapshot(now), "\n".join(summary))
        return summary

    def _describe_unused(self) -> str:
        """What a reward curve does not show: abandoned prompts, and responses without a score."""
        abandoned = self.statistics.get("queue", {}).get("abandoned", {})
        rewards = self.statistics.get("rollouter", {}).get("rewards", {})
        failed = rewards.get("failed", {})
        parts = [
            f"{sum(found.values()):,} {what} ({', '.join(f'{reason} {count:,}' for reason, count in found.items())})"
            for found, what in ((abandoned, "prompts were abandoned"), (failed, "responses got no score"))
            if found
        ]
        if not parts:
            return ""
        first = rewards.get("first_failure", "")[:_FAILURE_CHARS] if self.verdict.bound == "failing" else ""
        return f"{' and '.join(parts)}: {f'first {first}; ' if first else ''}see {self._run_dir / TEXT_LOG}"

    def _describe_waits(self) -> str:
        """Waiting as the verdict measures it. An engine is idle while it computes nothing, whatever its groups do."""
        training, generation = read_waits(self.waits)
        replicas = self.statistics.get("rollouter", {})
        elapsed_s = replicas.get("spans", {}).get(ELAPSED, 0.0)
        busy = min(1.0, replicas.get("engine_busy_s", 0.0) / elapsed_s) if elapsed_s else 1.0
        both = f"Training waited {training:.1%} of the time, generation {generation:.1%} (engines idle {1 - busy:.1%})"
        return f"{both}; {self.verdict}"


# -- statistics of several replicas -----------------------------------------------------------------------------------


def sum_replicas(replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the numbers in the replicas' statistics, nested ones too. Of other values, the first replica's is kept."""
    total: dict[str, Any] = {}
    for found in replicas:
        for name, value in found.items():
            known = total.get(name)
            if name == _ENDPOINTS:  # a replica that has just started has none
                total[name] = _merge_endpoints([*(known or ()), *(value or ())])
            elif isinstance(value, Mapping) and isinstance(known, Mapping):
                total[name] = sum_replicas([known, value])
            elif _is_number(value) and _is_number(known):
                total[name] = _NOT_SUMMED.get(name, sum)((known, value))
            else:
                total.setdefault(name, value)
    return total


def _merge_endpoints(endpoints: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge what all replicas know of each endpoint. It is up if one of them reaches it."""
    by_address: dict[Any, list[Mapping[str, Any]]] = {}
    for one in endpoints:
        by_address.setdefault((one.get("url"), one.get("model")), []).append(one)
    return [sum_replicas(sorted(seen, key=lambda one: not is_up(**one))) for seen in by_address.values()]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _counters(replica: Mapping[str, Any]) -> dict[str, Any]:
    """What remains of a dead replica's statistics."""
    rewards = _without(replica.get("rewards", {}), _REWARD_STATES)
    if "judge" in rewards:
        rewards["judge"] = _without(rewards["judge"], _JUDGE_STATES)
    counted = {name: replica[name] for name in _REPLICA_COUNTERS if name in replica}
    return {**counted, "rewards": rewards, "spans": replica["spans"]}


def _without(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
